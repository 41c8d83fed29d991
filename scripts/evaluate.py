"""Print loss, perplexity and bits per byte of a model on a text, or its scores on tasks. --help lists the options.

python scripts/evaluate.py FOLDER_OR_CHECKPOINT SOURCE
python scripts/evaluate.py FOLDER_OR_CHECKPOINT --tasks hellaswag,my_task.yaml
python scripts/launch.py --standalone --nproc-per-node=8 scripts/evaluate.py FOLDER_OR_CHECKPOINT SOURCE
python scripts/evaluate.py RUN --pending
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import end_at_interrupt, explain_wrong_interpreter

explain_wrong_interpreter()
end_at_interrupt()

from parallel.errors import UserError  # noqa: E402
from recipes.data.config import PAIR_OPTIONS, DataConfig  # noqa: E402
from recipes.files.atomic import write_whole  # noqa: E402
from recipes.files.exit_codes import exit_code, leave_after  # noqa: E402
from recipes.files.reading import path_argument  # noqa: E402
from recipes.files.screen import say  # noqa: E402
from recipes.plugins.loading import OPTION, WHERE, load_plugins  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from parallel.dist import World
    from parallel.mesh import Mesh
    from recipes.evaluation.text import ProgressLine
    from recipes.weights.locate import Weights

# Published models allow far longer sequences than devices have memory for the logits of.
LONGEST = 8192
# Tokens whose logits are copied in float32 at a time.
CHUNK_TOKENS = 2048
# Samples for the standard errors of metrics that are not means: the harness's own number.
BOOTSTRAPS = 100_000


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can fix, 71 for a fault that may pass, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        description="Print loss, perplexity and bits per byte of a model on a text, as one line of JSON, or, with"
        " --tasks, a table of its scores.",
        epilog="On several devices: python scripts/launch.py --standalone --nproc-per-node=8 scripts/evaluate.py ...",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a Hugging Face folder, a checkpoint, or runs/NAME for its newest checkpoint")
    parser.add_argument(
        "source", nargs="?", help='as data.source in a recipe: "python-stdlib", a file, folder or glob, or hf:ID'
    )
    parser.add_argument("--text-field", help="name of the text field in .jsonl, .parquet and .csv (text)")
    parser.add_argument(
        "--limit", type=int, default=0, help="evaluate the first N documents (of each task) only; 0 = all"
    )
    parser.add_argument(
        "--sequence-length", type=int, help=f"tokens per sequence (the model's own length, at most {LONGEST})"
    )
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences per forward pass (%(default)s)")
    parser.add_argument("--document-mask", action="store_true", help="as data.document_mask in a recipe")
    parser.add_argument(
        "--bos", action="store_true", help="as data.bos in a recipe (checkpoints that were trained so need no flag)"
    )
    tasks = parser.add_argument_group("tasks of the lm-evaluation-harness, instead of a text")
    tasks.add_argument("--tasks", help="names, YAML files and folders of them, separated by commas")
    tasks.add_argument("--num-fewshot", "--num_fewshot", type=int, help="examples in each prompt (as the task says)")
    tasks.add_argument("--output", type=path_argument, help="also write all results to this file, as JSON")
    pending = "evaluate what validation.job of a run has not, or what has failed less often than N times"
    parser.add_argument("--pending", metavar="N", type=int, nargs="?", const=sys.maxsize, help=pending)
    pairs = parser.add_argument_group("pairs", "of which only the answers are predicted; defaults are those of the run")
    for name, meaning in PAIR_OPTIONS.items():
        pairs.add_argument(f"--{name.replace('_', '-')}", help=meaning)
    parser.add_argument(
        "--bad-row-budget", type=float, default=0.01, help="share of rows that may hold no usable text (%(default)s)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    parser.add_argument(OPTION, dest="plugins", **WHERE)
    options = parser.parse_args(arguments)
    try:
        load_plugins(options.plugins)
        return evaluate(options)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # Rank 0 most likely reports the same, and then the launcher ends the others. Give it the time.
            time.sleep(10)
        say(error if rank == "0" else f"rank {rank}: {error}", to=2)
        return exit_code(error)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate and print the result. Returns the exit code. Raises UserError."""
    from models.hf_config import INSTALL
    from models.transformers_config import TransformersConfig
    from recipes.evaluation.text import CountedDocuments, ProgressLine
    from recipes.weights.locate import find_weights
    from recipes.weights.pairing import pairing_of

    _require_possible(options)
    if options.pending is not None:
        from recipes.training.evaluate_waiting import evaluate_waiting

        return evaluate_waiting(Path(options.model), options.plugins, device=options.device, attempts=options.pending)
    weights = find_weights(options.model)
    if isinstance(weights.model, TransformersConfig) and not find_spec("transformers"):
        raise UserError(INSTALL)
    if options.tasks is not None:
        return _evaluate_tasks(options, weights)
    tokenizer = weights.tokenizer
    if options.bos or (weights.is_checkpoint and weights.facts.bos_token_id is not None):
        from recipes.data.text.beginning import with_beginning

        tokenizer = with_beginning(tokenizer)
    length = options.sequence_length or min(weights.facts.context_length, LONGEST)
    data = _data(options, weights)
    pairing = pairing_of(data, weights.model, weights) if data.has_pairs else None
    if pairing is None and weights.model.is_encoder_decoder:
        raise UserError("an encoder-decoder model predicts answers to prompts; write --prompt-field and --answer-field")

    from parallel.dist import start, stop  # torch, from here on
    from recipes.evaluation.evaluate import PairReader, evaluate_pairs, evaluate_text

    world = start(options.device, seed=0)
    fields = pairing.format if pairing else data.text_field
    text = CountedDocuments(options.source, text_field=fields, limit=options.limit, budget=options.bad_row_budget)
    line = ProgressLine(sys.stderr)
    show = partial(_show, line, limit=options.limit)
    try:
        size = options.micro_batch_size
        model, mesh = _model(weights, world, dtype=options.dtype, tokens=length * size)
        how: dict[str, Any] = {"mesh": mesh} | ({"on_progress": show} if world.is_main else {})
        if pairing:
            reader = PairReader(text, tokenizer=tokenizer, pairing=pairing, length=length, long=data.long_pairs)
            found = evaluate_pairs(model, reader, pairing=pairing, micro_batch_size=size, **how)
            more = {"tokens": found.tokens, "pairs": reader.pairs}
            more |= {"too_long": reader.left_out, "without_answer": reader.unusable}
        else:
            how |= {"tokenizer": tokenizer, "document_mask": options.document_mask}
            how |= {"border_targets": data.border_targets}
            found = evaluate_text(model, text, shape=(size, length), **how)
            more = {name: getattr(found, name) for name in ("bits_per_byte", "tokens", "text_bytes", "documents")}
    finally:
        line.end()
    stop()
    if world.is_main:
        read = {"rows": text.rows, "bad_rows": text.bad_rows, "sequence_length": length}
        say(json.dumps({"loss": found.loss, "perplexity": found.perplexity} | more | read))
    return 0


