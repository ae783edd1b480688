"""torch.compile of a model, of a part of it and of a wrapper, before and after it is wrapped: what one process learns."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import manyranks as mr
from manyranks.parallel import OverlappedDataParallel, ZeroOptimizer
from manyranks.parallel.tensor import Column, Row, parallelize
from tests.conftest import matrix

AdamW = partial(torch.optim.AdamW, lr=0.1)


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, x):
        return x + super().forward(x)


def made() -> nn.Sequential:
    """Its head is its embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), Block(), Block(), nn.Linear(6, 11, bias=False)).double()
    model[3].weight = model[0].weight
    return model


def parts(model: nn.Sequential, backend: Callable) -> None:
    for k in (1, 2):
        model[k] = torch.compile(model[k], backend=backend)


# What is compiled before it is wrapped, and after: the model, its wrapper or parts.
WHEN = {
    "the model before": (lambda model, wrapper, backend: model.compile(backend=backend), None),
    "the model after": (None, lambda model, wrapper, backend: model.compile(backend=backend)),
    "the wrapper": (None, lambda model, wrapper, backend: wrapper.compile(backend=backend)),
    "torch.compile of it": (None, lambda model, wrapper, backend: torch.compile(wrapper, backend=backend)),
    "parts before": (lambda model, wrapper, backend: parts(model, backend), None),
    "parts after": (None, lambda model, wrapper, backend: parts(model, backend)),
}


def ddp(model: nn.Module) -> tuple:
    wrapper = OverlappedDataParallel(model, bucket_bytes=500, broadcast_buffers=True)
    return wrapper, AdamW(wrapper.parameters())


def zero(stage: int, model: nn.Module) -> tuple:
    return model, ZeroOptimizer(model.parameters(), AdamW, stage, bucket_bytes=500)


def tensor(model: nn.Module) -> tuple:
    """Its first pass shows whose gradients are parts, which compiled code would hide."""
    table = {f"{k}.{place}": style for k in (1, 2) for place, style in ((1, Column()), (3, Row()))}
    wrapper = parallelize(model, None, table, example=torch.arange(10)[None])
    return wrapper, AdamW(wrapper.parameters())


WRAPPERS = {"DDP": ddp, "tensor": tensor, "ZeRO-1": partial(zero, 1), "ZeRO-2": partial(zero, 2)}


KEPT = [
    ("DDP", "the model before"),
    ("DDP", "the wrapper"),
    ("DDP", "parts after"),
    ("tensor", "the model before"),
    ("tensor", "the wrapper"),
]


def learnt(model: nn.Module, optimizer, share: bool = True) -> None:
    """share: a rank's own rows; with a pass without gradients between steps."""
    for step in range(3):
        torch.manual_seed(step)
        tokens_BT = torch.randint(11, (12, 6))
        tokens_BT = tokens_BT.chunk(dist.get_world_size())[dist.get_rank()] if share else tokens_BT
        optimizer.zero_grad()
        cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        getattr(model, "finish", lambda: None)()
        optimizer.step()
        with torch.no_grad():
            model(tokens_BT)


def gap(wrap: str, when: str) -> tuple[float, int]:
    """How far parameters are from one process's; how many products the graphs have."""
    torch._dynamo.reset()
    alone, model, graphs = made(), made(), []
    learnt(alone, AdamW(alone.parameters()), share=False)

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph

    before, after = WHEN[when]
    if before:
        before(model, None, backend)
    wrapper, optimizer = WRAPPERS[wrap](model)
    compiled = after(model, wrapper, backend) if after else None
    learnt(wrapper if compiled is None else compiled, optimizer, share=wrap != "tensor")
    products = sum(node.target is torch._C._nn.linear for graph in graphs for node in graph.graph.nodes)
    whole = getattr(wrapper, "full_state_dict", model.state_dict)()
    whole = {name.replace("_orig_mod.", ""): x for name, x in whole.items()}
    return max((whole[name] - p).abs().max().item() for name, p in alone.named_parameters()), products


@pytest.mark.parametrize("shared_worlds", matrix([2, 3], [2]), indirect=True, scope="module")
@pytest.mark.parametrize(("wrap", "when"), matrix(product(WRAPPERS, WHEN), KEPT))
def test_a_compiled_model_learns_what_one_process_learns(shared_worlds, wrap, when):
    if wrap == "tensor" and when.startswith("parts"):  # a table has the names that parts have without it
        with pytest.raises(mr.RankFailed, match="matches no module" if when == "parts before" else r"call part\.compile\(\)"):
            shared_worlds.run(gap, wrap, when)
        return
    for off, products in shared_worlds.run(gap, wrap, when):
        assert off < 1e-12
        assert products >= 4  # those of both blocks
