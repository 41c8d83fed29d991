"""Rows of prompts and answers, or of the messages of a chat, as tokens of which only the answers are learned. A pair is
stored as one document of 32-bit numbers: token ids, with a bit for the first one and a bit for each learned one.
Imports no torch."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from parallel.errors import UserError
from recipes.data.text.answers import ASSISTANT, CONTENT, ROLE
from recipes.data.text.row import PLAIN_TEXT, Row, no_such_field, text_or_problem
from recipes.files.border import ForeignError, foreign

if TYPE_CHECKING:
    from recipes.data.text.chat import ChatTemplate
    from recipes.data.text.tokenizer import Tokenizer

LEARNED, FIRST = 1 << 31, 1 << 30
"""Bits of a stored token: it is a target of the loss; it begins a pair."""
ID = FIRST - 1
"""The other bits: its id."""
PAIR_TYPE = np.dtype("<u4")
ANSWERS = 2
"""The rules by which the answers of a chat are found; raise it when other tokens are learned."""
SETTINGS = {
    "prompt": "prompt_field",
    "answer": "answer_field",
    "messages": "messages_field",
    "prefix": "prompt_prefix",
    "suffix": "prompt_suffix",
}
"""The fields of PairFormat that [data] has under other names."""
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""What ShareGPT's data sets call roles, in "from" beside "value"."""
THOUGHTS = "reasoning_content", "thinking", "reasoning"
"""Names that data sets give to what an assistant thought before its answer."""


