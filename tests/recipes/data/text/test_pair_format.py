"""Rows of pairs as tokens: the same as transformers makes of them, and what of them is learned."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from parallel.errors import UserError
from recipes.data.text.chat import chat_settings
from recipes.data.text.pair_format import FIRST, ID, LEARNED, PairEncoder, PairFormat
from recipes.data.text.readers import read_file
from recipes.data.text.row import LATIN_1, Place, Row
from recipes.data.text.rows import open_rows, readable_documents
from recipes.data.text.tokenizer import Tokenizer, build_tokenizer

BEGIN, START, END = "<s>", "<|im_start|>", "<|im_end|>"
CHAT_ML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<|im_start|>assistant\n" }}
        {%- generation -%}{{ message.content | trim }}{{ "<|im_end|>" }}{%- endgeneration %}
        {{- "\n" }}
    {%- elif message.role == "system" and not loop.first %}
        {{- raise_exception("a system message must come first") }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
# Leaves earlier thoughts out, as templates of models that think do.
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Was ist das? 🎉"},
    {"role": "assistant", "content": "Ein Fest 🎉 mit Größe."},
    {"role": "user", "content": "Wann?"},
    {"role": "assistant", "content": " Heute\n"},
]


def library(*, ends: bool = False) -> LibraryTokenizer:
    """A byte-level tokenizer. ends: it adds the end token to a text, as T5's."""
    found = LibraryTokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", END, BEGIN, START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    found.train_from_iterator(["assistant user system: das ist ein Fest, summarize: the words"] * 9, trainer=trainer)
    if ends:
        found.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return found


