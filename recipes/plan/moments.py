"""What lives at the moments at which a training step can be the fullest, from the dimensions of the model.

What lives at once was read off FSDP2, and tests compare it with real steps whose storages are counted.
Imports no torch.
"""

from collections.abc import Collection, Iterator

from models.activations import norm_per_token
from parallel.config import MeshDegrees
from recipes.plan.messages import muon_cost
from recipes.plan.sizes import Pieces, Sizes
from recipes.plan.work import work_of
from recipes.recipe.schema import Recipe

MOMENTS_AT_A_TIME = 2**27
"""Elements, as BATCH in recipes/optimization/adamw.py."""


def sizes_of(recipe: Recipe, degrees: MeshDegrees, *, imbalance: float = 1.0) -> Sizes:
    """The sizes of a process. imbalance: rows of the experts of the fullest process, relative to the mean."""
    if not recipe.model.experts:
        return Sizes(recipe, degrees)
    from recipes.plan.experts import SparseSizes  # most models have none

    return SparseSizes(recipe, degrees, imbalance=imbalance)


def moments(size: Sizes, layers: Collection[int]) -> Iterator[tuple[str, Pieces]]:
    """The moments that can be the fullest, in the order of a step's last micro-batch. layers: blocks to look at."""
    if size.in_forward:
        yield f"the forward pass of block {size.recipe.model.layers - 1}", _in_forward(size)
    yield "the loss", loss(size, backward=False)
    yield "the gradient of the logits", loss(size, backward=True)
    yield "the gradient of the head", head(size)
    if not size.tied:
        yield "the reduction of the head", _reduced_head(size)
    for layer in sorted(layers, reverse=True):
        yield f"the backward pass of block {layer}", _block(size, layer)
        yield f"the reduction of block {layer}", _reduced_block(size, layer)
    yield "the gradient of the embedding", embedding(size)
    yield "the reduction of the embedding", _reduced_embedding(size)
    yield "the optimizer", optimizer(size)


# What several moments share.


def _gradients(size: Sizes, layers: int, *, head: bool, rest: bool = True) -> Pieces:
    """Bytes of gradients, while those of the first `layers` blocks, of the head and of the rest are not reduced yet.

    A step that accumulates has them whole on each process since its first micro-batch; for an embedding that is cut,
    even those of all parts, because torch 2.13 only cuts the sum, unless a tied head has cut it.
    """
    others = size.degrees.tensor - 1 if rest and not size.tied else 0
    blocks = size.recipe.model.layers - layers
    tables = int(rest) + int(head and not size.tied)
    whole = layers * size.block.whole + (tables + others) * size.table.whole + (size.norm.whole if rest else 0)
    done = blocks * size.block.share + (size.tables - tables) * size.table.share + (0 if rest else size.norm.share)
    held = size.held if rest else 0  # until the backward pass ends
    return {
        "accumulated gradients": 4 * whole if size.accumulates else 0,
        "reduced gradients": (held if size.recipe.fsdp.cpu_offload else 4 + held) * done,
    }


def _gradients_before(size: Sizes, layers: int) -> Pieces:
    """The same in an earlier micro-batch, which reduces none, before it has computed those of so many first blocks.

    If it is not the first one, it finds those of all blocks.
    """
    if size.micro_batches > 2:
        return _gradients(size, size.recipe.model.layers, head=True)
    return _gradients(size, size.recipe.model.layers - layers, head=True, rest=False) | {"reduced gradients": 0}


def _weights(size: Sizes, layers: int, *, head: bool, buffers: int) -> Pieces:
    """Gathered weights: of so many blocks, of the head if it is tied or not used yet, and what they arrive in."""
    tables = int(size.tied or head) + int(not size.tied and size.keeps_blocks)
    gathered = size.gathered * (tables * size.table.whole + size.norm.whole) + layers * size.gathered_block
    return {"gathered weights": gathered, "gathering": buffers if size.shards > 1 else 0}


