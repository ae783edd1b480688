"""Answers to 08_expert: what is right, and the mistakes that are made: each changes some steps of the right answer."""

import math
from collections import namedtuple

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, right, slip

# fmt: off

# Task 1
@right("route")
class RightRoute:
    def __call__(self, logits, bias, top_k, n, limit):
        self.logits, self.bias, self.top_k, self.n, self.limit = logits, bias, top_k, n, limit
        scores = self.scores()
        near = self.near(self.ranked(scores).detach(), len(bias) // n)
        experts = self.wanted(scores).detach().masked_fill(~near, self.hidden).topk(top_k).indices
        return self.shaped(experts, self.normalized(self.gates(scores, experts)))

    hidden = -torch.inf

    def scores(self):
        return self.logits.sigmoid()

    def wanted(self, scores):
        return scores + self.bias

    def ranked(self, scores):
        return self.wanted(scores)

    def near(self, ranked, local):
        strong = self.strong(ranked.unflatten(1, (local, self.n)))
        return torch.zeros_like(strong).scatter(1, strong.topk(self.limit).indices, 1.0).bool().repeat(1, local)

    def strong(self, ranked):
        return ranked.amax(1)

    def gates(self, scores, experts):
        return scores.gather(1, experts)

    def normalized(self, gates):
        return gates / gates.sum(1, keepdim=True)

    def shaped(self, experts, gates):
        return experts.T, gates.T

@also_right("route")
class RoutesInLists(RightRoute):  # token by token; what it returns is contiguous
    def shaped(self, experts, gates):
        wanted = self.wanted(self.scores()).tolist()
        rows = [sorted(chosen, key=lambda i: -row[i]) for row, chosen in zip(wanted, experts.tolist(), strict=True)]
        table = torch.tensor(rows, dtype=torch.int64).view(len(rows), self.top_k)
        return [table.T.contiguous(), gates.T.contiguous()]

@also_right("route")
class RoutesByOnes(RightRoute):  # the ranks as a table of experts and ranks; gates by a one-hot product
    def near(self, ranked, local):
        table = torch.nn.functional.one_hot(torch.arange(ranked.shape[1]) % self.n, self.n).bool()
        best = torch.where(table, ranked[:, :, None], -torch.inf).amax(1)
        least = best.sort(1, descending=True).values[:, self.limit - 1 : self.limit]
        return ((best >= least)[:, None, :] & table).any(2)

    def gates(self, scores, experts):
        return (torch.nn.functional.one_hot(experts, scores.shape[1]) * scores[:, None, :]).sum(2)

def near_in_blocks(self, ranked, local):
    strong = ranked.unflatten(1, (self.n, local)).amax(2)
    return torch.zeros_like(strong).scatter(1, strong.topk(self.limit).indices, 1.0).bool().repeat_interleave(local, 1)

slip("route", "WithoutTheBias", 0, "the bias is missing: score + bias decides who is chosen", RightRoute,
    wanted=lambda self, scores: scores)
slip("route", "RanksWithoutTheBias", 0,
    "the bias is missing where ranks are chosen: their best expert has the largest score + bias", RightRoute,
    ranked=lambda self, scores: scores)
slip("route", "RoutesToBlocks", 0, "those are blocks of neighbors: here experts are dealt, and expert i lives on rank i % n",
    RightRoute, near=near_in_blocks)
slip("route", "MasksBlocks", 0,
    "ranks are found by one layout, masked by another: expert i is on rank i % n, so repeat, not interleave", RightRoute,
    near=lambda self, ranked, local: RightRoute.near(self, ranked, local)[:, : self.n].repeat_interleave(local, 1))
slip("route", "RoutesToAnyRank", 0, "a token goes to more than `limit` ranks: choose ranks first, and experts from these only",
    RightRoute, near=lambda self, ranked, local: torch.ones_like(ranked, dtype=torch.bool))

# DeepSeek-V3's rule

slip("route", "SumsOfTwo", 0,
    "a rank is as strong as its best expert, the one with the largest score + bias: not the sum of several", RightRoute,
    strong=lambda self, ranked: ranked.topk(2, 1).values.sum(1))
slip("route", "HidesWithZero", 0,
    "score + bias can be negative, and a hidden 0 or −1 larger: mask other ranks' experts with −∞", RightRoute, hidden=0.0)
slip("route", "Reshapes", 0, "the choices of different tokens are mixed: [T, K] becomes [K, T] by .T, not by reshape or view",
    RightRoute, shaped=lambda self, *pair: [one.reshape(self.top_k, -1) for one in pair])
slip("route", "BiasInTheGates", 1.2, "the bias is in the gates: it only chooses. Gates are made of scores alone", RightRoute,
    gates=lambda self, scores, experts: (scores + self.bias.detach()).gather(1, experts))
slip("route", "RawGates", 1.2, "the gates are not normalized: divide the chosen experts' scores by their sum", RightRoute,
    normalized=lambda self, gates: gates)
slip("route", "ConstantSum", 2.1,
    "the sum of the chosen scores is taken as a constant: it depends on the logits, too. No detach", RightRoute,
    normalized=lambda self, gates: gates / gates.detach().sum(1, keepdim=True))
slip("route", "DetachedGates", 2.1,
    "the gates have no way back to the logits: no detach, no no_grad, no new tensor from numbers", RightRoute,
    gates=lambda self, scores, experts: scores.detach().gather(1, experts))

# Task 2
@right("drop")
class RightDrop:
    def __call__(self, experts_KT, gates_KT, experts, factor):
        self.experts, self.factor = experts, factor
        kept = self.kept(experts_KT, self.capacity(experts_KT))
        return self.marked(experts_KT, kept), self.left(gates_KT, kept)

    def capacity(self, experts_KT):
        return math.ceil(self.factor * experts_KT.numel() / self.experts)

    def kept(self, experts_KT, capacity):
        copies, taken = experts_KT.flatten().tolist(), [0] * self.experts
        kept = torch.zeros(len(copies), dtype=torch.bool)
        for number in self.order(torch.arange(len(copies)).view_as(experts_KT)):
            kept[number] = taken[copies[number]] < capacity
            taken[copies[number]] += 1
        return kept.view_as(experts_KT)

    def order(self, numbers_KT):
        return numbers_KT.flatten().tolist()

    def marked(self, experts_KT, kept):
        return experts_KT.where(kept, -1)

    def left(self, gates_KT, kept):
        return gates_KT * kept

@also_right("drop")
class DropsBySorting(RightDrop):  # a place is the number in the sorted order, less the first of the same expert
    def kept(self, experts_KT, capacity):
        flat = experts_KT.reshape(-1)
        order, counts = flat.argsort(stable=True), flat.bincount(minlength=self.experts)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat[order]]
        return (place < capacity).view_as(experts_KT)

    def left(self, gates_KT, kept):
        return gates_KT.masked_fill(~kept, 0)

