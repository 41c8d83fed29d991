"""A Hugging Face folder: config.json, tokenizer, safetensors headers; convert.py has the values. Imports no torch."""

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.config import ModelConfig, TextFacts
from models.hf import config_to_hf, layout_of
from models.hf_config import config_to_transformers, read_model
from models.layout import key_of
from models.transformers_config import TransformersConfig
from parallel.errors import TemporaryError, UserError, listed, some
from recipes.data.text.tokens_beside import TOKENIZER_CONFIG, without_mark
from recipes.files.layout import TOKENIZER
from recipes.files.lock import written_alone
from recipes.files.reading import fault, is_folder, json_object, may_pass, names_in, read_whole, user_path
from recipes.weights.companions import (
    GENERATION_CONFIG,
    OUR_CLASS,
    exported_tokenizer_config,
    token_names,
    without_added_tokens,
)
from recipes.weights.description import HF_CONFIG, Description

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Supported element types of weights, by their safetensors names."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_FILE_BYTES = 5_000_000_000
"""Size limit of one file of weights, as on the Hugging Face hub."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file."""

    name: str
    """The name in the file."""
    dtype: str
    """Key of DTYPE_BYTES."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


StoredTensors = dict[str, tuple[Path, Entry]]
"""key_of() of a tensor, or our name of another that it is tied to -> the file that has it and its entry there."""


def config_file(path: str) -> Path:
    """The config.json that model.config names, by itself or by its folder. Raises UserError if there is none."""
    file = user_path(path)
    if is_folder(file):
        file = file / HF_CONFIG
    if not file.exists():
        from recipes.data.text.hub import download_hint

        hint = download_hint(path, HF_CONFIG) or f"; write the path of a {HF_CONFIG}, or of a folder with one"
        raise UserError(f"{file} does not exist{hint}")
    return file


def read_config(file: Path) -> tuple[ModelConfig, TextFacts]:
    """The contents of a config.json. Raises UserError with everything in it that is not supported."""
    config = _read_json(file)
    try:
        return read_model(config)
    except ValueError as error:
        lines = [f"{file} describes a model that is not supported:", *str(error).split("\n")]
        raise UserError("\n  ".join(lines)) from None


def read_model_of(folder: Path) -> tuple[ModelConfig, TextFacts]:
    """The model of a folder with weights, and the rest of its config.json. Raises UserError as read_config."""
    model, facts = read_config(folder / HF_CONFIG)
    # transformers 5 writes tie_word_embeddings = true for every T5; of T5 1.1, which is not tied, remains this key.
    if isinstance(model, TransformersConfig) and model.settings.get("scale_decoder_outputs") is False:
        model = replace(model, tied_embeddings="lm_head.weight" not in _entries(folder, []))
    return model, facts


def stored_tensors(folder: Path, model: ModelConfig) -> StoredTensors:
    """Where every tensor of the model is stored, and the copies of tied ones that the files have.

    Reads only headers. Raises one UserError that lists every file and tensor that is missing, damaged or unknown.
    """
    problems: list[str] = []
    found = _entries(folder, problems)
    layout, damaged = layout_of(model), bool(problems)
    if not layout.prefix and "embed_tokens.weight" in found:
        problems.append(
            'the names of the tensors do not start with "model.": the model was saved without its head;'
            " save the whole ...ForCausalLM"
        )
        raise _unusable(folder, problems)

    def take(name: str) -> tuple[Path, Entry] | None:
        return next((found.pop(spelling) for spelling in layout.spellings(name) if spelling in found), None)

    stored: StoredTensors = {}
    missing = []
    # Copies that a file has instead of what they are a copy of are taken for it.
    copies = {copy: place for copy in layout.copies if (place := take(layout.copies[copy].name))}
    lanes: dict[str, tuple[Path, Entry]] = {}
    for ours, index, how in layout.pieces():
        name = key_of(ours, index)
        same = [copy for copy in copies if layout.copies[copy].of == name]
        place = lanes.get(how.name) or take(how.name) or (copies.pop(same[0]) if same else None)
        if place is None:
            missing.append(how.name)
            continue
        stored[name] = place
        lanes |= {} if how.lane is None else {how.name: place}
        stored |= {copy: copies[copy] for copy in same if copy in copies}
        for file, entry in (stored[one] for one in (name, *same) if one in stored):
            if entry.shape != how.shape_there:
                shapes = f"has shape {list(entry.shape)}, but the model needs {list(how.shape_there)}"
                problems.append(f"{entry.name} in {file.name} {shapes}")
    if missing and not damaged:  # otherwise they may be in the damaged files
        problems.append(f"missing: {some(missing)}")
    problems += [
        f"{entry.name} in {file.name} has type {entry.dtype}; weights must be {listed(DTYPE_BYTES, last='or')}"
        for file, entry in stored.values()
        if entry.dtype not in DTYPE_BYTES
    ]
    unknown = [
        name for name, (_, entry) in found.items() if not layout.ignores(name, entry.shape) and 0 not in entry.shape
    ]
    if unknown:
        problems.append(f"the model has no place for {some(unknown)}")
    if problems:
        raise _unusable(folder, problems)
    return stored


def _entries(folder: Path, problems: list[str]) -> dict[str, tuple[Path, Entry]]:
    """Name in the files -> file and entry. Adds a line to problems for each file or name that is not sound."""
    found: dict[str, tuple[Path, Entry]] = {}
    for file in _weight_files(folder, problems):
        try:
            entries = read_header(file)
        except TemporaryError:
            raise
        except UserError as error:
            problems.append(str(error))
            continue
        problems += [f"{e.name} is in {found[e.name][0].name} and in {file.name}" for e in entries if e.name in found]
        found |= {entry.name: (file, entry) for entry in entries}
    return found


def _unusable(folder: Path, problems: Sequence[str], most: int = 30) -> UserError:
    more = [f"and {len(problems) - most:,} more"] if len(problems) > most else []
    return UserError("\n  ".join([f"the weights in {folder} cannot be used:", *problems[:most], *more]))


def read_header(file: Path) -> list[Entry]:
    """The tensors of a safetensors file. Raises UserError if it is missing, truncated or not a safetensors file."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait forever
            raise UserError(f"{file.name} is not a file")
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if start == b"version ":
                raise UserError(f"{file.name} is a Git LFS pointer, not the weights; download them with `git lfs pull`")
            if length > MAX_HEADER_BYTES and 8 + length <= size:
                raise UserError(f"{file.name} is not a safetensors file")
            if 8 + length > size:
                raise UserError(f"{file.name} is a truncated safetensors file ({size} bytes); download it again")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = [Entry(name, about["dtype"], tuple(about["shape"])) for name, about in header.items()]
        end = 8 + length + max((about["data_offsets"][1] for about in header.values()), default=0)
    except FileNotFoundError:
        raise UserError(f"{file.name} is missing; download it again") from None
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError(f"{file.name} is not a safetensors file") from None
    if size != end:
        raise UserError(f"{file.name} has {size} bytes, but its header says {end}; download it again")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # checks everything else, as loading does
            return entries
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file.name} is damaged ({error}); download it again") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json_object(read_whole(file, most=MAX_HEADER_BYTES).decode())
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    except ValueError as error:
        raise UserError(f"{file} is not JSON that can be used: {error}") from None


