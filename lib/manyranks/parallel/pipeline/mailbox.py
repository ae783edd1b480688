"""A pipeline's messages: outputs to the stage after, gradients to the stage before.

A message is known by the action that uses it: the F of a stage and micro-batch, or the B
(a B and an I use the same one).

No rank waits for a send. gloo's ends only when the other side receives, and two ranks that
both waited for that first would wait for ever, whatever the messages' sizes. So a send is
started and left alone, and a rank waits only for what its next action uses. The schedule is
verified: the ranks that it waits for get there. Each message has a tag of its own, so that
receives may be posted in any order; one is posted ahead, while the action before computes.
(NCCL has no tags, and keeps the messages of two ranks in one order: Pipeline refuses it.)

What was sent stays in memory until it has arrived. A rank does not ask for that: a message
from another rank shows that this one has received all that it used before.
"""

from collections import defaultdict, deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.pipeline.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Action,
    Schedule,
    singles,
)

_DIMS = 8
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


class Spec(NamedTuple):
    """What a receiver must know of a tensor beforehand."""

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
    """Who sends what to whom, and when: the part that is the same in every step.

    specs: of the messages that were sent or received before: each is said once.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        self.schedule = schedule
        self.made: dict[Action, int] = {}
        self.used: dict[Action, int] = {}
        self.specs: dict[Action, Spec] = {}
        self.awaited: list[Action] = []
        for rank in range(len(schedule.ranks)):
            for place, item in enumerate(schedule.ranks[rank]):
                for action in singles(item):
                    self._note(rank, place, action)

    def _note(self, rank: int, place: int, action: Action) -> None:
        """What the action uses, from another rank or not, and what it makes."""
        if (made := self.made_by(action)) is not None:
            self.made[made] = place
        if (used := self.used_by(action)) is not None:
            self.used[used] = place
            if rank == self.rank and self.source(used) != rank:
                self.awaited.append(used)

    def used_by(self, action: Action) -> Action | None:
        first, last = action.stage == 0, action.stage == self.schedule.stages - 1
        if action.kind == WEIGHT or (first if action.kind == FORWARD else last):
            return None
        kind = FORWARD if action.kind == FORWARD else BACKWARD
        return action._replace(kind=kind)

    def made_by(self, action: Action) -> Action | None:
        kind = FORWARD if action.kind == FORWARD else BACKWARD
        stage = action.stage + (1 if kind == FORWARD else -1)
        inside = 0 <= stage < self.schedule.stages and action.kind != WEIGHT
        return Action(kind, stage, action.microbatch) if inside else None

    def source(self, message: Action) -> int:
        """The rank that sends it."""
        step = -1 if message.kind == FORWARD else 1
        return self.schedule.placement[message.stage + step]

    def target(self, message: Action) -> int:
        return self.schedule.placement[message.stage]

    def tag(self, message: Action) -> int:
        number = message.stage * self.schedule.microbatches + message.microbatch
        return 4 * number + 2 * (message.kind == FORWARD)


class Mailbox:
    """One rank's messages of one step."""

    def __init__(self, routes: Routes, device: torch.device):
        self._routes, self._device = routes, device
        self._awaited = deque(routes.awaited)
        self._here: dict[Action, Tensor] = {}  # from a stage on this very rank
        self._coming: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[int, list[_Sent]] = defaultdict(list)
        self._post_next()

    def take(self, message: Action) -> Tensor:
        """Waits for the message. Afterwards it is the caller's."""
        if message in self._here:
            return self._here.pop(message)
        if message not in self._routes.specs:
            self._routes.specs[message] = self._receive_spec(message)
        if message not in self._coming:
            self._post(message)
        self._awaited.popleft()  # messages are taken in the order of the rank's table
        work, tensor = self._coming.pop(message)
        work.wait()
        self._post_next()
        self._forget_arrived(message)
        return tensor

    def give(self, message: Action, tensor: Tensor) -> None:
        """Starts to send the tensor, which nobody may change from here on.

        Raises ValueError where it is not what was sent in the step before.
        """
        routes, to = self._routes, self._routes.target(message)
        if to == routes.rank:
            self._here[message] = tensor
            return
        spec = Spec.of(tensor)
        if message not in routes.specs:
            routes.specs[message] = spec
            if message.kind == FORWARD:
                self._send(message, _encoded(spec, self._device), tag=1)
        if routes.specs[message] != spec:
            raise _changed(message, routes.specs[message], spec)
        self._send(message, tensor.contiguous())

    def expect_gradient(self, stage: int, microbatch: int, output: Tensor) -> None:
        """A gradient has the shape and dtype of its output: nobody says it."""
        message = Action(BACKWARD, stage, microbatch)
        self._routes.specs.setdefault(message, Spec.of(output))

    def close(self) -> None:
        """Waits until everything has arrived."""
        for sent in self._sent.values():
            for message in sent:
                message.work.wait()
        self._sent.clear()

    def _send(self, message: Action, tensor: Tensor, tag: int = 0) -> None:
        routes, to = self._routes, self._routes.target(message)
        number = routes.tag(message) + tag
        work = dist.isend(tensor, group=routes.group, group_dst=to, tag=number)
        self._sent[to].append(_Sent(routes.used[message], work, tensor))

    def _post_next(self) -> None:
        """Posts the next receive, if it is known of what."""
        if self._awaited and self._awaited[0] in self._routes.specs:
            self._post(self._awaited[0])

    def _post(self, message: Action) -> None:
        shape, dtype = self._routes.specs[message]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._coming[message] = self._receive(message, tensor), tensor

    def _receive(self, message: Action, tensor: Tensor, tag: int = 0) -> dist.Work:
        routes, number = self._routes, self._routes.tag(message) + tag
        source = routes.source(message)
        return dist.irecv(tensor, group=routes.group, group_src=source, tag=number)

    def _receive_spec(self, message: Action) -> Spec:
        header = torch.empty(2 + _DIMS, dtype=torch.int64, device=self._device)
        self._receive(message, header, tag=1).wait()
        kind, dims, *sizes = header.tolist()
        return Spec(tuple(sizes[:dims]), _TYPES[kind])

    def _forget_arrived(self, message: Action) -> None:
        """Its sender made it after it had used these."""
        source, made = self._routes.source(message), self._routes.made[message]
        for sent in self._sent[source]:
            if sent.used <= made:
                sent.work.wait()  # returns at once, but gloo wants it
        self._sent[source] = [sent for sent in self._sent[source] if sent.used > made]


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


def _changed(message: Action, was: Spec, now: Spec) -> ValueError:
    return ValueError(
        f"what {message} uses is {_words(now)}, and was {_words(was)} in the first step, "
        "when the ranks told each other: give batches of one shape, or make another "
        "Pipeline for this"
    )


def _words(spec: Spec) -> str:
    return f"{str(spec.dtype)[6:]} of shape {spec.shape}"
