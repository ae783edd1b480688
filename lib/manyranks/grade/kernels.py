"""Checks of exercise 11_kernels: what Triton kernels compute, which bytes and sectors they ask for, and attention in tiles.

Kernels run under Triton's interpreter, counted lane by lane. Only the rank imports it: the last two tasks work without.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyranks.given import kernels as given
from manyranks.given.kernels import Heads, Launchers, Made, Matrix, Product, Tokens, without_triton
from manyranks.given.numbers import normal, whole
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, as_bytes, at_most, facts, values
from manyranks.grade.learner import Allowed, on_ctx, plain, tensor
from manyranks.grade.learner import whole as whole_number
from manyranks.grade.trial import Again
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.kernel import Counted, OutOfBounds, bank_conflicts, count
from manyranks.measure.watch import Watch, gradients
from manyranks.theory.blocks import WARP

_GIVEN = (*(f"manyranks.measure.{name}" for name in ("kernel", "interpreter", "relaunch")), given.__name__)
_ADVICE = (
    ("power of 2|power of two", "the sizes of a tile, and what tl.arange runs to, are powers of two; a mask cuts off the rest"),
    ("JITFunction|0 active drivers", "import Triton as the cell at the top does: then it's interpreted, even without a GPU"),
    ("(incompatible|cannot broadcast|not be broadcast|make_shape_compatible)", "x[:, None] is a column, x[None, :] is a row"),
    (r"AttributeError: .*tensor.* has no attribute '(T|t)'", "tl.trans(tile) turns a tile"),
)
_CHANGED = "whether the input has changed"
_RESULTS = f"number of results|{_CHANGED}"
_task = partial(Task, "11_kernels", worlds=(1,), allowed=Allowed(_GIVEN, given.OWN), advice=_ADVICE)

# A kernel runs where its launcher is, and again from its source, with nothing else of the learner's beside it: that counts.


def _launched(own: tuple, function: Callable, watch: Watch) -> dict:
    """Calls the learner's launcher, and returns what it launched, as data, and where its results lie."""
    try:
        from manyranks.measure.relaunch import noted  # and Triton, which it mends
    except ImportError as error:
        raise Stopped(f"{error}", "the tasks Attention and unsick run without Triton") from None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty makes is NaN then, not what was there before
    try:
        with noted([one for one in own if isinstance(one, Tensor)]) as launches, Launchers(launches.fill):
            counted = count(function, *own)
    except OutOfBounds as error:
        found, _, hint = f"{error}".rpartition(": ")
        raise Stopped(found, hint).with_traceback(without_triton(error.__traceback__)) from None
    except Exception as error:
        raise error.with_traceback(without_triton(error.__traceback__)) from None
    finally:
        torch.use_deterministic_algorithms(before)
    results = counted.result if isinstance(counted.result, tuple | list) else (counted.result,)
    stored, needed = _stored(counted), sum(one.numel() * one.element_size() for one in results if isinstance(one, Tensor))
    if stored < needed:
        found = f"the kernels stored {stored:,} bytes, and the result has {needed:,}"
        raise Stopped(found, "a kernel of yours stores every element of the result: kernel[grid](…) starts it")
    places = [launches.place(one) if isinstance(one, Tensor) else kind_of(one) for one in results]
    return {"launches": launches.told(), "results": places}


def _again(names: tuple[str, ...], judged: Callable[[Any, Counted], dict], case: Any, own: tuple, told: dict) -> dict:
    """Launches kernels again, on a rank that runs nothing else. names: of results; judged: facts of what they moved."""
    from manyranks.measure.relaunch import relaunch

    inputs = [one for one in own if isinstance(one, Tensor)]
    before, places = deepcopy(inputs), told["results"]
    counted = relaunch(told["launches"], inputs, [one for one in places if not isinstance(one, str)])
    loaded, needed = counted.requested_bytes(kind="load"), sum(one.nbytes for one in inputs)
    if loaded < needed:
        found = f"the kernels loaded {loaded:,} bytes, and the inputs have {needed:,}"
        raise Stopped(found, "a kernel of yours loads every element of the inputs")
    tensors = iter(counted.result)
    results = [one if isinstance(one, str) else next(tensors) for one in places]
    found = dict(zip(names, results, strict=False)) | {"the number of results": len(results)}
    return found | {_CHANGED: not all(map(torch.equal, inputs, before))} | judged(case, counted)


def _stored(counted: Counted) -> int:
    return counted.requested_bytes(kind="store") + counted.requested_bytes(kind="atomic")


