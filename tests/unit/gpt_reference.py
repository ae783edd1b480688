"""A slow GPT to compare training.gpt with: token by token, head by head, in plain sums."""

import math

import torch

from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from tests.unit.expert_reference import layer


def reference(model: GPT, ids: list[int]) -> torch.Tensor:
    """Logits of one sequence."""
    config, w = model.config, dict(model.named_parameters(remove_duplicate=False))
    x = [w["embedding.tokens.weight"][i] for i in ids]
    if config.style == "gpt2":
        x = [row + w["embedding.positions.weight"][s] for s, row in enumerate(x)]
    for number in range(config.layers):
        part = {k.removeprefix(f"layers.{number}."): v for k, v in w.items() if k.startswith(f"layers.{number}.")}
        y = attended(config, part, [normed(config, part, "attention_norm", row) for row in x])
        x = [row + out for row, out in zip(x, y, strict=True)]
        x = [row + mlp(config, part, normed(config, part, "mlp_norm", row)) for row in x]
    return torch.stack([w["head.projection.weight"] @ normed(config, w, "head.norm", row) for row in x])


def linear(w: dict, name: str, row: torch.Tensor) -> torch.Tensor:
    return w[f"{name}.weight"] @ row + w.get(f"{name}.bias", 0)


def normed(config: GPTConfig, w: dict, name: str, row: torch.Tensor) -> torch.Tensor:
    if config.style == "gpt2":
        row = row - row.sum() / len(row)
    return row / ((row**2).sum() / len(row) + 1e-5) ** 0.5 * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def mlp(config: GPTConfig, w: dict, row: torch.Tensor, name: str = "mlp") -> torch.Tensor:
    if f"{name}.router.weight" in w:
        experts = [w[f"{name}.experts.{part}"] for part in ("gate", "up", "down")]
        limits = config.top_k, config.scores, None, config.expert_groups, config.groups_per_token
        ((y,),), *_ = layer([row[None]], w[f"{name}.router.weight"], experts, *limits)
        return y + mlp(config, w, row, f"{name}.shared") if config.shared_experts else y
    up = linear(w, f"{name}.up", row)
    if config.style == "gpt2":
        return linear(w, f"{name}.down", up * (1 + torch.erf(up / 2**0.5)) / 2)
    gate = linear(w, f"{name}.gate", row)
    return linear(w, f"{name}.down", gate / (1 + torch.exp(-gate)) * up)


def attended(config: GPTConfig, w: dict, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    if config.latent:
        return latent(config, w, rows)
    size, served = config.hidden // config.heads, config.heads // (config.kv_heads or config.heads)
    q, k, v = ([linear(w, f"attention.{name}", row) for row in rows] for name in ("query", "key", "value"))
    out = []
    for s in range(len(rows)):
        heads = []
        for head in range(config.heads):
            own, shared = slice(head * size, (head + 1) * size), slice(head // served * size, (head // served + 1) * size)
            query = turned(config, q[s][own], s)
            scores = torch.stack([query @ turned(config, k[t][shared], t) / size**0.5 for t in range(s + 1)])
            weights = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(weights[t] * v[t][shared] for t in range(s + 1)))
        out.append(linear(w, "attention.output", torch.cat(heads)))
    return out


def latent(config: GPTConfig, w: dict, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """DeepSeek-V2, arXiv 2405.04434, equations 37 to 47, head by head."""
    sizes, down = config.latent, [linear(w, "attention.kv_down", row) for row in rows]
    c = [normed(config, w, "attention.kv_norm", row[: sizes.kv_rank]) for row in down]
    places = [turned(config, row[sizes.kv_rank :], t) for t, row in enumerate(down)]
    if sizes.q_rank:
        rows = [normed(config, w, "attention.query_norm", linear(w, "attention.query_down", row)) for row in rows]
    q, both, n = [linear(w, "attention.query_up", row) for row in rows], w["attention.kv_up.weight"], sizes.nope_size
    out = []
    for s in range(len(rows)):
        heads = []
        for head, q_head in enumerate(q[s].chunk(config.heads)):
            up_k, up_v = both.chunk(config.heads)[head].split((n, sizes.value_size))
            place = turned(config, q_head[n:], s)
            scores = [q_head[:n] @ (up_k @ c[t]) + place @ places[t] for t in range(s + 1)]
            weights = torch.exp(torch.stack(scores) / (n + sizes.rope_size) ** 0.5)
            heads.append(sum(share * (up_v @ c[t]) for t, share in enumerate(weights / weights.sum())))
        out.append(linear(w, "attention.output", torch.cat(heads)))
    return out


def turned(config: GPTConfig, head: torch.Tensor, position: int) -> torch.Tensor:
    if config.style == "gpt2":
        return head
    half = len(head) // 2
    turns = [complex(math.cos(a), math.sin(a)) for a in (position * 10000 ** (-i / half) for i in range(half))]
    pairs = torch.complex(head[:half], head[half:]) * torch.tensor(turns, dtype=torch.complex128)
    return torch.cat((pairs.real, pairs.imag))
