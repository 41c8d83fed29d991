"""A run that runs out of memory says which fields help, and exits with a code of its own."""

import errno
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel.dist import World
from parallel.errors import UserError
from parallel.nodes import arrange
from recipes.cluster.restarts import End, end_of
from recipes.files.exit_codes import OUT_OF_MEMORY
from recipes.metrics.hardware import hardware_of
from recipes.recipe.load import BENCHMARKS, CONFIGS, load, to_toml
from recipes.recipe.stages import stages_of
from recipes.training.out_of_memory import STATE, _advice, _changed, host_remedies, out_of_memory, remedies
from tests.test_hangs import ill_run
from tests.training import DEBUG, change


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["out_of_memory", pytest.param("out_of_host_memory", marks=pytest.mark.exhaustive)])
def test_a_rank_out_of_memory_ends_the_run_with_its_own_code_and_says_what_to_write(
    fault: str, tmp_path: Path, corpus: Path
) -> None:
    code, err = ill_run(tmp_path, corpus, fault, "--batch.micro_batch_size", "4", "--checkpoint.every", "2")
    assert code == OUT_OF_MEMORY and end_of([code])[0] is End.FINAL, err
    lines = err.splitlines()
    assert lines[0].startswith(f"OUT OF MEMORY: the host of rank 1 on {platform.node()}, after 5 steps: ") or (
        lines[0].startswith(f"OUT OF MEMORY: cpu of rank 1 on {platform.node()}, after 5 steps: CUDA out of memory. ")
    ), err
    assert lines[1] == "  write into the recipe, in this order until it fits:"
    assert lines[2].startswith("  batch.micro_batch_size = 2 ") and "Traceback" not in err
    log = (tmp_path / "runs" / "ill" / "log.txt").read_text()
    assert err in log and "Traceback" in log and f" in {fault}\n" in log
    assert (tmp_path / "runs" / "ill" / "checkpoints" / "step-00000004").is_dir()


def refused_by_the_allocator() -> BaseException:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 46)
    return error.value


