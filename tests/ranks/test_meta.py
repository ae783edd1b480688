"""Code that runs without numbers is recorded as if it had them."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyranks import theory
from manyranks.measure import meta
from manyranks.parallel import context, expert
from manyranks.parallel.context import ring
from manyranks.parallel.tensor import parallelize
from manyranks.timeline import Compute
from manyranks.training import GPTConfig, tensor_styles
from manyranks.training.gpt import Layer

CONFIG = GPTConfig(layers=1, hidden=96, heads=12, seq=24, style="gpt2")
TABLE = tensor_styles.styles_of(CONFIG, "layers.*")
OVERLAP = {"sequence_parallel": True, "overlap": True}


def step(**how):
    with meta.uncounted():
        model = parallelize(Layer(CONFIG), None, TABLE, **how)
    own = CONFIG.seq // (dist.get_world_size() if how else 1)
    x = torch.empty(2, own, CONFIG.hidden, requires_grad=True)
    y = model(x)
    y.backward(torch.empty_like(y))


def without(**how):
    with meta.without_numbers():
        step(**how)


def instructions(program) -> list:
    """Instructions without the bytes that operators move, for other kernels move others."""
    return [[i.work.flops if isinstance(i, Compute) else i for i in rank] for rank in program.ranks]


@pytest.mark.parametrize("how", [{}, OVERLAP], ids=["all-reduces", "rings"])
def test_a_program_without_numbers_is_that_of_the_same_code_with_numbers(shared_worlds, how):
    real, shadow = (shared_worlds.measure(run, flops=True, **how) for run in (step, without))
    assert shadow.payload_bytes == real.payload_bytes
    assert shadow.flops == real.flops
    assert instructions(shadow.program) == instructions(real.program)
    assert set(shadow.sent_bytes.values()) == {0}


def test_a_layer_that_no_laptop_has_room_for_is_replayed(shared_worlds):
    big = theory.models["megatron-22b"]

    def large():
        with meta.without_numbers():
            with meta.uncounted():
                layer = torch.nn.Linear(big.hidden, big.ffn, bias=False).bfloat16()
            x = torch.empty(4 * 2048, big.hidden, dtype=torch.bfloat16)
            dist.all_reduce(layer(x))

    m = shared_worlds.measure(large, flops=True)
    assert m.flops[0] == 2 * 4 * 2048 * big.hidden * big.ffn
    assert m.calls[0][-1].bytes == 2 * 4 * 2048 * big.ffn
    assert m.replay(theory.clusters["a100-dgx"]).makespan > 1e-3


def test_afterwards_tensors_have_numbers_again_and_are_sent(shared_worlds):
    def after():
        try:
            without()
            with meta.without_numbers():
                raise KeyError
        except KeyError:
            x = torch.ones(3)
            dist.all_reduce(x)
            return x.device.type, x.tolist(), dist.get_backend()

    n = shared_worlds.size
    assert shared_worlds.run(after) == [("cpu", [n] * 3, "gloo")] * n


def test_products_that_are_added_in_place_count(shared_worlds):
    def added():
        x = torch.zeros(5, 7)
        x.addmm_(torch.ones(5, 3), torch.ones(3, 7))

    assert set(shared_worlds.measure(added, flops=True).flops.values()) == {2 * 5 * 3 * 7}


def attention(kind: str):
    q, k, v = (torch.empty(1, 12, 8, 4, dtype=torch.bfloat16).zero_().requires_grad_() for _ in range(3))
    o = getattr(context, f"{kind}_attention")(q, k, v, layout="contiguous", tile=8)
    o.backward(torch.empty_like(o))


def attention_fused(kind: str):
    with meta.without_numbers(), meta.fused(ring, "attend", "attend_backward"):
        attention(kind)


@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
def test_fused_attention_without_numbers_has_the_products_and_messages_of_the_same_code_with_numbers(shared_worlds, kind):
    real, fused = (shared_worlds.measure(run, kind, flops=True) for run in (attention, attention_fused))
    assert fused.payload_bytes == real.payload_bytes
    assert fused.flops == real.flops
    if kind != "all_gather":  # whose reduce-scatter is the backend's own on GPUs
        assert instructions(fused.program) == instructions(real.program)
    assert moved(fused.program) < moved(real.program)


def moved(program) -> int:
    return sum(i.work.bytes for rank in program.ranks for i in rank if isinstance(i, Compute))


def experts(two_hops: bool, numbers: bool):
    """The routing has numbers; tokens, gates and weights may have none. Every token goes to rank 0."""
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("nodes", "inside"))
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] if two_hops else [None]
    experts_TK = torch.tensor([[0, 2], [3, 1], [1, 0], [0, 3], [1, -1]])
    with contextlib.nullcontext() if numbers else meta.without_numbers():
        with meta.uncounted():
            layer = expert.Experts(2, 8, 6)
        x_TH, gates_TK = (torch.empty(5, size, requires_grad=True) for size in (8, 2))
        hop = expert.two_hops if two_hops else expert.one_hop
        y_TH = hop(x_TH, expert.Routing(experts_TK, gates_TK), layer.compute, 2 * n, *groups)
        y_TH.backward(torch.empty_like(y_TH))


@pytest.mark.parametrize("two_hops", [False, True], ids=["one hop", "two hops"])
def test_tokens_without_numbers_go_where_a_routing_with_numbers_says(shared_worlds, two_hops):
    real, shadow = (shared_worlds.measure(experts, two_hops, numbers, flops=True) for numbers in (True, False))
    assert shadow.payload_bytes == real.payload_bytes
    assert shadow.flops == real.flops
    assert shadow.flops[0] > shadow.flops[1] > 0
    assert instructions(shadow.program) == instructions(real.program)


def test_numbers_that_meet_tensors_without_keep_theirs(shared_worlds):
    def mixed():
        own = torch.arange(3.0)
        with meta.without_numbers():
            rows = torch.empty(3, 2)
            rows.index_add_(0, own.long(), rows)
            rows.masked_fill_(own[:, None] > 1, 0.0)
            dist.all_reduce(own)
            with pytest.raises(NotImplementedError):
                own.copy_(rows[:, 0])
        return own.tolist()

    n = shared_worlds.size
    assert shared_worlds.run(mixed) == [[0, n, 2 * n]] * n
