"""Wrong answers to drop of 08_expert."""

import math

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightDrop
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "drop"
BY_TOKEN = "the wrong copies are dropped: places are taken token by token"
OWN = "T is this rank's own number of tokens"


@wrong(TASK, BY_TOKEN)
class TokenByToken(RightDrop):
    def order(self, experts_KT):
        return torch.arange(experts_KT.numel()).view_as(experts_KT).T.flatten().tolist()


@wrong(TASK, "the wrong copies are dropped: those with the smallest gates")
class SmallestGates(RightDrop):
    def order(self, experts_KT):
        return self.gates_KT.detach().flatten().argsort(descending=True).tolist()


@wrong(TASK, "the wrong copies are dropped: the first ones")
class LastOnesFirst(RightDrop):
    def order(self, experts_KT):
        return reversed(range(experts_KT.numel()))


@wrong(TASK, "each row of choices has C places of its own")
class EachRowForItself(RightDrop):
    def kept(self, experts_KT, capacity):
        return torch.stack([super(EachRowForItself, self).kept(row, capacity) for row in experts_KT])


@wrong(TASK, "C is rounded up: math.ceil, not int, // or round")
class RoundsDown(RightDrop):
    def capacity(self, experts_KT):
        return int(self.factor * experts_KT.numel() / self.experts)


@wrong(TASK, "C is rounded up: math.ceil, not int, // or round")
class RoundsToTheNearest(RightDrop):
    def capacity(self, experts_KT):
        return round(self.factor * experts_KT.numel() / self.experts)


@wrong(TASK, "there are T·K copies, not T")
class WithoutK(RightDrop):
    def count(self, experts_KT):
        return experts_KT.shape[1]


@wrong(TASK, "the factor is missing")
class WithoutTheFactor(RightDrop):
    def capacity(self, experts_KT):
        return math.ceil(experts_KT.numel() / self.experts)


@wrong(TASK, "E are all experts")
class OfLocalExperts(RightDrop):
    def capacity(self, experts_KT):
        return math.ceil(self.factor * experts_KT.numel() / (self.experts // me()[1]))


@wrong(TASK, "C copies have a place: there the C-th one is dropped")
class OneTooFew(RightDrop):
    def has_place(self, taken, capacity):
        return taken + 1 < capacity


@wrong(TASK, "C copies have a place: there one more is kept")
class OneTooMany(RightDrop):
    def has_place(self, taken, capacity):
        return taken <= capacity


def reduced(number, op=dist.ReduceOp.SUM):
    total = torch.tensor(number)
    dist.all_reduce(total, op)
    return int(total)


@wrong(TASK, OWN + ": capacity is per source rank, not for the whole batch")
class OfTheWholeBatch(RightDrop):
    def count(self, experts_KT):
        return reduced(experts_KT.numel())


@wrong(TASK, OWN + ", not the mean over ranks")
class OfTheMean(RightDrop):
    def count(self, experts_KT):
        return reduced(experts_KT.numel()) / me()[1]


@wrong(TASK, OWN + ", not the largest of all ranks")
class OfTheLargest(RightDrop):
    def count(self, experts_KT):
        return reduced(experts_KT.numel(), dist.ReduceOp.MAX)


@wrong(TASK, "rank 0 called all_reduce of 8 bytes; hint: each rank drops for itself", right_values=True)
class AsksTheOthers(RightDrop):
    def count(self, experts_KT):
        reduced(experts_KT.numel())
        return super().count(experts_KT)


@wrong(TASK, "a dropped copy takes its token's other copies with it")
class WholeTokens(RightDrop):
    def kept(self, experts_KT, capacity):
        return super().kept(experts_KT, capacity).all(0).expand_as(experts_KT)


@wrong(TASK, "a dropped copy is marked by −1")
class NotMarked(RightDrop):
    def marked(self, experts_KT, kept):
        return experts_KT.clone()


@wrong(TASK, "a dropped copy is marked by −1")
class MarkedByE(RightDrop):
    def marked(self, experts_KT, kept):
        return experts_KT.where(kept, self.experts)


@wrong(TASK, "the gate of a dropped copy is 0", right_values=True)
class GatesLeft(RightDrop):
    def left(self, gates_KT, kept):
        return gates_KT * 1


@wrong(TASK, "the gates that remain are not changed", right_values=True)
class NormalisedAgain(RightDrop):
    def left(self, gates_KT, kept):
        left = gates_KT * kept
        return torch.where(left.sum(0) > 0, left / left.sum(0).clamp(min=1e-9), 0)


@wrong(TASK, "the gates have no way back", right_values=True)
class Detached(RightDrop):
    def left(self, gates_KT, kept):
        return gates_KT.detach() * kept


@wrong(TASK, "the gate of a dropped copy has no gradient", right_values=True)
class GradientOfTheDropped(RightDrop):
    def left(self, gates_KT, kept):
        return gates_KT - gates_KT.detach() * ~kept


@wrong(TASK, "hint: it returns (experts_KT, gates_KT), in the shapes of what it gets")
class Transposed(RightDrop):
    def __call__(self, *args):
        return [one.T for one in super().__call__(*args)]


@wrong(TASK, "drop returned a tensor")
class ExpertsOnly(RightDrop):
    def __call__(self, *args):
        return super().__call__(*args)[0]


@wrong(TASK, "experts_KT changed; hint: leave what you are given")
class InPlace(RightDrop):
    def marked(self, experts_KT, kept):
        experts_KT[~kept] = -1
        return experts_KT


@wrong(TASK, "ZeroDivisionError", right_values=True)
class NeedsTokens(RightDrop):
    cases = slice(2)

    def left(self, gates_KT, kept):
        1 / gates_KT.shape[1]
        return super().left(gates_KT, kept)
