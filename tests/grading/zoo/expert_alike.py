"""Other right answers to the tasks of 08_expert, which must get full marks."""

import math

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import (
    RightAverage,
    RightBalance,
    RightCombine,
    RightDispatch,
    RightDrop,
    RightExchange,
    RightRoute,
    Way,
    sent_rows,
)
from tests.grading.zoo.wrong import me


class RoutedByLoops(RightRoute):
    """Token by token, in lists."""

    def chosen(self, wanted):
        rows = [sorted(range(len(row)), key=lambda i: -row[i])[: self.top_k] for row in wanted.tolist()]
        return torch.tensor(rows)


class RoutedByOnes(RightRoute):
    """The ranks as a table of experts and ranks; gates by a one-hot product."""

    def near(self, ranked):
        tables = torch.nn.functional.one_hot(self.ranks(ranked.shape[1]), self.n).bool()
        best = torch.where(tables, ranked[:, :, None], -torch.inf).amax(1)
        limit = best.sort(1, descending=True).values[:, self.limit - 1 : self.limit]
        return ((best >= limit)[:, None, :] & tables).any(2)

    def gates(self, scores, experts):
        chosen = torch.nn.functional.one_hot(experts, scores.shape[1]).to(scores.dtype)
        return self.normalised((chosen * scores[:, None, :]).sum(2))


class RoutedContiguously(RightRoute):
    def scores(self, logits):
        return 1 / (1 + torch.exp(-logits))

    def shaped(self, experts, gates):
        return [experts.T.contiguous(), gates.T.contiguous()]


def drop_by_sorting(experts_KT, gates_KT, experts, factor):
    """A place is the number in the sorted order, less the first of the same expert."""
    flat = experts_KT.reshape(-1)
    capacity = math.ceil(factor * flat.numel() / experts)
    order = flat.argsort(stable=True)
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), flat.bincount(minlength=experts).cumsum(0)[:-1]])
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat)) - begins[flat[order]]
    kept = (place < capacity).view_as(experts_KT)
    return experts_KT.masked_fill(~kept, -1), gates_KT.masked_fill(~kept, 0)


class DropRowByRow(RightDrop):
    """What rows before have taken is carried on."""

    def kept(self, experts_KT, capacity):
        taken, rows = torch.zeros(self.experts, dtype=torch.int64), []
        for row in experts_KT:
            ones = torch.nn.functional.one_hot(row, self.experts)
            place = ((ones.cumsum(0) + taken) * ones).sum(1)
            rows.append(place <= capacity)
            taken = taken + ones.sum(0)
        return torch.stack(rows)


class ExchangedByNames(RightExchange):
    """The arguments by their names, and gradients saved on ctx."""

    @staticmethod
    def there(rows, sent, received):
        out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        dist.all_to_all_single(input=rows.contiguous(), output=out, input_split_sizes=sent, output_split_sizes=received)
        return out


class ExchangedAsync(RightExchange):
    @staticmethod
    def there(rows, sent, received):
        out = torch.zeros(sum(received), rows.shape[1], dtype=rows.dtype)
        work = dist.all_to_all_single(out, rows.contiguous(), received, sent, async_op=True)
        work.wait()
        return out


class ExchangedFlat(RightExchange):
    """Numbers, not rows."""

    @staticmethod
    def back(grad, sent, received):
        width = grad.shape[1]
        out = grad.new_empty(sum(sent) * width)
        dist.all_to_all_single(out, grad.reshape(-1), [width * one for one in sent], [width * one for one in received])
        return out.view(-1, width)


