"""The documents of a .txt file: what data.text_documents names. Imports no torch."""

import io
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import IO

from recipes.data.text.row import (
    BYTE_ORDER_MARK,
    LONGEST_ROW,
    PIECE,
    File,
    Place,
    Row,
    Rows,
    TextRule,
    decoded_text,
    text_or_problem,
)

# A file as one document would be all training or all held-out text, so a file without separators is cut at the first
# blank line after this many bytes: small enough that one percent of a 1 MB file is several documents, large enough for
# some context. Text without blank lines is cut before the longer length.
CHUNK_BYTES = 2_048
LONGEST_CHUNK_BYTES = 65_536

# "auto" takes this for the separator if it starts or ends a line in the first BEGINNING_BYTES of a file.
SEPARATOR = "<|endoftext|>"
BEGINNING_BYTES = 1 << 20
# "auto" takes each file of up to this many bytes for a document if the source has this many files of plain text: with
# fewer, a hundredth of the documents would often be none.
SMALL_FILE_BYTES, MANY_FILES = 1 << 20, 100
LOOKED_AT = 16
"""Files whose beginning is read for the message about documents."""

AUTO, FILE, BLANK_LINE, LINE, PIECES = "auto", "file", "blank_line", "line", "pieces"
KEYWORDS = (AUTO, FILE, BLANK_LINE, LINE, PIECES)
CUT = (
    f"each document is a piece of a file, up to the first blank line after {CHUNK_BYTES:,} bytes; without any in"
    f" {LONGEST_CHUNK_BYTES:,} bytes, up to "
)
LINE_ENDING = rb"(?:\r\n|\n|\r(?!\n))"
# No pattern matches more bytes than this and its own length: then a match never depends on where reading starts.
LONGEST_BLANK = 80
PATTERNS = {LINE: LINE_ENDING, BLANK_LINE: LINE_ENDING + rb"[ \t]{0,%d}" % LONGEST_BLANK + LINE_ENDING}


def text_documents_problem(text_documents: str) -> str | None:
    """What is wrong with data.text_documents and what to write instead, or None: a keyword with a slip in it would be
    a separator that no file contains."""
    close = get_close_matches(re.sub(r"[- ]", "_", text_documents.lower()), KEYWORDS, n=1, cutoff=0.8)
    if text_documents in KEYWORDS or not close:
        return None
    return f'would be a separator; did you mean "{close[0]}"?'


def text_rule(files: Sequence[File], text_documents: str) -> TextRule:
    """How the .txt files among these become documents."""
    many = sum(file.name.lower().endswith(".txt") for file in files) >= MANY_FILES
    return TextRule(text_documents, small_files=many)


def plain_text(path: File, *, rule: TextRule, start: Place) -> Rows:
    """The documents of a file after `start`."""
    file, number, offset = start
    with path.open("rb") as stream:
        documents = _resolved(stream, rule)
        separated = documents not in (FILE, AUTO, PIECES)
        for data, size in _documents_of(stream, documents, offset):
            # What is blank between two separators is not a document, as a blank line of .jsonl is not a row.
            if not separated or data is None or (data and not data.isspace()):
                number += 1
                text, problem = _text_of(data, offset, size)
                yield (
                    Row(text.strip("\n") if separated else text, file, number, problem),
                    Place(file, number, offset + size),
                )
            offset += size


def what_a_document_is(files: Sequence[File], rule: TextRule) -> str:
    """What the documents of these .txt files are, for messages: of the first that can be read, or with "auto", which
    decides for each file, of the first LOOKED_AT."""
    found: dict[str, str] = {}  # what a document is -> the first such file
    for file in files[: LOOKED_AT if rule.documents == AUTO else None]:
        try:
            with file.open("rb") as stream:
                found.setdefault(_document(stream, rule), file.name)
        except OSError:
            continue
        if rule.documents != AUTO:
            break
    if len(found) > 1:
        return "; ".join(f"{what}, as in {name!r}" for what, name in found.items())
    return next(iter(found), "no file can be read")


def _document(stream: IO[bytes], rule: TextRule) -> str:
    """What a document of this file is, in words."""
    found = _resolved(stream, rule)
    stream.seek(0)
    there = found in KEYWORDS or _pattern(found).search(stream.read(BEGINNING_BYTES))
    return {
        FILE: "each file is one document",
        LINE: "each line is a document",
        BLANK_LINE: "each paragraph is a document",
        AUTO: CUT + "the last line or word before that",
        PIECES: CUT + "that length",
    }.get(found) or f"documents are separated by {found!r}" + (
        "" if there else ", which the first file does not contain in its first megabyte"
    )


