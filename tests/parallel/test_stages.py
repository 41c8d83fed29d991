"""Which blocks each stage has, and which process has each stage."""

from itertools import combinations

import pytest

from models.config import ModelConfig
from models.sizes import SIZES
from parallel.config import PipelineConfig
from parallel.stages import Stages, stages_of


def stages(model: ModelConfig, degree: int, config: PipelineConfig | None = None) -> Stages:
    return stages_of(model, config or PipelineConfig(), degree=degree, sequence_length=4096)


def costs(model: ModelConfig, lengths: tuple[int, ...]) -> list[float]:
    """FLOPs of a token in each stage, worked out anew: the output projection ends the last one."""
    head = 6 * model.vocabulary * model.width
    block = (model.flops_per_token(4096, "causal") - head) / model.layers
    return [length * block + head * (stage == len(lengths) - 1) for stage, length in enumerate(lengths)]


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("name", SIZES)
def test_the_fullest_stage_of_a_balanced_model_costs_the_least_that_is_possible(name: str, degree: int) -> None:
    model = SIZES[name]
    lengths = tuple(map(len, stages(model, degree).layers))
    assert sum(lengths) == model.layers
    borders = combinations(range(1, model.layers), degree - 1)
    splits = (tuple(b - a for a, b in zip((0, *cuts), (*cuts, model.layers), strict=True)) for cuts in borders)
    assert max(costs(model, lengths)) == min(max(costs(model, split)) for split in splits)


@pytest.mark.parametrize(
    ("name", "degree", "expected"),
    [
        ("llama3_405b", 16, (7, *[8] * 14, 7)),
        ("llama3_8b", 4, (8, 9, 9, 6)),
        ("smollm3_3b", 2, (20, 16)),
        ("llama3_1b", 4, (5, 5, 5, 1)),
        ("smollm3_debug", 4, (1, 1, 1, 1)),
    ],
)
def test_balanced_splits_give_the_stage_with_the_output_projection_fewer_blocks(
    name: str, degree: int, expected: tuple[int, ...]
) -> None:
    assert tuple(map(len, stages(SIZES[name], degree).layers)) == expected


@pytest.mark.parametrize(
    ("config", "owners", "text"),
    [
        (PipelineConfig(), (0, 1), "blocks 0-1 | 2-3"),
        (PipelineConfig(schedule="gpipe", split=(3, 1)), (0, 1), "blocks 0-2 | 3"),
        (PipelineConfig(schedule="interleaved", split=(1, 1, 1, 1)), (0, 1, 0, 1), "blocks 0+2 | 1+3"),
        (PipelineConfig(schedule="interleaved_zero_bubble", split=(1, 1, 1, 1)), (0, 1, 0, 1), "blocks 0+2 | 1+3"),
        (PipelineConfig(schedule="zbv", split=(1, 1, 1, 1)), (0, 1, 1, 0), "blocks 0+3 | 1+2"),
    ],
)
def test_a_schedule_says_which_process_has_which_blocks(
    config: PipelineConfig, owners: tuple[int, ...], text: str
) -> None:
    found = stages(SIZES["smollm3_debug"], 2, config)
    assert (found.owners, str(found)) == (owners, text)
    assert found.ends == (owners[0], owners[-1])
    for rank in range(2):
        assert found.of(rank) == tuple(stage for stage, owner in enumerate(owners) if owner == rank)
        assert found.layers_of(rank) == tuple(layer for stage in found.of(rank) for layer in found.layers[stage])


def test_three_stages_of_a_process_come_in_turns() -> None:
    found = stages(SIZES["llama2_7b"], 2, PipelineConfig(schedule="interleaved", stages_per_rank=3))
    assert found.owners == (0, 1, 0, 1, 0, 1)
    assert sorted(found.layers_of(0) + found.layers_of(1)) == list(range(32))
