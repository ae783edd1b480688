"""The errors of the collectives: what was given, what is allowed, what to use instead."""

from collections.abc import Collection, Mapping

from manyranks.theory.names import nearest, one_of

_POWER_OF_TWO = {
    ("all_gather", "recursive_doubling"): "pairs ranks 1, 2, 4, … apart",
    ("reduce_scatter", "halving"): "pairs ranks n/2, n/4, … 1 apart",
}


def algorithm(table: Mapping[str, Collection[str]], op: str, given: str) -> None:
    """Checks that the operation is known and has the algorithm."""
    one_of(table, op=op)
    if given not in table[op]:
        raise ValueError(f"algorithm={given!r} of {op}: {nearest(given, table[op])}")


def usual(op: str) -> str:
    """The algorithm that is meant where none is named: the ring, and for operations that have none what stands in its place."""
    return {"scatter": "tree", "gather": "tree", "all_to_all": "pairwise"}.get(op, "ring")


def group(op: str, n: int, algorithm: str, root: int = 0, node: int | None = None) -> None:
    """Checks that n ranks, the root and the node size suit the algorithm."""
    if type(n) is not int or n < 1:
        raise ValueError(f"n={n!r}: a group has a whole number of ranks, at least 1")
    if not 0 <= root < n:
        raise ValueError(f"root={root}: must be one of the {n} ranks, 0 to {n - 1}")
    why = _POWER_OF_TWO.get((op, algorithm))
    if why and n & (n - 1):
        raise ValueError(f"n={n}: {algorithm} of {op} needs a power of two: it {why}; take ring or pairwise")
    if algorithm == "hierarchical":
        _check_node(n, node)
    elif node is not None:
        raise ValueError(f"node={node}: only algorithm='hierarchical' has nodes, {algorithm!r} has none; leave it out")


def _check_node(n: int, node: int | None) -> None:
    if node is None:
        raise ValueError(f"node=None: algorithm='hierarchical' needs the ranks of a node, a divisor of n={n}")
    if node < 1 or n % node:
        allowed = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise ValueError(f"node={node}: ranks of a node must divide n={n}; allowed are {allowed}")
