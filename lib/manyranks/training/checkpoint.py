"""Checkpoints of a run: a folder a step, written under one plan and read under any other.

In it are the masters of all parameters and Adam's two moments of each, under their names in the
untouched GPT, whole: nothing says which ranks wrote them, and one process may as well read them.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from manyranks.parallel import boxes
from manyranks.parallel.boxes import Box
from manyranks.parallel.pipeline.split import Stage
from manyranks.parallel.precision import MasterOptimizer, make_states
from manyranks.parallel.tensor.cuts import Cut, equal
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.training.spread import Parts, Spread, Together

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    spread: Spread,
    step: int,
    run: str,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes folder/step-…, in which the ranks of the group have parts; returns it.

    spread: what training.parallelize gives. run: what a run that reads it must agree on.
    All ranks call it. Each part is written once, by one of the ranks that have it.
    """
    place, others = folder / f"step-{step:08}", _of_earlier_stages(spread.parts)
    own = [box for box in boxes_of(spread) if box.name.partition(".")[2] not in others]
    boxes.save(place, own, group, step=step, run=run)
    return place


def load(place: Path, spread: Spread, run: str, group: dist.ProcessGroup | None = None) -> int:
    """Reads one into the model and the optimizer, bit for bit; returns its step.

    Each rank reads what it has of them. Raises ValueError where it is that of another run.
    """
    facts = boxes.facts(place, group)
    if (written := facts.get("run", "nothing noted")) != run:
        raise ValueError(
            f"{place} was written by a run with\n{written}\nand this one has\n{run}\n"
            "Give it the same sizes and seed, or another folder"
        )
    boxes.load(place, boxes_of(spread), group)
    _follow(spread, facts["step"])
    return facts["step"]


def newest(folder: Path, group: dist.ProcessGroup | None = None) -> Path | None:
    """Finds the last checkpoint in the folder that is complete and unharmed; None: there is none.

    All ranks of the group call it: each reads a part of the files.
    """
    places = sorted(folder.glob("step-*"), reverse=True)
    return next((place for place in places if _whole(place, group)), None)


def _whole(place: Path, group: dist.ProcessGroup | None) -> bool:
    """The metadata are written when every rank has written its part; later, files may suffer."""
    grouped = dist.is_initialized()
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if grouped else (0, 1)
    try:
        stored = FileSystemReader(place).read_metadata().storage_data.values()
        parts = sorted((part.relative_path, part.offset, part.length) for part in stored)
        found = [all(_as_written(place / name, *where) for name, *where in parts[rank::ranks])]
    except Exception:  # there are none, or no metadata in it: a pickle raises anything then
        found = [False]
    if grouped:
        own, found = found[0], [False] * ranks
        dist.all_gather_object(found, own, group)
    return all(found)


def _as_written(file: Path, offset: int, length: int) -> bool:
    """Whether the checksum is right: torch.save writes a zip file, which has one of each part."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        with zipfile.ZipFile(io.BytesIO(opened.read(length))) as stored:
            return stored.testzip() is None


def boxes_of(spread: Spread) -> Iterator[Box]:
    """What this rank has: its masters and their moments, in their own memory, and buffers."""
    parts, states = spread.parts, _states(spread)
    for parameter, first, master, own in _held(spread):
        name, whole = parts.names[parameter], getattr(parameter, "whole", parameter)
        cut = _cut(parts, parameter, len(whole) if whole.ndim else 1)
        moments = states.get(master, {})  # a frozen one has none
        of_kind = {"parameter": master} | {kind: moments[kind] for kind in _MOMENTS if moments}
        for kind, values in of_kind.items():
            values_E = values.detach().view(-1)[own]
            yield from boxes.of_range(f"{kind}.{name}", values_E, first, whole.shape, cut)
    persistent = parts.model.state_dict()
    for name, buffer in parts.model.named_buffers():
        if name in persistent:
            yield from boxes.of_range(f"buffer.{name}", buffer.view(-1), 0, buffer.shape)


def _held(spread: Spread) -> Iterable[tuple[nn.Parameter, int, Tensor, slice]]:
    """A parameter, from which element on, and the tensor that has its master, and where in it."""
    for row in spread.rows:
        for parameter, first, own in row.owned():
            yield parameter, first, row.shard_S, own
    for unit in spread.units:
        for shard, first in zip(unit.shards, unit.row.firsts, strict=True):
            yield shard, first, shard, slice(None)
    in_rows = {p for row in spread.rows for p in row.parameters}
    in_rows |= {p for unit in spread.units for p in unit.shards}
    masters = dict(_with_masters(spread))
    for parameter in (p for p in spread.kinds if p not in in_rows):
        yield parameter, 0, masters.get(parameter, parameter), slice(None)


def _with_masters(spread: Spread) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Parameters that an optimizer keeps masters of beside, and these."""
    if not isinstance(spread.optimizer, MasterOptimizer):
        return ()
    return zip(spread.optimizer.parameters, spread.optimizer.masters, strict=True)


def _states(spread: Spread) -> dict[Tensor, dict]:
    """Adam's, by what it steps; those before the first step, where there was none."""
    states: dict[Tensor, dict] = {}
    for optimizer in _optimizers(spread):
        adam = getattr(optimizer, "optimizer", optimizer)
        make_states(adam)
        states |= adam.state
    return states


def _optimizers(spread: Spread) -> list:
    own = spread.optimizer
    return own.optimizers if isinstance(own, Together) else [own]


def _cut(parts: Parts, parameter: nn.Parameter, length: int) -> Cut | None:
    """Where this rank's part of it, of this length, lies in the whole one; None: it has all."""
    if parts.experts and parameter in set(parts.experts.expert_parameters()):
        degree = parts.experts.degree
        return equal(length * degree, degree, parts.experts.place)
    return parts.tensor.cuts.get(parts.names[parameter]) if parts.tensor else None


def _of_earlier_stages(parts: Parts) -> set[str]:
    """Tied parameters that a rank before this one writes; its shards may end elsewhere."""
    modules = [part for stage in parts.stages.values() for part in stage.modules()]
    shared = [one for part in modules if isinstance(part, Stage) for one in part.shared]
    return {parts.names[p] for p, stages in shared if min(stages) not in parts.stages}


@torch.no_grad()
def _follow(spread: Spread, step: int) -> None:
    """What else the ranks keep follows the masters: the model's parameters, Adam's counters."""
    for state in _states(spread).values():
        state["step"].fill_(step)
    for parameter, master in _with_masters(spread):
        parameter.copy_(master)
    for optimizer in _optimizers(spread):
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.spread()
