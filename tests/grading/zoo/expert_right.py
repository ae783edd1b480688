"""What the zoo of expert parallelism is made of: right answers, in parts that wrong ones leave out or replace."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import me


class Way(NamedTuple):
    """As the exercise has it."""

    order_S: torch.Tensor
    sent: list[int]
    received: list[int]
    sorted_R: torch.Tensor


class RightRoute:
    """A right answer to route."""

    def __call__(self, logits, bias, top_k, n, limit):
        self.n, self.limit, self.top_k, self.bias, self.logits = n, limit, top_k, bias, logits
        scores = self.scores(logits)
        wanted = self.wanted(scores)
        hidden = wanted.masked_fill(~self.near(self.ranked(scores)), self.hidden())
        experts = self.chosen(hidden)
        return self.shaped(experts, self.gates(scores, experts))

    def scores(self, logits):
        return logits.sigmoid()

    def wanted(self, scores):
        return (scores + self.bias).detach()

    def ranked(self, scores):
        return self.wanted(scores)

    def hidden(self):
        return -torch.inf

    def ranks(self, experts):
        return torch.arange(experts) % self.n

    def strong(self, wanted):
        return wanted.amax(-1)

    def near(self, ranked):
        at = self.ranks(ranked.shape[1])
        strong = torch.stack([self.strong(ranked[:, at == rank]) for rank in range(self.n)], 1)
        best = strong.topk(self.limit).indices
        return (at[None, :, None] == best[:, None, :]).any(-1)

    def chosen(self, wanted):
        return wanted.topk(self.top_k).indices

    def gates(self, scores, experts):
        return self.normalised(scores.gather(1, experts))

    def normalised(self, gates):
        return gates / gates.sum(1, keepdim=True)

    def shaped(self, experts, gates):
        return experts.T, gates.T


class RightDrop:
    """A right answer to drop."""

    def __call__(self, experts_KT, gates_KT, experts, factor):
        self.gates_KT, self.experts, self.factor = gates_KT, experts, factor
        kept = self.kept(experts_KT, self.capacity(experts_KT))
        return self.marked(experts_KT, kept), self.left(gates_KT, kept)

    def capacity(self, experts_KT):
        return math.ceil(self.factor * self.count(experts_KT) / self.experts)

    def count(self, experts_KT):
        return experts_KT.numel()

    def order(self, experts_KT):
        return range(experts_KT.numel())

    def kept(self, experts_KT, capacity):
        copies, taken = experts_KT.flatten().tolist(), [0] * self.experts
        kept = torch.zeros(len(copies), dtype=torch.bool)
        for number in self.order(experts_KT):
            kept[number] = self.has_place(taken[copies[number]], capacity)
            taken[copies[number]] += 1
        return kept.view_as(experts_KT)

    def has_place(self, taken, capacity):
        return taken < capacity

    def marked(self, experts_KT, kept):
        return experts_KT.where(kept, -1)

    def left(self, gates_KT, kept):
        return gates_KT * kept


def sent_rows(rows, sent, received):
    """A bare uneven all-to-all."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class RightExchange(torch.autograd.Function):
    """A right Exchange; there, back: how rows and gradients go."""

    @staticmethod
    def there(rows, sent, received):
        return sent_rows(rows, sent, received)

    @staticmethod
    def back(grad, sent, received):
        return sent_rows(grad, received, sent)

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = sent, received
        return ctx._forward_cls.there(rows, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return ctx._forward_cls.back(grad, *ctx.splits), None, None


class RightDispatch:
    """A right answer to dispatch."""

    def __call__(self, x, experts_KT, experts, exchange):
        (self.r, self.n), self.x, self.experts_KT, self.experts = me(), x, experts_KT, experts
        self.top_k, self.tokens, self.local = len(experts_KT), len(x), experts // me()[1]
        self.exchange = exchange
        copies = self.copies()
        order = self.order(copies)
        going = self.going(copies[order])
        coming = self.coming(going)
        sent, received = self.by_rank(going), self.by_rank(coming)
        arrived = self.travel(self.rows(order), sent, received)
        arrival = self.arrival(coming)
        return self.packed(arrived, arrival, going, coming, order, sent, received)

    def copies(self):
        return self.experts_KT.flatten()

    def place(self, copies):
        """Rank by rank, each with its experts."""
        return (copies % self.n) * self.local + copies // self.n

    def order(self, copies):
        there = (copies >= 0).nonzero()[:, 0]
        return there[self.place(copies[there]).argsort(stable=True)]

    def going(self, sent):
        return self.place(sent).bincount(minlength=self.experts)

    def coming(self, going):
        out = torch.empty_like(going)
        dist.all_to_all_single(out, going)
        return out

    def by_rank(self, counts):
        return counts.view(self.n, -1).sum(1).tolist()

    def token(self, order):
        return order % max(self.tokens, 1)

    def rows(self, order):
        return self.x[self.token(order)]

    def travel(self, rows, sent, received):
        return self.exchange(rows, sent, received)

    def arrival(self, coming):
        experts = torch.arange(self.local).repeat(self.n).repeat_interleave(coming)
        return experts.argsort(stable=True)

    def counts(self, going, coming):
        return coming.view(self.n, -1).sum(0)

    def packed(self, arrived, arrival, going, coming, order, sent, received):
        return arrived[arrival], self.counts(going, coming), Way(order, sent, received, arrival)


class RightCombine:
    """A right answer to combine."""

    def __call__(self, y, gates, way, exchange):
        self.way, self.exchange, self.gates = way, exchange, gates
        self.top_k, self.tokens = gates.shape
        home = self.travel(self.back(y), way.received, way.sent)
        return self.added(home, self.gate(gates))

    def back(self, y):
        return y[self.way.sorted_R.argsort()]

    def travel(self, rows, sent, received):
        return self.exchange(rows, sent, received)

    def gate(self, gates):
        return gates.flatten()[self.way.order_S]

    def token(self, order):
        return order % max(self.tokens, 1)

    def added(self, home, gate):
        out = home.new_zeros(self.tokens, home.shape[1])
        return out.index_add(0, self.token(self.way.order_S), self.weighted(home, gate))

    def weighted(self, home, gate):
        return gate[:, None] * home


class RightBalance:
    """A right answer to balance."""

    def __call__(self, probabilities, experts_KT, bias, speed):
        (self.r, self.n), self.experts, self.top_k = me(), len(bias), len(experts_KT)
        self.bias, self.speed = bias, speed
        own = self.own(experts_KT)
        counts = self.reduced(own)
        return self.loss(self.share(counts), self.mean(probabilities, counts)), self.moved(counts)

    def own(self, experts_KT):
        return experts_KT.flatten().bincount(minlength=self.experts)

    def reduced(self, counts):
        counts = counts.clone()
        dist.all_reduce(counts)
        return counts.double()

    def share(self, counts):
        return counts / counts.sum().clamp(min=1)

    def mean(self, probabilities, counts):
        return probabilities.sum(0) * self.n * self.top_k / counts.sum()

    def loss(self, share, mean):
        return self.experts * (share * mean).sum()

    def moved(self, counts):
        return self.bias + self.step(counts)

    def step(self, counts):
        return self.speed * (1 - counts / counts.mean())


class RightAverage:
    """A right answer to average."""

    def __call__(self, dense, experts, replicas):
        (self.r, self.n), self.replicas = me(), replicas
        self.size = dist.get_world_size(replicas)
        self.e = self.n // self.size
        self.of_dense(dense)
        self.of_experts(experts)

    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), None) / self.n)

    def of_experts(self, experts):
        self.put(experts, self.summed(self.flat(experts), self.replicas) / self.n)

    def gradient(self, parameter):
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def flat(self, parameters):
        return torch.cat([self.gradient(parameter).flatten() for parameter in parameters])

    def summed(self, flat, group):
        dist.all_reduce(flat, group=group)
        return flat

    def put(self, parameters, flat):
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
