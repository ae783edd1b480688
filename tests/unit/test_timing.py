"""measure.timing and measure.machine: what is called, in order, and what is refused. No speed is asserted."""

import math

import pytest
import torch

from manyranks.measure import machine, timing


@pytest.fixture
def log(monkeypatch):
    """The things that were done, in order; each look at the clock is a second after the one before."""
    done = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append(f"synchronized {device}"))

    def clock():
        done.append("clock")
        return float(done.count("clock"))

    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return done


@pytest.mark.parametrize(("device", "waits"), [("cuda:1", ["synchronized cuda:1"]), ("cpu", [])])
def test_each_look_at_the_clock_is_after_the_device_has_done_all(log, device, waits):
    found = timing.seconds(lambda *args, **kwargs: log.append((args, kwargs)), 3, warmup=1, repeats=2, device=device, power=4)
    assert log == 3 * [*waits, "clock", ((3,), {"power": 4}), *waits, "clock"]
    assert found == timing.Timings(all=(1.0, 1.0), warmup=(1.0,))
    assert timing.Timings((3.0, 1.0, 2.0, 7.0), (100.0,)).median == 2.5


# The machine


@pytest.fixture
def taken(monkeypatch):
    """A product takes a nanosecond for each of its mkn, all else half a second; holds what was timed, and where."""
    found = []

    def seconds(function, *args, repeats, device, warmup=2, **kwargs):
        calls = []
        with monkeypatch.context() as patched:
            patched.setattr(torch, "mm", lambda a, b, out: calls.append((a.shape, b.shape, out.shape, out.dtype)))
            function(*args, **kwargs)
        found.append((calls, str(device)))
        took = sum(a[0] * a[1] * b[1] for a, b, *_ in calls) * 1e-9
        return timing.Timings((took or 0.5,) * repeats)

    monkeypatch.setattr(machine.timing, "seconds", seconds)
    return found


def test_a_product_of_m_k_n_is_2mkn_flops(taken):
    assert machine.matmul_rate((512, 768, 1024), torch.bfloat16) == pytest.approx(2e9)
    assert taken == 2 * [([((512, 768), (768, 1024), (512, 1024), torch.bfloat16)], "cpu")]


@pytest.mark.parametrize(("size", "times"), [((100, 200, 100), 5), ((1, 2, 3), 1000)])
def test_small_products_are_timed_many_at_once_tiny_ones_not_for_hours_and_the_caller_s_random_numbers_stay(taken, size, times):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert machine.matmul_rate(size) == pytest.approx(2e9)
    assert [len(calls) for calls, _ in taken] == [1, times]
    assert torch.equal(torch.rand(3), expected)


def test_the_peak_is_that_of_the_best_size(monkeypatch):
    monkeypatch.setattr(machine, "matmul_rate", lambda size, dtype, device: {512: 5.0, 1024: 7.0, 2048: 6.0}.get(size, size))
    assert [machine.peak(), machine.peak(sizes=(2048, 512)), machine.peak(device="cuda")] == [7.0, 6.0, max(machine.LARGE)]


@pytest.mark.parametrize("bytes", [4, 1000, 1003])
def test_bandwidth_counts_what_is_read_and_what_is_written(taken, bytes):
    assert machine.memory_bandwidth(bytes) == 2 * (bytes // 4 * 4) / 0.5


COUNTS = "give one repetition or more, and 0 warm-up calls or more"
SIZES = r"size=.*: give one whole number, or three, \(m, k, n\), each 1 or more"
REFUSED = [
    *[(timing.seconds, {"repeats": n}, f"repeats={n}, warmup=2: {COUNTS}") for n in (0, -1)],
    (timing.seconds, {"warmup": -1}, f"repeats=10, warmup=-1: {COUNTS}"),
    *[(machine.matmul_rate, {"size": size}, SIZES) for size in (0, -1, 2.5, (3, 4), (3, 4, 0), (3, 4, 5, 6), "512")],
    *[(machine.peak, {"dtype": dtype}, "give a floating-point one") for dtype in ("bfloat16", torch.complex64, torch.int8)],
    (machine.peak, {"sizes": ()}, r"sizes=\(\): give one size or more"),
    *[(machine.memory_bandwidth, {"bytes": n}, f"bytes={n!r}: give a whole number from 4 up") for n in (3, 1e6)],
]


@pytest.mark.parametrize(("function", "given", "said"), REFUSED)
def test_what_cannot_be_timed_is_refused(function, given, said):
    with pytest.raises(ValueError, match=said):
        function(*[pytest.fail] * (function is timing.seconds), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_real_thing_gives_numbers(dtype):
    assert 0 < machine.matmul_rate(64, dtype, repeats=1) < math.inf
    assert 0 < machine.memory_bandwidth(4096, repeats=1) < math.inf
