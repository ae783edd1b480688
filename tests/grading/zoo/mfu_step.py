"""Wrong answers to step_flops of 09_mfu."""

from tests.grading.zoo.mfu_right import RightStep
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "step_flops"
SOME, SELECTIVE, FULL = slice(1, 2), slice(2, 3), slice(3, 4)  # cases: some layers learn, and what is recomputed
ALWAYS, FROZEN = "backward ends at the first layer that learns", "a layer that does not learn is counted as if it did"


@wrong(TASK, "backward is counted once")
class BackwardOnce(RightStep):
    def products(self, learns, comes):
        return int(comes)

    def scores(self, learns, comes):
        return int(comes)

    def of_head(self):
        return 2 * self.head


@wrong(TASK, "backward is missing")
class NoBackward(RightStep):
    def products(self, learns, comes):
        return 0

    def scores(self, learns, comes):
        return 0

    def of_head(self):
        return self.head


@wrong(TASK, "recomputation is counted as useful")
class RecomputationIsUseful(RightStep):
    def form(self, model, hardware):
        return hardware, hardware


@wrong(TASK, "recomputation is counted as useful")
class SelectiveIsUseful(RightStep):
    cases = SELECTIVE

    def form(self, model, hardware):
        useful = model + sum(self.recomputed(layer) * comes for layer, comes in zip(self.layers, self.comes(), strict=True))
        return useful, hardware


@wrong(TASK, "what backward of flash attention computes again is no model FLOPs")
class FlashIsUseful(RightStep):
    cases = SOME

    def form(self, model, hardware):
        return hardware, hardware


@wrong(TASK, "that is the other one")
class Swapped(RightStep):
    def form(self, model, hardware):
        return hardware, model


@wrong(TASK, "what is recomputed is missing in the hardware FLOPs")
class NothingAgain(RightStep):
    def again(self):
        return 0


@wrong(TASK, FROZEN)
class AllLearn(RightStep):
    cases = SOME

    def products(self, learns, comes):
        return 2

    def scores(self, learns, comes):
        return 2


@wrong(TASK, FROZEN)
class AllBehindTheFirstLearn(RightStep):
    cases = SOME

    def products(self, learns, comes):
        return 2 * comes


@wrong(TASK, "layers that do not learn are counted without any backward")
class NoWayThrough(RightStep):
    cases = SOME

    def comes(self):
        return [layer.learns for layer in self.layers]


@wrong(TASK, ALWAYS)
class BackToTheEmbedding(RightStep):
    cases = SOME

    def comes(self):
        return [True] * len(self.layers)


@wrong(TASK, "it is what learns before a layer that matters")
class WhatLearnsBehind(RightStep):
    cases = SOME

    def comes(self):
        return [any(layer.learns for layer in self.layers[i:]) for i in range(len(self.layers))]


@wrong(TASK, "the scores have no weights")
class ScoresLikeProducts(RightStep):
    cases = SOME

    def scores(self, learns, comes):
        return comes + learns


@wrong(TASK, "the scores have no weights")
class ScoresOnce(RightStep):
    def scores(self, learns, comes):
        return int(comes)


@wrong(TASK, "the head is missing")
class NoHead(RightStep):
    def of_head(self):
        return 0


@wrong(TASK, "the head learns: forward, and two products in backward")
class HeadDoesNotLearn(RightStep):
    def of_head(self):
        return 2 * self.head


@wrong(TASK, "nothing is recomputed where backward does not come")
class AgainEverywhere(RightStep):
    cases = FULL

    def where(self, learns, comes):
        return True


@wrong(TASK, "layers that do not learn")  # of what is recomputed, or of the scores: both are true
class AgainWhereItLearns(RightStep):
    cases = FULL

    def where(self, learns, comes):
        return learns


@wrong(TASK, "backward of flash attention computes QKᵀ again wherever it runs")
class FlashWhereItLearns(RightStep):
    cases = SOME

    def where_flash(self, learns, comes):
        return learns


@wrong(TASK, '"selective" recomputes the scores, once forward')
class SelectiveIsFull(RightStep):
    cases = SELECTIVE

    def recomputed(self, layer):
        return layer.products + layer.scores if self.recompute != "none" else 0


@wrong(TASK, '"selective" recomputes the scores, once forward')
class SelectiveWithBackward(RightStep):
    cases = SELECTIVE

    def recomputed(self, layer):
        return 3 * layer.scores if self.recompute == "selective" else super().recomputed(layer)


@wrong(TASK, '"selective" recomputes the scores only')
class SelectiveOfProducts(RightStep):
    cases = SELECTIVE

    def recomputed(self, layer):
        return layer.products if self.recompute == "selective" else super().recomputed(layer)


@wrong(TASK, '"full" recomputes whole layers')
class FullWithoutScores(RightStep):
    def recomputed(self, layer):
        return layer.products if self.recompute == "full" else super().recomputed(layer)


@wrong(TASK, '"full" recomputes whole layers')
class FullWithBackward(RightStep):
    def recomputed(self, layer):
        return super().recomputed(layer) * (3 if self.recompute == "full" else 1)


@wrong(TASK, "the head is not recomputed")
class HeadAgain(RightStep):
    def again(self):
        return super().again() + (self.head if self.recompute == "full" else 0)


@wrong(TASK, "flash attention keeps no scores: its backward computes QKᵀ again")
class FlashForgotten(RightStep):
    cases = SOME

    def of_flash(self, layer):
        return 0


@wrong(TASK, "one and a half forwards of the scores")
class FlashOrSelective(RightStep):
    cases = SELECTIVE

    def of_flash(self, layer):
        return layer.scores / 2 if self.flash and self.recompute == "none" else 0


@wrong(TASK, "computes QKᵀ again, not the product with V")
class FlashRunsBothAgain(RightStep):
    cases = SOME

    def of_flash(self, layer):
        return layer.scores if self.flash else 0


@wrong(TASK, "without flash attention the scores are kept as matrices")
class AlwaysFlash(RightStep):
    def of_flash(self, layer):
        return layer.scores / 2


@wrong(TASK, "the difference is 2 times the forward pass of one layer's products")
class TwoLayersMore(RightStep):
    def of_head(self):
        return super().of_head() + 2 * self.layers[0].products


@wrong(TASK, "it returns a pair of numbers, (model, hardware)")
class OneNumber(RightStep):
    def form(self, model, hardware):
        return hardware


@wrong(TASK, "it returns a pair of numbers, (model, hardware)")
class NamedNumbers(RightStep):
    def form(self, model, hardware):
        return {"model": model, "hardware": hardware}


@wrong(TASK, "whatever recompute is")
class FlashNotWithFull(RightStep):
    cases = FULL

    def of_flash(self, layer):
        return 0 if self.recompute == "full" else super().of_flash(layer)


@wrong(TASK, "what runs again is what `recompute` says")
class SelectiveIsAlwaysFlash(RightStep):
    cases = slice(4, 5)  # selective recomputation without flash attention

    def of_flash(self, layer):
        return layer.scores / 2 if self.flash or self.recompute == "selective" else 0
