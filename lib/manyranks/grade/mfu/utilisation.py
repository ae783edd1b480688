"""The task mfu: from the parameters' shapes, a step's time and a data sheet to a utilisation, under a paper's convention."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

from manyranks.grade.mfu import amounts, counting
from manyranks.grade.mfu.amounts import PERCENT, Amounts, aspect
from manyranks.grade.mfu.given import Row, Run
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT

FULL, CAUSAL, PARAMETERS, PALM = CONVENTIONS = ("full", "causal", "parameters", "palm")
CALL = "mfu(run, sheet, convention)"
_EMBEDDING = (
    "the embedding is counted as a matrix product: its rows are looked up. The head's product counts, and its matrix is the "
    "embedding's where the two are tied"
)
_POSITIONS = "the embedding of positions is counted as a matrix product: its rows are looked up, too"
_NO_HEAD = "the head is missing: where it is tied, its matrix has the embedding's name, and is multiplied by all the same"
_NO_OWN_HEAD = "the head is missing: its matrix, head.projection.weight, is multiplied by"
_NO_NAME = "where the head is tied, its matrix stands in run.shapes once, as embedding.tokens.weight"
_VECTORS = "biases and norms' weights are counted as products: those are vectors. Products are of matrices"
_WHOLE_MASK = "causal attention is counted full: this convention counts the half of the scores that the mask leaves"
_HALF_MASK = "half of the scores is counted: this convention counts the whole score matrix"
_NO_SCORES = "the attention scores are missing: this convention has 12·L·h·s for them, or half of it"
_WITH_SCORES = 'the attention scores are counted: "parameters" is 6Φ and nothing else'
_ALL_PARAMETERS = (
    "all parameters are counted: these conventions count matrix products, and only where weights are multiplied by"
)
_PRODUCTS_ONLY = (
    'not all parameters are counted: "parameters" and "palm" say 6Φ, and Φ is all of them, each once, whatever they do'
)
_HEAD_TWICE = "the tied matrix is counted twice: Φ is all parameters, and each counts once"
_ONCE = "backward is counted once: 2 FLOPs a parameter and token in forward, 4 in backward"
_NO_BACKWARD = "backward is missing: 2 FLOPs a parameter and token in forward, 4 in backward"
_NO_SEQ = "the scores' FLOPs of a token grow with seq: it looks at seq tokens"
_SQUARE = "that is a sequence's scores: a token's are 12·L·h·s, with one s"
_WEIGHTS_PEAK = "the peak is that of the dtype in which the weights are kept: the products run in products_dtype"
_OTHER_PEAK = "the peak is that of another dtype: take the row of products_dtype"
_SPARSE = "that is the peak for sparse matrices, twice what dense ones can reach: halve it where the row says sparse"
_HALVED = "the peak is halved where the row says nothing of sparsity: only sparse rows count FLOPs twice"
_ONE_REPLICA = (
    "the tokens are one replica's, and the chips are those of all: tokens of the whole job, over the chips of the whole job"
)
_ONE_CHIP = "the peak is one chip's: the job has replicas · chips of them"
_CHIPS_ONLY = "the peak is one replica's: the job has replicas · chips"
_REPLICAS_ONLY = "a replica has several chips: the job has replicas · chips of them"
_NO_ACCUMULATE = "a step has `accumulate` micro-batches: sequences · accumulate · replicas sequences"
_NO_SEQUENCES = "a micro-batch has several sequences: sequences · accumulate · replicas · seq tokens a step"
_NOT_TOKENS = "those are sequences a second, not tokens: each has seq"
_PER_CENT = "that is in per cent: a utilisation is a share, 0.4 and not 40"
_UPSIDE_DOWN = "that is the inverse: what was reached ÷ what the chips could do"
_SECONDS = "that is FLOPs of a step: divide by its seconds"
_SHORT = "that is rounded: return the share with all of its digits"
_UNEXPLAINED = (
    "FLOPs of a token by the convention · tokens of a step ÷ seconds ÷ (all chips · the dense peak of products_dtype)"
)
_SHEET = {
    "fp64": Row(7e9, False),
    "fp32": Row(31e9, False),
    "tf32": Row(210e9, True),
    "bf16": Row(432e9, True),
    "fp8": Row(910e9, True),
}


_DENSE = _SHEET | {"bf16": Row(216e9, False)}  # of another vendor, for the same chip


class Case(NamedTuple):
    """A run on a chip, under a convention. share: its MFU under "full"; dense: whether bf16's row is that of dense matrices."""

    config: GPTConfig
    sequences: int
    accumulate: int
    replicas: int
    chips: int
    dtype: str
    convention: str
    share: float
    dense: bool = False

    @property
    def sheet(self) -> dict[str, Row]:
        """The chip's."""
        return _DENSE if self.dense else _SHEET

    @property
    def note(self) -> str:
        tied = "tied" if self.config.tied else "untied"
        return f'under "{self.convention}", {tied} head, {self.config.style}\'s style, products in {self.dtype}'

    @property
    def peak(self) -> float:
        """Of one chip, for dense matrices."""
        row = self.sheet[self.dtype]
        return row.flops / (2 if row.sparse else 1)


