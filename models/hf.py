"""Names and shapes of the decoder's weights, and its config.json, as Hugging Face has them.

models/hf_reading.py reads a config.json; models/hf_families.py is what both know of each family. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from models.config import ModelConfig, TextFacts
from models.hf_families import FAMILIES, KEYS, LATENT_KEYS, LLAMA3_KEYS, YARN_KEYS, Family, family_of, unsaid
from models.layout import Copy, Layout, Stored
from models.registry import LATENTS, OURS, PLACES, Place

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
PROJECTIONS = ("gate", "up", "down")
IN_BLOCK = {
    "attention_norm.weight": ("input_layernorm.weight", "b"),
    **{
        f"attention.{one}_proj.{tensor}": (f"self_attn.{one}_proj.{tensor}", axes)
        for one, *both in (("q", "QD", "x"), ("k", "KD", "y"), ("v", "KD", "y"), ("o", "DQ", "z"))
        for tensor, axes in zip(("weight", "bias"), both, strict=True)
    },
    "attention.q_norm.weight": ("self_attn.q_norm.weight", "q"),
    "attention.k_norm.weight": ("self_attn.k_norm.weight", "k"),
    "attention.sinks.weight": ("self_attn.sinks", "s"),
    "attention_post_norm.weight": ("post_attention_layernorm.weight", "a"),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight", "b"),
    **{f"feed_forward.{part}_proj.weight": (f"mlp.{part}_proj.weight", "FD") for part in PROJECTIONS[:2]},
    "feed_forward.down_proj.weight": ("mlp.down_proj.weight", "DF"),
    **{f"feed_forward.experts.{part}_proj": (f"mlp.experts.{part}_proj", "EXD") for part in PROJECTIONS[:2]},
    "feed_forward.experts.down_proj": ("mlp.experts.down_proj", "EDX"),
    **{f"feed_forward.experts.{part}_bias": (f"mlp.experts.{part}_proj_bias", "Ee") for part in PROJECTIONS[:2]},
    "feed_forward.experts.down_bias": ("mlp.experts.down_proj_bias", "Ez"),
    **{
        f"feed_forward.shared_experts.{part}_proj.weight": (f"mlp.shared_experts.{part}_proj.weight", axes)
        for part, axes in zip(PROJECTIONS, ("SD", "SD", "DS"), strict=True)
    },
    "feed_forward_post_norm.weight": ("post_feedforward_layernorm.weight", "a"),
}
"""Our name inside a block -> its name in files, and its axes (_axes()); a block without one of these axes lacks it.

