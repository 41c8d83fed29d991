"""Where a text ends that must not hold some others."""

import pytest

from recipes.evaluation.completions import before_one_of


@pytest.mark.parametrize(
    ("stops", "pieces", "before", "found"),
    [
        (["\n"], ["one", " two\nthree", "four"], "one two", True),
        (["abc", "cd"], ["xa", "b", "cd"], "x", True),  # the one that begins first
        (["aab"], ["aa", "ab!"], "a", True),
        (["abc"], ["ab", "x"], "abx", False),  # held back until it is clear
        (["abc", ""], ["ab"], "ab", False),
        ([], ["ab", "c"], "abc", False),
    ],
)
def test_a_text_ends_before_the_first_stop_however_it_is_cut(
    stops: list[str], pieces: list[str], before: str, found: bool
) -> None:
    for parts in (pieces, ["".join(pieces)], [*"".join(pieces)]):
        ended, texts = before_one_of(stops, iter(parts)), []
        while True:
            try:
                texts.append(next(ended))
            except StopIteration as end:
                assert ("".join(texts), end.value) == (before, found)
                break
