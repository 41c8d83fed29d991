"""The tasks that a run is validated on, without the harness for runs that have none. Imports no torch."""

from importlib.util import find_spec
from types import ModuleType

from parallel.errors import UserError
from recipes.files.border import foreign

INSTALL = 'the lm-evaluation-harness is not installed; pip install "lm-eval>=0.4.13" "transformers>=5"'


def harness() -> ModuleType:
    """recipes/evaluation/harness.py, which takes seconds to import. Raises UserError without the harness."""
    if not find_spec("lm_eval"):
        raise UserError(INSTALL)
    with foreign(f"{INSTALL}; the one that is installed cannot be used"):
        from recipes.evaluation import harness
    return harness


def task_names(text: str) -> list[str]:
    """The names in a comma-separated list. Raises UserError if there are none."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise UserError("--tasks: write names, YAML files or folders of tasks, separated by commas")
    return names
