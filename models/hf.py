"""Names and shapes of the decoder's weights, and its config.json, as Hugging Face has them.

models/hf_reading.py reads a config.json; models/hf_families.py is what both know of each family. Imports no torch.
"""

import re
from collections.abc import Iterator
from typing import Any

from models.config import ModelConfig, TextFacts
from models.hf_families import FAMILIES, Family, family_of, unsaid

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    **{f"attention.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"attention.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
POST_NORMS = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
}
"""Where attention has a norm after it, which is then the one of that name."""


def hf_name(name: str, *, norms: str = "before") -> str:
    """blocks.3.attention.q_proj.weight -> model.layers.3.self_attn.q_proj.weight. norms: as in ModelConfig. Raises
    KeyError."""
    if "experts." in name or name.startswith("routers."):
        from models.hf_experts import name_in_files

        return name_in_files(name)
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        inside = IN_BLOCK if norms == "before" else IN_BLOCK | POST_NORMS
        return f"model.layers.{match[1]}.{inside[match[2]]}"
    return OUTSIDE[name]


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(our name, shape) of every parameter of models.decoder.Decoder and of every buffer that is saved, in the order
    of the model."""
    width, inner = config.width, config.feed_forward_width
    query, key_value = config.heads * config.head_width, config.key_value_heads * config.head_width
    before, after = (config.norms in (place, "both") for place in ("before", "after"))
    of_heads = {"none": None, "head": (config.head_width,) * 2, "all": (query, key_value)}[config.qk_norm]
    shapes: dict[str, tuple[int, ...]] = {
        **({"attention_norm": (width,)} if before else {}),
        "attention.q_proj": (query, width),
        "attention.k_proj": (key_value, width),
        "attention.v_proj": (key_value, width),
        "attention.o_proj": (width, query),
        **({"attention.q_norm": of_heads[:1], "attention.k_norm": of_heads[1:]} if of_heads else {}),
        **({"attention_post_norm": (width,)} if after else {}),
        **({"feed_forward_norm": (width,)} if before else {}),
        "feed_forward.gate_proj": (inner, width),
        "feed_forward.up_proj": (inner, width),
        "feed_forward.down_proj": (width, inner),
        **({"feed_forward_post_norm": (width,)} if after else {}),
    }
    yield "embedding.weight", (config.vocabulary, width)
    dense = {f"{part}.weight": shape for part, shape in shapes.items()}
    sparse = _with_experts(dense, config) if config.experts else dense
    for layer in range(config.layers):
        for part, shape in (sparse if config.is_sparse(layer) else dense).items():
            yield f"blocks.{layer}.{part}", shape
    if config.experts:
        from models.hf_experts import router_shapes

        yield from router_shapes(config)
    yield "norm.weight", (width,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocabulary, width)


def _with_experts(dense: dict[str, tuple[int, ...]], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a block whose feed-forward has routed experts, from those of a dense one."""
    from models.hf_experts import feed_forward_shapes

    after = {name: shape for name, shape in dense.items() if name.startswith("feed_forward_post_norm")}
    kept = {name: shape for name, shape in dense.items() if not name.startswith("feed_forward.") and name not in after}
    return kept | dict(feed_forward_shapes(config)) | after


def beyond_hf(model: ModelConfig) -> str | None:
    """What a model of ours computes that no config.json of these families can say; None if there is nothing."""
    if family_of(model):
        return None
    similar = [name for name, family in FAMILIES.items() if (family.experts is None) == (model.experts == 0)]
    name, missing = min(((name, [*unsaid(model, name)]) for name in similar), key=lambda one: len(one[1]))
    if model.logit_softcap:
        name, missing = "llama", ["logit_softcap"]
    return f"{missing[0]} = {getattr(model, missing[0])}: a {FAMILIES[name].head} of transformers would ignore it"


def config_to_hf(model: ModelConfig, facts: TextFacts, *, dtype: str = "float32") -> dict[str, Any]:
    """A config.json for transformers 4.53 and later, and for programs that read the same keys.

    Raises ValueError for a model that is beyond_hf().

    RoPE uses the keys of transformers 4, which version 5 and vLLM read too. The family is "llama" where possible,
    because more programs support it, for a Mistral without windows, too. It cannot express layers without rotary
    embedding, and transformers refuses a Llama whose width is not a multiple of its heads; "smollm3" computes the same
    and accepts both.
    """
    name = family_of(model)
    if name is None:
        raise ValueError(beyond_hf(model))
    family = FAMILIES[name]
    ends = facts.eos_token_id
    of_experts = {}
    if model.experts:
        from models.hf_experts import keys_of_experts

        of_experts = keys_of_experts(model)
    return {
        "architectures": [family.head],
        "model_type": name,
        "torch_dtype": dtype,
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_width,
        **_of_gate(model),
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": facts.context_length,
        **_rope(model, family),
        **_windows(model, family),
        **of_experts,
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


def _of_gate(model: ModelConfig) -> dict[str, Any]:
    """The key of the activation, and those of scores and logits that the family of that activation has."""
    if model.activation == "silu":
        return {"hidden_act": "silu"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.attention_scale_width or model.head_width,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of windows."""
    layers = [model.window_of(layer) for layer in range(model.layers)]
    if family.windows == "all":
        return {"sliding_window": model.window}
    if not family.windows:
        return {"use_sliding_window": False} if "no_rope_every" in family.says else {}
    kinds = {"layer_types": ["sliding_attention" if window else "full_attention" for window in layers]}
    if family.windows == "kinds":
        return {"sliding_window": model.window or 4096, **kinds}
    return {"use_sliding_window": True, "sliding_window": model.window, **kinds} if any(layers) else {}


def _rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of rotary embeddings: of transformers 4 and, where both kinds of layers have their own, of 5."""
    kind = model.rope_scaling
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.rope_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = model.rope_original_length
    if kind == "llama3":
        scaling["low_freq_factor"] = model.rope_low_frequency_factor
        scaling["high_freq_factor"] = model.rope_high_frequency_factor
    if kind == "yarn":
        scaling |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        scaling["attention_factor"] = model.rope_attention_factor or None
    keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None if kind == "none" else scaling}
    if "no_rope_every" in family.says:
        keys["no_rope_layers"] = [int(model.uses_rope(layer)) for layer in range(model.layers)]
    if family.windows != "kinds":
        return keys
    local = model.rope_local_theta or model.rope_theta
    full = {**(keys["rope_scaling"] or {"rope_type": "default"}), "rope_theta": model.rope_theta}
    if "rope_local_theta" in family.says:
        keys["rope_local_base_freq"] = local
    sliding = {"rope_type": "default", "rope_theta": local}
    return keys | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
