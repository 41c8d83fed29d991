"""From the shape of a model to the module that computes it."""

import logging

from torch import nn

from models.config import ModelConfig
from models.decoder import Decoder
from models.transformers_config import TransformersConfig


def build_model(config: ModelConfig, *, loss_chunks: int = 1) -> nn.Module:
    """The plain model on torch's current device (the meta device, where it is parallelized afterwards).

    Raises ValueError, with the reason, for a model of transformers that cannot be trained here.
    """
    if isinstance(config, TransformersConfig):
        # transformers loads torchao, which tells its own developers of extensions that a CPU does not have.
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from models.transformers import TransformersModel

        return TransformersModel(config, loss_chunks=loss_chunks)
    return Decoder(config, loss_chunks=loss_chunks)
