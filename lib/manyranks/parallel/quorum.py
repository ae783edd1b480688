"""A quorum per step: replicas may die or join while the others train on.

    store = lighthouse()                       # in a process that outlives all replicas
    replica = Quorum(client(port), "b", 3)     # in each replica
    while replica.step < steps:
        replica.meet(state)                    # who's there? newcomers get the state
        loss(model(x), y).backward()
        if replica.average(gradients):         # the mean over all that are still there
            optimizer.step()

The replicas meet in rounds, on a store that all of them can reach. In a round each one
announces itself. A member of the last round closes it, and that list is the quorum. If the
list has changed, its members connect to each other anew. A round counts only if it worked
for everyone. If somebody dies in it, another one follows without it. Each replica still has
its own gradients then, so the step isn't lost.

Source: the idea is torchft's, github.com/meta-pytorch/torchft.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_NO_STATE, _POLL = -1, 0.005


def lighthouse(host: str = "127.0.0.1") -> dist.TCPStore:
    """Starts the store on which replicas meet, on a free port, which is its `.port`."""
    with socket.create_server((host, 0)) as opened:
        port, listens = opened.getsockname()[1], opened.detach()
    alone = {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(host, port, master_listen_fd=listens, **alone)


def client(port: int, host: str = "127.0.0.1") -> dist.TCPStore:
    """Connects to a lighthouse."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


class Quorum:
    """One replica's place among the others.

    `.members` are the names of this round's members. `.step` is the number of steps that
    this replica has the result of; -1: it has no state yet, or went its own way.

    store: the lighthouse's
    name: the replica's; a new process of the same replica may use it again
    replicas: how many the first round waits for
    least: how many it takes to go on
    patience: seconds until the others go on without one that doesn't come
    timeout: seconds to wait for a quorum
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        replicas: int,
        least: int = 1,
        patience: float = 1.0,
        timeout: float = 60.0,
    ):
        self.replicas, self.least, self.patience = replicas, least, patience
        self.timeout, self.step, self.members = timeout, _NO_STATE, []
        self._store, self._group, self._steps = store, None, []
        self._name = f"{name}.{store.add(f'processes of {name}', 1)}"
        self._round = store.add("rounds", 0)  # the next one, as far as it knows

    def meet(self, state: Sequence[Tensor]) -> None:
        """Agrees on who takes part in the next step, and hands the state to newcomers.

        state: parameters and the optimizer's tensors, in the same order on all replicas

        Raises RuntimeError if fewer than `least` come, or nobody has the state any more.
        """
        agreed = False
        while not agreed:
            if self._form(reduces=False):
                agreed = bool(self._group) or self._agree("met", self._hand_out, state)
        self._store.set("trained", "yes")
        self.step = max(0, *self._steps)

    def average(self, gradients: Sequence[Tensor]) -> bool:
        """Replaces gradients by their mean over the members that live through it.

        Returns False if they went on without this replica: it must leave out this step.

        Raises RuntimeError if fewer than `least` are left.
        """
        own = torch.cat([gradient.flatten() for gradient in gradients])
        total = torch.empty_like(own)
        while not self._agree("averaged", self._sum, own, total):
            if not self._form(reduces=True):
                return False
        parts = (total / len(self.members)).split([each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        self.step += 1
        return True

    def newcomers(self) -> int:
        """Counts the replicas that already wait for the next round."""
        return len(self._came(False)) if self._store.check([self._key("came")]) else 0

    def _form(self, reduces: bool) -> bool:
        """Takes part in the next round; returns whether this replica is in its quorum."""
        said = json.dumps([self._name, self.step, reduces])
        self._store.append(self._key("came"), f"{said}\n")
        began, members = time.monotonic(), self._key("members")
        while not self._store.check([members]):
            came, waited = self._came(reduces), time.monotonic() - began
            if self._may_close(came, waited):
                self._store.compare_set(members, "", json.dumps(came))
                self._store.set("rounds", str(self._round + 1))
            elif waited > self.timeout:
                names, need = ", ".join(name for name, _ in came), self.least
                raise RuntimeError(
                    f"no quorum in {self.timeout} s: {names} came. It takes {need} or "
                    "more, one of them from the last round and with the state: start "
                    "more, or start all from a checkpoint, with a new lighthouse"
                )
            time.sleep(_POLL)
        there = json.loads(self._store.get(members))
        names, self._steps = [name for name, _ in there], [step for _, step in there]
        self._round += 1
        if names != self.members:
            self._group = None  # which closes its connections
        inside = self._name in names
        self.members, self.step = (names, self.step) if inside else ([], _NO_STATE)
        return inside

    def _came(self, reduces: bool) -> list[tuple[str, int]]:
        """Lists who has announced itself: for a step, or to repeat a reduction."""
        lines = self._store.get(self._key("came")).decode().splitlines()
        said = map(json.loads, lines)
        return sorted((name, step) for name, step, also in said if also == reduces)

    def _may_close(self, came: list[tuple[str, int]], waited: float) -> bool:
        """Says whether these are enough, and whether it's up to this replica."""
        names, first = {name for name, _ in came}, self._round == 0
        all_there = len(names) >= self.replicas if first else names >= set(self.members)
        has_state = any(step != _NO_STATE for _, step in came)
        able = has_state or not self._store.check(["trained"])
        able = able and len(names) >= self.least and (first or bool(self.members))
        return able and (all_there or waited > self.patience)

    def _agree(self, what: str, do: Callable, *args) -> bool:
        """Does it with the other members; returns whether it worked for all of them."""
        verdict, worked = self._key(f"{what}?", -1), True
        try:
            if self._group is None:
                self._connect()
            do(*args)
        except RuntimeError:  # somebody is gone, or late
            worked = False
        votes = self._store.add(f"{verdict} yes", worked)
        if not worked or votes == len(self.members):
            self._store.compare_set(verdict, "", "yes" if worked else "no")
        try:
            self._store.wait([verdict], timedelta(seconds=self.patience))
        except RuntimeError:
            self._store.compare_set(verdict, "", "no")  # unless somebody was faster
        agreed = self._store.get(verdict) == b"yes"
        if not agreed:
            self._group = None
        return agreed

    def _connect(self) -> None:
        rank, patience = self.members.index(self._name), timedelta(seconds=self.patience)
        store = dist.PrefixStore(self._key("group", -1), self._store)
        self._group = dist.ProcessGroupGloo(store, rank, len(self.members), patience)

    def _hand_out(self, state: Sequence[Tensor]) -> None:
        """Sends the state of the first member that has it to all that don't."""
        rank = self.members.index(self._name)
        source = self._steps.index(max(self._steps))
        without = {r for r, step in enumerate(self._steps) if step == _NO_STATE}
        behind = sorted(without - {source})
        for tensor in state:
            if rank in behind:
                self._group.recv([tensor], source, 0).wait()
            elif rank == source:
                for other in behind:
                    self._group.send([tensor], other, 0).wait()

    def _sum(self, own: Tensor, total: Tensor) -> None:
        total.copy_(own)
        self._group.allreduce([total]).wait()

    def _key(self, what: str, back: int = 0) -> str:
        return f"round {self._round + back}: {what}"
