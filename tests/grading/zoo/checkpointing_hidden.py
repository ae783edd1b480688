"""Wrong answers to 04_checkpointing that keep what is no tensor, or that are wrong where little learns or nothing."""

import os
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tests.grading.zoo.checkpointing_right import Right, RightShares
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
ONE, LAST = "checkpoint", "shared_checkpoint"
KEPT = []


def as_array(tensor):
    return tensor.detach().numpy().copy()


@wrong(ONE, "✗ keeps x and nothing else", right_values=True)
class KeepsXAsAnArrayToo(Right):
    def save(self, ctx, x):
        super().save(ctx, x)
        ctx.array = as_array(x)


@wrong(ONE, "x itself is enough: a copy", right_values=True)
class KeepsXAsAnArray(Right):
    def save(self, ctx, x):
        ctx.array = as_array(x)

    def saved(self, ctx):
        return torch.from_numpy(ctx.array)


@wrong(ONE, "x itself is enough: a copy", right_values=True)
class KeepsXAsBytes(Right):
    def save(self, ctx, x):
        ctx.bytes, ctx.shape = x.detach().numpy().tobytes(), x.shape

    def saved(self, ctx):
        return torch.frombuffer(bytearray(ctx.bytes), dtype=torch.float64).view(ctx.shape)


@wrong(ONE, "x itself is enough: a copy", right_values=True)
class KeepsXAsAList(Right):
    def save(self, ctx, x):
        ctx.list = x.tolist()

    def saved(self, ctx):
        return torch.tensor(ctx.list, dtype=torch.float64)


class ForShow:
    """All that the function keeps goes elsewhere; the second run is for nothing."""

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        with saved_tensors_hooks(self.pack, self.unpack):
            y = function(x)
            if y.requires_grad:
                kept = self.pack(x)

                def again(grad):
                    state = torch.get_rng_state()
                    with torch.no_grad():
                        function(self.unpack(kept))
                    torch.set_rng_state(state)

                y.register_hook(again)
        return y


@wrong(ONE, "✗ keeps x and nothing else", right_values=True, cases=slice(None))
class KeepsArrays(ForShow):
    def pack(self, tensor):
        return as_array(tensor)

    def unpack(self, array):
        return torch.from_numpy(array)


@wrong(ONE, "what backward's run computes is not used", right_values=True, cases=slice(None))
class KeepsFiles(ForShow):
    def pack(self, tensor):
        path = os.path.join(tempfile.gettempdir(), uuid.uuid4().hex)
        torch.save(tensor.detach(), path)
        return path

    def unpack(self, path):
        tensor = torch.load(path)
        os.remove(path)
        return tensor


@wrong(ONE, "torch.utils.checkpoint is not allowed")
def torchs_own_with_another_thread(function, x):
    from torch.utils.checkpoint import checkpoint

    def elsewhere(x, more):
        on = torch.is_grad_enabled()

        def run():
            with torch.set_grad_enabled(on):
                return function(x)

        with ThreadPoolExecutor() as threads:
            return threads.submit(run).result() + more.sum() * 0

    return checkpoint(elsewhere, x, torch.empty(0, requires_grad=True), use_reentrant=True)


@wrong(ONE, "apply gets x itself")
class GivesADetachedX(Right):
    def __call__(self, function, x):
        return super().__call__(function, x.detach())


@wrong(ONE, "A tensor more for apply may be empty", right_values=True)
class GivesALargeTensorMore(Right):
    def __call__(self, function, x):
        self.like = x
        return super().__call__(function, x)

    def more(self):
        return [torch.empty_like(self.like, requires_grad=True)]


@wrong(ONE, "a sum of y that is made outside has no graph")
class SumsOutside(Right):
    def gradient(self, ctx, y, grad, x):
        y.sum().backward()
        return x.grad


@wrong(ONE, "None for the function")
class ReturnsItInTheWrongPlace(Right):
    def __call__(self, function, x):
        return InFront.apply(self, function, x, *self.more())


class InFront(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, function, x, more):
        ctx.way = way
        return way.forward(ctx, function, x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.way.backward(ctx, grad), None, None, None


@wrong(LAST, "is a gathered x, or a share, in a list", right_values=True)
class KeepsWhatItGathers(RightShares):
    """A cache that nobody empties."""

    def cut(self, row, shape):
        KEPT.append(super().cut(row, shape))
        return KEPT[-1]


@wrong(LAST, "✗ lets them go when backward is over", right_values=True)
class HangsItOnTheContext(RightShares):
    def run(self, function, x, pack, unpack):
        return Hanging(pack, unpack)(function, x)


class Hanging(Right):
    def __init__(self, pack, unpack):
        self.pack, self.unpack = pack, unpack

    def save(self, ctx, x):
        ctx.save_for_backward(self.pack(x))

    def saved(self, ctx):
        ctx.whole = self.unpack(ctx.saved_tensors[0])
        return ctx.whole


@wrong(LAST, "under torch.no_grad() just call the function", right_values=True, cases=slice(None))
class KeepsUnderNoGrad(RightShares):
    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            KEPT.append(x.clone())
        return super().run(function, x, pack, unpack)


@wrong(LAST, "a share has 1/t of x", right_values=True)
class KeepsAllOfXAsAnArray(RightShares):
    def run(self, function, x, pack, unpack):
        own = as_array(x)

        def unpack_and_look(share):
            unpack(share)
            return torch.from_numpy(own)

        return super().run(function, x, pack, unpack_and_look)


class Poorer(Right):
    """Without a tensor more for apply."""

    def more(self):
        return []


@wrong(LAST, "give it one more, torch.empty(0, requires_grad=True)", right_values=True, cases=slice(None))
class SharesWithNothingMore(RightShares):
    def checkpoint(self, function, x):
        return Poorer()(function, x)


class Bolder(Right):
    """Backward in any case."""

    def gradient(self, ctx, y, grad, x):
        torch.autograd.backward(y, grad)
        return x.grad


@wrong(LAST, "nothing needs a gradient here", right_values=True, cases=slice(None))
class FailsWhereNothingLearnsOnRanks(RightShares):
    def checkpoint(self, function, x):
        return Bolder()(function, x)


class SavesTheState(Right):
    """With x, for pack to see."""

    def save(self, ctx, x):
        ctx.save_for_backward(x, ctx.state)

    def restore(self, ctx):
        torch.set_rng_state(self.state)

    def saved(self, ctx):
        x, self.state = ctx.saved_tensors
        return x


@wrong(LAST, "only x goes in shares", right_values=True)
class SharesTheStateToo(RightShares):
    def __call__(self, function, x, group):
        rank, t = dist.get_rank(group), dist.get_world_size(group)

        def pack(tensor):
            return self.share(tensor.detach().flatten(), rank, t), tensor.shape

        def unpack(kept):
            return self.cut(self.gather(kept[0], t, group), kept[1])

        return self.run(function, x, pack, unpack)

    def checkpoint(self, function, x):
        return SavesTheState()(function, x)


@wrong(LAST, "only x goes in shares")
class TakesTheStateForX(RightShares):
    def checkpoint(self, function, x):
        return SavesTheState()(function, x)
