"""Cuts a model into the units of stage 3, and calls back before and after each module."""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from manyranks.parallel import replicas
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.flat_parameters import Named
from manyranks.parallel.precision import wide
from manyranks.parallel.shard import ShardParameter, as_gradient, is_shard

Place = tuple[nn.Module, str]  # a module, and the attribute it has a parameter under


class Part(NamedTuple):
    """A unit's path in the model, its parameters by name, and where modules have them."""

    path: str
    named: Named
    places: list[list[Place]]

    @property
    def first(self) -> nn.Parameter:
        """Any of the parameters; they share dtype, device and ranks."""
        return next(iter(self.named.values()))

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Makes the modules' attributes these: the whole parameters, or the shards.

        A module looks for an attribute in vars() before it looks among its parameters,
        where the shards stay all the time. Raises ValueError for a whole parameter that
        was changed while it was here, which the shards know nothing about.
        """
        for name, places, tensor in zip(self.named, self.places, tensors, strict=True):
            (first, attribute), *_ = places
            before = vars(first).get(attribute)
            if not is_shard(tensor):
                tensor.shown = tensor._version
            elif before is not None and before.shown != before._version:
                raise ValueError(
                    f"{name} was changed in the forward pass, as max_norm does: a sharded "
                    "parameter changes in the optimizer only"
                )
            for module, name in places:
                vars(module).pop(name, None)
                if not is_shard(tensor):
                    vars(module)[name] = tensor
                if name in (names := getattr(module, "_flat_weights_names", ())):
                    module._flat_weights[names.index(name)] = tensor  # a recurrent one's


class Cut(NamedTuple):
    """A model in units. needs: the numbers of the units that a module computes with."""

    parts: list[Part]
    needs: dict[nn.Module, list[int]]


def cut(
    module: nn.Module,
    units: Iterable[nn.Module] | None,
    key: Callable[[nn.Parameter], Hashable],
    inner: list[nn.Module],
) -> Cut:
    """Cuts a module into units: those gathered as a whole, all else module by module.

    A unit's parameters share a dtype, a device and `key`, and learn or are frozen
    together. A tied parameter belongs to the first unit that has it.
    units: None for the module's children and the children of its lists
    inner: wrappers in the module, which have units already
    Raises ValueError for a unit that isn't in the module or lies in another one, and for a
    parameter that a module outside this one, or in an inner wrapper, shares.
    """
    whole = _chosen(module, units, inner)
    inside = {part for unit in whole for part in unit.modules()}
    parts, needs, unit_of = [], {}, {}
    for path, part in _outside(module, inner):
        passive = part is not module and _is_passive(part)  # the one around it has them
        own = {} if part in inside or passive else _own(path, part)
        if part in whole:
            for at, one in _outside(part, inner, path):
                own |= _own(at, one)
        first = {p: name for name, p in reversed(own.items()) if p not in unit_of}
        for named in _alike({n: p for n, p in own.items() if first.get(p) == n}, key):
            unit_of |= dict.fromkeys(named.values(), len(parts))
            parts.append(Part(path, named, []))
        if part in whole or part not in inside:
            needs[part] = list(dict.fromkeys(unit_of[p] for p in own.values()))
        if part in whole:  # its modules may be called past it
            needs |= {within: needs[part] for _, within in _outside(part, inner)}
    places: dict[nn.Parameter, list[Place]] = {p: [] for p in unit_of}
    for _, part in _outside(module, inner):
        for attribute, p in part._parameters.items():
            if p is not None:
                places[p].append((part, attribute))
    _check_ties(places)
    for part in parts:
        part.places.extend(places[p] for p in part.named.values())
    return Cut(parts, needs)


def split(named: Named, views: list[Tensor], own: list[Tensor]) -> list[nn.Parameter]:
    """Makes each parameter this rank's shard; returns whole ones, which compute.

    views: of the row, in the parameters' shapes; own: what the shards are copies of
    Hooks on a parameter's gradient move to the whole one. The shard keeps those that are
    called after a gradient has been accumulated, such as an optimizer's.
    """
    found = []
    for (name, parameter), view, mine in zip(named.items(), views, own, strict=True):
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{name} is a {type(parameter).__name__}: only a plain nn.Parameter can be "
                "sharded; make it one, or leave its module outside the wrapper"
            )
        whole = nn.Parameter(view.new_empty(0), parameter.requires_grad)
        whole.data = view  # a separate version counter: gathering is no change
        for hook in [*(parameter._backward_hooks or {}).values()]:
            whole.requires_grad_().register_hook(hook)
        whole.requires_grad_(parameter.requires_grad)  # a frozen one may have hooks, too
        parameter._backward_hooks = None
        parameter.grad, parameter.data = None, mine.to(wide(mine.dtype), copy=True)
        whole.kept, parameter.__class__ = parameter.dtype, ShardParameter
        parameter.whole = whole
        found.append(whole)
    return found


def check(parts: list[Part]) -> None:
    """Raises ValueError for a parameter that isn't what it was when it was sharded."""
    for part in parts:
        for (name, shard), places in zip(part.named.items(), part.places, strict=True):
            here = all(m._parameters.get(own) is shard for m, own in places)
            same = shard.requires_grad == shard.whole.requires_grad
            if not (here and same and shard.dtype == shard.whole.kept):
                change = "was frozen or thawed" if not same else "was cast"
                change = change if here else "was replaced or removed"
                raise ValueError(
                    f"{name} {change} after it was sharded: change the module first, then "
                    "wrap it"
                )


