"""The range of a predicted time: as far as published rows of its kind were off, or a guess that says so."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from recipes.plan.evidence import ROWS, TOGETHER, kind_of, range_of, traits_of
from recipes.plan.hardware import GPUS
from recipes.plan.rates import RATES
from recipes.plan.time import StepTime, step_time, time_of
from recipes.recipe.load import CONFIGS, load
from tests.published.fit import residuals_of
from tests.published.rows import Published, read_experts, read_published

ALL = [*read_published(), *read_experts()]
MIXTURE = "qwen3_30b_a3b_16x8h100.toml"


def of(row: Published) -> str:
    return kind_of(traits_of(row.work, row.gpu))


def time(*words: str, file: str = MIXTURE, gpu: str = "H100", **rates: Any) -> StepTime:
    recipe = load(CONFIGS / file, words, rules=False)
    nodes = 16 if file == MIXTURE else 1
    degrees = recipe.mesh.fit(8 * nodes, nodes=nodes)
    return step_time(recipe, degrees, gpu=GPUS[gpu], rates=replace(RATES, **rates))


def test_more_than_85_percent_of_all_published_rows_lie_in_the_range_that_is_printed_for_them() -> None:
    spreads = np.array([range_of(row.work, row.gpu, RATES)[0] for row in ALL])
    inside = np.expm1(np.abs(residuals_of(ALL, RATES))) <= spreads
    assert inside.mean() > 0.85
    with_experts = np.array([row.work.experts is not None for row in ALL])
    assert with_experts.sum() == 8 and inside[with_experts].all()


def test_the_numbers_in_use_are_those_of_the_rows() -> None:
    """Those of a kind that has no row would be a guess without a word."""
    assert Counter(map(of, ALL)) == {kind: count for kind, (count, _) in ROWS.items()}
    pairs = {pair for row in ALL for pair in combinations(traits_of(row.work, row.gpu), 2)}
    assert pairs == {(one, two) for one, others in TOGETHER.items() for two in others.split()}


def test_experts_have_a_wide_range_and_a_narrow_one_where_the_time_of_a_run_calibrates_it() -> None:
    found = time()
    assert found.spread > 0.5 and found.evidence == "4 published rows: experts"
    assert time("--float8.recipe=tensorwise").spread > found.spread
    assert time(calibrated="by a run", spread=0.05).spread == 0.05


@pytest.mark.parametrize(
    ("file", "words", "gpu", "missing"),
    [
        ("smollm3_3b_8xh100.toml", ["--optimizer.name=muon"], "H100", "Muon"),
        (MIXTURE, [], "H200", "H200 with experts"),
        ("smollm3_3b_8xh100.toml", ["--mesh.context=2"], "A100", "A100 with context"),
        ("smollm3_3b_8xh100.toml", ["--mesh.pipeline=2"], "H200", "H200 with pipeline"),
    ],
)
def test_what_no_row_has_is_a_guess_that_says_so_and_is_wider(
    file: str, words: list[str], gpu: str, missing: str
) -> None:
    found = time(*words, file=file, gpu=gpu)
    assert found.evidence == f"a guess: no published row has {missing}"
    assert found.spread > max(ROWS[kind][1] for kind in (gpu, *missing.split(" with ")) if kind in ROWS)


def test_all_to_all_that_is_stated_as_deduplicated_and_hidden_gives_the_published_time() -> None:
    """DeepEP's: all of it was between nodes and in the way, and 256 H100 were predicted to be 40% slower."""
    rows = [row for row in ALL if row.work.experts and row.work.experts.degree == 32]
    assert len(rows) == 2
    for row in rows:
        assert row.work.experts
        plain = replace(row.work, experts=replace(row.work.experts, assumed=frozenset()))
        slow, once, stated = (
            time_of(plain, gpu=row.gpu, rates=replace(RATES, assumed=frozenset(words))).tokens_per_second / row.measured
            for words in ((), ("deduplicated",), ("deduplicated", "hidden"))
        )
        assert slow < 0.66 < once < stated and 0.85 < stated < 1.2
        assert time_of(row.work, gpu=row.gpu).tokens_per_second == pytest.approx(stated * row.measured)


def test_a_host_that_reads_the_sizes_of_messages_queues_again_in_every_sparse_layer() -> None:
    """A slower host only matters there: nothing else of this step waits for it."""
    divided, alone = (time(f"--mesh.expert={degree}", "--mesh.shard=128") for degree in (8, 1))
    slower = (time(f"--mesh.expert={degree}", "--mesh.shard=128", launch=2 * RATES.launch) for degree in (8, 1))
    more, none = (
        slow.seconds["gaps"] - fast.seconds["gaps"] for slow, fast in zip(slower, (divided, alone), strict=True)
    )
    assert none == 0 and more > 1e-3
