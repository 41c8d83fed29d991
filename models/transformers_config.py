"""What [model] becomes for a model that Hugging Face transformers defines, and this project does not.

Imports no torch.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from models.config import ModelConfig


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A model of transformers, by its config.json. The fields of the decoder's shape describe it as far as they can:
    layers (of both stacks), width, heads, vocabulary; nothing is built from them."""

    definition: str = ""
    """The JSON text of its config.json."""
    reason: str = field(default="", compare=False)
    """Why our decoder does not compute it."""
    positions: int = 0
    """Tokens of the longest sequence that it has positions for; 0 = no limit."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.json."""
        settings: dict[str, Any] = json.loads(self.definition)
        return settings

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads a prompt, and a decoder writes an answer."""
        if "is_encoder_decoder" in self.settings:
            return bool(self.settings["is_encoder_decoder"])
        from models.transformers import library_config

        return bool(library_config(self.settings).is_encoder_decoder)

    @property
    def computed_by(self) -> str:
        """As of a ModelConfig."""
        return f"transformers, not our decoder: {self.reason}"

    def problems(self) -> list[tuple[str, str]]:
        """None: transformers knows the rules of each family."""
        return []
