"""Every rule across fields: what triggers it, its message, and that its remedy works."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    AttentionConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    MeshDegrees,
)
from parallel.errors import UserError
from parallel.float8_limits import advice
from parallel.nodes import arrange
from recipes.checkpoint.config import CheckpointConfig
from recipes.data.config import BatchConfig, DataConfig
from recipes.evaluation.config import ValidationConfig
from recipes.files.lock import FolderLock
from recipes.metrics.config import MetricsConfig, ProfileConfig
from recipes.optimization.config import OptimizerConfig, ScheduleConfig
from recipes.recipe.load import load, to_toml
from recipes.recipe.rules import violations
from recipes.recipe.rules_mesh import Violation, require_fits_world
from recipes.recipe.schema import Recipe, RunConfig
from recipes.training.run_folder import (
    check_output_folder,
    claim_run_folder,
    identity_differences,
    require_same_data,
)
from recipes.weights.locate import InitialWeights


def violations_of(recipe: Recipe, *, processes: int | None = None, nodes: int | None = None) -> list[Violation]:
    weights = InitialWeights(recipe.model.weights, recipe.run.folder)
    return list(violations(recipe, weights, processes=processes, nodes=nodes))


def broken_by(recipe: Recipe, *, processes: int | None = None) -> dict[str, str]:
    """Dotted key -> message of every broken rule."""
    found = violations_of(recipe, processes=processes)
    assert len(dict(found)) == len(found)
    return dict(found)


def the_rule(recipe: Recipe, key: str, *, processes: int | None = None) -> str:
    """The message of the only broken rule."""
    found = broken_by(recipe, processes=processes)
    assert list(found) == [key]
    return found[key]


def test_the_default_recipe_breaks_no_rule() -> None:
    assert not broken_by(Recipe())
    assert not broken_by(Recipe(), processes=16)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torchao", "--float8.recipe=tensorwise --float8.emulate=true"),
        ("datasets", "--data.source=hf:allenai/c4:en"),
        ("safetensors", "--checkpoint.export_hf=true"),
        ("wandb", "--metrics.wandb=true"),
        ("tensorboard", "--metrics.tensorboard=true"),
    ],
)
def test_a_package_is_needed_only_by_the_recipe_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, package: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    load(Path("configs/smollm3_debug.toml"))
    with pytest.raises(UserError, match=f"needs the package {package}, which"):
        load(Path("configs/smollm3_debug.toml"), words.split())


@pytest.mark.parametrize(("every", "average", "saved"), [(20, 1, 10), (0, 2, 10), (20, 2, 0), (15, 2, 10)])
def test_an_average_without_a_checkpoint_of_every_validated_step_is_refused(
    every: int, average: int, saved: int
) -> None:
    checkpoint, validation = CheckpointConfig(every=saved), ValidationConfig(every=every, average=average)
    message = the_rule(Recipe(checkpoint=checkpoint, validation=validation), "validation.average")
    assert f"a checkpoint of every validated step (checkpoint.every = {saved}); write a multiple" in message
    assert f"instead of {every}, or average = 0" in message


def test_an_average_of_more_checkpoints_than_are_kept_is_refused() -> None:
    validation = ValidationConfig(every=20, average=3)
    recipe = Recipe(checkpoint=CheckpointConfig(every=10, keep=2), validation=validation)
    assert "needs as many checkpoints; write keep = 3 or more" in the_rule(recipe, "checkpoint.keep")
    for kept in ({"keep": 3}, {"keep_every": 10}):
        assert not broken_by(replace(recipe, checkpoint=replace(recipe.checkpoint, **kept)))


@pytest.mark.parametrize("name", ["a/b", "/a", ".", ".."])
def test_a_run_name_must_be_a_single_folder_name(name: str) -> None:
    assert 'write a name without "/"' in the_rule(Recipe(run=RunConfig(name=name)), "run.name")


def test_broken_rules_of_the_model_get_its_section() -> None:
    model = replace(SIZES["smollm3_debug"], head_width=33, no_rope_layers=(9,), heads=3)
    found = broken_by(Recipe(model=model))
    assert list(found) == ["model.key_value_heads", "model.head_width", "model.no_rope_layers"]
    assert found["model.key_value_heads"] == model.problems()[0][1]


def test_a_source_must_exist() -> None:
    assert "does not exist" in the_rule(Recipe(data=DataConfig(source="nowhere.txt")), "data.source")


def test_a_tokenizer_must_fit_the_vocabulary() -> None:
    assert "vocabulary" in the_rule(Recipe(data=DataConfig(tokenizer="train:5000")), "data.tokenizer")


def test_cudnn_attention_is_accepted_where_there_may_be_a_gpu() -> None:
    assert not broken_by(Recipe(attention=AttentionConfig(backend="cudnn")))


def test_cudnn_attention_is_refused_on_the_cpu() -> None:
    recipe = Recipe(run=RunConfig(device="cpu"), attention=AttentionConfig(backend="cudnn"))
    assert 'write "auto", "flash"' in the_rule(recipe, "attention.backend")


def test_a_backend_is_refused_with_document_masks() -> None:
    masked = Recipe(data=DataConfig(document_mask=True), attention=AttentionConfig(backend="flash"))
    assert "document_mask = true, which uses its own kernels" in the_rule(masked, "attention.backend")


FLASH3 = Recipe(attention=AttentionConfig("flash3"), fsdp=FSDPConfig(param_dtype="bfloat16"))


@pytest.mark.parametrize("masked", [False, True])
def test_flash3_is_accepted_where_there_may_be_a_gpu(masked: bool) -> None:
    assert not broken_by(replace(FLASH3, data=DataConfig(document_mask=masked)))


@pytest.mark.parametrize(("masked", "instead"), [(False, '"auto", "flash" or "math"'), (True, '"auto"')])
def test_flash3_is_refused_on_the_cpu(masked: bool, instead: str) -> None:
    recipe = replace(FLASH3, data=DataConfig(document_mask=masked), run=RunConfig(device="cpu"))
    message = the_rule(recipe, "attention.backend")
    assert message == f'needs CUDA, but run.device = "cpu"; write {instead}'


def test_flash3_is_refused_in_float32() -> None:
    recipe = replace(FLASH3, fsdp=FSDPConfig(param_dtype="float32"))
    assert 'write param_dtype = "bfloat16", or backend = "auto"' in the_rule(recipe, "fsdp.param_dtype")


@pytest.mark.parametrize(("backend", "device"), [("flash", "cuda"), ("cudnn", "cuda"), ("cudnn", "auto")])
def test_kernels_of_16_bits_are_refused_in_float32_on_a_gpu(backend: Any, device: Any) -> None:
    recipe = Recipe(
        run=RunConfig(device=device), attention=AttentionConfig(backend), fsdp=FSDPConfig(param_dtype="float32")
    )
    assert 'write param_dtype = "bfloat16", or backend = "auto"' in the_rule(recipe, "fsdp.param_dtype")
    assert not broken_by(replace(recipe, fsdp=FSDPConfig(param_dtype="bfloat16")))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_flash_in_float32_is_accepted_where_there_may_be_no_gpu(device: Any) -> None:
    recipe = Recipe(attention=AttentionConfig("flash"), fsdp=FSDPConfig(param_dtype="float32"))
    assert not broken_by(replace(recipe, run=RunConfig(device=device)))


@pytest.mark.parametrize("head_width", [36, 264])
def test_flash3_is_refused_for_heads_that_it_cannot_compute(head_width: int) -> None:
    recipe = replace(FLASH3, model=replace(SIZES["smollm3_debug"], head_width=head_width))
    assert "needs a multiple of 8 up to 256" in the_rule(recipe, "model.head_width")


def test_symmetric_memory_is_for_gpus_and_sums_in_float32() -> None:
    asked = FSDPConfig(symmetric_memory=True)
    assert not broken_by(Recipe(fsdp=asked))
    assert 'run.device = "cpu"' in the_rule(Recipe(fsdp=asked, run=RunConfig(device="cpu")), "fsdp.symmetric_memory")
    sent = replace(asked, reduce_dtype="bfloat16")
    assert 'reduce_dtype = "float32"' in the_rule(Recipe(fsdp=sent), "fsdp.symmetric_memory")


def test_every_source_of_a_mixture_must_exist(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    mixture = {str(tmp_path / "a.txt"): 1.0, "nowhere.txt": 1.0, "hf:": 1.0}
    found = violations_of(Recipe(data=DataConfig(mixture=mixture)))
    assert [key for key, _ in found] == ["data.mixture"] * 2
    assert "'nowhere.txt' does not exist" in found[0][1]


def test_a_share_of_a_mixture_must_not_be_tiny(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    mixture = {str(tmp_path / "a.txt"): 1.0, "python-stdlib": 0.00001}
    assert "less than 1 / 10000 of the tokens" in the_rule(Recipe(data=DataConfig(mixture=mixture)), "data.mixture")


@pytest.mark.parametrize("every", [0, 4])
def test_checkpoints_to_keep_must_be_among_those_saved(every: int) -> None:
    recipe = Recipe(checkpoint=CheckpointConfig(every=every, keep_every=10))
    assert f"a multiple of checkpoint.every = {every}" in the_rule(recipe, "checkpoint.keep_every")


def test_every_second_checkpoint_can_be_kept() -> None:
    assert not broken_by(Recipe(checkpoint=CheckpointConfig(every=5, keep_every=10)))


# Mesh


@pytest.mark.parametrize(
    ("mesh", "key", "message"),
    [
        (MeshConfig(shard=0), "mesh.shard", "a degree must be at least 1; write 1, or -1 for the rest"),
        (MeshConfig(replicate=0), "mesh.replicate", "a degree must be at least 1"),
        (MeshConfig(replicate=-1, shard=-1), "mesh", "only one can be the rest"),
    ],
)
def test_an_impossible_mesh_is_refused_for_any_number_of_processes(mesh: MeshConfig, key: str, message: str) -> None:
    assert message in the_rule(Recipe(mesh=mesh), key)
    assert message in broken_by(Recipe(mesh=mesh), processes=3)[key]


def test_written_degrees_must_multiply_to_the_processes() -> None:
    message = the_rule(Recipe(mesh=MeshConfig(replicate=2, shard=2)), "mesh", processes=8)
    assert "replicate 2 x shard 2 x context 1 x tensor 1 = 4 processes, but 8 were started; start 4" in message


def test_written_degrees_must_divide_the_processes() -> None:
    message = the_rule(Recipe(mesh=MeshConfig(replicate=3, shard=-1)), "mesh", processes=8)
    assert "8 / 3 is not an integer" in message


def test_the_rest_of_the_processes_becomes_the_sharding_degree() -> None:
    recipe = Recipe(mesh=MeshConfig(replicate=3, shard=-1), batch=BatchConfig(global_batch_size=9))
    assert not broken_by(recipe, processes=9)


INSIDE_NODES = Recipe(mesh=MeshConfig(shard="node"), batch=BatchConfig(global_batch_size=16))


def test_shards_inside_nodes_need_as_many_processes_on_each_node() -> None:
    recipe = INSIDE_NODES
    assert not broken_by(recipe) and not broken_by(recipe, processes=16)
    assert not violations_of(recipe, processes=16, nodes=4)
    [(key, message)] = violations_of(recipe, processes=16, nodes=3)
    assert key == "mesh.shard" and "16 processes cannot be divided equally among 3 nodes" in message


def test_shards_inside_nodes_divide_the_batch_over_all_processes() -> None:
    assert "1 x 6 data-parallel processes" in the_rule(INSIDE_NODES, "batch.global_batch_size", processes=6)


def test_copies_of_shards_inside_nodes_must_equal_the_nodes() -> None:
    twice = replace(INSIDE_NODES, mesh=MeshConfig(replicate=2, shard="node"))
    assert not broken_by(twice) and not broken_by(twice, processes=8)
    [(key, message)] = violations_of(twice, processes=8, nodes=4)
    assert key == "mesh.replicate" and "there are 4; omit replicate" in message


def test_shards_inside_nodes_name_the_nodes_that_differ() -> None:
    places = [("gpu-0", 0), ("gpu-0", 0), ("gpu-1", 1)]
    with pytest.raises(UserError, match="there are 1 on gpu-1 and 2 on gpu-0"):
        require_fits_world(MeshConfig(shard="node"), BatchConfig(), nodes=arrange(places))


def test_nodes_may_differ_for_shards_across_them() -> None:
    places = [("gpu-0", 0), ("gpu-0", 0), ("gpu-1", 1)]
    require_fits_world(MeshConfig(), BatchConfig(global_batch_size=3), nodes=arrange(places))


# Batch


@pytest.mark.parametrize(
    ("micro", "processes", "message"),
    [
        (3, None, "micro_batch_size = 3; write 15 or 18, or a micro_batch_size of 1, 2, 4 or 8"),
        (8, 4, "micro_batch_size 8 x 4 data-parallel processes = 32; write 32, or a micro_batch_size of 1, 2 or 4"),
        (1, 3, "micro_batch_size 1 x 3 data-parallel processes = 3; write 15 or 18"),
    ],
)
def test_a_batch_must_divide_into_micro_batches(micro: int, processes: int | None, message: str) -> None:
    recipe = Recipe(batch=BatchConfig(global_batch_size=16, micro_batch_size=micro))
    found = the_rule(recipe, "batch.global_batch_size", processes=processes)
    assert found == f"must be a multiple of {message}"


@pytest.mark.parametrize(("replicate", "shard"), [(3, 2), (6, -1), (-1, 6)])
def test_written_degrees_divide_the_batch_where_the_processes_are_unknown(replicate: int, shard: int) -> None:
    recipe = Recipe(batch=BatchConfig(global_batch_size=16), mesh=MeshConfig(replicate=replicate, shard=shard))
    message = the_rule(recipe, "batch.global_batch_size")
    assert "1 x 6 data-parallel processes = 6; write 12 or 18" in message


@pytest.mark.parametrize(("whole", "micro"), [(16, 1), (16, 2), (16, 4), (32, 8)])
def test_the_remedies_for_the_batch_work(whole: int, micro: int) -> None:
    assert not broken_by(Recipe(batch=BatchConfig(global_batch_size=whole, micro_batch_size=micro)), processes=4)


# Schedule


@pytest.mark.parametrize(
    ("schedule", "key", "message"),
    [
        (
            ScheduleConfig(kind="wsd", warmup_steps=60, decay_steps=50),
            "schedule.decay_steps",
            "warmup_steps 60 + decay_steps 50 = 110 must not exceed run.steps = 100; write steps = 110 or more",
        ),
        (
            ScheduleConfig(kind="constant", warmup_steps=101),
            "schedule.warmup_steps",
            "101 must not exceed run.steps = 100",
        ),
        (
            ScheduleConfig(kind="cosine", decay_steps=5),
            "schedule.decay_steps",
            'is for kind = "wsd" only, not "cosine"',
        ),
    ],
)
def test_a_schedule_must_fit_into_the_run(schedule: ScheduleConfig, key: str, message: str) -> None:
    assert message in the_rule(Recipe(schedule=schedule), key)


def test_bfloat16_moments_with_high_betas_are_refused() -> None:
    config = OptimizerConfig(state_dtype="bfloat16", betas=(0.9, 0.999))
    assert "betas of at most 0.99" in the_rule(Recipe(optimizer=config), "optimizer.state_dtype")


@pytest.mark.parametrize(("dtype", "beta"), [("bfloat16", 0.99), ("float32", 0.999)])
def test_moments_are_accepted_where_betas_move_them(dtype: Literal["bfloat16", "float32"], beta: float) -> None:
    assert not broken_by(Recipe(optimizer=OptimizerConfig(state_dtype=dtype, betas=(0.9, beta))))


@pytest.mark.parametrize(
    "field", [{"matrix_lr": 0.02}, {"momentum": 0.9}, {"lr_adjust": "original"}, {"nesterov": False}, {"ns_steps": 6}]
)
def test_fields_of_muon_are_refused_with_adamw(field: dict[str, Any]) -> None:
    [name] = field
    assert 'write name = "muon"' in the_rule(Recipe(optimizer=OptimizerConfig(**field)), f"optimizer.{name}")
    assert not broken_by(Recipe(optimizer=OptimizerConfig(name="muon", **field)))


def test_muon_is_refused_where_the_optimizer_runs_on_the_host() -> None:
    recipe = Recipe(optimizer=OptimizerConfig(name="muon"), fsdp=FSDPConfig(cpu_offload=True))
    assert 'write false, or name = "adamw"' in the_rule(recipe, "fsdp.cpu_offload")


def test_bfloat16_momentum_that_would_not_move_is_refused() -> None:
    config = OptimizerConfig(name="muon", state_dtype="bfloat16", momentum=0.995)
    assert "a momentum of at most 0.99" in the_rule(Recipe(optimizer=config), "optimizer.state_dtype")
    assert not broken_by(Recipe(optimizer=replace(config, momentum=0.99)))


def test_missing_file_that_calibrates_is_named_before_the_run(tmp_path: Path) -> None:
    missing = MetricsConfig(calibrated_by=str(tmp_path / "cpu.json"))
    assert "there is no such file" in the_rule(Recipe(metrics=missing), "metrics.calibrated_by")
    assert not broken_by(Recipe(metrics=replace(missing, calibrated_by=str(tmp_path))))


def test_the_run_must_reach_the_steps_to_trace() -> None:
    message = "after 10 + trace_steps 2 = 12 is beyond run.steps = 11; write run.steps = 12 or more, or trace earlier"
    assert message in the_rule(
        Recipe(run=RunConfig(steps=11), profile=ProfileConfig(trace_steps=2, after=10)), "profile.after"
    )


@pytest.mark.parametrize(("steps", "traced"), [(12, 2), (1, 0)])
def test_steps_to_trace_inside_the_run_are_accepted(steps: int, traced: int) -> None:
    recipe = Recipe(run=RunConfig(steps=steps), profile=ProfileConfig(trace_steps=traced, after=10))
    assert not broken_by(recipe)


def test_shares_of_the_run_that_exceed_it_are_refused() -> None:
    message = the_rule(Recipe(schedule=ScheduleConfig(warmup_steps=0.7, decay_steps=0.5)), "schedule.decay_steps")
    assert "warmup_steps 70 + decay_steps 50 = 120 must not exceed run.steps = 100" in message


def test_steps_that_the_message_names_are_enough_for_shares_of_the_run() -> None:
    schedule = ScheduleConfig(warmup_steps=0.7, decay_steps=60)
    message = the_rule(Recipe(schedule=schedule), "schedule.decay_steps")
    assert "write steps = 201 or more, or smaller shares" in message
    assert not broken_by(Recipe(run=RunConfig(steps=201), schedule=schedule))


def test_a_share_continues_a_run_that_had_its_steps() -> None:
    steps, share = (Recipe(schedule=ScheduleConfig(warmup_steps=warmup, decay_steps=20)) for warmup in (10, 0.1))
    assert identity_differences(steps, share) == identity_differences(share, steps) == []
    longer = replace(share, run=RunConfig(steps=400))
    assert identity_differences(steps, longer) == []
    other = Recipe(schedule=ScheduleConfig(warmup_steps=0.2, decay_steps=20))
    assert identity_differences(steps, other) == ["schedule.warmup_steps: 10 in the folder's recipe.toml, 0.2 now"]


def test_warmup_and_decay_may_fill_the_run() -> None:
    assert not broken_by(Recipe(schedule=ScheduleConfig(kind="wsd", warmup_steps=60, decay_steps=40)))


# Activation checkpointing


@pytest.mark.parametrize(("mode", "blocks"), [("none", "all"), ("full", "all"), ("full", 36), ("selective", 0.01)])
def test_any_part_of_the_blocks_may_recompute(mode: Any, blocks: Any) -> None:
    model = replace(SIZES["smollm3_debug"], layers=36)
    assert not broken_by(Recipe(model=model, activation_checkpointing=ActivationCheckpointingConfig(mode, blocks)))


@pytest.mark.parametrize(
    ("mode", "blocks", "message"),
    [
        ("none", 2, 'has no effect with mode = "none"; write mode = "selective" or "full", or blocks = "all"'),
        ("none", 1.0, 'has no effect with mode = "none"'),
        ("full", 5, 'exceeds the 4 blocks of the model; write at most 4, a share such as 0.5, or "all"'),
    ],
)
def test_blocks_that_cannot_recompute_are_refused(mode: Any, blocks: Any, message: str) -> None:
    recipe = Recipe(activation_checkpointing=ActivationCheckpointingConfig(mode, blocks))
    assert message in the_rule(recipe, "activation_checkpointing.blocks")


# Hardware


@pytest.mark.parametrize("hardware", ["8h100s", "0xh100", "x8h100", "8xtpu", "48x8x8h100", "_8xh100"])
def test_hardware_that_is_unknown_is_refused(hardware: str) -> None:
    found = the_rule(Recipe(run=RunConfig(hardware=hardware)), "run.hardware")
    assert 'write one such as "8xh100" or "48x8h100", with h100, h200' in found


@pytest.mark.parametrize("hardware", ["h100", "8xH100", "8h200", "48x8h100", "2x8xb200", "8xa100-40"])
def test_hardware_that_is_known_is_accepted(hardware: str) -> None:
    assert not broken_by(Recipe(run=RunConfig(hardware=hardware)))


# Float8


@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_float8_all_gather_without_tensorwise_scaling_is_refused(recipe: Literal["none", "rowwise"]) -> None:
    found = the_rule(Recipe(float8=Float8Config(recipe, all_gather=True)), "float8.all_gather")
    assert f'needs recipe = "tensorwise", not "{recipe}"; write all_gather = false' in found


GATHERED = Recipe(
    model=SIZES["smollm3_3b"],
    batch=BatchConfig(global_batch_size=48, micro_batch_size=1),
    float8=Float8Config("tensorwise", all_gather=True),
)


@pytest.mark.parametrize(
    ("mesh", "processes", "shards", "remedy"),
    [
        (MeshConfig(), 24, 24, "mesh.shard = 8 with mesh.replicate = -1, or "),
        (MeshConfig(context=3, context_by="gather"), None, 3, ""),
        (MeshConfig(replicate=4, shard=3, context=2), 24, 6, ""),
        (MeshConfig(shard=6, context=2, replicate=2), 24, 12, "mesh.shard = 2 with mesh.replicate = -1, or "),
    ],
)
def test_float8_all_gather_is_refused_where_processes_cannot_share_the_rows_of_a_matrix_equally(
    mesh: MeshConfig, processes: int | None, shards: int, remedy: str
) -> None:
    recipe = replace(GATHERED, mesh=mesh, batch=replace(GATHERED.batch, sequence_length=6144))
    found = the_rule(recipe, "float8.all_gather", processes=processes)
    assert found == f"{shards} processes cannot share the 2048 rows of q_proj equally; write {remedy}all_gather = false"
    assert not broken_by(replace(recipe, float8=Float8Config("tensorwise")), processes=processes)
    others = replace(recipe, float8=replace(recipe.float8, exclude=("attention", "down_proj", "lm_head")))
    assert "11008 rows of gate_proj" in the_rule(others, "float8.all_gather", processes=processes)
    if processes is not None:
        mesh = replace(mesh, shard=8 // mesh.context, replicate=-1)
        assert not broken_by(replace(recipe, mesh=mesh), processes=processes)


def test_float8_all_gather_with_tensorwise_scaling_is_accepted() -> None:
    assert not broken_by(Recipe(float8=Float8Config(recipe="tensorwise", all_gather=True)))


def test_autotuning_is_accepted_with_compilation() -> None:
    assert not broken_by(Recipe(compile=CompileConfig(enabled=True, autotune=True)))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("attention.backend", {"attention": AttentionConfig("cudnn")}),
        ("attention.backend", {"attention": AttentionConfig("flash3")}),
        ("compile.autotune", {"compile": CompileConfig(enabled=True, autotune=True)}),
        ("fsdp.symmetric_memory", {"fsdp": FSDPConfig(symmetric_memory=True)}),
        ("mesh.overlap_tensor", {"mesh": MeshConfig(tensor=2, overlap_tensor=True), "compile": CompileConfig(True)}),
    ],
)
def test_what_does_not_repeat_its_bits_is_refused_by_name(key: str, changes: dict[str, Any]) -> None:
    assert not broken_by(Recipe(**changes))
    assert "run.deterministic" in the_rule(Recipe(run=RunConfig(deterministic=True), **changes), key)
    kept = {"attention": AttentionConfig("flash"), "compile": CompileConfig(True), "mesh": MeshConfig(tensor=2)}
    assert not broken_by(Recipe(run=RunConfig(deterministic=True), **kept))  # type: ignore[arg-type]


def test_autotuning_is_refused_without_compilation() -> None:
    assert "write false, or enabled = true" in the_rule(
        Recipe(compile=CompileConfig(autotune=True)), "compile.autotune"
    )


SAMPLED = Recipe(run=RunConfig(steps=10), float8=Float8Config(recipe="rowwise", sample_every=10))


@pytest.mark.parametrize(
    "recipe", [SAMPLED, Recipe(float8=Float8Config(recipe="rowwise"), compile=CompileConfig(True))]
)
def test_float8_samples_and_compilation_are_accepted_alone(recipe: Recipe) -> None:
    assert not broken_by(recipe)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (replace(SAMPLED, compile=CompileConfig(True)), "which compile.enabled = true rules out"),
        (Recipe(float8=Float8Config(sample_every=10)), 'recipe = "none" makes none'),
        (replace(SAMPLED, run=RunConfig(steps=9)), "write at most 9"),
    ],
)
def test_float8_samples_are_refused_where_they_cannot_be_taken(recipe: Recipe, message: str) -> None:
    assert message in the_rule(recipe, "float8.sample_every")


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"width": 136}, "model.width", "width = 136 to be a multiple of 16; change it to 144"),
        ({"feed_forward_width": 1}, "model.feed_forward_width", "feed_forward_width = 1 to be a multiple of 16"),
        ({"heads": 3, "key_value_heads": 1, "head_width": 24}, "model.heads", "heads x head_width = 72"),
        (
            {"heads": 4, "key_value_heads": 1, "head_width": 24},
            "model.key_value_heads",
            "key_value_heads x head_width = 24",
        ),
    ],
)
def test_float8_refuses_widths_that_16_does_not_divide(changes: dict[str, Any], key: str, message: str) -> None:
    recipe = Recipe(model=replace(SIZES["smollm3_debug"], **changes), float8=Float8Config(recipe="rowwise"))
    assert message in broken_by(recipe)[key]
    assert not broken_by(replace(recipe, float8=Float8Config()))


@pytest.mark.parametrize(
    "changes", [{"heads": 6, "head_width": 24}, {"heads": 5, "key_value_heads": 1, "head_width": 32}]
)
def test_float8_accepts_heads_whose_products_16_divides(changes: dict[str, Any]) -> None:
    recipe = Recipe(model=replace(SIZES["smollm3_debug"], **changes), float8=Float8Config(recipe="rowwise"))
    assert not broken_by(recipe)


def test_float8_refuses_the_vocabulary_only_where_lm_head_is_converted() -> None:
    model = replace(SIZES["llama3_debug"], vocabulary=4100)
    recipe = Recipe(model=model, float8=Float8Config(recipe="tensorwise", exclude=()))
    assert "vocabulary, the width of lm_head, = 4100" in the_rule(recipe, "model.vocabulary")
    assert not broken_by(replace(recipe, float8=Float8Config(recipe="tensorwise")))
    assert not broken_by(replace(recipe, model=replace(model, tied_embeddings=True)))


@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_can_use_float8(name: str) -> None:
    exclude = ("lm_head", "experts") if SIZES[name].experts else ("lm_head",)
    assert not broken_by(Recipe(model=SIZES[name], float8=Float8Config(recipe="tensorwise", exclude=exclude)))


# Once the number of processes is known


def test_a_layout_that_fits_the_world_is_accepted() -> None:
    require_fits_world(MeshConfig(), BatchConfig(), nodes=arrange([("host", 0)] * 4))


def test_a_layout_that_does_not_fit_the_world_is_refused_with_everything_wrong() -> None:
    mesh, batch = MeshConfig(shard=2), BatchConfig(global_batch_size=15, micro_batch_size=2)
    with pytest.raises(UserError) as refusal:
        require_fits_world(mesh, batch, nodes=arrange([("host", 0)] * 4))
    assert str(refusal.value).startswith("2 problems in the recipe on 4 processes\n  mesh\n    replicate 1 x")
    assert "batch.global_batch_size" in str(refusal.value)


# The folder of a run


def named(output: Path, **sections: Any) -> Recipe:
    return replace(Recipe(), run=RunConfig(name="r", output=str(output)), **sections)


def begin(recipe: Recipe) -> None:
    """Write what a run leaves that ended before its first logged step."""
    folder = recipe.run.folder
    (folder / "checkpoints" / ".partial-00000001").mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe))
    for name in ("environment.json", "log.txt"):
        (folder / name).write_text("{}\n")
    (folder / "metrics.jsonl").touch()


def occupy(recipe: Recipe) -> None:
    """The same after one logged step."""
    begin(recipe)
    (recipe.run.folder / "metrics.jsonl").write_text('{"step": 1}\n')


def refusal_of(recipe: Recipe) -> str:
    with pytest.raises(UserError) as refusal:
        check_output_folder(recipe)
    return str(refusal.value)


def test_a_missing_or_empty_run_folder_is_accepted(tmp_path: Path) -> None:
    recipe = named(tmp_path)
    check_output_folder(recipe)
    recipe.run.folder.mkdir()
    check_output_folder(recipe)


def test_a_folder_without_results_may_go_to_another_recipe(tmp_path: Path) -> None:
    old = named(tmp_path)
    begin(old)
    check_output_folder(old)
    for sections in (
        {"optimizer": OptimizerConfig(lr=1e-3)},
        {"model": SIZES["llama3_debug"]},
        {"checkpoint": CheckpointConfig(resume="never")},
    ):
        check_output_folder(named(tmp_path, **sections))
    (old.run.folder / "recipe.toml").write_text("[run]\nold_key = 1\n")
    check_output_folder(old)


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoints/step-00000100"])
def test_each_kind_of_result_keeps_other_recipes_out(result: str, tmp_path: Path) -> None:
    old = named(tmp_path)
    begin(old)
    if result == "metrics.jsonl":
        (old.run.folder / result).write_text('{"step": 1, "lo')
    else:
        (old.run.folder / result).mkdir()
    check_output_folder(old)
    assert "belongs to a different recipe" in refusal_of(named(tmp_path, optimizer=OptimizerConfig(lr=1e-3)))
    assert "already holds this run" in refusal_of(named(tmp_path, checkpoint=CheckpointConfig(resume="never")))


def test_a_place_that_cannot_hold_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file, but the run's files go there" in refusal_of(
        replace(named(tmp_path), run=RunConfig(name="file", output=str(tmp_path)))
    )
    for below in ("file", "file/deeper"):
        message = refusal_of(named(tmp_path / below))
        assert message == (
            f'run.output = "{tmp_path / below}": {tmp_path / "file"} is no folder; write another run.output'
        )


def claim(recipe: Recipe, done: int) -> list[str]:
    lock = FolderLock()
    lock.take(recipe.run.folder, log=print)
    return claim_run_folder(recipe, done=done, environment={"done": done}, lock=lock)


def test_a_new_run_creates_its_folder(tmp_path: Path) -> None:
    recipe = named(tmp_path / "new")
    assert claim(recipe, 0) == []
    assert load(recipe.run.folder / "recipe.toml", rules=False) == recipe
    assert (recipe.run.folder / "environment.json").read_text() == '{\n  "done": 0\n}\n'


def test_results_without_a_checkpoint_are_set_aside(tmp_path: Path) -> None:
    recipe = named(tmp_path)
    for number in (1, 2):
        occupy(recipe)
        [note] = claim(recipe, 0)
        assert note.endswith(f"they are in {tmp_path}/r.{number} now")
        assert (tmp_path / f"r.{number}" / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert not (tmp_path / "r" / "metrics.jsonl").exists()
        shutil.rmtree(tmp_path / "r")


def test_a_recipe_that_changes_between_starts_is_kept(tmp_path: Path) -> None:
    old = named(tmp_path, schedule=ScheduleConfig(kind="wsd", decay_steps=50))
    occupy(old)
    assert claim(old, 100) == []  # finished: nothing to say, nothing to write
    other = replace(old, mesh=MeshConfig(shard=4))
    assert claim(other, 60) == []
    assert load(tmp_path / "r" / "recipe-until-00000060.toml", rules=False) == old
    assert load(tmp_path / "r" / "recipe.toml", rules=False) == other
    (tmp_path / "r" / "quarantine.jsonl").write_text("{}\n")
    assert claim(old, 100) == [] and (tmp_path / "r" / "quarantine.jsonl").exists()
    longer = replace(other, run=replace(other.run, steps=200))
    assert claim(longer, 80) == [
        "run.steps is 200 instead of 100: the learning rate of step 81 is 3.00e-04 instead of 1.20e-04"
    ]
    assert (tmp_path / "r" / "metrics.jsonl").exists()
    assert not (tmp_path / "r" / "quarantine.jsonl").exists()  # it was ahead of the run, and is written again


def test_extended_run_says_that_it_is_in_its_warm_up_again(tmp_path: Path) -> None:
    old = named(tmp_path, schedule=ScheduleConfig(kind="wsd", warmup_steps=0.2))
    occupy(old)
    (said,) = claim(replace(old, run=replace(old.run, steps=1000)), 100)
    assert said.endswith("instead of 3.00e-04; a share of the run, the warm-up lasts until step 200 now")


def test_a_recipe_that_took_no_step_does_not_replace_one_that_did(tmp_path: Path) -> None:
    first = named(tmp_path, schedule=ScheduleConfig(kind="constant"))
    occupy(first)
    for steps in (40_000, 133):
        claim(replace(first, run=replace(first.run, steps=steps)), 100)
    assert load(tmp_path / "r" / "recipe-until-00000100.toml", rules=False) == first


def test_a_linked_run_folder_stays_on_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "big"
    disk.mkdir()
    recipe = named(tmp_path)
    occupy(replace(recipe, run=replace(recipe.run, output=str(disk))))
    (tmp_path / "r").symlink_to(disk / "r")
    claim(recipe, 0)
    assert (tmp_path / "r").is_symlink()
    assert sorted(path.name for path in disk.iterdir()) == ["r", "r.1"]
    assert (disk / "r" / "recipe.toml").exists() and (disk / "r.1" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_reported_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: Not a directory; write another run\.output"):
        claim(named(tmp_path / "file"), 0)


def test_a_checkpoint_of_other_text_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    def facts(tokenizer: str, tokens: str) -> dict[str, Any]:
        return {"tokenizer": tokenizer, "sources": {"x.txt": {"tokens": tokens, "about": f"{tokens} files"}}}

    (tmp_path / "data.json").write_text(json.dumps(facts("a", "12")))
    require_same_data(tmp_path, facts("a", "12"))
    with pytest.raises(UserError, match="was trained on another tokenizer"):
        require_same_data(tmp_path, facts("x", "13"))
    with pytest.raises(UserError, match=r'was trained on other text behind "x.txt": 12 files then, 13 files now'):
        require_same_data(tmp_path, facts("a", "13"))
    now = facts("a", "12")
    now["sources"]["x.txt"] |= {"text": "t", "prepared": False}
    require_same_data(tmp_path, now)  # a checkpoint from before these were known
    (tmp_path / "data.json").write_text(json.dumps(now))
    require_same_data(tmp_path, now)
    changed = facts("x", "13")
    changed["sources"]["x.txt"] |= {"text": "u", "prepared": False}
    both = r'other text behind "x.txt": 12 files then, 13 files now; another tokenizer \(one of "train:N" changes'
    with pytest.raises(UserError, match=both):
        require_same_data(tmp_path, changed)
    prepared = facts("a", "12")
    prepared["sources"]["x.txt"] |= {"text": "t", "prepared": True}
    order = r'another order of "x.txt": text that is tokenized during training then, prepared shards now'
    with pytest.raises(UserError, match=order):
        require_same_data(tmp_path, prepared)
    for content in ("{", "[]", "{}", '{"sources": {"x.txt": [1]}}', "[" * 100_000):
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(UserError, match="cannot be read"):
            require_same_data(tmp_path, facts("a", "12"))


def test_a_tilde_in_run_output_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert RunConfig(name="r", output="~/runs").folder == Path("/somewhere/runs/r")


def test_a_run_may_continue_with_other_mesh_micro_batches_and_length(tmp_path: Path) -> None:
    occupy(named(tmp_path))
    other = named(
        tmp_path,
        mesh=MeshConfig(shard=4),
        batch=BatchConfig(micro_batch_size=2),
        metrics=MetricsConfig(every=3),
        data=DataConfig(cache="elsewhere"),
    )
    check_output_folder(replace(other, run=replace(other.run, steps=500)))


def test_another_recipe_is_refused_with_its_differences(tmp_path: Path) -> None:
    occupy(named(tmp_path))
    message = refusal_of(
        named(
            tmp_path,
            optimizer=OptimizerConfig(lr=1e-3),
            model=SIZES["llama3_debug"],
            schedule=ScheduleConfig(kind="linear"),
        )
    )
    assert f"{tmp_path}/r belongs to a different recipe:\n" in message
    assert "\n  optimizer.lr: 0.0003 in the folder's recipe.toml, 0.001 now\n" in message
    assert '\n  model.name: "smollm3_debug" in the folder\'s recipe.toml, "llama3_debug" now\n' in message
    assert '\n  schedule.kind: "wsd" in' in message
    assert message.endswith("give this run another name (--run.name OTHER), or put these keys back")


def test_only_the_fields_that_identify_a_run_count_as_differences() -> None:
    old = Recipe()
    new = Recipe(
        run=RunConfig(seed=1),
        data=DataConfig(source="a", text_field="b", tokenizer="train:300", bos=True, validation_fraction=0.5),
        batch=BatchConfig(sequence_length=1, global_batch_size=1),
    )
    assert [line.split(":")[0] for line in identity_differences(old, new)] == [
        "run.seed",
        "data.source",
        "data.text_field",
        "data.tokenizer",
        "data.bos",
        "data.validation_fraction",
        "batch.sequence_length",
        "batch.global_batch_size",
    ]
    assert identity_differences(old, old) == []
    mixed, turned = (replace(old, data=DataConfig(mixture=mixture)) for mixture in ({"a": 1, "b": 1}, {"b": 1, "a": 1}))
    (line,) = identity_differences(mixed, turned)
    assert line.startswith("data.mixture: the sources are in a different order: {")
    assert identity_differences(mixed, mixed) == []


def test_resume_never_refuses_a_folder_with_a_run(tmp_path: Path) -> None:
    recipe = named(tmp_path, checkpoint=CheckpointConfig(resume="never"))
    check_output_folder(recipe)
    occupy(recipe)
    message = refusal_of(recipe)
    assert "already holds this run" in message and "--run.name" in message and 'checkpoint.resume = "auto"' in message


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    recipe = named(tmp_path)
    recipe.run.folder.mkdir()
    (recipe.run.folder / "thesis.tex").touch()
    assert "is not empty and has no recipe.toml, so it is not a run folder; give this run" in refusal_of(recipe)


def test_a_file_in_place_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    recipe = named(tmp_path)
    recipe.run.folder.touch()
    assert "is a file" in refusal_of(recipe)


def test_a_recipe_that_no_longer_loads_is_refused(tmp_path: Path) -> None:
    recipe = named(tmp_path)
    occupy(recipe)
    (recipe.run.folder / "recipe.toml").write_text('[model]\nname = "smollm3_debug"\n[run]\nold_key = 1\n')
    message = refusal_of(recipe)
    assert "was written with another version of the recipe schema" in message and "run.old_key" in message


def test_recipes_are_compared_even_if_the_old_data_is_gone(tmp_path: Path) -> None:
    occupy(named(tmp_path, data=DataConfig(source="gone.txt")))
    assert 'data.source: "gone.txt" in' in refusal_of(named(tmp_path))


@pytest.mark.parametrize(
    ("mesh", "model", "length", "key", "message"),
    [
        (
            MeshConfig(tensor=3),
            {},
            64,
            "mesh.tensor",
            "3 processes cannot share model.key_value_heads = 2 equally; write 1 or 2",
        ),
        (MeshConfig(context=8), {}, 64, "mesh.context", '4 heads equally; write 1, 2 or 4, or context_by = "gather"'),
        (MeshConfig(tensor=2, context=4), {}, 64, "mesh.context", "4 processes cannot share 2 heads per tensor rank"),
        (
            MeshConfig(context=2, tensor=2),
            {},
            66,
            "batch.sequence_length",
            "must be a multiple of mesh.context 2 x mesh.tensor 2 = 4; write 68",
        ),
        (
            MeshConfig(context=2, tensor=2, context_by="gather"),
            {},
            68,
            "batch.sequence_length",
            "must be a multiple of 2 x mesh.context 2 x mesh.tensor 2 = 8; write 72",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(
    mesh: MeshConfig, model: dict[str, int], length: int, key: str, message: str
) -> None:
    shape = {
        "heads": 4,
        "key_value_heads": 2,
        "head_width": 16,
        "width": 64,
        "feed_forward_width": 96,
        "vocabulary": 512,
    }
    config = replace(Recipe().model, **shape | model)
    recipe = Recipe(mesh=mesh, model=config, batch=BatchConfig(sequence_length=length))
    assert message in broken_by(recipe)[key]


def test_tensor_groups_across_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="groups of 4 neighbouring processes would cross nodes: a has 2 of them"):
        require_fits_world(
            MeshConfig(tensor=4), BatchConfig(global_batch_size=8), nodes=arrange([("a", 0)] * 2 + [("b", 1)] * 2)
        )


@pytest.mark.parametrize("field", [{"all_gather": True}, {"sample_every": 2}])
def test_what_float8_cannot_do_with_tensor_parallelism_is_refused(field: dict[str, Any]) -> None:
    recipe = Recipe(mesh=MeshConfig(tensor=2), float8=Float8Config(recipe="tensorwise", emulate=True, **field))
    assert f"float8.{next(iter(field))}" in broken_by(recipe)


def test_float8_needs_parts_of_matrices_that_are_multiples_of_16() -> None:
    config = replace(Recipe().model, heads=4, key_value_heads=2, head_width=8, feed_forward_width=96)
    recipe = Recipe(mesh=MeshConfig(tensor=2), model=config, float8=Float8Config(recipe="tensorwise", emulate=True))
    assert "key_value_heads x head_width 16 / 2 is not" in broken_by(recipe)["mesh.tensor"]


def test_a_head_in_float8_needs_parts_of_the_vocabulary_that_are_multiples_of_16() -> None:
    untied = replace(Recipe().model, tied_embeddings=False, vocabulary=4112)
    float8 = Float8Config(recipe="tensorwise", emulate=True, exclude=())
    message = broken_by(Recipe(mesh=MeshConfig(tensor=2), model=untied, float8=float8))["mesh.tensor"]
    assert "model.vocabulary 4112 / 2 is not; write 1, or model.vocabulary = 4128" in message
    kept = replace(float8, exclude=("lm_head",))
    assert not broken_by(Recipe(mesh=MeshConfig(tensor=2), model=untied, float8=kept))
    padded = replace(untied, vocabulary=4128)
    assert not broken_by(Recipe(mesh=MeshConfig(tensor=2), model=padded, float8=float8))


@pytest.mark.parametrize(
    ("batch", "context", "length"),
    [
        (BatchConfig(sequence_length=250, micro_batch_size=4), 1, 252),
        (BatchConfig(sequence_length=120, micro_batch_size=2), 1, None),
        (BatchConfig(sequence_length=144, micro_batch_size=1), 2, 160),
        (BatchConfig(sequence_length=33, micro_batch_size=1), 2, 64),
    ],
)
def test_float8_needs_a_multiple_of_16_tokens_on_every_process(
    batch: BatchConfig, context: int, length: int | None
) -> None:
    recipe = Recipe(batch=batch, mesh=MeshConfig(context=context), float8=Float8Config(recipe="tensorwise"))
    if length is None:
        assert not broken_by(recipe)
        return
    assert f"; write {length}" in broken_by(recipe)["batch.sequence_length"]
    assert not broken_by(replace(recipe, batch=replace(batch, sequence_length=length)))


def test_tensor_groups_across_nodes_are_refused_before_the_nodes_are_there() -> None:
    model = replace(Recipe().model, heads=12, key_value_heads=12, head_width=8, feed_forward_width=96, vocabulary=4800)
    recipe = Recipe(mesh=MeshConfig(tensor=6), model=model, batch=BatchConfig(192, 24))
    ((key, message),) = violations_of(recipe, processes=12, nodes=3)
    assert key == "mesh.tensor"
    assert message.endswith("cross nodes: node 0 has 4 of them; write 1, 2 or 4")
    assert not violations_of(recipe, processes=12, nodes=2)
    assert not violations_of(recipe, processes=12)


def test_large_numbers_are_refused_as_quickly_as_small_ones() -> None:
    for mesh in (MeshConfig(tensor=10**12), MeshConfig(context=10**12)):
        assert broken_by(Recipe(mesh=mesh, batch=BatchConfig(sequence_length=64)))
    batch = BatchConfig(global_batch_size=10**15 + 1, micro_batch_size=10**13)
    assert "or a micro_batch_size of " in broken_by(Recipe(batch=batch))["batch.global_batch_size"]


def a_recipe_of_any_layout(choose: random.Random) -> Recipe:
    shared = choose.choice([1, 2, 3, 4, 5, 8, 12])
    model = replace(
        SIZES[choose.choice(["smollm3_debug", "llama3_debug"])],
        key_value_heads=shared,
        heads=shared * choose.choice([1, 2, 3, 4, 7]),
        head_width=choose.choice([8, 16, 32]),
        feed_forward_width=choose.choice([96, 384, 768, 1000, 1536, 4800]),
        vocabulary=choose.choice([512, 4096, 4112, 4800, 32000, 49152, 50257, 128256]),
    )
    mesh = MeshConfig(
        shard=choose.choice([-1, -1, -1, 1, 2, "node"]),
        context=choose.randint(1, 9),
        tensor=choose.randint(1, 12),
        context_by=choose.choice(["heads", "gather"]),
    )
    float8 = Float8Config(
        recipe=choose.choice(["none", "tensorwise", "rowwise"]), exclude=choose.choice([(), ("lm_head",)])
    )
    batch = BatchConfig(choose.randint(1, 300), choose.randint(1, 40), choose.randint(1, 5))
    return Recipe(model=model, mesh=mesh, float8=float8, batch=batch)


def test_every_value_that_a_refused_layout_proposes_is_accepted() -> None:
    """Of one key after the other. What a degree changes for others, such as the batch, they report next."""
    choose, tried = random.Random(15), Counter[str]()
    for _ in range(1500):
        recipe = a_recipe_of_any_layout(choose)
        nodes = choose.choice([1, 1, 2, 3])
        world: dict[str, Any] = choose.choice(
            [{}, {"processes": nodes * choose.choice([1, 2, 4, 6, 8]), "nodes": nodes}]
        )

        def found(recipe: Recipe, world: dict[str, Any] = world) -> dict[str, str]:
            refused = list(violations(recipe, InitialWeights("", recipe.run.folder), broken={"data"}, **world))
            assert len(dict(refused)) == len(refused)
            return dict(refused)

        for key, message in found(recipe).items():
            if key not in ("mesh.tensor", "mesh.context", "batch.sequence_length", "batch.global_batch_size"):
                continue
            section, _, field = key.partition(".")
            listing = re.search(r"; write ((?:\d+|, | or )+)", message)
            assert listing, message
            proposals = [(section, field, int(value)) for value in re.findall(r"\d+", listing[1])]
            if padded := re.search(r"model.vocabulary = (\d+), with", message):
                proposals.append(("model", "vocabulary", int(padded[1])))
            if sizes := re.search(r"a micro_batch_size of (.*)", message):
                proposals += [("batch", "micro_batch_size", int(value)) for value in re.findall(r"\d+", sizes[1])]
            if 'or context_by = "gather"' in message:
                proposals.append(("mesh", "context_by", "gather"))
            for section, name, value in proposals:
                changed = replace(recipe, **{section: replace(getattr(recipe, section), **{name: value})})
                assert key not in found(changed) or (name == "vocabulary" and message != found(changed)[key]), (
                    recipe, world, message, value, found(changed)[key],
                )  # fmt: skip
                tried[f"{section}.{name}"] += 1
    assert min(tried[key] for key in ("mesh.tensor", "mesh.context", "mesh.context_by", "model.vocabulary")) > 20
    assert min(tried[f"batch.{name}"] for name in ("sequence_length", "global_batch_size", "micro_batch_size")) > 50


def test_gathered_keys_need_a_kernel_for_fewer_queries_than_keys() -> None:
    mesh = MeshConfig(context=2, context_by="gather")
    recipe = Recipe(mesh=mesh, attention=AttentionConfig(backend="cudnn"))
    assert 'write "auto" or "flash"' in broken_by(recipe)["attention.backend"]
    for other in ("auto", "flash", "math"):
        assert "attention.backend" not in broken_by(Recipe(mesh=mesh, attention=AttentionConfig(backend=other)))


@pytest.mark.parametrize(
    ("tensor", "compiled", "device", "message"),
    [
        (1, True, "cuda", "has no effect with mesh.tensor = 1"),
        (2, False, "auto", "compile.enabled = false; write false, or compile.enabled = true"),
        (2, True, "cpu", 'needs CUDA, but run.device = "cpu"; write false'),
    ],
)
def test_tensor_messages_overlap_products_only_in_compiled_code_for_gpus(
    tensor: int, compiled: bool, device: Literal["auto", "cpu", "cuda"], message: str
) -> None:
    mesh = MeshConfig(tensor=tensor, overlap_tensor=True)
    recipe = Recipe(mesh=mesh, compile=CompileConfig(compiled), run=RunConfig(device=device))
    assert message in the_rule(recipe, "mesh.overlap_tensor")


def test_overlap_in_compiled_code_for_gpus_is_accepted() -> None:
    mesh = MeshConfig(tensor=2, overlap_tensor=True)
    assert not broken_by(Recipe(mesh=mesh, compile=CompileConfig(True), run=RunConfig(device="cuda")))


@pytest.mark.parametrize(
    ("tensor", "recipe", "message"),
    [
        (2, "rowwise", 'needs recipe = "tensorwise", not "rowwise"'),
        (2, "none", 'needs recipe = "tensorwise", not "none"'),
        (1, "tensorwise", "has no effect with mesh.tensor = 1"),
    ],
)
def test_float8_gathers_of_activations_need_tensorwise_scales_and_tensor_parallelism(
    tensor: int, recipe: Literal["none", "tensorwise", "rowwise"], message: str
) -> None:
    float8 = Float8Config(recipe=recipe, gather_activations=True)
    assert message in the_rule(Recipe(mesh=MeshConfig(tensor=tensor), float8=float8), "float8.gather_activations")


def test_float8_gathers_of_activations_are_accepted_where_they_are_emulated() -> None:
    float8 = Float8Config(recipe="tensorwise", gather_activations=True, emulate=True)
    assert not broken_by(Recipe(mesh=MeshConfig(tensor=2), float8=float8, run=RunConfig(device="cpu")))


def test_row_wise_float8_with_tensor_parallelism_is_warned_about() -> None:
    [line] = advice(MeshConfig(tensor=2), float8=Float8Config(recipe="rowwise"))
    assert line.startswith('warning: float8.recipe = "rowwise"') and 'write recipe = "tensorwise"' in line
    assert not advice(MeshConfig(tensor=1), float8=Float8Config(recipe="rowwise"))
    assert not advice(MeshConfig(tensor=2), float8=Float8Config(recipe="tensorwise"))


@pytest.mark.parametrize("degrees", [MeshDegrees(replicate=1, shard=1), MeshDegrees(replicate=4, shard=1)])
def test_a_run_that_gathers_no_weights_says_so_of_the_float8_gather(degrees: MeshDegrees) -> None:
    float8 = Float8Config(recipe="tensorwise", all_gather=True)
    [line] = advice(MeshConfig(), float8=float8, degrees=degrees)
    assert line.startswith("note: float8.all_gather = true gathers nothing here")
    assert not advice(MeshConfig(), float8=float8)  # the number of processes is not known yet
    assert not advice(MeshConfig(), float8=float8, degrees=MeshDegrees(replicate=1, shard=2))
    assert not advice(MeshConfig(), float8=float8, degrees=MeshDegrees(replicate=1, shard=1, context=2))
