"""`train.py RECIPE --show`: what a step of a run reads, past or to come, and which steps read a row of a file."""

import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise

import numpy as np

from models.encoder_decoder import EncoderDecoderInputs
from parallel.config import MeshDegrees
from parallel.dist import start, stop
from parallel.errors import UserError, listed
from parallel.mesh import build_mesh
from recipes.data.history import epoch_lines, from_json
from recipes.data.loader import DataLoader
from recipes.data.order import MIXTURE_PERIOD
from recipes.data.sequences import Sequences, Source
from recipes.data.text.sources import find_files
from recipes.data.text.tokenizer import Tokenizer
from recipes.data.tokens.shards import read_index
from recipes.files.layout import CHECKPOINTS, RECIPE, TOKENIZER, checkpoint_steps
from recipes.files.reading import user_path
from recipes.files.screen import DIM, GREEN, say
from recipes.metrics.clock import RunClock
from recipes.recipe.load import LoadedRecipe, load_run
from recipes.recipe.stages import Stage, at_several_lengths, stages_of
from recipes.training.build_run import open_loader, weights_for
from recipes.training.console import Console
from recipes.training.process import Process
from recipes.training.run_folder import own_checkpoint, step_of
from recipes.training.same_run import require_same_data

FORMS = "--show [STEP], --show STEP:ROW, or --show FILE:ROW for the steps that read this row of a file"
ROWS, TOKENS, LOOKED_AT, NAMED = 3, 300, 20_000, 20
"""Rows of a step, tokens of a document, documents whose lengths are counted, and steps that are shown."""
PADDING, ANEW = "padding", "attention begins anew"
Part = tuple[str, np.ndarray, np.ndarray]
"""The document that a part of a row is of, its tokens, (n,), and whether each is learned."""
Stages = Iterator[tuple[Stage, range, DataLoader]]
"""Stages, the steps that each reads in this run, and what it reads."""


def answer(arguments: Sequence[str]) -> int:
    """Print what these arguments of train.py ask for. Returns the exit code. Raises UserError."""
    at, words = [*arguments].index("--show"), [word for word in arguments if word != "--show"]
    what = words.pop(at) if at < len(words) and not words[at].startswith("--") else ""
    asked = re.fullmatch("([1-9][0-9]*)?(?::([1-9][0-9]*))?|(.+):([0-9]+)", what)
    if not asked or not words or words[0].startswith("-"):
        raise UserError(f"write train.py RECIPE {FORMS}; the recipe comes first")
    folder = user_path(words[0])
    if folder.is_dir():  # which may have been moved
        words[1:1] = ["--run.name", folder.absolute().name, "--run.output", str(folder.absolute().parent)]
    loaded = load_run(folder / RECIPE if folder.is_dir() else words[0], words[1:])
    world = start("cpu", seed=0)
    stages = stages_with_data(loaded, Process(world, Console(silent=False), RunClock(world.device)))
    try:
        if asked[3]:
            show_steps(stages, asked[3], int(asked[4]))
        else:
            saved = checkpoint_steps(loaded.recipe.run.folder / CHECKPOINTS)
            step = int(asked[1] or 0) or min(max([0, *saved]) + 1, loaded.recipe.run.steps)
            show_rows(loaded, stages, step, int(asked[2] or 0))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    stop()
    return 0


def stages_with_data(loaded: LoadedRecipe, process: Process) -> Stages:
    """The stages of a run with all that they read, on this process. Raises UserError."""
    recipe, history, done, trained = loaded.recipe, from_json([]), 0, ""
    own = checkpoint_steps(recipe.run.folder / CHECKPOINTS)
    checkpoint = own_checkpoint(recipe, own[-1]) if own else None
    if recipe.run.continue_from:
        from recipes.checkpoint.files import read_manifest
        from recipes.training.fork import find_trunk, taken_over

        trunk = find_trunk(recipe, log=process.console.log, origins=loaded.origins)
        history = from_json(taken_over(read_manifest(trunk).state["progress"], trunk)["history"])
        checkpoint, done = checkpoint or trunk, step_of(trunk)
    mesh = build_mesh(MeshDegrees(replicate=1, shard=1), device_type="cpu")
    place = process, mesh, weights_for(loaded, checkpoint, process.world)
    for stage in (stage for stage in stages_of(recipe) if stage.last > done):
        validation = replace(stage.recipe.validation, every=0, sample_tokens=0, job="")
        data = replace(stage.recipe.data, tokenizer=trained or stage.recipe.data.tokenizer)
        without = replace(stage.recipe, data=data, validation=validation)
        loader = open_loader(without, *place, checkpoint, several=at_several_lengths(recipe))
        if checkpoint is None and data.tokenizer.startswith("train:"):  # stages to come take it from checkpoints
            trained = str(loader.training.sequences.sources[0].shards.folder / TOKENIZER)
        if checkpoint is not None:
            require_same_data(checkpoint, loader.data_state)
        for source in loader.training.sequences.sources:
            source.waits = False
            if source.background is not None:
                source.background.stop()
        loader.continue_after(history, first_batch=done)
        yield stage, range(done + 1, stage.last + 1), loader
        history, done = loader.history(stage.last), stage.last
        loader.close()


