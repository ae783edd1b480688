"""The task train_step: one rank's table, run with real gradients and messages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade.journal import Stopped
from manyranks.grade.pipeline import flow, oracle
from manyranks.grade.pipeline.oracle import Way
from manyranks.grade.pipeline.ready import READY, YOURSELF
from manyranks.grade.pipeline.stages import Stage, Step, loss_of
from manyranks.grade.scripted import ScriptTask
from manyranks.grade.scripts import WAIT, Scene, Tensors, Wrong, judge_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.parallel.pipeline import schedules

_LOSS = "on the last rank, return the mean of the micro-batches' losses, as a tensor"
_TWICE = "the gradients are divided by m twice: either each loss is, or the sum of gradients"
_NOT_DIVIDED = "the step's loss is the mean over the m micro-batches: divide each loss by m before its backward"
_EACH = (
    "divided on each rank: only the last one divides, its loss by m; the gradient that it sends carries that up, and the "
    "others go back from what they receive as it is"
)
_ACTIONS = "divided by 2m: m is len(shapes); `actions` has an F and a B of each micro-batch"
_ROWS = "each micro-batch counts alike, however many rows it has: divide its loss by m"
_PASSED = "a middle rank sends x.grad, the gradient of its own stage's input, not the one that it received"
_INPUT = "a rank sends its stage's output: what has arrived is the input of the stage before"
_ONE_LOSS = "that is the last micro-batch's loss: add them up over the micro-batches, each divided by m"
_CHANGED = (
    "a tensor was changed while its send was under way: until that is over, leave it as it is, or send a clone, and wait "
    "before you use it for something else"
)
_INPUTS_CHANGED = "the tensors in `inputs` were changed: compute with new ones"
_NO_GRAPH = (
    "what is kept for the backward has no graph: keep y itself, as the stage returns it with gradients on, and detach only "
    "what is sent"
)
_LAST = "only one micro-batch has left its gradient: backward adds to .grad, do not set it, or set it to None, in between"
_DETACHED = (
    "only the last stage learns: a stage goes back from the gradient that it receives, y.backward(grad), and sends its input's "
    "gradient up, x.grad. For that the received x must be a leaf that wants one, x.requires_grad_(), and y be kept with its "
    "graph"
)
_ONES = "a stage goes back from the gradient that the next rank has sent, y.backward(grad), not from ones or its own sum"
_MIXED = (
    "a gradient has met another micro-batch's graph: keep inputs and outputs by the number, and take those that the "
    "table names; backwards need not come in the order of forwards"
)
_REUSED = (
    "an input was received where another one in flight still lies: its graph needs it until its backward. Make a new buffer "
    "for each micro-batch"
)
_WHERE = "inputs are on rank 0 only, targets on the last rank only, and None elsewhere; m is len(shapes)"
_WAIT = (
    "isend and irecv return at once: keep what they return, and call .wait() on it, on a receive's before its buffer is used, "
    "on a send's before the step ends"
)
_STALE = "the stage got what is no micro-batch's input: did it compute before the message had arrived?"
_RETURNED = "the loss is the mean over the micro-batches, each of them counted once and divided by m once"
_BOTH_SEND = (
    "a send ends only when the other side receives. Where a rank has a forward's output to send down while the "
    "next one has a gradient to send up, both wait in send for ever, as in 1F1B's steady state. Start the send with isend, go "
    "on, and wait for it at the end (keep the tensor until then); or give a send and a receive to batch_isend_irecv together"
)
_BEFORE = (
    "a rank waits for what another one sends later, or waits for its send before it goes on: wait for a receive when the table "
    "comes to its action, and for sends at the end"
)


def _run(step: Step, function: Callable, watch: Watch) -> Tensors:
    rank, known = dist.get_rank(), oracle.inputs_of(step)
    stage = Stage(rank, known[rank], watch)
    watch.refuse(READY, YOURSELF)
    last = rank == step.n - 1
    inputs = step.batch(oracle.INPUTS) if rank == 0 else None
    targets = step.batch(oracle.TARGETS) if last else None
    result = function(stage, list(step.tables[rank]), step.shapes, inputs and [*inputs], targets, loss_of)
    if watch.changed():
        watch.mark(_CHANGED)
    if inputs and not all(map(torch.equal, inputs, step.batch(oracle.INPUTS))):
        watch.mark(_INPUTS_CHANGED)
    return oracle.gradients(stage.layers) | ({"the loss": _loss(result)} if last else {})


def _loss(value) -> torch.Tensor:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise Stopped(f"the last rank returned {value!r:.60}", _LOSS)
    return value.detach().clone().reshape(())


@cache
def cases(n: int) -> list[Scene]:
    """GPipe's table, with backwards in the other order; 1F1B's; and again with micro-batches of unequal size."""
    m, few = 2 * n + 1, n + 1
    unequal = tuple(1 + i % 3 for i in range(few))
    return [
        _scene(Step(n, (_gpipe(n),) * n, (2,) * n), "GPipe's table"),
        _scene(Step(n, _one_f_one_b(n, m), (2,) * m), "1F1B's table"),
        _scene(Step(n, _one_f_one_b(n, few), unequal), "1F1B's table with micro-batches of 1 to 3 rows"),
    ]


def _gpipe(m: int) -> tuple[tuple[str, int], ...]:
    return (*(("F", i) for i in range(m)), *(("B", i) for i in reversed(range(m))))


def _one_f_one_b(p: int, m: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    ranks = schedules.one_f_one_b(p, m).ranks
    return tuple(tuple((action.kind, action.microbatch) for action in table) for table in ranks)


def _scene(step: Step, note: str) -> Scene:
    note = f"{note}, m = {step.m}"
    return Scene(step.n, partial(_run, step), oracle.trained(step), partial(_wrong, step), step, note)


def _wrong(step: Step) -> Iterator[Wrong]:
    m, n = step.m, step.n

    def when(hint: str, **how) -> Wrong:
        tensors = oracle.trained(step, Way(**how))
        return Wrong(hint, [{name: t for name, t in own.items() if name != "the loss"} for own in tensors])

    yield when(_TWICE, scale=1 / m)
    yield when(_ACTIONS, scale=1 / 2)
    yield when(_NOT_DIVIDED, scale=m)
    yield when(_LAST, last=True)
    yield when(_DETACHED, hands_back=False)
    yield when(_ONES, ones=True)
    yield when(_EACH, handed=1 / m)
    yield when(_INPUT, sends_input=True)
    if len(set(step.rows)) > 1:
        yield when(_ROWS, by_rows=True)
    if n > 2:
        yield when(_PASSED, passes_on=True)
    mean, one = oracle.trained(step)[-1]["the loss"], oracle.last_loss(step)
    for hint, loss in ((_RETURNED, mean * m), (_RETURNED, mean / m), (_ONE_LOSS, one), (_ONE_LOSS, one / m)):
        yield Wrong(hint, [{} for _ in range(n - 1)] + [{"the loss": loss}])


def _values(task: "Training", trial: Trial) -> Verdict:
    """As usual, with a hint for what no mistake explains."""
    verdict = judge_values(task, trial)
    if verdict.ok:
        return verdict
    if verdict.hint == WAIT:
        return verdict._replace(hint=_WAIT)
    names = [event.what for seen in trial.answers for event in seen.events]
    if found := [name for name in names if name in (_CHANGED, _INPUTS_CHANGED)]:
        return verdict._replace(hint=found[0])
    if not any(name.startswith("F ") for name in names):
        return verdict._replace(hint="no rank has called its stage")
    if "reused" in names:
        return verdict._replace(hint=_REUSED)
    stale = _STALE if "F ?" in names else ""
    return verdict._replace(hint=verdict.hint or stale or flow.traffic(task, trial).hint or flow.order(task, trial).hint)


@dataclass(frozen=True)
class Training(ScriptTask):
    part: ClassVar[bool] = True
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"waits in send[^;]*; rank \d waits in send", _BOTH_SEND),
        (r"'NoneType' (object )?(has no len|is not subscriptable|is not iterable)", _WHERE),
        (r"got NoneType|'NoneType' object has no attribute|Invalid function argument", _DETACHED),
        (r"element 0 of tensors does not require grad", _NO_GRAPH),
        (r"grad can be implicitly created only for scalar", _ONES),
        (r"backward through the graph a second time", _MIXED),
        (r"a leaf Variable that requires grad", "receive into the buffer first, then x.requires_grad_()"),
        (r"Mismatch in shape", _MIXED),
        (r"made room for", "micro-batch i has shapes[i] at every boundary, there and back"),
    )
    guesses: ClassVar[tuple[tuple[str, str], ...]] = ((r"^(?![\s\S]*does a loop not end)[\s\S]*waits in (send|recv)", _BEFORE),)
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("gradients and loss are those of one process", 0.25, _values, each_world=True),
        Aspect("computes in the table's order", 0.15, flow.order),
        Aspect("holds the micro-batches that the table holds", 0.4, flow.memory),
        Aspect("sends b·s·h elements a micro-batch and boundary, each way", 0.2, flow.traffic),
    )
