"""What the functions of this exercise are given; help(Run) names a class's fields."""

from typing import NamedTuple

from torch import Tensor, nn


class Weight(NamedTuple):
    """A parameter of this rank, with its gradient in .grad.

    kind: "cut": each tp rank has another part of it, and the whole gradient of this part; "whole": all tp ranks have it alike,
    and the same gradient; "partial": they have it alike, but each has the gradient of a part of the tokens.
    """

    parameter: nn.Parameter
    kind: str


class Call(NamedTuple):
    """A call of one rank. number: the same on all ranks that take part; axis: what it was made for.

    ranks: those that really take part; of a "send" or a "recv" the source, then the destination. sent: bytes that this rank
    sends in it: to the next of `ranks`, and from the last one to the first; a recv sends none.
    """

    number: int
    op: str
    axis: str
    ranks: tuple[int, ...]
    sent: int


class Span(NamedTuple):
    """What a rank did from one moment to another; the ranks' clocks agree. kind: "compute", or "call": from when this rank
    came to it until it was over, with the call's number; seconds.
    """

    kind: str
    started: float
    finished: float
    call: int | None = None


class Run(NamedTuple):
    """A step of a cluster. sizes: axis -> degree, outermost first; node: GPUs of one node, ranks 0 to node − 1 on the first.

    calls, spans, weights: by rank; weights: name -> tensor after the step. pp ranks are stages: they have other weights, and
    may have other work.
    """

    sizes: dict[str, int]
    node: int
    calls: list[list[Call]]
    spans: list[list[Span]]
    weights: list[dict[str, Tensor]]
