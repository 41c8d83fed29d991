"""The model that a config.json of Hugging Face asks for: our decoder where it can, else one of transformers.

Imports no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from models.config import LARGEST, ModelConfig, TextFacts
from models.hf import layout_of
from models.hf_families import FAMILIES
from models.hf_reading import Unsupported, config_from_hf, facts_of, text_facts
from models.transformers_config import TransformersConfig

INSTALL = 'transformers 5 or later is not installed; pip install "transformers>=5"'
ENDLESS = {"rope_parameters", "rope_theta", "relative_attention_num_buckets", "alibi"}
# Key -> what its presence asks for.
REFUSED = {
    "auto_map": "custom code, which is never run; if transformers itself computes the same model, delete auto_map",
    "quantization_config": "quantized weights, which cannot be trained; take the folder of the unquantized ones, or, of"
    " gpt_oss, what transformers saves of from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))",
    "compression_config": "compressed weights, which cannot be trained; take the folder of the uncompressed ones",
}


def read_model(settings: Mapping[str, Any]) -> tuple[ModelConfig, TextFacts]:
    """The model of a config.json, named "from_weights", and the rest of what it says.

    Raises ValueError with one line for each reason why neither our decoder nor transformers can train it.
    """
    try:
        return config_from_hf(settings), text_facts(settings)
    except Unsupported as error:
        return _of_transformers(settings, reason="; ".join(str(error).split("\n")))


def require_known(settings: Mapping[str, Any]) -> Any:
    """What transformers reads from a config.json. Raises ValueError where it is missing, or refuses that."""
    try:
        from models.transformers import library_config
    except ImportError as error:
        raise ValueError(INSTALL) from error
    if not isinstance(settings, Mapping):
        raise ValueError("a config.json must contain one JSON object")
    return library_config(settings)


def _of_transformers(settings: Mapping[str, Any], *, reason: str) -> tuple[TransformersConfig, TextFacts]:
    """What read_model() returns for a model of transformers. reason: why our decoder does not compute it."""
    if problems := [f"{key} = {settings[key]!r}: {why}" for key, why in REFUSED.items() if settings.get(key)]:
        raise ValueError("\n".join(problems))
    most = LARGEST["layers"]  # before transformers lists what each layer is
    numbers = ((key, value) for key, value in settings.items() if "layer" in key and type(value) is int)
    if problems := [f"{key} = {value}: is more than {most:,}" for key, value in numbers if value > most]:
        raise ValueError("\n".join(problems))
    library = require_known(settings)
    whole = library.to_dict()
    if problems := [*_unsuitable(whole, reason, family=settings["model_type"], nested=[*type(library).sub_configs])]:
        raise ValueError("\n".join(problems))

    def number(*names: str, default: int) -> int:
        """The first of these that the family has; transformers gives most of them one name."""
        for name in names:
            value = None
            with suppress(Exception):  # of a family whose layers differ in it
                value = getattr(library, name, None)
            if type(value) is int and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
            if type(value) is int:
                return value
        return default

    layers, width = number("num_hidden_layers", default=1), number("hidden_size", default=1)
    if library.is_encoder_decoder:
        layers += number("num_decoder_layers", "decoder_layers", default=layers)
    heads = number("num_attention_heads", default=1)
    model = TransformersConfig(
        name="from_weights",
        layers=layers,
        width=width,
        feed_forward_width=number(
            "intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", default=4 * width
        ),
        heads=heads,
        key_value_heads=number("num_key_value_heads", default=heads),
        head_width=number("head_dim", "d_kv", default=max(1, width // heads)),
        vocabulary=number("vocab_size", default=1),
        # As config.json says it: transformers 5 reads every T5 as tied.
        tied_embeddings=bool(settings.get("tie_word_embeddings", library.tie_word_embeddings)),
        norm_eps=1.0,
        rope_theta=1.0,
        definition=json.dumps(settings, indent=2) + "\n",
        reason=reason,
        # The length of a table of positions; 0 where they are rotary, relative, or biases, which have no end.
        positions=0 if ENDLESS & whole.keys() else _context_length(whole) or 0,
    )
    if problems := [f"{name} is more than {most:,}" for name, most in LARGEST.items() if getattr(model, name) > most]:
        raise ValueError("\n".join(problems))
    try:
        layout_of(model)  # builds it without values, so that what does not fit together is known at once
    except Exception as error:  # each family raises errors of its own
        raise ValueError(f"it cannot be built: {' '.join(str(error).split())}") from None
    return model, facts_of(whole, vocabulary=model.vocabulary, context_length=_context_length(whole))


def config_to_transformers(model: TransformersConfig, facts: TextFacts, *, dtype: str) -> dict[str, Any]:
    """The model's config.json, changed only where the type of the weights or the tokens at the ends of texts are."""
    from models.transformers import classes_of, library_config

    settings = dict(model.settings)
    whole = library_config(settings).to_dict()
    head, _, _ = classes_of(settings["model_type"], is_encoder_decoder=model.is_encoder_decoder)
    if head not in (settings.get("architectures") or ()):
        settings["architectures"] = [head]
    key = "dtype" if "dtype" in settings else "torch_dtype"  # of transformers 5, and of both
    if settings.get(key, "float32") != dtype:
        settings[key] = dtype
    then = facts_of(whole, vocabulary=model.vocabulary, context_length=_context_length(whole))
    same_tokens = model.name == "from_weights" and facts.eos_token_id == then.eos_token_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        now = getattr(facts, name)
        if now is None and (same_tokens or (name == "pad_token_id" and model.is_encoder_decoder)):
            continue  # a run does not use the first, and pairs were padded with the second
        if now != getattr(then, name):
            settings[name] = list(now) if isinstance(now, tuple) else now
    return settings


def _unsuitable(whole: Mapping[str, Any], reason: str, *, family: str, nested: list[str]) -> Iterator[str]:
    """What keeps a model of transformers from being trained here. whole: with all defaults; reason: as above."""
    from models.transformers import classes_of

    if nested:
        yield f"{', '.join(nested)}: parts with configs of their own, such as text and images, are not supported"
        return
    both = bool(whole.get("is_encoder_decoder"))
    head, base, fills_gaps = classes_of(family, is_encoder_decoder=both)
    kind = "an encoder-decoder" if both else "a causal"
    if head is None:
        yield f"model_type = {family!r}: transformers has no class that trains it as {kind} language model"
        return
    given = whole.get("architectures") or [head]
    if not isinstance(given, list) or not any(name in (head, base) for name in given):
        yield f"architectures = {given!r}: only {head}, {kind} language model, is supported for this model_type"
    elif fills_gaps and not both and not whole.get("is_decoder"):
        yield f"model_type = {family!r}: its tokens see later tokens, unless is_decoder = true"
    experts = {key: value for key, value in whole.items() if re.search(r"(^|_)experts?($|_)", key)}
    counts = [key for key, value in experts.items() if type(value) is int and value > 1]
    if counts and family in FAMILIES and FAMILIES[family].experts is not None:
        yield f"{reason}; mixtures of experts are computed by our own decoder only"
    elif counts:
        key = next((key for key in counts if re.fullmatch(r"(moe_)?(n|num)_.*experts", key)), counts[0])
        ours = "except by our own decoder (qwen3_moe, mixtral, olmoe, gpt_oss, dots1, deepseek_v2 and v3)"
        yield f"{key} = {experts[key]}: mixtures of experts are not supported, {ours}"


def _context_length(whole: Mapping[str, Any]) -> int | None:
    lengths = (whole.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"))
    return next((length for length in lengths if type(length) is int and length >= 1), None)
