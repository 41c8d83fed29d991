"""What reaches the screen and the log file, with and without a terminal."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from models.hf import export_of
from models.sizes import SIZES
from parallel.config import MeshDegrees
from recipes.data.config import BatchConfig, DataConfig
from recipes.training.console import Console, last_lines
from tests.processes import untimed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these variables, which a CI system may set, rich takes pytest's captured output for no terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_a_silent_console_prints_and_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Console(silent=True) as console:
        console.log("early")
        console.open_log(tmp_path / "log.txt")
        console.log("late", style="bold")
        console.progress(1, 2, "loss 1.000")
        console.end_progress()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_lines_from_before_open_log_follow_what_the_log_already_holds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("yesterday\n")
    with Console(silent=False) as console:
        console.log("a model", style="bold")
        console.log("  its mesh")
        assert untimed(log.read_text()) == "yesterday\n"
        console.open_log(log)
        console.log("step 1")
        assert untimed(log.read_text()) == "yesterday\na model\n  its mesh\nstep 1\n"  # immediately, not at the end
        console.log()
    assert untimed(log.read_text()) == "yesterday\na model\n  its mesh\nstep 1\n\n"
    assert capfd.readouterr() == ("a model\n  its mesh\nstep 1\n\n", "")


@pytest.mark.parametrize(
    "text",
    [
        "tensor[0] = x[1:2]",
        "[bold]not markup[/bold] [/]",
        "slices[:x:], :smile: :100:",
        "tab\tand two\nlines",
        "a line much longer than the eighty columns of a terminal " * 4,
    ],
)
def test_text_is_printed_and_logged_unchanged(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Console(silent=False) as console:
        console.open_log(tmp_path / "log.txt")
        console.log(text, style="dim")
    assert untimed((tmp_path / "log.txt").read_text()) == text + "\n"
    assert capfd.readouterr().out.expandtabs() == text.expandtabs() + "\n"


def test_control_characters_are_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Console(silent=False) as console:
        console.open_log(tmp_path / "log.txt")
        console.log("a\x1b[2Jb\x00c\rd\x7f")
    expected = "a\\u001b[2Jb\\u0000c\\u000dd\\u007f\n"
    assert capfd.readouterr().out == expected
    assert untimed((tmp_path / "log.txt").read_text()) == expected


# A class that Console knows by its name only, whose file imports torch: that takes seconds.
BEGIN = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.modules["recipes.metrics.throughput"] = SimpleNamespace(Throughput=None)
from recipes.training.console import Console
"""

# Two lines and a live line, which must not stay on the screen.
TWO_STEPS = (
    BEGIN
    + """
with Console(silent=False) as console:
    console.open_log(Path(sys.argv[1]))
    for step in (1, 2):
        console.log(f"step {step}")
        console.progress(step, 7, f"loss {step}.500")
"""
)


@pytest.mark.slow
def test_there_is_no_live_line_without_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_STEPS, tmp_path / "log.txt"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("step 1\nstep 2\n", "")
    assert untimed((tmp_path / "log.txt").read_text()) == "step 1\nstep 2\n"


