"""Runs a chain of layers by a plan: what each layer keeps, and what is computed again when.

A plan is a list of (kind, layer), layers counted from 1, as theory's checkpointing module
makes them:

    forward     computes the layer's output and holds nothing but it
    store       holds the output just computed until the next layer went backward
    keep        computes the output and holds what backward needs of the layer
    backward    uses that up

    y = run_plan(plan, layers, x)       # until the plan's first backward
    loss(y).backward()                  # the rest

Each layer is its own node in autograd's graph, so parameters get gradients layer by layer.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from manyranks.parallel.recomputation import Call, detached, gradients


def run_plan(
    plan: Iterable[tuple[str, int]], layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor
) -> Tensor:
    """The last layer's output; its backward, once, follows the rest of the plan.

    Each layer takes a tensor and gives one. Without gradients, an ordinary pass.
    Raises ValueError for a plan that does not compute each layer in order first, and
    RuntimeError, in backward, for one that needs what is not held.
    """
    if not torch.is_grad_enabled():
        for layer in layers:
            x = layer(x)
        return x
    run = _Run(plan, layers, x)
    for number in range(1, len(layers) + 1):
        y = run.forward(number, x.requires_grad)
        parameters = run.calls[number].parameters
        x = _Layer.apply(run, number, y, x, *parameters)
    run.hand = None
    return x


class _Layer(torch.autograd.Function):
    """A layer's node: forward was already computed; backward follows the plan."""

    @staticmethod
    def forward(ctx, run: "_Run", number: int, y: Tensor, x: Tensor, *parameters: Tensor):
        ctx.run, ctx.number = run, number
        if number == 1:
            ctx.save_for_backward(x)  # so that autograd notices when somebody changes it
        return y.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        _ = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *ctx.run.backward(ctx.number, grad, needed)


class _Run:
    """The values that are held at a point of the plan, by the layers' numbers.

    stored: outputs
    kept: a layer's input, as a leaf, and its output, with the graph between them
    hand: the number and the value of the output that was just computed
    """

    def __init__(
        self, plan: Iterable[tuple[str, int]], layers: Sequence[Callable], x: Tensor
    ):
        self._actions = iter(list(plan))
        self.calls = {k: Call(layer) for k, layer in enumerate(layers, start=1)}
        self.stored: dict[int, Tensor] = {0: x.detach()}
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.hand: tuple[int, Tensor] | None = None
        self._differs: dict[int, bool] = {}  # whether a layer's input needs a gradient
        self._next: tuple[str, int] | None = next(self._actions, None)

    def forward(self, number: int, differs: bool) -> Tensor:
        """Follows the plan to this layer's output, the first time it is computed."""
        self._differs[number] = differs
        if self._next not in (("forward", number), ("keep", number)):
            raise ValueError(
                f"the plan says {self._next} where layer {number} is to be computed "
                "first: forward or keep each layer in order, then go backward"
            )
        self._compute(*self._next, first=True)
        self._advance()
        while self._next and self._next[0] == "store":
            self._follow(*self._next)
            self._advance()
        return self.hand[1]

    def backward(self, number: int, grad: Tensor, needed: Sequence[bool]) -> list:
        """Follows the plan until this layer goes backward: gradients of what it needs."""
        self.hand = None
        while self._next and self._next[0] != "backward":
            self._follow(*self._next)
            self._advance()
        if self._next != ("backward", number) or number not in self.kept:
            raise RuntimeError(
                f"the plan says {self._next}, with layers {sorted(self.kept)} kept, where "
                f"layer {number} goes backward; a plan is good for one backward"
            )
        self._advance()
        self.hand = None
        x, y = self.kept.pop(number)
        self.stored.pop(number - 1, None)
        inputs = [x, *self.calls[number].parameters]
        return gradients([y], [grad], inputs, needed)

    def _advance(self) -> None:
        self._next = next(self._actions, None)

    def _follow(self, kind: str, number: int) -> None:
        if kind == "store" and self.hand and self.hand[0] == number:
            self.stored[number] = self.hand[1]
        elif kind in ("forward", "keep"):
            self._compute(kind, number)
        else:
            raise RuntimeError(f"the plan says {kind} {number}: it was not just computed")

    def _compute(self, kind: str, number: int, first: bool = False) -> None:
        call, keep = self.calls[number], kind == "keep"
        x = detached(self._input(number), self._differs[number])
        self.hand = None
        with torch.set_grad_enabled(first or keep):
            y = call.first(x, keep=keep) if first else call.again(x)
        if keep:
            self.kept[number] = x, y
        self.hand = number, y.detach()

    def _input(self, number: int) -> Tensor:
        before = number - 1
        if self.hand and self.hand[0] == before:
            return self.hand[1]
        if before in self.stored:
            return self.stored[before]
        if before in self.kept:
            return self.kept[before][1]
        raise RuntimeError(f"the plan computes layer {number} without its input: store it")
