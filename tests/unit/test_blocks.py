"""A block's demands on a GPU: closed formulas against plain enumeration, and figures of NVIDIA's own documents."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import theory
from manyranks.measure.kernel import bank_conflicts
from manyranks.theory import blocks
from manyranks.theory.blocks import Attention

H100, A100, V100 = (theory.accelerators[name] for name in ("H100 SXM", "A100-80GB SXM", "V100 SXM2"))


@given(stride=st.integers(0, 70), lanes=st.integers(1, 32), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_sectors_are_those_that_enumerated_lanes_touch(stride, lanes, itemsize):
    assert blocks.sectors(stride, lanes, itemsize) == len({lane * stride * itemsize // 32 for lane in range(lanes)})


@given(stride=st.integers(0, 100))
def test_bank_conflicts_are_those_of_enumerated_words(stride):
    assert blocks.bank_conflicts(stride) == bank_conflicts([4 * lane * stride for lane in range(32)])


def test_a_product_in_one_tile_reads_each_matrix_once():
    assert blocks.product_bytes(100, 30, 70, 128) == 2 * (100 * 30 + 30 * 70 + 100 * 70)
    assert blocks.product_bytes(256, 512, 256, 128, 64) == 2 * (256 * 512 * 4 + 512 * 256 * 2 + 256 * 256)


def test_attention_in_one_tile_moves_what_no_cache_can_save_and_its_statistics():
    one = Attention(2, 4, 4, 96, 96, 32, queries=128, keys=128)
    once = blocks.attention_bytes_once(2 * 96, 4, 4, 32, 32)
    assert blocks.attention_bytes(one) == once + blocks.LSE * 2 * 4 * 96
    layer = theory.layer.core(theory.models["llama3-8b"], theory.Plan(seq=4096), 128, 128)[0]
    assert layer.bytes == blocks.attention_bytes_once(4096, 32, 8, 128, 128)


def test_flash_attention_moves_an_order_less_than_scores_in_memory():
    """arXiv 2205.14135, figure 2: 40.3 GB for standard attention, 4.4 for theirs; sizes 1024 × 64, 16 heads, batch 64."""
    sizes = Attention(64, 16, 16, 1024, 1024, 64, queries=128, keys=128)
    both = blocks.attention_bytes(sizes) + blocks.attention_backward_bytes(sizes)
    assert 3e9 < both < 8e9
    assert blocks.standard_attention_bytes(sizes) > 8e9  # forward only
    one, scores = Attention(1, 1, 1, 256, 256, 64), 256 * 256
    assert blocks.standard_attention_bytes(one) == 2 * (7 * 256 * 64 + 4 * scores)  # in tiles of 128: Q, K and V twice, O


def test_a_causal_mask_halves_what_long_sequences_read():
    full, causal = (Attention(1, 1, 1, 8192, 8192, 128, 128, 128, causal) for causal in (False, True))
    assert causal.visits / full.visits == pytest.approx(0.5, abs=0.01)
    assert causal.returns / full.returns == pytest.approx(0.5, abs=0.01)


def test_occupancy():
    assert blocks.occupancy(H100, 8, 32) == (8, 1.0, "warps")
    assert blocks.occupancy(H100, 8, 255) == (1, 0.125, "registers")
    assert blocks.occupancy(H100, 4, 32, 48 * 1024) == (4, 0.25, "shared memory")
    assert blocks.occupancy(V100, 4, 32, 48 * 1024).blocks == 2  # nothing is reserved
    assert blocks.occupancy(A100, 1, 16).limit == "blocks"
    assert blocks.occupancy(H100, 1, 96).blocks == 20  # 21 warps have registers enough, and come in fours


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: blocks.sectors(-1), "stride=-1"),
        (lambda: blocks.sectors(1, itemsize=3), "itemsize=3"),
        (lambda: blocks.sectors(1, lanes=0), "lanes=0"),
        (lambda: blocks.occupancy(H100, 8, 300), "at most 255"),
        (lambda: blocks.occupancy(H100, 8, 32, 300_000), "needs more shared memory than a processor of H100 SXM"),
        (lambda: blocks.occupancy(H100, 32, 200), "needs more registers"),
        (lambda: blocks.processor(theory.accelerators["TPU v4"]), "unknown processors"),
        (lambda: blocks.product_bytes(0, 1, 1, 16), "m=0"),
        (lambda: blocks.waves(0, 132), "blocks=0"),
        (lambda: blocks.bank_conflicts(-1), "stride=-1"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_waves_leave_the_last_one_in_part():
    assert blocks.waves(132, H100.processors) == 1
    assert math.ceil(blocks.waves(133, H100.processors)) == 2
    assert blocks.waves(264, H100.processors, at_once=2) == 1


def test_every_gpu_whose_processors_are_counted_has_its_limits():
    chips = [chip for chip in theory.accelerators.values() if chip.processors]
    assert chips
    assert all(blocks.processor(chip).source for chip in chips)
