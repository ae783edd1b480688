"""Stacks: what a framework does with a plan. They describe structure, with sources; one number is fitted, _MEGATRON_HOST.

tables/stacks.csv lists them: the families below whose fields they have, and their own.
"""

from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import tables
from manyranks.theory.names import Named


class Attention(NamedTuple):
    """A fused attention kernel written for the A100: the share of that chip's peak that its products reach between the
    exponentials. Later chips run its instructions at a part of their peak (Accelerator.ampere).

    block: rows and columns of a tile; the tiles on the diagonal of a causal mask are computed whole. Rows of tiles are dealt to
    the processors from the shortest to the longest, so that the last one to start may be the longest.
    """

    forward: float
    backward: float
    block: int
    source: str


# With heads of 128, a forward takes 512 FLOPs and one exponential per score, a backward 1,280 and two. The shares of an A100's
# 312 TFLOP/s are the ones the papers print, less the time of the exponentials.
_FLASH = "arXiv 2307.08691, sections 1 and 4.1: of the peak, {} forward and {} backward on A100"
ATTENTION = Named(
    "attention",
    {
        "flash-1": Attention(0.445, 0.318, 128, _FLASH.format("30 to 50 %", "25 to 35 %")),
        "flash-2": Attention(0.892, 0.721, 128, _FLASH.format("up to 73 %", "up to 63 %")),
    },
)


class Moved(NamedTuple):
    """Bytes that one element passes between chip and memory in the forward of what is not a product, in 16 bits."""

    norm: float = 4
    rotary: float = 4
    gated: float = 6  # the activation of a gated MLP and its product
    softmax: float = 4
    quantized: float = 3  # what linear layers read in 8 bits: 2 bytes read, 1 written


class Keeps(NamedTuple):
    """Bytes per element that separate operators keep for backward beyond one kernel's: memory.layer_activations."""

    norm: float = 0
    gated: float = 0
    softmax: float = 0  # where scores are stored


class Copies(NamedTuple):
    """Bytes per parameter that pass a chip's memory on top of computing's, for each gather and each reduction: the copies
    out of and into their buffers, and the ring's traffic, for it writes what arrives and reads it to send it on.
    """

    gathered: float = 0
    reduced: float = 0


_FUSED, _NO_MORE, _NO_COPIES = Moved(), Keeps(), Copies()


# Seconds, a round number. With PyTorch 2.13 on one core a layer of a GPT with next to nothing to compute takes 440 µs forward
# and 515 backward, for 12 and 24 of theory.layer's kernels. A GPU's host has a core that is up to twice as fast.
_HOST = 20e-6
# 80 µs, fitted on all runs of Megatron, and the same whichever table is left out (benchmarks.held_out): launching a kernel
# with modules, autograd functions, random states and views. Qwen3-30B on H100s agrees, 9.6 ms per layer for 121 launches, but
# by a number that was chosen on it: layer.OPERATORS.
_MEGATRON_HOST = 80e-6


@dataclass(frozen=True)
class Stack:
    """A framework, by what it does that a plan doesn't say.

    attention: a key of ATTENTION, or "own": as fast as a product of the chip's own generation, with exponentials meanwhile, and
        no processor waiting for another
    moved: see Moved
    keeps: see Keeps
    every_other: selective recomputation runs every other product again, and all that is no product, instead of what is cheap
    prefetch: backward gathers the next unit's parameters while it computes this one's
    data_only: it has no tensor, pipeline, context or expert parallelism
    collective_share: share of the processors that a collective takes from computing while the two overlap
    copies: see Copies
    optimizer: bytes that a parameter's update passes between chip and memory, with a tensor in 32 bits besides the states; 0:
        one fused kernel
    fp32_shards: parameters, gradients and moments that are sharded, or on one rank, are in 32 bits; a step's first backward
        makes the gradients
    logits: bytes of one at the most; a fused loss keeps it in 32 bits, PyTorch's also its softmax and their gradient, a
        compiled one only logits and gradient, in 16
    cut_logits: the same where tp cuts the vocabulary, if that is more
    gathers_logits: all tensor-parallel ranks then gather them, and have all
    reserved: what the allocator holds on top of what is used, as a share of that; without fp32_shards states lie in flat
        buffers for good, and have none
    reduce_once: a pipeline's ranks sum whole gradients over a step, and reduce them at its end
    host: seconds that the CPU takes to launch a kernel; a pass takes no less
    hides_experts: one micro-batch's tokens travel to experts while another computes, "interleaved" where a pipeline's stages
        are, or "always"
    chunks: tensor-parallel products and their gathers and sums are cut in as many parts as ranks, which overlap
    pads: rows of 8-bit experts are copied to be padded, and back
    sends_8_bits: tokens travel to experts as 8-bit products read them
    repeats_keys: keys and values have a copy for each query head before attention, and travel so between context-parallel ranks
    schedules: what it ships
    source: what runs so
    """

    name: str
    attention: str = "own"
    moved: Moved = _FUSED
    keeps: Keeps = _NO_MORE
    every_other: bool = False
    prefetch: bool = True
    data_only: bool = False
    collective_share: float = 0.0
    copies: Copies = _NO_COPIES
    optimizer: float = 0.0
    fp32_shards: bool = False
    logits: float = 4.0
    cut_logits: float = 0.0
    gathers_logits: bool = False
    reserved: float = 0.0
    reduce_once: bool = False
    host: float = _HOST
    hides_experts: str = ""
    chunks: bool = False
    pads: bool = False
    sends_8_bits: bool = False
    repeats_keys: bool = False
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    source: str = ""


