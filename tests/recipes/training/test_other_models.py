"""The debug recipes for models of transformers, from a config.json to text from the exported folder."""

from pathlib import Path

import pytest
import torch

from models.transformers import TransformersModel
from parallel.config import CompileConfig
from parallel.dist import World, start, stop
from parallel.errors import UserError
from parallel.kernels import compile_blocks
from recipes.evaluation.generate import open_model, texts_of
from recipes.evaluation.opened import Sampling
from recipes.files.layout import EXPORT, LOG_FILE
from recipes.recipe.load import load
from recipes.recipe.schema import Recipe
from recipes.training.build import build
from tests.families import family_config
from tests.processes import untimed
from tests.training import rows, train

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[3] / "configs"
NAMES = ("gpt2_debug", "t5_debug")
GREEDY = Sampling(6, temperature=0.0)


def short(name: str, corpus: Path, folder: Path) -> Recipe:
    """The shipped recipe with its own model, on little text."""
    changes = {
        "run.steps": 3,
        "run.output": folder / "runs",
        "data.cache": corpus.parent / "cache",
        "batch.global_batch_size": 4,
        "checkpoint.every": 2,
        "checkpoint.export_hf": "true",
        "validation.every": 3,
        "validation.batches": 2,
        "validation.sample_tokens": 5,
        "schedule.warmup_steps": 1,
        "schedule.decay_steps": 0,
        "metrics.every": 1,
    }
    if name != "t5_debug":
        changes |= {"data.source": corpus, "data.tokenizer": "train:512", "batch.sequence_length": 32}
    return load(CONFIGS / f"{name}.toml", [f"--{key}={value}" for key, value in changes.items()])


@pytest.fixture(scope="module", params=NAMES)
def finished(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run of each recipe, to its end."""
    recipe = short(request.param, corpus, tmp_path_factory.mktemp(request.param))
    world = start("cpu", seed=0)
    try:
        assert train(recipe, world, silent=False) == 0  # or there is no log
    finally:
        stop()
    return recipe


def test_a_run_learns_validates_and_shows_a_sample(finished: Recipe) -> None:
    found = rows(finished)
    losses = [row["loss"] for row in found if "loss" in row]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert sum("validation_loss" in row for row in found) == 1
    log = untimed((finished.run.folder / LOG_FILE).read_text())
    assert "transformers, not our decoder" in log
    sampled = (
        "a held-out prompt, and how the model answers it:\nspell: " if "t5" in finished.run.name else "held-out text"
    )
    assert sampled in log


def test_the_exported_folder_writes_the_same_text_as_the_checkpoint(finished: Recipe) -> None:
    found = []
    for place in (finished.run.folder, finished.run.folder / EXPORT):
        opened = open_model(place, dtype=torch.float32, device=torch.device("cpu"))
        ids = opened.prompt_ids("spell: 4 2" if opened.encoder_decoder else "def main")
        found.append((ids, texts_of(opened, ids, GREEDY, beams=1, outputs=1)))
    assert found[0] == found[1] and len(found[0][1]) == 1


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 8), ("t5", 64)])
def test_blocks_of_two_stacks_may_be_compiled_for_more_kinds_and_lengths(name: str, limit: int) -> None:
    """T5's four kinds of block share a forward(), each with and without gradients: torch's limit of 8 is used up."""
    with torch.device("meta"):
        model = TransformersModel(family_config(name))
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_blocks(model, CompileConfig(enabled=True), device_type="cpu")
        assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.parametrize("name", ["TMPDIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_folders_that_the_compiler_would_not_find_are_refused_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's command line ended in a fatal error of g++ and 60 lines of tracebacks."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)  # asked once in a process
    with torch.device("meta"):
        model = TransformersModel(family_config("gpt2"))
    with pytest.raises(UserError, match=f"my folder' for the C.. compiler; set {name} to a path without blanks"):
        compile_blocks(model, CompileConfig(enabled=True), device_type="cpu")


def test_a_t5_whose_compiled_blocks_would_be_computed_again_is_refused_on_a_cpu(alone: World) -> None:
    options = ["--compile.enabled=true", "--activation_checkpointing.mode=selective"]
    with pytest.raises(UserError, match=r"corrupts memory .* write compile.enabled = false"):
        build(load(CONFIGS / "t5_debug.toml", options), alone)
    build(load(CONFIGS / "gpt2_debug.toml", options), alone)
