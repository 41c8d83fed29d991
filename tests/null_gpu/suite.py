"""Recipes on a GPU that computes nothing, `python -m tests.null_gpu.suite`: memory, waits and messages, no speed.

The null GPU is a stub of CUDA and NCCL below a CUDA build of torch; allocator, autograd, FSDP2, Inductor and Triton are
real. Recipes for H100s are stepped at their real size as one rank of theirs; small ones run whole, on 2 and 4 ranks.
Imports no torch.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.files.atomic import write_whole
from recipes.files.markdown import between, markdown_table
from recipes.files.screen import say
from recipes.lab.sweep.grid import read_sweep
from recipes.lab.sweep.runner import exit_code_of, run
from recipes.metrics.hardware import hardware_of
from recipes.recipe.load import CONFIGS, read_toml, shown, to_toml
from tests.null_gpu.build import NullGpu, build
from tests.null_gpu.calls import disorders, read_logs
from tests.null_gpu.generated import table as table_of_generated

HERE = Path(__file__).parent
DOCS = CONFIGS.parent / "docs/benchmarks"
PAGE, RECORD = DOCS / "null_gpu.md", DOCS / "null_gpu.json"
BEGIN = "<!-- Written by python -m tests.null_gpu.suite --write-docs. -->\n"
END = "<!-- Written by python -m tests.null_gpu.suite --write-docs: end. -->\n"
RECIPES = ("*h100*.toml", "smollm3_3b_long_*.toml")
MODELS = {"qwen3_0.6b_8xh100": 151_936, "t5_3b_8xh100": 32_128}
LONG = dict.fromkeys(("smollm3_3b_long_32k", "smollm3_3b_long_64k"), 128_256)
"""Recipes that begin with weights, which are not here, and their vocabularies; those of MODELS have a config."""
DEBUG = CONFIGS / "smollm3_debug.toml"
SHORT = (
    *("--run.device", "cuda", "--run.steps", "4", "--metrics.every", "2", "--checkpoint.every", "2"),
    *("--validation.every", "4", "--validation.sample_tokens", "0", "--schedule.warmup_steps", "1"),
    *("--schedule.decay_steps", "1"),
    *("--fsdp.param_dtype", "bfloat16", "--batch.global_batch_size", "8", "--attention.backend", "flash"),
)
AXES = {
    "shard 2": (2, "--mesh.shard 2"),
    "replicate 2": (2, "--mesh.replicate 2 --mesh.shard 1"),
    "context 2": (2, "--mesh.context 2"),
    "tensor 2": (2, "--mesh.tensor 2"),
    "tensor 2, overlapped": (2, "--mesh.tensor 2 --mesh.overlap_tensor true --compile.enabled true"),
    "replicate 2 x shard 2": (4, "--mesh.replicate 2 --mesh.shard 2"),
    "shard 2 x tensor 2": (4, "--mesh.shard 2 --mesh.tensor 2"),
    "shard 2, synchronous saves": (2, "--mesh.shard 2 --checkpoint.asynchronous false"),
    "shard 2, full checkpointing": (2, "--mesh.shard 2 --activation_checkpointing.mode full"),
}
"""Whole runs of DEBUG: ranks and options."""
ALONE = {f"TORCH_NCCL_{name}": "0" for name in ("ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR")}
ALONE["TORCH_NCCL_RANKS_PER_ROOT"] = "1000000"
"""For a rank without others: torch would ask these whether they live, and for their part of NCCL's addresses."""
UNCACHED = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
"""So that code is generated, and can be read."""
LIMIT = 900
"""Seconds of one run: no run that ends takes as long."""


