"""GPT-OSS on our decoder against transformers' own: sinks, biases, the clamped SwiGLU, folders."""

from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, library, nn

from models.attention import attend
from models.cache import KeyValueCache
from models.config import ModelConfig, TextFacts
from models.decoder import Decoder
from models.documents import Documents, Mask
from models.experts import by_experts, clamped_swiglu
from models.hf import config_to_hf, export_of, layout_of, parameter_shapes
from models.hf_config import read_model
from models.hf_reading import Unsupported, config_from_hf
from models.sinks import by_all_scores, with_sinks
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer, matrices_of
from recipes.weights.convert import export_checkpoint, import_folder
from recipes.weights.description import upcycling_problems
from recipes.weights.locate import find_weights
from tests.lengths_on_cpu import lengths_on_cpu
from tests.models.references import loaded, saved

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
SETTINGS: dict[str, Any] = {
    **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 300, "hidden_size": 64},
    **{"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 24, "max_position_embeddings": 256, "initializer_range": 0.1, "num_local_experts": 6},
    **{"num_experts_per_tok": 3, "sliding_window": 8, "rope_theta": 150000.0, "rope_scaling": YARN},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
LENGTH = 64  # beyond windows, and beyond the original length of YaRN


@cache
def reference() -> Any:
    """transformers' model with random weights, sinks and biases, of which some go beyond the limits of the clamps."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**SETTINGS)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1 or name.endswith("bias"):
                tensor += 0.5 * torch.randn_like(tensor)
            if "gate_up_proj_bias" in name:
                tensor *= 4
            if name.endswith("router.weight"):
                tensor.copy_(torch.randn_like(tensor))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return saved({"hf": reference()}, tmp_path_factory.mktemp("gpt_oss"), corpus)["hf"]


def tokens_of() -> Tensor:
    return torch.randint(1, SETTINGS["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_are_those_of_transformers(folder: Path) -> None:
    model, theirs, tokens = loaded(folder), reference(), tokens_of()
    assert (model.config.full_attention_every, model.config.window, model.config.rope_truncate) == (2, 8, False)
    targets = tokens.roll(-1, dims=1)
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
    theirs.zero_grad()
    nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    seen = set()
    for name, parameter in model.named_parameters():
        how = layout_of(model.config).tensors[name]
        gradient = gradients[how.name] if how.lane is None else gradients[how.name][..., how.lane :: 2]
        gradient = gradient.mT if how.transposed else gradient
        assert gradient.norm() > 0, name
        assert (parameter.grad - gradient).norm() < 5e-5 * gradient.norm(), name  # 1.3e-5 on one kind of CPU
        seen.add(how.name)
    assert seen == gradients.keys()


def test_folder_goes_through_a_checkpoint_and_back_to_the_byte(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "again", max_bytes=100_000)
    theirs = load_file(folder / "model.safetensors")
    again = {name: one for file in (tmp_path / "again").glob("*.safetensors") for name, one in load_file(file).items()}
    assert again.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], one) for name, one in again.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(model(tokens_of()).logits, reference()(tokens_of()).logits)
    assert find_weights(tmp_path / "checkpoint").model == find_weights(folder).model
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "half", dtype=torch.bfloat16)
    assert {one.dtype for one in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}


def test_missing_or_misshapen_fused_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][..., :-2].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_up_proj .* has shape \[6, 64, 94\], but the model needs \[6, 64, 96\]"):
        _ = find_weights(tmp_path).stored_tensors
    save_file({key: one for key, one in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing: .*layers\.1\.mlp\.experts\.gate_up_proj"):
        _ = find_weights(tmp_path).stored_tensors


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"sliding_window": 16, "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
        {"layer_types": ["full_attention"] * 4},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_config_goes_through_hugging_face_and_back(changes: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changes}
    model = config_from_hf(settings)
    config = config_to_hf(model, TextFacts(256))
    assert config["model_type"] == "gpt_oss" and config_from_hf(config) == model
    for one in (settings, config):
        library = transformers.AutoConfig.for_model(**one)
        assert config_from_hf({key: value for key, value in library.to_dict().items() if value is not None}) == model
    with torch.device("meta"):
        decoder = Decoder(model)
    shapes = {name: tuple(one.shape) for name, one in decoder.state_dict().items()}
    assert list(shapes.items()) == list(parameter_shapes(model))
    assert model.num_params() == sum(one.numel() for one in decoder.parameters())


def test_defaults_of_missing_keys_are_those_of_transformers() -> None:
    bare = {"model_type": "gpt_oss"}
    library = transformers.AutoConfig.for_model(**bare).to_dict()
    assert config_from_hf(bare) == config_from_hf({key: value for key, value in library.items() if value is not None})
    assert config_from_hf(bare) == replace(SIZES["gpt_oss_120b"], name="from_weights")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": False}, "attention_bias = False: GptOssForCausalLM without biases"),
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0: another limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0: another slope"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
    ids=str,
)
def test_what_our_decoder_does_not_compute_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        config_from_hf({**SETTINGS, **keys})
    with pytest.raises(ValueError, match=f"{message}.*mixtures of experts are computed by our own decoder only"):
        read_model({**SETTINGS, **keys})


def test_quantized_files_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"quantization_config.*quantized weights.*Mxfp4Config\(dequantize=True\)"):
        read_model({**SETTINGS, "quantization_config": {"quant_method": "mxfp4"}})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention_sinks": False}, "attention_sinks = False: a GptOssForCausalLM"),
        ({"router_scale": 2.0}, "router_scale = 2.0: a GptOssForCausalLM"),
        ({"qk_norm": "head"}, "qk_norm = head: a GptOssForCausalLM"),
    ],
    ids=str,
)
def test_a_model_that_is_almost_gpt_oss_is_not_exported_as_it(fields: dict[str, Any], reason: str) -> None:
    model = replace(SIZES["gpt_oss_20b"], **fields)
    assert not model.problems() and reason in export_of(model)


def test_fields_that_do_not_go_together_are_refused() -> None:
    clamped = {"activation": "swiglu_clamped"}
    assert "is for experts" in dict(replace(SIZES["llama3_debug"], **clamped).problems())["activation"]
    for dense in ({"dense_layers": 1}, {"shared_experts": 1}):
        assert "alone" in dict(replace(SIZES["gpt_oss_20b"], **dense).problems())["activation"]
    upcycled = replace(SIZES["llama3_debug"], experts=4, expert_width=384, biases=True, upcycle=True)
    assert next(upcycling_problems(upcycled, SIZES["llama3_debug"]))[0] == "biases"


def test_a_text_that_a_cache_reads_in_parts_has_the_logits_of_the_whole(folder: Path) -> None:
    model, tokens = loaded(folder), tokens_of()
    cache = KeyValueCache(model.config, batch=2, max_length=LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([40, 1, 1, 15, 7], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-5)


def test_documents_in_a_row_have_the_logits_of_each_alone(folder: Path) -> None:
    model, tokens = loaded(folder), tokens_of()
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    starts[:, [0, 20, 23]] = True
    with torch.no_grad():
        packed = model(tokens, documents=Documents.from_starts(starts))
        alone = [model(one) for one in tokens.split([20, 3, LENGTH - 23], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


# The parts by themselves


def gradients_of(function: Any, *tensors: Tensor) -> list[Tensor]:
    """What it returns, and the gradients of its arguments for one random gradient."""
    own = [one.detach().clone().requires_grad_() for one in tensors]
    out = function(*own)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype))
    return [out.detach(), *[cast_gradient(one) for one in own]]


def cast_gradient(one: Tensor) -> Tensor:
    assert one.grad is not None
    return one.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("new", "window", "documents"), [(33, 0, 0), (33, 7, 0), (5, 0, 0), (1, 5, 0), (33, 7, 1)])
def test_kernels_with_sinks_compute_the_definition(new: int, window: int, documents: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    shapes = ((2, new, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16))
    query, key, value = (torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    sinks = torch.randn(4, dtype=dtype)
    distance = torch.arange(33)[-new:, None] - torch.arange(33)
    mask: Tensor = (distance >= 0) & (distance < (window or 33))
    packed = None
    if documents:
        packed = Documents.from_starts(torch.arange(33).expand(2, -1) % 9 == 0).for_attention_in(torch.float32)
        assert isinstance(packed, Mask)
        mask = mask & packed.sees
    found = gradients_of(lambda *all: attend(*all[:3], packed, all[3], window=window), query, key, value, sinks)
    expected = gradients_of(lambda *all: by_all_scores(*all, mask, 0.25), query, key, value, sinks)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * other.norm()


@pytest.mark.parametrize("window", [0, 7])
def test_kernels_for_lengths_with_sinks_compute_the_definition(window: int) -> None:
    torch.manual_seed(4)
    query, key, value = (torch.randn(2, 32, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    sinks, packed = torch.randn(4), Documents.from_starts(torch.arange(32).expand(2, -1) % 9 == 0)
    inside = packed.for_attention_in(torch.float32)
    assert isinstance(inside, Mask)
    distance = torch.arange(32)[:, None] - torch.arange(32)
    mask = inside.sees & (distance < (window or 32))
    expected = gradients_of(lambda *all: by_all_scores(*all, mask, 0.25), query, key, value, sinks)
    with lengths_on_cpu():
        lengths = packed.for_attention_in(torch.float32)
        found = gradients_of(lambda *all: attend(*all[:3], lengths, all[3], window=window), query, key, value, sinks)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_operator_with_sinks_keeps_the_rules_of_operators() -> None:
    shapes = ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    heads = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, requires_grad=True)
    for mask in (None, torch.ones(9, 9, dtype=torch.bool).tril()):
        library.opcheck(with_sinks, (*heads, sinks, mask, None, None, 0, 0.25))


def test_biases_of_experts_are_added_to_their_rows() -> None:
    torch.manual_seed(3)
    rows, matrices, biases = torch.randn(10, 8), torch.randn(3, 4, 8), torch.randn(3, 4)
    ends, owner = torch.tensor([4, 4, 10], dtype=torch.int32), torch.tensor([0] * 4 + [2] * 6)

    def plain(rows: Tensor, matrices: Tensor, biases: Tensor) -> Tensor:
        return torch.einsum("ri,roi->ro", rows, matrices[owner]) + biases[owner]

    found = gradients_of(
        lambda rows, matrices, biases: by_experts(rows, matrices, ends, biases), rows, matrices, biases
    )
    for one, other in zip(found, gradients_of(plain, rows, matrices, biases), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_clamped_swiglu_clamps_gates_above_and_factors_on_both_sides() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 1.0])
    expected = [7 / (1 + exp(-7 * 1.702)) * 8, -9 / (1 + exp(9 * 1.702)) * -6, 2 / (1 + exp(-1.702))]
    assert clamped_swiglu(gate, up).tolist() == pytest.approx(expected, rel=1e-4)


def small() -> ModelConfig:
    return config_from_hf(SETTINGS)


def test_biases_and_sinks_neither_decay_nor_are_matrices_of_muon() -> None:
    model = Decoder(small())
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.1))
    decays = {id(one) for group in optimizer.param_groups if group["weight_decay"] for one in group["params"]}
    for name, parameter in model.named_parameters():
        plain = name.endswith("bias") or "sinks" in name or "norm" in name or name == "embedding.weight"
        assert (id(parameter) in decays) != plain, name
    assert matrices_of(optimizer) == []


def test_biases_start_at_zero_and_sinks_as_matrices_do() -> None:
    model = Decoder(small())
    for name, values in model.initial_values(dict(parameter_shapes(small())), seed=1, device=torch.device("cpu")):
        if name.endswith("bias"):
            assert not values.any(), name
        elif "sinks" in name:
            assert 0 < values.abs().max() < 5 * SETTINGS["initializer_range"], name
