"""Judges one trial under one aspect, and recognises typical mistakes in what was measured."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from manyranks.grade.report import Line, listed, size
from manyranks.grade.trial import Trial

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_WHAT = {
    "values": "returns the right values",
    "traffic": "sends no more and no less than it must",
    "messages": "sends its messages to the right ranks",
    "input": "leaves its input as it was",
}


class Verdict(NamedTuple):
    """ok, and where it is not: what was found and a hint."""

    ok: bool
    found: str = ""
    hint: str = ""


class Judged(NamedTuple):
    """A trial with a verdict on each aspect; with none where it did not end well."""

    trial: Trial
    verdicts: dict[str, Verdict]

    def holds(self, aspect: str) -> bool:
        """Whether the trial ended well and is right under this aspect."""
        return bool(self.verdicts) and self.verdicts[aspect].ok


def judged(task: "Task", trial: Trial) -> Judged:
    """The trial with its verdicts."""
    return Judged(trial, {} if trial.problem else {aspect: judge(task, trial) for aspect, judge in _JUDGES.items()})


def lines(done: list[Judged]) -> list[Line]:
    """One line of the report an aspect; none where no trial ended well."""
    ended = [trial for trial in done if trial.verdicts]
    return [_line(aspect, ended, len(ended) == len(done)) for aspect in _JUDGES] if ended else []


def _line(aspect: str, ended: list[Judged], all_ended: bool) -> Line:
    """Of the trials that are wrong, the one with most ranks tells most mistakes apart."""
    for trial, verdicts in reversed(ended):
        if not verdicts[aspect].ok:
            return Line(False, _WHAT[aspect], f"on {trial.case.n} ranks, {verdicts[aspect].found}", verdicts[aspect].hint)
    sizes = sorted({str(one.trial.case.n) for one in ended})
    return Line(True, _WHAT[aspect], "" if all_ended else f"on {listed(sizes)} ranks, as far as it ran")


def foreign_call(done: list[Trial]) -> Line | None:
    """A line where the function calls an operation that the backend has ready."""
    for trial in done:
        for rank, calls in trial.calls.items():
            for call in calls:
                if call.op not in ("send", "recv"):
                    what, found = (
                        "is built from send and receive only",
                        f"on {trial.case.n} ranks, rank {rank} called {call.op}",
                    )
                    return Line(False, what, found, "write it with dist.send, recv, isend, irecv or batch_isend_irecv")
    return None


def only_two_ranks(done: list[Judged]) -> list[Line]:
    """A line where all is right on 2 ranks and nothing but 2 ranks."""
    sizes = {one.trial.case.n for one in done}
    right = {n: all(one.holds("values") for one in done if one.trial.case.n == n) for n in sizes}
    if len(right) > 1 and right.pop(2) and not any(right.values()):
        hint = "on 2 ranks the next rank is also the previous one, and one step is enough; draw it for 3"
        return [Line(False, "works on any number of ranks", "right on 2 ranks only", hint)]
    return []


def _values(task: "Task", trial: Trial) -> Verdict:
    for rank, (answer, right) in enumerate(zip(trial.answers, trial.case.expected, strict=True)):
        got = answer.result
        if got is None:
            return Verdict(False, f"rank {rank} returned {answer.kind}", "return the result: a tensor")
        if got.shape != right.shape or got.dtype != right.dtype:
            found = f"rank {rank} returned {_form(got)}; right is {_form(right)}"
            return Verdict(False, found, _known(trial) or "look at the shapes in the docstring")
        if not _same(got, right):
            return Verdict(False, f"rank {rank}: {_difference(got, right)}", _known(trial))
    return Verdict(True)


def _traffic(task: "Task", trial: Trial) -> Verdict:
    must = [0] * trial.case.n
    for message in _messages(trial):
        must[message.source] += message.count * trial.case.itemsize
    sent = [sum(call.bytes for call in _sends(trial, rank)) for rank in range(trial.case.n)]
    for rank in range(trial.case.n):
        if sent[rank] != must[rank]:
            there, here = _sizes(sent[rank], must[rank])
            found = f"rank {rank} sent {there}; {task.algorithm} sends {here}"
            return Verdict(False, found, _traffic_hint(trial, rank, sum(sent)))
    return Verdict(True)


def _traffic_hint(trial: Trial, rank: int, total: int) -> str:
    if not total:
        return "nothing was sent: no rank can know what the others have"
    sizes = {call.bytes for call in _sends(trial, rank)}
    whole = max(m.start + m.count for m in _messages(trial)) * trial.case.itemsize
    chunks = max(m.count for m in _messages(trial)) * trial.case.itemsize < whole
    if chunks and sizes == {whole}:
        return "every message is the whole tensor: cut it with torch.tensor_split and send one chunk at a time"
    if len(_sends(trial, rank)) == sum(m.source == rank for m in _messages(trial)):
        return "the right number of messages, but not the right chunks in them"
    return ""


def _messages_right(task: "Task", trial: Trial) -> Verdict:
    for rank in range(trial.case.n):
        must = [m.destination for m in _messages(trial) if m.source == rank]
        peers = [call.peer for call in _sends(trial, rank)]
        if peers == must or (not task.in_order and Counter(peers) == Counter(must)):
            continue
        found = f"rank {rank} sent to {_peers(peers)}; {task.algorithm} sends to {_peers(must)}"
        return Verdict(False, found, _messages_hint(task, peers, must))
    return Verdict(True)


def _messages_hint(task: "Task", peers: list[int], must: list[int]) -> str:
    if not peers:
        return ""
    if len(peers) == len(must) and len(set(peers)) == len(set(must)) == 1:
        return f"that is the wrong neighbour: {task.reminder}"
    if Counter(peers) == Counter(must):
        return "the right messages in the wrong order"
    if set(peers) == set(must):
        return f"{len(must)} messages are needed, not {len(peers)}: too {'many' if len(peers) > len(must) else 'few'} steps"
    return task.reminder


def _input(task: "Task", trial: Trial) -> Verdict:
    for rank, answer in enumerate(trial.answers):
        if not _same(answer.argument, trial.case.arguments[rank][0]):
            found = f"rank {rank}'s input has changed"
            return Verdict(False, found, "work on a copy: chunks of torch.tensor_split are views of the input")
    return Verdict(True)


_JUDGES = {"values": _values, "traffic": _traffic, "messages": _messages_right, "input": _input}


def _known(trial: Trial) -> str:
    """The hint of the mistake that explains the results of all ranks, if one does."""
    for mistake in trial.case.mistakes:
        if all(a.result is not None and _same(a.result, b) for a, b in zip(trial.answers, mistake.results, strict=True)):
            return mistake.hint
    return ""


def _same(got: torch.Tensor, right: torch.Tensor) -> bool:
    if got.shape != right.shape or got.dtype != right.dtype:
        return False
    return torch.equal(got, right) or torch.allclose(got, right, rtol=1e-5, atol=1e-5)


def _difference(got: torch.Tensor, right: torch.Tensor) -> str:
    wrong = ~torch.isclose(got, right, rtol=1e-5, atol=1e-5).flatten()
    first = int(wrong.nonzero()[0])
    values = f"element {first} is {got.flatten()[first].item():g}, right is {right.flatten()[first].item():g}"
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong; {values}"


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _messages(trial: Trial) -> list:
    """Those of theory that carry anything, in order."""
    return [message for messages in trial.case.rounds for message in messages if message.count]


def _sends(trial: Trial, rank: int) -> list:
    return [call for call in trial.calls[rank] if call.op == "send" and call.bytes]


def _sizes(first: int, second: int) -> tuple[str, str]:
    """Both in short, or to the byte where they would read the same."""
    short = size(first), size(second)
    return short if short[0] != short[1] else (f"{first:,} bytes", f"{second:,} bytes")


def _peers(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    times = [f"rank {rank}" + (f" ({count} times)" if count > 1 else "") for rank, count in Counter(ranks).items()]
    return listed(times)
