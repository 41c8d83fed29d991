"""What cannot repeat its numbers to the bit is refused by name. Imports no torch."""

from collections.abc import Iterator

from recipes.recipe.fields import Violation
from recipes.recipe.schema import Recipe


def what_repeats_no_bits(recipe: Recipe) -> Iterator[Violation]:
    """What holds for run.deterministic, whatever the device; parallel/determinism.py does the rest."""
    by_cudnn, by_flash3 = (recipe.attention.backend == name for name in ("cudnn", "flash3"))
    for key, refused, why, remedy in (
        ("attention.backend", by_cudnn, "adds gradients up as they come", '"auto"'),
        ("attention.backend", by_flash3, "need not repeat its gradients (flash-attention #1766)", '"auto"'),
        ("compile.autotune", recipe.compile.autotune, "times kernels, so that two starts may choose others", "false"),
        ("fsdp.symmetric_memory", recipe.fsdp.symmetric_memory, "adds up in switches, as messages come", "false"),
        ("mesh.overlap_tensor", recipe.mesh.overlap_tensor, "was never compared to the bit", "false"),
    ):
        if refused:
            yield key, f"{why}, and run.deterministic = true; write {remedy}"
