"""Starts what a reader would use instead of a World. Imports nothing heavy: processes that peers start import this module."""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from unittest.mock import patch

_LAUNCH = "from benchmarks.peers import print_launch_seconds; print_launch_seconds({size})"


def missing(package: str) -> str:
    """Why a comparison is skipped; "" where the package is there."""
    return "" if importlib.util.find_spec(package) else f"{package} is not installed; `make bench` installs it"


def nothing() -> None:
    """The call whose cost is all overhead."""


nothing.__module__ = "__main__"  # ipyparallel sends it by value, as it does a notebook's own


def spawn_ranks(size: int) -> None:
    """torch.multiprocessing.spawn: `size` processes join a gloo group, do one all_reduce and end."""
    import torch.multiprocessing

    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, loopback):
        torch.multiprocessing.spawn(_spawned, (size, os.path.join(folder, "store")), nprocs=size)


def _spawned(rank: int, size: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    all_reduce_once()
    dist.destroy_process_group()  # without it gloo's threads now and then abort the process at its end


def all_reduce_once() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(8))


@contextlib.contextmanager
def ipyparallel_engines(size: int) -> Iterator:
    """A client of a new cluster whose engines have imported torch. The cluster is gone afterwards."""
    import ipyparallel

    # A folder of its own: nothing of the reader's profile is read or written.
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, IPYTHONDIR=folder):
        cluster = ipyparallel.Cluster(n=size, profile_dir=folder, log_level=logging.ERROR)
        client = None
        try:
            client = cluster.start_and_connect_sync()
            client[:].execute("import torch", block=True)
            yield client
        finally:
            if client is not None:
                client.close()
            _stop(cluster)


def _stop(cluster) -> None:
    """Ends the cluster and waits for its last process: each engine has a nanny that outlives it a little."""
    import psutil

    mine = psutil.Process().children(recursive=True)
    theirs = [process for process in mine if any("ipyparallel" in word for word in _words(process))]
    cluster.stop_cluster_sync()
    psutil.wait_procs(theirs, timeout=30)


def _words(process) -> list[str]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def debug_launcher_seconds(size: int) -> float:
    """Times accelerate's debug_launcher in a separate process: it forks, and refuses to once threads or CUDA are in use."""
    command = [sys.executable, "-c", _LAUNCH.format(size=size)]
    return float(subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=120, text=True).split()[-1])


def print_launch_seconds(size: int) -> None:
    import torch.distributed  # noqa: F401  before the clock starts
    from accelerate import debug_launcher

    started = time.perf_counter()
    debug_launcher(all_reduce_once, num_processes=size)
    print(time.perf_counter() - started)
