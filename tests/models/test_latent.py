"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi K2) on our decoder, and its folders, as transformers' own."""

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
from models.decoder import Decoder, build_model
from models.documents import Documents
from models.hf import beyond_hf, config_to_hf, export_of, layout_of, parameter_shapes
from models.hf_families import FAMILIES, unsaid
from models.hf_reading import Unsupported, config_from_hf
from models.sizes import SIZES
from recipes.weights.convert import export_checkpoint, import_folder
from recipes.weights.locate import find_weights
from tests.models.references import loaded, saved, with_random_routers

LENGTH, END = 48, 7
SHARED: dict[str, Any] = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 3},
    **{"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    **{"max_position_embeddings": 256, "initializer_range": 0.1, "n_group": None, "topk_group": None},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 1}
GROUPS = {"n_group": 4, "topk_group": 2}


def yarn(**keys: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "yarn", **YARN, **keys}}


# Name -> model_type, keys of its config.json.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy"}),
    "V2-Lite": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}),
    "V2-Lite, longer": ("deepseek_v2", {"q_lora_rank": None, **yarn(mscale=0.707, mscale_all_dim=0.707)}),
    "V3": ("deepseek_v3", {**GROUPS, "num_hidden_layers": 4, "first_k_dense_replace": 3}),
    "V3, longer": ("deepseek_v3", {**GROUPS, **yarn(mscale=1.0, mscale_all_dim=1.0)}),
    "V3, factors that differ": ("deepseek_v3", {**GROUPS, **yarn(mscale=0.5, mscale_all_dim=1.5)}),
    "V3, queries alone longer": ("deepseek_v3", {**GROUPS, **yarn(attention_factor=1.3)}),
    "V3, scores as they are, tied": ("deepseek_v3", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "Kimi K2": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "v_head_dim": 20}),
}
V3 = config_from_hf({"model_type": "deepseek_v3"})
SMALL = replace(
    V3,
    **{"layers": 4, "width": 128, "feed_forward_width": 384, "heads": 4, "key_value_heads": 4, "head_width": 48},
    **{"vocabulary": 512, "latent_width": 64, "query_latent_width": 96, "rope_width": 16, "value_width": 32},
    **{"experts": 8, "experts_per_token": 2, "expert_width": 64, "dense_layers": 1, "expert_groups": 1},
    groups_per_token=1,
)
EACH = pytest.mark.parametrize("case", CASES)


def rounding(case: str) -> float:
    """By how much logits may differ. Those of V2 read softmax scores as they are, which sharp routers make out of small
    differences: in float32 both models are up to 4e-5 from what they compute in float64, where they agree to 1.3e-7."""
    return 5e-5 if CASES[case][0] == "deepseek_v2" else 1e-5


