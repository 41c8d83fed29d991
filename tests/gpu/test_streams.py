"""On which streams FSDP2 calls what this project has put into it. Needs no numbers, only CUDA."""

from typing import Any

import pytest
import torch

from models.decoder import Decoder
from models.sizes import SIZES
from parallel import fsdp
from parallel.config import FSDPConfig, MeshDegrees
from parallel.dist import start, stop
from parallel.mesh import build_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams exist on GPUs"),
]


@pytest.mark.parametrize("reduced", ["bfloat16", "float32"])
def test_fsdp_calls_every_hook_on_the_stream_that_uses_its_memory(
    monkeypatch: pytest.MonkeyPatch, reduced: Any
) -> None:
    """Memory that one stream allocates and another uses is given away while it is in use, unless torch is told.

    And what one stream has freed no other can use: all memory is that of the stream that computes.
    """
    torch.cuda.empty_cache()
    seen: dict[str, set[Any]] = {}

    def noted(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*arguments: Any, **options: Any) -> Any:
            into = " into memory" if options.get("out") is not None else ""
            seen.setdefault(f"{name}{into}", set()).add(torch.cuda.current_stream())
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, call)

    noted(fsdp.Reduction, "allocate")
    noted(fsdp, "_gather_nothing")
    noted(fsdp, "_whole_parameter")
    config = FSDPConfig(param_dtype="bfloat16", reduce_dtype=reduced)
    start("cuda", seed=0)
    # cuDNN's library asks the device for numbers, which one that computes nothing does not have.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        mesh = build_mesh(MeshDegrees(replicate=1, shard=1), device_type="cuda")
        with torch.device("meta"):
            model = Decoder(SIZES["smollm3_debug"])
        fsdp.shard_blocks_and_root(model, mesh, config)
        fsdp.materialize(model, device=torch.device("cuda", 0), seed=0)
        fsdp.compute_with_whole_shards(model, mesh, config)
        computes = torch.cuda.current_stream()
        for _ in range(2):
            tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
            model(tokens, tokens).sum().backward()
            model.zero_grad()
        pools = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
        reduces = fsdp.units_of(model)[-1]._get_fsdp_state()._comm_ctx.reduce_scatter_stream
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        stop()
    assert reduces != computes
    assert pools == {computes.cuda_stream}
    assert seen == {
        "allocate": {computes, reduces},  # of the message, and of the sum
        "_gather_nothing": {computes},
        "_whole_parameter": {computes},
        "_whole_parameter into memory": {computes},
    }


def test_what_another_stream_writes_waits_for_what_has_been_computed_in_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[Any] = []
    gather, computes, gathers = fsdp.Gather("cuda"), torch.cuda.current_stream(), torch.cuda.Stream()
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda waiting, other: waits.append((waiting, other)))
    with torch.cuda.stream(gathers):
        memory = gather.allocate((2**25,), dtype=torch.float32, device=torch.device("cuda", 0))
        assert torch.cuda.current_stream() == gathers
    assert waits == [(gathers, computes)]
    pools = {
        segment["stream"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= memory.data_ptr() < segment["address"] + segment["total_size"]
    }
    assert pools == {computes.cuda_stream}