Files have a tensor for each expert, but GPT-OSS's; ours are all experts of a layer together."""
PRE_NORM = "pre_feedforward_layernorm.weight"
"""The norm before the feed-forward where attention has one after it, which then has its name."""
OTHER_NAMES = {
    "mixtral": {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "gpt_oss": {"mlp.gate.": "mlp.router.", "gate_proj": "gate_up_proj", "experts.up_proj": "experts.gate_up_proj"},
}
"""Family -> parts of names in files -> those that it has there."""
OF_ROUTER = {"weight": "mlp.gate.weight", "logit_bias": "mlp.gate.bias", "bias": "mlp.gate.e_score_correction_bias"}


def hf_name(name: str, *, norms: str = "before") -> str:
    """blocks.3.attention.q_proj.weight -> model.layers.3.self_attn.q_proj.weight; of routed experts, without their
    numbers. norms: as in ModelConfig. Raises KeyError."""
    match = re.fullmatch(r"(blocks|routers)\.(\d+)\.(.+)", name)
    if match is None:
        return OUTSIDE[name]
    if match[1] == "routers":
        inside = OF_ROUTER[match[3]]
    else:
        latent = re.fullmatch(r"attention\.(?:heads\.)?((?:q|kv)_[ab]_\w+|(?<=heads\.)[qo]_proj)\.weight", match[3])
        inside = f"self_attn.{latent[1]}.weight" if latent else IN_BLOCK[match[3]][0]
        inside = PRE_NORM if match[3] == "feed_forward_norm.weight" and norms != "before" else inside
    return f"model.layers.{match[2]}.{inside}"


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(our name, shape) of every parameter of models.decoder.Decoder and of every buffer that is saved, in the order
    of the model."""
    yield "embedding.weight", (config.vocabulary, config.width)
    for layer in range(config.layers):
        for name, shape in inside_block(config, layer).items():
            yield f"blocks.{layer}.{name}", shape
    for layer in filter(config.is_sparse, range(config.layers)):
        yield f"routers.{layer}.weight", (config.experts, config.width)
        if config.biases:
            yield f"routers.{layer}.logit_bias", (config.experts,)
        if config.router_bias:
            yield f"routers.{layer}.bias", (config.experts,)
    last = config.part("norm").tensors
    for name, shape in (last(config, config.width) if last else {"weight": (config.width,)}).items():
        yield f"norm.{name}", shape
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocabulary, config.width)


def inside_block(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name inside a block -> shape of every parameter there, in the order of the model."""
    axes, found = _axes(config, layer), dict[str, tuple[int, ...]]()
    for name, (_, letters) in IN_BLOCK.items():
        place, shape = name.partition(".")[0], tuple(axes[letter] for letter in letters)
        if place in PLACES and (tensors := config.part(place).tensors):
            found |= {f"{place}.{own}": of_own for own, of_own in tensors(config, layer).items()}
        elif all(shape) and "norm." in name and (tensors := config.part("norm").tensors):
            found |= {name.removesuffix("weight") + own: features for own, features in tensors(config, *shape).items()}
        elif all(shape):
            found[name] = shape
    return found


def tensors_of_ours(config: ModelConfig, layer: int, place: Place) -> dict[str, tuple[int, ...]]:
    """Name in our attention, or feed-forward, -> shape of each parameter: what a part that inherits it has at least."""
    fields: dict[str, Any] = {place: OURS}
    own = inside_block(replace(config, **fields), layer)
    return {name.partition(".")[2]: shape for name, shape in own.items() if name.startswith(f"{place}.")}


def require_as_declared(config: ModelConfig, built: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless a model, or some layers of it, has the tensors that its parts say. built: name -> shape
    of its parameters."""
    declared = dict(parameter_shapes(config))
    blocks = {name.split(".")[1] for name in built if name.startswith("blocks.")}
    here = {name for name in declared if name.startswith("blocks.") and name.split(".")[1] in blocks}
    for name in sorted({*built, *here}):
        if (said := declared.get(name)) != (has := built.get(name)):
            raise ValueError(f"{name}: the facts of its part say {said}, but its module has {has}; correct one of them")


def _axes(config: ModelConfig, layer: int) -> dict[str, int]:
    """The letter of an axis -> its length in this layer; 0 = there is none."""
    query, key_value = config.heads * config.head_width, config.key_value_heads * config.head_width
    of_heads = {"none": (0, 0), "head": (config.head_width,) * 2, "all": (query, key_value)}[config.qk_norm]
    sparse, bias = config.is_sparse(layer), config.biases
    return {
        "D": config.width,
        "Q": query,
        "K": key_value,
        "q": of_heads[0],
        "k": of_heads[1],
        "b": config.width * (config.norms != "after"),  # of norms before, and after
        "a": config.width * (config.norms != "before"),
        "F": config.feed_forward_width * (not sparse),
        "E": config.experts * sparse,
        "X": config.expert_width,
        "S": config.shared_experts * config.expert_width * sparse,
        "x": query * bias,
        "y": key_value * bias,
        "z": config.width * bias,
        "e": config.expert_width * bias,
        "s": config.heads * config.attention_sinks,
    }


def layout_of(model: ModelConfig) -> Layout:
    """The layout of our decoder's files, or of those of transformers."""
    if model.by_transformers:
        from models.transformers import stored_layout

        return stored_layout(replace(model, name="", weights="", config="", dropout=False))  # remembered by the rest
    tensors, family = {}, family_of(model)
    is_ours = family is not None or all(getattr(model, place) == OURS for place in PLACES)  # else beyond_hf()
    other = OTHER_NAMES.get(family or "", {})
    for name, shape in parameter_shapes(model):
        stored, each = hf_name(name, norms=model.norms) if is_ours else name, tuple[str, ...]()
        for part, theirs in other.items():
            stored = stored.replace(part, theirs)
        if ".feed_forward.experts." in name and family == "gpt_oss":
            lane = {"gate": 0, "up": 1}.get(name.rpartition(".")[2].partition("_")[0])
            tensors[name] = Stored(stored, shape, transposed=len(shape) == 3, lane=lane)
            continue
        if ".feed_forward.experts." in name:
            before, after = stored.split("experts.")
            each = tuple(f"{before}experts.{number}.{after}.weight" for number in range(model.experts))
        tensors[name] = Stored(stored, shape, parts=each)
    copies = {"lm_head.weight": Copy(hf_name("lm_head.weight"), of="embedding.weight")}
    return Layout(tensors, copies if model.tied_embeddings else {})


def beyond_hf(model: ModelConfig) -> str | None:
    """What a model of ours computes that no config.json of these families can say; None if there is nothing."""
    if model.by_transformers or family_of(model):
        return None
    similar = [name for name, family in FAMILIES.items() if (family.experts is None) == (model.experts == 0)]
    name, missing = min(((name, [*unsaid(model, name)]) for name in similar), key=lambda one: len(one[1]))
    if model.logit_softcap:
        name, missing = "llama", ["logit_softcap"]
    return f"{missing[0]} = {getattr(model, missing[0])}: a {FAMILIES[name].head} of transformers would ignore it"


def export_of(model: ModelConfig) -> str:
    """Whether a model can be exported, and as what, in words."""
    if problem := beyond_hf(model):
        return f"cannot be exported to Hugging Face, because of model.{problem}"
    return f"can be exported as {model.settings['model_type'] if model.by_transformers else family_of(model)}"


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
    return {
        "architectures": [family.head],
        "model_type": name,
        "torch_dtype": dtype,
        **{key: getattr(model, field) for field, key in KEYS.items()},
        **_of_gate(model),
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": facts.context_length,
        **_rope(model, family),
        **_of_latents(model),
        **_windows(model, family),
        **_of_experts(model, family),
        "attention_bias": model.biases,
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


def _of_latents(model: ModelConfig) -> dict[str, Any]:
    """The keys of DeepSeek-V2 and V3 beside those of their experts, with those that transformers does not read."""
    if model.attention != LATENTS:
        return {}
    keys = {key: getattr(model, field) or None for field, key in LATENT_KEYS.items()}
    keys |= {"qk_nope_head_dim": model.head_width - model.rope_width, "head_dim": model.rope_width}
    others = {"topk_method": "noaux_tc", "num_nextn_predict_layers": 0} if model.router == "sigmoid" else {}
    return {**keys, "rope_interleave": True, "scoring_func": model.router, **others}


def _of_gate(model: ModelConfig) -> dict[str, Any]:
    """The key of the activation, and those of scores and logits that the family of that activation has."""
    if model.activation != "gelu_tanh":
        clamped = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0} if model.activation == "swiglu_clamped" else {}
        return {"hidden_act": "silu", **clamped}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.attention_scale_width or model.head_width,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _of_experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.experts is None:
        return {}
    keys: dict[str, Any] = {family.count: model.experts, "num_experts_per_tok": model.experts_per_token}
    keys[family.expert_width] = model.expert_width
    if "normalize_scores" not in family.experts:
        keys["norm_topk_prob"] = model.normalize_scores
    if family.dense == "any":
        return keys | {"decoder_sparse_step": 1, "mlp_only_layers": [*model.dense]}
    if not family.dense:
        return keys
    if family.experts.get("expert_groups_by") == "one":
        keys["topk_method"] = "group_limited_greedy" if model.expert_groups > 1 else "greedy"
    return keys | {
        "n_shared_experts": model.shared_experts,
        "first_k_dense_replace": len(model.dense),
        "routed_scaling_factor": model.router_scale,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
        "sliding_window": None,
    }


def _windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of windows."""
    layers = [model.window_of(layer) for layer in range(model.layers)]
    if family.windows == "all":
        return {"sliding_window": model.window or None}
    if not family.windows:
        return {"use_sliding_window": False} if "no_rope_every" in family.says else {}
    kinds = {"layer_types": ["sliding_attention" if window else "full_attention" for window in layers]}
    if family.every:
        return {"sliding_window": model.window or 4096, **kinds}
    return {"use_sliding_window": True, "sliding_window": model.window, **kinds} if any(layers) else {}


def _rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of rotary embeddings: of transformers 4 and, where both kinds of layers have their own, of 5."""
    kind = model.rope_scaling
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.rope_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = model.rope_original_length
        fields = LLAMA3_KEYS if kind == "llama3" else YARN_KEYS
        scaling |= {key: getattr(model, field) for field, key in fields.items()}
    if kind == "yarn":
        scaling["attention_factor"] = model.rope_attention_factor or None
        scaling |= {} if model.rope_truncate else {"truncate": False}
    # Programs that do not read attention_factor divide the factor of mscale by that of mscale_all_dim.
    same = ("mscale", "mscale_all_dim")[model.rope_attention_factor != 1 :]
    scaling |= dict.fromkeys(same, model.rope_mscale) if model.rope_mscale else {}
    if kind == "none":  # which a family with a default of its own must be told
        scaling = {"rope_type": "default"} if "rope_parameters" in family.defaults else {}
    keys: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": scaling or None}
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
