"""Times one GPU for theory's tables: attention kernels, and steps of a Llama under FSDP2 on a group of one rank.

    python -m benchmarks.one_gpu FOLDER

writes FOLDER/h100_attention.csv and FOLDER/h100_steps.csv (on an H200 h200_…). Times are medians. A step is measured from
outside, and its kernels by the profiler: where the host is too slow to keep the GPU busy, the two differ.
"""

import csv
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from manyranks.measure import timing

CUDA = torch.device("cuda")
BACKENDS = {"flash-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# batch, heads, sequence, head size
ATTENTIONS = [(1, 16, 2048, 64), (4, 16, 2048, 64), (1, 16, 2048, 128), (1, 32, 2048, 128), (4, 32, 2048, 128)]
ATTENTIONS += [(1, 8, 8192, 128), (1, 32, 4096, 128), (1, 32, 8192, 64), *((1, 32, s, 128) for s in (8192, 16384, 32768))]


class Run(NamedTuple):
    """A step: sizes of the model, sequences and their length, torch.compile for each layer and the loss, recomputation."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    microbatch: int
    compiled: bool = False
    recompute: str = "none"


_SMALL, _LARGE = (8, 2048, 16, 16, 5632, 32000), (4, 4096, 32, 8, 14336, 32000)
_SIZES = [(24, 1024, 16, 16, 4096, 50304, 1024, 8), (*_SMALL, 2048, 1), (*_SMALL, 2048, 8), (*_LARGE, 2048, 1)]
_SIZES += [(*_LARGE, 2048, 4), (*_LARGE, 8192, 1), (8, 2048, 32, 8, 8192, 128256, 8192, 1)]
_SIZES += [(2, 8192, 64, 8, 28672, 32000, 4096, 1)]
RUNS = [Run(*sizes, compiled) for compiled in (False, True) for sizes in _SIZES]
RUNS += [Run(*_LARGE, seq, 1, compiled, "full") for compiled in (False, True) for seq in (8192, 32768)]


class Norm(nn.Module):
    """RMSNorm, in 32 bits."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """Attention with rotary positions and grouped heads, and a gated MLP."""

    def __init__(self, run: Run):
        super().__init__()
        self.size = run.hidden // run.heads
        self.groups, keys, width = run.heads // run.kv_heads, run.kv_heads * self.size, run.hidden
        shapes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        shapes |= {"gate": (width, run.ffn), "up": (width, run.ffn), "down": (run.ffn, width)}
        self.linear = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        self.before, self.between = Norm(run.hidden), Norm(run.hidden)

    def forward(self, x, turns):
        own = self.linear
        y = self.before(x)
        q, k, v = (own[name](y).unflatten(-1, (-1, self.size)) for name in "qkv")
        q, k = (_turned(each, turns) for each in (q, k))
        k, v = (each.repeat_interleave(self.groups, 2) for each in (k, v))
        attended = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = x + own["o"](attended.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + own["down"](F.silu(own["gate"](y)) * own["up"](y))


def _turned(x, turns):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, run: Run):
        super().__init__()
        self.embedding, self.head = nn.Embedding(run.vocab, run.hidden), nn.Linear(run.hidden, run.vocab, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(run) for _ in range(run.layers)), Norm(run.hidden)
        size = run.hidden // run.heads
        angles = torch.outer(torch.arange(run.seq), 1e4 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.again = run.recompute == "full"

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, self.turns, use_reentrant=False) if self.again else layer(x, self.turns)
        return self.head(self.norm(x))


def attentions() -> Iterator[dict[str, object]]:
    """Seconds of attention under a causal mask, forward and backward, in bfloat16."""
    for (name, backend), (batch, heads, seq, size) in itertools.product(BACKENDS.items(), ATTENTIONS):
        q, k, v, gradient = (torch.randn(batch, heads, seq, size, device=CUDA, dtype=torch.bfloat16) for _ in range(4))
        inputs = [each.requires_grad_() for each in (q, k, v)]
        attend = functools.partial(F.scaled_dot_product_attention, *inputs, is_causal=True)
        with sdpa_kernel(backend):
            out = attend()
            backward = functools.partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
            sizes = {"kernel": name, "batch": batch, "heads": heads, "seq": seq, "head_size": size}
            yield sizes | {"forward_us": f"{1e6 * kernels(attend):.1f}", "backward_us": f"{1e6 * kernels(backward):.1f}"}


def steps() -> Iterator[dict[str, object]]:
    """Milliseconds and bytes of each of RUNS: forward and backward from outside and in kernels, the optimizer, peaks."""
    for run in RUNS:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        with torch.device(CUDA):
            yield run._asdict() | step(run)
        print(run, flush=True)


def step(run: Run) -> dict[str, object]:
    model, loss = Llama(run), _loss
    if run.compiled:
        model.layers, loss = nn.ModuleList(torch.compile(layer) for layer in model.layers), torch.compile(_loss)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens, labels = (torch.randint(run.vocab, (run.microbatch, run.seq)) for _ in range(2))

    def passes():
        optimizer.zero_grad()
        loss(model(tokens), labels).backward()

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        passes()
        update()
    torch.cuda.reset_peak_memory_stats()
    passes()
    update()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    took = [1e3 * each for each in (outside(passes), kernels(passes), outside(update))]
    named = dict(zip(("passes_ms", "kernels_ms", "update_ms"), (f"{each:.2f}" for each in took), strict=True))
    return named | dict(zip(("allocated", "reserved"), peaks, strict=True))


def _loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def outside(fn: Callable[[], object]) -> float:
    return timing.seconds(fn, repeats=5, warmup=1, device=CUDA).median


def kernels(fn: Callable[[], object], times: int = 5) -> float:
    """Returns the seconds during which kernels run; copies count as kernels."""
    fn()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            fn()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_type.name == "CUDA")
    busy, until = 0.0, 0.0
    for start, end in spans:  # streams beside each other count once
        busy, until = busy + max(0.0, end - max(start, until)), max(end, until)
    return busy / times / 1e6


def main(folder: str) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    chip = torch.cuda.get_device_name().split()[1].lower()
    for name, found in (("attention", attentions), ("steps", steps)):
        with (Path(folder) / f"{chip}_{name}.csv").open("w", newline="") as file:
            writer = None
            for row in found():
                row |= {"source": f"benchmarks/one_gpu.py on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}"}
                writer = writer or csv.DictWriter(file, row)
                writer.writeheader() if file.tell() == 0 else None
                writer.writerow(row)
                file.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
