"""Published model sizes by name.

Shapes are from the config.json of the published checkpoints; tests/models/test_sizes.py checks their exact
parameter counts. RoPE is as in pretraining at the original context length, except for the Llama releases that
exist only with "llama3" scaling (3.1 405B, 3.2 1B and 3B). Imports no torch.
"""

from dataclasses import replace
from typing import Any

from models.config import ModelConfig

SHAPE = ("layers", "width", "feed_forward_width", "heads", "key_value_heads", "head_width", "vocabulary")
DEBUG = (4, 128, 384, 4, 2, 32, 4096)
"""The shape of small models for a laptop CPU; every linear's widths are multiples of 16, as float8 requires."""


def _sizes(shapes: dict[str, tuple[int, ...]], **shared: Any) -> dict[str, ModelConfig]:
    """Name -> the size with this SHAPE. shared: the fields that all of them have in common."""
    return {name: ModelConfig(name, **shared | dict(zip(SHAPE, shape, strict=True))) for name, shape in shapes.items()}


_SMOLLM2 = _sizes(
    {
        "smollm2_135m": (30, 576, 1536, 9, 3, 64, 49152),
        "smollm2_360m": (32, 960, 2560, 15, 5, 64, 49152),
        "smollm2_1.7b": (24, 2048, 8192, 32, 32, 64, 49152),
    },
    tied_embeddings=True,
    norm_eps=1e-5,
    rope_theta=100_000.0,
)
_SMOLLM2["smollm2_1.7b"] = replace(_SMOLLM2["smollm2_1.7b"], rope_theta=130_000.0)
_SMOLLM3 = _sizes(
    {"smollm3_debug": DEBUG, "smollm3_3b": (36, 2048, 11008, 16, 4, 128, 128256)},
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=2_000_000.0,
    no_rope_every=4,
)
_LLAMA2 = _sizes(
    {
        "llama2_7b": (32, 4096, 11008, 32, 32, 128, 32000),
        "llama2_13b": (40, 5120, 13824, 40, 40, 128, 32000),
        "llama2_70b": (80, 8192, 28672, 64, 8, 128, 32000),
    },
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)
_LLAMA3 = _sizes(
    {
        "llama3_debug": DEBUG,
        "llama3_1b": (16, 2048, 8192, 32, 8, 64, 128256),
        "llama3_3b": (28, 3072, 8192, 24, 8, 128, 128256),
        "llama3_8b": (32, 4096, 14336, 32, 8, 128, 128256),
        "llama3_70b": (80, 8192, 28672, 64, 8, 128, 128256),
        "llama3_405b": (126, 16384, 53248, 128, 8, 128, 128256),
    },
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
for _name in ("llama3_1b", "llama3_3b"):
    _LLAMA3[_name] = replace(_LLAMA3[_name], tied_embeddings=True, rope_scaling="llama3", rope_factor=32.0)
_LLAMA3["llama3_405b"] = replace(_LLAMA3["llama3_405b"], rope_scaling="llama3")
_OF_QWEN3: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "qk_norm": "head"}
_QWEN3_MOE = _sizes(
    {
        "moe_debug": DEBUG,
        "qwen3_30b_a3b": (48, 2048, 6144, 32, 4, 128, 151936),
        "qwen3_235b_a22b": (94, 4096, 12288, 64, 4, 128, 151936),
    },
    tied_embeddings=False,
    experts=128,
    experts_per_token=8,
    expert_width=768,
    **_OF_QWEN3,
)
_QWEN3_MOE["moe_debug"] = replace(_QWEN3_MOE["moe_debug"], experts=8, experts_per_token=2, expert_width=192)
_QWEN3_MOE["qwen3_235b_a22b"] = replace(_QWEN3_MOE["qwen3_235b_a22b"], expert_width=1536)
_MIXTRAL = _sizes(  # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
    {"mixtral_8x7b": (32, 4096, 14336, 32, 8, 128, 32000)},
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    experts=8,
    experts_per_token=2,
    expert_width=14336,
)
_OLMOE = _sizes(  # https://huggingface.co/allenai/OLMoE-1B-7B-0924
    {"olmoe_1b_7b": (16, 2048, 1024, 16, 16, 128, 50304)},
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    qk_norm="all",
    experts=64,
    experts_per_token=8,
    expert_width=1024,
    normalize_scores=False,
)
_GPT_OSS = _sizes(  # https://huggingface.co/openai/gpt-oss-20b, with its YaRN
    {
        "gpt_oss_20b": (24, 2880, 2880, 64, 8, 64, 201088),
        "gpt_oss_120b": (36, 2880, 2880, 64, 8, 64, 201088),
    },
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=150_000.0,
    rope_scaling="yarn",
    rope_factor=32.0,
    rope_original_length=4096,
    rope_truncate=False,
    window=128,
    full_attention_every=2,
    attention_sinks=True,
    biases=True,
    activation="swiglu_clamped",
    experts=32,
    experts_per_token=4,
    expert_width=2880,
)
_GPT_OSS["gpt_oss_120b"] = replace(_GPT_OSS["gpt_oss_120b"], experts=128)
_QWEN3_TIED = _sizes(
    {
        "qwen3_0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
        "qwen3_1.7b": (28, 2048, 6144, 16, 8, 128, 151936),
        "qwen3_4b": (36, 2560, 9728, 32, 8, 128, 151936),
    },
    tied_embeddings=True,
    **_OF_QWEN3,
)
_QWEN3 = _sizes(
    {
        "qwen3_debug": DEBUG,
        "qwen3_8b": (36, 4096, 12288, 32, 8, 128, 151936),
        "qwen3_32b": (64, 5120, 25600, 64, 8, 128, 151936),
    },
    tied_embeddings=False,
    **_OF_QWEN3,
)
_OLMO3 = _sizes(
    {
        "olmo3_7b": (32, 4096, 11008, 32, 32, 128, 100278),
        "olmo3_32b": (64, 5120, 27648, 40, 8, 128, 100278),
    },
    tied_embeddings=False,
    norm_eps=1e-6,
    rope_theta=500_000.0,
    window=4096,
    full_attention_every=4,
    qk_norm="all",
    norms="after",
)
_OLMO2 = _sizes(
    {"olmo2_7b": (32, 4096, 11008, 32, 32, 128, 100352)},
    tied_embeddings=False,
    norm_eps=1e-6,
    rope_theta=500_000.0,
    qk_norm="all",
    norms="after",
)
_GEMMA3 = _sizes(
    {
        "gemma3_debug": DEBUG,
        "gemma3_1b": (26, 1152, 6912, 4, 1, 256, 262144),
        "gemma3_4b": (34, 2560, 10240, 8, 4, 256, 262208),
        "gemma3_12b": (48, 3840, 15360, 16, 8, 256, 262208),
        "gemma3_27b": (62, 5376, 21504, 32, 16, 128, 262208),
    },
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_local_theta=10_000.0,
    window=1024,
    full_attention_every=6,
    qk_norm="head",
    norms="both",
    norm_offset=True,
    embedding_scale=True,
    activation="gelu_tanh",
)
_GEMMA3["gemma3_debug"] = replace(_GEMMA3["gemma3_debug"], window=64, full_attention_every=2)
_GEMMA3["gemma3_1b"] = replace(_GEMMA3["gemma3_1b"], window=512)
_GEMMA3["gemma3_27b"] = replace(_GEMMA3["gemma3_27b"], attention_scale_width=168)

_DEEPSEEK2 = _sizes(  # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite
    {"deepseek_v2_lite": (27, 2048, 10944, 16, 16, 192, 102400)},
    tied_embeddings=False,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    attention="latent",
    latent_width=512,
    rope_width=64,
    value_width=128,
    experts=64,
    experts_per_token=6,
    expert_width=1408,
    shared_experts=2,
    dense_layers=1,
    normalize_scores=False,
    expert_groups_by="one",
)

_ALL = _SMOLLM2 | _SMOLLM3 | _LLAMA2 | _LLAMA3 | _MIXTRAL | _OLMOE | _GPT_OSS | _DEEPSEEK2
_ALL |= _QWEN3_MOE | _QWEN3_TIED | _QWEN3 | _OLMO2 | _OLMO3 | _GEMMA3
SIZES = dict(sorted(_ALL.items(), key=lambda size: not size[0].endswith("_debug")))
