"""training.utilisation: the peak of a device, MFU from tokens a second and from counted FLOPs, and the command's line."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyranks import theory
from manyranks.measure import machine
from manyranks.measure.flops import WorkCounter, operators
from manyranks.theory import flops
from manyranks.training import __main__, utilisation
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Result, Trainer
from manyranks.training.utilisation import Peak, Utilisation, peak

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
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67),
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


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA GeForce RTX 4090", torch.bfloat16), ("Tesla V100-SXM2-32GB", torch.bfloat16)]
)
def test_where_no_data_sheet_has_the_number_it_is_measured_and_says_so(gpu, name, dtype):
    gpu(name)
    assert peak("cuda:0", dtype) == Peak(1.5e14, name, "bfloat16", "measured: the best of a few large products")


def test_a_cpu_is_measured_whatever_it_is_called(gpu):
    found = peak(dtype=torch.float64)
    assert (found.flops, found.dtype) == (1.5e14, "float64")
    assert found.device.startswith("CPU with ")
    assert found.source.startswith("measured")


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


def test_without_ranks_the_peak_of_all_is_that_of_this_process(gpu):
    assert utilisation.peak_of_ranks() == peak()


# MFU

GPT = GPTConfig(layers=2, hidden=32, heads=4, seq=32)
MODELS = {
    "dense": GPT,
    "grouped": replace(GPT, kv_heads=2),
    "gpt2": replace(GPT, style="gpt2"),
    "experts": replace(GPT, experts=4, shared_experts=1),
    "untied": replace(GPT, tied=False),
    "dropout": replace(GPT, dropout=0.1),
}
PEAK = Peak(1e9, "made up", "float32", "made up")


def of_one_step_a_second(gpt: GPTConfig, training: TrainingConfig, **how) -> Utilisation:
    return Utilisation(gpt.shape(), gpt.seq, training.batch * gpt.seq, PEAK, training.recompute, **how)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_hfu_from_tokens_a_second_is_that_from_counted_flops(model, recompute):
    gpt, training = MODELS[model], TrainingConfig(steps=1, batch=3, recompute=recompute)
    with WorkCounter() as work:
        Trainer(gpt, training).run()
    used = of_one_step_a_second(gpt, training, flash=not gpt.dropout)
    assert used.hfu("full") == pytest.approx(work.flops / PEAK.flops, rel=0.005)
    assert used.mfu() < used.hfu() or (gpt.dropout and recompute == "none")


@pytest.mark.parametrize("model", MODELS)
def test_mfu_from_tokens_a_second_is_that_from_counted_flops_where_nothing_is_computed_twice(model):
    gpt, training = MODELS[model], TrainingConfig(steps=1, batch=3)
    with WorkCounter() as work, sdpa_kernel(SDPBackend.MATH):
        Trainer(gpt, training).run()
    assert of_one_step_a_second(gpt, training).mfu("full") == pytest.approx(work.flops / PEAK.flops, rel=0.005)


def test_the_same_run_under_other_conventions():
    used = Utilisation(
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


# One operator after the other


def test_operators_are_listed_in_their_order_with_shapes_flops_and_bytes():
    x, linear = torch.ones(3, 4), torch.nn.Linear(4, 5)
    found = operators(lambda: linear(x).relu_().sum())
    assert [(each.name, each.flops) for each in found] == [("aten::addmm", 2 * 3 * 4 * 5), ("aten::relu_", 0), ("aten::sum", 0)]
    assert found[0].shapes == ((5,), (3, 4), (4, 5))
    assert found[0].bytes == 4 * (5 + 12 + 20 + 15)
    with WorkCounter() as work:
        linear(x).relu_().sum()
    assert (sum(each.flops for each in found), sum(each.bytes for each in found)) == (work.flops, work.bytes)


def test_a_composition_stands_for_its_parts():
    x, linear = torch.ones(3, 4), torch.nn.Linear(4, 5, bias=False)
    with torch.inference_mode():
        found = operators(linear, x)
    assert [(each.name, each.flops, each.bytes) for each in found] == [("aten::linear", 2 * 3 * 4 * 5, 4 * (12 + 20 + 15))]


# The command


@pytest.mark.parametrize("asked", [True, False])
def test_the_command_says_how_much_was_used_where_that_is_asked(monkeypatch, capsys, asked):
    used = Utilisation(GPT.shape(), GPT.seq, 2e4, Peak(2e11, "2 × CPU with 1 thread", "float32", "measured: …"))
    given = []

    def train(*arguments):
        given.extend(arguments)
        return Result([3.0], 2.5, 0, 1.0, 842_000, 2, used if arguments[6] else None)

    monkeypatch.setattr(__main__, "_on_own_ranks", lambda ranks, cluster: train)
    __main__.main(["--dp", "2", "--steps", "1", *(["--mfu"] if asked else [])])
    assert given[6] is asked
    lines = [line for line in capsys.readouterr().out.splitlines() if "MFU" in line]
    share = f"MFU {used.mfu():.1%}, HFU {used.hfu():.1%} (causal)"
    peak = "200 GFLOP/s in float32 (2 × CPU with 1 thread, measured: …)"
    assert lines == ([f"  20,000 tokens/s: {share} of {peak}"] if asked else [])
