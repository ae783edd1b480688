"""The small GPT: a decoder-only transformer in the style of GPT-2 or Llama.

It knows nothing of parallelism: techniques cut and replace its parts from outside.

    B batch   S, T sequence   H hidden size   A heads   G key/value heads   D head size
    P pairs of a head's numbers, D/2   V vocabulary   E features of heads   F feed-forward size
    K a latent's size   R rotary numbers   U size of a value, where it isn't D
"""

import math
import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyranks.training.config import GPTConfig
from manyranks.training.moe import MoE

_ROTARY_BASE = 10_000.0
_DEVIATION = 0.02  # of every matrix, as in GPT-2
_ROUTER = "router.weight"  # has scores of about 1, as 0.02 gives where the hidden size is 2,500
_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


class GPT(nn.Module):
    """Tokens to logits: `.embedding`, then each of `.layers`, then `.head`.

    seed: of the first weights, which are the same on every rank, however many there are.
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        shape = config.shape()
        self.layers = nn.ModuleList(Layer(config, shape.is_moe(i)) for i in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.projection.weight = self.embedding.tokens.weight
        initialize(self, config.layers, seed)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """The logits_BSV; raises ValueError for more than config.seq tokens a sequence.

        positions_S: places in the whole sequence, where this is a shard of it; else 0 … S − 1.
        """
        if (given := tokens_BS.shape[1]) > (most := self.config.seq):
            raise ValueError(f"{given} tokens a sequence: this model takes at most seq={most}")
        x_BSH = self.embedding(tokens_BS, positions_S)
        for layer in self.layers:
            x_BSH = layer(x_BSH, positions_S)
        return self.head(x_BSH)


class Embedding(nn.Module):
    """A row for each token, and in GPT-2's style one for each position, added."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        learned = config.shape().positions
        self.positions = nn.Embedding(learned, config.hidden) if learned else None
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        x_BSH = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSH = x_BSH + self.positions(_positions(positions_S, x_BSH))
        return self.dropout(x_BSH)


class Layer(nn.Module):
    """Adds attention(norm(x)) to x, then mlp(norm(x)).

    moe: whether the MLP is made of experts
    """

    def __init__(self, config: GPTConfig, moe: bool = False):
        super().__init__()
        attention = LatentAttention if config.latent else Attention
        self.attention_norm, self.attention = norm(config), attention(config)
        self.mlp_norm, self.mlp = norm(config), _mixture(config) if moe else MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSH: Tensor, positions_S: Tensor | None = None) -> Tensor:
        x_BSH = x_BSH + self.dropout(self.attention(self.attention_norm(x_BSH), positions_S))
        return x_BSH + self.dropout(self.mlp(self.mlp_norm(x_BSH)))


