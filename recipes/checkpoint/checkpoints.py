"""The checkpoints of one run: saved while it trains, resumed on any mesh.

What saves and what resumes is imported by the first save and the first load, because many runs do neither.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.files.layout import checkpoint_steps, step_folder

if TYPE_CHECKING:
    from recipes.checkpoint.save import Saver

STEP_BYTES = 4
"""Size of the step count that AdamW keeps for every parameter."""


class Checkpoints:
    """The checkpoints of one run, OUTPUT/NAME/checkpoints/step-00000100 and so on; see recipes/checkpoint/folder.py.

    All processes call all methods, in the same order. The state of random generators is not saved, because training
    uses none: initialization and sampling have their own seeds, and the order of the data follows from seed and step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool = False,
        files: Mapping[str, str] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            folder: the folder of the checkpoints.
            keep: how many of the newest checkpoints to keep.
            keep_every: also keep those whose step is a multiple of this (0 = none).
            asynchronous: write on a thread, from a copy in host memory, while training continues.
            files: name -> text of the small files in every checkpoint (weights/locate.py, checkpoint_files).
            log: receives one line of text per message.
        """
        self.folder, self.files = folder, files or {}
        self._log = log
        self._keep, self._keep_every, self._asynchronous = keep, keep_every, asynchronous
        # A group of its own: a save communicates on a thread while training communicates on others.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        self._messages: deque[str] = deque()
        self._saver: Saver | None = None
        self._newest: int | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.folder)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of this step."""
        return step_folder(self.folder, step)

    def require_space(self, parameters: Iterable[Tensor], *, moments: torch.dtype = torch.float32) -> None:
        """Log how many checkpoints fit on the disk. Raises UserError if not even one does.

        moments: the dtype of the two moments that AdamW keeps for every parameter.
        """
        from recipes.checkpoint.collective import run_on_all
        from recipes.checkpoint.space import disk_space

        size = sum(
            parameter.numel() * (parameter.element_size() + 2 * moments.itemsize) + STEP_BYTES
            for parameter in parameters
        ) + sum(len(text.encode()) for text in self.files.values())

        def look() -> None:
            if dist.get_rank() == 0:
                self._log("  " + disk_space(self.folder, checkpoint_bytes=size, keep=self._keep))

        run_on_all(look, group=self._group)

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, progress: Mapping[str, Any] | None = None
    ) -> None:
        """Save the state after `step` steps, then delete the checkpoints that need not be kept.

        An asynchronous save waits for the previous save to end and for the state to be copied to host memory. The
        result is logged by report(). Nothing is raised if the disk is full. progress: a small record in plain JSON.
        """
        self.finish()
        if self._saver is None:
            from recipes.checkpoint.save import Saver

            self._saver = Saver(
                self.folder,
                group=self._group,
                files=self.files,
                keep=self._keep,
                keep_every=self._keep_every,
                log=self._messages.append,
            )
        self._saver.save(model, optimizer, step=step, progress=progress or {}, asynchronous=self._asynchronous)

    def finish(self) -> int | None:
        """Wait for a save in flight and log its result. Returns the step saved or loaded last, or None."""
        if self._saver is not None and (saved := self._saver.wait()) is not None:
            self._newest = saved
        self.report()
        return self._newest

    def report(self) -> None:
        """Log the results of the saves that ended since the last call."""
        while self._messages:
            self._log(self._messages.popleft())

    def resume(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, check: Callable[[Path], None]
    ) -> dict[str, Any]:
        """Load the checkpoint of `step`, or the newest older one that is not damaged. Damaged ones are set aside.

        check: called on rank 0 with the checkpoint before any tensor is read; its errors stop all processes. Returns
        the saved progress, and "step". Raises UserError if no checkpoint is left.
        """
        from recipes.checkpoint.resume import resume

        self.finish()
        progress = resume(self.folder, model, optimizer, step=step, check=check, group=self._group, log=self._log)
        self._newest = progress["step"]
        return progress

    def load(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> dict[str, Any]:
        """Load the checkpoint of `step` into model and optimizer, from any mesh. Returns its progress.

        Raises Damage on all processes if one of them reads anything that is not as it was written.
        """
        from recipes.checkpoint.resume import load

        self.finish()
        progress = load(self.folder, model, optimizer, step=step, group=self._group)
        self._newest = step
        return progress
