"""Products cut in two dimensions: what SUMMA moves.

b·s          tokens of a micro-batch
h_in, h_out  inputs and outputs of a linear layer
q            ranks along an edge of a q × q mesh
"""

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
