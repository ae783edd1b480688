"""Shards of a sharded module outside a forward: what one may do with them, and what is refused, by name."""

import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import manyranks as mr
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.fsdp import order as orders
from manyranks.parallel.shard import local
from manyranks.parallel.zero import Zero3, ZeroOptimizer
from tests.ranks.refused import said

WRAPPERS = {"Zero3": Zero3, "FSDP": FullyShardedDataParallel}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([0.5]))


class Model(nn.Module):
    """Reads parameters of modules that it doesn't call, and asks what they are like."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(5, 5), nn.Linear(5, 5), Scale()

    def forward(self, x):
        weight = self.first.weight
        assert (*weight.shape, weight.numel(), weight.size(1)) == (5, 5, 25, 5)
        return F.linear(self.second(x.to(weight.dtype)), weight) * self.scale.log.exp()


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5) + rank


def stepped(wrap) -> nn.Module:
    wrapped = wrap(model())
    wrapped(batch(dist.get_rank())).square().sum().backward()
    wrapped.finish()
    return wrapped


class Lamb(torch.optim.Optimizer):
    """Scales each update by two norms of a whole parameter, as LAMB and LARS do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.data.pow(2).sum().sqrt() / p.grad.data.pow(2).sum().sqrt()
                p.data.add_(trust * p.grad, alpha=-group["lr"])


def hand_clipped(parameters) -> None:
    norm = math.sqrt(sum(p.grad.detach().square().sum().item() for p in parameters))
    for p in parameters:
        p.grad.mul_(min(1, 1 / norm))


def step_of(optimizer: type, parameters, **options) -> None:
    made = optimizer([p for p in parameters if p.ndim == 2], **options)
    made.step(*[lambda: torch.zeros(())] * (optimizer is torch.optim.LBFGS))


def refusals(name: str) -> dict[str, str]:
    wrapped = stepped(WRAPPERS[name])
    own = [p for p in wrapped.parameters() if p.grad is not None]
    weight, scale = wrapped.module.first.weight, wrapped.module.scale.log
    calls = {
        "a norm of a parameter": lambda: sum(p.norm() for p in own),
        "a parameter in the loss": lambda: (batch(0) * scale).sum().backward(),
        "a product": lambda: F.linear(batch(0), weight),
        "clipping by hand": lambda: hand_clipped(own),
        "PyTorch's clipping": lambda: nn.utils.clip_grad_norm_(own, 1.0),
        "PyTorch's norm": lambda: nn.utils.get_total_norm([p.grad for p in own]),
        "a vector of all": lambda: nn.utils.parameters_to_vector(own),
        "random weights": lambda: nn.init.normal_(weight),
        "a comparison": lambda: torch.equal(weight, weight),
        "a decision": lambda: bool(scale > 0),
        "a number": lambda: scale.item(),
        "a view": lambda: weight.T,
        "values by index": lambda: weight.detach().__setitem__(0, torch.ones(5)),
        **{
            kind.__name__: lambda kind=kind: step_of(kind, own)
            for kind in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, Lamb)
        },
    }
    before = [local(p).clone() for p in own]
    found = said({what: (call, "") for what, call in calls.items()})
    assert all(map(torch.equal, before, map(local, own)))
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_needs_a_whole_tensor_is_refused_by_its_name(shared_worlds, name):
    for found in shared_worlds.run(refusals, name):
        assert [what for what, error in found.items() if not ("first.weight" in error or "scale.log" in error)] == []


def hooked(name: str) -> str:
    wrapped = WRAPPERS[name](model())
    wrapped.module.second.register_full_backward_hook(lambda module, gi, go: (gi[0] / module.weight.norm(),))
    try:
        wrapped(batch(0)).sum().backward()
    except ValueError as error:
        return str(error)
    return "" if torch.isfinite(local(wrapped.module.second.weight.grad)).all() else "wrong"


def test_a_backward_hook_reads_the_whole_weight_or_is_refused(shared_world):
    for name in WRAPPERS:
        assert all(error == "" or "second.weight" in error for error in shared_world.run(hooked, name))


ELEMENTWISE = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "many at once": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    **{
        kind.__name__: (kind, {})
        for kind in (torch.optim.Adagrad, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop)
    },
}


def trained(kind: type, options: dict, wrap=None, stage: int = 0) -> dict[str, torch.Tensor]:
    """Parameters after steps with all that is done element by element: decay groups, values clipped, averages."""
    ranks = range(dist.get_world_size()) if wrap is None and not stage else [dist.get_rank()]
    own = model() if wrap is None else wrap(model())
    parts = list(own.parameters())
    groups = [{"params": [p for p in parts if (p.dim() >= 2) == big], "weight_decay": 0.2 * big} for big in (True, False)]
    optimizer = ZeroOptimizer(groups, kind, stage, **options) if stage else kind(groups, **options)
    averages = [p.detach().clone() for p in parts]
    for _ in range(3):
        for rank in ranks:
            (own(batch(rank)).square().sum() / len(ranks)).backward()
        if wrap is not None:
            own.finish()
        if not stage:
            nn.utils.clip_grad_value_(parts, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [p.detach() for p in parts], 0.5)
    with torch.no_grad():
        for p, average in zip(parts, averages, strict=True):
            p.copy_(average)
        dict(own.named_parameters())["module.second.weight" if wrap else "second.weight"][1, 2:4] = 7
    if wrap is None:
        return own.state_dict()
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    own.load_state_dict({k: torch.zeros_like(v) for k, v in own.state_dict().items()})
    file.seek(0)
    own.load_state_dict(torch.load(file, weights_only=True))
    return own.full_state_dict()