class Counted(NamedTuple):
    """A run, and FLOPs of training on one token, as the counter has them: of products with weights, and of the scores."""

    run: Run
    products: float
    scores: float


@cache
def counted(case: Case) -> Counted:
    """By running the model; the step's time follows from the share."""
    c = case.config
    scores = 3 * counting.forward(c, 1, c.seq, c.seq)["scores"] / c.seq
    whole = counting.step(c, 1) / c.seq
    tokens = case.sequences * case.accumulate * case.replicas * c.seq
    seconds = whole * tokens / (case.share * case.replicas * case.chips * case.peak)
    shapes = {name: tuple(p.shape) for name, p in GPT(c).named_parameters()}
    sizes = (c.layers, c.hidden, c.seq, case.sequences, case.accumulate, case.replicas, case.chips)
    return Counted(Run(shapes, c.tied, *sizes, round(seconds, 9), "fp32", case.dtype), whole - scores, scores)


class Rule(NamedTuple):
    """How the MFU is made; the defaults are right. token: FLOPs; tokens: of a step; chips: of the job; peak: of the case."""

    token: Callable[[Case], float] = lambda case: _token(case)
    tokens: Callable[[Run], float] = lambda r: r.sequences * r.accumulate * r.replicas * r.seq
    chips: Callable[[Run], float] = lambda r: r.replicas * r.chips
    peak: Callable[[Case], float] = lambda case: case.peak


RIGHT = Rule()


def result(case: Case, rule: Rule = RIGHT) -> Amounts:
    """The share."""
    run = counted(case).run
    return {_MFU: rule.token(case) * rule.tokens(run) / (run.seconds * rule.chips(run) * rule.peak(case))}


_MFU = "the MFU"


def _size(run: Run, of: Callable[[str, tuple[int, ...]], bool] = lambda name, shape: True) -> int:
    """Parameters whose name and shape are so."""
    return sum(math.prod(shape) for name, shape in run.shapes.items() if of(name, shape))


def _token(case: Case, products: float | None = None, scores: float | None = None, parameters: float | None = None) -> float:
    """FLOPs of training on one token by the convention, from what was counted, or from what is given instead."""
    run, right_products, right_scores = counted(case)
    products = right_products if products is None else products
    full = right_scores if scores is None else scores
    everything = 6 * (_size(run) if parameters is None else parameters)
    return {
        FULL: products + full,
        CAUSAL: products + (full / 2 if scores is None else full),
        PARAMETERS: everything,
        PALM: everything + full,
    }[case.convention]


