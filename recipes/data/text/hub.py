"""A dataset on the Hugging Face hub, or in a folder laid out like it: "hf:ID[@REVISION][:CONFIG[:SPLIT]]". The
datasets library takes a second to import, so only reading rows imports it. Imports no torch."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.text.readers import is_array, read_file
from recipes.data.text.row import Fields, Place, Row, Rows, names_of, no_such_field, text_of
from recipes.files.border import reason
from recipes.files.reading import user_path

HUB_PREFIX = "hf:"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EXAMPLES = "'hf:allenai/c4:en', 'hf:roneneldan/TinyStories@REVISION' or 'hf:FOLDER::validation'"
# Timeout for reaching the hub at all; the library's own retries while reading are left as they are.
SECONDS_TO_ANSWER = 10
# Files in a folder that our own readers can continue with when datasets gives up.
READABLE = (".parquet", ".json", ".json.gz", ".json.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst")
# Rows converted at once; datasets itself holds a parquet row group or ten megabytes of JSON in memory.
BATCH_ROWS = 128


@dataclass(frozen=True)
class HubDataset:
    """The parts of a source that starts with "hf:"."""

    name: str
    """A name on the hub, or a path."""
    revision: str = ""
    """A commit, tag or branch; "" = the main branch."""
    config: str = ""
    """"" = the dataset's default."""
    split: str = "train"

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a name on the hub."""
        path = user_path(self.name)
        return path if path.is_dir() or not NAME.fullmatch(self.name) else None

    @property
    def source(self) -> str:
        """The source as a recipe writes it."""
        revision = f"@{self.revision}" if self.revision else ""
        split = "" if self.split == "train" else f":{self.split}"
        config = f":{self.config}" if self.config or split else ""
        return f"{HUB_PREFIX}{self.name}{revision}{config}{split}"


def parse(source: str) -> HubDataset:
    """The dataset that a source names. Raises UserError if the name is malformed. Needs no network."""
    if problem := hub_problem(source):
        raise UserError(f"data.source: {problem}")
    return _parsed(source)


def hub_problem(source: str) -> str | None:
    """What is wrong with a source that starts with "hf:" and what to write instead, or None. Needs no network."""
    if source.count(":") > 3 or not _parsed(source).name:
        return f"{source!r}: write a name or folder after 'hf:', optionally a configuration and a split, as {EXAMPLES}"
    dataset = _parsed(source)
    folder = dataset.folder
    if folder is None:
        return None
    if not folder.is_dir():
        return f"{source!r}: there is no folder '{folder}', and hub names look different; write it as {EXAMPLES}"
    if dataset.revision:
        return f"{source!r}: a folder has no revisions; remove '@{dataset.revision}'"
    if not folder_files(folder):
        return f"{source!r}: the folder is empty; give one with a dataset laid out as on the hub"
    return None


def download_hint(spec: str, file: str = "") -> str:
    """What to do about a path that does not exist, if it looks like the name of a model on the hub; else "".

    file: the only file that is needed; "" = all of them.
    """
    match = re.fullmatch(r"(?:hf:|https://huggingface\.co/)?([A-Za-z0-9][\w.-]*)/([\w.-]+)/?", spec)
    if match is not None and match[1] == "runs":  # the default of run.output
        return "; it would be the folder of a run: train that run first, or write another path"
    if match is None or Path(match[1]).exists():  # a wrong name in a folder of this machine
        return ""
    command = " ".join(["hf download", f"{match[1]}/{match[2]}", *([file] if file else []), f"--local-dir {match[2]}"])
    return f'. Models on the Hugging Face hub must be downloaded first: `{command}`; then write "{match[2]}"'


def pinned_dataset(source: str) -> str:
    """What pinned() of sources.py returns for a source that starts with "hf:"."""
    dataset = parse(source)
    if dataset.folder or COMMIT.fullmatch(dataset.revision):
        return source
    return HubDataset(dataset.name, commit_of(dataset), dataset.config, dataset.split).source


def _parsed(source: str) -> HubDataset:
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    revision = ""
    if not user_path(name).is_dir():
        name, _, revision = name.partition("@")
    config, split = (*rest, "", "")[:2]
    return HubDataset(name, revision, config, split or "train")


def commit_of(dataset: HubDataset) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    silence_library()
    name = f"data.source: {dataset.source!r}"
    page = f"its page on the hub, datasets/{dataset.name}"
    try:
        found = HfApi().dataset_info(dataset.name, revision=dataset.revision or None, timeout=SECONDS_TO_ANSWER)
    except GatedRepoError as error:
        raise UserError(f"{name}: access is gated; request it on {page}, then log in with 'hf auth login'") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: the hub has no such dataset; correct it, or if private: 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name}: it has no revision {dataset.revision!r}; see {page}") from error
    except (Exception, SystemExit) as error:  # any error of whichever network library is in use
        raise UserError(
            f"{name}: the Hugging Face hub does not answer ({reason(error)}); on a machine that reaches it, run 'hf"
            f" download {dataset.name} --repo-type dataset --local-dir FOLDER', then write the source as hf:FOLDER"
        ) from error
    assert found.sha is not None
    return found.sha


def silence_library() -> None:
    """Turn off the hub's progress bars and warnings, process-wide: our errors say what matters."""
    import huggingface_hub.utils

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity(logging.CRITICAL)