def settings_of(case: str) -> dict[str, Any]:
    """The config.json of a case."""
    family, keys = CASES[case]
    filled = {"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}
    return {**SHARED, **filled, **keys, "model_type": family, "architectures": [FAMILIES[family].head]}


@cache
def reference(case: str) -> Any:
    return with_random_routers(settings_of(case))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    return saved({case: reference(case) for case in CASES}, tmp_path_factory.mktemp("latent"), corpus)


def tokens_of(rows: int = 2) -> Tensor:
    return torch.randint(8, SHARED["vocab_size"], (rows, LENGTH), generator=torch.Generator().manual_seed(1))


# What it computes


@EACH
def test_latent_attention_has_the_logits_and_gradients_of_transformers(case: str, folders: dict[str, Path]) -> None:
    model, theirs, tokens = loaded(folders[case]), reference(case), tokens_of()
    targets = tokens.roll(-1, dims=1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=rounding(case))
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    layout = layout_of(model.config)
    for name, parameter in model.named_parameters():
        stored = layout.tensors[name].name
        if ".experts.gate_proj" in name or ".experts.up_proj" in name:  # transformers has them as one
            gradient = gradients[f"{stored.rpartition('.')[0]}.gate_up_proj"].chunk(2, dim=1)[".up_proj" in name]
        else:
            gradient = gradients.pop(stored)
        assert (parameter.grad - gradient).norm() < rounding(case) * gradient.norm(), name
    assert all("gate_up_proj" in name for name in gradients)


@EACH
def test_text_that_a_cache_reads_in_parts_has_the_logits_of_the_whole(case: str, folders: dict[str, Path]) -> None:
    model, tokens = loaded(folders[case]), tokens_of()
    cache = KeyValueCache(model.config, batch=2, max_length=LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.layers[0].value.shape[-1] == SHARED["v_head_dim"] or case == "Kimi K2"
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([20, 1, 1, 17, 9], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=rounding(case))


@EACH
def test_packed_documents_have_the_logits_of_each_by_itself(case: str, folders: dict[str, Path]) -> None:
    model, tokens = loaded(folders[case]), tokens_of(1)
    tokens[0, 19] = END
    with torch.no_grad():
        packed = model(tokens, documents=Documents.of(tokens, end_of_document=END))
        alone = [model(part) for part in tokens.split([20, LENGTH - 20], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=rounding(case))


# Its folders


@EACH
def test_folder_goes_through_a_checkpoint_and_back_to_the_byte(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    import_folder(folders[case], tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "again", max_bytes=100_000)
    theirs = load_file(folders[case] / "model.safetensors")
    again = {name: one for file in (tmp_path / "again").glob("*.safetensors") for name, one in load_file(file).items()}
    tied = {"lm_head.weight"} if reference(case).config.tie_word_embeddings else set()
    assert again.keys() - tied == theirs.keys() - tied
    assert all(torch.equal(theirs[name], one) and theirs[name].dtype == one.dtype for name, one in again.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_of()).logits, reference(case)(tokens_of()).logits, rtol=0, atol=1e-6)
    assert find_weights(tmp_path / "checkpoint").model == find_weights(folders[case]).model


@EACH
def test_config_goes_through_hugging_face_and_back(case: str) -> None:
    model = config_from_hf(settings_of(case))
    config = config_to_hf(model, TextFacts(256))
    assert config["model_type"] == CASES[case][0] and config_from_hf(config) == model
    as_saved = transformers.AutoConfig.for_model(**settings_of(case)).to_dict()  # as transformers 5 spells it
    as_saved = {key: value for key, value in as_saved.items() if value is not None or key == "q_lora_rank"}
    assert config_from_hf(as_saved) == model
    with torch.device("meta"):
        decoder = Decoder(model)
    assert {name: tuple(one.shape) for name, one in decoder.state_dict().items()} == dict(parameter_shapes(model))
    assert list(decoder.state_dict()) == [name for name, _ in parameter_shapes(model)]
    assert model.num_params() == sum(one.numel() for one in decoder.parameters())


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_missing_keys_have_the_values_of_transformers(family: str) -> None:
    asked = {"model_type": family, "num_experts_per_tok": 6}
    whole = transformers.AutoConfig.for_model(**asked).to_dict()
    given = {key: value for key, value in whole.items() if value is not None}
    assert config_from_hf(asked) == config_from_hf({**given, "architectures": [FAMILIES[family].head]})


@pytest.mark.parametrize(
    ("case", "keys", "error", "message"),
    [
        ("V3", {"rope_interleave": False}, Unsupported, "rope_interleave = False: rotary embeddings of halves"),
        ("V2", {"topk_method": "noaux_tc"}, Unsupported, "topk_method = 'noaux_tc': only 'greedy' and"),
        ("V2", {"norm_topk_prob": True}, Unsupported, "norm_topk_prob = True"),
        ("V3", {"attention_bias": True}, Unsupported, "biases in the attention projections"),
        ("V3", {"num_key_value_heads": 2}, ValueError, "num_key_value_heads = 2: must be heads = 4"),
        ("V3", {"qk_rope_head_dim": 7}, ValueError, "qk_rope_head_dim = 7: must be even, and below"),
        ("V3", {"kv_lora_rank": None}, ValueError, "kv_lora_rank = None: must be an integer"),
        ("V3", {"v_head_dim": 22}, ValueError, "v_head_dim = 22: must be from 1 to head_width = 20"),
    ],
    ids=str,
)
def test_config_that_asks_for_something_else_is_refused_by_its_key(
    case: str, keys: dict[str, Any], error: type[ValueError], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_from_hf({**settings_of(case), **keys})


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"query_latent_width": 0}, []),
        ({"expert_groups": 4, "groups_per_token": 2}, []),
        ({"experts": 0}, ["experts"]),
        ({"sparse_every": 2}, ["sparse_every"]),
        ({"expert_groups": 4, "groups_per_token": 2, "expert_groups_by": "one"}, ["expert_groups_by"]),
        ({"logit_softcap": 30.0}, ["logit_softcap"]),
    ],
    ids=str,
)
def test_export_refuses_what_deepseek_v3_cannot_say(fields: dict[str, Any], missing: list[str]) -> None:
    model = replace(SMALL, **fields)
    assert [*unsaid(model, "deepseek_v3")] == missing
    assert (beyond_hf(model) is None) == (not missing)


