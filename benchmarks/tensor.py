"""Tensor parallelism: one layer against DTensor's parallelize_module; what asynchronous messages leave exposed at scale."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as theirs

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, pairs
from benchmarks.training import Step
from manyranks import theory
from manyranks.measure import meta
from manyranks.parallel.tensor import parallelize
from manyranks.timeline import Timeline
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import Layer
from manyranks.training.tensor_styles import styles_of

ROUNDS, STEPS = 15, 4
CONFIG, BATCH = GPTConfig(1, 512, 8, seq=128, style="gpt2"), 4
# As DTensor, "kept" keeps gathered inputs for backward: 4 all-gathers and 4 reduce-scatters.
PLAIN, SEQUENCE = {"sequence_parallel": False}, {"sequence_parallel": True}
COMPARED = {"tensor parallel": PLAIN, "sequence parallel": SEQUENCE, "the same, inputs kept": SEQUENCE | {"regather": False}}

GPT_22B, CLUSTER = theory.models["megatron-22b"], theory.clusters["a100-dgx"]
LARGE = GPTConfig(1, GPT_22B.hidden, GPT_22B.heads, seq=2048, style="gpt2")  # arXiv 2205.05198, Table 3: t = 8, b = 4
LARGE_RANKS, LARGE_BATCH = 8, 4

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    yield from _layers()
    yield from _replayed()


# One layer, forward and backward, against DTensor


class Made(NamedTuple):
    """A layer with its input. step: forward and backward, returns the output."""

    module: nn.Module
    x: Tensor
    step: Callable[[], Tensor]


def _layers() -> Iterator[Row]:
    tokens = f"{BATCH} × {CONFIG.seq} tokens"
    for ranks in (2, 4):
        with mr.World(ranks) as world:
            for name, how in COMPARED.items():
                seconds = training.slowest(world.run(_both, how))
                what = f"layer of hidden {CONFIG.hidden}, {tokens}, {name}, t = {ranks}: ours; DTensor"
                yield Row(what, **seconds, ratio_at_most=0.85)


def _both(how: dict[str, bool]) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds of a forward and a backward, on this rank. First of all, that both compute the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ours, dtensors = _ours(mesh, how), _dtensors(mesh, how["sequence_parallel"])
    for a, b in zip(_outcome(ours), _outcome(dtensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)
    measures = [lambda step=made.step: training.fastest(step, STEPS) for made in (ours, dtensors)]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _ours(mesh: DeviceMesh, how: dict[str, bool]) -> Made:
    model = parallelize(_layer(CONFIG), mesh, styles_of(CONFIG, "layers.*"), **how)
    return _made(model.module, how["sequence_parallel"], model.finish)


def _dtensors(mesh: DeviceMesh, sequence_parallel: bool) -> Made:
    """Its sums of the norms' gradients come later, in the optimizer; they are not in the step, while ours are."""
    layer = _layer(CONFIG)
    theirs.parallelize_module(layer, mesh, _plan(sequence_parallel))
    return _made(layer, sequence_parallel)


def _plan(sequence_parallel: bool) -> dict[str, theirs.ParallelStyle]:
    columns = dict.fromkeys(("attention.query", "attention.key", "attention.value", "mlp.up"), theirs.ColwiseParallel())
    between = Shard(1) if sequence_parallel else Replicate()
    plan = columns | dict.fromkeys(("attention.output", "mlp.down"), theirs.RowwiseParallel(output_layouts=between))
    if sequence_parallel:
        plan |= dict.fromkeys(("attention_norm", "mlp_norm"), theirs.SequenceParallel())
        for part, others in (("attention", (None,)), ("mlp", ())):
            plan[part] = theirs.PrepareModuleInput(
                input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
            )
    return plan


def _layer(config: GPTConfig) -> Layer:
    torch.manual_seed(0)
    return Layer(config)


def _made(module: nn.Module, sequence_parallel: bool, finish: Step = lambda: None) -> Made:
    torch.manual_seed(1)
    x = torch.randn(BATCH, CONFIG.seq, CONFIG.hidden)
    x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone() if sequence_parallel else x
    x.requires_grad_()

    def step() -> Tensor:
        x.grad = None
        module.zero_grad()
        y = module(x)
        y.square().mean().backward()
        finish()
        return y

    return Made(module, x, step)


def _outcome(made: Made) -> list[Tensor]:
    """The output and all gradients, in the order of the parameters."""
    y = made.step().detach()
    return [y, made.x.grad, *(_whole(p.grad) for p in made.module.parameters())]


def _whole(grad: Tensor) -> Tensor:
    """A DTensor's part on this rank, where it is a sum the whole of it."""
    if isinstance(grad, DTensor):
        summed = [Replicate() if place.is_partial() else place for place in grad.placements]
        return grad.redistribute(placements=summed).to_local()
    return grad


# Asynchronous tensor parallelism, replayed at the size of a 22B model


def _replayed() -> Iterator[Row]:
    """One value each: no clock is read, and every run gives the same."""
    with mr.World(LARGE_RANKS, backend="gloo") as world:
        plain, sequence, overlapped = (_on_cluster(world, how) for how in (PLAIN, SEQUENCE, SEQUENCE | {"overlap": True}))
    what = f"layer of {GPT_22B.name}, t = {LARGE_RANKS}, replayed on {CLUSTER.name}"
    for name, other in (("sequence parallel", sequence), ("tensor parallel", plain)):
        exposed = {"ours": (_exposed(overlapped),), "theirs": (_exposed(other),)}
        yield Row(f"{what}, exposed communication: asynchronous; {name}", **exposed, ratio_at_most=0.5)
        whole = {"ours": (overlapped.makespan,), "theirs": (other.makespan,)}
        yield Row(f"{what}, its time: asynchronous; {name}", **whole)


def _exposed(timeline: Timeline) -> float:
    return max(map(timeline.exposed_communication, timeline.ranks))


def _on_cluster(world: mr.World, how: dict[str, bool]) -> Timeline:
    """Our code's own program at the layer's real size; transfers of one rank at the same time share its link."""
    return world.measure(_shapes_step, how, flops=True).replay(CLUSTER, sharing=True)


def _shapes_step(how: dict[str, bool]) -> None:
    """Forward and backward of the large layer in bfloat16, without numbers."""
    with meta.without_numbers():
        with meta.uncounted():
            model = parallelize(_layer(LARGE).bfloat16(), None, styles_of(LARGE, "layers.*"), **how)
        shards = dist.get_world_size() if how["sequence_parallel"] else 1
        x = torch.empty(LARGE_BATCH, LARGE.seq // shards, LARGE.hidden, dtype=torch.bfloat16, requires_grad=True)
        model(x).backward(torch.empty_like(x))
