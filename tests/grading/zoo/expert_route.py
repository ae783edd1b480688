"""Wrong answers to route of 08_expert."""

import torch

from tests.grading.zoo.expert_right import RightRoute
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "route"
BIASED, LOST = "the bias is in the gates", "the gates have no way back to the logits"


@wrong(TASK, "the bias is missing: score + bias decides who is chosen")
class WithoutTheBias(RightRoute):
    def wanted(self, scores):
        return scores.detach()


@wrong(TASK, "the bias is missing where the ranks are chosen")
class RanksWithoutTheBias(RightRoute):
    def ranked(self, scores):
        return scores.detach()


@wrong(TASK, "the bias is missing where the experts are chosen")
class ExpertsWithoutTheBias(RightRoute):
    def wanted(self, scores):
        return scores.detach()

    def ranked(self, scores):
        return scores.detach() + self.bias


@wrong(TASK, "the bias is added to the logit")
class BiasOnTheLogit(RightRoute):
    def wanted(self, scores):
        return (self.logits + self.bias).detach()


@wrong(TASK, "those are blocks of neighbours")
class Blocks(RightRoute):
    def ranks(self, experts):
        return torch.arange(experts) // (experts // self.n)


@wrong(TASK, "the ranks are found by one layout, and masked by another")
class MasksBlocks(RightRoute):
    def near(self, ranked):
        strong = ranked.unflatten(1, (-1, self.n)).amax(1)
        near = torch.zeros_like(strong).scatter(1, strong.topk(self.limit).indices, 1.0).bool()
        return near.repeat_interleave(ranked.shape[1] // self.n, 1)


@wrong(TASK, "the ranks are found by one layout, and masked by another")
class FindsBlocks(RightRoute):
    def near(self, ranked):
        strong = ranked.unflatten(1, (self.n, -1)).amax(2)
        near = torch.zeros_like(strong).scatter(1, strong.topk(self.limit).indices, 1.0).bool()
        return near.repeat(1, ranked.shape[1] // self.n)


@wrong(TASK, "a token goes to more than `limit` ranks")
class NoLimit(RightRoute):
    def near(self, ranked):
        return torch.ones_like(ranked, dtype=torch.bool)


@wrong(TASK, "a rank is as strong as its best expert")
class SumsOfRanks(RightRoute):
    def strong(self, wanted):
        return wanted.sum(-1)


@wrong(TASK, "a rank is as strong as its best expert")
class SumsOfTwo(RightRoute):
    def strong(self, wanted):
        return wanted.topk(2).values.sum(-1)


@wrong(TASK, "that is the worst one")
class WeakestExpert(RightRoute):
    def strong(self, wanted):
        return wanted.amin(-1)


@wrong(TASK, "mask the other ranks' experts with −∞")
class HidesWithZero(RightRoute):
    cases = slice(2)

    def hidden(self):
        return 0.0


@wrong(TASK, "mask the other ranks' experts with −∞")
class HidesWithMinusTen(HidesWithZero):
    def hidden(self):
        return -10.0


@wrong(TASK, "the scores are a softmax over all experts")
class SoftmaxScores(RightRoute):
    def scores(self, logits):
        return logits.softmax(-1)


@wrong(TASK, "the choices stand in another order")
class Ascending(RightRoute):
    def chosen(self, wanted):
        return super().chosen(wanted).flip(1)


@wrong(TASK, "the choices stand in another order")
class SortedByNumber(RightRoute):
    def chosen(self, wanted):
        return super().chosen(wanted).sort(1).values


@wrong(TASK, "the choices are sorted by their score")
class SortedByScore(RightRoute):
    def chosen(self, wanted):
        experts = super().chosen(wanted)
        return experts.gather(1, self.logits.gather(1, experts).argsort(1, descending=True))


@wrong(TASK, BIASED)
class BiasInTheGates(RightRoute):
    def gates(self, scores, experts):
        return self.normalised((scores + self.bias.detach()).gather(1, experts))


@wrong(TASK, BIASED)
class BiasInTheGatesWithGradient(RightRoute):
    def gates(self, scores, experts):
        return self.normalised((scores + self.bias).gather(1, experts))


@wrong(TASK, BIASED)
class BiasedAndRaw(RightRoute):
    def gates(self, scores, experts):
        return (scores + self.bias).gather(1, experts)


@wrong(TASK, "the gates are not normalised")
class RawGates(RightRoute):
    def normalised(self, gates):
        return gates


@wrong(TASK, "the gates are divided by the sum of all experts' scores")
class NormalisedOverAll(RightRoute):
    def gates(self, scores, experts):
        return scores.gather(1, experts) / scores.sum(1, keepdim=True)


@wrong(TASK, "the gates are a softmax of the chosen logits")
class SoftmaxOverTheChosen(RightRoute):
    def gates(self, scores, experts):
        return self.logits.gather(1, experts).softmax(1)


@wrong(TASK, "the scores are a softmax over all experts")
class SoftmaxOverAllAsGates(RightRoute):
    def gates(self, scores, experts):
        return self.logits.softmax(1).gather(1, experts)


@wrong(TASK, "the gates are a softmax of the scores")
class SoftmaxOfScores(RightRoute):
    def normalised(self, gates):
        return gates.softmax(1)


@wrong(TASK, "the gates are divided by a sum over tokens")
class NormalisedOverTokens(RightRoute):
    def normalised(self, gates):
        return gates / gates.sum(0)


@wrong(TASK, "all gates are alike")
class EqualGates(RightRoute):
    def normalised(self, gates):
        return gates * 0 + 1 / gates.shape[1]


@wrong(TASK, LOST, right_values=True)
class DetachedGates(RightRoute):
    def normalised(self, gates):
        return super().normalised(gates).detach()


@wrong(TASK, LOST, right_values=True)
def route_without_gradients(logits, bias, top_k, n, limit):
    with torch.no_grad():
        return RightRoute()(logits, bias, top_k, n, limit)


@wrong(TASK, "the sum of the chosen scores is taken as a constant", right_values=True)
class ConstantSum(RightRoute):
    def normalised(self, gates):
        return gates / gates.detach().sum(1, keepdim=True)


@wrong(TASK, "experts_KT has the shape [7, 3]; right is [3, 7]; hint: it returns (experts_KT, gates_KT)")
class TokensFirst(RightRoute):
    def shaped(self, experts, gates):
        return experts, gates


@wrong(TASK, "[T, K] becomes [K, T] by .T, not by reshape or view")
class Reshaped(RightRoute):
    def shaped(self, experts, gates):
        return experts.reshape(self.top_k, -1), gates.reshape(self.top_k, -1)


@wrong(TASK, "route returned nothing; hint: it returns (experts_KT, gates_KT)")
class ReturnsNothing(RightRoute):
    def shaped(self, experts, gates):
        return None


@wrong(TASK, "route returned a tensor")
class GatesOnly(RightRoute):
    def shaped(self, experts, gates):
        return gates.T


@wrong(TASK, "experts_KT is [3, 7] of float64; right is [3, 7] of int64")
class ExpertsAsFloats(RightRoute):
    def shaped(self, experts, gates):
        return experts.T.double(), gates.T


@wrong(TASK, "gates_KT is [3, 7] of float32; right is [3, 7] of float64")
class RoundedGates(RightRoute):
    def shaped(self, experts, gates):
        return experts.T, gates.T.float()


@wrong(TASK, "logits_TE changed; hint: leave what you are given")
class ChangesTheLogits(RightRoute):
    def scores(self, logits):
        scores = super().scores(logits)
        logits.data.sigmoid_()
        return scores


@wrong(TASK, "a leaf Variable that requires grad")
class InPlace(RightRoute):
    def scores(self, logits):
        return logits.sigmoid_()


@wrong(TASK, "manyranks.parallel.expert.routing is not allowed; hint: what is ready is no answer")
class TheLibrarys(RightRoute):
    def chosen(self, wanted):
        from manyranks.parallel.expert.routing import choose

        return choose(wanted, self.top_k)
