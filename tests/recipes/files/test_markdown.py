"""A page keeps all that is not between the marks."""

import pytest

from recipes.files.markdown import between


def test_only_what_is_between_the_marks_changes() -> None:
    assert between("a<b>old</b>c<b>", "<b>", "</b>", "new") == "a<b>new</b>c<b>"


@pytest.mark.parametrize("text", ["", "<b>", "</b>", "</b><b>"])
def test_page_without_both_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the page has lost '</?b>'"):
        between(text, "<b>", "</b>", "new")
