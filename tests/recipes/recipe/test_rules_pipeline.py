"""Every rule about the stages of a pipeline: what triggers it, its message, and that its remedy works."""

import random
import re
from dataclasses import replace
from typing import Any, cast

import pytest

from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    PipelineConfig,
)
from recipes.data.config import BatchConfig
from recipes.recipe.load import load
from recipes.recipe.rules import violations
from recipes.recipe.rules_pipeline import backward_can_split
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import stages_of
from recipes.weights.locate import InitialWeights
from tests.training import DEBUG

ZERO2 = FSDPConfig(reshard_after_forward=False)
ZERO_BUBBLE = ("zbv", "interleaved_zero_bubble")


def broken_by(recipe: Recipe, *, processes: int | None = None, nodes: int | None = None) -> dict[str, str]:
    """Dotted key -> message of every broken rule."""
    weights = InitialWeights("", recipe.run.folder)
    found = [*violations(recipe, weights, broken={"data"}, processes=processes, nodes=nodes)]
    assert len(dict(found)) == len(found)
    return dict(found)


def piped(schedule: str = "1f1b", *, degree: int = 2, **sections: Any) -> Recipe:
    """A recipe of 4 blocks and 16 micro-batches of one row."""
    pipeline = PipelineConfig(schedule=cast(Any, schedule))
    batch = BatchConfig(global_batch_size=16, micro_batch_size=1)
    mesh = MeshConfig(pipeline=degree)
    return replace(Recipe(mesh=mesh, pipeline=pipeline, batch=batch, fsdp=ZERO2), **sections)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", *ZERO_BUBBLE])
@pytest.mark.parametrize("processes", [None, 2, 8])
def test_every_schedule_is_accepted_for_known_and_unknown_processes(schedule: str, processes: int | None) -> None:
    assert not broken_by(piped(schedule), processes=processes)
    assert not broken_by(piped(schedule, mesh=MeshConfig(2, 2, pipeline=2, context=2)))
    assert not broken_by(piped(schedule, mesh=MeshConfig(2, "node", pipeline=2)))
    assert not broken_by(piped(schedule, mesh=MeshConfig(shard="node", pipeline=2)), processes=8, nodes=4)


@pytest.mark.parametrize(
    ("pipeline", "degree", "key", "message"),
    [
        (
            PipelineConfig(stages_per_rank=2),
            2,
            "pipeline.stages_per_rank",
            '"1f1b" has one stage on each process; write 1, or schedule = "interleaved"',
        ),
        (
            PipelineConfig("gpipe", stages_per_rank=3),
            2,
            "pipeline.stages_per_rank",
            '"gpipe" has one stage on each process; write 1, or schedule = "interleaved"',
        ),
        (
            PipelineConfig("zbv", stages_per_rank=3),
            2,
            "pipeline.stages_per_rank",
            '"zbv" has two stages on each process; write 2',
        ),
        (
            PipelineConfig("interleaved", stages_per_rank=1),
            2,
            "pipeline.stages_per_rank",
            '"interleaved" needs several stages on each process; write 2 or more, or schedule = "1f1b"',
        ),
        (PipelineConfig(), 5, "mesh.pipeline", "4 blocks cannot be 5 stages; write 4 or less"),
        (PipelineConfig("interleaved"), 3, "mesh.pipeline", "4 blocks cannot be 3 x 2 stages; write 2 or less"),
        (
            PipelineConfig(split=(1, 1, 2)),
            2,
            "pipeline.split",
            "must be 2 numbers of 1 or more that add up to model.layers = 4, not 3 that add up to 4; [] balances them",
        ),
        (PipelineConfig(split=(1, 2)), 2, "pipeline.split", "not 2 that add up to 3; [] balances them"),
        (PipelineConfig(split=(0, 4)), 2, "pipeline.split", "must be 2 numbers of 1 or more"),
    ],
)
def test_stages_that_the_model_or_the_schedule_cannot_have_are_refused(
    pipeline: PipelineConfig, degree: int, key: str, message: str
) -> None:
    found = broken_by(piped(degree=degree, pipeline=pipeline))
    assert list(found) == [key] and message in found[key]


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        ({"fsdp": FSDPConfig()}, "fsdp.reshard_after_forward", "frees weights that {} still needs for their gradients"),
        (
            {"compile": CompileConfig(enabled=True)},
            "compile.enabled",
            "{} cannot split the backward pass of compiled blocks",
        ),
        (
            {"activation_checkpointing": ActivationCheckpointingConfig("selective")},
            "activation_checkpointing.mode",
            '"selective" recomputes blocks once, but {} needs that twice; write "none" or "full"',
        ),
    ],
)
def test_what_loses_gradients_where_those_of_weights_come_later_is_refused(
    schedule: str, sections: dict[str, Any], key: str, message: str
) -> None:
    found = broken_by(piped(schedule, **sections))
    assert list(found) == [key]
    assert message.format(f'pipeline.schedule = "{schedule}"') in found[key]
    assert found[key].endswith(', or schedule = "interleaved"')
    assert not broken_by(piped("interleaved", **sections))


