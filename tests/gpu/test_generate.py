"""Text on a GPU: the tokens of a CPU, and no pause for every new length."""

import time

import pytest
import torch

from models.decoder import Decoder
from models.sizes import SIZES
from parallel.fsdp import materialize
from recipes.evaluation.generate import generate
from recipes.evaluation.opened import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def debug_model(device: str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(SIZES["smollm3_debug"])
    materialize(model, device=torch.device("cpu"), seed=0)
    return model.to(device)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_gpu_writes_the_tokens_of_a_cpu(temperature: float) -> None:
    sampling = Sampling(64, temperature=temperature, seed=5)
    texts = [list(generate(debug_model(device), range(40), sampling)) for device in ("cpu", "cuda")]
    assert texts[0] == texts[1]


def test_the_debug_model_writes_100_tokens_a_second_in_bfloat16() -> None:
    model = debug_model("cuda").to(torch.bfloat16)
    tokens = generate(model, range(40), Sampling(200))
    next(tokens)  # CUDA loads its kernels
    began = time.perf_counter()
    assert len(list(tokens)) / (time.perf_counter() - began) > 100
