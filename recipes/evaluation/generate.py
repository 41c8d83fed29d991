"""Generates text with a model on one device, token by token, with a key/value cache; or by the generate() of
transformers, from the model that it reads in an exported folder: for models that it defines, and for what
models/cache.py has no code for: beams, and several texts at once. V vocabulary, T tokens."""

import copy
import datetime
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch

from models.cache import KeyValueCache
from models.decoder import Decoder
from models.hf_config import INSTALL
from models.transformers_config import TransformersConfig
from parallel.dist import let_segments_grow
from parallel.errors import UserError
from parallel.kernels import without_plans
from recipes.data.config import DataConfig
from recipes.data.text.chat import ChatTemplate, chat_settings, ends_of_answers
from recipes.data.text.pair_format import PairFormat, template_of
from recipes.evaluation.opened import OpenedModel, Sampling, next_token, stream_text
from recipes.files.border import foreign
from recipes.files.screen import say
from recipes.weights.companions import ignored_settings, repetition_penalty
from recipes.weights.convert import export_checkpoint, load_weights, require_finite
from recipes.weights.locate import Weights, find_weights

# Prompt tokens per forward pass: enough to keep a device busy, and a bound on the memory of the logits.
PREFILL_TOKENS = 512
# New tokens that fit into the cache at first; it grows when there are more.
FIRST_TOKENS = 4096


def open_exported(weights: Weights, *, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """The model as transformers reads it. A checkpoint is exported to a temporary folder first. Raises UserError."""
    try:
        from models.transformers import read_folder
    except ImportError:
        raise UserError(INSTALL) from None
    tokenizer, reads_prompts = weights.tokenizer, weights.model_in(str(dtype)).is_encoder_decoder
    with TemporaryDirectory(prefix="shardwright-") as place:
        folder = weights.path
        if weights.is_checkpoint:
            folder = Path(place) / "exported"
            export_checkpoint(weights.path, folder, dtype=dtype)
        else:
            weights.stored_tensors  # noqa: B018  raises what transformers would only warn of
        with foreign(f"transformers cannot read {weights.path}"):
            model = read_folder(folder, dtype=dtype, device=device)
    require_finite({f"{name} in {weights.path}": values for name, values in model.named_parameters()})
    ends = weights.description.ends(where=weights.path)
    return OpenedModel(model, tokenizer, weights.facts_of_text, ends, encoder_decoder=reads_prompts)


def check_search(*, beams: int, outputs: int, temperature: float | None) -> None:
    """Raises UserError for values that do not go together. temperature: None = the default, which samples."""
    if beams < 1 or outputs < 1:
        name, value = ("beams", beams) if beams < 1 else ("outputs", outputs)
        raise UserError(f"{name} = {value}: must be 1 or more")
    if outputs > beams and (beams > 1 or temperature == 0):
        sampled = ", or sample: --temperature 0.8" if beams == 1 else ""
        found = "one beam finds one text" if beams == 1 else f"{beams} beams find no more than {beams} texts"
        raise UserError(f"outputs = {outputs}: {found}; write --beams {outputs}{sampled}")


@torch.no_grad()
def texts_of(
    opened: OpenedModel, prompt_ids: Sequence[int], sampling: Sampling, *, beams: int, outputs: int
) -> list[list[int]]:
    """The tokens of each text after the prompt, the best first, without the token that ends it.

    Generation settings that came with the model hold for what is not an argument here, such as a repetition penalty.

    Args:
        opened: what open_exported() returned.
        prompt_ids: tokens of the prompt.
        sampling: how tokens are drawn.
        beams: how many texts are followed at once.
        outputs: how many texts to return.
    """
    model, ends = cast(Any, opened.model), opened.stop_ids()
    settings = copy.deepcopy(model.generation_config)
    sampled = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    settings.update(
        do_sample=sampling.temperature > 0,
        **(sampled if sampling.temperature else dict.fromkeys(sampled)),
        num_beams=beams,
        num_return_sequences=outputs,
        max_length=None,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends) if settings.pad_token_id is None else settings.pad_token_id,
    )
    prompt = torch.tensor([list(prompt_ids)], device=model.device)  # (1, T)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else [], device_type=model.device.type):
        torch.manual_seed(sampling.seed)
        with foreign("transformers cannot generate with these options and generation_config.json"), without_plans():
            rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    begin = 1 if opened.encoder_decoder else len(prompt_ids)  # an answer begins after the token that starts a decoder
    return [[*takewhile(lambda token: token not in ends, row[begin:])] for row in rows.tolist()]


