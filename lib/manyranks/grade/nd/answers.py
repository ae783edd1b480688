"""Answers that are words and whole numbers: written down on the rank, as JSON in a tensor, and read and compared here."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.journal import Stopped
from manyranks.grade.nd.ready import own
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

if TYPE_CHECKING:
    from manyranks.grade.nd.task import NdTask

Parts = dict[str, Any]  # of an answer, by name
_NO_FLOAT = "a rank, or a coordinate, is a whole number: // in place of /"


class Slip(NamedTuple):
    """A typical mistake. answer: what it makes of a question's arguments, or some parts of that; hint: what to say then."""

    hint: str
    answer: Callable[..., Parts]


@dataclass(frozen=True)
class Exam:
    """Questions of one case. ask: calls the learner's function with such arguments, and reads its parts; right: those.

    equal: whether a part is as good as what is right, of arguments, the part's name, and both; first, others: what a report
    calls the first question, and another one, where it tells them apart.
    """

    questions: list[tuple]
    ask: Callable[[Callable, tuple], Parts]
    right: Callable[..., Parts]
    slips: tuple[Slip, ...]
    equal: Callable[[tuple, str, Any, Any], bool]
    first: str = ""
    others: str = ""

    def known(self) -> Iterator[tuple[str, dict[str, list]]]:
        """Each mistake's hint, and its parts as `rights` has them, where one of them is not right."""
        for slip in self.slips:
            found = _by_part([slip.answer(*question) for question in self.questions])
            wrong = {part: its for part, its in found.items() if not self.accepts(part, its)}
            if wrong:
                yield slip.hint, wrong

    @cached_property
    def rights(self) -> dict[str, list]:
        """Part -> of each question."""
        return _by_part([self.right(*question) for question in self.questions])

    def accepts(self, part: str, got: list) -> bool:
        """Whether all questions are answered right, in this part."""
        right = self.rights[part]
        triples = zip(self.questions, got, right, strict=True)
        return len(got) == len(right) and all(self.equal(question, part, one, other) for question, one, other in triples)


def same(question: tuple, part: str, got: Any, right: Any) -> bool:
    """What is right, and nothing else."""
    return got == right


def _by_part(answers: list[Parts]) -> dict[str, list]:
    return {part: [plain(answer[part]) for answer in answers] for part in answers[0]}


def plain(value: Any) -> Any:
    """As it comes back: lists for tuples and ranges."""
    return json.loads(json.dumps(value))


def said(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def heard(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def whole(value: Any, what: str, form: str) -> int:
    """The learner's number. Raises Stopped for what is none; form: what is asked for."""
    if type(value) is int:
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex():
        value = value.item()
    if isinstance(value, float):
        raise Stopped(f"{what} is {value!r:.40}", _NO_FLOAT)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return int(value)


def row(value: Any, what: str, form: str) -> list[int]:
    """The learner's ranks, as a list. Raises Stopped for what is none."""
    value = value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1 else value
    if not isinstance(value, tuple | list | range | set | frozenset):
        raise Stopped(f"{what} is {kind_of(value)}", form)
    return [whole(one, f"a rank of {what}", form) for one in value]


def pair(value: Any, call: str, form: str) -> tuple:
    """The learner's two parts. Raises Stopped for others."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    return tuple(value)


def an_axis(value: Any, sizes: dict[str, int], what: str) -> str:
    """The learner's. Raises Stopped for what is none."""
    if not isinstance(value, str) or value not in sizes:
        raise Stopped(f"{what} is {value!r:.60}", f"an axis of this cluster: one of {', '.join(sizes)}")
    return value


def an_order(value: Any, sizes: dict[str, int], call: str) -> list[str]:
    """The learner's axes, each once. Raises Stopped for others."""
    form = "an order has each axis of sizes once, the outermost first"
    if isinstance(value, str) or not isinstance(value, tuple | list | dict):
        raise Stopped(f"the order of {call} is {kind_of(value)}", form)
    missing = [degree for axis, degree in sizes.items() if axis not in value]
    if missing and max(missing) == 1:
        form = f"an axis of degree 1 stands in the order, too: {form}"
    if sorted(map(str, value)) != sorted(sizes):
        raise Stopped(f"the order of {call} is {', '.join(map(str, value)) or 'empty':.80}", form)
    return list(value)


def kind_of(value: Any) -> str:
    """ "nothing", "a tuple of 3"."""
    if value is None:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor of {value.numel()} elements"
    many = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"a {type(value).__name__}{many}"


def scene(exam: Exam, note: str) -> Scene:
    """The case in which a rank alone answers the exam."""
    right = {part: said(its) for part, its in exam.rights.items()}
    return Scene(1, partial(_asked, exam.questions, exam.ask), [right], must=exam, note=note)


def _asked(questions: list[tuple], ask: Callable, function: Callable, watch) -> Tensors:
    def refusing(*question):
        with own():
            return function(*question)

    found = [ask(refusing, question) for question in questions]
    return {part: said(its) for part, its in _by_part(found).items()}


def aspect(what: str, share: float, part: str) -> Aspect:
    """Of this part of the answers."""

    def judge(task: "NdTask", trial: Trial) -> Verdict:
        exam = trial.case.must
        got, right = heard(trial.answers[0].tensors[part]), exam.rights[part]
        if exam.accepts(part, got):
            return Verdict(True)
        at = next(i for i, question in enumerate(exam.questions) if not exam.equal(question, part, got[i], right[i]))
        found = task.found(exam.questions[at], part, got[at], right[at])
        hint = _why(exam, part, got) or task.otherwise(part, exam, got) or task.unexplained
        return Verdict(False, found, hint, exam.others if at else exam.first)

    return Aspect(what, share, judge, each_world=True)


def _why(exam: Exam, part: str, got: list) -> str:
    """The hint of the mistake that explains all answers."""
    return next((hint for hint, wrong in exam.known() if wrong.get(part) == got), "")


def of_clusters(exam: Exam) -> Scene:
    """The case of sick clusters, of which learners have the first: who knows only this one has no points."""
    exam = replace(exam, first="the cluster that you have", others="another cluster")
    return scene(exam, "the cluster that you have, and others")


def scenes(exams: Iterable[tuple[Exam, str]]) -> list[Scene]:
    return [scene(exam, note) for exam, note in exams]
