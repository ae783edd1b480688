"""PyTorch's clipping refuses gradients that are spread over ranks, before it changes any, and still clips all others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_  # as a program has it that imports it before this library

from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.shard import local
from manyranks.parallel.tensor import Column, Row, parallelize
from manyranks.parallel.zero import Zero3, ZeroOptimizer
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def stepped(model: nn.Module, whole: nn.Module | None = None) -> list[nn.Parameter]:
    """After a backward, with large gradients, and what the wrapper does in the end."""
    (1000 * model(torch.ones(2, 3, 6))).sum().backward()
    getattr(model, "finish", int)()
    return list((whole or model).parameters())


def zero(stage: int):
    optimizer = ZeroOptimizer((model := mlp()).parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    return stepped(model), optimizer.clip_grad_norm_


def wrapped(wrap):
    model = wrap(mlp())
    return stepped(model), model.clip_grad_norm_


def experts():
    model = ExpertParallel(GPT(GPTConfig(layers=1, hidden=12, heads=2, seq=6, experts=6)))
    model(torch.ones(2, 6, dtype=torch.long)).sum().backward()
    model.finish()
    return list(model.parameters()), model.clip_grad_norm_


CASES = {
    "ZeroOptimizer": [lambda: zero(1), lambda: zero(2)],
    "this rank's part": [lambda: wrapped(Zero3), lambda: wrapped(FullyShardedDataParallel)],
    "TensorParallel": [lambda: wrapped(lambda model: parallelize(model, None, {"0": Column(), "2": Row()}))],
    "ExpertParallel": [experts],
}


def refusals() -> list[str]:
    found = []
    for whose, makers in CASES.items():
        for make in makers:
            parameters, clip = make()
            before = [p.grad.clone() for p in parameters if p.grad is not None]
            try:
                clip_grad_norm_(parameters, 1.0)
                found.append(f"{whose}: PyTorch's clips")
            except ValueError as error:
                found += [f"{error}"] * (whose not in f"{error}" or "call " not in f"{error}")
            found += ["changed"] * (
                not all(map(torch.equal, map(local, before), [local(p.grad) for p in parameters if p.grad is not None]))
            )
            assert clip(1.0) > 10
    return found


def test_it_is_refused_and_says_what_to_call(shared_world):
    assert shared_world.run(refusals) == [[]] * 3


def test_whole_gradients_are_clipped_as_before(shared_world):
    def norms() -> tuple[float, float]:
        parameters = stepped(mlp())
        dist.barrier()
        return clip_grad_norm_(iter(parameters), 1.0).item(), clip_grad_norm_(parameters[0], 1.0).item()

    for first, second in shared_world.run(norms):
        assert first > 1 > second > 0


def test_units_that_a_part_of_the_ranks_share_are_clipped_by_the_norm_of_one_copy(shared_world):
    def norms():
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
        own = pairs[dist.get_rank() == 2]
        model = FullyShardedDataParallel(mlp(), shared_by=lambda parameter: own)
        stepped(model)
        whole = mlp()
        (1000 * whole(torch.ones(2, 3, 6))).sum().backward()
        return model.clip_grad_norm_(1.0).item(), clip_grad_norm_(whole.parameters(), 1.0).item()

    for ours, alone in shared_world.run(norms):
        assert abs(ours - alone) < 1e-3 * alone