class Attention(nn.Module):
    """Each key/value head serves A/G query heads. Source: GQA, arXiv 2305.13245."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        shape = config.shape()
        self.query = nn.Linear(shape.hidden, shape.query_size, shape.bias)
        self.key = nn.Linear(shape.hidden, shape.kv_size, shape.bias)
        self.value = nn.Linear(shape.hidden, shape.kv_size, shape.bias)
        self.output = nn.Linear(shape.query_size, shape.hidden, shape.bias)
        self.core = CausalAttention(config.dropout)
        self.head_size, self.rotary = shape.head_size, not shape.positions
        self.project = each

    def forward(self, x_BSH: Tensor, positions_S: Tensor | None = None) -> Tensor:
        q_BASD, k_BGSD, v_BGSD = (
            # -1: however many heads the linear layer has, which may be a shard's.
            y_BSE.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for y_BSE in self.project(x_BSH, self.query, self.key, self.value)
        )
        if self.rotary:
            positions_S = _positions(positions_S, q_BASD.transpose(1, 2))
            q_BASD, k_BGSD = rotated(q_BASD, positions_S), rotated(k_BGSD, positions_S)
        o_BASD = self.core(q_BASD, k_BGSD, v_BGSD)
        return self.output(o_BASD.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """All heads' keys and values are expanded from one latent a token, which is all that is kept.

    A latent has no place; one rotary key that all heads share says where a token stands.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        h, self.heads, self.sizes = config.hidden, config.heads, config.latent
        q, k, r = self.sizes.q_rank, self.sizes.kv_rank, self.sizes.rope_size
        features = self.heads * (self.sizes.nope_size + r)
        self.query_down = nn.Linear(h, q, bias=False) if q else nn.Identity()
        self.query_norm = nn.RMSNorm(q, eps=1e-5) if q else nn.Identity()
        self.query_up = nn.Linear(q or h, features, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(h, k + r, bias=False), nn.RMSNorm(k, eps=1e-5)
        up = self.heads * (self.sizes.nope_size + self.sizes.value_size)
        self.kv_up = nn.Linear(k, up, bias=False)
        self.output = nn.Linear(self.heads * self.sizes.value_size, h, bias=False)
        self.core = LatentCore(config.dropout)

    def forward(self, x_BSH: Tensor, positions_S: Tensor | None = None) -> Tensor:
        positions_S, sizes = _positions(positions_S, x_BSH), self.sizes
        q_BSE = self.query_up(self.query_norm(self.query_down(x_BSH)))
        q_BASD = q_BSE.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        own_BASD, place_BASR = q_BASD.split((sizes.nope_size, sizes.rope_size), -1)
        q_BASD = torch.cat((own_BASD, rotated(place_BASR, positions_S)), -1)
        c_BSK, key_BSR = self.kv_down(x_BSH).split((sizes.kv_rank, sizes.rope_size), -1)
        up_ADK = self.kv_up.weight.unflatten(0, (self.heads, -1))
        ups = up_ADK.split((sizes.nope_size, sizes.value_size), 1)
        key_BSR = rotated(key_BSR[:, None], positions_S)[:, 0]
        o_BASU = self.core(q_BASD, self.kv_norm(c_BSK), key_BSR, *ups)
        return self.output(o_BASU.transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """softmax(QKᵀ/√D + mask)V: a token sees itself and those that stand before it in k."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        if self.training and self.dropout.rate:
            return self._with_dropout(q_BASD, k_BGSD, v_BGSD)
        attention = F.scaled_dot_product_attention
        return attention(q_BASD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)

    def _with_dropout(self, q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        """Builds the score matrix: PyTorch's own way with dropout does so on the CPU too."""
        group, seq = q_BASD.shape[1] // k_BGSD.shape[1], q_BASD.shape[2]
        k_BATD, v_BATD = (
            x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k_BGSD, v_BGSD)
        )
        scores_BAST = q_BASD / math.sqrt(q_BASD.shape[-1]) @ k_BATD.mT
        later_ST = torch.ones(seq, seq, dtype=torch.bool, device=q_BASD.device).triu(1)
        weights_BAST = torch.softmax(scores_BAST.masked_fill(later_ST, -math.inf), -1)
        return self.dropout(weights_BAST) @ v_BATD


class LatentCore(CausalAttention):
    """Expands each head's keys and values from the latents; the rotary key ends every key."""

    def forward(
        self, q_BASD: Tensor, c_BSK: Tensor, key_BSR: Tensor, up_k_ADK: Tensor, up_v_AUK: Tensor
    ) -> Tensor:
        both_KE = torch.cat((up_k_ADK, up_v_AUK), 1).flatten(0, 1).mT.to(c_BSK.dtype)
        both_BASE = (c_BSK @ both_KE).unflatten(-1, (len(up_k_ADK), -1)).transpose(1, 2)
        k_BASD, v_BASU = both_BASE.split((up_k_ADK.shape[1], up_v_AUK.shape[1]), -1)
        shared_BASR = key_BSR[:, None].expand(-1, len(up_k_ADK), -1, -1)
        return super().forward(q_BASD, torch.cat((k_BASD, shared_BASR), -1), v_BASU)


class MLP(nn.Module):
    """GELU, or gated by SiLU. Source of the gate: SwiGLU, arXiv 2002.05202."""

    def __init__(self, config: GPTConfig, ffn: int | None = None):
        super().__init__()
        shape = config.shape()
        h, f = shape.hidden, ffn or shape.ffn
        self.gate = nn.Linear(h, f, bias=shape.bias) if shape.gated else None
        self.up, self.down = nn.Linear(h, f, bias=shape.bias), nn.Linear(f, h, bias=shape.bias)
        self.project = each

    def forward(self, x_BSH: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(*self.project(x_BSH, self.up)))
        up_BSF, gate_BSF = self.project(x_BSH, self.up, self.gate)
        return self.down(F.silu(gate_BSF) * up_BSF)


def _mixture(config: GPTConfig) -> MoE:
    shape = config.shape()
    shared = shape.shared_experts * shape.shared_ffn  # side by side they are one wide MLP
    return MoE(config, MLP(config, shared) if shared else None)


def each(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Applies several linear layers to one input. MLP.project can be set to another function."""
    return [linear(x) for linear in linears]


class Head(nn.Module):
    """The last norm, then a logit for each token of the vocabulary."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = norm(config)
        self.projection = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x_BSH: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """Returns logits.

        positions_S: not used; all parts of the model are called the same way
        """
        return self.projection(self.norm(x_BSH))


class Dropout(nn.Module):
    """nn.Dropout, whose mask on the CPU has x's dtype, with a mask of one byte an element."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.rate, True)[0] if self.training and self.rate else x


def norm(config: GPTConfig) -> nn.Module:
    kind = nn.RMSNorm if config.style == "llama" else nn.LayerNorm
    return kind(config.hidden, eps=1e-5)  # as GPT-2 and Llama 2


def rotated(x_BASD: Tensor, positions_S: Tensor) -> Tensor:
    """Turns numbers i and i + D/2 of each head by position · base^(−2i/D), as a pair.

    The product of a query and a key then depends on how far apart they stand, not on where.
    Source: RoFormer, arXiv 2104.09864, equation 34, with GPT-NeoX's choice of pairs.
    """
    size = x_BASD.shape[-1]
    i_P = torch.arange(size // 2, dtype=torch.float64, device=x_BASD.device)
    angles_SP = positions_S.double()[:, None] * _ROTARY_BASE ** (-2 * i_P / size)
    precise = torch.promote_types(x_BASD.dtype, torch.float32)
    cos_SP, sin_SP = angles_SP.cos().to(precise), angles_SP.sin().to(precise)
    a_BASP, b_BASP = x_BASD.chunk(2, -1)
    turned = a_BASP * cos_SP - b_BASP * sin_SP, a_BASP * sin_SP + b_BASP * cos_SP
    return torch.cat(turned, -1).to(x_BASD.dtype)


def initialize(model: nn.Module, layers: int, seed: int) -> None:
    """Sets the weights; those that end in the residual stream are smaller by √(2·layers).

    A parameter has its own generator, seeded by its name, so that what it gets does not depend
    on which others there are. Source: GPT-2's, Radford et al. 2019, section 2.3.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        deviation = parameter.shape[1] ** -0.5 if name.endswith(_ROUTER) else _DEVIATION
        drawn.normal_(0, deviation, generator=generator)
        residual = name.endswith(_RESIDUAL)
        with torch.no_grad():
            parameter.copy_(drawn / math.sqrt(2 * layers) if residual else drawn)


def loss(logits_BSV: Tensor, targets_BS: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats a token, in fp32 or better.

    reduction: "mean", "sum", "none" (flat)
    """
    precise = torch.promote_types(logits_BSV.dtype, torch.float32)
    logits_NV = logits_BSV.flatten(0, 1).to(precise)
    return F.cross_entropy(logits_NV, targets_BS.flatten(), reduction=reduction)


def _positions(given_S: Tensor | None, x_BS: Tensor) -> Tensor:
    return torch.arange(x_BS.shape[1], device=x_BS.device) if given_S is None else given_S
