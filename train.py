"""Train a recipe: `train.py RECIPE [--section.field value ...]`, alone or as one of several processes."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C exits at once, without a traceback, until there is work to save
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # recipes/cluster/launcher.py blocks it until here

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import ShowVersion, explain_wrong_interpreter  # noqa: E402

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.files.exit_codes import exit_code, leave_after  # noqa: E402
from recipes.files.screen import tell  # noqa: E402

USAGE = """\
usage: train.py RECIPE [--section.field value ...]   train; recipes: configs/
  train.py RECIPE --check [--processes N [--nodes M]]   print it resolved
  train.py RECIPE --prove [--json]      compare these processes with one
  train.py RECIPE --show [STEP[:ROW]]   show what a step reads; FILE:ROW: when
  train.py RECIPE --plan [--help]       predict memory, time and cost on GPUs
  train.py [RECIPE] --help [SECTION]    all fields, or a section's; --version"""


def main(arguments: list[str]) -> int:
    """Returns the exit code (see recipes/files/exit_codes.py)."""
    parser = argparse.ArgumentParser(usage=USAGE.removeprefix("usage: "), add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", nargs=0, action=ShowVersion)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--nodes", type=int)
    try:
        if "--plan" in arguments:
            from recipes.lab.plan.command import answer
        elif "--prove" in arguments:
            from recipes.lab.prove.prove import answer
        elif "--show" in arguments:
            from recipes.lab.show.show import answer
        else:
            return run(*parser.parse_known_args(arguments, argparse.Namespace(began=time.monotonic())))
        return answer(arguments)
    except UserError as error:
        tell(str(error))
        return exit_code(error)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Train, check or print help; arguments: the recipe and its overrides. Returns the exit code. Raises UserError."""
    from recipes.recipe.load import load_run, print_help

    if arguments and arguments[0].startswith("-"):
        raise UserError(f"the recipe must come first: train.py RECIPE {' '.join(arguments)}")
    if any(count is not None and (count < 1 or not options.check) for count in (options.processes, options.nodes)):
        raise UserError("--processes N and --nodes M, at least 1, need --check; to train on N: NPROC=N scripts/run.sh")
    if options.help:
        return print_help(arguments, usage=USAGE)
    if not arguments:
        raise UserError(f"no recipe given, as in train.py configs/smollm3_debug.toml --check\n\n{USAGE}")
    if options.check:
        from recipes.training.check import check

        return check(arguments[0], arguments[1:], processes=options.processes, nodes=options.nodes)
    loaded = load_run(arguments[0], arguments[1:])
    from recipes.training.run import train  # torch, from here on

    return train(loaded, began=options.began)


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1:]))
