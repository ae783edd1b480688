"""Checkpoints of a run: a folder for each, written under one plan and read under any other.

A checkpoint has the masters of all parameters and Adam's two moments of each, under their names
in the untouched GPT, whole: nothing says which ranks wrote them, and one process may read them.
Data order and dropout need no state. Both follow from the seed and the step.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import boxes, saving
from manyranks.parallel.boxes import Box
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.pipeline.split import Stage
from manyranks.parallel.precision import MasterOptimizer, make_states
from manyranks.parallel.shard import local
from manyranks.parallel.tensor.cuts import Cut
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.theory import failures
from manyranks.training.spread import Parts, Spread, Together

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps two runs out of one folder
    fcntl = None

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpoints:
    """The checkpoints that a run writes into a folder, beside the training.

    All ranks of the group make one and call its methods together. It is a context manager: at its
    end it waits for the last checkpoint. As long as it's open, no other run may write there.

    folder: made if it isn't there
    group: the ranks of the run
    keep: how many whole checkpoints stay, once this run has written one; None: all

    Raises ValueError if another run writes there, or for keep below 1.
    """

    def __init__(self, folder: Path | str, group: Group = None, keep: int | None = None):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={keep!r}: give a number of checkpoints, 1 or more, or None")
        self.folder, self.keep, self._group = Path(folder), keep, group
        self._saver = saving.Saver(group)
        self._spread: Spread | None = None
        self._parts: tuple[Box, ...] = ()
        self._lock = _lock(self.folder) if self._saver.rank == 0 else None
        try:
            if self._lock is not None:
                # What runs before were writing when they died: before any rank of this run writes.
                for file in self.folder.glob(f"step-*/*{saving.UNFINISHED}"):
                    file.unlink(missing_ok=True)
            free = _all(self._saver.rank != 0 or self._lock is not None, group)
        except BaseException:  # an interrupt, say, after which the process goes on
            self._unlock()
            raise
        if not free:
            raise ValueError(
                f"another run writes to {folder}: stop it, or give another folder. If it failed, "
                "its world still has its ranks: close that world"
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        try:
            if kind is None:
                self.wait()
            self._saver.close()
        finally:
            self._unlock()

    def save(self, spread: Spread, step: int, run: str) -> Path:
        """Copies what a checkpoint needs, has it written, and returns where.

        spread: what training.parallelize gives
        step: the number of steps done
        run: what a run that reads it must agree on
        """
        place = _place(self.folder, step)
        if spread is not self._spread:  # its tensors stay where they are
            others = _of_earlier_stages(spread.parts)
            self._spread = spread
            own = boxes_of(spread)
            self._parts = tuple(b for b in own if b.name.partition(".")[2] not in others)
        self._saver.start(place, self._parts, step=step, run=run)
        self._remove_old()
        return place

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk, on all ranks."""
        self._saver.wait()
        self._remove_old()

    def check(self) -> None:
        """Raises OSError if this rank turned out to be unable to write the last one."""
        self._saver.check()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _remove_old(self) -> None:
        """Removes all before the last `keep` whole ones, on one rank, once this run wrote one.

        A run before may have left damaged ones there.
        """
        if self._saver.rank or self.keep is None:
            return
        left, own = self.keep, False
        for place in (_place(self.folder, step) for step in _steps(self.folder)):
            if own and left <= 0:
                shutil.rmtree(place, ignore_errors=True)
                continue
            own |= self._saver.wrote(place)
            with contextlib.suppress(ValueError):
                if saving.files(place):
                    left -= 1


def load(place: Path, spread: Spread, run: str) -> int:
    """Reads a checkpoint into the model and the optimizer, bit for bit; returns its step.

    Each rank reads what it has of them. Raises ValueError if another run wrote it.
    """
    facts = saving.facts(place)
    if (written := facts.get("run", "nothing noted")) != run:
        raise ValueError(
            f"{place} was written by a run with\n{written}\nand this one has\n{run}\n"
            "Give it the same sizes, batch and seed, or another folder"
        )
    saving.load(place, boxes_of(spread))
    _follow(spread, facts["step"])
    return facts["step"]


def newest(folder: Path, group: Group = None) -> Path | None:
    """Finds the newest whole, undamaged checkpoint in the folder; None if there is none.

    All ranks of the group call it: each reads a part of the files. One of them warns of each
    checkpoint that is passed over, and says which file is damaged.
    """
    rank, ranks = saving.rank_and_size(group)
    steps = [_steps(folder)]
    if ranks > 1:  # as one rank sees them: a folder on a network may look different to another
        dist.broadcast_object_list(steps, group=group, group_src=0)
    for place in (_place(folder, step) for step in steps[0]):
        try:
            files = saving.files(place)
            wrong = next(filter(None, map(saving.damage, files[rank::ranks])), "")
        except (ValueError, OSError) as error:
            wrong = str(error)
        wrongs = [wrong]
        if ranks > 1:
            wrongs = [""] * ranks
            dist.all_gather_object(wrongs, wrong, group)
        if not any(wrongs):
            return place
        if rank == 0:
            said = "; ".join(dict.fromkeys(filter(None, wrongs)))
            warnings.warn(f"{place.name} is passed over: {said}", stacklevel=3)
    return None


