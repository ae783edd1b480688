"""Which whole parameters get only a part of their gradient on each rank.

Between a column- and a row-parallel layer each rank has features of its own. A parameter
that works on them and is whole on every rank, as a norm of single heads does, sees these
only: its gradient is the sum of what the ranks find. Nobody has to say where that is. The
graph that autograd keeps of the forward pass shows it:

    x ─ column-parallel ─ norm, attention ─ row-parallel ─ y
    whole                 own                               whole
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from manyranks.parallel.parts import Conjugate
from manyranks.parallel.tensor import linear, mappings


def in_part(result: Any) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Parameters that work on a rank's own features, and those that work on whole ones.

    result: what a forward pass returned, tensors in any containers. A parameter may be in
    both sets.
    """
    roots = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn]
    order = list(_inputs_first(roots))
    own: dict[Node, bool] = {}  # whether a node's result is of this rank's own features
    for node in order:
        edge = _edge(node)
        own[node] = any(own[other] for other in _inputs(node)) if edge is None else edge
    # How a node's result is used: with own features, with whole ones.
    uses: dict[Node, set[bool]] = {node: {own[node]} for node in roots}
    with_own, with_whole = set(), set()
    for node in reversed(order):
        if hasattr(node, "variable"):
            for use in uses[node]:
                (with_own if use else with_whole).add(node.variable)
        for other in _inputs(node):
            use = {False} if _edge(node) else {True} if own[node] else uses[node]
            uses.setdefault(other, set()).update(use)
    return with_own, with_whole


def _edge(node: Node) -> bool | None:
    """True where features become the rank's own, False where whole; else None."""
    kind = getattr(node, "_forward_cls", None)
    if kind is Conjugate and node.back is mappings.same:  # reduce_out
        return False
    enters = kind is Conjugate and getattr(node.back, "func", None) is mappings.all_reduce
    return True if enters or kind is linear.ColumnProducts else None


def _inputs(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _inputs_first(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node that the roots depend on, each after those that it depends on."""
    waiting, begun, done = list(roots), set(), set()
    while waiting:
        node = waiting.pop()
        if node in done:
            continue
        if node in begun:
            done.add(node)
            yield node
        else:
            begun.add(node)
            waiting += [node, *(other for other in _inputs(node) if other not in done)]
