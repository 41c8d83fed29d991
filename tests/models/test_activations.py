"""The bytes that a block keeps, against the counts of the code that torch.compile generates."""

import pytest

from models.activations import Kept, Widths, saved_per_token
from models.sizes import SIZES
from tests.generated_code import rows_of_generated_code

ROWS = [
    (row["block"].partition(",")[0], row["float8"], row["recompute"], row["saved kB"], row["weights kB"])
    for row in rows_of_generated_code()
]


def test_the_file_has_rows_of_several_models() -> None:
    assert len({row[0] for row in ROWS}) >= 4 and len(ROWS) >= 48


@pytest.mark.parametrize(("model", "float8", "mode", "saved", "weights"), sorted({*ROWS}))
def test_a_block_keeps_what_its_generated_code_keeps(
    model: str, float8: str, mode: str, saved: str, weights: str
) -> None:
    kept = Kept(mode=mode, float8=float8 != "none")  # type: ignore[arg-type]
    assert f"{saved_per_token(Widths.of(SIZES[model]), kept) / 1e3:.2f}" == saved
    assert weights == "0", "recipes/plan/memory.py counts no weights that are kept beside the gathered ones"
