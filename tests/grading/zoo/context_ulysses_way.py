"""Wrong answers to ulysses of 07_context: gradients that do not come back, and messages."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as ready
from torch.distributed import _functional_collectives as functional

from tests.grading.zoo.context_right import RightUlysses, sent
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "ulysses"
NONE = "autograd does not see dist.all_to_all_single"


class Unseen(RightUlysses):
    """The all-to-all itself, without a Function."""

    names = "qkv"

    def of_all(self, x):
        self.now = self.names[0]
        self.names = self.names[1:] + self.names[:1]
        return super().of_all(x)

    def of_own(self, y):
        self.now = "o"
        return super().of_own(y)


@wrong(TASK, f"the result has no graph; hint: there is no gradient of q, k and v: {NONE}")
class SendsTheBareResult(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now == "o" else super().swap(x)


@wrong(TASK, f"there is no gradient of k and v: {NONE}")
class SendsBareKeysAndValues(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now in "kv" else super().swap(x)


@wrong(TASK, f"there is no gradient of q: {NONE}")
class SendsBareQueries(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now == "q" else super().swap(x)


@wrong(TASK, f"there is no gradient of q, k and v: {NONE}")
class SendsAllBare(Unseen):
    def swap(self, x):
        return sent(x.detach()) if self.now != "o" else super().swap(x)


@wrong(TASK, "backward sends as many bytes as forward")
class GradientsStay(RightUlysses):
    def return_back(self, grad):
        return grad.clone()


@wrong(TASK, "the gradients are N times too large")
class GradientsNTimes(RightUlysses):
    def return_back(self, grad):
        return self.n * sent(grad) if self.later() else sent(grad)

    def later(self):
        """Of the result's exchange alone."""
        self.seen = getattr(self, "seen", 0) + 1
        return self.seen == 1


@wrong(TASK, "the gradients are divided by N")
class GradientsDivided(GradientsNTimes):
    def return_back(self, grad):
        return sent(grad) / (self.n if self.later() else 1)


@wrong(TASK, "the gradients are divided by N")
class GradientsDividedTwice(RightUlysses):
    def return_back(self, grad):
        return sent(grad) / self.n


@wrong(TASK, "torch.distributed.nn.functional is not allowed; hint: what is ready is no answer")
class ReadyWithItsGradient(RightUlysses):
    def swap(self, x):
        return ready.all_to_all_single(torch.empty(x.shape, dtype=x.dtype), x.contiguous())


@wrong(TASK, "torch.distributed._functional_collectives is not allowed; hint: what is ready is no answer")
class ReadyFunctional(RightUlysses):
    def swap(self, x):
        return functional.all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)


@wrong(TASK, "out is not contiguous: torch.empty_like(x) has the strides of x")
class RoomLikeWhatIsNotContiguous(RightUlysses):
    def swap(self, x):
        return Scattered.apply(x)


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return Scattered.apply(grad)


@wrong(TASK, "no number is a sum over ranks here")
class GradientsReduced(RightUlysses):
    def return_back(self, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


@wrong(TASK, "a copied head has the gradient of one of its copies", cases=slice(None))
class OneCopysGradient(RightUlysses):
    ranks = 4

    def copied(self, x):
        copies = super().copied(x)
        return torch.cat((copies[:, :, : x.shape[2]], copies[:, :, x.shape[2] :].detach()), 2)


@wrong(TASK, "what is sent has to be contiguous")
class NotContiguous(RightUlysses):
    def swap(self, x):
        out = torch.empty(x.shape, dtype=x.dtype)
        dist.all_to_all_single(out, x.detach())
        return out


@wrong(TASK, "repeat key/value heads only as far as each rank gets one", right_values=True)
class RepeatsAllHeads(RightUlysses):
    def __call__(self, q, k, v, positions, attention):
        k, v = (one.repeat(1, 1, q.shape[2] // one.shape[2], 1) for one in (k, v))
        return super().__call__(q, k, v, positions, attention)


@wrong(TASK, "repeat key/value heads only as far as each rank gets one", right_values=True)
class AllHeadsToAll(RightUlysses):
    """Every rank gets all key/value heads, and takes its own."""

    def __call__(self, q, k, v, positions, attention):
        (self.r, self.n), self.p = me(), torch.cat(positions)
        k, v = (self.of_all(x.expand(self.n, *x.shape))[:, :, self.mine(x.shape[2])] for x in (k, v))
        return self.of_own(attention(self.of_all(self.heads(q)), k, v))

    def mine(self, heads):
        return list(range(self.r, heads, self.n)) or [self.r % heads]


@wrong(TASK, "no rank needs all heads of all tokens", right_values=True)
class Gathers(RightUlysses):
    """All of all, and takes its own."""

    def swap(self, x):
        return Gathered.apply(x)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        (r, n), x = me(), x.contiguous()
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        return torch.stack([part[r] for part in parts])

    @staticmethod
    def backward(ctx, grad):
        return Gathered.apply(grad)


@wrong(TASK, "an all-to-all is one call", right_values=True)
class ByMessages(RightUlysses):
    def swap(self, x):
        return Exchanged.apply(x)


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        (r, n), out = me(), torch.empty(x.shape, dtype=x.dtype)
        out[r] = x[r]
        for far in range(1, n):
            to, source = (r + far) % n, (r - far) % n
            for work in [dist.isend(x[to].contiguous(), to), dist.irecv(out[source], source)]:
                work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchanged.apply(grad)


@wrong(TASK, "four all-to-alls in each direction are enough", right_values=True)
class ExchangesTwice(RightUlysses):
    def swap(self, x):
        sent(x.detach())
        return super().swap(x)


@wrong(TASK, "what is sent is float32")
class InSinglePrecision(RightUlysses):
    def swap(self, x):
        return super().swap(x.float()).double()


@wrong(TASK, "waits in all_to_all")
class OneRankLeavesOut(RightUlysses):
    def swap(self, x):
        return x if self.r == 1 else super().swap(x)


@wrong(TASK, "q changed; hint: leave what you are given as it is")
class ChangesQ(RightUlysses):
    def __call__(self, q, k, v, positions, attention):
        y = super().__call__(q, k, v, positions, attention)
        q.data.zero_()
        return y


@wrong(TASK, "rank 1 raised ZeroDivisionError")
class Raises(RightUlysses):
    def heads(self, x):
        return super().heads(x) * (1 / (1 - self.r))


@wrong(TASK, "attention takes q_TBaD, k_TBgD and v_TBgD of the whole sequence")
class KeepsOwnKeys(RightUlysses):
    """Queries of the whole sequence, keys of the rank's own tokens."""

    def __call__(self, q, k, v, positions, attention):
        (self.r, self.n), self.p = me(), torch.cat(positions)
        return self.of_own(attention(self.of_all(self.heads(q)), k, v))
