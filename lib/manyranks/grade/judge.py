"""Judges one trial under one aspect, and recognises typical mistakes in what was measured."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from manyranks.grade.report import Line, listed, size
from manyranks.grade.trial import Detour, Missing, Mistake, Trial
from manyranks.grade.trouble import clash

if TYPE_CHECKING:
    from manyranks.grade.check import Task

_WAIT = "isend and irecv return at once: keep what they return and call .wait() on it"
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


class Finding(NamedTuple):
    """A line of the report, and the trial that it is about; None where it is about several."""

    line: Line
    trial: Trial | None = None


class Judged(NamedTuple):
    """A trial with a verdict on each aspect; with none where it did not end well."""

    trial: Trial
    verdicts: dict[str, Verdict]

    def holds(self, aspect: str) -> bool:
        """Whether the trial ended well and is right under this aspect."""
        return bool(self.verdicts) and self.verdicts[aspect].ok


def judged(task: "Task", trial: Trial) -> Judged:
    """The trial with its verdicts."""
    return Judged(trial, {} if trial.trouble else {aspect: judge(task, trial) for aspect, judge in _JUDGES.items()})


def findings(done: list[Judged]) -> list[Finding]:
    """One an aspect; none where no trial ended well."""
    ended = [trial for trial in done if trial.verdicts]
    return [_finding(aspect, ended, len(ended) == len(done)) for aspect in _JUDGES] if ended else []


def _finding(aspect: str, ended: list[Judged], all_ended: bool) -> Finding:
    """Of the trials that are wrong, the one with most ranks tells most mistakes apart; few elements are easier to read.

    But bytes show best on a large tensor.
    """
    sign = -1 if aspect == "traffic" else 1
    for trial, verdicts in sorted(ended, key=lambda one: (-one.trial.case.n, sign * one.trial.case.elements)):
        if not verdicts[aspect].ok:
            found = f"{trial.case}, {verdicts[aspect].found}"
            return Finding(Line(False, _WHAT[aspect], found, verdicts[aspect].hint), trial)
    sizes = sorted({str(one.trial.case.n) for one in ended})
    return Finding(Line(True, _WHAT[aspect], "" if all_ended else f"on {listed(sizes)} ranks, as far as it ran"))


def foreign_call(done: list[Trial]) -> Finding | None:
    """Where the function calls an operation that the backend has ready."""
    for trial in done:
        for rank, calls in trial.calls.items():
            for call in calls:
                if call.op not in ("send", "recv"):
                    what, found = "is built from send and receive only", f"{trial.case}, rank {rank} called {call.op}"
                    hint = "write it with dist.send, recv, isend, irecv or batch_isend_irecv"
                    return Finding(Line(False, what, found, hint), trial)
    return None


def only_two_ranks(done: list[Judged]) -> list[Finding]:
    """A finding where all is right on 2 ranks and nothing but 2 ranks."""
    sizes = {one.trial.case.n for one in done}
    right = {n: all(one.holds("values") for one in done if one.trial.case.n == n) for n in sizes}
    if len(right) > 1 and right.pop(2) and not any(right.values()):
        hint = "on 2 ranks the next rank is also the previous one, and one step is enough; draw it for 3"
        return [Finding(Line(False, "works on any number of ranks", "right on 2 ranks only", hint))]
    return []


def _values(task: "Task", trial: Trial) -> Verdict:
    for rank, (answer, right) in enumerate(zip(trial.answers, trial.case.expected, strict=True)):
        got = answer.result
        if got is None:
            return Verdict(False, f"rank {rank} returned {answer.kind}", "return the result: a tensor")
        if not _same(got, right):
            return Verdict(False, *_wrong(task, trial, rank, got, right))
    if early := _unwaited(trial, "recv"):
        return Verdict(False, f"{early}: the values are right by luck", _WAIT)
    return Verdict(True)


def _wrong(task: "Task", trial: Trial, rank: int, got: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    """What is wrong with a rank's result, and a hint."""
    hint = _WAIT if trial.unwaited else _known(trial) or _detour(trial) or _known(trial, partly=True)
    if got.shape != right.shape or got.dtype != right.dtype:
        found = f"rank {rank} returned {_form(got)}; right is {_form(right)}"
        if got.shape == right.shape:
            return found, f"right shape, wrong dtype: take dtype={task.argument}.dtype"
        return found, hint or "the table above the task says how many elements to return"
    unequal = clash(trial.notes, also_smaller=True)
    return f"rank {rank}: {_difference(got, right)}", hint or (": ".join(unequal) if unequal else "")


