"""scripts/convert_hf.py as users start it."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.recipes.weights.test_hf_folder import SMALL, contents, write_random

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert_hf.py"


def convert(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return run_command(SCRIPT, *arguments, cwd=folder)


def test_import_and_export_keep_the_folder_and_refuse_mistakes(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "hf", max_bytes=10**9)
    assert convert(tmp_path, "import", "hf", "a/checkpoint") == (0, "wrote a/checkpoint\n", "")
    assert convert(tmp_path, "export", "a/checkpoint", "b/hf") == (0, "wrote b/hf\n", "")
    assert contents(tmp_path / "b" / "hf") == contents(folder)
    assert convert(tmp_path, "export", "a/checkpoint", "half", "--dtype", "bfloat16")[0] == 0
    size, half = ((path / "model.safetensors").stat().st_size for path in (folder, tmp_path / "half"))
    assert half < 0.6 * size

    code, out, error = convert(tmp_path, "export", "a/checkpoint", "b/hf")
    assert (code, out, error) == (2, "", "b/hf already exists; give another name, or delete it\n")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    code, out, error = convert(tmp_path, "import", "hf", "again")
    assert (code, out) == (2, "") and error.startswith("hf has no tokenizer.json; ") and error.count("\n") == 1
    assert not (tmp_path / "again").exists()


def test_folder_that_cannot_be_uploaded_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "hf", max_bytes=10**9)
    convert(tmp_path, "import", "hf", "checkpoint")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    for words, message in (
        (
            ("hf", "me/model"),
            "hf was not uploaded: ConnectError: [Errno 111] Connection refused; log in with",
        ),
        (("hf", "model"), "'model' is no name on the hub: it must be OWNER/MODEL"),
        (("hf", "me/mo del"), "hf was not uploaded: Repo id must "),
        (("checkpoint", "me/model"), "checkpoint is a checkpoint; export it first: convert_hf.py export checkpoint "),
        (("missing", "me/model"), "missing does not exist"),
    ):
        code, out, error = convert(tmp_path, "upload", *words)
        assert (code, out, error.count("\n")) == (2, "", 1) and error.startswith(message), error


def test_ctrl_c_leaves_no_files(tmp_path: Path) -> None:
    wide = replace(SMALL, vocabulary=32768, width=512)
    write_random(tmp_path / "hf", wide, max_bytes=10**9)
    assert convert(tmp_path, "import", "hf", "checkpoint")[0] == 0
    for arguments in (("import", "hf", "out"), ("export", "checkpoint", "out")):
        process = subprocess.Popen([sys.executable, SCRIPT, *arguments], cwd=tmp_path, stderr=subprocess.PIPE)
        while not (partial := tmp_path / ".partial-out").exists() or not any(partial.iterdir()):
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == b"" and process.returncode == 130
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


def test_wrong_arguments_print_the_usage(tmp_path: Path) -> None:
    for arguments in ((), ("both", "x", "y"), ("import", "x"), ("import", "x", "y", "--dtype", "bfloat16")):
        code, out, error = convert(tmp_path, *arguments)
        assert (code, out) == (2, "") and error.startswith("usage: convert_hf.py import FOLDER CHECKPOINT")
    assert convert(tmp_path, "--help")[1].startswith("usage: convert_hf.py")
