"""Recipes on a GPU that computes nothing: `bench.py --suite null_gpu`. It shows memory, waits and messages, no speed.

The null GPU is a stub of CUDA and NCCL below a CUDA build of torch; allocator, autograd, FSDP2, Inductor and Triton are
real. Recipes for H100s are stepped at their real size as one rank of theirs; small ones run whole, on 2 and 4 ranks.
Imports no torch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.files.markdown import markdown_table
from recipes.lab.bench.marks import between
from recipes.lab.null_gpu.build import NullGpu, build
from recipes.lab.null_gpu.calls import SMALL, disorders, read_logs
from recipes.lab.sweep.runner import exit_code_of
from recipes.metrics.hardware import hardware_of
from recipes.recipe.load import CONFIGS, shown

HERE = Path(__file__).parent
DOCS = CONFIGS.parent / "docs/benchmarks"
PAGE, RECORD = DOCS / "null_gpu.md", DOCS / "null_gpu.json"
BEGIN = "<!-- Written by scripts/bench.py --suite null_gpu --write-docs. -->\n"
END = "<!-- Written by scripts/bench.py --suite null_gpu --write-docs: end. -->\n"
EAGER = ("--compile.enabled", "false")
FLOAT8, BF16 = ("--float8.recipe", "tensorwise"), ("--float8.recipe", "none", "--float8.all_gather", "false")
VARIED = {"llama3_8b_8xh100": FLOAT8, "llama3_8b_8xh100_float8": BF16}
"""Recipes that run with and without float8, and how."""
DEBUG = CONFIGS / "smollm3_debug.toml"
SHORT = (
    *("--run.device", "cuda", "--run.steps", "4", "--metrics.every", "2", "--checkpoint.every", "2"),
    *("--validation.every", "4", "--schedule.warmup_steps", "1", "--schedule.decay_steps", "1"),
    *("--fsdp.param_dtype", "bfloat16", "--batch.global_batch_size", "8", "--attention.backend", "flash"),
)
AXES = {
    "shard 2": (2, "--mesh.shard 2"),
    "replicate 2": (2, "--mesh.replicate 2 --mesh.shard 1"),
    "context 2": (2, "--mesh.context 2"),
    "tensor 2": (2, "--mesh.tensor 2"),
    "replicate 2 x shard 2": (4, "--mesh.replicate 2 --mesh.shard 2"),
    "shard 2 x tensor 2": (4, "--mesh.shard 2 --mesh.tensor 2"),
    "shard 2, synchronous saves": (2, "--mesh.shard 2 --checkpoint.asynchronous false"),
    "shard 2, full checkpointing": (2, "--mesh.shard 2 --activation_checkpointing.mode full"),
}
"""Whole runs of DEBUG: ranks and options."""
ALONE = {f"TORCH_NCCL_{name}": "0" for name in ("ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR")}
ALONE["TORCH_NCCL_RANKS_PER_ROOT"] = "1000000"
"""For a rank without others: torch would ask these whether they live, and for their part of NCCL's addresses."""
RUN = "run: "
"""Begins the names of whole runs in the record."""
LIMIT = 900
"""Seconds of one run: no run that ends takes as long."""


@dataclass(frozen=True)
class Whole:
    """What a run of train.py on several ranks was like."""

    code: int | None
    """Its exit code; None = it did not end."""
    error: str
    """The end of what it printed, if it failed."""
    calls: int
    """Calls of NCCL by all ranks."""
    disorders: Sequence[str]
    """Where ranks differ in the order of their calls."""


