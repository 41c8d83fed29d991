"""Pipeline parallelism: each process of a group has some of the blocks, and passes on what they return.

The model is cut into stages (parallel/stages.py). A process has one model with the blocks of all its stages under their
names in the whole one, so sharding, optimizer and checkpoints know nothing of stages. Every process reads the tokens,
targets and documents of its micro-batches itself: only hidden states travel. The order is that of torch's schedules,
which are given the numbers of micro-batches instead of their tensors.

B batch, T tokens of a row, P tokens of this process, D model width.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.interface import interface_of
from parallel.dist import all_gather_single, wait_for
from parallel.fsdp import expect_micro_batch
from parallel.mesh import Mesh, share_timeout
from parallel.passes import Batch, Passes, gradient_norm, one_or_nan, sum_over_group
from parallel.stages import Stages

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
}
"""pipeline.schedule -> the name in torch."""


class Pipeline(Passes):
    """Computes the gradients of the blocks that this process has, together with the processes that have the others.

    The model's forward pass becomes that of the whole model, without gradients: its losses on the last stage and zero
    on the others, or its logits on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        config: ModelConfig,
        stages: Stages,
        schedule: str,
        dtype: torch.dtype,
        compiled: bool,
        reshards: bool,
        has_z_loss: bool,
    ) -> None:
        """
        Args:
            model: the part that this process has, sharded.
            mesh: the one that it is sharded over, with a pipeline axis.
            config: that of the whole model.
            stages: all of them.
            schedule: as pipeline.schedule in a recipe.
            dtype: that of hidden states.
            compiled: whether the blocks are compiled when they are first called.
            reshards, has_z_loss: as of Passes.
        """
        super().__init__(model, mesh, reshards=reshards, has_z_loss=has_z_loss)
        assert mesh.pipeline is not None
        self._group, self._stages, self._config, self._dtype = mesh.pipeline.get_group(), stages, config, dtype
        self._own, self._kind = stages.of(self._group.rank()), SCHEDULES[schedule]
        self.copies = group_of_copies(mesh, stages) if config.tied_embeddings else None
        self._tied: nn.Parameter | None = None
        if self.copies is not None:
            self._tied = cast(nn.Parameter, model.get_submodule(cast(str, interface_of(model).embedding)).weight)
        self._gradients_on = next(model.parameters()).device  # the host, if they are offloaded
        self._is_cold = compiled
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._micro_batches: Sequence[Batch] = ()
        self._rows: Tensor | None = None
        self._progressed: Callable[[], None] = lambda: None
        self._target_tokens = self._losses = torch.zeros(())
        self._part: Callable[..., Tensor] = model.forward
        model.forward = self._forward
        # An error inside a schedule would print all of it, from every process (torch 2.11 to 2.13).
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    # Training

    def run(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: Tensor,
        *,
        step: int,
        progressed: Callable[[], None],
        rows: Tensor | None = None,
    ) -> Tensor:
        """As of Passes; the losses are zero but on the last stage. All micro-batches have one shape."""
        self._micro_batches, self._target_tokens, self._progressed = micro_batches, target_tokens, progressed
        self._losses = torch.zeros(2 if self.has_z_loss else (), device=target_tokens.device)
        root = self.units[0]
        expect_micro_batch(self.units, is_last=False, reshards=self.reshards)
        root.set_is_last_backward(False)
        if self._is_cold:
            self._compile_all_stages()
        self._begin(micro_batches, device=target_tokens.device)
        self._rows = rows
        numbers = torch.arange(len(micro_batches))
        first = (numbers,) if 0 in self._own else ()
        schedule, cause = self._planned(), None
        try:
            schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
        except RuntimeError as error:
            if (cause := error.__cause__) is None:
                raise
        if cause is not None:  # torch has put another error around that of a stage
            raise cause
        # Only now, since a process has several stages, and gradients of weights may come after those of hidden states:
        # FSDP reduces in this call what its hooks in the backward passes have not, as torch's own stages let it do.
        expect_micro_batch(self.units, is_last=True, reshards=self.reshards)
        root.set_is_last_backward(True)
        root._get_fsdp_state()._root_post_backward_final_callback()
        if self._tied is not None and self.copies is not None:  # of the look-up and of the projection
            sum_over_group(cast(DTensor, self._tied.grad).to_local(), self.copies)
        return self._losses

    def _compile_all_stages(self) -> None:
        """Call the blocks of all stages at the same time: in a schedule, each would wait for the one before to compile.

        The gradients that this adds are zero.
        """
        self._is_cold = False
        inputs, targets, documents = self._micro_batches[0]
        made = []
        for stage in self._own:
            hidden = torch.ones_like(self._hidden(inputs, length=inputs.shape[1] // self.mesh.degrees.context))
            given = None if stage == 0 else hidden.requires_grad_()
            layers = self._stages.layers[stage]
            made.append(self.model(inputs, targets, documents=documents, layers=layers, hidden=given))
        for one in made:  # after the first, FSDP looks at all blocks, whose weights must have been gathered
            one.backward(torch.zeros_like(one))

    def _planned(self) -> Any:
        """torch's schedule for so many micro-batches of this shape."""
        count, tokens = len(self._micro_batches), self._micro_batches[0][0]
        if (count, tokens.shape) not in self._schedules:
            hidden = self._hidden(tokens, length=tokens.shape[1] // self.mesh.degrees.context).requires_grad_()
            stages, last = [], len(self._stages.layers) - 1
            for stage in self._own:
                # With these, torch asks no other process for shapes, and computes nothing to find them.
                given = torch.zeros(1, dtype=torch.int64) if stage == 0 else hidden
                made = torch.zeros_like(self._losses).requires_grad_() if stage == last else hidden
                part: Any = nn.Module()  # with the parameters of the model, for schedules that split the backward pass
                part.model, part.forward = self.model, partial(self._forward_stage, stage)
                stages.append(
                    _PlannedStage(
                        part, stage, last + 1, tokens.device, input_args=given, output_args=made, group=self._group
                    )
                )
            kind = get_schedule_class(self._kind)
            one_or_all: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
            # The loss is divided by the targets of the whole batch: not by the number of micro-batches, too.
            schedule = kind(one_or_all, count, loss_fn=self._begin_backward, scale_grads=False)
            self._schedules[count, tokens.shape] = schedule
        return self._schedules[count, tokens.shape]

    def _hidden(self, tokens: Tensor, *, length: int) -> Tensor:
        """Memory for the hidden states of tokens (B, T): (B, P, D). length: tokens of a row in a tensor group."""
        shape = (tokens.shape[0], length // self.mesh.degrees.tensor, self._config.width)
        return torch.empty(shape, dtype=self._dtype, device=tokens.device)

    def _forward_stage(self, stage: int, hidden: Tensor, number: Tensor) -> Tensor:
        """What a stage makes of a micro-batch, (B, P, D), or of the last stage its losses.

        hidden: (B, P, D), or anything for the first stage; number: (1,), of the micro-batch.
        """
        self._progressed()
        inputs, targets, documents = self._micro_batches[int(number)]
        given = None if stage == 0 else hidden
        self._note(self._rows, int(number), of=len(self._micro_batches))
        made: Tensor = self.model(inputs, targets, documents=documents, layers=self._stages.layers[stage], hidden=given)
        self._note(None)
        made.register_hook(lambda gradient: self._progressed())  # a stage may have only backward passes left
        return made

    def _begin_backward(self, losses: Tensor, number: Tensor) -> Tensor:
        """What the backward pass of a micro-batch begins with. losses: those of the last stage."""
        mean = losses / self._target_tokens
        self._losses += mean.detach()
        loss = mean.sum() if self.has_z_loss else mean
        return loss * one_or_nan(loss)  # torch calls backward() itself

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """As of Passes."""
        return [parameter for parameter in parameters if parameter is not self._tied or 0 in self._own]

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """As of Passes, over the parameters of all stages; those given are of this process, or none."""
        own = self.counted(parameters)
        norm = gradient_norm(own) if own else torch.zeros((), device=self._gradients_on)
        norms = norm.new_empty(self._group.size())
        all_gather_single(norms, norm.view(1), group=self._group)  # not a sum, whose order a group may choose
        return norms.square().sum().sqrt()

    # Without gradients

    def _forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, layers: range | None = None, **options: Any
    ) -> Tensor:
        """The model's forward pass: of the blocks of a stage, or of all stages. Arguments as of models/decoder.py."""
        if layers is not None:
            return self._part(tokens, targets, layers=layers, **options)
        assert not torch.is_grad_enabled(), "run() computes gradients"
        last = len(self._stages.layers) - 1
        result: Tensor | None = None
        for stage in self._own:
            if stage and stage - 1 not in self._own:
                result = self._hidden(tokens, length=tokens.shape[1])
                self._move(dist.irecv, result, stage - 1)
            result = self._part(tokens, targets, layers=self._stages.layers[stage], hidden=result, **options)
            if stage != last and stage + 1 not in self._own:
                self._move(dist.isend, result.contiguous(), stage + 1)
        if targets is not None:
            return cast(Tensor, result) if last in self._own else torch.zeros((), device=tokens.device)
        if last not in self._own:
            result = torch.empty(*tokens.shape, self._config.vocabulary, dtype=self._dtype, device=tokens.device)
        logits = cast(Tensor, result).contiguous()
        dist.broadcast(logits, group=self._group, group_src=self._stages.owners[last])
        return logits

    def _move(self, way: Callable[..., Any], hidden: Tensor, stage: int) -> None:
        """Send to the process of another stage or receive from it, as torch's schedules do.

        A message by itself would make NCCL set up a communicator for each pair of processes.
        """
        message = dist.P2POp(way, hidden, group=self._group, group_peer=self._stages.owners[stage])
        for work in dist.batch_isend_irecv([message]):
            wait_for(work)


class _WithoutBuffers(dict[int, Any]):
    """What a stage receives of each micro-batch. Before torch 2.15, each came with its memory, for the whole run."""

    def __setitem__(self, number: int, infos: Any) -> None:
        super().__setitem__(number, infos)
        self.renew(number)

    def renew(self, number: int, device: torch.device | str = "meta") -> None:
        """Give a micro-batch other memory: on "meta", none."""
        for info in self.get(number, ()):
            if isinstance(buffer := getattr(info, "buffer", None), Tensor):  # torch 2.15 has None: it does the same
                info.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


class _PlannedStage(PipelineStage):
    """Has memory for what it receives from the message until it is used.

    Adds up gradients of weights that are computed apart in float32, as FSDP's hooks do in whole backward passes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.args_recv_info: _WithoutBuffers = _WithoutBuffers()
        self.grad_recv_info: _WithoutBuffers = _WithoutBuffers()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.args_recv_info.renew(fwd_chunk_id, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.grad_recv_info.renew(bwd_chunk_id, self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        made = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        self.args_recv_info.renew(fwd_chunk_id)  # the graph keeps it
        return made

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        self.grad_recv_info.renew(bwd_chunk_id)
        if (loss := options.get("loss")) is not None and options.get("full_backward", True):
            loss.detach_()  # the schedule keeps it to the end of the step, and its graph what the stage has received

    def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> None:
        super().backward_weight_one_chunk(*arguments, **options)
        cast(Any, self.submod).model._get_fsdp_state()._root_post_backward_final_callback()


def group_of_copies(mesh: Mesh, stages: Stages) -> ProcessGroup | None:
    """The processes of a pipeline group that have the first and the last stage, if these are two; None on others."""
    if not stages.splits_ends:
        return None
    assert mesh.pipeline is not None
    group = mesh.pipeline.get_group()
    if group.size() == 2:
        return group
    whole = mesh.devices.mesh.flatten(1)  # the pipeline axis is the first: (stages, groups)
    own, _ = dist.new_subgroups_by_enumeration(whole[list(stages.ends)].t().tolist())
    share_timeout([own] if own is not None else [])
    return own