@also_right("drop")
class DropsRowByRow(RightDrop):  # what rows before have taken is carried on
    def kept(self, experts_KT, capacity):
        taken, rows = torch.zeros(self.experts, dtype=torch.int64), []
        for row in experts_KT:
            ones = torch.nn.functional.one_hot(row, self.experts)
            rows.append(((ones.cumsum(0) + taken) * ones).sum(1) <= capacity)
            taken = taken + ones.sum(0)
        return torch.stack(rows)

def tokens_of_all_ranks(self, experts_KT):
    dist.all_reduce(total := torch.tensor(experts_KT.numel()))
    return math.ceil(self.factor * int(total) / self.experts)

slip("drop", "TokenByToken", 0,
    "the wrong copies are dropped: all first choices come before any second one, as in experts_KT.flatten()", RightDrop,
    order=lambda self, numbers_KT: numbers_KT.T.flatten().tolist())
slip("drop", "EachRowForItself", 0,
    "each row of choices has its own C places: they should share them, first choices first", RightDrop,
    kept=lambda self, experts_KT, capacity: torch.stack([RightDrop.kept(self, row, capacity) for row in experts_KT]))
slip("drop", "OneTooFew", 0, "C copies have a place: your answer drops the C-th one, too", RightDrop,
    kept=lambda self, experts_KT, capacity: RightDrop.kept(self, experts_KT, capacity - 1))
