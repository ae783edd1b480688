"""Checks of exercise 09_mfu: FLOPs, a run's MFU, timing, where a step's time went, and what fusing saves.

The right numbers are those that WorkCounter counts while real modules run: tests/grading/answers/test_09_mfu.py compares them.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from manyranks.given import mfu as given
from manyranks.given.mfu import Chain, Job, Layer, Model, Pass, Run, Step, Timing
from manyranks.given.numbers import seed_of
from manyranks.grade.check import Task
from manyranks.grade.judges import ROUNDED, WAIT, Judge, Right, Verdict, facts, sent, values
from manyranks.grade.learner import Ready, number
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.prints import Fact, only_rounded, same
from manyranks.measure.watch import Watch
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT

_READY = Ready(given=(f"{given.__name__}.device.<locals>",))
_ADVICE = (
    (r"attribute '__(self|closure|wrapped|code)__'", "nobody can look into the device: what it does is read off clock()"),
    (r"AttributeError: '\w+' object has no attribute", "the table above has the names of what you are given"),
)
_task = partial(Task, "09_mfu", part=True, ready=_READY, advice=_ADVICE)
_alone = partial(_task, worlds=(1,))

# Numbers: what a learner's function returns, and what is said of it

_FLOP, _SHARE, _SECONDS = "{:,.0f} FLOP".format, "{:.2%}".format, "{:.4g} s".format


def _named(value: Any, names: tuple[str, ...], call: str) -> dict[str, float]:
    """The learner's dict. Raises Stopped where it has other names."""
    form = "it returns a dict: " + "{" + ", ".join(f'"{name}": …' for name in names) + "}"
    if not isinstance(value, dict):
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    for name in (*names, *value):
        if name not in value or name not in names:
            raise Stopped(f"what {call} returned has {'no ' if name in names else ''}{name!r:.40}", form)
    return {name: number(value[name], name, form) for name in names}


def _several(value: Any, count: int, what: str, form: str) -> list:
    """The learner's list, tuple, tensor or array. Raises Stopped for what is none, or has another length."""
    value = value.tolist() if getattr(value, "ndim", 0) == 1 else value
    if not isinstance(value, tuple | list) or len(value) != count:
        raise Stopped(f"{what} {kind_of(value)}, where {count} items are asked for", form)
    return list(value)


def _amounts(share: float, what: str, names: str, unit: Callable[[float], str], hint: str = "") -> Judge:
    """The numbers of these names are right, whatever the others are. hint: where no known mistake explains them."""
    judge = values(share, what, names, alone=True, part=True)

    def verdict(trial: Trial, right: Right) -> Verdict:
        for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
            for name, here in judge.look(should).items():
                if not same(there := seen.results[name], here):
                    found = (f"rank {rank}: " if trial.n > 1 else "") + f"{name}: {_both(there, here, unit)}"
                    why = WAIT if trial.unwaited else ROUNDED if only_rounded(there, here) else hint
                    return Verdict(False, found, why, firm=bool(trial.unwaited))
        return Verdict(True)

    return judge._replace(verdict=verdict)


def _both(there: float, here: float, unit: Callable[[float], str]) -> str:
    """With their quotient where it is simple; to the last digit where they would read the same."""
    words = [unit(there), unit(here)] if unit(there) != unit(here) else [f"{there:.15g}", f"{here:.15g}"]
    times = [f"{k} times" for k in range(2, 1000) if same(there, k * here)]
    times += [f"1/{k} of" for k in range(2, 1000) if same(there * k, here)]
    return f"you have {words[0]}, right is {words[1]}" + "".join(f"; yours is {each} that" for each in times)


# Task 1: a forward pass

_PARTS = ("attention", "scores", "mlp", "router", "head")


def _forward(case: Pass, function: Callable, watch: Watch) -> dict:
    return _named(function(*case), _PARTS, forward_flops.call)


_ATTENTION = "each row times hidden × hidden, twice hidden × (kv_heads · hidden / heads), and hidden × hidden: 2 FLOPs each"
_SCORES = "in each layer and sequence two products: seq × hidden × seq and seq × seq × hidden, all heads together"
_MLP = "an MLP has 2 or 3 products of hidden × ffn; with experts, top_k + shared_experts of 2 or 3 of hidden × expert_ffn"
forward_flops = _alone(
    "forward_flops(m, batch, seq, predicted)",
    4,
    _forward,
    (
        _amounts(0.2, "the attention's products with weights", "attention", _FLOP, _ATTENTION),
        _amounts(0.2, "its scores", "scores", _FLOP, _SCORES),
        _amounts(0.25, "the MLPs and the experts", "mlp", _FLOP, _MLP),
        _amounts(0.1, "the routers", "router", _FLOP, "each row times hidden × experts, in layers with experts; 0 without"),
        _amounts(0.25, "the head", "head", _FLOP, "batch · predicted rows times hidden × vocab, once"),
    ),
    cases=(  # grouped heads; experts behind a dense layer; no gate
        Pass(Model(5, 36, 9, 3, 40, True, 50, 5), 4, 7, 7),
        Pass(Model(3, 32, 8, 2, 44, True, 30, 1, 11, 5, 12, 3), 5, 7, 2),
        Pass(Model(3, 30, 5, 5, 36, False, 41, 3), 4, 10, 1),
    ),
    more=given.drawn_passes,
)

