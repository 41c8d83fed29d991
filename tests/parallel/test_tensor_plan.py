"""Models of transformers cut by their plans: every family against one process, and whole steps beside FSDP."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from models.documents import Documents
from models.loss import IGNORED
from models.tensor_plan import FAMILIES
from models.transformers import TransformersModel
from models.transformers_config import TransformersConfig
from parallel.dist import start, stop
from parallel.errors import UserError
from parallel.mesh import build_mesh
from parallel.tensor import cut_matrices
from recipes.recipe.load import CONFIGS, load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from tests.families import family_config
from tests.meshes import mesh_config, on_each_mesh
from tests.parallel.combinations import degrees_of
from tests.parallel.test_transformers import train_all, train_plainly
from tests.processes import ROOT, run_processes
from tests.training import DEBUG
from tests.whole import whole

VOCABULARY, ROWS, LENGTH, END = 96, 2, 24, 2
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64},
    **{"pad_token_id": 5, "bos_token_id": 1, "eos_token_id": END, "tie_word_embeddings": False},
}
TIED, OWN_WIDTH = {"tie_word_embeddings": True}, {"head_dim": None}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# Norms of heads, biases of all linears, windows, a tied head, and a padding token in the second half of the vocabulary.
MORE: dict[str, dict[str, Any]] = {
    "cohere": TIED | OWN_WIDTH,
    "cohere2": TIED | WINDOWS,
    "exaone4": WINDOWS,
    "gemma": TIED,
    "gemma2": TIED | WINDOWS,
    "gemma3_text": TIED | WINDOWS | {"pad_token_id": 50},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo3": OWN_WIDTH | WINDOWS,
    "phi": OWN_WIDTH | {"qk_layernorm": True, "num_key_value_heads": 4},
    "phi3": OWN_WIDTH | {"original_max_position_embeddings": 64},
    "qwen2": OWN_WIDTH,
    "qwen3": TIED,
    "starcoder2": OWN_WIDTH | {"use_bias": True},
}
STEPS = {2: [("qwen3", "1.1.1.2:compile,selective"), ("mistral", "1.1.1.2:zero2,accumulate")]}
STEPS[4] = [("qwen3", "1.2.1.2"), ("mistral", "2.1.1.2:full")]


def config_of(family: str) -> TransformersConfig:
    settings = {"model_type": family} | SHAPE | MORE.get(family, {})
    settings = {key: value for key, value in settings.items() if value is not None}
    shape = family_config("qwen3")
    return TransformersConfig(
        **{name: getattr(shape, name) for name in ("name", "layers", "width", "feed_forward_width", "heads")},
        **{name: getattr(shape, name) for name in ("key_value_heads", "head_width", "norm_eps", "rope_theta")},
        vocabulary=VOCABULARY,
        tied_embeddings=settings["tie_word_embeddings"],
        definition=json.dumps(settings),
    )


def loss_and_gradients(family: str, axis: Any) -> tuple[float, dict[str, Tensor]]:
    """Of two rows, one of several documents, with padding and ignored targets; of the same weights on every mesh."""
    model = TransformersModel(config_of(family))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms, too, are unlike each other
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random) * 0.1
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    if axis is not None:
        cut_matrices(model, axis)
    tokens = torch.randint(6, VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    tokens[0, [7, 12]], tokens[0, 3], tokens[1, 5] = END, 5, 50
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :3] = IGNORED
    documents = Documents.of(inputs, end_of_document=END) if family in ("qwen3", "gemma3_text", "phi3") else None
    loss = model(inputs, targets, documents=documents) / LENGTH
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def compare_families(families: list[str]) -> dict[str, Any]:
    """Family -> how far its loss, and its worst gradient, are from those of one process."""
    world = start("cpu", seed=0)
    axis = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    found = {}
    for family in families:
        loss, gradients = loss_and_gradients(family, None)
        cut_loss, cut = loss_and_gradients(family, axis)
        assert cut.keys() == gradients.keys()
        errors = {name: ((cut[name] - g).norm() / g.norm()).item() for name, g in gradients.items()}
        worst = max(errors, key=lambda name: errors[name])
        found[family] = {"loss": abs(cut_loss / loss - 1), "parameter": worst, "gradient": errors[worst]}
    stop()
    return found


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    [found, _] = run_processes(2, compare_families, list(FAMILIES))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_cut_in_two_has_the_gradients_of_one_process(family: str, compared: dict[str, Any]) -> None:
    assert compared[family]["loss"] < 1e-6 and compared[family]["gradient"] < 1e-4, compared[family]


@pytest.mark.slow
def test_parts_that_gather_their_features_need_no_heads_that_divide() -> None:
    found = run_processes(4, compare_families, ["olmo2", "phi3", "phi"])[0]
    assert max(one["gradient"] for one in found.values()) < 1e-4, found


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for processes, cases in STEPS.items():
        answers = run_processes(processes, train_all, cases, load(DEBUG))
        found |= dict(zip(cases, zip(*answers, strict=True), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_run_cut_by_a_plan_follows_plain_transformers(name: str, trained: dict[tuple[str, str], Any]) -> None:
    expected = train_plainly(family_config(name))
    for case in (case for cases in STEPS.values() for model, case in cases if model == name):
        found = trained[name, case]
        assert len(found) == prod(degrees_of(case))
        np.testing.assert_allclose(found[0]["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[0]["norms"], expected["norms"], rtol=1e-4)
        assert all((one["losses"], one["norms"]) == (found[0]["losses"], found[0]["norms"]) for one in found)
        for parameter, gradient in expected["gradients"].items():
            error = np.linalg.norm(found[0]["gradients"][parameter] - gradient) / np.linalg.norm(gradient)
            assert error < 1e-4, (case, parameter, error)


def initial_weights(mesh: str, recipe: Recipe) -> dict[str, np.ndarray]:
    """Name -> the whole parameter that a run on the mesh starts with."""
    world = start("cpu", seed=0)
    recipe = replace(recipe, model=config_of("gemma3_text"))
    built = build(recipe, world, mesh=build_mesh(mesh_config(mesh).fit(world.size), device_type="cpu"))
    found = {name: whole(parameter).detach().numpy() for name, parameter in built.model.named_parameters()}
    stop()
    return found


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_how_they_are_cut() -> None:
    found = on_each_mesh(["1.1.1.1", "1.2.1.2"], initial_weights, load(DEBUG))
    for name, expected in found["1.1.1.1"][0].items():
        assert all(np.array_equal(one[name], expected) for one in found["1.2.1.2"]), name


REFUSED = {
    "gpt2_debug --mesh.tensor 2": "GPT2LMHeadModel has no tp_plan of transformers that was compared with one process",
    "t5_debug --mesh.tensor 2": "T5ForConditionalGeneration has no tp_plan",
    "qwen2 --mesh.tensor 4": "4 processes cannot share model.key_value_heads = 2 equally; write 1 or 2",
    "qwen2 --mesh.context 2": "qwen2 of transformers sees whole rows only; write 1",
    "qwen2 --mesh.tensor 2 --model.dropout true": "would drop other numbers; write 1, or model.dropout = false",
    "qwen2 --mesh.tensor 2 --mesh.overlap_tensor true --compile.enabled true": "mesh.overlap_tensor",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_cut_is_refused_by_its_name(command: str, tmp_path: Path) -> None:
    recipe, *arguments = command.split()
    if recipe == "qwen2":
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": recipe, "vocab_size": 4096}))
        recipe, arguments = "qwen3_debug", [*arguments, f"--model.config={tmp_path}"]
    with pytest.raises(UserError) as refusal:
        load(CONFIGS / f"{recipe}.toml", arguments)
    assert REFUSED[command] in " ".join(str(refusal.value).split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "olmo", "clip_qkv": 8.0}, "olmo cannot be cut with clip_qkv = 8.0 in its config.json; write 1"),
        ({"model_type": "cohere", "use_qk_norm": True}, "cohere cannot be cut with use_qk_norm = True"),
        ({"model_type": "qwen2", "vocab_size": 97}, "write 1, or vocab_size in config.json = 128"),
    ],
)
def test_settings_that_cannot_be_cut_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | settings))
    with pytest.raises(UserError) as refusal:
        load(CONFIGS / "qwen3_debug.toml", ["--mesh.tensor", "2", f"--model.config={tmp_path}"])
    assert message in " ".join(str(refusal.value).split())


def build_without_initial_values(recipe: Recipe) -> str:
    with pytest.raises(UserError) as refusal:
        build(replace(recipe, model=config_of("apertus")), start("cpu", seed=0))
    stop()
    return str(refusal.value)


@pytest.mark.slow
def test_model_with_parameters_that_transformers_starts_nowhere_is_refused() -> None:
    [text] = run_processes(1, build_without_initial_values, load(DEBUG))
    assert re.fullmatch(r"model: transformers gives \S+alpha_p no initial values .*", text)


@pytest.mark.parametrize("changed", [{"mlp.up_proj": "of another version"}, {"self_attn.o_proj": "all_reduce"}])
def test_block_is_not_cut_by_a_plan_that_leaves_a_linear_out(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        theirs = TransformersModel(config_of("qwen3")).model.config
        plan = theirs.base_model_tp_plan | {f"layers.*.{name}": style for name, style in changed.items()}
        monkeypatch.setattr(type(theirs), "base_model_tp_plan", plan)
        assert TransformersModel(config_of("qwen3")).interface.inside_block is None


def test_the_page_lists_the_families_that_are_cut() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    listed = page.partition("one process are\ncut: ")[2].partition(" (`model_type`")[0]
    assert tuple(re.findall(r"\w+", listed.replace(" and ", " "))) == FAMILIES
