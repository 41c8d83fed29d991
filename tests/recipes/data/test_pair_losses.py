"""What models compute on batches of pairs: the loss of each answer to its own prompt, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from models.config import ModelConfig
from models.decoder import build_model
from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from parallel.fsdp import materialize
from recipes.data.pair_sequences import PairSequences
from recipes.data.text.pair_format import ID
from tests.families import family_config
from tests.models.test_cache import SMALL
from tests.recipes.data.test_pair_sequences import PACKED, PADDED, batches, opened, source, tokenizers

pytestmark = pytest.mark.slow

__all__ = ["source", "tokenizers"]  # fixtures

CAUSAL = {
    "our decoder": replace(SMALL, vocabulary=320),
    "gpt2": family_config("gpt2", vocab_size=320),
    "qwen3": family_config("qwen3", vocab_size=320),
}


def built(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        model = build_model(config)
    materialize(model, device=torch.device("cpu"), seed=1)
    return model


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_packed_pairs_have_the_loss_that_each_has_alone(source: Path, tokenizers: Any, name: str) -> None:
    model, data = built(CAUSAL[name]), opened(source, tokenizers[0])
    together = sum(
        model(inputs, targets, documents=documents).item()
        for inputs, targets, documents in batches(data, PACKED).take_once(0)
    )
    assert isinstance(data.training, PairSequences)
    alone = 0.0
    for number in range(12):
        found, pairs = data.training.pairs(number)
        for pair in pairs.tolist():
            ids = torch.from_numpy((found.read(pair) & ID).astype("int64"))[None]  # (1, T + 1)
            targets = ids[:, 1:].clone()
            targets[:, : int(found.pairs.prompts[pair]) - 1] = IGNORED
            alone += model(ids[:, :-1], targets).item()
    assert together == pytest.approx(alone, rel=1e-5)
    data.training.close()


@torch.no_grad()
def test_padded_pairs_have_the_loss_that_transformers_gives_each_alone(source: Path, tokenizers: Any) -> None:
    config = family_config("t5", vocab_size=320)
    model, data = built(config), opened(source, tokenizers[0], PADDED)
    plain = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config.settings)).eval()
    missing, unexpected = plain.load_state_dict(
        {name.removeprefix("model."): value for name, value in model.state_dict().items()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    for inputs, targets, _ in batches(data, PADDED, micro=6).take_once(0):
        assert isinstance(inputs, EncoderDecoderInputs)
        alone = 0.0
        for tokens, mask, labels in zip(inputs.encoder_tokens, inputs.encoder_mask, targets, strict=True):
            answer = labels[labels != IGNORED][None]
            alone += plain(input_ids=tokens[mask][None], labels=answer).loss.item() * answer.numel()
        assert model(inputs, targets).item() == pytest.approx(alone, rel=1e-5)
    data.training.close()
