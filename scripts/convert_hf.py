"""Convert between Hugging Face folders and checkpoints: `python scripts/convert_hf.py import|export|upload FROM TO`."""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.files.exit_codes import exit_code  # noqa: E402
from recipes.files.reading import path_argument  # noqa: E402
from recipes.files.screen import say  # noqa: E402
from recipes.plugins.loading import OPTION, WHERE, load_plugins  # noqa: E402

USAGE = """\
convert_hf.py import FOLDER CHECKPOINT                    Hugging Face folder to new checkpoint
       convert_hf.py export CHECKPOINT FOLDER [--dtype TYPE] [--plugins.modules FILE]    checkpoint to such a folder
       convert_hf.py upload FOLDER NAME [--private]             folder to the Hugging Face hub, as OWNER/MODEL

CHECKPOINT to export: a folder such as runs/NAME/checkpoints/step-00000100, or
runs/NAME for its newest checkpoint. TYPE: bfloat16 or float32; the default is
the type in the checkpoint (float32 in checkpoints of a run)."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(usage=USAGE, allow_abbrev=False)
    parser.add_argument("direction", choices=("import", "export", "upload"), help=argparse.SUPPRESS)
    parser.add_argument("source", type=path_argument, help=argparse.SUPPRESS)
    parser.add_argument("target", type=path_argument, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=argparse.SUPPRESS)
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(OPTION, dest="plugins", **WHERE)
    options = parser.parse_args(arguments)
    if options.direction != "export" and options.dtype:
        parser.error("--dtype needs export; an imported checkpoint keeps the types of its folder")
    if options.direction != "upload" and options.private:
        parser.error("--private needs upload")

    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        from recipes.weights.locate import local_folder

        local_folder(options.source)  # before torch is imported
        load_plugins(options.plugins)
        import torch

        from recipes.weights.convert import export_checkpoint, import_folder, upload_folder

        if options.direction == "import":
            import_folder(options.source, options.target)
        elif options.direction == "upload":
            options.target = upload_folder(options.source, str(options.target), private=options.private)
        else:
            dtype = getattr(torch, options.dtype) if options.dtype else None
            export_checkpoint(options.source, options.target, dtype=dtype)
    except (Exception, KeyboardInterrupt) as error:
        if interrupts:  # C++ code turns the exception into another error
            return 128 + signal.SIGINT
        if not isinstance(error, UserError):
            raise
        say(error, to=2)
        return exit_code(error)
    say(f"wrote {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
