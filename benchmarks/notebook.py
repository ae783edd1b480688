"""Times what a reader of a notebook waits for: World in a kernel, beside jupyter-distributed and ipyparallel's %%px.

All are driven the way a front end does it, by messages to a kernel; the clock stops when the answer arrives. If none comes
within TIMEOUT, the row says so, and the kernel is started again.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from benchmarks import peers
from benchmarks.compare import Row

RANKS, TIMEOUT, STARTING = 8, 20.0, 180.0
APART = os.path.join(sys.prefix, "peers")  # packages that would change every notebook, were they installed beside ours
_JOIN = "import os, torch, torch.distributed as dist\n"
_GROUP = """os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
dist.init_process_group("gloo")
"""
_FIRST = "dist.all_reduce(torch.ones(8))\n"
_DEADLOCK = "x = torch.ones(4)\ndist.all_reduce(x) if dist.get_rank() else dist.recv(x, 1)\n"
_KILLED = (
    "import os, signal\nif dist.get_rank() == 3:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(8))\n"
)
_FIGURE = "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1))\nplt.plot([1, 2])\nplt.show()\n"


@dataclass(frozen=True)
class Way:
    """One way to have ranks in a notebook. before: cells that no clock runs for; start: cells until the first all_reduce is
    done; magic: the first line of a cell that runs on all ranks; spec: the kernel's program and environment, None for Python's.
    """

    name: str
    before: tuple[str, ...]
    start: tuple[str, ...]
    magic: str = ""
    spec: tuple[list[str], dict[str, str]] | None = None


OURS = Way(
    "World",
    ("import manyranks as mr\n%load_ext manyranks", "mr.World(1).close()"),
    (f"world = mr.World({RANKS})", "%%ranks\n" + _FIRST),
    "%%ranks\n",
)
PROXY = Way(
    "jupyter-distributed",
    (),
    (_JOIN + _GROUP + _FIRST,),
    spec=([sys.executable, "-m", "jupyter_distributed.kernel", "-f", "{connection_file}"],
          {"JUPYTER_DISTRIBUTED_WORLD_SIZE": str(RANKS), "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3", "PYTHONPATH": APART}),
)  # fmt: skip
ENGINES = Way(
    "ipyparallel",
    ("import ipyparallel as ipp, tempfile",),
    (
        f"cluster = ipp.Cluster(n={RANKS}, profile_dir=tempfile.mkdtemp())\n"
        "client = cluster.start_and_connect_sync(activate=True)",
        f"client[:].scatter('rank', range({RANKS}), flatten=True, block=True)\nclient[:]['store'] = tempfile.mktemp()",
        "%%px\n" + _JOIN + f"os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n"
        f"dist.init_process_group('gloo', store=dist.FileStore(store, {RANKS}), rank=rank, world_size={RANKS})\n" + _FIRST,
    ),
    "%%px\n",
)
PEERS = {"jupyter_distributed": PROXY, "ipyparallel": ENGINES}
# What a reader waits for: the code of all ranks, and what has to arrive.
WAITS = {
    "an empty cell": ("pass\n", "idle"),
    "a line of output, in a cell that goes on": ("print('a line', flush=True)\nimport time\ntime.sleep(3)\n", "a line"),
    "a figure": (_FIGURE, "image/png"),
    "an exception on one rank": ("if dist.get_rank() == 1:\n    raise ValueError('odd')\n", "odd"),
    "an interrupt, all ranks asleep": ("import time\ntime.sleep(60)\n", "interrupt"),
    "a deadlock": (_DEADLOCK, "idle"),
    "a killed rank, the others waiting": (_KILLED, "idle"),
}
_ENDS = ("an interrupt, all ranks asleep", "a deadlock", "a killed rank, the others waiting")  # new ranks for the next one


class Kernel:
    """A kernel and its messages."""

    def __init__(self, way: Way):
        self.way, self.manager = way, KernelManager(kernel_name="python3")
        more = {name: value for name, value in os.environ.items() if name != "MANYRANKS_SETTINGS"}
        if way.spec:
            argv, environment = way.spec
            self.manager._kernel_spec = KernelSpec(argv=argv, language="python", interrupt_mode="message")
            more |= environment
        self.manager.start_kernel(env=more)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=STARTING)

    def seconds(self, code: str, until: str = "idle", timeout: float = TIMEOUT) -> float:
        """Until this arrives: the kernel is idle, or a message that has these letters. inf where it doesn't."""
        if until == "interrupt":
            return self._interrupted(code)
        started = time.perf_counter()
        sent, found = self.client.execute(code), float("inf")
        while (left := started + timeout - time.perf_counter()) > 0:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=left)
                if (
                    found == float("inf")
                    and until != "idle"
                    and until in str(message["content"])
                    and "code" not in message["content"]
                ):
                    found = time.perf_counter() - started
                done = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
                if done and message["parent_header"].get("msg_id") == sent:
                    return time.perf_counter() - started if until == "idle" else found
        return found

    def _interrupted(self, code: str) -> float:
        sent, self_started = self.client.execute(code), time.perf_counter()
        time.sleep(1.0)
        self.manager.interrupt_kernel()
        asked = time.perf_counter()
        while time.perf_counter() - asked < TIMEOUT:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=1.0)
                done = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
                if done and message["parent_header"].get("msg_id") == sent and time.perf_counter() > self_started + 1.0:
                    return time.perf_counter() - asked
        return float("inf")

    def close(self) -> None:
        """Ends the kernel, and what it has started."""
        import psutil

        family = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=20)


def measured(way: Way) -> dict[str, float]:
    """Seconds of the start, and of each of WAITS."""
    kernel, found = None, {}
    try:
        for what, (code, until) in WAITS.items():
            if kernel is None:
                kernel, first = _started(way)
                found.setdefault(f"{RANKS} ranks, first all_reduce", first)
            found[what] = kernel.seconds(way.magic + code, until)
            if what in _ENDS:
                kernel = kernel.close()
    finally:
        if kernel is not None:
            kernel.close()
    return found


def _started(way: Way) -> tuple[Kernel, float]:
    began = time.perf_counter()
    kernel = Kernel(way)
    if way.spec is None:  # an ordinary kernel: it's there before the reader asks for ranks
        for cell in way.before:
            kernel.seconds(cell, timeout=STARTING)
        began = time.perf_counter()
    for cell in way.start:
        kernel.seconds(cell, timeout=STARTING)
    return kernel, time.perf_counter() - began


def rows() -> Iterator[Row]:
    sys.path.append(APART)
    ours = measured(OURS)
    for package, way in PEERS.items():
        if reason := peers.missing(package):
            yield Row(f"in a notebook, beside {way.name}", skipped=reason)
            continue
        theirs = measured(way)
        for what, seconds in ours.items():
            yield _row(f"{what}; {way.name}", seconds, theirs[what])


def _row(what: str, ours: float, theirs: float) -> Row:
    if theirs == float("inf"):
        return Row(what, skipped=f"ours {ours:.3g} s; theirs: no answer within {TIMEOUT:g} s")
    return Row(what, (ours,), (theirs,))


if __name__ == "__main__":
    for name, value in measured({way.name: way for way in (OURS, *PEERS.values())}[sys.argv[1]]).items():
        print(f"{name}: {value:.3g} s", flush=True)
