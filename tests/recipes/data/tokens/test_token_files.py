"""Files of tokens that other trainers wrote, read where they are. Each is written here by its definition:

datatrove  TokenizedFile, src/datatrove/pipeline/tokens/tokenizer.py: tokens, uint64 ends of documents, three lines
Megatron   _IndexWriter, megatron/core/datasets/indexed_dataset.py: "MMIDIDX", version, type, two counts, int32 lengths,
           int64 places in bytes, int64 documents (numbers of sequences, from 0 to all)
llm.c      write_datafile, dev/data/data_common.py: 256 int32 (magic, version, tokens), then the tokens
nanoGPT    data/openwebtext/prepare.py: uint16, nothing else
numpy      numpy.lib.format
"""

import os
import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.errors import UserError
from recipes.data.config import BatchConfig, DataConfig
from recipes.data.open_data import Data, DataSettings, Launch, open_data
from recipes.data.sequences import Sequences
from recipes.data.text.sources import is_prepared, source_problem
from recipes.data.text.tokenizer import Tokenizer, load_tokenizer
from recipes.data.tokens.token_files import TokenFiles, token_files
from recipes.files.exit_codes import REFUSED
from recipes.files.layout import TOKENIZER
from recipes.training.check import check
from tests.commands import run_command
from tests.recipes.data.texts import shards_in, tokenizer_for, work_on, write_rows
from tests.training import DEBUG

LENGTH = 16
Documents = list[list[int]]


def write_datatrove(path: Path, documents: Documents, dtype: str = "<u2") -> str:
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(path)
    ends = np.cumsum([len(document) for document in documents], dtype="<u8")
    ends.tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"gpt2|{np.dtype(dtype).itemsize}\n{ends[-1]}\n{ends[-1]} T")
    return str(path)


def write_megatron(path: Path, documents: Documents, code: int = 8) -> str:
    """Each document but the first as two sequences."""
    dtype = {4: np.dtype("<i4"), 5: np.dtype("<i8"), 7: np.dtype("<f4"), 8: np.dtype("<u2")}[code]
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(path)
    lengths = [len(documents[0]), *(length for each in documents[1:] for length in (1, len(each) - 1))]
    places = [0, *np.cumsum(lengths)[:-1] * dtype.itemsize]
    with path.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents) + 1))
        index.write(np.array(lengths, "<i4").tobytes() + np.array(places, "<i8").tobytes())
        index.write(np.array([0, *range(1, 2 * len(documents), 2)], "<i8").tobytes())
    return str(path)


