"""Checks of exercise 09_mfu: FLOPs of a product and of a token, MFU and HFU, intensity, timing, and where a step's time went.

The right FLOPs are those that WorkCounter counts while real modules run: tests/grading/answers/test_09_mfu.py compares them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from manyranks.given import mfu as given
from manyranks.given.mfu import Job, Log, Model, Product, Timing
from manyranks.grade.check import Task
from manyranks.grade.judges import ROUNDED, WAIT, Judge, Verdict, both, facts, rank_by_rank, results, sent
from manyranks.grade.learner import TABLE, Allowed, dict_of, number, pair
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.fingerprints import Fact, only_rounded, same
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from manyranks.world.strangers.kept import Asks, Kept

_ALLOWED = Allowed(given=(f"{Asks.__module__}.{Asks.__name__}.calls.<locals>",))
_ADVICE = (
    (r"attribute '__(self|closure|wrapped|code)__'", "nobody can look into the device: what it does is read off clock()"),
    TABLE,
)
_task = partial(Task, "09_mfu", part=True, allowed=_ALLOWED, common=_ADVICE)
_alone = partial(_task, worlds=(1,))

# Numbers: what a learner's function returns, and what is said of it

_FLOP, _SHARE, _SECONDS = "{:,.0f} FLOP".format, "{:.2%}".format, "{:.4g} s".format
_INTENSITY = "{:.4g} FLOPs per byte".format


def _named(value: Any, names: tuple[str, ...], call: str) -> dict[str, float]:
    """The learner's dict. Raises Stopped where it has other names."""
    form = dict_of(names)
    if not isinstance(value, dict):
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    for name in (*names, *value):
        if name not in value or name not in names:
            raise Stopped(f"what {call} returned has {'no ' if name in names else ''}{name!r:.40}", form)
    return {name: number(value[name], name, form) for name in names}


def _amounts(share: float, what: str, names: str, unit: Callable[[float], str], hint: str = "") -> Judge:
    """Judges that the numbers of these names are right, whatever the others are. hint: where no known mistake explains them."""
    look = results(names)

    def wrong(trial: Trial, rank: int, seen: Seen, should: Seen) -> Verdict | None:
        for name, here in look(should).items():
            if not same(there := seen.results[name], here):
                found = (f"rank {rank}: " if trial.n > 1 else "") + f"{name}: {_both(there, here, unit)}"
                mixed = _mixed(name, there, should.results)
                why = WAIT if trial.unwaited else ROUNDED if only_rounded(there, here) else mixed or hint
                return Verdict(False, found, why, firm=bool(trial.unwaited))

    return rank_by_rank(share, what, wrong, look, values=True, part=True)


def _mixed(name: str, there: float, right: dict[str, Any]) -> str:
    """Says whether a wrong number is another name's, or has another one's in it."""
    others = [(other, x) for other, x in right.items() if other != name and isinstance(x, float | int) and x]
    exchanged = [f"that is what {other} should be: are the two exchanged?" for other, x in others if same(there, x)]
    more = [f"{other} is counted in {name}, too" for other, x in others if same(there, right[name] + x)]
    return next(iter(exchanged + more), "")


def _both(there: float, here: float, unit: Callable[[float], str]) -> str:
    """Says both, with their quotient where it is simple; to the last digit where they would read the same."""
    words = [unit(there), unit(here)] if unit(there) != unit(here) else [f"{there:.15g}", f"{here:.15g}"]
    times = [f"{k} times" for k in range(2, 1000) if same(there, k * here)]
    times += [f"1/{k} of" for k in range(2, 1000) if same(there * k, here)]
    return f"you have {words[0]}, right is {words[1]}" + "".join(f"; yours is {each} that" for each in times)


# Task 1: a product

_PAIR = "it returns a pair of numbers, (forward, backward)"


def _product(case: Product, function: Callable, watch: Watch) -> dict:
    found = pair(function(*case[:3]), product.call, _PAIR)
    return {name: number(one, name, _PAIR) for name, one in zip(("forward", "backward"), found, strict=True)}


