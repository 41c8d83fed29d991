"""Which process a hang is attributed to, from the reports of all processes."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.sizes import SIZES
from parallel import heartbeats
from parallel.config import MeshConfig
from parallel.dist import flight_record, on_main, start, stop
from parallel.heartbeats import ALARM, HUNG, Heartbeats, connect
from recipes.cluster.reports import Report, place_of, verdict
from tests.build import build_model
from tests.processes import run_processes

WAITING = Report(0, "a", "step", 7, 61.0, "parallel/passes.py:20 sum_over_group", waits=True, answers=True)


def reports(count: int, **odd: Report) -> list[Report]:
    """Reports of `count` processes that wait in the same place, except those given by rank: r2=..."""
    return [replace(odd.get(f"r{rank}", WAITING), rank=rank, node=f"h{rank // 2}") for rank in range(count)]


def named(found: Sequence[Report]) -> list[str]:
    return [line.split(":")[0].strip() for line in verdict(found).splitlines()[1:] if line.startswith("  rank ")]


def test_processes_that_do_not_answer_are_named_before_busy_ones() -> None:
    busy = replace(WAITING, waits=False, phase="data")
    found = reports(4, r1=busy, r2=replace(WAITING, answers=False), r3=Report(3))
    assert named(found) == ["rank 2 on h1", "rank 3 on h1"]
    lines = verdict(found).splitlines()
    assert lines[0] == "HUNG: no progress for 61 s; does not answer; the process is frozen or its node is gone:"
    assert lines[1:3] == [
        "  rank 2 on h1: last seen in phase step of step 7",
        "  rank 3 on h1: last seen in phase start",
    ]
    assert lines[3].startswith("  2 of 4 processes wait for it, rank 0 on h0 in phase step of step 7, at parallel/")


def test_a_busy_process_is_named_while_others_wait() -> None:
    found = reports(4, r1=replace(WAITING, waits=False, phase="data", place="recipes/data/text/rows.py:9 read"))
    assert named(found) == ["rank 1 on h0"]
    assert "  rank 1 on h0: phase data of step 7, at recipes/data/text/rows.py:9 read\n" in verdict(found)


def test_a_process_that_is_steps_behind_is_named() -> None:
    assert named(reports(4, r3=replace(WAITING, step=6))) == ["rank 3 on h1"]


def test_a_process_that_waits_in_a_different_place_is_named() -> None:
    assert named(reports(4, r2=replace(WAITING, place="models/decoder.py:3 forward"))) == ["rank 2 on h1"]


def test_two_processes_that_wait_in_different_places_are_both_named() -> None:
    found = reports(2, r1=replace(WAITING, place="models/decoder.py:3 forward"))
    assert named(found) == ["rank 0 on h0", "rank 1 on h0"]
    assert "wait for each other in different places" in verdict(found)


def test_no_process_is_blamed_when_all_wait_in_the_same_place() -> None:
    assert "all 4 processes are in the same place" in verdict(reports(4))


def test_a_single_stuck_process_is_reported_as_such() -> None:
    assert "the only process is stuck" in verdict(reports(1))


def test_only_the_first_of_many_culprits_are_listed() -> None:
    found = reports(40, **{f"r{rank}": Report(rank) for rank in range(20)})
    assert len(named(found)) == 8 and "\n  and 12 more\n" in verdict(found)


def look_at_a_wait() -> tuple[str, bool]:
    """Where rank 0 is while it waits for rank 1, as seen by another thread of it."""
    world = start("cpu", seed=0)
    seen: list[tuple[str, bool]] = []
    main = threading.main_thread().ident
    looked = threading.Event()

    def look() -> None:
        seen.append(place_of(main))
        looked.set()

    if world.rank == 0:
        threading.Timer(1.0, look).start()
    else:
        threading.Event().wait(2.0)
    on_main(world, lambda: None)
    dist.barrier()
    if world.rank == 1:
        look()
    looked.wait()
    stop()
    return seen[0]


@pytest.mark.slow
def test_waiting_for_other_processes_is_distinguished_from_own_work() -> None:
    waiting, working = run_processes(2, look_at_a_wait)
    assert waiting[1] and not working[1]
    assert waiting[0].startswith("tests/recipes/cluster/test_watchdog.py:") and waiting[0].endswith(" look_at_a_wait")


def look_at_a_sum() -> tuple[str, bool]:
    """Where rank 0 is at the end of its backward pass, while rank 1 has not begun: replicas sum their gradients."""
    start("cpu", seed=0)
    model, _ = build_model(SIZES["llama3_debug"], mesh=MeshConfig(replicate=2, shard=1))
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    model(tokens, tokens).backward()  # both have started
    main, seen = threading.main_thread().ident, list[tuple[str, bool]]()
    look = threading.Timer(2.0, lambda: seen.append(place_of(main)))
    look.start()
    if dist.get_rank() == 1:
        threading.Event().wait(4.0)
    model(tokens, tokens).backward()
    look.join()
    dist.barrier()
    stop()
    return seen[0]


@pytest.mark.slow
def test_waiting_for_the_gradients_of_other_replicas_is_distinguished_from_own_work() -> None:
    (place, waits), (_, working) = run_processes(2, look_at_a_sum)
    assert place.endswith(" look_at_a_sum") and waits and not working


GENERATED = """
def call(args):
    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(args[0], 2, group)
    torch.ops._c10d_functional.wait_tensor.default(buf0)