def gaps(kind: type, options: dict, wrap) -> float:
    alone, ours = trained(kind, options), trained(kind, options, wrap)
    return max((alone[name] - ours[name]).abs().max().item() for name in alone)


@pytest.mark.parametrize("which", ELEMENTWISE)
def test_what_is_done_element_by_element_is_what_one_process_does(shared_worlds, which):
    kind, options = ELEMENTWISE[which]
    for wrap in WRAPPERS.values():
        assert max(shared_worlds.run(gaps, kind, options, wrap)) < 1e-12


# Order


class Picks(nn.Module):
    def __init__(self, picks: tuple[int, ...]):
        super().__init__()
        self.layers, self.picks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), picks

    def forward(self, x):
        for k in self.picks:
            x = torch.tanh(self.layers[k](x))
        return x


def dropped(picks: list[list[tuple[int, ...]]]) -> int:
    """Runs this rank's picks pass by pass; returns how often this rank put names into the store."""
    wrapped, post, posts = FullyShardedDataParallel(Picks(())), orders.Order._post, []
    orders.Order._post = lambda *args: (posts.append(0), post(*args))[1]
    try:
        for of_ranks in picks:
            wrapped.module.picks = of_ranks[dist.get_rank() % len(of_ranks)]
            wrapped(torch.ones(2, 4)).sum().backward()
            wrapped.finish()
    finally:
        orders.Order._post = post
    return len(posts)


ALL, OTHERS = [(0, 1, 2)], [(0, 1), (0, 2)]


def test_ranks_compare_their_order_when_it_changes_and_not_again(shared_worlds):
    assert shared_worlds.run(dropped, [ALL, ALL, ALL]) == [2] * shared_worlds.size
    assert shared_worlds.run(dropped, [ALL, [(0, 2)], [(0, 2)], ALL]) == [6] * shared_worlds.size


@pytest.mark.parametrize("before", [[], [ALL, ALL]], ids=["at first", "later"])
def test_ranks_that_run_other_layers_all_hear_of_both(shared_world, before):
    with pytest.raises(mr.RankFailed) as failed:
        shared_world.run(dropped, [*before, OTHERS])
    assert all(f"rank {rank} runs 'layers.{1 + rank % 2}'" in str(failed.value) for rank in range(3))


# A model that changes under a ZeroOptimizer, and optimizers that can't be sharded


def changed(stage: int) -> dict[str, str]:
    def zero(change, dtype=torch.float64, before=lambda m: None):
        def call():
            own = model().to(dtype)
            before(own)
            optimizer = ZeroOptimizer(own.named_parameters(), torch.optim.AdamW, stage)
            for late in (lambda m: None, change):
                late(own)
                own(batch(0)).sum().backward()
                optimizer.step()

        return call

    def loads(own):
        own.load_state_dict({k: v + 1 for k, v in own.state_dict().items()})

    return said(
        {
            "cast": (zero(nn.Module.float), ""),
            "frozen": (zero(lambda m: m.first.weight.requires_grad_(False)), ""),
            "thawed": (
                zero(lambda m: m.first.weight.requires_grad_(), before=lambda m: m.first.weight.requires_grad_(False)),
                "",
            ),
            "loaded in 16 bits": (zero(loads, torch.bfloat16), ""),
            "loaded": (zero(loads), ""),
        }
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_that_changes_under_a_zero_optimizer_is_noticed(shared_world, stage):
    for found in shared_world.run(changed, stage):
        assert found.pop("loaded") == "nothing was raised"
        assert all("weight" in error or "scale" in error for error in found.values()), found


def whole_only() -> dict[str, str]:
    kinds = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "LBFGS": torch.optim.LBFGS, "Lamb": Lamb}
    makes = {name: (lambda kind=kind: ZeroOptimizer(model().parameters(), kind), "") for name, kind in kinds.items()}
    return said(makes)


def test_optimizers_that_look_at_whole_parameters_are_refused_before_a_message(shared_world):
    measured = shared_world.measure(whole_only)
    assert all(name in error for found in measured.results for name, error in found.items())
    assert set(measured.payload_bytes.values()) == {0}


def test_a_group_may_have_names_of_its_own_and_unknown_options_are_the_optimizer_s_to_refuse(shared_world):
    def both() -> str:
        ZeroOptimizer([{"params": model().parameters(), "whose": "all", "lr": 0.0}], torch.optim.AdamW)
        try:
            ZeroOptimizer(model().parameters(), torch.optim.AdamW, rate=1)
        except TypeError as error:
            return str(error)
        return ""

    assert all("rate" in error for error in shared_world.run(both))


def test_data_parallel_keeps_tensors_that_anyone_may_read(shared_world):
    assert all(shared_world.run(lambda: stepped(OverlappedDataParallel).module.first.weight.grad.norm().item() > 0))


class Late:
    """A gather that comes between the end of a wait and the look at it."""

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Wait timeout")
        return True

    def is_completed(self):
        return True


def test_a_gather_that_comes_just_after_the_timeout_has_come():
    order = object.__new__(orders.Order)
    order._waits = True
    assert order.wait(Late())
