"""A schedule executed: the stages of a model on several ranks, with real gradients.

    stages = split(model, schedule.stages)
    mine = {s: stages[s] for s in schedule.stages_of(dist.get_rank())}
    pipeline = Pipeline(mine, schedule, loss=loss)
    losses = pipeline.step(inputs, targets)  # then the optimizer

Any verified schedule is executed: a rank goes through its table, and for each action takes
what it uses from its mailbox, computes, and sends what another stage uses.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.pipeline.mailbox import Mailbox, Routes
from manyranks.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Pair,
    Schedule,
    forwards,
    singles,
)
from manyranks.parallel.pipeline.split import Shared, Tied
from manyranks.parallel.pipeline.split_backward import SplitBackward
from manyranks.parallel.pipeline.verify import verify

Loss = Callable[[Tensor, Tensor], Tensor]


class Wrapper(Protocol):
    """A module around a stage, which averages or shards gradients over other ranks.

    Those of parallel.data_parallel, parallel.fsdp and parallel.expert are examples.
    """

    def no_sync(self) -> AbstractContextManager:
        """Gradients that backwards make inside stay on this rank, and add up."""

    def finish(self) -> None:
        """Ends a step, after its last backward: returns when the gradients are reduced."""


class Pipeline:
    """The stages of this rank, trained together with the other ranks' stages.

    stages: this rank's modules by stage number, each from one tensor to one tensor; where
        they come from split(), gradients of the parameters that several share are added up,
        and so are the gradients of a stage's copies
    schedule: any; it is verified
    group: the ranks of the schedule, None for all
    loss: from the last stage's output and the targets to a scalar, a mean over them
    pace: called with each Action or Pair, gives a context manager that it computes in
    ties: False leaves that sum to tie(), for gradients that are averaged after step()

    A stage may be in a Wrapper over other ranks: all but its last B or W is in no_sync(),
    so that its gradients leave in this one, and step() calls finish().
    Raises ValueError for stages that belong to another rank, a group of another size, a
    schedule that cannot run, no loss on the last stage's rank, half a Wrapper, and a shared
    parameter that is sharded, or in two wrappers on this rank (wrap a ModuleList of the
    stages, and finish() it after step()); at the first step(), for ranks with other
    schedules.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: Group = None,
        loss: Loss | None = None,
        pace: Callable[[Action | Pair], AbstractContextManager] | None = None,
        ties: bool = True,
    ):
        verify(schedule)
        _check_stages(stages, schedule, group)
        if loss is None and schedule.stages - 1 in stages:
            raise ValueError("this rank has the last stage: give it a loss")
        self.stages, self.schedule, self.loss = dict(stages), schedule, loss
        self.wrappers = {s: stage for s, stage in stages.items() if _is_wrapper(s, stage)}
        self.pace = pace or (lambda item: nullcontext())
        self.routes = Routes(schedule, group)
        self._items, self._agreed = schedule.ranks[self.routes.rank], False
        self._tied, self._ties = Tied(self.stages, schedule, group), ties
        for shared in self._tied.shared:
            _check_shared(shared, self.stages, self.wrappers)
        actions = schedule.actions(self.routes.rank)
        self.splits = {(a.stage, a.microbatch) for a in actions if a.kind == INPUT}
        # In a stage's last B or W its gradients are complete, and may leave.
        self.last = {a.stage: a for a in actions if a.kind in (BACKWARD, WEIGHT)}

    def step(
        self, inputs: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor | None:
        """Runs one batch, forward and backward: adds to the parameters' gradients.

        inputs: needed on the first stage's rank
        targets: needed on the last stage's rank
        Their first dimension is cut into m micro-batches whose sizes differ by one at most;
        gradients are of the mean over the batch. All batches have the same shapes. Returns,
        on the last stage's rank, each micro-batch's share of the loss: their sum is the
        loss of the batch. (In DualPipe both ends have some.) Raises ValueError for a batch
        that is smaller than m.
        """
        step = _Step(self, inputs, targets)
        if not self._agreed:
            _check_agreed(self.schedule, self.routes.group, _device(self.stages))
            self._agreed = True
        self._tied.begin()
        step.run(self._items)
        for wrapper in self.wrappers.values():
            wrapper.finish()
        if self._ties:
            self.tie()
        return step.shares()

    def tie(self) -> None:
        """Sums gradients of what several stages share, or several ranks' copies of a stage.

        step() calls it, unless ties=False. Where gradients are means over the same ranks,
        the sums are the same to the last bit, however each rank has made its means.
        """
        self._tied.finish()

    @torch.no_grad()
    def evaluate(
        self, microbatches: int, inputs: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor | None:
        """Runs one batch, forward only, in so many micro-batches; otherwise as step()."""
        schedule = forwards(self.schedule.placement, microbatches)
        step = _Step(self, inputs, targets, Routes(schedule, self.routes.group))
        step.run(schedule.ranks[self.routes.rank])
        return step.shares()


class _Flight(NamedTuple):
    """The values that a forward leaves for its backward: of y, where its gradient goes."""

    x: Tensor
    y: GradientEdge | None  # None where nothing learns
    split: SplitBackward | None


class _Step:
    """A rank's part of one step: what is in flight. Nothing of it outlives the step."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Tensor | None,
        targets: Tensor | None,
        routes: Routes | None = None,
    ):
        self._pipeline, self._stages = pipeline, pipeline.stages
        self._routes = routes or pipeline.routes
        self._final, m = pipeline.schedule.stages - 1, self._routes.schedule.microbatches
        first, last = 0 in self._stages, self._final in self._stages
        self._inputs = _microbatches("inputs", inputs, m) if first else []
        self._targets = _microbatches("targets", targets, m) if last else []
        self._flying: dict[tuple[int, int], _Flight] = {}
        self._halves: dict[tuple[int, int], SplitBackward] = {}  # whose W is to come
        self.losses: dict[int, Tensor] = {}
        self.mail = Mailbox(self._routes, _device(self._stages))

    def run(self, items: Sequence[Action | Pair]) -> None:
        """Works through the rank's items, with the messages that come between them."""
        for place, item in enumerate(items):
            self.mail.post(place)
            self.do(item)
        self.mail.post(len(items))
        self.mail.close()

    def do(self, item: Action | Pair) -> None:
        """Takes what the item uses, computes, and sends. In a Pair, forward comes first."""
        actions = singles(item)
        used = [self._take(action) for action in actions]
        with self._pipeline.pace(item):
            made = list(map(self._compute, actions, used))
        for action, tensor in zip(actions, made, strict=True):
            self._give(action, tensor)

    def _take(self, action: Action) -> Tensor | None:
        """A forward's input, or the gradient of the stage's output."""
        if (message := self._routes.schedule.uses(action)) is not None:
            return self.mail.take(message)
        return self._inputs[action.microbatch] if action.kind == FORWARD else None

    def _give(self, action: Action, made: Tensor | None) -> None:
        if (message := self._routes.schedule.makes(action)) is not None:
            self.mail.give(message, made)

    def shares(self) -> Tensor | None:
        """Each micro-batch's share of the loss; None where none has ended here."""
        losses = [loss for _, loss in sorted(self.losses.items())]
        return torch.stack(losses) if losses else None

    def _compute(self, action: Action, used: Tensor | None) -> Tensor | None:
        kind, s, k = action
        with self._accumulating(action):
            if kind == FORWARD:
                return self._forward(s, k, used)
            if kind == WEIGHT:
                if (split := self._halves.pop((s, k), None)) is not None:
                    split.weight_gradients()
                return None
            return self._backward(s, k, used, whole=kind == BACKWARD)

    def _accumulating(self, action: Action) -> AbstractContextManager:
        """Inside, gradients stay on this rank. Those of a stage's last B or W may leave."""
        wrapper = self._pipeline.wrappers.get(action.stage)
        may_leave = action == self._pipeline.last[action.stage]
        return nullcontext() if may_leave or wrapper is None else wrapper.no_sync()

    def _forward(self, s: int, k: int, x: Tensor) -> Tensor | None:
        stage = self._stages[s]
        learns = s > 0 and x.is_floating_point() and torch.is_grad_enabled()
        x = x.detach().requires_grad_(learns)
        split = SplitBackward(stage) if (s, k) in self._pipeline.splits else None
        with split or nullcontext():
            y = stage(x.view_as(x))  # no leaf: on those, I keeps FSDP's hooks silent
        made = _checked(y, s).detach()
        if s == self._final:
            y = self._loss(y, k)
        else:
            self.mail.expect_gradient(s, k, made)
        edge = get_gradient_edge(y) if y.requires_grad else None
        self._flying[s, k] = _Flight(x, edge, split)
        return made

    def _loss(self, y: Tensor, k: int) -> Tensor:
        """The micro-batch's share of the batch's mean loss."""
        targets, rows = self._targets[k], sum(map(len, self._targets))
        loss = self._pipeline.loss(y, targets)
        if loss.dim():
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}: give one that is a scalar, the "
                "mean over what it is called with"
            )
        loss = loss * (len(targets) / rows)
        self.losses[k] = loss.detach()
        return loss

    def _backward(self, s: int, k: int, grad: Tensor | None, whole: bool) -> Tensor | None:
        """B or I: the gradient of the stage's input, zeros where nothing depends on it."""
        x, y, split = self._flying.pop((s, k))
        found = None
        if s == self._final:
            grad = torch.ones_like(self.losses[k])
        if y is not None and whole:
            torch.autograd.backward([y], [grad])
            found = x.grad
        elif y is not None:
            found = split.input_gradient(y, grad, x if x.requires_grad else None)
            self._halves[s, k] = split
        return torch.zeros_like(x) if found is None and s > 0 else found


