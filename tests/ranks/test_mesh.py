"""parallel.mesh on real ranks: groups that add up what they should, made once, and a mesh of another size refused."""

import os

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.parallel.mesh import AXES, SHARED, Mesh

MESHES = {
    4: Mesh(dp=2, tp=2, ep=2),
    8: Mesh(dp=2, pp=2, cp=2, ep=2, dp_shard=1, order=("cp", "pp", "dp", "tp")),
}


@pytest.fixture(scope="module")
def eight():
    with mr.World(8, backend="gloo", timeout=30) as world:
        yield world


def sums(mesh: Mesh) -> dict[str, float]:
    """For each axis, what its group adds up where rank r gives 2 to the power of r."""
    here, found = mesh.build(), {}
    for axis in (*AXES, *SHARED):
        x = torch.tensor(2.0) ** dist.get_rank()
        dist.all_reduce(x, group=here.group(axis))
        found[axis] = x.item()
    return found


@pytest.mark.parametrize("n", MESHES)
def test_each_axis_adds_up_its_own_ranks(four, eight, n):
    mesh = MESHES[n]
    for rank, found in enumerate((four if n == 4 else eight).run(sums, mesh)):
        assert found == {axis: sum(2.0**other for other in mesh.group(axis, rank)) for axis in found}


def gathered_by_planes(mesh: Mesh) -> list[list[float]]:
    here, found = mesh.build(), []
    for plane in (here.plane("replicas", "shards"), here.plane("ep_replicas", "ep")):
        for k in range(2):
            out = torch.empty(plane.size(k))
            dist.all_gather_single(out, torch.full((1,), float(here.rank)), group=plane.get_group(k))
            found.append(out.tolist())
    return found


def test_planes_communicate_along_their_axes(eight):
    mesh = MESHES[8]
    for rank, found in enumerate(eight.run(gathered_by_planes, mesh)):
        assert found == [list(mesh.group(axis, rank)) for axis in ("replicas", "shards", "ep_replicas", "ep")]


def built_twice(mesh: Mesh) -> tuple[bool, int]:
    """Whether it is the same place, and how many files the second one opened: sockets are files."""
    first = mesh.build()
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    again = Mesh(**vars(mesh)).build()
    return again is first, (len(os.listdir("/proc/self/fd")) if before else 0) - before


def test_a_mesh_that_is_built_again_opens_no_socket_more(four):
    assert four.run(built_twice, MESHES[4]) == [(True, 0)] * 4


def test_a_mesh_of_another_size_is_refused_on_every_rank(four):
    with pytest.raises(
        mr.RankFailed, match=r"pp·dp·cp·tp = 2·2·2·1 = 8 on 4 ranks: choose degrees whose product is the number"
    ):
        four.run(sums, MESHES[8])
    assert len(four.run(sums, MESHES[4])) == 4
