"""What a cut model must not do: found in its table, in its graph, or when it is used.

Between a column- and a row-parallel layer each rank has features of its own. A parameter
that works on them and is whole on every rank, as a norm of single heads does, sees these
only: its gradient is the sum of what the ranks find. Nobody has to say where that is. The
graph that autograd keeps of the forward pass shows it:

    x ─ column-parallel ─ norm, attention ─ row-parallel ─ y
    whole                 own                               whole
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from manyranks.parallel.parts import Conjugate
from manyranks.parallel.tensor import layers
from manyranks.parallel.tensor.cuts import Masks, Style, Vocabulary

# In the table


def check_kind(name: str, module: nn.Module, style: Style) -> None:
    """Raises ValueError where the style is not for a module of this kind."""
    if isinstance(style, Masks):
        if not (hasattr(module, "p") or hasattr(module, "rate")):
            raise ValueError(
                f"{style!r} for {name}, a {type(module).__name__}: it is for dropout, a "
                "module with a probability p or a rate"
            )
        return
    kinds = (nn.Linear, nn.Embedding) if isinstance(style, Vocabulary) else (nn.Linear,)
    if not (isinstance(style, Style) and isinstance(module, kinds)):
        raise ValueError(
            f"{style!r} for {name}, a {type(module).__name__}: give Column() or Row() to "
            "an nn.Linear, Vocabulary() to an nn.Embedding or nn.Linear; cut a model once"
        )
    if more := _what_else_it_does(module, next(k for k in kinds if isinstance(module, k))):
        raise ValueError(
            f"{style!r} for {name}, a {type(module).__name__}: its part would ignore "
            f"{more}; move that into a module around it, or leave it out of the table"
        )


def _what_else_it_does(module: nn.Module, kind: type[nn.Module]) -> str:
    """What a part of a plain module of this kind would not do; empty where nothing."""
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return "a forward of its own"
    if parametrize.is_parametrized(module):
        return f"its parametrizations ({', '.join(module.parametrizations)})"
    hooks = [
        name for name, found in vars(module).items() if name.endswith("_hooks") and found
    ]
    if hooks:
        return f"its hooks ({', '.join(name.strip('_') for name in hooks)})"
    names = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    if more := sorted(names | {name for name, _ in module.named_buffers()}):
        return f"its {', '.join(more)}"
    return ""


# In the graph


def in_part(
    result: Any, columns: Collection[nn.Parameter] = ()
) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Finds parameters that work on own features of a rank, and those on whole ones.

    result: what a forward pass returned, tensors in any containers. columns: what makes
    features the rank's own. A parameter may be in both sets.
    """
    roots = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn]
    order = list(_inputs_first(roots))
    own: dict[Node, bool] = {}  # whether a node's result is of this rank's own features
    for node in order:
        edge, leaf = _edge(node), getattr(node, "variable", None)
        # A Function, as a checkpoint is, may have more inside than a product with a weight.
        opaque = isinstance(node, BackwardCFunction)
        read = [x for x in _inputs(node) if not (opaque and hasattr(x, "variable"))]
        from_own = any(own[other] for other in read) or leaf in columns
        own[node] = from_own if edge is None else edge
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
    if getattr(node, "_forward_cls", None) is not Conjugate:
        return None
    if node.back is layers.same:  # reduce_out
        return False
    return True if getattr(node.back, "func", None) is layers.all_reduce else None


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
