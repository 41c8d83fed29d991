"""Reading a sweep's file into rows, what is refused, and the shipped sweeps."""

from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.lab.sweep.grid import Sweep, dotted, read_sweep, windows
from recipes.recipe.fields import sections, value_of
from recipes.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[4]
BENCH = ROOT / "configs/sweeps/gpu_bench.toml"
OF_BENCH = {"gpu_bench", "nccl_bench"}
SWEEPS = sorted(path for path in (ROOT / "configs/sweeps").glob("*.toml") if path.stem not in OF_BENCH)
CPU_VARIANTS = sorted((ROOT / "configs/sweeps/cpu").glob("*.toml"))
DEBUG = ROOT / "configs/smollm3_debug.toml"


def read(tmp_path: Path, text: str, *arguments: str, base: str = f'base = "{DEBUG}"', **options: Any) -> Sweep:
    path = tmp_path / "mine.toml"
    path.write_text(f"{base}\n{text}")
    return read_sweep(path, arguments, output=tmp_path / "out", **{"processes": 2, **options})


def refused(tmp_path: Path, text: str, *arguments: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, *arguments, **options)
    assert not (tmp_path / "out").exists()
    return " ".join(str(caught.value).split())


def test_axes_are_combined_and_the_last_varies_fastest(tmp_path: Path) -> None:
    sweep = read(
        tmp_path,
        """
        timeout = 60
        [fixed]
        optimizer.lr = 1e-3
        [axes]
        activation_checkpointing.mode = ["none", "full"]
        "batch.micro_batch_size" = [1, 2]
        """,
        "--optimizer.eps",
        "1e-6",
    )
    assert [row.label for row in sweep.rows] == [
        "mode=none,micro_batch_size=1",
        "mode=none,micro_batch_size=2",
        "mode=full,micro_batch_size=1",
        "mode=full,micro_batch_size=2",
    ]
    last = sweep.rows[-1]
    assert last.overrides == {"activation_checkpointing.mode": "full", "batch.micro_batch_size": 2}
    assert (last.recipe.activation_checkpointing.mode, last.recipe.batch.micro_batch_size) == ("full", 2)
    assert {(row.recipe.optimizer.lr, row.recipe.optimizer.eps) for row in sweep.rows} == {(1e-3, 1e-6)}
    assert last.recipe.run.folder == tmp_path / "out/mine/runs" / last.label
    assert (sweep.name, last.timeout, last.skip_steps, last.processes) == ("mine", 60, 10, 2)


def test_runs_are_rows_in_order_with_names_or_labels(tmp_path: Path) -> None:
    sweep = read(
        tmp_path,
        """
        processes = 4
        [[runs]]
        name = "plain"
        [[runs]]
        timeout = 5
        optimizer = { betas = [0.8, 0.9], lr = 1.0 }
        """,
    )
    assert [row.label for row in sweep.rows] == ["plain", "betas=[0.8,0.9],lr=1.0"]
    assert sweep.rows[0].overrides == {}
    assert sweep.rows[1].recipe.optimizer.betas == (0.8, 0.9)
    assert sweep.rows[1].processes == 4
    assert [row.timeout for row in sweep.rows] == [1800, 5]


def test_the_fingerprint_depends_on_whatever_changes_a_number(tmp_path: Path) -> None:
    text = '[[runs]]\nname = "a"\noptimizer.lr = 1e-3'
    first = read(tmp_path, text).rows[0].fingerprint
    path = tmp_path / "mine.toml"
    assert read_sweep(path, output=tmp_path / "elsewhere", processes=2).rows[0].fingerprint == first
    assert read_sweep(path, output=tmp_path / "out", processes=1).rows[0].fingerprint != first
    assert read(tmp_path, text.replace("1e-3", "2e-3")).rows[0].fingerprint != first
    assert read(tmp_path, f"skip_steps = 20\n{text}").rows[0].fingerprint != first


