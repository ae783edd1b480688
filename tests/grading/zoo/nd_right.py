"""What learners' answers to the tasks of 10_nd_parallel have in common: parts that a wrong one replaces."""

import math
from itertools import permutations

import torch
import torch.distributed as dist


def strides(sizes):
    found, stride = {}, 1
    for axis in reversed(sizes):
        found[axis], stride = stride, stride * sizes[axis]
    return found


def table(sizes):
    return torch.arange(math.prod(sizes.values())).view(*sizes.values())


def groups_of(sizes, axes):
    names = list(sizes)
    inside = [i for i, axis in enumerate(names) if axis in axes]
    outside = [i for i, axis in enumerate(names) if axis not in axes]
    size = math.prod(sizes[names[i]] for i in inside)
    return table(sizes).permute(*outside, *inside).reshape(-1, size).tolist()


class RightAverage:
    """Groups, then sums over tp, then the mean over data."""

    def __call__(self, sizes, weights):
        self.sizes, self.weights = sizes, weights
        self.tp, self.data = self.make(self.axes_of_tp()), self.make(self.axes_of_data())
        self.over_tp()
        self.over_data()

    def axes_of_tp(self):
        return ("tp",)

    def axes_of_data(self):
        return ("dp", "cp")

    def groups(self, axes):
        return groups_of(self.sizes, axes)

    def make(self, axes):
        for row in self.groups(axes):
            group = dist.new_group(row)
            if dist.get_rank() in row:
                own = group
        return own

    def grads(self, *kinds):
        return [w.parameter.grad for w in self.weights if w.kind in (kinds or ("cut", "whole", "partial"))]

    def summed_kinds(self):
        return ("partial",)

    def over_tp(self):
        self.add_up(self.grads(*self.summed_kinds()), self.tp)

    def over_data(self):
        self.add_up(self.grads(), self.data)
        for grad in self.grads():
            grad /= self.divisor()

    def divisor(self):
        return dist.get_world_size(self.data)

    def row(self, grads):
        return torch.cat([grad.flatten() for grad in grads])

    def reduce(self, flat, group):
        dist.all_reduce(flat, group=group)

    def add_up(self, grads, group):
        flat = self.row(grads)
        self.reduce(flat, group)
        self.put(grads, flat)

    def put(self, grads, flat):
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


class RightPlace:
    def __call__(self, traffic, sizes, node):
        self.traffic, self.sizes, self.node = traffic, sizes, node
        return self.form(self.choose(permutations(sizes)))

    def form(self, order):
        return order

    def choose(self, orders):
        return min(orders, key=self.crossing)

    def crossing(self, order):
        return sum(self.traffic[axis] * self.share(order, i) for i, axis in enumerate(order))

    def share(self, order, i):
        home = table({axis: self.sizes[axis] for axis in order}) // self.node
        return (home != home.roll(-1, i)).double().mean().item()


class RightMisplaced(RightPlace):
    def __call__(self, run):
        self.run, self.sizes, self.node = run, run.sizes, run.node
        self.traffic, self.between = self.bytes(lambda rank, call: True), self.bytes(self.leaves)
        return self.form((self.axis(), self.order()))

    def counted(self):
        return range(len(self.run.calls))

    def calls(self):
        return [(rank, call) for rank in self.counted() for call in self.run.calls[rank]]

    def leaves(self, rank, call):
        following = call.ranks[(call.ranks.index(rank) + 1) % len(call.ranks)]
        return rank // self.run.node != following // self.run.node

    def amount(self, call):
        return call.sent

    def bytes(self, counts):
        found = dict.fromkeys(self.run.sizes, 0)
        for rank, call in self.calls():
            found[call.axis] += self.amount(call) if counts(rank, call) else 0
        return found

    def axis(self):
        return max(self.between, key=self.between.get)

    def order(self):
        return self.choose(permutations(self.run.sizes))


class RightDrifting:
    def __call__(self, run):
        self.run = run
        return self.form((self.axis(), self.groups()))

    def form(self, answer):
        return answer

    def at(self, rank, axis):
        return rank // strides(self.run.sizes)[axis] % self.run.sizes[axis]

    def calls(self):
        return [call for calls in self.run.calls for call in calls if call.axis == "data"]

    def axis(self):
        for call in self.calls():
            for axis in ("cp", "dp"):
                if len({self.at(rank, axis) for rank in call.ranks}) < self.run.sizes[axis]:
                    return axis
        return None

    def axes(self):
        return ("dp", "cp")

    def groups(self):
        return groups_of(self.run.sizes, self.axes())


class RightStraggler:
    def __call__(self, run):
        self.run, self.ranks = run, range(len(run.spans))
        self.own = self.times()
        return self.form(self.answer())

    def form(self, answer):
        return answer

    def spent(self, kind):
        return [sum(span.finished - span.started for span in spans if span.kind == kind) for spans in self.run.spans]

    def times(self):
        found = {}
        for span in (span for spans in self.run.spans for span in spans if span.kind == "call"):
            found.setdefault(span.call, []).append(span.finished - span.started)
        return {number: self.of_call(both) for number, both in found.items()}

    def of_call(self, spans):
        return min(spans)

    def stage(self, rank):
        return rank // strides(self.run.sizes)["pp"] % self.run.sizes["pp"]

    def peers(self, rank):
        return [one for one in self.ranks if self.stage(one) == self.stage(rank)]

    def answer(self):
        compute = self.spent("compute")
        for rank in self.ranks:
            if compute[rank] > 1.1 * min(compute[one] for one in self.peers(rank)):
                return rank, "computes"
        return self.sender(), "sends"

    def sender(self):
        return max(self.ranks, key=self.slowness)

    def usual(self):
        found = {}
        for call in (call for calls in self.run.calls for call in calls if call.sent):
            kind = (call.op, call.axis, call.sent)
            found[kind] = min(self.own[call.number], found.get(kind, math.inf))
        return found

    def far(self, rank):
        calls = [call for call in self.run.calls[rank] if call.sent]
        return [call for call in calls if len({one // self.run.node for one in call.ranks}) > 1]

    def of_rank(self, ratios):
        return min(ratios)

    def slowness(self, rank):
        usual = self.usual()
        return self.of_rank([self.own[c.number] / usual[c.op, c.axis, c.sent] for c in self.far(rank)])
