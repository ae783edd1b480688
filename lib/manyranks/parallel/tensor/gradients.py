"""Gradients of several products of one input, with weights that are cut by columns.

    N tokens   I features that come in   O features that go out: weight_OI

Where messages travel beside products, linear and overlapped make these by hand.
"""

from collections.abc import Sequence

from torch import Tensor


def of_input(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Σ grad @ weight over the products that read the input, in one tensor."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        rows(total).addmm_(rows(grad), weight)
    return total


def of_parameters(
    grads: Sequence[Tensor], x_NI: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The weights' gradients, then the biases'.

    grads: [.., O] each, of the products. x_NI: their input, None where no weight learns.
    needed: which of weights and biases learn, as in needs_input_grad; the others get None.
    """
    to_weights, to_biases = halves(needed)
    of_weights = [
        rows(grad).mT @ x_NI if need else None
        for grad, need in zip(grads, to_weights, strict=True)
    ]
    of_biases = [
        rows(grad).sum(0) if need else None
        for grad, need in zip(grads, to_biases, strict=True)
    ]
    return of_weights + of_biases


def rows(x: Tensor) -> Tensor:
    """[tokens, features]; a copy where x's memory does not allow a view."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def halves(row: Sequence) -> tuple[Sequence, Sequence]:
    """As weights and biases stand in one row of arguments."""
    return row[: len(row) // 2], row[len(row) // 2 :]
