"""parallel.mesh in one process: coordinates, groups, PyTorch's DeviceMesh beside them, and what is refused."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from manyranks import theory
from manyranks.parallel.mesh import AXES, SHARED, Mesh

ORDERS = (AXES, ("dp", "pp", "cp", "tp"), ("tp", "cp", "dp", "pp"), ("cp", "pp", "dp", "tp"))


@st.composite
def meshes(draw, most: int = 4) -> Mesh:
    """Meshes of odd and even degrees, in any order, with any ep and dp_shard that go with them."""
    degrees = {axis: draw(st.integers(1, most)) for axis in AXES}
    shard = draw(st.sampled_from(divisors(degrees["dp"])))
    shards = shard * degrees["cp"]
    alike = [e for e in divisors(degrees["dp"] * degrees["cp"]) if shards % e == 0 or e % shards == 0]
    return Mesh(**degrees, ep=draw(st.sampled_from(alike)), dp_shard=shard, order=draw(st.permutations(AXES)))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# Numbers


@given(meshes(), st.data())
def test_coordinates_and_rank_are_inverse(mesh, data):
    rank = data.draw(st.integers(0, mesh.ranks - 1))
    at = mesh.coordinates(rank)
    assert tuple(at) == mesh.order
    assert all(0 <= at[axis] < mesh.size(axis) for axis in AXES)
    assert mesh.rank(**at) == rank


@given(meshes(), st.sampled_from((*AXES, *SHARED)))
def test_the_groups_of_an_axis_part_the_ranks_and_rise(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.ranks))
    assert all(len(group) == mesh.size(axis) and list(group) == sorted(group) for group in groups)
    assert all(mesh.group(axis, rank) == group for group in groups for rank in group)


@given(meshes())
def test_two_axes_cut_data_into_rows_and_columns(mesh):
    """Each rank of `data` is in one row and one column, and a row and a column meet in one rank."""
    for outer, inner in (("replicas", "shards"), ("ep_replicas", "ep")):
        for rank in range(0, mesh.ranks, 5):
            data, row, column = (mesh.group(axis, rank) for axis in ("data", inner, outer))
            assert set(row) & set(column) == {rank}
            assert {other for start in column for other in mesh.group(inner, start)} == set(data)


def test_of_16_ranks_tp_are_neighbors_and_pp_is_farthest():
    mesh = Mesh(pp=2, dp=2, cp=2, tp=2, ep=2, dp_shard=1)
    assert mesh.coordinates(13) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1}
    groups = {axis: mesh.group(axis, 13) for axis in (*AXES, *SHARED)}
    assert groups == {
        "pp": (5, 13),
        "dp": (9, 13),
        "cp": (13, 15),
        "tp": (12, 13),
        "data": (9, 11, 13, 15),
        "shards": (13, 15),
        "replicas": (9, 13),
        "ep": (13, 15),
        "ep_replicas": (9, 13),
    }
    assert {axis: mesh.span(axis) for axis in AXES} == {"pp": 9, "dp": 5, "cp": 3, "tp": 2}


@given(meshes(3))
def test_a_plan_and_a_mesh_allow_the_same_degrees_and_count_alike(mesh):
    plan = theory.Plan(dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, tp=mesh.tp, ep=mesh.ep, dp_shard=mesh.dp_shard, seq=mesh.cp)
    assert (plan.gpus, plan.shards) == (mesh.ranks, mesh.size("shards"))


@pytest.mark.parametrize(
    "wrong", [{"dp": 6, "ep": 4}, {"dp": 6, "dp_shard": 4}, {"dp": 6, "ep": 3, "dp_shard": 2}, {"tp": 0}, {"dp_shard": 0}]
)
def test_what_a_plan_refuses_a_mesh_refuses_by_the_same_name(wrong):
    said = []
    for kind in (theory.Plan, Mesh):
        with pytest.raises(ValueError, match="|".join(wrong)) as caught:
            kind(**wrong)
        said.append(str(caught.value).partition(":")[0])
    assert said[0] == said[1]


# Links


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(8, 2, 8, 8), (4, 2, 16, 8), (2, 1, 512, 1), (1, 4, 2, 128), (16, 1, 8, 8)])
def test_each_axis_uses_the_link_that_theory_s_strides_say(tp, cp, dp, pp):
    """On nodes that the degrees fill: every group of an axis is as far apart as the one that begins at a node's start."""
    mesh, cluster = Mesh(tp=tp, cp=cp, dp=dp, pp=pp), theory.clusters["llama3-cluster"].of(1024)
    strides = {"tp": 1, "cp": tp, "dp": tp * cp, "pp": tp * cp * dp, "data": tp}
    for axis, stride in strides.items():
        size = mesh.size(axis)
        assert mesh.group(axis, 0) == tuple(range(0, size * stride, stride))
        assert {cluster.route_of(group) for group in mesh.groups(axis)[:100]} == {cluster.route(size, stride)}
        far = cluster.between(0, mesh.span(axis) - 1)
        assert {cluster.between(group[0], group[-1]) for group in mesh.groups(axis)} == {far}
        assert far.name == ("NVLink" if (size - 1) * stride < 8 else "RoCE")


# Beside PyTorch


@pytest.mark.parametrize("order", ORDERS)
def test_groups_are_those_of_pytorch_s_mesh_in_any_order(order):
    mesh = Mesh(dp=3, pp=2, cp=2, tp=4, order=order)
    for rank in (0, 17, 47):
        with mesh.as_rank(rank) as here:
            torchs = init_device_mesh("cpu", [mesh.size(axis) for axis in order], mesh_dim_names=order)
            own = dict(zip(order, torchs.get_coordinate(), strict=True))
            assert here.coordinates == own
            for axis in AXES:
                ranks = dist.get_process_group_ranks(torchs.get_group(axis))
                assert dist.get_process_group_ranks(here.group(axis)) == ranks == list(mesh.group(axis, rank))
                assert here.device_mesh.get_local_rank(axis) == own[axis]
                assert dist.get_rank(here.group(axis)) == own[axis]
            turned = torchs.mesh.permute([order.index(axis) for axis in AXES])
            assert torch.equal(here.device_mesh.mesh, turned)


