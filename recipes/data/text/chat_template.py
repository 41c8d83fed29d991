"""Runs a chat template, with the names that transformers gives it, in Jinja's sandbox and in a process of its own: a
template is a program, which may loop for ever or fill the memory. Imports no torch."""

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from parallel.errors import UserError

MARKS = "\ufdd0", "\ufdd1"
"""Stand around an answer while the template is rendered. Unicode assigns no characters to them."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = "strftime_now"
SAFE_JINJA = (3, 1, 6)
SECONDS = 5
"""Computing time of one chat, after which the process is ended."""
MEMORY = 2_000_000_000
"""Bytes that the process may have."""
MOST_CHARACTERS = 50_000_000
"""Characters of a chat as one text."""
ROLE, CONTENT, ASSISTANT = "role", "content", "assistant"


def serve() -> None:
    """Compile the template in the first line of the input, and answer each further line, with JSON."""
    with suppress(ValueError, OSError):  # there may be a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, whose end closes the input
    template, answer = None, dict[str, Any]()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process, and does not count while others compute
        asked = json.loads(line)
        try:
            if template is None:
                template, answer = _Template(**asked), {}
            else:
                answer = template.answer(**asked)
            if len(answer.get("text", "")) > MOST_CHARACTERS:
                raise UserError(f"it writes more than {MOST_CHARACTERS:,} characters")
            answer.get("text", "").encode()  # half a surrogate pair cannot be
        except MemoryError:
            raise
        except Exception as error:  # whatever the code of a template runs into
            answer = {"problem": " ".join(str(error).split())[:300] or type(error).__name__}
        text = json.dumps(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(text, flush=True)  # noqa: T201  # to the process that asked


class _Template:
    def __init__(self, template: str, *, special_tokens: Mapping[str, str], date: str) -> None:
        self._marked = MARKED.search(template) is not None
        self._special = dict(special_tokens)
        self._template = _environment(date).from_string(template)

    def answer(self, messages: list[dict[str, Any]], *, prompt: bool) -> dict[str, Any]:
        """The "text" of a chat, of a prompt with what comes before an answer, and its "answers": first character, and
        the one after the last.

        Answers are what the template puts between {% generation %} and {% endgeneration %}. In a template without
        these, an answer is what its message adds to the text of those before, with the prompt for it.
        """
        if prompt:
            return {"text": self._text(messages, prompt=True)}
        if not self._marked:
            return self._by_prefixes(messages)
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in MARKS):
            raise UserError("a message holds U+FDD0 or U+FDD1, which are no characters")
        return self._by_marks(self._text(messages))

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        nothing = {"tools": None, "documents": None}
        text: str = self._template.render(messages=messages, add_generation_prompt=prompt, **nothing, **self._special)
        return text

    def _by_marks(self, text: str) -> dict[str, Any]:
        begin, end = MARKS
        parts, answers, place = re.split(f"([{begin}{end}])", text), [], 0
        opened: list[int] = []
        for part in parts:
            if part == begin:
                opened.append(place)
            elif part == end:
                answers.append((opened.pop(), place))
            else:
                place += len(part)
        return {"text": "".join(part for part in parts if part not in MARKS), "answers": answers}

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        text, answers = self._text(messages), []
        for number, message in enumerate(messages):
            if message[ROLE] != ASSISTANT:
                continue
            before, after = self._text(messages[:number], prompt=True), self._text(messages[: number + 1])
            if not text.startswith(before):  # some write no prompt for an answer, others one that begins a thought
                shared = commonprefix([before, text])  # noqa: RUF071  characters are meant
                before = max(self._text(messages[:number]), shared, key=len)
            end = len(after.rstrip()) if after[len(before) :].strip() else len(after)
            if not text.startswith(after):
                end = self._end_of(str(message.get(CONTENT) or ""), text, len(before))
            if not text.startswith(before) or not end:
                raise UserError(
                    f"it writes the messages up to number {number + 1} differently when others follow,"
                    " so the answer cannot be found; mark answers in it with {% generation %}"
                )
            answers.append((len(before), end))
        return {"text": text, "answers": answers}

    def _end_of(self, content: str, text: str, begin: int) -> int:
        """The end of an answer that begins there with its content, and of the token that ends it; 0 = it does not. For
        templates that write an answer differently, with thoughts for example, while it is the last message."""
        content, end_token = content.strip(), self._special.get("eos_token", "")
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        if not content or not text.startswith(content, begin):
            return 0
        end = begin + len(content)
        space = len(text[end:]) - len(text[end:].lstrip())
        return end + space + len(end_token) if end_token and text.startswith(end_token, end + space) else end


def _environment(date: str) -> Any:
    """Jinja's sandbox, without what a template could reach Python itself with: it came with somebody's weights."""
    import jinja2
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < SAFE_JINJA:
        found, safe = jinja2.__version__, ".".join(map(str, SAFE_JINJA))
        raise UserError(f"data.messages_field: the sandbox of jinja2 {found} leaks; pip install 'jinja2>={safe}'")

    class PlainNamespace(Namespace):
        """namespace() without names that Python uses."""

        def __init__(self, *arguments: Any, **names: Any) -> None:
            super().__init__()
            for name, value in dict(*arguments, **names).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise TemplateError(f"namespace() may not hold {name!r}")
            super().__setitem__(name, value)

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}."""

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{MARKS[0]}{caller()}{MARKS[1]}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own is for HTML

    def strftime_now(format: str) -> str:
        return datetime.date.fromisoformat(date).strftime(format)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, TODAY: strftime_now, "namespace": PlainNamespace}
    sandbox.globals["dict"] = lambda *arguments, **names: dict(*arguments, **names)
    return sandbox
