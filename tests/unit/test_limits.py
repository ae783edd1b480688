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


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", True, None, 4.0, [4]])
def test_a_size_that_is_no_whole_number_from_one_up_is_refused(size):
    with pytest.raises(ValueError, match=re.escape(f"World({size!r})")) as caught:
        limits.checked_size(size)
    assert "whole number, 1 or more" in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_whole_number_is_a_size(size):
    assert limits.checked_size(size) == size


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("nan"), "5", True, False, [5]])
def test_a_timeout_that_is_no_positive_number_is_refused(timeout):
    with pytest.raises(ValueError, match=re.escape(f"timeout={timeout!r}")) as caught:
        limits.checked_timeout(timeout)
    assert "None for no limit" in str(caught.value)


@pytest.mark.parametrize("timeout", [1, 0.25, float("inf")])
def test_a_positive_timeout_comes_back_as_float(timeout):
    checked = limits.checked_timeout(timeout)
    assert (checked, type(checked)) == (timeout, float)


def test_no_timeout_is_allowed():
    assert limits.checked_timeout(None) is None


@pytest.mark.parametrize("backend", ["mpi", "", "NCCL", None, 3])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises(ValueError, match=re.escape(f"backend={backend!r}")) as caught:
        limits.resolved_backend(backend, 2)
    assert all(repr(name) in str(caught.value) for name in ("auto", "gloo", "nccl"))


@pytest.mark.parametrize("engine", ["slurm", "", None])
def test_an_unknown_engine_is_refused(engine):
    with pytest.raises(ValueError, match=re.escape(f"engine={engine!r}")) as caught:
        limits.checked_choice("engine", engine, limits.ENGINES)
    assert all(repr(name) in str(caught.value) for name in limits.ENGINES)


def test_an_allowed_choice_comes_back():
    assert limits.checked_choice("engine", "local", limits.ENGINES) == "local"


def test_nccl_without_gpus_is_refused_and_points_to_gloo(monkeypatch):
    monkeypatch.setattr(limits, "_gpus", lambda: 0)
    with pytest.raises(ValueError, match=re.escape("World(4, backend='nccl') needs 4 GPUs")) as caught:
        limits.resolved_backend("nccl", 4)
    assert "this machine has 0" in str(caught.value)
    assert "backend='gloo'" in str(caught.value)
    assert "World(0)" not in str(caught.value)


def test_nccl_with_too_few_gpus_says_how_many_ranks_fit(monkeypatch):
    monkeypatch.setattr(limits, "_gpus", lambda: 2)
    with pytest.raises(ValueError, match="this machine has 2") as caught:
        limits.resolved_backend("nccl", 3)
    assert "World(2)" in str(caught.value)


@pytest.mark.parametrize(("gpus", "size"), [(2, 1), (2, 2), (8, 8)])
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_nccl_is_taken_where_every_rank_can_have_a_gpu(monkeypatch, backend, gpus, size):
    monkeypatch.setattr(limits, "_gpus", lambda: gpus)
    assert limits.resolved_backend(backend, size) == "nccl"


@pytest.mark.parametrize(("gpus", "size"), [(0, 1), (2, 3), (7, 8)])
def test_auto_takes_gloo_where_a_gpu_is_missing(monkeypatch, gpus, size):
    monkeypatch.setattr(limits, "_gpus", lambda: gpus)
    assert limits.resolved_backend("auto", size) == "gloo"


def test_gloo_does_not_ask_for_gpus(monkeypatch):
    monkeypatch.setattr(limits, "_gpus", lambda: pytest.fail("the GPUs were counted"))
    assert limits.resolved_backend("gloo", 2) == "gloo"


def test_a_world_that_fits_has_room(room):
    raised = room(ranks=4)
    limits.check_room(4)
    assert raised == []


def test_too_little_memory_is_refused_with_what_is_needed_and_what_fits(room):
    room(ranks=3)
    with pytest.raises(ValueError, match=r"World\(4\) needs about [\d.]+ GB .* [\d.]+ GB are free") as caught:
        limits.check_room(4)
    assert "At most 3 ranks fit" in str(caught.value)


def test_no_memory_at_all_is_refused(room):
    room(ranks=0)
    with pytest.raises(ValueError, match="No rank fits"):
        limits.check_room(1)


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


def test_the_memory_that_is_free_is_a_number_of_bytes():
    assert limits.available_bytes() >= 0


def test_a_container_s_copies_of_files_make_room_for_ranks(tmp_path, monkeypatch):
    for name, text in (("max", "1000"), ("current", "990"), ("stat", "anon 90\nactive_file 300\ninactive_file 600\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(limits, "_CONTAINER", tmp_path)
    assert limits.available_bytes() == 910
    (tmp_path / "memory.max").write_text("max")
    assert limits.available_bytes() > 910


def test_want_of_room_is_told_from_what_cannot_be(room):
    room(ranks=3)
    with pytest.raises(NotStarted):
        limits.check_room(4)


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

    monkeypatch.setattr(limits, "_gpus", lambda: 1)
    monkeypatch.setattr(world, "Team", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError):
        world.World(size, **options)


def test_a_world_for_which_there_is_no_room_starts_no_process(monkeypatch, room):
    from manyranks.world import world

    room(ranks=1)
    monkeypatch.setattr(world, "Team", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="One rank fits"):
        world.World(2, backend="gloo")
