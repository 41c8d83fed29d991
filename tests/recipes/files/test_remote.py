import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallel.errors import TemporaryError, UserError
from recipes.files import remote
from recipes.files.exit_codes import REFUSED, exit_code
from recipes.files.local_copy import local_copy
from tests.object_server import ObjectServer, hurried, object_server
from tests.processes import PATIENCE

pytestmark = pytest.mark.slow

pytest.importorskip("moto.server", reason="the server that speaks S3 is in the test extra")
pytest.importorskip("s3fs", reason="the extra `remote` is not installed")

CONTENT = random.Random(0).randbytes(300_007)


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        remote.write("s3://bucket/data/a.bin", CONTENT)
        yield server


@pytest.fixture
def server(running: ObjectServer) -> Iterator[ObjectServer]:
    with hurried(running, block=1 << 15, patience=PATIENCE) as server:
        yield server


def read_all() -> bytes:
    [file] = remote.find("s3://bucket/data/a.bin")
    with file.open() as content:
        return content.read()


def test_file_is_read_from_any_position(server: ObjectServer) -> None:
    [file] = remote.find("s3://bucket/data/*.bin", pattern=True)
    with file.open() as content:
        for position in (0, 299_999, 65_536, 1, 150_000):
            content.seek(position)
            assert content.read(100_000) == CONTENT[position : position + 100_000]
        assert content.seek(-5, 2) == len(CONTENT) - 5
        assert content.read() == CONTENT[-5:]


@pytest.mark.parametrize("fault", ["reset", "cut", "503", "500", "slow"])
def test_block_that_fails_on_its_way_is_asked_for_again(server: ObjectServer, fault: str) -> None:
    server.faults.extend([("GET", fault)] * 3)
    assert read_all() == CONTENT
    assert not server.faults


def test_server_that_is_lost_for_a_moment_costs_only_time(server: ObjectServer) -> None:
    [file] = remote.find("s3://bucket/data/a.bin")
    with file.open() as content:
        begin = content.read(1000)
        server.down = True
        threading.Timer(1.0, lambda: setattr(server, "down", False)).start()
        assert begin + content.read() == CONTENT


def test_server_that_stays_away_is_a_temporary_error(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 1.0)
    server.down = True
    with pytest.raises(TemporaryError, match="cannot be reached now"):
        read_all()


def test_wrong_key_is_told_from_a_fault(server: ObjectServer) -> None:
    server.always = "403"
    with pytest.raises(UserError, match="may not be used with these credentials") as raised:
        remote.read("s3://bucket/data/a.bin")
    assert not isinstance(raised.value, TemporaryError)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://no-such-bucket/x", "does not exist: The specified bucket does not exist"),
        ("s3://Bad!/x", "is not an address that can be used"),
        ("ftp://host/x", "addresses begin with s3://, gs:// or https://"),
    ],
)
def test_bad_address_is_refused_at_once(server: ObjectServer, address: str, message: str) -> None:
    """Faults that may pass would be tried again until the test is stopped."""
    with pytest.raises(UserError, match=message) as raised:
        remote.write(address, b"")
    assert not isinstance(raised.value, TemporaryError)


def test_missing_package_is_named(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match="gs://bucket/x is read with the package gcsfs, which is not installed"):
        remote.read("gs://bucket/x")


def test_missing_file_is_not_an_error(server: ObjectServer) -> None:
    assert remote.read("s3://bucket/nothing") is None
    assert remote.state("s3://bucket/nothing") is None
    assert remote.find("s3://bucket/nothing") == []
    remote.delete(["s3://bucket/nothing"])


