"""Models that nobody here wrote, in every wrapper, in situations of every day, on 2 and 3 ranks: each trains as in one process.

Not all of these hundreds of rows, but so many that each two values meet. One process runs each rank's micro-batches
alone and takes the mean of their gradients.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib.resources import files
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import FullyShardedDataParallel, OverlappedDataParallel, Zero3, ZeroOptimizer, checkpoint_modules
from manyranks.parallel.expert import take_over
from manyranks.parallel.tensor import parallelize_transformers
from tests.conftest import matrix
from tests.notebooks.pages import OWN, code
from tests.ranks.families import FAMILIES, loss_of, made

pytest.importorskip("transformers")
ADAM = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-5}  # eps: far above a gradient that is 0 but for rounding, as keys' biases'
STEPS = 3


class Training(NamedTuple):
    """A model with its optimizer, and what its wrapper asks for around a backward pass."""

    model: Callable
    optimizer: object
    no_sync: Callable = nullcontext
    finish: Callable = lambda: None


def zero(module: nn.Module, layers: list[nn.Module], stage: int) -> Training:
    return Training(module, ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage, **ADAM))


def wrapped(wrap: Callable, module: nn.Module, layers: list[nn.Module]) -> Training:
    model = wrap(module, layers)
    return Training(model, torch.optim.AdamW(model.parameters(), **ADAM), model.no_sync, model.finish)


WRAPPERS = {
    "DDP": partial(wrapped, lambda module, layers: OverlappedDataParallel(module)),
    "ZeRO-1": partial(zero, stage=1),
    "ZeRO-2": partial(zero, stage=2),
    "ZeRO-3": partial(wrapped, lambda module, layers: Zero3(module)),
    "FSDP": partial(wrapped, lambda module, layers: FullyShardedDataParallel(module)),
    "FSDP by layers": partial(wrapped, lambda module, layers: FullyShardedDataParallel(module, units=layers)),
}
SMALL = ("torch.nn", "outside", "unused")
COMPILED = (*SMALL, "GPT-2", "OPT", "BART", "BERT", "ViT")
SITUATIONS = ("plain", "accumulated", "scaled", "compiled", "compiled later", "checkpointed", "evaluated", "frozen")


class Row(NamedTuple):
    family: str
    wrapper: str
    situation: str
    ranks: int


def prepared(row: Row, alone: bool = False) -> tuple[nn.Module, list[nn.Module]]:
    """The model before it's wrapped, and its layers."""
    family, module = FAMILIES[row.family], made(row.family)
    part, layers = module.get_submodule(family.part), [m for m in module.modules() if type(m).__name__ == family.layer]
    if row.situation == "frozen":
        part.requires_grad_(False)
    if row.situation == "scaled":
        next(p for p in part.parameters() if p.dim() > 1).register_hook(partial(overflow, row, module))
    if row.situation == "compiled" and not alone:
        part.compile(backend="aot_eager")
    if row.situation == "checkpointed" and not alone:
        assert len(checkpoint_modules(module, lambda m: m in layers)) == len(layers)
    assert layers
    return module, layers


def overflow(row: Row, module: nn.Module, grad: Tensor) -> Tensor:
    """In the second step, on the last rank, one element of a gradient is infinite."""
    if module.now == (1, row.ranks - 1):
        grad = grad.clone()
        grad.view(-1)[-1] = math.inf
    return grad


def trained(row: Row, module: nn.Module, training: Training, ranks: Iterable[int]) -> tuple[dict, dict]:
    """On these ranks' micro-batches: each rank's losses, and its buffers, which are its own."""
    batch, ranks = FAMILIES[row.family].batch, list(ranks)
    losses, buffers = {rank: [] for rank in ranks}, {rank: [b.clone() for b in module.buffers()] for rank in ranks}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=row.situation == "scaled")
    parts = 2 if row.situation == "accumulated" else 1

    def loss(rank: int, seed: int) -> Tensor:
        torch.manual_seed(10 * seed + rank)
        found = loss_of(training.model(**batch()))
        losses[rank].append(found.item())
        return found

    def evaluate(rank: int) -> None:
        if row.situation == "evaluated":
            module.eval()
            with torch.no_grad():
                loss(rank, 99)
            module.train()

    for step in range(STEPS):
        training.optimizer.zero_grad()
        for part, rank in product(range(parts), ranks):
            module.now = step, rank
            for buffer, own in zip(module.buffers(), buffers[rank], strict=True):
                buffer.copy_(own)
            with training.no_sync() if part < parts - 1 else nullcontext():
                found = loss(rank, 2 * step + part)
                evaluate(rank)
                scaler.scale(found / parts).backward()
                training.finish()
            evaluate(rank)
            buffers[rank] = [b.clone() for b in module.buffers()]
        if len(ranks) > 1:  # the mean, as the wrappers make it: of whole gradients
            for p in module.parameters():
                p.grad = None if p.grad is None else p.grad / len(ranks)
        scaler.step(training.optimizer)
        scaler.update()
    for rank in ranks:
        losses[rank].append(scaler.get_scale())  # half of what it was, if a step was left out
    return losses, buffers