# Task 2: a step of training

_PAIR = "it returns a pair of numbers, (model, hardware)"
_SOME = (False, False, True, False, False, True, False)


def _learning(recompute: str, flash: bool, products: int, learns: tuple[bool, ...] = _SOME) -> Step:
    return Step(tuple(Layer(products, 15552, one) for one in learns), 43200, recompute, flash)


def _step(case: Step, function: Callable, watch: Watch) -> dict:
    found = function([*case.layers], *case[1:])
    names = f"model FLOPs, {'all' if all(one.learns for one in case.layers) else 'some'} learn", "hardware FLOPs"
    pairs = zip(names, _several(found, 2, f"{step_flops.call} returned", _PAIR), strict=True)
    return {name: number(one, name, _PAIR) for name, one in pairs}


step_flops = _alone(
    "step_flops(layers, head, recompute, flash)",
    4,
    _step,
    (
        _amounts(0.25, "model FLOPs where all layers learn", "all learn", _FLOP),
        _amounts(0.35, "model FLOPs where some do not", "some learn", _FLOP),
        _amounts(0.4, "hardware FLOPs", "hardware", _FLOP),
    ),
    cases=(
        _learning("full", False, 158976, (True, True, True)),
        *(_learning("none", True, 158976), _learning("selective", True, 186624)),
        *(_learning("full", True, 165888), _learning("selective", False, 186624)),
    ),
    more=given.drawn_steps,
    unexplained="products: forward 1, backward 2 where the layer learns, 1 where only a layer before it does, 0 before the "
    "first that learns. scores: 1, and 2 where backward comes. head: 3. hardware adds what recompute and flash run again where "
    "backward comes",
)

# Task 3: utilisation


def _run(case: Job, rank: int, n: int, seed: int) -> tuple[Run, dict, str]:
    """What mfu is called with."""
    c = case.config
    shapes = {name: tuple(parameter.shape) for name, parameter in GPT(c).named_parameters()}
    run = Run(shapes, c.tied, c.layers, c.hidden, c.seq, *case.counts, case.seconds, "fp32", case.dtype)
    return run, dict(case.sheet), case.convention


def _mfu(given: tuple[Run, dict, str], function: Callable, watch: Watch) -> dict:
    name = f'the MFU under "{given[2]}"'
    return {name: number(function(*given), name, "it returns one number, the share")}


_LLAMA = GPTConfig(3, 24, 6, 40, 50, 11, 2, tied=False)
_GPT2 = GPTConfig(2, 20, 4, 36, 44, 13, style="gpt2", tied=True)
_CONVENTIONS = {"full": 0.3, "causal": 0.25, "parameters": 0.2, "palm": 0.25}
_TIED = "where the head is tied, its matrix stands in run.shapes once, as embedding.tokens.weight"
mfu = _alone(
    "mfu(run, sheet, convention)",
    4,
    _mfu,
    tuple(_amounts(part, f'the share under "{name}"', f'"{name}"', _SHARE) for name, part in _CONVENTIONS.items()),
    cases=(
        Job(_LLAMA, (5, 7, 13, 8), "bf16", "full", 5.2272e-05, given.SHEET),
        Job(_GPT2, (7, 5, 17, 6), "bf16", "causal", 4.5546e-05, given.OTHERS),
        Job(_GPT2, (5, 9, 11, 8), "fp8", "parameters", 2.6601e-05, given.SHEET),
        Job(_LLAMA, (9, 5, 7, 8), "fp32", "palm", 0.000369223, given.SHEET),
    ),
    make=_run,
    more=partial(given.drawn_jobs, conventions=tuple(_CONVENTIONS), make=GPTConfig),
    advice=(
        (r"KeyError: 'head\.projection\.weight'", _TIED),
        (r"KeyError: 'embedding\.positions\.weight'", "only models in GPT-2's style have learned positions"),
        (r"KeyError", "the sheet's rows are called as run.products_dtype and run.weights_dtype are, the conventions as above"),
        *_ADVICE,
    ),
    unexplained="FLOPs of a token by the convention · tokens of a step ÷ seconds ÷ (all chips · dense peak of products_dtype)",
)

# Task 4: timing

_LARGEST = "no rank needs each of the others' numbers, only the largest of each: one all-reduce, op=dist.ReduceOp.MAX"
_INSTEAD = dict.fromkeys(("all_gather", "all_to_all", "broadcast", "gather", "reduce"), _LARGEST)
_INSTEAD |= dict.fromkeys(("send", "recv"), "an all-reduce is one call, dist.all_reduce, not a loop of messages")
_INSTEAD |= {"barrier": "a barrier is not needed: an all-reduce waits for all ranks"}


