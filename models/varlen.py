"""Attention kernels for documents of varying lengths in one row. Importing this takes almost a second: import it late.

B batch, T tokens, S tokens with keys, N query heads, K key/value heads, H head width.
"""

from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.documents import Lengths

# torch 2.12 and later require this argument for grouped queries; 2.11 does not have it and takes them as they are.
ASKS_FOR_GROUPED_QUERIES = "enable_gqa" in signature(varlen_attn).parameters


def attention_by_lengths(
    query: Tensor, key: Tensor, value: Tensor, documents: Lengths, *, window: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention inside documents on CUDA, in bfloat16 or float16. Shapes, window and scale as in attend().

    The last query of a document is aligned with its last key, where it has fewer queries than keys.
    """
    batch, heads, length, _ = query.shape
    longest_keys = key.shape[2]
    options: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if ASKS_FOR_GROUPED_QUERIES else {}
    options |= {} if scale is None else {"scale": scale}
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (B T or S, N or K, H)
    # The longest document is at most a row. Its exact length would have to come from the device, at every step.
    out = varlen_attn(
        query,
        key,
        value,
        documents.cumulative,
        documents.cumulative if documents.of_keys is None else documents.of_keys,
        length,
        longest_keys,
        window_size=(window - 1, 0),  # tokens before and after each one: -1 = all, 0 after it = causal
        **options,
    )
    assert isinstance(out, Tensor)  # it returns a tuple only on request
    return out.unflatten(0, (batch, length)).transpose(1, 2)  # (B, N, T, H)
