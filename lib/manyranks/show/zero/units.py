"""Watches the units of a reader's stage 3: when each is whole, and that none is read too early."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from manyranks.show.zero.memory import watched


class _Gather:
    """The handle of a gather that notes whether anyone has waited for it."""

    def __init__(self, work):
        self._work, self.waited = work, False

    def wait(self, *timeout) -> bool:
        self.waited = True
        return self._work.wait(*timeout)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def carefully(function: Callable, *args) -> Any:
    """Calls function(*args) on a rank and refuses a gather into memory that isn't there, which could crash the process.

    Raises RuntimeError for a gather into a row whose storage is too small.
    """
    with _gathers():
        return function(*args)


def whole_units(run: Callable, train: Callable, stage: type) -> str:
    """Returns the units that have memory while each part of a step computes. If nobody has waited for one, it's in parentheses.

    With three units that's "0 1 2 2 1 0" one at a time, and "0(1) 1(2) 2 (1)2 (0)1 0" if the next one is fetched ahead.
    Raises RankFailed if a unit is read before its wait, even if its gather happens to be done by then.
    """
    return " ".join(run(carefully, _moments, train, stage)[0])


def late_gradients(train: Callable, stage: type) -> int:
    """Returns how many parameters still have a gradient when a rank's step begins. If none has, refuses to reduce again."""
    found = []

    class Counting(stage):
        def step(self) -> None:
            found.append(sum(p.grad is not None for row in self.rows for p in row.parameters))
            for row in () if found[0] else self.rows:
                row.reduce = _refuse
            super().step()

    train(Counting, steps=1)
    return found[0]


def _refuse() -> None:
    raise RuntimeError("`step` reduces a row whose gradients have already left")


def _moments(train: Callable, stage: type) -> list[str]:
    class Careful(stage):
        def before_forward(self, k: int) -> None:
            super().before_forward(k)
            _must_be_there(self.rows[k], k, "forward")

        def before_backward(self, k: int) -> None:
            super().before_backward(k)
            _must_be_there(self.rows[k], k, "backward")

    return watched(train, Careful, _whole)


def _must_be_there(unit, k: int, when: str) -> None:
    free = unit.row.untyped_storage().nbytes() < unit.row.nbytes
    if free or not unit.work.waited:
        cause = "it's free" if free else "its gather may still be under way"
        raise RuntimeError(f"in {when}, unit {k} was read before its wait: {cause}")


def _whole(stage) -> str:
    there = [(k, unit.work.waited) for k, unit in enumerate(stage.rows) if unit.row.untyped_storage().nbytes()]
    return "".join(f"{k}" if waited else f"({k})" for k, waited in there) or "-"


@contextmanager
def _gathers() -> Iterator[None]:
    """Lets gathers return a _Gather, on this rank."""
    import torch.distributed as dist

    def gathering(gather: Callable) -> Callable:
        def noted(row, *args, **kwargs):
            if row.untyped_storage().nbytes() < row.nbytes:
                raise RuntimeError(f"a gather needs {row.nbytes} bytes, and its row has {row.untyped_storage().nbytes()}")
            work = gather(row, *args, **kwargs)
            return work and _Gather(work)

        return noted

    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    with mock.patch.multiple(dist, **{name: gathering(getattr(dist, name)) for name in names}):
        yield
