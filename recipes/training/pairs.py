"""How a recipe's rows become pairs: from its fields, its model, and the chat template beside its tokenizer. Imports no
torch."""

from pathlib import Path

from models.config import ModelConfig
from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from recipes.data.config import DataConfig
from recipes.data.pairs import Pairing
from recipes.data.text.chat import chat_settings, read_chat_files
from recipes.data.text.pairs import PairFormat
from recipes.weights.locate import FROM_WEIGHTS, Weights


def pairing_of(data: DataConfig, model: ModelConfig, weights: Weights | None) -> Pairing:
    """For a recipe with pairs. weights: those it starts from or took its tokenizer from. Raises UserError for a chat
    without a template, and for a model that lacks a token."""
    encoder_decoder = isinstance(model, TransformersConfig) and model.is_encoder_decoder
    chat = {}
    if data.messages_field:
        files = dict(weights.description.companions) if weights else {}
        if data.tokenizer != FROM_WEIGHTS:
            tokenizer = Path(data.tokenizer).expanduser()
            files |= read_chat_files(tokenizer if tokenizer.is_dir() else tokenizer.parent)
        chat = chat_settings(files, template=data.chat_template, date=data.chat_date)
    format = PairFormat(
        prompt=data.prompt_field,
        answer=data.answer_field,
        messages=data.messages_field,
        prefix=data.prompt_prefix,
        suffix=data.prompt_suffix,
        encoder_decoder=encoder_decoder,
        **chat,
    )
    if not encoder_decoder:
        return Pairing(format)
    assert isinstance(model, TransformersConfig)
    start, padding = (model.settings.get(f"{name}_token_id") for name in ("decoder_start", "pad"))
    if not isinstance(start, int) or not isinstance(padding, int):
        raise UserError(
            "model: config.json of an encoder-decoder model must give decoder_start_token_id and pad_token_id, as its"
            f" decoder was trained with; they are {start!r} and {padding!r}"
        )
    return Pairing(format, decoder_start=start, padding=padding)
