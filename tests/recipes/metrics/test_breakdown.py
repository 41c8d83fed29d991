"""The table of where a step's time went, from a hand-made trace of a GPU and a recorded trace of a CPU."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.sizes import SIZES
from parallel.config import FSDPConfig
from recipes.metrics.breakdown import (
    ATTENTION,
    CASTS,
    COMMUNICATION,
    COPIES,
    IDLE,
    KINDS,
    LOSS,
    MATMUL,
    OPTIMIZER,
    REST,
    STEP,
    Breakdown,
    break_down,
    read_trace,
    table,
)
from recipes.metrics.config import ProfileConfig
from recipes.optimization.config import OptimizerConfig
from recipes.recipe.schema import Recipe
from tests.meshes import mesh_degrees
from tests.processes import run_processes
from tests.training import change

# A GPU: kernels on two streams, each launched by an operator on a CPU thread


def cpu(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {}}


def launched(
    name: str, ts: float, dur: float, *, at: float, stream: int = 7, tid: int = 1, cat: str = "kernel", group: str = ""
) -> list[dict[str, Any]]:
    """A kernel with this name, and its launch at this moment of a CPU thread. group: as NCCL describes it."""
    number = {"correlation": hash((name, ts))}
    launch = {**cpu("cudaLaunchKernel", at, 1, tid, cat="cuda_runtime"), "args": number}
    found = {"stream": stream} | ({"Process Group Description": group} if group else {})
    return [launch, {**cpu(name, ts, dur, stream, cat=cat), "args": number | found}]


def gpu_step(begin: float) -> list[dict[str, Any]]:
    """1000 us; the kernels leave 80 us idle: 0 to 20, 840 to 860 and 960 to 1000."""
    events = [
        cpu(STEP, 0, 1000, cat="user_annotation"),
        {**cpu(STEP, 0, 1000, 7), "cat": "gpu_user_annotation"},  # torch also writes it to the GPU's track
        cpu("aten::linear", 5, 20),
        cpu("aten::mm", 6, 15),
        *launched("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 20, 180, at=10),
        *launched("ncclDevKernel_AllGather_RING_LL", 100, 150, at=30, stream=20),  # 100 hidden, 50 exposed
        cpu("aten::scaled_dot_product_attention", 50, 20),
        *launched("cudnn_generated_fort_native_sdpa_sm90_knob_7_flash_fprop", 250, 100, at=55),
        cpu("autograd::engine::evaluate_function: CompiledFunctionBackward", 80, 60, tid=2),
        *launched("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 350, 50, at=85, tid=2),
        *launched("triton_poi_fused__to_copy_abs_amax_clamp_mul_t_3", 400, 30, at=90, tid=2),
        *launched("void cutlass::device_kernel<sm90_f8_gemm>", 430, 170, at=95, tid=2),
        cpu("aten::cross_entropy_loss", 150, 20),
        *launched("void cunn_SoftMaxForward<4, float>", 600, 60, at=155),
        cpu("aten::to", 175, 20),
        cpu("aten::_to_copy", 176, 18),
        cpu("aten::copy_", 177, 16),
        *launched("void at::native::bfloat16_copy_kernel", 660, 20, at=180),
        cpu("gradient norm", 200, 20, cat="user_annotation"),
        cpu("aten::_foreach_norm", 201, 18),
        *launched("void multi_tensor_apply_kernel<LpNorm>", 680, 20, at=205),
        *launched("ncclDevKernel_ReduceScatter_Sum_f32_RING", 650, 190, at=206, stream=20),  # 700 to 840 exposed
        cpu("Optimizer.step#AdamW.step", 230, 20, cat="user_annotation"),
        *launched("void multi_tensor_apply_kernel<FusedAdam>", 860, 80, at=235),
        *launched("Memcpy HtoD (Pinned -> Device)", 940, 20, at=260, cat="gpu_memcpy"),
    ]
    for event in events:
        event["ts"] += begin
        if "correlation" in event["args"]:
            event["args"]["correlation"] += begin
    return events


EXPECTED = {
    MATMUL: 180 + 170,
    ATTENTION: 100,
    REST: 50,
    LOSS: 60,
    OPTIMIZER: 20 + 80,
    CASTS: 30 + 20,
    COPIES: 20,
    COMMUNICATION: 50 + 140,
    IDLE: 80,
}


def test_every_instant_of_a_gpu_step_belongs_to_one_kind() -> None:
    found = break_down([*gpu_step(0), *gpu_step(5000), {"ph": "M", "name": "process_name"}])
    assert found.steps == 2
    assert found.step_seconds == pytest.approx(1e-3)
    assert {kind: 1e6 * seconds for kind, seconds in found.seconds.items()} == pytest.approx(EXPECTED)
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds)
    assert found.hidden_communication == pytest.approx(150e-6)  # 100 of the gather, 50 of the reduction
    assert found.kernels[MATMUL] == [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", pytest.approx(180e-6), 1),
        ("void cutlass::device_kernel<sm90_f8_gemm>", pytest.approx(170e-6), 1),
    ]
    assert [name for name, _, _ in found.kernels[ATTENTION]] == [
        "cudnn_generated_fort_native_sdpa_sm90_knob_7_flash_fprop"
    ]


# Inductor names kernels after their own operators and after the neighbouring ones.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4", CASTS),
        (
            "triton_poi_fused__scaled_dot_product_cudnn_attention__scaled_mm__to_copy_clamp_mul_t_transpose_view_7",
            CASTS,
        ),
        ("triton_red_fused_abs_max_2", CASTS),  # the scale of a whole tensor
        ("triton_per_fused__to_copy_abs_amax_clamp_exp2_floor_log2_mul_reciprocal_3", CASTS),  # of each row
        ("triton_poi_fused__scaled_mm__to_copy_abs_amax_clamp_clone_max_mul_new_ones_reciprocal_t_view_0", CASTS),
        ("triton_poi_fused__to_copy_mul_reciprocal_t_15", CASTS),
        ("triton_poi_fused__to_copy_0", CASTS),
        ("triton_poi_fused__to_copy_mm_t_5", CASTS),  # of a weight, for a product of bf16
        ("triton_red_fused__scaled_mm__to_copy_abs_add_clamp_max_mean_mul_pow_reciprocal_rsqrt_t_view_1", REST),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_view_2", REST),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_add_cat_mul_neg_slice_transpose_view_3", REST),
        ("triton_poi_fused__scaled_dot_product_flash_attention_for_cpu_backward_transpose_view_2", REST),
        ("triton_poi_fused__scaled_dot_product_flash_attention_backward_add_transpose_6", REST),
        ("triton_poi_fused_mm_mul_silu_3", REST),
        ("triton_poi_fused__to_copy_mul_5", REST),  # not recognizable as scaling
        ("triton_poi_fused_addmm_view_5", REST),
        ("triton_tem_fused__scaled_mm__to_copy_t_3", MATMUL),
        ("triton_tem_fused_mm_3", MATMUL),
    ],
)
def test_a_compiled_kernel_counts_as_what_it_does_not_as_its_neighbours(name: str, kind: str) -> None:
    step = cpu(STEP, 0, 100, cat="user_annotation")
    backward = [
        cpu("autograd::engine::evaluate_function: CompiledFunctionBackward", 1, 50),
        cpu("CompiledFunctionBackward", 2, 40),
    ]
    found = break_down([step, *backward, *launched(name, 10, 60, at=3)])
    assert {kind: round(1e6 * seconds) for kind, seconds in found.seconds.items() if seconds} == {kind: 60, IDLE: 40}


@pytest.mark.parametrize("scope", ["_InChunks", "_InChunksBackward"])
def test_a_compiled_kernel_of_the_loss_counts_as_loss(scope: str) -> None:
    kernel = launched("triton_red_fused__to_copy_prepare_softmax_online_0", 10, 60, at=3)
    found = break_down([cpu(STEP, 0, 100, cat="user_annotation"), cpu(scope, 1, 50), *kernel])
    assert found.seconds[LOSS] == pytest.approx(60e-6)


def test_time_outside_the_traced_steps_does_not_count() -> None:
    found = break_down([*gpu_step(0), *launched("gemm", 990, 500, at=300), *launched("gemm", 3000, 500, at=2500)])
    assert found.seconds[MATMUL] == pytest.approx((350 + 10) * 1e-6)
    assert sum(found.seconds.values()) == pytest.approx(1e-3)


def test_communication_on_a_gpu_is_told_apart_by_axis_and_collective() -> None:
    events = [
        cpu(STEP, 0, 1000, cat="user_annotation"),
        *launched("nvjet_tst", 0, 300, at=1),
        cpu("FSDP::all_gather (blocks.0)", 10, 10, cat="user_annotation"),
        # Where shard = 1, FSDP shards over the context axis alone: one group for two purposes.
        *launched("ncclDevKernel_AllGather_RING_LL", 200, 150, at=15, stream=20, group="mesh_context"),
        *launched("ncclDevKernel_SendRecv", 350, 40, at=30, stream=21, group="mesh_context"),
        *launched("ncclDevKernel_SendRecv", 400, 20, at=32, stream=21, group="mesh_context"),
        *launched("ncclDevKernel_SendRecv", 430, 20, at=34, stream=23, group="mesh_pipeline"),
        *launched("ncclDevKernel_SendRecv", 640, 30, at=36, stream=24, group="mesh_expert"),
        *launched("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 450, 50, at=40, stream=22, group="mesh_tensor"),
        cpu("FSDP::post_backward_reduce (blocks.0)", 50, 30, cat="user_annotation"),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 500, 5, at=52, stream=22, group="mesh_tensor"),  # norms
        *launched("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 510, 50, at=55, stream=20, group="mesh_shard_context"),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 560, 70, at=60, stream=20, group="mesh_replicate"),
        cpu("gradient norm", 100, 10, cat="user_annotation"),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 700, 8, at=105, stream=22, group="mesh_tensor"),
        *launched(
            "ncclDevKernel_AllReduce_Sum_i64_RING_LL", 710, 2, at=120, stream=22, group="mesh_replicate"
        ),  # counts
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 720, 4, at=130, stream=22, group="default_pg"),
    ]
    found = break_down(events)
    in_microseconds = {label: (round(1e6 * s), round(1e6 * e), n) for label, (s, e, n) in found.collectives.items()}
    assert in_microseconds == {
        "context: all-to-all": (60, 60, 2),
        "expert: all-to-all": (30, 30, 1),
        "pipeline: send and receive": (20, 20, 1),
        "replicate: all-reduce": (70, 70, 1),
        "shard: all-gather": (150, 50, 1),
        "shard: reduce-scatter": (50, 50, 1),
        "sums: all-reduce": (14, 14, 3),
        "tensor: all-reduce": (5, 5, 1),
        "tensor: reduce-scatter": (50, 50, 1),
    }
    exposed = sum(exposed for _, exposed, _ in found.collectives.values())
    assert exposed == pytest.approx(found.seconds[COMMUNICATION])
    assert "| shard: all-gather | 0.15 | 0.05 | 1 |\n" in table(found)


def test_simultaneous_work_on_two_streams_counts_once() -> None:
    step = cpu(STEP, 0, 100, cat="user_annotation")
    found = break_down([step, *launched("gemm", 0, 60, at=1), *launched("fmha", 40, 50, at=2, stream=8)])
    assert [round(1e6 * found.seconds[kind]) for kind in (MATMUL, ATTENTION, IDLE)] == [60, 30, 10]


def test_the_table_has_a_row_for_each_kind_with_time_and_share() -> None:
    page = table(break_down(gpu_step(0)))
    assert "Mean of 1 traced steps: 1.00 ms." in page
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:10]] == list(KINDS)
    assert ["matrix multiplications", "0.35", "35.0%"] in lines
    assert ["sum", "1.00", "100.0%"] in lines
    assert ["communication, hidden behind work", "0.15", "15.0%"] in lines
    assert "| `nvjet_tst_128x256_64x4_2x1_v_bz_TNT` | 0.18 | 1 |\n" in page


# A CPU: real steps of a small model


Recorded = tuple[Path, list[float], list[float]]


def record(folder: str) -> tuple[list[float], list[float]]:
    """Trace two real steps in this process. Returns seconds by the host's clock: of each step alone, and around it."""
    from parallel.dist import start, stop
    from parallel.passes import gradient_norm
    from recipes.metrics.clock import RunClock
    from recipes.metrics.profile import StepProfiler
    from recipes.optimization.optimizer import build_optimizer
    from tests.build import build_model

    world = start("cpu", seed=0)
    try:
        model, _ = build_model(replace(SIZES["smollm3_debug"], layers=2), fsdp=FSDPConfig(), loss_chunks=2)
        optimizer = build_optimizer(model, OptimizerConfig())
        tokens = torch.randint(0, 4096, (4, 128))
        log: Callable[[str], None] = lambda line: None  # noqa: E731
        profiler = StepProfiler(
            ProfileConfig(trace_steps=2, after=2), world, folder=Path(folder), clock=RunClock(world.device), log=log
        )
        within, around = [], []
        for step in range(5):
            first = time.perf_counter()
            with profiler.step(step + 1):
                begin = time.perf_counter()
                model(tokens, tokens).backward()
                gradient_norm(model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                within.append(time.perf_counter() - begin)
            around.append(time.perf_counter() - first)
        return within[2:4], around[2:4]
    finally:
        stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("profile")
    return folder, *record(str(folder))


@pytest.fixture(scope="module")
def found(recorded: Recorded) -> Breakdown:
    return break_down(read_trace(recorded[0] / "trace.json.gz"))


@pytest.mark.slow
def test_the_parts_of_a_recorded_step_add_up_to_it(found: Breakdown, recorded: Recorded) -> None:
    assert found.steps == 2
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=1e-6)
    _, within, around = recorded
    assert 0.98 * sum(within) / 2 < found.step_seconds < 1.02 * sum(around) / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_of_one_process_has_every_kind_of_work(kind: str, found: Breakdown) -> None:
    assert found.seconds[kind] > 0


