"""`train.py RECIPE --plan --ladder FILE`: the loss beside days and cost."""

from pathlib import Path
from typing import Any

import pytest

from recipes.recipe.load import CONFIGS, load
from tests.ladders import LAW, write_ladder
from tests.recipes.lab.plan.asked import numbers, printed, refused

NODE = str(CONFIGS / "smollm3_3b_8xh100.toml")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_ladder(tmp_path / "ladder.json", load(NODE, rules=False))


def predicted(*arguments: str) -> dict[str, Any]:
    loss: dict[str, Any] = numbers(NODE, *arguments)["loss"]
    return loss


def test_a_plan_with_a_ladder_has_the_loss_below_its_cost(file: str) -> None:
    lines = printed(NODE, "--tokens", "60B", "--ladder", file).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("cost "))
    size = load(NODE, rules=False).model.non_embedding_params()
    loss = LAW.E + LAW.A / size**LAW.a + LAW.B / 60e9**LAW.b
    assert lines[at + 1].startswith(f"loss    {loss:.3f} (")
    reach = f"), {size / 1e6:,.0f}x the largest rung, 6,000x the longest run of the ladder large"
    assert lines[at + 1].endswith(reach)
    assert lines[at + 2].startswith("        at the same cost, ")
    assert max(map(len, lines)) <= 100 and len(lines) <= 40
    assert "loss  " not in printed(NODE)


def test_a_lowest_loss_at_the_edge_of_the_sizes_tried_is_marked(file: str) -> None:
    few = predicted("--tokens", "1M", "--ladder", file)
    assert few["lowest_at_equal_flops"]["at_edge"] and few["beyond_longest_run"] == pytest.approx(0.1, rel=0.1)
    assert "at the edge of the sizes tried" in " ".join(printed(NODE, "--tokens", "1M", "--ladder", file).split())
    optimal = ("--tokens", "12B", "--ladder", file)  # for LAW, of a model of this size
    assert not predicted(*optimal)["lowest_at_equal_flops"]["at_edge"]
    assert "edge" not in printed(NODE, *optimal)


def test_the_loss_is_that_of_the_tokens_given(file: str) -> None:
    few, many = (predicted("--tokens", tokens, "--ladder", file) for tokens in ("1B", "1T"))
    assert few["low"] < few["loss"] < few["high"]
    assert many["loss"] < few["loss"] and many["ladder"] == "large"
    assert numbers(NODE)["loss"] is None


def test_the_lowest_loss_for_the_money_is_at_equal_flops(file: str) -> None:
    recipe = load(NODE, rules=False)
    for tokens in (1e9, 1e13):
        found = predicted("--tokens", str(tokens), "--ladder", file)
        best, size = found["lowest_at_equal_flops"], recipe.model.non_embedding_params()
        assert best["loss"] <= found["loss"]
        assert (best["parameters"] < size) == (best["tokens"] > tokens) == (tokens < 1e12)


@pytest.mark.slow
def test_a_search_has_the_loss_of_the_recipe_that_it_finds(file: str) -> None:
    lines = printed(NODE, "--search", "--ladder", file).splitlines()
    of_fastest = lines[lines.index("of the fastest:") :]
    assert [line.split()[0] for line in of_fastest[1:4]] == ["time", "cost", "loss"]
    assert of_fastest[4].startswith("        at the same cost, ")


def test_ladders_that_say_nothing_of_the_recipe_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "staged.toml").write_text(f'base = "{NODE}"\n[[stages]]\nname = "a"\nuntil = 9\n[[stages]]\nname = "b"')
    assert "predicts runs with batch.sequence_length" in refused(NODE, "--ladder", file, "--batch.sequence_length=512")
    assert "gone.json cannot be read" in refused(NODE, "--ladder", str(tmp_path / "gone.json"))
    assert "this recipe has stages" in refused(str(tmp_path / "staged.toml"), "--ladder", file)
    assert refused(NODE, "--processes", "8,16", "--ladder", file).startswith("--ladder: goes with one number of")