def _some_vectors(run: Run) -> list[int]:
    """Sizes of all vectors; of the norms', of all others; of biases, of all others."""
    vectors = _size(run, lambda _, shape: len(shape) == 1)
    norms = _size(run, lambda name, shape: len(shape) == 1 and "norm" in name)
    biases = _size(run, lambda name, shape: len(shape) == 1 and name.endswith("bias"))
    return [some for some in (vectors, norms, vectors - norms, biases, vectors - biases) if some]


def _matrices(case: Case) -> list[tuple[str, float]]:
    """What may be counted wrong: hint and FLOPs a token."""
    run, products, scores = counted(case)
    tokens = _size(run, lambda name, _: name == "embedding.tokens.weight")
    places = _size(run, lambda name, _: name == "embedding.positions.weight")
    looked_up = places + (0 if run.tied else tokens)
    byname, no_head = products / 6, _NO_HEAD if run.tied else _NO_OWN_HEAD
    found = [
        (_EMBEDDING, {"products": 6 * (byname + tokens)}),
        (_EMBEDDING, {"products": 6 * (byname + tokens + places)}),
        (_EMBEDDING if looked_up > places else _POSITIONS, {"products": 6 * (byname + looked_up)}),
        (_POSITIONS, {"products": 6 * (byname + places)}),
        (no_head, {"products": 6 * (byname - tokens)}),
        (no_head, {"products": 6 * (byname - tokens + places)}),
        *((_VECTORS, {"products": 6 * (byname + some)}) for some in _some_vectors(run)),
        (_ALL_PARAMETERS, {"products": 6 * _size(run)}),
        (_NO_HEAD if run.tied else _VECTORS, {"products": 6 * (_size(run) - tokens)}),
        (_VECTORS, {"products": 6 * (_size(run) - looked_up)}),
        (_PRODUCTS_ONLY, {"parameters": byname}),
        (_PRODUCTS_ONLY, {"parameters": _size(run) - looked_up}),
        (_PRODUCTS_ONLY, {"parameters": _size(run) - tokens - places}),
        (_PRODUCTS_ONLY, {"parameters": _size(run) - tokens}),
        *((_PRODUCTS_ONLY, {"parameters": _size(run) - some}) for some in _some_vectors(run)),
        (_PRODUCTS_ONLY, {"parameters": _size(run, lambda name, _: name.startswith("layers."))}),
        (_HEAD_TWICE, {"parameters": _size(run) + tokens * run.tied}),
        (_WHOLE_MASK, {"scores": scores}) if case.convention == CAUSAL else (_HALF_MASK, {"scores": scores / 2}),
        (_NO_SCORES, {"scores": 0}),
        (_ONCE, {"products": products * 2 / 3, "parameters": _size(run) * 2 / 3}),
        (_NO_BACKWARD, {"products": products / 3, "parameters": _size(run) / 3}),
        (_NO_SEQ, {"scores": scores / run.seq}),
        (_SQUARE, {"scores": scores * run.seq}),
    ]
    wrong = [(hint, _token(case, **changed)) for hint, changed in found]
    if case.convention == PARAMETERS:
        wrong += [(_WITH_SCORES, _token(case) + scores), (_WITH_SCORES, _token(case) + scores / 2)]
    return [*wrong, (_ONCE, _token(case) * 2 / 3), (_NO_BACKWARD, _token(case) / 3)]


def _wrong(case: Case) -> Iterator[tuple[str, list[Amounts]]]:
    """By FLOPs of a token, then by peak, chips and tokens, then by what is made of them."""
    run, row = counted(case).run, case.sheet[case.dtype]
    for hint, token in _matrices(case):
        yield hint, [result(case, Rule(token=lambda case, token=token: token))]
    if row.sparse:
        yield _SPARSE, [result(case, Rule(peak=lambda case: row.flops))]
        yield _SPARSE, [result(case, Rule(peak=lambda case: 2 * row.flops))]
    for dtype, other in case.sheet.items():
        hint = _WEIGHTS_PEAK if dtype == run.weights_dtype else _OTHER_PEAK
        for peak in {other.flops, other.flops / (2 if other.sparse else 1)} if dtype != case.dtype else ():
            yield hint, [result(case, Rule(peak=lambda case, peak=peak: peak))]
    if not row.sparse:
        yield _HALVED, [result(case, Rule(peak=lambda case: row.flops / 2))]
    for hint, rule in _RULES:
        yield hint, [result(case, rule)]
    share = result(case)[_MFU]
    yield _PER_CENT, [{_MFU: 100 * share}]
    yield _UPSIDE_DOWN, [{_MFU: 1 / share}]
    yield _SECONDS, [{_MFU: share * run.seconds}]
    for digits in (2, 3, 4):
        yield _SHORT, [{_MFU: round(share, digits)}]


