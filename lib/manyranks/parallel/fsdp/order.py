"""Ranks that gather units must use them in one order: they compare it whenever it changes.

Nothing in a gather says whose parameters it brings. Where one rank runs layer 3 and another
one layer 4, as LayerDrop has it, both compute with a mix, or wait forever. So each rank
notes the order of its modules. After the first pass, and after each pass with a new order,
a rank puts the names into the group's store and waits for the other ranks' names. A rank
whose order stays sends nothing. If a gather takes longer than a second, it looks whether
another one has put names there.
"""

import json
from datetime import timedelta
from itertools import zip_longest

import torch.distributed as dist
from torch import nn

from manyranks.parallel.collectives.messages import Group

_FOREVER, _SECOND = timedelta(days=365), timedelta(seconds=1)


class Order:
    """The order that modules compute in, which is expected again in the next pass.

    module: it and its modules are called
    group: ranks with the same order, None for all
    """

    def __init__(self, module: nn.Module, group: Group):
        self._names = {m: n or type(m).__name__ for n, m in module.named_modules()}
        self._modules: dict[str, list] = {"forward": [], "backward": []}
        self._at, self._ended, self._ran = (
            dict.fromkeys(self._modules, 0) for _ in range(3)
        )
        self._changed, self._compared = False, 0
        self._rank, self._n = dist.get_rank(group), dist.get_world_size(group)
        self._compares = self._n > 1 and dist.get_backend(group) != "fake"
        self._waits = self._compares and dist.get_backend(group) == "gloo"
        if self._compares:
            store = (group or dist.group.WORLD).get_group_store()
            number = store.add(f"sharded modules of rank {self._rank}", 1)
            self._store = dist.PrefixStore(f"order {number}", store)

    def begin(self, kind: str) -> None:
        """A forward or backward begins."""
        self._at[kind] = 0

    def note(self, kind: str, module: nn.Module, count: int) -> list[nn.Module]:
        """Notes that this one computes, and returns the `count` expected next."""
        modules, at = self._modules[kind], self._at[kind]
        if modules[at : at + 1] != [module]:
            modules[at:] = [module]  # another order than before
            self._changed = True
        self._at[kind] = at + 1
        return modules[at + 1 : at + 1 + count]

    def end(self, kind: str) -> None:
        """A pass ends. Raises ValueError where its order has changed, and ranks differ."""
        if self._compares and self._changed:
            self._post(kind)
            for rank in range(self._n):
                self._compare(rank)
            self._compared += 1
        self._changed = False
        self._ran[kind] = self._at[kind]
        self._at[kind] = 0
        self._ended[kind] += 1

    def wait(self, work: dist.Work) -> None:
        """Waits for a gather. Raises ValueError where another rank runs other modules."""
        while self._waits:
            try:
                return work.wait(_SECOND)
            except RuntimeError:
                if work.is_completed():
                    break  # it came just now, or failed: the wait below knows
            for rank in range(self._n):
                if self._store.check([self._key(rank)]):
                    self._compare(rank)
        return work.wait()

    def _key(self, rank: int) -> str:
        return f"{self._compared} of rank {rank}"

    def _post(self, kind: str) -> None:
        names = [self._names[m] for m in self._modules[kind][: self._at[kind]]]
        message = json.dumps([kind, self._ended[kind], names])
        self._store.set(self._key(self._rank), message)

    def _compare(self, rank: int) -> None:
        """Raises ValueError where another rank's pass isn't what this rank had, or has."""
        self._store.wait([self._key(rank)], _FOREVER)
        kind, number, theirs = json.loads(self._store.get(self._key(rank)))
        over = self._store.check([self._key(self._rank)]) or number < self._ended[kind]
        count = self._ran[kind] if number < self._ended[kind] else self._at[kind]
        ours = [self._names[m] for m in self._modules[kind][:count]]
        if not over:
            theirs = theirs[:count]  # this rank isn't further yet
        pairs = list(zip_longest(ours, theirs, fillvalue="nothing more"))
        if differing := [(mine, other) for mine, other in pairs if mine != other]:
            self._post(kind)  # so that the others learn it, too
            mine, other = differing[0]
            raise ValueError(
                f"in {kind}, rank {self._rank} runs {mine!r} where rank {rank} runs "
                f"{other!r}: all ranks run a sharded module's parts in one order; draw "
                "layers to drop from the same seed, or leave such parts outside the wrapper"
            )