@pytest.mark.parametrize(
    ("schedule", "degree", "rows", "message"),
    [
        (
            "1f1b",
            4,
            3,
            "is 3 micro-batches for each data-parallel process, but mesh.pipeline 4 needs 4 or more; write 4",
        ),
        ("zbv", 2, 1, "but mesh.pipeline 2 needs 2 or more; write 2 or more"),
        ("interleaved", 2, 5, 'which "interleaved" cannot divide into 2 equal rounds; write 4 or 6'),
        ("interleaved_zero_bubble", 2, 7, 'which "interleaved_zero_bubble" cannot divide into 3 equal rounds; write 6'),
    ],
)
def test_too_few_micro_batches_and_unequal_rounds_are_refused(
    schedule: str, degree: int, rows: int, message: str
) -> None:
    found = broken_by(piped(schedule, degree=degree, batch=BatchConfig(global_batch_size=rows, micro_batch_size=1)))
    assert list(found) == ["batch.global_batch_size"] and message in found["batch.global_batch_size"]


def test_sizes_of_batches_that_a_refusal_proposes_are_accepted() -> None:
    choose = random.Random(40)
    model, tried = replace(SIZES["smollm3_debug"], layers=24), 0
    for _ in range(300):
        schedule, degree = choose.choice(["1f1b", "interleaved", *ZERO_BUBBLE]), choose.randint(2, 8)
        batch = BatchConfig(global_batch_size=choose.randint(1, 80), micro_batch_size=choose.randint(1, 3))
        recipe = piped(schedule, degree=degree, batch=batch, model=model)
        processes = choose.choice([None, degree, 2 * degree])
        message = broken_by(recipe, processes=processes).get("batch.global_batch_size", "")
        for size in re.findall(r"\d+", message.partition("; write ")[2].partition(", or a micro")[0]):
            other = replace(recipe, batch=replace(batch, global_batch_size=int(size)))
            found = broken_by(other, processes=processes).get("batch.global_batch_size", "")
            assert not found or "micro_batch_size" in message, (message, found)  # sizes that divide may be too few
            tried += not found
    assert tried > 100


def test_a_model_of_transformers_is_not_cut_into_stages() -> None:
    recipe = load(DEBUG.with_name("gpt2_debug.toml"), rules=False)
    found = broken_by(replace(recipe, mesh=MeshConfig(pipeline=2)))
    assert "cannot be cut into stages, only our own decoder can; write 1" in found["mesh.pipeline"]


def test_float8_is_not_sampled_over_stages() -> None:
    recipe = piped(float8=Float8Config("tensorwise", emulate=True, sample_every=2))
    assert broken_by(recipe) == {"float8.sample_every": "does not work with mesh.pipeline > 1 yet; write 0"}


def test_a_mesh_that_does_not_fit_the_processes_is_refused() -> None:
    rest = broken_by(piped(), processes=3)
    assert "3 / 2 is not an integer; start a multiple of 2 processes" in rest["mesh"]
    nodes = broken_by(piped(mesh=MeshConfig(shard="node", pipeline=2)), processes=6, nodes=3)
    assert "3 nodes cannot be divided equally among the stages of pipeline 2" in nodes["mesh.shard"]
    replicas = broken_by(piped(mesh=MeshConfig(2, "node", pipeline=2)), processes=8, nodes=2)
    assert 'shard = "node" makes one replica per 2 nodes' in replicas["mesh.replicate"]


def test_a_micro_batch_is_shared_by_all_stages() -> None:
    degrees = MeshConfig(pipeline=2, shard=2, tensor=2).fit(8)
    batch = BatchConfig(global_batch_size=16, micro_batch_size=1)
    assert batch.divided(degrees) == "2 x 8 micro-batches of 1, each shared by 4 processes"


def test_without_a_pipeline_its_section_is_not_judged() -> None:
    unread = PipelineConfig("zbv", stages_per_rank=3, split=(7,))
    assert not broken_by(piped(degree=1, pipeline=unread, fsdp=FSDPConfig(), compile=CompileConfig(enabled=True)))


def test_a_stage_of_a_run_may_have_a_pipeline_of_its_own() -> None:
    own = ["--stages.web.mesh.pipeline", "4", "--stages.web.pipeline.split", "1", "1", "1", "1"]
    words = ["--mesh.pipeline", "2", "--pipeline.split", "3", "1", *own]
    recipe = load(DEBUG.with_name("smollm3_debug_stages.toml"), words)
    assert [stage.recipe.pipeline.split for stage in stages_of(recipe)] == [(1, 1, 1, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_zero_bubble_on_an_older_torch_is_refused(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.recipe.rules_experts.version", lambda _: "2.11.0+cpu")
    recipe = replace(Recipe(), pipeline=replace(PipelineConfig(), schedule=schedule), fsdp=ZERO2)
    said = f'"{schedule}" needs torch 2.12 or later, and this is 2.11.0+cpu; write "interleaved"'
    assert ("pipeline.schedule", said) in [*backward_can_split(recipe)]