def main(arguments: list[str]) -> int:
    """Run the suite. Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.removesuffix("Imports no torch.\n"), allow_abbrev=False)
    parser.add_argument(
        "--python", type=Path, nargs="*", default=[Path(sys.executable)], help="with a CUDA torch (this)"
    )
    parser.add_argument(
        "--recipes", type=Path, nargs="*", help="to step, or sweeps, whose rows are stepped as they are (all for H100s)"
    )
    parser.add_argument("--axes", choices=AXES, nargs="*", help="whole runs (all)")
    parser.add_argument("--eager-only", action="store_true", help="do not step with torch.compile")
    parser.add_argument("--generated", action="store_true", help="only print the bytes that generated kernels move")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON file that keeps all results (%(default)s)")
    parser.add_argument("--write-docs", action="store_true", help=f"write {shown(PAGE)}; else print its table")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options), interrupted="interrupted")


def _run(options: argparse.Namespace) -> int:
    if options.generated:
        return _count_generated(options)
    try:
        record: dict[str, Any] = json.loads(options.record.read_bytes()) if options.record.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{options.record} is no record of this suite ({error}); write another --record") from None
    failed = 0
    for gpu, folder in _built(options):
        rows = record.setdefault(gpu.torch.partition("+")[0], {})
        for name, row in _rows(gpu, options, folder):
            rows[name] = row
            failed += is_bad(row)
            say(f"{gpu.torch} {name}: {row.get('error') or 'done'}")
            write_whole(options.record, json.dumps(record, indent=1, sort_keys=True) + "\n")
    lines = "\n".join(table(record))
    if options.write_docs:
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{lines}\n\n"), encoding="utf-8")
    else:
        say(lines)
    return int(failed > 0)


def _count_generated(options: argparse.Namespace) -> int:
    """Print the bytes that the generated kernels of each recipe move, with two layers; 1 if a step failed."""
    failed = 0
    for gpu, folder in _built(options):
        counted = {}
        for path in _paths(options):
            *_, (name, overrides) = variants(path, eager_only=False)
            row = step(gpu, path, (*overrides, "--model.layers", "2"), folder / "step")
            counted[name] = row.get("generated", [])
            failed += "error" in row
            say(f"{gpu.torch} {name}: {row.get('error') or 'done'}")
        say("\n".join(table_of_generated(counted)))
    return int(failed > 0)


def _built(options: argparse.Namespace) -> Iterator[tuple[NullGpu, Path]]:
    """A null GPU for each Python that is asked for, and a folder that is deleted after its use."""
    for python in options.python:
        with tempfile.TemporaryDirectory(prefix="null_gpu_") as folder:
            yield build(python, Path(folder) / "stub"), Path(folder)


def _paths(options: argparse.Namespace) -> list[Path]:
    """The recipes that are asked for."""
    return (
        sorted(path for name in RECIPES for path in CONFIGS.rglob(name)) if options.recipes is None else options.recipes
    )


def _rows(gpu: NullGpu, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what was seen) of each step and each whole run."""
    for path in _paths(options):
        if "runs" in read_toml(path):
            for row in read_sweep(path, output=folder, processes=1).rows:
                file = folder / f"{row.label}_{row.processes}xh200.toml"
                file.write_text(to_toml(row.recipe), encoding="utf-8")
                yield f"{path.stem}, {row.label}", step(gpu, file, (), folder / "step")
            continue
        for name, overrides in variants(path, eager_only=options.eager_only):
            yield name, step(gpu, path, overrides, folder / "step")
    for name in AXES if options.axes is None else options.axes:
        ranks, along = AXES[name]
        yield f"run, {name}", whole(gpu, ranks, DEBUG, [*SHORT, *along.split()], folder / "run")


def is_bad(row: Mapping[str, Any]) -> bool:
    """Whether a run failed, or its ranks disagree."""
    return bool(row.get("error") or row.get("disorders"))


