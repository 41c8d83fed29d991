"""The [validation] section. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out documents."""

    every: Annotated[int, Ge(0)] = 0
    """Validate every this many steps, and after the last; 0 = never."""
    batches: Annotated[int, Ge(1)] = 8
    """Global batches per validation, always the same ones."""
    sample_tokens: Annotated[int, Ge(0)] = 0
    """Tokens of sample text to generate at the end of the run; 0 = none."""
