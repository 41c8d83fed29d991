"""What others know of multi-head latent attention, models/latent_attention.py. Imports no torch."""

from models.config import ModelConfig
from models.registry import LATENT, Costs, Part


def tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Name in the part, as in files but for `heads` -> shape of each parameter."""
    width, heads, latent, query = config.width, config.heads, config.latent_width, config.query_latent_width
    shapes = {
        "q_a_proj": (query, width),
        "q_a_layernorm": (query,),
        "kv_a_proj_with_mqa": (latent + config.rope_width, width),
        "kv_a_layernorm": (latent,),
        "heads.q_b_proj" if query else "heads.q_proj": (heads * config.head_width, query or width),
        "heads.kv_b_proj": (heads * (config.head_width - config.rope_width + config.value_width), latent),
        "heads.o_proj": (width, heads * config.value_width),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items() if all(shape)}


def problems(config: ModelConfig) -> dict[str, str]:
    """Field -> what is wrong with it, and what to write instead."""
    heads, width, rope, found = config.heads, config.head_width, config.rope_width, dict[str, str]()
    if not config.latent_width:
        found["latent_width"] = 'is read by attention = "latent"; write 512 or so'
    if not 0 < config.value_width <= width:
        found["value_width"] = f"must be from 1 to head_width = {width}; write {width}"
    if not 0 < rope < width or rope % 2:
        found["rope_width"] = f"must be even, and below head_width = {width}; write {width // 4 * 2}"
    if config.key_value_heads != heads:
        found["key_value_heads"] = f"must be heads = {heads}, which all read latents; write that"
    if config.rope_mscale and config.rope_scaling == "none":
        found["rope_mscale"] = 'needs rope_scaling; write 0, or rope_scaling = "yarn"'
    return found


def _kept(config: ModelConfig, how: str) -> float:
    """As in Costs: kernels get values as wide as keys, and return as much, of which o_proj reads a part."""
    latents = config.query_latent_width + config.latent_width + config.rope_width
    if how == "selective":  # keys and values as one product returns them
        return latents - config.heads * (config.head_width + config.rope_width - config.value_width)
    return latents + config.heads * config.value_width * (how == "eager")


PART = Part(
    "models.latent_attention:LatentAttention",
    tensors=tensors,
    whole=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    column=("heads.q_proj", "heads.q_b_proj", "heads.kv_b_proj"),
    row=("heads.o_proj",),
    shared=("heads.shared",),
    inner="heads.inner",
    documents=True,
    cache=True,
    reads=LATENT,
    problems=problems,
    # Keys and values are put together from parts, and taken apart: each is read and written twice, of 2 bytes.
    costs=Costs(kept=_kept, moved=lambda config: 16 * config.heads * config.head_width),
)
