"""The predicted memory of models of transformers, against real steps on the CPU whose storages are counted."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.encoder_decoder import EncoderDecoderInputs
from parallel.dist import start, stop
from recipes.metrics.clock import RunClock
from recipes.optimization.skip_steps import StepGuard
from recipes.plan.memory import predict
from recipes.plan.tracked import CPU, LiveBytes, fullest_moment
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from recipes.training.step import train_step
from tests.families import family_config
from tests.live_bytes import moments_of
from tests.processes import run_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
DEBUG = [
    "--run.device=cpu",
    "--compile.enabled=false",
    "--batch.sequence_length=64",
    "--batch.micro_batch_size=2",
    "--batch.global_batch_size=4",
]
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2, bf16": (1, ("--fsdp.param_dtype=bfloat16", "--batch.loss_chunks=4", "--batch.global_batch_size=8")),
    "gemma2": (1, ("--optimizer.state_dtype=bfloat16", "--optimizer.grad_clip=0")),
    "t5": (
        1,
        (
            "--data.answer_length=16",
            "--activation_checkpointing.mode=selective",
        ),
    ),
    "gpt2, full": (2, ("--activation_checkpointing.mode=full", "--batch.global_batch_size=16")),
    "qwen3": (2, ("--fsdp.reshard_after_forward=false", "--batch.global_batch_size=8")),
    "t5_gated": (2, ("--data.answer_length=16", "--activation_checkpointing.mode=full", "--fsdp.param_dtype=bfloat16")),
}
"""A family -> processes, and what the recipe asks for."""


def recipe_of(case: str) -> Recipe:
    recipe = load(ROOT / "configs/smollm3_debug.toml", [*DEBUG, *CASES[case][1]], rules=False)
    return replace(recipe, model=family_config(case.partition(",")[0], vocab_size=512))


def counted_peaks(cases: list[str]) -> dict[str, int]:
    """The most bytes that live at once in a step with values, for each of CASES."""
    world = start("cpu", seed=0)
    found = {}
    gc.disable()
    for case in cases:
        recipe = recipe_of(case)
        built = build(recipe, world)
        live, guard = LiveBytes(), StepGuard(built.mesh, device=CPU, max_skipped_steps=10)
        batches = micro_batches(recipe, built.mesh.degrees.data_parallel)
        live.follow(*built.parameters, *built.model.buffers(), *moments_of(built))
        for part in batches[0]:
            live.follow(*(vars(part).values() if isinstance(part, EncoderDecoderInputs) else [part]))
        peaks = []
        for step in range(1, 5):
            gc.collect()  # and not in the middle of a step: as training does
            live.restart()
            with live:
                train_step(built, batches, step=step, learning_rate=1e-3, guard=guard, clock=RunClock(CPU))
            peaks.append(live.peak)
        found[case] = min(peaks[1:])
    stop()
    return found


def micro_batches(recipe: Recipe, ranks: int) -> list[Any]:
    """Of one process: rows of text, or pairs for an encoder-decoder model."""
    batch = recipe.batch
    tokens = torch.ones(batch.micro_batch_size, batch.sequence_length, dtype=torch.int64)
    inputs, targets = tokens, tokens.clone()
    if recipe.model.is_encoder_decoder:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[0, -1] = False  # transformers makes no mask that hides nothing
        targets = torch.ones(batch.micro_batch_size, recipe.data.answer_length, dtype=torch.int64)
        inputs = EncoderDecoderInputs(tokens, mask, targets.clone())
    return [(inputs, targets, None)] * (batch.global_batch_size // ranks // batch.micro_batch_size)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_tracked_peak_is_that_of_real_steps(processes: int) -> None:
    cases, predicted = [case for case, (number, _) in CASES.items() if number == processes], {}
    for case in cases:
        recipe = recipe_of(case)
        predicted[case] = sum(fullest_moment(recipe, recipe.mesh.fit(processes))[1].values())
    longer = 0.001 if processes == 1 else 0.05  # gloo's thread may hold a buffer for longer
    for counted in run_processes(processes, counted_peaks, cases):
        more = {case: counted[case] / peak - 1 for case, peak in predicted.items()}
        assert all(-0.001 < share < longer for share in more.values()), more


@pytest.mark.parametrize(("mode", "chunks"), [("none", 1), ("full", 8)])
def test_a_llama_of_transformers_needs_what_the_formula_of_our_decoder_predicts(mode: str, chunks: int) -> None:
    changes = [
        f"--activation_checkpointing.mode={mode}",
        f"--batch.loss_chunks={chunks}",
        "--batch.sequence_length=256",
    ]
    recipe = load(ROOT / "configs/smollm3_debug.toml", [*DEBUG, "--batch.global_batch_size=16", *changes], rules=False)
    shape = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32, "vocab_size": 512}
    theirs = family_config("qwen3", model_type="llama", tie_word_embeddings=True, **shape)
    ours = ModelConfig("from_config", 6, 128, 512, 4, 2, 32, 512, True, 1e-6, 1e4)
    degrees = recipe.mesh.fit(8)
    tracked, formula = (predict(replace(recipe, model=model), degrees, context=False) for model in (theirs, ours))
    assert tracked.peak == pytest.approx(formula.peak, rel=5e-3)
    assert tracked.fullest.partition("block")[0].removesuffix("model.layers.4") in formula.fullest
