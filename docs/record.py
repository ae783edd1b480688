"""Records on four real ranks what the page "Step by step" plays, and writes docs/play.json: python docs/record.py.

No clock is in it: the same program records the same again. `make gallery` runs it, and tests/ranks/test_play.py compares.
"""

import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import manyranks as mr
from manyranks.parallel import FullyShardedDataParallel
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.runtime import Pipeline

FILE = Path(__file__).with_name("play.json")
RANKS, MICROBATCHES, LAYERS = 4, 6, 3


def ring() -> list[list[float]]:
    """An all-reduce of numbers times 10 to the power of the rank; returns what this rank holds, before and after each round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(1.0, n + 1) * 10**rank
    held = [x.tolist()]
    for step in range(2 * n - 2):
        leaving, coming, got = (rank - step) % n, (rank - step - 1) % n, torch.empty(1)
        sent = dist.isend(x[leaving : leaving + 1].clone(), (rank + 1) % n)
        dist.recv(got, (rank - 1) % n)
        sent.wait()
        x[coming] = got + (x[coming] if step < n - 1 else 0)
        held.append(x.tolist())
    return held


def pipeline() -> list[tuple[str, int]]:
    """A step of 1F1B; returns this rank's actions in their order."""
    done, rank = [], dist.get_rank()

    @contextmanager
    def note(action):
        yield
        done.append((action.kind, action.microbatch))

    torch.manual_seed(rank)
    run = Pipeline({rank: nn.Linear(4, 4)}, schedules.one_f_one_b(RANKS, MICROBATCHES), loss=nn.functional.mse_loss, pace=note)
    run.step(torch.ones(MICROBATCHES, 4), torch.ones(MICROBATCHES, 4))
    return done


def fsdp() -> list[dict]:
    """The second step of FSDP (the first notes the order of the layers); returns each change of what this rank holds."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[dict] = []

    def look(does: str) -> None:
        now = {"does": does, "units": [_state(unit) for unit in model.units]}
        if not seen or now["units"] != seen[-1]["units"] or does:
            seen.append(now)

    def watched(method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments):
            method(*arguments)
            look("")

        return call

    def forward(k: int, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        look(f"F{k}")
        output.register_hook(lambda grad: look(f"B{k}"))

    for k, (unit, layer) in enumerate(zip(model.units, model.module, strict=True)):
        for name in ("start", "wait", "free", "reduce", "hand_over"):
            setattr(unit, name, watched(getattr(unit, name)))
        layer.register_forward_hook(lambda *given, k=k: forward(k, *given))
    for _ in range(2):
        seen.clear()
        look("")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        look("step")
    return seen


def _state(unit) -> list[int]:
    """Bytes of the whole parameters, 1 while they are on their way; of whole gradients, 1 while they leave; of the shard's."""
    whole = sum(w.grad.nbytes for w in unit.whole if w.grad is not None)
    own = sum(s.grad.nbytes for s in unit.shards if s.grad is not None)
    return [unit.row_E.untyped_storage().nbytes(), int(unit._gather is not None), whole, int(unit._reduction is not None), own]


def record() -> dict:
    """All three. Raises RuntimeError where a rank of FSDP does anything else than the others, for one is drawn for all."""
    with mr.World(RANKS) as world:
        moved = world.measure(ring)
        actions = world.run(pipeline)
        first, *others = world.run(fsdp)
    if any(other != first for other in others):
        raise RuntimeError("the ranks of FSDP don't do the same: record again, and look at what differs")
    found = {"ring": {"rounds": moved.rounds, "held": moved.results}, "pipeline": actions, "fsdp": first}
    return json.loads(json.dumps(found))  # tuples are lists there


if __name__ == "__main__":
    FILE.write_text(json.dumps(record()) + "\n", encoding="utf-8")
