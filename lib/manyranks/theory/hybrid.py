"""Hybrid models: their layers mix tokens in several ways, by attention, by a state, or by attention to compressed keys.

Their parameters are counted. Nothing models yet how long such a layer takes or what it keeps, so no estimate accepts one.
"""

from dataclasses import dataclass, field

from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.names import concise, whole


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet: a matrix of key_size × value_size for each value head, corrected token by token.

    key_heads: heads of queries, and of keys.
    value_heads: heads of values, each with a gate for its output, a decay and a step.
    kernel: tokens that the convolution of queries, keys and values sees.
    Source: arXiv 2412.06464, section 3; transformers, modeling_qwen3_next.py.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    def __post_init__(self):
        whole(**vars(self))

    def parameters(self, hidden: int) -> int:
        """Counts projections, convolution, decays, the output's norm and its projection."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        into = hidden * (2 * keys + 2 * values + 2 * self.value_heads)
        convolution, decays = self.kernel * (2 * keys + values), 2 * self.value_heads
        return into + convolution + decays + self.value_size + values * hidden


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2: a state of head_size × state for each head, which decays from token to token.

    groups: sets of the state's inputs and outputs, each for as many heads.
    kernel: tokens that the convolution sees.
    Source: arXiv 2405.21060, section 7; transformers, modeling_nemotron_h.py.
    """

    heads: int
    head_size: int
    groups: int
    state: int
    kernel: int

    def __post_init__(self):
        whole(**vars(self))

    def parameters(self, hidden: int) -> int:
        """Counts the projection, convolution with its bias, decays and skips, the output's norm and its projection."""
        inner, states = self.heads * self.head_size, 2 * self.groups * self.state
        into, convolution = hidden * (2 * inner + states + self.heads), (self.kernel + 1) * (inner + states)
        return into + convolution + 3 * self.heads + inner + inner * hidden


@dataclass(frozen=True)
class CompressedAttention:
    """Attention to a window, and to compressed keys: one stands for `ratio` tokens, and is their value, too.

    q_rank: numbers of a token that its queries are expanded from.
    groups: sets of heads, each projected to o_rank numbers before the output.
    ratio: tokens per compressed key; 0: the layer has only its window.
    index_heads: heads of index_size that choose a query's keys; with them, windows overlap. 0: a query sees all keys.
    Source: DeepSeek-V4, arXiv 2606.19348, section 2.3; transformers, modeling_deepseek_v4.py.
    """

    heads: int
    head_size: int
    q_rank: int
    groups: int
    o_rank: int
    ratio: int
    index_heads: int
    index_size: int

    def __post_init__(self):
        sizes = vars(self)
        whole(**{name: size for name, size in sizes.items() if name not in _MAY_BE_0})
        whole(0, **{name: sizes[name] for name in _MAY_BE_0})

    def parameters(self, hidden: int) -> int:
        """Counts projections, norms and sinks, and what compresses and chooses keys."""
        queries, output = self.heads * self.head_size, self.groups * self.o_rank
        q = self.q_rank * (hidden + 1 + queries)
        attention = q + (hidden + 1) * self.head_size + queries * self.o_rank + output * hidden + self.heads
        if not self.ratio:
            return attention
        compressed = self._compressor(hidden, self.head_size)
        if not self.index_heads:
            return attention + compressed
        chooses = self.q_rank * self.index_heads * self.index_size + hidden * self.index_heads
        return attention + compressed + chooses + self._compressor(hidden, self.index_size)

    def _compressor(self, hidden: int, size: int) -> int:
        wide = 2 * size if self.index_heads > 0 else size
        return 2 * hidden * wide + self.ratio * wide + size


_MAY_BE_0 = ("ratio", "index_heads", "index_size")
Mixer = DeltaNet | Mamba2 | CompressedAttention


@dataclass(frozen=True)
class HybridShape:
    """A model of layers that mix tokens and of MLPs, each with a norm before it.

    shape: the sizes of its attention, experts and vocabulary; its `layers` are those that mix tokens.
    mixers: what stands in place of attention, and in how many layers; the others have attention.
    mlp_layers: layers with experts.
    output_gate: attention's output is multiplied with a gate, as wide as the queries.
    streams: copies of the residual stream, which hyper-connections mix before and after each layer; 1: there are none.
    Raises ValueError for counts that don't go together.
    """

    shape: ModelShape
    mixers: tuple[tuple[Mixer, int], ...]
    mlp_layers: int
    output_gate: bool = False
    streams: int = 1
    source: str = field(default="", repr=False)

    def __post_init__(self):
        whole(mlp_layers=self.mlp_layers, streams=self.streams, **{"layers of a mixer": min(self._counts, default=1)})
        if sum(self._counts) > self.shape.layers:
            raise ValueError(f"mixers in {sum(self._counts)} of {self.shape.layers} layers that mix tokens")
        if not self.shape.experts:
            raise ValueError(f"shape={self.shape}: its MLPs must have experts")

    def __repr__(self) -> str:
        return f"{concise(self, 'mixers', hide='shape')[:-1]}, name={self.name!r})"

    @property
    def _counts(self) -> list[int]:
        return [layers for _, layers in self.mixers]

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def parameters(self) -> int:
        """Counts everything but the multi-token-prediction modules."""
        norm = parameters_of(self.shape.final_norm)
        ends = parameters_of(self.shape.embedding + self.shape.final_norm + self.shape.head)
        attention = (self.shape.layers - sum(self._counts)) * self._attention
        mixers = sum(layers * (mixer.parameters(self.shape.hidden) + norm) for mixer, layers in self.mixers)
        return ends + attention + mixers + self.mlp_layers * self._mlp + self._connections

    @property
    def active_parameters(self) -> int:
        """Counts those that one token uses, both embeddings whole."""
        unused = self.shape.experts - self.shape.top_k
        return self.parameters - self.mlp_layers * unused * self.shape.expert_parameters

    @property
    def mtp_parameters(self) -> int:
        """Counts what the multi-token-prediction modules add: each a projection, three norms, attention and experts."""
        module = 2 * self.shape.hidden**2 + 3 * parameters_of(self.shape.final_norm) + self._attention + self._mlp
        return self.shape.mtp_depth * module

    @property
    def _connections(self) -> int:
        """Counts what mixes the streams: each layer learns n to read, n to write and n × n to mix, and the head n to read."""
        n, read = self.streams, self.streams * self.shape.hidden + 1
        each = (2 + n) * n * read + 3
        return ((self.shape.layers + self.mlp_layers) * each + n * read + 1) if n > 1 else 0

    @property
    def _attention(self) -> int:
        gate = self.shape.hidden * self.shape.query_size if self.output_gate else 0
        heads = 2 * self.shape.head_size if self.shape.qk_norm else 0
        return parameters_of(self.shape.attention + self.shape.final_norm) + gate + heads

    @property
    def _mlp(self) -> int:
        experts = self.shape.experts * self.shape.expert_parameters
        return parameters_of(self.shape.router + self.shape.shared + self.shape.final_norm) + experts
