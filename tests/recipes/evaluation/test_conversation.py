"""What a conversation keeps, forgets and ends with."""

from collections.abc import Callable, Iterable

from parallel.errors import UserError
from recipes.data.text.chat import ChatTemplate
from recipes.evaluation.conversation import END, converse

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if messages[-1].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def said(lines: Iterable[str]) -> tuple[list[str], str]:
    """The prompts that a model gets, which answers with their number, and what is shown."""
    waiting, prompts, shown = iter(lines), list[str](), list[str]()

    def read() -> str:
        return next(waiting, END).strip()

    def answer(prompt: str, log: Callable[[str], object]) -> None:
        if "too long" in prompt:
            raise UserError("no positions are left")
        prompts.append(prompt)
        log(" answer ")
        log(str(len(prompts)))

    converse(ChatTemplate(TEMPLATE, special_tokens={}, date=""), answer, read=read, show=shown.append)
    return prompts, "".join(shown)


def test_each_prompt_holds_the_messages_and_answers_before_it() -> None:
    prompts, shown = said(["one", "", "two"])
    assert prompts == ["<user>one<assistant>", "<user>one<assistant>answer 1<user>two<assistant>"]
    assert shown == " answer 1\n answer 2\n"


def test_exit_ends_it() -> None:
    assert said(["one", " /exit ", "two"])[0] == ["<user>one<assistant>"]


def test_message_without_an_answer_is_forgotten_and_the_reason_shown() -> None:
    prompts, shown = said(["too long", "refuse", "\udcff", "one"])
    assert prompts == ["<user>one<assistant>"]
    reasons = "no positions are left\nthe chat template refuses this prompt: no\nthe message is not UTF-8 text\n"
    assert shown == f"{reasons} answer 1\n"
