"""What learners' answers to the tasks of 09_mfu on several ranks have in common: parts that a wrong one replaces."""

import statistics
from itertools import pairwise

import torch
import torch.distributed as dist

PARTS = ("matmul", "other", "communication", "waiting", "python")


class RightTime:
    def __call__(self, launch, synchronise, clock, warmup, repeats, inner):
        self.launch, self.synchronise, self.clock = launch, synchronise, clock
        self.warmup, self.repeats, self.inner = warmup, repeats, inner
        self.warm()
        return self.form(self.of_job(self.times()))

    def form(self, time):
        return time

    def warm(self):
        for _ in range(self.warmup):
            self.launch()
        self.synchronise()

    def times(self):
        return [self.measurement() / self.divisor() for _ in range(self.repeats)]

    def measurement(self):
        started = self.clock()
        self.work()
        self.end()
        return self.clock() - started

    def work(self):
        for _ in range(self.inner):
            self.launch()

    def end(self):
        self.synchronise()

    def divisor(self):
        return self.inner

    def sent(self, times):
        return torch.tensor(times, dtype=torch.float64)

    def op(self):
        return dist.ReduceOp.MAX

    def exchanged(self, row):
        dist.all_reduce(row, op=self.op())
        return row

    def of_job(self, times):
        return self.middle(self.exchanged(self.sent(times)).tolist())

    def middle(self, times):
        return statistics.median(times)


class RightBudget:
    def __call__(self, spans, arrived, step, zero):
        self.spans, self.arrived, self.step, self.zero = spans, arrived, step, zero
        self.last = self.moments()
        return self.form(self.parts())

    def form(self, parts):
        return parts

    def sent(self):
        return torch.tensor(self.arrived, dtype=torch.float64) - self.zero

    def exchanged(self, row):
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        return row

    def moments(self):
        return (self.exchanged(self.sent()) + self.zero).tolist()

    def parts(self):
        parts = dict.fromkeys(PARTS, 0.0)
        for begin, end in pairwise(self.edges()):
            parts[self.part_of(begin, end)] += end - begin
        return parts

    def edges(self):
        begins, ends = ([getattr(span, name) for span in self.spans] for name in ("started", "finished"))
        return sorted({one for one in (*self.last, *self.step, *begins, *ends) if self.within(one)})

    def within(self, moment):
        return self.step[0] <= moment <= self.step[1]

    def part_of(self, begin, end):
        covering = [span for span in self.spans if span.started <= begin and end <= span.finished]
        return self.part(self.choice(covering), end) if covering else "python"

    def choice(self, covering):
        return max(covering, key=lambda span: span.started)

    def part(self, span, end):
        if span.kind == "wait":
            return "waiting" if end <= self.last[span.call] else "communication"
        return self.of_calls() if span.kind == "calls" else span.kind

    def of_calls(self):
        return "python"


class BySpans(RightBudget):
    """Span by span: its own time is what the spans directly inside it leave."""

    def parts(self):
        parts = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            if span.kind == "wait":
                waiting, communication = self.of_wait(span, self.last[span.call])
                parts["waiting"] += waiting
                parts["communication"] += communication
            elif span.kind != "calls":
                parts[span.kind] += self.own(span)
        parts["python"] = self.left(parts)
        return parts

    def own(self, span):
        return span.finished - span.started - sum(one.finished - one.started for one in self.inside(span))

    def inside(self, span):
        """Those directly in it."""
        inner = [one for one in self.spans if self.holds(span, one)]
        return [one for one in inner if not any(self.holds(other, one) for other in inner)]

    def holds(self, outer, one):
        return one is not outer and outer.started <= one.started and one.finished <= outer.finished

    def of_wait(self, wait, last):
        waiting = max(0.0, min(last, wait.finished) - wait.started)
        return waiting, wait.finished - wait.started - waiting

    def left(self, parts):
        return self.step[1] - self.step[0] - sum(parts.values())
