"""All axes at once: where each rank stands, and with whom it shares each axis.

    mesh = Mesh(pp=2, dp=2, cp=2, tp=2)             # 16 ranks; numbers alone, for any size
    mesh.coordinates(13)                            # {"pp": 1, "dp": 1, "cp": 0, "tp": 1}
    mesh.group("tp", 13)                            # (12, 13)
    here = mesh.build()                             # on the 16 ranks of a world
    dist.all_reduce(x, group=here.group("tp"))

Ranks are counted row by row: in the last axis of `order`, neighbors differ by one, and in
the first by all the others' product. So the last axis lies inside a node, the first across.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "cp", "tp")
# Axes of the ranks of dp × cp, in their order. `data` is all of them: those that have the
# same parameters, but for experts. ZeRO's shards lie next to each other, replicas (HSDP)
# far apart; so do ranks that together have all experts, and ranks with the same ones.
SHARED = ("data", "shards", "replicas", "ep", "ep_replicas")
FOLDED = ("etp", "ep", "ep_replicas")  # of all ranks of a stage, where etp is given
_PLANES = (("replicas", "shards"), ("ep_replicas", "ep"), ("ep_replicas", "ep", "etp"))


@dataclass(frozen=True)
class Mesh:
    """pp·dp·cp·tp ranks. ep divides dp·cp, and is not in the product.

    dp_shard: data-parallel ranks that share one copy of ZeRO's states, None for all; with
    the context-parallel ones they are the axis `shards`, and dp/dp_shard are `replicas`.
    etp: ranks that cut each expert. Where it's given, experts have separate axes on the
    dp·cp·tp ranks of a stage: etp of them are neighbors, ep come next, and then the ranks
    with the same part of the same experts. None: experts are whole, on each of tp ranks.
    order: of the axes, the outermost first.
    Raises ValueError, naming the field, for what is no degree, and for degrees that do not
    go together.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    dp_shard: int | None = None
    order: tuple[str, ...] = AXES
    etp: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "order", tuple(self.order))
        for name in (*AXES, "ep", "dp_shard", "etp"):
            _check_degree(name, getattr(self, name))
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order={self.order}: give {', '.join(AXES)}, each once")
        self._check_shared()

    def _check_shared(self) -> None:
        data, folded = self.dp * self.cp, self.etp is not None
        if folded and data * self.tp % (each := self.etp * self.ep):
            raise ValueError(
                f"etp·ep = {self.etp}·{self.ep} = {each} does not divide dp·cp·tp = "
                f"{data * self.tp}: choose a divisor of it"
            )
        if not folded and data % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp·cp = {self.dp}·{self.cp} = {data}: "
                f"choose a divisor of {data}"
            )
        if self.dp % (self.dp_shard or 1):
            raise ValueError(
                f"dp_shard={self.dp_shard} does not divide dp={self.dp}: replicas × shards "
                f"= dp, so choose a divisor of {self.dp}"
            )
        shards = self.size("shards")
        if not folded and shards % self.ep and self.ep % shards:
            raise ValueError(
                f"ep={self.ep} and dp_shard·cp = {shards}: choose them so that one divides "
                "the other"
            )

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def size(self, axis: str) -> int:
        """Ranks of each group of such an axis; ValueError for others."""
        self._check_axis(axis)
        shards, data = (self.dp_shard or self.dp) * self.cp, self.dp * self.cp
        sizes = {"data": data, "shards": shards, "replicas": data // shards}
        sizes |= {"ep": self.ep, "ep_replicas": data // self.ep}
        if self.etp is not None:
            sizes |= {"etp": self.etp}
            sizes["ep_replicas"] = data * self.tp // (self.etp * self.ep)
        return sizes[axis] if axis in sizes else getattr(self, axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns a rank's place on each axis, the outermost first.

        Raises ValueError where there is no such rank.
        """
        _check_place("rank", rank, self.ranks)
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in self.order}

    def rank(self, **coordinates: int) -> int:
        """The one at these coordinates, 0 where none is given: mesh.rank(pp=1, tp=1).

        Raises ValueError for an unknown axis, and for a coordinate beyond its degree.
        """
        if unknown := sorted(coordinates.keys() - set(AXES)):
            raise ValueError(
                f"{unknown[0]}={coordinates[unknown[0]]}: the axes of coordinates are "
                f"{', '.join(AXES)}; choose among them"
            )
        rank = 0
        for axis in self.order:
            at, size = coordinates.get(axis, 0), self.size(axis)
            _check_place(axis, at, size)
            rank = rank * size + at
        return rank

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share an axis with this one, itself among them, rising.

        axis: of AXES or SHARED, or with etp of FOLDED. Raises ValueError for another, and
        for no such rank.
        """
        self._check_axis(axis)
        own = self.coordinates(rank)
        if self.etp is not None and axis in FOLDED:
            stage = self.stage(rank)
            return tuple(stage[place] for place in self._folded(axis, stage.index(rank)))
        if axis in AXES:
            return tuple(self.rank(**own | {axis: at}) for at in range(self.size(axis)))
        outer, inner = (name for name in self.order if name in ("dp", "cp"))
        size = self.size(inner)
        places = self._places(axis, own[outer] * size + own[inner])
        pairs = [divmod(place, size) for place in places]
        return tuple(self.rank(**own | {outer: o, inner: i}) for o, i in pairs)

    def stage(self, rank: int) -> list[int]:
        """All ranks of this one's pipeline stage, rising."""
        own, axes = self.coordinates(rank), [axis for axis in self.order if axis != "pp"]
        places = itertools.product(*(range(self.size(axis)) for axis in axes))
        return [self.rank(**own | dict(zip(axes, at, strict=True))) for at in places]

    def _folded(self, axis: str, at: int) -> range:
        """Finds, in a row of a stage, the ranks that share an axis of FOLDED with one."""
        apart = {"etp": 1, "ep": self.etp, "ep_replicas": self.etp * self.ep}[axis]
        whole = apart * self.size(axis)
        first = at // whole * whole
        return range(first + at % apart, first + whole, apart)

    def _check_axis(self, axis: str) -> None:
        known = dict.fromkeys((*AXES, *SHARED, *(FOLDED if self.etp is not None else ())))
        if axis not in known:
            raise ValueError(f"axis={axis!r}: choose one of {', '.join(known)}")

    def _places(self, axis: str, at: int) -> range:
        """Finds, in a row of dp·cp ranks, those that share an axis of SHARED with `at`."""
        size = self.size(axis)
        if axis in ("replicas", "ep_replicas"):
            apart = self.size("data") // size
            return range(at % apart, self.size("data"), apart)
        return range(at // size * size, (at // size + 1) * size)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of an axis, by their first ranks: every rank is in one of them."""
        groups: dict[int, tuple[int, ...]] = {}
        for rank in range(self.ranks):
            if rank not in groups:
                group = self.group(axis, rank)
                groups |= dict.fromkeys(group, group)
        return list(dict.fromkeys(groups.values()))

    def span(self, axis: str) -> int:
        """Returns how far the axis's groups reach, the first and the last rank counted.

        Theory says which link it uses: cluster.between(0, mesh.span("cp") - 1) for groups
        that begin where a node does, and cluster.route_of(mesh.group("cp", rank)) for any.
        """
        return max(group[-1] - group[0] + 1 for group in self.groups(axis))

    def grid(self) -> Tensor:
        """The ranks as pp × dp × cp × tp, whatever their order."""
        sizes = [self.size(axis) for axis in self.order]
        whole = torch.arange(self.ranks, device="cpu").view(sizes)
        return whole.permute([self.order.index(axis) for axis in AXES])

    def build(self, device: str = "cpu") -> "Here":
        """This rank's groups; all ranks of the default group call it.

        A second call gives the same ones: a group costs sockets. Raises ValueError where
        there is no default group, or one of another number of ranks.
        """
        if not dist.is_initialized():
            raise ValueError(
                "this process has no group: call build() on the ranks of a world or under "
                "torchrun, or look at a single rank by as_rank()"
            )
        if dist.get_world_size() != self.ranks:
            degrees = "·".join(map(str, (self.pp, self.dp, self.cp, self.tp)))
            raise ValueError(
                f"pp·dp·cp·tp = {degrees} = {self.ranks} on {dist.get_world_size()} ranks: "
                "choose degrees whose product is the number of ranks"
            )
        return _here(self, device, dist.group.WORLD)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator["Here"]:
        """Yields what build() gives to one rank of the mesh, in this process, of any size.

        Its groups send nothing: PyTorch's fake process group. Raises ValueError for no such
        rank, and in a process that has a group.
        """
        self.coordinates(rank)
        if dist.is_initialized():
            raise ValueError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()}: look "
                "at a mesh where there are no ranks, as in a notebook's kernel"
            )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=self.ranks, store=FakeStore())
        try:
            yield Here(self, rank, "cpu")
        finally:
            dist.destroy_process_group()


class Here:
    """A rank's place in a mesh: .mesh, .rank, .coordinates, .device_mesh, and its groups.

    device_mesh: PyTorch's, with the axes pp, dp, cp and tp.
    """

    def __init__(self, mesh: Mesh, rank: int, device: str):
        self.mesh, self.rank, self.coordinates = mesh, rank, mesh.coordinates(rank)
        self.device_mesh = DeviceMesh(device, mesh.grid(), mesh_dim_names=AXES)
        self._device, self._groups = device, {}
        for axis in AXES:
            self._groups[mesh.group(axis, rank)] = self.device_mesh.get_group(axis)
        folded = FOLDED if mesh.etp is not None else ()
        for axis in (*SHARED, *folded):  # many are an axis of their own
            if (ranks := mesh.group(axis, rank)) not in self._groups:
                group = dist.new_group(ranks, use_local_synchronization=True)
                self._groups[ranks] = group

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that share such an axis with this one; ValueError for another."""
        return self._groups[self.mesh.group(axis, self.rank)]

    def plane(self, *axes: str, **names: str) -> DeviceMesh:
        """The ranks of `data` by two axes: replicas × shards, or ep_replicas × ep.

        With etp, it's the ranks of a stage: ep_replicas × ep × etp.
        names: what the axes are called in it, if not so. Raises ValueError for other axes.
        """
        folded = self.mesh.etp is not None and "ep" in axes
        if axes not in _PLANES or folded != (len(axes) == 3):
            planes = " or ".join(" × ".join(each) for each in _PLANES)
            raise ValueError(f"{' × '.join(axes)}: choose {planes}, the last one with etp")
        of = self.mesh
        ranks = of.stage(self.rank) if folded else of.group("data", self.rank)
        return DeviceMesh.from_group(
            [self.group(axis) for axis in axes],
            self._device,
            mesh=torch.tensor(ranks, device="cpu").view([of.size(axis) for axis in axes]),
            mesh_dim_names=tuple(names.get(axis, axis) for axis in axes),
        )


@functools.lru_cache(maxsize=32)  # a place kept here keeps the sockets of its groups
def _here(mesh: Mesh, device: str, default: dist.ProcessGroup) -> Here:
    return Here(mesh, dist.get_rank(default), device)


def _check_degree(name: str, degree: object) -> None:
    if degree is None and name in ("dp_shard", "etp"):
        return
    if type(degree) is not int or degree < 1:
        raise ValueError(f"{name}={degree!r}: a degree is a whole number, 1 or more")


def _check_place(name: str, at: object, size: int) -> None:
    if type(at) is not int or not 0 <= at < size:
        raise ValueError(
            f"{name}={at!r}: this mesh has {size}; choose one of 0 to {size - 1}"
        )
