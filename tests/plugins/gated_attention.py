"""Attention whose heads pass a gate before the output projection (Qwen3-Next; "Gated Attention for LLMs",
arXiv 2505.06708): o_proj(heads * sigmoid(gate_proj(x))).

B batch, T tokens, D model width, N heads, H head width.
"""

from typing import Any

from models.hf import tensors_of_ours
from recipes.plugins.register import Costs, part


def gated_attention(config: Any, layer: int) -> Any:
    """The module of a layer. torch is imported here, as --check and --plan do not need it."""
    import torch
    from torch import Tensor, nn

    from models.decoder import Attention

    class GatedAttention(Attention):
        def __init__(self) -> None:
            super().__init__(config, layer)
            self.gate_proj = nn.Linear(config.width, config.heads * config.head_width, bias=False)

        def forward(self, x: Tensor, *further: Any) -> Tensor:
            """x: (B, T, D) -> (B, T, D). further: rotations, cache and documents, as ours takes them."""
            return self.o_proj(self.heads(x, *further) * torch.sigmoid(self.gate_proj(x)))

    return GatedAttention()


def tensors(config: Any, layer: int) -> dict[str, tuple[int, ...]]:
    """Ours, and the gate's."""
    own = tensors_of_ours(config, layer, "attention")
    return {**own, "gate_proj.weight": (config.heads * config.head_width, config.width)}


part(
    "attention",
    "gated",
    gated_attention,
    tensors=tensors,
    column=("q_proj", "k_proj", "v_proj", "gate_proj"),
    row=("o_proj",),
    norms=("q_norm", "k_norm"),
    inner="inner",
    documents=True,
    cache=True,
    reads=("qk_norm", "window", "attention_scale_width", "no_rope_every", "no_rope_layers"),
    costs=Costs(
        # Beside what ours keeps: the gate and its product with the heads, which o_proj reads; or gate_proj's result.
        kept=lambda config, how: (1 if how == "selective" else 2) * config.heads * config.head_width,
        # Forward reads two and writes one, backward reads three and writes two, of 2 bytes.
        moved=lambda config: 16 * config.heads * config.head_width,
    ),
)
