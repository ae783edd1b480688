"""A product, a layer and a step on this machine: FLOPs counted and seconds measured, under the machine's own roof."""

import torch

from manyranks.few_ranks.ranks import OnRanks
from manyranks.measure import machine, timing
from manyranks.measure.compared import Compared, SmallRun
from manyranks.measure.flops import WorkCounter
from manyranks.theory import flops
from manyranks.theory.architecture import ModelShape
from manyranks.theory.roofline import Roof
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT

_CONFIG = GPTConfig(layers=2, hidden=256, heads=8, ffn=704, seq=256)
_REPEATS, _MOST = 5, 4  # sequences


@OnRanks
def mfu(values, ranks, say):
    """A rank in float32: FLOPs of theory and of a counter, seconds next to those that the machine's roof allows, and the roof.

    A linear layer's product forward, a layer and a step of the course's GPT in both directions; micro-batches of 4 at most.
    """
    sequences = min(_MOST, values["microbatch"])
    say(0.2, "this machine's best product, and its memory")
    rank = ranks(1)
    peak, bandwidth = rank.run(_roof)[0]
    say(0.5, "a product, a layer and a step")
    measured, c = rank.run(_measured, sequences)[0], _CONFIG
    roof = Roof(max(peak, *(counted / seconds for counted, _, seconds in measured.values())), bandwidth)
    shape = ModelShape("measured", c.layers, c.hidden, c.ffn, c.heads, c.vocab, tied=True)
    tokens, one = sequences * c.seq, flops.forward(shape, c.seq)
    again = one.core / 2  # flash attention's backward computes QKᵀ once more
    theory = {"product": 2 * tokens * c.hidden * c.ffn, "layer": tokens * (3 * one.layers + again) / c.layers}
    theory |= {"step": tokens * (3 * (one.layers + one.head) + again)}
    rows, points = [], []
    for name, (counted, moved, seconds) in measured.items():
        rows.append(Compared(f"{name}: FLOPs", theory[name], counted, "flops"))
        rows.append(Compared(f"{name}: time (theory: the roof's)", roof.seconds(counted, moved), seconds, "seconds"))
        points.append((name, counted / moved, counted / seconds))
    used = tokens * flops.per_token(shape, c.seq) / measured["step"][2] / roof.peak
    what = f"{sequences} × {c.seq} tokens, h = {c.hidden}, float32: MFU of the step {used:.0%}"
    return SmallRun(f"one rank of this machine, {what}", tuple(rows), (roof.peak, roof.bandwidth), tuple(points))


def _roof() -> tuple[float, float]:
    return machine.peak(), machine.memory_bandwidth(2**25)


def _measured(sequences: int) -> dict[str, tuple[float, float, float]]:
    """Returns FLOPs, bytes and seconds of each."""
    model, c = GPT(_CONFIG), _CONFIG
    tokens = torch.randint(c.vocab, (sequences, c.seq))
    x = torch.randn(sequences, c.seq, c.hidden, requires_grad=True)
    first, second = torch.randn(sequences * c.seq, c.hidden), torch.randn(c.hidden, c.ffn)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    runs = {"product": lambda: first @ second, "layer": lambda: model.layers[0](x).sum().backward(), "step": step}
    found = {}
    for name, run in runs.items():
        run()  # what is made once isn't counted
        with WorkCounter() as work:
            run()
        found[name] = work.flops, work.bytes, min(timing.seconds(run, repeats=_REPEATS).all)
    return found
