"""The task choose: which layers to checkpoint, so that a budget is kept and the least is computed again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from typing import ClassVar

import torch

from manyranks.grade.checkpointing.budget import peak
from manyranks.grade.checkpointing.chains import Chain, best, chains, flops, measured
from manyranks.grade.checkpointing.task import CheckpointTask
from manyranks.grade.journal import Stopped
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

_INSTEAD = "instead of ValueError, choose "
_NUMBERS = "return the numbers of the layers to checkpoint, counted from 0, as a set or a list: {0, 2}"
_TABLE = (
    "go through the layers once; keep, for each number of bytes that may be held by now, the least FLOPs with which it can be "
    "had, and from which choice"
)
_EQUAL = "a choice that holds just the budget fits, too: <=, not <"
_SHIFTED = "layers are counted from 0: with 1 less, your numbers would be right"
_OTHERS = "return the layers to checkpoint: yours are those that keep everything, the others would be right"
_EVERY = "where nothing fits, raise ValueError: not even what holds least at each layer is within the budget"
_PEAK = (
    "what is held when forward ends fits, and backward needs more: peak(layers, chosen) counts, at each layer, all that it "
    "saves, computed again or not, beside what those before it hold"
)
_LAST = "the last layer's checkpoint frees nothing: backward begins there, and needs at once all that it saves"
_MORE = "a part of your choice is enough"
_FEWEST = "it is not the number of layers that counts, but their FLOPs"


def _asked(chain: Chain, choose: Callable, watch) -> Tensors:
    """The choice; what it was measured to compute again and to hold. Without a choice, where it raised ValueError.

    Where nothing fits, what it has done instead is marked, if it is no choice.
    """
    nothing_fits = best(chain.layers, chain.budget) is None
    try:
        chosen = choose(list(chain.layers), chain.budget)
        if nothing_fits and chosen is None:
            return _instead("returned None", watch)
        chosen = _numbers(chosen, len(chain.layers))
    except ValueError:
        return {}
    except Exception as error:
        if nothing_fits and not isinstance(error, (Stopped, NotImplementedError)):
            return _instead(f"raised {type(error).__name__}", watch)
        raise
    found = measured(chain.shapes, chosen) if chain.shapes else ()
    return {"chosen": torch.tensor(chosen, dtype=torch.int64), "measured": torch.tensor(found, dtype=torch.int64)}


def _instead(what: str, watch) -> Tensors:
    watch.mark(f"{_INSTEAD}{what}")
    return {}


def _numbers(chosen, n: int) -> list[int]:
    try:
        numbers = list(chosen)
    except TypeError:
        raise Stopped(f"choose returned {chosen!r:.60}", _NUMBERS) from None
    if any(isinstance(k, bool) or not isinstance(k, Integral) or not 0 <= k < n for k in numbers):
        raise Stopped(f"choose returned {chosen!r:.60} for {n} layers", _NUMBERS)
    return sorted(set(map(int, numbers)))


@cache
def cases(n: int) -> list[Scene]:
    """Chains of real layers, one of many that is not run, and budgets in which nothing fits."""
    return [Scene(1, partial(_asked, chain), [{}], must=chain, note=note) for note, chain in chains().items()]


def _choice(trial: Trial) -> tuple[int, ...] | None:
    chosen = trial.answers[0].tensors.get("chosen")
    return None if chosen is None else tuple(chosen.tolist())


def _fits(task: "Choose", trial: Trial) -> Verdict:
    """The peak, measured where the layers are real, is within the budget."""
    chain, chosen = trial.case.must, _choice(trial)
    if (right := best(chain.layers, chain.budget)) is None:
        return Verdict(True)
    if chosen is None:
        hint = _EQUAL if peak(chain.layers, right) == chain.budget else _TABLE
        return Verdict(False, f"choose raised ValueError; to checkpoint {_set(right)} fits", hint)
    measured = trial.answers[0].tensors["measured"].tolist()
    most = measured[1] if measured else peak(chain.layers, chosen)
    if most <= chain.budget:
        return Verdict(True)
    how = "measured" if measured else "by peak(layers, chosen)"
    return Verdict(False, f"{_set(chosen)} holds {most:,} bytes, {how}; the budget is {chain.budget:,}", _why(chain, chosen))


def _why(chain: Chain, chosen: tuple[int, ...]) -> str:
    """Why a choice does not fit."""
    if meant := _meant(chain, chosen):
        return meant
    ends = sum(layer.input if k in chosen else layer.saved for k, layer in enumerate(chain.layers))
    if not chosen:
        return "without checkpoints everything is kept: choose layers until peak(layers, chosen) is within the budget"
    return _PEAK if ends <= chain.budget else "peak(layers, chosen) says what a choice holds: compare it with the budget"


def _meant(chain: Chain, chosen: tuple[int, ...]) -> str:
    """The hint where other numbers would be right: one less, or those that are missing."""
    least = flops(chain.layers, best(chain.layers, chain.budget))

    def right(other: set[int]) -> bool:
        fits = min(other, default=0) >= 0 and peak(chain.layers, other) <= chain.budget
        return fits and flops(chain.layers, other) == least

    if chosen and right({k - 1 for k in chosen}):
        return _SHIFTED
    return _OTHERS if right(set(range(len(chain.layers))) - set(chosen)) else ""


def _least_flops(task: "Choose", trial: Trial) -> Verdict:
    """No choice that fits computes less again."""
    chain, chosen = trial.case.must, _choice(trial)
    right = best(chain.layers, chain.budget)
    if right is None:
        return Verdict(True)
    if chosen is None or peak(chain.layers, chosen) > chain.budget:
        return Verdict(False, f"nothing that fits was chosen; {_set(right)} fits", _TABLE)
    measured = trial.answers[0].tensors["measured"].tolist()
    mine, theirs = measured[0] if measured else flops(chain.layers, chosen), flops(chain.layers, right)
    if mine == theirs:
        return Verdict(True)
    found = f"{_set(chosen)} computes {mine:,} FLOPs again; {_set(right)} fits, too, and computes {theirs:,}"
    return Verdict(False, found, _why_more(chain, chosen, right))


def _why_more(chain: Chain, chosen: tuple[int, ...], right: tuple[int, ...]) -> str:
    if meant := _meant(chain, chosen):
        return meant
    if (less := best(chain.layers, chain.budget - 1)) and flops(chain.layers, chosen) == flops(chain.layers, less):
        return _EQUAL
    if set(right) < set(chosen):
        return _LAST if set(chosen) - set(right) == {len(chain.layers) - 1} else f"{_MORE}; {_TABLE}"
    if len(chosen) < len(right):
        return f"{_FEWEST}; {_TABLE}"
    return f"taking one layer after the other, the best by some measure first, can miss the best choice: {_TABLE}"


def _set(chosen: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, chosen)) + "}"


def _refuses(task: "Choose", trial: Trial) -> Verdict:
    """ValueError where nothing fits."""
    chain, chosen = trial.case.must, _choice(trial)
    for event in trial.answers[0].events:
        if event.what.startswith(_INSTEAD):
            return Verdict(False, event.what.removeprefix("instead of ValueError, "), _EVERY)
    if chosen is None or best(chain.layers, chain.budget) is not None:
        return Verdict(True)
    least = peak(chain.layers, range(len(chain.layers)))
    return Verdict(
        False, f"choose returned {_set(chosen)}; the least that fits is {least:,}, the budget is {chain.budget:,}", _EVERY
    )


@dataclass(frozen=True)
class Choose(CheckpointTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"with 40 layers[\s\S]*a loop does not end", f"40 layers have 2 to the 40 choices, too many to try each: {_TABLE}"),
        (r"choose returned \[(True|False)", "not a list of yes and no"),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("fits the budget", 0.2, _fits),
        Aspect("computes as little again as possible", 0.7, _least_flops),
        Aspect("raises ValueError where nothing fits", 0.1, _refuses),
    )
