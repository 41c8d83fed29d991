"""What a ladder answers: on the screen and as a page."""

from dataclasses import replace
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.sizes import SIZES
from recipes.lab.ladder.answer import CAUTION, LadderAnswer, at_equal_flops, lines, write_ladder_page
from recipes.lab.ladder.fit import BestRates, EndedRun, Trial, compute_optimal
from recipes.lab.ladder.rungs import scaled
from recipes.metrics.ladder import Ladder, losses
from tests.ladders import LAW, fit

LENGTH = 256
LARGE = scaled(SIZES["smollm3_debug"], 8_000_000)


def point(model: ModelConfig, tokens: int, seed: int) -> EndedRun:
    """A run 0.5% below the law with seed 0, and as much above it with seed 1."""
    size = model.non_embedding_params()
    loss = float(losses([LAW], size, tokens)[0]) * (0.995, 1.005)[seed]
    flops = float(tokens) * model.flops_per_token(LENGTH, "causal")
    return EndedRun(f"{size / 1e6:.1f}M", seed, size, tokens, flops, loss)


@pytest.fixture
def answer() -> LadderAnswer:
    rungs = [scaled(LARGE, size) for size in (200_000, 600_000, 2_000_000)]
    points = [point(model, tokens, seed) for model in rungs for tokens in (10**7, 2 * 10**7) for seed in range(2)]
    top = max(one.parameters for one in points)
    return LadderAnswer(
        recipe="configs/large.toml",
        model=LARGE,
        tokens=16 * 10**7,
        sequence_length=LENGTH,
        learning_rate=3e-3,
        ladder=Ladder("configs/large.toml", {}, ((1.0, fit()),), parameters=top, tokens=2 * 10**7),
        points=points,
        trials=(),
        factor=1.0,
        rates=BestRates(0.4, -0.3, []),
        failed={},
    )


def named(answer: LadderAnswer) -> dict[str, str]:
    """The lines, by what they begin with."""
    return {line[:16].strip(): line[16:] for line in lines(answer) if line}


def test_half_and_double_the_size_have_equal_flops(answer: LadderAnswer) -> None:
    for factor in (0.5, 1, 2):
        size, tokens, _ = at_equal_flops(fit(), LARGE, answer.flops, LENGTH, factor)
        assert size / LARGE.non_embedding_params() == pytest.approx(factor, rel=0.05)
        assert tokens / answer.tokens == pytest.approx(1 / factor, rel=0.2)
    found = named(answer)
    loss, low, high = fit().predict(LARGE.non_embedding_params(), answer.tokens)
    assert found["this recipe"].split() == ["8M", "160M", f"{loss:.3f}", f"{low:.3f}", "to", f"{high:.3f}"]
    assert found["half as large"].endswith(", at equal FLOPs") and found["twice as large"].endswith(", at equal FLOPs")


def test_the_screen_says_how_far_it_extrapolates_and_how_sure_that_is(answer: LadderAnswer) -> None:
    assert len(lines(answer)) <= 20 and max(map(len, lines(answer))) <= 120
    assert named(answer)["reach"].startswith(
        "3.9x the parameters of the largest rung, 8x the tokens of the longest run, "
    )
    near = replace(answer, tokens=10**7, ladder=replace(answer.ladder, parameters=16 * 10**6))
    assert named(near)["reach"].startswith(
        "0.5x the parameters of the largest rung, 0.5x the tokens of the longest run"
    )
    assert named(answer)["check"].startswith("none: too few runs to hold some out")
    held_out = replace(answer.ladder, fits=((1.0, replace(fit(), misfit=0.02)),))
    said = named(replace(answer, ladder=held_out))["check"]
    assert said.startswith("laws of smaller runs miss larger ones by 2.0% (95% by less)") and len(said) <= 104


def test_the_best_size_is_that_of_the_tokens_given(answer: LadderAnswer) -> None:
    size = compute_optimal(LAW, answer.tokens)
    assert named(answer)["best size"].startswith(f"{size / 1e6:.3g}M parameters (")
    assert named(answer)["best size"].endswith(f"for 160M tokens, {answer.tokens / size:.2g} tokens per parameter")


