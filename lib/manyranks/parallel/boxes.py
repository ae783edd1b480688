"""Checkpoints of whole tensors, whoever has which part of them: cut, dealt or in shards.

    parts = of_range("layers.0.mlp.up.weight", shard_S, first=96, shape=(8, 16), cut=cut)
    save(folder, parts, step=100)             # on every rank, with what it has
    facts(folder)                             # {"step": 100}
    load(folder, parts)                       # by other ranks, with what they need

A rank's shard of a row is a range of a parameter's elements, which is cut out of the whole
one by tensor parallelism, say. That is a few boxes: of a matrix, the end of one row, some
whole rows, and the beginning of another one. So no rank has to put a tensor together, and
none has more in memory than it trains with. If several ranks have the same, one writes it.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from manyranks.parallel.precision import make_states
from manyranks.parallel.sharded import Sharded, names_of
from manyranks.parallel.tensor.cuts import Cut
from manyranks.parallel.zero import ZeroOptimizer

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
_FACTS = "facts"
_AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Box(NamedTuple):
    """Part of a whole tensor of this name and shape; tensor: its elements, on this rank."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


def of_model(
    model: Sharded | ZeroOptimizer, optimizer: torch.optim.Optimizer | None = None
) -> list[Box]:
    """Returns what a checkpoint needs of this rank; load() fills the same tensors.

    After loading a ZeroOptimizer, call its spread() for the model's parameters. Learning
    rates and other options aren't in it.

    model: a Zero3 or FullyShardedDataParallel; or a ZeroOptimizer, which doesn't know the
        model's buffers: save them beside
    optimizer: of the former's parameters(); one that hasn't stepped gets its first states
    """
    found = []
    if isinstance(model, ZeroOptimizer):
        optimizer, buffers = model.optimizer, ()
        name_of = {
            p: n for r in model.rows for p, n in zip(r.parameters, r.names, strict=True)
        }
        owned = [
            (name_of[p], p.shape, first, row.shard_S, span)
            for row in model.rows
            for p, first, span in row.owned()
        ]
        found = [b for k, p in enumerate(model.frozen) for b in _whole(f"frozen.{k}", p)]
    else:
        names, buffers = names_of(model), model.named_buffers()
        owned = [
            (names[shard], whole.shape, first, shard, slice(None))
            for unit in model.units
            for shard, whole, first in zip(
                unit.shards, unit.whole, unit.row.firsts, strict=True
            )
        ]
    if optimizer is not None:
        make_states(optimizer)
    for name, buffer in buffers:
        found += _whole(f"buffer.{name}", buffer)
    for name, shape, first, shard, span in owned:
        states = optimizer.state.get(shard, {}) if optimizer is not None else {}
        for kind, value in {"parameter": shard, **states}.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim():
                part = value.detach()[span]
                found += of_range(f"{kind}.{name}", part, first, shape)
            else:
                found += _whole(f"{kind}.{name}", value)
    return found


def _whole(name: str, tensor: Tensor) -> list[Box]:
    """Returns the box of a tensor that every rank has whole."""
    return of_range(name, tensor.detach().view(-1), 0, tensor.shape or (1,))


def of_range(
    name: str, values_E: Tensor, first: int, shape: Iterable[int], cut: Cut | None = None
) -> list[Box]:
    """Elements of this rank's part of a whole tensor, as boxes of the whole one.

    shape: of the part, cut: where it lies, with its filling, which is left out; None: the
    part is the whole. values_E: the part's elements from number `first` on, row by row.
    """
    whole, found, at = list(shape), [], 0
    if cut:
        whole[cut.dim] = max(stop for _, stop in cut.spans)
    for offsets, sizes in rectangles(tuple(shape), first, first + values_E.numel()):
        tensor = values_E[at : at + math.prod(sizes)].view(sizes)
        at += tensor.numel()
        if cut:
            offsets, tensor = _placed(offsets, tensor, cut)
        if tensor.numel():
            found.append(Box(name, tuple(whole), offsets, tensor))
    return found


