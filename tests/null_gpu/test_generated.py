"""The bytes that generated kernels move: read from a module, and those of a real block on the null GPU."""

from pathlib import Path

import pytest

from tests.null_gpu.build import NullGpu
from tests.null_gpu.generated import count, table
from tests.null_gpu.suite import step
from tests.null_gpu.test_faults import RECIPE, gpu, on_null_gpu

__all__ = ["gpu"]
CODE = """
# AOT ID: ['0_forward']
triton_a = async_compile.triton('triton_a', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_out_ptr0': '*bf16', 'in_ptr0': '*fp32', 'xnumel': 'i32'}})
def triton_a(): pass
''', device_str='cuda')
triton_b = async_compile.triton('triton_b', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'X': 'constexpr'}})
def triton_b(): pass
''', device_str='cuda')

def call(args):
    arg0, arg1 = args
    assert_size_stride(arg0, (4, 100), (100, 1))
    assert_size_stride(arg1, (100, ), (1, ))
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((4, 100), (100, 1), torch.bfloat16)
        extern_kernels.mm(arg0, arg0, out=buf0)
        buf1 = buf0; del buf0  # reuse
        triton_a.run(buf1, arg1, 400, stream=stream0)
        buf2 = empty_strided_cuda((4, 100), (100, 1), torch.bfloat16)
        triton_b.run(buf1, buf2, stream=stream0)
        buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(reinterpret_tensor(buf2, (400, ), (1, ), 0))
        buf4 = buf3[0]
        assert_size_stride(buf4, (4, 100), (100, 1))
        buf5 = empty_strided_cuda((4, 100), (100, 1), torch.bfloat16)
        triton_b.run(buf4, buf5, stream=stream0)
        buf6 = torch.ops.aten.sort.default(arg0)
    return (buf5, )
"""


def test_each_launch_is_counted_by_its_kind_and_moves_its_bytes() -> None:
    found = count(CODE)
    assert [found[kind] for kind in ("fused", "products", "attention", "other")] == [3, 1, 1, 1]
    assert found["what"] == "block, forward"
    assert found["moved"] == (800 + 400 + 800) + (800 + 800) + (800 + 800)


def test_the_least_leaves_out_what_only_fused_kernels_see() -> None:
    """The product, arg1 and attention's answer are read; buf2, for attention, and the result are written."""
    assert count(CODE)["least"] == 800 + 400 + 800 + 800 + 800


def test_sizes_that_are_not_known_make_it_a_count_of_one_row() -> None:
    code = CODE.replace("_scaled_dot_product_flash_attention", "sort").replace("(4, 100)", "(s0, 100)")
    assert (found := count(code))["what"] == "loss, a row of logits"
    assert found["moved"] == (200 + 400 + 200) + 400 + 400


def test_shapes_that_torch_2_15_states_together_are_read() -> None:
    grouped = "assert_size_stride_grouped((arg0, arg1, ), ((4, 100), (100, ), ), ((100, 1), (1, ), ), 'input')"
    code = CODE.replace("assert_size_stride(arg0, (4, 100), (100, 1))", grouped)
    assert count(code.replace("    assert_size_stride(arg1, (100, ), (1, ))\n", "")) == count(CODE)


def test_the_same_modules_are_one_line_of_the_table() -> None:
    [*_, line] = table({"a_recipe": [count(CODE)] * 2})
    assert line == "| a_recipe | block, forward | 2 | 3 | 1 | 1 | 1 | 0.0052 | 0.0036 | 1.44 |"


class TestOnNullGpu:
    pytestmark = on_null_gpu

    def test_smollm3_moves_no_more_bytes_than_were_counted(self, gpu: NullGpu, tmp_path: Path) -> None:
        """2.299 GB a block in 13 kernels; each bfloat16 logit twice read and once written; 28 bytes a parameter."""
        seen = step(gpu, RECIPE, ("--compile.enabled", "true", "--model.layers", "2"), tmp_path / "step")
        modules = {what: [row for row in seen["generated"] if row["what"].startswith(what)] for what in PARTS}
        moved, fused, products = (sum(row[key] for row in modules["block"]) for key in ("moved", "fused", "products"))
        assert 2.2e9 < moved < 2.3e9 and (fused, products) == (13, 21)  # 2.255e9 by torch 2.15
        assert sum(row["moved"] for row in modules["loss"]) == pytest.approx(6 * 128_256, rel=0.001)
        parameters = (2 * 2048**2 + 2 * 512 * 2048 + 3 * 11008 * 2048 + 128_256 * 2048) / 8
        assert sum(row["moved"] for row in modules["update"]) == pytest.approx(28 * parameters, rel=0.001)
        assert all(row["moved"] <= 1.1 * row["least"] for row in seen["generated"])


PARTS = ("block", "loss", "update")
