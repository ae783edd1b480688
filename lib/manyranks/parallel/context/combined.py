"""Ring and Ulysses together: heads change places inside a node, keys and values go round.

The N = R · U ranks are a mesh of R × U. The U ranks of a row share a shard of the ring. An
all-to-all among them gives each the whole shard for A/U heads, and a ring along its column
does the rest. So U is bounded by the heads, and a ring's message has 1/U of them.

Source: Fang and Zhao, "USP", arXiv 2405.07719.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.context.blockwise import TILE, check
from manyranks.parallel.context.layouts import check as check_sequence
from manyranks.parallel.context.ring import ring_attention
from manyranks.parallel.context.sight import check_documents
from manyranks.parallel.context.ulysses import check_heads, to_heads, to_tokens

AXES = ("ring", "ulysses")


def ring_ulysses_attention(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mesh: DeviceMesh,
    causal: bool = True,
    layout: str = "zigzag",
    documents_BT: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """As ring_attention, on a mesh with the axes "ring" and "ulysses", of R × U ranks.

    A rank has the tokens of layouts.positions(layout, seq, R · U, sharing=U).
    Raises ValueError as ring_attention and ulysses_attention do, and for another mesh.
    """
    ring, ulysses = groups(mesh)
    u, n = dist.get_world_size(ulysses), mesh.size()
    check(q_BASD, k_BGSD, v_BGSD, tile)
    check_heads(q_BASD.shape[1], k_BGSD.shape[1], u)
    check_sequence(layout, n * q_BASD.shape[2], n, u)
    check_documents(documents_BT, q_BASD.shape[0], n * q_BASD.shape[2])
    qkv = to_heads(q_BASD, k_BGSD, v_BGSD, ulysses)
    return to_tokens(
        ring_attention(*qkv, ring, causal, layout, documents_BT, tile), ulysses
    )


def groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of this rank's column and row. Raises ValueError for another mesh."""
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
