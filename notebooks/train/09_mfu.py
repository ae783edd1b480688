"""Trains a small Llama on the source code of Python's library: FSDP, recomputation, stages,
split layers, split sequences, experts. Prints its MFU.

torchrun --nproc-per-node 4 09_mfu.py --cp 2 --tp 2 --micro 3 --steps 50 --peak 5e10
"""

import argparse
import dataclasses
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclasses.dataclass
class Config:
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 176
    seq: int = 64
    batch: int = 12  # sequences per step
    micro: int = 1  # micro-batches
    pp: int = 1  # stages
    cp: int = 1  # ranks that share a sequence
    tp: int = 1  # ranks that share a layer
    experts: int = 0  # instead of an MLP; a token uses 2
    ep: int = 1  # ranks that share the experts
    clip: float = float("inf")  # the largest norm of the gradient
    steps: int = 20
    rate: float = 3e-3
    dtype: str = "float32"
    peak: float = 0.0  # FLOP/s of one GPU in this dtype, dense; 0: print no MFU


# The model: bytes in, a logit for each of the 256 next bytes out.


class Norm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (len(self.weight),), self.weight, eps=1e-5)


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Turns each pair of a head's numbers by its token's position."""
    size = x.shape[-1]
    like = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    rates = 10_000 ** (-torch.arange(0, size, 2, **like) / size)
    angles = places.to(**like)[:, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# Split layers, split sequences: a rank has some heads of some tokens. Keys go round.


class Along(torch.autograd.Function):
    """Gathers the sequence, or scatters the ranks' sum; backward does the other one."""

    @staticmethod
    def forward(ctx, x: Tensor, group, gather: bool) -> Tensor:
        ctx.group, ctx.gather = group, gather
        x, n = x.transpose(0, 1).contiguous(), dist.get_world_size(group)
        y = x.new_empty(len(x) * n if gather else len(x) // n, *x.shape[1:])
        move = dist.all_gather_single if gather else dist.reduce_scatter_single
        move(y, x, group=group)
        return y.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Along.forward(ctx, grad, ctx.group, not ctx.gather), None, None


CUT = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0, "output": 1, "down": 1}


def cut(model: nn.Module, group) -> None:
    """Leaves this rank's rows or columns of each product."""
    for name, module in model.named_modules():
        module.group = group
        if isinstance(module, Experts):
            for key, whole in [*module.named_parameters(recurse=False)]:
                parts = whole.detach().chunk(dist.get_world_size(module.ranks))
                own = nn.Parameter(parts[dist.get_rank(module.ranks)].clone())
                setattr(module, key, own)
                own.own = own.cut = True
        if (dim := CUT.get(name.rpartition(".")[2])) is not None:
            parts = module.weight.detach().chunk(dist.get_world_size(group), dim)
            module.weight = nn.Parameter(parts[dist.get_rank(group)].clone())
            module.weight.cut = True


def pass_on(sent: Tensor, group):
    """Starts a hop. The result waits for it, and returns what the rank before has sent."""
    ranks, k = dist.get_process_group_ranks(group), dist.get_rank(group)
    found, after = torch.empty_like(sent), ranks[k + 1 - len(ranks)]
    calls = [(dist.isend, sent, after), (dist.irecv, found, ranks[k - 1])]
    works = dist.batch_isend_irecv([dist.P2POp(*call, group) for call in calls])
    return lambda: [work.wait() for work in works] and found


def visits(q: Tensor, kv: Tensor, group, *others: Tensor):
    """Yields each rank's keys and values that own queries see, scores, and their rows."""
    rank, n, half = dist.get_rank(group), dist.get_world_size(group), kv.shape[-2] // 2
    for hop in range(n):
        arrived = pass_on(kv, group) if hop < n - 1 else None  # while the caller computes
        rows = slice(half if hop > rank else 0, None)  # early ones see no later rank's keys
        k, v = kv[..., : half if 0 < hop <= rank else None, :]  # nobody sees its late ones
        score = q[..., rows, :] @ k.mT  # on GPUs, a flash kernel works on a tile at a time
        score += torch.full_like(score, -torch.inf).triu(1) if hop == 0 else 0
        yield k, v, score, *(x[..., rows, :] for x in others)
        kv = arrived and arrived()