slip("drop", "RoundsDown", 0, "C is rounded up: math.ceil, not int, // or round", RightDrop,
    capacity=lambda self, experts_KT: int(self.factor * experts_KT.numel() / self.experts))
slip("drop", "WithoutK", 0, "C = ⌈factor · T·K / E⌉: there are T·K copies, not T", RightDrop,
    capacity=lambda self, experts_KT: math.ceil(self.factor * experts_KT.shape[1] / self.experts))
slip("drop", "OfTheWholeBatch", 0,
    "T is this rank's own number of tokens: capacity is per source rank, not for the whole batch", RightDrop,
    capacity=tokens_of_all_ranks)
slip("drop", "AsksTheOthers", 2.55, "each rank drops for itself: its own tokens are all that it needs to know", RightDrop,
    capacity=lambda self, experts_KT: min(RightDrop.capacity(self, experts_KT), tokens_of_all_ranks(self, experts_KT)))
slip("drop", "DropsInPlace", 0, "leave what you are given as it is: no operation with _ at its end on a tensor of the caller's",
    RightDrop, marked=lambda self, experts_KT, kept: experts_KT.masked_fill_(~kept, -1))
slip("drop", "NotMarked", 0, "a dropped copy is marked by −1", RightDrop,
    marked=lambda self, experts_KT, kept: experts_KT.clone())
slip("drop", "GatesLeft", 2.1, "the gate of a dropped copy is 0: its expert does not compute it", RightDrop,
    left=lambda self, gates_KT, kept: gates_KT * 1)
slip("drop", "DropsAndNormalizes", 2.1, "the gates that remain are not changed: your answer divides them by their sum again",
    RightDrop, left=lambda self, gates_KT, kept: gates_KT * kept / (gates_KT * kept).sum(0).clamp(min=1e-9))
slip("drop", "NeedsTokens", 1.5, "a rank may have no tokens: then there is nothing to divide by, and nothing to drop",
    RightDrop, left=lambda self, gates_KT, kept: gates_KT * kept * (1 / len(gates_KT[0]) * len(gates_KT[0])))

# Task 3
def travel(rows, sent, received):
    """A bare uneven all-to-all."""
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out

