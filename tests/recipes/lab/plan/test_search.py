"""The search for the fastest recipe, against brute force and against the real --check."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from parallel.config import ActivationCheckpointingConfig, MeshConfig
from parallel.errors import UserError
from recipes.lab.plan.plan import Asked, Plan, World, plan, world_of
from recipes.lab.plan.result import SearchResult, search, write_fastest
from recipes.lab.plan.search import GRAIN, KINDS, SLOWEST, TIE, kind_of, peak
from recipes.lab.plan.search_space import CHUNKS, PREFETCH, SEARCHED, SHARES, Meshed, Space, changes, tuned
from recipes.plan.hardware import GPUS, Gpu
from recipes.plan.memory import FULL
from recipes.plan.rates import RATES
from recipes.recipe.conflicts import unread
from recipes.recipe.fields import value_of
from recipes.recipe.load import load, to_toml
from recipes.recipe.rules import violations
from recipes.recipe.schema import Recipe
from recipes.weights.locate import InitialWeights
from tests.training import change

ROOT = Path(__file__).resolve().parents[4]
DEBUG = ROOT / "configs" / "smollm3_debug.toml"
SMOLLM = ROOT / "configs" / "smollm3_3b_8xh100.toml"
LLAMA = ROOT / "configs" / "llama3_70b_32x8h100.toml"
QWEN = ROOT / "configs" / "qwen3_30b_a3b_16x8h100.toml"


def gpu_with(gigabytes: float, *, per_node: int = 8) -> Gpu:
    return replace(GPUS["H100"], memory=round(gigabytes * 1e9), per_node=per_node)


def searched(recipe: Recipe, processes: int, nodes: int, gpu: Gpu, *fixed: str, numerics: bool = False) -> SearchResult:
    world = World(
        replace(gpu, per_node=max(gpu.per_node, processes) if nodes == 1 else processes // nodes), processes, nodes
    )
    return search(recipe, world, numerics=numerics, fixed=frozenset(fixed))


def accepted(recipe: Recipe, processes: int, nodes: int) -> bool:
    """Whether the rules of --check do, but for those about the data."""
    weights = InitialWeights("", recipe.run.folder)
    return not any(violations(recipe, weights, processes=processes, nodes=nodes, broken={"data"}))


def layouts(recipe: Recipe, processes: int, nodes: int, fixed: tuple[str, ...]) -> Iterator[Recipe]:
    """Every mesh and micro-batch."""
    degrees = range(1, processes + 1)
    contexts = [1] if "mesh.context" in fixed else degrees
    tensors = [1] if "mesh.tensor" in fixed else degrees
    for replicate, shard, context, tensor in product(degrees, degrees, contexts, tensors):
        if replicate * shard * context * tensor != processes:
            continue
        lent = [degree for degree in degrees if shard * context * tensor % degree == recipe.model.experts % degree == 0]
        experts = lent if recipe.model.experts else [1]
        micro_batches = range(1, recipe.batch.global_batch_size + 1)
        for by, micro, expert in product(("heads", "gather"), micro_batches, experts):
            mesh = MeshConfig(replicate, shard, context, tensor, context_by=by, expert=expert)
            candidate = replace(recipe, mesh=mesh, batch=replace(recipe.batch, micro_batch_size=micro))
            if (context > 1 or by == "heads") and accepted(candidate, processes, nodes):
                yield candidate


def all_plans(recipe: Recipe, processes: int, nodes: int, gpu: Gpu, fixed: tuple[str, ...]) -> Iterator[Plan]:
    """Of everything that the search may choose and that fits."""
    ways = [ActivationCheckpointingConfig()]
    ways += [ActivationCheckpointingConfig(mode, blocks) for mode in ("selective", "full") for blocks in SHARES]
    stages = [recipe.fsdp.reshard_after_forward] if "fsdp.reshard_after_forward" in fixed else [True, False]
    tunings = [*product(CHUNKS, PREFETCH)]
    if "batch.loss_chunks" in fixed:
        tunings = [(recipe.batch.loss_chunks, ahead) for ahead in PREFETCH]
    if "fsdp.prefetch" in fixed:
        tunings = [*dict.fromkeys((chunks, recipe.fsdp.prefetch) for chunks, _ in tunings)]
    for layout in layouts(recipe, processes, nodes, fixed):
        for way, reshard in product(ways, stages):
            fsdp = replace(layout.fsdp, reshard_after_forward=reshard)
            setting = replace(layout, activation_checkpointing=way, fsdp=fsdp)
            for tuning in tunings:
                candidate = plan(tuned(setting, tuning), World(gpu, processes))
                if candidate.fits:
                    yield candidate


FEW = ("batch.loss_chunks", "fsdp.prefetch")
CASES = {
    "HSDP": (SMOLLM, ["--batch.global_batch_size=16"], 8, 2, 14.0, ("mesh.context", "mesh.tensor")),
    "tensor": (
        LLAMA,
        ["--batch.global_batch_size=4", "--batch.micro_batch_size=1", "--mesh.tensor=1"],
        4,
        1,
        36.0,
        FEW,
    ),
    "context": (
        *(SMOLLM, ["--batch.global_batch_size=4", "--batch.sequence_length=32768", "--compile.enabled=false"]),
        *(4, 1, 30.0, ("mesh.tensor", "fsdp.reshard_after_forward", "fsdp.prefetch")),
    ),
    "experts": (QWEN, ["--batch.global_batch_size=8"], 4, 2, 30.0, ("mesh.context", "mesh.tensor", *FEW)),
}
"""Recipe, changes, processes, nodes, GB, what is fixed."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_search_finds_what_brute_force_finds(case: str) -> None:
    path, arguments, processes, nodes, memory, fixed = CASES[case]
    recipe = load(path, ["--model.layers=4", *arguments], rules=False)
    gpu = gpu_with(memory, per_node=processes // nodes)
    found = searched(recipe, processes, nodes, gpu, *fixed)
    every = list(all_plans(recipe, processes, nodes, gpu, fixed))
    assert found.best is not None
    assert found.looked.too_large > 0 and found.best.fits
    fastest: dict[object, float] = {}
    for candidate in sorted(every, key=lambda candidate: candidate.time.step_seconds):
        fastest.setdefault(kind_of(candidate.recipe, candidate.degrees), candidate.time.step_seconds)
    best = [found.best, *found.others]
    assert len(best) == min(KINDS, len(fastest))
    for here, (kind, seconds) in zip(best, fastest.items(), strict=False):
        assert seconds <= here.time.step_seconds <= TIE * seconds, f"{kind_of(here.recipe, here.degrees)}, not {kind}"
    for candidate in every:  # to the grain of the front, twice: what was left out, and beside what it was left out
        if candidate.time.step_seconds <= SLOWEST * found.best.time.step_seconds:
            enough = candidate.memory.peak + 2 * GRAIN * gpu.memory
            no_slower = [at for at in found.looked.front if at.seconds <= TIE * candidate.time.step_seconds]
            assert any(at.peak <= enough for at in no_slower), candidate


def test_a_loss_that_is_faster_in_chunks_is_computed_in_chunks() -> None:
    recipe = load(DEBUG, ["--compile.enabled=false", "--batch.loss_chunks=1"])
    rates = replace(RATES, loss_chunked=RATES.loss / 2)
    best = search(recipe, World(GPUS["H100"], 2, rates=rates)).best
    assert best is not None and best.recipe.batch.loss_chunks > 1


def test_no_more_blocks_recompute_than_must() -> None:
    recipe, gpu = load(SMOLLM, ["--model.layers=20", "--activation_checkpointing.mode=full"], rules=False), gpu_with(29)
    found = searched(recipe, 8, 1, gpu, "activation_checkpointing.mode", "mesh.tensor", "mesh.context")
    assert found.best is not None
    way = found.best.recipe.activation_checkpointing
    blocks = len(way.recomputed(20))
    assert 1 < blocks < 20 and 2 * blocks % 5, "not a share that is tried anyway"
    for chunks in CHUNKS:
        fewer = change(
            found.best.recipe, activation_checkpointing={"blocks": blocks - 1}, batch={"loss_chunks": chunks}
        )
        assert not plan(fewer, World(gpu, 8)).fits


def test_of_an_odd_number_of_blocks_just_over_half_can_recompute() -> None:
    recipe = load(SMOLLM, ["--model.layers=9", "--activation_checkpointing.mode=full"], rules=False)
    fixed = ("mesh.tensor", "mesh.context", "batch.micro_batch_size", "activation_checkpointing.mode")
    recipe = change(recipe, activation_checkpointing={"blocks": "all"}, batch={"loss_chunks": 16})
    degrees = recipe.mesh.fit(8)
    needs = [peak(change(recipe, activation_checkpointing={"blocks": count}), degrees) for count in (4, 5)]
    assert needs[0] > needs[1]
    found = searched(recipe, 8, 1, gpu_with((needs[1] + 1) / FULL / 1e9), "fsdp.reshard_after_forward", *fixed)
    assert found.best is not None and len(found.best.recipe.activation_checkpointing.recomputed(9)) == 5


def test_the_front_only_gets_slower_and_leaner() -> None:
    found = searched(load(DEBUG), 4, 1, gpu_with(4))
    assert len(found.looked.front) > 1
    for one, next_one in zip(found.looked.front, found.looked.front[1:], strict=False):
        assert one.seconds < next_one.seconds and one.peak > next_one.peak
    assert [speed for _, speed, _ in found.points()] == sorted((speed for _, speed, _ in found.points()), reverse=True)


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments, "--check"], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.slow
def test_check_accepts_the_recipe_that_is_written_and_finds_what_the_screen_says(tmp_path: Path) -> None:
    recipe = load(DEBUG, ["--batch.global_batch_size=48", "--mesh.overlap_tensor=false"])
    found = searched(recipe, 8, 2, gpu_with(2.5))
    file = tmp_path / "fast.toml"
    write_fastest(found, file, base=DEBUG)
    checked = check(file, "--processes", "8", "--nodes", "2")
    assert checked.returncode == 0, checked.stderr
    assert found.best is not None
    assert load(file, processes=8, nodes=2) == change(found.best.recipe, run={"name": "fast", "hardware": "2x4h100"})
    assert f"on 8 processes: {found.best.degrees};" in checked.stdout