@pytest.mark.parametrize("fault", ["reset", "503"])
def test_file_that_fails_on_its_way_to_the_server_is_sent_again(
    server: ObjectServer, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    server.faults.extend([("PUT", fault)] * 2)
    remote.upload(tmp_path / "file", f"s3://bucket/sent/{fault}")
    assert not server.faults
    assert remote.read(f"s3://bucket/sent/{fault}") == CONTENT


def test_copy_is_made_once_and_again_when_a_file_changes(server: ObjectServer, tmp_path: Path) -> None:
    remote.write("s3://bucket/copied/a.json", b"one")
    first = local_copy("s3://bucket/copied", tmp_path)
    lines: list[str] = []
    assert local_copy("s3://bucket/copied", tmp_path, log=lines.append) == first
    assert not lines
    remote.write("s3://bucket/copied/a.json", b"two")
    again = local_copy("s3://bucket/copied", tmp_path)
    assert (again / "a.json").read_text() == "two"
    (again / "a.json").write_text("owt")  # as long as it was
    assert (local_copy("s3://bucket/copied", tmp_path, log=lines.append) / "a.json").read_text() == "two"
    assert "a.json changed since it was copied; copied anew" in lines[-2]
    again.with_name(f"{again.name}.xxh3").unlink()  # as older versions leave it
    assert local_copy("s3://bucket/copied", tmp_path) == again
    assert (first / "a.json").read_text() == "one"
    (again / "a.json").write_text("tw")  # without checksums, the sizes at the server are known
    assert (local_copy("s3://bucket/copied", tmp_path) / "a.json").read_text() == "two"


def test_copy_has_the_folders_too_if_they_are_wanted(server: ObjectServer, tmp_path: Path) -> None:
    for name in ("a.json", "inside/b.json"):
        remote.write(f"s3://bucket/folders/{name}", b"one")
    found = [local_copy("s3://bucket/folders", tmp_path / str(deep), deep=deep) for deep in (True, False)]
    assert (found[0] / "inside" / "b.json").read_text() == "one"
    assert [file.name for file in found[1].iterdir()] == ["a.json"]


def test_copy_that_was_killed_is_continued(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        remote.write(f"s3://bucket/three/{name}", name.encode())

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local_copy("s3://bucket/three", tmp_path, check=killed)
    server.requests.clear()
    assert sorted(file.name for file in local_copy("s3://bucket/three", tmp_path).iterdir()) == ["a", "b", "c"]
    assert not [request for request in server.requests if "/bucket/three/" in request and request.startswith("GET")]


def test_copy_that_is_not_as_it_must_be_does_not_stay(server: ObjectServer, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise UserError(f"{(folder / 'a.bin').stat().st_size} wrong bytes")

    with pytest.raises(UserError, match="300007 wrong bytes"):
        local_copy("s3://bucket/data", tmp_path, check=refuse)
    assert not list((tmp_path / "remote").glob("data-*"))
    assert (local_copy("s3://bucket/data", tmp_path) / "a.bin").read_bytes() == CONTENT


def test_a_block_that_failed_while_nobody_waited_for_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        down = False

        def cat_file(self, address: str, *, start: int, end: int) -> bytes:
            if self.down:
                raise ConnectionError("the server is down")
            return CONTENT[start:end]

    server = Server()
    monkeypatch.setattr(remote, "_system", lambda address: server)
    for name, value in {"BLOCK": 10, "PATIENCE": 0.1, "LONGEST_PAUSE": 0.05}.items():
        monkeypatch.setattr(remote, name, value)
    blocks = remote._Blocks(remote.RemoteFile("s3://bucket/a.bin", remote.RemoteState(100, "tag")))
    found = blocks.read(10) + blocks.read(10)  # the second asks for those ahead
    for block in blocks._blocks.values():
        block.result(timeout=PATIENCE)
    server.down = True
    found += blocks.read(10)  # is here already; one more is asked for
    assert isinstance(blocks._blocks[max(blocks._blocks)].exception(timeout=PATIENCE), TemporaryError)
    server.down = False
    while piece := blocks.read(10):
        found += piece
    assert found == CONTENT[:100]


def test_a_file_whose_name_has_the_signs_of_a_pattern_is_found_by_its_name(server: ObjectServer) -> None:
    for name in ("part[1].jsonl", "part1.jsonl", "part?.jsonl"):
        remote.write(f"s3://bucket/odd/{name}", b"{}")
    assert [file.name for file in remote.find("s3://bucket/odd/part[1].jsonl")] == ["part[1].jsonl"]
    assert [file.name for file in remote.find("s3://bucket/odd/part[1].jsonl", pattern=True)] == ["part1.jsonl"]
    remote.delete(["s3://bucket/odd/part1.jsonl"])
    assert [file.name for file in remote.find("s3://bucket/odd/part[1].jsonl", pattern=True)] == ["part[1].jsonl"]


@pytest.mark.parametrize("code", ["RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"])
def test_what_did_not_arrive_whole_or_in_time_is_sent_again(server: ObjectServer, code: str) -> None:
    server.faults.extend([("PUT", f"400 {code}")] * 2 + [("PUT", "409 OperationAborted")])
    remote.write("s3://bucket/again", code.encode())
    assert not server.faults
    assert remote.read("s3://bucket/again") == code.encode()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three parts and a bit: 5 MiB is the least that S3 takes as a part."""
    monkeypatch.setattr(remote, "PART", 5 << 20)
    (tmp_path / "large").write_bytes(random.Random(1).randbytes((15 << 20) + 7))
    return tmp_path / "large"


def sent_parts(server: ObjectServer) -> list[str]:
    numbers = [re.search("partNumber=([0-9]+)", one) for one in server.requests if one.startswith("PUT")]
    return sorted(number[1] for number in numbers if number)


def test_a_part_that_fails_late_is_sent_again_alone_whatever_it_took(
    server: ObjectServer, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes longer than the patience."""
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    server.requests.clear()
    server.faults.extend([("PUT", ""), ("PUT", "late 503 SlowDown"), ("PUT", "late 400 RequestTimeout")])
    remote.upload(large, "s3://bucket/sent/large")
    assert remote.read("s3://bucket/sent/large") == large.read_bytes()
    assert len(sent_parts(server)) == 4 + 2


def test_an_upload_that_was_given_up_goes_on_with_what_has_arrived(
    server: ObjectServer, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    server.rule = lambda request: "503 SlowDown" if "partNumber=3" in request else ""
    with pytest.raises(TemporaryError, match="SlowDown"):
        remote.upload(large, "s3://bucket/given-up")
    assert remote.state("s3://bucket/given-up") is None
    server.heal()
    server.requests.clear()
    remote.upload(large, "s3://bucket/given-up")
    assert "3" in sent_parts(server) and "1" not in sent_parts(server)
    assert remote.read("s3://bucket/given-up") == large.read_bytes()


def test_parts_that_a_killed_process_left_are_deleted_below_an_address_only(
    server: ObjectServer, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.1)
    server.rule = lambda request: "503 SlowDown" if "partNumber=2" in request else ""
    for name in ("mine/a", "mine-too/a"):
        with pytest.raises(TemporaryError):
            remote.upload(large, f"s3://bucket/{name}")
    server.heal()
    assert remote.abort_uploads("s3://bucket/mine") == 1
    assert remote.abort_uploads("s3://bucket/mine") == 0
    assert remote.abort_uploads("s3://bucket/mine-too") == 1


@pytest.mark.parametrize(
    ("fault", "work", "says"),
    [
        ("403 AccessDenied", lambda: remote.write("s3://bucket/x", b""), "grant them s3:PutObject"),
        ("403 AccessDenied", lambda: remote.delete(["s3://bucket/x"]), "grant them s3:DeleteObject"),
        ("403", lambda: remote.state("s3://bucket/x"), "grant them s3:GetObject and s3:ListBucket"),
        ("403 RequestTimeTooSkewed", lambda: remote.write("s3://bucket/x", b""), "set this machine's clock"),
        ("403 ExpiredToken", lambda: remote.write("s3://bucket/x", b""), "renew these credentials"),
    ],
)
def test_a_refusal_names_the_right_that_is_missing_or_the_clock(
    server: ObjectServer, fault: str, work: Callable[[], object], says: str
) -> None:
    server.always = fault
    with pytest.raises(UserError, match=says) as raised:
        work()
    assert exit_code(raised.value) == REFUSED


def test_damage_that_the_clients_checksum_finds_is_no_fault_that_passes(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.1)
    remote.write("s3://bucket/flipped", b"as it was sent")
    server.faults.extend([("GET", "flip")])
    assert remote.read("s3://bucket/flipped") == b"as it was sent"
    assert not server.faults
    server.rule = lambda request: "flip" if request.startswith("GET") else ""
    with pytest.raises(remote.Altered, match="is damaged, at its server or on its way"):
        remote.read("s3://bucket/flipped")


def test_a_bucket_that_is_not_there_is_no_missing_file_in_any_words(server: ObjectServer) -> None:
    server.always = "404 NoSuchBucket"
    with pytest.raises(UserError, match="does not exist"):
        remote.read("s3://bucket/data/a.bin")