def _weight_files(folder: Path, problems: list[str]) -> list[Path]:
    """The safetensors files that belong to the model, in a fixed order."""
    there = names_in(folder)
    if SINGLE in there:  # transformers prefers it to an index too
        return [folder / SINGLE]
    if INDEX in there:
        names = _read_json(folder / INDEX).get("weight_map")
        if isinstance(names, dict) and names and all(isinstance(name, str) for name in names.values()):
            files = sorted(set(names.values()))
            outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
            if outside:  # names alone: in the hub's cache, the files themselves are links to another folder
                problems.append(f"{INDEX} names files outside of the folder: {some(outside)}; download it again")
            return [folder / name for name in files if name not in outside]
        problems.append(f"{INDEX} has no weight_map")
        return []
    others = [name for kind in (".safetensors", ".bin", ".pth") for name in there if name.endswith(kind)]
    instead = f"; the folder has {some(others)}" if others else ""
    if others and not any(name.endswith(".safetensors") for name in others):
        instead += ". Loading such files can run code, so they are never read; let transformers write safetensors:"
        classes = _read_json(folder / HF_CONFIG).get("architectures")
        name = classes[0] if isinstance(classes, list) and classes else "AutoModelForCausalLM"
        instead += f' {name}.from_pretrained("{folder}").save_pretrained("{folder.name}-safetensors")'
    problems.append(f"{SINGLE} and {INDEX} are missing{instead}")
    return []


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, renamed to `folder` if the block succeeds and deleted if it fails.

    Raises UserError if `folder` is not empty and replace is False, if another process is writing it, or if it cannot be
    written.
    """
    real = Path(os.path.realpath(folder))  # a link stays a link: its target is written, on the target's disk
    partial, old = (real.parent / f".{word}-{real.name}" for word in ("partial", "old"))
    try:
        with written_alone(real):
            if real.exists() and not (real.is_dir() and (replace or not any(real.iterdir()))):
                raise UserError(f"{folder} already exists; give another name, or delete it")
            if os.path.ismount(real):
                raise UserError(f"{folder} is a mount point, which cannot be renamed; give a folder in it")
            for left_over in (partial, old):  # of a killed process
                if left_over.exists():
                    shutil.rmtree(left_over)
            partial.mkdir(parents=True)
            try:
                yield partial
                if replace and real.is_dir() and any(real.iterdir()):
                    os.rename(real, old)
                try:
                    os.rename(partial, real)  # also over an empty folder
                except OSError:
                    if old.exists():
                        os.rename(old, real)
                    raise
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        kind = TemporaryError if may_pass(error) else UserError
        raise kind(f"{folder} cannot be written: {error}") from error


def write_description(folder: Path, description: Description, *, dtype: str) -> None:
    """Write everything but the weights. dtype: torch's name of their type, such as "float32"."""
    from recipes.data.text.beginning import added_beginning

    facts, companions = description.facts, dict(description.companions)
    model = description.model
    # The pairs of an encoder-decoder model are tokenized as by its own tokenizer.
    begins = facts.bos_token_id is not None or description.begins or model.is_encoder_decoder
    if isinstance(model, TransformersConfig):
        config = config_to_transformers(model, facts, dtype=dtype)
    else:
        config = config_to_hf(model, facts, dtype=dtype)
    contents = _generated(description) | {HF_CONFIG: config}
    if kept := companions.pop(TOKENIZER_CONFIG, None):
        ours = contents[TOKENIZER_CONFIG]
        if added_beginning(json.loads(description.tokenizer)) is None:
            ours.pop("bos_token", None)  # nothing adds one, and lm-eval takes what the original names
        contents[TOKENIZER_CONFIG] = exported_tokenizer_config(json.loads(kept), ours, begins=begins)
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()} | companions
    # A model trained without a beginning token must not get one.
    texts[TOKENIZER] = without_mark(description.tokenizer if begins else without_added_tokens(description.tokenizer))
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())


