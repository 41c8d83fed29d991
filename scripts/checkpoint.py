"""Lists, verifies, shows, averages or deletes checkpoints: `scripts/checkpoint.py list PATH`. Imports no torch."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.checkpoint import look  # noqa: E402
from recipes.checkpoint.config import CheckpointConfig  # noqa: E402
from recipes.files.exit_codes import FAILED, FINISHED, exit_code  # noqa: E402
from recipes.files.reading import is_remote, path_argument, user_path  # noqa: E402
from recipes.files.screen import say  # noqa: E402

USAGE = """\
checkpoint.py list PATH      a table of checkpoints: step, size, visible damage
       checkpoint.py verify PATH    the same after reading every byte; exits with 1 if anything is damaged
       checkpoint.py show PATH      the contents of one checkpoint: progress, files, tensors
       checkpoint.py average RUN --steps FIRST:LAST:EVERY|A,B,C [--weights equal|decay|2,1,1] OUT
       checkpoint.py average RUN@STEP RUN@STEP ... [--weights equal|2,1,1] OUT
       checkpoint.py delete RUN --keep N [--keep-every N] [--keep-best COLUMN] [--yes]

delete: lists, and with --yes deletes, what checkpoint.keep, keep_every and keep_best of a recipe would not keep; never
the best of the run's own recipe, nor what runs beside it were forked from. RUN is on this disk.
PATH: runs/NAME, its folder of checkpoints, one checkpoint, or the address of one of these, s3://bucket/runs/NAME.
`show` takes the newest of several. RUN: runs/NAME, or its address. OUT: a new folder like a run's, with the average in
it, which after a constant learning rate is like a decay of it: a linear one, or with --weights decay by 1 - sqrt."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 for damage, 2 for an error that the user can fix, 71 for a fault that may pass."""
    parser = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False)
    parser.add_argument("command", choices=("list", "verify", "show", "average", "delete"), help=argparse.SUPPRESS)
    parser.add_argument(
        "paths", nargs="+", type=lambda one: one if is_remote(one) else str(path_argument(one)), help=argparse.SUPPRESS
    )
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    parser.add_argument("--weights", default="equal", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--keep-every", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--keep-best", default="", help=argparse.SUPPRESS)
    parser.add_argument("--yes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    path, *others = options.paths
    averages, others, out = options.command == "average", others[:-1], others[-1:]
    if bool(out) != averages or bool(options.steps) != (averages and not others):
        parser.error("average, and nothing else, needs OUT, and --steps or several RUN@STEP")
    deletes = options.command == "delete"
    kept = {"keep": options.keep, "keep_every": options.keep_every, "keep_best": options.keep_best}
    if any(kept.values()) != deletes or (deletes and (options.keep < 1 or options.keep_every < 0)):
        parser.error("delete, and nothing else, needs --keep N, at least 1")
    codes = {FINISHED}
    try:
        if options.command == "average":
            from recipes.lab.average.average import average, named, steps_of

            wanted = named([path, *others]) if others else [(path, step) for step in steps_of(options.steps)]
            average(wanted, user_path(out[0]), weights=options.weights, log=say)
            return 0
        found = look.lines(options.command, path)
        if deletes:
            lines = look.prune(user_path(path), CheckpointConfig(**kept), really=options.yes)
            found = ((line, FINISHED) for line in lines)
        for line, code in found:
            say(line)
            codes.add(code)
    except UserError as error:
        say(error, to=2)
        return exit_code(error)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
