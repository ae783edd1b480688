"""A rank's instrument: what happens there, in order, and the bytes that are alive at chosen moments."""

import gc
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from manyranks.measure.aliases import replaced
from manyranks.measure.journal import Journal, Stopped, frames
from manyranks.measure.location import machinery
from manyranks.measure.memory import PeakBytes
from manyranks.measure.reachable import Elsewhere

OVERWROTE = "a tensor was changed while it was being sent"  # a mark
_MOMENT, _LOOKS = 0.02, 4  # seconds, and how often to look in the meantime
_BLOCK = 4096  # bytes: torch and Python keep smaller ones for themselves, as they meet operators and modules
_OWN_BOOKS = re.compile("^<frozen importlib|linecache.py$|grade/learner.py$")  # of modules, lines, and of what is ready


class Event(NamedTuple):
    """A note.

    kind: "gradient", "call", "wait" or "mark"
    what: the parameter, the operation or the mark
    bytes: of a call
    """

    kind: str
    what: str
    bytes: int = 0


class _Memory(PeakBytes):
    """Counts bytes, and stops the profile function inside operators: no learner's lines run there, and that saves time."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            sys.setprofile(before)


class Watch(Journal):
    """A journal that also keeps events in memory, in order.

    held: the live bytes each time that `weigh` was called; peak_bytes: the most that
    tensors took inside `peak`; scattered: whether an all-to-all had an output that is not contiguous: gloo misplaces numbers.
    """

    def __init__(self, folder: str, rank: int):
        super().__init__(folder, rank)
        self.events: list[Event] = []
        self.held: list[int] = []
        self.peak_bytes, self.scattered = 0, False
        self._memory, self._there = _Memory(counts=False), []
        self._place, self._forbidden = "", ("", "", "", "")
        self._works: list[dist.Work] = []
        self._open: dict[int, list[_Place]] = {}  # of a send that nobody has waited for: what it reads
        self._coming: dict[int, dist.Work] = {}  # of a receive that nobody has waited for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything is noted."""
        wait, send, receive, events = dist.Work.wait, dist.ProcessGroup.send, dist.ProcessGroup.recv, self.events

        def noted(work, *args, **kwargs):
            self._stop_forbidden()
            events.append(Event("wait", ""))
            for under_way in (self._open, self._coming):
                under_way.pop(id(work), None)
            return wait(work, *args, **kwargs)

        def opened(group, tensors, *args):
            work = send(group, tensors, *args)
            self._open[id(work)] = [_Place.of(tensor) for tensor in tensors]
            self._works.append(work)  # so that no other one has its id
            return work

        def coming(group, tensors, *args):
            if any(map(self._is_read, tensors)):
                self.mark(OVERWROTE)
            work = receive(group, tensors, *args)
            self._coming[id(work)] = work
            return work

        messages = patch.multiple(dist.ProcessGroup, send=opened, recv=coming)
        with patch.object(dist.Work, "wait", noted), messages, self, self._memory:
            yield

    def follow(self, model: nn.Module) -> None:
        """Notes each gradient of the model, from now on, as it is made."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(Event("gradient", name)))

    def mark(self, what: str) -> None:
        """Notes that the script has come to this place."""
        self._place = what
        self.events.append(Event("mark", what))

    def forget(self) -> None:
        """Drops the events that are worked out by now, all but the calls: records would be large with them."""
        self.events[:] = [event for event in self.events if event.kind == "call"]

    def forbid(self, function: str, place: str, what: str, hint: str) -> None:
        """Makes a function of this name raise Stopped, from now on, where it calls or waits past the mark `place`."""
        self._forbidden = (function, place, what, hint)

    def under_way(self) -> tuple[int, int]:
        """Counts the messages being sent, and those being received: begun, and nobody has waited for them."""
        return len(self._open), len(self._coming)

    def weigh(self, *owners) -> None:
        """Counts the bytes that are alive; the least of a moment, for a call's thread may let go of a tensor a little late.

        owners: what the learner has made; what they lead to counts in any form, also as arrays, bytes and lists of numbers.
        """
        others = self._others(owners)
        counts = [self._memory.live_bytes()]
        for _ in range(_LOOKS if self._count else 1):  # without calls, only the thread that looks at this one may hold a tensor
            time.sleep(_MOMENT / _LOOKS)
            counts.append(self._memory.live_bytes())
        self.held.append(min(counts) + others)

    def overlapping_calls(self, function: Callable, *calls: tuple[dict[str, torch.Tensor], tuple]) -> dict[str, torch.Tensor]:
        """Makes both calls, and the first once more with halves, before their backwards: in this order, then in reverse.

        calls: of each, the leaves by name, of which copies are made, and what the function gets after them
        Returns the leaves' gradients, by name: each the sum over both orders.
        """
        self.mark("over")
        leaves, more = calls[0]
        calls = (*calls, ({name: leaf.detach() / 2 for name, leaf in leaves.items()}, more))
        copies = [{name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()} for leaves, _ in calls]
        for order in (1, -1):
            results = [function(*own.values(), *more) for own, (_, more) in zip(copies, calls, strict=True)]
            for y in results[::order]:
                y.backward(torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape))
        found: dict[str, torch.Tensor] = {}
        for i, own in enumerate(copies, 1):
            found |= gradients(own, f"the gradient in call {i} of three of ")
        return found

    def leave_out(self, *owners) -> None:
        """Leaves out what these lead to now, such as variables of other cells, until an operator uses it."""
        self._there = Elsewhere(owners).all

    def meet(self, *owners) -> None:
        """Counts the tensors that these lead to, from now on, whether an operator has used them or not."""
        self._others(owners)

    def _others(self, owners: tuple) -> int:
        found = Elsewhere(owners, but=(self, self.events, *self._there))
        self._memory.meet(found.tensors, found.storages)
        return found.bytes

    def weigh_all(self, first: bool = False) -> int:
        """Bytes that are alive, also of lists, bytes and numpy's arrays that were made since the first time."""
        gc.collect()  # what stands in a cycle is gone only then
        self.weigh()
        if first and tracemalloc.is_tracing():  # it never stops: stopping can crash other threads (CPython 128679)
            tracemalloc.clear_traces()
        elif first:
            tracemalloc.start()
        blocks = [] if first else [(one.traceback[0].filename, one.size) for one in tracemalloc.take_snapshot().traces]
        theirs = [n for file, n in blocks if not _OWN_BOOKS.search(file) and (n >= _BLOCK or not machinery(file))]
        return self.held[-1] + sum(theirs)

    @contextmanager
    def peak(self) -> Iterator[None]:
        """Inside, the most that is alive at one time is what peak_bytes says.

        Only here: counting after every operator took a quarter of a check's time.
        """
        self._memory.peak_bytes = 0
        self._memory.counts = True
        yield
        self._memory.counts = False
        self.peak_bytes = self._memory.peak_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_c10d_functional"):  # they reach no operator of c10d
            raise Stopped("functional collectives do not count here", "call dist's own: dist.all_reduce and the like")
        if self._open and self._overwrites(func, args, kwargs or {}):
            self.mark(OVERWROTE)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _overwrites(self, func, args: tuple, kwargs: dict) -> bool:
        """Returns whether the operator writes where an open send reads."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor) and self._is_read(value):
                    return True
        return False

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Returns whether an open send reads a byte of it: other chunks of the same storage may change."""
        own = _Place.of(tensor)
        read = (place for places in self._open.values() for place in places if place.storage == own.storage)
        return any(place.begins < own.ends and own.begins < place.ends for place in read)

    def _stop_forbidden(self) -> None:
        function, place, what, hint = self._forbidden
        if place and place == self._place and function in (name for _, _, name in frames()):
            raise Stopped(what, hint)

    def _note(self, op: str, named: dict) -> None:
        self._stop_forbidden()
        super()._note(op, named)
        self.events.append(Event("call", op, self.last.bytes))
        self.scattered |= op == "all_to_all" and "output" in named and not named["output"].is_contiguous()


