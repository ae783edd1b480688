"""Tensor parallelism on a few ranks: what a rank sends for a layer, and what the layer keeps on it."""

import torch

from manyranks.few_ranks.ranks import OnRanks, bytes_sent, few
from manyranks.measure.compared import Compared, SmallRun
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import parallelize
from manyranks.theory import Plan
from manyranks.theory import tensor as theory
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import Layer
from manyranks.training.tensor_styles import styles_of

_CONFIG, _SEQUENCES = GPTConfig(style="gpt2", dropout=0.1), 4
_kept: dict = {}  # on a rank: its part of a layer


@OnRanks
def tensor(values, ranks, say):
    """Cuts a small GPT-2 layer, whose kept bytes PyTorch counts as theory does, over 2 or 4 ranks, in bfloat16."""
    how = {"sequence_parallel": values["sequence_parallel"]}
    t, shape, tokens = few(values["tp"], most=_CONFIG.heads), _CONFIG.shape(), _SEQUENCES * _CONFIG.seq
    world = ranks(t)
    say(0.3, f"{t} ranks cut a layer")
    world.run(_cut, how)
    say(0.5, "forward and backward")
    counted = world.measure(_there_and_back, how)
    sent = max(bytes_sent(counted).values())
    say(0.8, "what is kept")
    plan = Plan(tp=t, seq=_CONFIG.seq, microbatch=_SEQUENCES, flash=False, recompute="none", **how)
    kept = theory.saved(shape, plan, itemsize=2).total + _CONFIG.seq**2  # and the causal mask
    rows = (
        Compared("a rank sends", theory.layer(tokens, shape.hidden, t, **how).both.bytes, sent),
        Compared("a layer keeps, per rank", kept, max(world.run(_saved, how))),
    )
    where = f"a small GPT-2 layer on {t} ranks of this machine, in 16 bits, {tokens} tokens, nothing recomputed"
    return SmallRun(where, rows)


def _cut(how: dict) -> None:
    torch.manual_seed(0)
    _kept["layer"] = parallelize(Layer(_CONFIG).bfloat16(), None, styles_of(_CONFIG, "layers.*"), **how)


def _input(how: dict) -> torch.Tensor:
    own = _CONFIG.seq // torch.distributed.get_world_size() if how["sequence_parallel"] else _CONFIG.seq
    return torch.randn(_SEQUENCES, own, _CONFIG.hidden, dtype=torch.bfloat16, requires_grad=True)


def _there_and_back(how: dict) -> None:
    _kept["layer"](_input(how)).sum().backward()


def _saved(how: dict) -> int:
    """Bytes that the layer keeps for backward."""
    return saved_bytes(_kept["layer"], _input(how))
