"""Checks the layers and promises of docs/architecture.md against the sources, folder by folder."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.private_names import NAMES
from tests.sources import ROOT, imports, modules_named, name, nodes, tree

PACKAGES = ("models", "parallel", "recipes")
TOP = (*PACKAGES, "scripts")
# The layers from top to bottom. A file may import from its own layer and from those below it, never from one above;
# inside a layer, folders may import each other as long as no circle comes of it.
LAYERS = (
    ("train.py", "scripts"),
    (
        *("recipes/lab/average", "recipes/lab/curves", "recipes/lab/ladder"),
        *("recipes/lab/plan", "recipes/lab/prove", "recipes/lab/show", "recipes/lab/sweep"),
    ),
    ("recipes/training",),
    ("recipes/plan",),
    ("recipes/recipe",),
    ("recipes/evaluation",),
    ("recipes/weights", "recipes/cluster"),
    ("recipes/plugins",),
    ("recipes/data", "recipes/checkpoint", "recipes/metrics"),
    ("recipes/data/tokens",),
    ("recipes/data/text",),
    ("recipes/optimization", "recipes/files"),
    ("parallel",),
    ("models",),
)
LEVEL = {place: level for level, places in enumerate(LAYERS) for place in places}
# Libraries that a single file may import.
ONLY_IMPORTER = {
    "torchao": "parallel/float8.py",
    "transformers": "models/transformers.py",
    "fsspec": "recipes/files/remote.py",
    "lm_eval": "recipes/evaluation/harness.py",
}
# Set by the launcher for each process; and where the nodes meet, set for the launcher.
PROCESS_ENVIRONMENT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
MEETING_ENVIRONMENT = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
AS_LAUNCHER = "recipes/cluster/launcher.py"
"""What sets these variables for processes that it starts without torchrun."""
TORCH_FREE = "Imports no torch."


EVERY_FILE = [ROOT / "train.py", *(file for top in TOP for file in sorted((ROOT / top).rglob("*.py")))]
INITS = [file for file in EVERY_FILE if file.name == "__init__.py"]
FILES = [file for file in EVERY_FILE if file not in INITS]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = {name(file).removesuffix(".py").replace("/", "."): file for file in FILES}
"""Dotted name -> file."""


@cache
def imports_at_start(file: Path) -> set[str]:
    """What importing the file imports: nothing inside functions or below `if TYPE_CHECKING`."""

    def executed(statements: list[ast.stmt]) -> Iterator[ast.AST]:
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            yield statement
            only_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
            for part in ("orelse",) if only_for_types else ("body", "orelse", "finalbody"):
                yield from executed(getattr(statement, part, []))

    return modules_named(executed(tree(file).body), file)


def our_files(modules: set[str]) -> list[Path]:
    return sorted({MODULES[module] for module in modules if module in MODULES})


def libraries(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def place(file: Path) -> str:
    """The entry of LAYERS that a file belongs to: the file itself, or else its folder."""
    return name(file) if name(file) in LEVEL else name(file.parent)


def is_torch_free(file: Path) -> bool:
    return (ast.get_docstring(tree(file)) or "").endswith(TORCH_FREE)


def lines_outside_tests() -> dict[str, int]:
    """File -> its number of lines, for everything that is imported or run."""
    scripts = [file for pattern in ("*.sh", "*.sbatch") for file in sorted((ROOT / "scripts").glob(pattern))]
    return {name(file): len(file.read_bytes().splitlines()) for file in [*FILES, *scripts, ROOT / ".ci" / "run"]}


# Layers


def test_every_folder_has_a_layer() -> None:
    missing = {place(file) for file in FILES} - set(LEVEL)
    assert not missing, f"give {missing} a place in LAYERS and in docs/architecture.md"


def test_every_entry_of_the_layers_exists() -> None:
    assert not [entry for entry in LEVEL if not (ROOT / entry).exists()]


def test_docs_draw_every_entry_of_the_layers() -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [entry for entry in LEVEL if not re.search(rf"(?<![\w/]){re.escape(entry)}(?![\w.])", drawing)]


@pytest.mark.slow
def test_no_file_imports_from_a_layer_above_its_own() -> None:
    upward = [
        f"{name(file)} imports {name(other)}"
        for file in FILES
        for other in our_files(imports(file))
        if LEVEL[place(other)] < LEVEL[place(file)]
    ]
    assert not upward, upward


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {place(file): set() for file in FILES}
    for file in FILES:
        graph[place(file)] |= {place(other) for other in our_files(imports(file))} - {place(file)}
    require_no_circle(graph)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count."""
    require_no_circle({name(file): {name(other) for other in our_files(imports(file))} for file in FILES})