product = _alone(
    "product(m, k, n)",
    2,
    _product,
    (
        _amounts(0.5, "FLOPs of the forward pass", "forward", _FLOP, "m·n results, each a sum of k products: 2mkn"),
        _amounts(0.5, "FLOPs of the backward pass", "backward", _FLOP, "two products, one for each factor's gradient: 4mkn"),
    ),
    cases=(Product(7, 5, 11, 2), Product(64, 24, 40, 4)),
    more=given.drawn_products,
)

# Task 2: a token


def _model(case: GPTConfig, rank: int, n: int, seed: int) -> Model:
    """Makes what per_token gets."""
    shapes = {name: tuple(parameter.shape) for name, parameter in GPT(case).named_parameters()}
    return Model(shapes, case.tied, case.layers, case.hidden, case.seq)


class _Config(GPTConfig):
    """A case: a configuration that reports can name."""

    def __str__(self) -> str:
        return f"for a {'tied' if self.tied else 'untied'} head, {self.style}'s style"


def _token(model: Model, function: Callable, watch: Watch) -> dict:
    each = {"with the whole score matrix": False, "with a causal mask": True}
    return {name: number(function(model, causal), name, "it returns one number, FLOPs") for name, causal in each.items()}


_TIED = "where the head is tied, its matrix stands in model.shapes once, as embedding.tokens.weight"
per_token = _alone(
    "per_token(model, causal)",
    4,
    _token,
    (
        _amounts(0.5, "FLOPs of a token with the whole score matrix", "whole", _FLOP),
        _amounts(0.5, "FLOPs of a token under a causal mask", "causal", _FLOP),
    ),
    make=_model,
    cases=(_Config(3, 24, 6, 40, 50, 11, 2, tied=False), _Config(2, 20, 4, 36, 44, 13, style="gpt2", tied=True)),
    more=partial(given.drawn_configs, make=_Config),
    advice=(
        (r"KeyError: 'head\.projection\.weight'", _TIED),
        (r"KeyError: 'embedding\.positions\.weight'", "only models in GPT-2's style have learned positions"),
    ),
    unexplained="6 for each parameter in a matrix that a token's row is multiplied by; and 12·L·h·s, or 6·L·h·s if causal",
)

# Task 3: utilization

_SHARES = ("MFU", "HFU")


def _used(case: Job, function: Callable, watch: Watch) -> dict:
    return _named(function(case.log, dict(case.sheet)), _SHARES, used.call)


_SHEET = {"fp32": given.Row(31e9, False), "tf32": given.Row(210e9, True), "bf16": given.Row(432e9, True)}
_OTHER = _SHEET | {"bf16": given.Row(216e9, False)}  # another vendor's, for the same chip
used = _alone(
    "used(log, sheet)",
    4,
    _used,
    (_amounts(0.5, "the MFU", "MFU", _SHARE), _amounts(0.5, "the HFU", "HFU", _SHARE)),
    cases=(
        Job(Log(6.3e8, 1250.0, 8, "fp32", "bf16", True), _SHEET),
        Job(Log(4.5e8, 990.0, 6, "fp32", "bf16", False), _OTHER),
        Job(Log(2.7e8, 810.0, 4, "bf16", "tf32", True), _OTHER),
    ),
    more=given.drawn_jobs,
    advice=((r"KeyError", "the sheet's rows are called as log.products_dtype and log.weights_dtype are"),),
    unexplained="needed FLOPs per token · tokens per second ÷ (chips · dense peak of products_dtype); HFU counts what runs "
    "again, a third of `needed`",
)

# Task 4: intensity


def _intensity(case: Product, function: Callable, watch: Watch) -> dict:
    return {"the intensity": number(function(*case), "the intensity", "it returns one number, FLOPs per byte")}


intensity = _alone(
    "intensity(m, k, n, itemsize)",
    2,
    _intensity,
    (_amounts(1, "FLOPs per byte", "intensity", _INTENSITY, "2mkn ÷ (the elements of all three matrices · itemsize)"),),
    cases=(Product(1, 40, 24, 2), Product(96, 40, 24, 4), Product(50, 24, 80, 1)),
    more=given.drawn_products,
)

# Task 5: timing