def _bytes(case: Any, counted: Counted) -> dict[str, int]:
    return {"bytes that lanes load": counted.requested_bytes(kind="load"), "bytes that lanes store": _stored(counted)}


def _in_tiles(row: str, name: str, case: Any, counted: Counted) -> dict:
    """Bytes, the largest tile's elements beyond 32 rows of the case's field `row`, and small numbers of the last result."""
    beyond = max(launch.tile for launch in counted.launches) - 32 * max(16, 1 << (getattr(case, row) - 1).bit_length())
    small = {f"{name} within ±20": one.clamp(-20, 20) for one in counted.result[-1:]}  # large ones make the tolerance wide
    return _bytes(case, counted) | small | {"elements in a tile beyond 32 rows": max(0, beyond)}


def _sectors(case: Any, counted: Counted) -> dict[str, int]:
    stored = counted.sectors(kind="store") + counted.sectors(kind="atomic")
    return {"sectors that loads touch": counted.sectors(kind="load"), "sectors that stores touch": stored} if case.even else {}


def _drawn(case: Any, seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(shape, seed, case, i, dtype=torch.float32) for i, shape in enumerate(shapes)]


def _kernel_task(call: str, points: float, names: tuple[str, ...], judged: Callable, judges: tuple, **more) -> Task:
    return _task(call, points, _launched, judges, then=Again(partial(_again, names, judged)), **more)


def _moves(share: float, what: str, names: str, hint: str = "", needs: int = 1) -> Judge:
    """Judges that kernels ask for no more bytes or sectors than the right answer does."""
    return at_most(share, what, names, hint, says="{got} {name}; {right} are enough", unit="{:,}".format, needs=needs)


# Task 1: copy a transposed matrix

_TILE = "each load and each store: along the last axis of a tile, neighboring lanes need neighboring addresses"
copy_rows = _kernel_task(
    "copy_rows(x_RC)",
    4,
    ("the copy",),
    lambda case, counted: {"contiguous": counted.result[0].is_contiguous()} | _bytes(case, counted) | _sectors(case, counted),
    (
        values(0.4, "returns a contiguous copy of the matrix", f"copy|contiguous|{_RESULTS}", alone=True),
        _moves(0.3, "loads touch each sector once", "loads|lanes load", _TILE),
        _moves(0.3, "stores touch each sector once", "stores|lanes store", _TILE),
    ),
    cases=(Matrix(64, 96, even=True), Matrix(70, 150)),
    make=lambda case, rank, n, seed: (_drawn(case, seed, (case.columns, case.rows))[0].T,),
    unexplained="tile [i, j] of x goes to [i, j] of out, and a mask cuts off what lies beyond R and C",
)

# Task 2: softmax down the columns

softmax_columns = _kernel_task(
    "softmax_columns(x_RC)",
    3,
    ("the result",),
    lambda case, counted: _bytes(case, counted) | _sectors(case, counted),
    (
        values(0.5, "each column is the softmax of that column", f"the result|{_RESULTS}", alone=True),
        _moves(0.3, "loads and stores each element once", "bytes", "a program loads its tile once, keeps it, and stores once"),
        _moves(0.2, "its lanes share sectors", "sectors", "a warp's lanes run along a row of x: a program takes many columns"),
    ),
    cases=(Matrix(24, 64, even=True), Matrix(70, 100)),
    make=lambda case, rank, n, seed: (given.drawn_columns(case, seed),),
    unexplained="exp(x − the column's maximum) ÷ their sum over the column; rows beyond R must not count",
)

# Task 3: a product with a budget


def _factors(case: Product, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor, int, int]:
    return *case.factors(*_drawn(case, seed, (case.m, case.k), (case.n, case.k))), case.budget, case.shared


def _within(case: Product, counted: Counted) -> dict:
    beyond = [max(one.dot_bytes - case.shared, one.tile - case.most) for one in counted.launches]
    stored = [one.stored - case.most for one in counted.launches]
    return {
        "whether tl.dot ran": counted.flops >= 2 * case.m * case.n * case.k,
        "bytes more than the budget": max(0, counted.requested_bytes() - case.budget),
        "bytes more than the shared memory": max(0, *beyond),
        "elements of a program's tile more than fit the shared memory": max(0, *stored),
    }


