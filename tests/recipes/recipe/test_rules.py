"""Every rule across fields: what triggers it, its message, and that its remedy works."""

import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from models.sizes import SIZES
from parallel.config import (
    AttentionConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    MeshDegrees,
    PipelineConfig,
)
from parallel.errors import UserError
from parallel.float8_limits import advice
from parallel.nodes import arrange
from recipes.checkpoint.config import CheckpointConfig
from recipes.data.config import BatchConfig, DataConfig
from recipes.files.lock import FolderLock
from recipes.metrics.config import MetricsConfig
from recipes.optimization.config import OptimizerConfig, ScheduleConfig
from recipes.recipe.conflicts import CONFLICTS
from recipes.recipe.load import CONFIGS, load, to_toml
from recipes.recipe.rules import violations
from recipes.recipe.rules_mesh import require_fits_world
from recipes.recipe.rules_tasks import require_row
from recipes.recipe.schema import Recipe, RunConfig
from recipes.recipe.stages import stages_of
from recipes.training.run_folder import check_output_folder, claim_run_folder
from recipes.training.same_run import identity_differences, require_same_data
from recipes.weights.locate import InitialWeights

DEBUG = CONFIGS / "smollm3_debug.toml"
CASES: dict[str, list[str]] = {}
"""What is written after a recipe (the debug recipe, if none is named) -> the problems it has; none: it is accepted."""
for _line in Path(__file__).with_name("rules.txt").read_text().splitlines():
    if _line.startswith(" "):
        CASES[next(reversed(CASES))].append(_line.strip())
    else:
        CASES[_line] = []


def problems_of(case: str) -> list[str]:
    """What is wrong with a recipe, in sorted lines of "field: message"."""
    words, path, options = case.split(), DEBUG, {}
    while words and not words[0].startswith("--"):
        name, _, number = words.pop(0).partition("=")
        path = CONFIGS.parent / name if name.endswith(".toml") else path
        options |= {"p": {"processes": int(number or 0)}, "n": {"nodes": int(number or 0)}}.get(name, {})
        options |= {"elsewhere": True} if name == "away" else {}
    try:
        load(path, words, **options)
    except UserError as error:
        _, *problems = re.split(r"\n  (?=\S)", str(error))
        parts = (re.fullmatch(r"(\S+)(?:(?: = .*)?   \(.*?\)|)\n(.*)", problem, re.DOTALL) for problem in problems)
        return sorted(f"{part[1]}: {' '.join(part[2].split())}" for part in parts if part)
    return []


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_is_refused_with_everything_wrong_and_what_to_write_instead_or_accepted(case: str) -> None:
    assert problems_of(case) == sorted(CASES[case])


def test_every_row_of_the_table_has_a_recorded_refusal() -> None:
    recorded = "\n".join(problem for problems in CASES.values() for problem in problems)
    for key, _, says in CONFLICTS:
        pattern = ".*".join(map(re.escape, re.split(r"\{.*?\}", f"{key}: {says}")))
        by_config_and_weights = says.startswith("has no effect with model.weights")  # see test_transformers_recipes.py
        of_parts = '"{model.attention}"' in says  # see tests/models/test_parts.py
        assert re.search(f"^{pattern}$", recorded, re.MULTILINE) or by_config_and_weights or of_parts, says


def test_a_rule_that_reads_a_wrong_value_is_skipped_and_no_other() -> None:
    recipe = Recipe(attention=AttentionConfig("flash"), data=DataConfig(document_mask=True), mesh=MeshConfig(tensor=3))
    assert {"attention.backend", "mesh.tensor"} <= broken_by(recipe).keys()
    for wrong, known in (("data.document_mask", "mesh.tensor"), ("mesh", "attention.backend")):
        assert broken_by(recipe, broken={wrong}).keys() & {"attention.backend", "mesh.tensor"} == {known}
    assert "attention.backend" in broken_by(recipe, broken={"data.source", "model.layers"})
    assert "attention.backend" not in broken_by(recipe, broken={"data.prompt_field"})  # which data.has_pairs reads


