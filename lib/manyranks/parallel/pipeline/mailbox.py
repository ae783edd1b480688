"""A pipeline's messages: outputs to the stage after, gradients to the stage before.

NCCL has no tags: messages between two ranks arrive in the order both have posted them, and
one that is posted too early holds up those behind it. So all ranks agree on one order:
messages come as they would be made if every F, I and W took a second. Between two of its
items a rank posts, in one batch, what comes between them in that order. Then no circle can
form: of all messages that have not arrived, take the first. All that its two ranks wait for
before it has arrived, so both have posted it.

A rank waits only for what its next item uses, and for no send. A message stays in its
sender's memory until it has arrived. The sender does not ask: a message from the other rank
shows that the other has received all that it used before.
"""

from bisect import bisect
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.pipeline.program import Times, program
from manyranks.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    Action,
    Message,
    Schedule,
    singles,
)
from manyranks.timeline import replay
from manyranks.timeline.spans import COMPUTE

_DIMS = 8
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


class Spec(NamedTuple):
    """The facts of a tensor that a receiver must know beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "Spec":
        return Spec(tuple(tensor.shape), tensor.dtype)


class _Sent(NamedTuple):
    used: int  # where in the receiver's table
    work: dist.Work
    tensor: Tensor


class Routes:
    """The part that is the same in every step: who sends what to whom, and when.

    posted: the messages that this rank sends or receives before its first item, before its
        second, …, and at the end
    made, used: message -> the place of the item that makes it in its sender's table, or
        uses it in its receiver's
    specs: of the messages that were sent or received before: each is said once
    """

    def __init__(self, schedule: Schedule, group: Group):
        self.group, self.rank = group, dist.get_rank(group)
        self.schedule = schedule
        self.made: dict[Message, int] = {}
        self.used: dict[Message, int] = {}
        self.specs: dict[Message, Spec] = {}
        moments = _moments(schedule)
        own = moments[self.rank]
        self.posted: list[list[Message]] = [[] for _ in range(len(own) + 1)]
        items = [
            (at, r, place) for r, row in enumerate(moments) for place, at in enumerate(row)
        ]
        for at, rank, place in sorted(items):
            for action in singles(schedule.ranks[rank][place]):
                if (used := schedule.uses(action)) is not None:
                    self.used[used] = place
                if (made := schedule.makes(action)) is not None:
                    self.made[made] = place
                    receiver = schedule.receiver(made)
                    if rank != receiver and self.rank in (rank, receiver):
                        self.posted[bisect(own, at)].append(made)


def _moments(schedule: Schedule) -> list[list[tuple[float, bool, int]]]:
    """Returns, for each rank, when its items would end if F, I and W took a second each.

    Where two end together, a backward goes first. Of two in one direction, the one whose
    message the other takes goes first: so it is posted while the other computes.
    """
    timeline, rows = replay(program(schedule), Times()), []
    for rank, items in enumerate(schedule.ranks):
        ends, row = iter(timeline.of(rank, COMPUTE)), []
        for item in items:
            actions = singles(item)
            spans = [next(ends) for _ in actions]
            kind, stage, _ = actions[0]
            row.append(
                (spans[-1].finished, kind == FORWARD, stage if kind == FORWARD else -stage)
            )
        rows.append(row)
    return rows


class Mailbox:
    """The messages of a rank in one step."""

    def __init__(self, routes: Routes, device: torch.device):
        self._routes, self._device = routes, device
        self._here: dict[Message, Tensor] = {}  # from a stage on this very rank
        self._leaving: dict[Message, Tensor] = {}
        self._coming: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[int, list[_Sent]] = defaultdict(list)

    def post(self, place: int) -> None:
        """Starts to send and to receive what comes before the rank's item at this place."""
        batch = []
        for message in self._routes.posted[place]:
            if message not in self._routes.specs:
                self._start(batch)
                batch = []
                self._routes.specs[message] = self._agreed_spec(message)
            shape, dtype = self._routes.specs[message]
            tensor = self._leaving.pop(message, None)
            if tensor is None:  # it comes here
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
            batch.append((message, tensor))
        self._start(batch)

    def take(self, message: Message) -> Tensor:
        """Waits for the message. Afterwards it is the caller's."""
        if message in self._here:
            return self._here.pop(message)
        work, tensor = self._coming.pop(message)
        work.wait()
        self._forget_arrived(message)
        return tensor

    def give(self, message: Message, tensor: Tensor) -> None:
        """Takes the tensor along at the next post(). Nobody may change it from here on.

        Raises ValueError where it is not what was sent in the step before.
        """
        if self._routes.schedule.receiver(message) == self._routes.rank:
            self._here[message] = tensor
            return
        spec = Spec.of(tensor)
        if (known := self._routes.specs.get(message, spec)) != spec:
            raise ValueError(
                f"{message} is {_words(spec)}, and was {_words(known)} in the "
                "first step, when the ranks told each other: give batches of one shape, or "
                "make another Pipeline for this"
            )
        self._leaving[message] = tensor.contiguous()

    def expect_gradient(self, stage: int, microbatch: int, output: Tensor) -> None:
        """A gradient has the shape and dtype of its output: nobody says it."""
        message = self._routes.schedule.uses(Action(BACKWARD, stage, microbatch))
        self._routes.specs.setdefault(message, Spec.of(output))

    def close(self) -> None:
        """Waits until everything has arrived."""
        for sent in self._sent.values():
            for message in sent:
                message.work.wait()
        self._sent.clear()

    def _start(self, batch: list[tuple[Message, Tensor]]) -> None:
        """Sends this rank's own messages and receives the others, all at once."""
        routes, schedule, ops = self._routes, self._routes.schedule, []
        for message, tensor in batch:
            call, peer = dist.irecv, schedule.sender(message)
            if peer == routes.rank:
                call, peer = dist.isend, schedule.receiver(message)
            ops.append(dist.P2POp(call, tensor, group=routes.group, group_peer=peer))
        works = dist.batch_isend_irecv(ops) if ops else []
        works = works * len(ops) if len(works) < len(ops) else works  # NCCL has one for all
        for (message, tensor), op, work in zip(batch, ops, works, strict=True):
            if op.op == dist.irecv:
                self._coming[message] = work, tensor
            else:
                sent = _Sent(routes.used[message], work, tensor)
                self._sent[schedule.receiver(message)].append(sent)

    def _agreed_spec(self, message: Message) -> Spec:
        """Returns the message's Spec, which its sender says before, but for a gradient."""
        if (leaving := self._leaving.get(message)) is not None:
            if message.kind == FORWARD:
                self._start([(message, _encoded(Spec.of(leaving), self._device))])
            return Spec.of(leaving)
        header = torch.empty(2 + _DIMS, dtype=torch.int64, device=self._device)
        self._start([(message, header)])
        self._coming.pop(message)[0].wait()
        kind, dims, *sizes = header.tolist()
        return Spec(tuple(sizes[:dims]), _TYPES[kind])

    def _forget_arrived(self, message: Message) -> None:
        """Forgets messages that have arrived: their receiver used them to make this one."""
        routes = self._routes
        sender, made = routes.schedule.sender(message), routes.made[message]
        for sent in self._sent[sender]:
            if sent.used <= made:
                sent.work.wait()  # returns at once, but gloo wants it
        self._sent[sender] = [sent for sent in self._sent[sender] if sent.used > made]


def _encoded(spec: Spec, device: torch.device) -> Tensor:
    """The spec as a message of one size. Raises ValueError where it has no such form."""
    shape, dtype = spec
    if dtype not in _TYPES or len(shape) > _DIMS:
        raise ValueError(
            f"a stage's output is {_words(spec)}: stages hand over tensors of at most "
            f"{_DIMS} dimensions, of {', '.join(str(t)[6:] for t in _TYPES)}"
        )
    sizes = [*shape, *[0] * (_DIMS - len(shape))]
    return torch.tensor([_TYPES.index(dtype), len(shape), *sizes], device=device)


def _words(spec: Spec) -> str:
    return f"{str(spec.dtype)[6:]} of shape {spec.shape}"
