"""A conversation with a model on a terminal, or line by line from a pipe."""

import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper

from parallel.errors import UserError
from recipes.data.text.chat import ChatTemplate

END = "/exit"
Answer = Callable[[str, Callable[[str], object]], object]
"""Given a prompt, passes the text of its answer to a function, piece by piece. Raises UserError if it cannot."""


def read_message() -> str:
    """The next line of standard input; /exit after the last one. Raises UserError if it is closed."""
    if not isinstance(sys.stdin, TextIOWrapper):
        raise UserError("a conversation reads standard input, which is closed; write the prompt after the model")
    if sys.stdin.errors != "surrogateescape":  # refused after the first read
        sys.stdin.reconfigure(errors="surrogateescape")
    if on_terminal := sys.stdin.isatty():
        import readline  # noqa: F401  # input() then edits lines and remembers them
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # so that readline puts the terminal back
    try:
        return input("> " if on_terminal else "").strip()
    except EOFError:
        return END
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, before)
        signal.raise_signal(signal.SIGINT)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def converse(template: ChatTemplate, answer: Answer, *, read: Callable[[], str], show: Callable[[str], object]) -> None:
    """Answer messages, each with all those before it, until one is /exit. read: returns the next message; empty ones
    are passed over. show: shows a piece of an answer, or why there is none; that message is then forgotten."""
    messages: list[dict[str, str]] = []
    for message in filter(None, iter(read, END)):
        pieces: list[str] = []

        def note(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            show(piece)

        asked = [*messages, {"role": "user", "content": message}]
        try:
            message.encode()
            answer(template.prompt(asked), note)
        except UnicodeEncodeError:
            show("the message is not UTF-8 text")
        except UserError as error:
            show(str(error))
        else:
            messages = [*asked, {"role": "assistant", "content": "".join(pieces).strip()}]
        show("\n")