def variants(path: Path, *, eager_only: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of the steps of a recipe."""
    name, size = path.resolve().relative_to(CONFIGS).with_suffix(""), (MODELS | LONG).get(path.stem)
    config = str(CONFIGS / "models" / path.stem.replace("_8xh100", ".json"))
    random = ("--model.weights", "", "--data.tokenizer", f"train:{size}") if size else ()
    of_model = ("--model.name", "from_config", "--model.config", config) if path.stem in MODELS else ()
    for way, enabled in (("eager", "false"), ("compiled", "true"))[: 1 if eager_only else 2]:
        yield f"{name}, {way}", (*random, *of_model, "--compile.enabled", enabled)


def step(
    gpu: NullGpu, path: Path, overrides: Sequence[str], folder: Path, *, script: Path = HERE / "step.py"
) -> dict[str, Any]:
    """What step.py saw of this recipe, as one rank of as many as its name says (8), and "error" if it failed."""
    hardware = hardware_of(path.stem)
    out = _cleared(folder) / "out.json"
    command = [gpu.python, script, path.resolve(), hardware.processes if hardware else 8, out, *overrides]
    error = _finish(command, gpu.environment(NULL_GPU_LOG=str(folder / "calls"), **ALONE, **UNCACHED), folder)
    return (json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}) | error


def whole(
    gpu: NullGpu, ranks: int, path: Path, overrides: Sequence[str], folder: Path, *, script: Path = HERE / "drive.py"
) -> dict[str, Any]:
    """How training this recipe with train.py on so many ranks ended, their calls of NCCL and where these differ."""
    together = _cleared(folder) / "together"
    together.mkdir()
    command = [gpu.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script, path]
    command += [*overrides, "--run.output", folder, "--run.name", "run"]
    variables = {"NULL_GPU_LOG": str(folder / "calls"), "NULL_GPU_TOGETHER": str(together)}
    error = _finish(command, gpu.environment(**variables), folder)
    logs = read_logs(folder / "calls")
    seen = {"ranks": ranks, "calls": sum(len(log.calls) for log in logs.values()), "disorders": disorders(logs)}
    return seen | error


def _cleared(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _finish(command: Sequence[object], environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Run it. Returns its "error", if it failed."""
    stdout, stderr = folder / "stdout", folder / "stderr"
    ended = run([*map(str, command)], stdout=stdout, stderr=stderr, timeout=LIMIT, environment=environment)
    return {} if ended.outcome == "done" else {"error": f"{ended.outcome}: {ended.reason}"}


def table(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: a line for each recipe and version of torch, then one for each whole run."""
    seen = sorted((name, torch, row) for torch, rows in record.items() for name, row in rows.items())
    memory = ("recipe", "torch", "ranks", "predicted", "seen", "ratio", "reserved")
    heads = (*memory, "retries/waits/copies", "messages", "order")
    return markdown_table(heads, [_cells(name, torch, row) for name, torch, row in seen])


def _cells(name: str, torch: str, row: Mapping[str, Any]) -> list[str]:
    start = [name, torch, f"{row.get('ranks', '')}", f"{row['predicted'] / 1e9:.1f}" if "predicted" in row else ""]
    if "error" in row:
        return [*start, row["error"].partition(":")[0], *[""] * 5]
    if "disorders" in row:
        return [*start, *[""] * 4, str(row["calls"]), "; ".join(row["disorders"]) or "equal"]
    memory = [f"{row['allocated'] / 1e9:.1f}", f"{row['predicted'] / row['allocated']:.3f}"]
    above = f"+{row['reserved'] / row['allocated'] - 1:.1%}"
    counts = f"{row['retries']}/{row['waits']}/{row['copies']}"
    return [*start, *memory, above, counts, _messages(row["sent"], row["planned"]), ""]


def _messages(sent: Mapping[str, Mapping[str, float]], planned: Mapping[str, Mapping[str, float]]) -> str:
    """Messages and GB of all axes, seen and planned, or one number of each where they are the same."""

    def of(key: str, by: float, form: str) -> str:
        pair = [f"{sum(axis[key] for axis in axes.values()) / by:{form}}" for axes in (sent, planned)]
        return " of ".join(dict.fromkeys(pair))

    return f"{of('messages', 1, ',.0f')}; {of('sent', 1e9, '.1f')} GB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
