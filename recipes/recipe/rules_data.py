"""Rules about what [data] and [validation] name on the disk, and about installed packages. Imports no torch."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import FROM_WEIGHTS, ModelConfig
from parallel.errors import TemporaryError, UserError
from recipes.data.config import HELD_OUT, BatchConfig, DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.files.layout import TOKENIZER
from recipes.files.reading import path_problem, user_path
from recipes.recipe.fields import Violation, one_line, refusal_of, toml
from recipes.recipe.paths import WRITTEN
from recipes.recipe.schema import Recipe

if TYPE_CHECKING:
    from recipes.data.tokens.shards import Index
    from recipes.weights.locate import InitialWeights


def needs_are_met(recipe: Recipe) -> Iterator[Violation]:
    """Packages that only some recipes import, which scripts/setup.sh lets PYTHON lack; a calibration."""
    texts = (*recipe.data.sources, *recipe.validation.texts.values())
    asked = {
        "float8.recipe": ("torchao", recipe.float8.recipe != "none", '"none"'),
        "data": ("datasets", any(text.startswith("hf:") for text in texts), "files as sources"),
        "model.weights": ("safetensors", recipe.model.weights, '""'),
        "checkpoint.export_hf": ("safetensors", recipe.checkpoint.export_hf, "false"),
        "metrics.wandb": ("wandb", recipe.metrics.wandb, "false"),
        "metrics.tensorboard": ("tensorboard", recipe.metrics.tensorboard, "false"),
    }
    for field, (package, needed, instead) in asked.items():
        if needed and find_spec(package) is None:
            rule = f"needs the package {package}, which {sys.executable} lacks"
            yield field, f"{rule}; install it there, or write {instead}"
    if (file := recipe.metrics.calibrated_by) and not os.path.exists(user_path(file)):
        yield "metrics.calibrated_by", 'there is no such file; write one of --plan --calibrated-by, or ""'


def data_is_there(data: DataConfig, *, batch: BatchConfig) -> Iterator[Violation]:
    """The sources can be read, each is there once, and those that are prepared fit the recipe."""
    for source in data.sources:
        index, problem = _look_at(source)
        if problem:
            yield "data.mixture" if data.mixture else "data.source", problem
        elif index is not None:
            yield from _prepared_fits(source, index, data, length=batch.sequence_length)
    if len({user_path(source).resolve() for source in data.mixture}) < len(data.mixture):
        yield "data.mixture", "names the same source twice; give each source one share"
    if len(data.mixture) > 1:
        from recipes.data.order import mixture_problem

        if message := mixture_problem(data.mixture):
            yield "data.mixture", message


def tokens_are_read_as_they_are(data: DataConfig, *, validation: ValidationConfig) -> Iterator[Violation]:
    """Nothing asks for other tokens than those in the files of other trainers."""
    from recipes.data.text.sources import is_prepared, is_token_files

    sources = [*data.sources, *filter(None, validation.texts.values())]
    if not (files := [source for source in sources if is_token_files(source)]):
        return
    remedies = {
        "tokenizer": data.tokenizer.startswith("train:") and 'name their tokenizer, as in "gpt2/tokenizer.json"',
        "bos": data.bos and "write false",
        "source": data.has_pairs and "pairs need text",
        "validation_fraction": data.validation_fraction
        and files[0] in data.sources
        and "documents are held out by a"
        ' hash of their text: write 0, and a file of its own, [validation] source = "FILE"',
    }
    for name in ("text_field", "text_documents") if all(map(is_prepared, sources)) else ():
        remedies[name] = getattr(data, name) != getattr(DataConfig, name) and "omit this"
    for name, remedy in remedies.items():
        if remedy:
            yield f"data.{name}", f"'{files[0]}' holds tokens, which are read as they are; {remedy}"


def text_can_be_cut(data: DataConfig) -> Iterator[Violation]:
    """There is a folder for the tokens, and a text file is divided as the recipe says."""
    from recipes.data.text.plain_text import text_documents_problem

    if message := text_documents_problem(data.text_documents):
        yield "data.text_documents", message
    if unusable := path_problem(data.cache, inside=WRITTEN["data.cache"]):
        yield "data.cache", unusable


def tokenizer_fits(recipe: Recipe, initial: "InitialWeights | None") -> Iterator[Violation]:
    """The model has a row for every token of the tokenizer, which begins documents and forms pairs as is asked."""
    data, model = recipe.data, recipe.model
    yield from _rows_suffice(data.tokenizer, model=model, initial=initial)
    if data.bos and data.tokenizer != FROM_WEIGHTS:
        from recipes.data.text.beginning import beginning_problem

        if message := beginning_problem(data.tokenizer):
            yield "data.bos", message
    if data.has_pairs or model.is_encoder_decoder:
        from recipes.weights.pairing import pairing_problems

        yield from ((f"data.{field}", message) for field, message in pairing_problems(data, model, initial))


def _rows_suffice(tokenizer: str, *, model: ModelConfig, initial: "InitialWeights | None") -> Iterator[Violation]:
    """The model has a row for every token, and its weights were trained with this tokenizer."""
    from recipes.data.text.tokenizer import tokenizer_problem

    if initial is not None and (model.weights or tokenizer == FROM_WEIGHTS):
        if refused := refusal_of(lambda: initial.found):
            if not model.weights:
                yield "data.tokenizer", f"needs model.weights or a checkpoint of this run: {refused}"
            return  # weights_fit reports what is wrong with them
        weights = initial.found
        if tokenizer == FROM_WEIGHTS:
            if refused := refusal_of(lambda: weights.tokenizer):
                yield "data.tokenizer", refused
            return
        if tokenizer.startswith("train:") and (weights.path / TOKENIZER).is_file():
            problem = "would train a new tokenizer, whose tokens mean nothing to the weights, which have their own"
            yield "data.tokenizer", f'{problem}; write tokenizer = "{FROM_WEIGHTS}"'
            return
    if message := tokenizer_problem(tokenizer, model.vocabulary):
        if model.by_transformers:
            message = message.replace("model.vocabulary", "vocab_size in config.json")
        yield "data.tokenizer", message


def _prepared_fits(source: str, index: "Index", data: DataConfig, *, length: int) -> Iterator[Violation]:
    """Prepared tokens were made with this tokenizer and validation fraction, and fill a sequence of this length."""
    from recipes.data.text.sources import is_prepared
    from recipes.data.tokens.shards import TOKENIZER as TOKENIZER_FILE
    from recipes.data.tokens.shards import open_index

    if data.tokenizer.startswith("train:"):
        file = toml(f"{source}/{TOKENIZER_FILE}")
        yield "data.tokenizer", f"'{source}' is tokenized already; write tokenizer = {file}"
    if index.validation_fraction != data.validation_fraction:
        share = index.validation_fraction
        yield "data.validation_fraction", f"'{source}' was prepared with {share}; write that or prepare it again"
    if (tokens := sum(shard.train for shard in index.shards)) <= length and not data.has_pairs:
        rule = f"'{source}' has {tokens:,} tokens, but a sequence and its last target need {length + 1:,}"
        yield "batch.sequence_length", f"{rule}; give more text, or shorter sequences"
    path = user_path(data.tokenizer)
    other = str(path.parent if path.name == TOKENIZER_FILE else path)
    with suppress(UserError):  # of another folder, whose tokenizer is read all the same
        its = open_index(other) if is_prepared(other) and Path(other) != Path(source) else index
        if its.tokenizer_fingerprint != index.tokenizer_fingerprint:
            yield "data.tokenizer", f"'{source}' holds tokens of another tokenizer; prepare it again with this one"


def validation_is_there(validation: ValidationConfig) -> Iterator[Violation]:
    """The texts to validate on and the files of tasks can be read."""
    for task in validation.tasks:
        if (task.endswith((".yaml", ".yml")) or "/" in task) and not Path(task).exists():
            message = f"{task!r} does not exist; write the path of a YAML file or folder, or the name of a task"
            yield "validation.tasks", message
    field = "validation.sources" if validation.sources else "validation.source"
    for name, source in validation.texts.items():
        if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield field, f"{toml(name)} names a column of metrics.jsonl; write letters, digits, and any of _ . - only"
        if source != HELD_OUT and (problem := _look_at(source)[1]):
            yield field, problem


def _look_at(source: str) -> tuple["Index | None", str]:
    """The index of a prepared source, and what is wrong with a source and what to write instead; "" if nothing is."""
    from recipes.data.text.sources import is_prepared, is_token_files, source_problem
    from recipes.data.tokens.shards import PARTS, open_index

    try:
        if is_token_files(source):
            from recipes.data.tokens.token_files import token_files

            token_files(source)
            return None, ""
        if is_prepared(source):
            return open_index(source), ""
    except TemporaryError:
        raise
    except UserError as error:
        return None, one_line(error).removeprefix("data.source: ")
    problem = source_problem(source)
    if problem and (user_path(source) / PARTS).is_file():
        from recipes.data.tokens.parts import unfinished_problem

        problem = unfinished_problem(source) or problem
    return None, problem or ""
