"""Every recipe in configs/, and the generated page docs/recipes.md."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.decoder import build_model
from models.interface import blocks_of
from models.sizes import SIZES
from models.transformers_config import TransformersConfig
from parallel.errors import UserError
from parallel.mesh import build_mesh
from parallel.order import parallelize
from recipes.plan.stages import parts
from recipes.recipe.load import load, to_toml
from recipes.recipe.schema import Recipe
from recipes.recipe.stages import at_several_lengths, stages_of
from recipes.training.same_run import identity_differences
from tests import write_docs

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = sorted((ROOT / "configs/benchmarks").glob("*.toml"))
CONFIGS = sorted((ROOT / "configs").glob("*.toml")) + BENCHMARKS
REAL = [path for path in CONFIGS if path not in BENCHMARKS and "_debug" not in path.stem]
SHIPPED = {
    "smollm3_debug",
    "smollm3_debug_gpu",
    "smollm3_debug_everything",
    "smollm3_debug_every_axis",
    "smollm3_debug_document_mask",
    "llama3_debug",
    "llama3_debug_annealing",
    "smollm3_debug_muon",
    "smollm3_debug_stages",
    "smollm3_debug_pipeline",
    "smollm3_debug_8m",
    "moe_debug",
    "smollm3_debug_upcycled",
    "smollm3_3b_8xh100",
    "smollm3_3b_8xh100_c4",
    "smollm3_3b_48x8h100",
    "smollm3_3b_48x8h100_pretraining",
    "smollm3_3b_long_32k",
    "smollm3_3b_long_64k",
    "llama3_70b_32x8h100",
    "llama3_405b_128x8h100",
    "llama3_405b_128x8h100_pipeline",
    "gpt2_124m_shakespeare",
    "gpt2_124m_8xh100",
    "qwen3_0.6b_8xh100",
    "t5_3b_8xh100",
    "gpt2_debug",
    "qwen3_debug",
    "t5_debug",
}
SHIPPED_BENCHMARKS = {
    "smollm3_3b_h100",
    "smollm3_3b_4xh100",
    "smollm3_3b_8xh100",
    "smollm3_3b_h100_float8",
    "smollm3_3b_8xh100_float8",
    "smollm3_3b_8xh100_float8_rowwise",
    "llama2_7b_8xh100",
    "llama3_8b_8xh100",
    "llama3_8b_8xh100_float8",
    "llama3_70b_64x8h100",
}

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.stem}-{path.stem}")


def layout(name: str) -> dict[str, int]:
    """The numbers of processes and nodes in the name of a recipe."""
    hardware = re.search(r"_(?:(\d+)x)?(?:(\d+)x?)?h100", name)
    if hardware is None:
        known = {"smollm3_debug_everything": 4, "smollm3_debug_every_axis": 8, "smollm3_debug_gpu": 1}
        return {"processes": 8 if "_long_" in name else known.get(name, 2), "nodes": 1}
    nodes, each = (int(hardware[1]), int(hardware[2])) if hardware[2] else (1, int(hardware[1] or 1))
    return {"processes": nodes * each, "nodes": nodes}


def loaded(path: Path, **hardware: int) -> Recipe:
    """The recipe. One that continues from weights, which are not here, starts from random ones instead; and one whose
    text its user brings reads another."""
    written = tomli.loads(path.read_text()).get("model", {})
    changes = []
    if written.get("name") == "from_weights":
        published = ROOT / "configs" / "models" / f"{path.stem.rpartition('_')[0]}.json"
        size = json.loads(published.read_text())["vocab_size"]
        changes = ["--model.name=from_config", f"--model.config={published}", f"--data.tokenizer=train:{size}"]
    elif path.stem.startswith(tuple(SIZES)) and (model := load(path, rules=False).model).weights:
        changes = [f"--data.tokenizer=train:{model.vocabulary}", "--model.upcycle=false"]
    if changes:
        changes.append("--model.weights=")
    if path.stem == "gpt2_124m_shakespeare":
        changes.append("--data.source=python-stdlib")
    return load(path, changes, **hardware, elsewhere=reads_prepared(path))


def reads_prepared(path: Path) -> bool:
    """Whether the text of a recipe must be prepared before it can be checked."""
    return path.stem.endswith("_pretraining")


def test_names_of_recipes_give_processes_and_nodes() -> None:
    assert layout("a_h100") == {"processes": 1, "nodes": 1}
    assert layout("a_4xh100_trick") == {"processes": 4, "nodes": 1}
    assert layout("a_48x8h100") == {"processes": 384, "nodes": 48}


def test_every_shipped_recipe_exists() -> None:
    assert {path.stem for path in CONFIGS if path not in BENCHMARKS} >= SHIPPED
    assert {path.stem for path in BENCHMARKS} >= SHIPPED_BENCHMARKS


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_recipe_that_trains_a_real_model_saves_and_validates_it_with_a_tokenizer_of_its_size(path: Path) -> None:
    recipe = loaded(path)
    assert 0 < recipe.checkpoint.every < recipe.run.steps
    assert 0 < recipe.validation.every < recipe.run.steps
    if "shakespeare" not in path.stem and not reads_prepared(path):  # text which the user brings
        assert recipe.data.tokenizer == f"train:{recipe.model.vocabulary}"
        assert "python-stdlib" not in recipe.data.sources
    # The other models of transformers have no fast kernel for it.
    assert recipe.data.document_mask or isinstance(recipe.model, TransformersConfig)


def test_the_first_run_on_a_gpu_has_the_steps_and_tokens_of_the_one_on_a_cpu() -> None:
    recipe, cpu = (load(ROOT / f"configs/{name}.toml") for name in ("smollm3_debug_gpu", "smollm3_debug"))
    batch = replace(cpu.batch, micro_batch_size=cpu.batch.global_batch_size)
    run = replace(cpu.run, name=recipe.run.name, device="cuda")
    assert recipe == replace(cpu, run=run, batch=batch, fsdp=replace(cpu.fsdp, param_dtype="bfloat16"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_is_called_one_and_saves_nothing(path: Path) -> None:
    recipe = load(path)
    assert recipe.run.name.endswith("_benchmark")
    assert recipe.checkpoint.every == 0
    assert not recipe.data.document_mask, "as published figures: with masks, throughput depends on the documents"


@every_config
def test_a_recipe_loads_on_the_hardware_of_its_name(path: Path) -> None:
    recipe = loaded(path, **layout(path.stem))
    assert recipe.run.name == path.stem + ("_benchmark" if path in BENCHMARKS else "")
    if isinstance(recipe.model, TransformersConfig):
        assert path.stem.startswith(recipe.model.settings["model_type"])
        return
    if recipe.model.name not in ("from_weights", "from_config"):
        assert recipe.model.name == max((name for name in SIZES if path.stem.startswith(name)), key=len)


@pytest.mark.slow
@every_config
@pytest.mark.filterwarnings("error:Slicing a flattened dim")  # each process would print it
def test_a_recipe_builds_on_meta_and_shards_over_the_hardware_of_its_name(path: Path) -> None:
    """As rank 0; the fake backend stands in for the other processes."""
    hardware = layout(path.stem)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=hardware["processes"])
    try:
        recipe = loaded(path, **hardware)
        degrees = recipe.mesh.fit(hardware["processes"], nodes=hardware["nodes"])
        own, whole = None, recipe.model.num_params()
        if degrees.pipeline > 1:
            _, part = next(parts(recipe, replace(degrees, shard=1, tensor=1)))
            own, whole = [layer for run in part.layers for layer in run], part.state["parameters"] // 4
        with torch.device("meta"):
            model = build_model(recipe.model, layers=own)
        names = list(model.state_dict())
        assert sum(parameter.numel() for parameter in model.parameters()) == whole
        report = parallelize(
            model,
            build_mesh(degrees, device_type="cpu"),
            float8=replace(recipe.float8, emulate=True),  # builds without a GPU
            activation_checkpointing=recipe.activation_checkpointing,
            compile=recipe.compile,
            fsdp=recipe.fsdp,
            layout=replace(recipe.mesh, overlap_tensor=False),
        )
        assert list(model.state_dict()) == names
        assert all(isinstance(block, FSDPModule) for block in blocks_of(model))
        if recipe.float8.recipe != "none":
            converted, all_linears = 7 * recipe.model.layers, 7 * recipe.model.layers + (model.lm_head is not None)
            assert f"{converted} of {all_linears} linears converted" in report[0]
        local = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
        share = whole / degrees.per_layer
        assert local == pytest.approx(share, rel=0.01)  # rank 0 has one row more of uneven shards
    finally:
        dist.destroy_process_group()


@every_config
def test_a_resolved_recipe_resolves_to_itself(path: Path, tmp_path: Path) -> None:
    recipe = loaded(path)
    resolved = tmp_path / "recipe.toml"
    resolved.write_text(to_toml(recipe))
    again = load(resolved, elsewhere=reads_prepared(path))
    assert again == recipe
    assert to_toml(again) == to_toml(recipe)


@every_config
def test_a_recipe_fits_a_screen_and_repeats_nothing_of_its_base(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 50 + 12 * text.count("[[stages]]")
    if base := re.search(r'^base = "(.*)"', text, re.MULTILINE):
        own, inherited = load(path, rules=False), load(path.parent / base[1], rules=False)
        written = {
            f"{section}.{key}"
            for section, body in re.findall(r"^\[(\w+)\].*\n((?:(?!\[).*\n)*)", text, re.MULTILINE)
            for key in re.findall(r"^(\w+) =", body, re.MULTILINE)
        }
        same = {key for key in written if _value(own, key) == _value(inherited, key)}
        # Repeated because readers of the file look for it, or because the model's size differs from the base's in it.
        again = {key for key in same if own.model.name == "custom" and key.startswith("model.")}  # all is written
        assert same - again <= {"schedule.kind", "float8.all_gather", "model.rope_scaling"}


def _value(recipe: object, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_debug_recipe_fits_any_small_machine(count: int) -> None:
    load(ROOT / "configs" / "smollm3_debug.toml", processes=count)


def test_smollm3_48x8_has_the_published_hyperparameters() -> None:
    recipe = load(ROOT / "configs" / "smollm3_3b_48x8h100.toml", processes=384, nodes=48)
    tokens_per_step = recipe.batch.global_batch_size * recipe.batch.sequence_length
    assert recipe.run.steps * tokens_per_step == 4_720_000 * 576 * 4096
    warmup, decay = recipe.schedule.phases(recipe.run.steps)
    assert warmup == 2000
    assert decay * tokens_per_step == 522_000 * 576 * 4096
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (2e-4, (0.9, 0.95), 1e-8)
    assert (optimizer.weight_decay, optimizer.grad_clip) == (0.1, 1.0)
    assert recipe.data.document_mask


def test_gpt2_has_the_published_hyperparameters() -> None:
    recipe = load(ROOT / "configs" / "gpt2_124m_8xh100.toml", processes=8)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (6e-4, (0.9, 0.95), 0.1)
    assert recipe.schedule.phases(recipe.run.steps)[0] == 700


@pytest.mark.slow
def test_the_whole_pretraining_passes_check_and_has_the_published_stages(tmp_path: Path) -> None:
    """On copies of one small text, each in the place of a prepared source."""
    path, hardware = ROOT / "configs/smollm3_3b_48x8h100_pretraining.toml", {"processes": 384, "nodes": 48}
    stages = stages_of(load(path, elsewhere=True, **hardware))
    assert {"tokens/dclm", "tokens/reasoning"} <= at_several_lengths(load(path, elsewhere=True, **hardware))
    sources = list(dict.fromkeys(source for stage in stages for source in stage.recipe.data.sources))
    rows = (" ".join(map(str, range(first, first + 3000))) for first in range(0, 120_000, 3000))
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    prepare = [ROOT / "scripts/prepare_data.py", "text.jsonl", sources[0], "--tokenizer=train:300", "--cores=1"]
    subprocess.run([sys.executable, *prepare], cwd=tmp_path, check=True, capture_output=True)
    for source in sources[1:]:
        shutil.copytree(tmp_path / sources[0], tmp_path / source)
    check = [ROOT / "train.py", path, "--check", "--processes=384", "--nodes=48"]
    checked = subprocess.run([sys.executable, *check], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert all(f"stage {stage.name}: " in checked.stdout for stage in stages)
    shutil.rmtree(tmp_path / sources[-1])  # which only the last stages read

    def problem() -> str:
        refused = subprocess.run([sys.executable, *check], cwd=tmp_path, check=False, capture_output=True, text=True)
        assert refused.returncode == 2 and "stages.long_32k." in refused.stderr
        return " ".join(refused.stderr.split())

    assert f"'{sources[-1]}'" in problem()
    (tmp_path / "text.jsonl").write_text('{"text": "one two three"}\n{"text": "three two"}\n' * 50)
    other = [*prepare[:2], sources[-1], "--tokenizer=train:270", "--cores=1"]
    subprocess.run([sys.executable, *other], cwd=tmp_path, check=True, capture_output=True)
    assert "holds tokens of another tokenizer" in problem()
    assert "but a sequence and its last target need 32,769" in problem()

    published = [(3_450_000, 4096), (4_198_000, 4096), (4_720_000, 4096), (20_000, 32768), (22_000, 65536)]
    tokens = [stage.recipe.batch.global_batch_size * stage.recipe.batch.sequence_length for stage in stages]
    assert [stage.last * tokens[0] for stage in stages[:3]] == [steps * 576 * 4096 for steps, _ in published[:3]]
    long = [(stage.last - stage.first) * amount for stage, amount in zip(stages[3:], tokens[3:], strict=True)]
    assert long == [20_000 * 72 * 32768, 22_000 * 36 * 65536]
    assert [stage.recipe.batch.sequence_length for stage in stages] == [length for _, length in published]
    assert [stage.recipe.model.rope_theta for stage in stages] == [5e4, 5e4, 5e4, 1.5e6, 5e6]
    rates = [[stage.learning_rate(step) for step in (stage.first, stage.last - 1)] for stage in stages]
    assert rates[0] == [2e-4 / 2000, 2e-4] and rates[1] == [2e-4, 2e-4]
    assert rates[2][0] == 2e-4 and rates[2][1] < 1e-9 and max(rates[3][1], rates[4][1]) < 1e-9
    assert all(stage.recipe.data.document_mask for stage in stages)


@pytest.mark.parametrize(
    ("length", "theta", "steps", "groups"), [(32768, 1_500_000.0, 20_000, 72), (65536, 5_000_000.0, 22_000, 36)]
)
def test_long_recipes_continue_from_weights_with_the_published_stages(
    length: int, theta: float, steps: int, groups: int
) -> None:
    path = ROOT / f"configs/smollm3_3b_long_{length // 1024}k.toml"
    with pytest.raises(UserError, match="does not exist"):
        load(path)
    written = load(path, rules=False)
    assert written.model.weights and written.data.tokenizer == "from_weights"
    for nodes in (1, 2, 3, 12):
        recipe = loaded(path, processes=8 * nodes, nodes=nodes)
        assert recipe.mesh.fit(8 * nodes, nodes=nodes).context * 8192 == recipe.batch.sequence_length == length
    assert (recipe.model.rope_theta, recipe.run.steps, recipe.batch.global_batch_size) == (theta, steps, groups)
    assert (recipe.optimizer.lr, recipe.schedule.kind, recipe.schedule.min_lr_ratio) == (2e-5, "cosine", 0.0)
    assert recipe.schedule.phases(steps)[0] == 1000


@pytest.mark.parametrize(("name", "peak"), [("llama3_70b_32x8h100", 1.5e-4), ("llama3_405b_128x8h100", 8e-5)])
def test_large_llamas_have_the_published_hyperparameters_and_one_micro_batch(name: str, peak: float) -> None:
    hardware = layout(name)
    recipe = loaded(ROOT / f"configs/{name}.toml", **hardware)
    degrees = recipe.mesh.fit(hardware["processes"], nodes=hardware["nodes"])
    assert recipe.batch.global_batch_size == recipe.batch.micro_batch_size * degrees.data_parallel
    assert degrees.tensor == 8 and recipe.model.rope_scaling == "none" and recipe.model.rope_theta == 5e5
    assert recipe.optimizer.lr == peak
    assert recipe.schedule.phases(recipe.run.steps) == (8000, 0)
    assert recipe.schedule.learning_rate(recipe.run.steps, peak=1.0, steps=recipe.run.steps) == pytest.approx(0.01)


def test_float8_recipes_differ_from_their_bases_only_in_float8_and_in_what_memory_it_leaves() -> None:
    for path in CONFIGS:
        if "_float8" in path.stem:
            recipe, plain = load(path), load(path.parent / f"{path.stem.partition('_float8')[0]}.toml")
            assert recipe.float8.recipe != "none"
            same_batch = replace(recipe.batch, micro_batch_size=plain.batch.micro_batch_size)
            checkpointing = plain.activation_checkpointing
            other = replace(recipe, batch=same_batch, activation_checkpointing=checkpointing)
            assert replace(other, float8=plain.float8, run=plain.run) == plain
            assert not identity_differences(plain, recipe)


def test_document_masks_identify_a_run() -> None:
    plain = load(ROOT / "configs" / "smollm3_debug.toml")
    masked = load(ROOT / "configs" / "smollm3_debug_document_mask.toml")
    assert replace(masked, data=plain.data, run=plain.run) == plain
    assert identity_differences(plain, masked) == ["data.document_mask: false in the folder's recipe.toml, true now"]


def test_a_run_may_resume_with_other_loss_chunks() -> None:
    recipe = load(ROOT / "configs/benchmarks/smollm3_3b_h100.toml")
    assert recipe.batch.loss_chunks > 1
    assert not identity_differences(recipe, replace(recipe, batch=replace(recipe.batch, loss_chunks=1)))


def test_the_page_about_recipes_is_up_to_date() -> None:
    text = write_docs.PAGE.read_text()
    assert text == write_docs.with_fields(text), "run python -m tests.write_docs"
