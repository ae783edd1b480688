"""Links and accelerators: T(n), its half-bandwidth point, the fit, bisections, and the tables they come from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import hardware
from manyranks.theory.hardware import Link, fat_tree_bisection, fit_link, torus_bisection

LINK = Link("test", 10e-6, 1e9)


def test_the_time_of_a_message_is_latency_plus_size_over_bandwidth():
    assert LINK.seconds(0) == 10e-6
    assert LINK.seconds(1_000_000) == pytest.approx(1.01e-3)
    with pytest.raises(ValueError, match="n=-1"):
        LINK.seconds(-1)


def test_half_of_the_bandwidth_is_reached_at_alpha_times_beta():
    assert LINK.half_bandwidth_bytes == pytest.approx(10_000)
    assert LINK.seconds(10_000) == pytest.approx(2 * LINK.latency)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_the_fit_finds_the_link_that_made_the_times(latency, bandwidth):
    sizes = [4**k for k in range(15)]
    made = Link("made", latency, bandwidth)
    fitted = fit_link("fitted", sizes, [made.seconds(n) for n in sizes])
    for n in sizes:
        assert fitted.seconds(n) == pytest.approx(made.seconds(n), rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1, 1], [1e-3, 1e-3], "two different sizes"),
        ([1, 2], [1e-3], "2 sizes, 2 of them different, and 1 times"),
        ([1, 2], [0.0, 1e-3], "above 0"),
        ([1, 1000], [2e-3, 1e-3], "do not grow"),
    ],
)
def test_times_that_fit_no_link_are_refused(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        fit_link("none", sizes, seconds)


def test_a_torus_is_cut_twice_and_a_fat_tree_in_halves():
    assert torus_bisection((4, 4), 1.0) == 8  # two cuts of a 4 × 4 torus, 4 links each
    assert torus_bisection((16, 16, 16), 45e9) == 512 * 45e9
    assert fat_tree_bisection(4096, 50e9) == 2048 * 50e9


def test_links_are_quoted_one_way():
    assert theory.links["NVLink, H100"].bandwidth == 450e9
    assert theory.links["NVLink, A100"].bandwidth == 300e9
    assert theory.links["InfiniBand 400G"].bandwidth == 50e9


def test_accelerators_have_the_published_numbers():
    h100 = theory.accelerators["H100 SXM"]
    assert (h100.flops, h100.memory, h100.memory_bandwidth) == (989e12, 80e9, 3.35e12)
    assert all(chip.source for chip in theory.accelerators.values())


def test_every_published_row_names_its_source():
    for name in ("accelerators", "llama3_architecture", "llama3_table4"):
        assert all(row["source"] for row in theory.published.rows(name))
    with pytest.raises(ValueError, match="published table 'gpt5': choose from accelerators, "):
        theory.published.rows("gpt5")


# Devices and their peaks -------------------------------------------------------------------------------------------------

DEVICES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA A100-SXM4-80GB": "A100-80GB SXM",
    "NVIDIA A100-SXM4-40GB": "A100-40GB SXM",
    "A100-SXM4-40GB": "A100-40GB SXM",
    "NVIDIA A100-PCIE-40GB": "A100-40GB PCIe",
    "NVIDIA A100 80GB PCIe": "A100-80GB PCIe",
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H20": "H20",
    "NVIDIA B200": "B200 (HGX)",
    "NVIDIA GB200": "GB200 (per GPU)",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300 (per GPU)",
    "AMD Instinct MI300X": "MI300X",
}


@pytest.mark.parametrize("name", DEVICES)
def test_an_accelerator_is_found_by_the_name_that_its_driver_gives_it(name):
    assert hardware.of_device(name) is theory.accelerators[DEVICES[name]]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H800 PCIe",
        "cpu",
        "",
    ],
)
def test_an_unknown_device_is_not_guessed(name):
    assert hardware.of_device(name) is None


def test_peaks_are_those_of_the_data_sheets_without_sparsity():
    def tflops(name):
        return [(flops := hardware.peak(theory.accelerators[name], dtype)) and flops / 1e12 for dtype in hardware.DTYPES]

    assert tflops("A100-80GB SXM") == [312, 312, None, None, 156, 19.5, 19.5]
    assert tflops("H100 SXM") == [989, 989, 1978, None, 494.5, 67, 67]
    assert tflops("B200 (HGX)") == [2250, 2250, 4500, 9000, 1100, 75, 37]
    assert tflops("V100 SXM2") == [None, 125, None, None, None, 15.7, 7.8]
    assert tflops("TPU v5e") == [197, None, None, None, None, None, None]
    assert tflops("B300") == [2250, 2250, 4500, 13500, 1100, 75, 1.25]
    assert tflops("GB300 (per GPU)") == [2500, 2500, 5000, 15000, 1250, 80, 1.39]
    assert tflops("Rubin (per GPU)") == [4000, 4000, 17500, 35000, 2000, 130, 33]
    assert tflops("MI300X")[3] is None


def test_a_rack_s_figures_are_those_printed_for_all_of_its_chips():
    """Both ways, as vendors print them: GB300 and Vera Rubin NVL72, petabytes and petaflops."""
    printed = {"gb300-nvl72": (20, 576, 130, 2 * 180, 360), "vera-rubin-nvl72": (20.7, 1580, 260, 288, 1260)}
    for name, (memory, bandwidth, nvlink, bf16, fp8) in printed.items():
        chip, half = theory.clusters[name].accelerator, 2 if name == "gb300-nvl72" else 1  # sparse 16 bits, dense 8 bits
        found = (chip.memory, chip.memory_bandwidth, 2 * chip.scale_up, half * chip.flops / 1e3, chip.flops_fp8 / 1e3)
        assert [72 * each / 1e12 for each in found] == pytest.approx((memory, bandwidth, nvlink, bf16, fp8), rel=0.01), name


def test_the_way_to_the_host_is_pcie_or_a_share_of_the_chip_to_chip_link():
    assert theory.clusters["b300"].host == theory.clusters["h100"].host == 64e9
    for name, per_cpu in {"gb200-nvl72": 0.9e12, "gb300-nvl72": 0.9e12, "vera-rubin-nvl72": 1.8e12}.items():
        assert theory.clusters[name].host == per_cpu / 2 / 2, name  # one way, of two chips


def test_block_scales_come_with_4_bits():
    assert [name for name, chip in theory.accelerators.items() if chip.scaled] == [
        *("B200 (HGX)", "GB200 (per GPU)", "B300", "GB300 (per GPU)", "Rubin (per GPU)")
    ]


def test_a_chip_has_half_of_its_bfloat16_peak_in_tf32():
    for row in theory.published.rows("peaks"):
        if row["dtype"] == "tf32":
            half = theory.accelerators[row["device"]].flops / 2e12
            assert float(row["tflops"]) == pytest.approx(half, rel=0.03), row  # HGX B200: 2.2 PFLOP/s are printed for 2.25
        assert row["dtype"] in hardware.DTYPES
        assert row["source"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hardware.of_device(0), "name=0: give the text"),
        (lambda: hardware.peak("H20", "bfloat16"), "accelerator='H20': give an Accelerator, as theory.accelerators"),
        (lambda: hardware.peak(theory.accelerators["H20"], "bf16"), "dtype='bf16': did you mean 'float16'|'bfloat16'"),
    ],
)
def test_devices_and_dtypes_that_cannot_be_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
