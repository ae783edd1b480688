"""theory.calibrate: a cluster's constants come back from what it would measure, and survive a file."""

import json
from dataclasses import replace

import pytest

from manyranks.theory import Plan, calibration, cluster, clusters, collectives, kernels, layer, models, network, step
from manyranks.theory.calibration import Measurements

H100, SIZES = clusters["h100-dgx"], [2**k for k in range(12, 30, 3)]


def measured(cluster, ranks=8, **changes):
    """The rates that a node of this cluster would measure, by the model."""
    chip, link = cluster.accelerator, network.reached(cluster.route(ranks).ring, kernels.DEFAULT)
    times = [collectives.seconds("all_reduce", size, ranks, link) for size in SIZES]
    given = {
        "products": [0.4 * chip.flops, chip.matmul_fraction * chip.flops],
        "copy": kernels.BANDWIDTH * chip.memory_bandwidth,
    }
    return Measurements(**given | {"ranks": ranks, "sizes": SIZES, "seconds": times} | changes)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_cluster_that_measures_itself_is_as_before(ranks):
    found = calibration.calibrate(measured(H100, ranks), H100)
    assert found.name == "h100-dgx, calibrated"
    assert found.accelerator.matmul_fraction == pytest.approx(H100.accelerator.matmul_fraction)
    assert found.accelerator.memory_bandwidth == pytest.approx(H100.accelerator.memory_bandwidth)
    assert found.levels[0].link.latency == pytest.approx(H100.levels[0].link.latency)
    assert found.levels[0].link.bandwidth == pytest.approx(H100.levels[0].link.bandwidth)
    assert found.levels[1:] == H100.levels[1:]


def test_a_slower_machine_is_foretold_to_be_slower():
    chip = H100.accelerator
    slow = replace(H100, accelerator=replace(chip, matmul_fraction=0.5 * chip.matmul_fraction, memory_bandwidth=1e12))
    slow = replace(slow, name="slow").with_link("node", latency=20e-6, bandwidth=100e9)
    plan = Plan(dp=2, tp=4, seq=4096, microbatch=2)
    times = [step.estimate(models["llama3-8b"], plan, each).seconds for each in (H100, slow)]
    found = step.estimate(models["llama3-8b"], plan, calibration.calibrate(measured(slow), H100)).seconds
    assert times[0] < times[1] == pytest.approx(found)


def test_a_cluster_survives_its_file(tmp_path):
    for name in ("h100-dgx", "llama3-cluster", "tpu-v4", "laptop"):
        path = tmp_path / f"{name}.json"
        cluster.save(clusters[name].of(8), path)
        assert cluster.load(path) == clusters[str(path)] == clusters[name].of(8)


@pytest.mark.parametrize("change", [lambda d: d.pop("levels"), lambda d: d.update(format="2"), lambda d: d.update(torus=3)])
def test_another_file_is_refused_with_what_is_wrong(change, tmp_path):
    path = tmp_path / "mine.json"
    cluster.save(H100, path)
    data = json.loads(path.read_text())
    change(data)
    for text in (json.dumps(data), "[]", "{", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"mine.json: not a cluster file that calibrate wrote \("):
            clusters[str(path)]
    with pytest.raises(ValueError, match=r"none.json: not a cluster file"):
        clusters[str(tmp_path / "none.json")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"products": []}, "give one product or more"),
        ({"copy": 0.0}, "rates above 0"),
        ({"products": 1e12}, "give one product or more"),
        ({"products": [700.0]}, r"products of 700 FLOP/s on H100 SXM, which does 9.89e\+14: give FLOP/s"),
        ({"products": [1e18]}, r"products of 1e\+18 FLOP/s on H100 SXM"),
        ({"seconds": ["1 ms"] * len(SIZES)}, "seconds=.* give numbers"),
        ({"ranks": 1}, "2 ranks or more"),
        ({"seconds": [1.0]}, "two different sizes or more"),
        ({"seconds": [0.0] * len(SIZES)}, "must be above 0"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        calibration.calibrate(measured(H100, **changes), H100)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "97e9", None, True])
@pytest.mark.parametrize("name", ["flops", "memory_bandwidth", "matmul_fraction", "specials"])
def test_a_file_with_a_chip_that_cannot_be_is_refused(name, value, tmp_path):
    path = tmp_path / "mine.json"
    cluster.save(H100, path)
    data = json.loads(path.read_text())
    data["accelerator"][name] = value
    path.write_text(json.dumps(data))
    if (name, value) == ("specials", 0):  # unknown
        assert clusters[str(path)].accelerator.specials == 0
    else:
        with pytest.raises(ValueError, match=rf"mine.json: .*{name}={value!r} of accelerator 'H100 SXM': give a number, "):
            clusters[str(path)]


def test_a_cpu_multiplies_32_bit_numbers_at_its_measured_rate():
    cpu = cluster.laptop(flops=97e9)
    assert [kernels.peak(cpu.accelerator, rate) for rate in ("bf16", "fp32")] == [97e9, 97e9]
    assert kernels.peak(H100.accelerator, "fp32") == H100.accelerator.flops / 2


@pytest.mark.parametrize("name", ["a100-dgx", "v100-dgx", "laptop"])
def test_8_bit_products_need_a_chip_that_has_them(name):
    chip = clusters[name].accelerator.name
    with pytest.raises(ValueError, match=f"^precision='fp8' on {chip}, which has no products in 8 bits: say precision='bf16'"):
        step.estimate(models["llama3-8b"], Plan(precision="fp8"), clusters[name])


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_scales_of_blocks_need_a_chip_whose_products_read_them(precision):
    shape, plan = models["llama3-8b"], Plan(precision=precision, zero=3, dp=8)
    said = f"^precision='{precision}' on H100 SXM, whose products read no scales of blocks: say 'fp8'"
    with pytest.raises(ValueError, match=said):
        step.estimate(shape, plan, clusters["h100-dgx"])
    with pytest.raises(ValueError, match=f"^precision='{precision}' on A100-80GB SXM, which has no products in 8 bits"):
        step.estimate(shape, plan, clusters["a100-dgx"])
    assert step.estimate(shape, plan, clusters["b300"]).seconds > 0


def test_fewer_bits_are_faster_where_the_chip_is_and_attention_keeps_16():
    shape, chip = models["llama3-70b"], clusters["gb300-nvl72"]
    plans = {name: Plan(dp=64, zero=3, seq=8192, precision=name) for name in ("bf16-fp32-gradients", "mxfp8", "nvfp4")}
    seconds = [step.estimate(shape, plan, chip).seconds for plan in plans.values()]
    assert seconds == sorted(seconds, reverse=True)
    for name, plan in plans.items():
        rates = {kernel.part: kernel.rate for kernel in layer.forward(shape, plan, False) if kernel.flops}
        assert rates["core"] == "bf16"
        assert rates["mlp"] == plan.recipe.rate == {"mxfp8": "fp8", "nvfp4": "fp4"}.get(name, "bf16")
    assert [plans[name].recipe.matmul * 32 for name in ("mxfp8", "nvfp4")] == [33, 18]  # bytes of 32 numbers and their scales


def test_more_ranks_than_a_node_has_are_refused():
    with pytest.raises(ValueError, match="ranks=16: a node of h100-dgx has 8; measure inside one"):
        calibration.calibrate(replace(measured(H100), ranks=16), H100)
