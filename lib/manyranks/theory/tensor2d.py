"""Products cut in more than one dimension: what SUMMA moves, and the published costs of 1D, 2D, 2.5D and 3D.

b·s          tokens of a micro-batch
h_in, h_out  inputs and outputs of a linear layer
q            ranks along an edge of a q × q mesh
"""

from typing import NamedTuple

from manyranks.theory import checks


def summa_received(tokens: int, inputs: int, outputs: int, q: int) -> int:
    """Elements that a rank of a q × q mesh receives in the forward of a linear layer: (q − 1)/q² · (b·s·h_in + h_in·h_out).

    In each of q rounds a row's ranks get a block of the input, b·s/q × h_in/q, and a column's one of the weight, from the rank
    that has it. Raises ValueError for sizes that q does not divide. Source: van de Geijn and Watts, "SUMMA", 1997; arXiv
    2104.05343, section 3.
    """
    checks.whole(q=q)
    for name, size in (("tokens", tokens), ("inputs", inputs), ("outputs", outputs)):
        if size % q:
            raise ValueError(f"{name}={size} on a mesh of {q} × {q}: give a multiple of {q}")
    return (q - 1) * (tokens * inputs + inputs * outputs) // q**2


class Cost(NamedTuple):
    """Of one linear layer on one rank, forward and backward. compute, parameters, activations: shares of the whole layer's;
    bandwidth: what it moves, in whole tensors; latency: messages, one after another."""

    compute: float
    parameters: float
    activations: float
    bandwidth: float
    latency: float


def cost(scheme: str, ranks: int, depth: int = 1) -> Cost:
    """What a product cut in one, two, "2.5" or three dimensions costs: the published table colossal_tp_complexity.

    scheme: "1D", "2D" (q × q ranks, SUMMA), "2.5D" (depth · q × q) or "3D" (q × q × q). Raises ValueError for another scheme,
    and for a number of ranks that does not make such a mesh. Source: Colossal-AI's documentation; arXiv 2104.05343, 2105.14500
    and 2105.14450.
    """
    if scheme not in _EDGES:
        raise ValueError(f"scheme={scheme!r}: choose from {', '.join(_EDGES)}")
    if not all(type(n) is int and n >= 1 for n in (ranks, depth)) or (depth > 1 and scheme != "2.5D"):
        raise ValueError(f"ranks={ranks!r}, depth={depth!r}: whole numbers from 1 up, and a depth only for 2.5D")
    P, power = ranks, _EDGES[scheme]
    q = round((P / depth) ** (1 / power))
    if depth * q**power != P:
        raise ValueError(f"ranks={P} for {scheme}: give {_MESHES[scheme]}")
    steps = 6 * (q - 1)
    return {
        "1D": Cost(1 / P, 1 / P, 1, 2 * (P - 1) / P, 2 * (P - 1)),
        "2D": Cost(1 / P, 1 / P, 1 / P, steps / q, steps),
        "2.5D": Cost(1 / P, 1 / q**2, 1 / P, 3 * (q - 1) * (depth + 1) / (depth * q), steps),
        "3D": Cost(1 / P, 1 / P, 1 / P, steps / P, steps),
    }[scheme]


_EDGES = {"1D": 1, "2D": 2, "2.5D": 2, "3D": 3}
_MESHES = {"1D": "any number", "2D": "a square", "2.5D": "depth times a square", "3D": "a cube"}