def alone(row: Row) -> tuple[dict[str, Tensor], dict, dict]:
    """In this process: the parameters, and each rank's losses and buffers."""
    module, _ = prepared(row, alone=True)
    training = Training(module, torch.optim.AdamW(module.parameters(), **ADAM))
    losses, buffers = trained(row, module, training, range(row.ranks))
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}, losses, buffers


def gaps(row: Row, parameters: dict[str, Tensor], losses: dict, buffers: dict) -> dict[str, float]:
    """On a rank: the largest difference to one process in a parameter, which it names, in a buffer and in a loss."""
    torch._dynamo.reset()  # after eight models with one function it would give up, in silence
    torch._dynamo.utils.counters.clear()
    rank, (module, layers) = dist.get_rank(), prepared(row)
    training = WRAPPERS[row.wrapper](module, layers)
    if row.situation == "compiled later":
        training.model.compile(backend="aot_eager")
    own_losses, own_buffers = trained(row, module, training, [rank])
    assert row.situation != "compiled" or torch._dynamo.utils.counters["frames"]["ok"], "nothing was compiled"
    state = training.model.full_state_dict() if hasattr(training.model, "full_state_dict") else module.state_dict()
    found = {name: (state[name] - p).abs().max().item() for name, p in parameters.items()}
    pairs = enumerate(zip(own_buffers[rank], buffers[rank], strict=True))
    found |= {f"buffer {k}": (own - b).abs().max().item() for k, (own, b) in pairs if b.numel()}
    found |= {f"loss {k}": abs(a - b) for k, (a, b) in enumerate(zip(own_losses[rank], losses[rank], strict=True))}
    return found


def allowed(row: Row) -> bool:
    """A large family's layer takes several seconds to compile, and a whole model half a minute."""
    return row.family in {"compiled": COMPILED, "compiled later": SMALL}.get(row.situation, FAMILIES)


def cover(*factors: Iterable) -> list[Row]:
    """Rows where each two values of two factors meet, if they may: most new pairs first, then the rarest values."""

    def pairs(row: Row) -> set:
        return set(combinations(enumerate(row), 2))

    left = {row: pairs(row) for row in map(Row._make, product(*factors)) if allowed(row)}
    missing, rows, times = set().union(*left.values()), [], Counter()
    while missing:
        rows.append(max(left, key=lambda row: (len(left[row] & missing), -sum(times[value] for value in row))))
        missing -= left.pop(rows[-1])
        times.update(rows[-1])
    return sorted(rows, key=lambda row: row.ranks)


def each_once(rows: Iterable[Row]) -> list[Row]:
    """The rows that bring a family, a wrapper or a situation that none before them has."""
    known: set = set()
    found = []
    for row in rows:
        if not known.issuperset(row):
            found.append(row)
            known.update(row)
    return found


ROWS = cover(FAMILIES, WRAPPERS, SITUATIONS, (2, 3))
SOON = each_once(row for row in ROWS if row.ranks == 3 and not row.situation.startswith("compiled"))


def written() -> dict[str, dict[str, str]]:
    """The table in *Your own model*: for each family, a word for each axis."""
    with (files("manyranks.show") / "axes.csv").open(encoding="utf-8") as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


def cut_and_dealt(family: str) -> list[bool]:
    """On a rank: whether the library knows where to cut a model, and its experts. It compares what they compute."""
    found = []
    for change in (partial(parallelize_transformers, mesh=None), take_over):
        try:
            change(made(family))
            found.append(True)
        except ValueError:
            found.append(False)
    return found


@pytest.mark.parametrize("family", matrix(FAMILIES, []))
def test_the_page_says_which_models_can_be_cut_and_dealt(world_of, family):
    row = written()[family]
    says = [row["tensor"] == "yes", row["expert"] == "yes"]
    assert world_of(2).run(cut_and_dealt, family) == [says] * 2


def test_the_page_says_what_this_table_found_and_what_the_page_trains_itself():
    import nbformat  # takes a second, in each rank that imports this file

    axes = {"data": ["DDP"], "ZeRO": ["ZeRO-1", "ZeRO-2", "ZeRO-3"], "FSDP": ["FSDP", "FSDP by layers"]}
    rows, trains = written(), {(row.family, row.wrapper) for row in ROWS}
    assert [(family, row["what"]) for family, row in rows.items()] == [(name, family.what) for name, family in FAMILIES.items()]
    for family, row in rows.items():
        for axis, wrappers in axes.items():
            assert (row[axis] == "yes") == trains.issuperset(product([family], wrappers)), (family, axis)
    by_hand = {(family, axis) for family, row in rows.items() for axis, word in row.items() if word == "by hand"}
    assert by_hand == {("Llama", "pipeline"), ("Llama", "context"), ("OPT", "tensor")}  # OPT: see test_foreign.py

    page = code(nbformat.read(OWN, as_version=4))
    for call in ("Pipeline(", "ring_attention("):
        (cell,) = [cell for cell in page if call in cell.source]
        assert "model = llama(" in cell.source
        assert "equal to one process" in cell.outputs[0].text


@pytest.mark.parametrize(Row._fields, matrix(ROWS, SOON))
def test_it_trains_as_in_one_process(world_of, family, wrapper, situation, ranks):
    row = Row(family, wrapper, situation, ranks)
    for found in world_of(ranks).run(gaps, row, *alone(row)):
        assert {name: gap for name, gap in found.items() if not gap <= FAMILIES[family].gap} == {}
