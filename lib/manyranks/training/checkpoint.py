"""Checkpoints of a run: a folder a step, written and read by any number of ranks."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from manyranks.parallel.sharded_state import sharded_state
from manyranks.parallel.zero import Zero3, ZeroOptimizer


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | ZeroOptimizer,
    step: int,
    sizes: str,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes folder/step-…, in which every rank of the group has a part; returns it.

    model: in its wrapper, with its optimizer: what training.parallelize gives.
    sizes: what a run that reads it must agree on. All ranks call it.
    """
    state = {**_state(model, optimizer), "step": step, "sizes": sizes}
    place = folder / f"step-{step:08}"
    with _alone_allowed():
        dcp.save(state, checkpoint_id=place, process_group=group)
    return place


def load(
    place: Path,
    model: nn.Module,
    optimizer: Optimizer | ZeroOptimizer,
    sizes: str,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Reads one into the model and the optimizer, bit for bit; returns its step.

    Raises ValueError where it is that of a run of other sizes.
    """
    with _alone_allowed():
        found = {"step": 0, "sizes": ""}
        dcp.load(found, checkpoint_id=place, process_group=group)
        if found["sizes"] != sizes:
            raise ValueError(
                f"{place} was written by a run with\n{found['sizes']}\nand this one has\n{sizes}\n"
                "Give it the same sizes, or another folder"
            )
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=place, process_group=group)
    _take(model, optimizer, state)
    return found["step"]


def newest(folder: Path) -> Path | None:
    """The last complete one in the folder, None where there is none."""
    # The metadata are written when every rank has written its part.
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


def _state(model: nn.Module, optimizer: Optimizer | ZeroOptimizer) -> dict:
    """By the names of parameters, or of the rows that are sharded: any number of ranks reads it."""
    if isinstance(optimizer, ZeroOptimizer):
        return sharded_state(optimizer)
    if isinstance(model, Zero3):
        return sharded_state(model, optimizer)
    parameters, moments = get_state_dict(model.module, optimizer)
    return {"model": parameters, "optimizer": moments}


def _take(model: nn.Module, optimizer: Optimizer | ZeroOptimizer, state: dict) -> None:
    """What was read into the state; a sharded one's tensors are the shards themselves."""
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.spread()
    elif not isinstance(model, Zero3):
        set_state_dict(
            model.module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@contextlib.contextmanager
def _alone_allowed() -> Iterator[None]:
    """Without PyTorch's warning that there is no group: one process may well have none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield
