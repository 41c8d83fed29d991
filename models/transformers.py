"""Any causal or encoder-decoder model of Hugging Face transformers as a model of ours. The only importer of it."""

from torch import Tensor, nn

from models.documents import Documents
from models.interface import ModelInterface
from models.loss import SummedLoss
from models.pairs import EncoderDecoderInputs
from models.transformers_config import TransformersConfig


class TransformersModel(nn.Module):
    """The contract of models.decoder.Decoder around a model of transformers, which is its child `model`."""

    def __init__(self, config: TransformersConfig, *, loss_chunks: int = 1) -> None:
        super().__init__()
        self.config = config
        self.loss = SummedLoss(loss_chunks)
        raise NotImplementedError

    @property
    def interface(self) -> ModelInterface:
        """What parallel/ may know of this model."""
        raise NotImplementedError

    def forward(
        self, inputs: Tensor | EncoderDecoderInputs, targets: Tensor | None = None, *, documents: Documents | None = None
    ) -> Tensor:
        """As Decoder.forward: logits (B, T, V), or, with targets (B, T), their summed loss, a scalar."""
        raise NotImplementedError
