import gzip
import json
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from parallel.errors import TemporaryError, UserError
from recipes.data.prepared import prepared_folder
from recipes.data.text.rows import open_rows
from recipes.data.text.sources import is_prepared, source_problem
from recipes.data.tokens.parts import Part, read_cuts
from recipes.data.tokens.prepare import write_shards
from recipes.files import remote
from tests.object_server import ObjectServer, hurried, object_server, upload_folder
from tests.processes import PATIENCE
from tests.recipes.data.texts import tokenizer_for, work_on, write_rows
from tests.recipes.data.tokens.test_parts import everything

pytestmark = pytest.mark.slow

pytest.importorskip("moto.server", reason="the server that speaks S3 is in the test extra")
pytest.importorskip("s3fs", reason="the extra `remote` is not installed")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each type."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("source") / "corpus"
    folder.mkdir()
    texts = write_rows(folder / "a.jsonl", 400)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines) + bytes(512))  # padded, as by a block device
    with pyarrow.CompressedOutputStream(str(folder / "d.jsonl.zst"), "zstd") as file:
        file.write(lines)
    table = pyarrow.table({"text": texts, "number": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=100)
    (folder / "f.txt").write_text("\n\n".join(texts))
    (folder / "g.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    (folder / "h.jsonl.gz").write_bytes(gzip.compress(lines)[:-300])  # broken off
    return folder


@pytest.fixture(scope="module")
def running(corpus: Path) -> Iterator[ObjectServer]:
    with object_server() as server:
        upload_folder(corpus, "s3://bucket/corpus")
        yield server


@pytest.fixture
def server(running: ObjectServer) -> Iterator[ObjectServer]:
    with hurried(running, block=1 << 13, patience=PATIENCE) as server:
        yield server


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.jsonl.gz", "d.jsonl.zst", "e.parquet", "f.txt", "g.csv"])
def test_rows_of_a_file_at_a_server_are_those_of_the_local_file(server: ObjectServer, corpus: Path, name: str) -> None:
    server.faults.extend([("GET", "cut"), ("GET", "503"), ("GET", "reset")])
    rows = open_rows(f"s3://bucket/corpus/{name}", text_field="text")
    begin = [next(rows) for _ in range(5)]
    rest = open_rows(f"s3://bucket/corpus/{name}", text_field="text", cursor=rows.cursor)
    assert begin + list(rest) == list(open_rows(str(corpus / name), text_field="text"))


def test_file_that_breaks_off_at_a_server_loses_the_rows_of_the_local_one(server: ObjectServer, corpus: Path) -> None:
    far, near = (
        open_rows(str(source), text_field="text") for source in ("s3://bucket/corpus/h.jsonl.gz", corpus / "h.jsonl.gz")
    )
    assert list(far) == list(near)


def test_tokens_of_a_folder_at_a_server_are_equal_to_the_byte_whatever_fails(
    server: ObjectServer, corpus: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_for(corpus / "a.jsonl")
    list(write_shards(tmp_path / "near", work_on(corpus, tokenizer=tokenizer)))
    server.faults.extend([("GET", fault) for fault in ("reset", "", "", "cut", "", "", "503", "", "500", "") * 3])
    work = work_on("s3://bucket/corpus/", tokenizer=tokenizer)  # type: ignore[arg-type]
    list(write_shards(tmp_path / "far", work))
    assert not server.faults
    arrays = sorted(file.name for file in (tmp_path / "near").glob("*.npy"))
    assert len(arrays) > 6
    assert [(tmp_path / "far" / name).read_bytes() for name in arrays] == [
        (tmp_path / "near" / name).read_bytes() for name in arrays
    ]


def test_parts_of_a_folder_at_a_server_hold_the_tokens_of_one_machine(
    server: ObjectServer, corpus: Path, tmp_path: Path
) -> None:
    work = work_on("s3://bucket/corpus/", tokenizer=tokenizer_for(corpus / "a.jsonl"))  # type: ignore[arg-type]
    list(write_shards(tmp_path / "whole", work))
    for number in (1, 2, 3, 4, 5):
        list(write_shards(tmp_path / "parts", work, part=Part(number, 5)))
    assert any(cut.at for cut in read_cuts(tmp_path / "parts"))
    assert everything(tmp_path / "parts") == everything(tmp_path / "whole")


def test_server_that_stays_away_ends_the_reading_with_a_temporary_error(
    server: ObjectServer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_on("s3://bucket/corpus/", tokenizer=tokenizer_for(corpus / "a.jsonl"))  # type: ignore[arg-type]
    shards = write_shards(tmp_path / "tokens", work)
    before = next(shards)
    server.down = True
    with monkeypatch.context() as patch, pytest.raises(TemporaryError, match="cannot be reached now"):
        patch.setattr(remote, "PATIENCE", 1.0)
        list(shards)
    server.down = False
    after = list(write_shards(tmp_path / "tokens", work))
    assert after[0].cursor != before.cursor
    assert after[-1].last


def test_file_that_changes_while_it_is_read_is_noticed(server: ObjectServer, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 400)
    remote.upload(tmp_path / "a.jsonl", "s3://bucket/changing/a.jsonl")
    work = work_on("s3://bucket/changing/*.jsonl", tokenizer=tokenizer_for(tmp_path / "a.jsonl"))  # type: ignore[arg-type]
    write_rows(tmp_path / "a.jsonl", 400, name="Dokument")
    remote.upload(tmp_path / "a.jsonl", "s3://bucket/changing/a.jsonl")
    with pytest.raises(UserError, match=r"'s3://bucket/changing/a.jsonl' changed while it was read"):
        list(write_shards(tmp_path / "tokens", work))


@pytest.mark.parametrize("parts", [1, 3])
def test_prepared_tokens_at_a_server_are_copied_and_verified(
    server: ObjectServer, corpus: Path, tmp_path: Path, parts: int
) -> None:
    for number in range(1, parts + 1):
        list(write_shards(tmp_path / "near", work_on(corpus / "a.jsonl"), part=Part(number, parts)))
    there = f"s3://bucket/tokens{parts}"
    upload_folder(tmp_path / "near", there)
    assert is_prepared(f"{there}/")
    assert not is_prepared("s3://bucket/corpus")
    copy = prepared_folder(there, tmp_path / "cache", log=lambda line: None)
    names = sorted(file.name for file in copy.iterdir())
    assert [(copy / name).read_bytes() for name in names] == [(tmp_path / "near" / name).read_bytes() for name in names]
    name = "00000-train.npy" if parts == 1 else "3000000-train.npy"
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    remote.write(f"{there}/{name}", bytes(content))
    with pytest.raises(UserError, match=f"'{there}' is damaged: {name} does not"):
        prepared_folder(there, tmp_path / "cache", log=lambda line: None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://bucket/corpus/*.bin", "no file matches"),
        ("s3://bucket/nothing", "there is no file of a supported type at"),
    ],
)
def test_source_without_files_says_what_to_write(server: ObjectServer, source: str, message: str) -> None:
    assert message in str(source_problem(source))


def test_file_of_a_web_server_is_read_like_a_local_one(corpus: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(corpus))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_address[1]}/a.jsonl"
        try:
            assert list(open_rows(address, text_field="text")) == list(
                open_rows(str(corpus / "a.jsonl"), text_field="text")
            )
        finally:
            web.shutdown()
