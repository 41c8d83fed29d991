"""Rules of the sections [data] and [validation], which look at what they name on the disk. Imports no torch."""

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
from recipes.data.config import HELD_OUT, DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.files.layout import TOKENIZER
from recipes.files.reading import path_problem, user_path
from recipes.recipe.fields import Violation, one_line, refusal_of, toml
from recipes.recipe.paths import WRITTEN

if TYPE_CHECKING:
    from recipes.recipe.schema import Recipe
    from recipes.weights.locate import InitialWeights


MOST_SOURCES = 10_000
"""Of a mixture: none may have less than this part of the tokens."""
WRONG_SOURCES = 10
"""Sources that are named in one refusal."""


def needs_are_met(recipe: "Recipe") -> Iterator[Violation]:
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


def data_is_there(
    data: DataConfig, *, length: int, model: ModelConfig, weights: "InitialWeights | None"
) -> Iterator[Violation]:
    """The sources can be read and fill a sequence of this length, and the tokenizer fits the model."""
    from recipes.data.text.plain_text import text_documents_problem
    from recipes.data.text.sources import is_prepared

    if unusable := path_problem(data.cache, inside=WRITTEN["data.cache"]):
        yield "data.cache", unusable
    if message := text_documents_problem(data.text_documents):
        yield "data.text_documents", message
    if len(data.mixture) > MOST_SOURCES:
        yield "data.mixture", f"names {len(data.mixture):,} sources, more than {MOST_SOURCES:,}; join some by globs"
        return
    wrong = 0
    for source in data.sources:
        if wrong >= WRONG_SOURCES:
            break
        if is_prepared(source):
            yield from prepared_fits(source, data, length=length)
        elif message := _source_problem(source):
            yield "data.mixture" if data.mixture else "data.source", message
            wrong += 1
    if len({user_path(source).resolve() for source in data.mixture}) < len(data.mixture):
        yield "data.mixture", "names the same source twice; give each source one share"
    if len(data.mixture) > 1:
        from recipes.data.order import mixture_problem

        if message := mixture_problem(data.mixture):
            yield "data.mixture", message
    yield from tokenizer_fits(data.tokenizer, model=model, initial=weights)
    if data.bos and data.tokenizer != FROM_WEIGHTS:
        from recipes.data.text.beginning import beginning_problem

        if message := beginning_problem(data.tokenizer):
            yield "data.bos", message
    if data.has_pairs or model.is_encoder_decoder:
        from recipes.weights.pairing import pairing_problems

        yield from ((f"data.{field}", message) for field, message in pairing_problems(data, model, weights))


def tokenizer_fits(tokenizer: str, *, model: ModelConfig, initial: "InitialWeights | None") -> Iterator[Violation]:
    """The model has a row for every token, and its weights were trained with this tokenizer."""
    from recipes.data.text.tokenizer import tokenizer_problem

    if initial is not None and (model.weights or tokenizer == FROM_WEIGHTS):
        if refused := refusal_of(initial.find):
            if not model.weights:
                yield "data.tokenizer", f"needs model.weights or a checkpoint of this run: {refused}"
            return  # weights_fit reports what is wrong with them
        weights = initial.find()
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


def prepared_fits(source: str, data: DataConfig, *, length: int) -> Iterator[Violation]:
    """Prepared tokens were made with this tokenizer and validation fraction, and fill a sequence of this length."""
    from recipes.data.text.sources import is_prepared
    from recipes.data.tokens.shards import TOKENIZER as TOKENIZER_FILE
    from recipes.data.tokens.shards import open_index

    try:
        index = open_index(source)
    except TemporaryError:
        raise
    except UserError as error:
        yield "data.source", one_line(error).removeprefix("data.source: ")
        return
    if data.tokenizer.startswith("train:"):
        file = toml(f"{source}/{TOKENIZER_FILE}")
        yield "data.tokenizer", f"'{source}' is tokenized already; write tokenizer = {file}"
    if index.validation_fraction != data.validation_fraction:
        share = index.validation_fraction
        yield "data.validation_fraction", f"'{source}' was prepared with {share}; write that or prepare it again"
    if (tokens := sum(shard.train for shard in index.shards)) <= length and not data.has_pairs:
        rule = f"'{source}' has {tokens:,} tokens, but a sequence and its last target need {length + 1:,}"
        yield "batch.sequence_length", f"{rule}; give more text, or shorter sequences"
    place = user_path(data.tokenizer)
    other = str(place.parent if place.name == TOKENIZER_FILE else place)
    with suppress(UserError):  # of another folder, whose tokenizer is read all the same
        its = open_index(other) if is_prepared(other) and Path(other) != Path(source) else index
        if its.tokenizer_fingerprint != index.tokenizer_fingerprint:
            yield "data.tokenizer", f"'{source}' holds tokens of another tokenizer; prepare it again with this one"


def validation_is_possible(
    validation: ValidationConfig, *, data: DataConfig, model: ModelConfig
) -> Iterator[Violation]:
    """There is text to validate on, its sources can be read, and the model can be asked the tasks."""
    from recipes.data.text.sources import is_prepared
    from recipes.data.tokens.shards import open_index

    if validation.tasks or validation.task_limit:
        from recipes.recipe.rules_tasks import task_problems

        for name, problem in task_problems(validation, encoder_decoder=model.is_encoder_decoder):
            yield f"validation.{name}", problem
    if data.validation_fraction == 0 and HELD_OUT in validation.texts.values():
        remedy = "write 0, or give a text that is not trained on: [validation] source"
        for field in ("every", "sample_tokens"):
            if getattr(validation, field):
                problem = "needs text, but data.validation_fraction = 0 holds none out"
                yield f"validation.{field}", f"{problem}; {remedy}"
    field = "validation.sources" if validation.sources else "validation.source"
    for name, source in validation.texts.items():
        if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield field, f"{toml(name)} names a column of metrics.jsonl; write letters, digits, and any of _ . - only"
        if source == HELD_OUT:
            continue
        try:
            message = None if is_prepared(source) and open_index(source) else _source_problem(source)
        except TemporaryError:
            raise
        except UserError as error:
            message = one_line(error).removeprefix("data.source: ")
        if message:
            yield field, message


def _source_problem(source: str) -> str | None:
    """What is wrong with a source, and what to write instead, or None."""
    from recipes.data.text.sources import source_problem
    from recipes.data.tokens.shards import PARTS

    problem = source_problem(source)
    if problem and (user_path(source) / PARTS).is_file():
        from recipes.data.tokens.parts import unfinished_problem

        problem = unfinished_problem(source) or problem
    return problem
