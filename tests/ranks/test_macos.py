"""Differences of macOS, injected: the loopback is lo0, no socket counts its bytes, no process dies with its parent."""

import os
import signal
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.world.fences import confine
from manyranks.world.processes import forkserver, local
from tests.conftest import BARE, gone, pids, start_script, wait_until
from tests.ranks.test_lifetime import SCRIPT, pids_in

# What others wrote is imported before, for it looks at the system, too.
DARWIN = f"import sys, psutil, cloudpickle, manyranks.measure.calls, {', '.join(forkserver._ONCE)}; sys.platform = 'darwin'"
DARWIN += "; from manyranks.measure import wire; wire.TCP_INFO = None"


@pytest.fixture(scope="module")
def servers():
    """The forkserver that the tests share, until one of them ends it."""
    servers = {}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture
def macos(servers, monkeypatch):
    """A world whose forkserver and ranks believe that they are on macOS."""
    monkeypatch.setattr(local, "_START", local._START.replace("import sys;", f"{DARWIN};", 1))
    monkeypatch.setattr(local, "_servers", servers)
    with mr.World(3, backend="gloo", timeout=30) as world:
        assert world.run(lambda: sys.platform) == ["darwin"] * 3
        yield world


def add():
    x = torch.ones(1000)
    dist.all_reduce(x)
    return int(x[0])


@pytest.mark.parametrize(("platform", "name"), [("darwin", "lo0"), ("linux", "lo")])
def test_ranks_use_the_systems_loopback(monkeypatch, platform, name):
    monkeypatch.setattr(sys, "platform", platform)
    assert local._environment(None)["GLOO_SOCKET_IFNAME"] == name
    assert local._environment("en0")["GLOO_SOCKET_IFNAME"] == "en0"


def test_a_run_is_measured_but_for_the_bytes_on_the_wire(macos):
    m = macos.measure(add, flops=True, memory=True)
    assert m.results == [3, 3, 3]
    assert m.sent_bytes is None
    assert "this system (darwin) does not count a socket's bytes" in repr(m)
    with mr.World(3, backend="gloo") as linux:
        other = linux.measure(add, flops=True, memory=True)
    for name in ("payload_bytes", "flops", "peak_bytes", "divergence"):
        assert getattr(m, name) == getattr(other, name), name


def test_a_deadlock_is_found(macos):
    def ring():
        dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % 3)

    with pytest.raises(mr.RankHung, match="a deadlock"):
        macos.run(ring)
    assert macos.run(add) == [3, 3, 3]


def test_ranks_that_outlive_their_forkserver_are_ended_by_the_kernel(macos):
    before = pids(macos)
    os.kill(local.the_forkserver().pid, signal.SIGKILL)
    with pytest.raises(mr.RankDied):
        macos.run(add)
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)
    assert macos.run(add) == [3, 3, 3]


def test_a_forkserver_that_was_killed_forks_no_more_and_leaves_no_socket(monkeypatch):
    monkeypatch.setattr(local, "_START", BARE)
    server = local.Forkserver()
    try:
        server.wait_until_ready()
        assert server.alive()
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.alive(), 20)
        with pytest.raises(mr.WorldError, match="rank 0 could not be started"):
            server.fork(0)  # an unclosed socket would be a warning, and those are errors here
    finally:
        server.close()


def test_a_rank_that_is_stuck_in_c_ends_too(macos):
    """It holds the interpreter, so that its second thread cannot notice that nobody is there any more."""
    before = pids(macos)
    for pid in before:
        psutil.Process(pid).suspend()
    os.kill(local.the_forkserver().pid, signal.SIGKILL)
    macos.close()
    assert wait_until(lambda: all(gone(pid) for pid in before), 20)


def test_killing_the_kernel_ends_every_rank():
    change = f"local._START = local._START.replace('import sys;', \"{DARWIN};\", 1)"
    lines = f"from manyranks.world.processes import local\n{change}\n"
    process = start_script(lines + SCRIPT.format(then="time.sleep(60)"))
    with process:
        family = pids_in(process.stdout.readline())
        assert len(family) == 4
        process.kill()
        assert wait_until(lambda: all(gone(pid) for pid in family), 20)


def test_strangers_code_has_its_limits_and_a_teacher_is_told_which(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert confine.fences() == "time, size of files"