@pytest.mark.parametrize(("model", "family"), [(SIZES["deepseek_v2_lite"], "deepseek_v2"), (V3, "deepseek_v3")])
def test_published_models_have_the_parameters_of_transformers(model: ModelConfig, family: str) -> None:
    assert export_of(model) == f"can be exported as {family}"
    config = transformers.AutoConfig.for_model(**config_to_hf(model, TextFacts(4096)))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert model.num_params() == sum(one.numel() for one in theirs.parameters())


# Its fields


def problems(**fields: Any) -> dict[str, str]:
    return dict(replace(SMALL, **fields).problems())


def test_fields_of_latents_are_refused_where_nothing_reads_them() -> None:
    found = dict(replace(SIZES["llama3_debug"], latent_width=64, rope_mscale=1.0).problems())
    assert found["latent_width"] == 'is not read by attention = "default"; write 0'
    assert found["rope_mscale"] == 'is not read by attention = "default"; write 0'


def test_fields_that_latents_do_not_read_are_refused() -> None:
    assert problems() == {}
    assert problems(qk_norm="head")["qk_norm"] == "is not read by attention = \"latent\"; write 'none'"
    assert problems(window=16)["window"] == 'is not read by attention = "latent"; write 0'
    assert "rope_scaling" in problems(rope_mscale=1.0)["rope_mscale"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent_width": 0}, "is read by"),
        ({"value_width": 0}, "must be from 1"),
        ({"key_value_heads": 2}, "must be heads = 4"),
        ({"rope_width": 0}, "must be even, and below head_width = 48"),
        ({"rope_width": 48}, "must be even, and below head_width = 48"),
        ({"value_width": 64}, "must be from 1 to head_width = 48"),
    ],
    ids=str,
)
def test_shapes_of_latents_that_fit_nothing_are_refused(fields: dict[str, int], message: str) -> None:
    assert message in problems(**fields)[next(iter(fields))]


# What it costs


def test_flops_are_those_of_matrices_and_of_heads_as_wide_as_they_are() -> None:
    attention = 6 * V3.layers * V3.heads * (192 + 128) * 4096
    assert V3.flops_per_token(4096, "full") == 6 * V3.matmul_params() + attention
    assert 37.4e9 < V3.active_params() < 37.7e9  # "37B activated for each token", arXiv 2412.19437


def test_initial_values_of_the_output_projection_are_smaller() -> None:
    model = build_model(SMALL)
    shapes = {f"blocks.0.attention.heads.{name}.weight": (300, 300) for name in ("o_proj", "kv_b_proj")}
    values = dict(model.initial_values(shapes, seed=0, device=torch.device("cpu")))  # type: ignore[operator]
    out, into = (one.std().item() for one in values.values())
    assert out == pytest.approx(into / (2 * SMALL.layers) ** 0.5, rel=0.05)
