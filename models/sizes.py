"""Published model sizes by name.

Shapes are from the config.json of the published checkpoints; tests/models/test_sizes.py checks their exact
parameter counts. RoPE is as in pretraining at the original context length, except for the Llama releases that
exist only with "llama3" scaling (3.1 405B, 3.2 1B and 3B). Imports no torch.
"""

from dataclasses import replace

from models.config import ModelConfig

SMOLLM3_3B = ModelConfig(
    name="smollm3_3b",
    layers=36,
    width=2048,
    feed_forward_width=11008,
    heads=16,
    key_value_heads=4,
    head_width=128,
    vocabulary=128256,
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=2_000_000.0,
    no_rope_every=4,
)
LLAMA2_7B = ModelConfig(
    name="llama2_7b",
    layers=32,
    width=4096,
    feed_forward_width=11008,
    heads=32,
    key_value_heads=32,
    head_width=128,
    vocabulary=32000,
    tied_embeddings=False,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)
LLAMA3_8B = replace(
    LLAMA2_7B,
    name="llama3_8b",
    feed_forward_width=14336,
    key_value_heads=8,
    vocabulary=128256,
    rope_theta=500_000.0,
)
LLAMA3_3B = replace(
    LLAMA3_8B,
    name="llama3_3b",
    layers=28,
    width=3072,
    feed_forward_width=8192,
    heads=24,
    tied_embeddings=True,
    rope_scaling="llama3",
    rope_factor=32.0,
)
SMOLLM2_135M = ModelConfig(
    name="smollm2_135m",
    layers=30,
    width=576,
    feed_forward_width=1536,
    heads=9,
    key_value_heads=3,
    head_width=64,
    vocabulary=49152,
    tied_embeddings=True,
    norm_eps=1e-5,
    rope_theta=100_000.0,
)
QWEN3_8B = replace(
    replace(LLAMA3_8B, layers=36, feed_forward_width=12288, vocabulary=151936, norm_eps=1e-6),
    name="qwen3_8b",
    rope_theta=1_000_000.0,
    qk_norm="head",
)
QWEN3_30B_A3B = replace(
    replace(QWEN3_8B, layers=48, width=2048, feed_forward_width=6144, key_value_heads=4),
    name="qwen3_30b_a3b",
    experts=128,
    experts_per_token=8,
    expert_width=768,
)
OLMO3_7B = replace(
    replace(LLAMA2_7B, vocabulary=100278, norm_eps=1e-6, rope_theta=500_000.0),
    name="olmo3_7b",
    window=4096,
    full_attention_every=4,
    qk_norm="all",
    norms="after",
)
GEMMA3_1B = ModelConfig(
    name="gemma3_1b",
    layers=26,
    width=1152,
    feed_forward_width=6912,
    heads=4,
    key_value_heads=1,
    head_width=256,
    vocabulary=262144,
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_local_theta=10_000.0,
    window=512,
    full_attention_every=6,
    qk_norm="head",
    norms="both",
    norm_offset=True,
    embedding_scale=True,
    activation="gelu_tanh",
)
GEMMA3_4B = replace(
    GEMMA3_1B,
    name="gemma3_4b",
    layers=34,
    width=2560,
    feed_forward_width=10240,
    heads=8,
    key_value_heads=4,
    vocabulary=262208,
    window=1024,
)


def _qwen3(size: str, layers: int, width: int, inner: int, heads: int, *, tied: bool) -> ModelConfig:
    shape = {"layers": layers, "width": width, "feed_forward_width": inner, "heads": heads, "tied_embeddings": tied}
    return replace(QWEN3_8B, name=f"qwen3_{size}", **shape)  # type: ignore[arg-type]


def _debug(size: ModelConfig, name: str) -> ModelConfig:
    """A small one for a laptop CPU; every linear's widths are multiples of 16, as float8 requires."""
    return replace(
        size,
        name=name,
        layers=4,
        width=128,
        feed_forward_width=384,
        heads=4,
        key_value_heads=2,
        head_width=32,
        vocabulary=4096,
    )


SIZES: dict[str, ModelConfig] = {
    size.name: size
    for size in (
        _debug(SMOLLM3_3B, "smollm3_debug"),
        _debug(LLAMA3_8B, "llama3_debug"),
        replace(_debug(QWEN3_30B_A3B, "moe_debug"), experts=8, experts_per_token=2, expert_width=192),
        SMOLLM2_135M,
        replace(
            SMOLLM2_135M,
            name="smollm2_360m",
            layers=32,
            width=960,
            feed_forward_width=2560,
            heads=15,
            key_value_heads=5,
        ),
        replace(
            SMOLLM2_135M,
            name="smollm2_1.7b",
            layers=24,
            width=2048,
            feed_forward_width=8192,
            heads=32,
            key_value_heads=32,
            rope_theta=130_000.0,
        ),
        SMOLLM3_3B,
        LLAMA2_7B,
        replace(
            LLAMA2_7B, name="llama2_13b", layers=40, width=5120, feed_forward_width=13824, heads=40, key_value_heads=40
        ),
        replace(
            LLAMA2_7B, name="llama2_70b", layers=80, width=8192, feed_forward_width=28672, heads=64, key_value_heads=8
        ),
        replace(LLAMA3_3B, name="llama3_1b", layers=16, width=2048, heads=32, head_width=64),
        LLAMA3_3B,
        LLAMA3_8B,
        replace(LLAMA3_8B, name="llama3_70b", layers=80, width=8192, feed_forward_width=28672, heads=64),
        replace(
            LLAMA3_8B,
            name="llama3_405b",
            layers=126,
            width=16384,
            feed_forward_width=53248,
            heads=128,
            rope_scaling="llama3",
        ),
        QWEN3_30B_A3B,
        replace(
            QWEN3_30B_A3B,
            name="qwen3_235b_a22b",
            layers=94,
            width=4096,
            feed_forward_width=12288,
            heads=64,
            expert_width=1536,
        ),
        _debug(QWEN3_8B, "qwen3_debug"),
        replace(_debug(GEMMA3_1B, "gemma3_debug"), window=64, full_attention_every=2),
        _qwen3("0.6b", 28, 1024, 3072, 16, tied=True),
        _qwen3("1.7b", 28, 2048, 6144, 16, tied=True),
        _qwen3("4b", 36, 2560, 9728, 32, tied=True),
        QWEN3_8B,
        _qwen3("32b", 64, 5120, 25600, 64, tied=False),
        OLMO3_7B,
        replace(
            OLMO3_7B, name="olmo3_32b", layers=64, width=5120, feed_forward_width=27648, heads=40, key_value_heads=8
        ),
        GEMMA3_1B,
        GEMMA3_4B,
        replace(
            GEMMA3_4B, name="gemma3_12b", layers=48, width=3840, feed_forward_width=15360, heads=16, key_value_heads=8
        ),
        replace(
            GEMMA3_4B,
            name="gemma3_27b",
            layers=62,
            width=5376,
            feed_forward_width=21504,
            heads=32,
            key_value_heads=16,
            head_width=128,
            attention_scale_width=168,
        ),
    )
}
