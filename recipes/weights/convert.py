"""Moves weights into models, checkpoints, Hugging Face folders (with a model card) and the hub: one tensor at a time,
so hosts need little memory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.hf import beyond_hf, layout_of
from models.layout import Layout, Stored, key_of
from parallel.errors import UserError
from parallel.fsdp import plain_name
from parallel.state_check import not_finite
from recipes.checkpoint.config import VALIDATION
from recipes.checkpoint.files import read_manifest, safetensors_header
from recipes.checkpoint.parameters import StoredParameters, write_parameters
from recipes.checkpoint.storage import CODES, DTYPES
from recipes.data.history import consumed_tokens, from_json
from recipes.data.text.hub import silence_library
from recipes.files.border import reason
from recipes.files.layout import RECIPE, REPORT
from recipes.files.markdown import markdown_table
from recipes.files.reading import read_text, toml_table
from recipes.weights import hf_folder
from recipes.weights.description import Description, checkpoint_files
from recipes.weights.hf_folder import DTYPE_BYTES, Entry, StoredTensors
from recipes.weights.locate import Weights, find_weights

Box = tuple[slice, ...]
"""A range for each axis of a tensor."""
WHOLE: Box = (slice(None),)
PIECE = 16_000_000
"""Number of elements to convert and write at a time."""
CARD = "README.md"


def load_weights(model: nn.Module, weights: Weights) -> None:
    """Fill a model, plain or sharded, with weights of its shape; each process reads only its own part.

    Where the model has experts and the weights have none, each begins as their feed-forward, and routers stay as they
    are (model.upcycle).

    The model must be on its device, with its final parameter types. Raises UserError with everything that is missing
    or damaged, before it reads any tensor.
    """
    tensors = {plain_name(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if not weights.model.experts and any(".feed_forward.experts." in name for name in tensors):
        _upcycle(tensors, weights)
        return
    if weights.is_checkpoint:
        StoredParameters(weights.path, weights.model).read_into(model)
        return
    stored, layout = weights.stored_tensors, layout_of(weights.model)
    for name, index, how in layout.pieces():
        if name in tensors:  # a stage of a pipeline has some of them
            _fill(tensors[name], *stored[key_of(name, index)], how, index)
    for name, copy in layout.copies.items():
        if name in stored and copy.of in tensors:
            _require_equal(stored[copy.of], stored[name], box=_own_box(tensors[copy.of]))


@torch.no_grad()
def _upcycle(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Fill each expert with a dense feed-forward (Komatsuzaki et al. 2022), and all else but routers as it is.

    tensors: by their names in the plain model.
    """
    read = StoredParameters(weights.path, weights.model).read if weights.is_checkpoint else None
    read = read or partial(_read_stored, weights.stored_tensors, layout_of(weights.model))
    for name, tensor in tensors.items():
        if not name.startswith("routers."):
            values = read(dense := re.sub(r"\.experts\.(\w+)$", r".\1.weight", name))
            own, box = tensor.to_local() if isinstance(tensor, DTensor) else tensor, _own_box(tensor)
            own.copy_(values[box] if dense == name else values[box[1:] or ...].expand_as(own))


@torch.no_grad()
def _fill(tensor: Tensor, file: Path, entry: Entry, how: Stored, index: int | None = None) -> None:
    """Read the part of one tensor, or of what it has at this index, that belongs to this process."""
    box = _own_box(tensor)
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if index is not None:
        first, *rest = box
        if index not in range(*first.indices(len(tensor))):
            return
        own, box = own[index - (first.start or 0)], tuple(rest) or WHOLE
    values = _ours(_read(file, entry, how.box_there(box)), how)
    assert values.shape == own.shape, f"{entry.name}: {values.shape} for {own.shape}"
    own.copy_(values)


