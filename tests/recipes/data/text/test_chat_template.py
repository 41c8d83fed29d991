"""Chat templates are programs that came with somebody's weights: what they use is bounded; their files may be odd."""

import json
import os
import signal
from pathlib import Path

import pytest

from parallel.errors import UserError
from recipes.data.text import chat as chat_module
from recipes.data.text.chat import ChatTemplate, chat_settings, ends_of_answers, read_chat_files
from recipes.data.text.pair_format import ANSWERS, PairFormat, template_of
from recipes.data.text.tokenizer import load_tokenizer, text_library

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FOR_A = "{% if messages[0].content == 'A' %}"


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, special_tokens={}, date="")


@pytest.mark.parametrize(
    ("attack", "problem"),
    [
        ("{{ messages[0].content * 20000000000 }}", "it ended its process, most likely by using more than 2 GB"),
        ("{{ messages[0].content.ljust(20000000000) }}", "it ended its process, most likely by using more than 2 GB"),
        ("{{ messages[0].content.ljust(60000000) }}", "it writes more than 50,000,000 characters"),
    ],
)
def test_chat_for_which_a_template_needs_too_much_memory_is_a_bad_row(attack: str, problem: str) -> None:
    one = template(FOR_A + attack + "{% endif %}" + PLAIN)
    found = one.render([{"role": "user", "content": "A"}, CHAT[1]])
    assert isinstance(found, str) and found.startswith(f"chat template: {problem}")
    assert not isinstance(one.render(CHAT), str)  # the next row is as good as ever


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "xxxxxxxxxxxxxxxxxxxx"])
def test_chat_for_which_a_template_does_not_end_is_a_bad_row(inside: str) -> None:
    loops = "{% for i in range(99999) %}" * 3 + inside + "{% endfor %}" * 3
    one = template(FOR_A + loops + "{% endif %}" + PLAIN)
    found = one.render([{"role": "user", "content": "A"}, CHAT[1]])
    assert found == "chat template: it computes for more than 5 s" or "2 GB of memory" in str(found)
    assert not isinstance(one.render(CHAT), str)


@pytest.mark.parametrize("half", [r"{{ '\ud800' }}", r"{{ raise_exception('\ud800') }}"])
def test_half_a_surrogate_pair_of_a_template_is_a_bad_row_and_no_prompt(half: str) -> None:
    one = template(half + PLAIN)
    assert str(one.render(CHAT)).startswith("chat template: ")
    with pytest.raises(UserError, match="the chat template refuses this prompt: "):
        one.prompt(CHAT[:1])


def test_template_that_ends_its_process_again_and_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MOST_ENDS", 2)
    one = template("{{ messages[0].content * 20000000000 }}" + PLAIN)
    assert isinstance(one.render(CHAT), str)
    with pytest.raises(UserError, match=r"data\.chat_template: it ended its process, .*, 2 times; repair the template"):
        one.render(CHAT)


def test_chat_whose_process_somebody_else_killed_is_written_all_the_same() -> None:
    one = template(PLAIN)
    os.kill(one._process.pid, signal.SIGKILL)
    assert not isinstance(one.render(CHAT), str)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[]", "it must contain one JSON object"),
        ("null", "it must contain one JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"chat_template": 7}', "chat_template must be a text, or a list of names and templates"),
        ('{"chat_template": {"a": "b"}}', "chat_template must be a text"),
        ('{"chat_template": [["default", "x"]]}', "chat_template must be a text"),
        ('{"chat_template": [{"name": "default", "template": null}]}', "the tokenizer came without a chat template"),
        ('{"chat_template": [{"name": "default", "template": [1]}]}', "chat_template must be a text"),
    ],
)
def test_tokenizer_config_of_another_shape_is_refused(config: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"data.messages_field: .*{problem}"):
        chat_settings({"tokenizer_config.json": config}, template="", date="")


def test_template_files_that_never_end_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(UserError, match=r"chat_template\.jinja cannot be used: it is not a regular file"):
        read_chat_files(tmp_path)
    for file in (str(tmp_path / "chat_template.jinja"), "/dev/zero"):
        with pytest.raises(UserError, match=f"data.chat_template: '{file}' cannot be read: .*not a regular file"):
            chat_settings({}, template=file, date="")
    with (tmp_path / "large.jinja").open("wb") as file_:
        file_.truncate(20_000_000_000)
    with pytest.raises(UserError, match="it has more than 10,000,000 bytes"):
        chat_settings({}, template=str(tmp_path / "large.jinja"), date="")


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_a_template_by_name_has_its_tokens_in_a_tokenizer_that_is_trained_for_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    format = PairFormat(messages="messages", rules=ANSWERS, **chat_settings({}, template=name, date=""))
    sources = [str(tmp_path / "chats.jsonl")]
    trained = load_tokenizer("train:300", sources=sources, text_field=format, cache=tmp_path, log=lambda line: None)
    one = template_of(format, trained)
    rendered, (ends, note) = one.render(CHAT), ends_of_answers(one, trained)
    assert not isinstance(rendered, str) and len(ends) == 1 and not note
    tokens = text_library(trained.json, spelled_out=True).encode(rendered.text).tokens
    assert {*format.tokens} <= {*tokens} and trained.backend.id_to_token(ends[0]) in tokens
    begin, end = rendered.answers[-1]
    assert rendered.text[begin:end].endswith(f"{CHAT[-1]['content']}{trained.backend.id_to_token(ends[0])}")
