"""The folder of a run, OUTPUT/NAME, belongs to one recipe. Imports no torch."""

from pathlib import Path

from parallel.errors import UserError
from recipes.fields import field_types, toml, value_of
from recipes.load import load
from recipes.schema import Recipe

# What makes two runs the same run. Everything else (length, mesh, micro-batches, precision, compile, checkpoints,
# metrics ...) may change between a run and its continuation.
IDENTITY = (
    "run.seed",
    "model.",
    "data.source",
    "data.text_field",
    "data.tokenizer",
    "data.validation_fraction",
    "batch.sequence_length",
    "batch.global_batch_size",
    "optimizer.",
    "schedule.",
)


def run_folder(recipe: Recipe) -> Path:
    """Where the files of the run go."""
    return Path(recipe.run.output).expanduser() / recipe.run.name


def identity_differences(old: Recipe, new: Recipe) -> list[str]:
    """What makes `new` another run than `old`, the one whose folder it would continue in; one line each."""
    return [
        f"{key}: {toml(was)} in the folder's recipe.toml, {toml(now)} now"
        for key in field_types()
        if key.startswith(IDENTITY)
        if (was := value_of(old, key)) != (now := value_of(new, key))
    ]


def holds_results(folder: Path) -> bool:
    """Whether the folder of a run holds anything that took time to make."""
    metrics = folder / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((folder / "checkpoints").glob("step-*"))


def check_output_folder(recipe: Recipe) -> None:
    """Raises UserError when the folder holds something that this run must not touch."""
    folder = run_folder(recipe)
    remedy = "give this run another name (--run.name OTHER)"
    if folder.is_file():
        raise UserError(f"{folder} is a file, but the run's files go there; {remedy}")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / "recipe.toml").is_file():
        raise UserError(f"{folder} is not empty and holds no recipe.toml, so it is not a run's folder; {remedy}")
    if not holds_results(folder):  # a run that broke off before its first logged step
        return
    if recipe.checkpoint.resume == "never":
        raise UserError(
            f'{folder} already holds this run, and checkpoint.resume = "never"; {remedy}'
            ', or continue the run with checkpoint.resume = "auto"'
        )
    try:
        old = load(folder / "recipe.toml", rules=False)
    except UserError as error:
        raise UserError(f"{folder} belongs to another version of the recipe schema; {remedy}\n{error}") from None
    if differences := identity_differences(old, recipe):
        lines = "".join(f"\n  {line}" for line in differences)
        raise UserError(f"{folder} belongs to a different recipe:{lines}\n{remedy}, or put these keys back")