def _timed(work: given.Work, function: Callable, watch: Watch) -> dict:
    case, (*functions, log) = work.timing, given.device(work)
    del work  # who walks up the frames finds no times
    time = number(function(*functions, *case[:3]), "the time", "it returns one number, seconds of one launch")
    timed = [part for part in log()[1:-1] if "launch" in part][-case.repeats :]  # a timed warm-up does not count
    return {
        "the time": time,
        "the number of launches": sum(part.count("launch") for part in log()),
        "how often it reads the clock while its device works": sum(part.count("busy") for part in log()),
        "how often it launches in each measurement": [part.count("launch") for part in timed],
        "how often it synchronises in each measurement": [part.count("synchronise") for part in timed],
    }


_EACH = "one number for each measurement, its seconds: in each of them another rank may be the slowest"
time_it = _task(
    "time_it(launch, synchronise, clock, warmup, repeats, inner)",
    4,
    _timed,
    (
        _amounts(0.5, "the job's time for one launch is right, the same on all ranks", "time", _SECONDS),
        facts(0.3, "warms up, synchronises and reads the clock in the right order", "launches|how often", each_world=True),
        sent(0.2, "sends its measurements, once", hint=_EACH, instead=_INSTEAD),
    ),
    make=given.work,
    cases=(Timing(3, 9, 5), Timing(2, 10, 3)),
    more=given.drawn_timings,
    unexplained="warm up, synchronise; `repeats` times: clock, `inner` launches, synchronise, clock; the difference ÷ inner; "
    "the largest of all ranks, measurement by measurement; the median of these",
)

# Task 5: where the time went

_SHARES = ("matmul", "other", "communication", "waiting", "python")


def _budget(trace: given.Trace, function: Callable, watch: Watch) -> dict:
    spans, arrived, step, zero = trace
    found = _named(function(spans, arrived, step, zero), _SHARES, time_budget.call)
    return found | {
        "what the five parts leave of the step's seconds": round(step[1] - step[0] - sum(found.values()), 9),
        "which parts of the step are below 0": [name for name in _SHARES if found[name] < -1e-9],
    }


_ADDS_UP = "each moment of the step belongs to one part: none twice, none to nobody, and no part is below 0"
_MOMENT = "one number for each call is enough: the moment at which this rank came to it"
time_budget = _task(
    "time_budget(spans, arrived, step, zero)",
    5,
    _budget,
    (
        _amounts(0.4, "the operators' time is right", "^matmul|^other", _SECONDS),
        _amounts(0.25, "communication and waiting are right", "^communication|^waiting", _SECONDS),
        _amounts(0.05, "Python has what is left", "^python", _SECONDS),
        facts(0.1, "the parts add up to the step", "step", _ADDS_UP, each_world=True),
        sent(0.2, "sends the moments of its calls, once", hint=_MOMENT, instead=_INSTEAD),
    ),
    make=lambda case, rank, n, seed: given.traces(case, n, 1 + seed_of(seed) % 64 / 64 * bool(seed))[rank],
    cases=given.STEPS,
    more=given.drawn_traces,
    unexplained="each moment of the step belongs to the innermost span that covers it; of a wait, what is before the last "
    'rank\'s moment is waiting, the rest communication; "calls" and what is not covered is python',
)

# Task 6: lost time

_TWO = "it returns a pair: a list with one number for each operator, and one number"


def _losses(case: Chain, function: Callable, watch: Watch) -> dict:
    found, results = function(deepcopy(case.operators), [*case.needed], case.peak, case.bandwidth), {}
    lost, saved = _several(found, 2, f"{lost_time.call} returned", _TWO)
    for one, value in zip(case.operators, _several(lost, len(case.operators), "lost is", _TWO), strict=True):
        moved = sum([*one.reads.values(), *one.writes.values()])
        name = f"lost at operator {len(results)}, {one.name} of {one.flops:,} FLOPs and {moved:,} bytes"
        results[name] = number(value, "what is lost", _TWO)
    return results | {"saved": number(saved, "saved", _TWO)}


def _in_one(seen: Seen) -> dict[str, Fact]:
    """A known mistake explains all losses, or none."""
    return {"lost": [number for name, number in seen.results.items() if name != "saved"]}


_BEYOND = "max(FLOPs ÷ peak, bytes ÷ bandwidth) − FLOPs ÷ peak, with bytes of all that is read and written"
_FUSED = (
    "of each run of neighbours without FLOPs: all its bytes, less those of one kernel that reads what comes from outside once "
    "and writes what is read behind it or needed; ÷ bandwidth"
)
lost_time = _alone(
    "lost_time(operators, needed, peak, bandwidth)",
    3,
    _losses,
    (
        _amounts(0.55, "what each operator loses to memory", "^lost", _SECONDS, _BEYOND)._replace(look=_in_one),
        _amounts(0.45, "what fusing gives back", "^saved", _SECONDS, _FUSED),
    ),
    cases=given.CHAINS,
    more=given.drawn_chains,
)
