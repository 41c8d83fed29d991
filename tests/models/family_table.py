"""Which families of transformers train here, each from a tiny config.json: built, compared, exported and read back.

For the lists of docs/models.md, which `pytest -m exhaustive tests/models/test_family_table.py` writes. One process
on the CPU, in float32, against the model as transformers computes it with eager attention, and torch's AdamW.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.documents import Documents
from models.encoder_decoder import EncoderDecoderInputs
from models.interface import interface_of
from models.loss import IGNORED
from models.transformers_config import TransformersConfig
from parallel.dist import World, start, stop
from parallel.errors import UserError
from parallel.fsdp import plain_name
from recipes.data.batches import MicroBatch
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.recipe.load import CONFIGS, LoadedRecipe, load_run
from recipes.training.build import Built, build
from recipes.training.step import train_step
from recipes.weights.locate import trained_description
from tests.models.family_configs import FAMILIES
from tests.whole import export_model

PAGE = CONFIGS.parent / "docs" / "models.md"
BEGIN = "<!-- Written by tests/models/test_family_table.py. -->\n"
END = "<!-- Written by tests/models/test_family_table.py: end. -->\n"
STEPS, FEWER_STEPS = 10, 3
LR = 1e-3
ROWS, TOKENS, PROMPT_TOKENS = 4, 32, 24
VOCABULARY = 512
END_OF_DOCUMENT = 2
Row = dict[str, Any]


def measure(family: str, *, compiles: bool) -> Row:
    """What happens to one family. A refusal is a result; any other error is a defect and ends the program."""
    world = start("cpu", seed=0)
    torch.compiler.reset()  # else the blocks of several models count as one that is compiled again and again
    try:
        with TemporaryDirectory(prefix="family-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(FAMILIES[family]), encoding="utf-8")
            return _measure(Path(folder), world, compiles=compiles)
    except UserError as error:
        text = " ".join(str(error).split())  # of a recipe's refusal, what follows the name of the file
        return {"refused": text.rpartition("not supported: ")[2] or text}
    finally:
        stop()


def _measure(folder: Path, world: World, *, compiles: bool) -> Row:
    loaded = recipe_of(folder)
    model = loaded.recipe.model
    if not isinstance(model, TransformersConfig):
        return {"path": "models/decoder.py"}
    built = build(loaded.recipe, world)
    interface = interface_of(built.model)
    row: Row = {
        "layers": " + ".join(str(len(stack)) for stack in interface.stacks),
        "head": "tied" if interface.head is None else "its own",
    }
    exported = folder / "exported"
    export(built, loaded, exported, world)
    theirs = their_model(exported)
    row |= {"folder": read_back(built, theirs, exported, folder / "again", world)}
    data = [micro_batches(step, model) for step in range(STEPS)]
    row |= {"gradients": gradient_gap(built, theirs, data[0])}
    reference = their_losses(theirs, data)
    row |= {"losses": largest_gap(losses(built, data, world), reference)}
    for mode in ("selective", "full"):
        changed = build(recipe_of(folder, f"--activation_checkpointing.mode={mode}").recipe, world)
        row |= {mode: largest_gap(losses(changed, data[:FEWER_STEPS], world), reference)}
    if compiles:
        changed = build(recipe_of(folder, "--compile.enabled=true").recipe, world)
        row |= {"compile": largest_gap(losses(changed, data[:FEWER_STEPS], world), reference)}
    return row | {"documents": "padded" if model.is_encoder_decoder else documents_gap(folder, world)}


def recipe_of(folder: Path, *changes: str) -> LoadedRecipe:
    """A recipe for the config.json of a folder, in float32."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    base = CONFIGS / ("t5_debug.toml" if settings.get("is_encoder_decoder") else "gpt2_debug.toml")
    weights = any(folder.glob("*.safetensors"))
    where = ("from_weights", "--model.weights", "--model.config=") if weights else ("from_config", "--model.config")
    sizes = {"sequence_length": TOKENS, "global_batch_size": ROWS, "micro_batch_size": ROWS // 2}
    tokenizer = "from_weights" if weights else f"train:{VOCABULARY}"
    arguments = [
        *(f"--model.name={where[0]}", f"{where[1]}={folder}", *where[2:]),
        *(f"--data.tokenizer={tokenizer}", "--fsdp.param_dtype=float32", "--optimizer.weight_decay=0"),
        *(f"--batch.{name}={size}" for name, size in sizes.items()),
    ]
    return load_run(base, [*arguments, *changes], processes=1, nodes=1)


# The same numbers


def micro_batches(step: int, model: TransformersConfig) -> list[MicroBatch]:
    """Two micro-batches of random tokens; two batches in turn, so that a model learns them."""
    generator = torch.Generator().manual_seed(step % 2)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)

    row = tokens(TOKENS + 1)
    inputs, targets = row[:, :-1], row[:, 1:].clone()
    half = ROWS // 2
    if not model.is_encoder_decoder:
        return [(inputs[part], targets[part], None) for part in (slice(half), slice(half, ROWS))]
    prompts, mask = tokens(PROMPT_TOKENS), torch.ones(ROWS, PROMPT_TOKENS, dtype=torch.bool)
    for index in range(ROWS):  # prompts and answers of different lengths
        mask[index, PROMPT_TOKENS - 3 * index :] = index == 0
        targets[index, TOKENS - 5 * index :] = IGNORED if index else targets[index, TOKENS:]
    prompts = prompts.where(mask, model.settings["pad_token_id"])
    inputs[:, 0] = model.settings["decoder_start_token_id"]
    return [
        (EncoderDecoderInputs(prompts[part], mask[part], inputs[part]), targets[part], None)
        for part in (slice(half), slice(half, ROWS))
    ]


