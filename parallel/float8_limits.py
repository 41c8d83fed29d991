"""What float8 asks of matrices and of the mesh, and where it was slow. Imports no torch."""

from collections.abc import Collection, Iterable, Mapping

from parallel.config import Float8Config, MeshConfig, MeshDegrees

UNIT = 16
"""The widths, and the tokens of a micro-batch, are multiples of this: torchao and the hardware need that."""


def fit(sizes: Iterable[int]) -> bool:
    """Whether float8 can multiply matrices of these sizes."""
    return not any(size % UNIT for size in sizes)


def why_not_shared(rows: Mapping[str, int], shards: int) -> str | None:
    """Why so many processes cannot gather these matrices in float8, which FSDP does without padding; None if they can.

    rows: of each matrix, by its name.
    """
    for name, count in rows.items():
        if count % shards:
            return f"{shards} processes cannot share the {count} rows of {name} equally"
    return None


def why_not_excluded(names: Collection[str], linears: Iterable[str]) -> str | None:
    """Why float8.exclude cannot have these names; None if it can. linears: the dotted names of the model's."""
    parts = {part for linear in linears for part in linear.split(".")}
    if unknown := {*names} - parts - {"lm_head"}:
        choice = ", ".join(sorted(part for part in parts if not part.isdigit()))
        return f"names {sorted(unknown)}, but no linear is called so: {choice}"
    return None


def advice(mesh: MeshConfig, *, float8: Float8Config, degrees: MeshDegrees | None = None) -> list[str]:
    """Warnings about a layout that works, but that was slower than another one where it was measured, or does not do
    what its name says. degrees: those of the mesh, once the number of processes is known."""
    lines = []
    if mesh.tensor > 1 and float8.recipe in ("rowwise", "rowwise_with_gw_hp"):
        lines.append(
            f'warning: float8.recipe = "{float8.recipe}" with tensor parallelism was slower than bfloat16 at 8B'
            ' and than "tensorwise" at 70B (published runs on H100); measure it, or write recipe = "tensorwise"'
        )
    if float8.all_gather and degrees is not None and degrees.shards == 1:
        lines.append(
            "note: float8.all_gather = true gathers nothing here, because every process holds whole matrices: it only"
            " casts them outside of the compiled blocks, with scales from the end of the step before"
        )
    return lines
