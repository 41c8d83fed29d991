"""Chat template, further end tokens and generation settings of the weights that a run starts from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.evaluation.generate import open_model
from recipes.recipe.schema import Recipe
from recipes.weights.convert import export_checkpoint, import_folder
from recipes.weights.locate import find_weights
from tests.commands import run_command
from tests.processes import run_processes
from tests.recipes.data.text.test_pair_format import CHAT_ML
from tests.recipes.weights.test_hf_folder import SMALL, contents, edit_config, write_random
from tests.training import change, run_all

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message['role'] }}: {{ message['content'] }}\r\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b\u00e9"}]


def add_companions(folder: Path) -> Path:
    """Give a folder what published chat models have, written by transformers."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="a", eos_token="</s>", pad_token="b"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    GenerationConfig(bos_token_id=0, eos_token_id=[3, 1], pad_token_id=1, **settings).save_pretrained(folder)
    edit_config(folder, eos_token_id=[3, 1], pad_token_id=1)
    return folder


def as_transformers_reads(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "template": tokenizer.chat_template,
        "chat": tokenizer.apply_chat_template(MESSAGES, tokenize=False),
        "special tokens": tokenizer.special_tokens_map,
        "ids": tokenizer("a b a")["input_ids"],
        "generation": GenerationConfig.from_pretrained(folder).to_dict(),
        "ends": AutoConfig.from_pretrained(folder).eos_token_id,
        "padding": AutoConfig.from_pretrained(folder).pad_token_id,
    }


@pytest.fixture(scope="module")
def tuned(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What transformers reads from the first folder, and a run from it that resumed twice, once without the folder."""
    folder = add_companions(write_random(tmp_path_factory.mktemp("weights") / "hf"))
    before = as_transformers_reads(folder)

    def starts(steps: int, weights: str, name: str = "tuned") -> Recipe:
        return change(
            small,
            run={"name": name, "steps": steps},
            model={**vars(replace(SMALL, weights=weights))},
            data={"tokenizer": "from_weights"},
            checkpoint={"every": 1, "export_hf": True},
        )

    first = starts(1, str(folder))
    assert run_processes(1, run_all, [first]) == [[0]]
    shutil.rmtree(folder)
    assert run_processes(1, run_all, [starts(2, str(folder)), starts(3, "")]) == [[0, 0]]
    return before, Path(first.run.folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_export_after_training_and_resumes_reads_like_the_folder_it_came_from(
    tuned: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    before, run = tuned
    assert before["ends"] == [3, 1] and before["generation"]["temperature"] == 0.6 and "user: a b" in before["chat"]
    assert as_transformers_reads(run / "hf") == before
    export_checkpoint(run, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run / "hf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", [False, True])
def test_a_base_model_trained_on_chats_stops_at_the_end_of_an_answer_wherever_it_goes(
    small: Recipe, tmp_path: Path, prepared: bool
) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    base = write_random(tmp_path / "hf")  # its texts end with </s>, number 3
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    for number, token in enumerate(("<|im_start|>", "<|im_end|>"), 4):
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": number, "content": token})
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    (base / "generation_config.json").write_text('{"eos_token_id": 3, "top_p": 0.9}')
    (template := tmp_path / "chat.jinja").write_text(CHAT_ML)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (source := tmp_path / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 9)
    data = {"messages_field": "messages", "chat_template": str(template), "tokenizer": "from_weights"}
    if prepared:
        words = ["--tokenizer", base, "--messages-field", "messages", "--chat-template", template]
        script, kept = str(ROOT / "scripts" / "prepare_data.py"), ["--validation-fraction", "0"]
        code, _, error = run_command(script, *map(str, [source, tmp_path / "shards", *words, *kept]))
        assert code == 0, error
        source = tmp_path / "shards"
        data = {"messages_field": "messages", "tokenizer": str(source / "tokenizer.json")}
    recipe = change(
        small,
        run={"name": f"chats_{prepared}", "steps": 1},
        model={**vars(replace(SMALL, weights=str(base)))},
        data={**data, "source": str(source), "validation_fraction": 0.0},
        checkpoint={"every": 1, "export_hf": True},
        validation={"every": 0},
    )
    assert run_processes(1, run_all, [recipe]) == [[0]]
    run = Path(recipe.run.folder)
    for place in (run, run / "hf"):
        assert set(find_weights(place).description.ends(where=place)) == {3, 5}
    assert AutoConfig.from_pretrained(run / "hf").eos_token_id == [3, 5]
    settings = GenerationConfig.from_pretrained(run / "hf")
    assert settings.eos_token_id == [3, 5] and settings.top_p == 0.9
    theirs = AutoTokenizer.from_pretrained(run / "hf")
    assert theirs.eos_token == "<|im_end|>" and theirs.chat_template == CHAT_ML


@pytest.mark.filterwarnings("ignore")
def test_import_and_export_keep_the_companions(tmp_path: Path) -> None:
    folder = add_companions(write_random(tmp_path / "hf"))
    import_folder(folder, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert as_transformers_reads(tmp_path / "out") == as_transformers_reads(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_generation_stops_at_every_end_that_the_generation_settings_name(tmp_path: Path) -> None:
    import torch

    folder = write_random(tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    import_folder(folder, tmp_path / "checkpoint")
    for place in (folder, tmp_path / "checkpoint"):
        opened = open_model(place, dtype=torch.float32, device=torch.device("cpu"))
        assert opened.stop_ids() == {3, 0}


def test_an_export_brings_no_code_and_adds_no_beginning(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf")
    kept = {"auto_map": {"AutoTokenizer": ["x--y.Z", None]}, "add_bos_token": True, "tokenizer_class": "Z", "x": 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    import_folder(folder, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["x"] == 1 and written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"auto_map", "add_bos_token"} & set(written)


def test_a_run_with_another_tokenizer_does_not_keep_them_and_says_so(tmp_path: Path) -> None:
    from recipes.data.text.tokenizer import build_tokenizer
    from recipes.weights.locate import trained_description
    from tests.recipes.weights.test_hf_folder import TOKENIZER

    folder = write_random(tmp_path / "hf")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    said: list[str] = []
    other = build_tokenizer(TOKENIZER.replace('"b": 1', '"c": 1'), where=tmp_path)
    found = trained_description(SMALL, other, find_weights(folder), length=16, log=said.append)
    assert not found.companions and "another tokenizer than" in said[0]


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "generation settings are no JSON": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [3'),
        "generation_config.json cannot be used: Expecting",
    ),
    "generation settings are a list": (
        lambda folder: (folder / "generation_config.json").write_text("[]"),
        "generation_config.json cannot be used: it must contain one JSON object",
    ),
    "generation ends are words": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
        "generation_config.json: eos_token_id = ['</s>']: must be token ids",
    ),
    "the template is no text": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\x00"),
        "chat_template.jinja cannot be used: 'utf-8' codec",
    ),
    "the template is a folder": (
        lambda folder: (folder / "chat_template.jinja").mkdir(),
        "chat_template.jinja cannot be used: Is a directory",
    ),
    "the template is huge": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b" " * 10_000_001),
        "chat_template.jinja cannot be used: it has more than 10,000,000 bytes",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_companions_are_refused_by_name(case: str, tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf")
    spoil, said = BROKEN[case]
    spoil(folder)
    with pytest.raises(UserError) as error:
        import_folder(folder, tmp_path / "checkpoint")
    assert said in str(error.value) and str(error.value).count("\n") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
