"""Converts weight names and config.json to and from Hugging Face: "llama" (Llama 2 to 3.2, SmolLM2) and "smollm3".

The classes of transformers are the reference for config.json and the defaults of missing keys. Imports no torch.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from models.config import ModelConfig, TextFacts

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


def hf_name(name: str) -> str:
    """blocks.3.attention.q_proj.weight -> model.layers.3.self_attn.q_proj.weight. Raises KeyError."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        return f"model.layers.{match[1]}.{IN_BLOCK[match[2]]}"
    return OUTSIDE[name]


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(our name, shape) of every parameter of models.decoder.Decoder, in the order of the model."""
    width, inner = config.width, config.feed_forward_width
    query, key_value = config.heads * config.head_width, config.key_value_heads * config.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "attention.q_proj": (query, width),
        "attention.k_proj": (key_value, width),
        "attention.v_proj": (key_value, width),
        "attention.o_proj": (width, query),
        "feed_forward_norm": (width,),
        "feed_forward.gate_proj": (inner, width),
        "feed_forward.up_proj": (inner, width),
        "feed_forward.down_proj": (width, inner),
    }
    yield "embedding.weight", (config.vocabulary, width)
    for layer in range(config.layers):
        for part, shape in shapes.items():
            yield f"blocks.{layer}.{part}.weight", shape
    yield "norm.weight", (width,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocabulary, width)


class Unsupported(ValueError):
    """A sound config.json that asks for what our decoder does not compute: one line for each reason."""


CONTEXT_LENGTH = 2048
"""The context length where config.json has none."""
CLASSES = {"llama": "LlamaForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
# Key -> its defaults in transformers.LlamaConfig and SmolLM3Config.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "vocab_size": (32000, 128256),
    "hidden_size": (4096, 2048),
    "intermediate_size": (11008, 11008),
    "num_hidden_layers": (32, 36),
    "num_attention_heads": (32, 16),
    "num_key_value_heads": (None, 4),
    "head_dim": (None, None),
    "hidden_act": ("silu", "silu"),
    "rms_norm_eps": (1e-6, 1e-6),
    "initializer_range": (0.02, 0.02),
    "max_position_embeddings": (2048, 32768),
    "rope_theta": (10_000.0, 2_000_000.0),
    "no_rope_layers": (None, None),
    "no_rope_layer_interval": (4, 4),
    "tie_word_embeddings": (False, True),
    "bos_token_id": (1, 128000),
    "eos_token_id": (2, 128001),
    "pad_token_id": (None, 128004),
}
# Key -> (supported values, what other values ask for). Keys that are neither here nor read below (use_cache,
# pretraining_tp, transformers_version, ...) do not change what the model computes.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "an activation other than the silu of SwiGLU"),
    "attention_bias": ((False, None), "biases in the attention projections"),
    "mlp_bias": ((False, None), "biases in the feed-forward"),
    "attention_dropout": ((0, None), "dropout on the attention weights"),
    "rope_interleaved": ((False, None), "rotary embeddings of neighbouring elements"),
    "is_causal": ((True, None), "attention to later tokens"),
    "partial_rotary_factor": ((1, None), "rotary embeddings of a part of each head"),
    "quantization_config": ((None,), "quantized weights"),
    "compression_config": ((None,), "compressed weights"),
    "per_layer_config": ((None,), "layers of different shapes"),
    "auto_map": ((None,), "custom code"),
}


# Our field -> its key, where they differ.
SPELLED = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "feed_forward_width": "intermediate_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "vocabulary": "vocab_size",
}


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    family = list(CLASSES).index(config["model_type"])
    return {**{key: defaults[family] for key, defaults in DEFAULTS.items()}, **config}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a config.json, named "from_weights".

    Raises ValueError with one line for each malformed key, or Unsupported with one for each unsupported key.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in CLASSES:
        known = " or ".join(f'"{name}"' for name in CLASSES)
        raise Unsupported(f"model_type = {family!r}: only {known} is supported")
    given = _Reader(_with_defaults(config))
    _note_unsupported(given, config, family)
    width, heads = given.integer("hidden_size"), given.integer("num_attention_heads")
    layers = given.integer("num_hidden_layers")
    given.integer("max_position_embeddings", null=CONTEXT_LENGTH)  # read by text_facts
    values: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "feed_forward_width": given.integer("intermediate_size"),
        "heads": heads,
        "key_value_heads": given.integer("num_key_value_heads", null=heads),
        "head_width": given.integer("head_dim", null=width // heads),
        "vocabulary": given.integer("vocab_size"),
        "tied_embeddings": given.boolean("tie_word_embeddings"),
        "norm_eps": given.number("rms_norm_eps"),
        "init_std": given.number("initializer_range"),
        **_rope(given),
        **(_no_rope(given, layers) if family == "smollm3" else {}),
    }
    model = ModelConfig(name="from_weights", **values)
    if not given.problems:
        # Rules across fields cannot judge values that are wrong by themselves.
        given.problems += [
            f"{SPELLED.get(field, field)} = {getattr(model, field)}: {message}" for field, message in model.problems()
        ]
    if given.problems:
        raise ValueError("\n".join(given.problems + given.unsupported))
    if given.unsupported:
        raise Unsupported("\n".join(given.unsupported))
    return model


def text_facts(config: Mapping[str, Any]) -> TextFacts:
    """The rest of a config.json that config_from_hf accepts. Raises ValueError for impossible end tokens."""
    given = _with_defaults(config)
    ends, vocabulary = given["eos_token_id"], given["vocab_size"]
    if isinstance(ends, list) and not all(type(end) is int and 0 <= end < vocabulary for end in ends):
        raise ValueError(f"eos_token_id = {ends!r}: must be token ids below vocab_size = {vocabulary}")
    return facts_of(given, vocabulary=vocabulary, context_length=given["max_position_embeddings"])


def facts_of(values: Mapping[str, Any], *, vocabulary: int, context_length: int | None) -> TextFacts:
    """The tokens that a config.json names, without those beyond the vocabulary."""

    def token(value: Any) -> int | None:
        return value if type(value) is int and 0 <= value < vocabulary else None

    ends = values.get("eos_token_id")
    several = tuple(end for end in ends if token(end) is not None) if isinstance(ends, list) else ()
    return TextFacts(
        context_length=context_length or CONTEXT_LENGTH,
        bos_token_id=token(values.get("bos_token_id")),
        eos_token_id=(several or None) if isinstance(ends, list) else token(ends),
        pad_token_id=token(values.get("pad_token_id")),
    )


def beyond_hf(model: ModelConfig) -> str | None:
    """What a model of ours computes that no config.json of these families can say; None if there is nothing."""
    if not model.logit_softcap:
        return None
    return f"logit_softcap = {model.logit_softcap}: a Llama or SmolLM3 of transformers would compute uncapped logits"


def config_to_hf(model: ModelConfig, facts: TextFacts, *, dtype: str = "float32") -> dict[str, Any]:
    """A config.json for transformers 4.53 and later, and for programs that read the same keys.

    Raises ValueError for a model that is beyond_hf().

    RoPE uses the keys of transformers 4, which version 5 and vLLM read too. The family is "llama" where possible,
    because more programs support it. It cannot express layers without rotary embedding, and transformers refuses a
    Llama whose width is not a multiple of its heads; "smollm3" computes the same and accepts both.
    """
    if problem := beyond_hf(model):
        raise ValueError(problem)
    rope = [int(model.uses_rope(layer)) for layer in range(model.layers)]
    family = "llama" if all(rope) and model.width % model.heads == 0 else "smollm3"
    scaling = None
    if model.rope_scaling == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_frequency_factor,
            "high_freq_factor": model.rope_high_frequency_factor,
            "original_max_position_embeddings": model.rope_original_length,
        }
    ends = facts.eos_token_id
    return {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": facts.context_length,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        **({"no_rope_layers": rope, "use_sliding_window": False} if family == "smollm3" else {}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
        # Written even if None: a missing key means the default token of the family.
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": list(ends) if isinstance(ends, tuple) else ends,
        "pad_token_id": facts.pad_token_id,
    }


class _Reader:
    """Reads values of the right type; for a wrong one, returns a placeholder and adds a line to `problems`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self.unsupported: list[str] = []
        """Values of the right type that ask for what our decoder does not compute."""
        self.place = ""

    def table(self, key: str, values: dict[str, Any]) -> "_Reader":
        """Reads the values of a table, and adds lines where this reader does."""
        inside = _Reader(values)
        inside.problems, inside.unsupported, inside.place = self.problems, self.unsupported, f"{key}."
        return inside

    def refuse(self, key: str, rule: str) -> None:
        self.problems.append(self._line(key, rule))

    def decline(self, key: str, rule: str) -> None:
        """Add a line to `unsupported`."""
        self.unsupported.append(self._line(key, rule))

    def _line(self, key: str, rule: str) -> str:
        value = f"{self.values[key]!r}" if key in self.values else "missing"
        return f"{self.place}{key} = {value}: {rule}"

    def integer(self, key: str, *, null: int | None = None) -> int:
        """An integer of at least 1; null: the value that JSON's null stands for."""
        value = self.values.get(key)
        if value is None and null is not None:
            return max(1, null)
        if type(value) is int and value >= 1:
            return value
        self.refuse(key, "must be an integer >= 1")
        return 1

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self.refuse(key, "must be a number > 0")
        return 1.0

    def boolean(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return bool(value)


def _note_unsupported(given: _Reader, config: Mapping[str, Any], family: str) -> None:
    """Add a line for each key of config that asks for something our model does not support."""
    classes = config.get("architectures") or [CLASSES[family]]
    if not isinstance(classes, list):
        given.refuse("architectures", "must be a list of names")
    elif CLASSES[family] not in classes:
        given.decline("architectures", f"only {CLASSES[family]} is supported for this model_type")
    for key, (harmless, meaning) in ONLY.items():
        if key in config and config[key] not in harmless:
            given.decline(key, f"{meaning} is not supported")
    types = config.get("layer_types")  # if given, it alone decides
    asked = []
    if types is not None and not isinstance(types, list | tuple):
        given.refuse("layer_types", "must be a list of the kind of each layer")
    elif others := [repr(kind) for kind in types or () if kind != "full_attention"]:
        asked.append(f"layer_types has {', '.join(dict.fromkeys(others))}")
    if config.get("use_sliding_window") and config.get("sliding_window") and (asked or types is None):
        asked += [f"{key} = {config[key]!r}" for key in ("use_sliding_window", "sliding_window")]
    if asked:
        given.unsupported.append(f"{', '.join(asked)}: only 'full_attention' in every layer is supported")


def _rope(given: _Reader) -> dict[str, Any]:
    """The RoPE fields, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    # In transformers 5, rope_scaling overrides rope_parameters, and a rope_theta inside overrides the one outside.
    key = "rope_scaling" if given.values.get("rope_scaling") else "rope_parameters"
    parameters = given.values.get(key) or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        given.refuse(key, "must be one table for all layers")
        parameters = {}
    inside = given.table(key, dict(parameters))
    values: dict[str, Any] = {"rope_theta": (inside if "rope_theta" in parameters else given).number("rope_theta")}
    if parameters.get("partial_rotary_factor") not in (None, 1):
        inside.decline("partial_rotary_factor", f"{ONLY['partial_rotary_factor'][1]} is not supported")
    spelled = "rope_type" if "rope_type" in parameters else "type"
    kind = parameters.get(spelled, "default")
    if kind == "llama3":
        # transformers takes a missing original length from outside the table, and one outside overrides it.
        original = "original_max_position_embeddings"
        inside.values.setdefault(original, given.values.get("max_position_embeddings"))
        if given.values.get(original) is not None:
            inside.values[original] = given.values[original]
        values |= {
            "rope_scaling": "llama3",
            "rope_factor": inside.number("factor"),
            "rope_low_frequency_factor": inside.number("low_freq_factor"),
            "rope_high_frequency_factor": inside.number("high_freq_factor"),
            "rope_original_length": inside.integer(original),
        }
        if values["rope_factor"] < 1:
            inside.refuse("factor", "must be a number >= 1")
    elif kind != "default":
        inside.decline(spelled, "only 'default' and 'llama3' rotary embeddings are supported")
    return values


def _no_rope(given: _Reader, layers: int) -> dict[str, Any]:
    """The layers without rotary embedding, as an interval if they follow one."""
    pattern = given.values["no_rope_layers"]
    if pattern is None:
        return {"no_rope_every": given.integer("no_rope_layer_interval")}
    if not isinstance(pattern, list) or len(pattern) < layers or any(flag not in (0, 1) for flag in pattern):
        given.refuse("no_rope_layers", f"must be a list of 1 (rotary) or 0 (none) for each of the {layers} layers")
        return {}
    without = tuple(layer for layer in range(layers) if not pattern[layer])
    if not without:
        return {}
    interval = without[0] + 1
    if without == tuple(range(interval - 1, layers, interval)):
        return {"no_rope_every": interval}
    return {"no_rope_layers": without}
