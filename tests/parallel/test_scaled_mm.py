"""Every product that a recipe computes in float8 obeys the rules of torch._scaled_mm on a GPU, without one.

A block of the recipe's model is cut, cast and multiplied as in a run, on fake tensors, which have shapes and strides,
but no numbers. torch checks the operands of each product as if they were on a GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.decoder import Decoder
from models.sizes import SIZES
from parallel.config import MeshDegrees
from parallel.context import cut_rows
from parallel.errors import UserError
from parallel.float8 import convert_linears
from parallel.mesh import build_mesh
from parallel.tensor import cut_matrices
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.recipes.recipe.test_configs import CONFIGS, layout, loaded

pytestmark = pytest.mark.slow

DEBUG = CONFIGS[0].parent / "smollm3_debug.toml"
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ON_GPU = ["--run.device=cuda", "--float8.emulate=false"]
ONE_ROW = ["--batch.micro_batch_size=1"]

scaled_mm = torch._scaled_mm


class Products:
    """Stands where torch._scaled_mm does, and asks it about every product as if its operands were on a GPU."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, first: Tensor, second: Tensor, **options: Any) -> Tensor:
        self.count += 1
        # Rules of the kernels that torch's check of fake tensors leaves out.
        assert (first.dtype, second.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
        assert options["scale_a"].numel() == 1 or options["out_dtype"] == torch.bfloat16
        found = scaled_mm(on_gpu(first), on_gpu(second), **{name: on_gpu(value) for name, value in options.items()})
        return torch.empty_like(found, device="cpu")


def on_gpu(value: Any) -> Any:
    """A fake tensor like this one; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    found = Products()
    monkeypatch.setattr(torch, "_scaled_mm", found)
    return found


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def multiply(recipe: Recipe, degrees: MeshDegrees, *, tokens: int | None = None) -> None:
    """Forward and backward of a model of one block, as the first process of a tensor and context group.

    tokens: compute only the logits of so many.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.context * degrees.tensor)
    mesh = build_mesh(replace(degrees, pipeline=1, replicate=1, shard=1), device_type="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Decoder(replace(recipe.model, layers=1), loss_chunks=recipe.batch.loss_chunks)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().to(torch.bfloat16)))
        if recipe.float8.recipe != "none":
            convert_linears(model, recipe.float8, device_type="cuda")
        if mesh.tensor is not None:
            cut_matrices(model, mesh.tensor, float8_gathers=recipe.float8.gather_activations)
        if mesh.context is not None:
            cut_rows(model, mesh.context, by=recipe.mesh.context_by)
        if tokens is not None:
            model(torch.zeros(1, tokens, dtype=torch.int64))
            return
        texts = torch.zeros(recipe.batch.micro_batch_size, recipe.batch.sequence_length, dtype=torch.int64)
        model(texts, texts).backward()
    dist.destroy_process_group()


def test_every_recipe_can_be_multiplied_in_float8(products: Products) -> None:
    found: dict[tuple[object, ...], tuple[Path, Recipe, MeshDegrees]] = {}
    for path in CONFIGS:
        if any(SIZES[size].experts for size in SIZES if path.stem.startswith(size)):  # whose products are in bfloat16
            continue
        recipe = loaded(path, **layout(path.stem))
        degrees = recipe.mesh.fit(layout(path.stem)["processes"], nodes=layout(path.stem)["nodes"])
        model, batch = recipe.model, recipe.batch
        widths = (model.width, model.feed_forward_width, model.heads, model.key_value_heads, model.head_width)
        tokens = batch.micro_batch_size * batch.sequence_length
        cut = (recipe.mesh.context_by, degrees.context, degrees.tensor, recipe.float8.gather_activations)
        found.setdefault((widths, tokens, cut, recipe.float8.exclude), (path, recipe, degrees))
    for path, recipe, degrees in found.values():
        for name in FLOAT8:
            products.count = 0
            float8 = replace(recipe.float8, recipe=name, all_gather=False, emulate=False)  # gathered weights are alike
            multiply(replace(recipe, float8=float8), degrees)
            assert products.count == 7 * (2 if name == "rowwise_with_gw_hp" else 3), (path.stem, name)


@pytest.mark.parametrize("recipe", FLOAT8)
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_logits_of_any_number_of_tokens_can_be_computed(recipe: str, tokens: int, products: Products) -> None:
    """A sample grows token by token."""
    multiply(load(DEBUG, [f"--float8.recipe={recipe}", *ON_GPU]), MeshDegrees(replicate=1, shard=1), tokens=tokens)
    assert products.count == 7


UNTIED = ["--model.tied_embeddings=false", "--float8.exclude=k_proj"]
REFUSED: dict[str, list[str]] = {
    "tokens": [*ONE_ROW, "--batch.sequence_length=1000"],
    "tokens of two rows": ["--batch.sequence_length=500", "--batch.micro_batch_size=2"],
    "tokens of a context group": [*ONE_ROW, "--batch.sequence_length=1040", "--mesh.context=2"],
    "width": ["--model.width=136"],
    "feed-forward width": ["--model.feed_forward_width=1000"],
    "feed-forward width of a tensor group": ["--model.feed_forward_width=1040", "--mesh.tensor=2"],
    "heads": ["--model.head_width=20", "--model.heads=5", "--model.key_value_heads=5"],
    "key and value heads": ["--model.head_width=20", "--model.heads=8", "--model.key_value_heads=2"],
    "key and value heads of a tensor group": ["--model.head_width=8", "--model.key_value_heads=2", "--mesh.tensor=2"],
    "vocabulary": [*UNTIED, "--model.vocabulary=8200"],
    "vocabulary of a tensor group": [*UNTIED, "--model.vocabulary=8208", "--mesh.tensor=2"],
}
ACCEPTED: dict[str, list[str]] = {
    "tokens of four rows": ["--batch.sequence_length=500", "--batch.micro_batch_size=4"],
    "tokens of a context group": [*ONE_ROW, "--batch.sequence_length=1056", "--mesh.context=2"],
    "tokens of a tensor group": [*ONE_ROW, "--batch.sequence_length=1040", "--mesh.tensor=2"],
    "vocabulary of a head that is no float8": ["--model.tied_embeddings=false", "--model.vocabulary=8200"],
    "vocabulary of a tied head": ["--model.vocabulary=8200"],
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gpu_cannot_multiply_is_refused_before(case: str, recipe: str) -> None:
    written = [*REFUSED[case], f"--float8.recipe={recipe}", *ON_GPU]
    with pytest.raises(UserError, match="float8 needs"):
        load(DEBUG, written)
    unchecked = load(DEBUG, written, rules=False)
    with pytest.raises((RuntimeError, UserError), match=r"divisible by 16|multiples of 16"):
        multiply(unchecked, unchecked.mesh.fit(unchecked.mesh.tensor * unchecked.mesh.context))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("case", ACCEPTED)
def test_what_a_gpu_can_multiply_is_accepted(case: str, recipe: str, products: Products) -> None:
    checked = load(DEBUG, [*ACCEPTED[case], f"--float8.recipe={recipe}", *ON_GPU])
    multiply(checked, checked.mesh.fit(checked.mesh.tensor * checked.mesh.context))
    assert products.count == 3 * 7


def test_activations_that_are_gathered_in_float8_can_be_multiplied(products: Products) -> None:
    written = ["--float8.recipe=tensorwise", "--float8.gather_activations=true", "--mesh.tensor=2"]
    multiply(load(DEBUG, [*written, *ON_GPU]), MeshDegrees(replicate=1, shard=1, context=1, tensor=2))
    assert products.count == 3 * 7
