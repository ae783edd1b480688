"""parallel.data_parallel: what it refuses, and that no failure leaves it stuck."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyranks as mr
from manyranks.parallel import data_parallel as dp

VARIANTS = [dp.NaiveDataParallel, dp.FlatDataParallel, dp.BucketedDataParallel, dp.OverlappedDataParallel]
WIDTH, DEPTH = 13, 6


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def reduces(calls) -> list:
    return [call for call in calls if call.op == "all_reduce"]


class Fails(torch.autograd.Function):
    """The identity; backward raises where and when it is told to."""

    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise ArithmeticError("backward fails here")
        return grad, None


def step_that_fails_after(model, layer: int | None) -> bool:
    """A step whose backward raises before the gradients of this layer."""
    h = torch.ones(2, WIDTH)
    for number, each in enumerate(model.module):
        h = Fails.apply(each(h), number == layer)
    try:
        h.sum().backward()
    except ArithmeticError:
        return True
    model.finish()
    return False


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", [(3, 3, 3), (0, 2, 4), (1, 4, 4)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_a_backward_that_raised_the_next_step_is_right(shared_world, variant, where, set_to_none):
    def steps():
        rank = dist.get_rank()
        model = variant(layers(), bucket_bytes=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        failed = step_that_fails_after(model, where[rank])
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.full((2, WIDTH), float(rank))).sum().backward()
        model.finish()
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        alone(torch.ones(2, WIDTH)).sum().backward()  # linear: the mean of inputs 0, 1 and 2
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return failed, max((a.grad - b.grad).abs().max().item() for a, b in pairs)

    m = shared_world.measure(steps)
    assert all(failed and error < 1e-5 for failed, error in m.results)
    assert m.divergence is None


def test_ranks_that_did_not_fail_find_nan_for_what_a_failed_one_did_not_send(shared_world):
    def one_fails():
        rank = dist.get_rank()
        model = dp.OverlappedDataParallel(layers(), bucket_bytes=1)
        failed = step_that_fails_after(model, 3 if rank == 1 else None)
        if failed:
            model.module.zero_grad()
            model(torch.ones(2, WIDTH))
        return [p.grad is None or bool(p.grad.isnan().any()) for p in model.parameters()]

    in_time = [True] * 8 + [False] * 4
    assert shared_world.run(one_fails) == [in_time, [True] * 12, in_time]


def test_a_step_out_of_order_is_an_error_and_leaves_no_trace(shared_world):
    def out_of_order():
        model, x = dp.OverlappedDataParallel(layers(), bucket_bytes=1), torch.ones(2, WIDTH)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"forward pass before finish\(\)"):
            model(x)
        with torch.no_grad():
            model(x)
        with pytest.raises(RuntimeError, match=r"5.bias got a second gradient before finish\(\)"):
            loss.backward()
        model.module.zero_grad()
        model(x).sum().backward()
        model.finish()
        return model.module[5].bias.grad[0].item()

    m = shared_world.measure(out_of_order)
    assert m.results == [2.0] * 3
    assert m.divergence is None


def test_two_backwards_through_different_parameters_make_one_step(shared_world):
    def halves():
        model = dp.OverlappedDataParallel(layers(), bucket_bytes=1)
        for half in (model.module[:3], model.module[3:]):
            half(torch.ones(2, WIDTH)).sum().backward()
        model.finish()
        return model.module[0].bias.grad.numel() + model.module[5].bias.grad.numel()

    m = shared_world.measure(halves)
    assert m.results == [2 * WIDTH] * 3
    assert len(reduces(m.calls[0])) == 2 * DEPTH


def test_the_hooks_of_a_wrapper_that_is_gone_send_nothing(shared_world):
    def rewrapped():
        module = layers()
        for _ in range(3):
            model = dp.OverlappedDataParallel(module)
            gc.collect()
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish()

    assert len(reduces(shared_world.measure(rewrapped).calls[0])) == 1


def test_a_parameter_frozen_later_keeps_none_and_one_thawed_later_is_an_error(shared_world):
    def later():
        module = layers()
        module[2].requires_grad_(False)
        model = dp.OverlappedDataParallel(module)
        module[0].requires_grad_(False)
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish()
        module[2].bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"2\.bias was frozen when the model was wrapped"):
            model(torch.ones(2, WIDTH))
        return [p.grad is None for p in module[:4].parameters()]

    assert shared_world.run(later) == [[True, True, False, False, True, True, False, False]] * 3


def shuffled(rank: int) -> nn.Module:
    module = nn.Module()
    for name in ["a", "b", "c"] if rank != 1 else ["a", "c", "b"]:
        module.register_parameter(name, nn.Parameter(torch.ones(2)))
    return module


DIFFERENT = {
    "order": (shuffled, "rank 0 of the group has parameter b of float32 (2,), where rank 1 has parameter c of float32 (2,)"),
    "shape": (lambda rank: nn.Linear(2, 3 + (rank == 1)), "has parameter weight of float32 (3, 2), where rank 1 has "),
    "dtype": (lambda rank: nn.Linear(2, 3).to(torch.float64 if rank == 2 else None), "rank 2 has parameter weight of float64"),
    "frozen": (lambda rank: nn.Linear(2, 3).requires_grad_(rank != 1), "rank 1 has frozen parameter weight of float32 (3, 2)"),
    "more": (
        lambda rank: nn.Sequential(*[nn.Linear(1, 1)] * 1, *[nn.PReLU()] * (rank == 2)),
        "has nothing more, where rank 2 has",
    ),
    "buffer": (lambda rank: nn.BatchNorm1d(2 + (rank == 1), affine=False), "has buffer running_mean of float32 (2,)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_models_that_differ_are_an_error_on_all_ranks_that_names_the_first_difference(shared_world, case):
    build, text = DIFFERENT[case]

    def wrap():
        with pytest.raises(ValueError, match="the ranks' models differ") as error:
            dp.OverlappedDataParallel(build(dist.get_rank()))
        return str(error.value)

    first, *others = shared_world.run(wrap)
    assert others == [first] * 2
    assert text in first


def test_so_are_buckets_that_differ(shared_world):
    def wrap():
        with pytest.raises(ValueError, match="has buckets of 100 bytes, where rank 1 has buckets of 101 bytes"):
            dp.OverlappedDataParallel(layers(), bucket_bytes=100 + dist.get_rank())
        return True

    assert shared_world.run(wrap) == [True] * 3


def embedding_step(model, backward_in_no_sync: bool = False) -> None:
    loss = model(torch.arange(3)).sum() * dist.get_rank()
    with model.no_sync() if backward_in_no_sync else contextlib.nullcontext():
        loss.backward()
    model.finish()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bucket_bytes", [1, 1000])
def test_sparse_and_complex_gradients_are_refused_in_plain_words(shared_world, variant, bucket_bytes):
    def refused():
        model = variant(nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)), bucket_bytes=bucket_bytes)
        for local in (False, True):
            model.module.zero_grad()
            with pytest.raises(ValueError, match=r"0\.weight has a sparse gradient, .* say sparse=False"):
                embedding_step(model, local)
        model.module[0].sparse = False
        model.module.zero_grad()
        embedding_step(model)
        with pytest.raises(ValueError, match=r"weight is torch\.complex64, and only real gradients"):
            variant(nn.Linear(2, 2, dtype=torch.complex64))
        with pytest.raises(ValueError, match="weight has no shape yet: run one forward pass"):
            variant(nn.LazyLinear(2))
        with pytest.raises(ValueError, match="bucket_bytes=0: give a number of bytes above 0"):
            variant(layers(), bucket_bytes=0)
        return model.module[1].bias.grad.tolist()

    m = shared_world.measure(refused)
    assert m.results == [[3.0, 3.0]] * 3
    assert m.divergence is None


def test_a_rank_outside_the_group_is_told_so():
    def outside():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            with pytest.raises(ValueError, match="not in the group"):
                dp.NaiveDataParallel(layers(), group)
        else:
            dp.NaiveDataParallel(layers(), group)
        return True

    with mr.World(3, backend="gloo", timeout=30) as world:
        assert world.run(outside) == [True] * 3


def test_a_model_with_nothing_to_learn_has_no_buckets(shared_world):
    def frozen():
        model = dp.OverlappedDataParallel(layers().requires_grad_(False))
        model(torch.ones(1, WIDTH))
        model.finish()
        return model.buckets

    assert shared_world.run(frozen) == [()] * 3
