"""Asynchronous tensor parallelism equals one process, sends what plain rings send, and computes while messages travel."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.collectives.messages import Members, wait
from manyranks.parallel.tensor import layers, overlapped
from manyranks.timeline import Compute, Recv, Send, Wait

B, S, INTO, OUT = 2, 12, 8, 24  # 12 tokens and 24 features: 2, 3 and 4 divide both
DOUBLE = torch.float64


def whole(batch: int = B, dtype: torch.dtype = DOUBLE) -> dict[str, Tensor]:
    """x, the weights and biases of two column-parallel layers, and the weight of a row-parallel one: equal on all ranks."""
    torch.manual_seed(0)
    shapes = {"x": (batch, S, INTO), "first": (OUT, INTO), "second": (2 * OUT, INTO), "down": (INTO, 2 * OUT)}
    shapes |= {"bias": (OUT,)}
    return {name: torch.randn(shape, dtype=DOUBLE).to(dtype) for name, shape in shapes.items()}


CUTS = {"x": 1, "first": 0, "second": 0, "down": 1, "bias": 0}


def part(name: str, x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), CUTS[name])[dist.get_rank()].contiguous()


def own(frozen: tuple[str, ...] = (), **how) -> dict[str, Tensor]:
    """This rank's parts of `whole`, as leaves."""
    return {name: part(name, x).requires_grad_(name not in frozen) for name, x in whole(**how).items()}