def _own_box(parameter: Tensor) -> Box:
    """The part of a parameter that this process holds. Tensor parallelism and FSDP both leave neighbouring rows."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, length) for length in parameter.shape)
    lengths, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(begin, begin + length) for begin, length in zip(first, lengths, strict=True))


def _require_equal(one: tuple[Path, Entry], other: tuple[Path, Entry], *, box: Box) -> None:
    if not torch.equal(_read(*one, box), _read(*other, box)):
        raise UserError(
            f"{one[0].parent} says tie_word_embeddings, but its {other[1].name} differs from its {one[1].name}: write"
            " tie_word_embeddings = false into its config.json, or delete the wrong one of the two"
        )


def _ours(values: Tensor, how: Stored) -> Tensor:
    """Our tensor from that of a file."""
    values = values if how.lane is None else values[..., how.lane :: 2]
    return values.mT if how.transposed else values


def _theirs(several: Sequence[tuple[Tensor, Stored]]) -> Tensor:
    """The tensor of a file from ours: one, or one for each lane."""
    values = [values.mT if how.transposed else values for values, how in several]
    return values[0] if len(values) == 1 else torch.stack(values, dim=-1).flatten(-2)


def _read(file: Path, entry: Entry, box: Box = WHOLE) -> Tensor:
    """A part of a tensor. Opens the file each time, or what was read would stay mapped in memory."""
    from safetensors import safe_open  # not needed for a checkpoint of ours

    with safe_open(file, framework="pt") as tensors:
        values = tensors.get_slice(entry.name)[box] if entry.shape else tensors.get_tensor(entry.name)
    require_finite({f"{entry.name} in {file}": values})
    return cast(Tensor, values)


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError if weights from outside are NaN or infinite. tensors: by what a message calls them."""
    floating = {name: values for name, values in tensors.items() if values.is_floating_point()}
    if names := not_finite(floating) if floating else []:
        raise UserError(f"{names[0]} has NaN or infinite values: the weights cannot be used")


def _read_stored(stored: StoredTensors, layout: Layout, name: str) -> Tensor:
    """The values of one of our tensors, from the files of a Hugging Face folder."""
    how = layout.tensors[name]
    if how.parts:
        return torch.stack([_read(*stored[key_of(name, index)]) for index in range(len(how.parts))])
    return _ours(_read(*stored[name]), how)


def import_folder(folder: Path, checkpoint: Path) -> None:
    """Write the weights of a Hugging Face folder, unchanged, as a checkpoint. Leaves no files after a UserError."""
    weights = find_weights(folder)
    if weights.is_checkpoint:
        raise UserError(f"{folder} holds a Shardwright checkpoint; import reads Hugging Face folders")
    stored, layout = weights.stored_tensors, layout_of(weights.model)
    for name, copy in layout.copies.items():
        if name in stored:
            _require_equal(stored[copy.of], stored[name], box=WHOLE)
    _ = weights.tokenizer  # raises UserError if our programs cannot use it
    description = replace(weights.description, facts=weights.facts_of_text, begins=False)
    with hf_folder.new_folder(checkpoint) as place:
        read = partial(_read_stored, stored, layout)
        types: dict[str, torch.dtype] = {}
        for name, index, _ in layout.pieces():
            dtype = DTYPES[stored[key_of(name, index)][1].dtype]
            types[name] = torch.promote_types(types.get(name, dtype), dtype)
        shapes = {name: (how.shape, types[name]) for name, how in layout.tensors.items()}
        write_parameters(place, shapes, read, files=checkpoint_files(description))


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int = hf_folder.MAX_FILE_BYTES,
    replace: bool = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder. Leaves no files after a UserError.

    dtype: None = unchanged. max_bytes: size limit of one file. replace: an earlier folder may be there.
    """
    weights = find_weights(checkpoint)
    if not weights.is_checkpoint:
        raise UserError(f"{checkpoint} is a Hugging Face folder already")
    parameters = StoredParameters(weights.path, weights.model)
    if problem := beyond_hf(weights.model):
        raise UserError(f"the model cannot be a Hugging Face folder: {problem}; it stays in its checkpoints")
    stored_as: dict[Entry, list[tuple[str, int | None, Stored]]] = {}  # several where these are lanes of it
    for name, index, how in layout_of(weights.model).pieces():
        code = CODES[dtype if dtype and not _is_bias(name) else parameters.dtype(name)]
        stored_as.setdefault(Entry(how.name, code, how.shape_there), []).append((name, index, how))
    files = hf_folder.plan_files([*stored_as], max_bytes=max_bytes)
    types = {entry.dtype for entry, [(name, *_), *_] in stored_as.items() if not _is_bias(name)}
    widest = DTYPES[max(types, key=lambda code: DTYPE_BYTES[code])]
    description = with_card(weights.description, weights.path)
    read = lru_cache(maxsize=1)(parameters.read)  # once for all experts of a layer
    with hf_folder.new_folder(folder, replace=replace) as place:
        for file, entries in files.items():
            with (place / file).open("wb") as stream:
                stream.write(safetensors_header((one.name, one.dtype, one.shape, one.bytes) for one in entries))
                for entry in entries:
                    own = [(read(name)[... if index is None else index], how) for name, index, how in stored_as[entry]]
                    for piece in _theirs(own).contiguous().flatten().split(PIECE):
                        stream.write(piece.cpu().to(DTYPES[entry.dtype]).view(torch.uint8).numpy())
        hf_folder.write_index(place, files)
        hf_folder.write_description(place, description, dtype=str(widest).removeprefix("torch."))


def _is_bias(name: str) -> bool:
    """Whether this is a router's, which stays in float32: in bfloat16, steps of it would be lost."""
    return name.startswith("routers.") and name.endswith(".bias")


