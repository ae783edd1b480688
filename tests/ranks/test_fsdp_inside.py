"""parallel.fsdp inside other modules: what a parent's parameters() gives is what trains; what can't be is refused."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.context import ContextParallel
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel, full_state_dict
from manyranks.parallel.zero import Zero3, ZeroOptimizer
from tests.ranks.test_fsdp import F64, WIDTH, Frozen, Tied, data, layers

STEPS = 3


class Outer(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def head() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, 5, dtype=F64)


class Dictionary(nn.Module):
    """Parts in a ModuleDict, each on its own, one of them called twice."""

    def __init__(self, wrap):
        super().__init__()
        first, second, *_ = layers(F64)
        self.parts = nn.ModuleDict({"first": wrap(first), "second": wrap(second)})

    def forward(self, x):
        return self.parts["first"](self.parts["second"](torch.tanh(self.parts["first"](x))))


class Gates(nn.Module):
    """A recurrent module keeps its weights in a list, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, dtype=F64)

    def forward(self, x):
        return self.recurrent(x)[0]


class Attends(nn.Module):
    """PyTorch's attention uses its last layer's weight without calling that layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=F64)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


def blocks(wrap) -> nn.Module:
    return nn.Sequential(*map(wrap, layers(F64)))


BUILDS = {  # from a wrapper to a model around it
    "one inside": lambda wrap: Outer(wrap(layers(F64)), head()),
    "two side by side": lambda wrap: Outer(wrap(layers(F64)), wrap(head())),
    "block by block": blocks,
    "block by block, and around them": lambda wrap: wrap(Outer(blocks(wrap), head())),
    "in each other": lambda wrap: wrap(Outer(wrap(blocks(wrap)), wrap(head()))),
    "a dictionary": Dictionary,
    "frozen": lambda wrap: Outer(wrap(Frozen()), head()),
    "tied inside": lambda wrap: Outer(wrap(Tied()), head()),
    "attention": lambda wrap: Outer(wrap(Attends()), head()),
    "recurrent": lambda wrap: Outer(wrap(Gates()), head()),
}


def plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "module")


def average(model: nn.Module) -> None:
    """Does for parameters that no wrapper shards what data parallelism would do."""
    for p in model.parameters():
        if not hasattr(p, "whole") and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def against_one_process(name: str, wrap) -> tuple[float, dict[str, tuple]]:
    """The largest difference to one process after SGD on outer.parameters(), and the shards' shapes by plain name."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model, alone = BUILDS[name](wrap), BUILDS[name](lambda module: module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        average(model)
        sum(alone(data(r, step)).square().mean() / n for r in range(n)).backward()
        for optimizer in optimizers:
            optimizer.step()
    whole, expected = full_state_dict(model), alone.state_dict()
    assert whole.keys() == expected.keys()
    assert {plain(key) for key in model.state_dict()} == set(expected)
    gap = max((whole[key] - expected[key]).abs().max().item() for key in expected)
    return gap, {plain(key): tuple(p.shape) for key, p in model.named_parameters()}


WRAPPED = [(name, FullyShardedDataParallel) for name in BUILDS]
WRAPPED += [(name, Zero3) for name in ("one inside", "block by block, and around them", "attention")]


@pytest.mark.parametrize(("name", "wrap"), WRAPPED)
@pytest.mark.few(5)
def test_a_parent_s_parameters_are_the_shards_that_train(shared_world, name, wrap):
    found = shared_world.run(against_one_process, name, wrap)
    alone = dict(BUILDS[name](lambda module: module).named_parameters())
    assert max(gap for gap, _ in found) < 1e-12
    for key, p in alone.items():
        sizes = [shapes[key] for _, shapes in found]
        if sizes[0] != tuple(p.shape):  # else nothing shards it
            assert sum(size for (size,) in sizes) == p.numel()


def test_with_wrappers_in_each_other_units_come_and_go_as_with_one(shared_world):
    def calls(nested: bool) -> None:
        wrap = FullyShardedDataParallel
        model = wrap(Outer(blocks(wrap), head())) if nested else wrap(Outer(layers(F64), head()), units=[])
        for step in range(2):
            model(data(0, step)).square().mean().backward()
            model.finish()
            assert not any(unit.gathered for unit in model.units)

    one, two = (shared_world.measure(calls, nested) for nested in (False, True))
    for rank in range(3):
        steps = [[(call.op, call.bytes) for call in m.calls[rank] if call.is_async] for m in (one, two)]
        assert steps[0] == steps[1]
        assert len(steps[0]) == 17 * 2


