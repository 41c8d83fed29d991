"""A plan on one screen."""

from dataclasses import replace

import pytest

from recipes.lab.plan.plan import Plan, World, plan
from recipes.lab.plan.screen import Money, between, duration, in_units, number, screen, seconds
from recipes.plan.hardware import GPUS
from recipes.plan.time import StepTime
from recipes.recipe.load import CONFIGS, load

WORLD = World(GPUS["H100"], 8, kind_from="--gpu", number_from="--processes")


def planned(time: StepTime | None = None) -> Plan:
    recipe = load(CONFIGS / "smollm3_3b_8xh100.toml", rules=False)
    found = plan(recipe, WORLD)
    return found if time is None else replace(found, time=time)


def lines(found: Plan) -> list[str]:
    return screen(found, Money())


def row(found: Plan, name: str) -> list[str]:
    """The words of its row."""
    return next(line for line in lines(found) if line.startswith(f"{name} ")).removeprefix(name).split()


def test_a_plan_with_messages_on_every_axis_stays_on_one_screen() -> None:
    axes = [
        f"messages: {axis}, {place} nodes"
        for axis in ("replicate", "shard", "context", "tensor")
        for place in ("inside", "between")
    ]
    computing = {f"piece {index}": 1.0 for index in range(12)}
    time = StepTime(131_072, {**computing, **dict.fromkeys(axes, 0.5)}, dict.fromkeys(axes, 2.0), 0.2)
    found = lines(planned(time))
    assert len(found) <= 40 and max(map(len, found)) <= 100


def test_long_names_are_wrapped() -> None:
    found = planned()
    named = replace(found, recipe=replace(found.recipe, run=replace(found.recipe.run, name="a name " * 30)))
    assert max(map(len, lines(named))) <= 100


def test_pieces_of_time_add_up_to_the_step() -> None:
    shares = [line.split()[-1 if line.endswith("%") else -2] for line in _table(planned(), "where the time goes")]
    assert sum(float(share.removesuffix("%")) for share in shares) == pytest.approx(100, abs=0.5)


def _table(found: Plan, head: str) -> list[str]:
    """The rows below this head."""
    text = lines(found)
    begin = next(index for index, line in enumerate(text) if line.startswith(head)) + 1
    return text[begin : text.index("", begin)]


def test_messages_are_split_into_hidden_and_not_hidden() -> None:
    name = "messages: shard, inside nodes"
    time = StepTime(1000, {"products": 3.0, name: 1.0}, {name: 0.5}, 0.2)
    assert row(planned(time), "shard, inside nodes") == ["1.5", "s", "500", "ms", "1", "s", "25.0%"]
    assert row(planned(time), "messages not hidden")[:3] == ["1", "s", "25.0%"]


def test_one_process_has_no_table_of_messages() -> None:
    text = lines(planned(StepTime(1000, {"products": 3.0}, {}, 0.2)))
    assert not any(line.startswith("messages") for line in text)


def test_range_is_as_far_to_both_sides() -> None:
    least, most = planned(StepTime(1000, {"products": 6.0}, {}, 0.2)).range
    assert (least, most) == (pytest.approx(5.0), pytest.approx(7.2))


def test_a_recipe_beyond_94_percent_of_the_memory_does_not_fit() -> None:
    found = planned()
    gpu = replace(WORLD.gpu, memory=round(found.memory.peak / 0.95))
    tight = replace(found, world=replace(WORLD, gpu=gpu))
    assert found.fits and not tight.fits
    assert any("DOES NOT FIT (95.0% > 94%)" in line for line in lines(tight))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(24_130.4), "24,130"),
        (number(0.01234), "0.0123"),
        (in_units(15_000_000_000_000), "15 T"),
        (in_units(614_400), "614,400"),
        (seconds(0.0421), "42.1 ms"),
        (seconds(5.432), "5.43 s"),
        (seconds(0.9999), "1,000 ms"),
        (seconds(1234.5), "1,234 s"),
        (duration(400), "400 days"),
        (duration(1.5), "36 hours"),
        (duration(0.01), "14.4 minutes"),
        (duration(1e-4), "8.64 seconds"),
        (between("5.4 s", "7.9 s"), "5.4 to 7.9 s"),
        (between("812 ms", "1.2 s"), "812 ms to 1.2 s"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(shown: str, expected: str) -> None:
    assert shown == expected
