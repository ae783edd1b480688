"""Explorers show what the answers beside them say. Chapters 09 and 10 have separate tests of their answers."""

import html
import re

import nbformat
import pytest

from manyranks import show
from tests.drawn import words
from tests.notebooks import pages

pytestmark = pytest.mark.usefixtures("undrawn")

# Chapter -> its explorer, numbers of its answers that it doesn't show, and in the answers' order: button, controls that are
# moved after it, and what the explorer shows then.
ANSWERS = {
    "00_start_here": (
        show.hardware,
        "8 times 4 times; 35",
        ("", {}, "in the ring: at 5.6 MB", "in 8 pieces", "half of β: at 700 kB", "one message: 35 µs"),
        ("1,024 ranks", {}, "in the ring: at 717 MB", "in 1,024 pieces"),
        ("today's NVLink", {}, "one message: 4.57 µs", "half of β: at 3.06 MB"),
    ),
    "01_collectives": (
        show.collectives,
        "",
        ("1 MB, 64 ranks", {}, "rounds: 6", "sends: 6.29 MB", "recursive_doubling is the fastest here"),
        ("1 MB, 64 ranks", {"algorithm": "ring"}, "rounds: 126", "sends: 2.06 MB", "1.76 ms, 98%"),
        ("17 GB, 64 ranks", {}, "time: 142 ms", "sends: 33.8 GB", "hierarchical is the fastest here"),
        ("17 GB, 64 ranks", {"algorithm": "ring"}, "time: 678 ms", "sends: 33.8 GB"),
    ),
    "02_data_parallel": (
        show.data_parallel,
        "",
        ("", {}, "step time: 212 ms"),
        ("", {"overlap": False}, "step time: 238 ms"),
        ("1 sequence per GPU", {}, "step time: 56.4 ms"),
        ("1 sequence per GPU", {"overlap": False}, "step time: 79.4 ms"),
        ("", {"dp": 128}, "on 128 GPUs", "25.0% less time"),
        ("1 sequence per GPU", {"dp": 512}, "on 512 GPUs", "31.9% less time"),
        ("Llama 3 8B", {}, "134 of 80 GB"),
        ("Llama 3 8B", {"dp": 1024}, "134 of 80 GB"),
    ),
    "03_zero": (
        show.zero,
        "",
        ("data parallelism", {}, "on 64 GPUs", "states: 119 GB", "activations: 533 MB"),
        ("ZeRO-3", {}, "on 64 GPUs, ZeRO-3", "states: 1.87 GB", "activations: 1.78 GB"),
        ("Llama 70B", {}, "24.8 of 80 GB", "ZeRO-2, parameters: 141 GB"),
        ("Llama 70B", {"stage": "HSDP"}, "77.7 of 80 GB"),
        ("Llama 70B", {"stage": "ZeRO-2"}, "Does not fit"),
        ("a trillion", {}, "activations: 54.8 GB", "states: 15.8 GB"),
        ("32-bit gradients", {}, "44.1 GB"),
        ("", {}, "29.4 GB"),
    ),
    "04_checkpointing": (
        show.checkpointing,
        "C = √(17 · 32) = 23; p = 4, and 4 in flight; 19 of the layers; 48 in all; 361",
        ("", {}, "C = 8 segments", "activations: 10.3 of 32 GB"),
        ("16 segments", {"count": 32}, "activations: 6.71 of 32 GB", "recomputed: 35.2% of FLOPs"),
        ("", {"count": 16}, "activations: 6.85 of 32 GB"),
        ("", {"strategy": "every layer"}, "recomputed: 35.2% of FLOPs", "step time: 1.95 s"),
        ("optimal", {}, "2 + 13", "recomputed: 22.4% of FLOPs", "step time: 1.77 s"),
        ("", {"strategy": "keep everything"}, "recomputed: 3.71% of FLOPs"),
        ("pipeline", {}, "activations: 6.71 of 32 GB", "7 + 1"),
        ("long sequence", {"strategy": "every layer"}, "26.2 of 32 GB", "recomputed: 45.1% of FLOPs"),
        ("long sequence", {"count": 32}, "18.1 of 32 GB", "recomputed: 45.1% of FLOPs"),
        ("long sequence", {"strategy": "optimal"}, "31 of 32 GB", "recomputed: 42.6% of FLOPs"),
        ("long sequence", {}, "keep everything: 100% of the memory, 11.9% of a step's FLOPs", "other activations: 360 GB"),
        ("2022", {}, "1 + 36", "recomputed: 8.22% of FLOPs"),
        ("2022", {"attention": "selective"}, "10.3 of 32 GB", "recomputed: 1.73% of FLOPs"),
    ),
    "05_pipeline": (
        show.pipeline,
        "1F1B; 2p; Llama 3 8B",
        ("GPipe's memory", {"m": 8}, "upper holds: 8", "lower holds: 4"),
        ("GPipe's memory", {"m": 16}, "upper holds: 16", "memory per GPU: 78.4 of 80 GB"),
        ("GPipe's memory", {"m": 17}, "upper holds: 17", "memory per GPU: 81 of 80 GB"),
        ("interleaved", {}, "lower makespan: work 24 + bubble 2.25", "upper makespan: work 24 + bubble 9"),
        ("slow messages", {}, "lower makespan: work 24 + bubble 21", "upper makespan: work 24 + bubble 17"),
        ("zero bubble", {"W": 0.75}, "lower makespan: work 44 + bubble 3.5"),
        ("zero bubble", {"W": 0.5}, "lower makespan: work 40 + bubble 7"),
        ("zero bubble", {"W": 1.5}, "lower makespan: work 56 + bubble 0"),
    ),
    "06_tensor": (
        show.tensor,
        "405B; B200; 50 and 900 GB/s; 64 of 512 GPUs: d · t; eight per node; 72 GPUs; "
        "1/13: (6 · 218 million + 6sh) / (6 · 3,188 million + 6sh)",
        ("", {"tp": 4}, "memory per GPU: 155 of 80 GB"),
        ("", {}, "memory per GPU: 77.3 of 80 GB", "waiting: 11%"),
        ("", {"tp": 16}, "memory per GPU: 39 of 80 GB", "waiting: 23%"),
        ("two nodes", {}, "layer time: 14.6 ms", "waiting: 42%"),
        ("NVL72", {}, "layer time: 10.1 ms", "waiting: 24%"),
        ("small model", {}, "MFU: 31%", "TP 8"),
        ("small model", {"tp": 1}, "memory per GPU: 44.4 of 80 GB", "MFU: 56%", "TP 1"),
    ),
    "07_context": (
        show.context,
        "8,192 per rank; 1.7 ms; R/β: 9,890; 6%",
        ("", {}, "attention takes: 210 ms"),
        ("zigzag", {}, "attention takes: 114 ms"),
        ("two nodes", {}, "s = 131,072", "waits for messages: 3.3%"),
        ("two nodes", {"seq": 65536}, "waits for messages: 42%"),
        ("64 ranks", {}, "s = 32,768", "attention takes: 15.8 ms", "with ring-ulysses: 1.99 ms"),
        ("64 ranks", {"variant": "all-gather"}, "attention takes: 3.47 ms"),
    ),
    "08_expert": (
        show.expert,
        "each of its 8 copies; of its 80 GB; 1F1B; an H800",
        ("8 tensor ranks", {}, "step time: 34.1 s", "64 in 8 nodes"),
        ("cut experts", {}, "98.1 s, EP 16", "TP messages, 65% of the step"),
        ("8 expert ranks", {}, "125 of 80 GB", "32 of 256"),
        ("8 expert ranks", {"ep": 32}, "74.6 of 80 GB"),
        ("", {}, "step time: 19.6 s", "15.6 ms"),
        ("twice the load", {}, "step time: 23.7 s"),
        ("", {"schedule": "1f1b"}, "step time: 30.9 s"),
        ("twice the load", {"schedule": "1f1b"}, "step time: 41.7 s"),
        ("NVL72", {}, "992 µs", "sent between nodes: 0 B"),
    ),
    "09_mfu": (
        show.mfu,
        "128 tokens; 16 sequences; 64 MFU; 131,072 tokens; 8 micro-batches; 32 micro-batches",
        ("few tokens", {}, "MFU, this convention: 2.0%", "56%"),
        ("few tokens", {"microbatch": 64}, "MFU, this convention: 42.1%"),
        ("pipeline", {}, "MFU, this convention: 33.6%", "26%"),
        ("pipeline", {"m": 32}, "MFU, this convention: 42.0%"),
        ("long sequences", {}, "MFU, this convention: 48.5%", "speed per GPU: 3,240 tokens/s"),
        ("long sequences", {"convention": "full"}, "MFU, this convention: 82.2%"),
        ("long sequences", {"convention": "parameters"}, "MFU, this convention: 15.8%"),
    ),
    "11_kernels": (
        show.kernels,
        "L2 answers 1 - 63.5 / 295; 65,536 sums: 256²",
        ("every eighth element", {}, "for 64 bytes, a warp: touches 16 sectors", "moves: 139 GB"),
        ("", {}, "for 64 bytes, a warp: touches 2 sectors", "moves: 17.3 GB", "tiles of 128", "intensity: 63.5 FLOP/byte"),
        ("a tile of 256", {}, "needs more registers than a processor of H100 SXM has: 65,536 registers"),
        ("more stages", {}, "262,144 bytes of shared memory", "needs more shared memory", "232,448 bytes"),
    ),
    "12_failures": (
        show.failures,
        "",
        ("", {}, "5.81 days more"),
        ("a blocking save of 5 min", {}, "16.8 days more"),
        ("64 GPUs", {}, "a save every 3.61 h", "one per 32.6 days", "0.256 days more", "54 days of training"),
        ("131,072 GPUs", {}, "Limit: restarts, 20% of the time"),
    ),
}