def _evaluate_tasks(options: argparse.Namespace, weights: "Weights") -> int:
    """Evaluate tasks and print their table. Returns the exit code. Raises UserError."""
    import torch

    from parallel.dist import on_main_first, start, stop
    from recipes.evaluation.tasks import harness, task_names

    tests = harness()
    world = start(options.device, seed=0)
    names, limit = task_names(options.tasks), options.limit or None
    tasks = on_main_first(world, lambda: tests.load_tasks(names, limit=limit, examples=options.num_fewshot))
    longest = options.sequence_length or weights.facts.context_length
    tokens = min(longest, LONGEST) * options.micro_batch_size
    model, mesh = _model(weights, world, dtype=options.dtype, tokens=tokens)
    dtype = getattr(torch, options.dtype)
    scored = tests.Scored(model, mesh, world.device, dtype, max_length=longest, batch_tokens=tokens)
    asked = tests.harness_model(scored, weights.description)
    tests.require_answerable(asked, tasks)
    results = tests.results_of(asked, tasks, bootstraps=BOOTSTRAPS if world.is_main else 0)
    stop()
    if world.is_main:
        say(tests.tables(results))
        if options.output:
            try:
                write_whole(options.output, tests.as_json(results) + "\n")
            except OSError as error:
                raise UserError(f"--output {options.output} cannot be written: {error.strerror}") from None
    return 0


