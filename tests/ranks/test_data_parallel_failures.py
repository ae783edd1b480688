"""parallel.data_parallel: what it refuses, and that no failure leaves it stuck."""

import contextlib
import copy
import gc
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

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
@pytest.mark.few(6)
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


class Broken(nn.Module):
    """A weight times x, which fails where it is told to."""

    def __init__(self, where: str):
        super().__init__()
        self.weight, self.where = nn.Parameter(torch.ones(1)), where

    def forward(self, x: float, fails: bool):
        if fails and self.where == "forward":
            raise ArithmeticError("fails here")
        return Fails.apply(self.weight * x, fails and self.where == "model")


def broken_step(model, step: int) -> float | str:
    """The gradient, 10·step + 1 where each rank takes part, or what was raised; rank 1 fails in step 0."""
    fails = step == 0 and dist.get_rank() == 1
    try:
        out = model(10.0 * step + dist.get_rank(), fails)
        Fails.apply(out, fails and model.module.where == "loss").sum().backward()
        model.finish()
        return model.module.weight.grad.item()
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    finally:
        model.module.weight.grad = None


@pytest.mark.parametrize("where", ["forward", "model", "loss"])
def test_a_step_that_raised_before_its_first_gradient_does_not_shift_its_rank(shared_world, where):
    def steps():
        model = dp.OverlappedDataParallel(Broken(where))
        first = broken_step(model, 0)
        if where == "loss" and dist.get_rank() == 1:
            model.drop()
        return str(first), [broken_step(model, step) for step in (1, 2)]

    m = shared_world.measure(steps)
    assert [first.removeprefix("backward ") for first, _ in m.results] == ["nan", "fails here", "nan"]
    assert [later for _, later in m.results] == [pytest.approx([11.0, 21.0])] * 3
    assert m.divergence is None


def test_where_nobody_can_tell_finish_is_an_error_until_drop_and_nothing_wrong_is_sent(shared_world):
    """The backward raised before the model, and might as well not have been meant to be."""

    def steps():
        model = dp.OverlappedDataParallel(Broken("loss"))
        seen = [str(broken_step(model, step)) for step in range(3)]
        if dist.get_rank() == 1:
            for _ in seen:
                model.drop()
        return seen, broken_step(model, 3)

    m = shared_world.measure(steps)
    (zero, _), (one, _), (two, _) = m.results
    assert zero == two == ["nan"] * 3
    assert "finish() after a forward pass without its backward" in one[1]
    assert "a forward pass before finish()" in one[2]
    assert [last for _, last in m.results] == [pytest.approx(31.0)] * 3
    assert m.divergence is None


class Returns(nn.Module):
    """A layer's output, in what it is told to put it in."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        return self.kind(self.layer(x))


KINDS = {"tensor": lambda y: y, "dict": lambda y: {"y": [y]}, "object": lambda y: types.SimpleNamespace(y=y)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_that_is_to_have_no_backward_says_so_or_is_an_error(shared_world, kind):
    def evaluates(context) -> int:
        model, x = dp.OverlappedDataParallel(Returns(KINDS[kind])), torch.ones(1, WIDTH)
        with torch.no_grad() if context == "no_grad" else model.no_sync() if context else contextlib.nullcontext():
            model(x)
        y = model(x)
        (y if kind == "tensor" else y["y"][0] if kind == "dict" else y.y).sum().backward()
        model.finish()
        return True

    def without():
        with pytest.raises(RuntimeError, match=r"have none in torch\.no_grad\(\) or no_sync\(\)"):
            evaluates(None)

    assert reduces(shared_world.measure(without).calls[0]) == []
    assert shared_world.run(lambda: evaluates("no_grad") and evaluates("no_sync")) == [True] * 3


def test_no_sync_between_backward_and_finish_would_change_what_is_being_sent_and_is_an_error(shared_world):
    def late():
        model, x = dp.OverlappedDataParallel(layers()), torch.ones(2, WIDTH)
        first, second = model(x).sum(), model(x).sum()
        first.backward()
        with model.no_sync():
            with pytest.raises(RuntimeError, match=r"forward pass before finish\(\)"):
                model(x)
            with pytest.raises(RuntimeError, match=r"second gradient before finish\(\)"):
                second.backward()
        model.module.zero_grad()
        model(x).sum().backward()
        model.finish()
        return model.module[5].bias.grad[0].item()

    assert shared_world.run(late) == [2.0] * 3


def test_finish_after_a_backward_that_raised_is_an_error_and_the_next_step_is_right(shared_world):
    def steps():
        model = dp.OverlappedDataParallel(layers(), bucket_bytes=1)
        if step_that_fails_after(model, 3):
            with pytest.raises(RuntimeError, match=r"where forward or backward raised on this rank, call drop\(\)"):
                model.finish()
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish()
        return model.module[5].bias.grad[0].item()

    assert shared_world.run(steps) == [2.0] * 3


def test_what_a_reentrant_checkpoint_runs_twice_is_an_error_that_names_the_way_out(shared_world):
    def twice(reentrant):
        module = layers()
        model, x = dp.OverlappedDataParallel(module, bucket_bytes=1), torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=reentrant)
        x.sum().backward()
        model.finish()
        return module[5].bias.grad.numel()

    def refused():
        with pytest.raises(RuntimeError, match=r"second gradient .* with use_reentrant=False"):
            twice(True)
        return twice(False)

    assert shared_world.run(refused) == [WIDTH] * 3


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


CHANGES = {
    "replaced": (lambda m: m.load_state_dict(layers().state_dict(), assign=True), r"0\.weight was added, replaced or removed"),
    "added": (lambda m: m.append(nn.Linear(WIDTH, WIDTH)), r"6\.weight was added"),
    "module": (lambda m: m.__setitem__(2, nn.Identity()), r"2\.weight was .* removed"),
    "tied": (lambda m: setattr(m[3], "weight", m[0].weight), r"3\.weight was .* removed"),
    "dtype": (lambda m: m.double(), r"0\.weight was of torch\.float32 on cpu when the model was wrapped"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_changed_after_wrapping_are_an_error_that_names_the_first_and_says_wrap_again(shared_world, variant, change):
    def changed():
        model = variant(layers())
        CHANGES[change][0](model.module)
        with pytest.raises(ValueError, match=CHANGES[change][1] + ".*: wrap again"):
            model(torch.ones(2, WIDTH))
        return True

    assert shared_world.run(changed) == [True] * 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_of_the_wrapper_is_refused_with_what_to_do_instead(shared_world, variant):
    def copied():
        for group in (None, dist.new_group([0, 1, 2])):
            model = variant(layers(), group)
            with pytest.raises(TypeError, match=rf"{variant.__name__} cannot be copied.*: copy \.module and wrap the copy"):
                copy.deepcopy(model)
        return variant(copy.deepcopy(model.module)).buckets == model.buckets

    assert shared_world.run(copied) == [True] * 3


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
