"""Refusals of attention before any message."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.context.layouts import Mask, positions

AXES = ("ring", "ulysses")


def fitting(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Mask, n: int, sharing: int = 1
) -> list[Tensor]:
    """Returns where each rank's tokens stand, for inputs that fit each other and the mask.

    Raises ValueError for those that don't, and as positions does.
    """
    shapes = [tuple(x.shape) for x in (q_BASD, k_BGSD, v_BGSD)]
    q, k, v = shapes
    if not all(len(shape) == 4 and min(shape) > 0 for shape in shapes):
        raise ValueError(
            f"q, k and v have shapes {q}, {k} and {v}: give [B, heads, S, D] each"
        )
    if k != v or (q[0], *q[2:]) != (k[0], *k[2:]) or q[1] % k[1]:
        raise ValueError(
            f"q, k and v have shapes {q}, {k} and {v}: k and v must have one "
            "shape, B, S and D the same in all, and the heads of q a multiple of theirs"
        )
    kinds = [x.dtype for x in (q_BASD, k_BGSD, v_BGSD)]
    if len(set(kinds)) > 1 or not q_BASD.is_floating_point():
        given = ", ".join(map(str, kinds))
        raise ValueError(f"q, k and v are {given}: give one floating-point dtype")
    if len(devices := {str(x.device) for x in (q_BASD, k_BGSD, v_BGSD)}) > 1:
        raise ValueError(f"q, k and v are on {', '.join(sorted(devices))}: give one device")
    batch, seq = q[0], n * q[2]
    rows = None if mask.documents_BT is None else tuple(mask.documents_BT.shape)
    if rows not in (None, (batch, seq), (1, seq)):
        raise ValueError(
            f"documents of shape {rows}: give a number for each token of the whole "
            f"sequence, [{batch}, {seq}] or [1, {seq}]"
        )
    return positions(mask.layout, seq, n, sharing)


def check_heads(heads: int, kv_heads: int, n: int) -> None:
    """Raises ValueError for heads that cannot be dealt to n ranks."""
    if heads % n:
        fits = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise ValueError(
            f"{heads} query heads on {n} ranks: Ulysses gives each rank as many heads, so "
            f"give a number of ranks that divides them ({fits}), or use ring_attention"
        )
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"{kv_heads} key/value heads on {n} ranks: give a number of ranks that divides "
            "them or is a multiple of them, or use ring_attention"
        )


def groups(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns the groups of this rank's column and row.

    Raises ValueError for another mesh than one of a ring and Ulysses whose ranks rise.
    """
    if mesh is None or mesh.mesh_dim_names != AXES:
        raise ValueError(
            f"mesh={mesh}: give init_device_mesh(…, (R, U), mesh_dim_names={AXES}), whose "
            "rows are the ranks that exchange heads"
        )
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in (0, 1)):
        raise ValueError(
            f"a mesh of the ranks {mesh.mesh.tolist()}: they must rise in each row and "
            "each column, as they do in the groups that are made of them"
        )
    return mesh.get_group("ring"), mesh.get_group("ulysses")