def _saved(size: Sizes, layers: int, *, norm: bool = False, rotations: bool = True) -> Pieces:
    """What the first `layers` blocks and the final norm keep for the backward pass; rotations, tokens, targets."""
    saved = size.saved_before(layers)
    if norm:
        saved += norm_per_token(size.widths, size.kept[0])
    tables = 4 * size.positions * size.recipe.model.rope_of(0).head_width if rotations else 0
    batch = 16 * size.degrees.context + (8 if size.degrees.context > 1 else 0)  # whole rows, and the tokens of its part
    return {"activations": round(size.tokens * (saved + batch)) + tables}


def _next_gather(size: Sizes, layer: int) -> int:
    """Bytes that arrive in the backward pass while this block computes: with ZeRO-3, the one before it."""
    if size.keeps_blocks:
        return 0
    if layer == size.recipe.model.layers:  # after the head
        return size.gathered_block
    return min(layer, size.recipe.fsdp.prefetch) * size.gathered_block


def _after_blocks(size: Sizes, *, head: bool, buffers: int) -> Pieces:
    """What lives between the forward and the backward pass of the blocks. head, buffers: as of _weights()."""
    layers = size.recipe.model.layers
    return {
        **_gradients(size, layers, head=True),
        **_weights(size, layers if size.keeps_blocks else 0, head=head, buffers=buffers),
        **_saved(size, layers, norm=True),
    }


# The moments.


def _in_forward(size: Sizes) -> Pieces:
    """The forward pass of the last block."""
    layers = size.recipe.model.layers
    return {
        **_gradients(size, layers, head=True),
        **_weights(size, layers if size.keeps_blocks else 1, head=False, buffers=size.gathered_block),
        **_saved(size, layers),
        "block": size.in_forward,
    }


