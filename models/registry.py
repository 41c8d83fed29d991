"""The parts of the decoder, ours and registered ones, and sizes of models that are registered beside models/sizes.py.

A part is the module in one place of a block. Who needs to know more of it than its forward pass asks here: where tensor
and context parallelism cut it, its tensors, what it costs. What a part does not say is refused by name. What is
registered holds for the whole process, which `_parts` and `FAMILIES` are the only place of. S is the number of tokens
of a text. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from math import prod
from typing import Any, Literal, get_args

Place = Literal["attention", "feed_forward", "norm"]
"""The fields of [model] that name a part, and the names of the modules in a block."""
PLACES: tuple[Place, ...] = get_args(Place)
Tensors = Mapping[str, tuple[int, ...]]
OURS, LATENTS = "default", "latent"
"""The names of the parts that are ours; only attention has the second one."""
LATENT = ("latent_width", "query_latent_width", "rope_width", "value_width", "rope_mscale")
"""Fields of READ that ours do not read: attention = "latent" does (models/latent.py)."""
READ: Mapping[Place, Mapping[str, Any]] = {
    "attention": {"qk_norm": "none", "window": 0, "attention_scale_width": 0, "no_rope_every": 0, "no_rope_layers": ()}
    | {"attention_sinks": False, "biases": False, **dict.fromkeys(LATENT, 0)},
    "feed_forward": {"activation": "silu", "experts": 0},
    "norm": {"norm_offset": False},
}
"""Fields of [model] that some parts read, with the values that ask for nothing; another part says which it reads."""


@dataclass(frozen=True)
class Costs:
    """What MFU and --plan must know of a part beside its tensors, each of which they count as a product per token."""

    kept: Callable[[Any, str], float] = lambda config, how: 0.0
    """(config, how it runs: "eager", "compiled", or "selective" checkpointing, which keeps results of products alone)
    -> elements per token that it keeps for its backward pass, more than ours."""
    moved: Callable[[Any], float] = lambda config: 0.0
    """Bytes per token that its kernels move in a step, forward and backward, in bfloat16, more than those of ours."""
    flops: Callable[[Any, int, float], float] | None = None
    """Attention: (config, layer, S) -> FLOPs per token, forward and without a causal mask, beside products with its
    tensors; None = as ours, 4 x heads x head_width x S."""


@dataclass(frozen=True)
class Part:
    """What others know of a part."""

    builder: str | Callable[..., Any]
    """"MODULE:FUNCTION" or a function (config, layer) -> module; for a norm, (config, number of features) -> module."""
    tensors: Callable[[Any, int], Tensors] | None = None
    """The same arguments -> name in the part -> shape of each parameter, in order; None = ours (models/hf.py)."""
    column: tuple[str, ...] | None = None
    """Linears whose outputs tensor parallelism may cut; None = it cannot cut this part."""
    row: tuple[str, ...] = ()
    """Linears that sum over what those produce, and whose output the part returns."""
    norms: tuple[str, ...] = ()
    """Norms inside, of each head by itself."""
    whole: tuple[str, ...] = ()
    """Linears and norms before the column linears, of each token by itself, which every process has whole."""
    shared: tuple[str, ...] = ()
    """Modules without parameters, between them, that pass on what all heads read."""
    inner: str | None = None
    """Attention: the only module in which tokens see each other, called as models.attention.InnerAttention is, which
    context parallelism replaces; None = it cannot."""
    documents: bool = False
    """Attention: whether it keeps tokens inside their documents."""
    cache: bool = False
    """Attention: whether it appends keys and values of ours' shapes to a cache, and attends to it."""
    reads: tuple[str, ...] = ()
    """Fields of READ that it reads."""
    problems: Callable[[Any], Mapping[str, str]] | None = None
    """config -> field -> what is wrong with its shape, and what to write instead."""
    initial: Mapping[str, float] = field(default_factory=dict)
    """Name -> initial value of tensors that begin with neither normal numbers, as matrices, nor ones, as other
    weights, nor zeros, as biases."""
    costs: Costs | None = None
    """None = there is no MFU, and no --plan."""

    def make(self, *arguments: Any) -> Any:
        """The module. Raises ValueError for a builder that does not exist."""
        if callable(self.builder):
            return self.builder(*arguments)
        module, _, function = self.builder.partition(":")
        try:
            builder = getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f'the builder "{self.builder}" of a part cannot be imported: {error}') from error
        return builder(*arguments)

    def matrices(self, config: Any, number: int) -> dict[str, tuple[int, ...]]:
        """Name of a linear, or of another matrix -> its shape; none for ours. number: as tensors takes it."""
        shapes = self.tensors(config, number) if self.tensors else {}
        return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) > 1}

    def elements(self, config: Any, number: int, *, matrices: bool) -> int | None:
        """Those of its tensors that are matrices, or of the others; None for ours. number: as tensors takes it."""
        if self.tensors is None:
            return None
        return sum(prod(shape) for shape in self.tensors(config, number).values() if (len(shape) > 1) == matrices)


