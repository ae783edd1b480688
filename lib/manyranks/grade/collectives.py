"""Checks of exercise 01_collectives: five collectives from messages between two ranks, each with 7 and with 250,007 elements.

Tensors are named x_E (E elements); chunk r is torch.tensor_split(x_E, N)[r], and a shard is one chunk. The rings run
downwards and the tree sends far first, unlike the chapter's.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.given.numbers import whole
from manyranks.grade.check import Task
from manyranks.grade.judges import NOTHING, Judge, Right, Verdict, apart, facts, messages, rank_by_rank, values
from manyranks.grade.learner import NO_RANK, Allowed, plain
from manyranks.grade.trial import Make, Seen, Sent, Trial
from manyranks.measure.fingerprints import same, size
from manyranks.measure.watch import Watch
from manyranks.world.strangers.trouble import SAME_CHUNK

_EXERCISE = "01_collectives"
_ALLOWED = Allowed(hint="write it with dist.send, recv, isend, irecv or batch_isend_irecv", only=("send", "recv"))
_LARGE, _SMALL = 250_007, 7  # elements: odd, and neither can be cut into 3 equal chunks
_TREE = "in the round of distance d, each place that is a multiple of 2d sends to place + d, where that exists"
_RING = "in this ring, rank r sends to rank r − 1 only, modulo N"
_PAIRS = "each chunk goes straight to the rank it is meant for, in one message"
_ITSELF = (
    "what a rank keeps needs no message: copy it",
    "dist.send and dist.recv take ranks, not places: place p is rank (p + root) % N. What a rank already has needs no message",
)
_WHOLE_TENSOR = "cut it with torch.tensor_split and send one chunk at a time"
_VIEWS = "return a new tensor, and work on a copy: chunks of torch.tensor_split are views of the input"
_CUTS = "cut with torch.tensor_split: torch.chunk and torch.split make other sizes where N does not divide E"


class Call(NamedTuple):
    """A call on every rank: so many elements of this dtype, and so few digits that sums are exact in any order."""

    elements: int
    dtype: str
    root: int = 0  # modulo N

    def of(self, rank: int, n: int, seed: int) -> Tensor:
        """Draws a rank's tensor: whole numbers, or, for the judge, fractions of both signs where the dtype has them.

        Two ranks' tensors, or two places in one, are never equal by chance alone.
        """
        x = whole(1000, (self.elements,), seed, n, self, rank, least=1).to(getattr(torch, self.dtype))
        return (2 * x - 1001) / 16 if seed and x.is_floating_point() else x

    def __str__(self) -> str:
        return f"with {self.elements:,} elements"


def _called(given: tuple, function: Callable, watch: Watch) -> dict:
    """Calls the learner's function with this rank's tensor, and what else it is given."""
    before, scaled, n = given[0].clone(), watch.scaled, dist.get_world_size()
    result = plain(function(*given))
    found: dict = {"elements divided": watch.scaled - scaled}
    found["the input has changed"] = not torch.equal(given[0], before)
    found["the input is also returned"] = isinstance(result, Tensor) and result.data_ptr() == given[0].data_ptr()
    found["the result"] = "a tensor" if isinstance(result, Tensor) else result
    if not isinstance(result, Tensor):
        return found
    chunks = result.tensor_split(n) if result.dim() == 1 else [result]
    return found | {f"the result, chunk {i} of {len(chunks)}": part for i, part in enumerate(chunks)}


def _right_values(dtype_of: str) -> Judge:
    """Judges chunk by chunk; where no known mistake explains them, wrong chunks may. dtype_of: the argument with it."""
    parts = values(0.5, "returns the right values", "the result")

    def verdict(trial: Trial, right: Right) -> Verdict:
        found = parts.verdict(trial, right)
        if found.ok or found.firm:
            return found
        if "rounded" in found.hint:
            return found._replace(hint=f"right shape, wrong dtype: take dtype={dtype_of}.dtype")
        return found._replace(hint=_missing(trial, right))

    return parts._replace(verdict=verdict)


def _missing(trial: Trial, right: Right) -> str:
    """Says which chunks of the result are wrong, where they alone tell the mistake."""
    if any(seen.results["the result"] != "a tensor" for seen in trial.seen):
        return "return the result: a tensor"
    wrong = []
    for seen, should in zip(trial.seen, right, strict=True):
        names = [name for name in should.results if "chunk" in name]
        wrong.append({i for i, name in enumerate(names) if not same(seen.results.get(name), should.results[name])})
    n = trial.n
    if wrong == [{r} for r in range(n)]:
        return "the rank's own chunk is missing: it belongs at place r of the result, copy it there"
    if n > 2 and wrong == [{(r - 1) % n} for r in range(n)]:
        return "the last chunk is missing: a ring of N ranks has N − 1 steps"
    if wrong == [set(range(n)) - {r} for r in range(n)]:
        return "only the rank's own chunk is right: in each step, pass on the chunk that came last"
    return ""


class Chunks(NamedTuple):
    """Holds the hints about wrong chunks.

    first: for the first chunk that a rank sends
    later: for those after it
    room: for the tensor that receives one
    sent: for a rank that sends the right number of messages
    """

    first: str = ""
    later: str = ""
    room: str = ""
    sent: str = "the right number of messages, but other chunks in them"


def _other_chunk(trial: Trial, right: Right, chunks: Chunks) -> str:
    """Returns the earliest message of a run that broke off whose chunk, or the room for it, has the wrong size."""
    found, sizes = [], {_elements(call) for should in right for call in should.calls}
    for rank, should in enumerate(right):
        met = Counter()
        for entry in trial.notes.get(rank, []):
            who = entry.op, entry.peer
            k = met[who]
            met[who] += 1
            must = [_elements(call) for call in should.calls if (call.op, call.peer) == who][k : k + 1]
            if must and entry.elements != must[0]:
                room = entry.op == "recv"
                hint = chunks.room if room else chunks.later if k else chunks.first
                hint = hint if entry.elements in sizes else _WHOLE_TENSOR if entry.elements == trial.case.elements else _CUTS
                whom, does = ("from", "makes room for") if room else ("to", "sends")
                there = f"in message {k + 1} {whom} rank {entry.peer}, rank {rank} {does} {entry.elements:,} elements"
                found.append((k, room, rank, f"{there}; right is {must[0]:,}: {hint}"))
    return min(found)[-1] if found else ""


def _elements(call: Sent) -> int:
    return call.bytes // getattr(torch, call.dtype).itemsize


def _bytes(whole_tensor: bool, chunks: Chunks) -> Judge:
    """Judges that each rank sends as many bytes as it must. whole_tensor: whether a message has the whole tensor."""

    def sent(seen: Seen) -> list[int]:
        return [call.bytes for call in seen.calls if call.op == "send"]

    def wrong(trial: Trial, rank: int, seen: Seen, should: Seen) -> Verdict | None:
        got, must = sent(seen), sent(should)
        if sum(got) == sum(must):
            return None
        there, here = apart(*(size(sum(each)) for each in (got, must)), sum(got), sum(must))
        found = f"rank {rank} sent {there}; right is {here}"
        if not any(sent(one) for one in trial.seen):
            return Verdict(False, found, NOTHING)
        if not whole_tensor and set(got) == {trial.case.elements * getattr(torch, trial.case.dtype).itemsize}:
            return Verdict(False, found, f"every message is the whole tensor: {_WHOLE_TENSOR}")
        return Verdict(False, found, chunks.sent if len(got) == len(must) else "")

    def early(trial: Trial, right: Right) -> str:
        return _other_chunk(trial, right, chunks)

    what = "sends no more and no less than it must"
    return rank_by_rank(0.25, what, wrong, lambda seen: {"sent": sent(seen)}, last=True, early=early)


def _task(
    call: str, points: float, make: Make, cases: tuple[Call, ...], hint: str, chunks: Chunks, *also: Judge, **more
) -> Task:
    """Makes one of the five tasks.

    hint: for messages to the wrong ranks that no known mistake explains
    chunks: for messages with the wrong chunk
    also: what else it's judged by
    """
    judges = (
        _right_values("shard" if "shard" in call else "x_E"),
        _bytes("root" in call, chunks),
        messages(0.15, "sends its messages to the right ranks", in_order="pairwise" not in call, hint=hint),
        facts(0.1, "leaves its input as it was", "input (has changed|is)", _VIEWS, each_world=True),
        *also,
    )
    advice = (
        ("(to|from) itself", _ITSELF["root" in call]),
        NO_RANK,
        ("The size of tensor a|the broadcast shape", more.pop("unlike", f"{SAME_CHUNK} {_CUTS}")),
    )
    more |= {
        "advice": advice,
        "more": lambda random: [Call(random.randint(8, 999), random.choice(cases).dtype, random.randint(0, 9))],
    }
    return Task(_EXERCISE, call, points, _called, judges, cases, make=make, allowed=_ALLOWED, **more)


def _divisions(trial: Trial, right: Right) -> Verdict:
    """The answer to the task's question: where is the cheapest place to divide by N?"""
    divided = max(seen.results["elements divided"] for seen in trial.seen)
    shard, elements = -(-trial.case.elements // trial.n), trial.case.elements
    if divided <= shard:
        return Verdict(True, f"{trial}, each rank divided its shard only, at the cheapest place")
    found = f"{trial}, a rank divided {divided:,} of them, where {shard:,} are enough"
    more = "N times as many divisions as" if divided == elements else "more divisions than"
    return Verdict(True, found, f"{more} needed: divide the shard, between the two rings")


_WHOLE = (Call(_SMALL, "int64"), Call(_LARGE, "float32"))


def _own(case: Call, rank: int, n: int, seed: int) -> tuple:
    return (case.of(rank, n, seed),)


_OF_THE_WHOLE = "ring_all_gather takes chunk r, and the number of elements of the whole tensor: is that what you give it?"
_BOTH_RINGS = "do your ring_reduce_scatter and ring_all_gather pass their own checks?"
_ROOTS = Call(_SMALL, "int64", root=-1), Call(_LARGE, "float32"), Call(_SMALL, "int64", root=1)
tree_broadcast = _task(
    "tree_broadcast(x_E, root)",
    3,
    lambda case, rank, n, seed: (case.of(rank, n, seed), case.root % n),
    _ROOTS,
    _TREE,
    Chunks(),
    worlds=(2, 3, 4, 5),
    unexplained="in each round, whoever has the root's tensor sends it, and nobody sends it before it has come",
)
ring_all_gather = _task(
    "ring_all_gather(shard, elements)",
    4,
    lambda case, rank, n, seed: (case.of(0, n, seed).tensor_split(n)[rank].clone(), case.elements),
    _WHOLE,
    _RING,
    Chunks(
        "in the first step a rank has only its own shard to send",
        "after the first step, a rank passes on what it has just received",
        "make room for the chunk that rank r + 1 sends in this step",
        "the right number of messages, but other chunks in them: which one does a rank never send?",
    ),
    unexplained="in each step, print which chunk a rank sends and which one it expects: rank r − 1 has to send that one",
)
ring_reduce_scatter = _task(
    "ring_reduce_scatter(x_E)",
    5,
    _own,
    _WHOLE,
    _RING,
    Chunks(
        "chunk r ends at rank r, so it starts at rank r − 1",
        "after the first step, a rank sends the chunk it has just added to",
        "make room for the chunk that rank r + 1 sends in this step",
        "the right number of messages, but other chunks in them: a rank sends every chunk but its own",
    ),
    unexplained="chunk r starts at rank r − 1, and each rank adds its own term to what comes before it sends the chunk on",
)
ring_all_reduce = _task(
    "ring_all_reduce(x_E)",
    4,
    _own,
    (Call(_SMALL, "float64"), Call(_LARGE, "float32")),
    f"{_RING}: {_BOTH_RINGS}",
    Chunks(_BOTH_RINGS, _BOTH_RINGS, _OF_THE_WHOLE, _BOTH_RINGS),
    Judge(0, "divides by N", _divisions, needs=4, last=True),
    unlike=_OF_THE_WHOLE,
    unexplained=f"it takes a reduce-scatter, a division by N, and an all-gather: {_BOTH_RINGS}",
)
pairwise_all_to_all = _task(
    "pairwise_all_to_all(x_E)",
    4,
    _own,
    _WHOLE,
    _PAIRS,
    Chunks(
        first="the rank that you send to wants its own chunk of your tensor",
        room="every chunk that a rank receives is as long as its own chunk, chunk r: make the room like that one",
    ),
    unexplained="what comes from rank s belongs at place s of the result",
)
