"""Mixed precision: a model in 16 bits, an optimizer in 32.

In bfloat16 a weight has 8 significant bits: what changes it by less than 1/512 of itself is
rounded away, and many steps are smaller, more of them as the learning rate falls. So the
optimizer works on copies in 32 bits, the masters, and the model gets them rounded. With
Adam that is 16 bytes per parameter:

    2 parameter + 2 gradient + 4 master + 4 first moment + 4 second moment

float16 has 11 significant bits but ends at 65,504 and at 2⁻²⁴ ≈ 5.96·10⁻⁸. A gradient of
half of that or less, 2.98·10⁻⁸, becomes zero, and many are that small. So the loss is
multiplied by a large scale, hence all gradients, and the optimizer divides by it, in 32
bits.

    optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss.backward(); model.finish(); optimizer.step()                    # bfloat16

    scaler = LossScaler()
    scaler.scaled(loss).backward(); model.finish(); scaler.step(optimizer)  # float16

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, sections 3.1 and
3.2; the 16 bytes: Rajbhandari et al., arXiv 1910.02054, section 3.1.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.shard import local

Clip = Callable[[list[Tensor]], object]

_HALF, _WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)


class Held(NamedTuple):
    """The tensors that training holds between steps, by what they are.

    states: the optimizer's, of the parameters' shapes
    counters: its others, such as Adam's count of steps, one a parameter tensor
    """

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    masters: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]


class Scalable(Protocol):
    """The protocol of what a LossScaler steps; .optimizer is the torch optimizer inside."""

    optimizer: torch.optim.Optimizer

    def gradients(self) -> list[Tensor]: ...

    def step(self, scale: float = 1.0, clip: Clip | None = None) -> None: ...


class MasterOptimizer:
    """Any torch optimizer, on copies in 32 bits of parameters in 16.

    params, **kwargs: as the optimizer class takes them; params may be groups. Parameters of
    32 or 64 bits are their own masters. Elements that something else changed, as loading
    weights does, give their masters anew at the next step.
    .optimizer is the torch optimizer: a learning-rate schedule takes it.
    step() also makes the gradients in 32 bits: 4 more bytes per parameter.
    Raises ValueError for a parameter of another dtype, and where there is none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        optimizer_class: type[torch.optim.Optimizer],
        **kwargs,
    ):
        groups = [{**g, "params": _listed(g["params"])} for g in groups_of(params)]
        self.parameters = [p for group in groups for p in group["params"]]
        self.masters = [_master(p) for p in self.parameters]
        master = dict(zip(self.parameters, self.masters, strict=True))
        copies = [{**g, "params": [master[p] for p in g["params"]]} for g in groups]
        self.optimizer = optimizer_class(copies, **kwargs)

    @property
    def param_groups(self) -> list[dict]:
        """The torch optimizer's, of masters."""
        return self.optimizer.param_groups

    def gradients(self) -> list[Tensor]:
        """Returns those that step() is going to use, times the scale."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def step(self, scale: float = 1.0, clip: Clip | None = None) -> None:
        """Steps the optimizer on the masters; the parameters become theirs, rounded.

        Parameters without gradient stay.
        scale: what the gradients were multiplied by
        clip: called before the step with the masters, whose gradients are already divided
            by the scale, and may be changed: lambda masters: clip_grad_norm_(masters, 1.0)
        """
        self._refresh()
        for parameter, master in self._pairs():
            if parameter.grad is not None:
                grad = _wide(parameter.grad, master)
                master.grad = grad if scale == 1 else grad / scale
        if clip is not None:
            clip(self.masters)
        self.optimizer.step()
        for parameter, master in self._pairs():
            if parameter is not master:
                master.grad = None
                parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the parameters' gradients."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def held(self) -> Held:
        """Returns what is held now; gradients until zero_grad()."""
        return Held(
            parameters=tuple(self.parameters),
            gradients=tuple(self.gradients()),
            masters=tuple(m for p, m in self._pairs() if m is not p),
            **optimizer_states(self.optimizer),
        )

    def state_dict(self) -> dict:
        """Masters and optimizer, to go on from later."""
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Goes on from a state_dict(); the parameters become its masters, rounded."""
        for (parameter, master), saved in zip(self._pairs(), state["masters"], strict=True):
            master.copy_(saved)
            parameter.copy_(master)
        self.optimizer.load_state_dict(state["optimizer"])

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.parameters, self.masters, strict=True)

    def _refresh(self) -> None:
        """Masters of what something else has changed since the last step.

        Found by its value: a change through parameter.data leaves no other trace.
        """
        for parameter, master in self._pairs():
            if parameter is not master:
                rounded = master.to(parameter.dtype)
                if not torch.equal(parameter, rounded):
                    master.copy_(torch.where(parameter == rounded, master, parameter))


