"""Text by transformers' generate(): for its models and for ours, from folders and from checkpoints."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from models.decoder import Decoder
from models.transformers import TransformersModel
from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from recipes.evaluation.evaluate import answer_of
from recipes.evaluation.generate import (
    check_search,
    continue_text,
    generate,
    open_exported,
    open_for_prompts,
    open_model,
    texts_of,
)
from recipes.evaluation.losses import without_dropout
from recipes.evaluation.opened import Sampling
from recipes.weights.convert import import_folder, load_weights
from recipes.weights.locate import find_weights
from tests.families import FAMILIES, VOCABULARY

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
HOW = Sampling(12, temperature=0.0)
ONE = {"beams": 1, "outputs": 1}
END, PROMPT = 1, [5, 6, 7]
NAMES = ("gpt2", "t5")


def tokenizer() -> str:
    """The text of a tokenizer.json with an entry for every row of a model."""
    library = Library(models.WordLevel({"</s>" if i == END else f"w{i}": i for i in range(VOCABULARY)}, "w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([AddedToken("</s>", special=True)])
    return str(library.to_str())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, as transformers writes it, with large weights: logits that are far apart."""
    found = {}
    for name in NAMES:
        ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}
        config = AutoConfig.for_model(**FAMILIES[name] | ends, initializer_range=0.3)
        torch.manual_seed(1)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        theirs = kind.from_config(config)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.mul_(4 if name == "t5" and parameter.dim() > 1 else 1)
        found[name] = tmp_path_factory.mktemp("library") / name
        theirs.save_pretrained(found[name])
        (found[name] / "tokenizer.json").write_text(tokenizer())
    return found


def expected(folder: Path, **asked: Any) -> list[list[int]]:
    """What transformers generates after the prompt, without what follows an end."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    prompt = torch.tensor([PROMPT])
    rows = kind.from_pretrained(folder).generate(prompt, max_new_tokens=12, do_sample=False, **asked)
    begin = 1 if config.is_encoder_decoder else len(PROMPT)
    return [row[begin : row.index(END, begin) if END in row[begin:] else None] for row in rows.tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_and_beams_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    opened = open_model(folders[name], dtype=torch.float32, device=CPU)
    assert texts_of(opened, PROMPT, HOW, **ONE) == expected(folders[name])
    three = texts_of(opened, PROMPT, HOW, beams=3, outputs=2)
    assert three == expected(folders[name], num_beams=3, num_return_sequences=2)
    assert three[0] != three[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_writes_the_text_of_the_folder_it_came_from(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    import_folder(folders[name], tmp_path / "checkpoint")
    opened = open_model(tmp_path / "checkpoint", dtype=torch.float32, device=CPU)
    assert texts_of(opened, PROMPT, HOW, **ONE) == expected(folders[name])


def test_a_seed_gives_the_same_samples_and_another_seed_others(folders: dict[str, Path]) -> None:
    opened = open_model(folders["gpt2"], dtype=torch.float32, device=CPU)
    first, again, other = (
        texts_of(opened, PROMPT, replace(HOW, temperature=2.0, seed=seed), beams=1, outputs=3) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(first) == 3 and first[0] != first[1]


def test_generation_settings_of_the_folder_hold_for_what_is_not_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["gpt2"]
    copy = tmp_path / "penalized"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"no_repeat_ngram_size": 1, "temperature": 0.1}))
    found = texts_of(open_model(copy, dtype=torch.float32, device=CPU), PROMPT, HOW, **ONE)
    assert found == expected(folder, no_repeat_ngram_size=1) != expected(folder)


def test_several_texts_are_numbered_and_an_answer_begins_a_line(folders: dict[str, Path]) -> None:
    opened = open_model(folders["t5"], dtype=torch.float32, device=CPU)
    said: list[str] = []
    sampling = replace(HOW, max_tokens=3)
    tokens, seconds = continue_text(
        opened, "w5 w6", sampling, log=said.append, log_prompt=said.append, beams=2, outputs=2
    )
    lines = "".join(said).split("\n")
    assert lines[0] == "--- 1 of 2" and lines[1] == "w5 w6" and lines[3:5] == ["--- 2 of 2", "w5 w6"]
    assert tokens <= 6 and seconds > 0


def test_a_chat_is_encoded_as_by_the_tokenizer_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["gpt2"], tmp_path / "chat"))
    template = "{% for message in messages %}w8 {{ message.content }} </s> {% endfor %}"
    template += "{% if add_generation_prompt %}w9{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    open_as = partial(open_model, dtype=torch.float32, device=CPU)
    ready = open_for_prompts(find_weights(folder), None, template="", open_as=open_as)
    assert ready.template is not None
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>")
    theirs.chat_template = template
    messages: list[dict[str, Any]] = [{"role": "user", "content": "w5 w6"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ready.chat.prompt_ids(ready.template.prompt(messages)) == list(expected) == [8, 5, 6, END, 9]


def test_our_decoder_searches_with_beams_through_its_export(tmp_path: Path) -> None:
    config: dict[str, Any] = FAMILIES["qwen3"] | {"model_type": "llama", "initializer_range": 0.3}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | ends)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    ours = open_model(tmp_path, dtype=torch.float32, device=CPU)
    assert isinstance(ours.model, Decoder)
    greedy = list(generate(ours.model, PROMPT, HOW, stop_ids=ours.stop_ids()))
    exported = open_exported(find_weights(tmp_path), dtype=torch.float32, device=CPU)
    assert texts_of(exported, PROMPT, HOW, **ONE) == [greedy]
    assert len(texts_of(exported, PROMPT, HOW, beams=3, outputs=3)) == 3


def test_an_answer_by_repeated_forward_passes_is_the_greedy_one(folders: dict[str, Path]) -> None:
    weights = find_weights(folders["t5"])
    assert isinstance(weights.model, TransformersConfig)
    model = TransformersModel(weights.model)
    load_weights(model, weights)
    found = answer_of(model, PROMPT, tokens=12, start=0, end=END, device=CPU)
    assert [found] == expected(folders["t5"]) and len(found) > 2


def test_dropout_is_off_in_evaluation_alone(folders: dict[str, Path]) -> None:
    config = find_weights(folders["gpt2"]).model
    for dropout in (True, False):
        model = torch.nn.Dropout(0.5)
        model.config = replace(config, dropout=dropout)  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="inside"), without_dropout(model):
            assert model.training is not dropout
            raise RuntimeError("inside")
        assert model.training


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"beams": 0, "outputs": 1, "temperature": 0.8}, "beams = 0: must be 1 or more"),
        ({"beams": 1, "outputs": -1, "temperature": 0.8}, "outputs = -1: must be 1 or more"),
        ({"beams": 1, "outputs": 3, "temperature": 0.0}, "one beam finds one text; write --beams 3, or sample"),
        ({"beams": 2, "outputs": 3, "temperature": None}, "2 beams find no more than 2 texts; write --beams 3"),
    ],
)
def test_a_search_that_cannot_find_so_many_texts_is_refused(search: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_search(**search)