def test_pasted_into_the_recipe_the_difference_gives_the_fastest(tmp_path: Path) -> None:
    found = searched(load(DEBUG), 4, 1, gpu_with(2.2))
    assert found.best is not None
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(f'base = "{DEBUG}"\n{found.difference()}')
    assert found.difference() and load(pasted, processes=4, nodes=1) == found.best.recipe


@pytest.mark.slow
@pytest.mark.parametrize(("path", "processes", "nodes"), [(DEBUG, 6, 1), (SMOLLM, 4, 2)])
def test_the_rules_of_check_accept_everything_that_is_printed(path: Path, processes: int, nodes: int) -> None:
    batch = {"global_batch_size": 24, "micro_batch_size": 1}
    recipe = change(load(path, rules=False), model={"layers": 2}, batch=batch)
    found = searched(recipe, processes, nodes, GPUS["H100"], numerics=True)
    assert found.best is not None and found.apart
    for printed in (found.best, *found.others, *found.apart.values(), *found.looked.front):
        assert accepted(printed.recipe, processes, nodes), to_toml(printed.recipe)


def test_what_defines_the_training_stays() -> None:
    recipe = load(DEBUG)
    found = searched(recipe, 8, 1, GPUS["H100"])
    assert found.best is not None
    for other in (found.best, *found.others):
        changed = {(section, name) for section, fields in changes(recipe, other.recipe).items() for name in fields}
        assert {f"{section}.{name}" for section, name in changed} <= {*SEARCHED}
        assert other.recipe.batch.global_batch_size == recipe.batch.global_batch_size