def test_shards_are_saved_and_loaded_as_any_state(shared_world):
    def both() -> bool:
        first, second = (Outer(FullyShardedDataParallel(Tied()), head()) for _ in range(2))
        with torch.no_grad():
            for p in first.parameters():
                p.add_(dist.get_rank() + 1)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file))
        with torch.no_grad():
            return torch.equal(first(data(0, 0)), second(data(0, 0)))

    assert shared_world.run(both) == [True] * 3


def test_a_shard_may_step_while_backward_goes_on(shared_world):
    """Its hooks are called as PyTorch's own would be, one unit after its gradient has left."""

    def both() -> tuple[float, list[int]]:
        rank, n, order = dist.get_rank(), dist.get_world_size(), []
        model, alone = FullyShardedDataParallel(layers(F64)), layers(F64)
        places = {p: k for k, unit in enumerate(model.units) for p in unit.shards}
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p, optimizer=optimizer) -> None:
                order.append(places[p])
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
        for k in range(STEPS):
            model(data(rank, k)).square().mean().backward()
            theirs.zero_grad()
            sum(alone(data(r, k)).square().mean() / n for r in range(n)).backward()
            theirs.step()
        whole = model.full_state_dict()
        return max((whole[key] - value).abs().max().item() for key, value in alone.state_dict().items()), order

    for gap, order in shared_world.run(both):
        assert gap < 1e-12
        assert order == [k for k in (4, 3, 2, 1, 0) for _ in "wb"] * STEPS


def test_gradients_leave_while_the_unit_before_computes(shared_world):
    """Three at once: when B2 begins, unit 1 comes (G1), unit 2 computes, and unit 3's gradients leave (R3 until H3)."""

    def events() -> list[str]:
        model, log = FullyShardedDataParallel(layers()), []
        for k, (unit, layer) in enumerate(zip(model.units, model.module, strict=True)):
            for name, letter in (("start", "G"), ("reduce", "R"), ("hand_over", "H")):
                noted(unit, name, f"{letter}{k}", log)
            layer.register_forward_hook(lambda m, x, y, k=k: begins(y, f"B{k}", log))
        for _ in range(2):
            log.clear()
            model(torch.ones(2, WIDTH)).sum().backward()
        return log[log.index("B4") :]

    def begins(output, text: str, log: list[str]) -> None:
        output.register_hook(lambda grad: log.append(text))

    def noted(unit, name: str, text: str, log: list[str]) -> None:
        run = getattr(unit, name)

        def wrapper():
            happens = {"start": not unit.gathered, "reduce": True, "hand_over": unit._reduction is not None}
            log.extend([text] if happens[name] else [])
            run()

        setattr(unit, name, wrapper)

    for log in shared_world.run(events):
        assert " ".join(log) == "B4 R4 G2 B3 H4 R3 G1 B2 H3 R2 G0 B1 H2 R1 B0 H1 R0 H0"


# What can't be.


def refused() -> dict[str, str]:
    found = {}

    def note(name: str, run) -> None:
        with pytest.raises((ValueError, TypeError)) as error:
            run()
        found[name] = str(error.value)

    embedding, tied = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    tied.weight = embedding.weight
    note("tied outside", lambda: FullyShardedDataParallel(nn.Sequential(embedding)))
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    both = nn.Sequential(one, two)
    inner = FullyShardedDataParallel(both)
    outer = nn.Sequential(inner, nn.Linear(3, 3))
    outer[1].weight = one.weight
    note("tied to an inner one", lambda: FullyShardedDataParallel(outer))
    sharded = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    around = nn.Sequential(sharded, nn.Linear(4, 4))
    note("zero", lambda: ZeroOptimizer(around.parameters(), torch.optim.SGD, lr=0.1))
    note("data parallel", lambda: OverlappedDataParallel(around))
    note("context", lambda: ContextParallel(around, "0"))
    note("expert", lambda: ExpertParallel(around, experts="0"))
    note("cast", lambda: around.double())
    note("copy", lambda: copy.deepcopy(around))
    around.float()
    sharded.module[0].weight.requires_grad_(False)
    note("frozen later", lambda: around(torch.ones(2, 4)))
    sharded.module[0].weight.requires_grad_(True)
    sharded.module[1].weight = nn.Parameter(torch.ones(4, 4))
    note("replaced", lambda: around(torch.ones(2, 4)))
    clamped = FullyShardedDataParallel(nn.Sequential(nn.Embedding(7, 3, max_norm=0.1)))
    double = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3)))
    double.module.double()
    note("cast inside", lambda: double(torch.ones(2, 3)))
    twice = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    note("gradients of gradients", lambda: twice(torch.ones(2, 3)).sum().backward(create_graph=True))
    note("changed", lambda: clamped(torch.arange(3)).sum().backward())
    return found


