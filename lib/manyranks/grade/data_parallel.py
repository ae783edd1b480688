"""Checks of exercise 02_data_parallel: equal weights, averages, buckets, and buckets that leave while backward runs.

The ranks train a small model in float64: a tied weight, a frozen layer, a layer `detour` that not all ranks use, buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor, nn

from manyranks.given.data_parallel import Batch, Toy, batch, learning
from manyranks.given.numbers import drawn
from manyranks.grade.check import Task
from manyranks.grade.judges import Right, Verdict, as_bytes, at_most, calls, facts, parting, rank_by_rank, values
from manyranks.grade.learner import NOTHING_GIVEN, arguments, made, refuse_class
from manyranks.grade.trial import Seen, Sent, Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch, gradients

_RATE = 0.1
_FIRST, _CAP = 300, 10_000  # bytes: of the first bucket, and of the others
_SMALL, _NUMBER = 4096, 64  # bytes: of examples and numbers; no parameter is as small as this, a number is
_GRADIENTS = "average the gradients, parameter.grad, and leave the weights as they are"
_NONE = "a parameter that a rank's examples do not use has a gradient of None there: make it zeros, and send it all the same"
_LEFT_OUT = "is something left out where a gradient is None? It counts as zeros, and is sent all the same"


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@contextmanager
def _same_weights(model: nn.Module, call: str, hint: str) -> Iterator[None]:
    """Raises Stopped where what runs inside has changed them."""
    before = _weights(model)
    yield
    if changed := [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]:
        raise Stopped(f"{call} has changed the weights: {changed[0]}", hint)


# Tasks 1, 2 and 4


def _replicate(model: Toy, function: Callable, watch: Watch) -> dict:
    own = [*model.named_parameters(), *model.named_buffers()]  # which the layers, hooks and optimizers of before go on to use
    views = [(f"a view of {name}", tensor.detach()) for name, tensor in own]
    function(model)
    return {name: tensor.detach().clone() for name, tensor in (*own, *views)}


def _uneven(case: str, rank: int, n: int, seed: int) -> tuple[Toy, Batch]:
    return Toy(seed), batch(1, rank, seed, drawn(seed).sample(range(2, 17), n)[rank])


def _average(given: tuple[Toy, Batch], function: Callable, watch: Watch) -> dict:
    model, mine = given
    mine.loss(model).backward()
    with _same_weights(model, "average()", _GRADIENTS):
        function(model, len(mine.x_BS))
    return gradients(learning(model))


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Fills buckets from the last parameter on; a bucket ends with the parameter that brings it to its number of bytes."""
    made: list[list[nn.Parameter]] = [[]]
    for p in reversed([p for p in parameters if p.requires_grad]):
        made[-1].append(p)
        if sum(p.nbytes for p in made[-1]) >= (_FIRST if len(made) == 1 else _CAP):
            made.append([])
    return [bucket for bucket in made if bucket]


def _in_buckets(given: tuple[Toy, Batch], function: Callable, watch: Watch) -> dict:
    model, mine = given
    mixed = model.embedding.weight, model.first.bias, model.detour.weight, model.first.weight, model.detour.bias
    buckets = _buckets([*mixed, *model.second.parameters()])  # `detour`, which not all use, has one alone, and shares one
    mine.loss(model).backward()
    with _same_weights(model, "average_in_buckets()", _GRADIENTS), watch.peak():
        function(buckets)
    return gradients(learning(model)) | {"held at once": watch.peak_bytes}


def _by_bucket(among: list[Sent]) -> list[str]:
    """The all-reduces in order, what was broadcast together, and what the task does not need."""
    broadcast = sum(call.bytes for call in among if call.op == "broadcast")
    found = [f"{broadcast:,} bytes broadcast"] if broadcast else []
    found += [f"all_reduce of {call.bytes:,} bytes" for call in among if call.op == "all_reduce"]
    return found + sorted({call.op for call in among} - {"all_reduce", "broadcast"})


def _by_parameter(among: list[Sent]) -> list[str]:
    """The all-reduces in any order; of numbers, which no parameter is as small as, how many there are."""
    numbers = [call for call in among if call.op == "all_reduce" and call.bytes <= _NUMBER]
    counted = [f"{len(numbers)} number{'s' if len(numbers) > 1 else ''}"] if numbers else []
    return counted + sorted(f"{call.op} of {call.bytes:,} bytes" for call in among if call not in numbers)


