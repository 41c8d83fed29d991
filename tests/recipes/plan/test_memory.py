"""The predicted memory of a step, against steps whose storages are counted and against the page of generated code."""

import cProfile
import json
import os
import pstats
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor

from models.decoder import Decoder
from models.sizes import SIZES
from parallel.config import (
    ActivationCheckpointingConfig,
    CompileConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
    MeshDegrees,
)
from parallel.mesh import build_mesh
from recipes.data.config import BatchConfig
from recipes.lab.plan.search import peak
from recipes.metrics.hardware import MEMORY, Hardware, hardware_of
from recipes.optimization.config import OptimizerConfig
from recipes.plan.memory import FULL, predict
from recipes.plan.sizes import Sizes
from recipes.plan.tracked import CPU, fake_processes
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from tests import write_docs
from tests.live_bytes import build, tracked_step
from tests.meshes import mesh_degrees

ROOT = Path(__file__).resolve().parents[3]
EAGER = ["--run.device=cpu", "--compile.enabled=false", "--fsdp.param_dtype=bfloat16"]
DEBUG = ["smollm3_debug.toml", "--batch.micro_batch_size=2"]
LLAMA_DEBUG = ["llama3_debug.toml", "--batch.micro_batch_size=2", "--batch.sequence_length=256"]
SHORT = [*LLAMA_DEBUG, "--batch.sequence_length=16"]
REAL = ["benchmarks/smollm3_3b_8xh100.toml", "--model.layers=2", "--activation_checkpointing.mode=none"]
WITHOUT_WINDOWS = ("window=0", "full_attention_every=0", "rope_local_theta=0", "rope_scaled_layers=all")
"""On a CPU, each layer with windows keeps its mask."""
FILES = {
    **{"DEBUG": DEBUG, "LLAMA_DEBUG": LLAMA_DEBUG, "SHORT": SHORT, "REAL": REAL},
    "LLAMA": ["benchmarks/llama3_8b_8xh100.toml", "--model.layers=4"],
    "PLAIN": [*REAL, "--batch.global_batch_size=8", *(f"--model.{change}" for change in WITHOUT_WINDOWS)],
}
SHORTER = {
    **{"mode": "activation_checkpointing.mode", "blocks": "activation_checkpointing.blocks"},
    **{"chunks": "batch.loss_chunks", "batch": "batch.global_batch_size", "tokens": "batch.sequence_length"},
    **{"reshard": "fsdp.reshard_after_forward", "computed": "fsdp.param_dtype", "reduced": "fsdp.reduce_dtype"},
}


def eager(file: str, *changes: str) -> Recipe:
    return load(ROOT / "configs" / file, [*EAGER, *changes], rules=False)


def assert_as_tracked(recipe: Recipe, processes: int) -> None:
    live = tracked_step(recipe, processes)
    predicted = predict(recipe, recipe.mesh.fit(processes), context=False)
    assert predicted.peak == pytest.approx(live.peak, rel=1e-4), f"{predicted.fullest} here, {live.fullest} there"


