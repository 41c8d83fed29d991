"""scripts/generate.py as users start it: its output, its exit codes, and Ctrl-C."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from recipes.data.text.tokenizer import load_tokenizer
from tests.commands import Command, run_command
from tests.processes import until_the_terminal_closes
from tests.scripts.nodes import arguments

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "generate.py")


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a small random SmolLM3 and a tokenizer."""
    import torch
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    folder = tmp_path_factory.mktemp("generate")
    torch.manual_seed(0)
    places = {"sources": [str(corpus)], "text_field": "text", "cache": folder / "cache"}
    tokenizer = load_tokenizer("train:300", log=lambda line: None, **places)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    options = {"num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": False}
    model = SmolLM3ForCausalLM(SmolLM3Config(vocab_size=300, **options, **shape, **ids))
    with torch.no_grad():  # never among the most likely tokens, so that no text ends early
        model.lm_head.weight[tokenizer.end_of_document] = 0
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(tokenizer.backend.to_str())
    return folder / "model"


def generate(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code, out, err = run_command(SCRIPT, *arguments, cwd=cwd or ROOT)
    assert "Traceback" not in err, err
    return code, out, err


def test_the_same_seed_prints_the_same_text(folder: Path) -> None:
    words = [str(folder), "def main(", "--max-tokens", "30", "--top-k", "50", "--top-p", "0.95", "--seed", "3"]
    code, out, err = generate(*words)
    assert code == 0
    assert out.startswith("def main(") and len(out) > 40
    assert "30 tokens in" in err and err.rstrip().endswith("tokens/s")
    assert generate(*words)[1] == out
    assert not set(map(chr, range(32))) & set(out) - set("\n\t")  # no control characters for the terminal


def test_the_answer_alone_is_what_follows_the_prompt(folder: Path) -> None:
    arguments = [str(folder), "def main(", "--max-tokens", "8", "--greedy"]
    whole, (code, answer, _) = generate(*arguments)[1], generate(*arguments, "--answer-only")
    assert code == 0 and len(answer) > 1
    assert whole == "def main(" + answer  # a pipe gets no colours


def test_on_a_terminal_the_prompt_is_dim(folder: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, SCRIPT, str(folder), "def main(", "--max-tokens", "8", "--greedy"]
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL)
    os.close(follower)
    shown = until_the_terminal_closes(leader)
    assert process.wait() == 0
    assert shown.startswith(b"\x1b[2mdef main(\x1b[0m")


def test_a_reader_that_has_enough_ends_the_text_quietly(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(folder), "def ", "--max-tokens", "30000", "--top-k", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(4) == b"def "
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message", "lines"),
    [
        (("MISSING", "a"), "MISSING does not exist", 1),
        (("MODEL", "a", "--top-p", "2", "--max-tokens", "0"), "top_p = 2.0: must be", 2),
        (("MODEL", "a", "--device", "cuda:99"), "device 'cuda:99' is not available", 1),
        (("MODEL", os.fsdecode(b"caf\xe9")), "the prompt is not UTF-8 text", 1),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    arguments: tuple[str, ...], message: str, lines: int, folder: Path, tmp_path: Path
) -> None:
    model, *others = arguments
    code, out, err = generate(str(folder if model == "MODEL" else tmp_path / model), *others)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == lines


def test_a_text_longer_than_the_context_is_announced(folder: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(folder, tmp_path / "short"))
    config = (short / "config.json").read_text()
    (short / "config.json").write_text(json.dumps(json.loads(config) | {"max_position_embeddings": 4}))
    code, _, err = generate(str(short), "", "--max-tokens", "4", "--greedy")
    assert code == 0 and err.startswith("up to 5 tokens, but the model was trained for at most 4\n4 tokens in")


def test_ctrl_c_ends_the_text_without_a_traceback(folder: Path) -> None:
    process = Command(SCRIPT, folder, "def ", "--max-tokens", "30000", "--top-k", "20")
    assert process.stdout.read(12).startswith("def ")  # it has begun to write
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out.endswith("\n") and err == ""


def test_a_run_continues_from_its_newest_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """A run folder is all that is needed, even after the data and the cache are gone."""
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text()[:60_000])
    short = ("--run.steps", "2", "--checkpoint.every", "1", "--data.validation_fraction", "0.3")
    assert run_command("train.py", *arguments(tmp_path, text, "small", *short))[0] == 0
    shutil.rmtree(tmp_path / "cache")
    text.unlink()
    code, out, err = generate("runs/small", "def ", "--max-tokens", "5", "--greedy", cwd=tmp_path)
    assert code == 0 and out.startswith("def "), err
    step = "runs/small/checkpoints/step-00000002"
    assert generate(step, "def ", "--max-tokens", "5", "--temperature", "0", cwd=tmp_path)[:2] == (0, out)


def test_a_chat_without_a_prompt_is_a_conversation(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    words = [str(folder), "--chat-template", str(template), "--max-tokens", "6", "--greedy"]
    talk = subprocess.run(
        [sys.executable, SCRIPT, *words], input="one\ntwo\n/exit\nthree\n", capture_output=True, text=True
    )
    assert talk.returncode == 0 and talk.stderr.count("6 tokens in ") == 2
    alone = generate(*words[:1], "one", *words[1:], "--answer-only")[1]
    assert talk.stdout.startswith(alone)
    latin = subprocess.run([sys.executable, SCRIPT, *words], input="é\n".encode("latin-1"), capture_output=True)
    assert (latin.returncode, latin.stdout) == (0, b"the message is not UTF-8 text\n")
    closed = ["bash", "-c", '"$@" <&-', "", sys.executable, SCRIPT, *words]
    refused = subprocess.run(closed, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("a conversation reads standard input, which is")
    assert generate(str(folder))[::2] == (2, "write the text to continue, or --chat for a conversation\n")


def test_ctrl_c_at_the_prompt_of_a_conversation_leaves_the_terminal_as_it_was(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[-1].content }}")
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    command = [sys.executable, SCRIPT, str(folder), "--chat-template", str(template), "--max-tokens", "1"]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
    shown = b""
    while b"> " not in shown:
        shown += os.read(leader, 4096)
    while process.poll() is None:  # between the prompt and its wait for a key, readline misses a signal
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.returncode == 130
    assert termios.tcgetattr(follower) == before
    os.close(follower)
    assert b"Traceback" not in until_the_terminal_closes(leader)