# torch.optim's multi-tensor AdamW: 21 reads and writes of a 32-bit tensor, and 3 for the gradients' norm and their clipping.
_FOREACH = 96.0
_NCCL = 16 / 132  # one processor a channel, 16 channels, of an H100's 132
_FSDP2 = Copies(4 + 2 * 2, 6 + 3 * 4)  # parameters in 16 bits, gradients copied from 16 bits to 32, in which they are summed
_FSDP1 = Copies(0 + 2 * 2, 4 + 3 * 2)  # all in 16 bits; parameters are views of what is gathered
# Operator by operator: RMSNorm and rotary positions in 32 bits. Backward reads a norm's input in 32 bits and, divided by its
# root mean square, in 16; and of a gated MLP also what the function makes.
_EAGER = {"moved": Moved(norm=36, rotary=20, gated=10), "keeps": Keeps(norm=4, gated=2)}
# One H100 with memory to spare held 10 to 27 % more than it used, 17 % in the mean: tables/h100_steps.csv.
_RESERVED = 0.17
# A round number: what llm-foundry ran had less left.
_PYTORCH = {"collective_share": _NCCL, "optimizer": _FOREACH, "fp32_shards": True, "reserved": 0.05}
# torch.distributed.tensor.parallel.loss, backward: log-probabilities, zeros, their sum with the exponential, and its product.
_LOSS = {"logits": 12.0, "cut_logits": 16.0}
_FULLY_SHARD = _PYTORCH | _LOSS | {"copies": _FSDP2, "reduce_once": True, "reserved": _RESERVED}
_FULLY_SHARD |= {"schedules": ("1f1b", "interleaved", "zb-h1", "zb-v")}  # torch.distributed.pipelining
# torchtitan/models/llama3/model/model.py: repeat_kv, then scaled_dot_product_attention, which the ring of PyTorch replaces.
_TITAN = {"attention": "flash-2", "every_other": True, "repeats_keys": True} | _FULLY_SHARD
# Backward reads logits in 16 bits and writes their gradient, and nothing else is as large: Dao-AILab/quack issue 48.
_COMPILED_LOSS = {"logits": 4.0}
# Megatron-Core's interleaved 1F1B with --overlap-moe-expert-parallel-comm, and --moe-router-padding-for-quantization.
_MEGATRON = {"host": _MEGATRON_HOST, "hides_experts": "interleaved", "pads": True}
# Aleph-Alpha/scaling, transformer/model: lm_head.py gathers logits, and losses/cross_entropy.py is PyTorch's. Scores are copied
# to 32 bits for the softmax, and its result back: Megatron-LM, FusedScaleMaskSoftmax.forward_torch_softmax.
_TORCH_MEGATRON = {"attention": "flash-2", "host": _MEGATRON_HOST, "logits": 14.0, "gathers_logits": True}
_TORCH_MEGATRON |= {"reserved": _RESERVED}
_ENGINE = {"moved": Moved(quantized=4), "chunks": True}
_FAMILIES = {"megatron": _MEGATRON, "engine": _ENGINE, "torch-megatron": _TORCH_MEGATRON, "eager": _EAGER, "titan": _TITAN}
_FAMILIES |= {"compiled-loss": _COMPILED_LOSS, "fully-shard": _FULLY_SHARD, "pytorch": _PYTORCH, "fsdp1": {"copies": _FSDP1}}
_FAMILIES |= {"dualpipe": {"schedules": ("1f1b", "dualpipe")}}


def _stack(row: dict[str, str]) -> Stack:
    """Reads a stack: its families' fields, and its own; "moved.norm" is the norm of Moved."""
    given, parts = {}, {"moved": {}, "keeps": {}}
    for family in row["families"].split():
        given |= _FAMILIES[family]
    for name, text in tables.pairs(row["fields"]).items():
        value, (part, _, field) = float(text) if "." in text else tables.value(text), name.partition(".")
        (parts[part] if field else given)[field or part] = value
    given |= {part: kind(**parts[part]) for part, kind in (("moved", Moved), ("keeps", Keeps)) if parts[part]}
    return Stack(row["name"], source=row["source"], **given)


STACKS = Named("stack", {row["name"]: _stack(row) for row in tables.rows("stacks")})