@right("Exchange")
class RightExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = sent, received
        return ctx._forward_cls.there(rows, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return ctx._forward_cls.back(grad, *ctx.splits), None, None

    def there(rows, sent, received):
        return travel(rows, sent, received)

    def back(grad, sent, received):
        return travel(grad, received, sent)

@also_right("Exchange")
class ExchangesByNames(RightExchange):  # the arguments by their names; copies and tuples on the way back
    def there(rows, sent, received):
        out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        dist.all_to_all_single(input=rows.contiguous(), output=out, input_split_sizes=sent, output_split_sizes=received)
        return out

    def back(grad, sent, received):
        return travel(grad.clone(memory_format=torch.contiguous_format), tuple(received), tuple(sent))

@also_right("Exchange")
class ExchangesNumbers(RightExchange):  # waits by itself; and backward sends numbers, not rows
    def there(rows, sent, received):
        out = torch.zeros(sum(received), rows.shape[1], dtype=rows.dtype)
        dist.all_to_all_single(out, rows.contiguous(), received, sent, async_op=True).wait()
        return out

    def back(grad, sent, received):
        width, out = grad.shape[1], grad.new_empty(sum(sent) * grad.shape[1])
        dist.all_to_all_single(out, grad.reshape(-1), [width * one for one in sent], [width * one for one in received])
        return out.view(-1, width)

def into_columns(rows, sent, received):
    out = rows.new_empty(rows.shape[1], sum(received)).T
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out

def as_it_lies(grad, sent, received):
    dist.all_to_all_single(out := grad.new_empty(sum(sent), grad.shape[1]), grad, sent, received)
    return out

def after_a_barrier(rows, sent, received):
    dist.barrier()
    return travel(rows, sent, received)

def by_torch(rows, sent, received):
    from torch.distributed import _functional_collectives as functional

    return functional.all_to_all_single(rows.contiguous(), received, sent, dist.group.WORLD).clone()

slip("Exchange", "SwapsSplits", 0, "", RightExchange, says="received stands before sent",
    there=lambda rows, *splits: dist.all_to_all_single(rows.new_empty(sum(splits[1]), rows.shape[1]), rows, *splits))
slip("Exchange", "NoGradient", 0,
    "the rows have no gradient: backward returns one for rows_SH, by an all-to-all, and None for each list", RightExchange,
    backward=staticmethod(lambda ctx, grad: (None, None, None)))

# where as many rows came as went, nobody would see it

slip("Exchange", "GradientsStay", 0, "backward has to send, too: the gradient of a row that came from rank s belongs to rank s",
    RightExchange, back=lambda grad, sent, received: torch.cat([grad, grad.new_zeros(sum(sent), grad.shape[1])])[: sum(sent)])
slip("Exchange", "GradientsAreMeans", 1.2, "gradients come back as they are: each belongs to one row, so divide nothing by N",
    RightExchange, back=lambda grad, sent, received: travel(grad, received, sent) / dist.get_world_size())
slip("Exchange", "GradientNotContiguous", 1.5, "", RightExchange, says="grad.contiguous()", back=as_it_lies)
slip("Exchange", "ScatteredRoom", 1.2,
    "the all-to-all's out isn't contiguous, and gloo mixes up its numbers: make a new one", RightExchange,
    there=into_columns)

# rank 1 of three has nothing to do

slip("Exchange", "SkipsWhereNothingHappens", 1.5, "", RightExchange, says="all ranks have to call it, also one without rows",
    there=lambda rows, *splits: travel(rows, *splits) if sum(map(sum, splits)) else rows.clone())
slip("Exchange", "WithABarrier", 1.8, "a barrier is not needed: who waits for rows waits long enough", RightExchange,
    there=after_a_barrier)
slip("Exchange", "SavesLists", 0, "save_for_backward takes tensors only: keep lists as attributes of ctx, ctx.sent = sent",
    RightExchange, forward=staticmethod(lambda ctx, rows, *splits: ctx.save_for_backward(*splits)))
slip("Exchange", "ReadyMade", 0, "", RightExchange,
    says="torch.distributed._functional_collectives.all_to_all_single is not allowed", there=by_torch)

# Task 4
Way = namedtuple("Way", "order_S sent received sorted_R")

@right("dispatch")
class RightDispatch:
    def __call__(self, x, experts_KT, experts, exchange):
        self.r, self.n, self.x, self.experts_KT, self.exchange = dist.get_rank(), dist.get_world_size(), x, experts_KT, exchange
        self.top_k, self.tokens, self.experts, self.local = len(experts_KT), len(x), experts, experts // self.n
        copies = self.copies()
        order = self.order(copies)
        going = self.place(copies[order]).bincount(minlength=experts)
        coming = self.coming(going)
        sent, received = (counts.view(self.n, -1).sum(1).tolist() for counts in (going, coming))
        arrived, arrival = self.travel(self.x[self.token(order)], sent, received), self.arrival(coming)
        return arrived[arrival], self.counts(going, coming), self.way(order, sent, received, arrival)

    def copies(self):
        return self.experts_KT.flatten()

    def place(self, copies):
        """Rank by rank, each with its experts."""
        return (copies % self.n) * self.local + copies // self.n

    def order(self, copies):
        there = (copies >= 0).nonzero()[:, 0]
        return there[self.place(copies[there]).argsort(stable=True)]

    def coming(self, going):
        dist.all_to_all_single(out := torch.empty_like(going), going)
        return out

    def token(self, order):
        return order % max(self.tokens, 1)

    def travel(self, rows, sent, received):
        return self.exchange(rows, sent, received)

    def arrived(self, coming):
        """The experts of the rows, as these come."""
        return torch.arange(self.local).repeat(self.n).repeat_interleave(coming)

    def arrival(self, coming):
        return self.arrived(coming).argsort(stable=True)

    def counts(self, going, coming):
        return coming.view(self.n, -1).sum(0)

    def way(self, *parts):
        return Way(*parts)

@also_right("dispatch")
class DispatchesInLists(RightDispatch):  # rank by rank and expert by expert; counts by dist.all_to_all
    def order(self, copies):
        key = [(e % self.n, e // self.n, i) for i, e in enumerate(copies.tolist()) if e >= 0]
        return torch.tensor([i for _, _, i in sorted(key)], dtype=torch.int64)

    def coming(self, going):
        dist.all_to_all(out := [torch.empty_like(part) for part in going.chunk(self.n)], list(going.chunk(self.n)))
        return torch.cat(out)

    def arrival(self, coming):
        experts = self.arrived(coming).tolist()
        return torch.tensor(sorted(range(len(experts)), key=experts.__getitem__), dtype=torch.int64)

    def way(self, order, sent, received, arrival):
        return Way(order, tuple(sent), tuple(received), arrival)

@also_right("dispatch")
class DispatchesByOneSort(RightDispatch):  # one number to sort by; counts as a table; the learner's own Exchange
    def order(self, copies):
        count = copies.numel()
        key = torch.where(copies >= 0, self.place(copies) * count + torch.arange(count), self.experts * max(count, 1))
        return key.sort().indices[: int((copies >= 0).sum())]

    def coming(self, going):
        return super().coming(going.view(self.n, -1)).flatten()

    def travel(self, rows, sent, received):
        return RightExchange.apply(rows.index_select(0, torch.arange(len(rows))), sent, received)

def without_a_stable_sort(self, coming):
    """Equals are turned round."""
    experts = self.arrived(coming)
    return len(experts) - 1 - experts.flip(0).argsort(stable=True)

def counts_of_all_ranks(self, going):
    dist.all_gather(every := [torch.empty_like(going) for _ in range(self.n)], going)
    return torch.stack(every).view(self.n, self.n, -1)[:, self.r].flatten()

def everything_to_everyone(self, rows, sent, received):
    """Every rank takes all rows, and picks its own."""
    dist.all_gather_object(every := [None] * self.n, sent)
    rows = RightExchange.apply(rows.repeat(self.n, 1), [len(rows)] * self.n, [*map(sum, every)])
    return torch.cat(rows.split([count for its in every for count in its])[self.r :: self.n])

slip("dispatch", "DispatchesToBlocks", 0.75, "expert i lives on rank i % N: experts are dealt in turn, not in blocks of E ÷ N",
    RightDispatch, place=lambda self, copies: copies)
slip("dispatch", "DispatchesTokenByToken", 2, "a copy's number is k·T + t, its place in experts_KT.flatten(), not t·K + k",
    RightDispatch, copies=lambda self: self.experts_KT.T.flatten(), token=lambda self, order: order // self.top_k)
slip("dispatch", "NotSorted", 2,
    "rows_RH stands in the order of the ranks it came from: sort it by expert, argsort(stable=True)", RightDispatch,
    arrival=lambda self, coming: torch.arange(int(coming.sum())))
slip("dispatch", "SortIsNotStable", 2,
    "rows of one expert stand in another order: by the rank they come from, then as they were sent", RightDispatch,
    arrival=without_a_stable_sort)
slip("dispatch", "SendsTheDropped", 0.75, "dropped copies do not travel: −1 is no expert, yet −1 % N is a rank", RightDispatch,
    order=lambda self, copies: self.place(copies).argsort(stable=True),
    place=lambda self, copies: RightDispatch.place(self, copies).clamp(min=0))
slip("dispatch", "CountsInTheOrderOfExperts", 0, "", RightDispatch, says="those for rank 0 stand first",
    coming=lambda self, going: RightDispatch.coming(self, going.view(self.n, -1).T.flatten()))
slip("dispatch", "TokensInTheWay", 2, "way.order_S has the numbers of copies, k·T + t, not those of tokens", RightDispatch,
    way=lambda self, order, *others: Way(self.token(order), *others))
slip("dispatch", "DispatchesByItself", 2.5,
    "x has no gradient: autograd does not see dist's own all-to-all. Rows travel by exchange", RightDispatch,
    travel=lambda self, rows, *splits: travel(rows.detach(), *splits) + 0 * self.x.sum())
slip("dispatch", "GathersCounts", 3,
    "a rank needs the counts of its own experts only: an all-to-all gives each its part, and no more", RightDispatch,
    coming=counts_of_all_ranks)
slip("dispatch", "CountsAsFloats", 2.25, "the counts are sent as float64: they are int64, one number for each expert",
    RightDispatch, coming=lambda self, going: RightDispatch.coming(self, going.double()).long())
slip("dispatch", "EverythingToEveryone", 2.25,
    "no rank needs all tokens: each copy goes to the rank of its expert, by exchange", RightDispatch,
    travel=everything_to_everyone)
slip("dispatch", "CountsOnlyWithTokens", 1.67, "all ranks call the counts' all-to-all, also one without tokens", RightDispatch,
    coming=lambda self, going: RightDispatch.coming(self, going) if self.tokens else going)

# Task 5
@right("combine")
class RightCombine:
    def __call__(self, y, gates, way, exchange):
        self.way, self.exchange, self.gates, (self.top_k, self.tokens) = way, exchange, gates, gates.shape
        return self.added(self.travel(self.back(y), way.received, way.sent), self.gate(gates))

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

@also_right("combine")
class CombinesByBlocks(RightCombine):  # each copy at its place in [K, T, H]; and with the learner's own Exchange
    def added(self, home, gate):
        every = home.new_zeros(self.top_k * self.tokens, home.shape[1]).index_copy(0, self.way.order_S, home)
        return (every.view(self.top_k, self.tokens, home.shape[1]) * self.gates[..., None]).sum(0)

    def travel(self, rows, sent, received):
        return RightExchange.apply(rows, sent, received)

@also_right("combine")
class CombinesByAMatrix(RightCombine):  # of gates, [T, S]; what is sent back is put in its place
    def back(self, y):
        return torch.empty_like(y).index_put((self.way.sorted_R,), y)

    def added(self, home, gate):
        return (torch.arange(self.tokens)[:, None] == self.token(self.way.order_S)) * gate @ home

def written_over(self, home, gate):
    out = home.new_zeros(self.tokens, home.shape[1])
    out[self.token(self.way.order_S)] += self.weighted(home, gate)
    return out

slip("combine", "NotPutBack", 1,
    "tokens return in the wrong order: y_RH is sorted, and goes back as it arrived: y[sorted_R.argsort()]", RightCombine,
    back=lambda self, y: y)
slip("combine", "SortedAgain", 1,
    "tokens return in the wrong order: y[sorted_R] sorts again. The inverse is y[sorted_R.argsort()]", RightCombine,
    back=lambda self, y: y[self.way.sorted_R])
slip("combine", "GatesTwice", 1, "the gates are applied twice: each result is multiplied by its gate once", RightCombine,
    weighted=lambda self, home, gate: gate[:, None] ** 2 * home)
slip("combine", "PlusEquals", 1,
    "a token's results are written over each other: index_add adds them, out[tokens] += … does not", RightCombine,
    added=written_over)
slip("combine", "CombinesByItself", 2,
    "y has no gradient: autograd does not see dist's own all-to-all. Results travel by exchange", RightCombine,
    travel=lambda self, rows, *splits: travel(rows.detach(), *splits))
slip("combine", "RawGradientOfY", 3, "the gradient of y lacks the gates: y's gradient is the gate times that of out",
    RightCombine, weighted=lambda self, home, gate: home + (gate[:, None] - 1) * home.detach())
slip("combine", "InTwoExchanges", 3, "one exchange is enough: all results go back together", RightCombine,
    travel=lambda self, rows, *splits: torch.cat(
        [self.exchange(half.contiguous(), *splits) for half in rows.tensor_split(2, 1)], 1))

# Task 6
@right("balance")
class RightBalance:
    def __call__(self, probabilities, experts_KT, bias, speed):
        self.n, self.experts, self.top_k, self.bias, self.speed = dist.get_world_size(), len(bias), len(experts_KT), bias, speed
        self.mine = self.own(experts_KT)
        counts = self.reduced(self.mine.clone())
        return self.loss(self.share(counts), self.mean(probabilities, counts)), bias + self.step(counts)

    def own(self, experts_KT):
        return experts_KT.flatten().bincount(minlength=self.experts)

    def reduced(self, counts):
        dist.all_reduce(counts)
        return counts.double()

    def share(self, counts):
        return counts / counts.sum().clamp(min=1)

    def mean(self, probabilities, counts):
        return probabilities.sum(0) * self.n * self.top_k / counts.sum()

    def loss(self, share, mean):
        return self.experts * (share * mean).sum()

    def step(self, counts):
        return self.speed * (1 - counts / counts.mean())

@also_right("balance")
class BalancesInFloats(RightBalance):  # counts as float64, by one_hot; waits by itself
    def own(self, experts_KT):
        return torch.nn.functional.one_hot(experts_KT, self.experts).sum((0, 1)).double()

    def reduced(self, counts):
        dist.all_reduce(counts, async_op=True).wait()
        return counts

@also_right("balance")
class BalancesInInt32(RightBalance):  # the mean over tokens as a weighted sum; the bias by shares
    def own(self, experts_KT):
        return super().own(experts_KT).int()

    def mean(self, probabilities, counts):
        return (probabilities * (self.n / (counts.sum() / self.top_k))).sum(0)

    def step(self, counts):
        return self.speed - self.speed * self.experts * self.share(counts)

def mean_by_another_message(self, probabilities, counts):
    dist.all_reduce(tokens := torch.tensor(len(probabilities)))
    return probabilities.sum(0) * self.n / tokens

slip("balance", "OwnCounts", 0,
    "the counts are this rank's own: f and the bias need those of all ranks, one all-reduce of counts", RightBalance,
    reduced=lambda self, counts: counts.double())
slip("balance", "OwnMean", 0.9,
    "P is the mean over this rank's own tokens: a token counts the same anywhere, so divide by all tokens", RightBalance,
    mean=lambda self, probabilities, counts: probabilities.sum(0) / max(len(probabilities), 1))
slip("balance", "MeanOfNothing", 0.9, "a mean over no tokens is nan, and a rank may have none: sum, and divide by all tokens",
    RightBalance, mean=lambda self, p, counts: RightBalance.mean(self, p.mean(0)[None] * len(p), counts))
slip("balance", "SumOfLosses", 0.9, "the sum of the ranks' losses is right, but their mean should be: multiply by N",
    RightBalance, mean=lambda self, probabilities, counts: RightBalance.mean(self, probabilities, counts) / self.n)
slip("balance", "WholeNumbers", 0.9,
    "nearly right: a quotient of two int64 tensors is float32. Make counts float64 before you divide", RightBalance,
    share=lambda self, counts: (counts.long() / counts.long().sum()).double())
slip("balance", "ChaptersStep", 2.1,
    "that is the sign's step, the chapter's: here the bias moves by speed · (1 − count / mean count)", RightBalance,
    step=lambda self, counts: self.speed * (counts.mean() - counts).sign())
slip("balance", "OwnBias", 2.1,
    "the new bias differs from rank to rank: it is made of this rank's counts. All ranks must have the same", RightBalance,
    step=lambda self, counts: RightBalance.step(self, self.mine.double()))
slip("balance", "SpeedOfItsOwn", 2.1, "", RightBalance, says="the new bias",
    step=lambda self, counts: RightBalance.step(self, counts) * 0.125 / self.speed)
slip("balance", "TwoMessages", 2.1, "one all-reduce of E counts is enough: their sum tells how many tokens there are",
    RightBalance, mean=mean_by_another_message)
slip("balance", "CountsUpToTheLargest", 0, "", RightBalance,
    says="0 for an expert that nobody chose there: bincount(minlength=E)",
    own=lambda self, experts_KT: experts_KT.flatten().bincount())

# Task 7
@right("average")
class RightAverage:
    def __call__(self, dense, experts, replicas):
        self.n, self.replicas, self.size = dist.get_world_size(), replicas, dist.get_world_size(replicas)
        self.of_dense(dense)
        self.of_experts(experts)

    def of_dense(self, dense):
        self.put(dense, self.summed(dense, None) / self.n)

    def of_experts(self, experts):
        self.put(experts, self.summed(experts, self.replicas) / self.n)

    def flat(self, parameters):
        return torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in parameters])

    def summed(self, parameters, group):
        dist.all_reduce(flat := self.flat(parameters), group=group)
        return flat

    def put(self, parameters, flat):
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

@also_right("average")
class AveragesAsync(RightAverage):  # both calls before the first wait, and experts first
    def __call__(self, dense, experts, replicas):
        rows = [self.flat(experts), self.flat(dense)]
        works = [dist.all_reduce(row, group=group, async_op=True) for row, group in zip(rows, (replicas, None), strict=True)]
        for work, row, parameters in zip(works, rows, (experts, dense), strict=True):
            work.wait()
            self.put(parameters, row / dist.get_world_size())

@also_right("average")
class AveragesBefore(RightAverage):  # divided before it is sent; nothing is called where there is one replica
    def __call__(self, dense, experts, replicas):
        for parameters, group in ((dense, dist.group.WORLD), (experts, replicas)):
            flat = self.flat(parameters) / dist.get_world_size()
            if dist.get_world_size(group) > 1:
                dist.all_reduce(flat, group=group)
            self.put(parameters, flat)

@also_right("average")
class AveragesInPlace(RightAverage):  # copied into the gradients that are there; one call where all ranks are replicas
    def __call__(self, dense, experts, replicas):
        for parameter in [*dense, *experts]:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        together = dist.get_world_size(replicas) == dist.get_world_size()
        super().__call__([*dense, *(experts if together else [])], [] if together else experts, replicas)

    def of_experts(self, experts):
        return super().of_experts(experts) if experts else None

    def put(self, parameters, flat):
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

slip("average", "ExpertsOverAll", 0,
    "expert gradients are averaged over all ranks, but other ranks have other experts. Sum with group=replicas",
    RightAverage, on=(4,), of_experts=lambda self, experts: self.put(experts, self.summed(experts, None) / self.n))
slip("average", "MeanOverReplicas", 1.2,
    "expert gradients are e times too large: they are sums over e ranks' tokens already. Divide by N", RightAverage, on=(4,),
    of_experts=lambda self, experts: self.put(experts, self.summed(experts, self.replicas) / self.size))
slip("average", "OwnExperts", 0, "expert gradients are not summed over the replicas: each has seen other tokens", RightAverage,
    on=(4,), of_experts=lambda self, experts: self.put(experts, self.flat(experts) / self.n))
slip("average", "DenseOverReplicas", 0,
    "dense gradients are averaged over the replicas only: all N ranks have these parameters", RightAverage, on=(4,),
    of_dense=lambda self, dense: self.put(dense, self.summed(dense, self.replicas) / self.size))
slip("average", "NoDivision", 1.2, "all gradients are sums: the mean of N losses takes a division by N", RightAverage, on=(4,),
    put=lambda self, parameters, flat: RightAverage.put(self, parameters, flat * self.n))
slip("average", "DividesTwice", 1.2, "all gradients are divided twice: once by N is enough, and ReduceOp.AVG divides, too",
    RightAverage, on=(4,), put=lambda self, parameters, flat: RightAverage.put(self, parameters, flat / self.n))
slip("average", "CutsTurned", 1.2,
    "the gradients are mixed up: cut the flat row in the order and sizes in which it was put together", RightAverage, on=(4,),
    put=lambda self, parameters, flat: RightAverage.put(self, parameters[::-1], flat))
slip("average", "SkipsNone", 0, "", RightAverage, says="a rank that skips it sends fewer numbers than the others", on=(4,),
    flat=lambda self, parameters: torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]))
slip("average", "OneCallEach", 1.65,
    "one call for each parameter: put all gradients into one flat row, and cut it again afterwards", RightAverage, on=(4,),
    of_dense=lambda self, dense: [RightAverage.of_dense(self, [one]) for one in dense])