@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_can_use_float8(name: str) -> None:
    exclude = ("lm_head", "experts") if SIZES[name].experts else ("lm_head",)
    assert not broken_by(Recipe(model=SIZES[name], float8=Float8Config(recipe="tensorwise", exclude=exclude)))


def broken_by(recipe: Recipe, *, processes: int | None = None, broken: Collection[str] = ()) -> dict[str, str]:
    """Dotted key -> message of every broken rule."""
    weights = InitialWeights(recipe.model.weights, recipe.run.folder)
    found = [*violations(recipe, weights, processes=processes, broken=broken)]
    assert len(dict(found)) == len(found)
    return dict(found)


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
    load(DEBUG)
    with pytest.raises(UserError, match=f"needs the package {package}, which"):
        load(DEBUG, words.split())


def test_shards_inside_nodes_name_the_nodes_that_differ() -> None:
    places = [("gpu-0", 0), ("gpu-0", 0), ("gpu-1", 1)]
    with pytest.raises(UserError, match="there are 1 on gpu-1 and 2 on gpu-0"):
        require_fits_world(MeshConfig(shard="node"), BatchConfig(), nodes=arrange(places))


def test_nodes_may_differ_for_shards_across_them() -> None:
    places = [("gpu-0", 0), ("gpu-0", 0), ("gpu-1", 1)]
    require_fits_world(MeshConfig(), BatchConfig(global_batch_size=3), nodes=arrange(places))


