"""Predict the loss of a recipe from small runs: `scripts/ladder.py RECIPE`; see --help. Imports no torch."""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter

explain_wrong_interpreter()

from recipes.files.reading import path_argument  # noqa: E402
from recipes.lab.sweep.runner import exit_code_of, say  # noqa: E402

EPILOG = """\
The runs are ordinary recipes in OUTPUT/NAME/recipes, trained one after another on this machine (NPROC processes). The
same command goes on after an interruption, and answers once all runs that can end have ended:
OUTPUT/NAME/ladder.md, and ladder.json for `train.py RECIPE --plan --ladder FILE` and validation.ladder.
On SLURM, task 0 of an array tries the rates, each rung and seed is one of the others (--dry-run prints them), then the
command itself answers:
  sbatch --array=0 --nodes=1 --wait --wrap "python scripts/ladder.py RECIPE"
  sbatch --array=1-10 --nodes=1 --wrap "python scripts/ladder.py RECIPE\""""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 if a run failed, 2 for a user error, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        description="Predict the loss of a recipe from a ladder of small runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ladder.py RECIPE [option ...] [--section.field value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", type=path_argument, help="the recipe of the large run")
    parser.add_argument("--rungs", type=int, default=5, help="number of small models (%(default)s)")
    parser.add_argument("--parameters", help="their sizes without embeddings instead, such as 10M,20M,40M")
    parser.add_argument("--tokens-per-parameter", default="10,20,40", help="lengths of their runs (%(default)s)")
    parser.add_argument("--tokens", help="lengths of all runs instead, such as 1B,2B")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each, with different seeds (%(default)s)")
    parser.add_argument("--rates", default="0.5,2", help="factors of the rate to try first, on three rungs; '' = none")
    parser.add_argument(
        "--output", type=path_argument, default=Path("runs/ladders"), help="folder of all ladders (%(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="write and list the recipes without training them")
    parser.add_argument("--gpu", help="of the hours that a dry run predicts, such as H100; default: this machine")
    parser.add_argument("--price", type=float, default=0.0, help="of one GPU for an hour, for the dry run")
    options, overrides = parser.parse_known_args(arguments)
    options.command = shlex.join(["python", "scripts/ladder.py", *arguments])
    return exit_code_of(lambda: _ladder(options, overrides), interrupted="interrupted; the same command goes on here")


def _ladder(options: argparse.Namespace, overrides: list[str]) -> int:
    from recipes.lab.ladder.ladder import climb
    from recipes.lab.plan.options import amount
    from recipes.lab.sweep.grid import device_count, processes_here

    for name in ("parameters", "tokens", "tokens_per_parameter", "rates"):
        written = (getattr(options, name) or "").split(",")
        setattr(options, name, [amount(f"--{name.replace('_', '-')}", one) for one in written if one])
    task, processes = os.environ.get("SLURM_ARRAY_TASK_ID"), processes_here(device_count())
    return climb(options, overrides, task=task, processes=processes, log=say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