class ReadyModel(NamedTuple):
    """A model with what belongs to its prompts."""

    text: OpenedModel  # as it continues texts
    chat: OpenedModel  # as it answers messages
    template: ChatTemplate | None  # of messages
    problem: str  # why there is no template
    around: tuple[str, str]  # texts before and after each prompt, as in its training
    context: int  # tokens of a prompt and its answer at most
    penalty: float  # of repetitions


def open_model(path: str | Path | Weights, *, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    """Load a Hugging Face folder, a checkpoint, or a run's newest one onto a device. Raises UserError if impossible."""
    weights = path if isinstance(path, Weights) else find_weights(path)
    if isinstance(weights.model, TransformersConfig):
        return open_exported(weights, dtype=dtype, device=device)
    tokenizer = weights.tokenizer
    with torch.device("meta"):
        model = Decoder(weights.model_in(str(dtype).removeprefix("torch.")))
    model = model.to(dtype)
    if model.routers is not None:  # experts are chosen in float32
        model.routers.float()
    model = model.to_empty(device=device)
    load_weights(model, weights)
    return OpenedModel(model, tokenizer, weights.facts_of_text, weights.description.ends(where=weights.path))


def choose_device(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """The given device and type; by default a GPU if there is one, with bfloat16. Raises UserError if unusable."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda", "mps"):
            raise UserError(f"device {name!r}: must be cpu, cuda or mps")
        if found.type == "cuda":
            let_segments_grow()  # the cache of keys and values is copied into larger ones
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise UserError(f"device {name!r} is not available: {str(error).splitlines()[0]}") from None
    return found, getattr(torch, dtype or ("float32" if found.type == "cpu" else "bfloat16"))


def open_for_prompts(
    weights: Weights, data: DataConfig | None, *, template: str | None, open_as: Callable[..., OpenedModel]
) -> ReadyModel:
    """A model with what belongs to its prompts. data: of the run that made it. template: a file; "" = what came with
    the weights; None = no chats. open_as: such as open_model(). Raises UserError like it, and for an unusable file."""
    companions, found, ends = weights.description.companions, None, tuple[int, ...]()
    if ignored := [] if weights.model.by_transformers else ignored_settings(companions):
        say(f"generation_config.json: not obeyed here: {', '.join(ignored)}", to=2)
    penalty, problem = repetition_penalty(companions, where=weights.path), ""
    try:
        if template is not None:
            date = data.chat_date if data and data.chat_date else datetime.date.today().isoformat()
            settings = chat_settings(companions, template=template, date=date)
            found = template_of(PairFormat(**settings), weights.tokenizer)
            ends, _ = ends_of_answers(found, weights.tokenizer)
    except UserError as error:  # in the words of a recipe
        problem = str(error).partition(": ")[2].partition(";")[0]
        if template:
            raise UserError(f"--chat: {problem}; write --chat-template FILE.jinja") from None
    opened = open_as(weights)
    text = replace(opened, as_pairs=bool(data and data.has_pairs))
    chat = replace(opened, as_pairs=True, ends=(*opened.ends, *ends))
    around = (data.prompt_prefix, data.prompt_suffix) if data else ("", "")
    longest = opened.facts.context_length
    context = min(longest, getattr(weights.model, "positions", 0) or longest)
    return ReadyModel(text, chat, found, problem, around, context, penalty)


def continue_text(
    opened: OpenedModel,
    prompt: str,
    sampling: Sampling,
    *,
    log: Callable[[str], object],
    log_prompt: Callable[[str], object] | None = None,
    beams: int = 1,
    outputs: int = 1,
) -> tuple[int, float]:
    """Pass prompt and continuation to `log`, piece by piece, to the end of a document. Returns (new tokens, seconds).

    log_prompt: receives the prompt instead of `log`. beams, outputs: of models of transformers; several outputs have a
    line above each.
    """
    started, made = time.perf_counter(), list[int]()
    ids = opened.prompt_ids(prompt)
    for number, text in enumerate(texts_after(opened, ids, sampling, made=made, beams=beams, outputs=outputs), 1):
        if outputs > 1:
            log(("\n" if number > 1 else "") + f"--- {number} of {outputs}\n")
        (log_prompt or log)(prompt + ("\n" if opened.encoder_decoder else ""))
        for piece in text:
            log(piece)
    return len(made), time.perf_counter() - started


def texts_after(
    opened: OpenedModel, ids: Sequence[int], sampling: Sampling, *, made: list[int], beams: int = 1, outputs: int = 1
) -> Iterator[Iterator[str]]:
    """Yield the texts after a prompt, each in pieces as they come. made: receives their tokens."""

    def noted(tokens: Iterable[int]) -> Iterator[int]:
        for token in tokens:
            made.append(token)
            yield token

    several: Iterable[Iterable[int]]
    if isinstance(opened.model, Decoder):
        several = [generate(opened.model, ids, sampling, stop_ids=opened.stop_ids())]
    else:
        several = texts_of(opened, ids, sampling, beams=beams, outputs=outputs)
    for tokens in several:
        yield stream_text(noted(tokens), opened.tokenizer.decode, after=() if opened.encoder_decoder else ids)


def generate(
    model: Decoder, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """Yield the tokens after the prompt, up to one of stop_ids. Raises UserError for no prompt, wrong arguments, and
    NaN or infinite logits. model: a plain one on one device, not sharded."""
    sampling.require_possible()
    if not model.config.part("attention").cache:
        raise UserError(f'model.attention = "{model.config.attention}" has no cache to generate with')
    if not prompt_ids:
        raise UserError("the prompt has no tokens; at least one is needed")
    device = next(model.parameters()).device
    longest = len(prompt_ids) + sampling.max_tokens - 1  # the last token is not fed back
    capacity = min(longest, len(prompt_ids) + FIRST_TOKENS)
    cache = _cache(model, capacity)
    generator = torch.Generator().manual_seed(sampling.seed)
    new, text = torch.tensor([prompt_ids], device=device), list(prompt_ids)  # (1, T)
    for _ in range(sampling.max_tokens):
        if cache.length + new.shape[1] > capacity:
            capacity = min(longest, 2 * capacity)
            cache = _cache(model, capacity, copy=cache)
        with torch.no_grad(), without_plans():  # not around the yield, where it would apply to the caller too
            for piece in new.split(PREFILL_TOKENS, dim=1):
                logits = model(piece, cache=cache)[0, -1]  # (V,)
        logits = logits.float().cpu()  # the one wait for a device
        if not logits.isfinite().all():
            raise UserError(f"after {cache.length} tokens the logits are NaN or infinite: the weights are unusable")
        token = next_token(logits, sampling, generator=generator, seen=text)
        if token in stop_ids:
            return
        text.append(token)
        yield token
        new = torch.tensor([[token]], device=device)  # (1, 1)


def _cache(model: Decoder, capacity: int, *, copy: KeyValueCache | None = None) -> KeyValueCache:
    """A cache for `capacity` tokens, empty or with the contents of `copy`."""
    weight = next(model.parameters())
    cache = KeyValueCache(model.config, batch=1, max_length=capacity, dtype=weight.dtype, device=weight.device)
    for old, new in zip(copy.layers if copy else (), cache.layers, strict=False):
        new.append(old.key[:, :, : old.length], old.value[:, :, : old.length])
    return cache