@pytest.mark.slow
def test_a_terminal_shows_a_live_line_and_wipes_it_at_the_end(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "80", "PATH": os.environ["PATH"]}
    with subprocess.Popen(
        [sys.executable, "-c", TWO_STEPS, tmp_path / "log.txt"], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the end, on Linux
            pass
    os.close(ours)
    assert process.returncode == 0
    screen = shown.decode()
    assert "step 1\r\n" in screen and "step 2\r\n" in screen
    assert "loss 2.500" in screen and "2/7" in screen
    assert screen.rindex("\x1b[2K") > screen.rindex("2/7")  # wiped at the end
    assert untimed((tmp_path / "log.txt").read_text()) == "step 1\nstep 2\n"


# Two lines for a screen or a log that takes none.
FULL = (
    BEGIN
    + """
with Console(silent=False) as console:
    console.open_log(Path(sys.argv[1]))
    for step in (1, 2):
        console.log(f"step {step}")
print("the end", file=sys.stderr)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("full", ["log", "screen", "both"])
def test_training_goes_on_when_screen_or_log_cannot_be_written(full: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt" if full == "screen" else Path("/dev/full")
    with open("/dev/full" if full != "log" else tmp_path / "screen", "w") as screen:
        done = subprocess.run(
            [sys.executable, "-c", FULL, log], cwd=ROOT, stdout=screen, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.startswith("the end\n")
    if full == "log":
        lost = "/dev/full cannot be written: No space left on device; its lines are lost until it can"
        assert sorted((tmp_path / "screen").read_text().splitlines()) == sorted(["step 1", "step 2", lost])
    if full == "screen":
        assert untimed(log.read_text()) == f"step 1\n{SCREEN_LOST.format('No space left on device')}\nstep 2\n"


SCREEN_LOST = "standard output cannot be written: {}; its lines are in this file only until it can"


@pytest.mark.slow
def test_training_goes_on_when_the_reader_of_a_pipe_ends(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "log.txt"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.stderr.startswith("the end\n")
    assert untimed((tmp_path / "log.txt").read_text()) == f"step 1\n{SCREEN_LOST.format('Broken pipe')}\nstep 2\n"


@pytest.mark.slow
def test_training_goes_on_when_the_reader_of_a_pipe_stops_reading(tmp_path: Path) -> None:
    """As `less` does at the end of its page. What it missed is counted when it goes on."""
    lines = "".join(f"step {step} {'x' * 2000}\n" for step in range(1, 101))
    code = FULL.replace("(1, 2)", "range(1, 101)").replace("{step}", "{step} {'x' * 2000}")
    code += "sys.stdin.readline()\nconsole.log('again')\n"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log.txt"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stderr.readline() == b"the end\n"
        head = process.stdout.read1(1 << 20)
        process.stdin.write(b"\n")
        out = (head + process.communicate()[0]).decode()
    log = untimed((tmp_path / "log.txt").read_text()).replace(SCREEN_LOST.format("nobody reads it") + "\n", "", 1)
    assert log == lines + "again\n"
    shown, rest = out.split("\n(")
    assert lines.startswith(shown) and len(shown) > 60_000
    missing = 100 - shown.count("\n")
    assert rest == f"{missing} lines are missing here, which could not be written)\nagain\n"


@pytest.mark.slow
def test_training_goes_on_when_its_terminal_goes_away(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    code = TWO_STEPS.replace("(1, 2)", "range(1, 8)").replace("    for", "    import time\n    for") + (
        "        while step == 2 and os.isatty(1): time.sleep(0.01)\n        time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", "import os" + code, tmp_path / "log.txt"],
        cwd=ROOT,
        env={"TERM": "xterm", "PATH": os.environ["PATH"]},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(theirs)
        while b"step 2" not in os.read(ours, 4096):
            pass
        os.close(ours)
        assert process.communicate()[1] == ""
    assert process.returncode == 0
    log = untimed((tmp_path / "log.txt").read_text()).splitlines()
    assert [line for line in log if line.startswith("step")] == [f"step {step}" for step in range(1, 8)]
    assert SCREEN_LOST.format("Input/output error") in log


@pytest.mark.slow
def test_training_goes_on_when_the_screen_lacks_a_character(tmp_path: Path) -> None:
    code = FULL.replace("step {step}", "\u2192 {step}")
    environment = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "log.txt"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("? 1\n? 2\n", "the end\n")
    assert untimed((tmp_path / "log.txt").read_text()) == "\u2192 1\n\u2192 2\n"


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_finished_run_offers_an_export_that_can_be_made(softcap: float, tmp_path: Path) -> None:
    folder, model = tmp_path / "run", replace(SIZES["moe_debug"], logit_softcap=softcap)
    (folder / "checkpoints").mkdir(parents=True)
    offered = [line for line in last_lines(folder, model, DataConfig()) if "convert_hf.py export" in line]
    assert len(offered) == (0 if softcap else 1)
    said = (
        "cannot be exported to Hugging Face, because of model.logit_softcap = 30.0" if softcap else "can be exported as"
    )
    assert export_of(model).startswith(said)
    (tmp_path / "run-hf").mkdir()
    assert not [line for line in last_lines(folder, model, DataConfig()) if "convert_hf.py export" in line]


def test_a_finished_run_on_chats_offers_a_chat(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    lines = last_lines(tmp_path, SIZES["smollm3_debug"], DataConfig(messages_field="messages"))
    assert any(line.endswith(f"generate.py {tmp_path} --chat") for line in lines)


def test_shares_that_do_not_add_up_to_1_are_said() -> None:
    assert DataConfig(mixture={"a": 2.0, "b": 1.0}).shares_note == (
        "data.mixture adds up to 3, not 1: of the tokens, 'a' 66.7%, 'b' 33.3%"
    )
    assert not DataConfig(mixture={"a": 0.333, "b": 0.333, "c": 0.333}).shares_note and not DataConfig().shares_note


def test_a_batch_is_divided_among_data_ranks_and_shared_by_tensor_and_context_ranks() -> None:
    batch = BatchConfig(global_batch_size=16, micro_batch_size=2)
    assert batch.divided(MeshDegrees(replicate=2, shard=2)) == "4 x 2 micro-batches of 2"
    shared = "2 x 4 micro-batches of 2, each shared by 4 processes"
    assert batch.divided(MeshDegrees(replicate=1, shard=2, context=2, tensor=2)) == shared


@pytest.mark.slow
def test_an_empty_line_on_a_full_screen_is_logged_with_the_reason(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from recipes.training.console import Console
with Console(silent=False) as console:
    console.open_log(Path(sys.argv[1]))
    console.log()
"""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code, tmp_path / "log.txt"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert untimed((tmp_path / "log.txt").read_text()) == f"\n{SCREEN_LOST.format('No space left on device')}\n"