_RULES: list[tuple[str, Rule]] = [
    (_ONE_REPLICA, Rule(tokens=lambda r: r.sequences * r.accumulate * r.seq)),
    (_REPLICAS_ONLY, Rule(chips=lambda r: r.replicas)),
    (_REPLICAS_ONLY, Rule(tokens=lambda r: r.sequences * r.accumulate * r.seq, chips=lambda r: 1)),
    (_ONE_CHIP, Rule(chips=lambda r: 1)),
    (_CHIPS_ONLY, Rule(chips=lambda r: r.chips)),
    (_NO_ACCUMULATE, Rule(tokens=lambda r: r.sequences * r.replicas * r.seq)),
    (_NO_SEQUENCES, Rule(tokens=lambda r: r.accumulate * r.replicas * r.seq)),
    (_NOT_TOKENS, Rule(tokens=lambda r: r.sequences * r.accumulate * r.replicas)),
]


def _run(case: Case, run: Run, function: Callable, watch) -> Tensors:
    with own():
        found = function(run._replace(shapes=dict(run.shapes)), dict(case.sheet), case.convention)
    return {_MFU: amounts.number(found, f"what {CALL} returned", "it returns one number, the share")}


@cache
def cases(n: int) -> list[Scene]:
    """Each convention; tied and not; with learned positions; another dtype."""
    llama = GPTConfig(3, 24, 6, 40, 50, 11, 2, tied=False)
    gpt2 = GPTConfig(2, 20, 4, 36, 44, 13, style="gpt2", tied=True)
    return [
        _scene(Case(llama, 5, 7, 13, 8, "bf16", FULL, 0.41)),
        _scene(Case(gpt2, 7, 5, 17, 6, "bf16", CAUSAL, 0.37, dense=True)),
        _scene(Case(gpt2, 5, 9, 11, 8, "fp8", PARAMETERS, 0.29)),
        _scene(Case(llama, 9, 5, 7, 8, "fp32", PALM, 0.52)),
    ]


def _scene(case: Case) -> Scene:
    right = [amounts.exact(result(case))]
    wrong = partial(_wrong, case)
    return Scene(1, partial(_run, case, counted(case).run), right, lambda: amounts.mistakes(right, wrong()), case, case.note)


def _under(convention: str, share: float) -> Aspect:
    """Of the cases with this convention."""
    found = aspect(f'the share under "{convention}"', share, (_MFU,), PERCENT)

    def judge(task: "Mfu", trial: Trial) -> Verdict:
        return found.judge(task, trial) if trial.case.must.convention == convention else Verdict(True)

    return found._replace(judge=judge)


@dataclass(frozen=True)
class Mfu(MfuTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    measured: ClassVar[str] = "by the counter it is"
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"KeyError: 'head\.projection\.weight'", _NO_NAME),
        (r"KeyError: 'embedding\.positions\.weight'", "only models in GPT-2's style have learned positions"),
        (r"KeyError", "the sheet's rows are called as run.products_dtype and run.weights_dtype are, the conventions as above"),
        *MfuTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = tuple(
        _under(convention, share) for convention, share in ((FULL, 0.3), (CAUSAL, 0.25), (PARAMETERS, 0.2), (PALM, 0.25))
    )
