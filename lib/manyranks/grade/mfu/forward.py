"""The task forward_flops: a forward pass by its sizes, part by part, against the counter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

from manyranks.grade.mfu import amounts, counting
from manyranks.grade.mfu.amounts import Amounts, aspect
from manyranks.grade.mfu.given import Model
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect
from manyranks.training.config import GPTConfig

ATTENTION, SCORES, MLP, ROUTER, HEAD = PARTS = ("attention", "scores", "mlp", "router", "head")
CALL = "forward_flops(m, batch, seq, predicted)"
_KV = "keys and values are counted as if all heads had their own: there are kv_heads of them, each hidden / heads wide"
_KV_OUTPUT = "the output's product is as wide as the query's, whatever kv_heads is: hidden × hidden"
_ONE_HEAD = (
    "keys and values are counted as wide as one head, or with kv_heads numbers: there are kv_heads, each hidden / heads wide"
)
_NO_OUTPUT = "the output projection is missing: four products, query, key, value and output"
_HALF_SCORES = (
    "that is half of it: either one of the two products is missing, QKᵀ and the one with V, or the masked half. This counter "
    "counts the whole score matrix, for a mask makes no product smaller"
)
_OF_GROUPS = "scores are counted for the key/value heads only: each of the `heads` queries has scores of its own"
_NO_SCORES = "the attention scores are missing: QKᵀ and the product with V, two products without weights"
_WIDE_HEADS = "each head's product is hidden / heads deep, so that all heads together are hidden deep"
_ONE_ROW = "each token looks at seq tokens: seq · seq scores a sequence and head"
_ALL_ROWS = "tokens look at those of their own sequence only: batch · seq · seq, not (batch · seq)²"
_NO_GATE = "the gate is missing: a gated MLP, or expert, has three products, gate, up and down"
_GATE = "a gate is counted where there is none: without one there are two products, up and down"
_ALL_EXPERTS = "all experts are counted: a token's row goes to top_k of them, whatever their number is"
_ONE_EXPERT = "one expert is counted: a token's row goes to top_k of them"
_EXPERTS_NO_GATE = "experts are counted without their gate: if gated, they have three products as an MLP has"
_SHARED_FFN = "the shared experts are as large as the others: expert_ffn wide, not ffn"
_ONE_SHARED = "one shared expert is counted: a token goes to each of the shared_experts"
_NO_SHARED = "the shared experts are missing: each token goes to all of them, too"
_SHARED_CHOSEN = "each token goes to the shared experts besides its top_k, not among them, and once"
_FFN = "an expert's products are expert_ffn wide, not ffn"
_ALL_DENSE = "all layers are counted with an MLP: behind the first dense_layers, there are experts"
_NO_DENSE = "all layers are counted with experts: the first dense_layers have an MLP of ffn"
_NO_MLP = "the MLPs of the first dense_layers are missing"
_NO_EXPERTS = "the experts of the layers behind the first dense_layers are missing"
_WITH_ROUTER = "the router is counted twice: it has a name of its own"
_NO_ROUTER = "the router is a product, too: each row times hidden × experts"
_ROUTED_K = "the router gives each of the experts a logit, not only top_k: choosing comes afterwards"
_ALL_ROUTED = "a router is counted in each layer: the first dense_layers have none"
_EMBEDDING = (
    "the embedding is counted as a matrix product: it looks up one row for each token, which takes no FLOPs. Its matrix counts "
    "where the head multiplies by it"
)
_ALL_POSITIONS = "logits are counted for all tokens: the head sees the last `predicted` ones of each sequence"
_NO_HEAD = "the head is missing: predicted rows of each sequence times hidden × vocab"
_ONE_SEQUENCE = "the head's rows are those of all sequences: batch · predicted"
_EACH_LAYER = "the head comes once, after all layers"
_BY_ONE = "a multiply-add is counted as one: it is two FLOPs, so 2mkn for m × k times k × n"
_BACKWARD = "backward is counted, too: asked for is one forward pass"
_ONE_TOKEN = "that is one token's: there are batch · seq of them"
_ONE_OF_BATCH = "that is one sequence's: there are batch of them"
_ONE_LAYER = "that is one layer's: all layers are asked for"
_UNEXPLAINED = {
    ATTENTION: "each row times hidden × hidden, twice hidden × (kv_heads · hidden / heads), and hidden × hidden: 2 FLOPs each",
    SCORES: "in each layer and sequence two products: seq × hidden × seq and seq × seq × hidden, all heads together",
    MLP: "an MLP has 2 or 3 products of hidden × ffn; with experts, top_k + shared_experts of 2 or 3 of hidden × expert_ffn",
    ROUTER: "each row times hidden × experts, in layers with experts; 0 without",
    HEAD: "batch · predicted rows times hidden × vocab, once",
}


class Case(NamedTuple):
    """A model and how many tokens it sees."""

    model: Model
    batch: int
    seq: int
    predicted: int

    @property
    def config(self) -> GPTConfig:
        m = self.model
        experts = {} if not m.experts else {"experts": m.experts, "top_k": m.top_k, "expert_ffn": m.expert_ffn}
        experts |= {"shared_experts": m.shared_experts, "dense_layers": m.dense_layers} if m.experts else {}
        style = "llama" if m.gated else "gpt2"
        return GPTConfig(m.layers, m.hidden, m.heads, m.ffn, m.vocab, self.seq, m.kv_heads, style=style, **experts)

    @property
    def note(self) -> str:
        m, parts = self.model, []
        parts += [f"{m.heads} heads, {m.kv_heads} key/value heads", "gated" if m.gated else "no gate"]
        parts += [f"{m.experts} experts" if m.experts else "no experts", f"{self.batch} × {self.seq} tokens"]
        return "for " + ", ".join(parts)


class Rule(NamedTuple):
    """How a forward pass is counted; the defaults are right. Widths are those of a token's row, all of one layer."""

    kv: Callable[[Model], float] = lambda m: m.kv_heads * m.hidden / m.heads
    scores: Callable[[Case], float] = lambda c: 4 * c.batch * c.seq * c.seq * c.model.hidden
    matrices: Callable[[Model], int] = lambda m: 2 + m.gated
    chosen: Callable[[Model], float] = lambda m: m.top_k + m.shared_experts
    expert_ffn: Callable[[Model], int] = lambda m: m.expert_ffn
    dense: Callable[[Model], int] = lambda m: m.dense_layers
    moe: Callable[[Model], int] = lambda m: m.layers - m.dense_layers
    routed: Callable[[Model], float] = lambda m: (m.layers - m.dense_layers) * m.experts
    rows: Callable[[Case], float] = lambda c: c.batch * c.predicted


