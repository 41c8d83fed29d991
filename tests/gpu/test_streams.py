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
CONFIG = FSDPConfig(param_dtype="bfloat16", reduce_dtype="bfloat16")


def test_fsdp_calls_every_hook_on_the_stream_that_uses_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that one stream allocates and another uses is given away while it is in use, unless torch is told."""
    seen: dict[str, set[Any]] = {}

    def noted(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*arguments: Any, **options: Any) -> Any:
            into = " into memory" if options.get("out") is not None else ""
            seen.setdefault(f"{name}{into}", set()).add(torch.cuda.current_stream())
            return real(*arguments, **options)

        monkeypatch.setattr(place, name, call)

    noted(fsdp.Bfloat16ReduceScatter, "allocate")
    noted(fsdp, "_gather_nothing")
    noted(fsdp, "_whole_parameter")
    start("cuda", seed=0)
    # cuDNN's library asks the device for numbers, which one that computes nothing does not have.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        mesh = build_mesh(MeshDegrees(replicate=1, shard=1), device_type="cuda")
        with torch.device("meta"):
            model = Decoder(SIZES["smollm3_debug"])
        fsdp.shard_blocks_and_root(model, mesh, CONFIG)
        fsdp.materialize(model, device=torch.device("cuda", 0), seed=0)
        fsdp.compute_with_whole_shards(model, mesh, CONFIG)
        computes = torch.cuda.current_stream()
        for _ in range(2):
            tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
            model(tokens, tokens).sum().backward()
        reduces = fsdp.units_of(model)[-1]._get_fsdp_state()._comm_ctx.reduce_scatter_stream
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        stop()
    assert reduces != computes
    assert seen == {
        "allocate": {computes, reduces},  # of the message, and of the sum
        "_gather_nothing": {computes},
        "_whole_parameter": {computes},
        "_whole_parameter into memory": {computes},
    }
