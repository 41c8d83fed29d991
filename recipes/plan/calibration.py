"""Rates of a machine from what was measured on it: `--plan --calibrated-by FILE`.

FILE is the environment.json of a run on several processes, which has the speed of its network, the metrics.jsonl of a
run, or a run's folder, which has both. Its content says which of them it is. Imports no torch.
"""

from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from parallel.errors import UserError
from recipes.files.layout import ENVIRONMENT, METRICS, RECIPE
from recipes.files.reading import is_folder, json_object, read_text
from recipes.plan.hardware import Gpu, gpu_of
from recipes.plan.messages import Group
from recipes.plan.rates import RATES, SHARES, Rates
from recipes.plan.time import step_time
from recipes.recipe.load import load

SKIPPED = 3
"""Logged rows of a run that are left out: they compile, warm up and fill the queues of data."""
KINDS = "a run's environment.json or metrics.jsonl, or its folder"
LEAST, MOST = 1e-3, 1e3
"""Factors that a run may be off its plan; more is another run or another unit."""
SPREAD = 0.05
"""How far a step may still be off, as a share of it: assumed, not measured."""

Json = dict[str, Any]


def calibrated(path: Path, gpu: Gpu | None, *, processes: int = 1) -> tuple[Gpu, Rates]:
    """The device and its rates as measured. Raises UserError for a file of another kind (see KINDS) or device. gpu: to
    plan for; None = the file's own. processes: those of the plan. A run says little about another number."""
    try:
        found, rates = _by_content(path, gpu, processes=processes)
        _require_possible(found, rates, path)
        return found, rates
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise UserError(f"{path} is damaged, or of another version ({error!r}); measure again") from None


def _by_content(path: Path, gpu: Gpu | None, *, processes: int) -> tuple[Gpu, Rates]:
    """The device and its rates, read according to the kind of the file."""
    if is_folder(path):
        environment = _environment(path)
        gpu = _same(environment["device"], gpu, path)
        rates = _by_network(environment, path, gpu) if "preflight" in environment else RATES
        return _by_run(path / METRICS, read_text(path / METRICS), gpu, rates, planned=processes)
    text = read_text(path)
    if path.suffix == ".jsonl":
        return _by_run(path, text, gpu, RATES, planned=processes)
    record = _record(text)
    if record is None:
        raise UserError(f"{path} holds no record; write {KINDS}")
    if "preflight" in record:
        gpu = _same(record["device"], gpu, path)
        return gpu, _by_network(record, path, gpu)
    if {"device", "world_size"} <= {*record}:
        raise UserError(
            f"{path} measures no network: its run had one process, or is of an older version; write its {METRICS}"
        )
    raise UserError(f"{path} is of no known kind; write {KINDS}")


def _require_possible(gpu: Gpu, rates: Rates, path: Path) -> None:
    """Raise UserError for numbers that no device has."""
    numbers = [(f"gpu.{name}", value) for name, value in vars(gpu).items()] + [*vars(rates).items()]
    wrong = [name for name, value in numbers if isinstance(value, float) and not (isfinite(value) and value >= 0)]
    if wrong:
        raise UserError(f"{path} holds times that cannot be ({', '.join(wrong)}); measure again")


def _record(text: str) -> Json | None:
    """The JSON object in the text; None if there is none."""
    with suppress(ValueError):
        return json_object(text)
    return None


def _environment(folder: Path) -> Json:
    """environment.json of a run. Raises UserError."""
    found = _record(read_text(folder / ENVIRONMENT)) or {}
    if not isinstance(found.get("device"), str) or type(found.get("world_size")) is not int:
        raise UserError(f"{folder / ENVIRONMENT} is damaged; write the folder of another run")
    return found


def _same(device: str, gpu: Gpu | None, path: Path) -> Gpu:
    """The GPU that the file was measured on. Raises UserError if that is not the one to plan for, or is not known."""
    found = gpu_of(device)
    if device == "cpu":
        raise UserError(f"{path} is of a run on a CPU, for which no times are predicted; write one of a GPU")
    if found is None:
        raise UserError(f"{path} was measured on {device}, whose data sheet is not in recipes/plan/hardware.py; add it")
    variant = gpu is not None and "GB" not in device and gpu.name.partition("-")[0] == found.name  # as "NVIDIA H100"
    if gpu is not None and gpu.name != found.name and not variant:
        raise UserError(
            f"{path} was measured on {device}, not on {gpu.name}; write --gpu {found.name}, or another file"
        )
    return gpu or found