class Ring(torch.autograd.Function):  # q: [batch, kv heads, heads of each, tokens, size]
    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, group) -> Tensor:
        o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        for _, v, score, out, old in visits(q, kv, group, o, lse):
            new = old.logaddexp(score.logsumexp(-1, keepdim=True))
            out[:], old[:] = (old - new).exp() * out + (score - new).exp() @ v, new
        ctx.save_for_backward(q, kv, o, lse)
        ctx.group = group
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        (q, kv, o, lse), own, arrived = ctx.saved_tensors, None, lambda: 0
        mine = q, do, (o * do).sum(-1, keepdim=True), lse, torch.zeros_like(q)
        for k, v, score, Q, dO, delta, L, dQ in visits(q, kv, ctx.group, *mine):
            P = (score - L).exp()
            dS = P * (dO @ v.mT - delta)
            dQ += dS @ k
            part = torch.zeros_like(kv)  # of the gradient of the block that's here now
            part[..., : k.shape[-2], :] = torch.stack([dS.mT @ Q, P.mT @ dO]).sum(3, True)
            own = part if own is None else own  # others' travel behind their blocks
            arrived = arrived if part is own else pass_on(part + arrived(), ctx.group)
        return mine[-1], own + arrived(), None


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        h, self.size = config.hidden, config.hidden // config.heads
        self.query = nn.Linear(h, h, bias=False)
        self.key = nn.Linear(h, config.kv_heads * self.size, bias=False)
        self.value = nn.Linear(h, config.kv_heads * self.size, bias=False)
        self.output = nn.Linear(h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Along.apply(x, self.group, True)
        q, k, v = (
            made(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        )
        q, k = rotated(q, self.places) / self.size**0.5, rotated(k, self.places)
        q, kv = q.unflatten(1, (k.shape[1], -1)), torch.stack([k, v])[:, :, :, None]
        y = Ring.apply(q, kv, self.ring).flatten(1, 2)
        return Along.apply(self.output(y.transpose(1, 2).flatten(2)), self.group, False)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = Along.apply(x, self.group, True)
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return Along.apply(x, self.group, False)


class Exchange(torch.autograd.Function):
    """Sends the first sent[0] rows to the first rank, and so on; gradients go back."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        ctx.back = received, sent, group
        came = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(came, x.contiguous(), received, sent, group)
        return came

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Exchange.forward(ctx, grad, *ctx.back), None, None, None


class Experts(nn.Module):
    """Sends each token to its two best experts, whole ones, and their results home."""

    def __init__(self, config: Config):
        super().__init__()
        n, h, f = config.experts, config.hidden, config.ffn
        self.router = nn.Linear(h, n, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(n, f, h)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(n, h, f))

    def forward(self, x: Tensor) -> Tensor:
        rows, e = x.flatten(0, 1), dist.get_world_size(self.ranks)
        gates, chosen = self.router(rows).softmax(-1).topk(2)
        gates = (gates / gates.sum(-1, keepdim=True)).flatten()
        order = chosen.flatten().argsort(stable=True)  # copies by expert, and so by rank
        leaving = chosen.flatten().bincount(minlength=len(self.router.weight)).view(e, -1)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.ranks)
        sent, received = leaving.sum(1).tolist(), coming.sum(1).tolist()
        came = Exchange.apply(rows[order // 2], sent, received, self.ranks)
        column = torch.arange(coming.shape[1], device=x.device).expand_as(coming)
        again = column.flatten().repeat_interleave(coming.flatten()).argsort(stable=True)
        parts = came[again].split(coming.sum(0).tolist())  # on GPUs: F.grouped_mm
        own = zip(parts, self.gate, self.up, self.down)
        y = torch.cat([(F.silu(r @ g.T) * (r @ u.T)) @ d.T for r, g, u, d in own])
        y = Exchange.apply(y[again.argsort()], received, sent, self.ranks)
        y = torch.zeros_like(rows).index_add(0, order // 2, y * gates[order, None])
        return y.view_as(x)


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.attention = Norm(config.hidden), Attention(config)
        self.norm2 = Norm(config.hidden)
        self.mlp = Experts(config) if config.experts else MLP(config)

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


def share_of(tokens: Tensor, m: int, group) -> list[Tensor]:
    """This rank's sequences; some ranks may have one more than others."""
    if len(tokens) < (n := dist.get_world_size(group)) * m:
        raise ValueError(
            f"batch={len(tokens)} on {n} ranks, m={m}: use at least {n * m} sequences"
        )
    return tokens.to(device()).tensor_split(n)[dist.get_rank(group)].tensor_split(m)


# FSDP: each rank keeps a shard of every unit; a unit is whole only while it computes.


class Unit:
    """A module's parameters end to end in one row, padded so that all shards are equal."""

    def __init__(self, module: nn.Module, group):
        self.parameters = [p for p in module.parameters() if not hasattr(p, "own")]
        self.group = group
        self.tensor, t = module.group, dist.get_world_size(module.group)
        once = [
            torch.full_like(p, 1 if hasattr(p, "cut") else 1 / t) for p in self.parameters
        ]
        once = self.row_of(once).chunk(dist.get_world_size(group))
        self.once = once[dist.get_rank(group)].clone()
        self.row = self.row_of(self.parameters)
        own = self.row.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.shard = nn.Parameter(own.clone())
        vector_to_parameters(self.row, self.parameters)  # each becomes a view of its piece
        self.free()

    def row_of(self, tensors: list[Tensor]) -> Tensor:
        row = parameters_to_vector(tensors).detach()
        return F.pad(row, (0, -len(row) % dist.get_world_size(self.group)))

    def free(self) -> None:
        self.row.untyped_storage().resize_(0)

    def start(self) -> None:
        if not self.row.untyped_storage().size():
            self.row.untyped_storage().resize_(self.row.nbytes)
            self.work = dist.all_gather_single(self.row, self.shard.data, self.group, True)

    def reduce(self) -> None:
        """Starts to sum the gradients over the ranks; each gets its shard of the sum."""
        self.free()  # backward is done with them
        for p in self.parameters:
            if not hasattr(p, "cut"):  # each rank has seen its part of the sequence
                dist.all_reduce(p.grad, group=self.tensor)
        self.grads = self.row_of([p.grad for p in self.parameters])
        self.shard.grad = own = torch.empty_like(self.shard)
        self.reducing = dist.reduce_scatter_single(
            own, self.grads, group=self.group, async_op=True
        )
        for p in self.parameters:
            p.grad = None


class Sharded:
    """Runs the parts of a model, and gathers the next one while this one computes."""

    def __init__(self, model: nn.Sequential, group, keep: bool):
        self.model, self.units = model, [Unit(part, group) for part in model]
        self.own = [p for p in model.parameters() if hasattr(p, "own")]  # experts, whole
        self.keep = keep  # all units from the first forward to the last backward

    def __call__(self, x: Tensor) -> Tensor:
        for k, part in enumerate(self.model):
            self.fetch(k, k + 1)
            again = isinstance(part, Layer)
            x = Recompute.apply(part, x, *part.parameters()) if again else part(x)
            x.register_hook(partial(self.arrived, k))
            if k + 1 < len(self.units) and not self.keep:  # the last stays for backward
                self.units[k].free()
        return x

    def fetch(self, k: int, after: int) -> None:
        self.units[k].start()
        self.units[k].work.wait()
        if 0 <= after < len(self.units):
            self.units[after].start()

    def arrived(self, k: int, grad: Tensor) -> None:
        """The gradient of part k's result is there, so part k + 1 is done."""
        if k + 1 < len(self.units) and self.last:
            self.units[k + 1].reduce()
        self.fetch(k, k - 1)

    def finish(self, clip: float) -> None:
        self.units[0].reduce()
        for unit in self.units:
            unit.reducing.wait()
        norm = sum((unit.once * unit.shard.grad**2).sum() for unit in self.units)
        for p in self.own:  # its tokens came from ep ranks; the replicas have the others
            dist.all_reduce(p.grad, group=Experts.replicas)
            norm += (p.grad**2).sum() / dist.get_world_size(Experts.replicas)
        dist.all_reduce(norm)  # every element once, over all ranks
        for p in self.own + [unit.shard for unit in self.units]:
            p.grad *= (clip / (norm.sqrt() + 1e-6)).clamp(max=1)

    def state_dict(self) -> dict[str, Tensor]:
        for k in range(len(self.units)):
            self.fetch(k, k)
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


# Activation checkpointing: forward keeps a layer's input, backward runs it again.


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        """The parameters are inputs: without x's gradient, too, it needs a backward."""
        ctx.layer = layer  # without dropout, its second run equals its first
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        y.backward(grad)  # the parameters get their gradients in here
        return None, x.grad, *(None for _ in ctx.layer.parameters())


# Pipeline parallelism: a rank has a few of the parts; outputs go on, gradients come back.


def mesh(config: Config):
    """Rank = ((stage · d + data rank) · c + place) · t + tensor rank. Returns groups."""
    n, p, c, t = dist.get_world_size(), config.pp, config.cp, config.tp
    if n % (p * c * t) or p > config.layers + 2:
        raise ValueError(
            f"pp={p}, cp={c}, tp={t} on {n} ranks, {config.layers + 2} parts: divide {n}"
        )
    if c > 1 and config.seq % (2 * c * t):
        raise ValueError(f"seq={config.seq}, cp={c}, tp={t}: use a multiple of {2 * c * t}")
    if any(size % t for size in (config.heads, config.kv_heads, config.ffn, config.seq)):
        raise ValueError(f"tp={t}: choose a divisor of heads, kv_heads, ffn and seq")
    if n // p % config.ep or config.experts % config.ep:
        raise ValueError(f"ep={config.ep}: use a divisor of experts and of {n // p} ranks")
    ranks, groups = torch.arange(n).view(p, -1, t), dist.new_subgroups_by_enumeration
    data, _ = groups(ranks.view(p, -1, c * t).transpose(1, 2).flatten(0, 1).tolist())
    dc, _ = groups(ranks.transpose(1, 2).flatten(0, 1).tolist())  # FSDP's d · c ranks
    ring, _ = groups(ranks.view(-1, c, t).transpose(1, 2).flatten(0, 1).tolist())
    tensor, _ = groups(ranks.flatten(0, 1).tolist())
    folded = ranks.view(p, -1, config.ep)  # the same ranks, for the experts
    Experts.ranks, _ = groups(folded.flatten(0, 1).tolist())
    Experts.replicas, _ = groups(folded.transpose(1, 2).flatten(0, 1).tolist())
    dist.all_reduce(torch.zeros(1, device=device()))  # NCCL: all ranks join the first call
    return dist.get_rank() * p // n, n // p, data, dc, ring, tensor


def exchange(sent: Tensor, to: int | None, source: int | None, rows: int, config: Config):
    """Sends what was computed and receives what comes next, in one batch."""
    seq = config.seq // config.cp // config.tp
    found = torch.empty(rows, seq, config.hidden, device=device())
    calls = [(dist.isend, sent, to), (dist.irecv, found, source)]
    calls = [dist.P2POp(*call) for call in calls if call[2] is not None]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return None if source is None else found


def run(model: Sharded, batches: list[Tensor], stage: int, d: int, config: Config):
    """Runs 1F1B. Returns this rank's part of the loss, 0 before the last stage."""
    before = dist.get_rank() - d if stage else None
    after = dist.get_rank() + d if stage < config.pp - 1 else None
    m, flying, sent, to = len(batches), {}, torch.zeros((), device=device()), None
    total, ahead = torch.zeros_like(sent), min(config.pp - 1 - stage, m)
    order = [("F", k) for k in range(ahead)]
    for k in range(m):
        order += [("F", ahead + k)] * (ahead + k < m) + [("B", k)]
    for kind, k in order:
        source = before if kind == "F" else after
        found = exchange(sent, to, source, len(batches[k]), config)
        if kind == "F":
            x = batches[k][:, 0] if found is None else found.requires_grad_()
            y = model(x)
            if after is None:
                y = loss_of(y, batches[k]) * y[..., 0].numel() / config.batch / config.seq
                total += y.detach()  # the ranks' sum is the batch's mean
            flying[k], sent, to = (x, y), y.detach(), after
        else:
            x, y = flying.pop(k)
            model.last = k == m - 1
            y.backward(found)  # None: y is the loss
            sent, to = x.grad, before
    exchange(sent, to, None, 0, config)
    return total


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def needed(model: nn.Module, config: Config) -> int:
    """FLOPs per token, forward and backward; a mask leaves half of the scores."""
    used = [p[: 2 if p.dim() == 3 else None] for p in model[1:].parameters()]  # 2 experts
    phi = sum(p.numel() for p in used)  # the embedding, model[0], multiplies nothing
    return 6 * phi + 6 * config.layers * config.hidden * config.seq


def now() -> float:
    """Seconds, once the GPU has done what was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(config: Config) -> dict[str, Tensor]:
    """Returns this stage's weights after all steps."""
    whole, text, (stage, d, group, dc, ring, tensor) = build(config), corpus(), mesh(config)
    flops = config.batch * config.seq * needed(whole, config)  # of a step
    cut(whole, tensor)
    pieces, k = torch.arange(config.seq).tensor_split(2 * config.cp), dist.get_rank(ring)
    places = torch.cat([pieces[k], pieces[-1 - k]])  # zigzag
    Attention.ring, Attention.places = ring, places.to(device())
    own = places.chunk(config.tp)[dist.get_rank(tensor)]
    cuts = [k * len(whole) // config.pp for k in (stage, stage + 1)]
    model = Sharded(whole[slice(*cuts)].to(device()), dc, keep=config.micro > 1)
    learns = model.own + [unit.shard for unit in model.units]
    optimizer = torch.optim.AdamW(learns, lr=config.rate)
    started, before = now(), 0
    for step in range(config.steps):
        tokens = batch_of(step, text, config)[:, torch.stack([own, own + 1])]
        mine = share_of(tokens, config.micro, group)
        loss = run(model, mine, stage, d, config)
        model.finish(config.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.3f}", flush=True)
        if config.peak and step % 10 == 0:
            each, started, before = (now() - started) / (step - before or 1), now(), step
            mfu = flops / each / (dist.get_world_size() * config.peak)
            if step and dist.get_rank() == 0:  # the first step warms up
                print(f"    {each:.3f} s per step, MFU {mfu:.2%}", flush=True)
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