def without_generated(companions: Mapping[str, str], description: Description) -> dict[str, str]:
    """The companions but those that write_description() would write anyway."""
    ours = _generated(description)
    return {name: text for name, text in companions.items() if name not in ours or json.loads(text) != ours[name]}


def _generated(description: Description) -> dict[str, Any]:
    """The companions of a model that has none of its own."""
    facts = description.facts
    ids = {name: getattr(facts, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in ids.items()}
    if isinstance(description.model, TransformersConfig):  # its config.json may say more about generation
        generation = {}
    else:
        generation = {
            GENERATION_CONFIG: {f"{name}_token_id": value for name, value in given.items() if value is not None}
        }
    firsts = {name: value[0] if isinstance(value, tuple) else value for name, value in ids.items()}
    names = token_names(description.tokenizer)
    return generation | {
        TOKENIZER_CONFIG: {
            "tokenizer_class": OUR_CLASS,
            "model_max_length": facts.context_length,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": names[first] for name, first in firsts.items() if first in names},
        },
    }


def plan_files(entries: Sequence[Entry], *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, list[Entry]]:
    """File name -> its tensors. A file holds at most max_bytes, or one larger tensor."""
    groups: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not groups or size + entry.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    for group in groups:
        group.sort(key=lambda entry: -DTYPE_BYTES[entry.dtype])  # aligns every tensor to its element size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index of several files; a single file has none."""
    if list(files) == [SINGLE]:
        return
    index = {
        "metadata": {"total_size": sum(entry.bytes for entries in files.values() for entry in entries)},
        "weight_map": {entry.name: file for file, entries in files.items() for entry in entries},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