def test_a_share_continues_a_run_that_had_its_steps() -> None:
    steps, share = (Recipe(schedule=ScheduleConfig(warmup_steps=warmup, decay_steps=20)) for warmup in (10, 0.1))
    assert identity_differences(steps, share) == identity_differences(share, steps) == []
    longer = replace(share, run=RunConfig(steps=400))
    assert identity_differences(steps, longer) == []
    other = Recipe(schedule=ScheduleConfig(warmup_steps=0.2, decay_steps=20))
    assert identity_differences(steps, other) == ["schedule.warmup_steps: 10 in the folder's recipe.toml, 0.2 now"]


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
    found = broken_by(recipe, processes=processes)["float8.all_gather"]
    assert found == f"{shards} processes cannot share the 2048 rows of q_proj equally; write {remedy}all_gather = false"
    assert not broken_by(replace(recipe, float8=Float8Config("tensorwise")), processes=processes)
    others = replace(recipe, float8=replace(recipe.float8, exclude=("attention", "down_proj", "lm_head")))
    assert "11008 rows of gate_proj" in broken_by(others, processes=processes)["float8.all_gather"]
    if processes is not None:
        mesh = replace(mesh, shard=8 // mesh.context, replicate=-1)
        assert not broken_by(replace(recipe, mesh=mesh), processes=processes)


# Once the number of processes is known


def test_a_layout_that_fits_the_world_is_accepted() -> None:
    require_fits_world(MeshConfig(), BatchConfig(), nodes=arrange([("host", 0)] * 4))


def test_a_layout_that_does_not_fit_the_world_is_refused_with_everything_wrong() -> None:
    mesh, batch = MeshConfig(shard=2), BatchConfig(global_batch_size=15, micro_batch_size=2)
    with pytest.raises(UserError) as refusal:
        require_fits_world(mesh, batch, nodes=arrange([("host", 0)] * 4))
    assert str(refusal.value).startswith("2 problems in the recipe on 4 processes\n  mesh\n    replicate 1 x")
    assert "batch.global_batch_size" in str(refusal.value)


# Pipelines and experts

ZERO2 = FSDPConfig(reshard_after_forward=False)
ZERO_BUBBLE = ("zbv", "interleaved_zero_bubble")


def piped(schedule: str = "1f1b", *, degree: int = 2, **sections: Any) -> Recipe:
    """A recipe of 4 blocks and 16 micro-batches of one row."""
    pipeline = PipelineConfig(schedule=cast(Any, schedule))
    batch = BatchConfig(global_batch_size=16, micro_batch_size=1)
    mesh = MeshConfig(pipeline=degree)
    return replace(Recipe(mesh=mesh, pipeline=pipeline, batch=batch, fsdp=ZERO2), **sections)


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


def test_a_micro_batch_is_shared_by_all_stages() -> None:
    degrees = MeshConfig(pipeline=2, shard=2, tensor=2).fit(8)
    batch = BatchConfig(global_batch_size=16, micro_batch_size=1)
    assert batch.divided(degrees) == "2 x 8 micro-batches of 1, each shared by 4 processes"


def test_a_stage_of_a_run_may_have_a_pipeline_of_its_own() -> None:
    own = ["--stages.web.mesh.pipeline", "4", "--stages.web.pipeline.split", "1", "1", "1", "1"]
    words = ["--mesh.pipeline", "2", "--pipeline.split", "3", "1", *own]
    recipe = load(DEBUG.with_name("smollm3_debug_stages.toml"), words)
    assert [stage.recipe.pipeline.split for stage in stages_of(recipe)] == [(1, 1, 1, 1), (3, 1), (3, 1)]


def test_an_older_torch_is_refused_where_it_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.recipe.rules_axes.version", lambda _: "2.11.0+cpu")
    old = "needs torch 2.12 or later, and this is 2.11.0+cpu; write"
    for schedule in ZERO_BUBBLE:
        assert broken_by(piped(schedule))["pipeline.schedule"] == f'"{schedule}" {old} "interleaved"'
    moe, words = str(DEBUG.with_name("moe_debug.toml")), "--mesh.expert=2"
    assert problems_of(f"{moe} p=2 {words}") == [f"mesh.expert: in a model with experts {old} 1"]
    assert not problems_of(f"{moe} p=2 --fsdp.reduce_dtype=bfloat16")


def test_a_dense_recipe_may_leave_what_its_size_says_of_experts(tmp_path: Path) -> None:
    dense = load(CONFIGS / "moe_debug.toml", ["--model.experts=0"])
    assert dense.model.experts_per_token == 2
    resolved = tmp_path / "recipe.toml"
    resolved.write_text(to_toml(dense))
    assert load(resolved) == dense


# Scores of tasks


@pytest.mark.parametrize(
    ("keep_best", "message"),
    [
        ("max:validation_task/x/acc", ""),
        ("min:validation_task/x/unknown", ""),
        ("min:validation_task/x/acc", "higher values are better; write 'max:validation_task/x/acc'"),
        ("max:validation_task/y/acc", 'the tasks have "validation_task/x/acc" or "validation_task/x/unknown"'),
    ],
)
def test_score_that_the_tasks_do_not_have_is_refused(keep_best: str, message: str) -> None:
    scores = {"x/acc": True, "x/unknown": None}
    with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext():
        require_row(keep_best, scores)


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
    assert message.endswith("give this run another name: --run.name r-2, or put these keys back")


def test_an_automatic_name_is_that_of_the_file_with_a_number_if_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> str:
        return load(CONFIGS / "llama3_debug.toml", ["--run.name", "auto", "--run.output", str(tmp_path)]).run.name

    assert name() == "llama3_debug"
    for folder in ("llama3_debug", "llama3_debug-2"):
        (tmp_path / folder).mkdir()
    assert name() == "llama3_debug-3"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert name() == "llama3_debug-7"


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


def test_tensor_groups_across_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="groups of 4 neighbouring processes would cross nodes: a has 2 of them"):
        require_fits_world(
            MeshConfig(tensor=4), BatchConfig(global_batch_size=8), nodes=arrange([("a", 0)] * 2 + [("b", 1)] * 2)
        )


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
