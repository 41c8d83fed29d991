"""What [model] becomes for a model that Hugging Face transformers defines, and this project does not.

Numbers that are counted on a model without values are counted by models/counts.py. Imports no torch.
"""

import json
import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from models.config import AttentionFlops, ModelConfig

# Before any import of transformers, which imports torchao: that tells of C++ extensions that a CPU cannot load.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)


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

    @property
    def by_transformers(self) -> bool:
        """Whether transformers computes this model, not our decoder."""
        return True

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.json."""
        return cast(dict[str, Any], json.loads(self.definition))

    @cached_property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads a prompt, and a decoder writes an answer."""
        if "is_encoder_decoder" in self.settings:
            return bool(self.settings["is_encoder_decoder"])
        from models.transformers import library_config

        return bool(library_config(self.settings).is_encoder_decoder)

    @property
    def computed_by(self) -> str:
        """The code that a run with this model goes through, and why."""
        return f"transformers, not our decoder: {self.reason}"

    def problems(self) -> list[tuple[str, str]]:
        """None: transformers knows the rules of each family."""
        return []

    def matmul_params(self) -> int:
        """Parameters in matrix products, of both stacks, each as often as a token meets it."""
        from models.counts import forward_flops

        return round((forward_flops(self).decoder + forward_flops(self).encoder) / 2)

    def num_params(self) -> int:
        """Total number of parameters, of a model without values; a tied weight counts once."""
        from models.counts import parameters

        return parameters(self)

    def flops_per_token(self, sequence_length: float, attention: AttentionFlops) -> int:
        """FLOPs as ModelConfig defines them, counted by torch on a model without values. For an encoder-decoder: per
        token of a prompt and an answer of `sequence_length` tokens each; counts.step_flops() takes real lengths."""
        from models.counts import Lengths, step_flops

        length = sequence_length
        if self.is_encoder_decoder:
            return round(step_flops(self, Lengths(1, length, 1, length, length), attention) / 2)
        return round(step_flops(self, Lengths(1, length), attention))
