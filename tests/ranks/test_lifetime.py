"""When the notebook's process ends, however it ends, so do its ranks; and they listen on the loopback only."""

import mmap
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from jupyter_client.manager import start_new_kernel

import manyranks as mr
from manyranks.world.processes import local
from manyranks.world.processes.local import the_forkserver
from tests.conftest import BARE, gone, pids, start_script, wait_until

SCRIPT = """
import os, sys, time
import manyranks as mr
from manyranks.world.processes.local import the_forkserver
world = mr.World(3, backend="gloo")
print(*world.run(os.getpid), the_forkserver().pid, flush=True)
{then}
"""
ONE_STUCK_ONE_RUNNING = """
import threading
import torch, torch.distributed as dist
stuck, running = mr.World(3, backend="gloo"), mr.World(3, backend="gloo")
print(*stuck.run(os.getpid), *running.run(os.getpid), flush=True)
def receive():
    dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % 3)
for busy, task in ((stuck, (receive,)), (running, (time.sleep, 60))):
    threading.Thread(target=busy.run, args=task, daemon=True).start()
time.sleep(0.3)
print(flush=True)
time.sleep(60)
"""
FORKING = """
if os.fork() == 0:
    sys.exit()  # runs what Python runs at the end
os.wait()
print(world.run(abs, -1), flush=True)
raise ValueError
"""


def large_pages() -> bool:
    """Whether Linux moves memory into large pages when it's asked to."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 2**23, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"1" * len(memory)
        try:
            memory.madvise(25)  # MADV_COLLAPSE
        except OSError:
            return False
    return True


def started(then: str):
    process = start_script(SCRIPT.format(then=then))
    return process, pids_in(process.stdout.readline())


def pids_in(line: str) -> list[int]:
    return [int(pid) for pid in line.split()]


def test_killing_the_kernel_ends_every_rank_and_the_forkserver():
    """Idle ranks, ranks that are stuck and ranks that compute."""
    process, family = started(ONE_STUCK_ONE_RUNNING)
    with process:
        family += pids_in(process.stdout.readline())
        assert len(family) == 10
        process.stdout.readline()  # both are at it
        assert not any(gone(pid) for pid in family)
        process.kill()
        assert wait_until(lambda: all(gone(pid) for pid in family), 20)


@pytest.mark.whole  # the next test's script ends, too
@pytest.mark.parametrize("then", ["sys.exit(1)", "raise ValueError"], ids=["exit", "exception"])
def test_a_script_that_ends_leaves_nothing(then):
    process, family = started(then)
    with process:
        process.wait(timeout=20)
        assert wait_until(lambda: all(gone(pid) for pid in family), 20)


def test_a_fork_of_the_kernel_that_ends_leaves_the_ranks_alone_and_its_own_end_leaves_nothing():
    process, family = started(FORKING)
    with process:
        assert process.stdout.readline() == "[1, 1, 1]\n"
        process.wait(timeout=20)
        assert wait_until(lambda: all(gone(pid) for pid in family), 20)


def test_a_fork_does_not_wait_for_a_lock_that_another_thread_held():
    the_forkserver()
    held, over = threading.Event(), threading.Event()

    def hold():
        with local._starting:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        the_forkserver(hold=True).release()
        os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_the_forkserver_ends_a_while_after_the_last_world_and_the_next_world_has_another(monkeypatch):
    monkeypatch.setattr(local, "strangers", 2)  # a forkserver of this test's own, which has no use for what tests import
    monkeypatch.setattr(local, "_START", BARE)
    monkeypatch.setattr(local, "IDLE", 0.3)
    first, second = mr.World(1), mr.World(1)
    server = the_forkserver().pid
    first.close()
    time.sleep(0.5)
    assert second.run(abs, -1) == [1]
    second.close()
    assert wait_until(lambda: gone(server), 20)
    with mr.World(1) as world:
        assert world.run(abs, -1) == [1]
        time.sleep(0.5)
        assert the_forkserver().pid != server
        assert world.run(abs, -2) == [2]
        server = the_forkserver().pid
    assert wait_until(lambda: gone(server), 20)


def test_killing_the_forkserver_ends_its_ranks_and_the_next_run_works(world):
    before = pids(world)
    os.kill(the_forkserver().pid, signal.SIGKILL)
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)
    with pytest.raises(mr.RankDied):
        world.run(abs, -1)
    assert world.run(abs, -1) == [1, 1, 1]


@pytest.mark.whole
def test_restarting_the_kernel_ends_every_rank():
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        printed = []
        client.execute_interactive(
            SCRIPT.format(then=""), timeout=300, output_hook=lambda m: printed.append(m["content"].get("text", ""))
        )
        family = [int(pid) for pid in "".join(printed).split()]
        assert len(family) == 4
        manager.restart_kernel(now=False)
        assert wait_until(lambda: all(gone(pid) for pid in family), 20)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_world_that_is_forgotten_ends():
    world = mr.World(2, backend="gloo")
    before = pids(world)
    del world
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)


def test_ranks_listen_on_the_loopback_only(world):
    family = [*pids(world), the_forkserver().pid, os.getpid()]
    listening = [c for pid in family for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in listening if c.laddr} <= {"127.0.0.1", "::1"}
    connected = [c for pid in pids(world) for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_ESTABLISHED]
    assert connected
    assert {c.laddr.ip for c in connected} <= {"127.0.0.1", "::1"}


def test_ranks_have_a_session_of_their_own(world):
    assert all(os.getsid(pid) == pid != os.getsid(0) for pid in pids(world))


def test_what_a_rank_starts_ends_with_it(world):
    def child():
        import subprocess

        return subprocess.Popen(["sleep", "60"]).pid

    children = world.run(child)
    world.close()
    assert wait_until(lambda: all(gone(pid) for pid in children), 20)


@pytest.mark.skipif(not large_pages(), reason="needs Linux 6.1")
def test_after_some_ranks_the_forkserver_has_large_pages_and_ranks_start_as_before():
    for _ in range(7):
        with mr.World(3, backend="gloo") as world:
            assert world.run(lambda: dist.get_rank()) == [0, 1, 2]
    found = Path(f"/proc/{the_forkserver().pid}/smaps_rollup").read_text()
    assert int(re.search(r"AnonHugePages: +(\d+) kB", found)[1]) > 100_000