def equalize(
    module: nn.Module,
    parts: list[Part],
    group: Group,
    replica_group: Group,
    group_of: Callable[[nn.Parameter], Group],
) -> None:
    """Gives all ranks the parameters and buffers of the group's rank 0.

    Raises ValueError where the ranks' models differ.
    """
    replicas.check_same(module, group)
    named = {p: part for part in parts for p in part.named.values()}
    if replica_group is not None:
        replicas.broadcast([*named, *module.buffers()], replica_group)
    for parameter in named:
        replicas.broadcast([parameter], group_of(parameter))
    replicas.broadcast(module.buffers(), group)


def levels(group: Group, mesh: DeviceMesh | None) -> tuple[Group, Group]:
    """Returns the group that shards, and the one that replicates, if any.

    Raises ValueError for a mesh that isn't of two dimensions, and one beside a group.
    """
    if mesh is None:
        return group, None
    if group is not None or mesh.ndim != 2:
        raise ValueError(
            f"mesh={mesh}: give a mesh of two dimensions, replicas × shards, and no group"
        )
    return mesh.get_group(1), mesh.get_group(0)


def accumulate(shards: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    """Adds to the shards' gradients, and calls the shards' hooks as autograd would."""
    for shard, grad in zip(shards, grads, strict=True):
        if grad is None:
            continue
        for hook in [*(shard._backward_hooks or {}).values()]:
            grad = grad if (changed := hook(grad)) is None else changed
        shard.grad = (
            as_gradient(grad, shard) if shard.grad is None else shard.grad.add_(grad)
        )
        for hook in [*(shard._post_accumulate_grad_hooks or {}).values()]:
            hook(shard)  # such as an optimizer's step, during backward


def hooks(
    needs: dict[nn.Module, list], before: Callable, after: Callable, gradient: Callable
) -> list[RemovableHandle]:
    """Lets modules call before() and after() their forward, and parameters gradient().

    Ours comes first: other hooks may use a module's parameters.
    """
    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    found = []
    for module in needs:
        how = {"with_kwargs": True, "prepend": True}
        found.append(module.register_forward_pre_hook(before, **how))
        found.append(module.register_forward_hook(after, always_call=True))
    for unit in dict.fromkeys(unit for units in needs.values() for unit in units):
        for whole in unit.whole if unit.learns else ():
            hook = partial(gradient, unit)
            found.append(whole.register_post_accumulate_grad_hook(hook))
    return found


class Ends:
    """Frees units at the end of a module's backward that no parameter's gradient frees.

    Those are frozen units, and units that several modules need.
    """

    def __init__(self, needs: dict[nn.Module, list]):
        self._needs = needs
        self._users: dict[object, set[nn.Module]] = {}
        self._computing: set[nn.Module] = set()

    def watch(self, module: nn.Module, inputs: object) -> None:
        """Waits for the gradients of all of a module's inputs."""
        for unit in self._needs[module]:
            self._users.setdefault(unit, set()).add(module)
        missing = set(range(len(tensors := learning(inputs))))
        for k, tensor in enumerate(tensors):
            tensor.register_hook(partial(self._arrived, module, missing, k))

    def begin(self, module: nn.Module) -> None:
        """Begins a module's backward. Raises ValueError for one that makes a graph."""
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: a sharded module has no gradients of gradients: its "
                "rows are gone by then; take them of a copy that isn't sharded"
            )
        self._computing.add(module)

    def _arrived(self, module: nn.Module, missing: set[int], k: int, grad: Tensor) -> None:
        missing.discard(k)
        if missing:
            return
        self._computing.discard(module)
        needed = {unit for other in self._computing for unit in self._needs[other]}
        for unit in self._needs[module]:
            if unit not in needed and (not unit.learns or len(self._users[unit]) > 1):
                unit.free()

    def clear(self) -> None:
        """Forgets modules whose backward never came to its end."""
        self._computing.clear()