_ADVICE = (
    (r"generator didn't yield|'NoneType' object is not an iterator", "no_sync() has to `yield` where the `with` block runs"),
    (r"generator didn't stop", "no_sync() has to `yield` once, and no more"),
    (r"no attribute 'copy_'", "a gradient to write into is None: make it zeros first; and does finish() forget the step?"),
    (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b|expected a non-empty list of Tensors", _NONE),
    (r"hook on a tensor that doesn't require grad", "frozen parameters get no gradient: ask parameter.requires_grad"),
    (r"(waits in|to its|called) all_reduce", _LEFT_OUT),
    (r"does not have a grad_fn", "inside no_sync() backward must still make gradients"),
    (arguments("finish|no_sync"), r"the training loop calls model.\1()"),
)
_task = partial(Task, "02_data_parallel", advice=_ADVICE)

_A_ROW = max(sum(p.nbytes for p in bucket) for bucket in _buckets(list(Toy(0).parameters())))
_ALL_ROWS = sum(p.nbytes for p in learning(Toy(0)).values())
_ONE = "make the row of one bucket, reduce it, write it back, and only then make the next"  # a loop keeps the one before it
_holds = partial(at_most, names="^held", says="{got} {name}; {right} is enough", unit=as_bytes, grain=_SMALL)
_ROWS_HELD = _holds(0.2, "holds the rows of one bucket at a time", room=_A_ROW + _SMALL, hint=_ONE)
_ALIKE = values(0.4, "gives all ranks rank 0's parameters and buffers", "^(?!a view)")
_INTO = "the tensor has moved to other memory, as `tensor.data = …` does: copy into the memory it has, which views go on to use"
_IN_PLACE = facts(0.2, "writes into the memory that the model's tensors have", "^a view", _INTO, needs=1)
_EACH_ONCE = calls(0.4, "sends each tensor once", _by_bucket, "one broadcast of each parameter and of each buffer, from rank 0")
replicate = _task(
    "replicate(model)", 2, _replicate, (_ALIKE, _IN_PLACE, _EACH_ONCE), make=lambda case, rank, n, seed: Toy(seed, rank)
)

_EACH = "one all-reduce of each gradient, zeros included, and one of the number of examples"
_EACH_AND_NUMBER = calls(0.3, "sends every gradient once, and the number of examples", _by_parameter, _EACH)
_OVER_EXAMPLES = values(0.7, "averages over the examples")
_UNUSED = "only rank 1 uses the layer `detour`"
_UNEVEN = f"where each rank has another number of examples, and {_UNUSED}"
_WEIGHTED = "multiply each rank's gradient by its number of examples, and divide the sum by the number of all ranks' examples"
_JUDGED = _OVER_EXAMPLES, _EACH_AND_NUMBER
average = _task("average(model, examples)", 4, _average, _JUDGED, (_UNEVEN,), make=_uneven, unexplained=_WEIGHTED)

_A_BUCKET = calls(
    0.3, "makes one all-reduce per bucket, in order", _by_bucket, "one all-reduce of each bucket's row, in their order"
)
_IN_BUCKETS = (values(0.5, "averages over the ranks", "^the gradient"), _A_BUCKET, _ROWS_HELD)
_PARTS = "each part of the row replaces the gradient that it was made from, and it is divided by N once"
average_in_buckets = _task(
    "average_in_buckets(buckets)",
    3,
    _in_buckets,
    _IN_BUCKETS,
    (f"where {_UNUSED}",),
    make=lambda case, rank, n, seed: (
        Toy(seed).to(torch.float32 if "float32" in case else torch.float64),
        batch(1, rank, seed),
    ),
    more=lambda random: (f"where {_UNUSED}, and weights are float32",),
    unexplained=_PARTS,
)

# Task 3

_LIMITS = ((_FIRST, _CAP), (384, 384 + 48 * 48 * 8), (10**6, 10**6), (1, 1), (_FIRST, 4 * _CAP))


def _limits(case: str, rank: int, n: int, seed: int) -> tuple[nn.Module, list[tuple[int, int]]]:
    """Draws parameters of any sizes for the judge, and limits that buckets meet exactly: no table has their results."""
    if not seed:
        return Toy(0), [*_LIMITS]
    random, limits = drawn(seed), []
    kinds = [(torch.float32, torch.float64)[random.random() < 0.7] for _ in range(20)]
    tensors = [torch.zeros(random.randint(1, 99), random.randint(1, 9), dtype=kind) for kind in kinds]
    model = nn.ParameterList(nn.Parameter(one, random.random() < 0.8) for one in tensors)
    sizes = [p.nbytes for p in learning(model).values()][::-1]
    for _ in range(4):
        first, end = sorted(random.sample(range(1, len(sizes)), 2))
        limits.append((sum(sizes[:first]), sum(sizes[first:end])))
    return model, [*_LIMITS, *limits]


def _cut(given: tuple[nn.Module, list[tuple[int, int]]], function: Callable, watch: Watch) -> dict:
    model, limits = given
    named, found = dict(model.named_parameters()), {}
    names = {id(p): name for name, p in named.items()}
    for first, cap in limits:
        parameters = list(named.values())
        made = function(parameters, first, cap)
        if list(map(id, parameters)) != list(names):
            raise Stopped("cut has changed the list that it was given", "make new lists, and leave `parameters` as it is")
        for what, each in (("", made), *(("a list of ", one) for one in (made if isinstance(made, list | tuple) else ()))):
            if not isinstance(each, list | tuple):
                raise Stopped(f"cut returned {what}{kind_of(each)}", "return the list of buckets, each a list of parameters")
        if wrong := [p for bucket in made for p in bucket if id(p) not in names]:
            raise Stopped(f"cut returned lists of {type(wrong[0]).__name__}", "put the parameters themselves into the lists")
        buckets = [[names[id(p)] for p in bucket] for bucket in made]
        found[f"with first_bytes={first:,} and cap_bytes={cap:,}: the result"] = buckets
    return found


_RULE = "a bucket is closed once it holds at least so many bytes, with the one that reaches it"
cut = _task(
    "cut(parameters, first_bytes, cap_bytes)", 2, _cut, (facts(1.0, "cuts as it should", "", _RULE),), worlds=(1,), make=_limits
)

# Tasks 5 and 6

_OVERLAPPED = "Overlapped(module, first_bytes, cap_bytes)"
_RUNS = {  # case -> a step's batches; `detour` is used on no rank in 0 and 3, on rank 1 in 1, on all but rank 0 in 2
    "in four steps": [[0], [1], [2], [3]],
    "with two micro-batches inside no_sync() and one outside": [[0, 1, 3], [2, 4, 3], [3, 6, 7]],
    "after an exception inside no_sync()": [[2], [3]],
}
_STEPS, _MICRO, _EXCEPTION = _RUNS
_OTHER = ", and with other limits"
_LOOP = "the training loop calls finish(), after backward: a hook only starts all-reduces"
_COUNT = "a bucket leaves when its last gradient is there, and no earlier: count its gradients, and count anew in each step"
_ALONE = "inside no_sync(), and when it ends, nothing leaves: the gradients of its micro-batches wait in parameter.grad"
_LATE = "a bucket leaves in the hook of its last gradient, at once, with async_op=True, if those before it have left"


def _steps(case: str, rank: int, n: int, seed: int) -> tuple[Toy, list[list[Batch]], bool, tuple[int, int]]:
    """Draws limits for the judge's own case: with a cap of more than a layer's bytes, a bucket has two layers' parameters."""
    random, limits, (case, _, own) = drawn(seed, case), (_FIRST, _CAP), case.partition(_OTHER)
    if own:
        limits = random.choice((_FIRST, 18_500)), random.randint(19_300, 37_000)
    return Toy(seed, rank), [[batch(one, rank, seed) for one in step] for step in _RUNS[case]], "exception" in case, limits


def _train(given: tuple[Toy, list[list[Batch]], bool, tuple[int, int]], kind, watch: Watch) -> dict:
    module, steps, raises, limits = given
    watch.follow(module)
    model = _made(kind, module, *limits)
    watch.forbid("finish", "backward", "finish() ran inside backward", _LOOP)
    if raises:
        with suppress(LookupError):
            with _no_sync(model):
                raise LookupError
            raise Stopped("no_sync() has swallowed an exception", "let it through: try and finally, without except")
    optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)
    for *alone, last in steps:
        if alone:
            watch.mark("alone")
            with _no_sync(model):
                for one in alone:
                    one.loss(model).backward()
        watch.mark("forward")
        loss = last.loss(model)
        if max(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()) > 2:  # one is the check's
            raise Stopped("a parameter has more than one hook of yours", "add hooks in __init__, one for each parameter")
        with _same_weights(module, "finish()", "average gradients, parameter.grad, and leave the weights to the optimizer"):
            watch.mark("backward")
            loss.backward()
            watch.mark("finish")
            model.finish()
        watch.mark("step")
        optimizer.step()
        optimizer.zero_grad()
        watch.weigh()
    return _weights(module) | {f"held after step {step}": count for step, count in enumerate(watch.held, 1)}


