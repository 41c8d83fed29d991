"""What the report of a run says, on its page and in its Markdown."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli

from recipes.lab.curves.page import write_html
from recipes.lab.curves.panels import curves
from recipes.lab.curves.reading import LoggedRun, read_runs
from recipes.lab.curves.report import model_card, sections, state_of
from recipes.recipe.load import CONFIGS, load, to_toml
from tests.recipes.lab.curves.runs import row, run_folder

DEBUG = CONFIGS / "smollm3_debug.toml"
NODE = CONFIGS / "smollm3_3b_8xh100.toml"
SLOW = {"rank": 3, "node": "node1", "phase": "compute", "seconds": 2.0, "median": 1.0}
LOG = """2026-11-29T07:00:00Z   mesh: 1 process
2026-11-29T07:01:00Z a held-out text, and how the model goes on:
2026-11-29T07:01:00Z Once <upon>
a time
2026-11-29T07:01:00Z there was
2026-11-29T07:01:01Z done: 150 steps, 1,000 tokens in 1.0 s
"""


def run(folder: Path, *rows: dict[str, Any], recipe: Path = DEBUG, **environment: Any) -> LoggedRun:
    """A run of a shipped recipe, which trained for 40 of its steps, was started again, skipped a step, and had a
    straggler."""
    own = load(recipe, ["--run.steps", "50", "--optimizer.lr", "0.25"], rules=False)
    rows = rows or (
        *(row(step, validation_loss=5.0 - step / 50) for step in range(1, 20)),
        *(row(step, stragglers=[SLOW], **{"epochs": {"text": 0.5}}) for step in range(20, 30)),
        {"step": 25, "skipped": True},
        row(28),
        {"step": 40, "validation_loss": 2.5},
    )
    place = run_folder(folder / "mine", *rows, recipe=tomli.loads(to_toml(own)))
    about = {"device": "cpu", "world_size": 1, "nodes": 1, "packages": {"torch": "2.13.0"}, "git_commit": "0123abc"}
    about |= {"command": ["train.py", str(recipe), "--run.steps", "50"]} | environment
    (place / "environment.json").write_text(json.dumps(about))
    return read_runs([place])[0]


def part(run: LoggedRun, title: str) -> list[list[str]]:
    return [[*cells] for section in sections(run) if section.title == title for cells in section.rows]


def page(*runs: LoggedRun) -> str:
    out = io.BytesIO()
    write_html(curves(runs, "steps"), out)
    return out.getvalue().decode()


def test_what_was_asked_is_compared_with_the_file_of_the_command(tmp_path: Path) -> None:
    head, *rows = part(run(tmp_path), "What was asked")
    assert head[:2] == ["", "this run"] and head[2].endswith("configs/smollm3_debug.toml")
    assert [cells[0] for cells in rows] == ["run.steps", "optimizer.lr"] and rows[1][1] == "0.25"


def test_a_recipe_with_a_base_is_compared_with_the_base(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'base = "{DEBUG}"\n[run]\nsteps = 50\n[optimizer]\nlr = 0.25\n')
    head, *rows = part(run(tmp_path, command=["/x/train.py", str(mine)]), "What was asked")
    assert head[2].endswith("smollm3_debug.toml") and [cells[0] for cells in rows] == ["run.steps", "optimizer.lr"]


@pytest.mark.parametrize("command", [None, [], ["pytest", "x"], ["train.py", "/not/here.toml"], "train.py x", [1, 2]])
def test_without_the_file_the_defaults_are_compared_and_no_field_of_the_size(tmp_path: Path, command: Any) -> None:
    head, *rows = part(run(tmp_path, command=command), "What was asked")
    keys = [cells[0] for cells in rows]
    assert head[2] == "the defaults" and "optimizer.lr" in keys and "model.width" not in keys


def test_events_are_listed_by_step_with_the_time_of_the_run(tmp_path: Path) -> None:
    events = part(run(tmp_path), "Events")[1:]
    assert [cells[0] for cells in events] == ["20", "25", "27"]
    assert events[0] == ["20", "0:01 h", "rank 3 on node1 is slow in compute, in 8 rows to step 27"]
    assert events[1][2].startswith("skipped") and events[2][2] == "started again from here"
    rows = [row(1), row(2000), *({"step": step, "skipped": True} for step in range(2, 2000))]
    many = part(run(tmp_path / "many", *rows), "Events")[1:]
    assert len(many) == 41 and many[0][2] == "1958 earlier ones" and many[-1][0] == "1,999"


def test_on_a_known_gpu_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    gpu = {"device": "NVIDIA H100 80GB HBM3", "world_size": 8}
    found = run(tmp_path, *(row(step, peak_memory_gib_most=60.0) for step in (1, 2, 3)), recipe=NODE, **gpu)
    head, seconds, memory = part(found, "Predicted and measured")
    assert head == ["", "predicted", "measured"] and 1 < float(seconds[1]) < 100 and seconds[2] == "1"
    assert 30 < float(memory[1]) < 80 and memory[2] == "60.00"
    assert part(run(tmp_path / "cpu"), "Predicted and measured") == []


def test_samples_of_the_log_are_shown_as_they_are_and_escaped(tmp_path: Path) -> None:
    found = run(tmp_path)
    steps = [LOG.replace("  mesh: 1 process", f"step  {10 * step}/150  loss 2") for step in range(1, 10)]
    (found.folder / "log.txt").write_text("".join(steps))
    samples = [section for section in sections(found) if section.title.startswith("Sample")]
    assert samples[0].title == "Sample after step 10" and samples[0].text == "Once <upon>\na time\nthere was"
    assert "<td>optimizer.<wbr>lr</td><td>0.25</td>" in page(found)
    assert len(samples) == 6 and samples[-1].title == "Sample after step 90"
    assert "Once &lt;upon&gt;\na time" in page(found)


def test_the_commands_to_go_on_are_those_of_the_run(tmp_path: Path) -> None:
    found = run(tmp_path, world_size=2)
    [text] = [section.text for section in sections(found) if section.title == "How to go on"]
    assert text.startswith(f"NPROC=2 scripts/run.sh {DEBUG} --run.steps 50\n") and "generate" not in text
    (found.folder / "checkpoints/step-00000040").mkdir(parents=True)
    [text] = [section.text for section in sections(found) if section.title == "How to go on"]
    assert f"export {found.folder} {found.folder}-hf" in text


def test_the_page_of_a_run_has_all_parts(tmp_path: Path) -> None:
    text = page(run(tmp_path))
    for title in ("Last numbers", "What was asked", "Data", "Events", "How to go on", "Versions"):
        assert f"<h2>{title}</h2>" in text
    assert "<p>cut off: smollm3_debug, 1 x cpu, 28 of 50 steps" in text and "http-equiv" not in text


@pytest.mark.slow
def test_the_page_is_read_again_while_the_run_goes_on_and_says_done_at_its_end(tmp_path: Path) -> None:
    found = run(tmp_path)
    locks = "import fcntl; file = open('.lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", locks], cwd=found.folder, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        text = page(found)
        assert 'http-equiv="refresh"' in text and "<p>running: " in text
        (found.folder / "log.txt").write_text(LOG)
        assert state_of(found) == "done"  # the run waits for its report
        process.communicate(b"\n")


def test_the_model_card_has_usage_licence_data_numbers_and_curve(tmp_path: Path) -> None:
    text = model_card(run(tmp_path))
    head = text.split("---\n")[1]
    assert "license: unknown" in head and "library_name: transformers" in head
    assert "# mine\n" in text and 'pipeline("text-generation", ' in text
    assert "\n| validation loss | 2.5000 |\n" in text and "\n| 40 | 2.5000 |\n" in text
    assert text.count("\n## ") >= 7


def test_a_folder_with_metrics_alone_has_a_report(tmp_path: Path) -> None:
    [found] = read_runs([run_folder(tmp_path / "a", {"step": 1, "loss": 2.0, "stragglers": [1, {"rank": []}]})])
    assert "<h2>How to go on</h2>" in page(found) and "## Usage" in model_card(found)
