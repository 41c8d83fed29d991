"""Qwen3-MoE and dots1 (DeepSeek-V3's feed-forwards) on our decoder, and their folders, against transformers' own."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from models.cache import KeyValueCache
from models.config import ModelConfig, TextFacts
from models.decoder import Decoder
from models.hf import beyond_hf, config_to_hf, export_of, layout_of, parameter_shapes
from models.hf_config import read_model
from models.hf_families import FAMILIES, unsaid
from models.hf_reading import Unsupported, config_from_hf
from models.sizes import SIZES
from recipes.weights.convert import export_checkpoint, import_folder
from recipes.weights.locate import find_weights
from tests.models.references import loaded, saved, with_random_routers

SHARED: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "num_experts_per_tok": 3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
DOTS: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
MIXTRAL: dict[str, Any] = {"num_local_experts": 8, "intermediate_size": 40}
OLMOE: dict[str, Any] = {"num_experts": 8, "intermediate_size": 40, "head_dim": 16}
# Name -> model_type, keys of its config.json.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True}),
    "Qwen3-MoE, tied, scores as they are": ("qwen3_moe", {"num_experts": 6, "tie_word_embeddings": True}),
    "Qwen3-MoE, first layer dense": ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "Qwen3-MoE, every other layer": ("qwen3_moe", {"num_experts": 8, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "Qwen3-MoE, some layers dense": ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "Mixtral": ("mixtral", MIXTRAL),
    "Mixtral, windows": ("mixtral", {**MIXTRAL, "sliding_window": 8, "tie_word_embeddings": True}),
    "OLMoE": ("olmoe", OLMOE),
    "OLMoE, scores that add up to 1": ("olmoe", {**OLMOE, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "dots1": ("dots1", {**DOTS, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "dots1, groups": ("dots1", {**DOTS, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "dots1, no shared experts": ("dots1", {**DOTS, "n_shared_experts": 0, "norm_topk_prob": True}),
    "dots1, scores as they are": ("dots1", {**DOTS, "n_shared_experts": 1, "norm_topk_prob": False}),
}


def settings_of(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    family, keys = CASES[case]
    return {**SHARED, **keys, "model_type": family, "architectures": [FAMILIES[family].head]}


@cache
def reference(case: str) -> Any:
    return with_random_routers(settings_of(case))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    return saved({case: reference(case) for case in CASES}, tmp_path_factory.mktemp("experts"), corpus)


def tokens_of() -> Tensor:
    return torch.randint(1, SHARED["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_a_model_with_experts_has_the_logits_and_gradients_of_transformers(case: str, folders: dict[str, Path]) -> None:
    model, theirs, tokens = loaded(folders[case]), reference(case), tokens_of()
    targets = tokens.roll(-1, dims=1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    layout = layout_of(model.config)
    for name, parameter in model.named_parameters():
        stored = layout.tensors[name]
        inside = stored.name.replace("block_sparse_moe", "mlp").replace(".w2", ".down_proj")  # since transformers 5
        if ".experts.gate_proj" in name or ".experts.up_proj" in name:  # transformers has them as one
            both = gradients[f"{inside.rpartition('.')[0]}.gate_up_proj"]
            gradient = both.chunk(2, dim=1)[".up_proj" in name]
        else:
            gradient = gradients.pop(inside)
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm(), name
    assert all("gate_up_proj" in name or not gradient.numel() for name, gradient in gradients.items())


@pytest.mark.parametrize("case", CASES)
def test_a_folder_with_experts_goes_through_a_checkpoint_and_back_to_the_byte(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    import_folder(folders[case], tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "again", max_bytes=100_000)
    theirs = load_file(folders[case] / "model.safetensors")
    again = {name: one for file in (tmp_path / "again").glob("*.safetensors") for name, one in load_file(file).items()}
    tied = {"lm_head.weight"} if reference(case).config.tie_word_embeddings else set()
    empty = {name for name, one in theirs.items() if not one.numel()}  # of no shared experts
    assert again.keys() - tied == theirs.keys() - tied - empty
    assert all(torch.equal(theirs[name], one) and theirs[name].dtype == one.dtype for name, one in again.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    with torch.no_grad():
        assert torch.equal(model(tokens_of()).logits, reference(case)(tokens_of()).logits)
    checkpoint = find_weights(tmp_path / "checkpoint")
    assert checkpoint.model == find_weights(folders[case]).model
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            loaded(checkpoint.path).state_dict().values(), loaded(folders[case]).state_dict().values(), strict=True
        )
    )


def test_a_bfloat16_export_keeps_biases_of_routers_in_float32(folders: dict[str, Path], tmp_path: Path) -> None:
    import_folder(folders["dots1"], tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "half", dtype=torch.bfloat16)
    types = {name: one.dtype for name, one in load_file(tmp_path / "half" / "model.safetensors").items()}
    for name, dtype in types.items():
        assert dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("case", CASES)
def test_a_config_with_experts_goes_through_hugging_face_and_back(case: str) -> None:
    model = config_from_hf(settings_of(case))
    config = config_to_hf(model, TextFacts(256))
    assert config["model_type"] == CASES[case][0] and config_from_hf(config) == model
    as_saved = transformers.AutoConfig.for_model(**settings_of(case)).to_dict()  # as transformers 5 spells it
    assert config_from_hf({key: value for key, value in as_saved.items() if value is not None}) == model
    with torch.device("meta"):
        decoder = Decoder(model)
    assert {name: tuple(one.shape) for name, one in decoder.state_dict().items()} == dict(parameter_shapes(model))
    assert list(decoder.state_dict()) == [name for name, _ in parameter_shapes(model)]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_spellings_of_the_number_of_experts_are_read(key: str) -> None:
    settings = settings_of("Qwen3-MoE")
    del settings["num_experts"]
    assert config_from_hf({**settings, key: 16}).experts == 16
    with pytest.raises(ValueError, match="which says the same"):
        config_from_hf({**settings, "num_experts": 16, "num_local_experts": 8})


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: noise of routers"),
        ("OLMoE", {"clip_qkv": 8.0}, "clip_qkv = 8.0: clipped queries, keys and values"),
        ("OLMoE", {"head_dim": 24}, "head_dim = 24: only hidden_size / num_attention_heads"),
        ("Qwen3-MoE", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
        ("dots1", {"max_window_layers": 1, "sliding_window": 8}, "max_window_layers = 1"),
    ],
)
def test_experts_that_our_decoder_does_not_compute_are_refused_with_the_reason(
    case: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        config_from_hf({**settings_of(case), **keys})
    with pytest.raises(ValueError, match=f"{message}.*mixtures of experts are computed by our own decoder only"):
        read_model({**settings_of(case), **keys})


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("Qwen3-MoE", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: is more than experts = 8"),
        ("Qwen3-MoE", {"num_experts": 0}, "num_experts = 0: must be an integer"),
        ("Qwen3-MoE", {"num_experts": 10**9}, "experts = 1000000000: is more than 16,384"),
        ("Qwen3-MoE", {"decoder_sparse_step": 4}, "leaves none of the 3 layers to experts"),
        ("Qwen3-MoE", {"mlp_only_layers": [-1]}, "mlp_only_layers = .-1.: must be a list of layers"),
        ("dots1", {"n_group": 3}, "n_group = 3: must divide"),
        ("dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1: must be an integer >= 0"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts = None"),
    ],
)
def test_impossible_experts_are_refused_by_the_key_that_is_wrong(case: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**settings_of(case), **keys})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"router_bias": True}, "router_bias = True: a Qwen3MoeForCausalLM"),
        ({"router_scale": 2.0}, "router_scale = 2.0: a Qwen3MoeForCausalLM"),
        ({"shared_experts": 1}, "shared_experts = 1: a Qwen3MoeForCausalLM"),
        ({"qk_norm": "none", "no_rope_every": 4}, "no_rope_every = 4: a MixtralForCausalLM"),
        ({"router": "sigmoid", "router_bias": True, "sparse_every": 2}, "sparse_every = 2: a Dots1ForCausalLM"),
        ({"router": "sigmoid", "shared_experts": 1}, "router_bias = False: a Dots1ForCausalLM"),
    ],
    ids=str,
)
def test_experts_that_no_config_json_can_say_are_not_exported(fields: dict[str, Any], problem: str) -> None:
    model: ModelConfig = replace(SIZES["moe_debug"], **fields)
    assert not model.problems() and not beyond_hf(SIZES["moe_debug"])
    assert str(beyond_hf(model)).startswith(problem)
    with pytest.raises(ValueError, match=problem):
        config_to_hf(model, TextFacts(256))


@pytest.mark.parametrize(
    ("family", "fields", "missing"),
    [
        ("mixtral", {"qk_norm": "none"}, []),
        ("mixtral", {"qk_norm": "none", "normalize_scores": False}, ["normalize_scores"]),
        ("mixtral", {"qk_norm": "none", "dense_layers": 1}, ["dense_layers"]),
        ("mixtral", {"qk_norm": "none", "window": 8, "full_attention_layers": (1,)}, ["full_attention_layers"]),
        ("olmoe", {"qk_norm": "all", "head_width": 32}, []),
        ("olmoe", {"qk_norm": "all", "head_width": 64}, ["head_width"]),
        ("olmoe", {"qk_norm": "all", "further_dense_layers": (1,)}, ["further_dense_layers"]),
        ("qwen3_moe", {"further_dense_layers": (1,), "sparse_every": 2}, []),
        ("dots1", {"router": "sigmoid", "router_bias": True, "dense_layers": 1}, []),
    ],
    ids=str,
)
def test_a_family_of_experts_says_what_it_has(family: str, fields: dict[str, Any], missing: list[str]) -> None:
    assert [*unsaid(replace(SIZES["moe_debug"], **fields), family)] == missing


def test_an_upcycled_llama_is_a_mixtral_and_a_sigmoid_router_needs_no_shared_experts() -> None:
    llama = replace(SIZES["llama3_debug"], experts=8, experts_per_token=2, expert_width=384, upcycle=True)
    assert export_of(llama) == "can be exported as mixtral"
    ups = layout_of(llama).tensors["blocks.0.feed_forward.experts.up_proj"].parts
    assert ups[1] == "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    sigmoid = replace(SIZES["moe_debug"], router="sigmoid", router_bias=True)
    assert export_of(sigmoid) == "can be exported as dots1"
    assert export_of(replace(sigmoid, qk_norm="none")).startswith("cannot be exported to Hugging Face, because of mod")


@pytest.mark.parametrize("case", ["Qwen3-MoE", "dots1, groups"])
def test_a_text_that_a_cache_reads_in_parts_goes_to_the_same_experts(case: str, folders: dict[str, Path]) -> None:
    model, tokens = loaded(folders[case]), tokens_of()
    cache = KeyValueCache(model.config, batch=2, max_length=32, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([20, 1, 1, 7, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-5)
