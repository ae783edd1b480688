"""Tasks that are solved with messages between two ranks: what must travel, and the mistakes known by their traces."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from manyranks.grade import probe
from manyranks.grade.check import Task
from manyranks.grade.compare import difference, form, same, sizes
from manyranks.grade.journal import Entry
from manyranks.grade.report import Line, listed
from manyranks.grade.trial import Trial
from manyranks.grade.trouble import SAME_CHUNK, clash, place
from manyranks.grade.verdict import Aspect, Finding, Verdict
from manyranks.measure.calls import Call
from manyranks.measure.operators import POINT_TO_POINT
from manyranks.theory.collectives import Round

_WAIT = "isend and irecv return at once: keep what they return and call .wait() on it"
_CUTS = "cut with torch.tensor_split: torch.chunk and torch.split make other sizes where N does not divide E"


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer. results: rank -> what it returns if not what is right; hint: what to tell the learner."""

    hint: str
    results: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Missing:
    """A typical wrong answer that is right but for some chunks, whatever stands there. chunks: rank -> the numbers of these."""

    hint: str
    chunks: tuple[set[int], ...]


@dataclass(frozen=True)
class Detour:
    """A typical wrong way. rounds: the messages that travel then; hint: what to tell the learner."""

    hint: str
    rounds: list[Round]


@dataclass(frozen=True)
class Case:
    """One call on every rank of a world. arguments, expected: by rank; rounds: the messages that must travel, in theory.

    note: what distinguishes it beside its size, "root = 3".
    """

    arguments: tuple[tuple, ...]
    expected: tuple[torch.Tensor, ...]
    rounds: list[Round]
    mistakes: tuple[Mistake | Missing, ...] = ()
    detours: tuple[Detour, ...] = ()
    note: str = ""

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.arguments)

    @property
    def job(self) -> tuple:
        """What a rank runs: a probe, and its arguments after the learner's function."""
        return probe.answer, self.arguments

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.expected[0].itemsize

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return max(message.start + message.count for messages in self.rounds for message in messages)

    def __str__(self) -> str:
        return f"on {self.n} ranks with {self.elements:,} elements"


def _foreign_call(done: list[Trial]) -> Finding | None:
    """Where the function calls an operation that the backend has ready; a call that raised is in the notes alone."""
    for trial in done:
        for rank, call in _calls(trial):
            if call.op not in POINT_TO_POINT:
                what, found = "is built from send and receive only", f"{trial.case}, rank {rank} called {call.op}"
                where = f" ({place(call.frames)})" if isinstance(call, Entry) else ""
                hint = f"write it with dist.send, recv, isend, irecv or batch_isend_irecv{where}"
                return Finding(Line(False, what, found, hint), trial)
    return None


def _calls(trial: Trial) -> Iterator[tuple[int, Entry | Call]]:
    """Rank and call: as the ranks noted them, then as the world counted them, which sees those of any thread."""
    for noted in (trial.notes, trial.calls):
        yield from ((rank, call) for rank, calls in noted.items() for call in calls)


def _values(task: "MessageTask", trial: Trial) -> Verdict:
    for rank, (answer, right) in enumerate(zip(trial.answers, trial.case.expected, strict=True)):
        got = answer.result
        if got is None:
            return Verdict(False, f"rank {rank} returned {answer.kind}", "return the result: a tensor")
        if not same(got, right):
            return Verdict(False, *_wrong(task, trial, rank, got, right))
    if early := _unwaited(trial, "recv"):
        return Verdict(False, f"{early}: the values are right by luck", _WAIT)
    return Verdict(True)


