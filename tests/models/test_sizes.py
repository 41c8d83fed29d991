"""Published sizes: exact parameter counts, and FLOPs per token compared with torch's own counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig, TextFacts
from models.decoder import Decoder, build_model
from models.documents import Documents
from models.hf import config_to_hf
from models.sizes import SIZES

# From the published checkpoints (safetensors index totals; the papers round them).
PUBLISHED = {
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v2_lite": 15_706_484_224,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "gemma3_1b": 999_885_952,
    # Without the tower for images and its projection: 416,866,032 and 1152 times the width and one.
    "gemma3_4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3_12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3_27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
}


def on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def test_all_published_sizes_and_debug_sizes_exist() -> None:
    assert {*PUBLISHED} == {name for name in SIZES if not name.endswith("_debug")}
    assert len(SIZES) == len(PUBLISHED) + 5


@pytest.mark.parametrize("name", SIZES)
def test_each_size_is_valid_and_has_its_own_name(name: str) -> None:
    assert SIZES[name].name == name
    assert SIZES[name].problems() == []


@pytest.mark.parametrize("name", SIZES)
def test_the_parameter_count_equals_the_formula_and_the_published_number(name: str) -> None:
    config = SIZES[name]
    assert config.num_params() == sum(parameter.numel() for parameter in on_meta(config).parameters())
    assert config.num_params() == PUBLISHED.get(name, config.num_params())


THEIRS = ("qwen3", "olmo", "mixtral", "gemma3", "gpt_oss")


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith(THEIRS)])
def test_the_parameter_count_is_that_of_transformers(name: str) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**config_to_hf(SIZES[name], TextFacts(4096)))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == SIZES[name].num_params()


@pytest.mark.parametrize("length", [100, 512, 600, 8192])
def test_flops_count_the_tokens_that_windows_leave(length: int) -> None:
    config = SIZES["gemma3_1b"]
    pairs = {window: sum(min(token + 0.5, window) for token in range(length)) for window in (512, length)}
    windows, per_pair = 22, 12 * config.heads * config.head_width
    expected = 6 * config.matmul_params()
    expected += per_pair * (windows * pairs[512] + (config.layers - windows) * pairs[length]) / length
    assert config.flops_per_token(length, "causal") == pytest.approx(expected, rel=1e-6)
    assert config.flops_per_token(0, "causal") == 6 * config.matmul_params()


@pytest.mark.parametrize(
    ("name", "length"),
    [("qwen3_debug", 64), ("gemma3_debug", 48), ("smollm3_debug", 64), ("llama3_debug", 96), ("smollm2_135m", 32)],
)
def test_flops_per_token_equal_the_count_of_torch(name: str, length: int) -> None:
    """torch counts the products it runs. The math attention kernel multiplies every pair: the "full" convention."""
    config = replace(SIZES[name], layers=2)
    model, batch = on_meta(config), 3
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == batch * length * config.flops_per_token(length, "full")


def test_causal_attention_counts_half_the_flops_of_full_attention() -> None:
    config, length = SIZES["smollm3_3b"], 8192
    attention = 12 * 36 * 16 * 128 * length
    assert config.flops_per_token(length, "full") - config.flops_per_token(length, "causal") == attention // 2
    # PERFORMANCE figures for SmolLM3 at 8192: 22.07 and 25.70 GFLOP.
    assert round(config.flops_per_token(length, "causal") / 1e9, 2) == 22.07
    assert round(config.flops_per_token(length, "full") / 1e9, 2) == 25.70


def test_layers_without_rope_follow_the_interval_and_the_list() -> None:
    config = SIZES["smollm3_3b"]
    assert [layer for layer in range(config.layers) if not config.uses_rope(layer)] == list(range(3, 36, 4))
    irregular = replace(SIZES["llama3_debug"], no_rope_layers=(0, 2))
    assert [irregular.uses_rope(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key_value_heads", {"key_value_heads": 3}),
        ("head_width", {"head_width": 31}),
        ("no_rope_layers", {"no_rope_layers": (1, 9)}),
        ("rope_high_frequency_factor", {"rope_scaling": "llama3", "rope_low_frequency_factor": 4.0}),
    ],
)
def test_an_impossible_shape_is_reported_under_its_field(field: str, change: dict) -> None:
    problems = replace(SIZES["smollm3_debug"], **change).problems()
    assert [name for name, _ in problems] == [field]


@pytest.mark.parametrize("name", SIZES)
def test_no_token_of_our_decoder_sees_a_later_one_or_another_document(name: str) -> None:
    size = SIZES[name]
    every = (
        size.dense_layers + 1,
        size.full_attention_every,
        size.no_rope_every,
        *(one + 1 for one in size.no_rope_layers),
    )
    small = {"layers": max(2, *every), "width": 32, "feed_forward_width": 32, "window": min(size.window, 3)}
    small |= {"vocabulary": 40, "heads": 4, "key_value_heads": 2, "head_width": 8, "expert_width": 8}
    if size.latent_width:
        small |= {"key_value_heads": 4, "latent_width": 8, "rope_width": 4, "value_width": 6}
    model, tokens = build_model(replace(size, **small)), 1 + torch.arange(12)[None]
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) / 4
    documents = Documents.from_starts(torch.arange(12)[None] % 6 == 0)
    trials = (None, 11, slice(0, 11)), (documents, 5, slice(6, 12)), (documents, 11, slice(0, 11))
    for packed, changed, untouched in trials:
        other = tokens.clone()
        other[0, changed] = 0
        one, two = (model(text, documents=packed)[0] for text in (tokens, other))
        torch.testing.assert_close(one[untouched], two[untouched], rtol=0, atol=1e-5)  # experts round otherwise
        assert (one[changed] - two[changed]).abs().max() > 0.1
