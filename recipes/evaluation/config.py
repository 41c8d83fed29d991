"""What a recipe says of validation. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out documents."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between validations, and one at the end; 0 = none."""
    batches: Annotated[int, Ge(1)] = 8
    """Global batches per validation; always the same ones."""
    sample_tokens: Annotated[int, Ge(0)] = 0
    """Length of the continuation sampled at the end of the run; 0 = none."""