def rectangles(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Rectangle]:
    """Boxes of a tensor that are its elements first … stop − 1, row by row, in order."""
    if len(shape) < 2:
        if first < stop:
            yield (first,), (stop - first,)
        return
    row_size = math.prod(shape[1:])
    while first < stop:
        row, at = divmod(first, row_size)
        if not at and (rows := (stop - first) // row_size):
            yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            first += rows * row_size
            continue
        end = min(row_size, stop - row * row_size)
        for offsets, sizes in rectangles(shape[1:], at, end):
            yield (row, *offsets), (1, *sizes)
        first = row * row_size + end


def _placed(offsets: tuple[int, ...], tensor: Tensor, cut: Cut) -> tuple:
    """Where it lies in the whole tensor, and it without filling."""
    (start, stop), dim = cut.spans[cut.place], cut.dim
    length = max(0, min(tensor.shape[dim], stop - start - offsets[dim]))
    there = (*offsets[:dim], start + offsets[dim], *offsets[dim + 1 :])
    return there, tensor.narrow(dim, 0, length)


def save(
    folder: Path,
    parts: Iterable[Box],
    group: dist.ProcessGroup | None = None,
    **facts: object,
) -> None:
    """Writes the group's tensors, each rank its part, and the facts that one rank gives.

    All of them call it. Boxes of one tensor are the same on two ranks, or lie apart.
    PyTorch raises CheckpointException where they overlap, or leave some of a tensor out.
    """
    # What was there is no checkpoint from now on, should this one not come to its end. No
    # rank writes before this one has told all of them what.
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        (folder / ".metadata").unlink(missing_ok=True)
    with _alone_allowed():
        planner = _Writer(parts)
        dcp.save(
            {_FACTS: facts}, checkpoint_id=folder, planner=planner, process_group=group
        )


def facts(folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, object]:
    """Returns the facts that save() was given. All ranks of the group call it.

    Raises ValueError for a folder that save() has not written.
    """
    if _FACTS not in _metadata(folder):
        raise ValueError(f"{folder} has a checkpoint of another kind: give another folder")
    found = {_FACTS: {}}
    planner = dcp.DefaultLoadPlanner(**_AS_IT_IS)
    with _alone_allowed():
        dcp.load(found, checkpoint_id=folder, planner=planner, process_group=group)
    return found[_FACTS]


def load(
    folder: Path, parts: Iterable[Box], group: dist.ProcessGroup | None = None
) -> None:
    """Fills the boxes of all ranks of the group, which call it.

    Raises ValueError for a folder without a checkpoint, and for a tensor that it has not,
    or of another shape.
    """
    planner = _Reader(parts)
    planner.check(folder)
    with _alone_allowed():
        dcp.load({}, checkpoint_id=folder, planner=planner, process_group=group)


class _Writer(dcp.DefaultSavePlanner):
    """PyTorch's checkpoint has one of several ranks write what they have in common."""

    def __init__(self, parts: Iterable[Box]):
        super().__init__(**_AS_IT_IS)
        self._parts = {(box.name, box.offsets): box for box in parts}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(
            plan, items=[*plan.items, *map(_item, self._parts.values())]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        box = self._parts.get((index.fqn, index.offset))
        return super().lookup_object(index) if box is None else box.tensor


class _Reader(dcp.DefaultLoadPlanner):
    def __init__(self, parts: Iterable[Box]):
        super().__init__(**_AS_IT_IS)
        self._parts: dict[str, list[Box]] = {}
        for box in parts:
            self._parts.setdefault(box.name, []).append(box)

    def check(self, folder: Path) -> None:
        """That it has all of them; for PyTorch would wrap an error up."""
        there = _metadata(folder)
        for name, (box, *_) in self._parts.items():
            shape = tuple(there[name].size) if name in there else "none"
            if shape != box.shape:
                raise ValueError(
                    f"{name} has the shape {box.shape} here, and {shape} in {folder}: give "
                    "a checkpoint of a model of the same sizes"
                )

    def create_local_plan(self) -> LoadPlan:
        items, there = [], self.metadata.state_dict_metadata
        for name, own in self._parts.items():
            chunks = [box.chunk for box in own]
            items += create_read_items_for_chunk_list(name, there[name], chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn][index.index].tensor


def _metadata(folder: Path) -> dict:
    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder} has no checkpoint: give a folder that save() has filled"
        )
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


@contextlib.contextmanager
def _alone_allowed() -> Iterator[None]:
    """Without PyTorch's warning that there is no group: one process may well have none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


def _item(box: Box) -> WriteItem:
    properties = TensorProperties.create_from_tensor(box.tensor)
    data = TensorWriteData(box.chunk, properties, torch.Size(box.shape))
    index = MetadataIndex(box.name, torch.Size(box.offsets))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
