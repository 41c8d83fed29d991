"""Tiny models of Hugging Face transformers, as the JSON of their config.json, and batches for them."""

import json
from typing import Any

import torch

from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from models.transformers_config import TransformersConfig

VOCABULARY, ROWS, LENGTH, ANSWER = 96, 4, 24, 12
_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_T5 = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": _T5,
    "t5_gated": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "qwen3": _LLAMA_LIKE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma2": _LLAMA_LIKE
    | {
        "model_type": "gemma2",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 30.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 16,
    },
    "mistral": _LLAMA_LIKE | {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": False},
}
"""By a name of ours: T5, T5 1.1 (an output projection of its own), sliding windows, capped and scaled logits."""


def family_config(name: str, *, dropout: bool = False, **changes: Any) -> TransformersConfig:
    """The model of FAMILIES with these keys of its config.json changed."""
    definition = FAMILIES[name] | changes
    return TransformersConfig(
        name="from_config",
        layers=2,
        width=64,
        feed_forward_width=96,
        heads=4,
        key_value_heads=4,
        head_width=16,
        vocabulary=VOCABULARY,
        tied_embeddings=definition.get("tie_word_embeddings", True),
        norm_eps=1e-6,
        rope_theta=1e4,
        dropout=dropout,
        definition=json.dumps(definition),
    )


def batch_for(config: TransformersConfig, step: int) -> tuple[torch.Tensor | EncoderDecoderInputs, torch.Tensor]:
    """Inputs and targets of a step: rows of text, or pairs of various lengths."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=random)
    if not config.is_encoder_decoder:
        targets = tokens[:, 1:].clone()
        targets[0, :5] = IGNORED
        return tokens[:, :-1], targets
    answers = torch.randint(3, VOCABULARY, (ROWS, ANSWER), generator=random)
    prompts, mask = tokens[:, 1:].clone(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    decoder = torch.cat((torch.zeros(ROWS, 1, dtype=torch.int64), answers[:, :-1]), dim=1)
    for row in range(1, ROWS):
        mask[row, -3 * row :], prompts[row, -3 * row :] = False, 0
        answers[row, -row:], decoder[row, -row:] = IGNORED, 0
    return EncoderDecoderInputs(prompts, mask, decoder), answers


def rows_of(inputs: Any, rows: slice) -> Any:
    """Some rows of a batch's inputs."""
    if isinstance(inputs, EncoderDecoderInputs):
        return EncoderDecoderInputs(inputs.encoder_tokens[rows], inputs.encoder_mask[rows], inputs.decoder_tokens[rows])
    return inputs[rows]
