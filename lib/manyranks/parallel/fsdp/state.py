"""A fully sharded module between steps: clips, and tells its state and what it holds."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import clipping
from manyranks.parallel.precision import Held, optimizer_states


class Sharded(nn.Module):
    """A wrapper whose `units` hold this rank's shards of `module`."""

    def compile(self, *args, **kwargs) -> None:
        """Compiles the module inside, as nn.Module's; messages stay outside its graphs."""
        self.module.compile(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, also those that no_sync() has kept whole."""
        super().zero_grad(set_to_none)
        self.forget()

    def forget(self) -> None:
        """Drops gradients that haven't come to the shards."""
        for unit in self.units:
            unit.forget()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state_dict, whole, on every rank; all ranks call it."""
        return full_state_dict(self)

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """Returns what this rank holds now, with an optimizer of parameters().

        Shards are masters where modules compute in fewer bits. Rows are those that are
        gathered now: none, after finish().
        """
        return held(self.units, optimizer)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Clips as torch.nn.utils does, over all ranks' shards. Returns the norm before.

        Raises ValueError for most below 0, and where units have different ranks.
        """
        if len({unit.group for unit in self.units}) > 1:
            raise ValueError(
                "the units are sharded over different ranks: call clipping.clip_grad_norm "
                "with all shards, and how many ranks hold each"
            )
        shards = [shard for unit in self.units for shard in unit.shards]
        return clipping.clip_grad_norm(shards, most, self.units[0].group)

    def _apply(self, fn, recurse: bool = True):
        """Raises ValueError where .to(), .half() or .cuda() would change the shards."""
        for unit in self.units:
            now = unit.shards[0].detach()
            if (then := fn(now)).dtype != now.dtype or then.device != now.device:
                raise ValueError(
                    f"a sharded module stays {now.dtype} on {now.device}: cast or move it "
                    "before it's wrapped"
                )
        return self

    def __deepcopy__(self, memo: dict):
        raise TypeError(
            f"{type(self).__name__} can't be copied, for its group and hooks belong to the "
            "ranks and parameters: load full_state_dict() into another model"
        )


def held(units: Iterable, optimizer: torch.optim.Optimizer) -> Held:
    """Returns what units hold now, with an optimizer of their shards."""
    units = list(units)
    shards = [(shard, unit.row_E.dtype) for unit in units for shard in unit.shards]
    learning = [p for unit in units for p in (*unit.shards, *unit.whole)]
    parameters = [shard for shard, dtype in shards if shard.dtype == dtype]
    return Held(
        parameters=(*parameters, *(unit.row_E for unit in units if unit.gathered)),
        gradients=tuple(p.grad for p in learning if p.grad is not None),
        masters=tuple(shard for shard, dtype in shards if shard.dtype != dtype),
        **optimizer_states(optimizer),
    )


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """Returns each parameter's name as if nothing were wrapped."""
    wrappers = _wrappers(module)
    return {p: _unwrapped(name, wrappers) for name, p in module.named_parameters()}


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's state_dict as if nothing were sharded; all ranks call it.

    module: a sharded one, or one with sharded ones in it
    """
    wrappers = _wrappers(module)
    units = dict.fromkeys(unit for one in wrappers.values() for unit in one.units)
    whole = {shard: value for unit in units for shard, value in _gathered(unit)}
    named = dict(module.named_parameters(remove_duplicate=False))
    return {
        _unwrapped(name, wrappers): whole.get(named.get(name), value)
        for name, value in module.state_dict().items()
    }


def _wrappers(module: nn.Module) -> dict[str, Sharded]:
    return {name: m for name, m in module.named_modules() if isinstance(m, Sharded)}


def _gathered(unit) -> list[tuple[nn.Parameter, Tensor]]:
    """Each shard with a copy of its whole parameter, in the shard's precision."""
    shard_S = unit.row.join(unit.shards, unit.shards[0].new_zeros(unit.row.size))
    whole_E = shard_S.new_empty(unit.row_E.numel())
    dist.all_gather_single(whole_E, shard_S, group=unit.group)
    copies = [part.clone() for part in unit.row.parts(whole_E)]
    return list(zip(unit.shards, copies, strict=True))


def _unwrapped(name: str, wrappers: dict[str, nn.Module]) -> str:
    """The name without the wrappers' own "module", the inner ones' first."""
    for path in sorted(wrappers, key=len, reverse=True):
        before = f"{path}." if path else ""
        if name.startswith(f"{before}module."):
            name = before + name.removeprefix(f"{before}module.")
    return name
