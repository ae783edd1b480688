"""Hybrid models: most of their layers mix tokens in time linear in the sequence, the others by attention.

Their parameters are counted. Nothing models yet how long a linear layer takes or what it keeps, so no estimate accepts one.
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
class HybridShape:
    """A model of attention, linear mixers and MLPs, each with a norm before it.

    shape: the sizes of its attention, experts and vocabulary; its `layers` are those that mix tokens.
    linear: what stands in place of attention.
    linear_layers: layers with it; the others have attention.
    mlp_layers: layers with experts.
    output_gate: attention's output is multiplied with a gate, as wide as the queries.
    Raises ValueError for counts that don't go together.
    """

    shape: ModelShape
    linear: DeltaNet | Mamba2
    linear_layers: int
    mlp_layers: int
    output_gate: bool = False
    source: str = field(default="", repr=False)

    def __post_init__(self):
        whole(linear_layers=self.linear_layers, mlp_layers=self.mlp_layers)
        if self.linear_layers > self.shape.layers:
            raise ValueError(f"linear_layers={self.linear_layers}: of {self.shape.layers} layers that mix tokens")
        if not self.shape.experts:
            raise ValueError(f"shape={self.shape}: its MLPs must have experts")

    def __repr__(self) -> str:
        return f"{concise(self, 'linear', hide='shape')[:-1]}, name={self.name!r})"

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def parameters(self) -> int:
        """Counts everything but the multi-token-prediction modules."""
        linear = self.linear.parameters(self.shape.hidden) + parameters_of(self.shape.final_norm)
        ends = parameters_of(self.shape.embedding + self.shape.final_norm + self.shape.head)
        attention = (self.shape.layers - self.linear_layers) * self._attention
        return ends + attention + self.linear_layers * linear + self.mlp_layers * self._mlp

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
    def _attention(self) -> int:
        gate = self.output_gate * self.shape.hidden * self.shape.query_size
        heads = 2 * self.shape.head_size * self.shape.qk_norm
        return parameters_of(self.shape.attention + self.shape.final_norm) + gate + heads

    @property
    def _mlp(self) -> int:
        experts = self.shape.experts * self.shape.expert_parameters
        return parameters_of(self.shape.router + self.shape.shared + self.shape.final_norm) + experts