def _made(kind, module: Toy, first: int, cap: int):
    """The learner's wrapper. Raises Stopped where it is none, or is ready-made."""
    model = made(kind, NOTHING_GIVEN, _OVERLAPPED, ("__call__", "finish"), module, first, cap)
    for part in model.modules() if isinstance(model, nn.Module) else ():
        if part not in list(module.modules()):
            refuse_class(type(part), NOTHING_GIVEN)
    return model


def _no_sync(model):
    """The context manager. Raises Stopped where it is none."""
    if not callable(getattr(model, "no_sync", None)):
        raise Stopped(f"a {type(model).__name__} has no no_sync()", "write no_sync(self) in the class")
    if hasattr(type(context := model.no_sync()), "__enter__"):
        return context
    hint = "put @contextmanager above it, and `yield` where the code of the `with` block should run"
    raise Stopped(f"no_sync() returned a {type(context).__name__}, which `with` cannot use", hint)


def _order(seen: Seen) -> dict:
    """Gradients, all-reduces, and who waits before finish() does: "gradient first.weight", "call all_reduce 1024", "wait"."""
    steps, place = [], ""
    for kind, what, count in seen.events:
        place = what if kind == "mark" else place
        if kind in ("mark", "gradient"):
            steps.append(f"{kind} {what}")
        elif kind == "call" and what == "all_reduce":
            steps.append(f"{kind} {what} {count}")
        elif kind == "wait" and place in ("backward", "alone"):
            steps.append("wait")
    return {"order": steps}


