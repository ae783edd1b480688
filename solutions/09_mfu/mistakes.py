"""Answers to 09_mfu: what is right, and the mistakes that are made."""

import math
import statistics
from fractions import Fraction
from itertools import count, pairwise
from types import SimpleNamespace as Its

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

PARTS = ("peak", "slower", "messages", "ranks", "rest")
TOKENS, HEAD = "embedding.tokens.weight", "head.projection.weight"

# Task 1

@right("product")
def flops(m, k, n):
    return 2 * m * k * n, 4 * m * k * n

@also_right("product")
def by_gradients(m, k, n):
    """Each of backward's products by its own sizes, as floats in a list."""
    of_rows, of_weights = (m, n, k), (k, m, n)
    return [2.0 * math.prod((m, k, n)), float(sum(2 * math.prod(sizes) for sizes in (of_rows, of_weights)))]

@also_right("product")
def as_an_array(m, k, n):
    return np.array([2, 4]) * m * k * n

@also_right("product")
def as_a_tensor(m, k, n):
    """Multiplications and additions apart; backward is twice forward."""
    forward = torch.tensor(m * n * k + m * n * k)
    return torch.stack((forward, 2 * forward))

slip("product", "half_the_flops", 0,
    "a multiply-add is counted as one: it's two FLOPs, so 2mkn for m × k times k × n",
    lambda *sizes: [x // 2 for x in flops(*sizes)])
slip("product", "one_product_back", 1,
    "backward is counted once: it has two products, one for the rows' gradient and one for the weights'",
    lambda *sizes: (flops(*sizes)[0],) * 2)
slip("product", "backward_with_forward", 1,
    "that is forward and backward together: backward alone has two products as large as forward's, 4mkn",
    lambda *sizes: (flops(*sizes)[0], 3 * flops(*sizes)[0]))
slip("product", "together", 0, "", lambda *sizes: sum(flops(*sizes)), says="it returns a pair of numbers, (forward, backward)")

@mistake("product", says="torch.utils.flop_counter.FlopCounterMode is not allowed")
def from_the_counter(m, k, n):
    with FlopCounterMode(display=False):
        nn.Linear(k, n)
    return flops(m, k, n)

# Task 2. instead: what a mistake takes in place of an amount

@right("per_token")
def token(model, causal, **instead):
    products = parameters(model, lambda name, shape: len(shape) == 2 and "embedding" not in name)
    amounts = {"products": products, "head": model.tied * math.prod(model.shapes[TOKENS]), "six": 6, "masked": 1 / 2}
    its = Its(**amounts | {"scores": 2 * model.layers * model.hidden * model.seq} | instead)
    return its.six * (its.products + its.head + its.scores * (its.masked if causal else 1))

def parameters(model, counts=lambda name, shape: True):
    return sum(math.prod(shape) for name, shape in model.shapes.items() if counts(name, shape))

@also_right("per_token")
def token_by_layers(model, causal):
    """The head by its name, the layers by theirs; the scores as two products, forward and twice back."""
    layers = parameters(model, lambda name, shape: name.startswith("layers.") and len(shape) > 1)
    weights = layers + math.prod(model.shapes[TOKENS if model.tied else HEAD])
    tokens = sum(range(1, model.seq)) / model.seq + 1 / 2 if causal else model.seq  # that one sees, half of its own
    return 3 * (2 * weights + 2 * 2 * tokens * model.hidden * model.layers)

@also_right("per_token")
def token_in_a_loop(model, causal):
    total = torch.zeros((), dtype=torch.float64)
    for name, shape in model.shapes.items():
        looked_up = name == "embedding.positions.weight" or (name == TOKENS and not model.tied)
        if len(shape) == 2 and not looked_up:
            total += 6 * shape[0] * shape[1]
    return total + (6 if causal else 12) * model.layers * model.hidden * model.seq

@also_right("per_token")
def token_with_numpy(model, causal):
    sizes = {name: np.prod(shape) for name, shape in model.shapes.items() if len(shape) != 1}
    for name in (TOKENS, "embedding.positions.weight")[model.tied:]:
        sizes.pop(name, 0)
    return 6 * sum(sizes.values()) + np.float64(model.layers * model.hidden * model.seq) * (12, 6)[causal]

@mistake("per_token", "the embedding is counted as a product: its rows are looked up. If tied, its matrix is the head's")
def embedding_counts(model, causal):
    return token(model, causal, products=parameters(model, lambda name, shape: len(shape) == 2))

@mistake("per_token", "the head is missing where it's tied: its matrix has the embedding's name, and is multiplied by")
def no_tied_head(model, causal):
    return token(model, causal, head=0)

@mistake("per_token", "biases and norms' weights are counted as products: those are vectors. Products are of matrices")
def vectors_are_products(model, causal):
    return token(model, causal, products=parameters(model, lambda name, shape: "embedding" not in name))

@mistake("per_token", "all parameters are counted: of these only matrices that a token's row is multiplied by are in a product")
def all_parameters(model, causal):
    return token(model, causal, products=parameters(model), head=0)

slip("per_token", "causal_forgotten", 2,
    "the causal mask is forgotten: it leaves half of the scores, so 6·L·h·s where `causal` is True",
    lambda *given: token(*given, masked=1))
slip("per_token", "causal_twice", 2,
    "the causal half is halved twice: 12·L·h·s has every score, and 6·L·h·s is already the half that the mask leaves",
    lambda *given: token(*given, masked=1 / 4))
slip("per_token", "always_causal", 2,
    "half of the scores is missing where `causal` is False: QKᵀ, the product with V, or the part that a mask would leave out",
    lambda model, causal: token(model, True))
slip("per_token", "backward_once", 0,
    "backward is counted once: for each product of forward it has two, for the inputs' and the weights' gradients",
    lambda *given: token(*given, six=4))
slip("per_token", "forward_only", 0, "that is a forward pass: training adds backward, which takes twice that",
    lambda *given: token(*given, six=2))
slip("per_token", "multiply_adds_are_one", 0, "a multiply-add is counted as one: it's two FLOPs, so 6 per parameter and not 3",
    lambda *given: token(*given, six=3))
slip("per_token", "no_scores", 0, "the scores are missing: QKᵀ and the product with V have no parameters, and 12·L·h·s FLOPs",
    lambda *given: token(*given, scores=0))

# Task 3. instead: what a mistake takes in place of an amount

@right("used")
def share(log, sheet, **instead):
    row = sheet[log.products_dtype]
    amounts = {"peak": row.flops / (1 + row.sparse), "chips": log.chips, "again": log.needed / 3 * log.recompute}
    its = Its(**amounts | {"needed": log.needed} | instead)
    of = log.tokens_per_second / (its.chips * its.peak)
    return {"MFU": its.needed * of, "HFU": (its.needed + its.again) * of}

@also_right("used")
def by_forwards(log, sheet):
    """In forward passes: training needs three, and recomputation is a fourth; of tensors, in another order."""
    peak = torch.tensor(sheet[log.products_dtype].flops, dtype=torch.float64) * log.chips
    peak = peak / 2 if sheet[log.products_dtype].sparse else peak
    one = log.needed * log.tokens_per_second / 3 / peak
    return {"HFU": one * (3 + log.recompute), "MFU": 3 * one}

@also_right("used")
def by_chip(log, sheet):
    """One chip, with its part of the tokens."""
    flops, sparse = sheet[log.products_dtype]
    mine, dense = log.tokens_per_second / log.chips, flops / {True: 2, False: 1}[sparse]
    return dict(zip(("MFU", "HFU"), (np.float64(log.needed * mine / dense) * x for x in (1, 8 / 6 if log.recompute else 1))))

@also_right("used")
def by_seconds(log, sheet):
    """Seconds that a token takes, against those that it would take at the peak."""
    row, spent = sheet[log.products_dtype], log.chips / log.tokens_per_second
    best = Fraction(log.needed) / Fraction(row.flops) * (2 if row.sparse else 1)
    used = float(best) / spent
    return {"MFU": used, "HFU": used + used / 3 if log.recompute else used}

def dense(log, sheet, name):
    return sheet[name].flops / (1 + sheet[name].sparse)

slip("used", "recomputation_is_needed", 2,
    "recomputation is counted into MFU: what runs again is executed, but training doesn't need it. It belongs to HFU only",
    lambda log, sheet: dict.fromkeys(("MFU", "HFU"), share(log, sheet)["HFU"]))
slip("used", "nothing_again", 2, "what runs again is missing in HFU: the forward pass, a third of `needed`",
    lambda *given: share(*given, again=0))
slip("used", "again_whole", 2,
    "HFU counts all of `needed` again: only the forward pass runs a second time, a third of it",
    lambda log, sheet: share(log, sheet, again=log.needed * log.recompute))
slip("used", "again_half", 2,
    "HFU takes forward for half of `needed`: backward is twice forward, so forward is a third of both",
    lambda log, sheet: share(log, sheet, again=log.needed / 2 * log.recompute))
slip("used", "always_again", 2, "HFU counts a second forward pass where `log.recompute` is False: nothing runs again there",
    lambda log, sheet: share(log, sheet, again=log.needed / 3))
slip("used", "sparse_peak", 0,
    "the sparse peak is taken as dense: halve it, because our matrices aren't half zeros",
    lambda log, sheet: share(log, sheet, peak=sheet[log.products_dtype].flops))
slip("used", "always_half", 0, "a dense peak is halved: halve only rows that say sparse=True",
    lambda log, sheet: share(log, sheet, peak=sheet[log.products_dtype].flops / 2))
slip("used", "peak_of_the_weights", 0,
    "that is the peak of the weights' dtype: products run in products_dtype, whatever the weights are kept in",
    lambda log, sheet: share(log, sheet, peak=dense(log, sheet, log.weights_dtype)))
slip("used", "one_chip", 0, "the tokens are the whole job's, and the peak is one chip's: multiply the peak by log.chips",
    lambda *given: share(*given, chips=1))
slip("used", "percent", 0, "that is in percent: a share is asked for, 0.4 for 40%",
    lambda *given: {name: 100 * x for name, x in share(*given).items()})
slip("used", "one_number", 0, "", lambda *given: share(*given)["MFU"], says='it returns a dict: {"MFU": …, "HFU": …}')

# Task 4

@right("intensity")
def per_byte(m, k, n, itemsize, two=2, elements=lambda m, k, n: m * k + k * n + m * n):
    return two * m * k * n / (itemsize * elements(m, k, n))

@also_right("intensity")
def by_shapes(m, k, n, itemsize):
    moved = sum(math.prod(shape) * itemsize for shape in ((m, k), (k, n), (m, n)))
    return np.float64(flops(m, k, n)[0]) / moved

@also_right("intensity")
def by_reciprocals(*sizes):
    """2 ÷ the sum of the reciprocal sizes."""
    *three, itemsize = sizes
    return torch.tensor(2 / itemsize / math.fsum(1 / each for each in three), dtype=torch.float64)

@also_right("intensity")
def exactly(m, k, n, itemsize):
    return Fraction(2 * m * k * n, itemsize * (m * (k + n) + k * n))

slip("intensity", "mkn", 0, "a multiply-add is counted as one: it's two FLOPs, so 2mkn",
    lambda *sizes: per_byte(*sizes, two=1))
slip("intensity", "only_weights", 0, "only the weights' bytes are counted: the rows are read, too, and the result is written",
    lambda *sizes: per_byte(*sizes, elements=lambda m, k, n: k * n))
slip("intensity", "no_result", 0, "the result's bytes are missing: m × n elements are written",
    lambda *sizes: per_byte(*sizes, elements=lambda m, k, n: m * k + k * n))
slip("intensity", "no_rows", 0, "the rows' bytes are missing: m × k elements are read",
    lambda *sizes: per_byte(*sizes, elements=lambda m, k, n: k * n + m * n))
slip("intensity", "per_element", 0, "that is FLOPs per element: an element has `itemsize` bytes",
    lambda m, k, n, itemsize: per_byte(m, k, n, 1))
slip("intensity", "bytes_per_flop", 0, "that is bytes per FLOP: FLOPs per byte are asked for",
    lambda *sizes: 1 / per_byte(*sizes))

# Tasks 5 and 6

def largest(row):
    dist.all_reduce(row, op=dist.ReduceOp.MAX)
    return row

def summed(row):
    dist.all_reduce(row)
    return row

def one_by_one(row):
    return torch.cat([largest(one.clone()) for one in row.split(1)])

# Task 5. instead: what a mistake takes in place of a rule

def waits_and_reads(end, clock, started):
    end()
    return clock() - started

def reads_and_waits(end, clock, started):
    seconds = clock() - started
    end()
    return seconds

@right("time_it")
def timed(launch, synchronize, clock, warmup, repeats, inner, **instead):
    rules = {"read": waits_and_reads, "ready": synchronize, "end": synchronize, "divide": inner, "largest": largest}
    its = Its(**rules | {"dtype": torch.float64} | {"middle": lambda row: statistics.median(row.tolist())} | instead)

    def measurement():
        started = clock()
        for _ in range(inner):
            launch()
        return its.read(its.end, clock, started) / its.divide

    for _ in range(warmup):
        launch()
    its.ready()
    times = [measurement() for _ in range(repeats)]
    return its.middle(its.largest(torch.tensor(times, dtype=its.dtype)))

@also_right("time_it")
def timed_from_end_to_end(launch, synchronize, clock, warmup, repeats, inner):
    """The end of a measurement is the begin of the next one; by quantile."""
    moments = []
    for number in [warmup, *[inner] * repeats]:
        for _ in range(number):
            launch()
        synchronize()
        moments.append(clock())
    times = [(end - begin) / inner for begin, end in pairwise(moments)]
    return largest(torch.tensor(times, dtype=torch.float64)).quantile(0.5)

@also_right("time_it")
def times_the_warmup(launch, synchronize, clock, *numbers):
    """And throws it away; synchronizes before each measurement, too; sorts and divides at last; waits for a call."""

    def ready():
        synchronize()
        return clock()

    def waited(row):
        dist.all_reduce(row, op=dist.ReduceOp.MAX, async_op=True).wait()
        return row

    def middle(row):
        ordered = sorted(row.tolist())
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 / numbers[-1]

    ready()
    return timed(launch, synchronize, ready, *numbers, ready=ready, end=lambda: None, divide=1, largest=waited, middle=middle)

slip("time_it", "never_synchronizes", 0.8,
    "that is how long the launches take: launch() returns at once. synchronize() before a measurement ends",
    lambda *given: timed(*given, end=lambda: None))
slip("time_it", "reads_before_it_waits", 0.8,
    "the clock is read before synchronize(): that is how long the launches take. synchronize() first, then read the clock",
    lambda *given: timed(*given, read=reads_and_waits))
slip("time_it", "after_each_launch", 0.8,
    "synchronize() after each launch makes device and host wait: once, after a measurement's last launch",
    lambda launch, synchronize, *given: timed(lambda: (launch(), synchronize()), synchronize, *given, end=lambda: None))
slip("time_it", "no_warmup", 0.8, "the first launches are timed, too: `warmup` of them come first, and are slower",
    lambda launch, synchronize, clock, warmup, *numbers: timed(launch, synchronize, clock, 0, *numbers))
slip("time_it", "busy_at_the_begin", 0.8,
    "the device is still busy with older work when the clock is first read: synchronize() before that",
    lambda *given: timed(*given, ready=lambda: None))
slip("time_it", "mean", 0.8, "that is the mean: one hiccup spoils it. The median of the measurements",
    lambda *given: timed(*given, middle=torch.mean))
slip("time_it", "torch_median", 0.8,
    "torch.median of an even number of values is the lower of the middle two: take statistics.median",
    lambda *given: timed(*given, middle=torch.median))
slip("time_it", "largest_of_medians", 0,
    "that is the largest of the ranks' medians: take the largest of each measurement first, and then their median",
    lambda *given: timed(*given, largest=lambda row: largest(row.quantile(0.5).view(1))))
slip("time_it", "sum_of_ranks", 0.8, "that adds the ranks' measurements: an all-reduce adds unless op=dist.ReduceOp.MAX",
    lambda *given: timed(*given, largest=summed))
slip("time_it", "single_numbers", 0,
    "what is sent is float32: torch.tensor of Python's floats is float32, so say dtype=torch.float64",
    lambda *given: timed(*given, dtype=torch.float32))
slip("time_it", "one_call_each", 3.2,
    "one call for each number: put all numbers into one tensor, for each call costs its latency",
    lambda *given: timed(*given, largest=one_by_one))
slip("time_it", "looks_into_the_device", 0, "",
    lambda launch, *given: timed(launch, *given, middle=lambda row: launch.__self__._free),
    says="nobody can look into the device: what it does is read off clock()")
slip("time_it", "endless", 0, "", lambda launch, *given: timed(launch, *given, end=lambda: [launch() for _ in count()]),
    says="far more than a right answer needs: does the loop end?")

# Task 6. instead: what a mistake takes in place of a rule

def split(wait, last):
    return rest(wait, max(0.0, min(last, wait.finished) - wait.started))

def rest(wait, ranks):
    return ranks, wait.finished - wait.started - ranks

@right("waterfall")
def budget(spans, arrived, step, zero, flops, peak, **instead):
    rules = {"since": zero, "back": zero, "largest": largest, "split": split, "best": flops / peak}
    rules |= {"slower": lambda seconds, best: seconds - best, "left": lambda step, parts: step - sum(parts)}
    its, ranks, messages, operators = Its(**rules | instead), 0.0, 0.0, 0.0
    last = (its.largest(torch.tensor(arrived, dtype=torch.float64) - its.since) + its.back).tolist()
    for span in spans:
        if span.kind == "wait":
            waited = its.split(span, last[span.call])
            ranks, messages = ranks + waited[0], messages + waited[1]
        else:
            operators += span.finished - span.started
    parts = its.best, its.slower(operators, its.best), messages, ranks
    return dict(zip(PARTS, (*parts, its.left(step[1] - step[0], parts)), strict=True))

@also_right("waterfall")
def budget_by_arrays(spans, arrived, step, zero, flops, peak):
    """With arrays, in another order."""
    last = largest(torch.tensor(arrived, dtype=torch.float64) - zero).numpy() + zero
    waits = np.array([(one.started, one.finished, last[one.call]) for one in spans if one.kind == "wait"])
    until = np.clip(waits[:, 2], waits[:, 0], waits[:, 1])
    operators = sum(one.finished - one.started for one in spans if one.kind == "operator")
    found = {"messages": (waits[:, 1] - until).sum(), "ranks": (until - waits[:, 0]).sum(), "peak": flops / peak}
    found["rest"] = step[1] - step[0] - operators - found["messages"] - found["ranks"]
    return found | {"slower": operators - flops / peak}

@also_right("waterfall")
def budget_from_zero(spans, arrived, step, zero, *sizes):
    """Everything on the clock that began at the barrier."""
    moved = [span._replace(started=span.started - zero, finished=span.finished - zero) for span in spans]
    return budget(moved, [one - zero for one in arrived], [one - zero for one in step], 0.0, *sizes)

@also_right("waterfall")
def budget_by_gaps(spans, arrived, step, zero, flops, peak):
    """The rest is the gaps between spans; tensors."""
    found = budget(spans, arrived, step, zero, flops, peak)
    edges = [step[0], *(moment for span in spans for moment in span[2:4]), step[1]]
    found["rest"] = sum(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in found.items()}

slip("waterfall", "slower_is_everything", 3.5,
    "'slower' has the operators' whole time: only what is beyond FLOPs ÷ peak, so subtract `peak`",
    lambda *given: budget(*given, slower=lambda seconds, best: seconds))
slip("waterfall", "own_moments", 1.75, "waiting for other ranks is counted as messages: until the last rank has come to the "
    "call nothing is on its way. That takes the others' moments, and of each call the largest, op=dist.ReduceOp.MAX",
    lambda *given: budget(*given, largest=lambda row: row))
slip("waterfall", "sum_of_moments", 2.75,
    "all waiting is for ranks here, none for messages: does the all-reduce add up the moments? op=dist.ReduceOp.MAX",
    lambda *given: budget(*given, largest=lambda row: summed(row + 1000)))
slip("waterfall", "clocks_agree", 2.75,
    "the ranks' clocks began at different times: subtract `zero` before the all-reduce, and add it after",
    lambda *given: budget(*given, since=0, back=0))
slip("waterfall", "not_back_on_its_clock", 2.75,
    "the largest moments count from zero here: add this rank's zero before comparing them with spans",
    lambda *given: budget(*given, back=0))
slip("waterfall", "waiting_below_zero", 2.75,
    "where the last rank had come before the wait began, no time is spent waiting for it: 0, not less",
    lambda *given: budget(*given, split=lambda wait, last: rest(wait, min(last, wait.finished) - wait.started)))
slip("waterfall", "exchanged", 2.75,
    "messages and ranks are exchanged: before the last rank comes, you wait for ranks; after that, for messages",
    lambda *given: budget(*given, split=lambda *one: split(*one)[::-1]))
slip("waterfall", "in_another_order", 3.5, "",
    lambda *given: dict(zip(("peak", "rest", "messages", "ranks", "slower"), budget(*given).values(), strict=True)),
    says="that is what rest should be: are the two exchanged?")
slip("waterfall", "no_rest", 4.25,
    "the rest is forgotten: what no operator and no wait covers, between the step's start and its end",
    lambda *given: budget(*given, left=lambda step, parts: 0.0))
slip("waterfall", "rest_with_waits", 4.25,
    "the rest has the waits in it, too: it is the step less the other four parts",
    lambda *given: budget(*given, left=lambda step, parts: step - parts[0] - parts[1]))