def main(arguments: list[str]) -> int:
    """Run the suite. Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="bench.py --suite null_gpu", description=__doc__.removesuffix("Imports no torch.\n"), allow_abbrev=False
    )
    parser.add_argument(
        "--python", type=Path, nargs="+", default=[Path(sys.executable)], help="with a CUDA torch (this)"
    )
    parser.add_argument("--recipes", type=Path, nargs="*", help="to step (all for H100s)")
    parser.add_argument("--axes", choices=AXES, nargs="*", help="whole runs (all)")
    parser.add_argument("--eager-only", action="store_true", help="do not step with torch.compile")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON file that keeps all results (%(default)s)")
    parser.add_argument("--write-docs", action="store_true", help=f"write {shown(PAGE)}; else print its table")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options), interrupted="interrupted")


def _run(options: argparse.Namespace) -> int:
    paths = sorted(CONFIGS.rglob("*h100*.toml")) if options.recipes is None else options.recipes
    record: dict[str, Any] = {}
    if options.record.exists():
        record = json.loads(options.record.read_text(encoding="utf-8"))
    failed = 0
    for python in options.python:
        with tempfile.TemporaryDirectory(prefix="null_gpu_") as folder:
            gpu = build(python, Path(folder) / "stub")
            rows = record.setdefault(gpu.torch.partition("+")[0], {})
            for name, row in _results(gpu, paths, options, Path(folder)):
                rows[name] = row
                failed += is_bad(row)
                print(f"{gpu.torch} {name}: {row.get('error') or 'done'}", flush=True)
                options.record.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    found = "\n".join(table(record))
    if options.write_docs:
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{found}\n"), encoding="utf-8")
    else:
        print(found)
    return int(failed > 0)


def _results(
    gpu: NullGpu, paths: Sequence[Path], options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what was seen) of each step and each whole run."""
    for path in paths:
        for name, overrides in variants(path, eager_only=options.eager_only):
            yield name, step(gpu, path, overrides, folder / "step")
    for name in AXES if options.axes is None else options.axes:
        ranks, along = AXES[name]
        yield f"{RUN}{name}", asdict(whole(gpu, ranks, DEBUG, [*SHORT, *along.split()], folder / "run"))


def is_bad(row: Mapping[str, Any]) -> bool:
    """Whether a run failed, or its ranks disagree."""
    return bool(row.get("error") or row.get("disorders"))


