"""More wrong answers to the fifth task of 03_zero: calls in another order than the simplest schedule's."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper
from tests.grading.zoo.zero_right import RightUnit

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Unit"


@wrong(TASK, "are not still the same Parameter objects")
class PutsNewParametersIn(RightUnit):
    def parameters(self, module):
        for part in module.modules():
            for name, p in list(part.named_parameters(recurse=False)):
                setattr(part, name, torch.nn.Parameter(p.detach().clone(), p.requires_grad))
        return list(module.parameters())


@wrong(TASK, "start() does nothing where the unit is whole or under way", right_values=True)
class GathersAgainWhenWhole(RightUnit):
    def start(self):
        if not self.works:
            self.issue()


@wrong(TASK, "wait() does nothing where nothing is on its way, also where the unit is free")
class WaitAssertsThatItIsUnderWay(RightUnit):
    def wait(self):
        assert not self.is_free
        super().wait()


@wrong(TASK, "a free unit stays free, and the next start() gathers it")
class WaitMarksAFreeUnitWhole(RightUnit):
    def wait(self):
        super().wait()
        self.is_free = False


@wrong(TASK, "reduce() works whether the unit is whole or free")
class ReduceAssertsThatItIsWhole(RightUnit):
    def reduce(self):
        assert not self.is_free, "gather it first"
        super().reduce()


@wrong(TASK, "a shard's own .grad is None before its first backward")
class AddsToNone(RightUnit):
    def take(self, p, s, mean_S):
        s.grad += mean_S


@wrong(TASK, "storage.resize_ takes bytes, not elements")
class ResizesToElements(RightUnit):
    def issue(self):
        for whole, shard_S in zip(self.wholes, self.shards, strict=True):
            whole.untyped_storage().resize_(whole.numel())
            self.works.append(dist.all_gather_single(whole, shard_S.detach(), async_op=True))
