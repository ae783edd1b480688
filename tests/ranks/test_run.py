"""world.run: what can be sent and returned, what ranks print, what does not leak, what stays between cells."""

import functools
import importlib
import os
import time

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.world.processes.local import loopback
from manyranks.world.world import Each


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x + dist.get_rank()


def add(a, b=0):
    return a + b + dist.get_rank()


def test_functions_of_every_kind_run_on_every_rank(world):
    offset = 10
    assert world.run(dist.get_rank) == [0, 1, 2]
    assert world.run(lambda: offset + dist.get_rank()) == [10, 11, 12]
    assert world.run(add, 1, b=2) == [3, 4, 5]
    assert world.run(functools.partial(add, 5)) == [5, 6, 7]
    assert world.run(Scale(2).apply, 3) == [6, 7, 8]
    assert world.run(lambda fn: fn(1), add) == [1, 2, 3]


def test_each_rank_gets_its_own_part_of_an_argument(world):
    parts = Each((torch.ones(2) * rank, f"of {rank}") for rank in range(3))
    assert [(part.sum().item(), name, b) for (part, name), b in world.run(lambda a, b: (a, b), parts, 7)] == [
        (0, "of 0", 7),
        (2, "of 1", 7),
        (4, "of 2", 7),
    ]


def test_each_rank_gets_its_own_part_of_a_keyword_argument_and_no_other(world):
    results = world.run(lambda a, *, b, c: (a, b, c), Each("xyz"), b=Each([5, 6, 7]), c=8)
    assert results == [("x", 5, 8), ("y", 6, 8), ("z", 7, 8)]


@pytest.mark.parametrize("parts", [Each([5, 6]), Each([5, 6, 7, 8])], ids=len)
def test_parts_for_more_or_fewer_ranks_than_run_are_an_error(world, parts):
    for args, kwargs in (((parts,), {}), ((), {"a": parts})):
        with pytest.raises(ValueError, match=rf"Each\(…\) with {len(parts)} parts, but 3 ranks run: give one part"):
            world.run(lambda a: a, *args, **kwargs)


def test_a_function_defined_in_main_is_sent_by_value(world):
    namespace = {"__name__": "__main__", "dist": dist}
    exec("def helper(x):\n    return 2 * x\ndef cell(x):\n    return helper(x) + dist.get_rank()", namespace)
    assert world.run(namespace["cell"], 4) == [8, 9, 10]


def test_keyword_arguments_of_any_name_reach_the_function(world):
    assert world.run(lambda **kwargs: sorted(kwargs), fn=1, self=2, name=3) == [["fn", "name", "self"]] * 3


def test_tensors_come_back_whole(world):
    def make():
        base = torch.arange(12.0).reshape(3, 4)
        tied = torch.nn.Linear(4, 4)
        return base.t()[1:, ::2], torch.ones(3, dtype=torch.bfloat16), torch.empty(0), torch.nn.Parameter(base), tied

    view, half, empty, parameter, module = world.run(make)[2]
    assert view.tolist() == [[1, 9], [2, 10], [3, 11]]
    assert half.dtype is torch.bfloat16
    assert empty.numel() == 0
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert module(torch.ones(4)).shape == (4,)


def test_a_100_megabyte_tensor_goes_and_returns(world):
    big = torch.arange(25_000_000, dtype=torch.float32)
    back = world.run(lambda x: x + 1 if dist.get_rank() == 1 else None, big)[1]
    assert torch.equal(back, big + 1)


def test_a_function_may_change_its_tensor_in_place(world):
    x = torch.ones(4)
    assert world.run(lambda t: dist.all_reduce(t) or t.sum().item(), x) == [12, 12, 12]
    assert x.sum() == 4


def test_nothing_of_the_cell_leaks_into_ranks(world):
    def state():
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.initial_seed(), torch.get_num_threads()

    seed = world.run(torch.initial_seed)
    with torch.no_grad():
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(123)
        try:
            assert world.run(state) == [(True, torch.float32, s, 1) for s in seed]
        finally:
            torch.set_default_dtype(torch.float32)


def test_ranks_draw_random_numbers_of_their_own(world):
    import random

    import numpy

    assert len(set(world.run(lambda: numpy.random.rand()))) == 3
    assert len(set(world.run(lambda: torch.rand(1).item()))) == 3
    assert len(set(world.run(lambda: random.random()))) == 3


def test_output_comes_in_rank_order_under_headings(world, capsys):
    def speak():
        import sys

        time.sleep(0.1 * (2 - dist.get_rank()))
        print("I am", dist.get_rank())
        if dist.get_rank() == 1:
            print("careful", file=sys.stderr)
        os.system("echo from C" if dist.get_rank() == 2 else "true")

    world.run(speak)
    printed = capsys.readouterr()
    assert printed.out == "── rank 0 ──\nI am 0\n── rank 1 ──\nI am 1\n── rank 2 ──\nI am 2\nfrom C\n"
    assert printed.err == "── rank 1 ──\ncareful\n"


