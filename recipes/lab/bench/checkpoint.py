"""Compares saving and loading with torch.distributed.checkpoint (DCP): `bench.py --suite checkpoint`."""

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from parallel.config import MeshConfig
from parallel.mesh import build_mesh
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.config import CheckpointConfig
from recipes.files.screen import say
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.optimizer import build_optimizer

ROWS = "rows.json"
"""The file in which rank 0 hands over what it measured."""
Row = dict[str, float]


def main(arguments: list[str]) -> int:
    """Prints medians and ratios. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.py --suite checkpoint", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=768, help="width of the twelve blocks")
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds, after one for warm-up")
    options = parser.parse_args(arguments)
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_work, (processes, Path(folder), options), nprocs=processes)
            _print(processes, json.loads((Path(folder) / ROWS).read_text()))
    say(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    return 0


def _print(processes: int, rows: list[Row]) -> None:
    gigabytes = rows[0]["gigabytes"]
    say(f"\n{processes} processes, {gigabytes:.2f} GB, median of {len(rows)}")
    baselines = {"stall": "dcp async, stall", "save": "dcp", "load": "dcp load"}
    for name in (name for name in rows[0] if name != "gigabytes"):
        seconds = [row[name] for row in rows]
        kind = "stall" if "stall" in name else "load" if "load" in name else "save"
        # Ratios within a round: a change of the machine's load affects both times.
        ratio = median(row[name] / row[baselines[kind]] for row in rows)
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        say(f"  {name:<34} {median(seconds):7.3f} s  ({spread})  {ratio:5.2f} x {baselines[kind]}")


def _work(rank: int, processes: int, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    bench = Bench(folder, options.width)
    rows = [bench.round(number) for number in range(options.repeats + 1)][1:]
    if rank == 0:
        (folder / ROWS).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def block(width: int) -> nn.Sequential:
    """The parameters of a transformer block; what it computes is meaningless."""
    shapes = ((width, width), (width, 3 * width), (3 * width, width), (width, 2 * width))
    return nn.Sequential(nn.RMSNorm(width), *(nn.Linear(*shape, bias=False) for shape in shapes), nn.GLU())


class Bench:
    """One state, and all ways to save and load it."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        mesh = build_mesh(MeshConfig().fit(dist.get_world_size()), device_type="cpu")
        self.model = nn.Sequential(*(block(width) for _ in range(12)))
        for part in self.model:
            fully_shard(part, mesh=mesh.fsdp)
        fully_shard(self.model, mesh=mesh.fsdp)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.model(torch.randn(2, width)).sum().backward()
        self.optimizer.step()
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.group = dist.new_group(backend="gloo")
        all_of_them = CheckpointConfig(keep=1000, asynchronous=False)
        self.ours, self.ours_async, self.ours_keep = (
            Checkpoints(folder / name, config, log=lambda line: None)
            for name, config in (
                ("ours", all_of_them),
                ("ours-async", replace(all_of_them, asynchronous=True)),
                ("ours-keep", replace(all_of_them, keep=1)),
            )
        )

    def round(self, number: int) -> Row:
        """Run each once, in an order that rotates from round to round, and delete what they wrote."""
        measured: Row = {"gigabytes": sum(p.numel() * p.element_size() for p in self.model.parameters()) * 3 / 1e9}
        trained: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": number}
        futures: list[Any] = []

        def dcp_async(name: str, **options: Any) -> None:
            path = self.folder / name
            futures.append(dcp.async_save(self._state(), checkpoint_id=path, process_group=self.group, **options))

        saves: dict[str, Callable[[], object]] = {
            "dcp": lambda: dcp.save(self._state(), checkpoint_id=self.folder / "dcp"),
            "ours": partial(self.ours.save, **trained),
            "dcp async": partial(dcp_async, "dcp async"),
            "ours async": partial(self.ours_async.save, **trained),
            # With staging memory that is reused, which DCP leaves to its caller.
            "dcp async, stager kept": partial(dcp_async, "dcp async, stager kept", async_stager=self.stager),
            "ours, an old one verified away": partial(self.ours_keep.save, **trained),
        }
        names = list(saves)
        start = number % len(names)
        for name in names[start:] + names[:start]:
            measured[name] = _seconds(saves[name])
            if "async" in name:
                measured[f"{name}, stall"] = measured[name]
                wait = self.ours_async.finish if name == "ours async" else lambda: futures.pop().result()
                measured[name] += _seconds(wait, together=False)
        loads: dict[str, Callable[[], object]] = {
            "ours load": partial(self.ours.load, **trained),
            "dcp load": self._dcp_load,
        }
        for name in reversed(loads) if number % 2 else loads:
            measured[name] = _seconds(loads[name])
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.folder.iterdir():
                if path.is_dir() and path.name != "ours-keep":
                    shutil.rmtree(path)
        dist.barrier()
        order = ["gigabytes", "dcp async, stall", "dcp async, stager kept, stall", "ours async, stall", "dcp", "ours"]
        order += ["ours, an old one verified away", "dcp async", "dcp async, stager kept", "ours async"]
        return {name: measured[name] for name in [*order, "dcp load", "ours load"]}

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _dcp_load(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder / "dcp")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _seconds(work: Callable[[], object], *, together: bool = True) -> float:
    """The seconds of the slowest process. together: start all at the same time."""
    if together:
        dist.barrier()
    began = perf_counter()
    work()
    taken = torch.tensor(perf_counter() - began)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()
