"""Chat templates: the Jinja text of a tokenizer that makes one text of the messages of a chat, and which characters of
it are answers. Templates run in Jinja's sandbox, with the names that transformers gives them. Imports no torch."""

import datetime
import json
import re
from collections.abc import Mapping
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from parallel.errors import UserError
from recipes.files.paths import user_path
from recipes.files.reading import read_patiently

TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
MARKS = "\ufdd0", "\ufdd1"
"""Stand around an answer while the template is rendered. Unicode assigns no characters to them."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = "strftime_now"
SAFE_JINJA = (3, 1, 6)


class Rendered(NamedTuple):
    """A chat as one text."""

    text: str
    answers: list[tuple[int, int]]
    """The first character of each answer, and the one after its last."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, template: str, *, special_tokens: Mapping[str, str], date: str) -> None:
        """special_tokens: bos_token and so on. date: what the template takes for today, YYYY-MM-DD. Raises UserError
        for a template that cannot be compiled."""
        from jinja2 import TemplateError

        self._marked = MARKED.search(template) is not None
        self._special = dict(special_tokens)
        try:
            self._template = _environment(date).from_string(template)
        except TemplateError as error:
            raise UserError(f"data.chat_template: the chat template is not valid Jinja: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> Rendered | str:
        """The chat, or why it has none.

        Answers are what the template puts between {% generation %} and {% endgeneration %}. In a template without
        these, an answer is what its message adds to the text of those before, with the prompt for it.
        """
        try:
            if self._marked:
                if any(mark in json.dumps(messages, ensure_ascii=False) for mark in MARKS):
                    return "chat template: a message holds U+FDD0 or U+FDD1, which are no characters"
                return self._by_marks(self._text(messages))
            return self._by_prefixes(messages)
        except Exception as error:  # whatever the code of a template runs into
            return f"chat template: {' '.join(str(error).split())[:300] or type(error).__name__}"

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The text that an assistant goes on from. Raises UserError for messages that the template refuses."""
        from jinja2 import TemplateError

        try:
            return self._text(messages, prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise UserError(f"the chat template refuses this prompt: {error}") from None

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        nothing = {"tools": None, "documents": None}
        text: str = self._template.render(messages=messages, add_generation_prompt=prompt, **nothing, **self._special)
        return text

    def _by_marks(self, text: str) -> Rendered:
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
        return Rendered("".join(part for part in parts if part not in MARKS), answers)

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> Rendered | str:
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
                return (
                    f"chat template: it writes the messages up to number {number + 1} differently when others follow,"
                    " so the answer cannot be found; mark answers in it with {% generation %}"
                )
            answers.append((len(before), end))
        return Rendered(text, answers)

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


def read_chat_files(folder: Path) -> dict[str, str]:
    """File name -> text of the files in a tokenizer's folder that chats need. Raises UserError."""
    found = {}
    for name in (TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS):
        file = folder / name
        try:
            if file.is_file():
                found[name] = read_patiently(file.read_bytes, what=str(file)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
    return found


def chat_files(template: str, special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Files that read_chat_files() reads, with these contents."""
    return {TEMPLATE: template, TOKENIZER_CONFIG: json.dumps(dict(special_tokens), indent=2) + "\n"}


def chat_settings(files: Mapping[str, str], *, template: str, date: str) -> dict[str, Any]:
    """The fields of a PairFormat that concern chats.

    Args:
        files: as read_chat_files().
        template: data.chat_template, a file; "" = the one in `files`.
        date: data.chat_date.

    Raises:
        UserError: if there is no template, or it needs a date.
    """
    try:
        config = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        special = {**json.loads(files.get(SPECIAL_TOKENS, "{}")), **config}
    except ValueError as error:
        raise UserError(f"data.messages_field: {TOKENIZER_CONFIG} of the tokenizer is damaged: {error}") from None
    text = _template_file(template) if template else files.get(TEMPLATE) or _named(config.get("chat_template"))
    if not text:
        raise UserError(
            f"data.messages_field: the tokenizer came without a chat template ({TEMPLATE}, or chat_template in"
            f' {TOKENIZER_CONFIG}); write data.chat_template = "FILE.jinja" (scripts: --chat-template FILE.jinja), or'
            " use prompt_field and answer_field"
        )
    if TODAY in text and not date:
        raise UserError(
            "data.chat_date: the chat template writes today's date, but tokens must not depend on the day that they are"
            ' made; write the date that it shall use, such as chat_date = "2026-01-31"'
        )
    tokens = {name: _content(value) for name, value in special.items() if name.endswith("_token")}
    return {
        "template": text,
        "special_tokens": tuple(sorted((name, token) for name, token in tokens.items() if token and name in text)),
        "date": date if TODAY in text else "",
    }


def _template_file(template: str) -> str:
    file = user_path(template)
    try:
        return read_patiently(file.read_bytes, what=f"data.chat_template: '{file}'").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: '{file}' cannot be read: {error}") from None


def _named(templates: Any) -> str:
    """The template of tokenizer_config.json: one, or the default one of a list."""
    if isinstance(templates, list):
        return next((str(one["template"]) for one in templates if one.get("name") == "default"), "")
    return templates or ""


def _content(token: Any) -> str:
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""


ROLE, CONTENT, ASSISTANT = "role", "content", "assistant"
