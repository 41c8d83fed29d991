"""Where trained weights lie: a Hugging Face folder, or one of our checkpoints. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from models.config import ModelConfig
from models.hf import TextFacts
from parallel.errors import UserError
from recipes.checkpoint.folder import check
from recipes.checkpoint.manifest import Damage
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.files.layout import CHECKPOINTS, MODEL, TOKENIZER, checkpoint_steps, step_folder
from recipes.weights import hf_folder
from recipes.weights.hf_folder import Description

FROM_WEIGHTS = "from_weights"
"""As model.name and as data.tokenizer: the one of model.weights."""
UNCHECKED = ("name", "init_std", "weights")
"""Fields of a model that its trained weights do not depend on."""
LLAMA3_ROPE = ("rope_factor", "rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_length")


@dataclass(frozen=True)
class Weights:
    """A folder of weights and what it says about them."""

    path: Path
    model: ModelConfig
    facts: TextFacts
    is_checkpoint: bool
    """One of ours, and not a Hugging Face folder."""

    def description(self) -> Description:
        """With the text of tokenizer.json. Raises UserError where there is none."""
        return Description(self.model, self.facts, hf_folder.read_tokenizer(self.path))

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises UserError where there is none, or one that does not fit the model."""
        try:
            ends = self.facts.eos_token_id
            tokenizer = build_tokenizer(
                self.description().tokenizer,
                where=self.path / TOKENIZER,
                ends=ends if isinstance(ends, tuple) else () if ends is None else (ends,),
            )
        except UserError as error:
            raise UserError(str(error).removeprefix("data.tokenizer: ")) from None
        if tokenizer.vocabulary > self.model.vocabulary:
            raise UserError(
                f"{self.path}: {TOKENIZER} has ids up to {tokenizer.vocabulary - 1}, but the model's vocabulary is"
                f" {self.model.vocabulary}; they do not belong together"
            )
        return tokenizer


def find_weights(path: str | Path) -> Weights:
    """The weights of a Hugging Face folder, a checkpoint, or a run's folder (its newest checkpoint).

    Reads a few small files. Raises UserError where there is nothing of that kind, or nothing we can use.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is {'not a folder' if folder.exists() else 'not there'}")
    if (folder / hf_folder.CONFIG).is_file():
        return Weights(folder, hf_folder.read_shape(folder), hf_folder.read_facts(folder), is_checkpoint=False)
    for place in (folder / CHECKPOINTS, folder):
        if steps := checkpoint_steps(place):
            folder = step_folder(place, steps[-1])
            break
    if (folder / MODEL).is_file():
        model, facts = read_description(folder)
        return Weights(folder, model, facts, is_checkpoint=True)
    if any(folder.glob("*.distcp")):
        raise UserError(f"{folder} is a checkpoint without {MODEL}: an older version of this program wrote it")
    raise UserError(
        f"{folder} holds no weights: neither a Hugging Face folder ({hf_folder.CONFIG} and safetensors), nor a"
        f" checkpoint ({MODEL}), nor the folder of a run with a checkpoint"
    )


def checkpoint_files(description: Description) -> dict[str, str]:
    """Name -> text of the files that describe a checkpoint."""
    model = replace(description.model, weights="")  # where they once came from is no part of what they are
    content = {"model": asdict(model), "text": asdict(description.facts)}
    return {MODEL: json.dumps(content, indent=2) + "\n", TOKENIZER: description.tokenizer}


def read_description(folder: Path) -> tuple[ModelConfig, TextFacts]:
    """What model.json says. Raises UserError."""
    file = folder / MODEL
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        model = TypeAdapter(ModelConfig).validate_python(content["model"])
        return model, TypeAdapter(TextFacts).validate_python(content["text"])
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} does not describe a model of this version: {error}") from None


def differences(model: ModelConfig, stored: ModelConfig) -> Iterator[tuple[str, Any]]:
    """(field, its value in the weights) for every field in which a model is not the one that weights were made for."""
    skipped = {*UNCHECKED, "no_rope_every", "no_rope_layers"}
    if model.rope_scaling == "none" or stored.rope_scaling == "none":
        skipped |= set(LLAMA3_ROPE)
    for field in fields(ModelConfig):
        if field.name not in skipped and getattr(model, field.name) != (theirs := getattr(stored, field.name)):
            yield field.name, theirs
    layers = range(min(model.layers, stored.layers))
    if [model.uses_rope(layer) for layer in layers] != [stored.uses_rope(layer) for layer in layers]:
        for name in ("no_rope_every", "no_rope_layers"):
            if getattr(model, name) != (theirs := getattr(stored, name)):
                yield name, theirs


def initial_weights(weights: str, run_folder: Path) -> Weights:
    """What a run with this model.weights begins with: its own newest checkpoint, which needs them no more, or them.

    Damaged checkpoints are passed over here as they will be when the run goes on, which sets them aside.
    """
    place, damaged = run_folder / CHECKPOINTS, None
    for step in reversed(checkpoint_steps(place)):
        try:
            check(place, step)
            return find_weights(step_folder(place, step))
        except Damage as damage:
            damaged = damaged or damage
    if damaged is not None and not weights:
        raise damaged
    return find_weights(weights)
