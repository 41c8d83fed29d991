"""Builds the optimizer of a recipe: two parameter groups, with weight decay and without, and matrices beside them."""

import math
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models.interface import blocks_of
from parallel.errors import UserError
from parallel.mesh import Mesh
from recipes.optimization.config import OptimizerConfig
from recipes.optimization.skip_steps import Skips, take_step


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    fields: Any = None,
) -> Optimizer:
    """The optimizer of `config` over the sharded parameters of `model`.

    Matrices decay. Norms and biases do so only with decay_norms. Embeddings, of tokens, positions or distances, and an
    output projection that is tied to one do so only with decay_embeddings. mesh, dtype: where whole matrices are
    multiplied, what shards them, and the type of the products. compiled: AdamW's updates by kernels of torch.compile,
    one call for each block; else by torch's fused kernel. fields: the section of a plug-in's optimizer, if it has one.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    # Biases of experts, a row for each, are vectors too.
    biases = {one for name, one in model.named_parameters() if ".experts." in name and name.endswith("_bias")}
    matrices: dict[nn.Parameter, None] = {}
    if config.facts.orthogonalizes:  # each once, in the order of the model
        of_blocks = (parameter for block in blocks_of(model) for parameter in block.parameters())
        others = biases | embeddings
        matrices = {one: None for one in of_blocks if one.dim() >= 2 and one not in others}
        if not matrices:
            what = f'optimizer.name = "{config.name}": the blocks of this model have no matrix'
            raise UserError(f'{what}; write name = "adamw"')
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        decays = config.decay_norms if parameter.dim() < 2 else config.decay_embeddings or parameter not in embeddings
        decays = config.decay_norms if parameter in biases else decays
        if parameter not in matrices:
            (decayed if decays else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    blocks = blocks_of(model) if compiled else None
    optimizer = _built(config, groups, fields, matrices=[*matrices], mesh=mesh, dtype=dtype, blocks=blocks)
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if left := [name for name, parameter in model.named_parameters() if parameter not in stepped]:
        raise UserError(f"{_entry(config)} leaves {len(left)} parameters untrained, such as {left[0]}")
    return optimizer


def matrices_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that Muon steps, if any."""
    return [parameter for group in optimizer.param_groups if "lr_share" in group for parameter in group["params"]]


def _built(config: OptimizerConfig, groups: list[dict[str, Any]], fields: Any, **options: Any) -> Optimizer:
    builder, own = config.facts.builder, {} if fields is None else {"fields": fields}
    try:
        build = resolve_name(builder) if isinstance(builder, str) else builder
        optimizer: Optimizer = build(groups, config, **options, **own)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{_entry(config)} names {builder}, which builds nothing: {error}") from error
    return optimizer


def _entry(config: OptimizerConfig) -> str:
    return f'optimizer.name = "{config.name}": its entry in {config.facts.place}'


def require_as_described(config: OptimizerConfig, fields: Any = None) -> None:
    """Try the optimizer on four numbers, which are no matrix of a block. Raises UserError unless its facts are true.

    fields: as of build_optimizer().
    """
    facts, entry = config.facts, _entry(config)

    def after(*steps: tuple[float, float], divisor: float, rate: float = 1.0) -> list[Tensor]:
        """The numbers, and what is kept of them, after steps with these gradients, unless they are skipped."""
        numbers = nn.Parameter(torch.ones(2, 2, device="cpu"))
        groups, dtype = [{"params": [numbers]}], torch.float32
        optimizer = _built(config, groups, fields, matrices=[], mesh=None, dtype=dtype, blocks=None)
        if facts.skips != isinstance(optimizer, Skips):
            here = "lacks" if facts.skips else "has"
            raise UserError(f"{entry} says skips = {facts.skips}, but it {here} found_inf and grad_scale")
        for group in optimizer.param_groups:
            group["lr"] = rate
        for gradient, skip in steps:
            numbers.grad = torch.full_like(numbers, gradient)
            take_step(optimizer, [numbers], skip=torch.tensor(skip), divisor=torch.tensor(divisor))
        return [numbers.detach(), *optimizer.state[numbers].values()]

    plain = after((1.0, 0.0), divisor=1.0)
    if not all(isinstance(tensor, Tensor) for tensor in plain):
        raise UserError(f"{entry} cannot be used: it keeps what is no tensor, and checkpoints hold tensors")
    kept, described = sum(tensor.nbytes for tensor in plain[1:]), config.state_bytes(4, 1)
    if kept != described:
        raise UserError(f"{entry} promises {described} bytes of four numbers, but it keeps {kept}; correct moments")
    if not all(map(torch.equal, plain, after((math.nan, 1.0), (2.0, 0.0), divisor=2.0))):
        raise UserError(f"{entry} says skips = True, but does not read both found_inf and grad_scale; write False")
    if not torch.equal(after((1.0, 0.0), divisor=1.0, rate=0.0)[0], torch.ones(2, 2)):
        raise UserError(f"{entry} cannot be used: its step does not read the learning rate of each group")
