"""More wrong answers to MLP of 06_tensor: units that are cut in other ways."""

import torch
import torch.distributed as dist
from torch import nn

from tests.grading.zoo.tensor_right import RightMLP, linear
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "MLP"


@wrong(TASK, "rank r has the units r, r + t, r + 2t, …, not neighbours")
class CutsBlocks(RightMLP):
    def cut(self, rows):
        return rows.chunk(self.t)[self.r]


@wrong(TASK, "cut each half by itself")
class CutsBothHalvesAtOnce(RightMLP):
    def halves(self, whole):
        (gate, up) = whole.gate_up.weight.chunk(self.t)[self.r].chunk(2)
        (gate_bias, up_bias) = whole.gate_up.bias.chunk(self.t)[self.r].chunk(2)
        self.gate, self.up = linear(gate, gate_bias), linear(up, up_bias)


@wrong(TASK, "the other U are up's: chunk(2), then deal")
class SwapsTheHalves(RightMLP):
    def halves(self, whole):
        super().halves(whole)
        self.gate, self.up = self.up, self.gate


@wrong(TASK, "the other U are up's: chunk(2), then deal")
class TakesTurns(RightMLP):
    """Gate, up, gate, up, …"""

    def halves(self, whole):
        self.gate, self.up = (
            linear(self.cut(whole.gate_up.weight[first::2]), self.cut(whole.gate_up.bias[first::2])) for first in (0, 1)
        )


@wrong(TASK, "dist.get_rank(group), dist.get_world_size(group)", cases=slice(None))
class RankOfTheWorld(RightMLP):
    ranks = 4

    def cut(self, rows):
        return rows[dist.get_rank() :: dist.get_world_size()]


@wrong(TASK, "a unit is a row of gate and of up, and a column of down")
class CutsColumnsOfTheFirst(RightMLP):
    def halves(self, whole):
        super().halves(whole)
        self.gate, self.up = linear(self.gate.weight.t()), linear(self.up.weight.t())
        self.gate.bias, self.up.bias = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.zeros(1).double())