def test_a_field_of_the_command_line_stays_as_given() -> None:
    kept = {"mesh.shard": 2, "mesh.tensor": 1, "activation_checkpointing.mode": "full", "fsdp.prefetch": 2}
    recipe = load(DEBUG, [f"--{key}={value}" for key, value in kept.items()] + ["--mesh.replicate=-1"])
    found = searched(recipe, 8, 1, GPUS["H100"], *kept)
    assert found.best is not None
    for plan_of in (found.best, *found.others):
        assert {key: value_of(plan_of.recipe, key) for key in kept} == kept
        assert plan_of.degrees.shard == 2


def test_the_recipe_as_it_is_wins_where_nothing_is_faster() -> None:
    recipe = load(DEBUG)
    first = searched(recipe, 4, 1, GPUS["H100"]).best
    assert first is not None
    again = searched(first.recipe, 4, 1, GPUS["H100"])
    assert again.best is not None and again.best.recipe == first.recipe
    assert again.difference() == ""
    assert "As it is, the recipe is the fastest." in again.lines()


def test_a_recipe_that_fits_nowhere_gets_what_is_nearest_and_what_would_fit() -> None:
    recipe, gpu = load(SMOLLM, ["--model.layers=4"], rules=False), gpu_with(8.4, per_node=2)
    found = searched(recipe, 2, 1, gpu)
    assert found.best is None and not found.looked.front and found.difference() == ""
    text = "\n".join(found.lines())
    assert f"Nothing fits: the least takes {found.least.peak / 1e9:.1f} GB" in text
    assert 'optimizer.state_dtype = "bfloat16", which changes what is trained' in text
    assert "4 GPUs on 2 nodes" in text
    assert searched(recipe, 4, 2, gpu).best is not None
    smaller = change(found.least.recipe, optimizer={"state_dtype": "bfloat16"})
    assert plan(smaller, World(gpu, 2)).fits


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    recipe = change(load(DEBUG), batch={"global_batch_size": 5, "sequence_length": 13}, model={"heads": 2})
    with pytest.raises(UserError, match=r"no mesh of 7 processes .* the batch does not divide .* a multiple of 7"):
        searched(recipe, 7, 1, GPUS["H100"])


