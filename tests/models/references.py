"""Models of transformers with random weights, their folders, and our decoder with the weights of such a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from models.decoder import Decoder
from recipes.data.text.tokenizer import load_tokenizer
from recipes.weights.convert import load_weights
from recipes.weights.locate import find_weights


def with_random_routers(settings: Mapping[str, Any]) -> Any:
    """The model of this config.json with random weights, norms, routers and biases of routers included."""
    config = transformers.AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, settings["architectures"][0])._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor += 0.2 * torch.randn_like(tensor)
            if name.endswith("gate.weight"):
                tensor.copy_(torch.randn_like(tensor))
    return model


def saved(models: Mapping[str, Any], place: Path, corpus: Path) -> dict[str, Path]:
    """Name -> the folder of each model, as transformers saves it, with a tokenizer of 300 tokens."""
    options: dict[str, Any] = {"text_field": "text", "cache": place / "cache", "log": lambda line: None}
    tokenizer = load_tokenizer("train:300", sources=[str(corpus)], **options)
    folders = {name: place / str(number) for number, name in enumerate(models)}
    for name, model in models.items():
        model.save_pretrained(folders[name])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token="<|endoftext|>")
        fast.save_pretrained(folders[name])
    return folders


def loaded(folder: Path) -> Decoder:
    """Our decoder with the weights of a folder."""
    weights = find_weights(folder)
    model = Decoder(weights.model)
    load_weights(model, weights)
    return model