def loss(size: Sizes, *, backward: bool) -> Pieces:
    """The logits, float32 copies of one chunk of them, and a few numbers per token."""
    model, rows = size.recipe.model, -(-size.tokens // size.recipe.batch.loss_chunks)
    logits, chunk = size.element * size.tokens * size.vocabulary, 4 * rows * size.vocabulary
    copies = 1 if backward or size.element == 4 else 2  # in float32; forward, the logits themselves are another one
    of_cut = (5 if backward else 9) if size.degrees.tensor > 1 else 0  # which targets are this process's
    per_token = (37 if backward else 17) + of_cut
    if size.recipe.compile.enabled:  # no kernel writes float32 logits
        copies = 0
    elif rows == size.tokens and size.degrees.tensor == 1:  # torch's own loss keeps its softmax, not the logits
        copies, per_token = (3, 0) if backward else (copies, 0)
        logits = 0 if backward else logits
    if backward:  # a head of its own is there, and asks for no more
        buffers = _next_gather(size, model.layers) if size.tied else 0
    else:  # the last gather's lives until the next one
        last = size.gathered_block if size.tied else size.element * size.table.whole
        buffers = 0 if size.keeps_blocks and size.accumulates else last
    return {
        **_after_blocks(size, head=True, buffers=buffers),
        "logits": logits,
        "loss": copies * chunk + per_token * size.tokens + (0 if backward else _until_the_loss(size)),
    }


def _until_the_loss(size: Sizes) -> int:
    """Bytes that the forward pass of the model releases only at its end."""
    normed = size.stream if size.degrees.tensor > 1 else 0  # its tokens, from which the head has gathered all
    targets = 8 * size.tokens if size.degrees.context > 1 else 0  # of its part of the rows
    return normed + targets + 8 * size.positions


def head(size: Sizes) -> Pieces:
    """The head's two products with the gradient of the logits."""
    return {
        **_after_blocks(size, head=True, buffers=_next_gather(size, size.recipe.model.layers)),
        "logits": size.element * size.tokens * size.vocabulary,
        "new gradients": size.element * size.table.whole + size.read,
    }


def _reduced_head(size: Sizes) -> Pieces:
    """The sum over processes of the gradient of a head of its own."""
    return {
        **_after_blocks(size, head=False, buffers=_next_gather(size, size.recipe.model.layers)),
        "new gradients": size.new(size.table) + size.stream,
        "reduction": size.reduction(size.table),
    }


def _block(size: Sizes, layer: int) -> Pieces:
    """The backward pass of this block, while the gradients of the one after it are summed over processes."""
    total, ahead = size.recipe.model.layers, _next_gather(size, layer)
    after_head = 0 if size.tied else size.table.whole
    before = after_head if layer == total - 1 else size.block.whole
    own = _saved(size, layer + 1) | inside(size, layer)
    last = {
        **_gradients(size, layer + 1, head=False),
        **_weights(size, layer + 1 if size.keeps_blocks else 1, head=False, buffers=ahead),
        **own,
        "reduction": size.sent * before,
    }
    if not size.accumulates:
        return last
    kept = _weights(size, total if size.keeps_blocks else 1, head=size.keeps_blocks, buffers=ahead)
    return _fuller(last, _gradients_before(size, layer + 1) | kept | own)


def _fuller(last: Pieces, before: Pieces) -> Pieces:
    """What lives in the last micro-batch, or in one before it, where no gradient is reduced."""
    return max(last, before, key=lambda pieces: sum(pieces.values()))


def inside(size: Sizes, layer: int) -> Pieces:
    """What the backward pass of a block makes where it has most."""
    tied = size.new_of_tied_head
    beside, new = size.inside(layer)
    # The gradient of its output, before all else.
    gathering = 2 * size.read + size.stream if size.degrees.tensor > 1 else 0
    if gathering > beside + new:
        return {"block": gathering, "new gradients": tied}
    return {"block": beside, "new gradients": new + tied}


def _reduced_block(size: Sizes, layer: int) -> Pieces:
    """The sum over processes of this block's gradients."""
    return {
        **_gradients(size, layer + 1, head=False),
        **_weights(size, layer if size.keeps_blocks else 0, head=False, buffers=_next_gather(size, layer)),
        **_saved(size, layer),
        "new gradients": size.new(size.block) + size.stream + size.new_of_tied_head,
        "reduction": size.reduction(size.block),
    }


def embedding(size: Sizes) -> Pieces:
    """The gradient of the embedding, of all its parts; with a tied head, a second one, of this part, and the sum."""
    table, layers, keeps = size.element * size.table.whole, size.recipe.model.layers, size.keeps_blocks
    parts = size.degrees.tensor * table
    own = _saved(size, 0, rotations=False) | {"new gradients": parts + (2 * table if size.tied else size.read)}
    last = {
        **_gradients(size, 0, head=False),
        **_weights(size, 0, head=False, buffers=0),
        **own,
        "reduction": size.sent * size.block.whole,
    }
    if not size.accumulates:
        return last
    own |= _weights(size, layers if keeps else 0, head=keeps, buffers=0)
    before = _fuller(last, _gradients_before(size, 0) | own)
    if size.micro_batches > 2 or size.element == 4:
        return before
    # The first of two micro-batches copies it to float32, in which gradients are added.
    return _fuller(before, _gradients(size, layers, head=True) | own | {"new gradients": table if size.tied else parts})


def _reduced_embedding(size: Sizes) -> Pieces:
    """The sum over processes of the gradient of the embedding."""
    return {
        **_gradients(size, 0, head=False),
        **_saved(size, 0, rotations=False),
        "new gradients": size.new(size.table),
        "reduction": size.reduction(size.table),
    }


def optimizer(size: Sizes) -> Pieces:
    """All gradients, each a share; torch's kernel takes bfloat16 moments in float32, some at a time."""
    facts = size.recipe.optimizer.facts
    groups = size.table.share, size.state["parameters"] // 4 - size.table.share  # about: without and with weight decay
    converted = groups[:1] if facts.orthogonalizes else groups  # momenta of matrices are updated one by one
    at_a_time = max(min(share, max(MOMENTS_AT_A_TIME, size.table.share)) for share in converted)
    converts = size.recipe.optimizer.state_dtype == "bfloat16" and not size.recipe.compiles_updates
    return {
        **_gradients(size, 0, head=False, rest=False),
        **_saved(size, 0, rotations=False),
        "moments in float32": 4 * facts.moments * at_a_time if converts else 0,
        "batches of Muon": muon_cost(work_of(size.recipe, size.degrees)).live if facts.orthogonalizes else 0,
    }