def _leaves_late(trial: Trial, rank: int, seen: Seen, should: Seen) -> Verdict | None:
    """Finds a bucket that leaves before it is full, or later than it could, and who waits while backward runs."""
    got, must = ([*_order(one)["order"], "nothing more"] for one in (seen, should))
    if got == must:
        return None
    at = parting(got, must)
    if got[at] == "wait":
        return Verdict(False, f"rank {rank} waits for an all-reduce while backward runs", "wait in finish()")
    steps, before = 1 + got[:at].count("mark step"), got[at - 1] if at else "the beginning"
    found = f"rank {rank}, step {steps}: after {_said(before)} comes {_said(got[at])}; right is {_said(must[at])}"
    inside = [step for step in must[:at] if step in ("mark alone", "mark forward")][-1:] == ["mark alone"]
    return Verdict(False, found, _ALONE if inside else _LATE if must[at].startswith("call") else _COUNT)


_PLACES = {"alone": "entering no_sync()", "forward": "the forward outside no_sync()", "backward": "its backward"}
_PLACES |= {"finish": "finish()", "step": "the optimizer's step"}


def _said(step: str) -> str:
    """Puts an event into words: "call all_reduce 384" is "an all_reduce of 384 bytes"."""
    kind, _, what = step.partition(" ")
    op, _, count = what.partition(" ")
    return {
        "mark": _PLACES.get(what, what),
        "gradient": f"the gradient of {what}",
        "call": f"an {op} of {int(count or 0):,} bytes",
    }.get(kind, step)


_ROWS_KEPT = _holds(0.1, "keeps no more than it needs", room=_ALL_ROWS + _SMALL, hint="one copy of the gradients is enough")


def _keeps_little(trial: Trial, right: Right) -> Verdict:
    if any(call.op == "all_reduce" for seen in trial.seen for call in seen.calls):
        return _ROWS_KEPT.verdict(trial, right)
    return Verdict(False, "there was no all-reduce to judge")


_WRAPPED = (
    values(0.4, "trains like one process on the whole batch", "^(?!held)"),
    calls(0.2, "sends each bucket once per step", _by_bucket, "what `replicate` sends, then one all-reduce per bucket a step"),
    rank_by_rank(0.3, "sends each bucket as soon as it can leave", _leaves_late, _order),
    _ROWS_KEPT._replace(verdict=_keeps_little),
)
_MEANS = "ranks begin alike; after finish(), parameter.grad is the mean over them of all that the step's backwards added up"
_BOTH = {"run": _train, "make": _steps, "judges": _WRAPPED, "unexplained": _MEANS}
overlapped = _task(_OVERLAPPED, 6, cases=(_STEPS,), more=lambda random: [_STEPS + _OTHER], **_BOTH)
no_sync = _task(f"{_OVERLAPPED}.no_sync()", 3, cases=(_MICRO, _EXCEPTION), more=lambda random: [_MICRO + _OTHER], **_BOTH)