def _unwaited(trial: Trial, op: str) -> str:
    ranks = [rank for rank, kind in trial.unwaited if kind == op]
    return f"rank {ranks[0]} did not wait for {ranks.count(ranks[0])} of its messages" if ranks else ""


def _traffic(task: "Task", trial: Trial) -> Verdict:
    must = [0] * trial.case.n
    for message in _messages(trial):
        must[message.source] += message.count * trial.case.itemsize
    sent = [sum(call.bytes for call in _sends(trial, rank)) for rank in range(trial.case.n)]
    for rank in range(trial.case.n):
        if sent[rank] != must[rank]:
            there, here = _sizes(sent[rank], must[rank])
            found = f"rank {rank} sent {there}; {task.algorithm} sends {here}"
            return Verdict(False, found, _traffic_hint(task, trial, rank, sum(sent)))
    return Verdict(True)


def _traffic_hint(task: "Task", trial: Trial, rank: int, total: int) -> str:
    if not total:
        return "nothing was sent: no rank can know what the others have"
    sizes = {call.bytes for call in _sends(trial, rank)}
    whole = trial.case.elements * trial.case.itemsize
    chunks = max(m.count for m in _messages(trial)) * trial.case.itemsize < whole
    if trial.unwaited:
        return _WAIT
    if chunks and sizes == {whole}:
        return "every message is the whole tensor: cut it with torch.tensor_split and send one chunk at a time"
    if known := _detour(trial):
        return known
    if any(f"torch.{call.dtype}" != str(trial.case.expected[0].dtype) for call in _sends(trial, rank)):
        return f"wrong dtype in the messages: take dtype={task.argument}.dtype"
    if len(_sends(trial, rank)) == sum(m.source == rank for m in _messages(trial)):
        return "the right number of messages, but not the right chunks in them"
    return ""


def _messages_right(task: "Task", trial: Trial) -> Verdict:
    for rank in range(trial.case.n):
        must = [m.destination for m in _messages(trial) if m.source == rank]
        peers = [call.peer for call in _sends(trial, rank)]
        if peers == must or (not task.in_order and Counter(peers) == Counter(must)):
            continue
        note = f" ({trial.case.note})" if trial.case.note else ""
        found = f"rank {rank} sent to {_peers(peers)}; {task.algorithm} sends to {_peers(must)}{note}"
        return Verdict(False, found, _detour(trial) or _messages_hint(task, peers, must))
    early = _unwaited(trial, "send")
    return Verdict(not early, early, _WAIT if early else "")


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


def _known(trial: Trial, partly: bool = False) -> str:
    """The hint of the mistake that explains the results of all ranks, if one does. partly: of the wrong ones."""
    results = [answer.result for answer in trial.answers]
    if any(result is None for result in results):
        return ""
    expected = trial.case.expected
    return next((mistake.hint for mistake in trial.case.mistakes if _explains(mistake, results, expected, partly)), "")


def _explains(
    mistake: Mistake | Missing, results: list[torch.Tensor], expected: tuple[torch.Tensor, ...], partly: bool
) -> bool:
    if isinstance(mistake, Mistake):
        triples = zip(results, mistake.results, expected, strict=True)
        return all(_same(got, wrong) or (partly and _same(got, right)) for got, wrong, right in triples)
    n = len(results)
    return [_wrong_chunks(n, got, right) for got, right in zip(results, expected, strict=True)] == list(mistake.chunks)


def _wrong_chunks(n: int, got: torch.Tensor, right: torch.Tensor) -> set[int]:
    """The numbers of the chunks that differ; of all where the shape does."""
    if got.shape != right.shape:
        return set(range(n))
    pairs = zip(got.tensor_split(n), right.tensor_split(n), strict=True)
    return {i for i, (mine, theirs) in enumerate(pairs) if not _same(mine, theirs)}


def _detour(trial: Trial) -> str:
    """The hint of the way that all messages took, if it is a known one."""
    return next((detour.hint for detour in trial.case.detours if _took(trial, detour)), "")


def _took(trial: Trial, detour: Detour) -> bool:
    sent = Counter((rank, call.peer) for rank in range(trial.case.n) for call in _sends(trial, rank))
    there = Counter((m.source, m.destination) for messages in detour.rounds for m in messages if m.count)
    return sent == there != Counter((m.source, m.destination) for m in _messages(trial))


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
