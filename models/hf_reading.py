"""Reads the config.json of a model that our decoder computes (models/hf_families.py).

The classes of transformers are the reference for what its keys mean. Imports no torch.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models.config import ModelConfig, TextFacts
from models.hf_families import DEFAULTS, FAMILIES, KEYS, LATENT_KEYS, LLAMA3_KEYS, YARN_KEYS, Family
from models.registry import LATENTS


class Unsupported(ValueError):
    """A sound config.json that asks for what our decoder does not compute: one line for each reason."""


CONTEXT_LENGTH = 2048
"""The context length where config.json has none."""
LATER = "attention to later tokens"
"""What no language model may have, be it ours or of transformers (models/assumptions.py)."""
# Key -> (supported values, what other values ask for). Keys that are neither here nor read below (use_cache,
# pretraining_tp, transformers_version, ...) do not change what the model computes.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "an activation other than the silu of SwiGLU"),
    "hidden_activation": (("gelu_pytorch_tanh",), "an activation other than the GELU of GeGLU, by tanh,"),
    "attn_logit_softcapping": ((None,), "soft-capped attention"),
    "use_bidirectional_attention": ((False, None), LATER),
    "attention_bias": ((False, None), "biases in the attention projections"),
    "swiglu_limit": ((7.0, None), "another limit of the clamped SwiGLU"),
    "swiglu_alpha": ((1.702, None), "another slope of the clamped SwiGLU"),
    "mlp_bias": ((False, None), "biases in the feed-forward"),
    "attention_dropout": ((0, None), "dropout on the attention weights"),
    "rope_interleave": ((True,), "rotary embeddings of halves"),
    "rope_interleaved": ((False, None), "rotary embeddings of neighbouring elements"),
    "is_causal": ((True, None), LATER),
    "router_jitter_noise": ((0, None), "noise of routers"),
    "clip_qkv": ((None,), "clipped queries, keys and values"),
    "partial_rotary_factor": ((1, None), "rotary embeddings of a part of each head"),
    "quantization_config": ((None,), "quantized weights"),
    "compression_config": ((None,), "compressed weights"),
    "per_layer_config": ((None,), "layers of different shapes"),
    "auto_map": ((None,), "custom code"),
}
KINDS = "full_attention", "sliding_attention"
# Our field -> its key, where they differ.
SPELLED = {
    **{**KEYS, **LATENT_KEYS, "norm_eps": "rms_norm_eps", "init_std": "initializer_range"},
    "experts_per_token": "num_experts_per_tok",
    "dense_layers": "first_k_dense_replace",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
}


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**DEFAULTS, **FAMILIES[config["model_type"]].defaults, **config}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a config.json, named "from_weights".

    Raises ValueError with one line for each malformed key, or Unsupported with one for each unsupported key.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = " or ".join(f'"{name}"' for name in FAMILIES)
        raise Unsupported(f"model_type = {name!r}: only {known} is supported")
    given, family = Reader(_with_defaults(config)), FAMILIES[name]
    _note_unsupported(given, config, family)
    shape = {field: given.integer(key) for field, key in KEYS.items() if field not in ("key_value_heads", "head_width")}
    heads, layers = shape["heads"], shape["layers"]
    given.integer("max_position_embeddings", null=CONTEXT_LENGTH)  # read by text_facts
    values: dict[str, Any] = {
        **shape,
        "key_value_heads": given.integer("num_key_value_heads", null=heads),
        "head_width": given.integer("head_dim", null=shape["width"] // heads),
        "tied_embeddings": given.boolean("tie_word_embeddings"),
        "norm_eps": given.number("rms_norm_eps"),
        "init_std": given.number("initializer_range"),
        **family.fields,
        **_windows(given, family, layers),
        **(_no_rope(given, layers) if "no_rope_every" in family.says else {}),
    }
    if family.fields["attention"] == LATENTS:
        nulls = {"q_lora_rank"} if given.values["q_lora_rank"] is None else {}
        values |= {field: given.integer(key) for field, key in LATENT_KEYS.items() if key not in nulls}
        values["head_width"] = given.integer("qk_nope_head_dim") + values["rope_width"]
    values |= _ropes_of_kinds(given, values) if family.windows == "kinds" else _rope(given)
    if "attention_scale_width" in family.says:
        scale = given.integer("query_pre_attn_scalar")
        values["attention_scale_width"] = 0 if scale == values["head_width"] else scale
        if given.values.get("final_logit_softcapping") is not None:
            values["logit_softcap"] = given.number("final_logit_softcapping")
    if family.experts is not None:
        values |= _experts(given, family, layers)
    model = ModelConfig(name="from_weights", **values)
    if not given.problems:
        # Rules across fields cannot judge values that are wrong by themselves.
        given.problems += [
            f"{SPELLED.get(field, field)} = {getattr(model, field)}: {message}" for field, message in model.problems()
        ]
    if family.square and model.heads * model.head_width != model.width:
        given.decline("head_dim", "only hidden_size / num_attention_heads is supported for this model_type")
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


class Reader:
    """Reads values of the right type; for a wrong one, returns a placeholder and adds a line to `problems`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self.unsupported: list[str] = []
        """Values of the right type that ask for what our decoder does not compute."""
        self.place = ""

    def table(self, key: str, values: dict[str, Any]) -> "Reader":
        """Reads the values of a table, and adds lines where this reader does."""
        inside = Reader(values)
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