class _Place(NamedTuple):
    """A tensor's place in memory: where its first byte is, and where its last one ends."""

    storage: StorageWeakRef
    begins: int
    ends: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Place":
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begins = tensor.data_ptr()
        ends = begins + (last + 1) * tensor.element_size() if tensor.numel() else begins
        return cls(StorageWeakRef(tensor.untyped_storage()), begins, ends)


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the leaf's gradient; zeros where there is none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def gradients(leaves: Mapping[str, torch.Tensor], of: str = "the gradient of ") -> dict[str, torch.Tensor]:
    """Returns a copy of each leaf's gradient, by name.

    of: what stands before the leaf's name
    """
    return {f"{of}{name}": gradient(leaf) for name, leaf in leaves.items()}


# What ranks say to each other, compared without a message: by the store that all of them have


class Compared:
    """Compares how many rows ranks send to each other and expect. All ranks make one, and call it before each exchange.

    Raises Stopped, on the rank that says it later, where two ranks don't agree.
    """

    def __init__(self):
        self._store, self._exchange = distributed_c10d._get_default_store(), 0
        self._place = f"rows compared/{(self._store.add('rows compared', 1) - 1) // dist.get_world_size()}"

    def __call__(self, sent: list[int], received: list[int], hint: str) -> None:
        me, n = dist.get_rank(), dist.get_world_size()
        self._exchange += 1
        if not len(sent) == len(received) == n:
            raise Stopped(f"lists of {len(sent)} and {len(received)} numbers were given for {n} ranks", hint)
        for other, (goes, comes) in enumerate(zip(sent, received, strict=True)):
            for source, to, count in ((me, other, goes), (other, me, comes)):
                key = f"{self._place}/{self._exchange}/{source}/{to}"
                if (first := self._store.compare_set(key, "", f"{count}").decode()) != f"{count}":
                    counts = (first, count) if to == me else (count, first)
                    raise Stopped(f"rank {source} sends rank {to} {counts[0]} rows, and rank {to} expects {counts[1]}", hint)