def test_what_would_be_wrong_is_refused_before_the_first_message(shared_world):
    words = {
        "tied outside": "weight of Embedding is tied to a module outside the wrapper",
        "tied to an inner one": "1.weight is tied to a parameter that another wrapper has sharded",
        "zero": "0 is this rank's shard of a fully sharded module: ZeroOptimizer would mix",
        "data parallel": "0.module.0.weight is this rank's shard",
        "context": "0.module.0.weight is this rank's shard",
        "expert": "0.module.0.weight is this rank's shard",
        "cast": "a sharded module stays torch.float32 on cpu",
        "copy": "can't be copied",
        "frozen later": "0.weight was frozen or thawed after it was sharded",
        "replaced": "1.weight was replaced or removed after it was sharded",
        "cast inside": "0.weight was cast after it was sharded",
        "gradients of gradients": "create_graph=True: a sharded module has no gradients of gradients",
        "changed": "0.weight was changed in the forward pass",
    }
    for found in shared_world.run(refused):
        assert found.keys() == words.keys()
        for name, said in words.items():
            assert said in found[name]


# What users do.


class Breaks(Exception):
    pass


def test_after_a_backward_that_raised_training_goes_on(shared_world):
    """Nothing of the broken step is left; without it, the steps are one process's."""

    def both() -> float:
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = FullyShardedDataParallel(layers(F64)), layers(F64)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if step == 2:
                handle = model.module[1].register_forward_hook(lambda m, x, y: y.register_hook(fails) and None)
                loss = model(data(rank, 99)).square().mean()
                handle.remove()
                with pytest.raises(Breaks):
                    loss.backward()
                optimizers[0].zero_grad()  # of what had arrived before, as without a wrapper
            model(data(rank, step)).square().mean().backward()
            sum(alone(data(r, step)).square().mean() / n for r in range(n)).backward()
            for optimizer in optimizers:
                optimizer.step()
        whole = model.full_state_dict()
        return max((whole[key] - value).abs().max().item() for key, value in alone.state_dict().items())

    def fails(grad):
        raise Breaks

    assert max(shared_world.run(both)) < 1e-12


def test_hooks_on_gradients_run_before_and_after_wrapping(shared_world):
    """One on the whole gradient of each rank, one on the mean's shard: both are linear here."""

    def both() -> float:
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = layers(F64), layers(F64)
        model[0].weight.register_hook(lambda grad: 3 * grad)
        model = FullyShardedDataParallel(model)
        model.module[1].weight.register_hook(lambda grad: 5 * grad)
        seen = []
        model.module[2].register_forward_pre_hook(lambda m, x: seen.append(tuple(m.weight.shape)))
        model(data(rank, 0)).square().mean().backward()
        sum(alone(data(r, 0)).square().mean() / n for r in range(n)).backward()
        with torch.no_grad():
            alone[0].weight.grad *= 3
            alone[1].weight.grad *= 5
            for m in (model, alone):
                for p in m.parameters():
                    p -= p.grad
        whole = model.full_state_dict()
        assert seen == [(WIDTH, WIDTH)]
        return max((whole[key] - value).abs().max().item() for key, value in alone.state_dict().items())

    assert max(shared_world.run(both)) < 1e-12


def test_a_backward_with_weights_of_before_a_step_is_refused(shared_world):
    def message() -> str:
        model = FullyShardedDataParallel(layers(F64))
        loss = model(data(0, 0)).square().mean()
        with torch.no_grad():
            [*model.parameters()][-1].add_(1)  # one of its unit's two is enough
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        return str(error.value)

    assert all("modified by an inplace operation" in text for text in shared_world.run(message))


def test_sums_that_no_sync_keeps_can_be_forgotten(shared_world):
    def both() -> bool:
        first, second = (FullyShardedDataParallel(layers(F64)) for _ in range(2))
        with first.no_sync():
            first(data(0, 7)).sum().backward()
        first.zero_grad()
        for model in (first, second):
            model(data(dist.get_rank(), 0)).sum().backward()
        return all(
            torch.equal(a.grad.to_local(), b.grad.to_local())
            for a, b in zip(first.parameters(), second.parameters(), strict=True)
        )

    assert shared_world.run(both) == [True] * 3


def test_numbers_that_are_not_floats_keep_their_dtype(shared_world):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.counts = nn.Parameter(torch.tensor([1001, 1003]), requires_grad=False)

        def forward(self, x):
            return x * self.counts

    def seen() -> list[float]:
        model = FullyShardedDataParallel(Counts(), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return [*model(torch.ones(())).tolist(), model.units[0].row_E.dtype == torch.int64]

    assert shared_world.run(seen) == [[1000.0, 1004.0, True]] * 3  # the product is bfloat16, the counts aren't
