"""Buckets: the gradients of several parameters in one tensor, so that one call takes them.

E counts a bucket's elements.
"""

import torch
from torch import Tensor, nn

from manyranks.parallel.flat_parameters import Named


class Bucket:
    """The gradients of some parameters, end to end in row_E.

    names, parameters: in the order of the row.
    In a step each gradient is put in once; then the row is reduced, and handed out.
    """

    def __init__(self, parameters: Named):
        self.names, self.parameters = tuple(parameters), tuple(parameters.values())
        sizes = [p.numel() for p in self.parameters]
        first = self.parameters[0]
        self.row_E = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._parts = self.row_E.split(sizes)
        pairs = zip(self._parts, self.parameters, strict=True)
        self._views = [_shaped(part, p) for part, p in pairs]
        self._filled: set[int] = set()
        self._absent: set[int] = set()  # of the filled places, those without a gradient

    @property
    def begun(self) -> bool:
        return bool(self._filled)

    @property
    def full(self) -> bool:
        return len(self._filled) == len(self.parameters)

    def fill(self, share: float) -> None:
        """Puts in what is missing."""
        for place in range(len(self.parameters)):
            if place not in self._filled:
                self.put(place, share)

    @torch.no_grad()
    def put(self, place: int, share: float) -> None:
        """Writes `share` times the gradient of the parameter at this place.

        The sign of a zero tells whether anyone has a gradient, without a byte more: a rank
        without one writes −0.0, and a rank with one never begins with −0.0. Sums keep to
        that, for −0.0 is the sum of nothing but −0.0 (IEEE 754-2019, section 6.3).
        Raises ValueError for a sparse gradient, RuntimeError for a second one in a step.
        """
        self._check(place)
        parameter, part = self.parameters[place], self._parts[place]
        if parameter.grad is None:
            part.fill_(-0.0)
            self._absent.add(place)
        else:
            torch.mul(parameter.grad, share, out=self._views[place])
            part[:1].add_(0.0)  # −0.0 becomes 0.0
            parameter.grad = self._views[place]
        self._views[place].underway = True  # wrappers.sum_gradients must not touch it now
        self._filled.add(place)

    def hand_out(self) -> None:
        """Each gradient is its part of the row, which now has the means; ends the step."""
        for place in self._absent:
            first = self._parts[place][:1]
            if not bool(((first == 0) & first.signbit()).all()):
                self.parameters[place].grad = self._views[place]
        self._end()

    def drop(self) -> None:
        """Ends the step and forgets its gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._end()

    def _end(self) -> None:
        for view in self._views:
            view.underway = False
        self._filled.clear()
        self._absent.clear()

    def _check(self, place: int) -> None:
        name, grad = self.names[place], self.parameters[place].grad
        if place in self._filled:
            raise RuntimeError(
                f"{name} got a second gradient before finish(): call finish() after each "
                "backward, run those that only accumulate in no_sync(), and checkpoint "
                "what is used twice with use_reentrant=False"
            )
        if grad is not None and grad.layout != torch.strided:
            self.drop()
            raise ValueError(
                f"{name} has a sparse gradient, and only dense ones are averaged: "
                "in an embedding, say sparse=False"
            )


def _shaped(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part in the parameter's shape, and in its strides where these leave no gaps.

    For a fused optimizer walks through both in the order of the memory.
    """
    like = torch.empty_like(parameter, device="meta")
    return part.as_strided(like.shape, like.stride())


def cut(parameters: Named, most: float) -> list[Bucket]:
    """Buckets of at most so many bytes, or of one parameter, from the last parameter on."""
    return [Bucket(part) for part in parts(parameters, most)]


def parts(parameters: Named, most: float) -> list[Named]:
    """Deals parameters to buckets.

    From the last parameter on, for that is about the order in which backward makes
    gradients. A bucket has one dtype and one device; the buckets are in the order in which
    they should become full.
    """
    buckets: list[Named] = []
    filling: dict[tuple, Named] = {}
    size: dict[tuple, int] = {}
    order = {name: number for number, name in enumerate(reversed(parameters))}
    for name in order:
        parameter = parameters[name]
        kind = parameter.dtype, parameter.device
        size[kind] = size.get(kind, 0) + parameter.nbytes
        if kind not in filling or size[kind] > most:
            filling[kind], size[kind] = {}, parameter.nbytes
            buckets.append(filling[kind])
        filling[kind][name] = parameter
    buckets.sort(key=lambda bucket: order[list(bucket)[-1]])
    return buckets
