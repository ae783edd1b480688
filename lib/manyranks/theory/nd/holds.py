"""The part of the small GPT on one rank of a composed run: parameter by parameter, rows that are sharded and sent, and bytes.

The GPT is cut as training does it: stages as theory.stages deals them; a layer's matrices over tensor-parallel ranks; experts
over expert-parallel ranks, which lie on dp·cp. Routers, experts and shared experts are whole on every tensor-parallel rank,
which gives them its own part of the sequence: that is etp = 1, also where a plan leaves etp out. ZeRO shards an expert over the
data-parallel ranks that have it; tensor-parallel ranks keep copies of these shards.

A row is what parallel puts end to end: a bucket, or a unit of ZeRO-3, of parameters of one kind.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

from manyranks.theory import checks, sharding
from manyranks.theory.architecture import ModelShape, Tensor, parameters_of
from manyranks.theory.names import nearest
from manyranks.theory.plan import Plan
from manyranks.theory.sharding import HeldBytes
from manyranks.theory.stages import Stage, deal_stages, stages_of

At = Mapping[str, int] | None
COORDINATES = ("pp", "dp", "cp", "tp")
DDP_BYTES, ZERO_BYTES = 25_000_000, 10_000_000  # of a bucket: defaults of parallel.data_parallel and parallel.zero
_NOT_THERE = ("latent", "mtp_depth", "qk_norm", "qkv_bias", "embedding_norm", "shared_gate", "parallel_layers")


class Kind(NamedTuple):
    """The traits that parameters of one row have in common.

    decays: matrices do
    expert: only some of the data-parallel ranks have it
    over: tensor-parallel ranks whose gradients of it are parts of one, 1 where each has its own
    copies: ranks of one data-parallel coordinate that have the same elements
    """

    decays: bool
    expert: bool = False
    over: int = 1
    copies: int = 1


class Parameter(NamedTuple):
    elements: int
    kind: Kind


class Part(NamedTuple):
    """The embedding, a layer or the head, on one tensor-parallel rank."""

    stage: int
    parameters: tuple[Parameter, ...]


class ParameterRow(NamedTuple):
    """A row of parameters.

    elements: without padding
    ranks: that have it
    shards: over which it is spread, 1 where nothing is
    For ZeRO-3 also its parameters, the stage, whether its unit is the stage's last or only one, and whether the head needs the
    row, too.
    """

    elements: int
    kind: Kind
    ranks: int
    shards: int
    stage: int = 0
    last: bool = False
    alone: bool = False
    tied: bool = False
    parameters: tuple[Parameter, ...] = ()

    @property
    def shard(self) -> int:
        """Elements of a shard, padding included; all of the row where it is not sharded."""
        return sharding.shard(self.elements, self.shards)


def coordinates(plan: Plan, at: At) -> dict[str, int]:
    """Returns them as Mesh.coordinates does, 0 where one is missing. Raises ValueError for no axis, and beyond a degree."""
    for axis, place in (at or {}).items():
        if axis not in COORDINATES:
            raise ValueError(f"at has {axis!r}: {nearest(axis, COORDINATES)}")
        if type(place) is not int or not 0 <= place < getattr(plan, axis):
            raise ValueError(f"{axis}={place!r}: the plan has {axis} = 0 to {getattr(plan, axis) - 1}")
    return {axis: (at or {}).get(axis, 0) for axis in COORDINATES}


def check(shape: ModelShape, plan: Plan) -> None:
    """Raises ValueError where the plan does not fit the shape or the mesh, and for a shape that the small GPT cannot have."""
    checks.kinds(shape=shape, plan=plan)
    plan.check(shape)
    if wrong := unplaced(plan):
        raise ValueError(wrong)
    missing = [name for name in _NOT_THERE if getattr(shape, name)]
    missing += ["norms_per_layer"] if shape.norms_per_layer != 2 else []
    if missing:
        given = f"{missing[0]}={getattr(shape, missing[0])}"
        raise ValueError(f"{shape.name} has {given}, which the small GPT has not: give the shape of its nd.twin")


def unplaced(plan: Plan) -> str:
    """Says what of a layout of experts the ranks of parallel.mesh cannot have, and the way out; empty where they can."""
    if plan.etp not in (None, 1):
        return f"etp={plan.etp}: the small GPT's experts are whole on every tensor-parallel rank; say etp=1, or leave it out"
    if (data := plan.dp * plan.cp) % plan.ep:
        return f"ep={plan.ep} does not divide dp·cp = {data}, on which parallel.mesh lays it; choose a divisor of {data}"
    return ""


def own_stages(shape: ModelShape, plan: Plan, pp: int) -> dict[int, Stage]:
    """A pipeline rank's stages, by number."""
    dealt = deal_stages(shape, plan.stages, plan.embedding_slots)
    return {stage: dealt[stage] for stage in stages_of(pp, plan.pp, plan.stages, plan.schedule)}


