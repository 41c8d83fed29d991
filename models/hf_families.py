"""What the families of transformers that our decoder computes differ in.

The classes of transformers are the reference for the defaults of missing keys. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from models.config import PATTERNS, ModelConfig
from models.registry import OURS, PLACES

PARTS: dict[str, Any] = {
    "qk_norm": "none",
    "norms": "before",
    "norm_offset": False,
    "embedding_scale": False,
    "activation": "silu",
    "attention_sinks": False,
    "biases": False,
    **dict.fromkeys(PLACES, OURS),
}
"""Field -> its value in most families: which parts a block has. A family has them all, or is another one."""
# Our field -> its key.
KEYS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "feed_forward_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_width": "head_dim",
}
LLAMA3_KEYS = {"rope_low_frequency_factor": "low_freq_factor", "rope_high_frequency_factor": "high_freq_factor"}
YARN_KEYS = {"rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow", "rope_attention_factor": "attention_factor"}
LATENT_KEYS = {"latent_width": "kv_lora_rank", "query_latent_width": "q_lora_rank", "rope_width": "qk_rope_head_dim"}
LATENT_KEYS["value_width"] = "v_head_dim"
# Key -> its default in transformers.LlamaConfig.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A model_type."""

    head: str
    """Its class."""
    defaults: Mapping[str, Any]
    """Defaults of missing keys, where they are not those of DEFAULTS."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of PARTS, where they have other values."""
    windows: str = ""
    """Which layers have a window: "all" where there is one, those that "layer_types" names, or ""; "kinds": as before,
    and both kinds have rotary embeddings of their own."""
    every: int = 0
    """Without layer_types, every n-th layer has no window; 0: none has one."""
    says: frozenset[str] = frozenset()
    """Further fields of ours that its config.json can say."""
    experts: Mapping[str, Any] | None = None
    """Of a family with routed experts, the fields of theirs that it fixes."""
    count: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    """The keys of their number and width."""
    dense: str = ""
    """Which layers of such a family may be dense: "any", the "first" ones, or ""."""
    whole_heads: bool = False
    """Whether transformers refuses widths that are not a multiple of the heads."""
    square: bool = False
    """Whether it takes all queries together for as wide as the model."""

    @property
    def fields(self) -> dict[str, Any]:
        """Our fields that follow from the family."""
        return {**PARTS, **self.parts}


_OLMO = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279, "vocab_size": 50304, "rms_norm_eps": 1e-5}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_BY_SOFTMAX = {"router": "softmax", "router_bias": False, "shared_experts": 0, "router_scale": 1.0}
_BY_SOFTMAX |= {"expert_groups": 1, "groups_per_token": 1}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_OF_LATENTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_OF_LATENTS["v_head_dim"] = 128
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {}, whole_heads=True),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4}
        | {"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
        says=frozenset({"no_rope_every"}),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"sliding_window": 4096},
        windows="all",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128}
        | {"max_position_embeddings": 32768, **_NO_TOKENS},
        {"qk_norm": "head"},
        windows="layer_types",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24}
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1, **_NO_TOKENS},
        {"qk_norm": "head"},
        experts=_BY_SOFTMAX,
        dense="any",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6}
        | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        windows="all",
        experts={**_BY_SOFTMAX, "normalize_scores": True},
        count="num_local_experts",
        expert_width="intermediate_size",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {**_OLMO, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}
        | {"max_position_embeddings": 4096, "num_experts_per_tok": 8, "norm_topk_prob": False},
        {"qk_norm": "all"},
        experts=_BY_SOFTMAX,
        expert_width="intermediate_size",
        square=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        {"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62}
        | {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "norm_topk_prob": False, **_NO_TOKENS}
        | {"routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62},
        {"qk_norm": "head"},
        experts={"router": "sigmoid", "router_bias": True, "expert_groups_by": "two"},
        count="n_routed_experts",
        dense="first",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"vocab_size": 102400, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy", **_OF_LATENTS},
        {"attention": "latent"},
        experts={"router": "softmax", "router_bias": False, "normalize_scores": False, "expert_groups_by": "one"},
        count="n_routed_experts",
        dense="first",
        whole_heads=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3, **_OF_LATENTS}
        | {"n_group": 8, "topk_group": 4, "bos_token_id": 0, "eos_token_id": 1},
        {"attention": "latent"},
        experts={"router": "sigmoid", "router_bias": True, "expert_groups_by": "two"},
        count="n_routed_experts",
        dense="first",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "head_dim": 64}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}
        | {"rope_theta": 150_000.0, "rope_parameters": _YARN, "attention_bias": True, **_NO_TOKENS},
        {"activation": "swiglu_clamped", "attention_sinks": True, "biases": True},
        windows="layer_types",
        every=2,
        experts={**_BY_SOFTMAX, "normalize_scores": True},
        count="num_local_experts",
        expert_width="intermediate_size",
    ),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO, {"qk_norm": "all", "norms": "after"}),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {**_OLMO, "rope_theta": 5e5, "sliding_window": 4096},
        {"qk_norm": "all", "norms": "after"},
        windows="kinds",
        every=4,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        {"qk_norm": "head", "norms": "both", "norm_offset": True, "embedding_scale": True, "activation": "gelu_tanh"},
        windows="kinds",
        every=6,
        says=frozenset({"attention_scale_width", "logit_softcap", "rope_local_theta"}),
        whole_heads=True,
    ),
}
"""model_type -> its family; a model of ours is exported as the first one that can say it."""


def family_of(model: ModelConfig) -> str | None:
    """The model_type that the model is exported as; None if there is none."""
    return next((name for name in FAMILIES if not [*unsaid(model, name)]), None)


def unsaid(model: ModelConfig, name: str) -> Iterator[str]:
    """The fields of a model that a config.json of this family cannot say."""
    family = FAMILIES[name]
    yield from (one for one, value in family.fields.items() if getattr(model, one) != value)
    if (family.experts is None) != (model.experts == 0):
        yield "experts"
    elif family.experts is not None:
        grouped = {} if model.expert_groups > 1 else {"expert_groups_by": model.expert_groups_by}
        fixed = {**family.experts, **grouped}
        yield from (one for one, value in fixed.items() if getattr(model, one) != value)
        dense = model.dense
        if dense and family.dense != "any" and not (family.dense == "first" and dense[-1] == len(dense) - 1):
            yield next(field for field in reversed(PATTERNS["is_sparse"]) if getattr(model, field))
    if family.whole_heads and model.width % model.heads:
        yield "heads"
    if family.square and model.heads * model.head_width != model.width:
        yield "head_width"
    asked = {
        "no_rope_every": not all(map(model.uses_rope, range(model.layers))),
        "attention_scale_width": model.attention_scale_width not in (0, model.head_width),
        "logit_softcap": model.logit_softcap > 0,
        "rope_local_theta": model.rope_local_theta not in (0, model.rope_theta),
    }
    yield from (one for one, is_asked in asked.items() if is_asked and one not in family.says)
    if model.window and not family.windows:
        yield "window"
    if model.window and family.windows == "all" and not all(map(model.window_of, range(model.layers))):
        yield "full_attention_every" if model.full_attention_every else "full_attention_layers"
    scales_full = model.rope_scaling == "none" or model.rope_scaled_layers == "full"
    if model.window and model.rope_scaling != "none" and scales_full != (family.windows == "kinds"):
        yield "rope_scaled_layers"