def test_a_long_run_shows_progress_before_it_ends(world):
    import contextlib
    import io

    shown = []

    class Screen(io.StringIO):
        def write(self, text):
            shown.append((time.monotonic(), text))
            return len(text)

    def slow():
        for step in range(4):
            if dist.get_rank() == 0:
                print("step", step)
            time.sleep(0.8)

    with contextlib.redirect_stdout(Screen()):
        world.run(slow)
    ended = time.monotonic()
    first = next(when for when, text in shown if "step 0" in text)
    assert ended - first > 0.5
    assert "".join(text for _, text in shown) == "── rank 0 ──\nstep 0\nstep 1\nstep 2\nstep 3\n"


def test_output_of_a_failing_run_is_shown(world, capsys):
    def broken():
        print("before")
        raise ValueError

    with pytest.raises(mr.RankFailed):
        world.run(broken)
    assert capsys.readouterr().out.count("before") == 3


def test_variables_stay_on_the_ranks(world):
    world.set(x=torch.ones(2), n=3)
    world.run_cell("y = n * rank\nx += rank", "<cell 1>")
    assert world.get("y") == [0, 3, 6]
    assert [x.tolist() for x in world.get("x")] == [[1, 1], [2, 2], [3, 3]]
    with pytest.raises(mr.RankFailed, match="no %%ranks cell has set 'z'"):
        world.get("z")


def test_repr_says_what_it_is(world):
    assert repr(world) == "World(3, backend='gloo'): open"
    html = world._repr_html_()
    assert "World of 3 ranks" in html
    assert "gloo" in html
    world.close()
    assert repr(world).endswith("closed")


def test_auto_is_gloo_where_there_are_too_few_gpus():
    too_many = torch.cuda.device_count() + 1
    with mr.World(too_many) as world:
        assert world.backend == "gloo"
        assert world.run(dist.get_backend) == ["gloo"] * too_many


def test_a_world_of_one_works():
    with mr.World(1, backend="gloo") as world:
        assert world.run(lambda: dist.all_reduce(torch.ones(1)) or dist.get_world_size()) == [1]


def test_32_ranks_start_and_reduce():
    with mr.World(32, backend="gloo") as world:
        assert world.run(lambda: dist.all_reduce(x := torch.ones(1)) or int(x)) == [32] * 32


@pytest.mark.gpu(2)
def test_auto_is_nccl_where_every_rank_can_have_a_gpu():
    def reduce():
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        return x.sum().item(), torch.cuda.current_device()

    with mr.World(2) as world:
        assert world.backend == "nccl"
        assert world.run(reduce) == [(8, 0), (8, 1)]


@pytest.mark.gpu(1)
def test_one_gpu_is_enough_for_a_world_of_one():
    with mr.World(1, backend="nccl") as world:
        assert world.run(lambda: dist.all_reduce(x := torch.ones(2, device="cuda")) or x.device.type) == ["cuda"]


def test_a_new_world_sees_the_environment_as_it_is_now(monkeypatch):
    monkeypatch.setenv("THERE_BEFORE", "1")
    monkeypatch.delenv("LANG", raising=False)
    with mr.World(2, backend="gloo") as before:
        monkeypatch.setenv("THERE_BEFORE", "2")
        monkeypatch.setenv("LANG", "C")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # ranks stay on the loopback, whatever is set
        with mr.World(2, backend="gloo") as after:
            names = "THERE_BEFORE", "LANG", "GLOO_SOCKET_IFNAME"
            found = [world.run(lambda: [os.environ.get(name) for name in names]) for world in (before, after)]
    assert found == [[["1", None, loopback()]] * 2, [["2", "C", loopback()]] * 2]


def test_ranks_that_run_an_older_version_of_a_module_say_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "reloaded_here.py"
    file.write_text("def number():\n    return 1\n")
    import reloaded_here

    with mr.World(2, backend="gloo") as world:
        assert world.run(reloaded_here.number) == [1, 1]
        file.write_text("def number():\n    return 22\n")
        importlib.reload(reloaded_here)
        with pytest.warns(UserWarning, match="reloaded_here.py has changed since this world's ranks imported it") as warned:
            measured = world.measure(reloaded_here.number)
        assert measured.results == [1, 1]
        assert {one.filename for one in warned} == {__file__}
    with mr.World(2, backend="gloo") as world:
        assert world.run(reloaded_here.number) == [22, 22]