def show_rows(loaded: LoadedRecipe, stages: Stages, step: int, row: int) -> None:
    """Print a row of a step, or its first ones (0), and what the sources of the step have. Raises UserError."""
    steps = loaded.recipe.run.steps
    if step > steps or (found := next((one for one in stages if step in one[1]), None)) is None:
        trunk = f" from {loaded.recipe.run.continue_from} on" if loaded.recipe.run.continue_from else ""
        raise UserError(f"--show {step}: not a step of this run, which trains up to step {steps:,}{trunk} (run.steps)")
    stage, _, loader = found
    if row > (size := stage.recipe.batch.global_batch_size):
        raise UserError(f"--show {step}:{row}: a step has {size:,} rows; write at most that")
    say(f"step {step:,} of {steps:,}{f' ({stage.name})' if stage.name else ''}")
    epochs = epoch_lines(loader.epochs(stage.last), by=f"step {stage.last}")
    say("\n".join([*map(about, loader.training.sequences.sources), *epochs]))
    for number, source, parts in rows_of(loader, step, {row} if row else {*range(1, ROWS + 1)}):
        say(f"\nrow {number:,} of {size:,}, from {source!r}")
        for name, tokens, learned in parts:
            most = 0 if name == PADDING else len(tokens) if row else TOKENS
            more = f" and {len(tokens) - most:,} tokens more (--show {step}:{number})" if 0 < most < len(tokens) else ""
            say(f"-- {name}{more}")
            say_tokens(loader.tokenizer, tokens[:most].tolist(), learned[:most], names_ends=loader.pairing is not None)
    loader.close()


def rows_of(loader: DataLoader, step: int, wanted: set[int]) -> Iterator[tuple[int, str, list[Part]]]:
    """Number, from 1, source and parts of these rows of a step, from the batches that it gets."""
    batches, sequences, is_text = loader.training, loader.training.sequences, loader.pairing is None
    sources = [sequences.sources[index] for index in batches.sources_of(step - 1).tolist()]
    rows = ((*one, row) for one in loader.batch(step - 1) for row in range(len(one[1])))
    for number, (inputs, targets, documents, row) in enumerate(rows, 1):
        if number not in wanted:
            continue
        source, ids = sources[number - 1], targets[row].numpy()
        learned, names, parts = ids >= 0, dict[int, str](), list[Part]()  # others are models.loss.IGNORED
        if isinstance(inputs, EncoderDecoderInputs):
            prompt = inputs.encoder_tokens[row][inputs.encoder_mask[row]].numpy()
            yield number, source.name, [("prompt", prompt, prompt < 0), ("answer", ids[learned], learned[learned])]
            continue
        pieces, files = [*sequences.pieces(batches.share_of(step - 1)[number - 1])], files_of(source)
        starts = [] if documents is None else np.flatnonzero(documents.positions[row] == 0).tolist()
        borders = [0, *accumulate(piece.end - piece.begin for piece in pieces)][:-1] if is_text else starts
        for begin, piece in zip(borders, pieces, strict=False):
            names[begin] = f"{files[piece.file] if files else piece.file}:{piece.row} from token {piece.begin:,}"
        for begin, end in pairwise([*sorted({*starts, *borders}), len(ids)]):
            # Of text, the last target of a part is the first input of the next one; of pairs, it is only a target.
            last = slice(end - 1, end if learned[end - 1] and not (is_text and end < len(ids)) else 0)
            marks = [begin > 0 and is_text and learned[begin - 1], *learned[begin : end - 1], *learned[last]]
            tokens = np.concatenate([inputs[row, begin:end].numpy(), ids[last]])
            parts.append((names.get(begin, ANEW if is_text else PADDING), tokens, np.array(marks, dtype=bool)))
        yield number, source.name, parts


def say_tokens(tokenizer: Tokenizer, tokens: Sequence[int], learned: np.ndarray, *, names_ends: bool) -> None:
    """Print tokens, the learned ones green, or in double brackets without a terminal. names_ends: of answers."""
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(tokens)] if tokens else []):
        text, before = " ".join(map(str, tokens[begin:end])), tokens[max(0, begin - 1) : begin]
        if tokenizer.backend.decoder is not None:  # in its place: some drop a space at the beginning
            text = tokenizer.decode([*before, *tokens[begin:end]]).removeprefix(tokenizer.decode(before))
        is_bare = sys.stdout.isatty() or not learned[begin]
        say(text if is_bare else f"[[{text}]]", end="", whole=True, style=GREEN if learned[begin] else DIM)
        if names_ends and learned[begin]:
            say(f" (ends with {tokenizer.backend.id_to_token(tokens[end - 1])!r}) ", end="")
    say()