def folder_files(folder: Path) -> list[Path]:
    """Every file that a dataset in a folder may consist of, sorted by path. Hidden files are ignored."""
    found = (file for file in folder.rglob("*") if file.is_file())
    visible = (file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(visible, key=lambda file: file.parts)


class HubReader:
    """An open dataset. Its shards are its files, in the hub's order. A place is a shard and a row in it, exact whatever
    a version of datasets counts in its own cursors. As with those, resuming inside a shard reads it from its start.
    datasets gives up at a broken row: if the file lies in a folder, our own readers continue and report bad rows."""

    def __init__(self, source: str, *, text_field: Fields) -> None:
        """Raises UserError if the dataset cannot be opened or has no such text field."""
        self._source = source
        self._text_field, self._names = text_field, names_of(text_field)
        self._nested = not isinstance(text_field, str) and bool(text_field.messages)
        self._dataset = parse(source)
        self._commit = "" if self._dataset.folder else commit_of(self._dataset)
        self._may_be_mixed = False
        self._data_files: list[Path] = []  # one per shard: files in a folder that our own readers can read
        self._stream = self._open()  # None = datasets cannot open the files at all
        if self._stream is not None:
            self._check(self._stream.features)
        shards = len(self._data_files) if self._stream is None else self._stream.num_shards
        if len(self._data_files) != shards:
            self._data_files = []
        self._sizes = [file.stat().st_size if file.exists() else 0 for file in self._data_files]
        self.files = [f"{source}, shard {number} of {shards}" for number in range(1, shards + 1)]

    def rows(self, start: Place) -> Rows:
        """The rows after `start`. Raises UserError where the dataset breaks off and our own readers cannot continue."""
        for shard in range(start.file, len(self.files)):
            yield from self._shard(start if shard == start.file else Place(shard))

    def _open(self, features: Any = None) -> Any:
        """A datasets.IterableDataset with as few columns as possible, typed as `features` or as found; None if datasets
        cannot open the files but our own readers can read them."""
        silence_library()
        import datasets
        from datasets.packaged_modules.json.json import JsonConfig
        from datasets.packaged_modules.parquet.parquet import ParquetConfig

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)
        folder, split = self._dataset.folder, self._dataset.split
        try:
            builder = datasets.load_dataset_builder(
                str(folder.resolve()) if folder else self._dataset.name,
                self._dataset.config or None,
                revision=self._commit or None,
                features=features,
            )
            config = builder.config
            if folder and features is None:
                self._data_files = _own_files(config, split)
            stream = builder.as_streaming_dataset(split=split)
            if isinstance(config, ParquetConfig) and {*self._names} <= {*(stream.features or ())}:
                config.columns = [*self._names]  # the other columns are not fetched
                stream = builder.as_streaming_dataset(split=split)
        except (Exception, SystemExit) as error:  # any error of a file format or file system that datasets supports
            if self._data_files:
                return None
            raise UserError(f"data.source: cannot open {self._source!r}: {reason(error)}") from error
        if isinstance(config, JsonConfig) and features is None:
            types = [(stream.features or {}).get(name) for name in self._names]
            # Where a field has mixed types, datasets (5.2) turns every text of the block into quoted JSON, silently if
            # the blocks before were plain. Make it stop instead: _of_any_type() continues from there, or, if the first
            # block is broken and datasets knows no types, _by_ourselves().
            if not any(map(_is_json, types)):
                self._may_be_mixed = None not in types
                config.on_mixed_types = None
        return stream

    def _check(self, features: Any) -> None:
        if features is None:  # datasets does not know them before it has read everything
            return
        setting = "data.text_field" if isinstance(self._text_field, str) else self._text_field.setting
        where = f"{setting}: {self._source!r}"
        for name in self._names:
            if name not in features:
                raise UserError(f"{where}: {no_such_field(name, features)}; name a text field")
            kind = features[name]
            is_text = getattr(kind, "dtype", "") in ("string", "large_string", "string_view") or _is_json(kind)
            if not is_text and not self._nested:
                raise UserError(f"{where}: not text: field {name!r} holds {kind}; name a text field")

    def _shard(self, start: Place) -> Rows:
        if self._stream is None:
            yield from self._by_ourselves(start, None)
            return
        place, last = start, None
        try:
            for row, place in self._of_any_type(start):
                last = row
                yield row, place
        except (Exception, SystemExit) as error:  # the same
            if not self._data_files:
                if isinstance(error, UserError):
                    raise
                raise self._refusal(place, f"{type(error).__name__}: {reason(error)}") from error
            yield from self._by_ourselves(place, last)

    def _by_ourselves(self, start: Place, last: Row | None) -> Rows:
        """The rows of a shard after `start`, read without datasets but numbered as datasets does. last: the row before
        `start`, if it was read. Raises UserError for a JSON file that is not one row per line."""
        shard, file = start.file, self._data_files[start.file]
        is_parquet = file.name.lower().endswith(".parquet")
        if not is_parquet and is_array(file):
            raise self._refusal(start, "it is broken, and it is one JSON array rather than one row per line")
        number = start.number if is_parquet else 0
        in_step = is_parquet or start.number == 0
        begin = Place(shard, number)
        for row, after in read_file(file, text_field=self._text_field, start=begin, size=self._sizes[shard]):
            number = row.number if is_parquet else number + 1  # in JSON, blank lines are not rows
            if number == start.number:
                in_step = last is None or bool(last.problem) or row.text == last.text
            if after.file != shard:  # the rest is lost, perhaps including a row that datasets could still read
                number, in_step = max(number, start.number + 1), True
            if number > start.number:
                if not in_step:
                    break
                end = after.number if is_parquet or after.file != shard else number
                yield row._replace(number=number), Place(after.file, end)
        if not in_step:
            raise self._refusal(start, "it is broken, and the part before that is not one row per line")

    def _refusal(self, place: Place, why: str) -> UserError:
        """The error for a place where neither datasets nor our own readers can continue."""
        where = f"{self.files[place.file]}, cannot be read past row {place.number}"
        if self._data_files:
            where += f" ('{self._data_files[place.file]}')"
        if self._dataset.folder:
            return UserError(f"data.source: {where}: {why}; repair the file or leave it out")
        return UserError(
            f"data.source: {where}: {why}; if it is the network, run the same command again later; if the file is"
            f" broken, run 'hf download {self._dataset.name} --repo-type dataset --revision {self._commit} --local-dir"
            " FOLDER' and start another run on hf:FOLDER, where broken rows are counted and skipped"
        )

    def _of_any_type(self, start: Place) -> Rows:
        """A shard's rows. From the first block with values that are not text on, read as JSON: several times slower.
        That block depends only on the shard, because a shard is always read from its start."""
        place = start
        try:
            for row, place in self._read(self._stream, start):
                yield row, place
        except ValueError:  # Arrow's; any other problem occurs again below
            if not self._may_be_mixed:
                raise
            from datasets import Features, Json

            mixed = self._open(Features({**self._stream.features, **{name: Json() for name in self._names}}))
            if mixed is None:
                raise
            yield from self._read(mixed, place)

    def _read(self, stream: Any, start: Place) -> Rows:
        number = 0
        shard = stream.shard(num_shards=len(self.files), index=start.file)
        as_json = {name for name in self._names if _is_json((stream.features or {}).get(name))}
        for table in shard.with_format("arrow").iter(batch_size=BATCH_ROWS):
            if number + len(table) <= start.number:
                number += len(table)
                continue
            for text, problem in self._texts(table, as_json):
                number += 1
                if number > start.number:
                    yield Row(text, start.file, number, problem), Place(start.file, number)

    def _texts(self, table: Any, as_json: set[str]) -> Iterator[tuple[str, str]]:
        """as_json: the fields that hold JSON."""
        if missing := [name for name in self._names if name not in table.column_names]:
            for _ in range(len(table)):
                yield "", no_such_field(missing[0], table.column_names)
            return
        for row in table.select(self._names).to_pylist():
            values = {
                name: json.loads(value) if name in as_json and value is not None else value
                for name, value in row.items()
            }
            yield text_of(values, self._text_field)


def _own_files(config: Any, split: str) -> list[Path]:
    """The files of a split in a folder, one per shard; empty if one of them has a type that we do not read."""
    files = [Path(file) for file in (config.data_files or {}).get(split, [])]
    readable = all(file.name.lower().endswith(READABLE) for file in files)
    return files if readable and getattr(config, "field", None) is None else []


def _is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"