def losses(built: Built, data: Sequence[list[MicroBatch]], world: World) -> list[float]:
    """The loss of each step of training."""
    clock, guard = RunClock(world.device), StepGuard(built.mesh, device=world.device, max_skipped_steps=1)
    return [
        train_step(built, batches, step=step, learning_rate=LR, guard=guard, clock=clock).loss.item()
        for step, batches in enumerate(data, 1)
    ]


def their_model(folder: Path) -> nn.Module:
    """The model of a folder as transformers computes it, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: nn.Module = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return model


def their_loss(theirs: nn.Module, batches: Sequence[MicroBatch]) -> Tensor:
    """The mean loss over the targets of all micro-batches."""
    summed, count = torch.zeros(()), 0
    for inputs, targets, _ in batches:
        if isinstance(inputs, EncoderDecoderInputs):
            masks = {"attention_mask": inputs.encoder_mask.long(), "decoder_input_ids": inputs.decoder_tokens}
            logits = theirs(input_ids=inputs.encoder_tokens, use_cache=False, **masks).logits
        else:
            logits = theirs(input_ids=inputs, use_cache=False).logits
        summed = summed + cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        count += int((targets != IGNORED).sum())
    return summed / count


def their_losses(theirs: nn.Module, data: Sequence[list[MicroBatch]]) -> list[float]:
    """The loss of each step of training with torch's AdamW."""
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for batches in data:
        optimizer.zero_grad()
        loss = their_loss(theirs, batches)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=False))


def gradient_gap(built: Built, theirs: nn.Module, batches: Sequence[MicroBatch]) -> float:
    """The largest relative difference of the gradient of a parameter, by name, before the first step."""
    count = sum(int((targets != IGNORED).sum()) for _, targets, _ in batches)
    for inputs, targets, documents in batches:
        (built.model(inputs, targets, documents=documents) / count).backward()
    ours = {name: parameter.grad for name, parameter in plain_parameters(built)}
    built.optimizer.zero_grad()
    theirs.zero_grad()
    their_loss(theirs, batches).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    theirs.zero_grad()
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values() if gradient is not None)

    def gap(name: str) -> float:
        one, other = whole(ours[name]), expected[name]
        if one is None or other is None:
            return 0.0 if one is None and other is None else float("inf")
        one = one.T if is_conv1d(theirs, name) else one
        # The bias of keys has a gradient of zero, up to rounding: not relative to its own size.
        return float((one - other).norm()) / max(float(other.norm()), 1e-4 * largest)

    return max(map(gap, expected))


