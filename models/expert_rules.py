"""Rules about the fields of routed experts. Imports no torch."""

from typing import Any


def problems_of_experts(config: Any) -> dict[str, str]:
    """Field -> what is wrong with the experts of a model that has some, and what to write instead."""
    found = {}
    if config.experts_per_token > config.experts:
        found["experts_per_token"] = f"is more than experts = {config.experts}; write {config.experts} at most"
    if config.activation == "gelu_tanh":
        found["activation"] = 'is not for experts, which compute with "silu" or "swiglu_clamped"; write one of them'
    elif config.activation == "swiglu_clamped" and (config.dense or config.shared_experts):
        found["activation"] = 'is for experts alone; write "silu", or no dense layers and shared_experts = 0'
    if len(config.dense) == config.layers:
        field = "dense_layers" if config.dense_layers >= config.layers else "further_dense_layers"
        field = "sparse_every" if config.sparse_every > config.layers else field
        found[field] = f"leaves none of the {config.layers} layers to experts; write less, or experts = 0"
    if config.experts % config.expert_groups:
        found["expert_groups"] = f"must divide experts = {config.experts}; write one of its divisors, or 1"
    elif config.groups_per_token > config.expert_groups:
        found["groups_per_token"] = f"is more than expert_groups = {config.expert_groups}; write that at most"
    elif config.groups_per_token < config.expert_groups and config.experts < 2 * config.expert_groups:
        found["expert_groups"] = (
            f"leaves a group fewer than two of {config.experts} experts; write {config.experts // 2} or less"
        )
    elif config.groups_per_token * config.experts // config.expert_groups < min(
        config.experts_per_token, config.experts
    ):
        found["groups_per_token"] = f"has fewer experts than experts_per_token = {config.experts_per_token}; write more"
    return found
