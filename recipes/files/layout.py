"""Where everything lies in the folder of a run, and in a checkpoint. Imports no torch."""

import re
from pathlib import Path

# In the folder of a run
RECIPE = "recipe.toml"
"""The resolved recipe."""
ENVIRONMENT = "environment.json"
"""Versions, commit and device."""
METRICS = "metrics.jsonl"
"""One row for each logged step."""
LOG_FILE = "log.txt"
"""What was on the screen."""
QUARANTINE = "quarantine.jsonl"
"""The rows of the data that were left out."""
FLOAT8_SHARES = "float8.jsonl"
"""{"step", "linear", "tensor", "overflow", "underflow"} of sampled steps."""
PROFILE = "profile"
"""Folder of the traces."""
EXPORT = "hf"
"""Folder of the exported weights."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""

# In a checkpoint
MODEL, TOKENIZER = "model.json", "tokenizer.json"
"""The files that make a checkpoint complete in itself."""
DATA = "data.json"
"""Fingerprints of the tokens it was trained on."""


def holds_results(folder: Path) -> bool:
    """Whether the folder of a run holds anything that took time to make."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((folder / CHECKPOINTS).glob("step-*"))


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in the folder of a run's checkpoints, oldest first."""
    # Without a superfluous zero: each step has one name.
    found = (re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match and (folder / match[0]).is_dir())


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:08d}"
