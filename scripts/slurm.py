"""What scripts/slurm.sbatch runs: a recipe on all nodes of a SLURM job, started again where that helps.

slurm.py RECIPE [--section.field value ...]   on the job's first node: check, start every node, judge how it ended
slurm.py --node FOLDER COMMAND ...            on each node, through srun: run the command, keep its output and exit code
slurm.py --pack                               pack environment and checkout, as PACK=FOLDER does for a job

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
from recipes.cluster.pack import CACHE, Pack, pack  # noqa: E402
from recipes.cluster.slurm import Job, Local, log, run_node  # noqa: E402
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
    if arguments == ["--pack"]:
        return show_pack()
    words = [word for word in arguments if word != "--check"]
    run = ["bash", str(ROOT / "scripts" / "run.sh"), *words]
    try:
        job = Job(run, os.environ, on_node=[sys.executable, str(ROOT / "scripts" / "slurm.py"), "--node"])
        code, recipe = job.checked_recipe()
        if (above := os.environ.get("PACK")) and not code and "--check" not in arguments:
            run_from_own_disks(job, above, words)
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
    return job.supervise(RunConfig(name=section["name"], output=section["output"]).folder)


def run_from_own_disks(job: Job, above: str, words: list[str]) -> None:
    """Let the nodes unpack environment and checkout below the folder `above` and run from there. Raises UserError."""
    if not os.path.isabs(above):
        raise UserError(f"PACK={above}: must be an absolute path, of a folder on each node's own disk")
    start = f"start{job.requeues}"
    local = Local(packed(), above=Path(above), script=ROOT / "scripts" / "unpack.sh", job=job.id, start=start)
    recipe, *fields = words
    path = Path(recipe if os.path.exists(recipe) else ROOT / recipe).absolute()
    if path.is_relative_to(ROOT / "configs"):
        recipe = str(local.checkout / path.relative_to(ROOT))
    job.run_from(local, run=["bash", str(local.checkout / "scripts" / "run.sh"), recipe, *fields])


def packed() -> Pack:
    files, notes = pack(ROOT, ROOT / CACHE)
    for note in notes:
        log(note)
    return files


def show_pack() -> int:
    try:
        files = packed()
    except UserError as error:
        log(str(error))
        return exit_code(error)
    say(f"{ROOT}/scripts/unpack.sh unpack FOLDER {files.key} {files.environment} {files.checkout}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