@pytest.mark.parametrize("chapter", ANSWERS)
def test_the_explorer_shows_what_the_answers_say(chapter):
    module, _, *claims = ANSWERS[chapter]
    explorer = module.explorer()
    for button, moved, *said in claims:
        (explorer.preset(button) if button else explorer.reset()).set(**moved)
        assert [each for each in said if each not in seen(explorer)] == [], (button, moved)


EXPLORERS = [*(module for module, *_ in ANSWERS.values()), show.mfu, show.nd]


@pytest.mark.parametrize("module", EXPLORERS, ids=lambda module: module.__name__)
def test_no_button_does_what_reset_does(module):
    explorer = module.explorer()
    assert [name for name in explorer.presets if explorer.values | explorer.presets[name] == explorer.values] == []


@pytest.mark.parametrize("chapter", ANSWERS)
def test_no_answer_has_a_number_that_nobody_checks(chapter):
    _, elsewhere, *claims = ANSWERS[chapter]
    known = numbers(elsewhere).union(*(numbers(f"{moved} {said}") for _, moved, *said in claims))
    answers = [answer for _, answer in pages.asked(nbformat.read(pages.NOTEBOOKS / f"{chapter}.ipynb", 4))]
    assert answers
    assert numbers(" ".join(answers)) - known == set()


def seen(explorer: show.Explorer) -> str:
    """Returns what a reader sees: the line above the picture, the tiles, words in the picture, and those under the mouse."""
    tiles = re.sub(r" <small>\(was [^<]*</small>", "", explorer.tiles.value)
    tiles = re.sub(r"<style>.*?</style>|<[^>]*>", " ", re.sub(r"</small>(?=<b>)", ": ", tiles), flags=re.DOTALL)
    says = re.findall(r'data-says="([^"]*)"', explorer.parts.value)
    drawn = [each for axes in explorer.figure.axes for each in words(axes)]
    return re.sub(r" *: +", ": ", re.sub(" +", " ", html.unescape(" | ".join([explorer.status, tiles, *says, *drawn]))))


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))