@dataclass(frozen=True)
class PairFormat:
    """The fields of a row that make a pair, and how they become tokens. Its repr() is in the source's fingerprint."""

    prompt: str = ""
    """Name of the field with the prompt."""
    answer: str = ""
    messages: str = ""
    """Name of the field with a chat, instead of the two."""
    prefix: str = ""
    """Text before every prompt."""
    suffix: str = ""
    """Text after every prompt."""
    encoder_decoder: bool = False
    """Whether prompt and answer are two texts, each with the special tokens that the tokenizer adds to a text."""
    template: str = ""
    """The Jinja text that makes one text of a chat."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """What the template knows as bos_token and so on."""
    date: str = ""
    """What the template takes for today, as YYYY-MM-DD."""
    rules: int = 0
    """ANSWERS for chats whose answers end as answers.py finds; 0 for those of older versions, and for pairs."""

    def __repr__(self) -> str:
        return f"PairFormat({', '.join(f'{name}={value!r}' for name, value in self._stored.items())})"

    @property
    def _stored(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value or name != "rules"}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        return (self.messages,) if self.messages else (self.prompt, self.answer)

    @property
    def tokens(self) -> list[str]:
        """Those that the template states in its first line, which a tokenizer that is trained for it gets."""
        stated = re.match(r"\{#-? tokens: (.*?) -?#\}", self.template)
        return stated[1].split() if stated else []

    @property
    def summary(self) -> str:
        """All of it, for comparison."""
        return json.dumps(self._stored, sort_keys=True)

    @property
    def options(self) -> str:
        """The options of scripts/prepare_data.py that read these fields, all but those of the chat template."""
        options = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in self._settings.items()]
        return " ".join([*options, *["--encoder-decoder"] * self.encoder_decoder])

    @property
    def in_recipe(self) -> list[str]:
        """The lines of [data] that read these fields, all but a chat template, which lies beside the tokenizer."""
        dated = {"chat_date": self.date} if self.date else {}
        return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in (self._settings | dated).items()]

    @property
    def _settings(self) -> dict[str, str]:
        return {setting: value for name, setting in SETTINGS.items() if (value := getattr(self, name))}

    @property
    def setting(self) -> str:
        """What names the fields in a recipe."""
        return "data.messages_field" if self.messages else "data.prompt_field, data.answer_field"

    def require_rows(self, files: Sequence[str]) -> None:
        """Raises UserError if one of these files has no fields."""
        if plain := [name for name in files if name.lower().endswith(PLAIN_TEXT)]:
            raise UserError(
                f"{self.setting}: '{plain[0]}' is plain text, which has no fields; give .jsonl, .parquet or .csv files"
            )

    def text_of(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """(the pair as JSON, "") or ("", problem) of a row's fields. JSON, so that a pair is one text like any other:
        it is hashed to be held out, and counted."""
        if missing := [name for name in self.fields if name not in row]:
            return "", no_such_field(missing[0], row)
        if self.messages:
            return self._chat(row[self.messages])
        texts = []
        for name in self.fields:
            text, problem = text_or_problem(row[name], text_field=name)
            if problem:
                return "", problem
            texts.append(text)
        blank = [name for name, text in zip(("prompt", "answer"), texts, strict=True) if not text.strip()]
        if len(blank) == 1:
            return "", f"empty {blank[0]}: field {getattr(self, blank[0])!r} holds no text"
        return "" if blank else json.dumps(texts, ensure_ascii=False), ""

    def _chat(self, messages: Any) -> tuple[str, str]:
        if isinstance(messages, str):  # .csv has nothing but text, and some tables keep their chats so
            try:
                messages = json.loads(messages)
            except (ValueError, RecursionError):
                return "", f"not messages: the text in field {self.messages!r} is not JSON"
        if messages is None:
            return "", "null"
        if not isinstance(messages, list):
            return "", f"not messages: field {self.messages!r} holds {type(messages).__name__}, not a list"
        if not messages:
            return "", ""
        messages = [_with_role(message) for message in messages]
        if problem := next(filter(None, map(_message_problem, messages)), ""):
            return "", problem
        answers = [message for message in messages if message[ROLE] == ASSISTANT]
        if not any(message.get(CONTENT) or message.get("tool_calls") for message in answers):
            return "", f'no answer: no message has the role "{ASSISTANT}" and a content'
        try:
            text = json.dumps([_plain(message) for message in messages], ensure_ascii=False)
        except (TypeError, ValueError) as error:
            return "", f"not messages: {error}"
        return text_or_problem(text, text_field=self.messages)

    def words_of(self, text: str) -> str:
        """What a person wrote in the JSON of a pair, to train a tokenizer on."""
        return "\n".join(part if isinstance(part, str) else str(part.get(CONTENT) or "") for part in json.loads(text))


PairFields: TypeAlias = "str | PairFormat"
"""What is read of a row: its text field, or those that make a pair."""


def prepared_otherwise(prepared: str, expected: str) -> str:
    """What is wrong with shards that were prepared with one format of pairs, or as text, for a recipe with another; ""
    where they differ in nothing that the older of two versions wrote. prepared, expected: summaries, "" for text."""
    if not prepared:
        return (
            "holds text, not pairs; prepare its pairs (scripts/prepare_data.py --prompt-field ...), or name no fields"
        )
    if not expected:
        return "holds pairs, not text; write the fields in [data] that it was prepared with, such as prompt_field"
    then, now = json.loads(prepared), json.loads(expected)
    names = [name for name in then if then[name] != now.get(name)]
    if not names:
        return ""
    shown = "; ".join(f"{name}: {str(then[name])[:60]!r} there, {str(now.get(name))[:60]!r} here" for name in names)
    return f"holds pairs that were made otherwise ({shown}); write the same in [data], or prepare it again"


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers gives it to a template: without nulls, which many templates write as "None" (and tables
    give every message every field that any message has), and with its thoughts under each name that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    thoughts = next((kept[name] for name in THOUGHTS if name in kept), None)
    return kept if thoughts is None else {"thinking": thoughts} | kept | {THOUGHTS[0]: thoughts}


def _with_role(message: Any) -> Any:
    if not isinstance(message, dict) or message.get(ROLE) is not None or not isinstance(message.get("from"), str):
        return message
    said = {ROLE: SPEAKERS.get(message["from"], message["from"]), CONTENT: message.get("value")}
    return {key: value for key, value in message.items() if key not in ("from", "value")} | said


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"not messages: a message is of type {type(message).__name__}, not an object"
    if not isinstance(message.get(ROLE), str):
        return f'not messages: a message needs a "{ROLE}" and a "{CONTENT}", or "from" and "value"'
    content = message.get(CONTENT)
    if content is None and (message.get("tool_calls") or message[ROLE] != ASSISTANT):
        return "" if message.get("tool_calls") else f'not messages: a message has no "{CONTENT}"'
    return "" if isinstance(content, str) else f'not messages: a "{CONTENT}" is {type(content).__name__}, not text'


def template_of(format: PairFormat, tokenizer: "Tokenizer") -> "ChatTemplate":
    """The chat template of a format. Raises UserError for one that cannot be compiled."""
    from recipes.data.text.chat import ChatTemplate

    end = tokenizer.backend.id_to_token(tokenizer.end_of_document) or ""
    special = {"eos_token": end} | dict(format.special_tokens)
    tokens = [added["content"] for added in json.loads(tokenizer.json).get("added_tokens") or ()]
    return ChatTemplate(format.template, special_tokens=special, date=format.date, tokens=tokens)


class PairEncoder:
    """Rows to stored pairs. Special tokens that a text spells out are these tokens, as in transformers."""

    def __init__(self, format: PairFormat, tokenizer: "Tokenizer") -> None:
        """Raises UserError for a chat template that cannot be compiled."""
        from recipes.data.text.tokenizer import text_library

        self._format, self._end, self._tokenizer = format, tokenizer.end_of_document, tokenizer
        self._library = text_library(tokenizer.json, spelled_out=True)
        self._template = None
        if format.messages:
            self._template = template_of(format, tokenizer)

    def encode(self, rows: Sequence[Row]) -> tuple[list[Row], list[np.ndarray]]:
        """The rows, with the problems that show only now, and the stored pair of each row that still has text."""
        contents = [json.loads(row.text) for row in rows if row.has_text]
        encode = self._of_chats if self._template else self._of_fields
        try:
            encoded = encode(contents)
        except ForeignError:  # the library does not say for which text
            encoded = [_alone(encode, content) for content in contents]
        of_text = iter(encoded)
        found: list[Row] = []
        pairs: list[np.ndarray] = []
        for row in rows:
            pair = next(of_text) if row.has_text else None
            if isinstance(pair, str):
                row = row._replace(text="", problem=pair)
            elif pair is not None:
                pairs.append(pair)
            found.append(row)
        self._tokenizer.require_rows([int((pair & ID).max()) for pair in pairs])
        return found, pairs

    def _of_fields(self, contents: Sequence[list[str]]) -> list[np.ndarray | str]:
        prefix, suffix, special = self._format.prefix, self._format.suffix, self._format.encoder_decoder
        texts = [f"{prefix}{prompt}{suffix}" for prompt, _ in contents], [answer for _, answer in contents]
        with foreign("cannot be encoded"):
            prompts, answers = (self._library.encode_batch_fast(each, add_special_tokens=special) for each in texts)
        return [self._joined(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]

    def _joined(self, prompt: list[int], answer: list[int]) -> np.ndarray | str:
        if not prompt:
            return "empty prompt: the tokenizer makes no token of it"
        if answer[-1:] != [self._end]:
            answer = [*answer, self._end]
        return stored([*prompt, *answer], np.arange(len(prompt) + len(answer)) >= len(prompt))

    def _of_chats(self, contents: Sequence[list[dict[str, Any]]]) -> list[np.ndarray | str]:
        assert self._template is not None
        rendered = [self._template.render(messages) for messages in contents]
        texts = ["" if isinstance(one, str) else one.text for one in rendered]
        with foreign("cannot be encoded"):
            encodings = self._library.encode_batch(texts, add_special_tokens=False)
        return [
            one if isinstance(one, str) else _chat_pair(encoding, one.answers)
            for one, encoding in zip(rendered, encodings, strict=True)
        ]


def _alone(encode: Callable[[list[Any]], list[np.ndarray | str]], content: Any) -> np.ndarray | str:
    """The stored pair of this content, or its problem."""
    try:
        return encode([content])[0]
    except ForeignError as error:
        return str(error)


def _chat_pair(encoding: Any, answers: Sequence[tuple[int, int]]) -> np.ndarray | str:
    """The stored pair of a chat's text. answers: the first character of each answer, and the one after its last."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    learned = np.zeros(len(offsets), dtype=bool)
    for begin, end in answers:
        inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
        if inside.size:
            learned[inside[0] : inside[-1] + 1] = True
    if not learned[1:].any():
        return "no answer: the chat template makes no token of any"
    return stored(encoding.ids, learned)


def shortened(pair: np.ndarray, over: int, *, long: str, keeps_end: bool) -> np.ndarray:
    """A stored pair without `over` of its prompt's tokens, which must be more. long: data.long_pairs, which says where
    they are cut. keeps_end: a token that ends the prompt for an encoder, as it ends every answer, stays."""
    if over == 0 or long == "cut_prompt_start":
        return pair[over:]
    prompt = int(np.flatnonzero(pair & LEARNED)[0])
    kept = pair[: prompt - over].copy()
    if keeps_end and pair[prompt - 1] & ID == pair[-1] & ID:
        kept[-1] = pair[prompt - 1]
    return np.concatenate([kept, pair[prompt:]])


def stored(ids: Sequence[int], learned: np.ndarray) -> np.ndarray:
    """A pair as it is stored: (n,) uint32."""
    pair = np.array(ids, dtype=PAIR_TYPE) | np.where(learned, LEARNED, 0).astype(PAIR_TYPE)
    pair[0] |= np.uint32(FIRST)
    return pair