@pytest.mark.slow
def test_a_recorded_step_on_a_cpu_hides_no_communication(found: Breakdown) -> None:
    assert found.hidden_communication == 0


@pytest.mark.slow
def test_a_recorded_step_has_one_product_per_linear_forward_and_two_backward(
    found: Breakdown, recorded: Recorded
) -> None:
    products = [
        event
        for event in read_trace(recorded[0] / "trace.json.gz")
        if event.get("name") == "aten::mm" and "dur" in event
    ]
    # 7 linears in each of 2 layers and the output projection, once forward and twice backward, in each of 2 steps
    assert len(products) == 2 * 3 * (7 * 2 + 1)
    assert found.seconds[MATMUL] == pytest.approx(sum(event["dur"] for event in products) / 2e6, rel=0.02)
    assert [(name, calls) for name, _, calls in found.kernels[MATMUL]] == [("aten::mm", 45)]


@pytest.mark.slow
def test_a_recorded_step_names_its_attention_kernel(found: Breakdown) -> None:
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in [name for name, _, _ in found.kernels[ATTENTION]]


@pytest.mark.slow
def test_the_profiler_writes_trace_table_and_numbers(found: Breakdown, recorded: Recorded) -> None:
    folder = recorded[0]
    assert sorted(path.name for path in folder.iterdir()) == ["breakdown.json", "breakdown.md", "trace.json.gz"]
    assert (folder / "breakdown.md").read_text() == table(found)
    numbers = json.loads((folder / "breakdown.json").read_text())
    assert numbers["seconds"] == found.seconds