class DispatchedByLoops(RightDispatch):
    """In lists, rank by rank and expert by expert."""

    def order(self, copies):
        numbers = copies.tolist()
        key = [(e % self.n, e // self.n, i) for i, e in enumerate(numbers) if e >= 0]
        return torch.tensor([i for _, _, i in sorted(key)], dtype=torch.int64)

    def arrival(self, coming):
        begins = coming.cumsum(0) - coming
        rows = []
        for local in range(self.local):
            for rank in range(self.n):
                place = rank * self.local + local
                rows += range(int(begins[place]), int(begins[place] + coming[place]))
        return torch.tensor(rows, dtype=torch.int64)


class DispatchedByOneSort(RightDispatch):
    """One number to sort by; a repeated x."""

    def order(self, copies):
        count = copies.numel()
        key = torch.where(copies >= 0, self.place(copies) * count + torch.arange(count), self.experts * max(count, 1))
        return key.sort().indices[: int((copies >= 0).sum())]

    def rows(self, order):
        return self.x.repeat(self.top_k, 1)[order]

    def coming(self, going):
        table = going.view(self.n, -1)
        out = torch.empty_like(table)
        dist.all_to_all_single(out, table)
        return out.flatten()


class DispatchedInLists(RightDispatch):
    """Counts by dist.all_to_all, rows through index_select, a Way of another class."""

    def coming(self, going):
        out = [torch.empty_like(part) for part in going.chunk(self.n)]
        dist.all_to_all(out, list(going.chunk(self.n)))
        return torch.cat(out)

    def rows(self, order):
        return torch.index_select(self.x, 0, self.token(order))

    def packed(self, arrived, arrival, going, coming, order, sent, received):
        out = arrived.index_select(0, arrival)
        return [out, self.counts(going, coming), Way(order, tuple(sent), tuple(received), arrival)]


class DispatchedByItsOwnExchange(RightDispatch):
    """With the learner's Exchange in place of the check's."""

    def travel(self, rows, sent, received):
        return RightExchange.apply(rows, sent, received)


class CombinedByBlocks(RightCombine):
    """Each copy at its place in [K, T, H]; then a weighted sum over K."""

    def added(self, home, gate):
        every = home.new_zeros(self.top_k * self.tokens, home.shape[1]).index_copy(0, self.way.order_S, home)
        return (every.view(self.top_k, self.tokens, home.shape[1]) * self.gates[..., None]).sum(0)


class CombinedByAMatrix(RightCombine):
    """A matrix of gates, [T, S]."""

    def back(self, y):
        back = torch.empty_like(y)
        back[self.way.sorted_R] = y
        return back

    def added(self, home, gate):
        tokens = self.token(self.way.order_S)
        return (torch.arange(self.tokens)[:, None] == tokens) * gate @ home


class CombinedInPlace(RightCombine):
    """index_put that adds up."""

    def added(self, home, gate):
        out = home.new_zeros(self.tokens, home.shape[1])
        return out.index_put((self.token(self.way.order_S),), self.weighted(home, gate), accumulate=True)


class CombinedByItsOwnExchange(RightCombine):
    def travel(self, rows, sent, received):
        return RightExchange.apply(rows, sent, received)


class BalancedInFloats(RightBalance):
    """Counts as float64, by one_hot."""

    def own(self, experts_KT):
        return torch.nn.functional.one_hot(experts_KT, self.experts).sum((0, 1)).double()


class BalancedAsync(RightBalance):
    def reduced(self, counts):
        counts = counts.clone()
        work = dist.all_reduce(counts, async_op=True)
        work.wait()
        return counts.double()

    def loss(self, share, mean):
        return self.experts * share @ mean


def balance_in_other_words(probabilities, experts_KT, bias, speed):
    """The mean over tokens as a weighted sum; the bias by shares."""
    load = torch.zeros_like(bias).scatter_add(0, experts_KT.flatten(), torch.ones(experts_KT.numel(), dtype=bias.dtype))
    dist.all_reduce(load)
    f, tokens = load / load.sum(), load.sum() / experts_KT.shape[0]
    loss = len(f) * (probabilities @ f).sum() / tokens * me()[1]
    return loss, bias + speed - speed * len(f) * f


class AveragedAsync(RightAverage):
    """Both calls before the first wait, and experts first."""

    def __call__(self, dense, experts, replicas):
        self.n = dist.get_world_size()
        rows, works = [], []
        for parameters, group in ((experts, replicas), (dense, None)):
            rows.append(self.flat(parameters))
            works.append(dist.all_reduce(rows[-1], group=group, async_op=True))
        for work, row, parameters in zip(works, rows, (experts, dense), strict=True):
            work.wait()
            self.put(parameters, row / self.n)


class AveragedBefore(RightAverage):
    """Divided before it is sent; nothing is called where there is one replica."""

    def flat(self, parameters):
        return super().flat(parameters) / self.n

    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), None))

    def of_experts(self, experts):
        flat = self.flat(experts)
        self.put(experts, self.summed(flat, self.replicas) if self.size > 1 else flat)


class AveragedInPlace(RightAverage):
    """Copied into the gradients that are there; one call where all ranks are replicas."""

    def __call__(self, dense, experts, replicas):
        self.n = dist.get_world_size()
        for parameter in [*dense, *experts]:
            parameter.grad = self.gradient(parameter)
        if dist.get_world_size(replicas) == self.n:
            return self.put([*dense, *experts], self.summed(self.flat([*dense, *experts]), None) / self.n)
        self.put(dense, self.summed(self.flat(dense), None) / self.n)
        return self.put(experts, self.summed(self.flat(experts), replicas) / self.n)

    def put(self, parameters, flat):
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))


class SentRows(RightExchange):
    """Backward by Exchange itself."""

    @staticmethod
    def back(grad, sent, received):
        return sent_rows(grad.clone(memory_format=torch.contiguous_format), tuple(received), tuple(sent))


ANSWERS = [
    *(("route", kind()) for kind in (RoutedByLoops, RoutedByOnes, RoutedContiguously)),
    *(("drop", answer) for answer in (drop_by_sorting, DropRowByRow())),
    *(("Exchange", kind) for kind in (ExchangedByNames, ExchangedAsync, ExchangedFlat, SentRows)),
    *(("dispatch", kind()) for kind in (DispatchedByLoops, DispatchedByOneSort, DispatchedInLists, DispatchedByItsOwnExchange)),
    *(("combine", kind()) for kind in (CombinedByBlocks, CombinedByAMatrix, CombinedInPlace, CombinedByItsOwnExchange)),
    *(("balance", answer) for answer in (BalancedInFloats(), BalancedAsync(), balance_in_other_words)),
    *(("average", kind()) for kind in (AveragedAsync, AveragedBefore, AveragedInPlace)),
]
for _, answer in ANSWERS:
    answer.__name__ = getattr(answer, "__name__", type(answer).__name__)
