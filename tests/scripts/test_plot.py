"""scripts/plot.py draws runs as a page that needs nothing else."""

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes.files.lock import FolderLock
from recipes.training.run_folder import Report
from tests.commands import run_command
from tests.processes import PATIENCE, wait_for
from tests.recipes.lab.curves.runs import row, run_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def plot(*arguments: object) -> tuple[int, str, str]:
    return run_command("scripts/plot.py", *arguments)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a gap, a skipped step, a restart and two stages, and its fork."""
    folder = tmp_path_factory.mktemp("plots")
    trunk = [row(step, stage="short" if step < 60 else "long") for step in range(1, 121)]
    trunk[30]["loss"] = None
    rows = [*trunk, {"step": 90, "skipped": True, "documents": {}}, row(100), {"step": 100, "validation_loss": 2.5}]
    fork = [row(step, lr=1e-4) for step in range(61, 90)]
    recipe = {"run": {"continue_from": "runs/trunk@60", "steps": 90}, "model": {"name": "<b>&small"}}
    return [run_folder(folder / "trunk", *rows), run_folder(folder / "fork", *fork, recipe=recipe)]


class Page(HTMLParser):
    """What a page refers to, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_run_is_drawn_into_its_folder(folders: list[Path]) -> None:
    command = [sys.executable, ROOT / "scripts/plot.py", folders[0]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folders[0] / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (folders[0] / "report.md").read_text().startswith("---\n")
    assert done.stdout.strip() == str(folders[0] / "report.html")


def test_the_page_of_several_runs_needs_nothing_from_elsewhere(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    code, _, err = plot(*folders, "--out", out, "--x", "tokens")
    assert code == 0, err
    text = out.read_text()
    page = Page(text)
    assert page.open == [] and page.count["svg"] == page.count["figure"] == 7
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.findall(r"""(?:@import|url\()\s*["']?(?!#)\S*""", text)
    assert "&lt;b&gt;&amp;small" in text and "<b>" not in text
    assert page.count["label"] == 2 and 'class="run-1"' in text
    assert "<td>loss, last tenth</td>" in text and page.count["table"] == 1


def test_the_values_below_the_pointer_are_those_of_the_rows(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert plot(*folders, "--out", out)[0] == 0
    texts = re.findall(r'<script type="application/json">(.*?)</script>', out.read_text())
    validation = next(found for found in map(json.loads, texts) if found["lines"] and found["lines"][0]["y"] == [2.5])
    assert (validation["lines"][0]["x"], validation["lines"][0]["name"], validation["unit"]) == (
        [100],
        "trunk",
        "steps",
    )
    loss = json.loads(texts[0])["lines"]
    assert [line["name"] for line in loss] == ["trunk", "fork"] and loss[0]["y"][30] is None


def test_several_runs_are_compared_on_the_screen_and_the_page_comes_last(folders: list[Path], tmp_path: Path) -> None:
    code, out, err = plot(folders[0] / "metrics.jsonl", folders[1], "--out", tmp_path / "two.html")
    assert (code, err) == (0, "")
    assert re.search(r"^ +trunk +fork\n", out) and re.search(r"\nsteps +100 +89\n", out)
    assert out.endswith(f"\n{tmp_path}/two.html\n")


def test_a_watched_page_is_rewritten_while_its_run_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    folder, lock = run_folder(tmp_path / "a", row(1), row(2)), FolderLock()
    lock.take(folder, log=print)
    page = folder / "report.html"
    command = [sys.executable, ROOT / "scripts/plot.py", folder, "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        try:
            wait_for("the page", page.exists)
            with (folder / "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps(row(777)) + "\n")
            wait_for("the next page", lambda: "777 steps" in page.read_text())
            watching.send_signal(signal.SIGINT)
            out, _ = watching.communicate(timeout=PATIENCE)
        finally:
            watching.kill()
            lock.release()
    assert (watching.returncode, out) == (130, f"{page}\n")


def test_watching_ends_with_the_run(folders: list[Path]) -> None:
    assert plot(folders[0], "--watch")[::2] == (0, "")


def test_runs_are_listed_without_arguments_and_of_a_folder(folders: list[Path], tmp_path: Path) -> None:
    code, out, err = plot(folders[0].parent)
    assert (code, err, len(out.splitlines())) == (0, "", 3) and "fork" in out and "89 of 90" in out
    run_folder(tmp_path / "runs" / "mine", row(7))
    command = [sys.executable, ROOT / "scripts/plot.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[1].split()[0]) == (0, "", "mine")
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "empty")
    assert done.returncode == 2 and done.stderr.startswith("no run is in runs/; write the folders")


@pytest.mark.parametrize("axis", ["tokens", "hours"])
def test_rows_without_the_axis_are_refused_by_name(tmp_path: Path, axis: str) -> None:
    whole = run_folder(tmp_path / "whole", row(1), row(2))
    without = run_folder(tmp_path / "old", {"step": 1, "loss": 2.0, "tokens": None}, {"step": 2, "loss": 1.0})
    code, out, err = plot(whole, without, "--x", axis, "--out", tmp_path / "a.html")
    assert (code, out) == (2, "")
    assert err == f"{without}: no row has {axis}, so it cannot be drawn over them; write --x steps\n"


@pytest.mark.parametrize("axis", ["steps", "tokens", "hours"])
def test_any_number_and_any_name_can_be_drawn(tmp_path: Path, axis: str) -> None:
    values = [1e308, -1e308, 1e99, 5e-324, -1.0, 0, 2**62, 10**400, None]
    columns = [name for name in row(1) if name not in ("step", "wall_seconds")]
    rows = [
        row(
            step,
            **dict.fromkeys(columns, value),
            **{
                "validation_loss/_$\\frac{$" + "x" * 500: value,
                "validation_task/\ud800\x07": value,
                "grad_norm/a": value,
            },
            stage=f"$x^\ud800{step}" * 40,
            wall_seconds={"step": value, "restarts": value},
        )
        for step, value in enumerate([*values, *reversed(values)], 1)
    ]
    folders = [
        run_folder(tmp_path / os.fsdecode(name), row(19), *rows, {"step": 2**53 - 1, "loss": 1.0, "tokens": 5})
        for name in ("_\u00e4 $b^$ <i>".encode() + b"\xff", b"a" * 200)
    ]
    out = tmp_path / f"{os.fsdecode(bytes([0xFE]))}.html"
    for chosen in (folders, folders[:1]):
        code, _, err = plot(*chosen, "--x", axis, "--out", out)
        assert (code, err) == (0, "")


def test_many_restarts_and_skipped_steps_are_drawn_as_few_marks(tmp_path: Path) -> None:
    rows = [row(step, wall_seconds={"step": 1.0, "restarts": 1.0 * step}) for step in range(1, 4000)]
    folder = run_folder(tmp_path / "a", *rows, *({"step": step, "skipped": True} for step in range(4000, 8000)))
    assert plot(folder, "--out", tmp_path / "a.html")[0] == 0
    assert (tmp_path / "a.html").stat().st_size < 4_000_000


def test_a_page_of_many_runs_and_columns_can_be_drawn(tmp_path: Path) -> None:
    columns = {f"validation_loss/{number}": 1.0 for number in range(200)}
    folders = [run_folder(tmp_path / str(number), row(1, **columns), row(2)) for number in range(2)]
    assert plot(*folders, "--out", tmp_path / "a.html")[::2] == (0, "")
    folders = [run_folder(tmp_path / f"run{number}", row(1), row(2)) for number in range(100)]
    code, out, err = plot(*folders, "--out", tmp_path / "a.html")
    assert (code, err, len(out.splitlines())) == (0, "", 102)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "{run}"), "nowhere is not the folder of a run; write the folders of runs"),
        (("{run}", "--out", "curves.jpeg"), "--out curves.jpeg: write a name that ends with .html"),
        (("{run}", "--out", "/nowhere/report.html"), "--out /nowhere/report.html cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    folders: list[Path], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = plot(*(argument.format(run=folders[0]) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_the_end_of_a_run_says_in_one_line_why_it_has_no_report(tmp_path: Path) -> None:
    said: list[str] = []
    folder = run_folder(tmp_path / "a")
    Report(folder).write(log=said.append)
    [line] = said
    assert line.startswith("report.html was not written: ") and "has no rows" in line
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
