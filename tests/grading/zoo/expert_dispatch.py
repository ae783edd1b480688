"""Wrong answers to dispatch of 08_expert."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightDispatch, Way
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "dispatch"
BLOCKS = "those are blocks of neighbours"
UNSORTED = "rows_RH stands in the order of the ranks it came from"
UNSTABLE = "rows of one expert stand in another order"
NO_WAY = "way is a Way: order_S and sorted_R are tensors"


@wrong(TASK, BLOCKS)
class Blocks(RightDispatch):
    def place(self, copies):
        return copies


@wrong(TASK, "expert i is number i // N on its rank")
class WrongNumberThere(RightDispatch):
    def place(self, copies):
        return (copies % self.n) * self.local + copies % self.local


@wrong(TASK, "a copy's number is k·T + t")
class TokenByToken(RightDispatch):
    def copies(self):
        return self.experts_KT.T.flatten()

    def token(self, order):
        return order // self.top_k


@wrong(TASK, "those are the rows of other tokens")
class WrongToken(RightDispatch):
    def token(self, order):
        return order // self.top_k


@wrong(TASK, UNSORTED)
class NotSorted(RightDispatch):
    def arrival(self, coming):
        return torch.arange(int(coming.sum()))


@wrong(TASK, "rows_RH is put in the inverse order")
class RowsByTheInverse(RightDispatch):
    def packed(self, arrived, arrival, going, coming, order, sent, received):
        return arrived[arrival.argsort()], self.counts(going, coming), Way(order, sent, received, arrival)


@wrong(TASK, UNSTABLE)
class LastRankFirst(RightDispatch):
    def arrival(self, coming):
        experts = torch.arange(self.local).repeat(self.n).repeat_interleave(coming)
        ranks = torch.arange(self.n).repeat_interleave(coming.view(self.n, -1).sum(1))
        return (experts * self.n - ranks).argsort(stable=True)


@wrong(TASK, UNSTABLE)
class Backwards(RightDispatch):
    """A sort that turns equals round."""

    def arrival(self, coming):
        experts = torch.arange(self.local).repeat(self.n).repeat_interleave(coming)
        return len(experts) - 1 - experts.flip(0).argsort(stable=True)


@wrong(TASK, "−1 is no expert, yet −1 % N is a rank", right_values=True)
class SendsTheDropped(RightDispatch):
    cases = slice(2)

    def order(self, copies):
        return self.place(copies).argsort(stable=True)

    def going(self, sent):
        return self.place(sent).clamp(min=0).bincount(minlength=self.experts)


@wrong(TASK, "bincount only supports", right_values=True)
class CountsMinusOne(RightDispatch):
    cases = slice(2)

    def going(self, sent):
        return self.copies().bincount(minlength=self.experts).view(-1, self.n).T.flatten().contiguous()


@wrong(TASK, "that is the other list: sent is how many rows go")
class ListsSwapped(RightDispatch):
    def travel(self, rows, sent, received):
        return self.exchange(rows, received, sent)


@wrong(TASK, "that is the other list")
class RoomForWhatIsSent(RightDispatch):
    def travel(self, rows, sent, received):
        return self.exchange(rows, sent, sent)


@wrong(TASK, "sizes are filled up to the largest")
class PadsToTheLargest(RightDispatch):
    def travel(self, rows, sent, received):
        most = torch.tensor(max(*sent, *received))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return self.exchange(rows, [int(most)] * self.n, [int(most)] * self.n)


@wrong(TASK, "lists of N whole numbers")
class TensorsForLists(RightDispatch):
    def travel(self, rows, sent, received):
        return self.exchange(rows, torch.tensor(sent), torch.tensor(received))


@wrong(TASK, "exchange was given a list of 9 as sent")
class OneSizeForEachExpert(RightDispatch):
    def by_rank(self, counts):
        return counts.tolist()


@wrong(TASK, "rows has sum(sent) rows, those for rank 0 first")
class AllTokensAsRows(RightDispatch):
    def rows(self, order):
        return self.x


@wrong(TASK, "counts_L is how many rows this rank's experts get from all ranks")
class OwnCounts(RightDispatch):
    def counts(self, going, coming):
        return going.view(self.n, -1).sum(0)


@wrong(TASK, "counts_L has one number for each of this rank's experts")
class CountsTurned(RightDispatch):
    def counts(self, going, coming):
        return super().counts(going, coming).flip(0)


@wrong(TASK, "counts_L is a list, not a tensor")
class CountsAsAList(RightDispatch):
    def counts(self, going, coming):
        return super().counts(going, coming).tolist()


@wrong(TASK, "counts_L has the shape [9]; right is [3]")
class CountsFromEachRank(RightDispatch):
    def counts(self, going, coming):
        return coming


@wrong(TASK, "way.sorted_R is the inverse")
class InverseOfSorted(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(sorted_R=way.sorted_R.argsort())


@wrong(TASK, "way.order_S is the inverse")
class InverseOfOrder(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(order_S=way.order_S.argsort())


@wrong(TASK, "way.order_S has the numbers of copies")
class TokensInTheWay(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(order_S=self.token(way.order_S))


@wrong(TASK, "way.sent: 2 of 3 elements are wrong")
class SentAndReceivedSwappedInTheWay(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(sent=way.received, received=way.sent)


@wrong(TASK, NO_WAY)
class NoWay(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, tuple(way)


@wrong(TASK, NO_WAY)
class WayOfTensors(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(order_S=way.order_S.tolist())


@wrong(TASK, "way.sent is no list of whole numbers; hint: " + NO_WAY)
class WayWithoutLists(RightDispatch):
    def packed(self, *args):
        rows, counts, way = super().packed(*args)
        return rows, counts, way._replace(sent=torch.tensor(way.sent), received=torch.tensor(way.received))


@wrong(TASK, "dispatch returned a tensor")
class RowsOnly(RightDispatch):
    def packed(self, *args):
        return super().packed(*args)[0]
