"""Tensor parallelism on a few ranks: what a rank sends in a step, and what a layer keeps on it."""

import torch

from manyranks.measure.beside import Beside, Small
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import parallelize
from manyranks.small.ranks import OnRanks, few
from manyranks.theory import Plan
from manyranks.theory import tensor as theory
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, Layer
from manyranks.training.tensor_styles import styles, styles_of

_CONFIG, _SEQUENCES = GPTConfig(style="gpt2", dropout=0.1), 4
_kept: dict = {}  # on a rank: its part of the model


@OnRanks
def tensor(values, ranks, say):
    """The course's GPT, cut over 2 or 4 ranks in float32: bytes on the socket of a step, and what a layer keeps in bfloat16."""
    how = {name: values[name] for name in ("sequence_parallel", "regather")}
    t, shape, tokens = few(values["tp"], most=_CONFIG.heads), _CONFIG.shape(), _SEQUENCES * _CONFIG.seq
    world = ranks(t)
    say(0.3, f"{t} ranks cut {shape.parameters:,} parameters")
    world.run(_cut, how)
    say(0.5, "a step")
    counted = world.measure(_step)
    sent = max((counted.sent_bytes or counted.payload_bytes).values())
    messages = theory.model(shape, tokens, t, **how, itemsize=4).both + theory.finish(shape, t, how["sequence_parallel"], 4)
    say(0.8, "a layer")
    plan = Plan(tp=t, seq=_CONFIG.seq, microbatch=_SEQUENCES, flash=False, recompute="none", **how)
    kept = theory.saved(shape, plan, itemsize=2).total + _CONFIG.seq**2  # and the causal mask
    rows = (
        Beside("sent by a rank in a step", messages.bytes, sent),
        Beside("kept by a layer, a rank", kept, max(world.run(_layer, how))),
    )
    return Small(f"{t} ranks of this machine, {shape.parameters:,} parameters, {tokens} tokens", rows)


def _cut(how: dict) -> None:
    torch.manual_seed(0)
    _kept["model"] = parallelize(GPT(_CONFIG), None, styles(_CONFIG), **how)


def _step() -> None:
    tokens = torch.arange(_SEQUENCES * (_CONFIG.seq + 1)).remainder(_CONFIG.vocab).view(_SEQUENCES, -1)
    model = _kept["model"]
    model.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    model.finish()


def _layer(how: dict) -> int:
    """Bytes that one layer keeps for backward."""
    layer = parallelize(Layer(_CONFIG).bfloat16(), None, styles_of(_CONFIG, "layers.*"), **how)
    own = _CONFIG.seq // torch.distributed.get_world_size() if how["sequence_parallel"] else _CONFIG.seq
    x = torch.randn(_SEQUENCES, own, _CONFIG.hidden, dtype=torch.bfloat16, requires_grad=True)
    return saved_bytes(layer, x)