def _wrong(task: "MessageTask", trial: Trial, rank: int, got: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    """What is wrong with a rank's result, and a hint."""
    hint = _WAIT if trial.unwaited else _known(trial) or _detour(trial) or _known(trial, partly=True)
    if got.shape != right.shape or got.dtype != right.dtype:
        found = f"rank {rank} returned {form(got)}; right is {form(right)}"
        if got.shape == right.shape:
            return found, f"right shape, wrong dtype: take dtype={task.argument}.dtype"
        return found, hint or "the table above the task says how many elements to return"
    unequal = clash(trial.notes, also_smaller=True)
    return f"rank {rank}: {difference(got, right)}", hint or (": ".join(unequal) if unequal else "")


def _unwaited(trial: Trial, op: str) -> str:
    ranks = [rank for rank, kind in trial.unwaited if kind == op]
    return f"rank {ranks[0]} did not wait for {ranks.count(ranks[0])} of its messages" if ranks else ""


def _traffic(task: "MessageTask", trial: Trial) -> Verdict:
    must = [0] * trial.case.n
    for message in _messages(trial):
        must[message.source] += message.count * trial.case.itemsize
    sent = [sum(call.bytes for call in _sends(trial, rank)) for rank in range(trial.case.n)]
    for rank in range(trial.case.n):
        if sent[rank] != must[rank]:
            there, here = sizes(sent[rank], must[rank])
            found = f"rank {rank} sent {there}; {task.algorithm} sends {here}"
            return Verdict(False, found, _traffic_hint(task, trial, rank, sum(sent)))
    return Verdict(True)


def _traffic_hint(task: "MessageTask", trial: Trial, rank: int, total: int) -> str:
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


def _messages_right(task: "MessageTask", trial: Trial) -> Verdict:
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


def _messages_hint(task: "MessageTask", peers: list[int], must: list[int]) -> str:
    if not peers:
        return ""
    if len(peers) == len(must) and len(set(peers)) == len(set(must)) == 1:
        return f"that is the wrong neighbour: {task.reminder}"
    if Counter(peers) == Counter(must):
        return "the right messages in the wrong order"
    if set(peers) == set(must):
        return f"{len(must)} messages are needed, not {len(peers)}: too {'many' if len(peers) > len(must) else 'few'} steps"
    return task.reminder


def _input(task: "MessageTask", trial: Trial) -> Verdict:
    for rank, answer in enumerate(trial.answers):
        if not same(answer.argument, trial.case.arguments[rank][0]):
            found = f"rank {rank}'s input has changed"
            return Verdict(False, found, "work on a copy: chunks of torch.tensor_split are views of the input")
    return Verdict(True)


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
        return all(same(got, wrong) or (partly and same(got, right)) for got, wrong, right in triples)
    n = len(results)
    return [_wrong_chunks(n, got, right) for got, right in zip(results, expected, strict=True)] == list(mistake.chunks)


def _wrong_chunks(n: int, got: torch.Tensor, right: torch.Tensor) -> set[int]:
    """The numbers of the chunks that differ; of all where the shape does."""
    if got.shape != right.shape:
        return set(range(n))
    pairs = zip(got.tensor_split(n), right.tensor_split(n), strict=True)
    return {i for i, (mine, theirs) in enumerate(pairs) if not same(mine, theirs)}


def _detour(trial: Trial) -> str:
    """The hint of the way that all messages took, if it is a known one."""
    return next((detour.hint for detour in trial.case.detours if _took(trial, detour)), "")


def _took(trial: Trial, detour: Detour) -> bool:
    sent = Counter((rank, call.peer) for rank in range(trial.case.n) for call in _sends(trial, rank))
    there = Counter((m.source, m.destination) for messages in detour.rounds for m in messages if m.count)
    return sent == there != Counter((m.source, m.destination) for m in _messages(trial))


def _messages(trial: Trial) -> list:
    """Those of theory that carry anything, in order."""
    return [message for messages in trial.case.rounds for message in messages if message.count]


def _sends(trial: Trial, rank: int) -> list:
    return [call for call in trial.calls[rank] if call.op == "send" and call.bytes]


def _peers(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    times = [f"rank {rank}" + (f" ({count} times)" if count > 1 else "") for rank, count in Counter(ranks).items()]
    return listed(times)


@dataclass(frozen=True)
class MessageTask(Task):
    """algorithm: its name in a report, "this ring"; reminder: the hint for messages that no known mistake explains.

    argument: the name of the function's tensor; in_order: whether a rank's messages must come in the order of theory; room:
    how large it is to be for what comes, where ranks do not mean the same chunk; remark: a line on a right answer, for no
    points.
    """

    algorithm: str
    reminder: str
    argument: str = "x_E"
    in_order: bool = True
    room: str = SAME_CHUNK
    remark: Callable[[Trial], Line] | None = None

    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("returns the right values", 0.5, _values, each_world=True),
        Aspect("sends no more and no less than it must", 0.25, _traffic, last=True),
        Aspect("sends its messages to the right ranks", 0.15, _messages_right),
        Aspect("leaves its input as it was", 0.1, _input, each_world=True),
    )

    def refusal(self, tried: list[Trial]) -> Finding | None:
        return _foreign_call(tried)

    def line(self, finding: Finding, function) -> Line:
        line = _recut(finding, function)
        return replace(line, hint=line.hint.replace(SAME_CHUNK, self.room))

    def remarks(self, trial: Trial) -> list[Line]:
        return [self.remark(trial)] if self.remark else []


def _recut(finding: Finding, function) -> Line:
    """The line with another hint where torch.chunk explains it: of the sizes tried, only 7 on 3 ranks show the difference."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    cuts = {"chunk", "split"}.intersection(names)
    trial = finding.trial
    shows = trial is not None and trial.case.n == 3 and not (trial.trouble and trial.trouble.hung)
    return replace(finding.line, hint=_CUTS) if cuts and shows else finding.line
