"""A run of our trainer against a plain loop over transformers' model and torch's AdamW: the same losses, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests.training import DEBUG, change, training

pytestmark = pytest.mark.slow

STEPS, WARMUP, DECAY = 20, 5, 6
PEAK = 3e-3
BATCH, LENGTH = 8, 64  # sequences, tokens
CLIP = 0.5
TOLERANCE = 1e-5  # relative, of every step's loss and gradient norm
SHARED = {
    "vocab_size": 520,  # a little more than the tokenizer has
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # With the usual 0.02, rows of the embedding can come close to zero at this learning rate. The first norm divides by
    # their size, so the gradient then depends on the order of rounded sums: gaps of 4e-5 in its norm.
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def their_model(family: str) -> Any:
    """The same random weights at every call."""
    torch.manual_seed(0)
    if family == "smollm3":  # tied
        return SmolLM3ForCausalLM(SmolLM3Config(**SHARED, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1]))
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaled, "original_max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**SHARED, num_hidden_layers=3, rope_parameters=rope))


def both_curves(family: str, recipe: Recipe) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(loss, gradient norm) of each step: ours, theirs."""
    import json

    from models.hf import hf_name
    from models.hf_reading import config_from_hf
    from parallel.dist import start, stop

    theirs = their_model(family)
    recipe = replace(recipe, model=config_from_hf(theirs.config.to_dict()))
    world = start("cpu", seed=0)
    with training(recipe, world) as trainer:
        weights = dict(theirs.named_parameters())
        with torch.no_grad():
            for name, parameter in trainer.built.model.named_parameters():
                parameter.to_local().copy_(weights.pop(hf_name(name)))
        assert not weights
        assert trainer.run() == 0
    rows = [json.loads(line) for line in (trainer.recipe.run.folder / "metrics.jsonl").read_text().splitlines()]
    ours = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    # Only the batches come from the trainer; tests/recipes/data checks which tokens they hold.
    sequences = trainer.loader.training.sequences
    batches = [torch.from_numpy(sequences.rows(step * BATCH, BATCH)) for step in range(STEPS)]
    stop()
    return ours, their_curve(theirs, batches)


def their_curve(model: Any, batches: list[torch.Tensor]) -> list[tuple[float, float]]:
    """A plain training loop: whole batches, no accumulation."""
    decayed = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    rest = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed_tokens" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    curve = []
    for step, rows in enumerate(batches):
        share = min(1.0, (step + 1) / WARMUP, (STEPS - step) / DECAY)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * share
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


@pytest.mark.parametrize("family", ["smollm3", "llama"])
def test_twenty_steps_equal_a_plain_loop_over_transformers(family: str, corpus: Path, tmp_path: Path) -> None:
    """With accumulation, clipping, warm-up, decay, and weight decay on the matrices alone."""
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": family, "steps": STEPS, "output": str(tmp_path / "runs")},
        "data": {"source": str(corpus), "tokenizer": "train:512", "cache": str(tmp_path / "cache")}
        | {"validation_fraction": 0.05},
        "batch": {"sequence_length": LENGTH, "global_batch_size": BATCH, "micro_batch_size": 2},
        "optimizer": {"lr": PEAK, "weight_decay": 0.1, "grad_clip": CLIP, "betas": (0.9, 0.95), "eps": 1e-8},
        "schedule": {"kind": "wsd", "warmup_steps": WARMUP, "decay_steps": DECAY, "min_lr_ratio": 0.0},
        "fsdp": {"param_dtype": "float32", "reduce_dtype": "float32"},
        "checkpoint": {"every": 0},
        "metrics": {"every": 1},
        "validation": {"every": 0, "sample_tokens": 0},
    }
    recipe = change(load(DEBUG), **changes)
    ours, theirs = both_curves(family, recipe)
    assert len(ours) == len(theirs) == STEPS
    gaps = [abs(a - b) / b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    assert theirs[-1][0] < theirs[0][0] - 0.7  # it learned, so the later steps depend on the earlier ones
    norms = [norm for _, norm in theirs]
    assert min(norms) < CLIP < max(norms)  # some are clipped, some are not
    assert max(gaps) < TOLERANCE
