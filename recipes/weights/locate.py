"""Where trained weights are: in a Hugging Face folder, or in one of our checkpoints. Imports no torch."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig, TextFacts
from parallel.errors import TemporaryError, UserError
from recipes.files.layout import CHECKPOINTS, MODEL, RECIPE, TOKENIZER, checkpoint_steps, step_folder
from recipes.files.reading import is_folder, is_remote, names_in, read_text, similar, toml_table, user_path
from recipes.weights.description import HF_CONFIG, Description, read_description

if TYPE_CHECKING:  # what a run without weights does not need is imported where it is used
    from recipes.data.text.tokenizer import Tokenizer
    from recipes.weights.hf_folder import StoredTensors

HF_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class Weights:
    """A folder of weights and what it says about them. Each of its files is read once, when it is first needed."""

    path: Path
    model: ModelConfig
    facts: TextFacts
    is_checkpoint: bool
    """True for one of our checkpoints, False for a Hugging Face folder."""

    def model_in(self, dtype: str) -> ModelConfig:
        """The model. Raises UserError where it sees later tokens, or has experts that torch cannot compute in this
        type."""
        if self.model.by_transformers:
            from models.transformers import require_causal

            try:
                require_causal(self.model)
            except ValueError as error:
                raise UserError(f"{self.path}: {error}") from None
        for field, rule, _ in self.model.uneven_rows(dtype):
            remedy = "write --dtype float32" if dtype == "bfloat16" else "this model cannot be opened here"
            raise UserError(f"{self.path}: {field} = {getattr(self.model, field)}: {rule}; {remedy}")
        return self.model

    @cached_property
    def description(self) -> Description:
        """The description with the texts of all its files. Raises UserError where one is missing or damaged."""
        from recipes.weights.companions import read_companions, read_tokenizer, without_added_tokens
        from recipes.weights.hf_folder import without_generated

        text = read_tokenizer(self.path)
        description = Description(self.model, self.facts, text)
        companions = without_generated(read_companions(self.path), description)
        nameless = not self.is_checkpoint and self.facts.bos_token_id is None
        return replace(description, companions=companions, begins=nameless and without_added_tokens(text) is not text)

    @cached_property
    def facts_of_text(self) -> TextFacts:
        """The facts, with the token that tokenizer.json begins texts with where config.json names none."""
        if not self.description.begins:
            return self.facts
        from recipes.data.text.beginning import added_beginning

        _, begin = added_beginning(json.loads(self.description.tokenizer)) or ("", None)
        return replace(self.facts, bos_token_id=begin)

    @cached_property
    def stored_tensors(self) -> "StoredTensors":
        """The tensors of a Hugging Face folder. Raises UserError with everything that is missing or damaged."""
        from recipes.weights.hf_folder import stored_tensors

        return stored_tensors(self.path, self.model)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the folder. Raises UserError where it is missing or does not fit the model."""
        from recipes.data.text.tokenizer import build_tokenizer

        try:
            ends = self.facts.eos_token_id
            tokenizer = build_tokenizer(
                self.description.tokenizer,
                where=self.path / TOKENIZER,
                ends=ends if isinstance(ends, tuple) else () if ends is None else (ends,),
            )
        except TemporaryError:
            raise
        except UserError as error:
            raise UserError(str(error).removeprefix("data.tokenizer: ")) from None
        if tokenizer.needed_rows > self.model.vocabulary:
            raise UserError(
                f"{self.path}: {TOKENIZER} has ids up to {tokenizer.needed_rows - 1}, but the model's vocabulary is"
                f" {self.model.vocabulary}; they do not belong together"
            )
        return replace(tokenizer, rows=self.model.vocabulary)


@dataclass(frozen=True)
class InitialWeights:
    """What a run starts from: located on the disk once, and remembered."""

    weights: str
    """The value of model.weights."""
    run_folder: Path
    """The run's folder, whose checkpoints take precedence over the weights."""
    config: str = ""
    """The value of model.config."""

    @cached_property
    def found(self) -> Weights:
        """What initial_weights() returns. Raises UserError as it does."""
        return initial_weights(self.weights, self.run_folder)

    def model(self) -> ModelConfig:
        """The model of the weights or, where there are none yet, of the config. Raises UserError."""
        if self.config and not (self.weights or checkpoint_steps(self.run_folder / CHECKPOINTS)):
            return self.configured
        return self.outside_of_stages()

    def outside_of_stages(self) -> ModelConfig:
        """The model of what is found, with the rope_theta that the run has outside of its stages. Raises
        UserError."""
        found, recipe = self.found, self.run_folder / RECIPE
        if found.path.parent != self.run_folder / CHECKPOINTS or not recipe.is_file():
            return found.model
        try:
            theta = toml_table(read_text(recipe))["model"]["rope_theta"]
        except (ValueError, KeyError, TypeError):  # the run's folder is checked later
            return found.model
        return replace(found.model, rope_theta=theta)

    @cached_property
    def configured(self) -> ModelConfig:
        """The model of the config, whatever the run's checkpoints hold. Raises UserError."""
        from recipes.weights.hf_folder import config_file, read_config

        return read_config(config_file(self.config))[0]


