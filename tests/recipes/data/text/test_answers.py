"""What is learned of a chat, and what ends its answers, by what its template writes."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from recipes.data.text.chat import ends_of_answers
from recipes.data.text.pair_format import ANSWERS, PairFormat, prepared_otherwise, template_of
from recipes.data.text.tokenizer import build_tokenizer
from tests.recipes.data.text.test_pair_format import CHAT_ML, END, MARKED, both, chat, encoded, ids, learned, library

ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen3: the thoughts of the last answer alone, and calls of tools.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content.split('</think>')[-1] }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}" + ASKED
)
# As Phi-3: the end of the text, which is another token, follows the last answer; messages of tools are left out.
ENDS_TWICE = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<pad>{% endif %}"
)
# As GLM: an answer ends where the next message begins.
BY_NEXT = (
    "{% for m in messages %}{{ '<s>' if m.role == 'user' else '<|im_start|>' }}{{ m.role }}\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>"
    "{% endfor %}{% endfor %}" + ASKED
)
# As GPT-OSS: earlier answers end with another token than the last one.
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<|im_end|>' if loop.last else '<pad>' }}"
    "{% endfor %}" + ASKED
)
# As SmolVLM: it expects lists of contents.
PICTURES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for one in m.content %}{{ one.text }}{% endfor %}<|im_end|>"
    "{% endfor %}" + ASKED
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + CHAT_ML
# For answers that go on: the last message has no end.
ENDS_ALL_BUT_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last or m.role != 'assistant' %}"
    "<|im_end|>\n{% endif %}{% endfor %}" + ASKED
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, *tools: str) -> dict[str, Any]:
    calls = {"tool_calls": [{"function": {"name": name, "arguments": {"a": 1}}} for name in tools]}
    return {"role": "assistant", "content": text} | (calls if tools else {})


TWO = [user("a"), answer("one"), user("b"), answer("two ")]


def shown(template: str, messages: list[dict[str, Any]]) -> str:
    """The text of a chat with [ and ] around what is learned, or what is wrong with it."""
    pair = encoded(chat(template), {"messages": messages})
    if isinstance(pair, str):
        return pair
    marks, ours = [0, *learned(pair), 0], both()[0]
    pieces = [ours.decode([number]) for number in ids(pair)]
    changes = [{1: "[", -1: "]", 0: ""}[now - then] for then, now in itertools.pairwise(marks)]
    return "".join(change + piece for change, piece in zip(changes, [*pieces, ""], strict=True))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (THINKS, TWO, "…assistant\n[one<|im_end|>]\n…assistant\n[<think></think>two <|im_end|>]\n"),
        (
            THINKS,
            [user("a"), answer("<think>x</think>one", "f"), user("b"), answer("two")],
            '…assistant\n[one<call>f{"a": 1}</call><|im_end|>]\n…[<think></think>two<|im_end|>]\n',
        ),
        (THINKS, [user("a"), answer("x <|im_end|> y"), user("b"), answer("")], "…[x <|im_end|> y<|im_end|>]…"),
        (ENDS_TWICE, TWO, "…assistant\n[one<|im_end|>]\n…assistant\n[two <|im_end|>\n<pad>]"),
        (
            ENDS_TWICE,
            [user("a"), answer("one"), {"role": "tool", "content": "c"}, answer("two")],
            "…assistant\n[one<|im_end|>]\n<|im_start|>assistant\n[two<|im_end|>\n<pad>]",
        ),
        (BY_NEXT, TWO, "<s>user\na<|im_start|>assistant\n[one<s>]user\nb<|im_start|>assistant\n[two<s>]"),
        (
            BY_NEXT,
            [user("a"), answer("", "f"), {"role": "tool", "content": "c"}, answer("d")],
            '…[<call>f{"a": 1}</call><|im_start|>]tool\nc<|im_start|>assistant\n[d<s>]',
        ),
        (CHAT_ML, [answer("one"), user("b"), answer("two")], "<|im_start|>assistant\n[one<|im_end|>]\n…"),
        (ENDS_ALL_BUT_LAST, [user("a"), answer("one"), answer("two")], "…assistant\n[one<|im_end|>]\n…[two<|im_end|>]"),
        (
            DEFAULT_SYSTEM,
            [answer("one"), user("b"), answer("two")],
            "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>assistant\n[one<|im_end|>]\n…[two<|im_end|>]\n",
        ),
    ],
)
def test_each_answer_is_learned_with_its_end_and_nothing_before_it(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    place, text = 0, shown(template, messages)
    for piece in expected.split("…"):
        assert piece in text[place:], text
        place = text.index(piece, place) + len(piece)
    assert text.count("[") == sum(message["role"] == "assistant" for message in messages)
    assert text.startswith(expected.partition("…")[0]) and text.endswith(expected.rpartition("…")[2])


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (OTHER_END, TWO, "it ends message 2 with '<pad>', but the last answer of a chat with '<|im_end|>'; mark"),
        (PICTURES, TWO, "the text of answer 1 is not among what is learned: it leaves it out or changes it"),
        (CHAT_ML, [user("a"), answer("", "f"), user("b"), answer("c")], "the text of answer 1 is not among what is"),
        (
            MARKED.replace("message.content | trim", "''"),
            TWO,
            "the text of answer 1 is not among what is learned: it leaves it out or changes it",
        ),
    ],
)
def test_answers_that_would_be_learned_wrongly_are_bad_rows(
    template: str, messages: list[dict[str, Any]], problem: str
) -> None:
    assert shown(template, messages).startswith(f"chat template: {problem}")


@pytest.mark.parametrize(
    ("template", "ends", "note"),
    [
        (CHAT_ML, [END], ""),
        (MARKED, [END], ""),
        (THINKS, [END], ""),
        (ENDS_TWICE, [END], ""),
        (BY_NEXT, ["<s>", "<|im_start|>"], ""),
        (OTHER_END, [END], "the chat template ends earlier answers of a chat with '<pad>', but the last with"),
        (NO_END, [], "no token of the tokenizer ends the answers that are learned"),
        (MARKED.replace('{{ "<|im_end|>" }}', ""), [], "no token of the tokenizer ends the answers"),
    ],
)
def test_ends_of_answers_are_those_that_the_template_writes(template: str, ends: list[str], note: str) -> None:
    text = library()
    text.add_special_tokens(["<|endoftext|>"])  # the base's own end, which is not that of an answer
    tokenizer = build_tokenizer(text.to_str(), where=Path("tokenizer.json"))
    found, said = ends_of_answers(template_of(chat(template), tokenizer), tokenizer)
    assert [tokenizer.backend.id_to_token(number) for number in found] == ends
    assert said.startswith(note) and bool(said) == bool(note)


def test_chats_of_older_versions_have_other_fingerprints_and_their_prepared_folders_are_read() -> None:
    older = PairFormat(messages="m", template="T")
    newer = PairFormat(messages="m", template="T", rules=ANSWERS)
    assert repr(older) == (
        "PairFormat(prompt='', answer='', messages='m', prefix='', suffix='', encoder_decoder=False, template='T',"
        " special_tokens=(), date='')"
    )
    assert repr(newer) != repr(older) and "rules" not in older.summary
    assert prepared_otherwise(older.summary, newer.summary) == ""
    assert prepared_otherwise(older.summary, PairFormat(messages="n").summary) != ""
