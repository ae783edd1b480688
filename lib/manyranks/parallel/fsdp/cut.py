"""Cuts a model into units: which parameters are gathered together, and who needs them."""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from manyranks.parallel.flat_parameters import Named
from manyranks.parallel.fsdp.unit import Part, Place
from manyranks.parallel.shard import is_shard


class Cut(NamedTuple):
    """A model in units.

    needs: the numbers of the units that a module computes with
    """

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
