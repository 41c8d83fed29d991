"""What is wrong with the fields of [data] that concern pairs, and what to write instead. Imports no torch."""

import datetime
from collections.abc import Iterator

from recipes.data.config import ONLY_OF_PAIRS, DataConfig
from recipes.data.text.row import PLAIN_TEXT
from recipes.data.text.sources import is_stdlib

TWO_FIELDS = "prompt_field and answer_field"
FIELDS = f'{TWO_FIELDS}, or messages_field = "messages"'


def pair_problems(data: DataConfig, *, encoder_decoder: bool) -> Iterator[tuple[str, str]]:
    """(field, message) of each problem. encoder_decoder: whether the model is one."""
    written = [name for name in ONLY_OF_PAIRS if getattr(data, name) != getattr(DataConfig, name)]
    if not (data.prompt_field or data.answer_field or data.messages_field):
        if encoder_decoder:
            yield "prompt_field", f"an encoder-decoder model learns answers to prompts; name the fields: {TWO_FIELDS}"
        for name in written:
            yield name, f"is for pairs of prompt and answer; name their fields: {FIELDS}"
        return
    if data.messages_field and (data.prompt_field or data.answer_field):
        yield "messages_field", "holds both prompts and answers; omit prompt_field and answer_field, or this"
    elif not data.messages_field and not (data.prompt_field and data.answer_field):
        missing = "answer_field" if data.prompt_field else "prompt_field"
        yield missing, f"is missing; a pair needs {FIELDS}"
    elif data.prompt_field and data.prompt_field == data.answer_field:
        yield "answer_field", "is the field of the prompt; name the field that holds the answer"
    if data.text_field != DataConfig.text_field:
        yield "text_field", "is not read where rows are pairs; omit it, or the fields of the pairs"
    if data.bos:
        yield "bos", "begins documents of text; a chat template writes its own beginning, and pairs have none; omit it"
    if encoder_decoder:
        if data.messages_field:
            yield "messages_field", f"is for causal models; an encoder-decoder model needs {TWO_FIELDS}"
    elif "answer_length" in written:
        yield "answer_length", "is for encoder-decoder models; batch.sequence_length limits prompt and answer together"
    yield from _settings_fit(data)
    for source in data.sources:
        if is_stdlib(source) or source.lower().endswith(PLAIN_TEXT):
            yield "source", f"{source!r} is plain text, which has no fields; give .jsonl, .parquet or .csv files"


def _settings_fit(data: DataConfig) -> Iterator[tuple[str, str]]:
    of_chats, of_fields = ("chat_template", "chat_date"), ("prompt_prefix", "prompt_suffix")
    for name in of_fields if data.messages_field else of_chats:
        if getattr(data, name):
            instead = (
                "the chat template writes such text" if data.messages_field else "write messages_field, or omit it"
            )
            yield name, f"has no effect with {'messages' if data.messages_field else 'prompt'}_field; {instead}"
    if data.messages_field and data.chat_template:
        from recipes.data.text.chat import NAMED, template_path

        if not template_path(data.chat_template).is_file():
            names = ", ".join(sorted(file.stem for file in NAMED.glob("*.jinja")))
            rule = f"'{data.chat_template}' does not exist; give a file with a Jinja template, or one of {names}"
            yield "chat_template", rule
    try:
        _ = data.chat_date and datetime.date.fromisoformat(data.chat_date)
    except ValueError:
        yield "chat_date", f'{data.chat_date!r} is not a date; write it as "2026-01-31"'
