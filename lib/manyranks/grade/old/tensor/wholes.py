"""What one process computes, as the exercise's text shows it; float64, with numbers that a seed gives."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyranks.grade.old.tensor.layout import EXACT


def linear(inner: int, outer: int, bias: bool = True) -> nn.Linear:
    """In float64."""
    return nn.Linear(inner, outer, bias=bias, **EXACT)


class WholeMLP(nn.Module):
    """Gated; the first half of gate_up's rows is the gate."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.gate_up, self.down = linear(hidden, 2 * units), linear(units, hidden)

    def forward(self, x_SBH: Tensor) -> Tensor:
        gate_SBU, up_SBU = self.gate_up(x_SBH).chunk(2, -1)
        return x_SBH + self.down(F.gelu(gate_SBU) * up_SBU)


class WholeAttention(nn.Module):
    """Query head j uses key/value head j % kv_heads."""

    def __init__(self, hidden: int, size: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.query, self.output = linear(hidden, heads * size, False), linear(heads * size, hidden, False)
        self.key, self.value = linear(hidden, kv_heads * size, False), linear(hidden, kv_heads * size, False)

    def forward(self, x_SBH: Tensor, memory_TBH: Tensor) -> Tensor:
        query = self.query(x_SBH)
        return self.output(attended(query, self.key(memory_TBH), self.value(memory_TBH), self.size))


def attended(query_SBE: Tensor, key_TBE: Tensor, value_TBE: Tensor, size: int, neighbours: bool = False) -> Tensor:
    """Heads side by side, in and out. neighbours: whether neighbouring queries share keys and values."""
    query, key, value = (part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in (query_SBE, key_TBE, value_TBE))
    times = query.shape[1] // key.shape[1]
    if neighbours:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    else:
        key, value = key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
    return F.scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3).flatten(2)


class WholeBlock(nn.Module):
    """Norm, MLP, dropout, residual; the mask is what the caller gives."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden, **EXACT)
        self.up, self.down = linear(hidden, units), linear(units, hidden)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(-1, 1)


def made(kind: type, seed: int, *sizes: int) -> nn.Module:
    """One of these classes, the same for a seed; other random numbers go on as they were."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return kind(*sizes)
