"""parallel.fsdp: which units are whole at a time, what travels and when; whatever a model does, it trains as in one process."""

import contextlib
import functools
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from manyranks.parallel import checkpointing
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import Zero3
from manyranks.theory import sharding
from tests.ranks.test_data_parallel import loss_of, tokens
from tests.ranks.test_zero import toy

WIDTH, DEPTH = 12, 5
UNIT = WIDTH * (WIDTH + 1)  # elements; 2, 3 and 4 ranks divide it
F64 = torch.float64


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Equal units: a linear layer each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH)))


def data(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(1000 * rank + step)
    return torch.randn(3, WIDTH, dtype=F64)


def gap(model, other: nn.Module | dict) -> float:
    """The largest difference of any parameter or buffer to another model's, or to its state_dict."""
    ours, theirs = model.full_state_dict(), other if isinstance(other, dict) else other.state_dict()
    assert ours.keys() == theirs.keys()
    return max((ours[k] - theirs[k]).abs().max().item() for k in ours if ours[k].numel())


STEPS = 4


@functools.cache
def alone(name: str, n: int) -> dict[str, torch.Tensor]:
    """The state_dict of one process that has trained MODELS[name] on the whole batches of n ranks."""
    model = seeded(MODELS[name])()
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss(model, data(r, step)) / n for r in range(n)).backward()
        optimizer.step()
    return model.state_dict()


def train(name: str, other: dict[str, torch.Tensor], wrap=FullyShardedDataParallel) -> float:
    """Each rank on its shard of the batch; the difference to one process on the whole one."""
    model = wrap(seeded(MODELS[name])())
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, data(dist.get_rank(), step)).backward()
        model.finish()
        optimizer.step()
        assert not any(unit.gathered for unit in model.units)
    return gap(model, other)


