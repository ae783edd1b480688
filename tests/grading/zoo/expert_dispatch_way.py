"""Wrong answers to dispatch of 08_expert: gradients that do not come back, and messages."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightDispatch, Way
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "dispatch"
NONE = "x has no gradient"


@wrong(TASK, "rows_RH has no graph; hint: " + NONE)
class Detached(RightDispatch):
    def rows(self, order):
        return super().rows(order).detach()


@wrong(TASK, "rows_RH has no graph; hint: " + NONE)
def dispatch_without_gradients(x, experts_KT, experts, exchange):
    with torch.no_grad():
        return RightDispatch()(x, experts_KT, experts, exchange)


@wrong(TASK, NONE, right_values=True)
class SendsByItself(RightDispatch):
    """By the all-to-all that autograd does not see."""

    def travel(self, rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.detach(), received, sent)
        return out + 0 * self.x.sum()


class Last(torch.autograd.Function):
    """x[t], whose gradients are written over each other."""

    @staticmethod
    def forward(ctx, x, tokens, how):
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.how = x.shape, how
        return x[tokens]

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(ctx.shape)
        (tokens,) = ctx.saved_tensors
        if ctx.how == "last":
            for token, row in zip(tokens.tolist(), grad, strict=True):
                out[token] = row
        else:
            out.index_add_(0, tokens, grad / ctx.how)
        return out, None, None


@wrong(TASK, "a token's gradient is the sum of its copies', not their mean", right_values=True)
class MeanOfCopies(RightDispatch):
    def rows(self, order):
        return Last.apply(self.x, self.token(order), self.top_k)


@wrong(TASK, "here only one of them counts", right_values=True)
class LastCopyOnly(RightDispatch):
    def rows(self, order):
        return Last.apply(self.x, self.token(order), "last")


@wrong(TASK, "a rank needs to know only how many rows its own experts get", right_values=True)
class GathersCounts(RightDispatch):
    def coming(self, going):
        every = [torch.empty_like(going) for _ in range(self.n)]
        dist.all_gather(every, going)
        return torch.stack(every).view(self.n, self.n, -1)[:, self.r].flatten().contiguous()


@wrong(TASK, "a rank needs to know only how many rows its own experts get", right_values=True)
class GathersChoices(RightDispatch):
    """Everybody's choices, to count them at home."""

    def coming(self, going):
        every = [None] * self.n
        dist.all_gather_object(every, self.copies())
        counts = [self.place(one[one >= 0]).bincount(minlength=self.experts) for one in every]
        return torch.stack(counts).view(self.n, self.n, -1)[:, self.r].flatten().contiguous()


@wrong(TASK, "a sum over ranks does not say how many rows come from each rank", right_values=True)
class ReducesATable(RightDispatch):
    def coming(self, going):
        table = going.new_zeros(self.n, self.experts)
        table[self.r] = going
        dist.all_reduce(table)
        return table.view(self.n, self.n, -1)[:, self.r].flatten().contiguous()


@wrong(TASK, "one message of counts is enough", right_values=True)
class CountsTwice(RightDispatch):
    """Of ranks first, and of experts then."""

    def coming(self, going):
        by_rank = going.view(self.n, -1).sum(1)
        dist.all_to_all_single(torch.empty_like(by_rank), by_rank)
        return super().coming(going)


