"""Requests of the completions API that many clients speak: checked, and answered by one model. serve.py has HTTP."""

import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from models.decoder import Decoder
from parallel.errors import UserError, listed
from recipes.data.config import DataConfig
from recipes.data.text.chat import ChatTemplate, ends_of_answers
from recipes.evaluation.by_transformers import texts_of
from recipes.evaluation.conversation import chat_template_of
from recipes.evaluation.generate import generate, penalty_of
from recipes.evaluation.opened import OpenedModel, stream_text
from recipes.evaluation.sampling import Sampling
from recipes.weights.locate import Weights

NOTHING = {"n": 1, "best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0}
"""Fields whose only possible value changes nothing."""


class Refusal(UserError):
    """Why a request gets no answer, with the HTTP status and the code by which programs know it."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Message(BaseModel, strict=True, extra="allow"):
    """A message of a chat. Its other fields are for the template."""

    role: str
    content: str


class Asked(BaseModel, strict=True, extra="forbid"):
    """A request of either kind, with the defaults of the API."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] = ""
    stream: bool = False
    stream_options: dict[str, bool] = {}
    user: str = ""


class ServedModel(NamedTuple):
    """A model that answers."""

    text: OpenedModel  # as it continues texts
    chat: OpenedModel  # as it answers messages
    template: ChatTemplate | str  # of messages, or why there is none
    around: tuple[str, str]  # texts before and after each prompt, as in its training
    context: int  # tokens of a prompt and its answer at most
    penalty: float


def served(weights: Weights, opened: OpenedModel, data: DataConfig | None, *, template: str) -> ServedModel:
    """A model with what its clients see. data: of the run that made it. template: a file; "" = what came with the
    weights. Raises UserError for a file that cannot be used."""
    found: ChatTemplate | str
    ends: tuple[int, ...] = ()
    try:
        found = chat_template_of(weights, data, file=template)
        ends, _ = ends_of_answers(found, weights.tokenizer)
    except UserError as error:
        if template:
            raise
        found = str(error).removeprefix("--chat: ")
    text = replace(opened, as_pairs=bool(data and data.has_pairs))
    chat = replace(opened, as_pairs=True, ends=(*opened.ends, *ends))
    around = (data.prompt_prefix, data.prompt_suffix) if data else ("", "")
    context = min(opened.facts.context_length, getattr(weights.model, "positions", 0) or opened.facts.context_length)
    return ServedModel(text, chat, found, around, context, penalty_of(weights))


class Answer(NamedTuple):
    """An answer that can be written."""

    model: str
    opened: OpenedModel
    prompt_ids: list[int]
    sampling: Sampling
    asked: Asked

    def write(self) -> Iterator[str | tuple[str, int]]:
        """Yield the text in pieces, then why it ended ("stop" or "length") and the number of its tokens."""
        opened, ids, made = self.opened, self.prompt_ids, list[int]()

        def tokens() -> Iterator[int]:
            if isinstance(opened.model, Decoder):
                found = generate(opened.model, ids, self.sampling, stop_ids=opened.stop_ids())
            else:
                found = iter(texts_of(opened, ids, self.sampling, beams=1, outputs=1)[0])
            for token in found:
                made.append(token)
                yield token

        text = stream_text(tokens(), opened.tokenizer.decode, after=() if opened.encoder_decoder else ids)
        stop = self.asked.stop
        stopped = yield from before_one_of([stop] if isinstance(stop, str) else stop, text)
        yield "stop" if stopped or len(made) < self.sampling.max_tokens else "length", len(made)


def before_one_of(stops: Sequence[str], pieces: Iterator[str]) -> Generator[str, None, bool]:
    """Yield the text before the first of these texts in it; "" is none. Returns whether one was there."""
    held = ""
    for piece in pieces:
        held += piece
        if found := [held.index(stop) for stop in stops if stop and stop in held]:
            yield held[: min(found)]
            return True
        begun = (n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n]))
        ready = len(held) - max(begun, default=0)  # the rest may become one of them
        yield held[:ready]
        held = held[ready:]
    yield held
    return False


def prepared(body: bytes, models: Mapping[str, ServedModel], *, chat: bool) -> Answer:
    """The answer to a request. Raises Refusal."""
    asked = _asked(body, chat=chat)
    name = asked.model or next(iter(models))
    if (model := models.get(name)) is None:
        raise Refusal(f"no model {name!r} here; write {listed(models, last='or')}", 404, "model_not_found")
    opened = model.chat if chat else model.text
    try:
        if not chat:
            prompt = f"{model.around[0]}{asked.prompt}{model.around[1]}"
        elif isinstance(model.template, str):
            raise Refusal(f"{name} cannot chat: {model.template}; /v1/completions continues texts", code="no_chat")
        else:
            prompt = model.template.prompt([message.model_dump() for message in asked.messages or ()])
        ids = opened.prompt_ids(prompt)
        room = model.context - (0 if opened.encoder_decoder else len(ids))
        wanted = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        most = (room if chat else min(room, 16)) if wanted is None else wanted
        if not ids or room < 1 or most > room or len(ids) > model.context:
            lengths = f"a prompt of {len(ids):,} tokens and an answer of {max(most, 1):,}"
            rule = f"{name} takes at least 1 of each, and at most {model.context:,} together"
            raise Refusal(f"{lengths}: {rule}", code="context_length_exceeded")
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        sampling = Sampling(most, asked.temperature, asked.top_k, asked.top_p, seed, model.penalty)
        sampling.require_possible()
    except UserError as error:
        raise error if isinstance(error, Refusal) else Refusal(str(error)) from None
    return Answer(name, opened, ids, sampling, asked)


def _asked(body: bytes, *, chat: bool) -> Asked:
    try:
        given = {name: value for name, value in from_json(body).items() if value is not None}
        asked = Asked(**{name: value for name, value in given.items() if NOTHING.get(name, Ellipsis) != value})
    except ValidationError as errors:
        lines = []
        for one in errors.errors():
            rule = "not possible here" if one["type"] == "extra_forbidden" else one["msg"]
            lines.append(f"{'.'.join(map(str, one['loc']))} = {to_json(one['input']).decode():.99}: {rule}")
        raise Refusal("\n".join(lines)) from None
    except (ValueError, AttributeError, TypeError) as error:
        raise Refusal(f"the request is not a JSON object: {error}") from None
    if not asked.messages if chat else asked.prompt is None:
        raise Refusal(f"{'messages' if chat else 'prompt'}: missing")
    return asked
