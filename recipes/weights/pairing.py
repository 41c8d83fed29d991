"""How a recipe's rows become pairs: from its fields, its model, and the chat template beside its tokenizer."""

import json
from collections.abc import Iterator, Mapping

from models.config import FROM_WEIGHTS, ModelConfig
from models.transformers_config import TransformersConfig
from parallel.errors import TemporaryError, UserError
from recipes.data.config import DataConfig
from recipes.data.pair_rules import pair_problems
from recipes.data.pair_sequences import Pairing
from recipes.data.text.chat import chat_settings, read_chat_files
from recipes.data.text.pair_format import ANSWERS, SETTINGS, PairFormat
from recipes.data.text.tokens_beside import TOKENIZER_CONFIG
from recipes.files.reading import user_path
from recipes.weights.companions import GENERATION_CONFIG
from recipes.weights.locate import InitialWeights, Weights


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
    encoder_decoder = model.is_encoder_decoder
    if problems := list(pair_problems(data, encoder_decoder=encoder_decoder)):
        yield from problems
        return
    try:
        weights = initial.find() if initial and (model.weights or data.tokenizer == FROM_WEIGHTS) else None
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