def test_a_mesh_on_the_command_line_that_does_not_fit_is_refused() -> None:
    recipe = load(DEBUG, ["--mesh.shard=8", "--mesh.replicate=-1"])
    expected = r"the degrees do not fit the processes \(.*; do not fix mesh.shard and batch.micro_batch_size or change"
    with pytest.raises(UserError, match=expected):
        searched(recipe, 4, 1, GPUS["H100"], "mesh.shard", "batch.micro_batch_size")


def test_float8_finds_micro_batches_that_make_short_sequences_divide() -> None:
    changes = ["--float8.recipe=tensorwise", "--batch.sequence_length=248", "--batch.micro_batch_size=2"]
    found = searched(load(DEBUG, changes), 2, 1, GPUS["H100"])  # float8 needs multiples of 16 tokens
    assert found.best is not None and found.best.recipe.batch.micro_batch_size % 2 == 0


def test_meshes_whose_processes_cannot_share_rows_that_are_gathered_in_float8_are_left_out() -> None:
    recipe = load(SMOLLM, ["--float8.recipe=tensorwise", "--float8.all_gather=true"], rules=False)
    recipe = replace(recipe, batch=replace(recipe.batch, global_batch_size=384))
    found = searched(recipe, 24, 3, GPUS["H100"], "mesh.tensor")
    assert found.looked.refused["rows gathered in float8 do not divide"]
    assert found.best is not None and 2048 % (found.best.degrees.shard * found.best.degrees.context) == 0


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    found = searched(load(DEBUG), 1, 1, GPUS["H100"])
    file = tmp_path / "mine.toml"
    file.write_text("# mine")
    with pytest.raises(UserError, match=r"mine.toml: exists; write another name, or remove it"):
        write_fastest(found, file, base=DEBUG)
    assert file.read_text() == "# mine"
    with pytest.raises(UserError, match="cannot be written"):
        write_fastest(found, tmp_path / "no" / "folder.toml", base=DEBUG)