def initial_weights(weights: str, run_folder: Path) -> Weights:
    """What a run starts from: its newest intact checkpoint or these weights. Raises UserError as find_weights does."""
    from recipes.checkpoint.folder import check
    from recipes.checkpoint.manifest import Damage

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


def find_weights(path: str | Path) -> Weights:
    """The weights of a Hugging Face folder, a checkpoint, or the newest checkpoint in a run's folder.

    Reads the description alone. Raises UserError where there are no weights, or none that this program supports.
    """
    if is_remote(str(path)):
        path = _fetched(str(path))
    folder = local_folder(path)
    if HF_CONFIG in (names := names_in(folder)):
        from recipes.weights.hf_folder import read_model_of

        return Weights(folder, *read_model_of(folder), is_checkpoint=False)
    for place in (folder / CHECKPOINTS, folder):
        if steps := checkpoint_steps(place):
            folder = step_folder(place, steps[-1])
            names = names_in(folder)
            break
    if MODEL in names:
        return Weights(folder, *read_description(folder), is_checkpoint=True)
    raise _no_weights(folder, MODEL)


def local_folder(path: str | Path) -> Path:
    """The folder at a path on this disk. Raises UserError, with the most similar name, if there is none."""
    folder = user_path(path)
    if not is_folder(folder):
        if folder.exists():
            raise UserError(f"{folder} is not a folder")
        from recipes.data.text.hub import download_hint

        remedy = "; write the folder of a model (--plan reads its config.json alone) or a run"
        raise UserError(f"{folder} does not exist{similar(folder) or download_hint(str(path)) or remedy}")
    return folder


def _fetched(address: str) -> Path:
    """A copy on this disk of the weights at an address, of a run those of its newest checkpoint, with its recipe.toml.

    Every byte of a checkpoint is compared with its checksum when it is copied. Raises UserError.
    """
    from recipes.checkpoint.files import verify
    from recipes.checkpoint.manifest import MANIFEST, Damage
    from recipes.files.atomic import replace as replace_file
    from recipes.files.local_copy import local_copy
    from recipes.files.remote import find, read
    from recipes.weights.hf_folder import read_header

    def require_sizes(folder: Path) -> None:  # there are no checksums to compare with
        for file in sorted(folder.glob("*.safetensors")):
            try:
                read_header(file)
            except UserError as error:
                raise UserError(f"{address}: {error}") from None

    def require_intact(folder: Path) -> None:
        try:
            verify(folder)
        except Damage as damage:
            raise UserError(f"{damage}; it was copied like this") from None

    place = address.rstrip("/")
    names = {file.address.removeprefix(f"{place}/") for file in find(place)}
    if HF_CONFIG in names:
        return local_copy(place, only=HF_FILES, check=require_sizes)
    steps = (re.fullmatch(rf"(?:(?:checkpoints/)?step-([0-9]+)/)?{re.escape(MANIFEST)}", name) for name in names)
    found = {int(match[1] or 0): match[0].removesuffix(MANIFEST).rstrip("/") for match in steps if match}
    if not found:
        raise _no_weights(address, MANIFEST)
    copy = local_copy(f"{place}/{found[max(found)]}".rstrip("/"), deep=True, check=require_intact)
    recipe = read(re.sub(rf"(/{CHECKPOINTS})?(/step-[0-9]+)?$", f"/{RECIPE}", place, count=1))
    if recipe and not (copy / RECIPE).is_file():  # for data_of_run()
        replace_file(copy / RECIPE, lambda out: out.write(recipe), sync=False)
    return copy


def _no_weights(place: str | Path, checkpoint: str) -> UserError:
    """checkpoint: the file that would make a folder there one."""
    return UserError(
        f"{place} holds no weights: it is neither a Hugging Face folder ({HF_CONFIG} and safetensors), nor a"
        f" checkpoint ({checkpoint}), nor a run folder with a checkpoint"
    )


def trained_description(
    model: ModelConfig, tokenizer: "Tokenizer", start: Weights | None, *, length: int, log: Callable[[str], None]
) -> Description:
    """What accompanies the weights of a run wherever they go.

    Args:
        model: that of the run.
        tokenizer: that of the run.
        start: what the run starts or resumes from; None = random weights.
        length: tokens per sequence of the run.
        log: receives a line about what is not kept.
    """
    # The text itself: written anew by the library, its fingerprint would differ when a run resumes with "from_weights".
    text, facts = tokenizer.json, TextFacts(length, tokenizer.beginning, tokenizer.end_of_document)
    if start is None:
        return Description(model, facts, text)
    facts, ends = replace(facts, context_length=max(length, start.facts.context_length)), start.facts.eos_token_id
    try:
        companions = start.description.companions
        if not companions and not isinstance(ends, tuple):
            return Description(model, facts, text)
        same = start.tokenizer.backend.get_vocab() == tokenizer.backend.get_vocab()
    except TemporaryError:
        raise
    except UserError:  # no tokenizer that the run could use
        same = False
    if not same:
        log(
            f"the run has another tokenizer than {start.path}, whose chat template and generation settings do not apply"
        )
        return Description(model, facts, text)
    if isinstance(ends, tuple):
        ends = ends if tokenizer.end_of_document in ends else (tokenizer.end_of_document, *ends)
        facts = replace(facts, eos_token_id=ends)
    return Description(model, replace(facts, pad_token_id=start.facts.pad_token_id), text, companions)
