"""The target after an end of document is of another text: what counts of it, and what older runs go on with."""

import tomllib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.loss import IGNORED
from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.data.batches import Batches
from recipes.evaluation.evaluate import evaluate_text
from recipes.recipe.fields import states_all, toml, value_of
from recipes.recipe.load import load, load_run, to_toml
from recipes.recipe.rules_ladder import conditions_of
from recipes.training.same_run import identity_differences, require_resumes
from tests.recipes.evaluation.test_evaluate import SMALL, Decoder, cpu_mesh

MASKED = Path(__file__).parents[3] / "configs" / "smollm3_debug_document_mask.toml"
END = 9
ROWS = [
    [1, 2, END, 3, 4],  # a border inside
    [END, 1, 2, 3, 4],  # the row begins behind one
    [1, 2, 3, 4, END],  # the last target is an end of document, which counts
    [1, 2, 3, END, 4],  # the last target is of another text
    [END, END, END, END, END],
]
N = IGNORED
TARGETS = [[2, END, N, 4], [N, 2, 3, 4], [2, 3, 4, END], [2, 3, END, N], [N, N, N, N]]


def targets(*, mask: int | None = END, borders: bool = False, once: bool = False) -> list[list[int]]:
    found: Any = SimpleNamespace(rows=lambda first, count: np.array(ROWS)[first : first + count], available=4)
    found.require = lambda first, count: None
    options: dict[str, Any] = {"global_batch_size": 5, "micro_batch_size": 1, "data_rank": 0, "data_ranks": 1}
    options |= {"end_of_document": mask, "border_targets": borders, "device": torch.device("cpu")}
    batches = Batches(found, **options)
    taken = batches.take_once(0) if once else batches._read(0)
    return [row for _, micro_batch, _ in taken for row in micro_batch.tolist()]


def test_the_first_token_of_the_next_document_is_no_target() -> None:
    assert targets() == TARGETS


def test_text_that_is_read_once_leaves_out_borders_and_rows_beyond_its_end() -> None:
    assert targets(once=True) == [*TARGETS[:4], [N] * 4]


@pytest.mark.parametrize("options", [{"borders": True}, {"mask": None}])
def test_all_targets_count_if_asked_for_and_without_a_mask(options: dict[str, Any]) -> None:
    assert targets(**options) == [row[1:] for row in ROWS]


def test_evaluating_documents_leaves_the_same_targets_out() -> None:
    start("cpu", seed=0)
    try:
        tokenizer: Any = SimpleNamespace(encode_batch=lambda texts: [[1] * len(text) for text in texts])
        tokenizer.end_of_document = 0
        how: dict[str, Any] = {"tokenizer": tokenizer, "shape": (2, 4), "document_mask": True, "mesh": cpu_mesh()}
        model = Decoder(SMALL)
        found = [evaluate_text(model, ["aaa", "aa", "a"], border_targets=keeps, **how) for keeps in (True, False)]
    finally:
        stop()
    assert [one.tokens for one in found] == [8, 6]  # of 9 tokens: all but the first, and those after two ends
    assert found[1].nats < found[0].nats


def old_run(folder: Path, *words: str, begun: bool = True) -> list[str]:
    """The options of a run of a version without the field, with its recipe.toml and perhaps a checkpoint."""
    options = ["--run.output", str(folder), "--run.name", "old", *words]
    text = to_toml(load(MASKED, options))
    assert "border_targets = false\n" in text
    (folder / "old" / "checkpoints").mkdir(parents=True)
    if begun:
        (folder / "old" / "checkpoints" / "step-00000010").mkdir()
    (folder / "old" / "recipe.toml").write_text(text.replace("border_targets = false\n", ""))
    return options


def test_a_run_of_an_older_version_goes_on_with_its_targets(tmp_path: Path) -> None:
    options, file = old_run(tmp_path), tmp_path / "old" / "recipe.toml"
    assert load(file, rules=False).data.border_targets  # as it is read by a fork and by what compares runs
    loaded = load_run(MASKED, options)
    assert loaded.recipe.data.border_targets
    assert loaded.origins is not None and loaded.origins["data.border_targets"].endswith("recipe.toml")
    require_resumes(loaded.recipe, file, where="there")
    file.write_text(to_toml(loaded.recipe))  # as its next start does
    require_resumes(load(MASKED, options), file, where="there")


