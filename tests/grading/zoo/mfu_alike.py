"""Other right answers to the tasks of 09_mfu, which must get full marks."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from tests.grading.zoo.mfu_right import RightForward, RightLost, RightMfu, RightStep
from tests.grading.zoo.mfu_right_ranks import PARTS, BySpans, RightBudget, RightTime


def by_products(m, batch, seq, predicted):
    """Every product as (m, k, n), summed."""
    tokens, size = batch * seq, m.hidden // m.heads
    widths = [m.hidden, m.kv_heads * size, m.kv_heads * size, m.hidden]
    products = {
        "attention": [(tokens, m.hidden, width) for width in widths] * m.layers,
        "scores": [(seq, size, seq), (seq, seq, size)] * (batch * m.heads * m.layers),
        "mlp": [(tokens, m.hidden, m.ffn)] * ((2 + m.gated) * m.dense_layers),
        "router": [(tokens, m.hidden, m.experts)] * (m.layers - m.dense_layers),
        "head": [(batch * predicted, m.hidden, m.vocab)],
    }
    chosen = (m.top_k + m.shared_experts) * (m.layers - m.dense_layers) * (2 + m.gated)
    products["mlp"] += [(tokens, m.hidden, m.expert_ffn)] * chosen
    return {name: sum(2 * m * k * n for m, k, n in each) for name, each in products.items()}


class AsFloats(RightForward):
    """In another order, as floats."""

    def form(self, found):
        return {name: float(found[name]) for name in sorted(found)}


class AsTensors(RightForward):
    def form(self, found):
        return {name: torch.tensor(flops) for name, flops in found.items()}


class StepFromTheHead(RightStep):
    """As backward goes: what is left before the first that learns has no backward."""

    def comes(self):
        learning = [i for i, layer in enumerate(self.layers) if layer.learns]
        return [bool(learning) and i >= learning[0] for i in range(len(self.layers))]

    def form(self, model, hardware):
        return [Fraction(model), np.float64(hardware)]


def step_by_products(layers, head, recompute, flash):
    """Forward, gradients of activations, gradients of weights, and what runs again, each by itself."""
    first = min((i for i, layer in enumerate(layers) if layer.learns), default=len(layers))
    forward = head + sum(layer.products + layer.scores for layer in layers)
    activations = head + sum(layer.products + 2 * layer.scores for layer in layers[first:])
    weights = head + sum(layer.products for layer in layers if layer.learns)
    parts = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[recompute]
    again = sum(parts[0] * layer.products + (parts[1] + 0.5 * flash) * layer.scores for layer in layers[first:])
    return forward + activations + weights, forward + activations + weights + again


class StepAsAnArray(RightStep):
    def form(self, model, hardware):
        return np.array([model, hardware])


class MfuByShapes(RightMfu):
    """The head by its name, the scores from 2 · 2 · 3."""

    def products(self):
        head = "embedding.tokens.weight" if self.run.tied else "head.projection.weight"
        layers = [name for name, shape in self.run.shapes.items() if name.startswith("layers.") and len(shape) > 1]
        return self.size(head) + sum(map(self.size, layers))

    def whole(self):
        return 3 * 2 * 2 * self.run.seq * self.run.hidden * self.run.layers

    def form(self, share):
        return torch.tensor(share, dtype=torch.float64)


class MfuByChip(RightMfu):
    """Of one chip's part of the tokens."""

    def tokens(self):
        return self.run.sequences * self.run.accumulate * self.run.seq / self.run.chips

    def chips(self):
        return 1

    def peak(self):
        flops, sparse = self.sheet[self.dtype()]
        return flops / (1 + sparse)

    def form(self, share):
        return np.float64(share)


class TimedFromEndToEnd(RightTime):
    """The end of a measurement is the begin of the next one."""

    def times(self):
        moments = [self.clock()]
        for _ in range(self.repeats):
            self.work()
            self.end()
            moments.append(self.clock())
        return [(end - begin) / self.inner for begin, end in pairwise(moments)]


class SynchronisesTwice(RightTime):
    """Before each measurement, too; divides at last."""

    def measurement(self):
        self.synchronise()
        return super().measurement()

    def divisor(self):
        return 1

    def middle(self, times):
        return super().middle(times) / self.inner


