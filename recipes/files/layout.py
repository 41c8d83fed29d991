"""The names of all files in a run folder and in a checkpoint. Imports no torch."""

import re
from pathlib import Path

from recipes.files.reading import is_folder, named_faults, names_in

# In a run folder
RECIPE = "recipe.toml"  # the resolved recipe
ORIGIN = "origin.json"  # the checkpoint that a fork continues from, and the run folder, steps and tokens of that
ENVIRONMENT = "environment.json"  # versions, commit and device
METRICS = "metrics.jsonl"  # one row per logged step
EVALUATIONS = "evaluations.jsonl"  # what was evaluated beside the run (recipes/evaluation/beside.py)
EVALUATION_LOG = "evaluations.txt"  # what the processes that did so print
LOG_FILE = "log.txt"  # a copy of the screen output
END = "end.json"  # what killed the run (recipes/files/end.py)
QUARANTINE = "quarantine.jsonl"  # the rows of the data that were skipped
PROOF = "proof.json"  # what was proved before the first step (recipes/cluster/proof.py)
REPORT = "report.html"  # curves and what else there is to say, with report.md; written at validations and the end
TENSORBOARD = "tensorboard"  # folder of what TensorBoard reads
PROFILE = "profile"  # folder of the traces
EXPORT = "hf"  # folder of the exported weights
CHECKPOINTS = "checkpoints"  # folder of the checkpoints
SAVED = ".saved"  # the step of the newest checkpoint of the run, so that it is missed if it is gone

MEMORY = ".memory"  # what of the run is in the memory of its nodes (recipes/checkpoint/memory_folder.py)
RUN_ID = ".run-id"  # the id of the run, where its checkpoints are copied to a server: the same is there

# In a checkpoint
MODEL, TOKENIZER = "model.json", "tokenizer.json"  # the files that make a checkpoint usable on its own
DATA = "data.json"  # fingerprints of the tokens that it was trained on


def holds_results(folder: Path) -> bool:
    """Whether a run folder holds metrics or checkpoints. Raises UserError if that cannot be determined."""
    if METRICS in names_in(folder):
        with named_faults(folder):
            if (folder / METRICS).stat().st_size > 0:
                return True
    return any(name.startswith("step-") for name in names_in(folder / CHECKPOINTS))


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in the `checkpoints` folder of a run, oldest first.

    Raises UserError if the folder cannot be listed.
    """
    steps = ((checkpoint_step(name), name) for name in names_in(folder))
    return sorted(step for step, name in steps if step is not None and is_folder(folder / name))


def checkpoint_step(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None for other names."""
    match = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", name)  # no extra leading zeros: each step has one name
    return int(match[1]) if match else None


def step_name(step: int) -> str:
    """The name of the folder of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / step_name(step)
