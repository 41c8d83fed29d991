"""The garbage collector does not run by itself during a step."""

import gc

import pytest

from recipes.training.step import without_garbage_collection


def test_garbage_is_collected_only_on_request() -> None:
    collections: list[str] = []

    def note(phase: str, about: dict[str, int]) -> None:
        collections.append(phase)

    assert gc.isenabled()
    with pytest.raises(ValueError, match="on the way"), without_garbage_collection():
        gc.callbacks.append(note)
        try:
            for _ in range(10_000):
                cycle: list[object] = []
                cycle.append(cycle)
            assert collections == []
            assert gc.collect() >= 9_999
        finally:
            gc.callbacks.remove(note)
        raise ValueError("on the way out")
    assert gc.isenabled() and gc.get_freeze_count() == 0