CASES = """
8 DEBUG mode=none chunks=1 reshard=true batch=16
8 DEBUG mode=selective chunks=8 reshard=true batch=16
8 DEBUG mode=full chunks=8 reshard=false batch=16
8 DEBUG mode=full chunks=8 reshard=true batch=32
8 DEBUG mode=none chunks=8 reshard=false batch=32
8 DEBUG mode=selective chunks=1 reshard=false batch=32
8 DEBUG mode=selective blocks=2 chunks=8
8 DEBUG mode=full blocks=2 chunks=8
8 DEBUG batch=16 mesh.replicate=2 mesh.shard=4 chunks=8
8 DEBUG batch=16 computed=float32 mode=full
8 DEBUG batch=16 fsdp.prefetch=3 chunks=8
8 DEBUG batch=32 reduced=bfloat16
8 SHORT batch=16 reduced=bfloat16 mesh.replicate=2 mesh.shard=4 chunks=8
8 SHORT batch=48 reduced=bfloat16
8 LLAMA_DEBUG batch=32 chunks=8
8 LLAMA_DEBUG batch=16 chunks=8 reshard=false
1 DEBUG chunks=8 computed=bfloat16 batch=2
1 DEBUG chunks=8 computed=float32 batch=4

1 SHORT reduced=bfloat16 computed=bfloat16 mode=full batch=2 chunks=8 mesh.replicate=1 mesh.shard=1
1 SHORT reduced=bfloat16 computed=float32 mode=full batch=4 chunks=8 mesh.replicate=1 mesh.shard=1
2 SHORT reduced=bfloat16 computed=bfloat16 mode=full batch=4 chunks=8 mesh.replicate=2 mesh.shard=1
2 SHORT reduced=bfloat16 computed=float32 mode=full batch=8 chunks=8 mesh.replicate=2 mesh.shard=1

8 DEBUG mesh.tensor=2 mode=selective chunks=8
8 DEBUG mesh.context=2 mode=none chunks=8
8 DEBUG mesh.context=2 mode=full chunks=8
8 LLAMA_DEBUG mesh.tensor=4 model.key_value_heads=4 mode=full
8 DEBUG mesh.context=2 mesh.context_by=gather mode=selective
8 LLAMA_DEBUG mesh.tensor=2 tokens=16 batch=16

8 REAL batch=16
8 REAL batch=16 reshard=false
8 REAL batch=8 mode=selective chunks=1
8 LLAMA mode=full
8 PLAIN model.name=qwen3_0.6b mesh.shard=8 mode=none
8 PLAIN model.name=qwen3_0.6b mesh.shard=8 mode=selective
8 PLAIN model.name=gemma3_1b mesh.context=4 mode=none
8 PLAIN model.name=gemma3_1b mesh.context=4 mode=selective
8 PLAIN model.name=olmo3_7b mesh.tensor=4 mode=none
8 PLAIN model.name=olmo3_7b mesh.tensor=4 mode=selective
"""
"""Processes, file and changes. In groups: on a mesh that only shards or copies; whole gradients that are summed in
bfloat16, fullest at the gradient of the embedding, when all others have become float32, and sums over replicas stay,
too; parts of matrices or rows, the last one fullest at the gradient of the embedding, of all its parts; shapes of real
models, the last ones with norms of heads and after parts."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*filter(None, CASES.splitlines())])
def test_the_predicted_peak_is_that_of_a_step(case: str) -> None:
    processes, file, *changes = case.split()
    words = [change.partition("=") for change in changes]
    assert_as_tracked(
        eager(*FILES[file], *(f"--{SHORTER.get(key, key)}={value}" for key, _, value in words)), int(processes)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "computed", "reshard", "micro_batches", "replicas"),
    [  # every pair of values once
        (DEBUG, "bfloat16", "true", 1, 1),
        (LLAMA_DEBUG, "float32", "true", 1, 2),
        (LLAMA_DEBUG, "bfloat16", "false", 2, 1),
        (LLAMA_DEBUG, "bfloat16", "true", 2, 2),
        (DEBUG, "float32", "false", 1, 2),
        (DEBUG, "float32", "false", 2, 1),
    ],
)
def test_the_predicted_peak_is_that_of_a_step_without_shards(
    file: list[str], computed: str, reshard: str, micro_batches: int, replicas: int
) -> None:
    """With so few tokens that gradients, and weights that FSDP has not freed yet, make the peak."""
    sizes = ["--batch.sequence_length=16", f"--batch.global_batch_size={2 * replicas * micro_batches}"]
    kinds = [f"--fsdp.param_dtype={computed}", f"--fsdp.reshard_after_forward={reshard}", "--batch.loss_chunks=8"]
    recipe = eager(*file, *sizes, *kinds, f"--mesh.replicate={replicas}", "--mesh.shard=1")
    found = predict(recipe, recipe.mesh.fit(replicas), context=False).peak / tracked_step(recipe, replicas).peak
    assert 1 - 1e-4 <= found <= 1 + 1e-3  # with so few tokens, some of them count


@pytest.mark.slow
def test_windows_need_masks_that_are_not_predicted_where_no_kernel_takes_lengths() -> None:
    words = ["--model.name=gemma3_debug", "--model.layers=4", "--batch.loss_chunks=8", "--batch.sequence_length=2048"]
    recipe = eager(*DEBUG, *words)
    predicted = predict(recipe, recipe.mesh.fit(8), context=False).peak
    masks = 2 * 2 * 2048**2  # of two of four layers, in bfloat16
    assert tracked_step(recipe, 8).peak - predicted == pytest.approx(masks, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "mode", "norms"),
    [
        ("tensor=2", "selective", ()),
        ("context=2", "none", ()),
        ("tensor=2", "none", ("qk_norm=head",)),
        ("tensor=2", "selective", ("qk_norm=head", "norms=both")),
        ("context=2", "none", ("qk_norm=head", "norms=both")),
        ("tensor=2", "none", ("qk_norm=all", "norms=after")),
    ],
)
def test_a_compiled_block_with_parts_of_matrices_or_rows_keeps_what_is_predicted(
    mesh: str, mode: str, norms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the partition of torch.compile, but not its kernels, which none of this depends on."""
    changes = ["--compile.enabled=true", f"--mesh.{mesh}", f"--activation_checkpointing.mode={mode}"]
    recipe = eager(*DEBUG, *changes, *(f"--model.{change}" for change in norms))

    def compile_blocks(model: Decoder, *_: Any, **__: Any) -> str:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager_decomp_partition", dynamic=False)
        return ""

    torch.compiler.reset()  # it refuses to compile the same code for many models
    monkeypatch.setattr("parallel.order.compile_blocks", compile_blocks)
    with fake_processes(8):
        degrees = recipe.mesh.fit(8)
        model = build(recipe, build_mesh(degrees, device_type="cpu")).model
        size = Sizes(recipe, degrees)
        predicted = size.tokens * size.saved[mode != "none"]
        # Of a norm of all heads, each process of a tensor group keeps the two numbers per token, not a part of them.
        near = 2e-3 if recipe.model.qk_norm == "all" else 1e-6
        assert saved_by_block(model, recipe) == pytest.approx([predicted] * recipe.model.layers, rel=near)


