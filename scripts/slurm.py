"""What scripts/slurm.sbatch runs: a recipe on all nodes of a SLURM job, started again where that helps.

slurm.py RECIPE [--section.field value ...]   on the job's first node: check, start every node, judge how it ended
slurm.py --node FOLDER COMMAND ...            on each node, through srun: run the command, keep its output and exit code

Imports no torch.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # first: other distributions install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

import tomllib  # noqa: E402

from parallel.errors import UserError  # noqa: E402
from recipes.cluster.slurm import Job, log, run_node  # noqa: E402
from recipes.files.exit_codes import exit_code  # noqa: E402
from recipes.files.screen import open_missing, say  # noqa: E402
from recipes.recipe.schema import RunConfig  # noqa: E402


def main(arguments: list[str]) -> int:
    open_missing()
    if arguments in (["-h"], ["--help"]):
        say(__doc__)
        return 0
    if arguments[:1] == ["--node"]:
        return run_node(Path(arguments[1]), arguments[2:])
    words = [word for word in arguments if word != "--check"]
    run = ["bash", str(ROOT / "scripts" / "run.sh"), *words]
    try:
        job = Job(run, os.environ, on_node=[sys.executable, str(ROOT / "scripts" / "slurm.py"), "--node"])
        code, recipe = job.checked_recipe()
    except UserError as error:
        log(str(error))
        code, recipe = exit_code(error), ""
    if code:
        log("refused: nothing was started")
        return code
    if "--check" in arguments:
        log(f"the recipe fits {job.nodes} nodes")
        return 0
    section = tomllib.loads(recipe)["run"]
    job.spare_nodes, job.least_nodes = section["spare_nodes"], section["least_nodes"]
    return job.supervise(RunConfig(name=section["name"], output=section["output"]).folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