RIGHT = Rule()


def result(case: Case, rule: Rule = RIGHT) -> Amounts:
    """By part."""
    m, tokens = case.model, case.batch * case.seq
    mlps = rule.dense(m) * m.ffn + rule.moe(m) * rule.chosen(m) * rule.expert_ffn(m)
    return {
        ATTENTION: 2 * tokens * m.layers * m.hidden * (2 * m.hidden + 2 * rule.kv(m)),
        SCORES: m.layers * rule.scores(case),
        MLP: 2 * tokens * rule.matrices(m) * m.hidden * mlps,
        ROUTER: 2 * tokens * m.hidden * rule.routed(m),
        HEAD: 2 * rule.rows(case) * m.hidden * m.vocab,
    }


_RULES: list[tuple[str, str, Rule]] = [
    (ATTENTION, _KV, Rule(kv=lambda m: m.hidden)),
    (ATTENTION, _ONE_HEAD, Rule(kv=lambda m: m.hidden / m.heads)),
    (ATTENTION, _ONE_HEAD, Rule(kv=lambda m: m.kv_heads)),
    (SCORES, _HALF_SCORES, Rule(scores=lambda c: 2 * c.batch * c.seq * c.seq * c.model.hidden)),
    (SCORES, _HALF_SCORES, Rule(scores=lambda c: 2 * c.batch * c.seq * (c.seq + 1) * c.model.hidden)),
    (SCORES, _NO_SCORES, Rule(scores=lambda c: 0)),
    (SCORES, _OF_GROUPS, Rule(scores=lambda c: 4 * c.batch * c.seq**2 * c.model.hidden * c.model.kv_heads / c.model.heads)),
    (SCORES, _WIDE_HEADS, Rule(scores=lambda c: 4 * c.batch * c.seq**2 * c.model.hidden * c.model.heads)),
    (SCORES, _WIDE_HEADS, Rule(scores=lambda c: 4 * c.batch * c.seq**2 * c.model.hidden / c.model.heads)),
    (SCORES, _ONE_ROW, Rule(scores=lambda c: 4 * c.batch * c.seq * c.model.hidden)),
    (SCORES, _ALL_ROWS, Rule(scores=lambda c: 4 * (c.batch * c.seq) ** 2 * c.model.hidden)),
    (MLP, _NO_GATE, Rule(matrices=lambda m: 2)),
    (MLP, _GATE, Rule(matrices=lambda m: 3)),
    (MLP, _ALL_EXPERTS, Rule(chosen=lambda m: m.experts + m.shared_experts)),
    (MLP, _ALL_EXPERTS, Rule(chosen=lambda m: m.experts)),
    (MLP, _ONE_EXPERT, Rule(chosen=lambda m: 1)),
    (MLP, _ONE_EXPERT, Rule(chosen=lambda m: min(m.experts, 1) + m.shared_experts)),
    (MLP, _NO_SHARED, Rule(chosen=lambda m: m.top_k)),
    (MLP, _ONE_SHARED, Rule(chosen=lambda m: m.top_k + min(m.shared_experts, 1))),
    (MLP, _SHARED_CHOSEN, Rule(chosen=lambda m: m.top_k - m.shared_experts)),
    (MLP, _SHARED_CHOSEN, Rule(chosen=lambda m: m.top_k * (1 + m.shared_experts))),
    (MLP, _FFN, Rule(expert_ffn=lambda m: m.ffn)),
    (MLP, _ALL_DENSE, Rule(dense=lambda m: m.layers, moe=lambda m: 0)),
    (MLP, _NO_DENSE, Rule(dense=lambda m: 0 if m.experts else m.layers, moe=lambda m: m.layers)),
    (MLP, _NO_MLP, Rule(dense=lambda m: 0)),
    (MLP, _NO_EXPERTS, Rule(moe=lambda m: 0)),
    (ROUTER, _NO_ROUTER, Rule(routed=lambda m: 0)),
    (ROUTER, _ROUTED_K, Rule(routed=lambda m: (m.layers - m.dense_layers) * m.top_k)),
    (ROUTER, _ALL_ROUTED, Rule(routed=lambda m: m.layers * m.experts)),
    (HEAD, _EMBEDDING, Rule(rows=lambda c: c.batch * (c.predicted + c.seq))),
    (HEAD, _EMBEDDING, Rule(rows=lambda c: 2 * c.batch * c.predicted)),
    (HEAD, _EMBEDDING, Rule(rows=lambda c: 2 * c.batch * c.seq)),
    (HEAD, _ALL_POSITIONS, Rule(rows=lambda c: c.batch * c.seq)),
    (HEAD, _NO_HEAD, Rule(rows=lambda c: 0)),
    (HEAD, _ONE_SEQUENCE, Rule(rows=lambda c: c.predicted)),
    (HEAD, _EACH_LAYER, Rule(rows=lambda c: c.batch * c.predicted * c.model.layers)),
]


