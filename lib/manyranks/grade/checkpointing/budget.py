"""What exercise 04 gives to its learners: layers as numbers, and what a choice of them holds at most.

The notebook shows both as they stand here.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """A layer's. forward: FLOPs; input: bytes of its input.

    saved: bytes that it keeps for backward, its input among them.
    """

    forward: int
    input: int
    saved: int


def peak(layers, chosen):
    """The most bytes held at once, where the layers with these numbers are checkpointed."""
    most = held = 0
    for k, layer in enumerate(layers):
        most = max(most, held + layer.saved)  # backward of layer k
        held += layer.input if k in chosen else layer.saved
    return most
