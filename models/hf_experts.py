"""Experts in Hugging Face folders: Qwen3-MoE, and dots1, DeepSeek-V3's feed-forwards beside attention like ours.

Files have a tensor for each expert; ours are all experts of a layer together. Imports no torch.
"""

import re
from collections.abc import Iterator
from typing import Any

from models.config import ModelConfig

PROJECTIONS = ("gate", "up", "down")
IN_BLOCK = {
    **{f"feed_forward.experts.{one}_proj": f"mlp.experts.{one}_proj" for one in PROJECTIONS},
    **{
        f"feed_forward.shared_experts.{one}_proj.weight": f"mlp.shared_experts.{one}_proj.weight" for one in PROJECTIONS
    },
}
OF_ROUTER = {"weight": "mlp.gate.weight", "bias": "mlp.gate.e_score_correction_bias"}


def name_in_files(name: str) -> str:
    """routers.3.weight -> model.layers.3.mlp.gate.weight, and so on; of experts, without their numbers. Raises
    KeyError."""
    if match := re.fullmatch(r"routers\.(\d+)\.(.+)", name):
        return f"model.layers.{match[1]}.{OF_ROUTER[match[2]]}"
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{IN_BLOCK[match[2]]}"


def names_of_each(name: str, experts: int) -> tuple[str, ...]:
    """The names in files of what our tensor has of each expert; empty unless it is one of routed experts."""
    if ".feed_forward.experts." not in name:
        return ()
    before, after = name_in_files(name).split("experts.")
    return tuple(f"{before}experts.{number}.{after}.weight" for number in range(experts))


def feed_forward_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name in its block, shape) of each parameter of a sparse feed-forward."""
    count, width, shared = config.experts, config.width, config.shared_experts * config.expert_width
    for one in PROJECTIONS:
        shape = (width, config.expert_width) if one == "down" else (config.expert_width, width)
        yield f"feed_forward.experts.{one}_proj", (count, *shape)
    for one in PROJECTIONS if shared else ():
        yield f"feed_forward.shared_experts.{one}_proj.weight", (width, shared) if one == "down" else (shared, width)


def router_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(our name, shape) of the parameters of all routers, and of their biases."""
    for layer in filter(config.is_sparse, range(config.layers)):
        yield f"routers.{layer}.weight", (config.experts, config.width)
        if config.router_bias:
            yield f"routers.{layer}.bias", (config.experts,)


def keys_of_experts(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json that say the same."""
    keys = {
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": model.normalize_scores,
    }
    if model.router == "softmax":
        dense = [*range(model.dense_layers)]
        return keys | {"num_experts": model.experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return keys | {
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_experts,
        "first_k_dense_replace": model.dense_layers,
        "routed_scaling_factor": model.router_scale,
        "n_group": model.expert_groups,
        "topk_group": model.groups_per_token,
        "sliding_window": None,
    }
