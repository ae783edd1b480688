"""Data parallelism: every rank has the whole model, and its own examples.

After backward, every gradient becomes its mean over the ranks, so that all take the same
step. One process with the whole batch would take it, too, where the ranks' shards are of
one size and the loss is a mean. Four wrappers differ in how many gradients travel together,
and when:

    NaiveDataParallel         each parameter alone        after backward
    FlatDataParallel          all together                after backward
    BucketedDataParallel      bucket by bucket            after backward
    OverlappedDataParallel    bucket by bucket            during backward

    model = OverlappedDataParallel(model)
    loss(model(x), y).backward()
    model.finish()  # then the optimizer

In all four a rank sends 2(N − 1)/N of the gradients' bytes in a step.
Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv 2006.15704, section 3.2.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyranks.parallel import replicas
from manyranks.parallel.buckets import Bucket, cut
from manyranks.parallel.collectives.messages import Group, members
from manyranks.parallel.shard import refuse_shards
from manyranks.parallel.wrappers import in_backward


class DataParallel(nn.Module):
    """The base of the four: `_most` is a bucket's size, finish() when it leaves.

    module: the model, which stays what it is and can be reached as .module
    group: the ranks that share the work, None for all
    bucket_bytes: the most that a bucket holds, but for a parameter that is larger alone
        (of no effect in the naive and the flat one)
    broadcast_buffers: in training, each forward pass starts from rank 0's buffers
    When it is made, parameters and buffers become those of the group's rank 0, in place. A
    tied parameter counts once. A frozen one takes no part. After a change of what the
    parameters are (thawed, replaced, added, of another dtype), wrap again. One that this
    rank's examples do not use counts as zero, and one that no rank's use keeps a gradient
    of None. After finish(), gradients are views of the buckets, which the next step writes
    to. For the weights, take .module.state_dict(); for a copy, copy .module and wrap it.
    Raises ValueError where the ranks' models differ, and for complex parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        bucket_bytes: int = 25_000_000,
        broadcast_buffers: bool = False,
    ):
        super().__init__()
        self.module, self.training = module, module.training
        self.group, self.broadcast_buffers = group, broadcast_buffers
        refuse_shards(module.named_parameters(), type(self).__name__)
        self._share = 1 / len(members(group).ranks)
        replicas.check_bytes(bucket_bytes)
        replicas.check_same(module, group, f"buckets of {bucket_bytes} bytes")
        replicas.broadcast(module.parameters(), group)
        replicas.broadcast(module.buffers(), group)
        self._kept = replicas.kept(module)
        learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
        replicas.check_gradients(learning)
        self._buckets = cut(learning, self._most(bucket_bytes))
        self._synchronizes = True
        self._set_up()

    def _set_up(self) -> None:
        """Whatever else is to be prepared."""

    def _most(self, bucket_bytes: float) -> float:
        """Bytes that a bucket may have."""
        return bucket_bytes

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names of each bucket's parameters, in the order in which buckets leave."""
        return tuple(bucket.names for bucket in self._buckets)

    def forward(self, *args, **kwargs):
        """Runs the module. Raises ValueError where a parameter is not what was wrapped.

        Where it is compiled, the module is, and not what is around it: hooks, messages.
        """
        aside = torch.compiler.disable if torch.compiler.is_compiling() else _as_it_is
        follows = aside(self._begin)()
        output = aside(self.module.__call__, recursive=False)(*args, **kwargs)
        if follows:
            aside(self._follow)(output)
        return output

    def _begin(self) -> bool:
        """Prepares the forward pass. Returns whether _follow is to see what it gives."""
        replicas.check_kept(self.module, self._kept)
        if self.broadcast_buffers and self.training and self._synchronizes:
            replicas.broadcast(self.module.buffers(), self.group)
        return False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to this rank's own gradients, and finish() does nothing.

        The next finish() outside sends the sums.
        """
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before

    def finish(self) -> None:
        """Makes gradients means over the ranks; call it after backward, on all of them.

        In every step: the next one of a rank that leaves one out is taken for it.
        Raises ValueError for a sparse gradient.
        """
        raise NotImplementedError

    def __deepcopy__(self, memo: dict):
        raise TypeError(
            f"{type(self).__name__} cannot be copied, for its group and hooks are the "
            "ranks' and the parameters': copy .module and wrap the copy"
        )


class BucketedDataParallel(DataParallel):
    """Sends one all-reduce per bucket after backward: large enough for the bandwidth.

    A bucket takes neighboring parameters, the last ones first, as backward makes their
    gradients. So the first is full long before backward ends, but does not leave yet.
    """

    def finish(self) -> None:
        if not self._synchronizes:
            return
        for bucket in self._buckets:
            bucket.fill(self._share)
            dist.all_reduce(bucket.row_E, group=self.group)
            bucket.hand_out()


class NaiveDataParallel(BucketedDataParallel):
    """Sends one all-reduce per parameter after backward, one after another.

    Each of them takes the network's latency, and most parameters are small.
    """

    def _most(self, bucket_bytes: float) -> float:
        return 0  # no two parameters fit


class FlatDataParallel(BucketedDataParallel):
    """Sends one all-reduce for all parameters (of a dtype) after backward.

    The latency is paid once, but the first gradient waits for the last.
    """

    def _most(self, bucket_bytes: float) -> float:
        return math.inf


class _Underway(DataParallel):
    """Buckets that leave one after another while backward runs, or should have ended."""

    def _set_up(self) -> None:
        self._works: list[dist.Work] = []  # of the buckets that have left
        self._runs = False  # forward, backward or finish(), or it raised
        self._unreached: set[object] = set()  # forward passes that await their backward

    @property
    def _waiting(self) -> list[Bucket]:
        """The buckets that have not left."""
        return self._buckets[len(self._works) :]

    def _send(self, bucket: Bucket) -> None:
        work = dist.all_reduce(bucket.row_E, group=self.group, async_op=True)
        self._works.append(work)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._runs = [], False
        self._unreached.clear()

    def _begin(self) -> bool:
        again = in_backward()  # a checkpoint's
        if self._runs and not again:
            self.drop()
        follows = torch.is_grad_enabled() and not again
        if follows and any(bucket.begun for bucket in self._buckets):
            raise RuntimeError(
                "a forward pass before finish(): call finish() after each backward, and "
                "run those that only accumulate inside no_sync()"
            )
        follows = follows and self._synchronizes
        self._runs = self._runs or follows
        super()._begin()
        return follows

    def drop(self) -> None:
        """Gives up this rank's step, as where its backward raised.

        The other ranks wait for all the buckets: they find NaN in those that had not left.
        """
        for bucket in self._waiting:
            bucket.row_E.fill_(math.nan)
            self._send(bucket)
        self._wait()
        for bucket in self._buckets:
            bucket.drop()

    def _follow(self, output) -> None:
        """Notes when a backward comes to this forward pass, from any of its outputs."""
        self._runs = False
        this, reached = object(), weakref.WeakMethod(self._reached)
        for tensor in tree_leaves((output, getattr(output, "__dict__", None))):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._unreached.add(this)
                tensor.register_hook(partial(_call, reached, this))

    def _reached(self, this: object) -> None:
        self._unreached.discard(this)
        if self._synchronizes:
            self._note_backward()

    def _note_backward(self) -> None:
        if not self._runs:
            self._runs = True
            # It is called at the end of a backward, but of none that raises.
            torch.autograd.Variable._execution_engine.queue_callback(self._note_end)

    def _note_end(self) -> None:
        self._runs = False

    def _check_ended(self) -> None:
        """Raises for a forward pass without a backward that ended: one may have raised."""
        if self._runs or self._unreached:
            raise RuntimeError(
                "finish() after a forward pass without its backward: run one that is to "
                "have none in torch.no_grad() or no_sync(); where forward or backward "
                "raised on this rank, call drop() instead"
            )


class OverlappedDataParallel(_Underway):
    """Sends one asynchronous all-reduce per bucket in backward, as soon as it is full.

    Computing cannot hide the last bucket's, nor what then still queues before it. Buckets
    leave in the same order on all ranks: a full one waits for those before it. One that
    never fills, because a parameter has no gradient, leaves in finish(). The order is that
    in which the model registers its parameters, from the last on: where backward goes
    another way, little or nothing overlaps.
    After a forward or backward that raised, drop(), or the next forward pass, drops all
    gradients; ranks that did not fail find NaN for the buckets that had not left here.
    A backward that raised before it came to the model looks as if there were none. So
    nothing leaves while a forward pass has had no backward, and finish() raises: those
    that are to have none belong in torch.no_grad() or no_sync().
    Raises RuntimeError for that, and for a forward pass or a second gradient before
    finish().
    """

    def _set_up(self) -> None:
        super()._set_up()
        # Weak: once the wrapper is gone, the hooks it left on the parameters do nothing.
        arrived = weakref.WeakMethod(self._arrived)
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = partial(_call, arrived, bucket, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def _arrived(self, bucket: Bucket, place: int) -> None:
        """The gradient of the parameter there has just been made."""
        if self._synchronizes or bucket.begun:
            self._note_backward()
            bucket.put(place, self._share)
            while not self._unreached and (waiting := self._waiting) and waiting[0].full:
                self._send(waiting[0])

    def finish(self) -> None:
        if not self._synchronizes:
            return
        self._check_ended()
        self._runs = True  # should this raise, the next forward pass cleans up
        for bucket in self._waiting:
            bucket.fill(self._share)
            self._send(bucket)
        self._wait()
        for bucket in self._buckets:
            bucket.hand_out()


def _call(method: weakref.WeakMethod, *args) -> None:
    """A hook: the last argument is the gradient, which the method does not need."""
    if (alive := method()) is not None:
        alive(*args[:-1])


def _as_it_is(method: Callable, recursive: bool = True) -> Callable:
    return method