@pytest.mark.parametrize(
    ("processes", "nodes", "gpu", "hardware"),
    [(64, 8, "H100", "8x8h100"), (8, 1, "A100-40", "8xa100-40"), (4, 1, "H100-500W", "4xh100-500w")],
)
def test_a_recipe_that_a_search_has_written_keeps_its_hardware(
    processes: int, nodes: int, gpu: str, hardware: str, tmp_path: Path
) -> None:
    """Its run is named after its file, which says no hardware: it was read as the 4 GPUs of its mesh."""
    recipe = load(DEBUG, ["--batch.global_batch_size=64"], rules=False)
    found = searched(recipe, processes, nodes, GPUS[gpu], "mesh.tensor", "mesh.context")
    write_fastest(found, tmp_path / "fast.toml", base=DEBUG)
    written = load(tmp_path / "fast.toml", rules=False)
    world = world_of(written, Asked("fast"))
    assert (written.run.hardware, world.gpu.name) == (hardware, gpu)
    assert (world.processes, world.nodes, world.number_from) == (processes, nodes, "from run.hardware")


def test_a_gain_is_shown_with_the_error_of_the_times_that_it_is_a_ratio_of() -> None:
    recipe = load(SMOLLM, ["--activation_checkpointing.mode=full"], rules=False)
    found = searched(recipe, 8, 1, GPUS["H100"])
    gain = found.best.time.tokens_per_second / found.original.time.tokens_per_second - 1  # type: ignore[union-attr]
    spread = found.best.time.spread  # type: ignore[union-attr]
    sure = "more than that" if gain > spread else "less than that: measure both"
    assert f"Each time is predicted within {spread:.0%}; the gain of {gain:+.1%} is {sure}." in found.lines()


def test_a_gain_below_zero_says_that_the_recipe_does_not_fit() -> None:
    """It was "-35.0% ... is less than that: measure both"."""
    recipe = load(SMOLLM, ["--batch.micro_batch_size=16"], rules=False)
    found = searched(recipe, 8, 1, GPUS["H100"], "batch.micro_batch_size", "mesh.tensor", "mesh.context")
    assert found.original and found.best and not found.original.fits
    assert found.best.time.tokens_per_second < found.original.time.tokens_per_second
    [said] = [line for line in found.lines() if "As it is" in line]
    assert said.startswith("As it is, the recipe does not fit: what fits is slower, by ")
    assert not any("measure both" in line for line in found.lines())


def test_a_recipe_that_fits_and_is_faster_than_all_that_is_searched_stays_the_fastest() -> None:
    words = ["--mesh.pipeline=2", "--mesh.replicate=4", "--pipeline.schedule=interleaved_zero_bubble"]
    words += ["--compile.enabled=false", "--fsdp.reshard_after_forward=false", "--activation_checkpointing.mode=full"]
    found = searched(load(SMOLLM, words, rules=False), 16, 2, GPUS["H100"], "mesh.pipeline")
    assert found.original and found.best
    if found.original.fits:
        assert found.best.time.step_seconds <= TIE * found.original.time.step_seconds


def test_a_search_varies_the_schedule_and_the_stages_of_a_pipeline() -> None:
    words = ["--mesh.pipeline=4", "--mesh.tensor=8", "--activation_checkpointing.mode=full"]
    recipe = load(ROOT / "configs" / "llama3_70b_32x8h100.toml", words, rules=False)
    space = Space(recipe, World(GPUS["H100"], 256, 32), frozenset({"mesh.pipeline", "mesh.tensor"}))
    orders = {layout.recipe.pipeline for layout in space.layouts() if isinstance(layout, Meshed)}
    assert {(order.schedule, order.runs) for order in orders} >= {("1f1b", 1), ("interleaved", 2), ("interleaved", 4)}
    eager = replace(recipe, compile=replace(recipe.compile, enabled=False))
    without_compile = [layout for layout in replace(space, recipe=eager).layouts() if isinstance(layout, Meshed)]
    assert {"zbv", "interleaved_zero_bubble"} <= {layout.recipe.pipeline.schedule for layout in without_compile}
    for layout in without_compile:
        for settings in space.settings(layout):
            assert all(space.refusal(setting) is None for setting in settings)
    fixed = frozenset({"mesh.pipeline", "pipeline.schedule", "pipeline.stages_per_rank"})
    kept = {layout.recipe.pipeline for layout in replace(space, fixed=fixed).layouts() if isinstance(layout, Meshed)}
    assert kept == {recipe.pipeline}