_LARGEST = "no rank needs each of the others' numbers, only the largest of each: one all-reduce, op=dist.ReduceOp.MAX"
_INSTEAD = dict.fromkeys(("all_gather", "all_to_all", "broadcast", "gather", "reduce"), _LARGEST)
_INSTEAD |= dict.fromkeys(("send", "recv"), "an all-reduce is one call, dist.all_reduce, not a loop of messages")
_INSTEAD |= {"barrier": "a barrier is not needed: an all-reduce waits for all ranks"}


def _device(case: Timing, rank: int, n: int, seed: int) -> Kept:
    device = given.Device(case, rank, n, seed)
    return Kept(case, (device.launch, device.synchronize, device.clock), device)


_MANY = Stopped(
    f"launch, synchronize and clock were called more than {given.MOST:,} times",
    "far more than a right answer needs: does the loop end?",
)


def _timed(asks: Asks, function: Callable, watch: Watch) -> dict:
    with asks.calls(_MANY) as functions:
        seconds = function(*functions, *asks.given[:3])
        return {"the time": number(seconds, "the time", "it returns one number, seconds of one launch")}


def _noted(case: Timing, device: Kept, results: Mapping[str, Fact]) -> dict:
    log = device.by.log
    timed = [part for part in log[1:-1] if "launch" in part][-case.repeats :]  # a timed warm-up does not count
    read = log if "launch" in log[0] else log[1:]  # nor does the reading before it
    return {
        "the time": results["the time"],
        "the number of launches": sum(part.count("launch") for part in log),
        "how often it reads the clock while its device works": sum(part.count("busy") for part in read),
        "how often it launches in each measurement": [part.count("launch") for part in timed],
        "how often it synchronizes in each measurement": [part.count("synchronize") for part in timed],
    }


_EACH = "one number for each measurement, its seconds: in each of them another rank may be the slowest"
_TIME = _amounts(0.5, "the job's time for one launch is right, the same on all ranks", "time", _SECONDS)
time_it = _task(
    "time_it(launch, synchronize, clock, warmup, repeats, inner)",
    4,
    _timed,
    (
        both(_TIME, facts(0, "", "launches in each", "the time is measured, not read off the device")),
        facts(0.3, "warms up, synchronizes and reads the clock in the right order", "launches|how often", each_world=True),
        sent(0.2, "sends its measurements, once", hint=_EACH, instead=_INSTEAD),
    ),
    make=_device,
    then=_noted,
    cases=(Timing(3, 9, 5), Timing(2, 10, 3)),
    more=given.drawn_timings,
    unexplained="warm up, synchronize; `repeats` times: clock, `inner` launches, synchronize, clock; the difference ÷ inner; "
    "the largest of all ranks, measurement by measurement; the median of these",
)

# Task 6: where the time went

_PARTS = ("peak", "slower", "messages", "ranks", "rest")


def _waterfall(trace: given.Trace, function: Callable, watch: Watch) -> dict:
    begin, end = trace.step
    found = _named(function(*trace), _PARTS, waterfall.call)
    return found | {
        "what the five parts leave of the step's seconds": round(end - begin - sum(found.values()), 9),
        "which parts of the step are below 0": [name for name in _PARTS if found[name] < -1e-9],
    }


_ADDS_UP = "every moment of the step belongs to exactly one part, and no part is below 0"
_MOMENT = "one number for each call is enough: the moment at which this rank came to it"
waterfall = _task(
    "waterfall(spans, arrived, step, zero, flops, peak)",
    5,
    _waterfall,
    (
        _amounts(0.15, "the FLOPs' time at the peak is right", "^peak", _SECONDS),
        _amounts(0.15, "what operators take beyond it is right", "^slower", _SECONDS),
        _amounts(0.35, "waiting for messages and for other ranks is right", "^messages|^ranks", _SECONDS),
        _amounts(0.05, "the rest has what is left", "^rest", _SECONDS),
        facts(0.1, "the parts add up to the step", "step", _ADDS_UP, each_world=True),
        sent(0.2, "sends the moments of its calls, once", hint=_MOMENT, instead=_INSTEAD),
    ),
    make=lambda case, rank, n, seed: given.traces(case, n, given.longer(seed))[rank],
    cases=given.STEPS,
    more=given.drawn_traces,
    unexplained="peak: flops ÷ peak. slower: operators' seconds less that. ranks: of each wait, what is before the last rank's "
    "moment; messages: what is after it. rest: what is left of the step",
)
