"""How the run that made some weights read its data."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from recipes.recipe.load import load, to_toml
from recipes.training.same_run import data_of_run
from recipes.weights.locate import Weights

ROOT = Path(__file__).resolve().parents[3]


class _At:
    def __init__(self, path: Path) -> None:
        self.path = path


def test_weights_of_a_run_with_stages_were_trained_on_the_data_of_their_stage(tmp_path: Path) -> None:
    recipe = load(ROOT / "configs/smollm3_debug_stages.toml")
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    ends = [stage.until for stage in recipe.stages]
    for step, masked in (
        (ends[0] - 1, False),
        (ends[0], False),
        (ends[0] + 1, True),
        (ends[1], True),
        (ends[2], False),
    ):
        data = data_of_run(cast(Weights, _At(tmp_path / "checkpoints" / f"step-{step:08d}")))
        assert data is not None and data.document_mask is masked, step
    exported = data_of_run(cast(Weights, _At(tmp_path / "hf")))
    assert exported is not None and "python-stdlib/unittest" in exported.sources and not exported.document_mask
    copy = tmp_path / "remote" / "cache" / f"step-{ends[0] + 1:08d}-0123456789abcdef"  # of a checkpoint at a server
    copy.mkdir(parents=True)
    (copy / "recipe.toml").write_text(to_toml(recipe))
    data = data_of_run(cast(Weights, _At(copy)))
    assert data is not None and data.document_mask
    alone = replace(recipe, stages=())
    (tmp_path / "recipe.toml").write_text(to_toml(alone))
    assert data_of_run(cast(Weights, _At(tmp_path / "checkpoints" / "step-00000001"))) == alone.data
