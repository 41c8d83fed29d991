"""Chat templates: the Jinja text of a tokenizer that makes one text of the messages of a chat, and which characters of
it are answers. chat_template.py runs them. Imports no torch."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parallel.errors import UserError
from recipes.data.text.answers import Ends
from recipes.data.text.chat_template import MEMORY, SECONDS, TODAY
from recipes.data.text.tokens_beside import MAX_BYTES, SPECIAL_TOKENS, TOKENIZER_CONFIG, read_beside, text_of
from recipes.files.reading import fault, json_object, read_patiently, read_whole, user_path

if TYPE_CHECKING:
    from recipes.data.text.tokenizer import Tokenizer

TEMPLATE = "chat_template.jinja"
MOST_ENDS = 5
"""Processes that a template may end."""
ROOT = Path(__file__).resolve().parents[3]
NAMED = ROOT / "configs" / "chat_templates"
"""Templates that data.chat_template may name."""
SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from recipes.data.text.chat_template import serve; serve()"


class Rendered(NamedTuple):
    """A chat as one text."""

    text: str
    answers: list[tuple[int, int]]
    """The first character of each answer, and the one after its last."""


class ChatTemplate:
    """A template in a process of its own, which is started again after one that a chat ended."""

    def __init__(
        self, template: str, *, special_tokens: Mapping[str, str], date: str, tokens: Iterable[str] = ()
    ) -> None:
        """special_tokens: bos_token and so on. date: what the template takes for today, YYYY-MM-DD. tokens: the added
        tokens, of which one may end an answer. Raises UserError for a template that cannot be compiled."""
        self.special_tokens = dict(special_tokens)
        settings = {"special_tokens": self.special_tokens, "date": date, "tokens": list(tokens)}
        self._first = {"template": template, **settings}
        self._one_at_a_time, self._ends = threading.Lock(), 0
        self._process = self._started()

    def render(self, messages: list[dict[str, Any]]) -> Rendered | str:
        """The chat, or why it has none. Raises UserError for a template that ended its process too often."""
        found = self._answer({"messages": messages, "prompt": False})
        return f"chat template: {found['problem']}" if "problem" in found else Rendered(**found)

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The text that an assistant goes on from. Raises UserError for messages that the template refuses."""
        found = self._answer({"messages": messages, "prompt": True})
        if "problem" in found:
            raise UserError(f"the chat template refuses this prompt: {found['problem']}")
        return str(found["text"])

    def ends(self) -> Ends:
        """What ends the answers that it writes. Raises UserError for a template that ended its process too often."""
        found = self._answer({"messages": [], "prompt": False})
        return Ends() if "problem" in found else Ends(tuple(found["tokens"]), found["earlier"], found["by_next"])

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        with self._one_at_a_time:
            for _ in range(2):  # the first process may have been killed by somebody else
                found = _exchanged(self._process, question)
                if (ended := self._process.poll()) is None:
                    return found
                self._process = self._started()
                if ended == -signal.SIGPROF:
                    break
            self._ends += 1
            if self._ends >= MOST_ENDS:
                raise UserError(f"data.chat_template: {found['problem']}, {MOST_ENDS} times; repair the template")
            return found

    def _started(self) -> "subprocess.Popen[str]":
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            process = subprocess.Popen([sys.executable, "-c", SERVE, str(ROOT)], text=True, **pipes)
        except OSError as error:
            raise fault("data.chat_template: the process of the template cannot be started", error) from None
        weakref.finalize(self, _end, process)
        if problem := _exchanged(process, self._first).get("problem"):
            raise UserError(f"data.chat_template: the chat template cannot be compiled: {problem}")
        return process


def _exchanged(process: "subprocess.Popen[str]", question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a template's process, or the problem that it has ended."""
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    if (line := process.stdout.readline()).endswith("\n"):  # else it was killed while it answered
        return dict(json.loads(line))
    if process.wait() == -signal.SIGPROF:
        return {"problem": f"it computes for more than {SECONDS} s"}
    return {"problem": f"it ended its process, most likely by using more than {MEMORY / 1e9:g} GB of memory"}


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes its pipes, and waits for it
        pass


def ends_of_answers(template: ChatTemplate, tokenizer: "Tokenizer") -> tuple[tuple[int, ...], str]:
    """The tokens that end the answers of chats, the usual one first, and what is to be said about them, or ""."""
    ends, note = template.ends(), ""
    if not ends.tokens:
        note = (
            "no token of the tokenizer ends the answers that are learned of the chat template, so generation will not"
            " stop by itself; write one after each answer in the template, such as {{ eos_token }}"
        )
    elif ends.earlier:
        note = (
            f"the chat template ends earlier answers of a chat with {ends.earlier!r}, but the last with"
            f" {ends.tokens[0]!r}, at which alone generation stops"
        )
    return tuple(number for end in ends.tokens if (number := tokenizer.backend.token_to_id(end)) is not None), note


def read_chat_files(folder: Path) -> dict[str, str]:
    """File name -> text of the files in a tokenizer's folder that chats need. Raises UserError."""
    return read_beside(folder, (TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS))


def chat_files(template: str, special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Files that read_chat_files() reads, with these contents."""
    config = {TOKENIZER_CONFIG: json.dumps(dict(special_tokens), indent=2) + "\n"}
    return config | {TEMPLATE: template} if template else config


def chat_settings(files: Mapping[str, str], *, template: str, date: str) -> dict[str, Any]:
    """The fields of a PairFormat that concern chats. Raises UserError if there is no template, or it needs a date.
    files: as read_chat_files(). template: data.chat_template, a file; "" = the one in `files`. date: data.chat_date."""
    try:
        special, config = (json_object(files.get(name, "{}")) for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG))
        given = _named(config.get("chat_template"))
    except ValueError as error:
        raise UserError(f"data.messages_field: {TOKENIZER_CONFIG} of the tokenizer is damaged: {error}") from None
    text = _template_file(template) if template else files.get(TEMPLATE) or given
    if not text:
        raise UserError(
            f"data.messages_field: the tokenizer came without a chat template ({TEMPLATE}, or chat_template in"
            f' {TOKENIZER_CONFIG}); write data.chat_template = "chatml", or "FILE.jinja" (scripts: --chat-template), or'
            " use prompt_field and answer_field"
        )
    if TODAY in text and not date:
        raise UserError(
            "data.chat_date: the chat template writes today's date, but tokens must not depend on the day that they are"
            ' made; write the date that it shall use, such as chat_date = "2026-01-31"'
        )
    tokens = {name: text_of(value) for name, value in {**special, **config}.items() if name.endswith("_token")}
    return {
        "template": text,
        "special_tokens": tuple(sorted((name, token) for name, token in tokens.items() if token and name in text)),
        "date": date if TODAY in text else "",
    }


def template_path(template: str) -> Path:
    """The file of a template: of the one with this name, or at this path."""
    named = NAMED / f"{template}.jinja"
    return named if "/" not in template and named.is_file() else user_path(template)


def _template_file(template: str) -> str:
    file = template_path(template)
    try:
        return read_patiently(partial(read_whole, file, most=MAX_BYTES), what=f"data.chat_template: '{file}'").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: '{file}' cannot be read: {error}") from None


def _named(templates: Any) -> str:
    """The template of tokenizer_config.json: one, or the default one of a list. Raises ValueError for anything else."""
    if isinstance(templates, list) and all(isinstance(one, dict) for one in templates):
        templates = next((one.get("template") for one in templates if one.get("name") == "default"), None)
    if not isinstance(templates, str | None):
        raise ValueError("chat_template must be a text, or a list of names and templates")
    return templates or ""
