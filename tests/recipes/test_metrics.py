"""What is measured, against numbers worked out by hand, and where it is written."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.documents import Documents
from models.sizes import SIZES
from parallel.dist import start, stop
from recipes.metrics import throughput as metrics
from recipes.metrics.hardware import peak_memory_gib
from recipes.metrics.throughput import PACKAGES, AttentionLength, Throughput
from recipes.metrics.writer import MetricsWriter
from recipes.training.environment import environment
from tests.processes import run_processes

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


# Rates

# SmolLM3 3B by hand. The weights of its matrices: q and o, k and v, three of the feed-forward; then the projection
# onto the vocabulary. Six operations for each; twelve for each layer, width of all heads and position in attention.
SMOLLM3_MATRICES = 36 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 11008) + 128256 * 2048
SMOLLM3_FULL = 6 * SMOLLM3_MATRICES + 12 * 36 * 2048 * 8192
SMOLLM3_CAUSAL = 6 * SMOLLM3_MATRICES + 6 * 36 * 2048 * 8192
H100_PEAK = 989.4e12


def throughput(monkeypatch: pytest.MonkeyPatch, device_name: str) -> Throughput:
    """Of SmolLM3 3B, a million tokens in 8192-token sequences a step, on eight devices of that name."""
    monkeypatch.setattr(metrics, "device_name", lambda device: device_name)
    return Throughput(SIZES["smollm3_3b"], tokens_per_step=2**20, sequence_length=8192, devices=8, device=CPU)


def test_mfu_in_both_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert (found.peak, found.flops, found.flops_full) == (H100_PEAK, SMOLLM3_CAUSAL, SMOLLM3_FULL)
    assert found.row(16.0) == pytest.approx(
        {
            "tokens_per_second": 65536.0,
            "tokens_per_second_per_device": 8192.0,
            "tflops_per_device": 180.83,  # 8192 tokens/s x 22.0736 GFLOP
            "mfu": 0.18276,  # 180.83 / 989.4
            "mfu_full": 0.21277,  # 8192 tokens/s x 25.6975 GFLOP / 989.4 TFLOP/s
        },
        rel=1e-4,
    )


def test_the_yardstick_is_the_bf16_peak_also_where_float8_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    seconds_at_the_peak = 2**20 / 8 * SMOLLM3_CAUSAL / H100_PEAK
    assert found.row(seconds_at_the_peak)["mfu"] == pytest.approx(1.0)
    assert found.row(seconds_at_the_peak / 1.4)["mfu"] == pytest.approx(1.4)


def test_attention_inside_documents_counts_as_many_flops_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = throughput(monkeypatch, "NVIDIA H100 80GB HBM3")
    row = found.row(16.0, attention_length=512.5)
    assert row["attention_length"] == 512.5
    causal, full = (6 * SMOLLM3_MATRICES + factor * 36 * 2048 * 512.5 for factor in (6, 12))
    assert row["tflops_per_device"] == pytest.approx(8192 * causal / 1e12)
    assert (row["mfu"], row["mfu_full"]) == pytest.approx((8192 * causal / H100_PEAK, 8192 * full / H100_PEAK))
    assert row["tokens_per_second"] == found.row(16.0)["tokens_per_second"]


def attention_lengths() -> list[float | None]:
    """At three logged steps: documents of rank + 1 tokens since the last one, then of rank + 3, then none."""
    world = start("cpu", seed=0)
    found, lengths = AttentionLength(CPU), []
    for length in (world.rank + 1, world.rank + 3):
        tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
        tokens[:, length - 1 :: length] = 0
        documents = Documents.of(tokens, end_of_document=0)
        found.count([documents, documents])
        found.count([documents])
        lengths.append(found.take())
    lengths.append(found.take())
    stop()
    return lengths


def test_attention_length_is_the_mean_over_all_processes_since_the_last_logged_step() -> None:
    assert run_processes(2, attention_lengths) == [[1.5, 3.5, None]] * 2


def test_no_mfu_where_the_peak_is_unknown() -> None:
    found = Throughput(SIZES["smollm3_3b"], tokens_per_step=1000, sequence_length=8192, devices=2, device=CPU)
    assert (found.device_name, found.peak) == ("cpu", None)
    assert found.row(0.5) == {
        "tokens_per_second": 2000.0,
        "tokens_per_second_per_device": 1000.0,
        "tflops_per_device": None,
        "mfu": None,
        "mfu_full": None,
    }


def test_peak_memory_is_in_gib() -> None:
    block = torch.ones(2**28, dtype=torch.uint8)  # a quarter of one
    del block
    assert 0.25 < peak_memory_gib(CPU) < 64


# metrics.jsonl


def writer(folder: Path, *, enabled: bool = True) -> MetricsWriter:
    return MetricsWriter(folder, enabled=enabled, wandb_project=None, run_name="r", recipe={}, before={})


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_appended(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 1, "loss": 2.5, "mfu": None})
    writer(tmp_path).write({"step": 2, "validation_loss": 2.25})
    assert rows(tmp_path) == [{"step": 1, "loss": 2.5, "mfu": None}, {"step": 2, "validation_loss": 2.25}]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 1e-3}]


def test_other_ranks_touch_nothing(tmp_path: Path) -> None:
    writer(tmp_path).write({"step": 7})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    silent = MetricsWriter(tmp_path, enabled=False, wandb_project="p", run_name="r", recipe={}, before={})
    silent.sync()
    silent.write({"step": 8})
    silent.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# Weights & Biases

TRACKED = """
import sys
from pathlib import Path
from recipes.metrics.writer import MetricsWriter
facts = {"recipe": {"run": {"steps": 3}}, "run_name": "a run of ours"}
writer = MetricsWriter(Path(sys.argv[1]), enabled=True, wandb_project="p", before={}, **facts)
writer.write({"step": 1, "loss": 3.0, "mfu": None})
writer.write({"step": 1, "validation_loss": 3.5})
state = writer.state()
writer.close()
writer = MetricsWriter(Path(sys.argv[1]), enabled=True, wandb_project="p", before=state, **facts)
writer.write({"step": 2, "loss": 2.0})
assert writer.state() == state and len(state["wandb_id"]) > 4
writer.close()
print(state["wandb_id"])
"""


def test_wandb_without_a_key_stays_offline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Whatever wandb would ask for, of its own server or of another, would come here.
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
            timeout=120,
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody knocked
            server.accept()
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr and "Traceback" not in done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2]
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    name = done.stdout.split()[-1]
    assert {file.name for file in files} == {f"run-{name}.wandb"}  # one run, before and after it went on
    recorded = b"".join(file.read_bytes() for file in files)
    for text in (b"a run of ours", b"validation_loss", b"loss", b"mfu"):
        assert text in recorded


# environment.json


def test_environment_names_what_made_the_numbers() -> None:
    found = environment(world_size=3, device=CPU)
    assert list(found) == [
        "git_commit",
        "git_uncommitted_changes",
        "python",
        "packages",
        "cuda",
        "device",
        "host",
        "world_size",
    ]
    assert list(found["packages"]) == list(PACKAGES)
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["wandb"]
    assert (found["device"], found["world_size"]) == ("cpu", 3)
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    assert json.loads(json.dumps(found)) == found


def test_environment_in_a_clone_and_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "recipes").mkdir(parents=True)
    monkeypatch.setattr(metrics, "__file__", str(clone / "recipes" / "metrics.py"))

    def git_facts() -> SimpleNamespace:
        found = environment(world_size=1, device=CPU)
        return SimpleNamespace(commit=found["git_commit"], changes=found["git_uncommitted_changes"])

    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", clone, *settings, *arguments], text=True).strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_facts() == SimpleNamespace(commit=None, changes=None)  # a copy, not a clone
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert git_facts() == SimpleNamespace(commit=git("rev-parse", "HEAD"), changes=False)
    (clone / "new.py").touch()
    assert git_facts() == SimpleNamespace(commit=git("rev-parse", "HEAD"), changes=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_facts() == SimpleNamespace(commit=None, changes=None)  # no git at all