def compiled(cause: BaseException) -> BaseException:
    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.distributed.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
        compiled(torch.OutOfMemoryError("CUDA out of memory.")),
        refused_by_the_allocator(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_mean_that_memory_ran_out_are_recognized(error: BaseException) -> None:
    assert out_of_memory(error) is not None


@pytest.mark.parametrize("error", [RuntimeError("gloo: connection closed"), OSError(errno.ENOSPC, "full"), KeyError()])
def test_other_errors_are_not_taken_for_a_lack_of_memory(error: BaseException) -> None:
    assert out_of_memory(error) is None


def world(kind: str, size: int) -> World:
    """A World of one node, as remedies() reads it."""
    nodes = arrange([("node", 0)] * size)
    return World(0, size, torch.device(kind), messages=None, nodes=nodes)  # type: ignore[arg-type]


def test_remedies_are_values_that_a_recipe_accepts_and_end_when_all_are_taken(tmp_path: Path) -> None:
    recipe = change(
        load(DEBUG),
        batch={"micro_batch_size": 4, "global_batch_size": 16},
        activation_checkpointing={"mode": "selective", "blocks": 2},
        fsdp={"reshard_after_forward": False, "prefetch": 3},
        mesh={"replicate": 2, "shard": 2},
    )
    taken = []
    for _ in range(100):
        found = [remedy for remedy in remedies(recipe, world("cuda", 4)) if remedy[0] != "batch.sequence_length"]
        if not found:
            break
        key, value, _ = found[0]
        section, name = key.split(".")
        fields = ({"replicate": 1, "shard": -1} if section == "mesh" else {}) | {name: value}
        recipe = replace(recipe, **{section: replace(getattr(recipe, section), **fields)})
        (tmp_path / "recipe.toml").write_text(to_toml(recipe))
        assert load(tmp_path / "recipe.toml", processes=4) == recipe
        taken.append(key)
    assert taken == [
        *["batch.micro_batch_size"] * 2,
        *["batch.loss_chunks"] * 3,
        "activation_checkpointing.blocks",
        "activation_checkpointing.mode",
        "fsdp.reshard_after_forward",
        "fsdp.prefetch",
        "mesh.shard",
        *["mesh.context"] * 2,
        "optimizer.state_dtype",
        "fsdp.cpu_offload",
    ]


@pytest.mark.parametrize(
    "path", [*sorted(CONFIGS.glob("*.toml")), *BENCHMARKS.glob("*.toml")], ids=lambda path: path.stem
)
def test_every_remedy_for_a_recipe_of_ours_is_a_recipe_that_loads(path: Path, tmp_path: Path) -> None:
    try:
        recipe = load(path, elsewhere=True)
    except UserError as error:
        assert "model.weights" in str(error)
        pytest.skip("its shape is in weights that are not here")
    hardware = hardware_of(recipe.run.name, written=recipe.run.hardware)
    size, nodes = (hardware.processes, hardware.nodes) if hardware else (recipe.mesh.fit(None).processes, 1)
    there = World(
        *(0, size, torch.device("cuda")),
        messages=None,  # type: ignore[arg-type]
        nodes=arrange([(f"node {rank * nodes // size}", 0) for rank in range(size)]),
    )
    for stage in stages_of(recipe):
        for key, value, _ in remedies(stage.recipe, there):
            (tmp_path / "recipe.toml").write_text(to_toml(_changed(stage.recipe, key, value)))
            load(tmp_path / "recipe.toml", processes=size, nodes=nodes, elsewhere=True)


def test_chunks_of_the_loss_are_no_remedy_in_compiled_code_which_holds_no_copy_of_the_logits() -> None:
    recipe = change(load(DEBUG), compile={"enabled": True})
    assert "batch.loss_chunks" not in [key for key, _, _ in remedies(recipe, world("cuda", 4))]


@pytest.mark.parametrize(
    ("dtype", "processes", "gathers"),
    [("float32", 1, False), ("float32", 2, True), ("bfloat16", 1, True)],
)
def test_resharding_is_no_remedy_where_the_shards_themselves_compute(dtype: str, processes: int, gathers: bool) -> None:
    recipe = change(load(DEBUG), fsdp={"reshard_after_forward": False, "param_dtype": dtype})
    found = [key for key, _, _ in remedies(recipe, world("cuda", processes))]
    assert ("fsdp.reshard_after_forward" in found) == gathers


@pytest.mark.parametrize(
    ("length", "by", "halved"),
    [(8, "heads", [4]), (4, "heads", []), (12, "heads", []), (16, "gather", [8]), (8, "gather", [])],
)
def test_a_shorter_sequence_is_named_if_all_processes_can_share_it(length: int, by: str, halved: list[int]) -> None:
    mesh = {"context": 2, "tensor": 2, "context_by": by}
    recipe = change(load(DEBUG), mesh=mesh, batch={"sequence_length": length})
    found = [value for key, value, _ in remedies(recipe, world("cpu", 4)) if key == "batch.sequence_length"]
    assert found == halved


def test_parts_of_sequences_and_matrices_are_named_if_processes_can_share_them() -> None:
    recipe = change(load(DEBUG), mesh={"shard": 4}, batch={"micro_batch_size": 1})
    found = {key: (value, effect) for key, value, effect in remedies(recipe, world("cuda", 4))}
    assert found["mesh.context"][0] == found["mesh.tensor"][0] == 2
    assert all(found[key][1].startswith("with mesh.shard = -1: ") for key in ("mesh.context", "mesh.tensor"))
    recipe = change(recipe, mesh={"shard": -1}, float8={"recipe": "tensorwise", "all_gather": True, "emulate": True})
    assert not [key for key, *_ in remedies(recipe, world("cuda", 1)) if key.startswith("mesh")]
    assert [key for key, *_ in remedies(recipe, world("cuda", 2)) if key.startswith("mesh")] == ["mesh.context"]


def test_remedies_for_a_pipeline_are_those_that_its_schedule_can_run() -> None:
    """A backward pass that is split needs whole weights, and 7 micro-batches can be interleaved, but not 14."""
    recipe = change(
        load(DEBUG),
        mesh={"pipeline": 2},
        model={"layers": 8},
        pipeline={"schedule": "zbv", "stages_per_rank": 2},
        fsdp={"reshard_after_forward": False},
    )
    found = {key: value for key, value, _ in remedies(recipe, world("cuda", 4))}
    assert "batch.micro_batch_size" in found and "fsdp.reshard_after_forward" not in found
    assert found["activation_checkpointing.mode"] == "full"
    recipe = change(
        recipe,
        mesh={"pipeline": 4},
        pipeline={"schedule": "interleaved"},
        batch={"global_batch_size": 14, "micro_batch_size": 2},
    )
    found = [key for key, _, _ in remedies(recipe, world("cuda", 4))]
    assert found and "batch.micro_batch_size" not in found


def test_before_the_first_step_only_what_shrinks_the_state_is_named() -> None:
    lines = _advice(
        change(load(DEBUG), mesh={"replicate": 2, "shard": 2}), world("cuda", 4), on_host=False, started=False
    )
    assert [line.split()[0] for line in lines[1:]] == [*STATE, "NPROC,"]


def test_the_host_is_no_place_for_the_state_of_muon() -> None:
    recipe = change(load(DEBUG), optimizer={"name": "muon"})
    lines = _advice(recipe, world("cuda", 4), on_host=False, started=False)
    assert "fsdp.cpu_offload" not in [line.split()[0] for line in lines]


def test_remedies_for_a_gpu_say_what_they_are_predicted_to_save() -> None:
    recipe = load(Path("configs/benchmarks/smollm3_3b_8xh100.toml"), ["--mesh.replicate=2", "--mesh.shard=4"])
    lines = _advice(change(recipe, batch={"micro_batch_size": 4}), world("cuda", 8), on_host=False)
    saved = [re.search(r"\(predicted: ([\d.]+) instead of ([\d.]+) GB\)$", line) for line in lines[1:-1]]
    assert len(saved) >= 6 and all(found and float(found[1]) < float(found[2]) for found in saved), lines
    on_host = _advice(recipe, world("cuda", 8), on_host=True)
    assert not [line for line in (*on_host, *_advice(recipe, world("cpu", 8), on_host=False)) if "predicted" in line]


def test_remedy_that_is_predicted_to_need_more_is_not_named() -> None:
    """With half a micro-batch this recipe would begin to accumulate gradients, which are whole meanwhile."""
    recipe = load(Path("configs/llama3_405b_128x8h100.toml"), rules=False)
    lines = "\n".join(_advice(recipe, world("cuda", 1024), on_host=False))
    assert "micro_batch_size" not in lines and "batch.sequence_length" in lines


@pytest.mark.parametrize(("compiled", "mode"), [("true", "full"), ("false", "selective")])
def test_selective_checkpointing_is_not_named_where_compiled_float8_keeps_as_much(compiled: str, mode: str) -> None:
    recipe = load(Path("configs/benchmarks/smollm3_3b_8xh100_float8.toml"), [f"--compile.enabled={compiled}"])
    found = {key: value for key, value, _ in remedies(recipe, world("cuda", 8))}
    assert found["activation_checkpointing.mode"] == mode


def test_a_lack_of_host_memory_beside_gpus_has_other_remedies() -> None:
    recipe = change(load(DEBUG), fsdp={"cpu_offload": True}, checkpoint={"every": 5, "asynchronous": True})
    assert [(key, value) for key, value, _ in host_remedies(recipe)] == [
        ("checkpoint.asynchronous", False),
        ("fsdp.cpu_offload", False),
    ]
