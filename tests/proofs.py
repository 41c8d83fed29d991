"""Proofs of the cases of tests/parallel/combinations.py, and of recipes, in real processes.

`python -m tests.proofs CASE ...` prints the verdict on each.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parallel.dist import start, stop
from recipes.lab.prove.prove import verdict_on
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.meshes import mesh_config
from tests.parallel.combinations import options_of, processes_of, sections_of
from tests.processes import run_processes
from tests.training import DEBUG, change


def recipe_of(case: str, folder: Path) -> Recipe:
    """The recipe of a case, of which everything is judged and counted."""
    of_mesh = mesh_config(case.partition(":")[0])
    recipe = change(load(DEBUG, rules=False), **sections_of(case))
    return change(
        recipe,
        run={"output": str(folder), "loss_spike_z": 20.0 if "spikes" in options_of(case) else 0.0},
        mesh={**vars(of_mesh), "context_by": recipe.mesh.context_by},
        batch={"micro_batch_size": 1},
        data={"document_mask": "documents" in options_of(case)}
        | (
            {"mixture": {"python-stdlib/email": 0.5, "python-stdlib/json": 0.5}}
            if "mixture" in options_of(case)
            else {}
        ),
        schedule={"kind": "linear", "warmup_steps": 2, "decay_steps": 0},
        metrics={"grad_norms": True},
    )


def verdicts(recipes: list[Recipe]) -> list[dict[str, Any]]:
    """The verdicts on recipes, in the processes that call this."""
    world, found = start("cpu", seed=0), []
    for recipe in recipes:
        began = time.monotonic()
        verdict = verdict_on(recipe, world)
        found.append(json.loads(verdict.json(time.monotonic() - began)))
        if world.is_main and len(sys.argv) > 1 and sys.argv[0].endswith("proofs.py"):
            print(verdict.text(time.monotonic() - began), flush=True)
    stop()
    return found


def prove_case(case: str) -> dict[str, Any]:
    """The verdict on one case."""
    with tempfile.TemporaryDirectory() as folder:
        return run_processes(processes_of(case), verdicts, [recipe_of(case, Path(folder))])[0][0]


if __name__ == "__main__":
    for case in sys.argv[1:]:
        verdict = prove_case(case)
        for row in verdict["comparisons"]:
            print(
                row["what"],
                {kind: (f"{one['error']:.1e}", one["of"]) for kind, one in row["worst"].items() if one["error"]},
            )
        print(f"{case}  {verdict['line']}", flush=True)