def _note_unsupported(given: Reader, config: Mapping[str, Any], family: Family) -> None:
    """Add a line for each key of config that asks for something our model does not support."""
    classes = config.get("architectures") or [family.head]
    if not isinstance(classes, list):
        given.refuse("architectures", "must be a list of names")
    elif family.head not in classes:
        given.decline("architectures", f"only {family.head} is supported for this model_type")
    other = "hidden_act" if family.fields["activation"] == "gelu_tanh" else "hidden_activation"
    for key, (harmless, meaning) in ONLY.items():
        if key == "attention_bias" and family.fields["biases"]:
            harmless, meaning = (True,), f"{family.head} without biases in the attention projections"
        if key != other and key in config and config[key] not in harmless:
            (given.refuse if meaning == LATER else given.decline)(key, f"{meaning} is not supported")


def _windows(given: Reader, family: Family, layers: int) -> dict[str, Any]:
    """The fields of windows. In most families layer_types, if given, alone decides which layers have one."""
    types, window = given.values.get("layer_types"), given.values.get("sliding_window")
    switch = given.values.get("use_sliding_window")
    if types is not None and not isinstance(types, list | tuple):
        given.refuse("layer_types", "must be a list of the kind of each layer")
        return {}
    known = KINDS if family.windows in ("layer_types", "kinds") else KINDS[:1]
    asked = []
    if others := [repr(kind) for kind in types or () if kind not in known]:
        asked.append(f"layer_types has {', '.join(dict.fromkeys(others))}")
    is_switched = bool(switch and window and family.windows in ("", "layer_types"))
    if is_switched and (asked or types is None):
        asked += [f"{key} = {given.values[key]!r}" for key in ("use_sliding_window", "sliding_window")]
    if asked:
        which = " and ".join(map(repr, known))
        given.unsupported.append(f"{', '.join(asked)}: only {which} in every layer is supported")
        return {}
    if family.windows == "all":
        return {} if window is None else {"window": given.integer("sliding_window")}
    if not family.windows or (types is None and not family.every):
        return {}
    every = given.values.get("sliding_window_pattern") or family.every
    if types is None and (type(every) is not int or every < 1):
        given.refuse("sliding_window_pattern", "must be an integer >= 1")
        return {}
    if types is not None and len(types) != layers:
        given.refuse("layer_types", f"must name the kinds of {layers} layers")
    full = [layer for layer, kind in enumerate(types or ()) if kind == KINDS[0]]
    if len(full) == layers or (types is None and every == 1):
        return {}
    pattern = {"full_attention_every": every} if types is None else _pattern("full_attention", full, layers)
    return {"window": given.integer("sliding_window"), **pattern}


