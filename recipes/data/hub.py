"""Datasets of the Hugging Face hub, or of a folder laid out like it, as rows: "hf:ID[@REVISION][:CONFIG[:SPLIT]]".

Imports no torch, and the datasets library (a second) only to read.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from recipes.data.readers import Place, Row, Rows, no_such_field, reason, text_or_problem

PREFIX = "hf:"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EXAMPLES = "'hf:allenai/c4:en', 'hf:roneneldan/TinyStories@REVISION' or 'hf:FOLDER::validation'"
# To say whether the hub is there at all; the library's own retries while reading are left as they are.
SECONDS_TO_ANSWER = 10
# Rows converted at once; datasets itself holds a row group of parquet, or ten megabytes of JSON.
BATCH_ROWS = 128


@dataclass(frozen=True)
class HubDataset:
    """What a source that begins with "hf:" names."""

    name: str
    """A name on the hub, or a path."""
    revision: str = ""
    """A commit, tag or branch; "" = the hub's main branch."""
    config: str = ""
    """"" = the dataset's default."""
    split: str = "train"

    @property
    def folder(self) -> Path | None:
        """The local folder, of which a name on the hub is no path."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() or not NAME.fullmatch(self.name) else None

    @property
    def source(self) -> str:
        """As it is written in a recipe."""
        revision = f"@{self.revision}" if self.revision else ""
        split = "" if self.split == "train" else f":{self.split}"
        config = f":{self.config}" if self.config or split else ""
        return f"{PREFIX}{self.name}{revision}{config}{split}"


def is_hub(source: str) -> bool:
    return source.startswith(PREFIX)


def parse(source: str) -> HubDataset:
    """Raises UserError for what is no name of a dataset; asks neither the hub nor the datasets library."""
    if problem := hub_problem(source):
        raise UserError(f"data.source: {problem}")
    return _parsed(source)


def hub_problem(source: str) -> str | None:
    """What is wrong with a source that begins with "hf:" and what to write instead, or None. Needs no network."""
    if source.count(":") > 3 or not _parsed(source).name:
        return f"{source!r}: after 'hf:' goes a name or folder, then perhaps a configuration and a split, as {EXAMPLES}"
    dataset = _parsed(source)
    folder = dataset.folder
    if folder is None:
        return None
    if not folder.is_dir():
        return f"{source!r}: there is no folder '{folder}', and it is no name on the hub either; write it as {EXAMPLES}"
    if dataset.revision:
        return f"{source!r}: a folder has no revisions; leave '@{dataset.revision}' out"
    if not folder_files(folder):
        return f"{source!r}: the folder is empty; give one that holds a dataset, as the hub does"
    return None


def folder_files(folder: Path) -> list[Path]:
    """All that a dataset in a folder may be read from, hidden files left out, sorted by path."""
    found = (file for file in folder.rglob("*") if file.is_file())
    visible = (file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(visible, key=lambda file: file.parts)


def pinned(source: str) -> str:
    """The source with the commit that its revision is at now; any other source, and a folder, as it is.

    Raises UserError where the hub does not answer.
    """
    if not is_hub(source):
        return source
    dataset = parse(source)
    if dataset.folder or COMMIT.fullmatch(dataset.revision):
        return source
    return HubDataset(dataset.name, _commit(dataset), dataset.config, dataset.split).source


def _parsed(source: str) -> HubDataset:
    name, *rest = source.removeprefix(PREFIX).split(":")
    revision = ""
    if not Path(name).expanduser().is_dir():
        name, _, revision = name.partition("@")
    config, split = (*rest, "", "")[:2]
    return HubDataset(name, revision, config, split or "train")


def _commit(dataset: HubDataset) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    _quiet()
    name = f"data.source: {dataset.source!r}"
    page = f"its page on the hub, datasets/{dataset.name}"
    try:
        found = HfApi().dataset_info(dataset.name, revision=dataset.revision or None, timeout=SECONDS_TO_ANSWER)
    except GatedRepoError as error:
        raise UserError(f"{name} must be asked for on {page}; then log in with 'hf auth login'") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: the hub has no such dataset; correct it, or if private: 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name}: it has no revision {dataset.revision!r}; see {page}") from error
    except Exception as error:  # whatever the network library of the day raises
        raise UserError(
            f"{name}: the Hugging Face hub does not answer ({reason(error)}); where it does, run 'hf download "
            f"{dataset.name} --repo-type dataset --local-dir FOLDER', then write the source as hf:FOLDER"
        ) from error
    assert found.sha is not None
    return found.sha


# ------------------------------------------------------------------------------------------------------------- reading


class HubReader:
    """An open dataset. Its shards are its files, in the hub's order.

    A place is a shard and a row of it: exact whatever the versions of datasets count in their own cursors. As with
    those, entering a shard reads it from its beginning.
    """

    def __init__(self, source: str, *, text_field: str) -> None:
        """Raises UserError for a dataset that cannot be opened or has no such field of text."""
        self._source = source
        self._text_field = text_field
        self._dataset = parse(source)
        self._commit = "" if self._dataset.folder else _commit(self._dataset)
        self._may_be_mixed = False
        self._stream = self._open()
        self._check(self._stream.features)
        shards = self._stream.num_shards
        self.files = [f"{source}, shard {number} of {shards}" for number in range(1, shards + 1)]

    def rows(self, start: Place) -> Rows:
        """The rows behind `start`. Raises UserError where the dataset breaks off: the network may be there later."""
        for shard in range(start.file, len(self.files)):
            yield from self._shard(start if shard == start.file else Place(shard))

    def _open(self, features: Any = None) -> Any:
        """A datasets.IterableDataset with no more columns than it must have, as `features` or as found."""
        _quiet()
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
            stream = builder.as_streaming_dataset(split=split)
            if isinstance(builder.config, ParquetConfig) and self._text_field in (stream.features or ()):
                builder.config.columns = [self._text_field]  # the others are not even fetched
                stream = builder.as_streaming_dataset(split=split)
        except Exception as error:  # whatever the file formats and file systems of datasets raise
            raise UserError(f"data.source: cannot open {self._source!r}: {reason(error)}") from error
        if isinstance(builder.config, JsonConfig) and features is None:
            text_type = (stream.features or {}).get(self._text_field)
            # Where the types of a field are mixed, datasets turns every text of the block into JSON, with quotes, and
            # does not say so if the blocks before it were plain (5.2). Rather stop there: _of_any_type() goes on.
            if text_type is not None and not _is_json(text_type):
                self._may_be_mixed = True
                builder.config.on_mixed_types = None
        return stream

    def _check(self, features: Any) -> None:
        if features is None:  # datasets does not know before it has read all
            return
        where = f"data.text_field: {self._source!r}"
        if self._text_field not in features:
            raise UserError(f"{where}: {no_such_field(self._text_field, features)}; name a field of text")
        kind = features[self._text_field]
        if getattr(kind, "dtype", "") not in ("string", "large_string", "string_view") and not _is_json(kind):
            raise UserError(f"{where}: not text: field {self._text_field!r} holds {kind}; name a field of text")

    def _shard(self, start: Place) -> Rows:
        place = start
        try:
            for row, place in self._of_any_type(start):
                yield row, place
        except UserError:
            raise
        except Exception as error:  # whatever the file formats and file systems of datasets raise
            where = f"{self.files[start.file]}, breaks off behind row {place.number}"
            raise UserError(
                f"data.source: {where}: {type(error).__name__}: {reason(error)}; if it is the network, resume later"
            ) from error

    def _of_any_type(self, start: Place) -> Rows:
        """A shard's rows; from a block on in which some values are no text, as JSON values, several times slower.

        Which block that is depends on the shard alone, as it is read from its beginning.
        """
        place = start
        try:
            for row, place in self._read(self._stream, start):
                yield row, place
        except ValueError:  # Arrow's; another trouble comes again below
            if not self._may_be_mixed:
                raise
            from datasets import Features, Json

            mixed = self._open(Features({**self._stream.features, self._text_field: Json()}))
            yield from self._read(mixed, place)

    def _read(self, stream: Any, start: Place) -> Rows:
        number = 0
        shard = stream.shard(num_shards=len(self.files), index=start.file)
        is_json = _is_json((stream.features or {}).get(self._text_field))
        for table in shard.with_format("arrow").iter(batch_size=BATCH_ROWS):
            if number + len(table) <= start.number:
                number += len(table)
                continue
            for text, problem in self._texts(table, is_json=is_json):
                number += 1
                if number > start.number:
                    yield Row(text, start.file, number, problem), Place(start.file, number)

    def _texts(self, table: Any, *, is_json: bool) -> Iterator[tuple[str, str]]:
        if self._text_field not in table.column_names:
            for _ in range(len(table)):
                yield "", no_such_field(self._text_field, table.column_names)
            return
        for value in table.column(self._text_field).to_pylist():
            if is_json and value is not None:
                value = json.loads(value)
            yield text_or_problem(value, text_field=self._text_field)


def _is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"


def _quiet() -> None:
    """Keep the hub's progress bars and warnings off the screen, process-wide: what matters is in our errors."""
    import huggingface_hub.utils

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity(logging.CRITICAL)
