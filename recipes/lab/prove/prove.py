"""`train.py RECIPE --prove`: do these processes compute what one process computes?"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from models.hf import beyond_hf
from parallel.dist import World, on_main, start, stop
from parallel.errors import UserError
from recipes.data.batches import MicroBatch
from recipes.files.exit_codes import FINISHED, WRONG, ended_by
from recipes.files.layout import CHECKPOINTS, EXPORT, step_folder
from recipes.files.layout import SAVED as NEWEST
from recipes.files.reading import fault, user_path
from recipes.files.screen import say
from recipes.lab.prove.compare import EQUAL, FLOAT32, Comparison, Limits, compared, differences, limits_of, worst_of
from recipes.lab.prove.diagnosis import KINDS, Difference
from recipes.lab.prove.reference import Alone, Record
from recipes.lab.prove.runs import GRADIENT_BAD, LOSS_BAD, SPIKE, Stopped, read_all, run_twin
from recipes.lab.prove.twin import SAVED, STEPS, WORDS, Twin, elsewhere, twins_of, write_words
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stage_of

PATIENCE = timedelta(minutes=5)
"""How long a process waits for another one, which may compile."""
ATTEMPTS = 5
"""Seeds until no token of a twin has two experts that are equally good but for rounding."""
NOT_COMPARED = (
    "kernels of full size",
    "links under load",
    "your text, mixtures and tokenizer",
    "weights that the run starts from",
    "the change from one stage to the next",
    "tasks, exports and copies",
)
PARITY = "the same weights in transformers"


@dataclass(frozen=True)
class Verdict:
    """What a proof has found."""

    recipe: Recipe
    processes: int
    twins: Sequence[Twin]
    comparisons: Sequence[Comparison]

    @property
    def is_proved(self) -> bool:
        return not any(comparison.is_wrong for comparison in self.comparisons)

    @property
    def not_compared(self) -> list[str]:
        where = "every mesh (transformers is not there, or has no such model)" if self.is_proved else "every mesh"
        where = "every mesh and in transformers" if PARITY in [one.what for one in self.comparisons] else where
        changed = (line for twin in self.twins for line in twin.changed)
        return list(dict.fromkeys([*changed, *NOT_COMPARED, f"what is wrong alike on {where}"]))

    def line(self, seconds: float) -> str:
        """The verdict alone."""
        who = "this process computes" if self.processes == 1 else f"{self.processes} processes compute"
        if self.is_proved:
            other = [line for twin in self.twins for line in twin.changed if line.startswith("mesh.")]
            but = f", but {', '.join(dict.fromkeys(other))}" if other else ""
            return f"PROVED in {seconds:.0f} s: {who} what a plain loop on one computes{but}"
        last = self.comparisons[-1]
        what = f"{last.first} is {last.first.error:.1e} off, limit {last.first.limit:.0e}" if last.first else ""
        return f"WRONG after {seconds:.0f} s, {last.what}: {'; '.join(filter(None, [what, last.why]))}"

    def text(self, seconds: float) -> str:
        """One screen for people."""
        lines = [f"{self.recipe.run.name} on {twin.degrees}: {twin.about}" for twin in self.twins]
        for comparison in self.comparisons:
            lines.append(f"{comparison.what}:")
            for kind in (kind for kind in KINDS if kind in comparison.worst):
                worst = comparison.worst[kind]
                off = f"{worst.error:.0e} off, limit {worst.limit:.0e} ({worst})" if worst.error else "equal"
                lines.append(f"  {kind:<18} {off}")
        return "\n".join([*lines, f"not compared: {'; '.join(self.not_compared)}", self.line(seconds)])

    def json(self, seconds: float) -> str:
        """The same for programs."""
        rows = [
            {
                "what": one.what,
                "worst": {k: {"error": d.finite, "limit": d.limit, "of": str(d)} for k, d in one.worst.items()},
                "first": str(one.first or ""),
                "diagnosis": one.why,
            }
            for one in self.comparisons
        ]
        verdict: dict[str, Any] = {"verdict": "proved" if self.is_proved else "wrong", "line": self.line(seconds)}
        verdict |= {"seconds": round(seconds, 1), "processes": self.processes, "not_compared": self.not_compared}
        return json.dumps(verdict | {"meshes": [str(twin.degrees) for twin in self.twins], "comparisons": rows})


def answer(arguments: Sequence[str]) -> int:
    """Prove the recipe on the processes that the launcher started, and print the verdict. Returns the exit code.

    arguments: those of train.py. Raises UserError for a recipe that cannot be trained.
    """
    began, left = time.monotonic(), [word for word in arguments if word not in ("--prove", "--json")]
    if not left or left[0].startswith("-"):
        raise UserError("the recipe must come first: train.py RECIPE --prove [--json] [--section.field value ...]")
    for word in ("--check", "--plan", "--help", "-h", "--processes", "--nodes"):
        if word in left:
            raise UserError(f"--prove does not go with {word}; write one of them")
    recipe = load(left[0], left[1:], elsewhere=True)
    device = "auto" if recipe.run.device == "cuda" else recipe.run.device  # a laptop proves recipes for GPUs, too
    world = start(device, seed=recipe.run.seed, deterministic=recipe.run.deterministic, timeout=PATIENCE)
    try:
        verdict = verdict_on(recipe, world)
    except UserError:
        time.sleep(0 if world.is_main else 10)  # rank 0 most likely says it for all
        raise
    except Stopped as stopped:
        return ended_by(*stopped.args)
    if world.is_main:
        shown = verdict.json if "--json" in arguments else verdict.text
        say(shown(time.monotonic() - began))
    stop()
    return FINISHED if verdict.is_proved else WRONG


def verdict_on(recipe: Recipe, world: World) -> Verdict:
    """The verdict on a recipe, the same on all processes. Raises UserError for what cannot be built."""

    def make() -> str:
        output = user_path(recipe.run.output).resolve()
        try:
            output.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix=".prove-", dir=output)  # all nodes see it
            write_words(Path(folder))
        except OSError as error:
            raise fault(f"run.output: {output} cannot be written", error) from None
        return folder

    if world.device.type == "cpu":
        torch.set_num_threads(1)  # tiny matrices wait for other threads
    folder, twins, comparisons = Path(on_main(world, make)), list[Twin](), list[Comparison]()
    try:
        sizes, on_gpu = {"processes": world.size, "nodes": len(world.nodes)}, world.device.type == "cuda"
        for twin in twins_of(recipe, folder, on_gpu=on_gpu, **sizes):
            twins.append(twin)
            comparisons += _proof_of(twin, world)
            if comparisons[-1].is_wrong:
                break
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return Verdict(recipe, world.size, twins, comparisons)


def _proof_of(twin: Twin, world: World) -> Iterator[Comparison]:
    """The comparisons of a twin, up to the first that is wrong: all in float32 and eagerly; if the recipe rounds or
    compiles, those with one process and over a resume as it is, too."""
    for variant in [twin.exact, twin] if twin.rounds or twin.recipe.compile.enabled else [twin.exact]:
        for comparison in _comparisons(variant, world, is_exact=variant is not twin):
            yield comparison
            if comparison.is_wrong:
                return


def _comparisons(twin: Twin, world: World, *, is_exact: bool) -> Iterator[Comparison]:
    twin, first, alone, limits, comparison = against_one_process(twin, world)
    yield comparison
    recipe, degrees = twin.recipe, twin.degrees
    bits = EQUAL if world.device.type == "cpu" or recipe.run.deterministic else limits
    if is_exact and (parity := _parity(twin, alone, world)):
        yield parity
    if is_exact:
        again = run_twin(twin.quiet.recipe, world)
        yield compared("without validation and saving", again, first, bits, world, degrees)
    resumed = _resume(recipe, world)
    yield compared(f"{twin.precision}, resumed", resumed, first, bits, world, degrees, since=SAVED)
    if is_exact and (other := elsewhere(twin)) is not None:
        there, expected = _resume(other.recipe, world), alone.record
        if recipe.model.experts and recipe.experts.loss_over == "batch":  # in the micro-batches of that mesh
            expected = _train_alone(twin, world, *read_all(twin, world), then=other.degrees.data_parallel).record
        yield compared(f"resumed on {other.degrees}", there, expected, limits, world, other.degrees, since=SAVED)


class Proof(NamedTuple):
    """A run of a twin, and what one process makes of it."""

    twin: Twin
    """With a limit of gradient norms that clips some of its steps."""
    run: Record
    alone: Alone
    limits: Limits
    comparison: Comparison


def against_one_process(twin: Twin, world: World) -> Proof:
    """Train a twin from its first step to its last, and compare that with what this process computes for itself."""
    limit, seed = twin.recipe.optimizer.grad_clip, twin.recipe.run.seed
    calibrates = limit > 0 and twin.recipe.run.steps == STEPS
    for attempt in range(ATTEMPTS):
        twin = twin.with_values("", **{"run.seed": (seed + attempt) % 2**32}).clipped(0.0 if calibrates else limit)
        data = read_all(twin, world)
        alone = _train_alone(twin, world, data[0], () if calibrates else data[1])
        if calibrates:
            twin = twin.clipped(world.messages.from_main(float(f"{median(alone.record.norms.values()):.3g}")))
            alone = _train_alone(twin, world, *data)
        if not world.messages.from_main(alone.is_tied):
            break
    run, what, away = run_twin(twin.recipe, world), f"{twin.precision}, one process", dict[str, Difference]()
    if twin.rounds:
        away = worst_of(differences(alone.record, _train_alone(twin.exact, world, *data).record, EQUAL))
        what += f" (its gradients are up to {away['gradient'].error:.0e} from those of float32)"
    if alone.is_tied:
        what += f" (with {ATTEMPTS} seeds, a token had two experts that only rounding tells apart)"
    limits = limits_of(twin, away, on_cpu=world.device.type == "cpu")
    return Proof(twin, run, alone, limits, compared(what, run, alone.record, limits, world, twin.degrees))


def _train_alone(
    twin: Twin,
    world: World,
    steps: Sequence[Sequence[MicroBatch]],
    held_out: Sequence[MicroBatch],
    *,
    then: int | None = None,
) -> Alone:
    """then: as of Alone.data_ranks, after the save."""
    recipe, alone, judges = twin.recipe, Alone(twin, world.device), twin.recipe.run.loss_spike_z > 0
    for step, micro_batches in enumerate(steps, start=1):
        rate = stage_of(recipe, step - 1).learning_rate(step - 1)
        alone.data_ranks = then if then and step > SAVED else alone.data_ranks
        if step in (GRADIENT_BAD, LOSS_BAD) or (judges and step == SPIKE):
            alone.skip(step, rate=rate)
        else:
            alone.step(step, micro_batches, rate=rate)
        if held_out and step in (recipe.validation.every, recipe.run.steps):
            alone.validate(step, held_out)
    judged = [loss for step, loss in alone.record.losses.items() if judges and step > SPIKE]
    alone.record.guard = {SAVED: [1.0], STEPS: judged}
    return alone


def _parity(twin: Twin, alone: Alone, world: World) -> Comparison | None:
    """The same weights in transformers, which has code of its own; None without it, or without the model in it."""
    run, model = twin.recipe.run.folder, twin.recipe.model
    if model.by_transformers or beyond_hf(model) or find_spec("transformers") is None:
        return None

    def look() -> float:
        from models.transformers import read_folder
        from recipes.weights.convert import export_checkpoint

        export_checkpoint(step_folder(run / CHECKPOINTS, STEPS), run / EXPORT)
        theirs = read_folder(run / EXPORT, dtype=torch.float32, device=world.device)
        tokens = torch.arange(twin.recipe.batch.sequence_length, device=world.device)[None] * 7 % WORDS
        with torch.no_grad():
            logits = theirs(tokens).logits
        return float((alone.logits(tokens) - logits).norm() / logits.norm())

    logits = Difference(STEPS, KINDS.index("logits"), "", on_main(world, look), FLOAT32["logits"], 1.0, 1.0)
    return Comparison(PARITY, {"logits": logits}, logits if logits.is_wrong else None)


def _resume(recipe: Recipe, world: World) -> Record:
    """Train a run on from its first checkpoint, as if it had ended there."""

    def remove() -> None:
        shutil.rmtree(step_folder(recipe.run.folder / CHECKPOINTS, STEPS))
        with suppress(FileNotFoundError):
            (recipe.run.folder / NEWEST).unlink()

    on_main(world, remove)
    return run_twin(recipe, world)
