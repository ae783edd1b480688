"""The faults of tests/ranks/test_faults.py: how a rank of a training run dies, and where."""

import ctypes
import functools
import io
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel import saving
from manyranks.training import trainer as trainers
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Result, Trainer
from tests.conftest import wait_until

EVERY = 2  # steps from save to save
_REDUCTIONS = ("all_reduce", "all_to_all_single", "reduce_scatter_single", "batch_isend_irecv")
_ROOM = 64 << 20  # bytes between what a process has and its limit


class Fault(NamedTuple):
    """A rank that dies.

    kind: how, one of KINDS
    place: where, one of PLACES
    rank: which one
    """

    kind: str
    place: str
    rank: int

    @property
    def step(self) -> int:
        """The number of steps done by then: one after the save of step 4, or just before it."""
        return 5 if self.place in ("forward", "backward", "reduce", "optimizer") else 4

    @property
    def left(self) -> int:
        """The step of the newest whole checkpoint afterwards."""
        return 4 if self.step == 5 or self.place == "after its name" else 2


def train(gpt: GPTConfig, training: TrainingConfig, folder: str, fault: Fault | None = None) -> Result:
    """Trains in float64 from the newest checkpoint to the end, or until the fault."""

    def made(*args) -> Trainer:
        trainer = Trainer(*args, dtype=torch.float64)
        trainer.evaluate = functools.partial(trainer.evaluate, 8)  # of 256 sequences
        if fault and fault.rank == (dist.get_rank() if dist.is_initialized() else 0):
            PLACES[fault.place](Ambush(fault, trainer, Path(folder)))
        return trainer

    trainers.Trainer = made
    try:
        return trainers.train(gpt, training, folder, EVERY, resume=True)
    finally:
        trainers.Trainer = Trainer


class Ambush:
    """A fault that waits in a trainer for its step. It strikes when the save before is whole."""

    def __init__(self, fault: Fault, trainer: Trainer, folder: Path):
        self.trainer, self.folder, self._fault = trainer, folder, fault
        self.die = KINDS[fault.kind]

    @property
    def due(self) -> bool:
        return self.trainer.step == self._fault.step and self.whole(4 if self._fault.step == 5 else 2)

    def strike(self, *_) -> None:
        if self.due:
            self.die()

    def whole(self, step: int) -> bool:
        """Waits until all ranks have written the checkpoint."""

        def is_whole() -> bool:
            try:
                return bool(saving.files(self.folder / f"step-{step:08}"))
            except ValueError:
                return False

        return wait_until(is_whole, 20)

    def hits(self, file: Path) -> bool:
        """Whether it's a file of the save that this rank dies in."""
        return Path(file).parent.name == f"step-{self._fault.step:08}" and self.whole(2)

    @property
    def layers(self) -> list[nn.Module]:
        """Those of this rank's stage."""
        return [layer for layer in self.trainer.spread.parts.model.layers if not isinstance(layer, nn.Identity)]


# Where


def forward(ambush: Ambush) -> None:
    ambush.layers[-1].register_forward_pre_hook(ambush.strike)


def backward(ambush: Ambush) -> None:
    """When the layers above have their gradients, and this one doesn't."""

    def watch(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(ambush.strike)

    ambush.layers[0].register_forward_hook(watch)


def reduce(ambush: Ambush) -> None:
    """When a reduction of backward is under way."""

    send_and_receive = dist.batch_isend_irecv

    def issued(call: Callable, *args, **options):
        if torch._C._current_graph_task_id() >= 0 and ambush.due:
            call(*args, **options | ({} if call is send_and_receive else {"async_op": True}))
            ambush.die()
        return call(*args, **options)

    for name in _REDUCTIONS:
        patch(dist, name, issued)


def optimizer(ambush: Ambush) -> None:
    """When matrices have stepped, and vectors haven't."""
    steps: list[int] = []

    def step(call: Callable, *args, **options) -> None:
        steps.append(ambush.trainer.step)
        if steps[-2:-1] == steps[-1:]:
            ambush.strike()
        call(*args, **options)

    patch(torch, "_fused_adamw_", step)


def copy(ambush: Ambush) -> None:
    """When one part is copied."""
    copied: list[int] = []

    def copies(call: Callable, *args) -> Tensor:
        copied.append(ambush.trainer.step)
        if copied[-2:-1] == copied[-1:]:
            ambush.strike()
        return call(*args)

    patch(saving, "_as", copies)


def before_the_file(ambush: Ambush) -> None:
    def opened(file: Path, mode: str) -> io.IOBase:
        if mode == "wb" and ambush.hits(file):
            ambush.die()
        return open(file, mode)

    saving.open = opened


def half_a_file(ambush: Ambush) -> None:
    """When the header and half of the numbers are written."""

    class Half(io.BufferedWriter):
        writes = 0

        def write(self, data: memoryview) -> int:
            self.writes += 1
            if self.writes == 2:
                super().write(data[: len(data) // 2])
                self.flush()
                ambush.die()
            return super().write(data)

    def opened(file: Path, mode: str) -> io.IOBase:
        return Half(io.FileIO(file, mode)) if mode == "wb" and ambush.hits(file) else open(file, mode)

    saving.open = opened


def before_its_name(ambush: Ambush) -> None:
    """When the file is on the disk, under another name."""

    def replace(call: Callable, source: Path, target: Path) -> None:
        if ambush.hits(target):
            ambush.die()
        call(source, target)

    patch(os, "replace", replace)


def after_its_name(ambush: Ambush) -> None:
    """When all files have their names, which may not have reached the disk."""

    def replace(call: Callable, source: Path, target: Path) -> None:
        call(source, target)
        if ambush.hits(target) and ambush.whole(4):
            ambush.die()

    patch(os, "replace", replace)


def patch(module: object, name: str, instead: Callable) -> None:
    """Has `instead` called with what it takes the place of. The rank dies of it, so nothing puts it back."""
    call = getattr(module, name)
    setattr(module, name, lambda *args, **options: instead(call, *args, **options))


# How


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segmentation_fault() -> None:
    ctypes.string_at(0)


def exits() -> None:
    os._exit(3)


def out_of_memory() -> None:
    """Takes memory until the system refuses. The limit stays, and goes with the process."""
    limit = psutil.Process().memory_info().vms + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    try:
        while True:
            taken.append(torch.empty(_ROOM // 4, dtype=torch.uint8))
    finally:
        taken.clear()


def full_disk() -> None:
    """From now on the system refuses to make a file longer than 10,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


def waits() -> None:
    time.sleep(60)


KINDS: dict[str, Callable[[], None]] = {
    "SIGKILL": killed,
    "SIGSEGV": segmentation_fault,
    "exit": exits,
    "out of memory": out_of_memory,
    "full disk": full_disk,
    "waits": waits,
}
CODES = {"SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV, "exit": 3}
PLACES: dict[str, Callable[[Ambush], None]] = {
    "forward": forward,
    "backward": backward,
    "reduce": reduce,
    "optimizer": optimizer,
    "copy": copy,
    "before the file": before_the_file,
    "half a file": half_a_file,
    "before its name": before_its_name,
    "after its name": after_its_name,
}
