"""Compare the speed and loss of recipes on this machine: `scripts/sweep.py SWEEP`; see --help. Imports no torch."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import ROOT, explain_wrong_interpreter

explain_wrong_interpreter()

from recipes.files.reading import path_argument  # noqa: E402
from recipes.lab.sweep.runner import exit_code_of, say  # noqa: E402

EPILOG = """\
Every row is a separate run, started as scripts/run.sh starts one. A row that runs out of memory, crashes, is refused or
times out is also a result. The same command continues an interrupted sweep; a row whose recipe has changed runs again.
Results go to OUTPUT/NAME: results.jsonl, table.md, report.html, and the folder of every run.
Sweeps are in configs/sweeps/, their CPU variants, for any machine, in configs/sweeps/cpu/."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 if no row was measured, 2 for a user error, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        description="Run the rows of a sweep and compare them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sweep.py SWEEP [--dry-run] [--retry] [--output FOLDER] [--section.field value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("sweep", type=path_argument, help="a file such as configs/sweeps/fp8.toml")
    parser.add_argument("--dry-run", action="store_true", help="check and list all rows without running them")
    parser.add_argument("--retry", action="store_true", help="also rerun the rows that failed")
    parser.add_argument(
        "--output", type=path_argument, default=Path("runs/sweeps"), help="folder of all results (%(default)s)"
    )
    options, overrides = parser.parse_known_args(arguments)
    message = "interrupted; the same command continues from here"
    return exit_code_of(lambda: sweep(options, overrides), interrupted=message)


def sweep(options: argparse.Namespace, overrides: list[str]) -> int:
    """Run the sweep; returns the exit code. Raises UserError."""
    from recipes.lab.sweep.grid import device_count, processes_here, read_sweep
    from recipes.lab.sweep.loop import run_sweep
    from recipes.lab.sweep.results import TABLE, current_results

    path = options.sweep if options.sweep.exists() or not (ROOT / options.sweep).exists() else ROOT / options.sweep
    devices = device_count()
    plan = read_sweep(
        path,
        overrides,
        output=options.output,
        processes=processes_here(devices),
        device=None if options.dry_run else "cuda" if devices else "cpu",
    )
    known = current_results(plan)
    say(f"{plan.name}: {len(plan.rows)} rows on {plan.rows[0].processes} processes, results in {plan.folder}")
    if options.dry_run:
        for row in plan.rows:
            values = ", ".join(f"{key} = {value}" for key, value in row.overrides.items()) or "the base as it is"
            state = f"   ({known[row.label]['outcome']} already)" if row.label in known else ""
            say(f"  {row.label}: {values}{state}")
        return 0
    results = run_sweep(plan, retry=options.retry, log=say)
    say((plan.folder / TABLE).read_text(encoding="utf-8").removesuffix("\n"))
    return 0 if any(result["outcome"] == "done" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