class LossScaler:
    """A loss scale that finds itself: as large as the gradients allow.

    scale: at first; where a gradient overflows, the step is skipped and the scale becomes
    `backoff` times as large; after `interval` steps without overflow, `growth` times.
    group: the ranks that decide together: an overflow on one skips the step on all. After
    finish() every rank has the overflow in its mean already. The ranks must ask each other
    where their gradients differ, as where each has a shard (ZeRO, fully sharded): of an
    overflow on one rank, another one has the element.
    A loss in float16 has the scale as its gradient, and 2¹⁶ is more than float16 holds: the
    first step is skipped then.
    Source: arXiv 1710.03740, section 3.2, and the numbers of torch.amp.GradScaler.
    Raises ValueError for numbers that would not grow, or not shrink.
    """

    def __init__(
        self,
        group: Group = None,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        if not (scale >= 1 and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                f"scale={scale}, growth={growth}, backoff={backoff}, interval={interval}: "
                "scale and growth must be 1 or more, backoff between 0 and 1, interval 1 "
                "or more"
            )
        self.group, self.scale, self.growth = group, scale, growth
        self.backoff, self.interval = backoff, interval
        self._good = 0  # steps since the scale changed

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in 32 bits: backward starts here."""
        return loss.float() * self.scale

    def step(self, optimizer: Scalable, clip: Clip | None = None) -> bool:
        """The optimizer's step, unless a gradient overflowed on some rank.

        optimizer: a MasterOptimizer, or a ZeroOptimizer
        clip: as its step() takes it

        Returns whether it was taken, the same on all ranks. All ranks call it; one
        all-reduce of 4 bytes. Gradients must be cleared afterwards in any case.
        Raises FloatingPointError where gradients are not finite even at a scale of 1.
        """
        if self._overflowed(optimizer):
            self._shrink()
            return False
        optimizer.step(self.scale, clip)
        self._good += 1
        if self._good == self.interval:
            self.scale *= self.growth
            self._good = 0
        return True

    def _overflowed(self, optimizer: Scalable) -> bool:
        stepped = [p for g in optimizer.optimizer.param_groups for p in g["params"]]
        bad = torch.zeros((), device=stepped[0].device)  # there may be no gradient here
        for grad in optimizer.gradients():
            bad.logical_or_(local(grad).isfinite().all().logical_not())
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        return bool(bad)

    def _shrink(self) -> None:
        if self.scale <= 1:
            raise FloatingPointError(
                f"gradients are not finite at a loss scale of {self.scale:g}: no scale "
                "will help; lower the learning rate, or look for NaN in the loss"
            )
        self.scale = max(1.0, self.scale * self.backoff)
        self._good = 0


def optimizer_states(optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, ...]]:
    """Its states, and its counters of steps, one a parameter."""
    named = [item for state in optimizer.state.values() for item in state.items()]
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    return {
        "states": tuple(value for name, value in tensors if name != "step"),
        "counters": tuple(value for name, value in tensors if name == "step"),
    }


def groups_of(params: Iterable) -> list[dict]:
    """The groups that they are, or the one that they make. Raises ValueError for none."""
    if not (listed := _listed(params)):
        raise ValueError("params is empty: give model.parameters(), not yet iterated")
    return listed if isinstance(listed[0], dict) else [{"params": listed}]


def _listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _wide(grad: Tensor, master: Tensor) -> Tensor:
    """The gradient in its master's dtype, and in its strides.

    For a fused optimizer walks through both in the order of the memory.
    """
    wide = grad.to(master.dtype)
    if wide.layout != torch.strided or wide.stride() == master.stride():
        return wide
    return torch.empty_like(master).copy_(wide)


def _master(parameter: Tensor) -> Tensor:
    if parameter.dtype in _WIDE:
        return parameter
    if parameter.dtype not in _HALF:
        allowed = ", ".join(str(dtype) for dtype in (*_HALF, *_WIDE))
        raise ValueError(f"a parameter of {parameter.dtype}: allowed are {allowed}")
    return parameter.detach().float().requires_grad_()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype an optimizer works in: 32 bits for parameters in 16."""
    return torch.float32 if dtype in _HALF else dtype


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer that hasn't stepped make its states, as before its first step.

    By a step with a rate, a decay and gradients of zero. Parameters and gradients stay.
    """
    if optimizer.state:
        return
    groups = optimizer.param_groups
    options = [{k: g[k] for k in ("lr", "weight_decay") if k in g} for g in groups]
    learning = [p for g in groups for p in g["params"] if p.requires_grad]
    grads = [p.grad for p in learning]
    for group, own in zip(groups, options, strict=True):
        group |= {k: v * 0 for k, v in own.items()}
    for p in learning:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, own in zip(groups, options, strict=True):
        group |= own
    for p, grad in zip(learning, grads, strict=True):
        p.grad = grad
        if "step" in optimizer.state[p]:
            optimizer.state[p]["step"].zero_()
