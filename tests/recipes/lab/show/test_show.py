"""What --show prints is what training reads, and where a row is read is where the order has it."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from models.loss import IGNORED
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.data.batches import MicroBatch
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.loader import DataLoader
from recipes.data.open_data import DataSettings, Launch, open_data
from recipes.data.order import permuted
from recipes.data.pair_batches import PairBatches
from recipes.data.pair_sequences import Pairing
from recipes.data.text.pair_format import PairFormat
from recipes.data.text.tokenizer import build_tokenizer
from recipes.data.tokens.prepare import write_shards
from recipes.data.tokens.workspace import preparation
from recipes.lab.show.show import (
    PADDING,
    Part,
    Stages,
    answer,
    places_of,
    rows_of,
    say_tokens,
    show_rows,
    show_steps,
    stages_with_data,
    tokens_of,
)
from recipes.metrics.clock import RunClock
from recipes.recipe.load import LoadedRecipe, to_toml
from recipes.recipe.schema import Recipe, StageConfig
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.run import train_stages
from tests.processes import run_processes
from tests.recipes.data.texts import SMALL, shards_in, tokenizer_for, work_on, write_rows
from tests.recipes.data.tokens.test_token_files import write_megatron
from tests.training import change

ROOT = Path(__file__).parents[4]


@contextmanager
def shown(recipe: Recipe) -> Iterator[Stages]:
    """The stages of a recipe, as --show opens them."""
    world = start("cpu", seed=0)
    try:
        yield stages_with_data(LoadedRecipe(recipe), Process(world, Console(silent=True), RunClock(world.device)))
    finally:
        stop()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources: two prepared folders and a file of tokens, with one tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    rows = {name: write_rows(folder / f"{name}.jsonl", 60, 1000 * n, name=name) for n, name in enumerate("abc")}
    (folder / "both").mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").rename(folder / "both" / f"{name}.jsonl")
    tokenizer = tokenizer_for(folder / "both")
    shards_in(folder / "web", work_on(folder / "both", fraction=0, tokenizer=tokenizer))
    shards_in(folder / "code", work_on(folder / "c.jsonl", fraction=0, tokenizer=tokenizer))
    tokens = [[*tokenizer.ids(text), tokenizer.end_of_document] for text in rows["c"]]
    write_megatron(folder / "c.bin", tokens)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared pairs, packed and for an encoder-decoder model."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"question": f"What is {n}?" * (1 + n % 4), "answer": f" It is {n * 7919 % 1000}."} for n in range(120)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": " ".join(row.values())}) + "\n" for row in rows))
    tokenizer = tokenizer_for(folder / "words.jsonl")
    for name, both in (("packed", False), ("padded", True)):
        fields = PairFormat(prompt="question", answer="answer", encoder_decoder=both)
        options: dict[str, Any] = {"tokenizer": tokenizer, "validation_fraction": 0.0, "pieces": SMALL}
        list(write_shards(folder / name, preparation(str(folder / "rows.jsonl"), text_field=fields, **options)))
    return folder


def of_texts(small: Recipe, texts: Path, **data: Any) -> Recipe:
    """A recipe with two stages of different lengths, on a mixture."""
    mixture = {str(texts / "web"): 0.6, str(texts / "code"): 0.3, str(texts / "c.bin"): 0.1}
    recipe = change(
        small,
        run={"name": "shown", "steps": 60},
        data={"mixture": mixture, "tokenizer": str(texts / "web" / "tokenizer.json"), "validation_fraction": 0.0}
        | {"document_mask": True, "shuffle_tokens": 1500}
        | data,
    )
    longer = {"batch.sequence_length": 48, "batch.global_batch_size": 6}
    return replace(recipe, stages=(StageConfig("short", 25, {}), StageConfig("long", 60, longer)))


def of_pairs(small: Recipe, pairs: Path, name: str = "packed", **data: Any) -> Recipe:
    fields = {"prompt_field": "question", "answer_field": "answer", "tokenizer": str(pairs / name / "tokenizer.json")}
    data = {"source": str(pairs / name), "validation_fraction": 0.0, **fields, **data}
    return change(small, run={"name": "pairs", "steps": 20}, data=data, batch={"sequence_length": 96})


def require_equal(parts: list[Part], inputs: torch.Tensor, targets: torch.Tensor, *, packed: bool) -> None:
    """Whether these parts are the whole of a row of text, or of packed pairs."""
    tokens, marks = (np.concatenate([part[index] for part in parts]).tolist() for index in (1, 2))
    wanted, learned = targets.tolist(), (targets != IGNORED).tolist()
    if packed:
        assert [token for token, mark in zip(tokens, marks, strict=True) if mark] == [
            target for target in wanted if target != IGNORED
        ]
        assert sum(len(ids) - int(marks[-1]) for _, ids, marks in parts) == len(inputs)
        return
    assert tokens[: len(inputs)] == inputs.tolist()
    assert marks == [False, *(learned if learned[-1] else learned[:-1])]
    assert all(token == target for token, target, mark in zip(tokens[1:], wanted, learned, strict=False) if mark)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_the_inverse_of_a_permutation_undoes_it(size: int) -> None:
    places, sizes = np.arange(size), np.full(size, size)
    keys = np.full(size, 12345, dtype=np.uint64)
    there = permuted(places, sizes=sizes, keys=keys)
    assert permuted(there, sizes=sizes, keys=keys, inverse=True).tolist() == places.tolist()


@pytest.mark.parametrize(
    "data", [{}, {"border_targets": True}, {"document_mask": False}], ids=["masked", "borders", "whole"]
)
def test_parts_of_text_are_the_inputs_and_targets_of_their_row(
    small: Recipe, texts: Path, data: dict[str, Any]
) -> None:
    with shown(of_texts(small, texts, **data)) as stages:
        for stage, steps, loader in stages:
            for step in (steps.start, steps.start + 1, steps.stop - 1):
                rows = [
                    row for inputs, targets, _ in loader.batch(step - 1) for row in zip(inputs, targets, strict=True)
                ]
                found = [*rows_of(loader, step, {*range(1, 100)})]
                assert [number for number, _, _ in found] == [*range(1, stage.recipe.batch.global_batch_size + 1)]
                for (_, _, parts), (inputs, targets) in zip(found, rows, strict=True):
                    require_equal(parts, inputs, targets, packed=False)
                    for name, ids, _ in parts[:-1]:
                        is_whole = name != PADDING and ids[-1] == loader.tokenizer.end_of_document
                        assert is_whole or stage.name == "long"  # which begins with joined sequences


def test_parts_of_pairs_are_the_inputs_and_targets_of_their_row(small: Recipe, pairs: Path) -> None:
    with shown(of_pairs(small, pairs)) as stages:
        _, _, loader = next(stages)
        [*batches] = loader.batch(4)
        rows = [row for inputs, targets, _ in batches for row in zip(inputs, targets, strict=True)]
        for (_, _, parts), (inputs, targets) in zip(rows_of(loader, 5, {*range(1, 9)}), rows, strict=True):
            require_equal(parts, inputs, targets, packed=True)
            for name, ids, learned in parts:
                text = loader.tokenizer.decode(ids[learned].tolist())
                assert name == PADDING or (text.startswith(" It is ") and text.endswith("<|endoftext|>"))


@pytest.mark.parametrize("mask", [True, False])
def test_every_row_is_read_where_the_inverse_says_through_stages_of_other_lengths(
    small: Recipe, texts: Path, mask: bool
) -> None:
    asked = 0
    with shown(of_texts(small, texts, document_mask=mask)) as stages:
        for _, steps, loader in stages:
            batches, sequences = loader.training, loader.training.sequences
            first = batches.first_of(steps.start - 1)
            where = defaultdict[tuple[str, int, int], set[int]](set)
            for number in range(first, batches.first_of(steps.stop - 1)):
                for piece in sequences.pieces(number):
                    where[piece.source, piece.file, piece.row].add(number - first)
            for index, source in enumerate(sequences.sources):
                files = 2 if source.name.endswith("web") else 1
                for file, row in ((file, row) for file in range(files) for row in range(1, 61)):
                    tokens = tokens_of(source, file, row)
                    assert tokens is not None
                    found = [*places_of(loader, index, *tokens, steps=steps)]
                    assert len(found) == len(set(found))
                    assert set(found) == where[source.name, file, row]
                    asked += len(found)
                assert tokens_of(source, 0, 61) is None
    assert asked > 500


def test_every_pair_is_read_where_the_inverse_says(small: Recipe, pairs: Path) -> None:
    with shown(of_pairs(small, pairs)) as stages:
        _, steps, loader = next(stages)
        sequences, (source,) = loader.training.sequences, loader.training.sequences.sources
        where = defaultdict[int, list[int]](list)
        for number in range(loader.training.first_of(steps.stop - 1)):
            for piece in sequences.pieces(number):
                where[piece.row].append(number)
        for row in range(1, 121):
            tokens = tokens_of(source, 0, row)
            assert tokens and [*places_of(loader, 0, *tokens, steps=steps)] == where[row]


def test_a_step_a_row_or_a_file_that_is_not_there_is_refused_in_one_sentence(small: Recipe, texts: Path) -> None:
    recipe = of_texts(small, texts)
    for step, row, message in (
        (61, 0, "--show 61: not a step of this run, which trains up to step 60"),
        (26, 7, "--show 26:7: a step has 6 rows; write at most that"),
    ):
        with shown(recipe) as stages, pytest.raises(UserError, match=message):
            show_rows(LoadedRecipe(recipe), stages, step, row)
    for name, number in (("a.jsonl", 61), ("d.jsonl", 1)):
        with shown(recipe) as stages, pytest.raises(UserError, match=f"{name}:{number}: no training document"):
            show_steps(stages, name, number)
    for words in (["--show"], ["recipe.toml", "--show", "x"], ["--show", "recipe.toml"]):
        with pytest.raises(UserError, match=r"write train\.py RECIPE --show"):
            answer(words)


def test_tokens_that_are_not_there_are_refused_in_one_sentence(small: Recipe, texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts / "web", tmp_path / "part")
    recipe = of_texts(small, texts, mixture={str(tmp_path / "part"): 1.0})
    with shown(recipe) as stages:
        _, _, loader = next(stages)
        source = loader.training.sequences.sources[0]
        source.shards._closed = False
        source.shards.shards[-1] = replace(source.shards.shards[-1], last=False)
        with pytest.raises(UserError, match=r"part' is tokenized up to token .* so far, and this needs more"):
            source._wait(source.shards.tokens + 1)


def test_learned_tokens_stand_in_brackets_with_the_name_of_what_ends_an_answer(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_for(texts / "both")
    ids = [*tokenizer.ids("What?"), *(answer := [*tokenizer.ids(" \x1b[1mThat."), tokenizer.end_of_document])]
    learned = np.arange(len(ids)) >= len(ids) - len(answer)
    say_tokens(tokenizer, ids, learned, names_ends=True)
    assert capsys.readouterr().out == "What?[[ \\u001b[1mThat.<|endoftext|>]] (ends with '<|endoftext|>') \n"


def test_ids_stand_for_tokens_without_a_decoder(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizer_for(texts / "both")
    content = json.loads(tokenizer.json) | {"decoder": None}
    say_tokens(
        build_tokenizer(json.dumps(content), where=texts), [40, 41, 42], np.array([False, True, True]), names_ends=False
    )
    assert capsys.readouterr().out == "40[[41 42]]\n"


def record(recipes: list[Recipe], folder: Path) -> None:
    """Train on this process and those beside it, and keep what each step reads."""
    world, take = start("cpu", seed=0), DataLoader.batch
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def batch(loader: DataLoader, number: int) -> list[MicroBatch]:
        found = take(loader, number)
        kept[number + 1] = [(cast(torch.Tensor, inputs).clone(), targets.clone()) for inputs, targets, _ in found]
        return found

    DataLoader.batch = batch  # type: ignore[method-assign]
    for recipe in recipes:
        kept.clear()
        with Console(silent=True) as console:
            assert train_stages(LoadedRecipe(recipe), Process(world, console, RunClock(world.device))) == 0
        torch.save(kept, folder / f"{recipe.run.name}-{world.rank}.pt")
    stop()


@pytest.mark.slow
def test_rows_are_those_that_two_processes_train_on(small: Recipe, texts: Path, pairs: Path, tmp_path: Path) -> None:
    raw = {"mixture": {str(texts / "both"): 0.6, str(texts / "c.jsonl"): 0.4}, "tokenizer": "train:400"}
    text = change(of_texts(small, texts, **raw), run={"steps": 4}, checkpoint={"every": 1})
    text = replace(text, stages=tuple(replace(one, until=2 + 2 * n) for n, one in enumerate(text.stages)))
    packed = change(of_pairs(small, pairs), run={"steps": 3}, checkpoint={"every": 2})
    recipes = [text, packed]

    def rows_of_steps(recipe: Recipe) -> dict[int, list[tuple[int, str, list[Part]]]]:
        with shown(recipe) as stages:
            return {step: [*rows_of(loader, step, {*range(1, 100)})] for _, steps, loader in stages for step in steps}

    to_come = [rows_of_steps(recipe) for recipe in recipes]
    run_processes(2, record, recipes, tmp_path)
    for recipe, early in zip(recipes, to_come, strict=True):
        ranks = [torch.load(tmp_path / f"{recipe.run.name}-{rank}.pt") for rank in range(2)]
        for found in (early, rows_of_steps(recipe)):
            assert [*found] == [*range(1, recipe.run.steps + 1)]
            for step, shown_rows in found.items():
                batches = [one for rank in ranks for one in rank[step]]
                rows = [row for inputs, targets in batches for row in zip(inputs, targets, strict=True)]
                for (_, _, parts), (inputs, targets) in zip(shown_rows, rows, strict=True):
                    require_equal(parts, inputs, targets, packed=recipe is packed)


def test_pairs_of_an_encoder_decoder_model_are_shown_whole(pairs: Path) -> None:
    format = PairFormat(prompt="question", answer="answer", encoder_decoder=True)
    folder, pairing = pairs / "padded", Pairing(format, decoder_start=0, padding=0)
    section = DataConfig(source=str(folder), prompt_field="question", answer_field="answer", validation_fraction=0.0)
    batch = BatchConfig(sequence_length=96, global_batch_size=8, micro_batch_size=4)
    settings = DataSettings(section, batch, 3, lambda: str(folder / "tokenizer.json"), validation={}, pairing=pairing)
    launch = Launch("this", writes=False, log=lambda line: None)
    data = open_data(settings, launch, resumed_data_state={})
    options: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 4, "data_rank": 0, "data_ranks": 1}
    batches = PairBatches(
        cast(Any, data.training), pairing=pairing, end_of_document=0, device=torch.device("cpu"), **options
    )
    loader: Any = SimpleNamespace(training=batches, pairing=pairing, batch=batches.take)
    targets = [row for _, micro_batch, _ in batches.take(2) for row in micro_batch]
    for (_, _, [prompt, own]), wanted in zip(rows_of(loader, 3, {*range(1, 9)}), targets, strict=True):
        assert (prompt[0], own[0]) == ("prompt", "answer")
        assert own[1].tolist() == wanted[wanted != IGNORED].tolist()
        assert not prompt[2].any() and own[2].all()
        assert data.tokenizer.decode(prompt[1].tolist()).startswith("What is ")
        assert data.tokenizer.decode(own[1].tolist()).startswith(" It is ")
    batches.close()


@pytest.mark.slow
def test_commands_show_rows_of_a_step_and_of_a_source_and_write_nothing(
    small: Recipe, texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(change(of_texts(small, texts), run={"output": str(tmp_path)})))

    def said(*words: str | Path, code: int = 0) -> str:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    found = said("train.py", tmp_path, "--show", "26:2")
    assert "step 26 of 60 (long)\n" in found and "row 2 of 6, from " in found and "[[" in found
    assert "  up to        64 tokens" in found and " times by step 60" in found
    found = said("train.py", tmp_path / "recipe.toml", "--show", "a.jsonl:12", "--run.seed", "5")
    assert "both/a.jsonl:12, tokens" in found and "read by step:row " in found
    assert "--show 61: not a step of this run" in said("train.py", tmp_path, "--show", "61", code=2)
    rows = said(
        "scripts/prepare_data.py", texts / "c.jsonl", tmp_path / "out", "--tokenizer", texts / "web", "--show", "2"
    )
    assert "c.jsonl', line 2" in rows and "c number 2001 says" in rows.replace("[[", "") and "line 3" not in rows
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
