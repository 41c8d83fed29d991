"""The name of a dataset on the Hugging Face hub, or of a folder laid out like it: "hf:ID[@REVISION][:CONFIG[:SPLIT]]".

Imports no torch.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from recipes.data.text.row import reason
from recipes.files.reading import user_path

HUB_PREFIX = "hf:"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EXAMPLES = "'hf:allenai/c4:en', 'hf:roneneldan/TinyStories@REVISION' or 'hf:FOLDER::validation'"
# Timeout for reaching the hub at all; the library's own retries while reading are left as they are.
SECONDS_TO_ANSWER = 10


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
    except Exception as error:  # any error of whichever network library is in use
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