class TimesTheWarmup(RightTime):
    """And throws it away."""

    def warm(self):
        self.synchronise()
        self.clock()
        super().warm()
        self.clock()


class SortsByHand(RightTime):
    def exchanged(self, row):
        dist.all_reduce(row, op=self.op(), async_op=True).wait()
        return row

    def middle(self, times):
        ordered = sorted(times)
        return (ordered[(len(times) - 1) // 2] + ordered[len(times) // 2]) / 2


class TorchQuantile(RightTime):
    def of_job(self, times):
        return self.exchanged(self.sent(times)).quantile(0.5)


class BudgetWithAStack(BySpans):
    """One pass over the spans; each takes its time away from the one that it lies in."""

    def parts(self):
        parts, stack = dict.fromkeys(PARTS, 0.0), []
        for span in self.spans:
            while stack and stack[-1].finished <= span.started:
                stack.pop()
            seconds = span.finished - span.started
            if stack and stack[-1].kind in parts:
                parts[stack[-1].kind] -= seconds
            if span.kind == "wait":
                waiting, communication = self.of_wait(span, self.last[span.call])
                parts["waiting"] += waiting
                parts["communication"] += communication
            elif span.kind in parts:
                parts[span.kind] += seconds
            stack.append(span)
        parts["python"] = self.left(parts)
        return parts


class BudgetFromZero(RightBudget):
    """Everything on the clock that began at the barrier."""

    def __call__(self, spans, arrived, step, zero):
        moved = [span._replace(started=span.started - zero, finished=span.finished - zero) for span in spans]
        return super().__call__(moved, [one - zero for one in arrived], [one - zero for one in step], 0.0)


class BudgetOfTensors(BySpans):
    def sent(self):
        return torch.tensor([moment - self.zero for moment in self.arrived]).double() * 0 + super().sent()

    def form(self, parts):
        return {name: torch.tensor(seconds, dtype=torch.float64) for name, seconds in reversed(parts.items())}


class LostInFractions(RightLost):
    """By intensity and ridge."""

    def lost(self, one):
        ridge = self.peak / self.bandwidth
        if one.flops / self.moved(one) >= ridge:
            return 0.0
        return self.moved(one) / self.bandwidth * (1 - one.flops / self.moved(one) / ridge)

    def form(self, lost, saved):
        return [torch.tensor(lost, dtype=torch.float64), np.float64(saved)]


class LostAsAnArray(RightLost):
    def form(self, lost, saved):
        return np.array(lost), saved


def lost_by_tensors(operators, needed, peak, bandwidth):
    """What is saved tensor by tensor: a reading that is left out, a writing that is left out."""
    lost = [max(0, (sum(o.reads.values()) + sum(o.writes.values())) / bandwidth - o.flops / peak) for o in operators]
    run_of, number = {}, 0
    for i, one in enumerate(operators):
        number += one.flops > 0
        run_of[i] = None if one.flops else number
    made_by = {name: i for i, one in enumerate(operators) for name in one.writes}
    saved, seen = 0, set()
    for i, one in enumerate(operators):
        for name, size in one.reads.items():
            inside = name in made_by and run_of[made_by[name]] == run_of[i]
            if run_of[i] is not None and (inside or (run_of[i], name) in seen):
                saved += size
            seen.add((run_of[i], name))
        for name, size in one.writes.items():
            readers = {run_of[k] for k, other in enumerate(operators) if name in other.reads}
            if run_of[i] is not None and readers <= {run_of[i]} and name not in needed:
                saved += size
    return tuple(lost), saved / bandwidth


ANSWERS = [
    ("forward_flops", by_products),
    ("forward_flops", AsFloats),
    ("forward_flops", AsTensors),
    ("step_flops", StepFromTheHead),
    ("step_flops", step_by_products),
    ("step_flops", StepAsAnArray),
    ("mfu", MfuByShapes),
    ("mfu", MfuByChip),
    ("time_it", TimedFromEndToEnd),
    ("time_it", SynchronisesTwice),
    ("time_it", TimesTheWarmup),
    ("time_it", SortsByHand),
    ("time_it", TorchQuantile),
    ("time_budget", BudgetWithAStack),
    ("time_budget", BudgetFromZero),
    ("time_budget", BudgetOfTensors),
    ("lost_time", LostInFractions),
    ("lost_time", LostAsAnArray),
    ("lost_time", lost_by_tensors),
]