def saved_by_block(model: Decoder, recipe: Recipe) -> list[int]:
    """Bytes that each block saves for its backward pass, without weights and rotations."""
    found: list[dict[int, int]] = [{} for _ in model.blocks]
    running: list[int | None] = [None]

    def save(tensor: torch.Tensor) -> torch.Tensor:
        is_rotation = tensor.dtype == torch.float32 and tensor.shape[-1:] == (recipe.model.head_width // 2,)
        weights = map(memory_of, model.parameters())  # gathered ones, of the block that is running
        if running[0] is not None and not is_rotation and memory_of(tensor) not in weights:
            found[running[0]][memory_of(tensor)] = local(tensor).untyped_storage().nbytes()
        return tensor

    def says(index: int | None) -> Callable[..., None]:
        def set_running(*_: Any) -> None:  # compiled with the block
            running[0] = index

        return set_running

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(says(index))
        block.register_forward_hook(says(None))
    tokens = torch.zeros(recipe.batch.micro_batch_size, recipe.batch.sequence_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens, tokens)
    return [sum(block.values()) for block in found]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_of(tensor: Any) -> int:
    return local(tensor).untyped_storage().data_ptr()


@pytest.mark.slow
def test_gathered_keys_need_a_mask_that_is_not_predicted_where_no_kernel_takes_lengths() -> None:
    recipe = eager(*DEBUG, "--mesh.context=2", "--mesh.context_by=gather", "--batch.loss_chunks=8")
    predicted = predict(recipe, recipe.mesh.fit(8), context=False).peak
    chunk, length, layers = 64, 256, recipe.model.layers
    assert tracked_step(recipe, 8).peak - predicted == pytest.approx(layers * 2 * chunk * length, abs=100)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["smollm3_debug.toml", "llama3_debug.toml"])
