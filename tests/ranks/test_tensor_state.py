"""parallel.tensor.state: what t ranks save any other number goes on with, as if one process had never stopped."""

import warnings
from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from manyranks.parallel.tensor import Column, Row, parallelize
from manyranks.parallel.tensor.state import full_state_dict, tensor_state
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from manyranks.training.tensor_styles import styles
from tests.ranks.test_tensor import random

SIZES = {"layers": 1, "hidden": 24, "heads": 12, "ffn": 24, "vocab": 10, "seq": 12}  # 10 tokens: uneven on 3 and on 4 ranks
MODELS = {
    "llama, tied, 1 key/value head": GPTConfig(**SIZES, kv_heads=1),  # on each of t ranks
    "llama, 2 key/value heads": GPTConfig(**SIZES, kv_heads=2, tied=False),  # on 4 ranks two copies of each
    "gpt2, untied": GPTConfig(**SIZES, style="gpt2", tied=False),
}


class Mixed(nn.Module):
    """Two parts in one matrix cut by rows, one cut by columns with a whole bias, one that is frozen and whole, a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(13, 24), nn.Linear(12, 10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, tokens_BS):
        self.passes += 1
        gate, up = self.up(nn.functional.one_hot(tokens_BS, 13).double()).chunk(2, -1)
        return self.down(gate.tanh() * up) * self.frozen


MIXED = {"up": Column(parts=2), "down": Row()}
STEPS = 2  # between two changes of t


def made(kind: str, seed: int = 0) -> nn.Module:
    """seed: 0, or of other weights, which a state replaces."""
    model = GPT(MODELS[kind]).double() if kind in MODELS else Mixed().double()
    for k, value in enumerate(model.state_dict().values()):
        value.copy_(random(*value.shape, seed=k) / 4 + seed)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(10, (2, 13), generator=torch.Generator().manual_seed(step))
        of = model.loss if getattr(model, "vocabulary", None) else loss
        of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        getattr(model, "finish", lambda: None)()
        optimizer.step()


@cache
def uninterrupted(kind: str, steps: int) -> dict:
    """In one process, without tensor parallelism."""
    model = made(kind)
    train(model, optimizer_of(model), range(steps))
    return model.state_dict()


def cut(kind: str, seed: int = 0, ranks: tuple[int, int] | None = None):
    mesh = ranks and init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    return parallelize(made(kind, seed), mesh, styles(MODELS[kind]) if kind in MODELS else MIXED)


def gap(state: dict, other: dict) -> float:
    """The largest difference of any number; names and order must be the same."""
    assert list(state) == list(other)
    assert all(state[k].shape == other[k].shape for k in state)
    return max((state[k] - other[k]).abs().max().item() for k in state)


def goes_on(folder: str, kind: str, ranks: tuple[int, int] | None, steps: range) -> dict:
    """Trains from where a checkpoint of another t left it, and writes the next one; the whole weights."""
    model = cut(kind, seed=7 * (steps.start > 0), ranks=ranks)
    state = tensor_state(model.module, model.cuts, optimizer := optimizer_of(model), model.group)  # before the first step, too
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        if steps.start:
            dcp.load(state, checkpoint_id=f"{folder}/{steps.start}")
        train(model, optimizer, steps)
        optimizer.state[next(model.parameters())]["note"] = "of an optimizer of one's own"
        state = tensor_state(model.module, model.cuts, optimizer, model.group)
        dcp.save(state, checkpoint_id=f"{folder}/{steps.stop}")
    return model.full_state_dict()


def on(sizes, ranks: tuple[int, int] | None, function, *args) -> list:
    """Each rank's result; None: in this process, which has no torch.distributed."""
    return sizes[ranks[0] * ranks[1]].run(function, *args) if ranks else [function(*args)]


CHAINS = {  # dp × tp: two pairs of ranks hold the same, as data parallelism beside tensor parallelism does
    "llama, tied, 1 key/value head": (None, (1, 2), (1, 4), (1, 3), (2, 2), None),
    "llama, 2 key/value heads": ((1, 2), (1, 4), None, (1, 4), (2, 2)),
    "gpt2, untied": ((1, 3), (1, 4), (1, 2), None, (1, 3)),
    "mixed": ((1, 3), (1, 4), (1, 2), None),
}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.few(2)
def test_checkpoints_of_shards_go_from_t_to_t_and_training_goes_on(sizes, tmp_path, kind):
    for k, ranks in enumerate(CHAINS[kind]):
        steps = range(k * STEPS, (k + 1) * STEPS)
        for found in on(sizes, ranks, goes_on, str(tmp_path), kind, ranks, steps):
            assert gap(found, uninterrupted(kind, steps.stop)) < 1e-10, ranks


def there_and_back(kind: str, before: dict) -> list[float]:
    """A whole state, and what is written over it afterwards; tied weights are one tensor."""
    model = cut(kind, seed=7)
    model.load_full_state_dict(before)
    state = model.full_state_dict()
    assert not any(value.requires_grad for value in state.values())
    copies = {name: value.clone() for name, value in state.items()}
    for value in model.module.state_dict().values():
        value.add_(1)
    tied = ", tied" not in kind or state["embedding.tokens.weight"] is state["head.projection.weight"]
    return [gap(copies, before), gap(state, before), 0.0 if tied else 1.0]


@pytest.mark.parametrize("kind", CHAINS)
def test_a_whole_state_is_one_process_s_bit_for_bit_and_comes_back_so(sizes, kind):
    before = uninterrupted(kind, STEPS)
    for t in (2, 4):
        assert sizes[t].run(there_and_back, kind, before) == [[0.0] * 3] * t
    assert there_and_back(kind, before) == [0.0] * 3  # and copies are copies where nothing is cut


def test_tied_weights_are_gathered_once(sizes):
    kind = "llama, tied, 1 key/value head"
    before, after = (sizes[2].measure(cut_and, kind, whole).calls for whole in (False, True))
    # query, key, value, output, gate, up, down of a layer, and the embedding
    assert [len(after[r]) - len(before[r]) for r in range(2)] == [7 + 1] * 2


def cut_and(kind: str, whole: bool) -> None:
    model = cut(kind)
    if whole:
        full_state_dict(model.module, model.cuts, model.group)


def test_a_checkpoint_holds_each_element_once_without_padding_and_copies(sizes, tmp_path):
    kind = "llama, 2 key/value heads"

    def save():
        model = cut(kind)
        state = tensor_state(model.module, model.cuts, optimizer_of(model), model.group)
        assert sum(isinstance(v, DTensor) for v in state["model"].values()) == 7 + 2
        dcp.save(state, checkpoint_id=str(tmp_path))
        return state["model"]["embedding.tokens.weight"].to_local().shape

    assert sizes[4].run(save) == [(3, 24), (3, 24), (3, 24), (1, 24)]
    found = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    for name, value in made(kind).state_dict().items():
        for stored in (found[f"model.{name}"], found[f"optimizer.{name} exp_avg"]):
            assert stored.size == value.shape
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == value.numel(), name
    assert len(found["model.layers.0.attention.key.weight"].chunks) == 2
    assert len(found["model.head.projection.weight"].chunks) == 4
