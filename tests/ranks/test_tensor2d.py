"""SUMMA on a square of ranks: equal to one process, each rank receives what the theory says, and wrong sizes are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import manyranks as mr
from manyranks.parallel.tensor2d import SummaLinear, cut, join

TOKENS, INTO, OUT = 12, 6, 18
DOUBLE = torch.float64


def mesh() -> DeviceMesh:
    q = round(dist.get_world_size() ** 0.5)
    return init_device_mesh("cpu", (q, q))


def whole() -> tuple[torch.Tensor, nn.Linear, nn.Linear]:
    """x and two layers, equal on all ranks."""
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS // 2, INTO, dtype=DOUBLE)
    return x, nn.Linear(INTO, OUT, dtype=DOUBLE), nn.Linear(OUT, INTO, bias=False, dtype=DOUBLE)


def compared(on: DeviceMesh | None = None, frozen: bool = False) -> float:
    """The largest difference of two layers, one after the other, from one process: of the output and of all gradients."""
    on = on or mesh()
    x, first, second = whole()
    first.requires_grad_(not frozen)
    up, down = SummaLinear.of(first, on), SummaLinear.of(second, on)
    own = cut(x, on).requires_grad_()
    y = down(F.gelu(up(own)))
    y.square().sum().backward()
    x.requires_grad_()
    expected = second(F.gelu(first(x))).flatten(0, 1)
    expected.square().sum().backward()
    found = [(join(y, on), expected), (join(own.grad, on), x.grad.flatten(0, 1))]
    found.append((join(down.weight.grad.mT, on).mT, second.weight.grad))
    if frozen:
        assert up.weight.grad is None
        assert up.bias.grad is None
    else:
        _, j = on.get_coordinate()
        found.append((join(up.weight.grad.mT, on).mT, first.weight.grad))
        found.append((up.bias.grad, first.bias.grad.chunk(on.size(0))[j]))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in found)


@pytest.mark.parametrize("frozen", [False, True])
def test_output_and_gradients_equal_one_process(four, frozen):
    assert max(four.run(compared, frozen=frozen)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 9])
def test_on_other_squares_too(ranks):
    with mr.World(ranks, backend="gloo", timeout=30) as world:
        assert max(world.run(compared)) < 1e-12


def test_a_mesh_whose_ranks_are_in_another_order_gives_the_same(four):
    def reordered():
        return compared(DeviceMesh("cpu", [[3, 1], [0, 2]]))

    assert max(four.run(reordered)) < 1e-12


def test_dims_before_the_last_stay(four):
    def shapes():
        return SummaLinear(INTO, OUT, True, mesh())(torch.ones(2, 5, INTO // 2)).shape

    assert four.run(shapes) == [(2, 5, OUT // 2)] * 4


def test_the_first_weights_are_one_processs(four):
    def first():
        torch.manual_seed(0)
        layer = SummaLinear(INTO, OUT, True, mesh())
        torch.manual_seed(0)
        return torch.equal(join(layer.weight.mT, mesh()).mT, nn.Linear(INTO, OUT).weight)

    assert four.run(first) == [True] * 4


# Traffic


def forward() -> torch.Tensor:
    torch.manual_seed(0)
    return SummaLinear(INTO, OUT, True, mesh())(torch.ones(TOKENS // 2, INTO // 2).requires_grad_())


def both_ways() -> None:
    forward().sum().backward()


def received(measured, itemsize: int = 4) -> list[int]:
    """Elements that each rank took out of its messages."""
    return [sum(call.bytes for call in calls if call.op == "recv") // itemsize for calls in measured.calls.values()]


def test_forward_each_rank_receives_its_share_of_both_matrices(four):
    """(q − 1)/q² · (bs·h_in + h_in·h_out), by as many messages as there are blocks."""
    m, q = four.measure(forward), 2
    assert received(m) == [(q - 1) * (TOKENS * INTO + INTO * OUT) // q**2] * 4
    assert [sum(call.op == "recv" for call in calls) for calls in m.calls.values()] == [2 * (q - 1)] * 4
    assert [4 * elements for elements in received(m)] == list(m.payload_bytes.values())
    largest = max(call.bytes for calls in m.calls.values() for call in calls)
    assert largest == 4 * max(TOKENS * INTO, INTO * OUT) // q**2


def test_backward_each_rank_receives_twice_that_and_the_bias_gradient(four):
    both, only_forward = received(four.measure(both_ways)), received(four.measure(forward))
    bias = OUT // 2  # around the ring of two ranks: one part of it to be added, then the other one's sum
    backward = 2 * (TOKENS * INTO + INTO * OUT) // 4 + bias
    assert [a - b for a, b in zip(both, only_forward, strict=True)] == [backward] * 4


# Bad input


def refused(make, *args) -> str:
    with pytest.raises(ValueError) as caught:
        make(*args)
    return str(caught.value)


def wrong() -> list[str]:
    on = mesh()
    return [
        refused(SummaLinear, 7, OUT, True, on),
        refused(SummaLinear, INTO, 19, True, on),
        refused(cut, torch.ones(13, INTO), on),
        refused(cut, torch.ones(TOKENS, 7), on),
        refused(SummaLinear, INTO, OUT, True, init_device_mesh("cpu", (4,))),
        refused(SummaLinear, INTO, OUT, True, init_device_mesh("cpu", (4, 1))),
        refused(SummaLinear, INTO, OUT, True, init_device_mesh("cpu", (1, 2, 2))),
    ]


def test_odd_sizes_and_meshes_that_are_no_square_are_refused(four):
    for found in four.run(wrong):
        assert found[0] == (
            "in_features=7 on a square of 2 × 2 ranks is cut into 2 equal parts: give a multiple of 2, for example 8"
        )
        assert [text.partition(" ")[0] for text in found[1:4]] == ["out_features=19", "tokens=13", "features=7"]
        assert all("two axes of equal size" in text for text in found[4:])
        assert "shape (4, 1)" in found[5]