def variants(path: Path, *, eager_only: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of the steps of a recipe."""
    whole_path = path.resolve()
    inside = CONFIGS in whole_path.parents
    stem = str(whole_path.relative_to(CONFIGS).with_suffix("")) if inside else path.stem
    for other in ((), VARIED[path.stem]) if path.stem in VARIED else ((),):
        kind = "" if not other else ", bf16" if other == BF16 else ", float8"
        yield f"{stem}{kind}, eager", (*other, *EAGER)
        if not eager_only:
            yield f"{stem}{kind}, compiled", (*other, "--compile.enabled", "true")


def step(
    gpu: NullGpu, path: Path, overrides: Sequence[str], folder: Path, *, script: Path = HERE / "step.py"
) -> dict[str, Any]:
    """What step.py saw of this recipe, as one rank of as many as its name says; or {"error": the end of its text}."""
    hardware, out = hardware_of(path.stem), _cleared(folder) / "out.json"
    if hardware is None:
        raise UserError(f"{path}: its name does not say how many H100s it is for, such as _8xh100")
    command = [str(gpu.python), str(script), str(path), str(hardware.processes), str(out), *overrides]
    code, text = _finish(command, gpu.environment(NULL_GPU_LOG=str(folder / "calls"), **ALONE))
    if code != 0 or not out.exists():
        return {"error": f"exit {code}: {text}"}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def whole(
    gpu: NullGpu, ranks: int, path: Path, overrides: Sequence[str], folder: Path, *, script: Path = HERE / "drive.py"
) -> Whole:
    """Train this recipe with train.py on so many ranks."""
    together = _cleared(folder) / "together"
    together.mkdir()
    command = [str(gpu.python), "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script)]
    command += [str(path), *overrides, "--run.output", str(folder), "--run.name", "run"]
    variables = {"NULL_GPU_LOG": str(folder / "calls"), "NULL_GPU_TOGETHER": str(together)}
    code, text = _finish(command, gpu.environment(**variables))
    logs = read_logs(folder / "calls")
    return Whole(code, "" if code == 0 else text, sum(len(log.calls) for log in logs.values()), disorders(logs))


def _cleared(folder: Path) -> Path:
    if folder.exists():
        subprocess.run(["rm", "-r", folder], check=True)
    folder.mkdir(parents=True)
    return folder


def _finish(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """(exit code, the end of the text) of a command; None = it took too long, and all its processes were killed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=CONFIGS.parent, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return code, out.read()[-20_000:]


def table(record: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: memory by version of torch; waits; messages that are not as planned; whole runs."""
    versions = sorted(record)
    names = list(dict.fromkeys(name for rows in record.values() for name in rows))
    steps = [name for name in names if not name.startswith(RUN)]
    seen = {name: [record[version].get(name, {}) for version in versions] for name in names}
    heads = [f"torch {version}: seen (reserved)" for version in versions]
    lines = [(name, *_predicted(seen[name]), *map(_memory, seen[name])) for name in steps]
    yield from markdown_table(("recipe", "GPUs", "GB predicted", "largest error", *heads), lines)
    waiting = [name for name in steps for row in seen[name] if "steps" in row and not _is_clean(row["steps"][-1])]
    number = sum("steps" in row for name in steps for row in seen[name])
    yield from ("", f"Steps with waits or copies: {len(waiting)} of {number} {', '.join(waiting)}".rstrip() + ".", "")
    yield from markdown_table(
        ("messages not as planned", "axis", "messages", "planned", "GB", "planned"),
        list(dict.fromkeys((name.rpartition(", ")[0], *line) for name in steps for line in _unplanned(seen[name][-1]))),
        align="llrrrr",
    )
    runs = [(name.removeprefix(RUN), *map(_ended, seen[name])) for name in names if name.startswith(RUN)]
    yield ""
    yield from markdown_table(
        ("whole run", *(f"torch {version}" for version in versions)), runs, align="l" * (1 + len(versions))
    )


def _predicted(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """GPUs, GB predicted, and the largest error of them all, of those that were stepped."""
    done = [row for row in rows if "steps" in row]
    if not done:
        return "", "", ""
    predicted = done[-1]["predicted"]["allocated"]
    errors = [predicted / row["steps"][-1]["allocated"] - 1 for row in done]
    return f"{done[-1]['processes']:,}", f"{predicted / 1e9:.1f}", f"{max(errors, key=abs):+.1%}"


def _memory(row: Mapping[str, Any]) -> str:
    if "steps" not in row:
        return "failed" if "error" in row else ""
    last = row["steps"][-1]
    return f"{last['allocated'] / 1e9:.1f} ({last['reserved'] / 1e9:.1f})"


def _is_clean(step: Mapping[str, int]) -> bool:
    return step["waits"] == step["to_host"] == 0


def _unplanned(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Axis, messages, planned, GB, planned; of axes where one of the two is another."""
    sent, planned = row.get("sent", {}), row.get("planned", {})
    for axis in sorted({*sent, *planned}):
        seen, plan = (one.get(axis, {"messages": 0, "sent": 0.0}) for one in (sent, planned))
        same = (
            abs(seen["messages"] - plan["messages"]) < 0.5 and abs(seen["sent"] - plan["sent"]) <= 0.01 * plan["sent"]
        )
        if not same and seen["sent"] + plan["sent"] > SMALL:
            numbers = (f"{one['messages']:,.0f}" for one in (seen, plan))
            yield (axis, *numbers, *(f"{one['sent'] / 1e9:.2f}" for one in (seen, plan)))


def _ended(run: Mapping[str, Any]) -> str:
    """Exit code, calls and order of a whole run."""
    if not run:
        return ""
    order = "; ".join(run["disorders"]) or "in equal order"
    return f"{'no end' if run['code'] is None else 'exit ' + str(run['code'])}, {run['calls']} calls {order}"
