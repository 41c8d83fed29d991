"""Requests of the completions API that many clients speak: checked, and answered by one model. serve.py has HTTP."""

import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from annotated_types import MaxLen
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from parallel.errors import UserError, listed
from recipes.evaluation.generate import ReadyModel, texts_after
from recipes.evaluation.opened import OpenedModel, Sampling

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
    stop: str | Annotated[list[str], MaxLen(16)] = ""
    stream: bool = False
    stream_options: dict[str, bool] = {}
    user: str = ""


class Answer(NamedTuple):
    """An answer that can be written."""

    model: str
    opened: OpenedModel
    prompt_ids: list[int]
    sampling: Sampling
    asked: Asked

    def write(self) -> Iterator[str | tuple[str, int]]:
        """Yield the text in pieces, then why it ended ("stop" or "length") and the number of its tokens."""
        made = list[int]()
        text = next(texts_after(self.opened, self.prompt_ids, self.sampling, made=made))
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
        begun = (n for stop in stops for n in range(min(len(stop), len(held) + 1)) if held.endswith(stop[:n]))
        ready = len(held) - max(begun, default=0)  # the rest may become one of them
        yield held[:ready]
        held = held[ready:]
    yield held
    return False


def prepared(body: bytes, models: Mapping[str, ReadyModel], *, chat: bool) -> Answer:
    """The answer to a request. Raises Refusal."""
    asked = _asked(body, chat=chat)
    name = asked.model or next(iter(models))
    if (model := models.get(name)) is None:
        raise Refusal(f"no model {name!r} here; write {listed(models, last='or')}", 404, "model_not_found")
    opened = model.chat if chat else model.text
    try:
        if not chat:
            prompt = f"{model.around[0]}{asked.prompt}{model.around[1]}"
        elif model.template is None:
            raise Refusal(f"{name} cannot chat: {model.problem}; /v1/completions continues texts", code="no_chat")
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
