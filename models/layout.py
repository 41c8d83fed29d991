"""How files of weights store the tensors of a model: their names there, shapes, and what else such files may hold.

Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from models.config import ModelConfig
from models.hf import hf_name, parameter_shapes
from models.transformers_config import TransformersConfig

FREQUENCIES = r"rotary_emb\.inv_freq$"
"""Old files hold the rotary frequencies, which follow from config.json."""
MASKS = r"(attn|attention)\.(masked_)?bias$"
"""Old files hold the causal mask, (1, 1, T, T), and the value of what it hides, (); transformers ignores both."""


class Stored(NamedTuple):
    """How a file stores one of our tensors."""

    name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    """Its shape in our layout."""
    transposed: bool = False
    """Whether files store it as (in, out)."""


class Copy(NamedTuple):
    """Another name of a tied parameter. Some programs write both."""

    name: str
    """This name, in the file."""
    of: str
    """Our name of the parameter."""


@dataclass(frozen=True)
class Layout:
    """What the files of a model hold."""

    tensors: Mapping[str, Stored]
    """Our name -> every parameter, and every buffer that is saved, in the order of the model."""
    copies: Mapping[str, Copy]
    """Our other name of a tied parameter -> how files may have it."""
    prefix: str = ""
    """Prefix of the names in files; missing where the model was saved without its head."""
    ignored: tuple[str, ...] = (FREQUENCIES,)
    """Patterns of names in files whose values follow from config.json."""

    def ignores(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether files may hold this tensor although the model has no place for it."""
        mask = shape in ((), (1,)) or (len(shape) == 4 and shape == (1, 1, shape[2], shape[2]))
        return any(re.search(pattern, name) for pattern in (*self.ignored, *[MASKS] * mask))

    def spellings(self, name: str) -> Iterator[str]:
        """The names that a tensor may have in files: this one, then the one with the prefix missing or added."""
        yield name
        if self.prefix:
            dotted = f"{self.prefix}."
            yield name.removeprefix(dotted) if name.startswith(dotted) else dotted + name


def layout_of(model: ModelConfig) -> Layout:
    """The layout of our decoder's files, or of those of transformers."""
    if isinstance(model, TransformersConfig):
        from models.transformers import stored_layout

        return stored_layout(replace(model, name="", weights="", config="", dropout=False))  # remembered by the rest
    tensors = {name: Stored(hf_name(name, norms=model.norms), shape) for name, shape in parameter_shapes(model)}
    copies = {"lm_head.weight": Copy(hf_name("lm_head.weight"), of="embedding.weight")}
    return Layout(tensors, copies if model.tied_embeddings else {})