def loss(model, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def adam(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


# What is there, and when.


class Watched:
    """Counts, at each start of gathering a unit, whose rows have memory then."""

    def __init__(self, model: Zero3):
        self.most, self.bytes = 0, 0
        for unit in model.units:
            unit.start = self._watching(model.units, unit.start)

    def _watching(self, units, start):
        def started():
            start()
            rows = [unit.row_E.untyped_storage().nbytes() for unit in units]
            self.most = max(self.most, sum(size > 0 for size in rows))
            self.bytes = max(self.bytes, sum(rows))

        return started


@pytest.mark.parametrize(
    ("prefetch", "keep_last", "most"), [(1, True, 2), (1, False, 2), (0, False, 1), (0, True, 1), (2, True, 3)]
)
def test_as_many_units_are_whole_as_are_gathered_ahead_and_one(shared_worlds, prefetch, keep_last, most):
    def watched():
        model = FullyShardedDataParallel(layers(), prefetch=prefetch, keep_last=keep_last)
        watch, found = Watched(model), []
        for _ in range(3):
            out = model(torch.ones(2, WIDTH))
            kept = [unit.gathered for unit in model.units]
            out.sum().backward()
            found.append((kept, [unit.gathered for unit in model.units]))
            model.finish()
        return watch.most, watch.bytes, found

    nothing = [False] * DEPTH
    for units, size, found in shared_worlds.run(watched):
        assert (units, size) == (most, most * UNIT * 4)
        assert found == [([*nothing[1:], keep_last], nothing)] * 3


def events(build, shape=(2, WIDTH), backward_from=None, **options) -> list[str]:
    """Events of the second step: gathers by c10d, modules that begin and end, gradients that arrive."""
    model, log = FullyShardedDataParallel(build(), **options), []
    for k, unit in enumerate(model.units):
        unit.start = lambda unit=unit, k=k, start=unit.start: (
            log.append(f"gather {k}") if not unit.gathered else None,
            start(),
        )
    for k, module in enumerate(model.module):
        module.register_forward_pre_hook(lambda m, x, k=k: log.append(f"forward {k}"))
        module.register_forward_hook(lambda m, x, y, k=k: log.append(f"forward {k} over"))
        module.weight.whole.register_post_accumulate_grad_hook(lambda p, k=k: log.append(f"backward {k} over"))
    for _ in range(2):
        log.clear()
        model(torch.ones(shape)).sum().backward()
        model.finish()
    return log


def test_the_next_unit_is_under_way_before_this_one_computes(shared_world):
    for log in shared_world.run(events, layers):
        for k in range(DEPTH - 1):
            assert log.index(f"gather {k}") < log.index(f"gather {k + 1}") < log.index(f"forward {k} over")
        back = log[log.index(f"forward {DEPTH - 1} over") :]
        assert f"gather {DEPTH - 1}" not in back  # it was kept
        for k in range(DEPTH - 1, 0, -1):
            assert back.index(f"gather {k - 1}") < back.index(f"backward {k} over")
        assert log.count("gather 0") == 2


def test_nothing_is_gathered_ahead_without_prefetch(shared_world):
    for log in shared_world.run(events, layers, prefetch=0):
        for k in range(DEPTH - 1):
            assert log.index(f"gather {k + 1}") > log.index(f"forward {k} over")
        back = log[log.index(f"forward {DEPTH - 1} over") :]
        for k in range(DEPTH - 1, 0, -1):
            assert back.index(f"gather {k - 1}") > back.index(f"backward {k} over")


class Around(nn.Sequential):
    """Each layer in a checkpoint."""

    def forward(self, x):
        for layer in self:
            x = checkpointing.checkpoint(layer, x)
        return x


def test_units_in_checkpoints_are_gathered_ahead_in_backward_too(shared_world):
    def watched():
        log, model = events(lambda: Around(*layers())), FullyShardedDataParallel(Around(*layers()))
        watch = Watched(model)
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            assert not any(unit.gathered for unit in model.units)
            model.finish()
        return log, watch.most

    for log, most in shared_world.run(watched):
        back = log[log.index(f"forward {DEPTH - 1} over") + 1 :]
        for k in range(DEPTH - 1, 0, -1):
            assert back.index(f"gather {k - 1}") < back.index(f"forward {k} over")
        assert (log.count("gather 0"), most) == (2, 2)


@pytest.mark.lenient
@pytest.mark.parametrize("widths", [[12] * 6, [7, 30, 5, 11, 3]])
def test_whole_gradients_take_what_the_theory_says(shared_worlds, widths):
    """By the garbage collector, which knows all tensors, just before and just after each unit's gradients leave."""

    def peak() -> int:
        gc.collect()
        others = set(alive())
        torch.manual_seed(0)
        model, seen = FullyShardedDataParallel(nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(widths)))), []

        def note() -> None:
            known = [*model.parameters(), *(unit.row_E for unit in model.units), *(p.grad for p in model.parameters())]
            whole = alive([w.grad for unit in model.units for w in unit.whole])
            left = (alive() | whole).keys() - others - alive(known).keys()
            seen.append(sum((alive() | whole)[at] for at in left))

        for unit in model.units:
            unit.reduce = lambda run=unit.reduce: (note(), run(), note())
            unit.hand_over = lambda run=unit.hand_over: (note(), run())
        for _ in range(2):
            seen.clear()
            model(torch.ones(1, widths[0])).sum().backward()
            for p in model.parameters():
                p.grad = None
        return max(seen)

    def alive(tensors=None) -> dict[int, int]:
        """Bytes of storages by address: of these tensors, or of all that there are."""
        every = gc.get_objects() if tensors is None else tensors
        found = [t.untyped_storage() for t in every if isinstance(t, torch.Tensor) and t.dim()]
        return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}

    units = [a * b + b for a, b in itertools.pairwise(widths)]
    activations = 4 * 4 * max(widths)  # what little of them is alive between two units
    for found in shared_worlds.run(peak):
        expected = sharding.gradients_peak(units, shared_worlds.size, 4)
        assert expected <= found <= expected + activations


# What travels.


def step_of(steps: int, mesh_of=None, **options) -> None:
    mesh = None if mesh_of is None else init_device_mesh("cpu", mesh_of)
    model = FullyShardedDataParallel(layers(), mesh=mesh, **options)
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.finish()


