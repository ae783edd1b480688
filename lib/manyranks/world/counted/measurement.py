"""The result of `world.measure`: what the ranks returned, with what was counted while they ran."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from manyranks.measure.budget import Budget, budget
from manyranks.measure.calls import Call
from manyranks.measure.divergence import describe, first_divergence
from manyranks.measure.profile import Profile
from manyranks.theory import collectives
from manyranks.theory.cluster import Cluster
from manyranks.theory.replay_costs import ClusterCosts
from manyranks.timeline import Program, Span, Timeline, replay
from manyranks.timeline.intervals import outside
from manyranks.timeline.spans import COMMUNICATION, COMPUTE
from manyranks.world import cells
from manyranks.world.counted import programs
from manyranks.world.rank.recording import Recording

# The algorithm whose bytes are an operation's nominal ones; those of broadcast and reduce are gloo's.
_NOMINAL = {"broadcast": "tree", "scatter": "naive", "gather": "naive"}


@dataclass(frozen=True)
class Measurement:
    """A measured run. Bytes are ints, times seconds; a rank of the world is the key, or the index, of each part.

    ranks: those that ran
    results: as run() returns
    calls: the communication calls of each rank, in the order issued
    payload_bytes: payload of each rank's own sends, and for a backend's collective the operation's nominal bytes
    sent_bytes: what left the process on its sockets, or None where the system does not count it
    flops, peak_bytes: None unless asked for
    divergence: the first place where the ranks' calls do not match, or None
    profiles: of each rank, None unless asked for
    no_bytes: why sent_bytes is None
    """

    ranks: tuple[int, ...]
    results: list
    calls: dict[int, list[Call]]
    payload_bytes: dict[int, int]
    sent_bytes: dict[int, int] | None
    flops: dict[int, int] | None
    peak_bytes: dict[int, int] | None
    divergence: str | None
    profiles: dict[int, Profile] | None
    no_bytes: str | None
    _recordings: dict[int, Recording]

    @cached_property
    def timeline(self) -> Timeline:
        """Compute and communication of all ranks on one clock, whose zero is the moment the first one began.

        A rank computes where its main thread is not waiting for communication.
        """
        zero = min(recording.started for recording in self._recordings.values())
        spans: list[Span] = []
        for rank, recording in self._recordings.items():
            waits = [(event.started, event.finished) for event in recording.journal if event.waits]
            for start, end in outside(waits, recording.started, recording.finished):
                spans.append(Span(rank, COMPUTE, "compute", start - zero, end - zero))
            for call in self.calls[rank]:
                end = recording.finished if call.finished is None else call.finished
                spans.append(Span(rank, COMMUNICATION, describe(call), call.started - zero, end - zero))
        return Timeline(tuple(spans))

    @cached_property
    def budgets(self) -> dict[int, Budget]:
        """Splits each rank's time into matmul, other operators, communication, waiting and Python, in seconds.

        Raises ValueError where the run was not measured with profile=True.
        """
        if self.profiles is None:
            raise ValueError("this run has no budgets: measure it with profile=True")
        waits = programs.waits_of(self.calls, self._recordings)
        return {rank: budget(self.profiles[rank], own) for rank, own in waits.items()}

    @cached_property
    def program(self) -> Program:
        """The calls that the ranks issued, in order, with the FLOPs and bytes in between where flops=True counted them.

        Raises ValueError where the ranks' calls diverge, or a message may come from any rank.
        """
        if self.divergence:
            raise ValueError(f"the ranks' calls diverge, so that they have no common order: {self.divergence}")
        return programs.program(self.calls, self._recordings)

    @cached_property
    def rounds(self) -> list[tuple[programs.Message, ...]]:
        """The messages between ranks, (source, destination, bytes), round by round, as theory.collectives.rounds has them.

        Not by the laptop's clock: a message takes one round, and starts as soon as both its ranks have come to it. The
        messages inside a backend's collective are not seen. Raises ValueError as `program` does.
        """
        return programs.rounds(self.program)

    def replay(self, cluster: Cluster, sharing: bool = False) -> Timeline:
        """The same program on a virtual clock: rank r is the r-th accelerator of the cluster. Deterministic.

        Computing is charged by its FLOPs and bytes; without measure(..., flops=True) it takes no time.

        sharing: transfers of one rank that are under way together share its part of the network

        Raises ValueError as `program` does, and for a cluster with fewer accelerators than ranks.
        """
        return replay(self.program, ClusterCosts(cluster), sharing)

    def __repr__(self) -> str:
        columns = {"rank": self.ranks, "calls": [len(self.calls[r]) for r in self.ranks]}
        for name in ("payload_bytes", "sent_bytes", "flops", "peak_bytes"):
            if (values := getattr(self, name)) is not None:
                columns[name.replace("_", " ")] = [f"{values[r]:,}" for r in self.ranks]
        rows = [list(columns), *([str(v) for v in row] for row in zip(*columns.values(), strict=True))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        if self.sent_bytes is None:
            lines.append(f"sent bytes: not counted; {self.no_bytes}")
        if self.divergence:
            lines.append(f"the ranks' calls diverge: {self.divergence}")
        return "\n".join(lines)


def measurement(results: list, recordings: dict[int, Recording]) -> Measurement:
    """Puts together what the ranks recorded.

    recordings: rank -> Recording, for the ranks that ran
    """
    calls = {rank: [replace(call, where=cells.label(call.where)) for call in own.calls] for rank, own in recordings.items()}
    no_bytes = next((r.no_bytes for r in recordings.values() if r.no_bytes), None)
    return Measurement(
        ranks=tuple(recordings),
        results=results,
        calls=calls,
        payload_bytes={rank: sum(payload(call, rank) for call in issued) for rank, issued in calls.items()},
        sent_bytes=None if no_bytes else _of("sent_bytes", recordings),
        flops=_of("flops", recordings),
        peak_bytes=_of("peak_bytes", recordings),
        divergence=first_divergence(calls),
        profiles=_of("profile", recordings),
        no_bytes=no_bytes,
        _recordings=recordings,
    )


def payload(call: Call, rank: int) -> int:
    """Bytes of payload that the call makes this rank send: its own for a send, the operation's nominal for a collective."""
    if call.op in ("send", "recv", "barrier") or not call.bytes:
        return call.bytes if call.op == "send" else 0
    if call.op == "all_to_all":
        return call.bytes - call.parts[call.ranks.index(rank)]
    n, root = len(call.ranks), call.ranks.index(call.peer) if call.peer is not None else 0
    whole = programs.whole_bytes(call)
    itemsize = getattr(torch, call.dtype).itemsize
    algorithm = _NOMINAL.get(call.op, "ring")
    sent = collectives.sent_bytes(call.op, whole // itemsize, itemsize, n, algorithm, root)
    return sent[call.ranks.index(rank)]


def _of(name: str, recordings: dict[int, Recording]) -> dict[int, Any] | None:
    values = {rank: getattr(recording, name) for rank, recording in recordings.items()}
    return None if None in values.values() else values
