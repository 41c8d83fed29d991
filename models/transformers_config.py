"""What [model] becomes for a model that Hugging Face transformers defines, and this project does not.

Imports no torch.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from models.config import ModelConfig


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A model of transformers, by its config.json. The fields of the decoder's shape describe it as far as they can:
    layers (of both stacks), width, heads, vocabulary; nothing is built from them."""

    definition: str = ""
    """The JSON text of its config.json."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.json."""
        settings: dict[str, Any] = json.loads(self.definition)
        return settings

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads a prompt, and a decoder writes an answer."""
        return bool(self.settings.get("is_encoder_decoder"))