def stated(file: Path) -> list[tuple[str, str, Any]]:
    """Section, name and value of each field in a file."""
    tables = {name: own for name, own in tomllib.loads(file.read_text()).items() if isinstance(own, dict)}
    return [(section, name, value) for section, own in tables.items() for name, value in own.items()]


def test_a_run_of_the_first_version_is_known_as_one_and_what_people_write_is_not(tmp_path: Path) -> None:
    """That wrote 45 fields outside of [model], however many there are now."""
    options, file = old_run(tmp_path), tmp_path / "old" / "recipe.toml"
    fields = sorted(stated(file), key=lambda one: one[0] not in ("model", "data"))
    first = [one for one in fields if one[0] == "model"] + [one for one in fields if one[0] != "model"][:45]
    file.write_text("\n".join(f"{section}.{name} = {toml(value)}" for section, name, value in first))
    assert load(file, rules=False).data.border_targets and load(MASKED, options).data.border_targets
    for path in MASKED.parent.rglob("*.toml"):
        assert not states_all([f"{section}.{name}" for section, name, _ in stated(path)]), path


def test_a_run_of_an_older_version_refuses_other_targets(tmp_path: Path) -> None:
    options, file = old_run(tmp_path), tmp_path / "old" / "recipe.toml"
    asked = load(MASKED, [*options, "--data.border_targets", "false"])
    assert not asked.data.border_targets
    with pytest.raises(UserError, match=r"data.border_targets: true in the folder's recipe.toml, false now"):
        require_resumes(asked, file, where="there")


def test_a_fork_of_a_run_of_an_older_version_keeps_its_targets(tmp_path: Path) -> None:
    old_run(tmp_path)
    inside = ("old@10", "old", "old/checkpoints", "old/checkpoints/step-00000010", "me@home/old@10", "me@home/old")
    (tmp_path / "me@home").symlink_to(tmp_path)
    for trunk in inside:
        fork = ["--run.output", str(tmp_path), "--run.name", "fork", "--run.continue_from", f"{tmp_path}/{trunk}"]
        assert load(MASKED, fork, rules=False).data.border_targets, trunk
        assert not load(MASKED, [*fork, "--data.border_targets", "false"], rules=False).data.border_targets
    (tmp_path / "fork" / "checkpoints" / "step-00000012").mkdir(parents=True)  # it has begun, with the new default
    (tmp_path / "fork" / "recipe.toml").write_text(to_toml(load(MASKED)))
    assert not load(MASKED, fork, rules=False).data.border_targets


@pytest.mark.parametrize("trunk", ["", "gone", "gone@10", "s3://bucket/runs/old", "\0", "~nobody-of-this-name/old"])
def test_what_holds_no_older_run_leaves_the_new_default(trunk: str, tmp_path: Path) -> None:
    words = ["--run.output", str(tmp_path), "--run.name", "fork", "--run.continue_from", trunk]
    with suppress(UserError):  # some are refused
        assert not load(MASKED, words, rules=False).data.border_targets


def test_a_run_that_has_no_checkpoint_begins_with_the_new_default(tmp_path: Path) -> None:
    assert not load(MASKED, old_run(tmp_path, begun=False)).data.border_targets


def test_without_a_mask_the_field_makes_no_other_run(tmp_path: Path) -> None:
    options = old_run(tmp_path, "--data.document_mask", "false", begun=False)
    old, new = load(tmp_path / "old" / "recipe.toml", rules=False), load(MASKED, options)
    assert value_of(old, "data.border_targets") != value_of(new, "data.border_targets")
    assert identity_differences(old, new) == []
    assert "data.border_targets" not in conditions_of(new)  # a ladder of an older version still compares


def test_the_field_is_refused_where_nothing_reads_it() -> None:
    with pytest.raises(UserError, match=r"data.border_targets = true .*\n.*has no effect without data.document_mask"):
        load(MASKED, ["--data.document_mask", "false", "--data.border_targets", "true"])
