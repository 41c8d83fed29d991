"""The lengths of the pairs that an encoder-decoder model reads, summed for the FLOPs of steps."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from models.counts import Lengths
from models.encoder_decoder import EncoderDecoderInputs
from models.loss import IGNORED
from parallel.passes import sum_over_group
from recipes.data.batches import MicroBatch


class PairLengths:
    """Sums over the pairs of all data ranks since the last logged step, without padding."""

    def __init__(self, group: ProcessGroup, *, device: torch.device) -> None:
        """group: the processes that read different pairs."""
        self._group = group
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def count(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Count one step of this process, by its inputs and targets. The host does not wait for the device."""
        for inputs, targets, _ in micro_batches:
            encoder = cast(EncoderDecoderInputs, inputs).encoder_mask.sum(1).double()  # (B,)
            decoder = (targets != IGNORED).sum(1).double()  # (B,)
            products = decoder, decoder * decoder, encoder, encoder * encoder, encoder * decoder
            self._sums += torch.stack([each.sum() for each in products])

    def per_step(self, steps: int) -> dict[str, Any]:
        """What Throughput.row() needs: the sums of one of so many steps. Then start again.

        Every process must call it, and the host waits for the device.
        """
        sums = Lengths(*sum_over_group(self._sums, self._group).tolist())
        self._sums.zero_()
        return {"lengths": sums / steps}
