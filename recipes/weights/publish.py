"""The model card (README.md) of an exported model, and its way to the Hugging Face hub. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from parallel.errors import UserError
from recipes.checkpoint.config import VALIDATION
from recipes.checkpoint.files import read_manifest
from recipes.data.history import consumed_tokens, from_json
from recipes.data.text.hub import silence_library
from recipes.files.border import reason
from recipes.files.layout import RECIPE, REPORT
from recipes.files.markdown import markdown_table
from recipes.files.reading import read_text, toml_table
from recipes.weights.description import Description
from recipes.weights.locate import find_weights

CARD = "README.md"


def with_card(description: Description, checkpoint: Path) -> Description:
    """The description with a model card among the files that accompany its weights; without one if the checkpoint is
    not from a run. Raises UserError."""
    manifest = read_manifest(checkpoint)
    if manifest.step is None:
        return description
    run = checkpoint.absolute().parents[1]
    file = run / RECIPE
    recipe = read_text(file) if file.is_file() else ""
    progress, name = manifest.state["progress"], run.name if recipe else checkpoint.name
    model, task = description.model, "text2text" if description.model.is_encoder_decoder else "text"
    lines = ["---", "library_name: transformers", "license: unknown", "tags:", "- shardwright"]
    lines += [f"pipeline_tag: {task}-generation", "---"]
    try:
        made_of = dict(toml_table(recipe)["model"]) if recipe else {}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({reason(error)}); bring back the one that the run wrote") from None
    lines += ["", f"# {name}", "", f"A language model with {model.parameters}. Trained with Shardwright"]
    lines += [f"for {manifest.step:,} steps on {progress['tokens']:,} tokens. The licence is yours to fill in."]
    if made_of.get("upcycle"):
        dense = made_of.get("weights")
        lines.append(f"Upcycled: each expert began as the feed-forward of the dense model in `{dense}`.")
    if not model.is_encoder_decoder:
        call = 'pipeline("text-generation", "FOLDER, or its name on the hub")("Once upon a time")'
        lines += ["", "## Usage", "", "    from transformers import pipeline", f"    print({call})"]
    lines += ["", "## Data", ""]
    try:
        consumed = consumed_tokens(from_json(progress.get("history", [])))
    except ValueError as error:
        raise UserError(f"{checkpoint} does not say what it was trained on: {error}") from None
    lines += markdown_table(["source", "tokens"], [(source, f"{count:,}") for source, count in consumed.items()])
    if scores := progress.get(VALIDATION):
        rows = [(key, f"{value:.4f}") for key, value in scores.items()]
        lines += ["", "## Evaluation", "", "Losses are in nats per token.", "", *markdown_table(["on", "value"], rows)]
    if (report := run / Path(REPORT).with_suffix(".md")).is_file():
        lines += ["", "".join(read_text(report).partition("## Curve\n")[1:]).rstrip()]
    if recipe:
        lines += ["", "## Recipe", "", "```toml", recipe.rstrip(), "```"]
    return replace(description, companions={**description.companions, CARD: "\n".join(lines) + "\n"})


def upload_folder(folder: Path, name: str, *, private: bool) -> str:
    """Upload a Hugging Face folder as the model OWNER/MODEL, which is created if it is missing, and keeps its
    visibility if it is there. Returns its address. Raises UserError, also if the hub cannot be reached or refuses."""
    weights = find_weights(folder)
    if weights.is_checkpoint:
        raise UserError(f"{folder} is a checkpoint; export it first: convert_hf.py export {folder} NEW_FOLDER")
    _ = weights.stored_tensors  # whole, or else refused
    if name.count("/") != 1:
        raise UserError(f"{name!r} is no name on the hub: it must be OWNER/MODEL")
    from huggingface_hub import HfApi

    silence_library()
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # any error of whichever network library is in use
        raise UserError(
            f"{folder} was not uploaded: {reason(error)}; log in with 'hf auth login' on a machine that reaches the"
            " hub, and run the same command again"
        ) from error
    return address