_parts: dict[tuple[str, str], Any] = {
    ("attention", OURS): Part(
        "models.decoder:Attention",
        column=("q_proj", "k_proj", "v_proj"),
        row=("o_proj",),
        norms=("q_norm", "k_norm"),
        inner="inner",
        documents=True,
        cache=True,
        costs=Costs(),
    ),
    ("attention", LATENTS): "models.latent",
    ("feed_forward", OURS): Part(
        "models.decoder:FeedForward", column=("gate_proj", "up_proj"), row=("down_proj",), costs=Costs()
    ),
    ("norm", OURS): Part("models.decoder:rms_norm_of", column=(), costs=Costs()),
}
"""(place, name) -> its Part, or the module whose PART it is, which most models do not need."""
FAMILIES: dict[str, Any] = {}
"""Value of model.name -> the ModelConfig that a plug-in has registered for it."""


def checked(place: Place, name: str, builder: str | Callable[..., Any], **facts: Any) -> Part:
    """A part for the name. facts: the other fields of Part, of which `tensors` is needed.

    Raises ValueError for the name of ours and for facts that contradict each other.
    """
    new = Part(builder, **facts)
    wrong = {
        f"there is no such place; write one of {', '.join(PLACES)}": place not in PLACES,
        "it is ours; choose another name": name in (OURS, LATENTS),
        "it says no tensors; write tensors = (config, layer) -> shapes": new.tensors is None,
        f"it can read {', '.join(READ.get(place, ()))} alone": {*new.reads} - {*READ.get(place, ())},
        "it says a half of how it is cut; write both column and row": bool(new.column) != bool(new.row),
    }
    for message, applies in wrong.items():
        if applies:
            raise ValueError(f'model.{place} = "{name}": {message}')
    return new


def put(kind: str, name: str, value: Any) -> None:
    """Make a part, of the name "PLACE.NAME", or a family a choice of [model] from now on; it replaces an earlier one of
    the name. A family is a ModelConfig, whose shape and parts `[model] name = "NAME"` takes."""
    if kind == "part":
        place, _, of_part = name.partition(".")
        _parts[place, of_part] = value
    elif kind == "family":
        FAMILIES[name] = value


def find(place: Place, name: str) -> Part:
    """The part of this name. Raises ValueError if nothing has registered it."""
    if (found := _parts.get((place, name))) is None:
        raise ValueError(f'model.{place} = "{name}" {unregistered(place, name)}')
    if isinstance(found, str):
        found = _parts[place, name] = import_module(found).PART
    part: Part = found
    return part


def unregistered(place: str, name: str) -> str | None:
    """Why no part has this name, and what to write instead; None if one has it, or this is not a place."""
    known = [one for at, one in _parts if at == place]
    if not known or (place, name) in _parts:
        return None
    close = get_close_matches(name, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"registered are {', '.join(known)}"
    return f"is registered by no module of [plugins]; {hint}"


def parts_not_ours(config: Any) -> dict[Place, str]:
    """Place -> name of the parts without which, of all that plug-ins register, a model cannot be built."""
    return {place: name for place in PLACES if (name := getattr(config, place)) not in (OURS, LATENTS)}


def problems_of_parts(config: Any) -> dict[str, str]:
    """Field -> what is wrong with the parts that a model names, and what to write instead."""
    found: dict[str, str] = {}
    for place in PLACES:
        name = getattr(config, place)
        if unknown := unregistered(place, name):
            found[place] = unknown
            continue
        part = find(place, name)
        unread = {*READ[place]} & {*LATENT} if name == OURS else {*READ[place]} - {*part.reads}
        for read, plain in READ[place].items():
            if read in unread and getattr(config, read) != plain:
                found[read] = f'is not read by {place} = "{name}"; write {plain!r}'
        found |= part.problems(config) if part.problems else {}
    if config.qk_norm == "all" and config.norm != OURS:
        found["norm"] = f'has no norm of all heads; write "{OURS}", or qk_norm = "head"'
    return found
