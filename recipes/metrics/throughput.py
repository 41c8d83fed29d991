"""Rates of a step: tokens per second, FLOPs, MFU, attention length; and the device's name and the host's memory."""

import resource
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.config import AttentionFlops, ModelConfig
from parallel.errors import UserError
from parallel.passes import sum_over_group

if TYPE_CHECKING:
    from models.counts import Lengths
    from models.transformers_config import TransformersConfig
    from recipes.data.batches import MicroBatch

ATTENTION: tuple[AttentionFlops, AttentionFlops] = ("causal", "full")


class AttentionLength:
    """Mean length of the documents that tokens attend in, over all data ranks, since the last logged step."""

    def __init__(self, group: ProcessGroup, *, device: torch.device) -> None:
        """group: the processes that read different sequences."""
        self._group, self._device = group, device
        self._squared_lengths = self._tokens = 0

    def count(self, micro_batches: "Iterable[MicroBatch]") -> None:
        """Count one step of this process. The numbers are on the host, so nothing waits for the device."""
        for _, _, documents in micro_batches:
            if documents is not None:
                self._squared_lengths += documents.squared_lengths
                self._tokens += documents.positions.numel()

    def per_step(self, steps: int) -> dict[str, Any]:
        """What Throughput.row() needs: the mean in tokens, if there are documents. Then start again.

        steps: how many were counted. Every process must call it.
        """
        if self._tokens == 0:
            return {}
        sums = torch.tensor([self._squared_lengths, self._tokens], dtype=torch.float64, device=self._device)
        squared_lengths, tokens = sum_over_group(sums, self._group).tolist()
        self._squared_lengths = self._tokens = 0
        return {"attention_length": squared_lengths / tokens}


class Throughput:
    """Tokens and FLOPs per second from a step's duration.

    MFU: achieved over peak FLOP/s, counting each token's forward and backward once, recomputation not. `mfu` counts
    causal attention, `mfu_full` full attention (see ModelConfig.flops_per_token). The peak is always the dense bf16
    one, also where linears run in float8: then the figure compares with bf16 runs and may exceed 1.
    """

    def __init__(
        self, model: ModelConfig, *, tokens_per_step: int, sequence_length: int, devices: int, device: torch.device
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.devices = devices
        self.device_name = device_name(device)
        self.peak: float | None = None
        self.kinds = () if model.uncounted() else ATTENTION
        if self.device_name != "cpu" and self.kinds:
            from recipes.metrics.hardware import bf16_peak

            self.peak = bf16_peak(self.device_name)
        self.model = model
        try:
            self.flops: dict[AttentionFlops, float] = {
                kind: model.flops_per_token(sequence_length, kind) for kind in self.kinds
            }
        except ValueError as error:  # of a model of transformers
            raise UserError(f"model: {error}") from None

    def row(
        self,
        step_seconds: float,
        *,
        attention_length: float | None = None,
        tokens: float | None = None,
        lengths: "Lengths | None" = None,
    ) -> dict[str, float | None]:
        """The rate columns of metrics.jsonl; tflops and mfu are null where the device's peak is unknown. All is of one
        step. attention_length: from AttentionLength if documents are masked; replaces the sequence length in the FLOPs.
        tokens: of packed pairs, without padding; replace tokens_per_step. lengths: of the pairs of an encoder-decoder
        model, from PairLengths; replace all of these."""
        of_step = self.tokens_per_step if tokens is None else tokens
        flops, columns = self.flops, {}
        if attention_length is not None:
            flops = {kind: self.model.flops_per_token(attention_length, kind) for kind in self.kinds}
            columns = {"attention_length": attention_length}
        if lengths is not None:
            from models.counts import step_flops

            model, of_step = cast("TransformersConfig", self.model), lengths.encoder + lengths.decoder
            flops = {kind: step_flops(model, lengths, kind) / of_step for kind in ATTENTION}
            stacks = {"encoder": lengths.encoder, "decoder": lengths.decoder}
            columns = {f"{name}_tokens_per_second": count / step_seconds for name, count in stacks.items()}
        per_second = of_step / step_seconds
        per_device = per_second / self.devices
        return columns | {
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": per_device * flops["causal"] / 1e12 if self.peak else None,
            "mfu": per_device * flops["causal"] / self.peak if self.peak else None,
            "mfu_full": per_device * flops["full"] / self.peak if self.peak else None,
        }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class HostMemory:
    """The memory of every process on CPUs, at logged steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def counts(self) -> list[float]:
        """What this process tells the others."""
        return [peak_memory_gib()]

    def summary(self, rows: Tensor) -> Tensor:
        """What the host needs of the counts of all processes, (processes, counts), however many they are."""
        return torch.cat([rows[self._rank], extremes(rows).flatten()])

    def compare(self, numbers: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
        """The columns for metrics.jsonl, and lines for people, from the summary."""
        own, *ends = numbers
        return {"peak_memory_gib": own, **extreme_columns("peak_memory_gib", ends)}, []


def extremes(rows: Tensor) -> Tensor:
    """The most of each column and the first row that has it, the least and the first that has it, (4, columns); empty
    for a single row."""
    if len(rows) == 1:
        return rows.new_empty(4, 0)
    numbers = torch.arange(len(rows), device=rows.device)[:, None]  # (rows, 1)
    ends = rows.amax(0), rows.amin(0)
    first = [torch.where(rows == end, numbers, len(rows)).amin(0) for end in ends]
    return torch.stack([part for pair in zip(ends, first, strict=True) for part in pair])


def extreme_columns(column: str, ends: Sequence[float]) -> dict[str, float]:
    """The columns that say which process has most and least. ends: of extremes()."""
    names = ("most", "most_rank", "least", "least_rank") if ends else ()
    return {f"{column}_{name}": int(n) if "rank" in name else n for name, n in zip(names, ends, strict=True)}


def peak_memory_gib() -> float:
    """Most memory of the host that this process held, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
