"""The bytes that a rank of a composed run sends in a training step, by axis: the small GPT, trained as training does it.

Bytes are counted as Measurement.payload_bytes counts them, in a step after the first one: in the first, pipeline stages
also tell each other the shapes of their messages, 80 bytes each. Tokens on their way to experts and back are not in it,
for they depend on the routing: theory.expert.sends has them. Axes have parallel.mesh's names; `world` is all ranks.
Where two axes are the same ranks, as data and dp without context parallelism, what is sent is counted under the name
that it has here, once.
"""

from collections.abc import Mapping
from typing import NamedTuple

from manyranks.theory import collectives, context, tensor
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import Calls, Passes
from manyranks.theory.nd import holds
from manyranks.theory.nd.holds import At, ParameterRow
from manyranks.theory.plan import Plan
from manyranks.theory.stages import Stage, stages_of

Orders = Mapping[int, str]  # by stage, the kinds of its actions: F, B, I, W

AXES = ("tp", "cp", "pp", "data", "shards", "replicas", "ep_replicas", "world")
_COUNT = 8  # bytes of a number in 64 bits: the clip's norm, copies that came to an expert


class _Run(NamedTuple):
    """A rank at its coordinates, with its stages and the bytes of a number."""

    shape: ModelShape
    plan: Plan
    at: dict[str, int]
    stages: dict[int, Stage]
    itemsize: int
    orders: Orders

    @property
    def wide(self) -> int:
        """Bytes of a number where 16 bits are too few."""
        return max(4, self.itemsize)

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch, on the ranks with this one's part of the sequence."""
        return self.plan.microbatch * self.plan.seq // self.plan.cp

    @property
    def layers(self) -> int:
        return sum(stage.layers for stage in self.stages.values())


def payload(
    shape: ModelShape, plan: Plan, at: At = None, itemsize: int | None = None, orders: Orders | None = None
) -> dict[str, int]:
    """Bytes that the rank at these coordinates sends, by axis of AXES: see calls."""
    return {axis: each.bytes for axis, each in calls(shape, plan, at, itemsize, orders).items()}


def calls(
    shape: ModelShape, plan: Plan, at: At = None, itemsize: int | None = None, orders: Orders | None = None
) -> dict[str, Calls]:
    """Calls of the rank at these coordinates, and the bytes that it sends in them, by axis of AXES.

    at: as Mesh.coordinates gives them, all 0 by default
    itemsize: bytes of a parameter, activation or gradient, by default what plan.precision says
    orders: for each of the rank's stages, the kinds of its actions as the schedule has them, "FFBFBB"; with ZeRO-3 and a
        pipeline they decide what is still there when it's needed again

    Calls in groups of one rank are left out. On gloo a reduce-scatter is measured as N − 1 sends, and as an all-to-all with
    ZeRO-3. Raises ValueError as holds.parts does, and without orders where they are needed.
    """
    size = plan.recipe.parameters if itemsize is None else itemsize
    holds.check(shape, plan)
    where = holds.coordinates(plan, at)
    run = _Run(shape, plan, where, holds.own_stages(shape, plan, where["pp"]), size, _orders(plan, where["pp"], orders))
    rows = holds.rows(shape, plan, at, size)
    found = dict.fromkeys(AXES, Calls()) | {"tp": _tensor(run) + _finish(run, rows), "cp": _context(run), "pp": _pipeline(run)}
    found |= _data(run, rows)
    if plan.zero or plan.pp * plan.tp * plan.ep > 1:  # else each rank has all gradients, and their norm
        rank = ((where["pp"] * plan.dp + where["dp"]) * plan.cp + where["cp"]) * plan.tp + where["tp"]
        found["world"] = _all_reduce(1, _COUNT, plan.gpus, rank)
    return found


def _tensor(run: _Run) -> Calls:
    """A layer with experts has attention's messages only: its MLP works on this rank's part of the sequence."""
    shape, plan, total = run.shape, run.plan, Calls()
    sizes = run.tokens, shape.hidden, plan.tp, plan.sequence_parallel and plan.tp > 1, plan.regather, run.itemsize, run.at["tp"]
    for stage in run.stages.values():
        blocks = (2 * stage.dense + stage.moe) * tensor.block(*sizes)
        total += _with_again(run, blocks)
        if stage.embedding:
            total += tensor.embedding(*sizes).both
        if stage.head:
            total += (tensor.head(*sizes) + tensor.loss(run.tokens, plan.tp, run.wide, run.at["tp"])).both
    return plan.microbatches * total


def _with_again(run: _Run, layers: Passes) -> Calls:
    """Full recomputation says again what forward has said."""
    return layers.both + layers.forward if run.plan.recompute == "full" else layers.both


def _finish(run: _Run, rows: list[ParameterRow]) -> Calls:
    """Gradients that are parts of one on several tensor-parallel ranks: an all-reduce a group, of shards if there are."""
    plan, total = run.plan, Calls()
    if plan.zero == 3:
        shards = [zip(holds.owned(row, plan, run.at), row.parameters, strict=True) for row in rows]
        held = [(own, p.kind.over) for each in shards for own, p in each]
    elif plan.zero:
        held = [(row.shard, row.kind.over) for row in rows]
    else:
        each = [p for part in holds.parts(run.shape, plan, run.at) for p in part.parameters]
        held = [(p.elements, p.kind.over) for p in each]
    for over in dict.fromkeys(over for _, over in held):
        elements = sum(size for size, group in held if group == over)
        total += _all_reduce(elements, run.wide if plan.zero else run.itemsize, over, run.at["tp"] % over)
    return total