def test_windows_begin_and_end_at_logged_steps() -> None:
    assert list(windows(steps=12, every=5, skip=1)) == [(1, 5), (5, 10), (10, 12)]
    assert list(windows(steps=12, every=5, skip=2)) == [(5, 10), (10, 12)]
    assert list(windows(steps=10, every=5, skip=1)) == [(1, 5), (5, 10)]
    assert list(windows(steps=4, every=1, skip=1)) == [(1, 2), (2, 3), (3, 4)]
    assert list(windows(steps=3, every=10, skip=3)) == list(windows(steps=1, every=10, skip=0)) == []
    assert next(windows(steps=10**15, every=1, skip=2)) == (2, 3)  # computed lazily


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[axes]\nfloat8.recipie = ['none']", "float8.recipie (mine.toml [axes]) unknown key; did you mean float8"),
        ("[axes]\noptimiser.lr = [1]", "[optimiser] (mine.toml [axes]) unknown section; did you mean [optimizer]?"),
        (
            "[fixed]\nbatch.micro = 1\n[axes]\nrun.seed = [1]",
            "batch.micro (mine.toml [fixed]) unknown key; [batch] has",
        ),
        ("[[runs]]\nmodle.width = 1", "[modle] (mine.toml [[runs]] 1) unknown section; did you mean [model]?"),
        ("[axes]\nrun.name = ['a']", "run.name (mine.toml [axes]) is set by the sweep; leave it out"),
        ("[axes]\noptimizer.lr = 1", "[axes] optimizer.lr = 1 must be a list of values, one per row"),
        ("[axes]", "axes (mine.toml) is empty, so the sweep has no rows"),
        ("", "write exactly one of them: [axes], or [[runs]]"),
        ("timeout = 0\n[[runs]]", "timeout = 0 (mine.toml) must be the seconds after which a run is treated as hung"),
        ("processes = true\n[[runs]]", "processes = true (mine.toml) must be the number of processes per run"),
        ("proceses = 1\n[[runs]]", "proceses = 1 (mine.toml) unknown key; did you mean processes?"),
        ("[batch]\nmicro_batch_size = 1\n[[runs]]", "write it below [fixed] as batch.FIELD"),
        ("[[runs]]\nname = 'a'\n[[runs]]\nname = 'a'", "several rows are named a; give each a different name"),
        ("[[runs]]\nname = 'a/b'", 'name = "a/b" must be a valid folder name without "|"; write name = "run_1"'),
        (
            f"[[runs]]\nname = '{'ä' * 101}'",
            "has 202 bytes, more than the 200 that names of its files allow; write name =",
        ),
        (
            f"[axes]\ndata.source = ['{'a' * 200}']",
            "has 207 bytes, more than the 200 that names of its files allow; use [[runs]]",
        ),
        ("[axes]\ndata.source = ['a|b']", 'source=a|b" must be a valid folder name without "|"; use [[runs]]'),
        ("least_processes = 3\n[[runs]]", "mine.toml: its rows do not differ on 2 processes and need 3 or more"),
        ("[[runs]]\ntimeout = '1'", '[[runs]] 1: timeout = "1" must be a number of seconds, 1 or more'),
        ("[[runs]]\nmetrics.every = 100", "leaves 1 windows of metrics.every = 100 steps after skip_steps = 10"),
    ],
)
def test_an_error_in_the_file_is_refused(text: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(tmp_path, text)


AXES = "[axes]\nactivation_checkpointing.mode = ['none', 'full']\nbatch.micro_batch_size = [1, 2]"
NAMED = """
[[runs]]
name = "a"
float8.recipe = "tensorwise"
batch.loss_chunks = 4
[[runs]]
name = "b"
optimizer.betas = [0.8, 0.9]
[[runs]]
batch.loss_chunks = 2
run.seed = 3
"""


def test_a_key_of_the_command_line_has_its_value_in_every_row(tmp_path: Path) -> None:
    """Labels and overrides show the value that runs."""
    sweep = read(tmp_path, NAMED, "--batch.loss_chunks", "8", "--optimizer.betas", "0.7", "0.8")
    assert [(row.label, row.overrides) for row in sweep.rows] == [
        ("a", {"float8.recipe": "tensorwise", "batch.loss_chunks": 8}),
        ("b", {"optimizer.betas": (0.7, 0.8)}),
        ("seed=3", {"batch.loss_chunks": 8, "run.seed": 3}),
    ]
    assert {(row.recipe.batch.loss_chunks, row.recipe.optimizer.betas) for row in sweep.rows} == {(8, (0.7, 0.8))}
    sweep = read(tmp_path, AXES.replace(", 'full'", ""), "--activation_checkpointing.mode", "full")
    assert [row.label for row in sweep.rows] == ["micro_batch_size=1", "micro_batch_size=2"]
    assert {row.overrides["activation_checkpointing.mode"] for row in sweep.rows} == {"full"}


def test_rows_that_the_command_line_makes_identical_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(tmp_path, AXES, "--activation_checkpointing.mode", "selective")
    assert message == (
        "mine.toml: --activation_checkpointing.mode makes the 2 rows of micro_batch_size=1 the same run; omit it,"
        " or write a sweep without rows that differ only in it"
    )
    text = "[[runs]]\nname = 'a'\nrun.seed = 1\n[[runs]]\nname = 'b'\n[[runs]]\nname = 'c'\noptimizer.lr = 1.0"
    assert "mine.toml: --run.seed makes a and b the same run" in refused(tmp_path, text, "--run.seed", "2")


def test_a_file_may_repeat_a_row(tmp_path: Path) -> None:
    again = "[[runs]]\nname = 'a'\nrun.seed = 1\n[[runs]]\nname = 'again'\nrun.seed = 1"
    assert len(read(tmp_path, again, "--run.seed", "2").rows) == 2


def test_every_row_is_checked_as_a_recipe(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(
        tmp_path,
        """
        [axes]
        float8.emulate = [true]
        float8.recipe = ["none", "tensorwise", "rowwise", "fp4"]
        float8.all_gather = [true]
        batch.micro_batch_size = [2, 3]
        """,
    )
    assert message.startswith("7 of 8 rows of mine.toml cannot run, so none was started")
    assert message.count('needs recipe = "tensorwise", not "rowwise"') == 2  # alone, and with a bad micro-batch
    assert message.count('float8.recipe = "fp4" (mine.toml [axes]) must be one of "none", "tensorwise"') == 2
    assert "micro_batch_size 3 x 2 data-parallel processes = 6" in message


def test_a_problem_of_several_rows_is_listed_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(tmp_path, "[axes]\nrun.seed = [1, 2, 3]", "--batch.micro_batch_size", "5")
    assert message.count("must be a multiple of") == 1
    assert "seed=1, seed=2, seed=3: 1 problem in " in message


def test_float8_is_refused_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    text = "[axes]\nfloat8.recipe = ['none', 'tensorwise']"
    assert "which has no GPU; write emulate = true" in refused(tmp_path, text, device="cpu")
    assert "1 of 2 rows" in refused(tmp_path, text, device="cpu")
    assert len(read(tmp_path, text, device="cuda").rows) == 2
    assert len(read(tmp_path, text).rows) == 2  # a dry run, on any machine
    assert len(read(tmp_path, text, "--float8.emulate", "true", device="cpu").rows) == 2


def test_a_missing_file_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean configs/sweeps/fp8\.toml\?"):
        read_sweep(Path("configs/sweeps/fp8x.toml"), output=tmp_path, processes=1)
    with pytest.raises(UserError, match="does not exist; did you mean"):
        read(tmp_path, "[[runs]]", base='base = "smollm3_debgu.toml"')


# The shipped sweeps


def test_every_documented_sweep_is_shipped_with_its_cpu_variant() -> None:
    promised = {"fp8", "numerics", "activation_checkpointing", "zero", "micro_batch", "sequence_length", "compile"}
    promised |= {"attention", "document_mask", "parallelism"}
    assert {path.stem for path in SWEEPS} == promised
    assert {path.stem for path in CPU_VARIANTS} == promised | {"tiny", "float8_head", *OF_BENCH}


def test_the_sweep_of_float8_output_projections_differs_in_nothing_else(tmp_path: Path) -> None:
    rows = read_sweep(ROOT / "configs/sweeps/cpu/float8_head.toml", output=tmp_path, processes=1).rows
    assert not rows[0].recipe.model.tied_embeddings
    float8 = [(row.recipe.run.seed, row.recipe.float8.recipe, list(row.recipe.float8.exclude)) for row in rows]
    kinds = [("none", ["lm_head"]), ("tensorwise", ["lm_head"]), ("tensorwise", [])]
    assert float8 == [(seed, *kind) for seed in range(3) for kind in kinds]
    assert {key for row in rows for key in row.overrides} <= {"run.seed", "float8.recipe", "float8.exclude"}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_fits_one_gpu_and_eight(path: Path, tmp_path: Path) -> None:
    for processes in {"zero": (2, 8), "parallelism": (4, 8)}.get(path.stem, (1, 2, 8)):
        sweep = read_sweep(path, output=tmp_path, processes=processes)
        assert all(row.processes == processes and row.recipe.run.device == "cuda" for row in sweep.rows)
        for row in sweep.rows:
            tokens = row.recipe.batch.global_batch_size * row.recipe.batch.sequence_length
            assert tokens >= 65_536 * (8 if path.stem == "zero" else 1)
            assert row.recipe.checkpoint.every == row.recipe.validation.every == 0


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_cpu_variant_compares_what_its_sweep_compares(path: Path, tmp_path: Path) -> None:
    sweep = read_sweep(path, output=tmp_path, processes=8)
    variant = read_sweep(path.parent / "cpu" / path.name, output=tmp_path, processes=1)
    if path.stem == "attention":  # CPUs have other kernels
        assert [list(row.overrides) for row in variant.rows] == [["attention.backend"]] * 3
        return
    assert len(variant.rows) == len(sweep.rows)
    if path.stem != "sequence_length":  # its CPU variant has shorter sequences
        assert [row.label for row in variant.rows] == [row.label for row in sweep.rows]
    # Each key differs between the same rows, whether the base or a row sets it.
    varied = {key for row in (*sweep.rows, *variant.rows) for key in row.overrides}
    if path.stem == "document_mask":
        varied.remove("attention.backend")  # cuDNN, set by the GPU base, supports no document masks; CPU kernels do
    for key in varied:
        assert pattern(variant, key) == pattern(sweep, key), key


def pattern(sweep: Sweep, key: str) -> list[int]:
    """For every row, the index of the first row with the same value of this key."""
    values = [value_of(row.recipe, key) for row in sweep.rows]
    return [values.index(value) for value in values]


@pytest.mark.parametrize("name", ["parallelism", "cpu/parallelism"])
def test_every_layout_of_the_parallelism_sweep_computes_the_same_tokens_per_micro_step(
    name: str, tmp_path: Path
) -> None:
    sweep = read_sweep(ROOT / f"configs/sweeps/{name}.toml", output=tmp_path, processes=8)
    layouts, tokens, batches = set(), set(), set()
    for row in sweep.rows:
        degrees, batch = row.recipe.mesh.fit(row.processes), row.recipe.batch
        layouts.add(degrees)
        tokens.add(batch.micro_batch_size * batch.sequence_length / (degrees.context * degrees.tensor))
        batches.add(batch.global_batch_size)
    assert len(layouts) == len(sweep.rows) and len(tokens) == len(batches) == 1


GPU_PAIRS = {
    "zero3": "zero2",
    "float8": "zero2",
    "float8_gather": "float8",
    "float8_rowwise": "float8",
    "micro_batch_2": "zero2",
    "flash": "zero2",
    "recompute_none": "zero2",
    "recompute_full": "zero2",
}
"""Row -> the row that it changes in one thing."""


def test_the_gpu_benchmark_changes_one_thing_at_a_time(tmp_path: Path) -> None:
    sweep = read_sweep(BENCH, output=tmp_path, processes=8)
    rows = {row.label: row.recipe for row in sweep.rows}
    assert list(rows)[:2] == ["works_bf16", "works_float8"]
    for row in sweep.rows:
        assert row.processes == row.recipe.metrics.every == 1
    for label, other in GPU_PAIRS.items():
        changed = {key for key, value in dotted(sections_of(rows[label])) if value != value_of(rows[other], key)}
        assert len(changed - {"run.name"}) == 1, (label, other, changed)


def sections_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every value by section."""
    return {name: vars(getattr(recipe, name)) for name in sections()}
