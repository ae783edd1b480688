"""Ranks of a composed run send, axis by axis, and have in memory exactly what theory.nd says of each of them."""

import gc
from collections import Counter, defaultdict
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

from manyranks.measure.calls import Call
from manyranks.parallel.mesh import Mesh
from manyranks.theory import Plan, nd
from manyranks.training.config import GPTConfig
from manyranks.training.parallelize import mesh_of, schedule
from manyranks.training.trainer import Trainer
from manyranks.world.counted.measurement import payload
from tests.conftest import matrix, wait_until
from tests.ranks.composed import GPT, SETTINGS, plan

SIX = replace(GPT, layers=6, tied=False)
ODD = replace(GPT, kv_heads=1, vocab=259)
MOE = replace(GPT, experts=4, expert_ffn=32, shared_experts=1, dense_layers=1, tied=False)
CASES: dict[str, tuple[GPTConfig, dict]] = {
    "dp × tp": (GPT, {"dp": 2, "tp": 2, "zero": 0}),
    "dp × tp, ZeRO 3, odd sizes": (ODD, {"dp": 2, "tp": 2, "zero": 3}),
    "dp × cp, HSDP, ZeRO 3": (GPT, {"dp": 2, "dp_shard": 1, "cp": 2, "zero": 3}),
    "tp, in 16 bits, copies of keys": (ODD, {"tp": 4, "precision": "bf16", "recompute": "full"}),
    "cp × tp, Ulysses": (GPT, {"cp": 2, "tp": 2, "context": "ulysses", "zero": 2}),
    "pp × cp, a V": (GPT, {"pp": 2, "cp": 2, "schedule": "zb-v"}),
    "pp × tp, in 16 bits": (replace(GPT, style="gpt2", kv_heads=None), {"pp": 2, "tp": 2, "precision": "bf16", "zero": 0}),
    "ep × cp": (MOE, {"dp": 2, "cp": 2, "ep": 2, "zero": 0}),
    "ep × tp, ZeRO 3": (MOE, {"dp": 2, "ep": 2, "tp": 2, "zero": 3}),
    "ep × pp × dp": (MOE, {"dp": 4, "ep": 2, "pp": 2}),
    "HSDP × tp, ZeRO 2": (GPT, {"dp": 4, "dp_shard": 2, "tp": 2, "zero": 2}),
    "HSDP × pp, ZeRO 3": (SIX, {"dp": 4, "dp_shard": 2, "pp": 2, "zero": 3, "schedule": "zb-h1"}),
    "dp × pp × cp × tp": (GPT, {"dp": 2, "pp": 2, "cp": 2, "tp": 2}),
}
KEPT = (*("dp × tp, ZeRO 3, odd sizes", "tp, in 16 bits, copies of keys", "cp × tp, Ulysses", "ep × pp × dp"),)


class Seen(NamedTuple):
    """By ranks of a group: what a rank issued there; bytes of all tensors that are alive after backward."""

    sent: dict[tuple[int, ...], Counter]
    alive: int


@pytest.fixture(scope="module")
def seen(world_of):
    """By a case's name, what each rank does in a step after the first; run once, for two tests."""
    found: dict[str, list[Seen]] = {}

    def seen(name: str) -> list[Seen]:
        if name not in found:
            gpt, fields = CASES[name]
            chosen = plan(gpt, **fields)
            m = world_of(chosen.gpus).measure(two_steps, gpt, chosen)
            found[name] = [Seen(sent(m.calls[rank], rank, mesh_of(chosen)), m.results[rank]) for rank in m.ranks]
        return found[name]

    return seen


def two_steps(gpt: GPTConfig, plan: Plan) -> int:
    before, found = alive(), []
    trainer = Trainer(gpt, replace(SETTINGS, plan=plan))
    buffers = [buffer for buffer in trainer.spread.parts.model.buffers() if buffer.is_floating_point()]
    before += sum(buffer.nbytes for buffer in buffers)  # routers' biases, which are no parameters
    wanted, complete = states(gpt, plan, trainer.rank), trainer.spread.complete

    def look() -> bool:
        found.append(alive() - before)
        return found[-1] == wanted

    trainer.run(1)
    dist.barrier()
    # gloo's threads let go of what was sent a moment after it has arrived.
    trainer.spread.complete = lambda: (wait_until(look, 5), complete())
    trainer.run(1)
    return found[-1]


def states(gpt: GPTConfig, plan: Plan, rank: int) -> int:
    found = nd.of_rank(gpt.shape(), plan, mesh_of(plan).coordinates(rank))
    return found.total - found.counters


def alive() -> int:
    """Bytes of the numbers that this process has, but for single ones: losses, counters."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_floating_point()}
    sizes = {t.untyped_storage().data_ptr(): t.element_size() for t in tensors}
    return sum(nbytes for at, nbytes in storages.items() if nbytes > sizes[at])


def sent(calls: list[Call], rank: int, mesh: Mesh) -> dict[tuple[int, ...], Counter]:
    """Calls, by operation, and bytes, after the barrier and before the losses are gathered; tokens to experts left out."""
    first = next(number for number, call in enumerate(calls) if call.op == "barrier") + 1
    found: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for call in calls[first:-1]:
        to_experts = mesh.ep > 1 and call.op == "all_to_all" and not call.is_async
        if call.op != "recv" and not to_experts and len(call.ranks) > 1:
            copies = set(call.ranks) < set(mesh.group("tp", rank))  # of a key's head: a part of the axis
            group = mesh.group("tp", rank) if copies else call.ranks
            found[group] += Counter({call.op: 1, "bytes": payload(call, rank)})
    return found


def expected(gpt: GPTConfig, plan: Plan, rank: int) -> dict[tuple[int, ...], Counter]:
    mesh, found = mesh_of(plan), defaultdict(Counter)
    at = mesh.coordinates(rank)
    for axis, calls in nd.calls(gpt.shape(), plan, at, orders=orders(plan, at["pp"])).items():
        group = tuple(range(mesh.ranks)) if axis == "world" else mesh.group(axis, rank)
        counted = Counter(calls._asdict())
        scatters, sharded = counted.pop("reduce_scatter"), plan.zero == 3 and axis in ("data", "shards", "ep_replicas")
        counted["all_to_all" if sharded else "send"] += scatters * (1 if sharded else len(group) - 1)  # gloo's is ours
        found[group] += counted  # without zeros
    return {group: counted for group, counted in found.items() if counted}


def orders(plan: Plan, rank: int) -> dict[int, str] | None:
    """For each stage of a rank, the kinds of its actions."""
    if plan.pp == 1:
        return None
    found: dict[int, str] = defaultdict(str)
    for action in schedule(plan).actions(rank):
        found[action.stage] += action.kind
    return found


@pytest.mark.parametrize("name", matrix(CASES, KEPT))
@pytest.mark.few(1)
def test_what_each_rank_sends_on_each_axis_is_the_theory_s(seen, name):
    gpt, fields = CASES[name]
    chosen = plan(gpt, **fields)
    for rank, one in enumerate(seen(name)):
        assert one.sent == expected(gpt, chosen, rank), f"rank {rank}"


@pytest.mark.lenient
@pytest.mark.parametrize("name", matrix(CASES, KEPT))
def test_what_each_rank_has_after_backward_is_the_theory_s_and_nothing_else(seen, name):
    """The tensors that are alive: no stage of another rank is, and no weight that tensor parallelism has cut."""
    gpt, fields = CASES[name]
    chosen = plan(gpt, **fields)
    for rank, one in enumerate(seen(name)):
        assert one.alive == states(gpt, chosen, rank), f"rank {rank}"
