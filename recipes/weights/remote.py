"""Weights at a server: a Hugging Face folder, a checkpoint or a run folder. Imports no torch."""

import re
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.files import verify
from recipes.checkpoint.manifest import MANIFEST, Damage
from recipes.files.local_copy import local_copy
from recipes.files.remote import find

HF_CONFIG = "config.json"
HF_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def fetched(address: str) -> Path:
    """A copy on this disk of the weights at an address, of a run those of its newest checkpoint.

    Every byte of a checkpoint is compared with its checksum when it is copied. Raises UserError.
    """
    place = address.rstrip("/")
    names = {file.address.removeprefix(f"{place}/") for file in find(place)}
    if HF_CONFIG in names:
        return local_copy(place, only=HF_FILES)
    steps = (re.fullmatch(rf"(?:(?:checkpoints/)?step-([0-9]+)/)?{re.escape(MANIFEST)}", name) for name in names)
    found = {int(match[1] or 0): match[0].removesuffix(MANIFEST).rstrip("/") for match in steps if match}
    if not found:
        raise UserError(
            f"{address} holds no weights: it is neither a Hugging Face folder ({HF_CONFIG} and safetensors), nor a"
            f" checkpoint ({MANIFEST}), nor a run folder with a checkpoint"
        )
    return local_copy(f"{place}/{found[max(found)]}".rstrip("/"), deep=True, check=_require_intact)


def _require_intact(folder: Path) -> None:
    try:
        verify(folder)
    except Damage as damage:
        raise UserError(f"{damage}; it was copied like this") from None
