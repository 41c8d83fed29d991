"""Who may import whom, and what the rooms promise (ARCHITECTURE.md), read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("models", "parallel", "recipes", "scripts")
OURS = {"models", "parallel", "recipes", "scripts", "train"}
FILES = [ROOT / "train.py", *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))]

MAY_IMPORT = {
    "models": {"models"},
    "parallel": {"models", "parallel"},
    "recipes": {"models", "parallel", "recipes"},
    "scripts": {"models", "parallel", "recipes"},
    "train.py": {"models", "parallel", "recipes"},
}
# The model and the order of its parallelization are put together in one place, and measured in another.
ASSEMBLED_IN = {"recipes/training/trainer.py", "recipes/plan.py"}
# Needs no order: it runs the plain model on one device.
PLAIN_MODEL_IN = {"recipes/evaluation/generate.py"}
TORCH_FREE = {
    "models/config.py",
    "models/hf.py",
    "models/sizes.py",
    "parallel/config.py",
    "parallel/errors.py",
    "parallel/nodes.py",
    "recipes/metrics/breakdown.py",
    "recipes/checkpoint/files.py",
    "recipes/checkpoint/folder.py",
    "recipes/checkpoint/look.py",
    "recipes/checkpoint/manifest.py",
    "recipes/checkpoint/space.py",
    "recipes/command_line.py",
    "recipes/data/tokens/background.py",
    "recipes/data/tokens/workspace.py",
    "recipes/data/text/compressed.py",
    "recipes/data/text/hub.py",
    "recipes/data/open_data.py",
    "recipes/data/order.py",
    "recipes/data/tokens/prepare.py",
    "recipes/data/text/readers.py",
    "recipes/data/text/rows.py",
    "recipes/data/sequences.py",
    "recipes/data/tokens/shards.py",
    "recipes/data/text/sources.py",
    "recipes/files/atomic.py",
    "recipes/files/exit_codes.py",
    "recipes/files/layout.py",
    "recipes/files/units.py",
    "recipes/fields.py",
    "recipes/metrics/goodput.py",
    "recipes/metrics/hardware.py",
    "recipes/weights/hf_folder.py",
    "recipes/load.py",
    "recipes/plan.py",
    "recipes/cluster/restarts.py",
    "recipes/cluster/slurm.py",
    "recipes/cluster/supervisor.py",
    "recipes/rules.py",
    "recipes/training/run_folder.py",
    "recipes/files/lock.py",
    "recipes/schema.py",
    "recipes/weights/locate.py",
    "recipes/sweep/loop.py",
    "recipes/sweep/numerics.py",
    "recipes/sweep/plots.py",
    "recipes/sweep/grid.py",
    "recipes/sweep/results.py",
    "recipes/sweep/runner.py",
    "scripts/checkpoint.py",
    "scripts/prepare_data.py",
    "scripts/slurm.py",
    "scripts/sweep.py",
    "scripts/write_docs.py",
}
LAUNCHER_ENVIRONMENT = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# What a recipe is, and the trainer. Everything else takes its own section or plain values.
MAY_TAKE_A_RECIPE = {
    "recipes/command_line.py",
    "recipes/fields.py",
    "recipes/load.py",
    "recipes/plan.py",
    "recipes/cluster/restarts.py",
    "recipes/rules.py",
    "recipes/training/run.py",
    "recipes/training/run_folder.py",
    "recipes/files/lock.py",
    "recipes/sweep/grid.py",
    "recipes/training/trainer.py",
}

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


def nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text(), str(file)))


def imports(file: Path) -> set[str]:
    """Dotted names of all modules that the file may import, at the top or inside a function."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}: write imports from the root"
            assert node.module
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@every_file
def test_rooms_import_downwards(file: Path) -> None:
    ours = {module.partition(".")[0] for module in imports(file)} & OURS
    assert ours <= MAY_IMPORT[room(file)]


@every_file
def test_the_model_and_its_order_meet_in_the_trainer_alone(file: Path) -> None:
    if room(file) in ("recipes", "train.py") and name(file) not in ASSEMBLED_IN:
        hidden = {"parallel.order"} if name(file) in PLAIN_MODEL_IN else {"models.decoder", "parallel.order"}
        assert not imports(file) & hidden
    if room(file) == "parallel":
        assert "models.decoder" not in imports(file)


@every_file
def test_only_one_file_knows_torchao(file: Path) -> None:
    if name(file) != "parallel/float8.py":
        assert not {module for module in imports(file) if module.partition(".")[0] == "torchao"}


@every_file
def test_only_one_folder_knows_how_checkpoints_are_stored(file: Path) -> None:
    if not name(file).startswith("recipes/checkpoint/") and name(file) != "recipes/bench/checkpoint.py":
        assert not {module for module in imports(file) if module.startswith("torch.distributed.checkpoint")}
    assert "pickle" not in imports(file)


@every_file
def test_only_one_file_knows_the_launcher(file: Path) -> None:
    if name(file) not in ("parallel/dist.py", "recipes/cluster/slurm.py") and room(file) != "scripts":
        strings = {node.value for node in nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not strings & LAUNCHER_ENVIRONMENT


@every_file
def test_what_a_run_is_needs_no_torch(file: Path) -> None:
    if name(file) in TORCH_FREE:
        assert not {module for module in imports(file) if module.partition(".")[0].startswith("torch")}
        assert not {
            module for module in imports(file) if module.startswith(("recipes.training.trainer", "parallel.dist"))
        }


@every_file
def test_components_take_their_own_section(file: Path) -> None:
    if room(file) != "recipes" or name(file) in MAY_TAKE_A_RECIPE:
        return
    for node in nodes(file):
        if isinstance(node, ast.arg) and node.annotation:
            assert "Recipe" not in {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}, (
                f"{name(file)}:{node.lineno} takes a whole Recipe"
            )


def test_packages_do_no_work_at_import() -> None:
    inits = [file for file in FILES if file.name == "__init__.py"]
    assert {room(file) for file in inits} >= {"models", "parallel", "recipes"}
    assert all(file.read_text() == "" for file in inits)


def test_the_entry_is_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 80


def test_loading_a_recipe_leaves_torch_out() -> None:
    modules = ", ".join(
        file.removesuffix(".py").replace("/", ".")
        for file in sorted(TORCH_FREE)
        if file.startswith(("models", "parallel", "recipes")) and (ROOT / file).exists()
    )
    code = f"import sys, {modules}; recipes.load.load('configs/smollm3_debug.toml', ['--run.steps', '300'])"
    check = "print([module for module in sys.modules if module.partition('.')[0] in ('torch', 'torchao')])"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; {check}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_our_packages_come_first_whatever_is_installed(tmp_path: Path) -> None:
    for package in ("models", "parallel", "recipes"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    code = f"import runpy; runpy.run_path({str(ROOT / 'train.py')!r}); import models, parallel, recipes"
    check = "print(models.__file__, parallel.__file__, recipes.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; {check}"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [
        str(ROOT / package / "__init__.py") for package in ("models", "parallel", "recipes")
    ]