def require_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter({one: sorted(imported - {one}) for one, imported in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_config_of_a_section_imports_nothing_of_recipes() -> None:
    configs = [file for file in FILES if file.name == "config.py"]
    assert len(configs) > 5
    assert not [name(file) for file in configs if "recipes" in libraries(imports(file))]


def test_no_folder_below_recipe_takes_a_whole_recipe() -> None:
    takers = [
        f"{name(file)}:{node.lineno}"
        for file in FILES
        if LEVEL[place(file)] > LEVEL["recipes/recipe"]
        for node in nodes(file)
        if isinstance(node, ast.arg) and node.annotation
        if re.search(r"\bRecipe\b", ast.unparse(node.annotation))
    ]
    assert not takers, takers


# One place each


def test_model_and_its_parallelization_meet_in_one_file_of_training() -> None:
    """And in scripts/evaluate.py, which trains nothing, and where a plan takes a step on tensors without values."""
    files = [file for file in FILES if "parallel.order" in imports(file) and place(file) != "scripts"]
    found = [name(file.parent) for file in files if name(file) != "recipes/plan/tracked.py"]
    assert found == ["recipes/training"], list(map(name, files))


def test_decoder_is_built_only_by_training_and_evaluation() -> None:
    """And where a plan takes a step on tensors without values."""
    users = [file for file in FILES if "models.decoder" in imports(file)]
    builders = {place(file) for file in users if name(file) != "recipes/plan/tracked.py"}
    assert builders <= {"models", "recipes/training", "recipes/evaluation", "scripts"}


@pytest.mark.parametrize(("library", "importer"), ONLY_IMPORTER.items())
def test_library_has_only_one_importer(library: str, importer: str) -> None:
    assert {name(file) for file in FILES if library in libraries(imports(file))} <= {importer}


def test_torch_checkpoints_are_used_only_by_what_is_named_checkpoint() -> None:
    users = {
        Path(name(file)).with_suffix("").parts
        for file in FILES
        if any(module.startswith("torch.distributed.checkpoint") for module in imports(file))
    }
    assert not [parts for parts in users if parts[0] != "recipes" or "checkpoint" not in parts]


def test_nothing_is_pickled_but_messages_between_the_processes_of_a_run() -> None:
    assert [name(file) for file in FILES if "pickle" in imports(file)] == ["parallel/messages.py"]


def files_with_one_of(words: set[str]) -> set[str]:
    """Files outside scripts/ with a string literal that is one of these words."""
    return {
        name(file)
        for file in FILES
        if place(file) != "scripts"
        for node in nodes(file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words
    }


def test_environment_of_a_process_is_read_only_by_dist() -> None:
    assert files_with_one_of(PROCESS_ENVIRONMENT) - {AS_LAUNCHER} == {"parallel/dist.py"}


def test_meeting_point_of_the_nodes_is_known_only_to_dist_and_the_launchers_in_cluster() -> None:
    files = files_with_one_of(MEETING_ENVIRONMENT) - {AS_LAUNCHER} - {"parallel/dist.py"}
    assert {str(Path(file).parent) for file in files} <= {"recipes/cluster"}, files


def test_private_names_of_libraries_are_those_of_the_list() -> None:
    """`_asdict` and `_replace` of named tuples, `os._exit` and `sys._current_frames` are documented."""
    own = {"_asdict", "_replace", "_current_frames", "_exit"}
    used: dict[str, str] = {}
    for file in (file for file in FILES if place(file) not in ("scripts", "train.py")):
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
            for name_used in private_parts(node):
                used[name_used] = f"{name(file)}:{node.lineno}"
    used = {name_used: where for name_used, where in used.items() if name_used not in own}
    assert used.keys() == NAMES.keys(), {key: used.get(key) for key in used.keys() ^ NAMES.keys()}


def private_parts(node: ast.AST) -> list[str]:
    """Names that begin with one underscore: of an attribute, or imported."""
    parts: list[str] = []
    if isinstance(node, ast.Attribute):
        parts = [node.attr]
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(PACKAGES):
        parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        parts = [part for alias in node.names for part in alias.name.split(".")]
    return [part for part in parts if re.match("_(?!_)", part)]


# Without torch


def test_torch_free_label_ends_the_docstring() -> None:
    misplaced = [name(file) for file in FILES if TORCH_FREE in (ast.get_docstring(tree(file)) or "")]
    misplaced = [file for file in misplaced if not is_torch_free(ROOT / file)]
    assert not misplaced, f'"{TORCH_FREE}" must be the last sentence of the docstring: {misplaced}'


def test_torch_free_file_imports_only_torch_free_files_of_ours() -> None:
    others = {
        name(file): [name(other) for other in our_files(imports_at_start(file)) if not is_torch_free(other)]
        for file in FILES
        if is_torch_free(file)
    }
    others = {file: imported for file, imported in others.items() if imported}
    assert not others, f'their imports must say "{TORCH_FREE}", too: {others}'


@pytest.mark.slow
def test_importing_every_torch_free_file_and_loading_a_recipe_leaves_torch_out() -> None:
    modules = sorted(module for module, file in MODULES.items() if is_torch_free(file))
    assert "recipes.recipe.load" in modules
    code = """if True:
        import importlib, json, sys
        for module in json.loads(sys.argv[1]):
            importlib.import_module(module)
        import recipes.recipe.load
        recipes.recipe.load.load("configs/smollm3_debug.toml", ["--run.steps", "300"])
        print([module for module in sys.modules if module.partition(".")[0] in ("torch", "torchao")])
    """
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


# Sizes


def test_no_function_is_longer_than_60_lines() -> None:
    long = [
        f"{name(file)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for file in FILES
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        if node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long, long


def test_no_file_is_longer_than_400_lines() -> None:
    long = {file: lines for file, lines in lines_outside_tests().items() if lines > 400}
    assert not long, long


@pytest.mark.parametrize(("room", "limit"), [("core", 40_980), ("recipes/lab", 7_480), ("scripts", 1_450)])
def test_a_room_is_no_longer_than_its_limit(room: str, limit: int) -> None:
    """A new capability raises a limit in the same change, here and in docs/architecture.md. core: what trains."""
    lines = {file: count for file, count in lines_outside_tests().items() if file.endswith(".py")}
    rooms = {file: next((one for one in ("recipes/lab", "scripts") if file.startswith(one)), "core") for file in lines}
    assert sum(count for file, count in lines.items() if rooms[file] == room) <= limit


def test_the_pages_have_at_most_45460_words() -> None:
    words = {name(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= 45_460, words


def test_entry_has_fewer_than_80_lines() -> None:
    assert lines_outside_tests()["train.py"] < 80


def test_training_loop_has_at_most_200_lines() -> None:
    assert lines_outside_tests()["recipes/training/trainer.py"] <= 200


def test_training_loop_imports_at_most_20_files_of_ours() -> None:
    assert len(our_files(imports(MODULES["recipes.training.trainer"]))) <= 20


# Packages and tests


def test_every_folder_of_code_is_a_package() -> None:
    folders = {file.parent for file in FILES if file.parent.name != "scripts"} - {ROOT}
    assert {file.parent for file in INITS} == folders | {folder.parent for folder in folders} - {ROOT}


def test_packages_do_no_work_at_import() -> None:
    assert not [name(file) for file in INITS if file.read_bytes()]


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(name(file.parent).replace("/", ".") for file in INITS)


def test_tests_mirror_the_folders() -> None:
    """Except tests/ itself, for whole commands; tests/gpu, which needs a GPU; and tests/null_gpu, which mimics one."""
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    assert not {
        str(folder) for folder in folders if folder.name not in ("gpu", "null_gpu") and not (ROOT / folder).is_dir()
    }


@pytest.mark.slow
def test_our_packages_come_first_whatever_is_installed(tmp_path: Path) -> None:
    for package in PACKAGES:
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
    assert found.stdout.split() == [str(ROOT / package / "__init__.py") for package in PACKAGES]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_in_a_page_of_docs_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [page.parent / link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:models|parallel|recipes|scripts|tests|docs)/[\w./]+)`", text)]
    missing = [str(path) for path in [*links, *paths] if not path.exists()]
    assert not missing
