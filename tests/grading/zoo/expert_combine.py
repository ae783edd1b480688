"""Wrong answers to combine of 08_expert."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightCombine
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "combine"
ORDER = "tokens return in the wrong order"
GATE_ORDER = "the gates stand in another order than the rows"
NEITHER = "neither y nor the gates have a gradient"


@wrong(TASK, ORDER + ": y_RH is sorted by expert")
class NotPutBack(RightCombine):
    def back(self, y):
        return y


@wrong(TASK, ORDER + ": y[sorted_R] sorts once more")
class SortedOnceMore(RightCombine):
    def back(self, y):
        return y[self.way.sorted_R]


@wrong(TASK, ORDER + ": row i that comes home belongs to copy way.order_S[i]")
class AsTheyCome(RightCombine):
    def token(self, order):
        return torch.arange(len(order)) % max(self.tokens, 1)


@wrong(TASK, ORDER + ": row i that comes home belongs to copy way.order_S[i]")
class InverseOrder(RightCombine):
    def token(self, order):
        return super().token(order.argsort())


@wrong(TASK, "results are added to other tokens")
class WrongToken(RightCombine):
    def token(self, order):
        return order // self.top_k


@wrong(TASK, "results are added to other tokens")
class ViewedByTokens(RightCombine):
    """[T, K, H], where numbers are k·T + t."""

    def added(self, home, gate):
        every = home.new_zeros(self.top_k * self.tokens, home.shape[1])
        every = every.index_copy(0, self.way.order_S, self.weighted(home, gate))
        return every.view(self.tokens, self.top_k, home.shape[1]).sum(1)


@wrong(TASK, "the gates are applied twice")
class GatesTwice(RightCombine):
    def weighted(self, home, gate):
        return gate[:, None] * super().weighted(home, gate)


@wrong(TASK, "the gates are missing")
class WithoutGates(RightCombine):
    def weighted(self, home, gate):
        return home + 0 * gate[:, None]


@wrong(TASK, "the gates are divided by their sum again")
class NormalisedAgain(RightCombine):
    def gate(self, gates):
        sums = gates.sum(0)
        return super().gate(torch.where(sums > 0, gates / sums.clamp(min=1e-9), 0.0))


@wrong(TASK, "that is a mean over the copies")
class MeanOfWeighted(RightCombine):
    def weighted(self, home, gate):
        return super().weighted(home, gate) / self.top_k


@wrong(TASK, "that is a mean over the copies")
class PlainMean(RightCombine):
    def weighted(self, home, gate):
        return home / self.top_k + 0 * gate[:, None]


@wrong(TASK, "not of the transposed")
class GatesTransposed(RightCombine):
    def gate(self, gates):
        return gates.T.flatten()[self.way.order_S]


@wrong(TASK, GATE_ORDER)
class GatesAsTheyStand(RightCombine):
    def gate(self, gates):
        return gates.flatten()[: len(self.way.order_S)]


@wrong(TASK, "a rank may have no tokens: no −1 in view or reshape, say each size", cases=slice(None))
class ShapeLeftOpen(RightCombine):
    def added(self, home, gate):
        chosen = home.new_zeros(self.top_k * self.tokens, home.shape[1])
        chosen = chosen.index_copy(0, self.way.order_S, self.weighted(home, gate))
        return chosen.view(self.top_k, self.tokens, -1).sum(0)


@wrong(TASK, GATE_ORDER)
class GatesThatAreNotZero(RightCombine):
    def gate(self, gates):
        return gates.flatten()[gates.flatten() != 0]


@wrong(TASK, GATE_ORDER)
class GatesByTheInverse(RightCombine):
    cases = slice(2)

    def gate(self, gates):
        return gates.flatten()[self.way.order_S.argsort().argsort()]


@wrong(TASK, "a token's results are written over each other")
class WrittenOver(RightCombine):
    def added(self, home, gate):
        out = home.new_zeros(self.tokens, home.shape[1])
        return out.index_put((self.token(self.way.order_S),), self.weighted(home, gate))


@wrong(TASK, "a token's results are written over each other")
class PlusEquals(RightCombine):
    def added(self, home, gate):
        out = home.new_zeros(self.tokens, home.shape[1])
        out[self.token(self.way.order_S)] += self.weighted(home, gate)
        return out


@wrong(TASK, "only the first choices count")
class FirstChoicesOnly(RightCombine):
    def gate(self, gates):
        return super().gate(gates) * (self.way.order_S < self.tokens)


@wrong(TASK, "y has no gradient", right_values=True)
class DetachedY(RightCombine):
    def back(self, y):
        return super().back(y).detach()


@wrong(TASK, "the gates have no gradient", right_values=True)
class DetachedGates(RightCombine):
    def gate(self, gates):
        return super().gate(gates).detach()


@wrong(TASK, "out_TH has no graph; hint: " + NEITHER)
def combine_without_gradients(y, gates, way, exchange):
    with torch.no_grad():
        return RightCombine()(y, gates, way, exchange)


@wrong(TASK, "y has no gradient", right_values=True)
class SendsByItself(RightCombine):
    def travel(self, rows, sent, received):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.detach(), received, sent)
        return out


@wrong(TASK, "the gradient of y lacks the gates", right_values=True)
class RawGradientOfY(RightCombine):
    def weighted(self, home, gate):
        return home + (gate[:, None] - 1) * home.detach()


@wrong(TASK, "that is dispatch's direction")
class DispatchsDirection(RightCombine):
    def travel(self, rows, sent, received):
        return self.exchange(rows, received, sent)


@wrong(TASK, "the gates are at home, where the tokens are", right_values=True)
class GatesTravel(RightCombine):
    """To the experts, which is too late here, and back."""

    def gate(self, gates):
        gate = super().gate(gates)[:, None].detach().contiguous()
        there = gate.new_empty(sum(self.way.received), 1)
        dist.all_to_all_single(there, gate, self.way.received, self.way.sent)
        return super().gate(gates)


@wrong(TASK, "one exchange is enough", right_values=True)
class InTwoExchanges(RightCombine):
    """Of halves of H, though one takes them all."""

    def travel(self, rows, sent, received):
        halves = [self.exchange(half.contiguous(), sent, received) for half in rows.tensor_split(2, 1)]
        return torch.cat(halves, 1)


@wrong(TASK, "one exchange is enough", right_values=True)
class Twice(RightCombine):
    def travel(self, rows, sent, received):
        return (self.exchange(rows, sent, received) + self.exchange(rows, sent, received)) / 2


@wrong(TASK, "no rank needs what all others have", right_values=True)
class AsksForSizes(RightCombine):
    def travel(self, rows, sent, received):
        dist.all_gather_object([None] * dist.get_world_size(), sent)
        return super().travel(rows, sent, received)


@wrong(TASK, "nothing is summed over ranks here")
class AllReducesResults(RightCombine):
    def added(self, home, gate):
        out = super().added(home, gate)
        dist.all_reduce(out.detach().flatten()[:1].clone())
        return 2 * out


@wrong(TASK, "a barrier is not needed", right_values=True)
class WithABarrier(RightCombine):
    def travel(self, rows, sent, received):
        dist.barrier()
        return super().travel(rows, sent, received)


@wrong(TASK, "of float32; right is")
class Float32(RightCombine):
    def added(self, home, gate):
        return super().added(home, gate).float()


@wrong(TASK, "nearly right, as if rounded")
class Rounded(RightCombine):
    def back(self, y):
        return super().back(y).float().double()


@wrong(TASK, "what combine returned has the shape")
class OneRowForEachCopy(RightCombine):
    def added(self, home, gate):
        return self.weighted(home, gate)


@wrong(TASK, "what combine returned is a NoneType, not a tensor")
class ReturnsNothing(RightCombine):
    def added(self, home, gate):
        super().added(home, gate)


@wrong(TASK, "gates_KT changed; hint: leave what you are given")
class ChangesGates(RightCombine):
    def gate(self, gates):
        gate = super().gate(gates)
        gates.data /= 2
        return gate


@wrong(TASK, "way.sent or way.received changed")
class ChangesTheWay(RightCombine):
    def travel(self, rows, sent, received):
        home = super().travel(rows, list(sent), list(received))
        self.way.sent.reverse()
        self.way.sent[0] += 1
        return home


@wrong(TASK, "all ranks have to call it, also one that has no rows", right_values=True)
class SkipsWithoutTokens(RightCombine):
    cases = slice(2)

    def travel(self, rows, sent, received):
        if not self.tokens:
            return rows.new_zeros(0, rows.shape[1])
        return super().travel(rows, sent, received)


@wrong(TASK, "out_TH has no graph; hint: a rank without tokens has experts, too", right_values=True)
class SkipsWhereNothingHappens(RightCombine):
    """A rank without tokens, and whose experts nobody chose."""

    cases = slice(3)

    def __call__(self, y, gates, way, exchange):
        if not len(y) + gates.numel():
            return torch.zeros(0, y.shape[1], dtype=y.dtype)
        return super().__call__(y, gates, way, exchange)