def block(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of this rank: two column-parallel layers of one input, and a row-parallel one after them."""
    first, second = overlapped.column(p["x"], [(p["first"], p["bias"]), (p["second"], None)])
    return first, overlapped.row(F.gelu(second), p["down"])


def alone(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.linear(p["x"], p["first"], p["bias"]), F.gelu(p["x"] @ p["second"].mT) @ p["down"].mT


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def compared(batch: int = B, dtype: torch.dtype = DOUBLE, frozen: tuple[str, ...] = ()) -> float:
    """The largest relative difference from one process in fp64: of outputs, and of all gradients."""
    mine, reference = own(frozen, batch=batch, dtype=dtype), whole(batch)
    for x in reference.values():
        x.requires_grad_()
    outputs, theirs = block(mine), alone(reference)
    for ys in (outputs, theirs):
        sum(y.double().square().sum() for y in ys).backward()
    t, rank = dist.get_world_size(), dist.get_rank()
    errors = [error(outputs[0], theirs[0].chunk(t, 2)[rank]), error(outputs[1], theirs[1].chunk(t, 1)[rank])]
    for name, x in mine.items():
        if name in frozen:
            assert x.grad is None
        else:
            assert x.grad.dtype == dtype
            errors.append(error(x.grad, part(name, reference[name].grad)))
    return max(errors)


def test_outputs_and_gradients_equal_one_process(shared_worlds):
    for batch in (1, 3):
        assert max(shared_worlds.run(compared, batch)) < 1e-12


def test_lower_precision_stays_near(shared_worlds):
    assert max(shared_worlds.run(compared, dtype=torch.float32)) < 1e-5
    assert max(shared_worlds.run(compared, dtype=torch.bfloat16)) < 3e-2


@pytest.mark.parametrize("frozen", [("x",), ("first", "second"), ("second", "bias", "down"), ("x", "first", "second", "bias")])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(shared_world, frozen):
    assert max(shared_world.run(compared, frozen=frozen)) < 1e-12


def test_a_group_of_one_computes_and_sends_nothing():
    with mr.World(1, backend="gloo") as world:
        m = world.measure(compared)
    assert m.results[0] < 1e-12
    assert m.calls[0] == []


def test_an_output_that_nobody_uses_counts_as_zero(shared_world):
    def only_second():
        p = own()
        block(p)[1].sum().backward()
        return [name for name in p if p[name].grad is None or not p[name].grad.any()]

    assert shared_world.run(only_second) == [["first", "bias"]] * 3


def test_under_autocast_shards_travel_in_its_dtype(shared_world):
    def lower():
        p = own(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = overlapped.row(p["x"].new_ones(B, S, 4), p["down"][:, :4])
        y.float().sum().backward()
        return y.dtype, p["down"].grad.dtype

    m = shared_world.measure(lower)
    assert m.results == [(torch.bfloat16, torch.float32)] * 3
    assert {call.dtype for call in m.calls[0]} == {"bfloat16"}


# Traffic and memory


def step(frozen: tuple[str, ...] = ()) -> None:
    """What is counted: forward and backward."""
    sum(y.sum() for y in block(own(frozen))).backward()


def test_each_all_gather_and_reduce_scatter_sends_exactly_its_bytes(shared_worlds):
    """Forward: x is gathered, the sum is scattered. Backward: its gradient and x are gathered, x's gradient is scattered."""
    t, m = shared_worlds.size, shared_worlds.measure(step)
    shard = 8 * B * S * INTO // t
    for rank in range(t):
        assert [(c.bytes, c.peer) for c in m.calls[rank] if c.op == "send"] == [(shard, (rank + 1) % t)] * (5 * (t - 1))
        assert m.payload_bytes[rank] == 5 * (t - 1) * shard


def test_with_frozen_weights_nothing_is_gathered_again(shared_world):
    m = shared_world.measure(step, frozen=("first", "second"))
    shard = 8 * B * S * INTO // 3
    assert m.payload_bytes[0] == 4 * 2 * shard
    m = shared_world.measure(step, frozen=("x",))
    assert m.payload_bytes[0] == 4 * 2 * shard


def layer(how: layers.How) -> None:
    """As a transformer layer: q, k, v of one input, then the output; up, then down; forward and backward."""
    torch.manual_seed(0)
    whole = [torch.nn.Linear(INTO, OUT) for _ in range(4)] + [torch.nn.Linear(OUT, INTO) for _ in range(2)]
    q, k, v, up = (layers.ColumnParallelLinear.of(one, how) for one in whole[:4])
    output, down = (layers.RowParallelLinear.of(one, how) for one in whole[4:])
    x = torch.randn(B, S // dist.get_world_size(), INTO).requires_grad_()
    x = x + output(sum(layers.column_parallel(x, q, k, v)))
    (x + down(F.gelu(up(x)))).sum().backward()


def test_a_layer_sends_the_bytes_of_six_all_gathers_and_four_reduce_scatters(shared_worlds):
    t = shared_worlds.size
    plain, decomposed = (
        shared_worlds.measure(layer, layers.How(sequence_parallel=True, overlap=overlap)) for overlap in (False, True)
    )
    assert [decomposed.payload_bytes[r] for r in range(t)] == [10 * (t - 1) * 4 * B * S * INTO // t] * t
    assert decomposed.payload_bytes == plain.payload_bytes
    assert {call.op for call in decomposed.calls[0]} == {"send", "recv"}


def test_what_is_kept_for_backward_is_the_shard(shared_world):
    """And for a row-parallel layer the input that it was given, as without overlap."""

    def kept():
        p = own()
        x, u = p["x"] * 1, torch.ones(B, S, 2 * OUT // 3, dtype=DOUBLE).requires_grad_() * 1
        both = [(p["first"], p["bias"]), (p["second"], None)]
        of_column = saved_bytes(overlapped.column, x, both, parameters=p.values())
        return of_column, saved_bytes(overlapped.row, u, p["down"], parameters=p.values())

    assert shared_world.run(kept) == [(8 * B * S * INTO // 3, 8 * B * S * 2 * OUT // 3)] * 3


# The order of events


def hidden(program: tuple) -> list[bool]:
    """For each message that this rank receives: is a product made between its issue and the wait for it?"""
    found = []
    for k, instruction in enumerate(program):
        if type(instruction) is Recv:
            until = program.index(Wait(instruction.handle), k)
            found.append(any(type(i) is Compute and i.work.flops for i in program[k:until]))
    return found


def open_messages(program: tuple) -> int:
    """The most sends of this rank that have been issued and not been waited for."""
    under_way, most = set(), 0
    for instruction in program:
        if type(instruction) is Send:
            under_way.add(instruction.handle)
        elif type(instruction) is Wait:
            under_way.discard(instruction.handle)
        most = max(most, len(under_way))
    return most


def test_a_product_is_made_while_each_message_travels(shared_worlds):
    t, program = shared_worlds.size, shared_worlds.measure(step, flops=True).program
    for rank in program.ranks:
        assert hidden(rank) == [True] * (5 * (t - 1))
        # the input's gradient leaves while the input comes again, and neither ring is ahead of its products
        assert open_messages(rank) == 2


def waits_first() -> None:
    """The same step by rings that wait for each message before they compute."""
    post = Members.post

    def late(self, *message):
        wait(post(self, *message))
        return []

    Members.post = late
    try:
        step()
    finally:
        Members.post = post


def test_a_version_that_waits_before_it_computes_would_be_noticed(shared_world):
    program = shared_world.measure(waits_first, flops=True).program
    assert [hidden(rank) for rank in program.ranks] == [[False] * 10] * 3


def test_every_chunk_is_one_product_and_no_work_is_done_twice(shared_worlds):
    """FLOPs of all ranks together are those of one process: forward, and twice as many backward."""
    t, m = shared_worlds.size, shared_worlds.measure(step, flops=True)
    products = 2 * B * S * INTO * (OUT + 2 * OUT + 2 * OUT)
    assert sum(m.flops.values()) == 3 * products
    assert len(set(m.flops.values())) == 1, t


def test_a_sequence_that_the_ranks_cannot_share_is_an_error(shared_world):
    def uneven():
        with pytest.raises(ValueError, match=r"on 3 ranks: sequence parallelism cuts dim 1.* give a multiple of 3 tokens"):
            overlapped.row(torch.ones(2, 7, 4), torch.ones(6, 4))
        return True

    m = shared_world.measure(uneven)
    assert all(m.results)
    assert not any(m.calls.values())
