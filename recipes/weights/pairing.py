"""How a recipe's rows become pairs: from its fields, its model, and the chat template beside its tokenizer; and what
keeps them from it, with what to write instead."""

import datetime
import json
from collections.abc import Iterator, Mapping

from models.config import FROM_WEIGHTS, ModelConfig
from models.transformers_config import TransformersConfig
from parallel.errors import TemporaryError, UserError
from recipes.data.config import ONLY_OF_PAIRS, DataConfig
from recipes.data.pair_sequences import Pairing
from recipes.data.text.chat import chat_settings, read_chat_files
from recipes.data.text.pair_format import ANSWERS, SETTINGS, PairFormat
from recipes.data.text.row import PLAIN_TEXT
from recipes.data.text.sources import is_stdlib
from recipes.data.text.tokens_beside import TOKENIZER_CONFIG
from recipes.files.reading import user_path
from recipes.weights.companions import GENERATION_CONFIG
from recipes.weights.locate import InitialWeights, Weights

TWO_FIELDS = "prompt_field and answer_field"
FIELDS = f'{TWO_FIELDS}, or messages_field = "messages"'


def pairing_of(data: DataConfig, model: ModelConfig, weights: Weights | None) -> Pairing:
    """How the rows of a recipe with pairs become pairs. weights: those it starts from or took its tokenizer from.
    Raises UserError for a chat without a template, and for a model that lacks a token."""
    encoder_decoder = model.is_encoder_decoder
    files = dict(weights.description.companions) if weights else {}
    if weights and data.messages_field and TOKENIZER_CONFIG not in files:  # it said no more than any export does
        tokenizer = weights.tokenizer
        files[TOKENIZER_CONFIG] = json.dumps({"eos_token": tokenizer.backend.id_to_token(tokenizer.end_of_document)})
    format = pair_format(data, files, encoder_decoder=encoder_decoder)
    if not isinstance(model, TransformersConfig) or not encoder_decoder:
        return Pairing(format)
    generation = json.loads(files.get(GENERATION_CONFIG, "{}"))
    start, padding = (_token(f"{name}_token_id", model, generation) for name in ("decoder_start", "pad"))
    return Pairing(format, decoder_start=start, padding=padding)


def pair_format(data: DataConfig, files: Mapping[str, str], *, encoder_decoder: bool) -> PairFormat:
    """The format of the pairs. files: name -> text of what came with the weights; another tokenizer's replace it."""
    chat = {}
    if data.messages_field:
        beside = {}
        if data.tokenizer != FROM_WEIGHTS:
            tokenizer = user_path(data.tokenizer)
            beside = read_chat_files(tokenizer if tokenizer.is_dir() else tokenizer.parent)
        chat = chat_settings({**files, **beside}, template=data.chat_template, date=data.chat_date)
        chat["rules"] = ANSWERS
    given = {name: getattr(data, setting) for name, setting in SETTINGS.items()}
    return PairFormat(**given, encoder_decoder=encoder_decoder, **chat)


def pairing_problems(data: DataConfig, model: ModelConfig, initial: InitialWeights | None) -> Iterator[tuple[str, str]]:
    """(field of [data], message) of what keeps a recipe's rows from becoming pairs."""
    if problems := list(pair_problems(data, encoder_decoder=model.is_encoder_decoder)):
        yield from problems
        return
    try:
        weights = initial.found if initial and (model.weights or data.tokenizer == FROM_WEIGHTS) else None
    except UserError:  # reported where weights are checked
        return
    try:
        _ = pairing_of(data, model, weights)
    except TemporaryError:
        raise
    except UserError as error:
        place, _, message = " ".join(str(error).split()).partition(": ")
        known = place.startswith("data.")
        yield (place.removeprefix("data."), message) if known else ("prompt_field", f"{place}: {message}")


def _token(name: str, model: TransformersConfig, generation: dict[str, object]) -> int:
    """The id of a token of an encoder-decoder model."""
    found = model.settings.get(name, generation.get(name))
    if found is None:  # some families have a default
        from models.transformers import library_config

        found = getattr(library_config(model.settings), name, None)
    if not isinstance(found, int) or not 0 <= found < model.vocabulary:
        raise UserError(
            f"model: config.json gives {name} = {found!r}, but the decoder needs one in its vocabulary; write it there"
            " (the models of the T5 family begin with their pad token, 0)"
        )
    return found


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
