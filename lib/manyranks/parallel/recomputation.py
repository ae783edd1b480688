"""A call that can be made again: what its first run notes, so that the second is the same.

random numbers    the generators' states before the call, for dropout
autocast          the settings at the call, for backward runs outside of them
parameters        the leaves of the call's graph, for their gradients
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    Node,
    get_gradient_edge,
    saved_tensors_hooks,
)
from torch.utils._pytree import tree_leaves


class Call:
    """A function that is called once, and later again with equal arguments.

    function: with the same arguments and random numbers, it computes the same.
    .parameters: after first(), the leaves that its result depends on beside its arguments.
    """

    def __init__(self, function: Callable):
        self._function = function
        self.parameters: list[Tensor] = []

    def first(self, *args, keep: bool = False, **kwargs) -> Any:
        """Calls it, and notes what again() needs. Returns what the function does.

        Autograd builds its graph, for that tells on which parameters the result depends;
        but unless keep is true, it saves nothing: that graph cannot go backward.
        Tensors among the arguments must be leaves, as detached() makes them.
        """
        self._random = _random_states((args, kwargs))
        self._autocast = _autocast_settings()
        with contextlib.nullcontext() if keep else saved_tensors_hooks(_forget, _gone):
            result = self._function(*args, **kwargs)
        given = {id(value) for value in tree_leaves((args, kwargs))}
        nodes = nodes_of(differentiable(result))
        _check_hooks(nodes)
        leaves = leaves_of(nodes)
        self.parameters = [leaf for leaf in leaves if id(leaf) not in given]
        return result

    def again(self, *args, **kwargs) -> Any:
        """The same call with the same random numbers, in the settings of the first."""
        with contextlib.ExitStack() as settings:
            settings.enter_context(_random_from(self._random))
            for setting in self._autocast:
                settings.enter_context(torch.autocast(**setting))
            return self._function(*args, **kwargs)


def detached(value: Any, differs: bool | None = None) -> Any:
    """The tensor as a leaf, which needs a gradient if it did, or as `differs` says."""
    if not isinstance(value, Tensor):
        return value
    differs = value.requires_grad if differs is None else differs
    return value.detach().requires_grad_() if differs else value


def differentiable(values: Any) -> list[Tensor]:
    """Returns the tensors that need a gradient, of all that is nested in the values."""
    leaves = tree_leaves(values)
    return [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]


def edges(values: Any) -> list[GradientEdge]:
    """Returns where the differentiable values' gradients come in. Edges hold no values."""
    return [get_gradient_edge(value) for value in differentiable(values)]


def nodes_of(results: Iterable[Tensor]) -> list[Node]:
    """All nodes of the results' graph, on every rank in the same order."""
    nodes, todo = {}, [get_gradient_edge(result).node for result in results]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            todo += [before for before, _ in node.next_functions]
    return list(nodes)


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """The tensors at the graph's ends: those that gradients arrive at."""
    leaves = (getattr(node, "variable", None) for node in nodes)
    return list({id(leaf): leaf for leaf in leaves if leaf is not None}.values())


def _check_hooks(nodes: Iterable[Node]) -> None:
    """fully_shard takes gradients as soon as its module's backward is over: too early."""
    if any(node.name() == "RegisterPostBackwardFunctionBackward" for node in nodes):
        raise RuntimeError(
            "the function calls a module that fully_shard has sharded, whose parameters "
            "would get no gradients: checkpoint the module before it is sharded, with "
            "checkpoint_modules(module, lambda m: m is module)"
        )


def gradients(
    results: list[Tensor | GradientEdge],
    grads: Iterable[Tensor | None],
    leaves: list[Tensor],
    needed: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Carries the results' gradients back to the leaves that need one, or all of them.

    Their hooks stay silent. Each leaf is an input of the checkpoint's own node, too: there
    they see the whole gradient, once. Raises RuntimeError where gradients are to have some.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a checkpoint has no gradient of its gradient; "
            "call the function without it there"
        )
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None]
    needed = needed or [True] * len(leaves)
    wanted = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
    if not pairs or not wanted:
        return [None] * len(leaves)
    used, theirs = zip(*pairs, strict=True)
    with _silent(wanted):
        found = iter(torch.autograd.grad(used, wanted, theirs, allow_unused=True))
    return [next(found) if needs else None for needs in needed]


@contextlib.contextmanager
def _silent(leaves: list[Tensor]) -> Iterator[None]:
    """Inside, the hooks that register_hook has put on the leaves are not called."""
    hooked = {id(leaf): leaf._backward_hooks for leaf in leaves if leaf._backward_hooks}
    removed = {key: dict(hooks) for key, hooks in hooked.items()}
    for hooks in hooked.values():
        hooks.clear()
    try:
        yield
    finally:
        for key, hooks in hooked.items():
            hooks.update(removed[key])


def _forget(tensor: Tensor) -> None:
    """Drops what autograd would save."""


def _gone(nothing: None) -> Tensor:
    raise RuntimeError(
        "backward came to what a checkpointed function has computed by another way than "
        "its result: return all that needs a gradient, in tuples, lists or dicts; a cache "
        "of keys and values has such tensors: in transformers, set use_cache=False"
    )


def _random_states(values: Any) -> dict[torch.device | None, Tensor]:
    """The states of the CPU's generator (None) and of the generators of the GPUs in use."""
    states: dict[torch.device | None, Tensor] = {None: torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        here = torch.device("cuda", torch.cuda.current_device())
        for device in {here, *(t.device for t in tensors if t.is_cuda)}:
            states[device] = torch.cuda.get_rng_state(device)
    return states


@contextlib.contextmanager
def _random_from(states: dict[torch.device | None, Tensor]) -> Iterator[None]:
    """Inside, random numbers start from these states; afterwards, from where they were."""
    devices = [device for device in states if device is not None]
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[None])
        for device in devices:
            torch.cuda.set_rng_state(states[device], device)
        yield


def _autocast_settings() -> list[dict]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
    ]