@wrong(TASK, "no expert's number has to travel with a row", right_values=True)
class ExpertsTravel(RightDispatch):
    """How many rows for each rank; then the number of each row's expert."""

    def order(self, copies):
        self.numbers = super().order(copies)
        return self.numbers

    def coming(self, going):
        by_rank = going.view(self.n, -1).sum(1)
        received = torch.empty_like(by_rank)
        dist.all_to_all_single(received, by_rank)
        splits = received.tolist(), by_rank.tolist()
        experts = by_rank.new_empty(int(received.sum()))
        dist.all_to_all_single(experts, self.copies()[self.numbers] // self.n, *splits)
        parts = [part.bincount(minlength=self.local) for part in experts.split(splits[0])]
        return torch.cat(parts)


@wrong(TASK, "the counts stand in the order of experts")
class CountsInTheOrderOfExperts(RightDispatch):
    """Though an all-to-all sends the first ones to rank 0."""

    def coming(self, going):
        return super().coming(going.view(self.n, -1).T.flatten().contiguous())


@wrong(TASK, "an all-to-all is one call", right_values=True)
class CountsByMessages(RightDispatch):
    def coming(self, going):
        parts, rooms = going.view(self.n, -1), torch.empty_like(going).view(self.n, -1)
        rooms[self.r] = parts[self.r]
        others = [rank for rank in range(self.n) if rank != self.r]
        works = [dist.isend(parts[k].contiguous(), k) for k in others] + [dist.irecv(rooms[k], k) for k in others]
        for work in works:
            work.wait()
        return rooms.flatten()


@wrong(TASK, "the counts are int64", right_values=True)
class CountsAsFloats(RightDispatch):
    def coming(self, going):
        return super().coming(going.double()).long()


@wrong(TASK, "the counts are int64", right_values=True)
class CountsInInt32(RightDispatch):
    def coming(self, going):
        return super().coming(going.int()).long()


@wrong(TASK, "no message says how many rows come", right_values=True)
class NumbersOfExpertsTravel(RightDispatch):
    """An expert's number with each row: twice as many messages, and the sizes are still unknown."""

    def coming(self, going):
        sizes = torch.zeros(self.n, self.experts, dtype=torch.float64)
        sizes[self.r] = going
        dist.all_reduce(sizes)
        return sizes.view(self.n, self.n, -1)[:, self.r].flatten().long()


@wrong(TASK, "counts come first", right_values=True)
class CountsAgainLater(RightDispatch):
    def coming(self, going):
        dist.all_reduce(torch.zeros(1, dtype=torch.float64))
        return super().coming(going)


class Everything(torch.autograd.Function):
    """All tokens of all ranks, and the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        rooms = [x.new_empty(max(sizes), x.shape[1]) for _ in sizes]
        filled = x.new_zeros(max(sizes), x.shape[1])
        filled[: len(x)] = x
        dist.all_gather(rooms, filled)
        return torch.cat([room[:size] for room, size in zip(rooms, sizes, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[me()[0]], None


@wrong(TASK, "each copy goes to the rank of its expert, by exchange", right_values=True)
class EverythingToEveryone(RightDispatch):
    """Every rank takes all rows, and picks its own."""

    def travel(self, rows, sent, received):
        every = [None] * self.n
        dist.all_gather_object(every, sent)
        sizes = [sum(its) for its in every]
        begins = [sum(sizes[:s]) + sum(its[: self.r]) for s, its in enumerate(every)]
        mine = [torch.arange(begin, begin + its[self.r]) for begin, its in zip(begins, every, strict=True)]
        return Everything.apply(rows, sizes)[torch.cat(mine)]


@wrong(TASK, "all ranks have to call it, also one that has no rows", right_values=True)
class SkipsWithoutRows(RightDispatch):
    cases = slice(2)

    def travel(self, rows, sent, received):
        if not len(rows):
            return self.x.sum() + rows.new_zeros(sum(received), rows.shape[1])
        return super().travel(rows, sent, received)


@wrong(TASK, "the counts come by an all-to-all that all ranks call, also one that has no tokens", right_values=True)
class SkipsWithoutTokens(RightDispatch):
    cases = slice(2)

    def coming(self, going):
        return super().coming(going) if self.tokens else going


@wrong(TASK, "which rank 2 did not call: all ranks have to call it", right_values=True)
class SkipsWhereNothingHappens(RightDispatch):
    """A rank without tokens, and whose experts nobody chose."""

    cases = slice(3)

    def travel(self, rows, sent, received):
        return super().travel(rows, sent, received) if sum(sent) + sum(received) else rows


@wrong(TASK, "a rank has experts also where it has no tokens", right_values=True)
class LeavesWithoutTokens(RightDispatch):
    cases = slice(3)

    def __call__(self, x, experts_KT, experts, exchange):
        if len(x):
            return super().__call__(x, experts_KT, experts, exchange)
        none, n = torch.zeros(0, dtype=torch.int64), me()[1]
        return x, torch.zeros(experts // n, dtype=torch.int64), Way(none, [0] * n, [0] * n, none)


@wrong(TASK, "x_TH changed; hint: leave what you are given")
class ChangesTokens(RightDispatch):
    def rows(self, order):
        rows = super().rows(order)
        self.x.data.mul_(2)
        return rows


@wrong(TASK, "manyranks.parallel.expert")
class TheLibrarys(RightDispatch):
    def travel(self, rows, sent, received):
        from manyranks.parallel.expert import dispatch

        return dispatch.exchange(rows, sent, received, None)
