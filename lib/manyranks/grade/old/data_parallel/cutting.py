"""The task cut: which gradients travel together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import nn

from manyranks.grade.old.data_parallel.buckets import CAP, FIRST, buckets
from manyranks.grade.old.data_parallel.ready import own
from manyranks.grade.old.data_parallel.task import GradientTask
from manyranks.grade.old.scripts import Script, Tensors
from manyranks.grade.old.toy import Toy
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.measure.journal import Stopped

_LIMITS = {
    "usual": (FIRST, CAP),
    "exact": (384, 384 + 48 * 48 * 8),
    "large": (10**6, 10**6),
    "tiny": (1, 1),
    "several": (FIRST, 4 * CAP),
}
_NO_GRADIENTS = "no parameter is in a bucket; gradients do not exist yet when buckets are cut: ask requires_grad"
_EMPTY = "an empty bucket would be an all-reduce of nothing: leave it out"
_CHAPTER = "that is the chapter's rule, at most so many bytes: here a bucket is closed once it has at least so many"
Cutting = Callable[[list[nn.Parameter], float, float], list[list[nn.Parameter]]]


@cache
def cut_cases(n: int) -> list[Script]:
    """One, in which the learner's function is called with several limits."""
    return [Script(n, _cutting, [_codes(buckets)])]


def _cutting(function, watch: Watch) -> Tensors:
    def refusing(*given) -> list[list[nn.Parameter]]:
        with own():
            return function(*given)

    return _codes(refusing)


def _codes(function: Cutting) -> Tensors:
    """For each of the limits, the numbers of the parameters, with −1 after each bucket."""
    parameters = list(Toy(0).parameters())
    found = {}
    for name, (first, cap) in _LIMITS.items():
        given = list(parameters)
        made = function(given, first, cap)
        if list(map(id, given)) != list(map(id, parameters)):
            raise Stopped("cut has changed the list that it was given", "make new lists, and leave `parameters` as it is")
        found[name] = _coded(made, {id(p): k for k, p in enumerate(parameters)})
    return found


def _coded(made: list[list[nn.Parameter]], numbers: dict[int, int]) -> torch.Tensor:
    if not isinstance(made, list):
        raise Stopped(f"cut returned a {type(made).__name__}", "return the list of buckets, each a list of parameters")
    for bucket in made:
        if not isinstance(bucket, list):
            raise Stopped(f"cut returned a list of {type(bucket).__name__}", "each bucket is a list of parameters")
        for parameter in bucket:
            if id(parameter) not in numbers:
                what = f"cut returned a list of lists of {type(parameter).__name__}"
                raise Stopped(what, "put the parameters themselves into the lists, those that were given")
    return torch.tensor([number for bucket in made for number in (*(numbers[id(p)] for p in bucket), -1)])


def _decoded(code: torch.Tensor) -> list[list[str]]:
    names = [name for name, _ in Toy(0).named_parameters()]
    made: list[list[str]] = [[]]
    for number in code.tolist():
        if number < 0:
            made.append([])
        else:
            made[-1].append(names[number])
    return made[:-1]


def _right(task: GradientTask, trial: Trial) -> Verdict:
    got, must = trial.answers[0].tensors, trial.case.expected[0]
    for name, (first, cap) in _LIMITS.items():
        mine, right = _decoded(got[name]), _decoded(must[name])
        if mine != right:
            found = f"with first_bytes={first:,} and cap_bytes={cap:,}: {_unlike(mine, right)}"
            return Verdict(False, found, _why(got, mine, right))
    return Verdict(True)


def _unlike(got: list[list[str]], right: list[list[str]]) -> str:
    for k, bucket in enumerate(right[: len(got)]):
        if got[k] != bucket:
            return f"bucket {k} has {', '.join(got[k]) or 'nothing'}; right is {', '.join(bucket)}"
    return f"{len(got)} buckets; right are {len(right)}"


def _why(got: Tensors, mine: list[list[str]], right: list[list[str]]) -> str:
    if not any((code >= 0).any() for code in got.values()):
        return _NO_GRADIENTS
    known = _known({name: _without_empty(code) for name, code in got.items()})
    empty = _EMPTY if any([] in _decoded(code) for code in got.values()) else ""
    return "; ".join(filter(None, (known, empty))) if known else _hint(mine, right)