def test_the_predicted_peak_of_one_process_is_right_where_it_is_at_the_embedding(file: str) -> None:
    short = ["--batch.sequence_length=32", "--batch.global_batch_size=2", "--batch.micro_batch_size=2"]
    recipe = eager(file, *short, "--batch.loss_chunks=8")
    assert "embedding" in predict(recipe, recipe.mesh.fit(1)).fullest
    assert_as_tracked(recipe, 1)


@pytest.mark.slow
def test_counted_storages_are_those_of_the_memory_tracker_of_torch() -> None:
    recipe = eager(*DEBUG, "--batch.loss_chunks=4", "--optimizer.grad_clip=0")
    live = tracked_step(recipe, 8)
    with fake_processes(8):
        mesh = build_mesh(recipe.mesh.fit(8), device_type="cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            built = build(recipe, mesh)
            tracker = FSDPMemTracker(built.model, built.optimizer)
            batch = torch.zeros(2, 256, dtype=torch.int64), torch.zeros(2, 256, dtype=torch.int64)
            tracker.track_inputs(batch)
            for step in (1, 2):
                with tracker:
                    built.model(*batch).backward()
                    built.optimizer.step()
                    built.optimizer.zero_grad()
                if step == 1:
                    tracker.reset_mod_stats()
            peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert live.peak == pytest.approx(peak, abs=64)  # the sums of a step: losses, targets, norm


def random_recipe(choose: random.Random) -> tuple[Recipe, MeshDegrees]:
    """Any shape, also such as nobody would train."""
    layers = choose.choice([1, 2, 3, 5, 8, 13, 34])
    model = replace(
        SIZES["smollm3_debug"],
        **{"layers": layers, "width": choose.choice([8, 64, 512, 2048]), "heads": 8, "key_value_heads": 4},
        feed_forward_width=8 * choose.randint(1, 400),
        vocabulary=8 * choose.choice([4, choose.randint(1, 20_000)]),
        tied_embeddings=choose.random() < 0.5,
    )
    micro = choose.choice([1, 2, 8])
    any_degrees = mesh_degrees([choose.choice([1, 2, 4]) for _ in range(4)])
    degrees = choose.choice(
        [any_degrees, any_degrees, MeshDegrees(replicate=1, shard=1), MeshDegrees(replicate=2, shard=1)]
    )
    recipe = Recipe(
        model=model,
        batch=BatchConfig(
            sequence_length=8 * choose.randint(1, 500),
            micro_batch_size=micro,
            global_batch_size=micro * degrees.data_parallel * choose.randint(1, 2),
            loss_chunks=choose.choice([1, 4]),
        ),
        mesh=MeshConfig(context_by=choose.choice(["heads", "gather"])),
        activation_checkpointing=ActivationCheckpointingConfig(
            mode=choose.choice(["none", "selective", "full"]),
            blocks=choose.choice(["all", 0.5, 0.25, choose.randint(1, layers), max(1, layers - 2)]),
        ),
        compile=CompileConfig(enabled=choose.random() < 0.5),
        float8=Float8Config(recipe=choose.choice(["none", "tensorwise"]), all_gather=choose.random() < 0.5),
        fsdp=FSDPConfig(
            reshard_after_forward=choose.random() < 0.5,
            param_dtype=choose.choice(["bfloat16", "float32"]),
            prefetch=choose.choice([1, 2, 9]),
            cpu_offload=choose.random() < 0.2,
        ),
        optimizer=OptimizerConfig(state_dtype=choose.choice(["bfloat16", "float32"])),
    )
    return recipe, degrees


@pytest.mark.slow
def test_the_peak_alone_is_that_of_all_moments() -> None:
    choose, fullest = random.Random(0), set()
    for _ in range(3000):
        recipe, degrees = random_recipe(choose)
        prediction = predict(recipe, degrees)
        assert peak(recipe, degrees) == prediction.peak, (recipe, degrees, prediction.fullest)
        fullest.add(prediction.fullest)
    assert len(fullest) > 10


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_peak_alone_is_that_of_all_moments_where_gathered_weights_stay(replicas: int) -> None:
    """With more and more tokens, which move the fullest moment from block to block."""
    shape = ["--model.layers=24", "--model.width=2048", "--model.feed_forward_width=8192", "--model.vocabulary=4096"]
    some = ["--activation_checkpointing.mode=full", "--activation_checkpointing.blocks=22"]
    kinds = [
        "--fsdp.reshard_after_forward=false",
        "--batch.loss_chunks=64",
        f"--batch.global_batch_size={2 * replicas}",
    ]
    recipe, fullest = eager(*DEBUG, *shape, *some, *kinds), set()
    for length in range(512, 2**15, 512):
        longer = replace(recipe, batch=replace(recipe.batch, sequence_length=length))
        prediction = predict(longer, MeshDegrees(replicate=replicas, shard=1))
        assert peak(longer, MeshDegrees(replicate=replicas, shard=1)) == prediction.peak, (length, prediction.fullest)
        fullest.add(prediction.fullest)
    assert len(fullest) >= 3


def test_the_peak_of_a_large_model_takes_a_few_hundred_calls() -> None:
    recipe = load(ROOT / "configs/llama3_405b_128x8h100.toml")
    degrees = recipe.mesh.fit(1024)
    peak(recipe, degrees)  # fills caches
    profile = cProfile.Profile()
    profile.runcall(peak, recipe, degrees)
    assert pstats.Stats(profile).total_calls < 1800, "the search asks for tens of thousands"


EAGER_ON_GPU = ["--compile.enabled=false", "--model.layers=8"]
ON_NULL_GPU: list[tuple[str, int, list[str], float]] = [
    ("benchmarks/smollm3_3b_8xh100", 8, [], 53.21),
    ("benchmarks/smollm3_3b_8xh100", 8, EAGER_ON_GPU[:1], 60.20),
    ("benchmarks/smollm3_3b_8xh100_float8", 8, [], 62.14),
    ("benchmarks/smollm3_3b_8xh100_float8", 8, [*EAGER_ON_GPU[:1], "--batch.micro_batch_size=1"], 57.39),
    ("benchmarks/llama3_8b_8xh100_float8", 8, EAGER_ON_GPU[:1], 61.56),
    ("llama3_70b_32x8h100", 256, [], 38.44),
    ("benchmarks/llama3_70b_64x8h100", 512, EAGER_ON_GPU, 14.64),
    ("smollm3_3b_48x8h100", 384, EAGER_ON_GPU, 14.07),
    ("benchmarks/llama2_7b_8xh100", 8, EAGER_ON_GPU, 14.88),
    ("llama3_405b_128x8h100", 1024, EAGER_ON_GPU, 17.67),
    ("smollm3_3b_long_64k", 64, [*EAGER_ON_GPU, "--model.weights="], 17.88),
    ("smollm3_3b_long_32k", 32, [*EAGER_ON_GPU, "--model.weights="], 17.74),
]
"""Recipe, processes, changes -> GB that torch 2.13's allocator had allocated at the peak, on a GPU without numbers."""


@pytest.mark.parametrize(("file", "processes", "changes", "seen"), ON_NULL_GPU)
def test_a_gpu_that_computes_nothing_allocates_what_is_predicted(
    file: str, processes: int, changes: list[str], seen: float
) -> None:
    recipe = load(ROOT / f"configs/{file}.toml", changes, rules=False, elsewhere=True)
    predicted = predict(recipe, recipe.mesh.fit(processes, nodes=-(-processes // 8)), context=False)
    assert predicted.peak / 1e9 == pytest.approx(seen, rel=0.04)


def test_no_recipe_needs_more_than_94_percent_of_its_gpu() -> None:
    found = write_docs.predictions()
    assert len(found) >= 16
    shares = {name: prediction.peak / hardware.memory for name, (_, hardware, prediction) in found.items()}
    assert round(FULL, 2) == 0.94 and not {name: share for name, share in shares.items() if share > FULL}


def test_the_page_about_memory_is_up_to_date() -> None:
    text = write_docs.MEMORY.read_text()
    assert text == write_docs.with_memory(text), "run python -m tests.write_docs"


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("smollm3_3b_h100_float8_benchmark", Hardware("H100")),
        ("smollm3_3b_8xh200", Hardware("H200", 8)),
        ("llama3_70b_64x8h100", Hardware("H100", 512, 64)),
        ("mine_h1000", None),
        ("smollm3_debug", None),
    ],
)
def test_the_name_of_a_recipe_says_its_hardware(name: str, hardware: Hardware | None) -> None:
    assert hardware_of(name) == hardware


def check(*arguments: str) -> tuple[str, str]:
    command = [sys.executable, ROOT / "train.py", *arguments, "--check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout, ended.stderr


@pytest.mark.slow
def test_check_says_how_much_memory_of_the_gpu_a_recipe_needs() -> None:
    out, err = check("configs/benchmarks/smollm3_3b_8xh100.toml")
    recipe = load(ROOT / "configs/benchmarks/smollm3_3b_8xh100.toml")
    peak = predict(recipe, recipe.mesh.fit(8)).peak
    assert "on 8 processes: replicate 1 x shard 8" in out and not err
    assert f"# memory {peak / 1e9:.1f} of {MEMORY['H100'] / 1e9:.1f} GB (predicted), fullest at the " in out


@pytest.mark.slow
def test_check_warns_of_a_recipe_that_needs_more_memory_than_its_gpu_has() -> None:
    _, err = check("configs/benchmarks/smollm3_3b_8xh100.toml", "--batch.micro_batch_size=4")
    assert err.startswith("warning: 1") and "more than 94% of the 85.5 GB of an H100" in err


@pytest.mark.slow
def test_check_predicts_no_memory_for_a_recipe_that_is_not_made_for_a_gpu() -> None:
    assert "GB (predicted)" not in check("configs/smollm3_debug.toml")[0]


def job(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the batch script of a SLURM job does with --check, on one node of eight processes."""
    named = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node", "NPROC": "8"}
    command = [sys.executable, ROOT / "scripts/slurm.py", *arguments, "--check"]
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, **named, "PYTHON": sys.executable, "PATH": path, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_job_refuses_a_recipe_that_cannot_fit_unless_it_is_forced(tmp_path: Path) -> None:
    recipe = str(ROOT / "configs/benchmarks/smollm3_3b_8xh100.toml")
    assert job(tmp_path, recipe).returncode == 0
    refused = job(tmp_path, recipe, "--batch.micro_batch_size=4")
    assert refused.returncode == 2 and " of memory are predicted per process, but H100 has 85.5 GB; " in refused.stderr
    assert "refused: nothing was started" in refused.stdout
    assert job(tmp_path, recipe, "--batch.micro_batch_size=4", FORCE="").returncode == 2  # set, but to nothing
    forced = job(tmp_path, recipe, "--batch.micro_batch_size=4", FORCE="1")
    assert forced.returncode == 0 and forced.stderr.startswith("warning: ")


@pytest.mark.slow
def test_a_job_compares_with_the_gpu_that_its_node_has(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 40960'\n")
    tool.chmod(0o755)
    refused = job(tmp_path, str(ROOT / "configs/benchmarks/smollm3_3b_8xh100.toml"))
    assert refused.returncode == 2 and "but NVIDIA A100-SXM4-40GB has 42.9 GB" in refused.stderr
    assert job(tmp_path, str(ROOT / "configs/smollm3_debug.toml"), "--run.device=cpu").returncode == 0


def test_a_peak_that_is_more_than_enough_is_said_to_be_more() -> None:
    recipe, degrees = load(ROOT / "configs/benchmarks/smollm3_3b_8xh100.toml"), MeshDegrees(replicate=1, shard=8)
    whole = peak(recipe, degrees)
    assert peak(recipe, degrees, enough=whole) == whole
    assert all(share * whole < peak(recipe, degrees, enough=share * whole) <= whole for share in (0.1, 0.5, 0.99))


@pytest.mark.slow
def test_check_and_plan_predict_the_same_peak() -> None:
    recipe = "configs/benchmarks/smollm3_3b_8xh100.toml"
    command = [sys.executable, ROOT / "train.py", recipe, "--plan", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert f"# memory {found['peak_memory_gib'] * 2**30 / 1e9:.1f} of " in check(recipe)[0]
