"""Wrong answers to mfu of 09_mfu: what is made of the share, and what is no answer."""

import math

import torch

from manyranks.theory.flops import training
from tests.grading.zoo.mfu_right import RightMfu
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "mfu"
CAUSAL = slice(1, 2)  # the case with a tied head


@wrong(TASK, "that is in per cent")
class PerCent(RightMfu):
    def form(self, share):
        return 100 * share


@wrong(TASK, "that is the inverse")
class UpsideDown(RightMfu):
    def form(self, share):
        return 1 / share


@wrong(TASK, "that is FLOPs of a step")
class WithoutSeconds(RightMfu):
    def form(self, share):
        return share * self.run.seconds


@wrong(TASK, "nearly right, as if rounded")
class Rounded(RightMfu):
    def form(self, share):
        return torch.tensor(share)


@wrong(TASK, "FLOPs of a token by the convention · tokens of a step")
class SomethingElse(RightMfu):
    def form(self, share):
        return share * 1.37


@wrong(TASK, "it returns one number, the share")
class APair(RightMfu):
    def form(self, share):
        return share, "of the peak"


@wrong(TASK, "it returns one number, the share")
class Nothing(RightMfu):
    def form(self, share):
        print(share)


@wrong(TASK, "what is ready is no answer")
class FromTheory(RightMfu):
    def token(self):
        return training(super().parameters(), 1)


@wrong(TASK, "the sheet's rows are called as run.products_dtype")
class UnknownRow(RightMfu):
    def dtype(self):
        return "bfloat16"


@wrong(TASK, "its matrix stands in run.shapes once")
class HeadByItsName(RightMfu):
    cases = CAUSAL

    def products(self):
        return math.prod(self.run.shapes["head.projection.weight"]) + super().products()


@wrong(TASK, "have learned positions")
class AlwaysPositions(RightMfu):
    def products(self):
        return super().products() - math.prod(self.run.shapes["embedding.positions.weight"])


@wrong(TASK, "that is rounded")
class InWholePerCent(RightMfu):
    def form(self, share):
        return round(share, 2)