@pytest.mark.parametrize("order", ORDERS)
def test_planes_are_pytorch_s_meshes_of_data(order):
    """Their rows rise, too: else a place in a mesh and in its group would disagree."""
    mesh = Mesh(dp=4, pp=2, cp=2, tp=2, ep=4, dp_shard=1, order=order)
    for rank in (0, 13, 31):
        with mesh.as_rank(rank) as here:
            for outer, inner in (("replicas", "shards"), ("ep_replicas", "ep")):
                plane = here.plane(outer, inner, **{inner: "inner"})
                assert plane.mesh_dim_names == (outer, "inner")
                assert plane.mesh.flatten().tolist() == list(mesh.group("data", rank))
                for k, axis in enumerate((outer, inner)):
                    assert dist.get_process_group_ranks(plane.get_group(k)) == list(mesh.group(axis, rank))
                    assert plane.get_local_rank(k) == dist.get_rank(here.group(axis))


def test_any_of_16_384_ranks_can_be_looked_at():
    mesh = Mesh(dp=128, pp=16, tp=8, ep=64, dp_shard=16)
    with mesh.as_rank(12_345) as here:
        assert here.coordinates == {"pp": 12, "dp": 7, "cp": 0, "tp": 1}
        assert here.device_mesh.shape == (16, 128, 1, 8)
        for axis in (*AXES, *SHARED):
            assert tuple(dist.get_process_group_ranks(here.group(axis))) == mesh.group(axis, 12_345)
    assert not dist.is_initialized()
    assert sum(map(len, mesh.groups("ep"))) == 16_384


def test_all_ranks_make_the_groups_that_they_share_in_the_same_order(monkeypatch):
    """Else two would wait for each other: a group is made by its members together."""
    made: list[list[tuple[int, ...]]] = []
    new_group = dist.new_group

    def noted(ranks, **options):
        made[-1].append(tuple(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", noted)
    for mesh in (Mesh(dp=4, cp=2, tp=2, ep=4, dp_shard=1), Mesh(dp=6, pp=2, ep=3), Mesh(dp=2, cp=3, ep=3, order=ORDERS[3])):
        made.clear()
        for rank in range(mesh.ranks):
            made.append([])
            with mesh.as_rank(rank):
                pass
        assert all(rank in group for rank, groups in enumerate(made) for group in groups)
        for first, second in itertools.combinations(made, 2):
            shared = set(first) & set(second)
            assert [g for g in first if g in shared] == [g for g in second if g in shared]
            assert len(first) == len(second), "a group's name counts those that its process has"


# What is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dp": 0}, "dp=0: a degree is a whole number, 1 or more"),
        ({"tp": 2.0}, "tp=2.0: a degree is a whole number, 1 or more"),
        ({"pp": True}, "pp=True: a degree"),
        ({"cp": None}, "cp=None: a degree"),
        ({"dp": 4, "cp": 2, "ep": 3}, "ep=3 does not divide dp·cp = 4·2 = 8: choose a divisor of 8"),
        ({"dp": 4, "dp_shard": 3}, "dp_shard=3 does not divide dp=4: replicas × shards = dp, so choose a divisor of 4"),
        ({"dp": 6, "ep": 3, "dp_shard": 2}, "ep=3 and dp_shard·cp = 2: choose them so that one divides the other"),
        ({"order": ("pp", "dp", "tp")}, r"order=\('pp', 'dp', 'tp'\): give pp, dp, cp, tp, each once"),
    ],
)
def test_degrees_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Mesh(**wrong)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda mesh: mesh.coordinates(8), "rank=8: this mesh has 8; choose one of 0 to 7"),
        (lambda mesh: mesh.coordinates(-1), "rank=-1: this mesh has 8; choose one of 0 to 7"),
        (lambda mesh: mesh.group("tp", 1.0), "rank=1.0: this mesh has 8; choose"),
        (lambda mesh: mesh.rank(tp=2), "tp=2: this mesh has 2; choose one of 0 to 1"),
        (lambda mesh: mesh.rank(ep=1), "ep=1: the axes of coordinates are pp, dp, cp, tp; choose among them"),
        (lambda mesh: mesh.group("fsdp", 0), "axis='fsdp': choose one of pp, dp, cp, tp, data, shards"),
        (lambda mesh: mesh.size("node"), "axis='node': choose one of"),
        (lambda mesh: mesh.build(), r"this process has no group: call build\(\) on the ranks of a world"),
        (lambda mesh: mesh.as_rank(8).__enter__(), "rank=8: this mesh has 8"),
    ],
)
def test_what_a_mesh_has_not_is_said(ask, said):
    with pytest.raises(ValueError, match=said):
        ask(Mesh(dp=2, pp=2, tp=2))


def test_a_process_that_has_a_group_looks_at_no_other_mesh():
    mesh = Mesh(dp=2, tp=2)
    with mesh.as_rank(3) as here:
        with pytest.raises(ValueError, match=r"this process is rank 3 of 4: look at a mesh where there are no ranks"):
            mesh.as_rank(0).__enter__()
        with pytest.raises(ValueError, match="replicas × ep: choose replicas × shards or ep_replicas × ep"):
            here.plane("replicas", "ep")
        with pytest.raises(ValueError, match="axis='experts': choose one of"):
            here.group("experts")
