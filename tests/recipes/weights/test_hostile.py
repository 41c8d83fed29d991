"""Folders that were made to harm, or that are badly wrong: refused at once, by name, before anything is allocated."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.errors import UserError
from recipes.data.text.tokenizer import tokenizer_problem
from recipes.weights.convert import import_folder
from recipes.weights.locate import find_weights
from tests.processes import run_processes
from tests.recipes.weights.test_hf_folder import contents, edit_config, files, write_random

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random(tmp_path / "hf")


def point_elsewhere(folder: Path, name: str) -> None:
    """Let the index give another name to its first file, which is now outside of the folder."""
    first = files(folder)[0]
    first.rename(folder.parent / "stolen.safetensors")
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace(json.dumps(first.name), json.dumps(name)))


def only_pickles(folder: Path) -> None:
    for file in (*files(folder), folder / INDEX):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def twice(folder: Path) -> None:
    one, other = files(folder)[:2]
    other.write_bytes(one.read_bytes())


def pipe(folder: Path) -> None:
    files(folder)[0].unlink()
    os.mkfifo(folder / "model-00001-of-00010.safetensors")


def huge_header(folder: Path) -> None:
    with files(folder)[0].open("wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000))
        stream.truncate(300_000_000)


def extra_file(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(100_000)}}))


def poison(folder: Path, value: float) -> None:
    """Write this value into a weight."""
    file = files(folder)[-1]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[-1] = value
    save_file(tensors, file)


def size(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **values)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "index leads up": (lambda f: point_elsewhere(f, "../stolen.safetensors"), "outside of the folder: ../stolen.safe"),
    "index leads up inside": (lambda f: point_elsewhere(f, "a/../../stolen.safetensors"), "outside of the folder: a/"),
    "index is absolute": (
        lambda f: point_elsewhere(f, str(f.parent / "stolen.safetensors")),
        "names files outside of the folder: /",
    ),
    "index with a null byte": (lambda f: point_elsewhere(f, "a\0b"), "is not a safetensors file"),
    "index with many files": (extra_file, "and 99,9"),
    "pickles": (only_pickles, "the folder has pytorch_model.bin. Loading such files can run code"),
    "a tensor twice": (twice, "is in model-00001-of-00010.safetensors and in model-00002-of-00010.safetensors"),
    "a pipe": (pipe, "model-00001-of-00010.safetensors is not a file"),
    "a huge header": (huge_header, "is not a safetensors file"),
    "code": (size(auto_map={"AutoModel": "x.Y"}), "custom code, which is never run"),
    "unknown rope": (size(rope_scaling="yarn"), "must be one table"),
    "a million layers": (size(num_hidden_layers=10**6), "num_hidden_layers = 1000000: is more than 10,000"),
    "10^18 layers": (size(num_hidden_layers=10**18), "num_hidden_layers = 1000000000000000000: is more"),
    "10^12 words": (size(vocab_size=10**12), "vocab_size = 1000000000000: is more than 16,777,216"),
    "10^9 wide": (size(hidden_size=10**9), "hidden_size = 1000000000: is more than"),
    "no layers": (size(num_hidden_layers=0), "num_hidden_layers = 0: must be an integer >= 1"),
    "negative layers": (size(num_hidden_layers=-3), "num_hidden_layers = -3: must be an integer >= 1"),
    "layers in words": (size(num_hidden_layers="two"), "num_hidden_layers = 'two': must be an integer >= 1"),
    "half a head": (size(num_attention_heads=1.5), "num_attention_heads = 1.5: must be an integer >= 1"),
    "length in words": (size(max_position_embeddings="long"), "max_position_embeddings = 'long': must be an integer"),
    "no number": (size(rms_norm_eps=float("nan")), "rms_norm_eps = nan: must be a number > 0"),
    "a denormal base": (size(rope_parameters={"rope_theta": 1e-320}), "rope_theta = 1e-320: must be from 1 to"),
    "a base below one": (size(rope_parameters={"rope_theta": 0.5}), "rope_theta = 0.5: must be from 1 to"),
    "a number below float32": (size(rms_norm_eps=1e-45), "rms_norm_eps = 1e-45: must be from 1.18e-38 to"),
    "a number above float32": (size(initializer_range=1e39), "initializer_range = 1e+39: must be from 1.18e-38 to"),
    "NaN weights": (lambda f: poison(f, float("nan")), " has NaN or infinite values: the weights cannot be used"),
    "infinite weights": (lambda f: poison(f, float("inf")), " has NaN or infinite values: the weights cannot be used"),
    "an infinite number": (size(rope_parameters={"rope_theta": float("inf")}), "rope_theta = inf: must be a number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_at_once_and_nothing_is_written(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, said = HOSTILE[case]
    spoil(folder)
    before, began = sorted(path.name for path in tmp_path.iterdir()), time.process_time()
    with pytest.raises(UserError) as error:
        import_folder(folder, tmp_path / "checkpoint")
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) < 40
    assert time.process_time() - began < 60  # most take a hundredth of a second
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_million_layers_in_a_checkpoint_are_refused_too(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "checkpoint")
    description = tmp_path / "checkpoint" / "model.json"
    description.write_text(description.read_text().replace('"layers": 2', '"layers": 1000000'))
    with pytest.raises(UserError, match="layers is more than 10,000"):
        find_weights(tmp_path / "checkpoint")


def test_a_folder_of_the_hubs_cache_whose_files_are_links_is_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    import_folder(snapshot, tmp_path / "one")
    import_folder(blobs, tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def read_as_nobody(folder: Path) -> str:
    os.setuid(65534)
    try:
        find_weights(folder)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("mode", "name"), [(0o000, ""), (0o700, ""), (0o600, "config.json")])
def test_a_folder_that_this_user_may_not_read_is_refused(mode: int, name: str, folder: Path) -> None:
    with TemporaryDirectory() as open_to_all:  # pytest's own folders are not
        Path(open_to_all).chmod(0o755)
        hidden = shutil.copytree(folder, Path(open_to_all) / "hf")
        (hidden / name).chmod(mode)
        (said,) = run_processes(1, read_as_nobody, hidden)
    assert "cannot be read: Permission denied" in said


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("x" * 300, "has a name of 300 bytes in it, more than 255"),
        ("~nobody-of-this-name/x", "begins with ~nobody-of-this-name, but that home folder is not known"),
        ("a/b/c", "a/b/c does not exist"),
        ("runs/not_trained_yet", "runs/not_trained_yet does not exist; it would be the folder of a run: train that"),
    ],
)
def test_a_path_that_cannot_be_is_refused(written: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        find_weights(written)
    assert said in str(error.value) and "hf download" not in str(error.value)


@pytest.mark.parametrize("prefix", ["", "hf:", "https://huggingface.co/"])
def test_a_name_on_the_hub_is_refused_with_the_command_that_downloads_it(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{prefix}HuggingFaceTB/SmolLM3-3B"
    command = '`hf download HuggingFaceTB/SmolLM3-3B --local-dir SmolLM3-3B`; then write "SmolLM3-3B"'
    with pytest.raises(UserError) as error:
        find_weights(name)
    assert command in str(error.value)
    said = tokenizer_problem(name, 1000)
    assert said is not None and "`hf download HuggingFaceTB/SmolLM3-3B tokenizer.json --local-dir SmolLM3-3B`" in said
    (tmp_path / "HuggingFaceTB").mkdir()  # then it is a wrong name in a folder of this machine
    with pytest.raises(UserError) as error:
        find_weights("HuggingFaceTB/SmolLM3-3B")
    assert "hf download" not in str(error.value)


def test_nan_weights_are_refused_by_every_command_that_reads_them(folder: Path, tmp_path: Path) -> None:
    from recipes.evaluation.generate import open_exported, open_model

    import_folder(folder, tmp_path / "sound")
    poison(folder, float("nan"))
    for opens in (open_model, open_exported):
        with pytest.raises(UserError, match="has NaN or infinite values: the weights cannot be used"):
            opens(find_weights(folder), dtype=torch.float32, device=torch.device("cpu"))
    open_exported(find_weights(tmp_path / "sound"), dtype=torch.float32, device=torch.device("cpu"))
