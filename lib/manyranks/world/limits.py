"""Checks of what a World is asked for, before any process starts."""

import contextlib
import os
import sys
from pathlib import Path

import psutil

from manyranks.world.errors import NoRoom

BACKENDS = ("auto", "gloo", "nccl")
ENGINES = ("local", "ray")
RANK_BYTES = 48 * 2**20  # private memory of an idle rank with its connections, measured at 32 ranks, rounded up
_FILES_A_RANK = 6  # that this process opens
_SPARE_FILES = 200
_CONTAINER = Path("/sys/fs/cgroup")


def checked_size(size) -> int:
    """The number of ranks as an int. Raises ValueError for anything but a whole number from 1 up."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"World({size!r}): the number of ranks must be a whole number, 1 or more; for example World(4)")
    return size


def checked_timeout(timeout) -> float | None:
    """The timeout in seconds, or None for no limit. Raises ValueError for anything else."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give the seconds that one run may take, above 0, or None for no limit")
    return float(timeout)


def checked_choice(name: str, value, allowed: tuple[str, ...]) -> str:
    """The value. Raises ValueError where it is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    return value


def resolved_backend(backend: str, size: int) -> str:
    """The backend, "gloo" or "nccl". "auto" takes NCCL where there is a GPU for every rank.

    Raises ValueError where NCCL is asked for and there are too few GPUs.
    """
    checked_choice("backend", backend, BACKENDS)
    if backend == "gloo":
        return backend
    import torch

    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < size:
        raise ValueError(
            f"World({size}, backend='nccl') needs {size} GPUs, one a rank; this machine has {gpus}. "
            f"Use backend='gloo', which runs on the CPU" + (f", or World({gpus})" if gpus else "")
        )
    return "nccl" if gpus >= size else "gloo"


def resolved_engine(engine: str, backend: str, confined) -> str:
    """The engine. Raises ValueError for an unknown one, and for what only ranks on this machine can be."""
    checked_choice("engine", engine, ENGINES)
    if engine == "ray" and checked_choice("backend", backend, BACKENDS) == "nccl":
        raise ValueError("engine='ray' with backend='nccl': ranks on a Ray cluster talk over gloo; leave backend out")
    if engine == "ray" and confined:
        raise ValueError("engine='ray' with confined=...: only ranks on this machine can be confined; leave engine out")
    return engine


def check_room(size: int) -> None:
    """Raises NoRoom, a ValueError, where the machine has too little memory, or may open too few files, for this many ranks."""
    import resource  # not on Windows, which check_place has turned away by now

    available = available_bytes()
    if size * RANK_BYTES > available:
        raise NoRoom(
            f"World({size}) needs about {size * RANK_BYTES / 1e9:.1f} GB ({RANK_BYTES / 1e6:.0f} MB a rank); "
            f"{available / 1e9:.1f} GB are free. {_fits(available // RANK_BYTES)}"
        )
    needed = size * _FILES_A_RANK + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise NoRoom(
            f"World({size}) needs {needed} open files; the limit of this process is {hard}. "
            f"{_fits(max(0, hard - _SPARE_FILES) // _FILES_A_RANK)}; or raise it with `ulimit -n`"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _fits(ranks: int) -> str:
    return f"At most {ranks} ranks fit" if ranks > 1 else "One rank fits" if ranks else "No rank fits"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """Memory that new processes can have: the machine's, or the container's where that is less. Copies of files make room."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or "max"
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(parts["active_file"]) + int(parts["inactive_file"]))
    return max(free, 0)


def check_place() -> None:
    """Raises RuntimeError where no world can be: inside a rank, or on Windows."""
    if os.environ.get("MANYRANKS_RANK"):
        raise RuntimeError(
            f"this code runs on rank {os.environ['MANYRANKS_RANK']} of a world, and a rank cannot start another world; "
            "call World in the notebook, and torch.distributed inside the function that you run"
        )
    if sys.platform == "win32":
        raise RuntimeError("worlds need Linux or macOS; on Windows, use WSL (see the README)")