def _microbatches(name: str, batch: Tensor | None, m: int) -> list[Tensor]:
    """m parts of the batch, whose sizes differ by one at most."""
    if batch is None:
        raise ValueError(f"this rank has a stage that needs {name}: give them")
    if len(batch) < m:
        raise ValueError(
            f"{name} of {len(batch)} rows in m={m} micro-batches: each needs one; give "
            f"{m} or more, or a schedule of at most {len(batch)} micro-batches"
        )
    return list(batch.tensor_split(m))


def _checked(y: object, s: int) -> Tensor:
    if not isinstance(y, Tensor):
        raise ValueError(
            f"stage {s} gave a {type(y).__name__}: a stage is from one tensor to one tensor"
        )
    return y


def _device(stages: Mapping[int, nn.Module]) -> torch.device:
    tensors = (p for stage in stages.values() for p in stage.parameters())
    return next((p.device for p in tensors), torch.device("cpu"))


def _check_agreed(schedule: Schedule, group: Group, device: torch.device) -> None:
    """All ranks work out the order of messages for themselves: from the same schedule."""
    told = hashlib.sha256(repr(schedule).encode()).digest()
    mine = torch.tensor(list(told[:8]), dtype=torch.uint8, device=device)
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, mine, group=group)
    if others := [rank for rank, one in enumerate(each) if not one.equal(mine)]:
        raise ValueError(
            f"{schedule.name}: rank {others[0]} of the group was given another schedule "
            f"than rank {dist.get_rank(group)}; give all ranks the same one"
        )


