"""A Timeline: what each rank did and when, whether it was measured or replayed."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from manyranks.timeline.intervals import joined, total

COMPUTE, COMMUNICATION = "compute", "communication"


class Span(NamedTuple):
    """A thing that a rank did: `kind` is "compute" or "communication"; times in seconds on one clock."""

    rank: int
    kind: str
    name: str
    started: float
    finished: float

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, on a clock whose zero is the start of the first one.

    causes: for each span, the index of the one whose end let it start, or -1; `replay` knows them, a measurement does not.
    """

    spans: tuple[Span, ...]
    causes: tuple[int, ...] = ()

    @property
    def ranks(self) -> list[int]:
        return sorted(self._of_rank)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the first span to the end of the last."""
        if not self.spans:
            return 0.0
        return max(s.finished for s in self.spans) - min(s.started for s in self.spans)

    def of(self, rank: int, kind: str | None = None) -> list[Span]:
        """The spans of one rank in order of start, of one kind if it is given."""
        return [s for s in self._of_rank.get(rank, ()) if kind in (None, s.kind)]

    def busy(self, rank: int, kind: str = COMPUTE) -> float:
        """Seconds during which at least one span of this kind is open on the rank."""
        return _covered(self.of(rank, kind))

    def exposed_communication(self, rank: int) -> float:
        """Seconds of communication on the rank that no compute hides."""
        return _covered(self.of(rank)) - self.busy(rank, COMPUTE)

    def bubble(self, rank: int) -> float:
        """Share of the makespan that the rank spends not computing, between 0 and 1."""
        return 1 - self.utilization(rank)

    def utilization(self, rank: int) -> float:
        """Share of the makespan that the rank spends computing, between 0 and 1; 1 where no time passes."""
        return self.busy(rank) / self.makespan if self.makespan else 1.0

    def critical_path(self) -> list[Span]:
        """The chain of spans that set the makespan, in order of time: the end of each let the next one start.

        If several are equally long, one of them. Raises ValueError for a timeline without causes.
        """
        if len(self.causes) != len(self.spans):
            raise ValueError(
                "only a replayed timeline knows what let each span start; make this one with replay(program, costs)"
            )
        path: list[Span] = []
        index = max(range(len(self.spans)), key=lambda i: self.spans[i].finished, default=-1)
        while index >= 0:
            path.append(self.spans[index])
            index = self.causes[index]
        return path[::-1]

    def trace_events(self) -> list[dict]:
        """Events of the Chrome trace format: a process a rank, a thread a lane; microseconds."""
        events: list[dict] = []
        for rank in self.ranks:
            events.append(_label("process_name", rank, 0, f"rank {rank}"))
            lanes = [(kind, spans) for kind in (COMPUTE, COMMUNICATION) for spans in _lanes(self.of(rank, kind))]
            for lane, (kind, spans) in enumerate(lanes):
                events.append(_label("thread_name", rank, lane, kind))
                events += [_complete(span, lane) for span in spans]
        return events

    def save(self, path: str | Path) -> Path:
        """Writes a trace that ui.perfetto.dev and chrome://tracing open; returns its path."""
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"}))
        return path

    @cached_property
    def _of_rank(self) -> dict[int, list[Span]]:
        """Each rank's spans, in order of start."""
        found: dict[int, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.rank, []).append(span)
        return {rank: sorted(spans, key=lambda s: (s.started, s.finished)) for rank, spans in found.items()}


def _covered(spans: Iterable[Span]) -> float:
    """Seconds during which at least one of them is open."""
    return total(joined((span.started, span.finished) for span in spans))


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Spreads overlapping spans over as few lanes as possible: viewers want none to overlap in one."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].finished <= span.started), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _label(what: str, rank: int, lane: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _complete(span: Span, lane: int) -> dict:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": lane,
        "ts": span.started * 1e6,
        "dur": span.seconds * 1e6,
    }
