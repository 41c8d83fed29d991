"""What the metrics writer writes, and where."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.metrics.config import MetricsConfig
from recipes.metrics.writer import MetricsWriter
from tests.full_disk import files_of_at_most

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def writer(folder: Path, *, enabled: bool = True) -> MetricsWriter:
    return MetricsWriter(folder, MetricsConfig(), enabled=enabled, run_name="r", recipe={}, before={})


def rows(folder: Path) -> list[Any]:
    """The rows without their time."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row.pop("time")) for row in found)
    return found


def test_rows_are_appended_to_the_file(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 1, "loss": 2.5, "mfu": None})
    writer(tmp_path).write({"step": 2, "validation_loss": 2.25})
    assert rows(tmp_path) == [{"step": 1, "loss": 2.5, "mfu": None}, {"step": 2, "validation_loss": 2.25}]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 1e-3}]


def test_a_disabled_writer_touches_nothing(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 7})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    silent = MetricsWriter(tmp_path, MetricsConfig(wandb=True), enabled=False, run_name="r", recipe={}, before={})
    silent.sync()
    silent.write({"step": 8})
    silent.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# TensorBoard


def board(folder: Path, *, done: int, said: list[str]) -> MetricsWriter:
    recipe = {"model": {"layers": 2}, "stages": ()}
    before = {"step": done} if done else {}
    given: dict[str, Any] = {"run_name": "r", "before": before, "log": said.append}
    return MetricsWriter(folder, MetricsConfig(tensorboard=True), enabled=True, recipe=recipe, **given)


def seen(folder: Path) -> Any:
    """What TensorBoard itself reads."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    said: list[str] = []
    first = board(tmp_path, done=0, said=said)
    for step in range(1, 6):
        first.write({"step": step, "loss": 1.0 * step, "wall_seconds": {"save": 0.5}, "mfu": None, "skipped": True})
    first.sync()  # and is killed; the checkpoint was that of step 3
    second = board(tmp_path, done=3, said=said)
    second.write({"step": 4, "loss": 40.0, "grad_norm": float("nan")})
    second.write({"step": 4, "validation_loss/a": 3.0})
    second.close()
    found = seen(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert set(found.Tags()["scalars"]) == {"loss", "wall_seconds/save", "validation_loss/a"}
    [text] = found.Tensors("recipe/text_summary")[0].tensor_proto.string_val
    assert b"[model]\n    layers = 2" in text and said == []


def test_a_fault_of_tensorboard_turns_it_off_and_loses_no_row(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (tmp_path / "tensorboard").write_text("a file")
    said: list[str] = []
    metrics = board(tmp_path, done=0, said=said)
    metrics.write({"step": 1})
    metrics.sync()
    metrics.close()
    [line] = said
    assert line.startswith("TensorBoard: off until the next start (") and rows(tmp_path) == [{"step": 1}]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_of_tensorboard_is_one_sentence_and_not_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    said: list[str] = []
    metrics = board(tmp_path, done=0, said=said)
    with files_of_at_most(2000):
        for step in range(1, 200):
            metrics.write({"step": step, **{f"value {number}": 1.0 for number in range(20)}})
        metrics.sync()
        metrics.close()
    assert len([line for line in said if line.startswith("TensorBoard: off until the next start (")]) == 1
    assert capfd.readouterr().err == ""


# Weights & Biases

TRACKED = """
import sys
from pathlib import Path
from recipes.metrics.config import MetricsConfig
from recipes.metrics.writer import MetricsWriter
config = MetricsConfig(wandb=True, wandb_project="p")
facts = {"recipe": {"run": {"steps": 3}}, "run_name": "a run of ours"}
writer = MetricsWriter(Path(sys.argv[1]), config, enabled=True, before={}, **facts)
writer.write({"step": 1, "loss": 3.0, "mfu": None})
writer.write({"step": 1, "validation_loss": 3.5})
state = writer.state()
writer.close()
writer = MetricsWriter(Path(sys.argv[1]), config, enabled=True, before=state, **facts)
writer.write({"step": 2, "loss": 2.0})
assert writer.state() == state and len(state["wandb_id"]) > 4
writer.close()
print(state["wandb_id"])
"""


@pytest.mark.slow
def test_wandb_without_a_key_stays_offline_and_continues_the_same_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Any request of wandb, to its own server or to another, would arrive here.
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", TRACKED, tmp_path],
            cwd=ROOT,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path / "home"),
                "WANDB_BASE_URL": address,
                "HTTPS_PROXY": address,
                "HTTP_PROXY": address,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # no connection was attempted
            server.accept()
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr and "Traceback" not in done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2]
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    name = done.stdout.split()[-1]
    assert {file.name for file in files} == {f"run-{name}.wandb"}  # one run, before and after resuming
    recorded = b"".join(file.read_bytes() for file in files)
    for text in (b"a run of ours", b"validation_loss", b"loss", b"mfu"):
        assert text in recorded
