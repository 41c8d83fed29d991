"""What a plain recipe loads, and what one of its training steps passes through."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sources import code_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
MOST_MODULES = 88
MOST_LINES = 10_950
"""Lines of code."""
WITH_CHECKPOINTS = {"modules": 102, "lines": 13_080}
"""The same of a run that saves checkpoints."""
MOST_FILES_OF_A_STEP = 16
NOT_ASKED_FOR = {
    "models.documents",
    "models.transformers_config",
    "parallel.float8",
    "recipes.checkpoint.memory",
    "recipes.checkpoint.memory_folder",
    "recipes.cluster.links",
    "recipes.cluster.preflight",
    "recipes.data.text.hub",
    "recipes.data.validation",
    "recipes.metrics.breakdown",
    "recipes.metrics.profile",
    "recipes.training.resume",
    "recipes.training.same_run",
    "recipes.weights.convert",
    "recipes.weights.hf_folder",
    "recipes.weights.locate",
}
# One process, local text, no checkpoint, no validation; the first and the last of 4 steps are logged.
PLAIN = [
    "--run.name=plain",
    "--run.steps=4",
    "--run.device=cpu",
    "--data.tokenizer=train:512",
    "--batch.sequence_length=64",
    "--batch.global_batch_size=4",
    "--batch.micro_batch_size=2",
    "--schedule.warmup_steps=0",
    "--schedule.decay_steps=0",
    "--checkpoint.every=0",
    "--metrics.every=100",
    "--validation.every=0",
    "--validation.sample_tokens=0",
]
# Traces the calls between the second and the third update of the parameters.
RUN = """if True:
    import json, os, sys
    from torch.optim.optimizer import register_optimizer_step_post_hook
    root, result, *arguments = sys.argv[1:]
    sys.path.insert(0, root)
    steps, called = 0, set()
    def note(frame, event, argument):
        if event == "call":
            called.add(frame.f_code.co_filename)
    def after_step(optimizer, positional, keyword):
        global steps
        steps += len(optimizer.state) > 1  # else it is tried
        sys.setprofile(note if steps == 2 else None)
    register_optimizer_step_post_hook(after_step)
    import train
    code = train.main(arguments)
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    with open(result, "w") as file:
        json.dump({"code": code, "steps": steps, "loaded": loaded, "called": sorted(called)}, file)
    os._exit(0)
"""


def short_run(corpus: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """What train.py loaded and called in a short run of the debug recipe on one file of text."""
    result = folder / "result.json"
    recipe = [str(ROOT / "configs" / "smollm3_debug.toml"), *PLAIN, f"--data.source={corpus}", *overrides]
    folders = [f"--run.output={folder / 'runs'}", f"--data.cache={folder / 'cache'}"]
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), str(result), *recipe, *folders],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    seen: dict[str, Any] = json.loads(result.read_text())
    assert (seen["code"], seen["steps"]) == (0, 4), run.stdout + run.stderr
    return seen


@pytest.fixture(scope="module")
def plain_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return short_run(corpus, tmp_path_factory.mktemp("lazy"))


def our_modules(run: dict[str, Any]) -> dict[str, int]:
    """Name -> lines of code of our modules that the run loaded, without empty files, the longest first."""
    files = {name: Path(file) for name, file in run["loaded"].items() if is_ours(file)}
    lines = {name: code_lines(file) for name, file in files.items()}
    return {name: lines[name] for name in sorted(lines, key=lambda name: -lines[name]) if lines[name]}


def is_ours(file: str) -> bool:
    top = Path(file).relative_to(ROOT).parts[0] if file.startswith(f"{ROOT}/") else ""
    return top in ("models", "parallel", "recipes", "train.py")


def listed(modules: dict[str, int]) -> str:
    return "\n".join(f"{lines:>6}  {name}" for name, lines in modules.items())


def test_plain_run_loads_few_modules(plain_run: dict[str, Any]) -> None:
    modules = our_modules(plain_run)
    assert len(modules) <= MOST_MODULES, f"{len(modules)} modules\n{listed(modules)}"


def test_plain_run_loads_few_lines(plain_run: dict[str, Any]) -> None:
    modules = our_modules(plain_run)
    lines = sum(modules.values())
    assert lines <= MOST_LINES, f"{lines} lines\n{listed(modules)}"


def test_run_with_checkpoints_loads_few_modules_and_lines(corpus: Path, tmp_path: Path) -> None:
    modules = our_modules(short_run(corpus, tmp_path, "--checkpoint.every=2"))
    assert len(modules) <= WITH_CHECKPOINTS["modules"], f"{len(modules)} modules\n{listed(modules)}"
    lines = sum(modules.values())
    assert lines <= WITH_CHECKPOINTS["lines"], f"{lines} lines\n{listed(modules)}"


def test_plain_run_loads_nothing_that_its_recipe_does_not_ask_for(plain_run: dict[str, Any]) -> None:
    loaded = sorted(NOT_ASKED_FOR & set(our_modules(plain_run)))
    assert not loaded


def test_modules_that_a_plain_run_must_not_load_exist() -> None:
    assert not [name for name in NOT_ASKED_FOR if not (ROOT / f"{name.replace('.', '/')}.py").exists()]


def test_plain_step_calls_functions_of_few_files(plain_run: dict[str, Any]) -> None:
    files = [str(Path(file).relative_to(ROOT)) for file in plain_run["called"] if is_ours(file)]
    assert any(file.startswith("models/") for file in files), "the trace missed the model"
    assert len(files) <= MOST_FILES_OF_A_STEP, f"{len(files)} files\n" + "\n".join(files)