def parts(shape: ModelShape, plan: Plan, at: At = None) -> list[Part]:
    """All that a rank holds, in the order of forward. Raises ValueError as check and coordinates do."""
    check(shape, plan)
    found, own = [], own_stages(shape, plan, coordinates(plan, at)["pp"])
    ends = sum(stage.embedding + stage.head for stage in own.values())  # on this rank, of the two that share a tied matrix
    rows = sharding.shard(shape.vocab, plan.tp)
    copies = 3 - ends if shape.tied else 1
    vocabulary = Parameter(rows * shape.hidden, Kind(True, copies=copies))
    for number, stage in own.items():
        if stage.embedding:
            found.append(Part(number, (vocabulary, *_on_rank(shape.embedding[1:], shape, plan))))
        found += [Part(number, _layer(shape, plan, moe)) for moe in [False] * stage.dense + [True] * stage.moe]
        if stage.head:
            own_matrix = [] if shape.tied and ends == 2 else [vocabulary]
            found.append(Part(number, (*_on_rank(shape.final_norm, shape, plan), *own_matrix)))
    return found


def _layer(shape: ModelShape, plan: Plan, moe: bool) -> tuple[Parameter, ...]:
    """Lists parameters in forward's order; experts' matrices stand in one tensor each, shared experts' too."""
    first, second = shape.norms[: len(shape.norms) // 2], shape.norms[len(shape.norms) // 2 :]
    found = _on_rank([*first, *shape.attention, *second, *([] if moe else shape.mlp)], shape, plan)
    if not moe:
        return found
    experts, shared = shape.experts // plan.ep, [shape.shared_experts * shape.shared_ffn * shape.hidden] * 3
    whole = _on_rank([Tensor(each, "whole") for each in [parameters_of(shape.router[:1]), *shared] if each], shape, plan)
    routed = _on_rank([Tensor(experts * one.elements, "whole") for one in shape.expert], shape, plan, plan.ep > 1)
    return (*found, whole[0], *routed, *whole[1:])


def _on_rank(tensors: list[Tensor], shape: ModelShape, plan: Plan, expert: bool = False) -> tuple[Parameter, ...]:
    t = plan.tp
    owners = max(1, t // shape.kv_heads)
    summed = t if plan.sequence_parallel else 1
    over = {"slices": (1, 1), "heads": (owners, owners), "whole": (summed, t)}
    return tuple(Parameter(one.on_rank(t, shape.kv_heads), Kind(one.decays, expert, *over[one.cut])) for one in tensors)


def rows(shape: ModelShape, plan: Plan, at: At = None, itemsize: int = 4) -> list[ParameterRow]:
    """The rows of a rank: buckets of gradients (ZeRO-0), sharded rows (1 and 2), units (3). itemsize: bytes of a parameter.

    Raises ValueError as parts does, and for an itemsize below 1.
    """
    checks.whole(itemsize=itemsize)
    held = parts(shape, plan, at)
    every = [parameter for part in held for parameter in part.parameters]
    if plan.zero == 3:
        return _units(held, plan, shape.tied)
    if plan.zero:
        packed = [(kind, _packed(sizes, ZERO_BYTES // itemsize)) for kind, sizes in _by_kind(every).items()]
        return [_row(elements, kind, plan) for kind, each in packed for elements in each]
    if plan.ep > 1:  # parallel.expert sums all of a kind at once
        return [
            _row(sum(p.elements for p in every if p.kind.expert == expert), Kind(True, expert), plan)
            for expert in (False, True)
        ]
    return [_row(elements, Kind(True), plan) for elements in _packed([p.elements for p in every], DDP_BYTES // itemsize)]


def _units(held: list[Part], plan: Plan, tied: bool) -> list[ParameterRow]:
    """A part of the model is a unit, and its experts are one, which fewer ranks share."""
    found = []
    for stage, group in groupby(held, key=lambda part: part.stage):
        units = list(group)
        for part in units:
            for expert in sorted({p.kind.expert for p in part.parameters}):
                own = tuple(p for p in part.parameters if p.kind.expert == expert)
                row = _row(sum(p.elements for p in own), Kind(True, expert), plan)
                shared = tied and plan.pp == 1 and part is held[0]
                where = {"stage": stage, "last": part is units[-1], "alone": len(units) == 1}
                found.append(row._replace(**where, tied=shared, parameters=own))
    return found


def place(row: ParameterRow, plan: Plan, at: At) -> int:
    """Returns which of the row's shards the rank at these coordinates keeps."""
    where = coordinates(plan, at)
    data = where["dp"] * plan.cp + where["cp"]
    return data // plan.ep if row.kind.expert else data % row.shards


def owned(row: ParameterRow, plan: Plan, at: At) -> list[int]:
    """Elements of each of the row's parameters that the rank at these coordinates keeps."""
    return sharding.owned([p.elements for p in row.parameters], row.shards, place(row, plan, at))


def of_rank(shape: ModelShape, plan: Plan, at: At = None) -> HeldBytes:
    """Parameters, gradients, masters and AdamW's two moments of the rank at these coordinates, after backward.

    at: as Mesh.coordinates gives them, all 0 by default. Where plan.precision has fewer than 4 bytes per parameter,
    masters, moments and ZeRO-3's gradients have 4; AdamW's counts of steps have 4, one for each tensor. But for padding
    and counts it's what theory.memory counts, with experts whole on each tensor-parallel rank. Raises ValueError as
    parts does.
    """
    size = plan.recipe.parameters
    wide = max(4, size)
    each = {"parameter": size, "gradient": size, "master": wide if size < wide else 0, "states": (wide, wide), "counter": 4}
    if plan.zero == 3 and size < wide:  # units are made of the masters
        each |= {"parameter": 0, "gradient": wide}
    if plan.zero == 0:
        tensors = [p.elements for part in parts(shape, plan, at) for p in part.parameters]
        return sharding.held(tensors, 1, 0, **each)
    found = []
    for row in rows(shape, plan, at, size):
        own = {"rank": place(row, plan, at), "tensors": len(row.parameters)} if plan.zero == 3 else {}
        found.append(sharding.held([row.elements], row.shards, plan.zero, **each, **own))
    return HeldBytes(*map(sum, zip(*found, strict=True)))


def _row(elements: int, kind: Kind, plan: Plan) -> ParameterRow:
    ranks = plan.dp * plan.cp // (plan.ep if kind.expert else 1)
    sharded = ranks if kind.expert else plan.shards
    return ParameterRow(elements, kind, ranks, sharded if plan.zero else 1)


def _by_kind(parameters: Iterable[Parameter]) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for parameter in parameters:
        found.setdefault(parameter.kind, []).append(parameter.elements)
    return found


def _packed(sizes: list[int], most: int) -> list[int]:
    """Rows of at most so many elements, or of one parameter, from the last parameter on."""
    found: list[int] = []
    for size in reversed(sizes):
        if found and found[-1] + size <= most:
            found[-1] += size
        else:
            found.append(size)
    return found