def _check_stages(
    stages: Mapping[int, nn.Module], schedule: Schedule, group: Group
) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(schedule.ranks) != size:
        raise ValueError(
            f"{schedule.name} is for {len(schedule.ranks)} ranks and the group has {size}: "
            f"make the schedule for p={size}, or give a group of {len(schedule.ranks)}"
        )
    if sorted(stages) != (own := schedule.stages_of(rank)):
        raise ValueError(
            f"stages {sorted(stages)} given to rank {rank}: {schedule.name} places {own} "
            "there; give these"
        )


def _is_wrapper(s: int, stage: nn.Module) -> bool:
    has = [name for name in ("no_sync", "finish") if callable(getattr(stage, name, None))]
    if len(has) == 1:
        raise ValueError(
            f"stage {s} is a {type(stage).__name__}, which has {has[0]}() alone: a wrapper "
            "has no_sync(), inside which gradients stay, and finish(), which reduces them; "
            "give it both, or neither, or take one of parallel.data_parallel"
        )
    return len(has) == 2


def _check_shared(
    shared: Shared, stages: Mapping[int, nn.Module], wrappers: Mapping[int, Wrapper]
) -> None:
    """Each wrapper averages what it has, when its own stage's gradients are complete."""
    here = [s for s in shared.stages if s in stages]
    if hasattr(shared.parameter, "whole") and len(shared.stages) > 1:
        raise ValueError(
            f"stages {shared.stages} share a parameter that is sharded in stage {here[0]}: "
            "the gradients' parts would not fit each other; untie it, or use data "
            "parallelism"
        )
    if len(here) > 1 and wrappers.keys() & here:
        raise ValueError(
            f"stages {here} share a parameter, and each is in a wrapper that would average "
            "it: put an nn.ModuleList of this rank's stages into one, give Pipeline the "
            "stages themselves, and call the wrapper's finish() after step()"
        )
