"""A small Llama with random weights, as transformers saves it."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.data.text.tokenizer import load_tokenizer


def save_tiny_llama(folder: Path, text: Path, **config: Any) -> Path:
    """Save it with a tokenizer of 300 entries that is trained on a text. Returns the Hugging Face folder."""
    tokenizer = load_tokenizer(
        "train:300", sources=[str(text)], text_field="text", cache=folder / "cache", log=lambda line: None
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<|endoftext|>")
    fast.save_pretrained(folder / "hf")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.end_of_document, "pad_token_id": None}
    model = LlamaConfig(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **sizes, **tokens, **config)
    LlamaForCausalLM(model).save_pretrained(folder / "hf")
    return folder / "hf"
