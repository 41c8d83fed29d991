"""Rates from records: what was measured is what a plan then predicts. A file that is none is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from recipes.files.layout import ENVIRONMENT, METRICS, RECIPE
from recipes.plan.calibration import calibrated, slowed
from recipes.plan.hardware import GPUS
from recipes.plan.messages import Group
from recipes.plan.rates import RATES, Rates
from recipes.plan.time import step_time
from recipes.recipe.load import CONFIGS, load, to_toml
from recipes.recipe.schema import Recipe

H100, DEVICE = GPUS["H100"], "NVIDIA H100 80GB HBM3"


def written(folder: Path, content: Any) -> Path:
    file = folder / "record.json"
    file.write_text(json.dumps(content))
    return file


def link(axis: str, processes: int, stride: int, rates: Rates) -> dict[str, Any]:
    """What pre-flight measures on nodes of 8 H100 that have these rates."""
    group = Group(axis, processes, stride, H100, rates)
    pairs = [[size, group.ring(size)] for size in (2**20, 2**26)]
    return {
        **{"axis": axis, "processes": processes, "stride": stride, "per_node": 8},
        **{"all_gather": pairs, "reduce_scatter": pairs},
    }


def environment(*links: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"device": DEVICE, "world_size": 16, "preflight": {"nodes": 2, "links": list(links)}} | more


def test_name_without_a_memory_may_be_of_either_h100(tmp_path: Path) -> None:
    file = written(tmp_path, environment(link("shard", 8, 1, RATES), device="NVIDIA H100"))
    names = [calibrated(file, GPUS[name])[0].name for name in ("H100", "H100-500W")]
    assert names == ["H100", "H100-500W"]
    with pytest.raises(UserError, match="not on H100-500W"):
        calibrated(written(tmp_path, environment(link("shard", 8, 1, RATES))), GPUS["H100-500W"])


def test_two_sizes_of_messages_tell_latency_and_bandwidth_apart_in_both_places(tmp_path: Path) -> None:
    true = replace(RATES, link=0.5, hop=4e-6, network=0.4, node_hop=3e-5)
    file = written(tmp_path, environment(link("shard", 8, 1, true), link("replicate", 2, 8, true)))
    _, rates = calibrated(file, H100)
    for field in ("link", "hop", "network", "node_hop", "collective"):
        assert getattr(rates, field) == pytest.approx(getattr(true, field), rel=1e-3), field


def test_messages_that_take_no_longer_when_larger_are_all_latency(tmp_path: Path) -> None:
    found = link("shard", 8, 1, RATES)
    found["all_gather"] = found["reduce_scatter"] = [[2**20, 1e-3], [2**26, 9e-4]]
    _, rates = calibrated(written(tmp_path, environment(found)), H100)
    assert rates.link > 0 and rates.hop >= 0


def run_of(folder: Path, seconds: list[float], **facts: Any) -> Recipe:
    """The folder of a run on 8 H100 whose steps took so long."""
    recipe = load(CONFIGS / "smollm3_3b_8xh100.toml", ["--metrics.every", "1"])
    (folder / RECIPE).write_text(to_toml(recipe))
    (folder / ENVIRONMENT).write_text(json.dumps({"device": DEVICE, "world_size": 8} | facts))
    rows = [json.dumps({"step": number, "step_seconds": value}) for number, value in enumerate(seconds, 1)]
    (folder / METRICS).write_text("\n".join(rows) + '\n{"step": 21, "step_sec')
    return recipe


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.6])
def test_plan_calibrated_by_a_run_predicts_the_step_of_that_run(tmp_path: Path, slower: float) -> None:
    recipe = run_of(tmp_path, [])
    degrees = recipe.mesh.fit(8)
    measured = step_time(recipe, degrees, gpu=H100, rates=slowed(RATES, slower)).step_seconds
    run_of(tmp_path, [60.0, 2.0, 2.0] + [measured] * 17)  # the first ones compile
    for path in (tmp_path / METRICS, tmp_path):
        gpu, rates = calibrated(path, None)
        found = step_time(recipe, degrees, gpu=gpu, rates=rates)
        assert found.step_seconds == pytest.approx(measured, rel=1e-3)
        assert f"{slower:.2f} times" in rates.calibrated


def test_run_that_did_not_record_its_nodes_had_full_ones(tmp_path: Path) -> None:
    recipe = load(CONFIGS / "smollm3_3b_48x8h100.toml", rules=False)
    measured = step_time(recipe, recipe.mesh.fit(384, nodes=48), gpu=H100, rates=slowed(RATES, 1.3)).step_seconds
    run_of(tmp_path, [measured] * 9, world_size=384)
    (tmp_path / RECIPE).write_text(to_toml(recipe))
    assert "1.30 times" in calibrated(tmp_path / METRICS, None)[1].calibrated


def test_run_on_other_processes_leaves_the_range_wide(tmp_path: Path) -> None:
    run_of(tmp_path, [8.0] * 9)
    for path in (tmp_path, tmp_path / METRICS):
        same, more = (calibrated(path, None, processes=processes)[1].spread for processes in (8, 64))
        assert same == 0.05 and more is RATES.spread is None


def test_damaged_line_of_a_run_is_no_step(tmp_path: Path) -> None:
    run_of(tmp_path, [8.0] * 9)
    expected = calibrated(tmp_path, None)
    with (tmp_path / METRICS).open("a") as file:
        file.write('\n{"step": 5, "los}\n[1]\n\0\0\n')
    assert calibrated(tmp_path, None) == expected


def test_folder_of_a_run_gives_its_network_and_its_speed(tmp_path: Path) -> None:
    true = replace(RATES, link=0.5)
    recipe = run_of(tmp_path, [])
    measured = step_time(recipe, recipe.mesh.fit(8), gpu=H100, rates=slowed(true, 1.2)).step_seconds
    run_of(tmp_path, [measured] * 20, preflight={"nodes": 1, "links": [link("shard", 8, 1, true)]})
    _, rates = calibrated(tmp_path, None)
    assert rates.link == pytest.approx(0.5, rel=1e-3) and "1.20 times" in rates.calibrated


BAD = {
    "nothing": ("", "holds no record; write a run's environment"),
    "no JSON": ("{", "holds no record"),
    "a list": ("[]", "holds no record"),
    "another record": ('{"a": 1}', "is of no known kind; write a run's environment"),
    "a record of kernels": ('{"suite": "gpu", "environment": {"device": "NVIDIA H100"}}', "is of no known kind"),
    "half a record": ('{"preflight": {}}', "is damaged"),
    "a CPU's, of an older version": ('{"suite": "calibrate", "processes": {"1": {}}}', "is of no known kind"),
    "messages in negative time": (
        '{"device": "NVIDIA H100", "preflight": {"links": [{"axis": "shard", "processes": 8, "stride": 1,'
        ' "per_node": 8, "all_gather": [[1, -5.0], [2, -7.0]], "reduce_scatter": [[1, 1], [2, NaN]]}]}}',
        "is damaged",
    ),
    "an older version": ('{"device": "NVIDIA H100", "world_size": 8}', "or is of an older version; write its metrics"),
    "no network": ('{"device": "NVIDIA H100", "world_size": 1}', "measures no network"),
    "an unknown GPU": ('{"device": "Voodoo", "world_size": 2, "preflight": {"links": []}}', "measured on Voodoo"),
    "a CPU's run": ('{"device": "cpu", "world_size": 2, "preflight": {"links": []}}', "of a run on a CPU"),
    "another GPU": ('{"device": "NVIDIA H200", "world_size": 2, "preflight": {"links": []}}', "write --gpu H200"),
}


@pytest.mark.parametrize("case", BAD)
def test_file_that_is_no_record_of_the_gpu_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, expected = BAD[case]
    file = tmp_path / "record.json"
    file.write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        calibrated(file, H100)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_messages_without_a_time_are_refused(tmp_path: Path) -> None:
    found = link("shard", 8, 1, RATES)
    found["all_gather"] = found["reduce_scatter"] = [[2**20, float("nan")], [2**26, 1e-3]]
    with pytest.raises(UserError, match="messages that took no time"):
        calibrated(written(tmp_path, environment(found)), H100)


def test_what_is_no_record_and_no_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    half = written(tmp_path, {"preflight": {}})
    refused = {tmp_path / "missing.json": "cannot be read", tmp_path / "a.json": "is not UTF-8", half: "is damaged"}
    for path, message in (refused | {tmp_path: "cannot be read"}).items():
        with pytest.raises(UserError, match=message):
            calibrated(path, None)
    run_of(tmp_path, [1.0] * 9)
    (tmp_path / ENVIRONMENT).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        calibrated(tmp_path, None)


def test_run_with_too_few_steps_or_impossible_ones_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path, [1.0, 1.0, 1.0])
    with pytest.raises(UserError, match="more than 3 logged steps"):
        calibrated(tmp_path, None)
    for seconds in (1e-9, 1.0):  # the second is several times the peak of its GPUs
        run_of(tmp_path, [seconds] * 9)
        with pytest.raises(UserError, match="at any speed"):
            calibrated(tmp_path, None)
    run_of(tmp_path, [1.0] * 9)
    (tmp_path / RECIPE).unlink()
    with pytest.raises(UserError, match="there is no recipe"):
        calibrated(tmp_path / METRICS, None)
