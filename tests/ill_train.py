"""train.py with a fault in one rank, for tests: `ill_train.py FAULT RANK STEP [train.py's arguments]`."""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AS_NCCL = "as_nccl:"
"""Before a fault: with process groups that end as NCCL's do."""
sys.path.insert(0, str(ROOT))


def end_together() -> None:
    """Let destroy_process_group wait until all processes call it, as it does for NCCL (pytorch #141510)."""
    from torch import distributed as dist

    destroy = dist.destroy_process_group

    def wait_for_all(*arguments: Any) -> None:
        store = dist.distributed_c10d._get_default_store()
        if store.add("ending", 1) < dist.get_world_size():
            print("waits in destroy_process_group", file=sys.stderr, flush=True)
        while store.add("ending", 0) < dist.get_world_size():
            time.sleep(0.05)
        destroy(*arguments)

    dist.destroy_process_group = wait_for_all


def main(fault: str, ill: int, begin: int) -> None:
    import torch

    from recipes.data.loader import DataLoader
    from recipes.training import step as step_module
    from recipes.training.trainer import Trainer

    if fault.startswith(AS_NCCL):
        end_together()
    fault = fault.removeprefix(AS_NCCL)
    if int(os.environ.get("RANK", "0")) != ill:
        return
    take, step, add = DataLoader.batch, Trainer.take_step, step_module.sum_over_group
    state = {"steps": 0}

    def stuck_in_data(self: DataLoader, batch: int) -> Any:
        if batch >= begin:
            threading.Event().wait()
        return take(self, batch)

    def slow_in_data(self: DataLoader, batch: int) -> Any:
        time.sleep(0.1 if batch >= begin else 0)
        return take(self, batch)

    def stuck(self: Trainer) -> Any:
        if self.step >= begin:
            threading.Lock().acquire() and threading.Event().wait()
        return step(self)

    def stuck_in_forward(self: Trainer) -> Any:
        """Behind the embedding, while others wait inside of the first block."""
        if self.step >= begin:
            wait = threading.Event().wait
            self.built.model.embedding.register_forward_hook(lambda module, inputs, output: wait() and None)
        return step(self)

    def in_last_block(self: Trainer, work: Callable[[], object], *, backward: bool = False) -> Any:
        """Do this in the forward or backward pass of the last block that this process has."""
        if self.step >= begin:
            block = [*self.built.model.blocks][-1]
            hook = block.register_full_backward_hook if backward else block.register_forward_hook
            hook(lambda *_: work() and None)
        return step(self)

    def stuck_in_backward(self: Trainer) -> Any:
        return in_last_block(self, threading.Event().wait, backward=True)

    def fails_in_block(self: Trainer) -> Any:
        return in_last_block(self, fails)

    def fails_in_backward(self: Trainer) -> Any:
        return in_last_block(self, fails, backward=True)

    def out_of_memory_in_block(self: Trainer) -> Any:
        return in_last_block(self, out_of_memory_at_start)

    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("this rank alone")

    def slow_in_work(self: Trainer) -> Any:
        end = time.thread_time() + (0.1 if self.step >= begin else 0)
        while time.thread_time() < end:
            pass
        return step(self)

    def slow_at_first(self: Trainer) -> Any:
        """The model takes 7 s longer in its first step and in its first validation, as one that compiles."""

        def work(*_: Any) -> None:
            time.sleep(0 if torch.is_grad_enabled() in seen else 7)
            seen.add(torch.is_grad_enabled())

        if self.step == 0:
            self.built.model.embedding.register_forward_pre_hook(work)
        return step(self)

    seen: set[bool] = set()

    def flip_once(self: Trainer) -> Any:
        """Flips a bit of a weight that no step rounds away, in the first attempt only."""
        if self.step == begin and not Path("struck").exists():
            Path("struck").touch()
            self.built.parameters[0].to_local().detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
        return step(self)

    def killed_once(self: Trainer) -> Any:
        """As by the kernel, in the first attempt only."""
        if self.step == begin and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    def left_out(value: Any, group: Any) -> Any:
        state["steps"] += 1
        return value if state["steps"] == begin else add(value, group)

    def out_of_memory(self: Trainer) -> Any:
        if self.step >= begin:
            from torch import OutOfMemoryError

            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee the documentation")
        return step(self)

    def out_of_host_memory(self: Trainer) -> Any:
        if self.step >= begin:
            import torch

            torch.empty(1 << 46)  # 256 TiB, which the allocator refuses
        return step(self)

    def fails_in_step(self: Trainer) -> Any:
        if self.step >= begin:
            raise ValueError("this rank alone")
        return step(self)

    def interrupted_in_step(self: Trainer) -> Any:
        """A signal came, of which the other ranks know nothing, and a library takes it for an error."""
        self.interruption.noted = 10 if self.step >= begin else 0
        return fails_in_step(self)

    def out_of_memory_at_start(*_: Any, **__: Any) -> Any:
        from torch import OutOfMemoryError

        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    if fault in ("stuck_in_data", "slow_in_data"):
        DataLoader.batch = locals()[fault]  # type: ignore[method-assign]
    elif fault in (
        "stuck",
        "stuck_in_forward",
        "stuck_in_backward",
        "fails_in_block",
        "fails_in_backward",
        "out_of_memory_in_block",
        "slow_in_work",
        "out_of_memory",
        "out_of_host_memory",
        "flip_once",
        "killed_once",
        "slow_at_first",
        "fails_in_step",
        "interrupted_in_step",
    ):
        Trainer.take_step = locals()[fault]  # type: ignore[method-assign]
    elif fault == "fails_in_validation":
        Trainer.validate = fails  # type: ignore[method-assign]
    elif fault == "out_of_memory_at_start":
        from recipes.training import build_run

        build_run.build = out_of_memory_at_start
    elif fault == "left_out":
        step_module.sum_over_group = left_out
    else:
        assert fault == "well"


if __name__ == "__main__":
    name, rank, first = sys.argv[1:4]
    main(name, int(rank), int(first))
    sys.argv[:] = [str(ROOT / "train.py"), *(word for word in sys.argv[4:] if word != str(ROOT / "train.py"))]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