def due(seconds_per_step: float, stall: float, mtbf: float, group: Group = None) -> int:
    """Returns how many steps from one save to the next lose least time, by Young's formula.

    The ranks agree on the longest of their times.

    seconds_per_step: without saves
    stall: seconds that a save adds to a step
    mtbf: mean seconds between two failures of the run
    """
    own = [seconds_per_step, stall]
    row = torch.tensor(own, dtype=torch.float64, device=saving.device(group))
    if dist.is_initialized():
        dist.all_reduce(row, dist.ReduceOp.MAX, group)
    seconds, stall = row.tolist()
    return max(1, round(failures.young(stall, mtbf) / seconds))


def _place(folder: Path, step: int) -> Path:
    return Path(folder) / f"step-{step:08}"


def _steps(folder: Path) -> list[int]:
    """Steps with a folder of that name, the last one first. A step-best, say, is the user's."""
    names = (re.fullmatch(r"step-(\d{8,})", place.name) for place in Path(folder).glob("step-*"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


def _lock(folder: Path) -> IO | None:
    """Takes the folder's lock, which ends with the process and its forks; None: it's taken."""
    folder.mkdir(parents=True, exist_ok=True)
    # A file, and open for writing, because NFS locks nothing else.
    opened = open(folder / ".lock", "a")
    try:
        if fcntl:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    except OSError as error:
        warnings.warn(
            f"{folder} can't be locked ({error.strerror}): see that no other run writes there",
            stacklevel=3,
        )
    return opened


def _all(own: bool, group: Group) -> bool:
    if not dist.is_initialized():
        return own
    flag = torch.tensor(int(own), device=saving.device(group))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag)


def boxes_of(spread: Spread) -> Iterator[Box]:
    """Yields what this rank has: masters and their moments, in their own memory, and buffers."""
    parts, states = spread.parts, _states(spread)
    for parameter, first, master in _held(spread):
        name, whole = parts.names[parameter], getattr(parameter, "whole", parameter)
        cuts = _cuts(parts, parameter, whole.shape)
        moments = states.get(master, {})  # a frozen one has none
        of_kind = {"parameter": master} | {kind: moments[kind] for kind in _MOMENTS if moments}
        for kind, values in of_kind.items():
            values_E = local(values).detach().view(-1)
            yield from boxes.of_range(f"{kind}.{name}", values_E, first, whole.shape, *cuts)
    persistent = parts.model.state_dict()
    for name, buffer in parts.model.named_buffers():
        if name in persistent:
            yield from boxes.of_range(f"buffer.{name}", buffer.view(-1), 0, buffer.shape)


def _held(spread: Spread) -> Iterable[tuple[nn.Parameter, int, Tensor]]:
    """Yields each parameter, its first element here, and its master."""
    for row in spread.rows:
        for parameter, shard in zip(row.parameters, row.shards, strict=True):
            yield parameter, shard.origin.first, shard
    for unit in spread.units:
        for shard, first in zip(unit.shards, unit.row.firsts, strict=True):
            yield shard, first, shard
    in_rows = {p for row in spread.rows for p in row.parameters}
    in_rows |= {p for unit in spread.units for p in unit.shards}
    masters = dict(_with_masters(spread))
    for parameter in (p for p in spread.kinds if p not in in_rows):
        yield parameter, 0, masters.get(parameter, parameter)


def _with_masters(spread: Spread) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Yields the parameters whose masters the optimizer keeps, and these."""
    if not isinstance(spread.optimizer, MasterOptimizer):
        return ()
    return zip(spread.optimizer.parameters, spread.optimizer.masters, strict=True)


def _states(spread: Spread) -> dict[Tensor, dict]:
    """Returns Adam's states by what it steps; before the first step, those it starts with."""
    states: dict[Tensor, dict] = {}
    for optimizer in _optimizers(spread):
        adam = getattr(optimizer, "optimizer", optimizer)
        make_states(adam)
        states |= adam.state
    return states


def _optimizers(spread: Spread) -> list:
    own = spread.optimizer
    return own.optimizers if isinstance(own, Together) else [own]


def _cuts(parts: Parts, parameter: nn.Parameter, shape: torch.Size) -> list[Cut]:
    """Finds where this rank's part, of this shape, lies in the whole; none if it has all."""
    name = parts.names[parameter]
    if parts.experts and parameter in set(parts.experts.expert_parameters()):
        return parts.experts.cuts(name, shape)
    return [parts.tensor.cuts[name]] if parts.tensor and name in parts.tensor.cuts else []


def _of_earlier_stages(parts: Parts) -> set[str]:
    """Names tied parameters that a rank before this one writes; its shards may end elsewhere."""
    modules = [part for stage in parts.stages.values() for part in stage.modules()]
    shared = [one for part in modules if isinstance(part, Stage) for one in part.shared]
    return {parts.names[p] for p, stages in shared if min(stages) not in parts.stages}


@torch.no_grad()
def _follow(spread: Spread, step: int) -> None:
    """Sets what follows from the masters and the step: parameters and Adam's counters."""
    for state in _states(spread).values():
        state["step"].fill_(step)
    for parameter, master in _with_masters(spread):
        parameter.copy_(master)
    for optimizer in _optimizers(spread):
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.spread()