def _pattern(name: str, chosen: Sequence[int], layers: int) -> dict[str, Any]:
    """The fields that name these layers: an interval if they follow one, or a list; none if there are none."""
    every = chosen[0] + 1 if chosen else 0
    if every and [*chosen] == [*range(every - 1, layers, every)]:
        return {f"{name}_every": every}
    return {f"{name}_layers": tuple(chosen)} if chosen else {}


def _rope(given: Reader) -> dict[str, Any]:
    """The RoPE fields, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    # In transformers 5, rope_scaling overrides rope_parameters, and a rope_theta inside overrides the one outside.
    key = "rope_scaling" if given.values.get("rope_scaling") else "rope_parameters"
    # null is a missing key, for which one family has more than a plain rope.
    parameters = given.values.get(key) or FAMILIES[given.values["model_type"]].defaults.get(key) or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        given.refuse(key, "must be one table for all layers")
        parameters = {}
    inside = given.table(key, dict(parameters))
    theta = (inside if "rope_theta" in parameters else given).number("rope_theta")
    return {"rope_theta": theta, **_scaling(given, inside)}


def _ropes_of_kinds(given: Reader, model: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE fields of a family whose layers with windows have their own. model: its fields so far."""
    both = given.values.get("rope_parameters") or {}
    scaling = given.values.get("rope_scaling") or {}
    tables = [both.get(kind) or {} for kind in KINDS] if isinstance(both, dict) else [both]
    if not all(isinstance(table, dict) for table in (*tables, scaling)) or set(both) - {*KINDS}:
        given.refuse("rope_parameters", "must be a table for full_attention and one for sliding_attention")
        return {}
    if not both and "rope_type" not in scaling and scaling.get("type", "default") != "default":
        rule = "transformers 5 ignores this key for this model_type; write rope_type"
        given.table("rope_scaling", scaling).decline("type", rule)
    full = given.table("rope_parameters.full_attention", {**tables[0], **scaling})
    sliding = given.table("rope_parameters.sliding_attention", tables[1])
    theta = (full if "rope_theta" in full.values else given).number("rope_theta")
    values = {"rope_theta": theta, **_scaling(given, full)}
    if not model.get("window"):
        return values
    if _scaling(given, sliding):
        sliding.decline("rope_type", "only 'default' rotary embeddings are supported in layers with a window")
    if "rope_theta" in sliding.values:
        local = sliding.number("rope_theta")
    elif "rope_local_base_freq" in given.values:
        local = given.number("rope_local_base_freq")
    else:
        local = theta
        if theta != FAMILIES["olmo3"].defaults["rope_theta"]:
            given.decline("rope_theta", "transformers 5 takes it for a part of the layers; write rope_parameters")
    values |= {"rope_local_theta": local} if local != theta else {}
    return values | ({"rope_scaled_layers": "full"} if "rope_scaling" in values else {})


def _scaling(given: Reader, inside: Reader) -> dict[str, Any]:
    """The fields of scaling; none for "default". inside: the table that has them."""
    parameters, values = inside.values, dict[str, Any]()
    if parameters.get("partial_rotary_factor") not in (None, 1):
        inside.decline("partial_rotary_factor", f"{ONLY['partial_rotary_factor'][1]} is not supported")
    spelled = "rope_type" if "rope_type" in parameters else "type"
    kind = parameters.get(spelled, "default")
    if kind == "default":
        return values
    if kind not in ("linear", "llama3", "yarn"):
        inside.decline(spelled, "only 'default', 'linear', 'llama3' and 'yarn' rotary embeddings are supported")
        return values
    values |= {"rope_scaling": kind, "rope_factor": inside.number("factor")}
    if values["rope_factor"] < 1:
        inside.refuse("factor", "must be a number >= 1")
    if kind != "linear":
        # transformers takes a missing original length from outside the table, and one outside overrides it.
        original = "original_max_position_embeddings"
        inside.values.setdefault(original, given.values.get("max_position_embeddings"))
        if given.values.get(original) is not None:
            inside.values[original] = given.values[original]
        values["rope_original_length"] = inside.integer(original)
    if kind == "llama3":
        values |= {field: inside.number(key) for field, key in LLAMA3_KEYS.items()}
    has_latents = "kv_lora_rank" in given.values
    if has_latents and parameters.get("mscale_all_dim"):
        values["rope_mscale"], longer = inside.number("mscale_all_dim"), math.log(max(1.0, values["rope_factor"])) / 10
        if kind == "yarn" and parameters.get("mscale"):  # of the rotated parts alone
            parts = inside.number("mscale")
            values["rope_attention_factor"] = (1 + parts * longer) / (1 + values["rope_mscale"] * longer)
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            if parameters.get(key) and not has_latents:
                inside.decline(key, "only attention_factor is supported")
        values |= {"rope_truncate": False} if parameters.get("truncate") is False else {}
        values |= {field: inside.number(key) for field, key in YARN_KEYS.items() if parameters.get(key) is not None}
    return values


