"""Answers to 09_mfu: what is right, and the mistakes that are made."""

import math
import statistics
from fractions import Fraction
from functools import partial
from itertools import accumulate, count, groupby, pairwise
from types import SimpleNamespace as Its

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

TASKS = "forward_flops", "step_flops", "mfu", "time_it", "time_budget", "lost_time"
wrong_pass, wrong_step, wrong_mfu, wrong_time, wrong_budget, wrong_loss = (partial(mistake, task) for task in TASKS)
PARTS = ("matmul", "other", "communication", "waiting", "python")
TOKENS = "embedding.tokens.weight"

# Task 1. instead: what a mistake takes in place of an amount

@right("forward_flops")
def forward(m, batch, seq, predicted, **instead):
    h, moe, row = m.hidden, m.layers - m.dense_layers, 2 * batch * seq * m.hidden
    amounts = {"kv": m.kv_heads * h // m.heads, "output": h, "scores": 4 * batch * seq * seq * h, "matrices": 2 + m.gated}
    amounts |= {"dense": m.dense_layers, "moe": moe, "chosen": m.top_k + m.shared_experts, "expert_ffn": m.expert_ffn}
    its = Its(**amounts | {"routed": m.experts * moe, "rows": batch * predicted} | instead)
    return {
        "attention": row * m.layers * (h + 2 * its.kv + its.output),
        "scores": m.layers * its.scores,
        "mlp": row * its.matrices * (its.dense * m.ffn + its.moe * its.chosen * its.expert_ffn),
        "router": row * its.routed,
        "head": 2 * its.rows * h * m.vocab,
    }

@also_right("forward_flops")
def by_products(m, batch, seq, predicted):
    """Every product as (m, k, n), summed."""
    tokens, size, moe = batch * seq, m.hidden // m.heads, m.layers - m.dense_layers
    widths = [m.hidden, m.kv_heads * size, m.kv_heads * size, m.hidden]
    experts = [(tokens, m.hidden, m.expert_ffn)] * ((m.top_k + m.shared_experts) * moe * (2 + m.gated))
    products = {
        "attention": [(tokens, m.hidden, width) for width in widths] * m.layers,
        "scores": [(seq, size, seq), (seq, seq, size)] * (batch * m.heads * m.layers),
        "mlp": [(tokens, m.hidden, m.ffn)] * ((2 + m.gated) * m.dense_layers) + experts,
        "router": [(tokens, m.hidden, m.experts)] * moe,
        "head": [(batch * predicted, m.hidden, m.vocab)],
    }
    return {name: sum(2 * m * k * n for m, k, n in each) for name, each in products.items()}

@also_right("forward_flops")
def as_tensors_and_floats(*given):
    """In another order."""
    return {name: torch.tensor(flops) if flops % 3 else float(flops) for name, flops in sorted(forward(*given).items())}

slip("forward_flops", "embedding_is_a_product", 3,
    "the embedding is counted as a product: it looks rows up, without FLOPs. Only the head multiplies by it",
    lambda m, batch, seq, predicted: forward(m, batch, seq, predicted, rows=batch * (predicted + seq)))
slip("forward_flops", "all_heads_have_keys", 3.2,
    "keys and values are counted for all heads: there are kv_heads of them, each hidden / heads wide",
    lambda m, *sizes: forward(m, *sizes, kv=m.hidden))
slip("forward_flops", "causal_scores", 3.2,
    "half of the scores is missing: QKᵀ, the product with V, or the masked half, which this counter counts",
    lambda m, batch, seq, predicted: forward(m, batch, seq, predicted, scores=2 * batch * seq * seq * m.hidden))
slip("forward_flops", "no_gate", 3, "the gate is missing: a gated MLP, or expert, has three products, gate, up and down",
    lambda *given: forward(*given, matrices=2))
slip("forward_flops", "all_experts", 3,
    "all experts are counted: a token's row goes to top_k of them, whatever their number is",
    lambda m, *sizes: forward(m, *sizes, chosen=m.experts + m.shared_experts))
slip("forward_flops", "no_shared_experts", 3, "the shared experts are missing: each token goes to all of them, too",
    lambda m, *sizes: forward(m, *sizes, chosen=m.top_k))
slip("forward_flops", "all_logits", 3,
    "logits are counted for all tokens: the head sees the last `predicted` ones of each sequence",
    lambda m, batch, seq, predicted: forward(m, batch, seq, predicted, rows=batch * seq))
slip("forward_flops", "multiply_adds_are_one", 0,
    "a multiply-add is counted as one: it is two FLOPs, so 2mkn for m × k times k × n",
    lambda *given: {name: flops // 2 for name, flops in forward(*given).items()})
slip("forward_flops", "of_one_layer", 1, "that is one layer's: all layers are asked for",
    lambda m, *sizes: {name: flops / (1 if name == "head" else m.layers) for name, flops in forward(m, *sizes).items()})

@wrong_pass(says="torch.utils.flop_counter.FlopCounterMode is not allowed")
def from_the_counter(m, *sizes):
    with FlopCounterMode(display=False):
        nn.Linear(m.hidden, m.vocab)
    return forward(m, *sizes)

# Task 2. instead: what a mistake takes in place of a rule

@right("step_flops")
def step(layers, head, recompute, flash, **instead):
    rules = {"comes": lambda learns: accumulate(learns, max), "where": lambda learns, comes: comes, "heads": 3}
    rules |= {"products": lambda learns, comes: comes + learns, "scores": lambda learns, comes: 2 * comes}
    rules |= {"again": lambda one: {"none": 0, "selective": one.scores, "full": one.products + one.scores}[recompute]}
    its = Its(**rules | {"of_flash": lambda one: one.scores / 2 * flash} | instead)
    model, again = its.heads * head, 0
    for one, comes in zip(layers, its.comes([one.learns for one in layers]), strict=True):
        model += one.products * (1 + its.products(one.learns, comes)) + one.scores * (1 + its.scores(one.learns, comes))
        again += its.where(one.learns, comes) * (its.again(one) + its.of_flash(one))
    return model, model + again

@also_right("step_flops")
def step_by_products(layers, head, recompute, flash):
    """Forward, gradients of activations, gradients of weights, and what runs again, each by itself."""
    first = min((i for i, layer in enumerate(layers) if layer.learns), default=len(layers))
    forward = head + sum(layer.products + layer.scores for layer in layers)
    activations = head + sum(layer.products + 2 * layer.scores for layer in layers[first:])
    weights = head + sum(layer.products for layer in layers if layer.learns)
    parts = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[recompute]
    again = sum(parts[0] * layer.products + (parts[1] + 0.5 * flash) * layer.scores for layer in layers[first:])
    return np.array([forward + activations + weights, forward + activations + weights + again])

@also_right("step_flops")
def step_from_the_head(*given):
    """As backward goes: what is left before the first that learns has no backward."""
    model, hardware = step(*given, comes=lambda learns: [i >= learns.index(True) for i in range(len(learns))])
    return [Fraction(model), np.float64(hardware)]

def once(learns, comes):
    return int(comes)

slip("step_flops", "backward_once", 0,
    "backward is counted once: for each product of forward it has two, for the inputs' and the weights' gradients",
    lambda *given: step(*given, products=once, scores=once, heads=2))
slip("step_flops", "recomputation_is_useful", 1.6,
    "recomputation is counted as useful: what runs again is hardware FLOPs, and no model FLOPs",
    lambda *given: (step(*given)[1], step(*given)[1]))
slip("step_flops", "nothing_again", 2.4, "what is recomputed is missing in the hardware FLOPs: it runs again, in backward",
    lambda *given: step(*given, where=lambda learns, comes: 0))
slip("step_flops", "all_learn", 1,
    "layers that do not learn are counted as if they did: their weights get no gradients, one product less",
    lambda *given: step(*given, products=lambda *_: 2, scores=lambda *_: 2))
slip("step_flops", "no_way_through", 1, "layers that do not learn are counted without any backward: where one before them "
    "learns, the gradient has to come " "through, one product for each of forward's",
    lambda *given: step(*given, comes=lambda learns: learns))
slip("step_flops", "back_to_the_embedding", 1,
    "backward goes through all layers here: it ends at the first that learns, and nothing runs again before",
    lambda *given: step(*given, comes=lambda learns: [True] * len(learns)))
slip("step_flops", "scores_like_products", 1,
    "the scores have no weights, but two activations that need gradients: twice forward where backward comes",
    lambda *given: step(*given, scores=lambda learns, comes: comes + learns))

@wrong_step("the head is not recomputed: backward begins with it", points=2.4)
def head_again(layers, head, recompute, flash):
    model, hardware = step(layers, head, recompute, flash)
    return model, hardware + head * (recompute == "full")

slip("step_flops", "flash_forgotten", 2.4,
    "flash attention keeps no scores: backward computes QKᵀ again, half a forward, whatever recompute is",
    lambda *given: step(*given, of_flash=lambda one: 0))

# Task 3. instead: what a mistake takes in place of an amount

@right("mfu")
def share(run, sheet, convention, **instead):
    row = sheet[run.products_dtype]
    products = parameters(run, lambda name, shape: len(shape) == 2 and "embedding" not in name)
    amounts = {"products": products + run.tied * math.prod(run.shapes[TOKENS]), "parameters": parameters(run), "six": 6}
    amounts |= {"scores": 12 * run.layers * run.hidden * run.seq, "causal": 1 / 2, "peak": row.flops / (1 + row.sparse)}
    amounts |= {"tokens": run.sequences * run.accumulate * run.replicas * run.seq, "chips": run.replicas * run.chips}
    its = Its(**amounts | instead)
    its.scores = its.scores * its.six / 6
    flops = {
        "full": its.six * its.products + its.scores,
        "causal": its.six * its.products + its.scores * its.causal,
        "parameters": its.six * its.parameters,
        "palm": its.six * its.parameters + its.scores,
    }[convention]
    return flops * its.tokens / run.seconds / (its.chips * its.peak)

def parameters(run, counts=lambda name, shape: True):
    return sum(math.prod(shape) for name, shape in run.shapes.items() if counts(name, shape))

@also_right("mfu")
def mfu_by_shapes(run, sheet, convention):
    """The head by its name, the layers by theirs."""
    head = TOKENS if run.tied else "head.projection.weight"
    layers = parameters(run, lambda name, shape: name.startswith("layers.") and len(shape) > 1)
    scores = 3 * 2 * 2 * run.seq * run.hidden * run.layers
    found = share(run, sheet, convention, products=layers + math.prod(run.shapes[head]), scores=scores)
    return torch.tensor(found, dtype=torch.float64)

@also_right("mfu")
def mfu_by_chip(run, sheet, convention):
    """Of one chip's part of the tokens."""
    tokens = run.sequences * run.accumulate * run.seq / run.chips
    return np.float64(share(run, sheet, convention, tokens=tokens, chips=1))

@wrong_mfu("the embedding is counted as a product: its rows are looked up. If tied, its matrix counts for the head", points=1.8)
def embedding_counts(run, *given):
    tied = run.tied * math.prod(run.shapes[TOKENS])
    return share(run, *given, products=parameters(run, lambda name, shape: len(shape) == 2) + tied)

@wrong_mfu("the head is missing where it is tied: its matrix has the embedding's name, and is multiplied by", points=3)
def no_tied_head(run, *given):
    return share(run, *given, products=parameters(run, lambda name, shape: len(shape) == 2 and "embedding" not in name))

@wrong_mfu("biases and norms' weights are counted as products: those are vectors. Products are of matrices", points=1.8)
def vectors_are_products(run, *given):
    tied = run.tied * math.prod(run.shapes[TOKENS])
    return share(run, *given, products=parameters(run, lambda name, shape: "embedding" not in name) + tied)

@wrong_mfu('parameters are missing here: "parameters" and "palm" say 6Φ, and Φ is all of them, whatever they do', points=2.2)
def products_only(run, *given):
    products = parameters(run, lambda name, shape: len(shape) == 2 and "embedding" not in name)
    return share(run, *given, parameters=products + run.tied * math.prod(run.shapes[TOKENS]))

slip("mfu", "causal_in_full", 3,
    "causal attention is counted full: this convention counts the half of the scores that the mask leaves",
    lambda *given: share(*given, causal=1))
slip("mfu", "peak_of_the_weights", 1,
    "the peak is that of the dtype in which the weights are kept: the products run in products_dtype",
    lambda run, *given: share(run._replace(products_dtype=run.weights_dtype), *given))
slip("mfu", "peak_of_sparse", 2,
    "that is the peak for sparse matrices, twice that of dense ones: halve it where the row says sparse",
    lambda run, sheet, convention: share(run, sheet, convention, peak=sheet[run.products_dtype].flops))
slip("mfu", "tokens_of_a_replica", 0,
    "the tokens are one replica's, and the chips are those of all: take the tokens of the whole job",
    lambda run, *given: share(run, *given) / run.replicas)
slip("mfu", "in_single", 0,
    "the share is nearly right: torch.tensor of Python's floats is float32. Keep to Python's numbers, which are float64",
    lambda *given: torch.tensor(share(*given)))
slip("mfu", "head_by_its_name", 0, "",
    lambda run, *given: share(run, *given, products=math.prod(run.shapes["head.projection.weight"])),
    says="its matrix stands in run.shapes once")

# Tasks 4 and 5

def largest(row):
    dist.all_reduce(row, op=dist.ReduceOp.MAX)
    return row

def summed(row):
    dist.all_reduce(row)
    return row

def one_by_one(row):
    return torch.cat([largest(one.clone()) for one in row.split(1)])

# Task 4. instead: what a mistake takes in place of a rule

@right("time_it")
def timed(launch, synchronise, clock, warmup, repeats, inner, **instead):
    rules = {"ready": synchronise, "end": synchronise, "divide": inner, "dtype": torch.float64, "largest": largest}
    its = Its(**rules | {"middle": lambda row: statistics.median(row.tolist())} | instead)

    def measurement():
        started = clock()
        for _ in range(inner):
            launch()
        its.end()
        return (clock() - started) / its.divide

    for _ in range(warmup):
        launch()
    its.ready()
    times = [measurement() for _ in range(repeats)]
    return its.middle(its.largest(torch.tensor(times, dtype=its.dtype)))

@also_right("time_it")
def timed_from_end_to_end(launch, synchronise, clock, warmup, repeats, inner):
    """The end of a measurement is the begin of the next one; by quantile."""
    moments = []
    for number in [warmup, *[inner] * repeats]:
        for _ in range(number):
            launch()
        synchronise()
        moments.append(clock())
    times = [(end - begin) / inner for begin, end in pairwise(moments)]
    return largest(torch.tensor(times, dtype=torch.float64)).quantile(0.5)

@also_right("time_it")
def times_the_warmup(launch, synchronise, clock, *numbers):
    """And throws it away; synchronises before each measurement, too; sorts and divides at last; waits for a call."""

    def ready():
        synchronise()
        return clock()

    def waited(row):
        dist.all_reduce(row, op=dist.ReduceOp.MAX, async_op=True).wait()
        return row

    def middle(row):
        ordered = sorted(row.tolist())
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 / numbers[-1]

    ready()
    return timed(launch, synchronise, ready, *numbers, ready=ready, end=lambda: None, divide=1, largest=waited, middle=middle)

slip("time_it", "never_synchronises", 0.8,
    "that is how long the launches take: launch() returns at once. synchronise() before a measurement ends",
    lambda *given: timed(*given, end=lambda: None))
slip("time_it", "after_each_launch", 0.8,
    "synchronise() after each launch makes device and host wait: once, after a measurement's last launch",
    lambda launch, synchronise, *given: timed(lambda: (launch(), synchronise()), synchronise, *given, end=lambda: None))
slip("time_it", "no_warmup", 0.8, "the first launches are timed, too: `warmup` of them come first, and are slower",
    lambda launch, synchronise, clock, warmup, *numbers: timed(launch, synchronise, clock, 0, *numbers))
slip("time_it", "busy_at_the_begin", 0.8,
    "the device is still busy with older work when the clock is first read: synchronise() before that",
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

# Task 5. instead: what a mistake takes in place of a rule

def holds(outer, one):
    return one is not outer and outer.started <= one.started and one.finished <= outer.finished

def directly(spans, span):
    inner = [one for one in spans if holds(span, one)]
    return [one for one in inner if not any(holds(other, one) for other in inner)]

def split(wait, last):
    return rest(wait, max(0.0, min(last, wait.finished) - wait.started))

def rest(wait, waiting):
    return waiting, wait.finished - wait.started - waiting

@right("time_budget")
def budget(spans, arrived, step, zero, **instead):
    """Span by span: its own time is what the spans directly inside it leave."""
    rules = {"since": zero, "back": zero, "largest": largest, "split": split, "inside": directly, "calls": "python"}
    its, parts = Its(**rules | {"left": lambda parts: step[1] - step[0] - sum(parts)} | instead), dict.fromkeys(PARTS, 0.0)
    last = (its.largest(torch.tensor(arrived, dtype=torch.float64) - its.since) + its.back).tolist()
    for span in spans:
        if span.kind == "wait":
            waiting, communication = its.split(span, last[span.call])
            parts["waiting"] += waiting
            parts["communication"] += communication
        else:
            inside = sum(one.finished - one.started for one in its.inside(spans, span))
            parts[its.calls if span.kind == "calls" else span.kind] += span.finished - span.started - inside
    return parts | {"python": its.left([parts[name] for name in PARTS[:-1]])}

@also_right("time_budget")
def budget_with_a_stack(spans, arrived, step, zero):
    """One pass over the spans; each takes its time away from the one that it lies in. Tensors, in another order."""
    last = (largest(torch.tensor(arrived, dtype=torch.float64) - zero) + zero).tolist()
    parts, stack = dict.fromkeys((*PARTS, "calls", "wait"), 0.0), []
    for span in spans:
        while stack and stack[-1].finished <= span.started:
            stack.pop()
        if stack:
            parts[stack[-1].kind] -= span.finished - span.started
        parts[span.kind] += span.finished - span.started
        if span.kind == "wait":
            for name, seconds in zip(("waiting", "communication"), split(span, last[span.call]), strict=True):
                parts[name] += seconds
        stack.append(span)
    parts["python"] = step[1] - step[0] - sum(parts[name] for name in PARTS[:-1])
    return {name: torch.tensor(parts[name], dtype=torch.float64) for name in reversed(PARTS)}

@also_right("time_budget")
def budget_from_zero(spans, arrived, step, zero):
    """Everything on the clock that began at the barrier."""
    moved = [span._replace(started=span.started - zero, finished=span.finished - zero) for span in spans]
    return budget(moved, [one - zero for one in arrived], [one - zero for one in step], 0.0)

slip("time_budget", "nested_twice", 2.25,
    "nested operators are counted twice: a moment belongs only to the innermost span that covers it",
    lambda *given: budget(*given, inside=lambda spans, span: []))
slip("time_budget", "calls_are_operators", 2.25,
    "'calls' spans are counted as operators: what no operator inside them covers is Python's",
    lambda *given: budget(*given, calls="other"))
slip("time_budget", "own_moments", 2.25, "waiting is counted as communication: until the last rank has come to the call "
    "nothing is on its way. That takes the " "others' moments, and of each call the largest, op=dist.ReduceOp.MAX",
    lambda *given: budget(*given, largest=lambda row: row))
slip("time_budget", "sum_of_moments", 3.25,
    "all is waiting here, no communication: an all-reduce adds up the moments unless op=dist.ReduceOp.MAX",
    lambda *given: budget(*given, largest=lambda row: summed(row + 1000)))
slip("time_budget", "clocks_agree", 3.25,
    "the ranks' clocks began at different times: subtract `zero` before the all-reduce, and add it after",
    lambda *given: budget(*given, since=0, back=0))
slip("time_budget", "not_back_on_its_clock", 3.25,
    "the largest moments count from zero here: add this rank's zero before comparing them with spans",
    lambda *given: budget(*given, back=0))
slip("time_budget", "waiting_below_zero", 3.25,
    "where the last rank had come before the wait began, there is no waiting: 0, not less",
    lambda *given: budget(*given, split=lambda wait, last: rest(wait, min(last, wait.finished) - wait.started)))

@wrong_budget("`call` says which collective a wait is for: ranks need not wait for them in their order", points=3.25)
def waits_in_the_calls_order(spans, *given):
    numbers = count()
    return budget([one._replace(call=next(numbers)) if one.kind == "wait" else one for one in spans], *given)

slip("time_budget", "no_python", 4.25,
    "Python is forgotten: what no operator and no wait covers, between the step's begin and its end",
    lambda *given: budget(*given, left=lambda parts: 0.0))

# Task 6. instead: what a mistake takes in place of a rule

@right("lost_time")
def lost(operators, needed, peak, bandwidth, **instead):
    rules = {"lost": lambda compute, memory: max(compute, memory) - compute, "moved": both, "ends": lambda one: one.flops > 0}
    rules |= {"read": lambda reads, made: dict(one for one in reads if one[0] not in made).values()}
    its = Its(**rules | {"later": lambda run, behind: {*needed, *read_by(behind)}} | instead)
    start, saved = 0, 0
    for product, group in groupby(operators, its.ends):
        run = [*group]
        start += len(run)
        behind = operators[start:]
        reads = [each for one in run for each in one.reads.items()]
        made = {name: size for one in run for name, size in one.writes.items()}
        written = sum(size for name, size in made.items() if name in its.later(run, behind))
        saved += 0 if product else sum(map(both, run)) - sum(its.read(reads, made)) - written
    return [its.lost(one.flops / peak, its.moved(one) / bandwidth) for one in operators], saved / bandwidth

def both(one):
    return sum(one.reads.values()) + sum(one.writes.values())

def read_by(operators):
    return {name for one in operators for name in one.reads}

@also_right("lost_time")
def lost_by_tensors(operators, needed, peak, bandwidth):
    """By intensity and ridge; what is saved tensor by tensor: a reading and a writing that is left out."""
    parts = [(both(one), one.flops / both(one) / (peak / bandwidth)) for one in operators]
    made_by, products = (
        {name: i for i, one in enumerate(operators) for name in one.writes},
        [one.flops > 0 for one in operators],
    )
    run_of, saved, seen = [None if one else k for one, k in zip(products, accumulate(products), strict=True)], 0, set()
    for i, one in enumerate(operators):
        for name, size in one.reads.items():
            inside = name in made_by and run_of[made_by[name]] == run_of[i]
            saved += size * (not products[i] and (inside or (run_of[i], name) in seen))
            seen.add((run_of[i], name))
        for name, size in one.writes.items():
            readers = {run_of[k] for k, other in enumerate(operators) if name in other.reads}
            saved += size * (not products[i] and readers <= {run_of[i]} and name not in needed)
    return [np.array([size / bandwidth * max(0, 1 - part) for size, part in parts]), np.float64(saved / bandwidth)]

slip("lost_time", "whole_time", 1.35,
    "that is how long an operator takes: lost is what is beyond its FLOPs ÷ peak, so subtract that",
    lambda *given: lost(*given, lost=max))
slip("lost_time", "only_reads", 1.35,
    "the bytes that an operator writes are not counted: it moves what it reads and what it writes",
    lambda *given: lost(*given, moved=lambda one: sum(one.reads.values())))
slip("lost_time", "below_zero", 1.35,
    "a loss is below 0 here, where the FLOPs take longer than the bytes: nothing is lost there, so 0",
    lambda *given: lost(*given, lost=lambda compute, memory: memory - compute))
slip("lost_time", "only_products", 1.35,
    "only products lose time here. Operators without FLOPs do, too: all of it, for they only move bytes",
    lambda *given: lost(*given, lost=lambda compute, memory: max(compute, memory) - compute if compute else 0.0))
slip("lost_time", "writes_its_last", 1.65,
    "only a run's last result is written here: so are all others that are read behind it or `needed`",
    lambda *given: lost(*given, later=lambda run, behind: run[-1].writes))
slip("lost_time", "writes_the_needed", 1.65,
    "only what is in `needed` is written here: write what operators behind the run read, too",
    lambda operators, needed, *chip: lost(operators, needed, *chip, later=lambda run, behind: needed))
slip("lost_time", "writes_for_others", 1.65,
    "only what operators behind the run read is written here: write what is in `needed`, too",
    lambda *given: lost(*given, later=lambda run, behind: read_by(behind)))
slip("lost_time", "writes_all", 1.65, "all results of a run are written here: what only the run itself reads stays on the chip",
    lambda *given: lost(*given, later=lambda run, behind: {name for one in run for name in one.writes}))
slip("lost_time", "reads_its_own", 1.65,
    "a fused kernel reads its own results from memory here: what it has made stays on the chip",
    lambda *given: lost(*given, read=lambda reads, made: dict(reads).values()))
slip("lost_time", "reads_twice", 1.65,
    "a tensor that several operators of a run read is counted each time here: a fused kernel reads it once",
    lambda *given: lost(*given, read=lambda reads, made: [size for name, size in reads if name not in made]))
slip("lost_time", "one_kernel", 1.65,
    "all is one kernel here, with the products: they stay what they are, and each of them ends a run",
    lambda *given: lost(*given, ends=lambda one: False))
slip("lost_time", "saves_without_end", 1.65, "", lambda *given: (lost(*given)[0], math.inf), says="you have inf s, right is")
slip("lost_time", "only_the_sum", 0, "", lambda *given: (sum(lost(*given)[0]), lost(*given)[1]),
    says="it returns a pair: a list with one number for each operator")
