"""scripts/evaluate.py on real folders: its numbers for any number of processes, and its error messages."""

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.data.text.rows import readable_documents
from tests.commands import run_command
from tests.processes import until_the_terminal_closes
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several lengths, whose total is not a multiple of a sequence."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": f"Document {n}: " + "naïve words and numbers, " * (n % 5 + 1) + str(n * n)} for n in range(40)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a tokenizer, saved by transformers."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"), text)


def evaluate(*arguments: object, processes: int = 1) -> tuple[int, str, str]:
    launch = ["scripts/launch.py", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return run_command(*launch, ROOT / "scripts/evaluate.py", *arguments, "--device", "cpu")


def theirs(folder: Path, text: Path) -> tuple[LlamaForCausalLM, list[str], list[int]]:
    """The model of transformers, the documents, and all their tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = list(readable_documents(str(text), text_field="text"))
    ids = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    return LlamaForCausalLM.from_pretrained(folder), texts, ids


def test_the_numbers_equal_those_of_transformers_on_any_number_of_processes(folder: Path, text: Path) -> None:
    length = 48
    model, texts, ids = theirs(folder, text)
    nats = 0.0
    for start in range(0, len(ids) - 1, length):
        piece = torch.tensor([ids[start : start + length + 1]])
        with torch.no_grad():
            logits = model(piece[:, :-1]).logits[0].double()
        nats += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
    size = sum(len(text.encode()) for text in texts)

    for processes, micro_batch in ((1, 4), (3, 2)):
        code, out, err = evaluate(
            folder, text, "--sequence-length", length, "--micro-batch-size", micro_batch, processes=processes
        )
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["tokens"], found["documents"], found["text_bytes"]) == (len(ids) - 1, 40, size)
        assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_masked_documents_equal_documents_evaluated_alone(folder: Path, text: Path) -> None:
    """transformers gets each document alone, from the start of the document or of its sequence, and the first token of
    the next one is no target."""
    length = 48
    model, _, ids = theirs(folder, text)
    end = ids[-1]
    nats, count = 0.0, 0
    begin = 0
    for position in range(1, len(ids)):
        if position % length == 0 or ids[position - 1] == end or position == len(ids) - 1:
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:position]])).logits[0].double()
            targets = torch.tensor(ids[begin + 1 : position + 1])
            inside = torch.tensor(ids[begin:position]) != end
            nats += torch.nn.functional.cross_entropy(logits[inside], targets[inside], reduction="sum").item()
            count += int(inside.sum())
            begin = position
    for processes in (1, 2):
        code, out, err = evaluate(folder, text, "--sequence-length", length, "--document-mask", processes=processes)
        assert (code, err) == (0, "")
        assert json.loads(out)["loss"] == pytest.approx(nats / count, rel=1e-6)


def with_bad_rows(text: Path, folder: Path) -> Path:
    """The text with two lines that are no documents, after the first."""
    first, *rest = text.read_text().splitlines()
    path = folder / "bad.jsonl"
    path.write_text("\n".join([first, '{"text": 7}', "no JSON", *rest]))
    return path


def test_bad_rows_are_skipped_within_the_budget_and_said_in_the_result(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    whole = json.loads(evaluate(folder, text)[1])
    code, out, _ = evaluate(folder, with_bad_rows(text, tmp_path), "--bad-row-budget", 0.05)
    assert code == 0
    assert (whole["rows"], whole["bad_rows"]) == (40, 0)
    assert json.loads(out) == whole | {"rows": 42, "bad_rows": 2}


def test_a_limit_evaluates_the_first_documents_alone_at_the_models_own_length(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(text.read_text().splitlines()[:7]))
    found = json.loads(evaluate(folder, text, "--limit", 7)[1])
    assert found == json.loads(evaluate(folder, few)[1])
    assert found["documents"] == 7
    assert found["sequence_length"] == 2048  # of LlamaConfig
    config = json.loads((folder / "config.json").read_text())
    shorter = shutil.copytree(folder, tmp_path / "shorter")
    (shorter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    short = json.loads(evaluate(shorter, text)[1])
    assert short == json.loads(evaluate(folder, text, "--sequence-length", 64)[1])
    assert short["sequence_length"] == 64


def test_a_terminal_shows_progress_while_it_runs_and_the_result_alone_at_the_end(folder: Path, text: Path) -> None:
    long = text.parent / "long.jsonl"
    long.write_text("\n".join([text.read_text()] * 30))
    command = [sys.executable, str(ROOT / "scripts/evaluate.py"), str(folder), str(long), "--device", "cpu"]
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*command, "--sequence-length", "16"], stdout=subprocess.PIPE, stderr=follower, text=True
    )
    os.close(follower)
    shown = until_the_terminal_closes(leader)
    out = process.communicate()[0]
    assert process.returncode == 0 and json.loads(out)["documents"] == 40 * 30
    lines = shown.decode().split("\r\x1b[K")
    assert re.fullmatch(r"[\d,]+ documents, [\d,]+ tokens in \d+ s, [\d,]+ tokens/s", lines[1])
    assert lines[-1] == ""  # wiped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MISSING", "TEXT"), "MISSING does not exist"),
        (("MODEL", "MISSING.txt"), "MISSING.txt"),
        (("MODEL", "TEXT", "--sequence-length", 0), "--sequence-length 0: must be 1 or more"),
        (("MODEL", "TEXT", "--text-field", "body"), "body"),
        (("MODEL", "TEXT", "--limit", -1), "--limit -1: must be 0 or more"),
        (("MODEL", "TEXT", "--bad-row-budget", 2), "--bad-row-budget 2.0: must be a share from 0 to 1"),
        (("MODEL", "BAD"), "2 of the first 42 rows of"),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(
    arguments: tuple[object, ...], message: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    paths = {"MODEL": folder, "TEXT": text, "BAD": with_bad_rows(text, tmp_path)} | {
        name: tmp_path / name for name in ("MISSING", "MISSING.txt")
    }
    code, out, err = evaluate(*(paths.get(str(word), word) for word in arguments))
    assert (code, out) == (2, ""), err
    assert message in err
    assert "Traceback" not in err


def test_a_mistake_on_two_processes_is_reported_once(text: Path, tmp_path: Path) -> None:
    code, _, err = evaluate(tmp_path / "nothing", text, processes=2)
    assert code != 0 and err.count("nothing does not exist") == 1, err
