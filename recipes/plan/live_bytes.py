"""How many bytes live at once while torch computes, counted storage by storage on fake tensors of the CPU."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """While entered, follows every storage from the operator that makes it to its end, and through its resizing."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.moment = self.fullest = "start"
        self.note: Callable[[], None] = lambda: None

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_  # no operator: FSDP frees and allocates with it

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._set(storage, size) if storage._cdata in self._sizes else None
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resized)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:  # in truth it returns its argument
            return args[0]
        result = func(*args, **(kwargs or {}))
        self.follow(*tree_leaves(result))
        return result

    def follow(self, *values: Any) -> None:
        """Count the storages of the tensors among these values."""
        for value in values:
            if isinstance(value, Tensor) and value.device == CPU:
                storage = storage_of(value)
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._forget, storage._cdata)
                    self._set(storage, storage.nbytes())

    def divided(self, tensors: Mapping[str, Iterable[Tensor | None]], *, rest: str) -> dict[str, int]:
        """Bytes that live now, by name; a storage that has several is counted under the first one."""
        sizes = dict(self._sizes)
        found = {}
        for name, several in tensors.items():
            storages = {storage_of(tensor)._cdata for tensor in several if tensor is not None}
            found[name] = sum(sizes.pop(storage, 0) for storage in storages)
        return found | {rest: sum(sizes.values())}

    def restart(self) -> None:
        """Forget the peak, not what lives."""
        self.peak = 0

    def _set(self, storage: torch.UntypedStorage, size: int) -> None:
        self.now += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        if self.now > self.peak:
            self.peak, self.fullest = self.now, self.moment
            self.note()

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; of a DTensor, behind this process's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Make this process rank 0 of so many; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds the names of groups
