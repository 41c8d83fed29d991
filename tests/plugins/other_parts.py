"""A feed-forward of two matrices without a gate (Primer's squared ReLU), and LayerNorm with a bias."""

from typing import Any

from recipes.plugins.register import Costs, part


def squared_relu(config: Any, layer: int) -> Any:
    from torch import Tensor, nn
    from torch.nn.functional import relu

    class SquaredReLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(config.width, config.feed_forward_width, bias=False)
            self.out = nn.Linear(config.feed_forward_width, config.width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(relu(self.into(x)).square())

    return SquaredReLU()


def layer_norm(config: Any, width: int) -> Any:
    from torch import nn

    return nn.LayerNorm(width, eps=config.norm_eps)


part(
    "feed_forward",
    "squared_relu",
    squared_relu,
    tensors=lambda config, layer: {
        "into.weight": (config.feed_forward_width, config.width),
        "out.weight": (config.width, config.feed_forward_width),
    },
    column=("into",),
    row=("out",),
    # It keeps two tensors as wide as it is inside; SwiGLU keeps four, or three where it is compiled.
    costs=Costs(kept=lambda config, how: (-2 if how == "eager" else -1) * config.feed_forward_width),
)
part(
    "norm",
    "layer",
    layer_norm,
    tensors=lambda config, width: {"weight": (width,), "bias": (width,)},
    column=(),
)
