"""Messages of a step along each axis of a mesh, as `--plan` counts them. Imports no torch."""

from dataclasses import replace

from parallel.config import MeshDegrees
from recipes.plan.hardware import Gpu
from recipes.plan.messages import messages_of
from recipes.plan.rates import RATES, Rates
from recipes.plan.work import work_of
from recipes.recipe.schema import Recipe
from tests.null_gpu.calls import Sent


def planned(recipe: Recipe, degrees: MeshDegrees) -> dict[str, Sent]:
    """Axis -> the messages of one step of one rank.

    The plan has seconds only. On a network where each message takes a second, they are a number of messages; where a
    byte takes a second, bytes.
    """
    instant = Gpu("", memory=0, bandwidth=1, bf16_peak=1, float8_peak=1, link=1, network=1, source="", per_node=2**30)
    still = replace(RATES, hop=0.0, node_hop=0.0, collective=0.0, network=1.0, link=1.0, moved=float("inf"))
    sent = _seconds(recipe, degrees, instant, still)
    number = _seconds(recipe, degrees, instant, replace(still, collective=1.0, link=float("inf")))
    return {axis: Sent(number[axis], 0, sent[axis]) for axis in sent if sent[axis]}


def _seconds(recipe: Recipe, degrees: MeshDegrees, gpu: Gpu, rates: Rates) -> dict[str, float]:
    messages = messages_of(work_of(recipe, degrees), gpu, rates, forward=0.0, backward=0.0)
    seconds: dict[str, float] = {}
    for part in (messages.exposed, messages.hidden):
        for name, value in part.items():
            axis = name.split()[1].rstrip(",")
            seconds[axis] = seconds.get(axis, 0.0) + value
    return seconds