def learning(values: object) -> list[Tensor]:
    """Returns the results that learn, in nested values or an object's attributes."""
    leaves = tree_leaves((values, getattr(values, "__dict__", None)))
    return [x for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None]


def cast(values: object, dtype: torch.dtype) -> object:
    """Returns nested values with floating-point tensors in another dtype."""

    def one(value: object) -> object:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return tree_map(one, values)


def in_backward() -> bool:
    """Tells whether autograd is running a backward, as when a checkpoint recomputes."""
    return torch._C._current_graph_task_id() != -1


def by_name(params: Iterable) -> Named:
    """Names an optimizer's params, by number where they have no names; ties count once."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    pairs = [p if isinstance(p, tuple) else (str(k), p) for k, p in enumerate(listed)]
    first = {p: name for name, p in reversed(pairs)}
    return {name: p for name, p in pairs if first[p] == name}


def _outside(
    module: nn.Module, inner: list[nn.Module], path: str = "", seen: set | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Walks through all modules that aren't in an inner wrapper, with their paths."""
    seen = set(inner) if seen is None else seen
    if module not in seen:
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from _outside(child, inner, f"{path}.{name}" if path else name, seen)


def _chosen(
    module: nn.Module, units: Iterable[nn.Module] | None, inner: list[nn.Module]
) -> list[nn.Module]:
    """Returns the modules that are gathered as a whole."""
    if units is None:
        return [unit for unit in _active(module) if unit not in inner]
    units, names = list(units), {part: name for name, part in module.named_modules()}
    for unit in units:
        if unit not in names:
            raise ValueError(f"a unit is not in the module: {str(unit).splitlines()[0]}")
        if inside := [p for p in unit.modules() if p is not unit and p in units]:
            raise ValueError(
                f"the unit {names[inside[0]]} lies in the unit {names[unit]}: "
                "give one of both"
            )
    return units


def _is_passive(module: nn.Module) -> bool:
    """Tells whether a module is never called: lists, and a part of PyTorch's attention."""
    unchanged = type(module).forward is nn.Module.forward and "forward" not in vars(module)
    return unchanged or isinstance(module, NonDynamicallyQuantizableLinear)


def _active(module: nn.Module) -> Iterator[nn.Module]:
    """The nearest modules in this one that are called."""
    for child in module.children():
        yield from _active(child) if _is_passive(child) else (child,)


def _own(path: str, module: nn.Module) -> Named:
    """Returns its own parameters, and its parameter lists', which have no forward."""
    own = dict(module.named_parameters(path, recurse=False))
    for name, child in module.named_children():
        if _is_passive(child):
            own |= _own(f"{path}.{name}" if path else name, child)
    for name, p in own.items():
        if is_shard(p):
            raise ValueError(
                f"{name} is tied to a parameter that another wrapper has sharded: put one "
                "wrapper around both modules"
            )
    return own


def _check_ties(places: dict[nn.Parameter, list[Place]]) -> None:
    """Raises ValueError where a module that isn't in the wrapper shares a parameter."""
    inside = {id(part._parameters) for each in places.values() for part, _ in each}
    for held in gc.get_referrers(*places):
        if not isinstance(held, dict) or id(held) in inside:
            continue
        for owner in gc.get_referrers(held):
            fields = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
            if fields.get("_parameters") is held:
                tied = [p for p in places if any(p is value for value in held.values())]
                part, name = places[tied[0]][0]
                raise ValueError(
                    f"{name} of {type(part).__name__} is tied to a module outside the "
                    "wrapper, which would compute with a shard: put one wrapper around both"
                )


def _alike(named: Named, key: Callable[[nn.Parameter], Hashable]) -> list[Named]:
    """Parts parameters by dtype, device, whether they learn, and what key() says."""
    parts: dict[tuple, Named] = {}
    for name, p in named.items():
        parts.setdefault((p.dtype, p.device, p.requires_grad, key(p)), {})[name] = p
    return list(parts.values())