# Four CPU processes


def record_meshes(recipe: Recipe, folder: str) -> None:
    """Trace a step on each mesh."""
    from parallel.dist import start, stop
    from parallel.mesh import build_mesh
    from recipes.metrics.clock import RunClock
    from recipes.metrics.profile import StepProfiler
    from recipes.optimization.skip_steps import StepGuard
    from recipes.training.build import build
    from recipes.training.step import train_step

    world = start("cpu", seed=0)
    for case in CALLS:
        degrees, _, by = case.partition(":")
        mesh = build_mesh(mesh_degrees(degrees), device_type="cpu")
        experts = {"experts": 4, "experts_per_token": 2, "expert_width": 32} if by == "experts" else {}
        layout = {"context_by": "gather" if by == "gather" else "heads"}
        built = build(change(recipe, mesh=layout, model=experts), world, mesh=mesh)
        guard = StepGuard(mesh, device=world.device, max_skipped_steps=3, loss_spike_z=0.0)
        clock, config = RunClock(world.device), ProfileConfig(trace_steps=1, after=1)
        profiler = StepProfiler(config, world, folder=Path(folder) / case, clock=clock, log=print)
        tokens = torch.randint(0, 512, (2, 32))
        for step in (1, 2):
            with profiler.step(step):
                train_step(built, [(tokens, tokens, None)], step=step, learning_rate=1e-3, guard=guard, clock=clock)
    stop()


