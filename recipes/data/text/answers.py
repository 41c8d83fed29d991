"""Where the answers of a chat are in its text, and what ends them: derived from what the template writes, for training,
generation and exports alike. Imports no torch."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from parallel.errors import UserError

ROLE, CONTENT, ASSISTANT = "role", "content", "assistant"
MARKS = "\ufdd0", "\ufdd1"
"""Stand around an answer while the template is rendered. Unicode assigns no characters to them."""
CONTENTS = "\ufdd2", "\ufdd3"
"""Stand for the contents of an answer and of the message after it."""
THOUGHT = "</think>"
"""Ends what templates may leave out of an answer."""
DROPS = "leaves it out or changes it, as templates of models with pictures and those without tools do; give another one"
Message = dict[str, Any]
QUESTION: Message = {ROLE: "user", CONTENT: "What is it?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": CONTENTS[0]}}}
RESULT: Message = {ROLE: "tool", "name": "f", "tool_call_id": "call00000", CONTENT: CONTENTS[1]}


class Ends(NamedTuple):
    """What ends the answers that a template writes."""

    tokens: tuple[str, ...] = ()
    """The token that ends the last answer of a chat, and the one that ends a call of a tool if that is another."""
    earlier: str = ""
    """The token that ends earlier answers, if that is another one."""
    by_next: bool = False
    """Whether it is the mark of the next message: the last answer of a chat lacks it."""


class Answers:
    """Finds the answers in the chats of a template."""

    def __init__(self, write: Callable[..., str], *, tokens: Sequence[str], marked: bool) -> None:
        """write: the text of messages, with prompt=True of one for an answer. tokens: the tokenizer's added ones.
        marked: whether the template marks answers."""
        self._write, self._marked = write, marked
        names = "|".join(re.escape(token) for token in sorted(filter(str.strip, tokens), key=len, reverse=True))
        self._token = re.compile(rf"\s*({names})" if names else "(?!)")

    @cached_property
    def ends(self) -> Ends:
        """What ends an answer; nothing if the template refuses a question and its answer, or ends it with no token."""
        answer = {ROLE: ASSISTANT, CONTENT: CONTENTS[0]}
        last = self._after_content([*self._question, answer])
        between = self._after_content([*self._question, answer, {ROLE: "user", CONTENT: CONTENTS[1]}])
        end, earlier = (mark[1] if (mark := self._token.match(text or "")) else "" for text in (last, between))
        by_next = bool(earlier) and last is not None and not last.strip() and not self._marked
        end = earlier if by_next else end
        tokens = dict.fromkeys(filter(None, (end, end and self._end_of_call(by_next=by_next))))
        return Ends(tuple(tokens), earlier if earlier != end else "", by_next)

    def _end_of_call(self, *, by_next: bool) -> str:
        """The token that ends a message that calls a tool; "" = none, or the template refuses such a message."""
        messages = [*self._question, {ROLE: ASSISTANT, CONTENT: "", "tool_calls": [CALL]}, RESULT]
        last = (self._after_content(messages[:-1]) or "").rstrip()
        if by_next:
            between = (last and self._after_content(messages)) or ""
            mark = self._token.match(between, len(last)) if between.startswith(last) else None
            return mark[1] if mark else ""
        return next((mark[1] for mark in self._token.finditer(last) if mark.end() == len(last)), "")

    def _after_content(self, messages: Sequence[Message]) -> str | None:
        """What follows the answer's content, up to that of the next message; in a marked template, what is learned.
        None where the template refuses the messages, or leaves the content out."""
        _, there, rest = self._written(messages).partition(CONTENTS[0])
        rest = re.sub(f"{MARKS[1]}[^{MARKS[0]}]*{MARKS[0]}", "", rest.partition(CONTENTS[1])[0])
        learned, ended, _ = rest.partition(MARKS[1])
        return None if not there else rest if not self._marked else learned if ended else ""

    def _written(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of messages; "" if the template refuses them."""
        try:
            return str(self._write(messages, prompt=prompt))
        except MemoryError:
            raise
        except Exception:  # whatever the code of a template runs into
            return ""

    @cached_property
    def _question(self) -> list[Message]:
        """A question as the template takes it: some refuse a chat without a system message."""
        return [QUESTION] if self._written([QUESTION], prompt=True) else [QUESTION | {ROLE: "system"}, QUESTION]

    @cached_property
    def _prompt(self) -> str:
        """What the template writes to ask for an answer."""
        without, asked = self._written(self._question), self._written(self._question, prompt=True)
        return asked[len(commonprefix([without, asked])) :]  # noqa: RUF071  characters are meant

    def spans(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The "text" of a chat, and its "answers": first character, and the one after the last. An answer is what its
        message adds to the text of those before, with the prompt for it, and the token that ends it."""
        text, spans, place = self._write(messages), list[tuple[int, int]](), 0
        for number, message in enumerate(messages):
            if message[ROLE] == ASSISTANT:
                begin = self._begin(messages, number, text, after=place)
                place = self._end(messages, number, text, begin)
                spans.append((begin, place))
        if spans and self.ends.by_next and messages[-1][ROLE] == ASSISTANT:
            text += self.ends.tokens[-1 if messages[-1].get("tool_calls") else 0]
            spans[-1] = spans[-1][0], len(text)
        self.require_contents(messages, [text[begin:end] for begin, end in spans])
        return {"text": text, "answers": spans}

    def _begin(self, messages: Sequence[Message], number: int, text: str, *, after: int) -> int:
        """Where an answer begins: after the prompt for it. after: the end of the answer before."""
        if number:  # the prompt of no messages may lack what comes first, such as a default system message
            before = self._written(messages[:number], prompt=True)  # some refuse a chat without a question
            shared = commonprefix([before, text])  # noqa: RUF071  characters are meant; some prompts begin a thought
            if before and shared == before:
                return len(before)
            if len(shared) > (start := len(self._written(messages[:number]))):
                marks, place = self._token.finditer(text, start), len(shared)
                place = next((mark.start(1) for mark in marks if mark.start(1) < place < mark.end(1)), place)
                if place >= after:  # else the answer before lacks its end where it is the last
                    return place
        head = self._before_content(messages, number, CONTENTS[0])
        if head is None or not text.startswith(head):
            raise _written_differently(number)
        begin = head.rfind(self._prompt, after) if self._prompt else -1
        return len(head) if begin < 0 else begin + len(self._prompt)

    def _before_content(self, messages: Sequence[Message], number: int, content: str) -> str | None:
        """What comes before this content, put in the place of a message's; None if the template leaves it out."""
        replaced = [*messages[:number], {**messages[number], CONTENT: content}, *messages[number + 1 :]]
        head, there, _ = self._written(replaced).partition(content)
        return head if there else None

    def _end(self, messages: Sequence[Message], number: int, text: str, begin: int) -> int:
        """Where an answer that begins there ends, with the token for that."""
        after = self._write(messages[: number + 1])
        if text.startswith(after):
            end = len(after.rstrip()) if after[begin:].strip() else len(after)
            mark = self._token.match(text, end) if self.ends.by_next else None
            return mark.end() if mark else end
        # It is written otherwise when others follow: without its thoughts, or an end of the whole text.
        later = (self._before_content(messages, place, CONTENTS[1]) for place in range(number + 1, len(messages)))
        until = next((head for head in later if head is not None), None)  # some leave out messages of tools
        if until is None or not text.startswith(until):
            raise _written_differently(number)
        content = _answered(messages[number])
        ends = self.ends.tokens or ((content,) if content else ())
        places = [place + len(end) for end in ends if (place := text.rfind(end, begin, len(until))) >= 0]
        if not places and self.ends.earlier:
            raise UserError(
                f"it ends message {number + 1} with {self.ends.earlier!r}, but the last answer of a chat with"
                f" {(*ends, 'no token')[0]!r}; mark answers in it with {{% generation %}}, or give one answer a row"
            )
        if not places:
            raise _written_differently(number)
        return max(places)

    def require_contents(self, messages: Sequence[Message], learned: Sequence[str]) -> None:
        """Raises UserError if what is learned lacks the text of an answer; in a marked template, of every answer."""
        answers = [message for message in messages if message[ROLE] == ASSISTANT]
        texts = ["".join(learned)] * len(answers) if self._marked else learned
        pairs = enumerate(zip(answers, map(_squeezed, texts), strict=True), 1)
        lacking = [n for n, (answer, text) in pairs if not all(_squeezed(said) in text for said in _said(answer))]
        if lacking and (not self._marked or len(lacking) == len(answers)):
            raise UserError(f"the text of answer {lacking[0]} is not among what is learned: it {DROPS}")


def _said(message: Message) -> list[str]:
    """What must be among what is learned of an answer: the names of the tools that it calls, or else its text."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list):
        return [_answered(message)]
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]


def _answered(message: Message) -> str:
    """The text of an answer without its thoughts."""
    return str(message.get(CONTENT) or "").rpartition(THOUGHT)[2].strip()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _written_differently(number: int) -> UserError:
    return UserError(
        f"it writes the messages up to number {number + 1} differently when others follow, so the answer cannot be"
        " found; mark answers in it with {% generation %}"
    )