"""
"""As torch.compile writes it."""


def look_at_generated_code() -> bool:
    """Whether rank 0 waits for rank 1, when it does so in generated code."""
    start("cpu", seed=0)
    names = {"torch": torch, "group": dist.group.WORLD.group_name}
    exec(compile(GENERATED, "/generated/code.py", "exec"), names)
    main, seen = threading.main_thread().ident, list[bool]()
    look = threading.Timer(1.0, lambda: seen.append(place_of(main)[1]))
    look.start()
    if dist.get_rank() == 1:
        threading.Event().wait(2.0)
    names["call"]([torch.ones(2)])
    look.join()
    dist.barrier()
    stop()
    return seen[0]


@pytest.mark.slow
def test_waiting_inside_compiled_code_is_distinguished_from_own_work() -> None:
    assert run_processes(2, look_at_generated_code) == [True, False]


class CountingStore:
    """A store, and how often each of its operations was called."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.operations = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.operations.append(name)
            return operation(*arguments)

        return counted


def exchange(per_node: int, full: int | None = None) -> list[object]:
    """What each process sees before and after an alarm. per_node: processes of each of the nodes. full: the rank whose
    machine has no room in memory."""
    if os.environ["RANK"] == str(full):
        heartbeats.SHARED_MEMORY = Path("/proc")
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // per_node)
    world = start("cpu", seed=0)
    beats = Heartbeats(world)
    name_is_there = beats.board.path.exists()
    beats._store = counting = CountingStore(connect())  # type: ignore[assignment]
    before = beats.look()
    assert counting.operations == ["append", "add", "multi_get"]
    dist.barrier()
    beats.board.write(f"report of {world.rank}")
    dist.barrier()
    if beats.place == 0:
        counting.operations.clear()
        beats.publish(beats.board.words())
        beats.look()
        assert counting.operations == ["set", "multi_get"]
    first = beats.is_first(HUNG)
    beats.board.show(ALARM)
    dist.barrier()
    found = [before, name_is_there, first, beats.look(), beats.of_all(), beats.board.shows(ALARM), beats.told(HUNG)]
    dist.barrier()
    stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("full", [None, 1])
def test_every_process_reads_all_heartbeats_and_the_alarm_also_where_one_finds_no_room_in_memory(
    full: int | None,
) -> None:
    answers: list[Any] = run_processes(4, exchange, 2, full)
    assert sorted(answer[2] for answer in answers) == [False] * 3 + [True]
    boards = [["report of 0", "report of 1"], ["report of 2", "report of 3"]]
    for rank, (before, name_is_there, _, after, posted, alarm, hung) in enumerate(answers):
        assert (before, after) == (("", False), ("\n".join(boards[1 - rank // 2]), True))
        assert (posted, alarm, hung) == (boards, True, "4") and not name_is_there


def test_the_record_of_collectives_is_asked_of_the_class_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"nccl", raising=False)  # only CUDA builds have it
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda backend: backend.encode())
    for name, record in (("ProcessGroupNCCL", b"nccl"), ("ProcessGroupNCCL2", b"nccl2")):
        monkeypatch.setattr("parallel.dist.communication_backend", lambda _, name=name: name)
        assert flight_record() == record


def test_start_turns_on_the_flight_recorder_but_keeps_the_users_buffer_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores them
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "77")  # set by the user
    start("cpu", seed=0, flight_recorder=tmp_path / "flight-recorder-")
    stop()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "77"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight-recorder-")
