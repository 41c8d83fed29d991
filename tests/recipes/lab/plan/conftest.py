"""Plans are the same on every machine."""

import pytest


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU decides; and a closed pipe does not end pytest, as it ends the command."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("recipes.lab.plan.plan.devices", lambda: ())