def _without_empty(code: torch.Tensor) -> torch.Tensor:
    """The code of the same buckets, but for those that have no parameter: two ends in a row, or one at the beginning."""
    before = torch.cat([code.new_tensor([-1]), code[:-1]])
    return code[(code >= 0) | (before >= 0)]


def _known(got: Tensors) -> str:
    """The hint of the rule that explains the buckets for all limits, if one does."""
    explains = (hint for hint, rule in MISTAKES if all(torch.equal(got[name], code) for name, code in _codes(rule).items()))
    return next(explains, "")


def _hint(got: list[list[str]], right: list[list[str]]) -> str:
    flat, all_right = [name for bucket in got for name in bucket], [name for bucket in right for name in bucket]
    if any(name.startswith("frozen") for name in flat):
        return "frozen parameters get no gradient: leave them out"
    if len(set(flat)) < len(flat):
        return "a parameter is in two buckets: its gradient would be averaged twice"
    if [] in got:
        return _EMPTY
    if flat == all_right[: len(flat)] and len(flat) < len(all_right):
        return "the last bucket is missing: it need not be full"
    if missing := set(all_right) - set(flat):
        return f"in no bucket: {', '.join(sorted(missing))}"
    return "a bucket is closed once it holds at least so many bytes, the parameter that reaches it included"


# ---- rules that learners follow instead


def _of_elements(itemsize: int) -> Cutting:
    """Where a parameter counts as so many bytes an element."""
    return lambda parameters, first, cap: buckets(parameters, first * 8 / itemsize, cap * 8 / itemsize)


def _at_most(parameters: list[nn.Parameter], first: float, cap: float, never_empty: bool = True) -> list[list[nn.Parameter]]:
    made: list[list[nn.Parameter]] = [[]]
    for p in reversed([p for p in parameters if p.requires_grad]):
        if (made[-1] or not never_empty) and sum(q.nbytes for q in made[-1]) + p.nbytes > (first if len(made) == 1 else cap):
            made.append([])
        made[-1].append(p)
    return [bucket for bucket in made if bucket]


def _all_in_one(parameters: list[nn.Parameter], first: float, cap: float) -> list[list[nn.Parameter]]:
    return buckets(parameters, math.inf, cap)


def _never_anew(parameters: list[nn.Parameter], first: float, cap: float) -> list[list[nn.Parameter]]:
    made: list[list[nn.Parameter]] = [[]]
    for p in reversed([p for p in parameters if p.requires_grad]):
        made[-1].append(p)
        if sum(q.nbytes for bucket in made for q in bucket) >= (first if len(made) == 1 else cap):
            made.append([])
    return [bucket for bucket in made if bucket]


def _forwards_within(parameters: list[nn.Parameter], first: float, cap: float) -> list[list[nn.Parameter]]:
    return [bucket[::-1] for bucket in buckets(parameters, first, cap)]


MISTAKES: tuple[tuple[str, Cutting], ...] = (
    ("backward makes the last parameter's gradient first: go through them in reverse", lambda p, f, c: buckets(p[::-1], f, c)),
    (_CHAPTER, _at_most),
    (_CHAPTER, lambda *a: _at_most(*a, never_empty=False)),
    ("the first bucket has a limit of its own: first_bytes", lambda p, f, c: buckets(p, c, c)),
    ("first_bytes is the limit of the first bucket alone: the others have cap_bytes", lambda p, f, c: buckets(p, f, f)),
    ("the limits are bytes, not elements: parameter.nbytes", _of_elements(1)),
    ("an element has 8 bytes here, not 4: parameter.nbytes", _of_elements(4)),
    ("a bucket that has exactly its number of bytes is closed, too: >=, not >", lambda p, f, c: buckets(p, f + 1, c + 1)),
    ("each bucket counts its own bytes: start from 0 when the next one is opened", _never_anew),
    ("the right buckets, but the last parameter comes first within each, too", _forwards_within),
    ("the right buckets, the last one first: give them in the order in which they are filled", lambda *a: buckets(*a)[::-1]),
    ("that is one bucket for all: close it when it has first_bytes, the next when it has cap_bytes", _all_in_one),
)


@dataclass(frozen=True)
class Cut(GradientTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (Aspect("cuts as it should", 1.0, _right, each_world=True),)
    sizes: ClassVar[tuple[int, ...]] = (1,)
