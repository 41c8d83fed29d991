"""Conversion of names and config.json in both directions, against the configuration classes of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, SmolLM3Config

from models.config import ModelConfig, TextFacts
from models.decoder import Decoder
from models.hf import config_to_hf, hf_name, parameter_shapes
from models.hf_reading import config_from_hf, text_facts
from models.sizes import SIZES

FACTS = TextFacts(4096, eos_token_id=2)
LLAMA: dict[str, Any] = {"model_type": "llama"}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_parameter_shapes_are_those_of_the_model(size: ModelConfig) -> None:
    with torch.device("meta"):
        model = Decoder(size)
    assert list(parameter_shapes(size)) == [(name, tuple(value.shape)) for name, value in model.named_parameters()]


def test_every_name_converts_to_another_one() -> None:
    names = [name for name, _ in parameter_shapes(SIZES["llama3_debug"])]
    assert len({*map(hf_name, names)}) == len(names)
    assert hf_name("blocks.12.feed_forward.gate_proj.weight") == "model.layers.12.mlp.gate_proj.weight"


@pytest.mark.parametrize("name", ["blocks.1.attention.q_proj.scale", "rope.weight", "model.norm.weight"])
def test_an_unknown_name_does_not_convert(name: str) -> None:
    with pytest.raises(KeyError):
        hf_name(name)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_size_converts_there_and_back(size: ModelConfig) -> None:
    written = config_to_hf(size, FACTS)
    back = config_from_hf(written)
    if size.no_rope_every > size.layers:
        back = replace(back, no_rope_every=size.no_rope_every)
    assert replace(back, name=size.name) == size
    assert config_to_hf(back, text_facts(written)) == written
    kinds = {"smollm3": "smollm3", "qwen3": "qwen3", "olmo3": "olmo3", "gemma3": "gemma3_text"}
    kinds |= {"mixtral": "mixtral", "olmo2": "olmo2", "olmoe": "olmoe", "gpt": "gpt_oss"}
    kinds |= {"deepseek": "deepseek_v2"}
    kind = kinds.get(size.name.partition("_")[0], "llama")
    kind = "qwen3_moe" if size.experts and size.qk_norm == "head" else kind
    assert written["model_type"] == kind


@pytest.mark.parametrize("config_class", [LlamaConfig, SmolLM3Config])
def test_missing_keys_have_the_defaults_of_transformers(config_class: Any) -> None:
    reference = config_class()
    model = config_from_hf({"model_type": reference.model_type})
    facts = text_facts({"model_type": reference.model_type})
    assert model.layers == reference.num_hidden_layers
    assert (model.width, model.feed_forward_width) == (reference.hidden_size, reference.intermediate_size)
    assert (model.heads, model.key_value_heads) == (reference.num_attention_heads, reference.num_key_value_heads)
    assert model.head_width == model.width // model.heads
    assert model.vocabulary == reference.vocab_size
    assert model.tied_embeddings == reference.tie_word_embeddings
    assert model.norm_eps == reference.rms_norm_eps
    assert model.init_std == reference.initializer_range
    assert {"rope_type": "default", "rope_theta": model.rope_theta} == reference.rope_parameters
    rope = [int(model.uses_rope(layer)) for layer in range(model.layers)]
    assert rope == getattr(reference, "no_rope_layers", [1] * model.layers)
    tokens = (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id)
    assert facts == TextFacts(reference.max_position_embeddings, *tokens)


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, "none"),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, "none"),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, "llama3"),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, 5e5, "llama3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, "none"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3}}, 7e4, "llama3"),
        ({"rope_theta": 1e3, "rope_parameters": {"rope_theta": 7e4}, "rope_scaling": {}}, 7e4, "none"),
        ({"rope_parameters": {"rope_theta": 7e4}, "rope_scaling": {"type": "llama3", **LLAMA3}}, 1e4, "llama3"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rope_is_read_from_old_and_new_keys(written: dict[str, Any], theta: float, scaling: str) -> None:
    model = config_from_hf(LLAMA | written)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)
    if scaling == "llama3":
        assert (model.rope_factor, model.rope_original_length) == (32.0, 64)
    reference = LlamaConfig(**written).rope_parameters
    assert (reference["rope_theta"], reference["rope_type"]) == (theta, scaling.replace("none", "default"))
    again = LlamaConfig(**config_to_hf(model, FACTS))  # transformers 5 reads what we write
    assert {"rope_theta": theta, "rope_type": reference["rope_type"]}.items() <= again.rope_parameters.items()
    assert scaling == "none" or LLAMA3.items() <= again.rope_parameters.items()


def test_a_missing_original_length_is_the_longest_sequence() -> None:
    scaling = {"rope_type": "llama3"} | {key: value for key, value in LLAMA3.items() if "original" not in key}
    assert config_from_hf(LLAMA | {"rope_scaling": scaling}).rope_original_length == 2048


@pytest.mark.parametrize(
    ("keys", "every", "layers"),
    [
        ({"no_rope_layer_interval": 3}, 3, ()),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 1]}, 0, ()),
        ({"no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1]}, 3, ()),  # longer than the layers
        ({"no_rope_layers": [0, 0, 0, 0, 0, 0]}, 1, ()),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 1]}, 0, (0, 3)),
        ({"no_rope_layers": [1, 1, 1, 0, 1, 1], "no_rope_layer_interval": 2}, 4, ()),
    ],
)
def test_layers_without_rope_are_read_and_written(keys: dict[str, Any], every: int, layers: tuple[int, ...]) -> None:
    model = config_from_hf({"model_type": "smollm3", "num_hidden_layers": 6} | keys)
    assert (model.no_rope_every, model.no_rope_layers) == (every, layers)
    reference = SmolLM3Config(num_hidden_layers=6, **keys).no_rope_layers[:6]
    assert [int(model.uses_rope(layer)) for layer in range(6)] == reference
    assert config_to_hf(model, FACTS).get("no_rope_layers", [1] * 6) == reference


def test_a_llama_that_transformers_refuses_is_written_as_a_smollm3() -> None:
    odd = replace(SIZES["llama3_debug"], width=100, heads=6, key_value_heads=3)
    written = config_to_hf(odd, FACTS)
    assert written["model_type"] == "smollm3" and all(written["no_rope_layers"])
    assert replace(config_from_hf(written), name=odd.name) == odd


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2'"),
        ({"model_type": None}, "model_type = None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSequence"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor = missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "must be one table"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window = True"),
        (
            {"use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention"]},
            "layer_types has 'sliding_attention', use_sliding_window = True, sliding_window = 128:",
        ),
        ({"layer_types": 3}, "layer_types = 3"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention'"),
        ({"model_type": ["llama"]}, "model_type = ['llama']"),
        ({"architectures": 3}, "architectures = 3"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"rope_theta": 10**400}, "rope_theta = 1000"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"auto_map": {"AutoModel": "mine.py"}}, "auto_map"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ],
)
def test_an_unsupported_value_is_refused_with_its_key(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        config_from_hf(LLAMA | keys)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == (3 if "missing" in said else 1)


def test_all_unsupported_values_are_listed_at_once() -> None:
    keys = {"mlp_bias": True, "hidden_size": -1, "rope_scaling": {"type": "dynamic"}, "quantization_config": {}}
    with pytest.raises(ValueError) as error:
        config_from_hf(LLAMA | keys)
    assert len(str(error.value).splitlines()) == len(keys)


def test_keys_that_change_nothing_are_ignored() -> None:
    harmless = {
        "pretraining_tp": 2,
        "use_cache": False,
        "_name_or_path": "x",
        "transformers_version": "4.30",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "quantization_config": None,
        "layer_types": ["full_attention"] * 32,
        "hidden_act": "silu",
        "pad_token_id": -1,
    }
    assert config_from_hf(LLAMA | harmless) == config_from_hf(LLAMA)
    assert text_facts(LLAMA | harmless) == text_facts(LLAMA)


def test_several_end_tokens_are_kept() -> None:
    facts = text_facts(LLAMA | {"eos_token_id": [2, 7]})
    assert facts.eos_token_id == (2, 7)
    assert config_to_hf(config_from_hf(LLAMA), facts)["eos_token_id"] == [2, 7]


def test_an_empty_list_of_end_tokens_means_none() -> None:
    assert text_facts(LLAMA | {"eos_token_id": []}).eos_token_id is None


@pytest.mark.parametrize("wrong", [[2, "</s>"], [32000], [-1], [True]])
def test_impossible_end_tokens_are_refused(wrong: list[object]) -> None:
    with pytest.raises(ValueError, match=r"eos_token_id = \[.*\]: must be token ids below vocab_size = 32000"):
        text_facts(LLAMA | {"eos_token_id": wrong})