def second_step(world, **options) -> list[list]:
    """Each rank's calls in the second step."""
    one, two = (world.measure(step_of, steps, **options) for steps in (1, 2))
    return [two.calls[rank][len(one.calls[rank]) :] for rank in range(world.size)]


def sent(calls, op: str) -> list[tuple[str, int]]:
    return [(call.dtype, call.bytes) for call in calls if call.op == op]


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("types", [(None, None), ("bfloat16", "float32"), ("bfloat16", None), ("float16", "float32")])
@pytest.mark.few(3)
def test_a_rank_sends_the_parameters_twice_and_the_gradients_once_each_in_its_precision(shared_worlds, types, keep_last):
    n = shared_worlds.size
    compute, reduce = (getattr(torch, name) if name else None for name in types)
    gathered, reduced = compute or torch.float32, reduce or compute or torch.float32
    names = [str(dtype).removeprefix("torch.") for dtype in (gathered, reduced)]
    for calls in second_step(shared_worlds, compute_dtype=compute, reduce_dtype=reduce, keep_last=keep_last):
        # A gather's bytes are of the shard, which a ring passes on N − 1 times.
        assert sent(calls, "all_gather") == [(names[0], UNIT // n * gathered.itemsize)] * (2 * DEPTH - keep_last)
        assert sent(calls, "all_to_all") == [(names[1], UNIT * reduced.itemsize)] * DEPTH
        assert {call.op for call in calls} == {"all_gather", "all_to_all"}
        assert all(call.is_async for call in calls)


@pytest.mark.parametrize("types", [(None, None), ("bfloat16", "float32")])
def test_the_payload_is_three_times_the_parameters_less_the_last_unit(shared_worlds, types):
    n, options = (
        shared_worlds.size,
        dict(zip(("compute_dtype", "reduce_dtype"), (t and getattr(torch, t) for t in types), strict=True)),
    )
    one, two = (shared_worlds.measure(step_of, steps, **options) for steps in (1, 2))
    gather, reduce = ((options[key] or torch.float32).itemsize for key in options)
    whole = gather * (2 * DEPTH - 1) * UNIT + reduce * DEPTH * UNIT
    for rank in range(n):
        assert (two.payload_bytes[rank] - one.payload_bytes[rank]) * n == (n - 1) * whole


# Replicas of shards.


def test_replicas_of_shards_reduce_inside_and_all_reduce_between(four):
    for rank, calls in enumerate(second_step(four, mesh_of=(2, 2))):
        inside, between = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        ranks = {call.op: call.ranks for call in calls}
        assert ranks == {"all_gather": inside, "all_to_all": inside, "all_reduce": between}
        shard = UNIT // 2 * 4
        assert sent(calls, "all_gather") == [("float32", shard)] * (2 * DEPTH - 1)
        assert sent(calls, "all_to_all") == [("float32", 2 * shard)] * DEPTH  # half of a unit stays here
        # An all-reduce of n bytes makes each of M replicas send 2(M − 1)/M·n, so here n.
        assert sent(calls, "all_reduce") == [("float32", shard)] * DEPTH
    one, two = (four.measure(step_of, steps, mesh_of=(2, 2)) for steps in (1, 2))
    for rank in range(4):
        theory = sharding.sent([UNIT] * DEPTH, 4, 3, 4, 4, replicas=2, replica=rank // 2)
        inside = theory.gather_forward + theory.gather_backward + theory.reduce_scatter
        phi = DEPTH * UNIT * 4
        assert (inside, theory.all_reduce) == ((3 * phi - UNIT * 4) // 2, phi // 2)
        calls = two.calls[rank][len(one.calls[rank]) :]
        # Of the all-gather each of two ranks passes its shard on once; of the all-to-all half leaves.
        each = {"all_gather": 1, "all_to_all": 2, "all_reduce": math.inf}
        assert sum(call.bytes / each[call.op] for call in calls) == inside
        assert two.payload_bytes[rank] - one.payload_bytes[rank] == inside + theory.all_reduce


def test_replicas_of_shards_train_as_one_process_from_rank_0_s_weights(four):
    def both():
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2))
        alone, model = toy(0), FullyShardedDataParallel(toy(rank), mesh=mesh)
        assert gap(model, alone) == 0
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
        for step in range(10):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, tokens(rank, step), True).backward()
            model.finish()
            sum(loss_of(alone, tokens(r, step), True) / 4 for r in range(4)).backward()
            ours, theirs = model.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            assert abs(ours - theirs) < 1e-12
            for optimizer in optimizers:
                optimizer.step()
        return gap(model, alone)

    assert max(four.run(both)) < 1e-10


@pytest.mark.parametrize("wrap", [Zero3, FullyShardedDataParallel])
def test_every_rank_begins_with_rank_0_s_weights(shared_worlds, wrap):
    def start():
        return gap(wrap(toy(dist.get_rank())), toy(0))

    assert shared_worlds.run(start) == [0] * shared_worlds.size


# Whatever a model does.


class Frozen(nn.Module):
    """Whole units that are frozen, between others that learn."""

    def __init__(self):
        super().__init__()
        self.parts = layers(F64)
        for k in (1, 3):
            self.parts[k].requires_grad_(False)

    def forward(self, x):
        return self.parts(x)


class Twice(nn.Module):
    """A unit that is used twice, with another one in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(F64)[:3])

    def forward(self, x):
        for k in (0, 1, 2, 1, 0, 0):
            x = torch.tanh(self.layers[k](x))
        return x


class Checkpointed(nn.Module):
    """Blocks that recompute their insides, the whole of them, or both. how: "inside", "around" or "both"."""

    def __init__(self, how: str):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block(how != "around") for _ in range(3)), how

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how == "inside" else checkpoint(block, x, use_reentrant=False)
        return x


class Block(nn.Module):
    def __init__(self, recomputes: bool):
        super().__init__()
        self.into, self.out = (nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x):
        return x + (checkpoint(self._inner, x, use_reentrant=False) if self.recomputes else self._inner(x))

    def _inner(self, x):
        return self.out(torch.tanh(self.into(x)))


class Tied(nn.Module):
    """The first, a middle and the last unit have one weight."""

    def __init__(self):
        super().__init__()
        self.layers = layers(F64)
        self.layers[2].weight = self.layers[4].weight = self.layers[0].weight

    def forward(self, x):
        return torch.tanh(self.layers(x))


def seeded(build):
    def model():
        torch.manual_seed(0)
        return build()

    return model


MODELS = {
    "frozen": Frozen,
    "twice": Twice,
    "checkpoint inside": lambda: Checkpointed("inside"),
    "checkpoint around": lambda: Checkpointed("around"),
    "checkpoints in each other": lambda: Checkpointed("both"),
    "tied": Tied,
}


@pytest.mark.parametrize("wrap", [Zero3, FullyShardedDataParallel])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(6)
def test_it_trains_as_in_one_process(shared_world, name, wrap):
    assert max(shared_world.run(train, name, alone(name, 3), wrap)) < 1e-10


@pytest.mark.parametrize("options", [{"prefetch": 0, "keep_last": False}, {"prefetch": 3}, {"keep_last": False}])
@pytest.mark.parametrize("name", ["frozen", "tied", "twice", "checkpoint around"])
@pytest.mark.few(4)
def test_so_it_does_whatever_is_gathered_ahead_or_kept(shared_world, name, options):
    def wrap(module):
        return FullyShardedDataParallel(module, **options)

    assert max(shared_world.run(train, name, alone(name, 3), wrap)) < 1e-10


def test_units_may_be_given_by_hand(shared_world):
    name = "checkpoint inside"

    def both(other):
        def wrap(module):
            return FullyShardedDataParallel(module, units=[module.blocks[0].into, module.blocks[2]])

        model = wrap(Checkpointed("inside"))
        sizes = {unit.part.path: unit.row.elements for unit in model.units}
        one = WIDTH * (WIDTH + 1)
        assert sizes == {
            "blocks.0.into": one,
            "blocks.0.out": one,
            "blocks.1.into": one,
            "blocks.1.out": one,
            "blocks.2": 2 * one,
        }
        return train(name, other, wrap)

    assert max(shared_world.run(both, alone(name, 3))) < 1e-10


@pytest.mark.parametrize("name", ["tied", "checkpoint around"])
def test_an_optimizer_made_before_or_after_treats_each_parameter_its_way(shared_world, name):
    """Vectors don't decay, and learn faster. Before it's wrapped, a model's parameters are those that train afterwards."""

    def groups(model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if name.endswith("weight")]
        vectors = [p for name, p in named if not name.endswith("weight")]
        return [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]

    def both(before: bool):
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = seeded(MODELS[name])(), seeded(MODELS[name])()
        optimizers = [torch.optim.AdamW(groups(model), lr=1e-2)] if before else []
        model = FullyShardedDataParallel(model)
        optimizers += [] if before else [torch.optim.AdamW(groups(model), lr=1e-2)]
        optimizers.append(torch.optim.AdamW(groups(alone), lr=1e-2))
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(data(rank, step)).square().mean().backward()
            sum(alone(data(r, step)).square().mean() / n for r in range(n)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return gap(model, alone)

    assert max(shared_world.run(both, True) + shared_world.run(both, False)) < 1e-10


def test_what_cannot_be_sharded_is_said(shared_world):
    def messages():
        model, found = Checkpointed("inside"), []
        for options in (
            {"units": [nn.Linear(2, 2)]},
            {"units": [model.blocks[0], model.blocks[0].out]},
            {"mesh": init_device_mesh("cpu", (3,))},
            {"mesh": init_device_mesh("cpu", (1, 3)), "group": dist.group.WORLD},
        ):
            with pytest.raises(ValueError) as error:
                FullyShardedDataParallel(model, **options)
            found.append(str(error.value))
        return found

    absent, inside, flat, two = shared_world.run(messages)[0]
    assert "not in the module: Linear(in_features=2" in absent
    assert "unit blocks.0.out lies in the unit blocks.0" in inside
    assert "two dimensions" in flat
    assert "no group" in two


def test_between_uses_an_attribute_is_the_shard_that_trains(shared_world):
    def seen():
        model = FullyShardedDataParallel(layers())
        weight = model.module[0].weight
        return weight is next(model.parameters()), tuple(weight.shape), model.units[0].row_E.untyped_storage().nbytes()

    assert shared_world.run(seen) == [(True, (UNIT // 3,), 0)] * 2 + [(True, (UNIT // 3 - WIDTH,), 0)]


# Between training steps.


def test_evaluation_between_steps_sees_the_newest_weights_and_changes_nothing(shared_world):
    def both():
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = FullyShardedDataParallel(layers(F64)), layers(F64)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        for step in range(4):
            with torch.no_grad():
                assert torch.allclose(model(data(5, step)), alone(data(5, step)), rtol=0, atol=1e-12)
            assert not any(unit.gathered for unit in model.units)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(data(rank, step)).square().mean()
            with torch.no_grad():  # also between forward and backward, and of a part of the model only
                assert torch.allclose(model(data(5, step)), alone(data(5, step)), rtol=0, atol=1e-12)
            loss.backward()
            model.finish()
            sum(alone(data(r, step)).square().mean() / n for r in range(n)).backward()
            model(data(5, step))  # with gradients: its last unit stays
            for optimizer in optimizers:
                optimizer.step()
            assert torch.allclose(model(data(5, step)), alone(data(5, step)), rtol=0, atol=1e-12)
        return gap(model, alone)

    assert max(shared_world.run(both)) < 1e-10


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_without_synchronizing_send_no_gradients_and_count(shared_world, passes):
    def both():
        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = FullyShardedDataParallel(toy(0)), toy(0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for k in range(passes):
                last = k == passes - 1
                batch, detour = passes * step + k, k == 1  # some parameters have no gradient at first
                with contextlib.nullcontext() if last else model.no_sync():
                    loss_of(model, tokens(rank, batch), detour).backward()
                    model.finish()
                assert last or all(p.grad is None for p in model.parameters())
                sum(loss_of(alone, tokens(r, batch), detour) / n for r in range(n)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return gap(model, alone)

    assert max(shared_world.run(both)) < 1e-10


def test_a_path_that_changes_from_step_to_step_is_followed(shared_world):
    def both():
        choices = itertools.cycle([(0, 1, 2), (2, 0), (1, 2, 0), (2, 0)])

        def loss(model, x):
            module = model.module if isinstance(model, FullyShardedDataParallel) else model
            module.path = path
            return model(x).square().mean()

        class Paths(Twice):
            path = (0,)

            def forward(self, x):
                for k in self.path:
                    x = torch.tanh(self.layers[k](x))
                return x

        rank, n = dist.get_rank(), dist.get_world_size()
        model, alone = FullyShardedDataParallel(seeded(Paths)()), seeded(Paths)()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        for step in range(8):
            path = next(choices)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(model, data(rank, step)).backward()
            model.finish()
            sum(loss(alone, data(r, step)) / n for r in range(n)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return gap(model, alone)

    assert max(shared_world.run(both)) < 1e-10


def test_a_sparse_gradient_is_named(shared_world):
    def message():
        model = FullyShardedDataParallel(nn.Sequential(nn.Embedding(4, 3, sparse=True)))
        with pytest.raises(ValueError) as error:
            model(torch.ones(2, dtype=torch.int64)).sum().backward()
        return str(error.value)

    assert all("0.weight has a sparse gradient" in text for text in shared_world.run(message))


def test_pytorch_s_peak_is_counted_over_whole_steps_and_grows_by_the_optimizer_s_states(four):
    """It works on DTensors, which first try an operator on tensors that have shapes and no memory."""

    def steps(count: int) -> None:
        model = layers()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(count):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    one, two = (four.measure(steps, count, memory=True).peak_bytes for count in (1, 2))
    theory = sharding.held([WIDTH * WIDTH, WIDTH] * DEPTH, 4, 3, parameter=0, gradient=4, master=4, counter=4)
    for rank in range(4):
        assert two[rank] - one[rank] == theory.states + theory.counters
        assert theory.total < two[rank] < 4 * theory.total, "a part of what one process takes"


@pytest.mark.parametrize(("name", "most"), [("frozen", 2), ("checkpoint around", 2), ("twice", 3)])
def test_frozen_and_recomputed_units_go_as_soon_as_others(shared_world, name, most):
    """One that is used twice stays until its gradients have come."""

    def watched():
        model = FullyShardedDataParallel(seeded(MODELS[name])())
        watch = Watched(model)
        for step in range(3):
            model(data(0, step).requires_grad_()).sum().backward()
            # finish() is for what no gradient's arrival frees: nothing is left to it here.
            assert not any(unit.gathered for unit in model.units)
            model.finish()
        return watch.most

    assert max(shared_world.run(watched)) <= most


def test_a_model_of_one_unit_sees_the_newest_weights(shared_world):
    def both():
        model = FullyShardedDataParallel(layers(F64)[:1])
        before = model(data(0, 0))
        for p in model.parameters():
            with torch.no_grad():
                p.add_(1)
        return torch.equal(before, model(data(0, 0)))

    assert not any(shared_world.run(both))


def test_a_shorter_evaluation_leaves_nothing_behind(shared_world):
    def left():
        model = FullyShardedDataParallel(layers())
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            model.finish()
        for p in model.parameters():
            p.grad = None
        short, model.module = model.module, model.module[:2]  # the third is gathered ahead
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        gathered = any(unit.gathered for unit in model.units)
        model.module = short
        model.finish()
        return gathered, any(p.grad is not None for p in model.parameters())

    assert shared_world.run(left) == [(False, False)] * 3


def test_what_a_step_began_with_is_gone_after_it(shared_world):
    def alive() -> list[bool]:
        model, inputs = FullyShardedDataParallel(layers()), []
        for _ in range(3):
            x = torch.ones(2, WIDTH, requires_grad=True)  # a pipeline's stage has one that wants a gradient
            model(x.view_as(x)).sum().backward()
            model.finish()
            inputs.append(weakref.ref(x))
        del x
        gc.collect()
        return [ref() is not None for ref in inputs]

    assert shared_world.run(alive) == [[False] * 3] * 3