def _by(rates: Rates, what: str, path: Path, *, spread: float | None = None) -> Rates:
    said = f"{rates.calibrated}; {what}" if rates.calibrated else f"by {path.name}: {what}"
    return replace(rates, calibrated=said, spread=spread)


# Pre-flight's measurements.


def _by_network(environment: Json, path: Path, gpu: Gpu) -> Rates:
    return by_links(environment["preflight"]["links"], gpu, _by(RATES, "its network's speed", path))


def by_links(links: list[Json], gpu: Gpu, rates: Rates) -> Rates:
    """The speed and the latency of each place, by its largest group: see recipes/cluster/links.py.

    Two sizes of a message tell them apart.
    """
    for link in sorted(links, key=lambda link: link["processes"]):
        group = Group(link["axis"], link["processes"], link["stride"], replace(gpu, per_node=link["per_node"]), rates)
        share = (group.size - 1) / group.size
        rates_of = []
        for name in ("all_gather", "reduce_scatter"):
            (less, sooner), (more, later) = link[name]
            if not (sooner > 0 and later > 0):
                raise ValueError("messages that took no time")
            speed = share * (more - less) / (later - sooner) if later > sooner else share * more / later
            rates_of.append((speed, max(0.0, sooner - share * less / speed)))
        speed, latency = (sum(values) / len(values) for values in zip(*rates_of, strict=True))
        start = min(rates.collective, latency)
        if group.nodes == 1:
            hop = (latency - start) / (group.size - 1)
            rates = replace(rates, link=speed / gpu.link, hop=hop, collective=start)
        else:
            inside = (group.size - group.nodes) * rates.hop
            hop = max(0.0, latency - start - inside) / group.nodes
            rates = replace(rates, network=speed / gpu.network / group.in_node, node_hop=hop)
    return rates


# A run's metrics.jsonl.


def _by_run(path: Path, text: str, gpu: Gpu | None, rates: Rates, *, planned: int) -> tuple[Gpu, Rates]:
    """The device, and its rates with one factor on all that computes: a run's steps cannot tell its parts apart.

    planned: the processes to plan for. A run says little about another number of them: the range stays wide.
    """
    rows = filter(None, map(_record, text.splitlines()))  # lines may be cut off
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row][SKIPPED:]
    if not seconds:
        raise UserError(f"{path}: needs more than {SKIPPED} logged steps; run 20 steps with --metrics.every 1")
    if missing := [name for name in (RECIPE, ENVIRONMENT) if not (path.parent / name).is_file()]:
        raise UserError(f"{path} needs the other files of its run: there is no {' and no '.join(missing)} beside it")
    recipe = load(path.parent / RECIPE, rules=False)
    environment = _environment(path.parent)
    gpu = _same(environment["device"], gpu, path)
    processes = environment["world_size"]
    nodes = environment["preflight"]["nodes"] if "preflight" in environment else _nodes(processes, gpu)
    degrees = recipe.mesh.fit(processes, nodes=nodes)
    at = replace(gpu, per_node=processes // nodes)
    measured = median(seconds)
    low, high = LEAST, MOST
    for _ in range(60):
        factor = (low * high) ** 0.5
        slower = step_time(recipe, degrees, gpu=at, rates=slowed(rates, factor)).step_seconds > measured
        low, high = (low, factor) if slower else (factor, high)
    batch = recipe.batch
    products = recipe.model.flops_per_token(0, "causal") * batch.global_batch_size * batch.sequence_length / processes
    peak = (recipe.float8.recipe != "none" and gpu.float8_peak) or gpu.bf16_peak
    if not 2 * LEAST < factor < MOST / 2 or products / measured > peak:
        raise UserError(
            f"{path}: a step of {measured:.3g} s cannot be one of {gpu.name} at any speed; is it another run's?"
        )
    what = f"{len(seconds)} steps of {recipe.run.name}: computing takes {factor:.2f} times as long"
    return gpu, _by(slowed(rates, factor), what, path, spread=SPREAD if planned == processes else None)


def _nodes(processes: int, gpu: Gpu) -> int:
    """The nodes of a run that did not record them: the fewest that can have so many of these GPUs."""
    return next(nodes for nodes in range(-(-processes // gpu.per_node), processes + 1) if processes % nodes == 0)


def slowed(rates: Rates, factor: float) -> Rates:
    """The rates with which everything but messages takes so many times as long."""
    shares = (*SHARES.values(), "flash", "cudnn", "triton", "attention_math", "moved", "eager")
    times = ("gap", "launch")
    return replace(
        rates,
        **{name: getattr(rates, name) / factor for name in shares},
        **{name: getattr(rates, name) * factor for name in times},
    )