def _context(run: _Run) -> Calls:
    """Each layer's keys and values, of the heads that this rank has."""
    shape, plan = run.shape, run.plan
    heads = shape.heads // plan.tp, max(1, shape.kv_heads // plan.tp), shape.head_size
    one = context.VARIANTS[plan.context](plan.microbatch, plan.seq, *heads, plan.cp, run.itemsize)
    return plan.microbatches * run.layers * _with_again(run, one)


def _pipeline(run: _Run) -> Calls:
    """Outputs to the stage after, gradients to the one before, where another rank has it; the two ends swap a tied gradient."""
    plan = run.plan
    owner = {stage: rank for rank in range(plan.pp) for stage in stages_of(rank, plan.pp, plan.stages, plan.schedule)}
    away = sum(owner.get(near, mine) != mine for s, mine in owner.items() if mine == run.at["pp"] for near in (s - 1, s + 1))
    shared = plan.tp if plan.sequence_parallel else 1
    sent = away * plan.microbatches * Calls(send=1, bytes=run.tokens // shared * run.shape.hidden * run.itemsize)
    ends = owner[0], owner[plan.stages - 1]
    if run.shape.tied and run.at["pp"] in ends and ends[0] != ends[1]:
        rows = -(-run.shape.vocab // plan.tp)
        sent += Calls(send=1, bytes=rows * run.shape.hidden * run.itemsize)
    return sent


def _data(run: _Run, rows: list[ParameterRow]) -> dict[str, Calls]:
    """Gradients and parameters between ranks that have the same ones."""
    plan, found = run.plan, {}
    place = run.at["dp"] * plan.cp + run.at["cp"]
    sharded = "data" if plan.shards == plan.dp * plan.cp or not plan.zero else "shards"
    for row in rows:
        axis = "ep_replicas" if row.kind.expert else sharded
        own = place // plan.ep if row.kind.expert else place
        sent = _sharded(run, row) if plan.zero else _all_reduce(row.elements, run.itemsize, row.ranks, own)
        found[axis] = found.get(axis, Calls()) + sent
    if sharded == "shards":
        found["replicas"] = _replicated(run, [row for row in rows if not row.kind.expert], place // plan.shards)
    if not plan.zero and plan.ep > 1 and (moe := sum(stage.moe for stage in run.stages.values())):
        found["data"] += _all_reduce(moe * run.shape.experts, _COUNT, plan.dp * plan.cp, place)  # how full experts were
    return found


def _sharded(run: _Run, row: ParameterRow) -> Calls:
    """A row's gradients to their shards, and its parameters from them."""
    if row.shards == 1:
        return Calls()
    plan, away = run.plan, (row.shards - 1) * row.shard * run.itemsize
    gathers = 1 if plan.zero < 3 else _gathers(run, row)
    return Calls(all_gather=gathers, reduce_scatter=_reduces(run), bytes=(gathers + _reduces(run)) * away)


def _reduces(run: _Run) -> int:
    """Times that gradients leave: stages keep them until their last micro-batch."""
    return run.plan.microbatches if run.plan.zero >= 2 and run.plan.pp == 1 else 1


def _gathers(run: _Run, row: ParameterRow) -> int:
    """Counts how often a unit comes in a step. A forward leaves a stage's last unit, so that a backward which follows finds it;
    the next forward frees it first, unless it begins with it. An I leaves all units until the next W. A forward gathers a tied
    embedding a second time, for the head."""
    order = run.orders[row.stage]
    gathered = order.count("F") if row.tied else 0
    left_by = ""
    for kind in order:
        if kind == left_by == "F" and not row.alone:
            left_by = ""
        if kind != "W" and not left_by:
            gathered += 1
        left_by = kind if kind == "I" or (kind == "F" and row.last) else ""
    return gathered


def _orders(plan: Plan, pp: int, orders: Orders | None) -> Orders:
    if plan.stages == 1:
        return {0: "FB" * plan.microbatches}
    own = stages_of(pp, plan.pp, plan.stages, plan.schedule)
    if plan.zero == 3 and (orders is None or set(orders) != set(own)):
        kinds = f"give the kinds of the actions of stages {own}, as {{{own[0]}: 'FFBFBB', …}}"
        raise ValueError(f"orders={orders!r}: with ZeRO-3 and stages, what is gathered depends on the schedule; {kinds}")
    return orders or {}


def _replicated(run: _Run, rows: list[ParameterRow], place: int) -> Calls:
    """Shards' gradients averaged over the replicas: in ZeRO-3 unit by unit, else all in one."""
    plan = run.plan
    replicas = plan.dp * plan.cp // plan.shards
    if plan.zero < 3:
        return _all_reduce(sum(row.shard for row in rows), run.wide, replicas, place)
    return sum((_reduces(run) * _all_reduce(row.shard, run.itemsize, replicas, place) for row in rows), Calls())


def _all_reduce(elements: int, itemsize: int, n: int, place: int) -> Calls:
    if n == 1 or not elements:
        return Calls()
    return Calls(all_reduce=1, bytes=collectives.sent_bytes("all_reduce", elements, itemsize, n)[place])