# Two layers of two parts, each of which gathers tokens and scatters them, forward and backward; the head and the
# embedding. FSDP gathers each layer twice, and embedding and final norm once. Attention exchanges tokens twice.
TENSOR = {"tensor: all-gather": 4 * 2 + 2, "tensor: reduce-scatter": 4 * 2 + 2, "tensor: all-reduce": 2 + 5}
SHARD = {"shard: all-gather": 2 * 2 + 1, "shard: reduce-scatter": 2 + 1}
CALLS = {
    "2.1.1.2": TENSOR | {"replicate: all-reduce": 2 + 1},
    "1.1.2.2": TENSOR | SHARD | {"context: all-to-all": 4 * 2},
    # Each layer tells counts once, and exchanges rows there and back, forward and backward. Its experts are gathered
    # over another mesh than its rest; routers are gathered once.
    "1.1.4.1.1.2:experts": {
        "expert: all-to-all": 2 * 5,
        "shard: all-gather": 2 * 2 * 2 + 1 + 1,
        "shard: reduce-scatter": 2 * 2 + 1 + 1,
    },
    "1.2.2.1:gather": SHARD | {"context: all-gather": 2, "context: reduce-scatter": 2},
}


@pytest.fixture(scope="module")
def on_meshes(small: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    run_processes(4, record_meshes, small, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS)
def test_a_recorded_step_on_a_mesh_counts_the_collectives_of_each_axis(case: str, on_meshes: Path) -> None:
    found = break_down(read_trace(on_meshes / case / "trace.json.gz"))
    calls = {label: calls for label, (_, _, calls) in found.collectives.items() if not label.startswith("sums")}
    assert calls == CALLS[case]
    assert all(0 <= exposed <= found.step_seconds for _, exposed, _ in found.collectives.values())
    assert sum(exposed for _, exposed, _ in found.collectives.values()) <= found.seconds[COMMUNICATION] * 1.001
    assert found.seconds[LOSS] > 0