def _model(weights: "Weights", world: "World", *, dtype: Any, tokens: int) -> "tuple[nn.Module, Mesh]":
    """The model with its weights, sharded over all processes. tokens: of a forward pass."""
    import torch

    from models.decoder import build_model
    from models.transformers_config import TransformersConfig
    from parallel.config import ActivationCheckpointingConfig, CompileConfig, Float8Config, FSDPConfig, MeshConfig
    from parallel.fsdp import materialize
    from parallel.mesh import build_mesh
    from parallel.order import parallelize
    from recipes.weights.convert import load_weights

    with torch.device("meta"):
        model = build_model(weights.model_in(dtype), loss_chunks=-(-tokens // CHUNK_TOKENS))
    mesh = build_mesh(MeshConfig().fit(world.size), device_type=world.device.type)
    parallelize(
        model,
        mesh,
        float8=Float8Config(),
        activation_checkpointing=ActivationCheckpointingConfig(),
        compile=CompileConfig(),
        fsdp=FSDPConfig(param_dtype=dtype),
        layout=MeshConfig(),
    )
    if isinstance(weights.model, TransformersConfig):
        materialize(model, device=world.device, seed=0)  # for buffers that no file holds
    else:
        model.to_empty(device=world.device)
    load_weights(model, weights)
    return model, mesh


def _data(options: argparse.Namespace, weights: "Weights") -> DataConfig:
    """How rows are read: as by the run that made the weights, but for what the command line says."""
    from models.config import FROM_WEIGHTS
    from recipes.recipe.fields import complaint
    from recipes.training.same_run import data_of_run

    data = data_of_run(weights) or DataConfig()
    given = {name: value for name in PAIR_OPTIONS if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        if wrong := complaint(f"data.{name}", value):
            raise UserError(f"--{name.replace('_', '-')} {value}: {wrong}")
    if options.text_field:
        if given:
            raise UserError("--text-field is for text without pairs; leave it out, or the options of pairs")
        return DataConfig(text_field=options.text_field, border_targets=data.border_targets)
    if "messages_field" in given:
        given = {"prompt_field": "", "answer_field": ""} | given
    elif {"prompt_field", "answer_field"} & given.keys():
        given = {"messages_field": ""} | given
    data = replace(data, **given, tokenizer=FROM_WEIGHTS)
    if bool(data.prompt_field) != bool(data.answer_field):
        raise UserError("pairs have a prompt and an answer; write both --prompt-field and --answer-field")
    return data


def _show(line: "ProgressLine", tokens: int, documents: int, *, limit: int) -> None:
    of = f" of {limit:,}" if limit else ""
    rate = tokens / max(line.seconds, 1e-3)
    line.show(f"{documents:,}{of} documents, {tokens:,} tokens in {line.seconds:,.0f} s, {rate:,.0f} tokens/s")


def _require_possible(options: argparse.Namespace) -> None:
    """Raises UserError for an option out of its range, and for a source that cannot be read."""
    from recipes.data.text.sources import source_problem
    from recipes.weights.locate import local_folder

    if options.pending is not None:
        local_folder(options.model)
    if [options.source, options.tasks, options.pending].count(None) != 2:
        raise UserError("write either a text to evaluate the model on, or --tasks, or --pending")
    if options.pending is not None and (options.limit or options.sequence_length or options.dtype != "float32"):
        raise UserError(
            "--pending evaluates as the recipe of the run says; omit --limit, --sequence-length and --dtype"
        )
    if options.output and not options.output.absolute().parent.is_dir():
        raise UserError(f"--output {options.output}: its folder does not exist; create it, or write another one")
    if options.tasks is None and (options.output or options.num_fewshot is not None):
        raise UserError("--output and --num-fewshot are for --tasks")
    of_text = ("text_field", "document_mask", *PAIR_OPTIONS)
    if options.tasks is not None and (given := [name for name in of_text if getattr(options, name)]):
        raise UserError(f"--{given[0].replace('_', '-')} is for a text, not for --tasks")
    if options.source is not None and (problem := source_problem(options.source)):
        raise UserError(f"{options.source}: {problem}")
    for name, least in (("sequence_length", 1), ("micro_batch_size", 1), ("limit", 0), ("num_fewshot", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")
    if not 0 <= options.bad_row_budget <= 1:
        raise UserError(f"--bad-row-budget {options.bad_row_budget}: must be a share from 0 to 1; write 0.01")


if __name__ == "__main__":
    leave_after(lambda: main(sys.argv[1:]))
