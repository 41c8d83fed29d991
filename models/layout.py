"""How files of weights store the tensors of a model: their names there, shapes, and what else such files may hold.

Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Whether files store its last two axes as (in, out)."""
    parts: tuple[str, ...] = ()
    """The names of its parts along its first axis, if files store these instead."""
    lane: int | None = None
    """0 or 1: it is every second element along the last axis of the file's tensor, and another of ours is the rest."""

    @property
    def shape_there(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        *before, last = self._turned(self.shape)
        return (*before, last if self.lane is None else 2 * last)

    def box_there(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """A range of it -> the range in the file that has it, and maybe the other lane's. box: for each axis."""
        *before, last = self._turned(box)
        return (*before, last if self.lane is None else slice(2 * last.start, 2 * last.stop))

    def _turned(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes


def key_of(name: str, index: int | None) -> str:
    """What Layout.pieces() says of a tensor in files, as one name."""
    return name if index is None else f"{name}[{index}]"


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

    def pieces(self) -> Iterator[tuple[str, int | None, Stored]]:
        """(our name, index along the first axis or None, how it is stored) of each tensor in files."""
        for name, how in self.tensors.items():
            if not how.parts:
                yield name, None, how
            for index, part in enumerate(how.parts):
                yield name, index, Stored(part, how.shape[1:], how.transposed)

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
