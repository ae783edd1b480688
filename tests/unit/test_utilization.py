"""training.utilization: the peak of a device, MFU under each convention, and the command's line."""

from dataclasses import replace

import pytest
import torch

from manyranks import theory
from manyranks.measure import machine
from manyranks.theory import flops
from manyranks.training import __main__, utilization
from manyranks.training.config import GPTConfig
from manyranks.training.trainer import Result
from manyranks.training.utilization import Peak, Utilization, peak

# Peaks


@pytest.fixture
def gpu(monkeypatch):
    """A function that gives this machine's GPU a name; measured, it makes 1.5e14 FLOP/s."""
    monkeypatch.setattr(machine, "peak", lambda dtype, device: 1.5e14)
    return lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("NVIDIA H200", torch.float8_e4m3fn, 1979),
    ],
)
def test_a_known_device_has_its_data_sheet_s_peak(gpu, name, dtype, tera):
    gpu(name)
    found = peak("cuda", dtype)
    assert found.flops == pytest.approx(tera * 1e12, rel=2e-3)
    assert (found.device, found.dtype) == (name, str(dtype).removeprefix("torch.").removesuffix("_e4m3fn"))
    assert found.source.startswith("data sheet of")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "Tesla V100-SXM2-32GB"])
def test_where_no_data_sheet_has_the_number_it_is_measured_and_says_so(gpu, name):
    gpu(name)
    measured = "measured: the best of a few large products"
    assert peak("cuda:0", torch.bfloat16) == Peak(1.5e14, name, "bfloat16", measured)
    threads = torch.get_num_threads()
    cpu = Peak(1.5e14, f"CPU with {threads} thread{'s' * (threads > 1)}", "float64", measured)
    assert peak(dtype=torch.float64) == utilization.peak_of_ranks(dtype=torch.float64) == cpu


@pytest.fixture(params=["fp32_precision", "allow_tf32"])
def tf32(request):
    """Allowed by the newer of PyTorch's two settings, or by the older one."""
    allowed = {"fp32_precision": ("tf32", "none"), "allow_tf32": (True, False)}[request.param]
    setattr(torch.backends.cuda.matmul, request.param, allowed[0])
    yield
    setattr(torch.backends.cuda.matmul, request.param, allowed[1])


def test_float32_on_a_gpu_is_tf32_where_that_is_allowed(gpu, tf32):
    gpu("NVIDIA H100 80GB HBM3")
    found = peak("cuda")
    assert (found.flops, found.dtype) == (494.5e12, "tf32")
    assert peak("cuda", torch.bfloat16).dtype == "bfloat16"
    assert peak("cpu").dtype == "float32"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_this_machine_s_gpu_is_found_by_its_name_or_measured(dtype):
    found, chip = peak("cuda", dtype), theory.hardware.of_device(torch.cuda.get_device_name())
    assert found.flops > 1e12
    assert found.source == (f"data sheet of {chip.name}" if chip else "measured: the best of a few large products")


# MFU


def test_the_same_run_under_other_conventions():
    used = Utilization(
        theory.models["llama3-8b"], 8192, 1e4, Peak(989e12, "H100", "bfloat16", "data sheet"), "full", flash=False
    )
    for convention in flops.CONVENTIONS:
        given = (used.shape, 8192, 1e4, 1, 989e12)
        assert used.mfu(convention) == pytest.approx(flops.mfu(*given, convention))
        assert used.hfu(convention) == pytest.approx(flops.hfu(*given, "full", convention))
    with pytest.raises(ValueError, match="did you mean 'causal'"):
        used.mfu("casual")
    with pytest.raises(ValueError, match="did you mean 'full'"):
        replace(used, recompute="ful").hfu()
    with pytest.raises(ValueError, match="peak=0"):
        replace(used, peak=replace(used.peak, flops=0)).mfu()


# The command


@pytest.mark.parametrize("asked", [True, False])
def test_the_command_says_how_much_was_used_where_that_is_asked(monkeypatch, capsys, asked):
    gpt = GPTConfig(layers=2, hidden=32, heads=4, seq=32)
    used = Utilization(gpt.shape(), gpt.seq, 2e4, Peak(2e11, "2 × CPU with 1 thread", "float32", "measured: …"))
    given = {}

    def train(*_, **named):
        given.update(named)
        return Result([3.0], 2.5, 0, 1.0, 842_000, 2, used if named["utilization"] else None)

    monkeypatch.setattr(__main__, "_on_own_ranks", lambda ranks, cluster: train)
    __main__.main(["--dp", "2", "--steps", "1", *(["--mfu"] if asked else [])])
    assert given["utilization"] is asked
    lines = [line for line in capsys.readouterr().out.splitlines() if "MFU" in line]
    share = f"MFU {used.mfu():.1%}, HFU {used.hfu():.1%} (causal)"
    peak = "200 GFLOP/s in float32 (2 × CPU with 1 thread, measured: …)"
    assert lines == ([f"  20,000 tokens/s: {share} of {peak}"] if asked else [])