def test_the_learning_rate_of_the_small_runs_stands_beside_that_of_the_recipe(answer: LadderAnswer) -> None:
    assert named(answer)["learning rate"] == "3e-3 in the recipe; the small runs suggest 3.4e-3"
    doubtful = replace(answer, rates=BestRates(0.4, -0.3, [200_000]))
    assert named(doubtful)["learning rate"].endswith("; at 200k parameters, the best may lie beyond those tried")
    assert "do not tell" in named(replace(answer, rates=None))["learning rate"]


def test_the_page_lists_all_runs_and_those_that_failed(answer: LadderAnswer, tmp_path: Path) -> None:
    failed = {"0.2M-seed2": "hung", "0.6M-seed2": "out of memory"}
    write_ladder_page(tmp_path, replace(answer, failed=failed), command="python scripts/ladder.py configs/large.toml")
    page = (tmp_path / "ladder.md").read_text().splitlines()
    assert page[0] == "# The ladder of configs/large.toml"
    assert "    python scripts/ladder.py configs/large.toml" in page
    assert "    failed          0.2M-seed2: hung (and 1 more: ladder.md)" in page
    assert "| a | 0.27 | 0.27 to 0.27 |" in page
    rows = [line for line in page if line.endswith("% |")]
    assert len(rows) == 6 and all(row.count(", ") == 1 and "0.00% |" in row for row in rows)
    assert page[-2:] == ["- 0.2M-seed2: hung", "- 0.6M-seed2: out of memory"]


def test_a_refused_ladder_has_a_page_with_losses_by_seed_and_the_rates_tried(
    answer: LadderAnswer, tmp_path: Path
) -> None:
    trial = Trial("0.2M", 187_128, 0.5, 1e-3, 3.25)
    refused = replace(answer, recipe="$a$b$", ladder=None, refused="the loss does not fall", trials=[trial])
    write_ladder_page(tmp_path, refused, command="")
    page = (tmp_path / "ladder.md").read_text()
    assert "no prediction   the loss does not fall" in page and "| 0.2M | 0.5x | 1e-3 | 3.2500 |" in page
    first = sorted(answer.points, key=lambda one: (one.parameters, one.tokens, one.seed))[:2]
    assert f"| {first[0].loss:.4f}, {first[1].loss:.4f} |" in page
    write_ladder_page(tmp_path, replace(refused, points=[], failed={"x": "hung"}), command="")  # nothing has ended
    assert "- x: hung" in (tmp_path / "ladder.md").read_text()


def test_a_best_size_that_the_laws_do_not_agree_on_is_not_given(answer: LadderAnswer) -> None:
    wild = replace(fit(), samples=tuple(LAW._replace(A=LAW.A * 10.0**power) for power in range(-9, 2)))
    assert answer.ladder is not None
    found = named(replace(answer, ladder=replace(answer.ladder, fits=((1.0, wild),))))
    assert found["best size"].startswith("not determined: some of the resampled laws put it far below")


def test_caution_looks_at_the_resampled_laws_and_the_distance_of_the_runs(answer: LadderAnswer) -> None:
    open_ended = replace(fit(), samples=(*[LAW] * 9, LAW._replace(E=0.001)), misfit=0.01)
    assert answer.ladder is not None
    said = lines(replace(answer, ladder=replace(answer.ladder, fits=((1.0, open_ended),))))
    assert [line for line in said if line.startswith("caution")] == [CAUTION.format(1 / 11)]
    near = [replace(one, parameters=one.parameters // 10**6 + 10**6) for one in answer.points]
    assert any("the sizes span only" in line for line in lines(replace(answer, points=near)))


def test_epochs_of_the_longest_run_and_of_the_recipe_are_said(answer: LadderAnswer) -> None:
    points = [replace(one, epochs=one.tokens / 10**7) for one in answer.points]
    assert named(replace(answer, points=points))["epochs"].startswith(
        "of the text: 2 in the longest run, 16 in this recipe: the law knows no epochs"
    )