ALL_MAKE_ALL = (
    "dist.new_group is called by all ranks, for every group, in one order, also by ranks outside the group: a loop over all "
    "groups, and each rank keeps the one that it is in"
)


@contextmanager
def groups_compared(function: Callable) -> Iterator[list[list[int]]]:
    """Inside, the ranks of each new group are noted, and compared with what the other ranks make at once. All ranks come in.

    function: the learner's, which makes them
    Where they make different groups, torch waits for ranks that never come, or mixes groups up: which of them is chance.
    """
    store, before, made = distributed_c10d._get_default_store(), dist.new_group, []
    place = f"groups compared/{(store.add('groups compared', 1) - 1) // dist.get_world_size()}"

    def new_group(ranks=None, *args, use_local_synchronization=False, **kwargs):
        if use_local_synchronization:
            hint = "plain dist.new_group(ranks) is asked for: with use_local_synchronization only a group's own ranks call it"
            raise Stopped("new_group was called with use_local_synchronization", hint)
        ranks = None if ranks is None else list(ranks)
        mine = sorted(range(dist.get_world_size()) if ranks is None else map(int, ranks))
        first = store.compare_set(f"{place}/{len(made)}", "", f"{mine}").decode()
        if first != f"{mine}":
            found = f"rank {dist.get_rank()} made a group of ranks {mine} where another rank made one of {first}"
            raise Stopped(found, ALL_MAKE_ALL)
        made.append(mine)
        return before(ranks, *args, **kwargs)

    with replaced({(module, "new_group"): new_group for module in (dist, distributed_c10d)}, function):
        yield made
