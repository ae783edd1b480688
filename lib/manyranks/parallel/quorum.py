"""A quorum per step: replicas may die or join while the others keep training.

    store = lighthouse()                       # in a process that outlives all replicas
    replica = Quorum(client(port), "b", 3)     # in each replica
    while replica.step < steps:
        replica.meet(state)                    # who's there? newcomers get the state
        loss(model(x), y).backward()
        if replica.average(gradients):         # the mean over all that are still there
            optimizer.step()

Replicas meet in rounds, on a store that all of them can reach. In a round each announces
itself. A member of the last round closes it, and that list is the quorum. If the list has
changed, its members connect again. If somebody dies in a round, the others meet in another
one. They still have their gradients, so the step isn't lost.

Source: the idea is torchft's, github.com/meta-pytorch/torchft.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_NO_STATE, _POLL = -1, 0.005


def lighthouse(host: str = "127.0.0.1") -> dist.TCPStore:
    """Starts the store on which replicas meet, on a free port, which is its `.port`.

    host: the name or address by which replicas reach this machine; by default all are on it
    """
    with socket.create_server((host, 0)) as opened:
        port, listens = opened.getsockname()[1], opened.detach()
    alone = {"is_master": True, "wait_for_workers": False}
    return dist.TCPStore(host, port, master_listen_fd=listens, **alone)


def client(port: int, host: str = "127.0.0.1") -> dist.TCPStore:
    """Connects to a lighthouse.

    port: the lighthouse's
    host: what it was started with
    """
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


@dataclass(eq=False)
class Quorum:
    """A replica's place among the others.

    `.members` are the names of this round's members. `.step` is how many steps are in this
    replica's state; it's -1 for a replica that needs the others' state.
    """

    store: dist.Store  # the lighthouse's
    name: str  # the replica's; a new process of the same replica may use it again
    replicas: int  # how many the first round waits for
    least: int = 1  # how many later rounds need
    patience: float = 5.0  # seconds until the others continue without one that's missing
    timeout: float = 60.0  # seconds to wait for a quorum

    def __post_init__(self):
        self.step, self.members, self._steps = _NO_STATE, [], []
        self._me = f"{self.name}.{self.store.add(f'processes of {self.name}', 1)}"
        self._round, self._group = self.store.add("last round", 0), None

    def meet(self, state: Sequence[Tensor]) -> None:
        """Agrees on who takes part in the next step, and hands the state to newcomers.

        state: parameters and the optimizer's tensors, in the same order on all replicas

        Raises RuntimeError if fewer than `least` come, or nobody has the state any more.
        """
        met = False
        while not met:
            met = self._form(newcomers=True) and self._agree("met", self._hand_out, state)
        self.step = max(self._steps)

    def average(self, gradients: Sequence[Tensor]) -> bool:
        """Replaces gradients by their mean over the members that are still there.

        Returns False if they continued without this replica: it must leave out this step.

        Raises RuntimeError if fewer than `least` are left.
        """
        own = torch.cat([gradient.flatten() for gradient in gradients])
        total = torch.empty_like(own)
        while not self._agree("averaged", self._sum, own, total):
            if not self._form(newcomers=False):
                return False
        parts = (total / len(self.members)).split([each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        self.step += 1
        return True

    def newcomers(self) -> bool:
        """Says whether somebody already waits for the next round."""
        return self.store.check([f"round {self._round + 1}: came"])

    def _form(self, newcomers: bool) -> bool:
        """Takes part in the next round; returns whether this replica is in its quorum."""
        self._round += 1
        began = time.monotonic()
        if first := self._round == 1:
            self.step = 0  # everyone has weights to start from
        came, quorum = self._key("came"), self._key("quorum")
        self.store.append(came, json.dumps([self._me, self.step]) + "\n")
        while not self.store.check([quorum]):
            lines = sorted(self.store.get(came).decode().splitlines())
            steps = {n: s for n, s in map(json.loads, lines) if newcomers or s != _NO_STATE}
            need = self.replicas if first else self.least
            waited = time.monotonic() - began
            able = first or (self.members and max(steps.values()) != _NO_STATE)
            complete = set(self.members) <= set(steps) or waited > self.patience
            if able and complete and len(steps) >= need:
                self.store.compare_set(quorum, "", json.dumps(steps))
                self.store.set("last round", str(self._round))
            elif waited > self.timeout:
                raise RuntimeError(
                    f"no quorum in {self.timeout} s: {', '.join(steps)} came. It takes "
                    f"{need} or more, one of them from the last round and with the state: "
                    "start more, or start all from a checkpoint, with a new lighthouse"
                )
            time.sleep(_POLL)
        steps = json.loads(self.store.get(quorum))
        if list(steps) != self.members:
            self._group = None  # which closes its connections
        self.members = list(steps) if self._me in steps else []
        self.step = self.step if self.members else _NO_STATE
        self._steps = list(steps.values())
        return bool(self.members)

    def _agree(self, what: str, do: Callable, *args) -> bool:
        """Calls do(*args) on all members; returns whether it worked for all of them."""
        verdict, patience = self._key(f"{what}?"), timedelta(seconds=self.patience)
        try:
            if self._group is None:
                store = dist.PrefixStore(self._key("group"), self.store)
                rank, size = self.members.index(self._me), len(self.members)
                self._group = dist.ProcessGroupGloo(store, rank, size, patience)
            do(*args)
            if self.store.add(f"{verdict} yes", 1) == len(self.members):
                self.store.compare_set(verdict, "", "yes")
            self.store.wait([verdict], patience)
        except RuntimeError:  # somebody is gone, or late
            self.store.compare_set(verdict, "", "no")  # unless there's a verdict
        agreed = self.store.get(verdict) == b"yes"
        if not agreed:
            self._group = None
        return agreed

    def _hand_out(self, state: Sequence[Tensor]) -> None:
        """Broadcasts one member's state, before the first step and to newcomers."""
        if min(self._steps) <= 0:
            for tensor in state:
                self._group.broadcast(tensor, self._steps.index(max(self._steps))).wait()

    def _sum(self, own: Tensor, total: Tensor) -> None:
        total.copy_(own)
        self._group.allreduce([total]).wait()

    def _key(self, what: str) -> str:
        return f"round {self._round}: {what}"
