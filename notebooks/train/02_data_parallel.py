"""Trains a small Llama on the source code of Python's library: data parallelism.

torchrun --nproc-per-node 4 02_data_parallel.py --steps 50
"""

import argparse
import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Config:
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 176
    seq: int = 64
    batch: int = 12  # sequences per step
    steps: int = 20
    rate: float = 3e-3
    dtype: str = "float32"
    bucket: int = 100_000  # numbers in an all-reduce, at most


# The model: bytes in, a logit for each of the 256 next bytes out.


class Norm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (len(self.weight),), self.weight, eps=1e-5)


def rotated(x: Tensor) -> Tensor:
    """Turns each pair of a head's numbers by its token's position."""
    seq, size = x.shape[-2:]
    like = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    rates = 10_000 ** (-torch.arange(0, size, 2, **like) / size)
    angles = torch.arange(seq, **like)[:, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        h, self.size = config.hidden, config.hidden // config.heads
        self.query = nn.Linear(h, h, bias=False)
        self.key = nn.Linear(h, config.kv_heads * self.size, bias=False)
        self.value = nn.Linear(h, config.kv_heads * self.size, bias=False)
        self.output = nn.Linear(h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        )
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.attention = Norm(config.hidden), Attention(config)
        self.norm2, self.mlp = Norm(config.hidden), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm = Norm(config.hidden)
        self.projection = nn.Linear(config.hidden, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


def build(config: Config) -> nn.Sequential:
    """The same weights in every process: embedding, layers, head."""
    torch.set_default_dtype(getattr(torch, config.dtype))
    torch.manual_seed(0)
    layers = [Layer(config) for _ in range(config.layers)]
    model = nn.Sequential(nn.Embedding(256, config.hidden), *layers, Head(config))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return model


# Data: a batch is sequences of bytes, each from a random place.


def corpus() -> Tensor:
    text = Path(argparse.__file__).read_bytes() + Path(dataclasses.__file__).read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(step: int, text: Tensor, config: Config) -> Tensor:
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - config.seq - 1, (config.batch,), generator=random)
    return torch.stack([text[start : start + config.seq + 1] for start in starts])


def share_of(tokens: Tensor) -> Tensor:
    """This rank's sequences; some ranks may have one more than others."""
    if len(tokens) < (n := dist.get_world_size()):
        raise ValueError(
            f"batch={len(tokens)} on {n} ranks: give each at least one sequence"
        )
    return tokens.tensor_split(n)[dist.get_rank()]


# Data parallelism: gradients are summed over the ranks, bucket by bucket, during backward.


class Buckets:
    def __init__(self, model: nn.Module, most: int):
        self.buckets: list[list[nn.Parameter]] = [[]]
        for p in reversed(list(model.parameters())):  # backward's order
            if sum(q.numel() for q in self.buckets[-1]) + p.numel() > most:
                self.buckets.append([])
            self.buckets[-1].append(p)
        self.buckets = [bucket for bucket in self.buckets if bucket]
        self.missing = [set(bucket) for bucket in self.buckets]
        for k, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, k=k: self.ready(k, p))
        self.sent = []

    def ready(self, k: int, p: nn.Parameter) -> None:
        self.missing[k].remove(p)
        if not self.missing[k]:
            row = torch.cat([p.grad.flatten() for p in self.buckets[k]])
            self.sent.append((k, row, dist.all_reduce(row, async_op=True)))

    def finish(self) -> None:
        """Waits for the sums, and hands them out."""
        for k, row, work in self.sent:
            work.wait()
            parts = row.split([p.numel() for p in self.buckets[k]])
            for p, part in zip(self.buckets[k], parts):
                p.grad = part.view_as(p)
            self.missing[k] = set(self.buckets[k])
        self.sent.clear()


def loss_of(model, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(config: Config) -> dict[str, Tensor]:
    """Returns the weights after all steps."""
    model, text = build(config).to(device()), corpus()
    buckets = Buckets(model, config.bucket)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate)
    for step in range(config.steps):
        mine = share_of(batch_of(step, text, config)).to(device())
        loss = loss_of(model, mine) * len(mine) / config.batch  # the ranks' sum is the mean
        loss.backward()
        buckets.finish()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.3f}", flush=True)
    return model.state_dict()


def device() -> torch.device:
    """The CPU, or the GPU that start() chose."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start() -> None:
    """Joins the group that torchrun describes; on GPUs, each process has its own."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def options() -> Config:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    start()
    train(options())
    dist.destroy_process_group()