def is_conv1d(theirs: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of GPT-2's kind of linear, which is stored (in, out)."""
    return name.endswith(".weight") and type(theirs.get_submodule(name[: -len(".weight")])).__name__ == "Conv1D"


def plain_parameters(built: Built) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with transformers' name for it."""
    for name, parameter in built.model.named_parameters():
        yield plain_name(name).removeprefix("model."), parameter


def whole(tensor: Tensor | None) -> Tensor | None:
    """The plain tensor of one process."""
    return None if tensor is None else tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Folders


def export(built: Built, loaded: LoadedRecipe, folder: Path, world: World) -> None:
    """Write a Hugging Face folder."""
    description = trained_description(loaded.recipe.model, tokenizer(), loaded.weights, length=TOKENS, log=print)
    export_model(built.model, folder, description, world=world)


def tokenizer(end: int = END_OF_DOCUMENT) -> Tokenizer:
    """A tokenizer with as many entries as the models have. end: the one that ends a document."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    words = {"</s>" if index == end else f"<{index}>": index for index in range(VOCABULARY)}
    library = Library(WordLevel(words, unk_token="<0>"))
    library.add_special_tokens([AddedToken("</s>", special=True)])
    return build_tokenizer(library.to_str(), where=Path("tokenizer.json"), ends=(end,))


def read_back(built: Built, theirs: nn.Module, exported: Path, again: Path, world: World) -> str:
    """Whether transformers reads the very weights, and whether a model that starts from them writes the same bytes."""
    expected = dict(theirs.named_parameters())
    for name, parameter in plain_parameters(built):
        values = whole(parameter.detach())
        assert values is not None
        if not torch.equal(values.T if is_conv1d(theirs, name) else values, expected[name]):
            return f"{name} differs"
    loaded = recipe_of(exported)
    export(build(loaded.recipe, world, weights=loaded.weights), loaded, again, world)
    files = [file.name for file in exported.glob("*.safetensors")]
    same = all((exported / file).read_bytes() == (again / file).read_bytes() for file in files)
    return "same bytes" if files and same else "differs"


def documents_gap(folder: Path, world: World) -> float | str:
    """How far the loss of packed documents is from that of each by itself; "refused" if they cannot be kept apart."""
    try:
        built = build(recipe_of(folder, "--data.document_mask=true").recipe, world)
    except UserError:
        return "refused"
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    ends = (10, 15)  # of the first document of each row
    for row, end in enumerate(ends):
        tokens[row, end] = END_OF_DOCUMENT
    targets = tokens.roll(-1, dims=1)
    documents = Documents.of(tokens, end_of_document=END_OF_DOCUMENT)
    with torch.no_grad():
        packed = built.model(tokens, targets, documents=documents).item()
        alone = 0.0
        for row, end in enumerate(ends):
            for part in (slice(end + 1), slice(end + 1, TOKENS)):
                alone += built.model(tokens[row : row + 1, part], targets[row : row + 1, part]).item()
        mixed = built.model(tokens, targets).item()
    assert abs(mixed - alone) / alone > 1e-6, "the documents see each other no matter what: nothing was tested"
    return abs(packed - alone) / alone


# The page

COMPARED: Mapping[str, str] = {
    "gradients": "first gradients",
    "losses": f"{STEPS} losses",
    "selective": "losses with selective",
    "full": "and full checkpointing",
    "compile": "with compile",
    "documents": "of packed documents",
}
"""What is compared: by its name in a row and on the page."""


def lists(rows: Mapping[str, Row]) -> str:
    """The families that train, by what becomes of packed documents; the largest differences; what is refused."""
    kinds: dict[str, list[str]] = {"masked": [], "refused": [], "padded": [], "ours": []}
    reasons: dict[str, list[str]] = {}
    for family, row in rows.items():
        if "refused" in row:  # for mixtures, "num_experts = 4: mixtures of experts ..."
            reasons.setdefault(re.sub(r"^\w+ = .*?: (?=[a-z])", "", row["refused"]), []).append(family)
        else:
            documents = row.get("documents", "ours")
            kinds[documents if isinstance(documents, str) else "masked"].append(family)
    lines = [
        *_item("Decoders, with `data.document_mask`", kinds["masked"]),
        *_item("Decoders, without it", kinds["refused"]),
        *_item("Encoder-decoder models", kinds["padded"]),
        *_item("By `models/decoder.py`", kinds["ours"]),
        *_item("Largest differences", [f"{title} {_largest(rows, column)}" for column, title in COMPARED.items()]),
        *_item(
            "Exported folders that differ", [name for name, row in rows.items() if "differs" in row.get("folder", "")]
        ),
    ]
    refused = [line for reason, families in reasons.items() for line in _item("; ".join(families), [reason])]
    return "\n".join(["", *lines, "", REFUSALS, "", *refused, ""])


REFUSALS = "Refused:"


def _largest(rows: Mapping[str, Row], column: str) -> str:
    found = [row[column] for row in rows.values() if isinstance(row.get(column), float)]
    return f"{max(found):.0e}" if found else "none"


def _item(title: str, words: Sequence[str]) -> list[str]:
    text = f"- {title}: {'; '.join(words)}"
    return wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) if words else []