_BUDGET = "the programs ask for itemsize · (M·K·⌈N/columns⌉ + N·K·⌈M/rows⌉ + M·N) bytes: wider tiles read A less often"
_SHARED = "a step holds (rows + columns) · step · itemsize bytes: a smaller step leaves room for larger tiles"
_over = partial(at_most, says="{got} {name}", unit="{:,}".format, needs=1)
product = _kernel_task(
    "product(a_MK, b_NK, budget, shared)",
    5,
    ("the product",),
    _within,
    (
        values(0.5, "returns A · Bᵀ", f"product|tl.dot|{_RESULTS}", alone=True),
        _over(0.3, "asks for no more bytes than the budget", "budget", _BUDGET),
        _over(0.2, "both tiles fit the shared memory", "shared", _SHARED),
    ),
    cases=(
        Product(32, 40, 192, 71_000, 6_200),
        Product(160, 24, 48, 61_000, 8_200),
        Product(64, 64, 64, 24_576, 4_096, torch.float16),
        Product(24, 30, 200, 50_000, 10_300),
    ),
    more=given.drawn_products,
    make=_factors,
    unexplained="out[i, j] is the sum over k of a[i, k] · b[j, k]; k beyond K must not count",
)

# Task 4: the loss without logits


def _of_loss(case: Tokens, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    hidden, weight = _drawn(case, seed, (case.tokens, case.hidden), (case.words, case.hidden))
    hidden[0], weight[:, 0], hidden[0, 0] = 0, 1, -120 / case.strong  # the first token's logits: no exponential in float32
    hidden[1:3, 1], weight[:, 1] = torch.tensor([200, -200]) / case.strong, torch.linspace(-1, 1, case.words)  # grow; fall
    return hidden * case.strong, weight, whole(case.words, (case.tokens,), seed, case), case.z


_ROW = "no logit leaves the chip: keep each row's maximum, sum and target"
_ONCE = "load the tile of tokens before the loop, loop once, and take the target's logit from the tile of logits"
loss = _kernel_task(
    "loss(hidden_TH, weight_VH, targets_T, z)",
    5,
    ("the losses",),
    partial(_in_tiles, "hidden", "the losses"),
    (
        values(0.5, "returns each token's loss", f"losses|{_RESULTS}", alone=True),
        _moves(0.25, "stores one number per token", "store", _ROW),
        _moves(0.25, "reads the weight once per tile of tokens, in the launcher's tiles", "load|tile", _ONCE),
    ),
    cases=(Tokens(37, 150, 24, 0.01, 6.0), Tokens(32, 70, 16, 0.5, 0.2)),  # logits of ±120, and small ones
    make=_of_loss,
    unexplained="lse is the maximum + log of the sum of exp(logit − maximum); the loss is lse − target's logit + z · lse²",
)

# Task 5: attention to a window


def _heads(case: Heads, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    q, k, v = _drawn(case, seed, *[(case.heads, case.rows, case.head)] * 3)
    k[:, 0] -= 30 * q[:, 0]
    k[:, -1] += 30 * q[:, -1]  # the last query's last score is far above its first ones
    return q * 4, k, v, case.window


_PASS = "one loop over the keys, with K and V loaded once in it, from the first tile that its queries see to the last one"
attend = _kernel_task(
    "attend(q_ASD, k_ASD, v_ASD, window)",
    6,
    ("the output", "the log-sum-exp"),
    partial(_in_tiles, "head", "the log-sum-exp"),
    (
        values(0.35, "the output is right", f"output|{_RESULTS}", alone=True),
        values(0.2, "the log-sum-exp is right", "log-sum-exp", alone=True),
        _moves(0.3, "loads no tile that nobody sees, and no tile twice", "load|tile", _PASS, needs=2),
        _moves(0.15, "stores the output and one number per row", "store", "no score leaves the chip", needs=2),
    ),
    cases=(Heads(2, 50, 24, window=100), Heads(1, 70, 16, window=17), Heads(2, 48, 40, window=18)),
    more=lambda random: [Heads(1, 40, 16, window=random.randint(1, 15))],
    make=_heads,
    unexplained="query i sees keys i − window + 1 to i, scores are q · k / √D; where none was seen yet, −inf − (−inf) is NaN",
)

# Task 6: attention as a function with a backward


def _both_passes(own: tuple[int, list[Tensor]], kind: Any, watch: Watch) -> dict:
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        raise Stopped(f"Attention is {kind_of(kind)}", "it's a class derived from torch.autograd.Function")
    tile, (*drawn, grad) = own
    leaves, before = [each.clone().requires_grad_() for each in drawn], drawn
    watch.weigh()
    with watch.peak(), Made() as made:
        out = tensor(kind.apply(*leaves, tile), "what Attention.apply returned")
        if not out.requires_grad:
            raise Stopped("the result has no graph", "forward returns the output, and the class is called by apply")
        watch.weigh()
        out.backward(grad)
    found = gradients(named := dict(zip("qkv", leaves, strict=True)))
    if len(grad[0]) < 100:  # more take a second, and show nothing else
        found |= watch.overlapping_calls(
            kind.apply, (named, (tile,)), ({name: one[:, 1:] for name, one in named.items()}, (tile,))
        )
    return found | {
        "the output": plain(out),
        _CHANGED: not all(map(torch.equal, (x.detach() for x in leaves), before)),
        "a tensor of more elements than tiles for all queries": given.larger(made.most, drawn[0], tile),
        "the result and what forward keeps": watch.held[1] - watch.held[0],
        "the most at one time": watch.peak_bytes,
    }


_ROOM = 600_000  # bytes: a tile of keys for all queries at once, a few times, and no tile for every pair of tiles
_SAVED = "save q, k, v, the output and the log-sum-exp, with ctx.save_for_backward, and nothing else"
_SCORES, _DROP = "a tile of scores has tile × tile elements", "use a tile of scores, then drop it"
_less = partial(at_most, says="{name}: {got}; {right} is enough", unit=as_bytes, needs=2)
attention = _task(
    "Attention.apply(q_ASD, k_ASD, v_ASD, tile)",
    5,
    _both_passes,
    (
        values(0.25, "forward returns the output", f"output|{_CHANGED}", alone=True),
        values(0.25, "backward returns the three gradients", "gradient", alone=True),
        facts(0.3, "makes no tensor of S × S elements, nor larger tiles than it should", "elements", _SCORES, needs=2),
        _less(0.1, "keeps q, k, v, the output and the log-sum-exp only", "keeps", _SAVED, 300),
        _less(0.1, "holds a few tiles at a time", "at one time", _DROP, _ROOM, grain=4096),
    ),
    cases=(Heads(2, 256, 8, tile=32), Heads(1, 41, 5, tile=8)),
    make=lambda case, rank, n, seed: (case.tile, given.drawn_heads(case, seed)),
    allowed=Allowed(),
    advice=(
        *on_ctx("Attention.apply(q, k, v, tile)", "the output's gradient"),
        ("returned an incorrect number of gradients", "backward returns one value per argument of forward: dq, dk, dv, None"),
    ),
    unexplained="P = exp(scores − lse), dV = Pᵀ dO, dS = P · (dO Vᵀ − Σ dO · O), dQ = dS K / √D, dK = dSᵀ Q / √D",
)

# Task 7: a tile without bank conflicts


def _addresses(case: Matrix, function: Callable, watch: Watch) -> dict:
    at = [[0] * case.columns for _ in range(given.ROWS)]
    for place in torch.randperm(given.ROWS * case.columns).tolist():  # an address may depend on i, j and columns only
        i, j = divmod(place, case.columns)
        at[i][j] = whole_number(function(i, j, case.columns), "an address", "it returns an address in bytes, a whole number")
    return {"at": at}


def _conflicts(case: Matrix, own: Matrix, results: dict) -> dict:
    at = results["at"]
    flat = [address for row in at for address in row]
    if [len(row) for row in at] != [case.columns] * given.ROWS or any(type(one) is not int for one in flat):  # such as NaN
        raise ValueError("each word of the tile has an address, a whole number")
    return {
        "the number of words with an address of their own": len({address // given.WORD for address in flat}),
        "the number of addresses that aren't multiples of 4, or below 0": sum(one % given.WORD > 0 or one < 0 for one in flat),
        "turns down a column": max(bank_conflicts([row[j] for row in at]) for j in range(case.columns)),
        "turns along a row": max(bank_conflicts(row[k : k + WARP]) for row in at for k in range(0, case.columns, WARP)),
        "bytes of shared memory": max(flat) + given.WORD,
    }


_BANKS = "word w lies in bank w mod 32: the 32 lanes of a warp need 32 different banks, along a row and down a column"
_turns = partial(at_most, says="{got} {name}; {right} is enough")
unsick = _task(
    "unsick(i, j, columns)",
    2,
    _addresses,
    (
        values(0.2, "each word has an address of its own", "^the number", alone=True),
        _turns(0.4, "a warp that reads down a column has no conflict", "column", _BANKS, needs=1),
        _turns(0.3, "a warp that reads along a row has none", "row", _BANKS, needs=2),
        _turns(0.1, "takes 32 words more at most", "bytes", "one word after each row is enough", given.WORD, needs=3),
    ),
    cases=(Matrix(given.ROWS, 32), Matrix(given.ROWS, 64)),
    more=lambda random: [Matrix(given.ROWS, 32 * random.randint(3, 5))],
    then=_conflicts,
    allowed=Allowed((given.__name__,)),
)