def about(source: Source) -> str:
    """What a source has, and how long its first documents are."""
    shards, tokens, lengths = source.shards, source.shards.tokens, Counter[int]()
    for _, _, begin, end in islice(shards.documents(0, tokens), LOOKED_AT):
        lengths[-(-(end - begin - 1).bit_length() // 2)] += 1
    documents = sum(shard.documents for shard in shards.shards)
    lines = [f"{source.name!r}: {tokens:,} tokens{'' if shards.complete else ' so far'} in {documents:,} documents"]
    for size, count in sorted(lengths.items()):
        share = count / lengths.total()
        lines.append(f"  up to {4**size:>9,} tokens {share:>4.0%} {'#' * round(40 * share)}".rstrip())
    return "\n".join(lines)


def files_of(source: Source) -> Sequence[str]:
    """The names of a source's files, by their numbers in metrics.jsonl; none of a dataset on the hub."""
    if files := getattr(source.shards, "files", None):  # of tokens of other trainers
        return [str(file.path) for file in files]
    index = read_index(source.shards.folder)
    return index.files if index else [*map(str, find_files(source.name))]


def show_steps(stages: Stages, name: str, row: int) -> None:
    """Print which rows of which steps read a row of a file. name: its path, or the end of it. Raises UserError."""
    known, found = dict[str, None](), dict[str, list[str]]()
    for stage, steps, loader in stages:
        for index, source in enumerate(loader.training.sequences.sources):
            for number, file in enumerate(files_of(source)):
                known[file] = None
                if f"/{file}".endswith(f"/{name}") and (tokens := tokens_of(source, number, row)):
                    size = stage.recipe.batch.global_batch_size
                    what = f"{file}:{row}, tokens {tokens[0]:,} to {tokens[1] - 1:,} of {source.name!r}"
                    found.setdefault(what, []).extend(
                        f"{steps.start + place // size}:{place % size + 1}"
                        for place in places_of(loader, index, *tokens, steps=steps)
                    )
    if not found:
        why = f"there is none, or it is held out, empty, bad or not tokenized yet; files: {listed([*known][:NAMED])}"
        raise UserError(f"--show {name}:{row}: no training document of this file and row: {why}")
    for what, places in found.items():
        more = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
        say(f"{what}: {'read by step:row ' * bool(places)}{', '.join(places[:NAMED]) or 'no step reads it'}{more}")


def tokens_of(source: Source, file: int, row: int) -> tuple[int, int] | None:
    """The first token of a training document in its source, and the one after its last; None if there is no such one.
    Documents are stored in the order of their files and rows."""
    every, key = range(source.shards.tokens), lambda token: next(source.shards.documents(token, 1))[:2]
    begin, end = (side(every, (file, row), key=key) for side in (bisect_left, bisect_right))
    return (begin, end) if begin < end else None


def places_of(loader: DataLoader, index: int, begin: int, end: int, *, steps: range) -> Iterator[int]:
    """Where, in these steps, the sequences are with one of the tokens begin .. end - 1 of this source as an input; of
    pairs, those with the pair that begins there."""
    sequences, mixture = loader.training.sequences, loader.training.sequences.mixture
    first, until = (loader.training.first_of(step - 1) for step in (steps.start, steps.stop))
    source = sequences.sources[index]
    if not isinstance(sequences, Sequences):
        for number in range(first, until):
            found, pairs = sequences.pairs(number)
            if found.source is source and begin in found.pairs.starts[pairs]:
                yield number - first
        return
    slots = np.flatnonzero(mixture.place(np.arange(MIXTURE_PERIOD))[0] == index)
    for number in numbers_of(source, begin, end, until=source.offset + mixture.consumed(until)[index]):
        period, rank = divmod(number - source.offset, len(slots))
        if number >= source.offset and (place := period * MIXTURE_PERIOD + int(slots[rank])) >= first:
            yield place - first


def numbers_of(source: Source, begin: int, end: int, *, until: int) -> list[int]:
    """The sequences of a source of text, with numbers below `until`, with one of the tokens begin .. end - 1."""
    position, total, found = source.position, source.tokens, set[int]()
    order, length, row = position.fresh, position.fresh.sequence_length, total or sys.maxsize
    for number, pieces in enumerate(position.pieces(np.arange(min(position.joined, until)), total=total)):
        if any((begin - start) % row < size or (start - begin) % row < end - begin for start, size in pieces):
            found.add(number)
    for epoch in range((order.origin + until * length) // row + 2 if total else 1):
        low, high = (max(0, token + epoch * row - order.origin) for token in (begin, end))
        numbers = order.shuffled(np.arange(low // length, -(-high // length)), total=total, inverse=True)
        found |= {*(position.joined + numbers).tolist()}
    return sorted(number for number in found if number < until)
