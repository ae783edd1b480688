"""Limits on a World: every refusal names the given value and what is allowed, before any process starts."""

import importlib.util
import re
import resource
import sys

import pytest

from manyranks.world import limits
from manyranks.world.errors import NotStarted

PLENTY = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def room(monkeypatch):
    """Sets the memory that is free and the limits on open files; returns the limits that were set."""
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append((which, pair)))
    raised = []

    def give(ranks=10**6, files=PLENTY):
        monkeypatch.setattr(limits, "available_bytes", lambda: ranks * limits.RANK_BYTES)
        monkeypatch.setattr(resource, "getrlimit", lambda which: files)
        return raised

    return give


REFUSED = {
    limits.checked_size: ("World({!r})", "whole number, 1 or more", [0, -1, 2.5, "4", True, None, 4.0, [4]]),
    limits.checked_timeout: ("timeout={!r}", "None for no limit", [0, -1, -0.5, float("nan"), "5", True, False, [5]]),
    lambda value: limits.resolved_backend(value, 2): ("backend={!r}", "'auto', 'gloo', 'nccl'", ["mpi", "", "NCCL", None, 3]),
    lambda value: limits.resolved_engine(value, "auto", None): ("engine={!r}", "'local', 'ray'", ["slurm", "", None]),
}


@pytest.mark.parametrize(
    ("check", "given", "said", "allowed"),
    [(check, given, said.format(given), allowed) for check, (said, allowed, each) in REFUSED.items() for given in each],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(check, given, said, allowed):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check(given)
    assert allowed in str(caught.value)


def test_what_can_be_comes_back():
    assert [limits.checked_size(size) for size in (1, 2, 1000)] == [1, 2, 1000]
    checked = [limits.checked_timeout(timeout) for timeout in (1, 0.25, float("inf"), None)]
    assert (checked, type(checked[0])) == ([1, 0.25, float("inf"), None], float)
    assert limits.resolved_engine("local", "auto", None) == "local"


@pytest.mark.parametrize(
    ("gpus", "size", "said"),
    [
        (
            0,
            4,
            "needs 4 GPUs, one a rank; this machine has 0. Use backend='gloo', which runs on the CPU",
        ),
        (2, 3, "this machine has 2. Use backend='gloo', which runs on the CPU, or World(2)"),
    ],
)
def test_nccl_with_too_few_gpus_points_to_gloo_and_says_how_many_ranks_fit(monkeypatch, gpus, size, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ValueError, match=re.escape(said) + "$"):
        limits.resolved_backend("nccl", size)


@pytest.mark.parametrize(("gpus", "size"), [(2, 1), (2, 2), (8, 8), (0, 1), (2, 3), (7, 8)])
def test_nccl_is_taken_where_every_rank_can_have_a_gpu_and_gloo_where_one_is_missing(monkeypatch, gpus, size):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert limits.resolved_backend("auto", size) == ("nccl" if gpus >= size else "gloo")
    assert gpus < size or limits.resolved_backend("nccl", size) == "nccl"


def test_gloo_does_not_ask_for_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: pytest.fail("the GPUs were counted"))
    assert limits.resolved_backend("gloo", 2) == "gloo"


def test_a_world_that_fits_has_room(room):
    raised = room(ranks=4)
    limits.check_room(4)
    assert raised == []


@pytest.mark.parametrize(("ranks", "fits"), [(3, "At most 3 ranks fit"), (0, "No rank fits")])
def test_too_little_memory_is_refused_with_what_is_needed_and_what_fits(room, ranks, fits):
    room(ranks)
    with pytest.raises(ValueError, match=rf"World\(4\) needs about [\d.]+ GB .* [\d.]+ GB are free. {fits}") as caught:
        limits.check_room(4)
    assert isinstance(caught.value, NotStarted)


def test_too_few_open_files_are_refused_and_the_number_that_fits_is_right(room):
    raised = room(files=(1000, 1000))
    with pytest.raises(ValueError, match=r"World\(5000\) needs \d+ open files; the limit of this process is 1000") as caught:
        limits.check_room(5000)
    assert "ulimit -n" in str(caught.value)
    fits = int(re.search(r"At most (\d+) ranks fit", str(caught.value))[1])
    limits.check_room(fits)
    with pytest.raises(ValueError, match="open files"):
        limits.check_room(fits + 1)
    assert raised == []


def test_a_limit_too_low_for_any_rank_promises_no_negative_number_of_ranks(room):
    room(files=(64, 64))
    with pytest.raises(ValueError, match="the limit of this process is 64") as caught:
        limits.check_room(1)
    assert re.search(r"-\d", str(caught.value)) is None, str(caught.value)


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_a_soft_limit_that_is_too_low_is_raised_below_the_hard_one(room, hard):
    raised = room(files=(64, hard))
    limits.check_room(8)
    ((which, (soft, unchanged)),) = raised
    assert (which, unchanged) == (resource.RLIMIT_NOFILE, hard)
    assert 64 < soft <= 4096


def test_a_container_s_copies_of_files_make_room_for_ranks(tmp_path, monkeypatch):
    for name, text in (("max", "1000"), ("current", "990"), ("stat", "anon 90\nactive_file 300\ninactive_file 600\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(limits, "_CONTAINER", tmp_path)
    assert limits.available_bytes() == 910
    (tmp_path / "memory.max").write_text("max")
    assert limits.available_bytes() > 910


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_rank_cannot_start_a_world(monkeypatch, rank):
    monkeypatch.setenv("MANYRANKS_RANK", rank)
    with pytest.raises(RuntimeError, match=f"runs on rank {rank} of a world"):
        limits.check_place()


def test_windows_is_told_to_use_wsl(monkeypatch):
    monkeypatch.delenv("MANYRANKS_RANK", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="WSL"):
        limits.check_place()


def test_windows_which_has_no_resource_module_gets_that_far(monkeypatch):
    monkeypatch.delenv("MANYRANKS_RANK", raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)
    spec = importlib.util.spec_from_file_location("limits_on_windows", limits.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="WSL"):
        module.check_place()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_notebook_on_linux_or_macos_may_start_a_world(monkeypatch, platform):
    monkeypatch.delenv("MANYRANKS_RANK", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    limits.check_place()


@pytest.mark.parametrize(
    ("size", "options"),
    [(0, {}), ("4", {}), (2, {"timeout": 0}), (2, {"engine": "slurm"}), (2, {"backend": "mpi"}), (2, {"backend": "nccl"})],
)
def test_a_world_that_cannot_be_starts_no_process(monkeypatch, size, options):
    from manyranks.world import world

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(world, "Team", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError):
        world.World(size, **options)


def test_a_world_for_which_there_is_no_room_starts_no_process(monkeypatch, room):
    from manyranks.world import world

    room(ranks=1)
    monkeypatch.setattr(world, "Team", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="One rank fits"):
        world.World(2, backend="gloo")
