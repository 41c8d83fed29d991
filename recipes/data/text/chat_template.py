"""Runs a chat template, with the names that transformers gives it, in Jinja's sandbox and in a process of its own: a
template is a program, which may loop for ever or fill the memory. Imports no torch."""

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from parallel.errors import UserError
from recipes.data.text.answers import CONTENTS, MARKS, Answers

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = "strftime_now"
SAFE_JINJA = (3, 1, 6)
SECONDS = 5
"""Computing time of one chat, after which the process is ended."""
MEMORY = 2_000_000_000
"""Bytes that the process may have."""
MOST_CHARACTERS = 50_000_000
"""Characters of a chat as one text."""


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
    def __init__(self, template: str, *, special_tokens: Mapping[str, str], date: str, tokens: Sequence[str]) -> None:
        self._special = dict(special_tokens)
        self._template = _environment(date).from_string(template)
        self._marked = MARKED.search(template) is not None
        self._answers = Answers(self._text, tokens=tokens, marked=self._marked)

    def answer(self, messages: list[dict[str, Any]], *, prompt: bool) -> dict[str, Any]:
        """The "text" of a chat, of a prompt with what comes before an answer, and its "answers": first character, and
        the one after the last. Of no messages, what ends answers, as Ends.

        Answers are what the template puts between {% generation %} and {% endgeneration %}. In a template without
        these, Answers finds them.
        """
        if not messages:
            return self._answers.ends._asdict()
        if prompt:
            return {"text": self._text(messages, prompt=True)}
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (*MARKS, *CONTENTS)):
            raise UserError("a message holds one of U+FDD0 to U+FDD3, which are no characters")
        if not self._marked:
            return self._answers.spans(messages)
        found = self._by_marks(self._text(messages))
        self._answers.require_contents(messages, [found["text"][begin:end] for begin, end in found["answers"]])
        return found

    def _text(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
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