def _no_rope(given: Reader, layers: int) -> dict[str, Any]:
    """The layers without rotary embedding, as an interval if they follow one."""
    pattern = given.values["no_rope_layers"]
    if pattern is None:
        return {"no_rope_every": given.integer("no_rope_layer_interval")}
    if not isinstance(pattern, list) or len(pattern) < layers or any(flag not in (0, 1) for flag in pattern):
        given.refuse("no_rope_layers", f"must be a list of 1 (rotary) or 0 (none) for each of the {layers} layers")
        return {}
    return _pattern("no_rope", [layer for layer in range(layers) if not pattern[layer]], layers)


def _dense(given: Reader, layers: int) -> dict[str, Any]:
    """The layers of Qwen3-MoE without experts: the first ones, all but every n-th, or others."""
    listed, step = given.values.get("mlp_only_layers") or [], given.integer("decoder_sparse_step")
    if not isinstance(listed, list) or any(type(layer) is not int or layer < 0 for layer in listed):
        given.refuse("mlp_only_layers", "must be a list of layers, from 0 on")
        return {}
    sparse = [layer for layer in range(layers) if not (layer + 1) % step and layer not in listed]
    dense = [layer for layer in range(layers) if layer not in sparse]
    if dense == [*range(len(dense))]:
        return {"dense_layers": len(dense)}
    every = _pattern("sparse", sparse, layers)
    return every if "sparse_every" in every else {"further_dense_layers": tuple(dense)}


def _experts(given: Reader, family: Family, layers: int) -> dict[str, Any]:
    """The fields of experts of a config.json."""
    fixed = family.experts or {}
    keys = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in given.values]
    if len({given.values[key] for key in keys if type(given.values[key]) is int}) > 1:
        given.refuse(keys[0], f"is not {keys[1]} = {given.values[keys[1]]}, which says the same")
    values = {
        "experts": given.integer(keys[-1] if keys else family.count),
        "experts_per_token": given.integer("num_experts_per_tok"),
        "expert_width": given.integer(family.expert_width),
        **({} if "normalize_scores" in fixed else {"normalize_scores": given.boolean("norm_topk_prob")}),
        **fixed,
    }
    if family.dense != "first":
        return values | (_dense(given, layers) if family.dense else {})
    first, window = given.values.get("first_k_dense_replace") or 0, given.values.get("sliding_window")
    if type(first) is not int or first < 0:
        given.refuse("first_k_dense_replace", "must be an integer >= 0")
    if given.values.get("layer_types") is None and window is not None and layers > given.integer("max_window_layers"):
        given.decline("max_window_layers", "layers with a window are not supported")
    is_v2 = fixed.get("expert_groups_by") == "one"
    if is_v2 and given.values["topk_method"] not in ("group_limited_greedy", "greedy"):
        given.decline("topk_method", "only 'greedy' and 'group_limited_greedy' are supported")
    if is_v2 and given.values.get("norm_topk_prob"):
        given.decline("norm_topk_prob", "transformers ignores it for this model_type")
    groups = {} if is_v2 and given.values["topk_method"] == "greedy" else {"expert_groups": "n_group"}
    groups |= {"groups_per_token": "topk_group"} if groups else {}
    return values | {
        "dense_layers": first,
        "shared_experts": given.integer("n_shared_experts") if given.values.get("n_shared_experts") != 0 else 0,
        "router_scale": given.number("routed_scaling_factor"),
        **{field: given.integer(key, null=1) for field, key in groups.items()},
    }