def both(*, ends: bool = False) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Ours, and that of transformers."""
    found = library(ends=ends)
    theirs = PreTrainedTokenizerFast(tokenizer_object=found, bos_token=BEGIN, eos_token=END, pad_token="<pad>")
    return build_tokenizer(found.to_str(), where=Path("tokenizer.json")), theirs


def encoded(format: PairFormat, row: dict[str, Any], *, ends: bool = False) -> np.ndarray | str:
    """The stored pair of a row, or its problem."""
    text, problem = format.text_of(row)
    if problem:
        return problem
    (found,), pairs = PairEncoder(format, both(ends=ends)[0]).encode([Row(text, 0, 1)])
    return found.problem or pairs[0]


def ids(pair: np.ndarray | str) -> list[int]:
    assert not isinstance(pair, str), pair
    return (pair & ID).tolist()


def learned(pair: np.ndarray | str) -> list[int]:
    assert not isinstance(pair, str), pair
    return ((pair & LEARNED) != 0).astype(int).tolist()


def chat(template: str) -> PairFormat:
    return PairFormat(messages="messages", template=template, special_tokens=(("bos_token", BEGIN),))


# ------------------------------------------------------------------------------------------------- chats


@pytest.mark.parametrize("template", [CHAT_ML, MARKED, THINKING])
def test_chat_has_the_tokens_that_transformers_gives_it(template: str) -> None:
    messages = CHAT[:3]
    _, theirs = both()
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True)
    assert ids(encoded(chat(template), {"messages": messages})) == list(expected["input_ids"])


def test_learned_tokens_are_the_assistant_mask_of_transformers() -> None:
    _, theirs = both()
    expected = theirs.apply_chat_template(
        CHAT, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pair = encoded(chat(MARKED), {"messages": CHAT})
    assert ids(pair) == list(expected["input_ids"])
    # transformers leaves out the last bytes of a character that ends an answer; none does here.
    assert learned(pair) == list(expected["assistant_masks"])


def test_tool_call_and_thoughts_reach_the_template_as_transformers_gives_them() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [{"name": "f"}]}
    messages = [{"role": "user", "content": "Was?", "tool_calls": None}, call]
    ours, theirs = both()
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    pair = encoded(chat(template), {"messages": messages})
    assert ours.decode(ids(pair)) == expected == '[user]Was?<|im_end|>[assistant](Hm.){"name": "f"}<|im_end|>'


def test_header_of_an_answer_is_not_learned_where_the_prompt_for_it_begins_a_thought() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    ours, _ = both()
    pair = encoded(chat(template), {"messages": CHAT[1:3]})
    answer = [number for number, used in zip(ids(pair), learned(pair), strict=True) if used]
    assert ours.decode(answer) == "Ein Fest 🎉 mit Größe.<|im_end|>"


def test_without_marks_the_answers_and_what_ends_them_are_learned() -> None:
    ours, _ = both()
    pair = encoded(chat(CHAT_ML), {"messages": CHAT})
    answers = [number for number, used in zip(ids(pair), learned(pair), strict=True) if used]
    assert ours.decode(answers) == f"Ein Fest 🎉 mit Größe.{END} Heute\n{END}"


def test_whole_character_at_the_end_of_an_answer_is_learned() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    pair = encoded(chat(template), {"messages": [{"role": "assistant", "content": "a🎉"}]})
    assert learned(pair) == [1] * 5 + [0]


def test_answer_without_the_thoughts_that_a_template_writes_for_the_last_one_is_learned() -> None:
    ours, _ = both()
    pair = encoded(chat(THINKING), {"messages": CHAT})
    answers = [number for number, used in zip(ids(pair), learned(pair), strict=True) if used]
    assert ours.decode(answers) == f"Ein Fest 🎉 mit Größe.{END}<think></think> Heute\n{END}"


def test_chat_that_a_template_writes_differently_when_it_goes_on_is_a_bad_row() -> None:
    problem = encoded(chat(THINKING.replace("m.content", "m.content if loop.last else '...'")), {"messages": CHAT})
    assert isinstance(problem, str)
    assert problem.startswith("chat template: it writes the messages up to number 3 differently when others follow")


def test_chat_that_its_template_refuses_is_a_bad_row() -> None:
    problem = encoded(chat(MARKED), {"messages": [*CHAT, CHAT[0]]})
    assert problem == "chat template: a system message must come first"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "not messages: the text in field 'messages' is not JSON"),
        ({"role": "user"}, "not messages: field 'messages' holds dict, not a list"),
        ([{"name": "human", "value": "hi"}], 'not messages: a message needs a "role"'),
        ([{"from": "human", "value": "hi"}], 'no answer: no message has the role "assistant"'),
        ([{"role": "user", "content": "hi"}], 'no answer: no message has the role "assistant"'),
        ([CHAT[0], {"role": "assistant", "content": ""}], "no answer"),
        ([{"role": "user", "content": [{"type": "image"}]}, CHAT[2]], 'not messages: a "content" is list, not text'),
        ([{"role": "user", "content": None}, CHAT[2]], 'not messages: a message has no "content"'),
        (None, "null"),
    ],
)
def test_chat_that_cannot_be_learned_is_a_bad_row_with_the_reason(messages: Any, problem: str) -> None:
    found = encoded(chat(CHAT_ML), {"messages": messages})
    assert isinstance(found, str)
    assert found.startswith(problem)


def test_chat_of_share_gpt_is_read_as_one_with_roles() -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    messages = [{"from": names[message["role"]], "value": message["content"], "weight": None} for message in CHAT]
    found, plain = (encoded(chat(CHAT_ML), {"messages": one}) for one in (messages, CHAT))
    assert not isinstance(found, str) and not isinstance(plain, str)
    assert found.tolist() == plain.tolist()


def test_template_cannot_leave_its_sandbox() -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{% set n = namespace(__class__=1) %}", "{{ messages.append(1) }}"):
        problem = encoded(chat(attack + CHAT_ML), {"messages": CHAT})
        assert isinstance(problem, str), attack
        assert problem.startswith("chat template: ")


def test_special_tokens_and_template_come_from_the_tokenizer_s_files() -> None:
    config = {
        "bos_token": {"content": BEGIN},
        "eos_token": None,
        "chat_template": [{"name": "default", "template": "T {{ bos_token }}"}],
    }
    found = chat_settings({"tokenizer_config.json": json.dumps(config)}, template="", date="")
    assert found == {"template": "T {{ bos_token }}", "special_tokens": (("bos_token", BEGIN),), "date": ""}
    found = chat_settings(
        {"tokenizer_config.json": json.dumps(config), "chat_template.jinja": "J"}, template="", date=""
    )
    assert found["template"] == "J"


def test_template_that_writes_today_needs_a_date() -> None:
    files = {"chat_template.jinja": "{{ strftime_now('%d %b %Y') }}" + CHAT_ML}
    with pytest.raises(UserError, match=r'data.chat_date: .* chat_date = "2026-01-31"'):
        chat_settings(files, template="", date="")
    format = PairFormat(messages="messages", **chat_settings(files, template="", date="2026-01-31"))
    text = both()[0].decode(ids(encoded(format, {"messages": CHAT})))
    assert text.startswith(f"31 Jan 2026{START}system")


def test_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.messages_field: the tokenizer came without a chat template"):
        chat_settings({}, template="", date="")


# ------------------------------------------------------------------------------------------------- fields

PAIR = PairFormat(prompt="question", answer="answer", prefix="Q: ", suffix="\nA:")
ROW = {"question": "das ist?", "answer": " ein Fest", "id": 7}


def test_pair_is_its_prompt_its_answer_and_an_end_token() -> None:
    _, theirs = both()
    prompt, answer = (theirs(text)["input_ids"] for text in ("Q: das ist?\nA:", " ein Fest"))
    pair = encoded(PAIR, ROW)
    assert ids(pair) == [*prompt, *answer, 1]
    assert learned(pair) == [0] * len(prompt) + [1] * (len(answer) + 1)
    assert isinstance(pair, np.ndarray)
    assert np.flatnonzero(pair & np.uint32(FIRST)).tolist() == [0]


def test_encoder_decoder_pair_has_the_tokens_that_the_tokenizer_adds() -> None:
    _, theirs = both(ends=True)
    format = PairFormat(prompt="question", answer="answer", prefix="summarize: ", encoder_decoder=True)
    batch = theirs("summarize: das ist?", text_target=" ein Fest")
    assert ids(encoded(format, ROW, ends=True)) == [*batch["input_ids"], *batch["labels"]]


def test_special_token_in_a_pair_is_this_token_as_in_transformers() -> None:
    _, theirs = both()
    row = {"question": f"{START}user\nhi{END}", "answer": "x"}
    format = PairFormat(prompt="question", answer="answer")
    assert ids(encoded(format, row))[:-2] == theirs(row["question"])["input_ids"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a"}, "no field 'answer'; it has 'question'"),
        ({"question": "a", "answer": 3}, "not text: field 'answer' holds int"),
        ({"question": "a", "answer": " \n"}, "empty answer: field 'answer' holds no text"),
        ({"question": "", "answer": "b"}, "empty prompt: field 'question' holds no text"),
        ({"question": None, "answer": "b"}, "null"),
        ({"question": "a", "answer": "\ud800"}, "invalid Unicode: half a surrogate pair at character 1"),
    ],
)
def test_pair_that_cannot_be_learned_is_a_bad_row_with_the_reason(row: dict[str, Any], problem: str) -> None:
    assert encoded(PAIR, row) == problem


def test_pair_without_any_text_is_an_empty_row() -> None:
    assert PAIR.text_of({"question": "", "answer": " "}) == ("", "")


# ------------------------------------------------------------------------------------------------- files

ROWS = [{"question": f'What, "{n}"?', "answer": f"It is\r\n{n}, ja: ü"} for n in range(5)]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        lines = ['"' + '","'.join(row[name].replace('"', '""') for name in rows[0]) + '"' for row in rows]
        path.write_bytes(("\ufeff" + "\r\n".join([",".join(rows[0]), *lines])).encode())
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_pairs_are_the_same_in_every_format_from_any_row_on(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    stream = open_rows(str(path), text_field=PAIR)
    found = [(row.text, stream.cursor) for row in stream]
    assert [json.loads(text) for text, _ in found] == [[row["question"], row["answer"]] for row in ROWS]
    for number, (_, cursor) in enumerate(found, 1):
        rest = open_rows(str(path), text_field=PAIR, cursor=cursor)
        assert [row.text for row in rest] == [text for text, _ in found[number:]]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_chats_are_the_same_in_every_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"messages": CHAT}, {"messages": CHAT[:3]}])
    texts = [row.text for row in open_rows(str(path), text_field=chat(CHAT_ML))]
    assert [json.loads(text) for text in texts] == [CHAT, CHAT[:3]]


def test_bad_rows_of_csv_are_listed_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'question,answer\na,b\nonly one\nc,\xff\n\n"d","e\n\nf"\ng,"open\nh,i\n')
    rows = [row for row, _ in read_file(path, text_field=PAIR, start=Place(0), size=60)]
    assert [row.text for row in rows if row.has_text] == ['["a", "b"]', '["d", "e\\n\\nf"]']
    problems = [row.problem for row in rows if row.problem]
    assert problems[0] == "not a row: 1 values for the 2 columns of the header"
    assert problems[1] == f"invalid Unicode: half a surrogate pair at character 1{LATIN_1}"
    assert problems[2].startswith("broken file: row 6 is not CSV: unexpected end of data; is a quote left open?")


def test_folder_does_not_read_csv_unless_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.csv", ROWS)
    assert len(list(open_rows(str(tmp_path), text_field=PAIR))) == 5
    assert len(list(open_rows(str(tmp_path / "*.csv"), text_field=PAIR))) == 5


def test_wrong_field_is_refused_with_its_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(
        UserError, match=r"data.prompt_field, data.answer_field: .* no field 'question'; it has 'prompt'"
    ):
        open_rows(str(path), text_field=PAIR)


def test_format_writes_its_lines_of_a_recipe() -> None:
    found = PairFormat(prompt="q", answer="a", prefix='say "it": ', encoder_decoder=True).in_recipe
    assert tomllib.loads("\n".join(found)) == {"prompt_field": "q", "answer_field": "a", "prompt_prefix": 'say "it": '}


def test_plain_text_has_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"is plain text, which has no fields"):
        open_rows(str(tmp_path), text_field=PAIR)


def test_tokenizer_is_trained_on_the_words_of_pairs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "a\nb", "answer": '"c"'}])
    assert list(readable_documents(str(path), text_field=PAIR)) == ['a\nb\n"c"']
