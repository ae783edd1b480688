"""parallel.tensor.state: what t ranks save any other number goes on with, as if one process had never stopped."""

import contextlib
import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from manyranks.parallel.tensor import Column, TensorParallel, cuts, parallelize
from manyranks.parallel.tensor.cuts import rank, size
from manyranks.parallel.tensor.layers import ColumnParallelLinear, How, RowParallelLinear
from manyranks.parallel.tensor.state import (
    full_state_dict,
    load_full_state_dict,
    tensor_state,
)
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from manyranks.training.tensor_styles import styles

SIZES = {"layers": 1, "hidden": 24, "heads": 12, "ffn": 24, "vocab": 10, "seq": 12}  # 10 tokens: uneven on 3 and on 4 ranks
MODELS = {
    "llama, tied, 1 key/value head": GPTConfig(**SIZES, kv_heads=1),  # on each of t ranks
    "llama, 2 key/value heads": GPTConfig(**SIZES, kv_heads=2, tied=False),  # on 4 ranks two copies of each
    "gpt2, untied": GPTConfig(**SIZES, style="gpt2", tied=False),
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
STEPS = 2  # between two changes of t


def gap(state: dict, other: dict) -> float:
    """The largest difference of any number; names and order must be the same."""
    assert list(state) == list(other)
    assert all(state[k].shape == other[k].shape for k in state)
    return max((state[k] - other[k]).abs().max().item() for k in state)


def built(kind: str, optimizer: str, seed: int = 0, sequence_parallel: bool = False):
    """On as many ranks as there are; also in a process without torch.distributed."""
    config, (make, options) = MODELS[kind], OPTIMIZERS[optimizer]
    model = parallelize(GPT(config, seed).double(), None, styles(config), sequence_parallel=sequence_parallel)
    return model, make(model.parameters(), **options)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(10, (2, 13), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x_BS, targets_BS = tokens(step)[:, :-1], tokens(step)[:, 1:]
        of = model.loss if isinstance(model, TensorParallel) else loss
        of(model(x_BS), targets_BS).backward()
        if isinstance(model, TensorParallel):
            model.finish()
        optimizer.step()


@cache
def uninterrupted(kind: str, optimizer: str, steps: int) -> dict:
    """The GPT as it is, in one process."""
    make, options = OPTIMIZERS[optimizer]
    model = GPT(MODELS[kind]).double()
    stepper = make(model.parameters(), **options)
    train(model, stepper, range(steps))
    return model.state_dict()


def saved(model: TensorParallel) -> dict:
    return full_state_dict(model.module, model.cuts, model.group)


def by_whole_tensors(state: dict, *how, steps: range, sequence_parallel: bool) -> dict:
    """Goes on from a state at another t, and gives the next one. Optimizers have nothing to go on from."""
    model, optimizer = built(*how, seed=77, sequence_parallel=sequence_parallel)
    load_full_state_dict(model.module, state, model.cuts)
    train(model, optimizer, steps)
    return saved(model)


def by_checkpoint(folder: str, *how, steps: range, sequence_parallel: bool) -> dict:
    """As by_whole_tensors, by folders that torch.distributed.checkpoint reads and writes."""
    model, optimizer = built(*how, seed=0 if steps.start == 0 else 77, sequence_parallel=sequence_parallel)
    state = tensor_state(model.module, model.cuts, optimizer, model.group)
    with alone_allowed():
        if steps.start:
            dcp.load(state, checkpoint_id=f"{folder}/{steps.start}")
        train(model, optimizer, steps)
        dcp.save(tensor_state(model.module, model.cuts, optimizer, model.group), checkpoint_id=f"{folder}/{steps.stop}")
    return saved(model)


@contextlib.contextmanager
def alone_allowed():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


def on(sizes, t: int, function, *args, **kwargs) -> list:
    """Each rank's result; t=1: in this process, which has no torch.distributed."""
    return [function(*args, **kwargs)] if t == 1 else sizes[t].run(function, *args, **kwargs)


CHAINS = [
    ("llama, tied, 1 key/value head", (1, 2, 4, 3, 1)),
    ("llama, 2 key/value heads", (2, 4, 1, 4)),
    ("gpt2, untied", (3, 4, 2, 1, 3)),
]


@pytest.mark.parametrize(("kind", "chain", "sequence_parallel"), [(*CHAINS[0], True), (*CHAINS[1], False), (*CHAINS[2], True)])
@pytest.mark.few(1)
def test_whole_states_go_from_t_to_t_and_training_goes_on(sizes, kind, chain, sequence_parallel):
    state = saved(built(kind, "plain SGD")[0])
    for k, t in enumerate(chain):
        steps = range(k * STEPS, (k + 1) * STEPS)
        found = on(sizes, t, by_whole_tensors, state, kind, "plain SGD", steps=steps, sequence_parallel=sequence_parallel)
        state = found[0]
        assert all(gap(other, state) == 0 for other in found), "the ranks have different wholes"
        assert gap(state, uninterrupted(kind, "plain SGD", steps.stop)) < 1e-12, t


@pytest.mark.parametrize(("kind", "chain", "optimizer"), [(*CHAINS[0], "AdamW"), (*CHAINS[1], "AdamW"), (*CHAINS[2], "SGD")])
@pytest.mark.few(1)
def test_checkpoints_of_shards_go_from_t_to_t_and_training_goes_on(sizes, tmp_path, kind, chain, optimizer):
    for k, t in enumerate(chain):
        steps = range(k * STEPS, (k + 1) * STEPS)
        found = on(sizes, t, by_checkpoint, str(tmp_path), kind, optimizer, steps=steps, sequence_parallel=False)
        assert gap(found[0], uninterrupted(kind, optimizer, steps.stop)) < 1e-10, t


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("t", [2, 4])
def test_a_whole_state_is_one_process_s_bit_for_bit_and_comes_back_so(sizes, kind, t):
    before = uninterrupted(kind, "AdamW", STEPS)

    def there_and_back():
        model, _ = built(kind, "AdamW", seed=5)
        load_full_state_dict(model.module, before, model.cuts)
        return gap(saved(model), before)

    assert sizes[t].run(there_and_back) == [0.0] * t


def test_tied_weights_are_gathered_once_and_are_one_tensor(sizes):
    def one():
        model, _ = built("llama, tied, 1 key/value head", "SGD")
        state = full_state_dict(model.module, model.cuts, model.group)
        return state["embedding.tokens.weight"] is state["head.projection.weight"]

    m = sizes[2].measure(one)
    cut = 7 + 1  # query, key, value, output, gate, up, down of a layer, and the embedding
    assert all(m.results)
    assert [len(m.calls[r]) for r in range(2)] == [cut] * 2


def test_whole_tensors_are_copies(sizes):
    def shares():
        model, optimizer = built("llama, tied, 1 key/value head", "AdamW")
        train(model, optimizer, range(1))
        state = saved(model)
        assert not any(v.requires_grad for v in state.values())
        before = {k: v.clone() for k, v in state.items()}
        train(model, optimizer, range(1, 3))
        return all(torch.equal(before[k], v) for k, v in state.items())

    assert all(sizes[2].run(shares))
    assert shares()


def test_a_checkpoint_holds_each_element_once_without_padding_and_copies(sizes, tmp_path):
    kind = "llama, 2 key/value heads"

    def save():
        model, optimizer = built(kind, "SGD")
        state = tensor_state(model.module, model.cuts, optimizer, model.group)
        assert sum(isinstance(v, DTensor) for v in state["model"].values()) == 7 + 2
        dcp.save(state, checkpoint_id=str(tmp_path))
        return state["model"]["embedding.tokens.weight"].to_local().shape

    assert sizes[4].run(save) == [(3, 24), (3, 24), (3, 24), (1, 24)]
    found = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    whole = GPT(MODELS[kind]).state_dict()
    for name, value in whole.items():
        for stored in (found[f"model.{name}"], found[f"optimizer.{name} momentum_buffer"]):
            assert stored.size == value.shape
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == value.numel(), name
    assert len(found["model.layers.0.attention.key.weight"].chunks) == 2
    assert len(found["model.head.projection.weight"].chunks) == 4


def test_a_checkpoint_before_the_first_step_changes_nothing(sizes, tmp_path):
    def both():
        state, plain = built("gpt2, untied", "AdamW"), built("gpt2, untied", "AdamW")
        dcp.save(tensor_state(state[0].module, state[0].cuts, state[1]), checkpoint_id=str(tmp_path))
        train(*state, range(2))
        train(*plain, range(2))
        return all(torch.equal(a, b) for a, b in zip(state[0].parameters(), plain[0].parameters(), strict=True))

    assert all(sizes[3].run(both))


# A model that is not the GPT.


class Mixed(nn.Module):
    """Two parts in one matrix cut by rows, one cut by columns with a whole bias, one that is frozen and whole, a buffer."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(5, 24).double(), nn.Linear(12, 5).double()
        self.frozen = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.passes += 1
        gate, up = self.up(x).chunk(2, -1)
        return self.down(gate.tanh() * up) + self.frozen

    def cut(self) -> dict[str, cuts.Cut]:
        t, place = size(None), rank(None)
        rows, columns = Column(parts=2).cut(24, t, place, ""), cuts.equal(12, t, place, dim=1)
        self.up, self.down = ColumnParallelLinear.of(self.up, How(), rows), RowParallelLinear.of(self.down, How())
        return {"up.weight": rows, "up.bias": rows, "down.weight": columns}


def mixed(steps: range, state: dict | None = None, whole: bool = False) -> dict:
    """whole: nn's own layers."""
    model = Mixed(0 if state is None else 1)
    of = {} if whole else model.cut()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if state is not None:
        load_full_state_dict(model, state, of)
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((3, 5), step / 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    return full_state_dict(model, of)


def test_parts_frozen_parameters_and_buffers_go_along(sizes):
    state = mixed(range(2))
    for k, t in enumerate((3, 4, 2)):
        state = sizes[t].run(mixed, range(2 + 2 * k, 4 + 2 * k), state)[0]
    assert gap(state, mixed(range(8), whole=True)) < 1e-12
    assert state["passes"] == 8


def test_a_buffer_s_copy_stays_as_it_was():
    model = Mixed(0)
    state = full_state_dict(model, {})
    model(torch.ones(1, 5, dtype=torch.float64))
    assert (state["passes"], model.passes) == (0, 1)


def test_a_checkpoint_has_frozen_parameters_and_buffers_and_leaves_out_what_is_no_tensor(sizes, tmp_path):
    def save():
        model = Mixed(0)
        of = model.cut()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.state[model.down.bias]["note"] = "of an optimizer of one's own"
        dcp.save(tensor_state(model, of, optimizer), checkpoint_id=str(tmp_path))
        return full_state_dict(model, of)

    def load():
        model = Mixed(1)
        of = model.cut()
        with alone_allowed():
            dcp.load(tensor_state(model, of), checkpoint_id=str(tmp_path))
        return full_state_dict(model, of)

    written = sizes[3].run(save)[0]
    assert written["passes"] == 1
    for t in (1, 2, 4):
        for read in on(sizes, t, load):
            assert read.keys() == written.keys()
            assert all(torch.equal(read[k], written[k]) for k in written)


def test_a_state_of_other_sizes_is_an_error(sizes):
    def refused():
        model = Mixed(0)
        of = model.cut()
        state = Mixed(0).state_dict()
        with pytest.raises(ValueError, match=r"up.weight has shape \(12, 5\), and this model's has \(24, 5\)"):
            load_full_state_dict(model, state | {"up.weight": torch.zeros(12, 5)}, of)
        # What a rank has of it is no whole state.
        with pytest.raises(ValueError, match=r"up.weight has shape \(8, 5\), and this model's has \(24, 5\)"):
            load_full_state_dict(model, model.state_dict(), of)
        with pytest.raises(RuntimeError, match=r"Missing key.*up.bias"):
            load_full_state_dict(model, {k: v for k, v in state.items() if k != "up.bias"}, of)

    sizes[3].run(refused)


def test_an_optimizer_that_is_not_elementwise_is_refused(sizes):
    def refused():
        model = Mixed(0)
        of = model.cut()
        optimizer = torch.optim.Adafactor(model.parameters())
        model.up.weight.grad = torch.ones_like(model.up.weight)
        optimizer.step()
        with pytest.raises(ValueError, match=r"an optimizer's state of shape .* use an elementwise optimizer"):
            tensor_state(model, of, optimizer)

    sizes[2].run(refused)


def test_a_group_that_is_not_the_whole_world_has_its_own_states(sizes, tmp_path):
    """Two pairs of ranks train the same model on 4 ranks, as data parallelism beside tensor parallelism does."""

    def pairs():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        config = MODELS["llama, 2 key/value heads"]
        model = parallelize(GPT(config).double(), mesh, styles(config))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        train(model, optimizer, range(STEPS))
        dcp.save(tensor_state(model.module, model.cuts, optimizer, model.group), checkpoint_id=f"{tmp_path}/{STEPS}")
        return saved(model)

    expected = uninterrupted("llama, 2 key/value heads", "AdamW", STEPS)
    assert all(gap(found, expected) < 1e-10 for found in sizes[4].run(pairs))
    next_steps = range(STEPS, STEPS + 1)
    found = on(
        sizes, 1, by_checkpoint, str(tmp_path), "llama, 2 key/value heads", "AdamW", steps=next_steps, sequence_parallel=False
    )
    assert gap(found[0], uninterrupted("llama, 2 key/value heads", "AdamW", STEPS + 1)) < 1e-10
