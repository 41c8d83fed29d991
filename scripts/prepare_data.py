"""Tokenize a source once, on all cores: `prepare_data.py SOURCE FOLDER --tokenizer T`. Recipes then read the folder.

On N machines that share a file system: the same command with `--part 1/N`, ..., `--part N/N`, in any order and at any
times; recipes read the folder once all have finished. scripts/prepare.sbatch does it as jobs of SLURM.

If it was interrupted or killed, the same command continues after the last whole shard. The tokens in the folder depend
only on the source, the tokenizer and the held-out share. Imports no torch.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first: other packages install a top-level `recipes` too

from recipes.files.interpreter import explain_wrong_interpreter

explain_wrong_interpreter()

from parallel.errors import UserError  # noqa: E402
from recipes.data.config import PAIR_OPTIONS, DataConfig  # noqa: E402
from recipes.files.exit_codes import REFUSED, TEMPORARY, exit_code  # noqa: E402
from recipes.files.reading import may_pass, path_argument, user_path  # noqa: E402
from recipes.files.screen import Screen, tell  # noqa: E402
from recipes.files.units import counted  # noqa: E402

if TYPE_CHECKING:
    from recipes.data.text.pair_format import PairFields
    from recipes.data.text.tokenizer import Tokenizer
    from recipes.data.tokens.shards import Index
    from recipes.data.tokens.workspace import Preparation

SHARDS_SHOWN = 20
OF_PAIRS = tuple(name for name in PAIR_OPTIONS if name != "long_pairs")  # which is for whoever reads the shards


def say(text: str) -> None:
    tell(text, to=1)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for an error that the user can fix, 71 for a fault that may pass, 130 for Ctrl-C."""
    options = (parser := _parser()).parse_intermixed_args(arguments)  # the folder may stand last
    if options.folder is None and not options.show:
        parser.error("write a folder for the shards, or --show N")
    if options.cores:
        os.environ["RAYON_NUM_THREADS"] = str(options.cores)  # read by the tokenizers library when it is imported
    try:
        prepare(options)
    except UserError as error:
        tell(str(error))
        return exit_code(error)
    except OSError as error:
        tell(f"cannot write '{options.folder}': {error.strerror or error}; the same command continues")
        return TEMPORARY if may_pass(error) else REFUSED
    except MemoryError:
        tell("memory ran out; the same command continues after the last whole shard, and --cores N takes less memory")
        return TEMPORARY
    except KeyboardInterrupt:
        tell("\ninterrupted; the same command continues after the last whole shard")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.removesuffix(" Imports no torch.\n"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="as data.source in a recipe: a file, folder or glob of text, hf:ID, ...")
    parser.add_argument("folder", type=path_argument, nargs="?", help="folder for the shards; --show needs none")
    parser.add_argument("--tokenizer", required=True, help='as data.tokenizer: a tokenizer.json, its folder, "train:N"')
    parser.add_argument("--text-field", default="text", help="field or column that holds the text (default: text)")
    for name in OF_PAIRS:
        parser.add_argument(f"--{name.replace('_', '-')}", default="", help=PAIR_OPTIONS[name])
    parser.add_argument("--encoder-decoder", action="store_true", help="the pairs are for an encoder-decoder model")
    parser.add_argument("--text-documents", default="auto", help="as data.text_documents (default: auto)")
    parser.add_argument("--bos", action="store_true", help="as data.bos: begin every document with the token for that")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        help="share of documents to hold out, 0 = none (default: 0.01)",
    )
    parser.add_argument("--bad-row-budget", type=float, default=0.01, help="largest share of bad rows (default: 0.01)")
    parser.add_argument("--cores", type=int, help="cores to use (default: all)")
    parser.add_argument(
        "--cache", type=path_argument, default=Path("~/.cache/shardwright"), help="folder for trained tokenizers"
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="only make part I of N, on one of N machines"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N", help="only show N rows as they are trained")
    parser.add_argument("--status", action="store_true", help="only say how much of each part is there")
    return parser


def _part(text: str) -> tuple[int, int]:
    """I/N as two numbers."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part: write I/N with I from 1 to N, such as 3/8")
    return int(found[1]), int(found[2])


def prepare(options: argparse.Namespace) -> None:
    """Tokenize the source or a part of it, and print what the folder holds if it is complete then."""
    from recipes.data.text.beginning import with_beginning
    from recipes.data.text.sources import is_hub, is_prepared, notes, pinned, source_problem
    from recipes.data.text.tokenizer import load_tokenizer
    from recipes.data.tokens.parts import missing_parts
    from recipes.data.tokens.shards import read_index
    from recipes.data.tokens.workspace import preparation, unclaim, would_read_itself

    _require_valid(options)
    folder = user_path(options.folder or ".")
    if is_prepared(options.source):
        raise UserError(f"'{options.source}' holds tokens already, so nothing needs preparing; use it as data.source")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"'{folder}' is a file; give a folder, or a name that does not exist")
    source = pinned(options.source)
    if problem := source_problem(source):
        raise UserError(f"data.source: {problem}")
    if would_read_itself(source, folder):
        raise UserError(f"'{folder}' lies inside '{options.source}' and would be part of it; give another folder")
    for note in notes(source, text_documents=options.text_documents):
        say(note)
    if is_hub(source) and (options.part != (1, 1) or options.status):
        raise UserError(f"--part needs files: download the dataset of '{options.source}', and give its folder of files")
    fields = _fields(options)
    reading: Any = {"text_field": fields, "text_documents": options.text_documents}
    tokenizer = load_tokenizer(options.tokenizer, sources=[source], **reading, cache=options.cache, log=say)
    if options.bos:
        tokenizer = with_beginning(tokenizer)
    _say_ends(fields, tokenizer)
    work = preparation(source, **reading, tokenizer=tokenizer, validation_fraction=options.validation_fraction)
    if options.show:
        _show(work, reading, options.show)
        return
    new = not folder.exists()
    started = time.perf_counter()
    try:
        if options.status:
            _say_state(folder, work)
            return
        tokens = _write(folder, work, options)
    except BaseException:
        unclaim(folder, remove=new)  # leave nothing behind if no shard was written
        raise
    seconds = time.perf_counter() - started
    if tokens:
        say(f"tokenized {tokens:,} tokens in {seconds:.1f} s, {counted(int(tokens / seconds))} tokens/s")
    else:
        say("nothing was left to do")
    if read_index(folder) is None:
        others = missing_parts(folder) or "another process has written its index"
        say(f"part {'/'.join(map(str, options.part))} is whole; recipes can read the folder after {others}")
        return
    _finish(folder, fields, options)
    share = f"validation_fraction = {options.validation_fraction:g}"
    more = (["bos = true"] if options.bos else []) if isinstance(fields, str) else fields.in_recipe
    say(", ".join([f'in a recipe: source = "{folder}"', f'tokenizer = "{folder / "tokenizer.json"}"', share, *more]))


def _require_valid(options: argparse.Namespace) -> None:
    """Raises UserError for numbers out of range, and for what is not a rule for documents."""
    from recipes.data.text.plain_text import text_documents_problem

    if not 0 <= options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} must be at least 0 and below 1; write 0.01, or 0 to"
            " hold nothing out"
        )
    if not 0 <= options.bad_row_budget <= 1:
        raise UserError(f"--bad-row-budget {options.bad_row_budget} must be a share from 0 to 1; write 0.01")
    if options.cores is not None and options.cores < 1:
        raise UserError(f"--cores {options.cores} must be at least 1")
    if problem := text_documents_problem(options.text_documents):
        raise UserError(f"--text-documents {options.text_documents} {problem}")


def _finish(folder: Path, fields: "PairFields", options: argparse.Namespace) -> None:
    """Write what stands beside the shards once all are there, and print what they hold."""
    from recipes.data.tokens.shards import bad_rows, open_index

    index = open_index(str(folder))
    _keep_template(folder, fields)
    _require_training_text(options.source, index)
    with (folder / "quarantine.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in bad_rows(folder, index.shards))
    _print_contents(folder, index)


def _fields(options: argparse.Namespace) -> "PairFields":
    """What is read of a row. Raises UserError for options that do not fit together."""
    given = {name: getattr(options, name) for name in (*OF_PAIRS, "bos", "source", "text_field", "tokenizer")}
    data = DataConfig(**given)
    if not data.has_pairs and not options.encoder_decoder:
        return data.text_field
    from recipes.weights.pairing import pair_format, pair_problems

    for name, message in pair_problems(data, encoder_decoder=options.encoder_decoder):
        raise UserError(f"--{name.replace('_', '-')}: {message}")
    return pair_format(data, {}, encoder_decoder=options.encoder_decoder)


def _say_ends(fields: "PairFields", tokenizer: "Tokenizer") -> None:
    """Say what is wrong with the ends of the answers of chats."""
    if not isinstance(fields, str) and fields.template:
        from recipes.data.text.chat import ends_of_answers
        from recipes.data.text.pair_format import template_of

        if note := ends_of_answers(template_of(fields, tokenizer), tokenizer)[1]:
            say(f"--messages-field: {note}")


def _show(work: "Preparation", reading: dict[str, Any], count: int) -> None:
    """Print the first rows of a source, and which of their tokens are learned."""
    from recipes.data.text.pair_format import ID, LEARNED
    from recipes.data.text.rows import open_rows
    from recipes.data.tokens.prepare import encoder
    from recipes.lab.show.show import say_tokens

    rows = open_rows(work.source, **reading)
    found, documents = encoder(work, where=rows.where)([*islice(rows, count)])
    of_rows, pairs = iter(documents), not isinstance(work.text_field, str)
    for row in found:
        say(f"-- {rows.where(row)}{f': a bad row: {row.problem}' if row.problem else ''}")
        if row.has_text:
            tokens = next(of_rows)
            learned = tokens >= LEARNED if pairs else tokens >= 0
            learned[0] = False  # nothing predicts it
            say_tokens(work.tokenizer, (tokens & ID if pairs else tokens).tolist(), learned, names_ends=pairs)


def _keep_template(folder: Path, fields: "PairFields") -> None:
    """Put a chat template beside the tokenizer, where recipes look for it."""
    if not isinstance(fields, str) and fields.template:
        from recipes.data.text.chat import chat_files

        for name, text in chat_files(fields.template, dict(fields.special_tokens)).items():
            (folder / name).write_text(text, encoding="utf-8")


def _write(folder: Path, work: "Preparation", options: argparse.Namespace) -> int:
    """Write all missing shards of the part. Returns how many tokens were written."""
    from recipes.data.tokens.parts import Part
    from recipes.data.tokens.prepare import write_shards
    from recipes.data.tokens.shards import BadRowBudget

    part, setting = Part(*options.part), "--bad-row-budget"
    bad_rows = BadRowBudget(folder, source=work.source, budget=options.bad_row_budget, setting=setting)
    with _progress() as show:
        shards = write_shards(folder, work, part=part, keep_unread=False, check=bad_rows.count, progress=show)
        return sum(shard.train + shard.validation for shard in shards)


def _say_state(folder: Path, work: "Preparation") -> None:
    """Say how much of each part is there."""
    from recipes.data.tokens.parts import state
    from recipes.data.tokens.workspace import claimed

    with claimed(folder, fingerprint=work.fingerprint, tokenizer=work.tokenizer.json):  # refuses other contents
        lines = state(folder, work)
    if not lines:
        raise UserError(f"'{folder}' holds no part yet; make them with --part 1/N to --part N/N")
    for line in lines:
        say(line)


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """What shows the number of tokens so far, in a line on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    def show(tokens: int) -> None:
        rate = tokens / (time.perf_counter() - started)
        bar.update(task, description=f"{counted(tokens)} tokens, {counted(int(rate))} tokens/s")

    console, started = Console(file=cast(IO[str], Screen())), time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading")
        yield show


def _print_contents(folder: Path, index: "Index") -> None:
    for shard in index.shards[:SHARDS_SHOWN]:
        say(f"shard {shard.number:05d}  {shard.train:>12,} tokens  checksum {shard.checksums['train']}")
    if len(index.shards) > SHARDS_SHOWN:
        say(f"... and {len(index.shards) - SHARDS_SHOWN} more, with their checksums in {folder / 'index.json'}")

    def total(name: str) -> int:
        return sum(getattr(shard, name) for shard in index.shards)

    say(
        f"{total('documents'):,} documents with {total('train'):,} tokens for training,"
        f" {total('held_out'):,} with {total('validation'):,} held out;"
        f" {total('empty'):,} empty rows, {total('bad'):,} bad rows"
    )
    if not total("held_out"):
        lowest, highest = min(shard.lowest for shard in index.shards), max(shard.highest for shard in index.shards)
        more = f"; --validation-fraction {int(lowest * 1e4 + 1) / 1e4:.4f} or more, and another folder, hold some out"
        say(
            "no document is held out: a recipe that reads this folder needs another text to validate on"
            ' ([validation] source = "FILE"), or validation.every = 0 and validation.sample_tokens = 0'
            f"{more if lowest < highest else ''}"
        )


def _require_training_text(source: str, index: "Index") -> None:
    if any(shard.documents for shard in index.shards):
        return
    if not any(shard.held_out for shard in index.shards):
        raise UserError(f"'{source}' holds no text for training; give another source")
    lowest, highest = min(shard.lowest for shard in index.shards), max(shard.highest for shard in index.shards)
    bound = f"{int(highest * 1e4) / 1e4:.4f} or less" if lowest < highest else "0"
    raise UserError(
        f"all documents of '{source}' are held out, and none is left for training; give another folder and"
        f" --validation-fraction {bound}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
