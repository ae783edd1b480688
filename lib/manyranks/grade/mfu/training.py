"""The task step_flops: what a step of training needs, and what it runs, where some layers do not learn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import ClassVar, NamedTuple

from manyranks.grade.mfu import amounts, counting
from manyranks.grade.mfu.amounts import Amounts, aspect, times
from manyranks.grade.mfu.given import Layer
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.journal import Stopped
from manyranks.training.config import GPTConfig

MODEL, HARDWARE = AMOUNTS = ("model", "hardware")
RECOMPUTE = ("none", "selective", "full")
CALL = "step_flops(layers, head, recompute, flash)"
_BATCH, _SEQ = 2, 9
_ONCE = (
    "backward is counted once, or forward is missing: for each product of forward backward has two, one for the gradient of "
    "what came in and one for that of the weights. Together they are three times forward"
)
_NO_BACKWARD = "backward is missing: where everything learns it has twice the FLOPs of forward"
_USEFUL = "recomputation is counted as useful: model FLOPs are what the step needs, once. What runs again is hardware FLOPs"
_SCORES_USEFUL = "what backward of flash attention computes again is no model FLOPs: QKᵀ is needed once"
_SWAPPED = "that is the other one: hardware FLOPs have what runs again, model FLOPs have not"
_NO_AGAIN = "what is recomputed is missing in the hardware FLOPs: it runs again, in backward"
_FROZEN_LEARN = (
    "a layer that does not learn is counted as if it did: its weights have no gradients, so its products with weights have one "
    "product in backward at most"
)
_NEVER = (
    "layers that do not learn are counted without any backward: where one before them learns, the gradient has to come "
    "through, one product for each of forward's"
)
_ALWAYS = "backward ends at the first layer that learns: those before it have none, and nothing is recomputed there"
_BEHIND = "it is what learns before a layer that matters: backward comes from the head, and ends at the first layer that learns"
_SCORES_FROZEN = (
    "the scores have no weights: both of their inputs are activations, and both need gradients, so backward of the scores is "
    "twice forward wherever backward comes at all"
)
_AGAIN_ALWAYS = "nothing is recomputed where backward does not come: before the first layer that learns"
_AGAIN_LEARNING = "layers that do not learn are recomputed, too, where backward comes through them"
_SELECTIVE = '"selective" recomputes the scores, once forward, and no product with weights'
_SELECTIVE_NOT_SCORES = '"selective" recomputes the scores only: the products with weights are those that are kept'
_FULL = '"full" recomputes whole layers, scores and products'
_HEAD_AGAIN = "the head is not recomputed: backward begins with it"
_NO_HEAD = "the head is missing: forward and backward, and it learns"
_HEAD_ONCE = "the head learns: forward, and two products in backward"
_NO_FLASH = (
    "flash attention keeps no scores: its backward computes QKᵀ again, half a forward of the scores, whatever recompute is"
)
_FLASH_WHOLE = "backward of flash attention computes QKᵀ again, not the product with V: half a forward of the scores"
_FLASH_ALWAYS = "without flash attention the scores are kept as matrices: what runs again is what `recompute` says"
_FLASH_FROZEN = "backward of flash attention computes QKᵀ again wherever it runs, in layers that do not learn, too"
_INSTEAD = (
    "with flash attention, too, selective recomputation runs the whole core again, and its backward then computes QKᵀ once "
    "more: one and a half forwards of the scores"
)
_PAIR = "it returns a pair of numbers, (model, hardware)"
_UNEXPLAINED = (
    "products: forward 1, backward 2 where the layer learns, 1 where only a layer before it does, 0 before the first that "
    "learns. scores: 1, and 2 where backward comes. head: 3. hardware adds what recompute and flash run again where backward "
    "comes"
)


class Case(NamedTuple):
    """learns: of each layer; the embedding does not."""

    learns: tuple[bool, ...]
    recompute: str
    flash: bool
    kv_heads: int = 2

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(len(self.learns), 24, 6, 40, 50, _SEQ, self.kv_heads, tied=False)

    @property
    def note(self) -> str:
        learns = (
            "all layers learn"
            if all(self.learns)
            else "layers learn: " + ", ".join("yes" if its else "no" for its in self.learns)
        )
        return f"with recompute={self.recompute!r}, flash={self.flash}, {learns}"

    def layers(self) -> tuple[list[Layer], int]:
        """What the learner's function is given: FLOPs of forward, of each layer and of the head."""
        found = counting.forward(self.config, _BATCH, _SEQ, _SEQ)
        count = len(self.learns)
        products = (found["attention"] + found["mlp"]) // count
        return [Layer(products, found["scores"] // count, learns) for learns in self.learns], found["head"]


class Rule(NamedTuple):
    """How a step is counted; the defaults are right.

    backward: products, of learns and comes, whether backward comes to the layer; scores: the same; comes: of learns of all
    layers; again: of recompute, products and scores, what runs again; where: of learns and comes, whether it does; core: what
    flash attention runs again, in forwards of the scores; where_core: as where; head: forwards of the head.
    """

    backward: Callable[[bool, bool], int] = lambda learns, comes: comes + learns
    scores: Callable[[bool, bool], int] = lambda learns, comes: 2 * comes
    comes: Callable[[tuple[bool, ...]], list[bool]] = lambda learns: list(accumulate(learns, max))
    again: Callable[[str, int, int], float] = lambda recompute, products, scores: {
        "none": 0,
        "selective": scores,
        "full": products + scores,
    }[recompute]
    where: Callable[[bool, bool], bool] = lambda learns, comes: comes
    core: Callable[[Case], float] = lambda case: case.flash / 2
    where_core: Callable[[bool, bool], bool] = lambda learns, comes: comes
    head: float = 3
    head_again: float = 0


def result(case: Case, given: tuple[list[Layer], int], rule: Rule) -> Amounts:
    """Model and hardware FLOPs."""
    layers, head = given
    model, again = rule.head * head, 0.0
    for layer, comes in zip(layers, rule.comes(case.learns), strict=True):
        learns = layer.learns
        model += layer.products * (1 + rule.backward(learns, comes)) + layer.scores * (1 + rule.scores(learns, comes))
        again += rule.where(learns, comes) * rule.again(case.recompute, layer.products, layer.scores)
        again += rule.where_core(learns, comes) * rule.core(case) * layer.scores
    again += rule.head_again * (case.recompute == "full") * head
    return {MODEL: model, HARDWARE: model + again}


_MODELS: list[tuple[str, Rule]] = [
    (_ONCE, Rule(backward=lambda learns, comes: comes, scores=lambda learns, comes: comes, head=2)),
    (_ONCE, Rule(backward=lambda learns, comes: 1, scores=lambda learns, comes: 1, head=2)),
    (_NO_BACKWARD, Rule(backward=lambda learns, comes: 0, scores=lambda learns, comes: 0, head=1)),
    (_FROZEN_LEARN, Rule(backward=lambda learns, comes: 2, scores=lambda learns, comes: 2)),
    (_FROZEN_LEARN, Rule(backward=lambda learns, comes: 2 * comes)),
    (_NEVER, Rule(backward=lambda learns, comes: 2 * learns, scores=lambda learns, comes: 2 * learns)),
    (_NEVER, Rule(backward=lambda learns, comes: 2 * learns)),
    (_ALWAYS, Rule(comes=lambda learns: [True] * len(learns))),
    (_ALWAYS, Rule(comes=lambda learns: [True] * len(learns), scores=lambda learns, comes: 1 + learns)),
    (_ALWAYS, Rule(backward=lambda learns, comes: 1 + learns)),
    (_BEHIND, Rule(comes=lambda learns: list(accumulate(learns[::-1], max))[::-1])),
    (_SCORES_FROZEN, Rule(scores=lambda learns, comes: comes + learns)),
    (_SCORES_FROZEN, Rule(scores=lambda learns, comes: comes)),
    (_SCORES_FROZEN, Rule(scores=lambda learns, comes: 2 * learns)),
    (_NO_HEAD, Rule(head=0)),
    (_HEAD_ONCE, Rule(head=2)),
    (_HEAD_ONCE, Rule(head=1)),
]
_AGAIN: list[tuple[str, Rule]] = [
    (_AGAIN_ALWAYS, Rule(where=lambda learns, comes: True)),
    (_AGAIN_ALWAYS, Rule(where=lambda learns, comes: True, where_core=lambda learns, comes: True)),
    (_AGAIN_ALWAYS, Rule(where_core=lambda learns, comes: True)),
    (_FLASH_FROZEN, Rule(where_core=lambda learns, comes: learns)),
    (_AGAIN_LEARNING, Rule(where=lambda learns, comes: learns)),
    (_AGAIN_LEARNING, Rule(where=lambda learns, comes: learns, where_core=lambda learns, comes: learns)),
    (_SELECTIVE, Rule(again=lambda recompute, p, s: {"none": 0, "selective": p + s, "full": p + s}[recompute])),
    (_SELECTIVE_NOT_SCORES, Rule(again=lambda recompute, p, s: {"none": 0, "selective": p, "full": p + s}[recompute])),
    (_SELECTIVE, Rule(again=lambda recompute, p, s: {"none": 0, "selective": 3 * s, "full": p + s}[recompute])),
    (_FULL, Rule(again=lambda recompute, p, s: {"none": 0, "selective": s, "full": p}[recompute])),
    (_FULL, Rule(again=lambda recompute, p, s: {"none": 0, "selective": s, "full": 3 * (p + s)}[recompute])),
    (_NO_AGAIN, Rule(again=lambda recompute, p, s: 0)),
    (_HEAD_AGAIN, Rule(head_again=1)),
    (_NO_FLASH, Rule(core=lambda case: case.flash * (case.recompute != "none") / 2)),
    (_NO_FLASH, Rule(core=lambda case: case.flash * (case.recompute != "full") / 2)),
    (_INSTEAD, Rule(core=lambda case: case.flash * (case.recompute != "selective") / 2)),
    (_FLASH_WHOLE, Rule(core=lambda case: float(case.flash))),
    (_FLASH_ALWAYS, Rule(core=lambda case: 0.5)),
    (_FLASH_ALWAYS, Rule(core=lambda case: (case.flash or case.recompute == "selective") / 2)),
]


def _wrong(case: Case, given: tuple[list[Layer], int], right: Amounts) -> Iterator[tuple[str, list[Amounts]]]:
    """By the model FLOPs; where these are right, by the hardware FLOPs."""
    if right[HARDWARE] != right[MODEL]:
        yield _SWAPPED, [{MODEL: right[HARDWARE], HARDWARE: right[MODEL]}]
        yield _SCORES_USEFUL, [{MODEL: right[HARDWARE] - _recomputed(case, given)}]
    if case.recompute != "none":
        yield _USEFUL, [{MODEL: right[HARDWARE]}]
        yield _USEFUL, [{MODEL: right[MODEL] + _recomputed(case, given)}]
        yield _NO_AGAIN, [{MODEL: right[MODEL], HARDWARE: right[MODEL]}]
    for hint, rule in _MODELS:
        yield hint, [{MODEL: result(case, given, rule)[MODEL]}]
    for hint, rule in _AGAIN:
        if case.recompute == "none" and hint == _AGAIN_LEARNING:
            continue
        yield hint, [{MODEL: right[MODEL], HARDWARE: result(case, given, rule)[HARDWARE]}]


def _recomputed(case: Case, given: tuple[list[Layer], int]) -> float:
    """What recompute alone runs again."""
    found = result(case, given, Rule(core=lambda case: 0))
    return found[HARDWARE] - found[MODEL]


def _run(case: Case, given: tuple[list[Layer], int], function: Callable, watch) -> Tensors:
    layers, head = given
    with own():
        found = amounts.listed(function(list(layers), head, case.recompute, case.flash))
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Stopped(f"{CALL} returned {amounts.kind_of(found)}", _PAIR)
    return {name: amounts.number(value, f"{name} FLOPs", _PAIR) for name, value in zip(AMOUNTS, found, strict=True)}


@cache
def cases(n: int) -> list[Scene]:
    """Everything learns; some layers do not, in all three places; with each way to recompute flash attention, and without."""
    some = (False, False, True, False, False, True, False)
    return [
        _scene(Case((True, True, True), "full", False)),
        _scene(Case(some, "none", True)),
        _scene(Case(some, "selective", True, kv_heads=6)),
        _scene(Case(some, "full", True, kv_heads=3)),
        _scene(Case(some, "selective", False, kv_heads=6)),
    ]


def _scene(case: Case) -> Scene:
    given = case.layers()
    model = counting.step(case.config, _BATCH, case.learns)
    hardware = counting.step(case.config, _BATCH, case.learns, case.recompute, case.flash)
    numbers = {MODEL: model, HARDWARE: hardware}
    right = [amounts.exact(numbers)]
    wrong = partial(_wrong, case, given, numbers)
    return Scene(1, partial(_run, case, given), right, lambda: amounts.mistakes(right, wrong()), (case, given), case.note)


def _of_model(what: str, share: float, all_learn: bool) -> Aspect:
    """Of the cases in which all layers learn, or of the others."""
    found = aspect(what, share, (MODEL,))

    def judge(task: "StepFlops", trial: Trial) -> Verdict:
        case, _ = trial.case.must
        return found.judge(task, trial) if all(case.learns) == all_learn else Verdict(True)

    return found._replace(judge=judge)


@dataclass(frozen=True)
class StepFlops(MfuTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    measured: ClassVar[str] = "the counter has"
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        _of_model("model FLOPs where all layers learn", 0.25, True),
        _of_model("model FLOPs where some do not", 0.35, False),
        aspect("hardware FLOPs", 0.4, (HARDWARE,)),
    )

    def otherwise(self, trial: Trial, name: str) -> str:
        """The difference may be a part of the model, some times."""
        _, (layers, head) = trial.case.must
        difference = (trial.answers[0].tensors[name] - trial.case.expected[0][name]).item()
        one = layers[0]
        parts = {"one layer's products": one.products, "one layer's scores": one.scores, "the head": head}
        parts |= {"a whole layer": one.products + one.scores}
        for part, flops in parts.items():
            if abs(difference) == flops:
                return f"the difference is one forward pass of {part}; {_UNEXPLAINED}"
            if simple := times(abs(difference), flops):
                return f"the difference is {simple} the forward pass of {part}; {_UNEXPLAINED}"
        return ""
