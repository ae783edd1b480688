"""A suite written for another wrapper: it wraps a module, calls backward, then a finish function, then the optimizer.

Two toy models: one with tied weights, one with a frozen parameter and a bias without a gradient. A few lines adapt ours to it.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.data_parallel import OverlappedDataParallel


class Plain(nn.Module):
    """A frozen parameter, and a bias that no example uses."""

    def __init__(self):
        super().__init__()
        self.into, self.middle = nn.Linear(10, 10, bias=False), nn.Linear(10, 50, bias=False)
        self.out = nn.Linear(50, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(50))

    def forward(self, x):
        return self.out(torch.relu(self.middle(torch.relu(self.into(x)))))


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.into, self.middle = nn.Linear(10, 10, bias=False), nn.Linear(10, 50, bias=False)
        self.back, self.again = nn.Linear(50, 10, bias=False), nn.Linear(10, 50, bias=False)
        self.out = nn.Linear(50, 5, bias=False)
        self.again.weight = self.middle.weight

    def forward(self, x):
        h = torch.relu(self.middle(torch.relu(self.into(x))))
        return self.out(torch.relu(self.again(torch.relu(self.back(h)))))


# The adapter.


def wrap(module: nn.Module, bucket_megabytes: float | None = None) -> nn.Module:
    return OverlappedDataParallel(module, **({} if bucket_megabytes is None else {"bucket_bytes": bucket_megabytes * 2**20}))


def after_backward(model: nn.Module) -> None:
    model.finish()


# The suite.


def data(rank: int, n: int, per_rank: int = 4):
    torch.manual_seed(42)
    x, y = torch.randn(n * per_rank, 10), torch.rand(n * per_rank, 5)
    return (x, y), (x[rank * per_rank : (rank + 1) * per_rank], y[rank * per_rank : (rank + 1) * per_rank])


def assert_equal_on_all_ranks(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        others = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        assert all(torch.equal(other, tensor) for other in others)


def suite(toy, bucket_megabytes) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # other weights on each rank, but for what is fixed
    alone = toy()
    model = wrap(copy.deepcopy(alone), bucket_megabytes)
    pairs = dict(alone.named_parameters()), dict(model.module.named_parameters())
    for name in pairs[0]:
        same = torch.equal(pairs[0][name], pairs[1][name])
        assert same == (rank == 0 or name in ("fixed", "bias")), name
    assert_equal_on_all_ranks(model.module)
    alone.load_state_dict(model.module.state_dict())
    whole, mine = data(rank, n)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(alone(whole[0]), whole[1]).backward()
        nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
        after_backward(model)
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(alone.parameters(), model.module.parameters(), strict=True):
            assert torch.allclose(one, other)
    assert_equal_on_all_ranks(model.module)
    assert sum(p.requires_grad for p in model.parameters()) == sum(p.requires_grad for p in alone.parameters())


@pytest.mark.parametrize("bucket_megabytes", [None, 0.0016, 0.0001, 0.01])
@pytest.mark.parametrize("toy", [Plain, Tied])
def test_its_suite_holds_for_ours(shared_worlds, toy, bucket_megabytes):
    shared_worlds.run(suite, toy, bucket_megabytes)
