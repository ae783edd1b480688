"""Model shapes: the sizes that fix a transformer, its tensors from them, and how many parameters these are.

h hidden size, f feed-forward size, a attention heads, g key/value heads, D head size, L layers, V vocabulary.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from manyranks.theory.names import concise, one_of, whole

# Vectors of the normalized size that a norm learns: a scale, or a scale and a shift.
NORMS = {"rmsnorm": 1, "layernorm": 2, "none": 0}


class Tensor(NamedTuple):
    """A tensor of the model, and how its layer's tensor-parallel ranks share it.

    elements: each once, however many ranks have it
    cut: "slices", one on each rank; "heads", keys or values, with copies of each head where there are more ranks than heads;
        "whole" on every rank
    decays: matrices do, under weight decay

    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """

    elements: int
    cut: str = "slices"
    decays: bool = True

    def on_rank(self, t: int, kv_heads: int) -> int:
        """Elements on one of t ranks, which must be able to share it evenly."""
        return self.elements // {"slices": t, "heads": min(t, kv_heads), "whole": 1}[self.cut]


def parameters_of(tensors: list[Tensor]) -> int:
    """Elements of all of them."""
    return sum(tensor.elements for tensor in tensors)


def _column(inputs: int, outputs: int, bias: bool, cut: str = "slices") -> list[Tensor]:
    """A linear layer whose outputs are cut, and its bias with them."""
    weight = Tensor(inputs * outputs, cut)
    return [weight, Tensor(outputs, cut, False)] if bias else [weight]


def _row(inputs: int, outputs: int, bias: bool) -> list[Tensor]:
    """Lists the tensors of a layer whose inputs are cut; its bias joins the sum."""
    weight = Tensor(inputs * outputs)
    return [weight, Tensor(outputs, "whole", False)] if bias else [weight]


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are expanded from kv_rank numbers a token, which are all that is cached.

    q_rank: the same for queries, 0 where they are not compressed
    nope_size, rope_size: a query's or key's numbers without and with rotary positions; all heads share one key of rope_size
    value_size: of a value head

    Raises ValueError for sizes that are not positive whole numbers.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    def __post_init__(self):
        for field in fields(self):
            whole(int(field.name != "q_rank"), **{f"latent.{field.name}": getattr(self, field.name)})

    def tensors(self, hidden: int, heads: int) -> list[Tensor]:
        """Queries down (whole) and up, or at once; keys and values down (whole) and up; the output; no norms."""
        query, kv = heads * (self.nope_size + self.rope_size), self.kv_rank + self.rope_size
        queries = [Tensor((self.q_rank or hidden) * query)]
        if self.q_rank:
            queries.insert(0, Tensor(hidden * self.q_rank, "whole"))
        up = self.kv_rank * heads * (self.nope_size + self.value_size)
        return [*queries, Tensor(hidden * kv, "whole"), Tensor(up), Tensor(heads * self.value_size * hidden)]


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes in elements; a count of 0 means that there is none.

    ffn: of a dense layer; unused where every layer has experts
    kv_heads: None means heads
    head_size: None means hidden // heads; with `latent`, it is nope_size + rope_size
    gated: the MLP has three matrices instead of two
    clamped: the MLP bounds what it multiplies
    tied: the head is the input embedding
    norm: "rmsnorm" (a scale), "layernorm" (a scale and a shift) or "none"; a final norm follows the last layer
    bias: on every linear layer but the head and the router
    qkv_bias: on queries, keys and values only
    qk_norm: a norm of head_size on queries and one on keys
    sinks: a number per query head, in the softmax with the scores
    positions: rows of learned position embeddings, 0 for rotary
    embedding_norm: a norm after the embedding
    dropout: on attention probabilities, after attention and MLP, and after the embedding
    experts: routed ones, in all layers but the first dense_layers; a token uses top_k of them and every shared one
    expert_groups: a token's experts lie in groups_per_token of them
    shared_ffn: size of each shared expert, 0 means expert_ffn
    shared_gate: a linear layer of one output that scales the shared experts
    router_bias: one number per expert
    mtp_depth: multi-token-prediction modules
    window: tokens that attention looks back in window_layers of the layers, None meaning all
    parallel_layers: attention and MLP read the same input and are added together

    Raises ValueError, naming the field, for a size that is not allowed or sizes that do not go together.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    head_size: int | None = None
    gated: bool = True
    clamped: bool = False
    tied: bool = False
    norm: str = "rmsnorm"
    norms_per_layer: int = 2
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    positions: int = 0
    embedding_norm: bool = False
    dropout: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    router_bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    latent: LatentAttention | None = None
    mtp_depth: int = 0
    window: int = 0
    window_layers: int | None = None
    parallel_layers: bool = False
    source: str = ""

    def __post_init__(self):
        self._check_types()
        self._fill()
        self._check_attention()
        self._check_experts()

    def __hash__(self) -> int:
        return hash((self.name, self.layers, self.hidden))  # cheap: shapes are keys of caches

    def __repr__(self) -> str:
        return concise(self, "name", "layers", "hidden", "ffn", "heads", "vocab", "kv_heads", "head_size", hide="source")

    def _check_types(self) -> None:
        one_of(NORMS, norm=self.norm)
        if not isinstance(self.latent, LatentAttention | None):
            raise ValueError(f"latent={self.latent!r}: must be a LatentAttention or None")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r}: must be True or False")
            if field.type is int or (field.type == int | None and value is not None):
                whole(int(field.default != 0 and field.name != "window_layers"), **{field.name: value})

    def _fill(self) -> None:
        if self.head_size is None and self.latent is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}: give head_size, or other sizes")
        size = self.latent.nope_size + self.latent.rope_size if self.latent else self.hidden // self.heads
        usual = {"kv_heads": self.heads, "head_size": size, "shared_ffn": self.expert_ffn if self.shared_experts else 0}
        for field, value in (usual | {"window_layers": self.layers if self.window else 0}).items():
            if getattr(self, field) is None or (field == "shared_ffn" and not self.shared_ffn):
                object.__setattr__(self, field, value)

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: each serves as many query heads")
        if self.window_layers > (self.layers if self.window else 0):
            raise ValueError(f"window_layers={self.window_layers}: with window={self.window}, at most layers={self.layers}")
        if self.latent is None:
            return
        if self.bias or self.qkv_bias or self.qk_norm:
            raise ValueError(
                "bias, qkv_bias, qk_norm: latent attention has no biases and brings its own norms; leave them False"
            )
        if (self.kv_heads, self.head_size) != (self.heads, self.latent.nope_size + self.latent.rope_size):
            raise ValueError(f"kv_heads={self.kv_heads}, head_size={self.head_size}: leave them out, latent decides them")

    def _check_experts(self) -> None:
        if not self.experts:
            names = ("top_k", "expert_ffn", "shared_experts", "shared_ffn", "shared_gate", "dense_layers", "router_bias")
            if given := [name for name in names if getattr(self, name)]:
                raise ValueError(f"{given[0]}={getattr(self, given[0])} without experts: give experts, or leave it 0")
        elif not self.expert_ffn:
            raise ValueError(f"expert_ffn=0 with experts={self.experts}: give the feed-forward size of one expert")
        elif not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k}: a token uses 1 to experts={self.experts} of them")
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers={self.dense_layers}: the model has layers={self.layers}")
        if (self.shared_ffn or self.shared_gate) and not self.shared_experts:
            raise ValueError(f"shared_ffn={self.shared_ffn}, shared_gate={self.shared_gate}: give shared_experts too")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.expert_groups, self.groups_per_token
        if self.experts % groups or (groups > 1 and not self.experts):
            raise ValueError(f"expert_groups={groups} does not divide experts={self.experts}")
        if chosen > groups:
            raise ValueError(f"groups_per_token={chosen}: there are expert_groups={groups}")
        if self.top_k > self.experts // groups * chosen:
            raise ValueError(f"top_k={self.top_k}: {chosen} groups have {self.experts // groups * chosen} experts")

    @property
    def query_size(self) -> int:
        """Numbers a token's queries have over all heads: a·D."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers a token's keys have over all heads, g·D; without `latent`, its values have as many."""
        return self.kv_heads * self.head_size

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is made of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def is_moe(self, layer: int) -> bool:
        """Returns whether this layer, counted from 0, has experts. Raises ValueError for a layer that the model hasn't."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer={layer}: {self.name} has layers 0 to {self.layers - 1}")
        return self.experts > 0 and layer >= self.dense_layers

    @cached_property
    def attention(self) -> list[Tensor]:
        """The matrices, biases and sinks of one layer; its norms are among `norms`."""
        if self.latent:
            return self.latent.tensors(self.hidden, self.heads)
        bias, keys = self.bias or self.qkv_bias, (self.hidden, self.kv_size)
        columns = _column(self.hidden, self.query_size, bias) + 2 * _column(*keys, bias, "heads")
        sinks = [Tensor(self.heads, decays=False)] if self.sinks else []
        return columns + _row(self.query_size, self.hidden, self.bias) + sinks

    @cached_property
    def mlp(self) -> list[Tensor]:
        """The MLP of one dense layer."""
        return self._mlp(self.ffn)

    @cached_property
    def expert(self) -> list[Tensor]:
        """A single routed expert; none in a dense model."""
        return self._mlp(self.expert_ffn) if self.experts else []

    @cached_property
    def shared(self) -> list[Tensor]:
        """All shared experts of one layer, with their gate."""
        gate = [Tensor(self.hidden, "whole")] if self.shared_gate else []
        return self.shared_experts * self._mlp(self.shared_ffn) + gate

    @cached_property
    def router(self) -> list[Tensor]:
        """The router of one layer: a score per expert, and the bias that balances them if there is one."""
        scores = [Tensor(self.hidden * self.experts, "whole")] if self.experts else []
        bias = [Tensor(self.experts, "whole", False)] if self.router_bias else []
        return scores + bias

    @cached_property
    def norms(self) -> list[Tensor]:
        """All norms of one layer, with the norms of queries and keys and of latent attention."""
        sizes = [self.hidden] * self.norms_per_layer
        if self.qk_norm:
            sizes += [self.head_size] * 2
        if self.latent:
            sizes += [self.latent.q_rank, self.latent.kv_rank]
        return [one for size in sizes for one in self._norm(size)]

    @cached_property
    def embedding(self) -> list[Tensor]:
        """The input embedding, learned positions, and the norm after them if there is one."""
        positions = [Tensor(self.positions * self.hidden, "whole")] if self.positions else []
        norm = self.final_norm if self.embedding_norm else []
        return [Tensor(self.vocab * self.hidden), *positions, *norm]

    @cached_property
    def final_norm(self) -> list[Tensor]:
        """The one after the last layer."""
        return self._norm(self.hidden)

    @cached_property
    def head(self) -> list[Tensor]:
        """The output projection; none where it is the input embedding."""
        return [] if self.tied else [Tensor(self.vocab * self.hidden)]

    def _norm(self, width: int) -> list[Tensor]:
        return [Tensor(width, "whole", False)] * NORMS[self.norm]

    def _mlp(self, ffn: int) -> list[Tensor]:
        into = 2 if self.gated else 1
        return into * _column(self.hidden, ffn, self.bias) + _row(ffn, self.hidden, self.bias)

    def layer_tensors(self, moe: bool) -> list[Tensor]:
        """All of a layer but its routed experts."""
        return self.attention + self.norms + (self.router + self.shared if moe else self.mlp)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert; 0 in a dense model."""
        return parameters_of(self.expert)

    @property
    def embedding_parameters(self) -> int:
        """The parameters before the first layer: the embedding, positions, and their norm."""
        return parameters_of(self.embedding)

    def layer_parameters(self, layer: int) -> int:
        """All that this layer, counted from 0, holds. Raises ValueError for a layer that the model does not have."""
        return self._layer(self.is_moe(layer))

    @property
    def parameters(self) -> int:
        """Φ: everything, tied embeddings once, without the multi-token-prediction modules."""
        layers = self.moe_layers * self._layer(moe=True) + (self.layers - self.moe_layers) * self._layer(moe=False)
        return layers + parameters_of(self.embedding + self.final_norm + self.head)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: Φ without the routed experts it is not sent to; both embeddings count whole.

        DeepSeek-V3's 37B is this number; its 36.6B leaves out the input embedding: a token reads only one row of it.
        """
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert_parameters

    @property
    def mtp_parameters(self) -> int:
        """The parameters that multi-token prediction adds, without the embedding and the head, which it shares with the model.

        A module: two norms, a projection of 2h to h, a layer like the last one, a norm. Published checkpoints store a copy of
        the embedding and the head with each. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
        """
        projection = 2 * self.hidden**2
        layer = self._layer(self.is_moe(self.layers - 1))
        return self.mtp_depth * (3 * parameters_of(self.final_norm) + projection + layer)

    def _layer(self, moe: bool) -> int:
        return parameters_of(self.layer_tensors(moe)) + (self.experts * self.expert_parameters if moe else 0)
