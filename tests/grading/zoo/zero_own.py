"""Wrong answers to later tasks of 03_zero that are wrong because the learner's own shard or gather is."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import Right1, Right2, RightUnit

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def shard(tensor):
    """E // N elements."""
    size = tensor.numel() // me()[1]
    return tensor.flatten()[me()[0] * size :][:size].clone()


def gather(shard_S, shape):
    """Leaves the padding where it is."""
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S)
    return whole


@wrong("Stage1", "your shard does not pass its own check: mend it first")
class CallsAWrongShard(Right1):
    def shard(self, parameter):
        return torch.nn.Parameter(shard(parameter.detach()))


@wrong("Stage1", "your gather does not pass its own check: mend it first")
class CallsAWrongGather(Right1):
    def gather(self, p, s):
        return gather(s.detach(), p.shape)


@wrong("Stage2", "your gather does not pass its own check: mend it first")
class CallsAWrongGatherInStage2(Right2):
    def gather(self, p, s):
        return gather(s.detach(), p.shape)


@wrong("Unit", "your shard does not pass its own check: mend it first")
class UnitCallsAWrongShard(RightUnit):
    def shard(self, p):
        return torch.nn.Parameter(shard(p.detach()), p.requires_grad)
