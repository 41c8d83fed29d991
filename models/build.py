"""Builds the module that computes a model, from its shape."""

from torch import nn

from models.config import ModelConfig
from models.decoder import Decoder
from models.transformers_config import of_transformers


def build_model(config: ModelConfig, *, loss_chunks: int = 1, z_loss: float = 0.0) -> nn.Module:
    """The plain model on torch's current device (the meta device, where it is parallelized afterwards).

    Raises ValueError, with the reason, for a model of transformers that cannot be trained here.
    """
    if of_transformers(config):
        from models.transformers import TransformersModel

        return TransformersModel(config, loss_chunks=loss_chunks, z_loss=z_loss)
    return Decoder(config, loss_chunks=loss_chunks, z_loss=z_loss)