def with_card(description: Description, checkpoint: Path) -> Description:
    """The description with a model card among the files that accompany its weights; without one if the checkpoint is
    not from a run. Raises UserError."""
    manifest = read_manifest(checkpoint)
    if manifest.step is None:
        return description
    run = checkpoint.absolute().parents[1]
    file = run / RECIPE
    recipe = read_text(file) if file.is_file() else ""
    progress, name = manifest.state["progress"], run.name if recipe else checkpoint.name
    model, task = description.model, "text2text" if description.model.is_encoder_decoder else "text"
    lines = ["---", "library_name: transformers", "license: unknown", "tags:", "- shardwright"]
    lines += [f"pipeline_tag: {task}-generation", "---"]
    try:
        made_of = dict(toml_table(recipe)["model"]) if recipe else {}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({reason(error)}); bring back the one that the run wrote") from None
    lines += ["", f"# {name}", "", f"A language model with {model.parameters}. Trained with Shardwright"]
    lines += [f"for {manifest.step:,} steps on {progress['tokens']:,} tokens. The licence is yours to fill in."]
    if made_of.get("upcycle"):
        dense = made_of.get("weights")
        lines.append(f"Upcycled: each expert began as the feed-forward of the dense model in `{dense}`.")
    if not model.is_encoder_decoder:
        call = 'pipeline("text-generation", "FOLDER, or its name on the hub")("Once upon a time")'
        lines += ["", "## Usage", "", "    from transformers import pipeline", f"    print({call})"]
    lines += ["", "## Data", ""]
    try:
        consumed = consumed_tokens(from_json(progress.get("history", [])))
    except ValueError as error:
        raise UserError(f"{checkpoint} does not say what it was trained on: {error}") from None
    lines += markdown_table(["source", "tokens"], [(source, f"{count:,}") for source, count in consumed.items()])
    if scores := progress.get(VALIDATION):
        rows = [(key, f"{value:.4f}") for key, value in scores.items()]
        lines += ["", "## Evaluation", "", "Losses are in nats per token.", "", *markdown_table(["on", "value"], rows)]
    if (report := run / Path(REPORT).with_suffix(".md")).is_file():
        lines += ["", "".join(read_text(report).partition("## Curve\n")[1:]).rstrip()]
    if recipe:
        lines += ["", "## Recipe", "", "```toml", recipe.rstrip(), "```"]
    return replace(description, companions={**description.companions, CARD: "\n".join(lines) + "\n"})


def upload_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload a Hugging Face folder as the model OWNER/MODEL, which is created if it is missing, and keeps its
    visibility if it is there. Returns its address. Raises UserError, also if the hub cannot be reached or refuses."""
    weights = find_weights(folder)
    if weights.is_checkpoint:
        raise UserError(f"{folder} is a checkpoint; export it first: convert_hf.py export {folder} NEW_FOLDER")
    _ = weights.stored_tensors  # whole, or else refused
    if name.count("/") != 1:
        raise UserError(f"{name!r} is no name on the hub: it must be OWNER/MODEL")
    from huggingface_hub import HfApi

    silence_library()
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # any error of whichever network library is in use
        raise UserError(
            f"{folder} was not uploaded: {reason(error)}; log in with 'hf auth login' on a machine that reaches the"
            " hub, and run the same command again"
        ) from error
    return address