def _resolved(stream: IO[bytes], rule: TextRule) -> str:
    """What the documents of a file are: as the rule says, or as "auto" decides from its size and beginning."""
    if rule.documents != AUTO:
        return rule.documents
    mark = re.escape(SEPARATOR.encode())
    beginning = stream.read(BEGINNING_BYTES).removeprefix(BYTE_ORDER_MARK)
    if re.search(rb"(?:^|[\r\n])%s|%s[ \t]*(?:[\r\n]|$)" % (mark, mark), beginning):
        return SEPARATOR
    return FILE if rule.small_files and stream.seek(0, io.SEEK_END) <= SMALL_FILE_BYTES else AUTO


def _documents_of(stream: IO[bytes], rule: str, offset: int) -> Iterator[tuple[bytes | None, int]]:
    """Each document after `offset`, and the bytes that it takes with its separator; None for one that is too long."""
    stream.seek(offset)
    if rule in (AUTO, PIECES):
        while chunk := _chunk(stream, whole_words=rule == AUTO):
            yield chunk, len(chunk)
        return
    pattern = None if rule == FILE else _pattern(rule)
    yield from _separated(stream, pattern, reach=max(len(rule.encode()) * 2, LONGEST_BLANK + 8))


def _pattern(rule: str) -> re.Pattern[bytes]:
    """What separates two documents. A line ending in a separator stands for any."""
    written = re.escape(rule.encode().replace(b"\r\n", b"\n")).replace(b"\\\n", LINE_ENDING)
    return re.compile(PATTERNS.get(rule, written))


def _separated(
    stream: IO[bytes], pattern: re.Pattern[bytes] | None, *, reach: int
) -> Iterator[tuple[bytes | None, int]]:
    """What lies between the matches of a pattern, none of which is longer than `reach`; all of it if there is none."""
    data, searched, lost, ended = bytearray(), 0, 0, False
    while data or not ended:
        match = pattern.search(data, searched) if pattern else None
        if match and (ended or match.end() < len(data)):  # else a line ending may go on behind it
            whole = not lost and match.start() <= LONGEST_ROW
            yield bytes(data[: match.start()]) if whole else None, lost + match.end()
            del data[: match.end()]
            searched = lost = 0
        elif ended:
            whole = not lost and len(data) <= LONGEST_ROW
            yield bytes(data) if whole else None, lost + len(data)
            return
        else:
            searched = max(0, len(data) - reach)
            if searched > LONGEST_ROW:
                lost += searched
                del data[:searched]
                searched = 0
            piece = stream.read(PIECE)
            data += piece
            ended = not piece


def _text_of(data: bytes | None, offset: int, size: int) -> tuple[str, str]:
    """(text, "") or ("", problem) of a document."""
    if data is None:
        return "", f"too long: a document of {size} bytes, more than {LONGEST_ROW}"
    text, problem = decoded_text(data.removeprefix(BYTE_ORDER_MARK) if offset == 0 else data, offset=offset)
    return ("", problem) if problem else text_or_problem(text, text_field="")


def _chunk(stream: IO[bytes], *, whole_words: bool) -> bytes:
    """The bytes of the next piece. They depend only on the bytes that follow, so reading can resume at any cut.
    whole_words: never cut a word, if the text has any."""
    lines: list[bytes] = []
    size = 0
    while size < LONGEST_CHUNK_BYTES and (line := stream.readline(LONGEST_CHUNK_BYTES - size)):
        lines.append(line)
        size += len(line)
        if size >= CHUNK_BYTES and line.isspace() and line.endswith(b"\n"):
            break
    chunk = b"".join(lines)
    if size < LONGEST_CHUNK_BYTES or chunk.endswith(b"\n"):
        return chunk
    kept = 0
    if whole_words:
        kept = 1 + (chunk.rfind(b"\n") if b"\n" in chunk else max(chunk.rfind(b" "), chunk.rfind(b"\t")))
    kept = kept or size - _partial_bytes(chunk)
    stream.seek(kept - size, io.SEEK_CUR)
    return chunk[:kept]


def _partial_bytes(chunk: bytes) -> int:
    """How many bytes at the end start a character or a line ending that is cut off."""
    if chunk.endswith(b"\r"):
        return 1
    for back in (1, 2, 3):
        byte = chunk[-back]
        if byte >= 0xC0:  # the first of two, three or four bytes
            return back if back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0