def _wrong(case: Case) -> Iterator[tuple[str, list[Amounts]]]:
    """What is wrong with all parts alike; then by part."""
    right, m, tokens = result(case), case.model, case.batch * case.seq
    for hint, factor in [(_BY_ONE, 1 / 2), (_BACKWARD, 3), (_ONE_TOKEN, 1 / tokens), (_ONE_OF_BATCH, 1 / case.batch)]:
        yield hint, [{part: right[part] * factor for part in PARTS}]
    yield _ONE_LAYER, [{part: right[part] / m.layers for part in PARTS[:-1]}]
    for part, hint, rule in _RULES:
        yield hint, [{part: result(case, rule)[part]}]
    product = 2 * tokens * m.layers * m.hidden
    yield _NO_OUTPUT, [{ATTENTION: right[ATTENTION] - product * m.hidden}]
    yield _KV_OUTPUT, [{ATTENTION: right[ATTENTION] - product * (m.hidden - m.kv_heads * m.hidden / m.heads)}]
    one = 2 * tokens * (m.layers - m.dense_layers) * m.hidden
    yield _EXPERTS_NO_GATE, [{MLP: right[MLP] - one * m.gated * (m.top_k + m.shared_experts) * m.expert_ffn}]
    yield _SHARED_FFN, [{MLP: right[MLP] + one * (2 + m.gated) * m.shared_experts * (m.ffn - m.expert_ffn)}]
    yield _WITH_ROUTER, [{MLP: right[MLP] + right[ROUTER]}]


def _run(case: Case, function: Callable, watch) -> Tensors:
    with own():
        found = function(*case)
    return amounts.named(found, PARTS, CALL)


@cache
def cases(n: int) -> list[Scene]:
    """Grouped heads; experts behind a dense layer; no gate."""
    models = [
        Case(Model(5, 36, 9, 3, 40, True, 50, 5), 4, 7, 7),
        Case(Model(3, 32, 8, 2, 44, True, 30, 1, 11, 5, 12, 3), 5, 7, 2),
        Case(Model(3, 30, 5, 5, 36, False, 41, 3), 4, 10, 1),
    ]
    return [_scene(case) for case in models]


def _scene(case: Case) -> Scene:
    counted = counting.forward(case.config, case.batch, case.seq, case.predicted)
    right = [amounts.exact({part: counted[part] for part in PARTS})]
    return Scene(1, partial(_run, case), right, lambda: amounts.mistakes(right, _wrong(case)), case, case.note)


@dataclass(frozen=True)
class ForwardFlops(MfuTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    measured: ClassVar[str] = "the counter has"
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("the attention's products with weights", 0.2, (ATTENTION,)),
        aspect("its scores", 0.2, (SCORES,)),
        aspect("the MLPs and the experts", 0.25, (MLP,)),
        aspect("the routers", 0.1, (ROUTER,)),
        aspect("the head", 0.25, (HEAD,)),
    )

    def otherwise(self, trial: Trial, name: str) -> str:
        """Of this part."""
        return _UNEXPLAINED[name]