def write_llm_c(path: Path, documents: Documents, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> str:
    tokens, header = np.array([*chain(*documents)], dtype), np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return str(path)


def write_plain(path: Path, documents: Documents, dtype: str = "uint16") -> str:
    np.array([*chain(*documents)], dtype).tofile(path)
    return f"{dtype}:{path}"


def write_npy(path: Path, documents: Documents, dtype: str = "<i4") -> str:
    np.save(path, np.array([*chain(*documents)], dtype))
    return str(path)


def write_several(folder: Path, documents: Documents) -> str:
    folder.mkdir()
    for number in range(3):
        write_datatrove(folder / f"{number:05d}_shuffled.ds", documents[100 * number : 100 * (number + 1)], "<u4")
    (folder / "00003_shuffled.ds").touch()  # of a process that had no documents
    (folder / "00003_shuffled.ds.index").touch()
    return f"{folder}/*.ds"


WRITERS: dict[str, Callable[[Path, Documents], str]] = {
    "datatrove": lambda folder, documents: write_datatrove(folder / "a.ds", documents),
    "datatrove uint32": lambda folder, documents: write_datatrove(folder / "b.ds", documents, "<u4"),
    "several": lambda folder, documents: write_several(folder / "many", documents),
    "megatron": lambda folder, documents: write_megatron(folder / "c.bin", documents),
    "megatron int32": lambda folder, documents: write_megatron(folder / "d.bin", documents, 4),
    "llm.c": lambda folder, documents: write_llm_c(folder / "e.bin", documents),
    "llm.c uint32": lambda folder, documents: write_llm_c(folder / "f.bin", documents, 20240801, 7, "<u4"),
    "nanoGPT": lambda folder, documents: write_plain(folder / "g.bin", documents),
    "int64": lambda folder, documents: write_plain(folder / "h.bin", documents, "int64"),
    "npy": lambda folder, documents: write_npy(folder / "i.npy", documents),
    "npy uint8": lambda folder, documents: write_npy(folder / "j.npy", [[5, 6, 0]] * 300, "u1"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer, Documents]:
    """A folder with shards of 300 documents, in prepared/; their tokenizer; and their tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_rows(folder / "rows.jsonl", 300)
    tokenizer = tokenizer_for(folder / "rows.jsonl")
    shards_in(folder / "prepared", work_on(folder / "rows.jsonl", fraction=0, tokenizer=tokenizer))
    return folder, tokenizer, [[*tokenizer.ids(text), tokenizer.end_of_document] for text in texts]


def opened(source: str, tokenizer: Tokenizer, lines: list[str] | None = None, **data: Any) -> Data:
    section = DataConfig(source=source, validation_fraction=0, cache="/nowhere", **data)
    settings = DataSettings(section, BatchConfig(sequence_length=LENGTH), 3, lambda: tokenizer, validation={})
    log = (lambda line: None) if lines is None else lines.append
    return open_data(settings, Launch(run="this", writes=True, log=log), resumed_data_state={})


def sequences_of(source: str, tokenizer: Tokenizer, **data: Any) -> Sequences:
    found = opened(source, tokenizer, **data).training
    assert isinstance(found, Sequences)
    return found


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "npy uint8"])
def test_rows_and_their_documents_are_those_of_the_same_text_prepared_by_us(
    name: str, corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    folder, tokenizer, documents = corpus
    ours = sequences_of(str(folder / "prepared"), tokenizer)
    source = WRITERS[name](tmp_path, documents)
    assert is_prepared(source) and source_problem(source)
    theirs = sequences_of(source, tokenizer, document_mask=True)
    count = 2 * ours.sources[0].sequences + 3  # over two borders of epochs
    assert np.array_equal(ours.rows(0, count), theirs.rows(0, count))
    for number in range(0, count, 7):
        pieces = [(one.row - 1, one.begin, one.end) for one in ours.pieces(number)]
        file_rows = 100 if name == "several" else 0
        assert pieces == [(one.file * file_rows + one.row - 1, one.begin, one.end) for one in theirs.pieces(number)]
    assert not [*tmp_path.glob("**/*.json")], "something is written beside the files"


def test_each_file_says_how_many_tokens_and_documents_it_holds(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    documents, tokens = corpus[2], sum(map(len, corpus[2]))
    for name, write in WRITERS.items():
        files = token_files(write(tmp_path, documents))
        assert sum(file.tokens for file in files) == (900 if name == "npy uint8" else tokens)
        assert sum(file.documents for file in files if file.index) in (0, 300)


def test_a_change_of_the_files_changes_the_state_that_a_resumed_run_compares(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    _, tokenizer, documents = corpus
    source = write_datatrove(tmp_path / "a.ds", documents)
    before = opened(source, tokenizer)
    assert opened(source, tokenizer).data_state == before.data_state
    write_datatrove(tmp_path / "a.ds", [documents[1], documents[0], *documents[2:]])
    after = opened(source, tokenizer)
    assert after.data_state["sources"][source]["text"] != before.data_state["sources"][source]["text"]
    assert after.data_state["sources"][source]["tokens"] != before.data_state["sources"][source]["tokens"]
    assert after.training.checksums(1) != before.training.checksums(1)


def test_an_id_beyond_the_vocabulary_is_refused_with_its_file_and_place(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer, documents = corpus
    write_datatrove(tmp_path / "00.ds", documents)
    for bad, name in ((tokenizer.vocabulary, "01.ds"), (-1, "01.npy")):
        wrong = [documents[0], [1, 2, bad, tokenizer.end_of_document], *documents[1:]]
        if name.endswith(".npy"):
            source = write_npy(tmp_path / name, wrong)
        else:
            write_datatrove(tmp_path / name, wrong)
            source = f"{tmp_path}/0*.ds"
        says = f"{name}' holds {bad} at {len(documents[0]) + 2} "
        with pytest.raises(UserError, match=says):
            opened(source, tokenizer)
        with monkeypatch.context() as patch:  # files too large to be looked at before the run
            patch.setattr("recipes.data.tokens.token_files.VERIFY_UP_TO_BYTES", 0)
            sequences = sequences_of(source, tokenizer)
            with pytest.raises(UserError, match=says):
                sequences.rows(0, sequences.available)


def test_documents_without_our_end_are_refused_with_document_mask_and_named_without(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    _, tokenizer, documents = corpus
    endless = [document[:-1] for document in documents]
    for source in (
        write_datatrove(tmp_path / "a.ds", endless),
        write_megatron(tmp_path / "b.bin", endless),
        write_npy(tmp_path / "c.npy", endless),
    ):
        with pytest.raises(UserError, match=r"data.document_mask: .*ends documents with"):
            opened(source, tokenizer, document_mask=True)
        lines: list[str] = []
        opened(source, tokenizer, lines)
        assert [line.startswith("WARNING") for line in lines] == [True]


def cut(path: Path, count: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def broken(kind: str, folder: Path) -> str:
    documents = [[3, 4, 0], [5, 0], [6, 7, 8, 0]]
    if kind.startswith("ds"):
        source = write_datatrove(folder / "a.ds", documents)
        if kind == "ds without index":
            (folder / "a.ds.index").unlink()
        elif kind == "ds with losses":
            (folder / "a.ds.loss").touch()
        elif kind == "ds of other metadata":
            (folder / "a.ds.metadata").write_text("gpt2|2\n8\n8")
        elif kind == "ds of disordered index":
            np.array([5, 3, 9], "<u8").tofile(folder / "a.ds.index")
        else:
            cut(folder / kind.split()[1], 3)
        return source
    if kind.startswith("bin"):
        source = write_megatron(folder / "a.bin", documents, 7 if kind == "bin of floats" else 8)
        index = bytearray((folder / "a.idx").read_bytes())
        if kind == "bin of another version":
            index[9] = 2
        elif kind == "bin of wrong places":
            index[34 + 4 * 5 + 8] += 2
        elif kind == "bin of wrong documents":
            index[-8] -= 1
        elif kind == "bin of a short index":
            del index[20:]
        elif kind == "bin of another magic":
            index[0] = ord("T")
        (folder / "a.idx").write_bytes(index)
        if kind.endswith("cut"):
            cut(folder / kind.split()[1])
        return source
    if kind.startswith("npy"):
        dtype, shape = {
            "npy of floats": ("<f4", (9,)),
            "npy of big-endian": (">i4", (9,)),
            "npy of two rows": ("<i4", (3, 3)),
            "npy of objects": ("O", (9,)),
            "npy cut": ("<i4", (9,)),
        }[kind]
        np.save(folder / "a.npy", np.zeros(shape, dtype), allow_pickle=True)
        if kind == "npy cut":
            cut(folder / "a.npy")
        return str(folder / "a.npy")
    if kind == "llm.c cut":
        source = write_llm_c(folder / "a.bin", documents)
        cut(folder / "a.bin", 2)
        return source
    if kind == "llm.c with a type":
        return f"uint32:{write_llm_c(folder / 'a.bin', documents)}"
    source = write_plain(folder / "a.bin", documents)
    if kind == "plain cut":
        cut(folder / "a.bin")
    return {
        "plain without a type": str(folder / "a.bin"),
        "plain of another type": f"uint32:{folder / 'a.bin'}",
        "plain missing": f"uint16:{folder / 'b.bin'}",
        "plain cut": source,
    }[kind]


BROKEN = {
    "ds without index": "a.ds.index",
    "ds with losses": "out of the loss",
    "ds of other metadata": "does not tell of the 9 tokens",
    "ds of disordered index": "are not those of",
    "ds a.ds cut": "it has 15 bytes, but 9 tokens of 2 bytes make 18",
    "ds a.ds.index cut": "does not tell of the 5 tokens",
    "bin of floats": "of version 1 for integers",
    "bin of another version": "of version 1 for integers",
    "bin of a short index": "of version 1 for integers",
    "bin of another magic": "of version 1 for integers",
    "bin of wrong places": "do not follow each other",
    "bin of wrong documents": "are not those of",
    "bin a.bin cut": "it has 17 bytes, but 9 tokens",
    "bin a.idx cut": "cut off, or not of text alone",
    "npy of floats": "not one row of little-endian integers",
    "npy of big-endian": "not one row of little-endian integers",
    "npy of two rows": "not one row of little-endian integers",
    "npy of objects": "not one row of little-endian integers",
    "npy cut": "it has 163 bytes, but 9 tokens of 4 bytes make 164",
    "llm.c cut": "it has 1,040 bytes, but 9 tokens of 2 bytes make 1,042",
    "llm.c with a type": "remove 'uint32:'",
    "plain without a type": "write it, as in 'uint16:",
    "plain of another type": "it has 18 bytes, but 4 tokens of 4 bytes make 16",
    "plain missing": "does not exist",
    "plain cut": "it has 17 bytes, but 8 tokens of 2 bytes make 16",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_not_what_it_says_gives_one_clear_error(
    kind: str, corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        opened(broken(kind, tmp_path), corpus[1])
    assert BROKEN[kind] in str(error.value) and str(tmp_path) in str(error.value)


def test_a_pattern_that_matches_other_files_is_refused(tmp_path: Path) -> None:
    """The bytes of ASCII text are ids of most vocabularies."""
    write_plain(tmp_path / "train.bin", [[1, 2, 3, 0]])
    (tmp_path / "meta.pkl").write_text("no tokens at all")
    with pytest.raises(UserError, match=r"/\*' takes in .*/meta.pkl and .*/train.bin; write what names"):
        token_files(f"uint16:{tmp_path}/*")
    (tmp_path / "other.bin").mkdir()
    with pytest.raises(UserError, match=r"takes in .*/other.bin(;| and)"):
        token_files(f"uint16:{tmp_path}/*.bin")
    (tmp_path / "other.bin").rmdir()
    os.mkfifo(tmp_path / "pipe.bin")  # opening it would wait for somebody who writes
    with pytest.raises(UserError, match=r"takes in .*/pipe.bin(;| and)"):
        token_files(f"uint16:{tmp_path}/*.bin")


def test_a_file_that_is_replaced_before_it_is_mapped_is_refused(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    _, tokenizer, documents = corpus
    files = TokenFiles(write_several(tmp_path / "many", documents), tokenizer, maps=1)
    files.read(0, out := np.empty(8, np.int64))
    assert out.tolist() == [*chain(*documents)][:8]
    start = files.files[0].tokens
    os.utime(files.files[1].path, ns=(0, 0))
    with pytest.raises(UserError, match=r"00001_shuffled.ds' changed while it was read; start again"):
        files.read(start, out)


def test_tokens_of_a_wider_type_than_stated_are_refused(tmp_path: Path) -> None:
    np.arange(1, 500, dtype="<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(
        UserError, match="every second of its first tokens is 0, as where a wider type is read as uint16"
    ):
        token_files(f"uint16:{tmp_path}/wide.bin")
    assert token_files(f"uint32:{tmp_path}/wide.bin")[0].tokens == 499


def test_a_tokenizer_of_the_cache_reads_the_same_files(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    folder, tokenizer, documents = corpus
    source = write_llm_c(tmp_path / "a.bin", documents)
    again = load_tokenizer(
        str(folder / "prepared" / TOKENIZER), sources=[source], text_field="text", cache=tmp_path, log=lambda line: None
    )
    assert np.array_equal(sequences_of(source, again).rows(0, 9), sequences_of(source, tokenizer).rows(0, 9))


def checked(folder: Path, source: str, *more: str) -> None:
    words = ["--run.output", str(folder / "runs"), "--data.source", source, "--data.validation_fraction", "0"]
    words += ["--data.tokenizer", str(folder / "prepared" / TOKENIZER), "--validation.every", "0"]
    check(str(DEBUG), [*words, "--validation.sample_tokens", "0", *more], processes=1, nodes=1)


def test_check_says_how_often_the_files_are_read(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = sum(map(len, corpus[2]))
    source = write_several(tmp_path / "many", corpus[2])
    size = ["--run.steps", "10", "--schedule.warmup_steps", "1", "--schedule.decay_steps", "1"]
    batch = ["--batch.sequence_length", "32", "--batch.global_batch_size", "8", "--batch.micro_batch_size", "1"]
    checked(corpus[0], source, *size, *batch)
    line = f"# reads {source!r} {10 * 8 * 32 / tokens:.1f} times by step 10"
    assert line in capsys.readouterr().out.splitlines()


def test_fields_that_tokenizing_would_read_are_refused_by_name(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    source = write_megatron(tmp_path / "a.bin", corpus[2])
    asked = {
        "data.tokenizer": ("train:300", "name their tokenizer"),
        "data.bos": ("true", "write false"),
        "data.text_field": ("body", "omit this"),
        "data.text_documents": ("line", "omit this"),
        "data.validation_fraction": ("0.1", "documents are held out by a hash of their text: write 0"),
        "data.prompt_field": ("a", "pairs need text"),
    }
    for field, (value, says) in asked.items():
        with pytest.raises(UserError) as error:
            checked(corpus[0], source, f"--{field}", value)
        assert f"holds tokens, which are read as they are; {says}" in " ".join(str(error.value).split())
    cut(tmp_path / "a.idx")
    with pytest.raises(UserError) as error:
        checked(corpus[0], source)
    assert "cut off, or not of text alone" in " ".join(str(error.value).split())


@pytest.mark.slow
def test_prepare_data_says_that_nothing_needs_preparing(
    corpus: tuple[Path, Tokenizer, Documents], tmp_path: Path
) -> None:
    arguments = (write_npy(tmp_path / "a.npy", corpus[2]), tmp_path / "out", "--tokenizer", "train:300")
    code, _, says = run_command("scripts/prepare_data.py", *arguments)
    assert code == REFUSED and "holds tokens already, so nothing needs preparing" in says
    assert not (tmp_path / "out").exists()