def test_numerics_are_listed_apart_and_never_win() -> None:
    recipe = load(SMOLLM, rules=False)
    fixed = ("mesh.tensor", "mesh.context", "fsdp.reshard_after_forward", "activation_checkpointing.blocks")
    alone = searched(recipe, 8, 1, GPUS["A100"], *fixed)
    both = searched(recipe, 8, 1, GPUS["A100"], *fixed, numerics=True)
    assert alone.apart == {} and both.best == alone.best
    assert set(both.apart) == {"bf16 moments", "bf16 sums", "bf16 both"}  # an A100 has no float8
    best = both.apart["bf16 both"].recipe
    assert best.optimizer.state_dtype == best.fsdp.reduce_dtype == "bfloat16"


@pytest.mark.slow
def test_a_recipe_of_405b_on_16384_gpus_is_searched_without_torch_in_half_a_minute() -> None:
    code = f"""
import sys
from recipes.recipe.load import load
from recipes.plan.hardware import GPUS
from recipes.lab.plan.plan import World
from recipes.lab.plan.search_space import Meshed, Space

recipe = load("{ROOT}/configs/llama3_405b_128x8h100.toml", rules=False)
space = Space(recipe, World(GPUS["H100"], 16384, 2048))
layouts = [layout for layout in space.layouts() if isinstance(layout, Meshed)]
import recipes.lab.plan.search
print(len(layouts), sum(len(settings) for settings in space.settings(layouts[0])), "torch" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    count, each, torch = answer.stdout.split()
    assert int(count) * int(each) < 100_000  # a setting takes 0.2 ms
    assert torch == "False"


def test_a_recipe_written_through_a_link_finds_its_base(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far" / "away")
    file = tmp_path / "near" / "fast.toml"
    write_fastest(searched(load(DEBUG), 2, 1, GPUS["H100"]), file, base=DEBUG)
    assert load(file, processes=2, nodes=1).run.name == "fast"


def test_a_written_recipe_has_the_changes_of_the_command_line(tmp_path: Path) -> None:
    recipe = load(
        DEBUG, ["--run.steps=7", "--optimizer.lr=0.5", "--schedule.warmup_steps=1", "--schedule.decay_steps=2"]
    )
    found = searched(recipe, 2, 1, GPUS["H100"], "run.steps", "optimizer.lr")
    write_fastest(found, tmp_path / "fast.toml", base=DEBUG)
    written = load(tmp_path / "fast.toml")
    assert (written.run.steps, written.optimizer, written.schedule) == (7, recipe.optimizer, recipe.schedule)


@pytest.mark.parametrize(
    ("recipe", "fixed"),
    [
        ("context = 2\ncontext_by = 'gather'", ()),
        ("context = 2\ncontext_by = 'gather'", ("mesh.context_by",)),
        ("tensor = 2\noverlap_tensor = true\n[compile]\nenabled = true", ("mesh.overlap_tensor",)),
        ("pipeline = 2\n[pipeline]\nschedule = 'gpipe'", ("pipeline.schedule",)),
    ],
)
def test_what_a_search_finds_has_no_values_that_nothing_reads(
    recipe: str, fixed: tuple[str, ...], tmp_path: Path
) -> None:
    base = tmp_path / "base.toml"
    base.write_text(f'base = "{DEBUG}"\n[mesh]\n{recipe}')
    best = searched(load(base, rules=False), 4, 1, GPUS["H100"], *fixed).best
    assert best is not None and best.degrees.context == best.degrees.tensor == best.degrees.pipeline == 1
    assert not [*unread(SEARCHED + fixed, [best.recipe])]


def test_equally_fast_recipes_keep_their_own_loss_chunks_and_prefetch() -> None:
    recipe = load(SMOLLM, ["--fsdp.prefetch=2", "--batch.loss_chunks=3"], rules=False)
    found = searched(recipe, 8, 1, GPUS["H100"], "mesh.tensor", "mesh.context")
    assert found.best is not None
    for at in (found.best, *found.looked.front[:1]):
        assert (at.recipe.fsdp.prefetch, at.recipe.batch.loss_chunks) == (2, 3)
