"""Dynamic context parallelism: a document gets as many ranks as it needs.

A fixed degree c cuts each document into c parts, also those that one rank could do alone:
their keys travel for nothing. Here a short document stays on one rank, packed into a
micro-batch with others, and a long one goes to a group of ranks that share it by a ring.
Groups are made beforehand, and smaller ones lie in larger ones: ranks 0–7, 0–3 and 4–7, ….

Every rank takes its largest groups first. So the ranks of a group have done the same work
when they meet, and nobody waits before the end of the step. There a rank waits for the
slowest one; the difference is counted in scores of attention.

    n ranks   c ranks of a group   S a rank's tokens of a micro-batch   V vocabulary

Sources: ByteScale, arXiv 2502.21231; FlexSP, arXiv 2412.01523.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from manyranks.parallel.collectives.messages import Group, Members, members
from manyranks.parallel.context.exchange import blockwise_attention
from manyranks.parallel.context.layouts import positions
from manyranks.parallel.context.ring import ring_attention
from manyranks.parallel.wrappers import sum_gradients

IGNORED = -100  # a target that doesn't count: F.cross_entropy's ignore_index
WORTH = 0.01  # of the slowest rank's scores: what more ranks for a document must save


class Micro(NamedTuple):
    """A micro-batch: documents that a group of ranks works on at the same time.

    documents: which of the step's they are
    ranks: the group; each document is cut over all of it, zigzag
    """

    documents: tuple[int, ...]
    ranks: range


# The plan


def degrees(n: int) -> list[int]:
    """Returns sizes of groups that lie in each other: 1, 2, 4, … if n is a power of 2."""
    found = [1]
    while found[-1] < n:
        left = n // found[-1]
        found.append(found[-1] * next(f for f in range(2, left + 1) if left % f == 0))
    return found


def tokens(length: int, c: int) -> int:
    """Returns a rank's tokens of a document that c ranks share, with its padding."""
    return length if c == 1 else 2 * -(-length // (2 * c))


def scores(length: int, c: int) -> int:
    """Returns the scores of each of c ranks for a document; zigzag makes them equal."""
    own = tokens(length, c)
    return own * (c * own + 1) // 2


def loads(
    plan: Sequence[Micro], lengths: Sequence[int], n: int, token: int = 0
) -> list[int]:
    """Returns each rank's scores of one head in a step.

    lengths: tokens of each document
    n: ranks
    token: scores that take as long as a token's linear layers; 0 counts attention only

    A rank idles for the difference to the largest.
    """
    found = [0] * n
    for documents, ranks in plan:
        for rank in ranks:
            found[rank] += sum(_cost(lengths[i], len(ranks), token) for i in documents)
    return found


def planned(
    lengths: Sequence[int],
    n: int,
    most: int,
    sizes: Sequence[int] | None = None,
    token: int = 0,
) -> list[Micro]:
    """Plans a step that gives each document a group of the size it needs.

    lengths, n, token: as in loads
    most: tokens of a rank in one micro-batch
    sizes: of groups, each a divisor of the next and the last of n; degrees(n) if None.
        With a single one, the degree is fixed and only the balance is left

    A document starts with the smallest group that has room for it. The largest go first,
    each to the group that has least to do. Then the slowest rank's costliest document gets
    the next larger group, again and again, as long as that makes the slowest rank faster by
    WORTH.
    Raises ValueError for sizes that don't lie in each other and a document without room.
    """
    sizes = _checked(lengths, n, most, sizes)
    wanted = [next(c for c in sizes if tokens(each, c) <= most) for each in lengths]
    plan, least = _dealt(lengths, wanted, n, most, token), math.inf
    while max(each := loads(plan, lengths, n, token)) <= (1 - WORTH) * least:
        best, least = plan, max(each)
        busy = [documents for documents, ranks in plan if each.index(least) in ranks]
        narrow = [i for documents in busy for i in documents if wanted[i] < sizes[-1]]
        if not narrow:
            break
        costliest = max(narrow, key=lambda i: _cost(lengths[i], wanted[i], token))
        wanted[costliest] = sizes[sizes.index(wanted[costliest]) + 1]
        plan = _dealt(lengths, wanted, n, most, token)
    return best


def in_order(lengths: Sequence[int], n: int, most: int, c: int) -> list[Micro]:
    """Plans a step of a fixed degree, as a loader does that sees one document at a time.

    Documents fill micro-batches as they come, and these go to the n/c groups in turn.
    Raises ValueError as planned does.
    """
    _checked(lengths, n, most, [c])
    packs: list[list[int]] = [[]]
    for i, length in enumerate(lengths):
        if sum(tokens(lengths[j], c) for j in packs[-1]) + tokens(length, c) > most:
            packs.append([])
        packs[-1].append(i)
    blocks = _blocks(n, c)
    return [Micro(tuple(own), blocks[k % len(blocks)]) for k, own in enumerate(packs)]


def _dealt(
    lengths: Sequence[int], wanted: list[int], n: int, most: int, token: int
) -> list[Micro]:
    """Documents in groups of the sizes that are wanted, the largest groups first."""
    cost = [_cost(*each, token) for each in zip(lengths, wanted, strict=True)]
    each: list[int] = [0] * n
    given: dict[range, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-wanted[i], -cost[i])):
        # All ranks of a group have as much to do so far.
        ranks = min(_blocks(n, wanted[i]), key=lambda ranks: each[ranks.start])
        given.setdefault(ranks, []).append(i)
        for rank in ranks:
            each[rank] += cost[i]
    sizes = [tokens(*each) for each in zip(lengths, wanted, strict=True)]
    return [
        Micro(tuple(own), ranks)
        for ranks, documents in given.items()
        for own in _packed(documents, sizes, most)
    ]


def _packed(documents: list[int], sizes: list[int], most: int) -> list[list[int]]:
    """Each document goes to the first micro-batch that has room, the longest first."""
    packs: list[list[int]] = []
    for i in documents:
        fits = (own for own in packs if sum(sizes[j] for j in own) + sizes[i] <= most)
        if (own := next(fits, None)) is None:
            packs.append([i])
        else:
            own.append(i)
    return packs


def _blocks(n: int, c: int) -> list[range]:
    return [range(first, first + c) for first in range(0, n, c)]


def _cost(length: int, c: int, token: int) -> int:
    return scores(length, c) + token * tokens(length, c)


def _checked(
    lengths: Sequence[int], n: int, most: int, sizes: Sequence[int] | None
) -> list[int]:
    """The sizes of groups. Raises ValueError as planned does."""
    given = {f"lengths[{i}]": each for i, each in enumerate(lengths)}
    for name, value in {"n": n, "most": most, **given}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    if not given:
        raise ValueError("no documents: give the tokens of at least one")
    sizes = degrees(n) if sizes is None else list(sizes)
    chain = [*sizes, n]
    if not sizes or any(
        type(c) is not int or c < 1 or after % c for c, after in pairwise(chain)
    ):
        raise ValueError(
            f"sizes={sizes} of groups of n={n} ranks: each size must divide the next, and "
            f"the last n: give sizes such as {degrees(n)}"
        )
    least = tokens(max(lengths), sizes[-1])
    if least > most:
        raise ValueError(
            f"a document of {max(lengths)} tokens is {least} on each of {sizes[-1]} ranks, "
            f"and most={most}: give most={least}, larger groups, or cut the document"
        )
    return sizes


# The step


def make_groups(sizes: Sequence[int], group: Group = None) -> dict[int, Group]:
    """Makes this rank's group of each size; call it on every rank, once, before all steps.

    sizes: as in planned
    group: the n ranks, None for all

    Raises ValueError for sizes that don't lie in each other.
    """
    everyone = members(group)
    n = len(everyone.ranks)
    names = dist.get_process_group_ranks(group or dist.group.WORLD)
    found: dict[int, Group] = {}
    for c in _checked([1], n, n, sizes):
        own = next(ranks for ranks in _blocks(n, c) if everyone.place in ranks)
        ranks = [names[rank] for rank in own]
        found[c] = (
            group if c == n else dist.new_group(ranks, use_local_synchronization=True)
        )
    return found


def step(
    model: nn.Module,
    documents: Sequence[Tensor],
    plan: Sequence[Micro],
    groups: dict[int, Group],
    group: Group = None,
) -> Tensor:
    """Adds up the gradients of the mean loss of all tokens, and returns that loss.

    model: called as model(tokens_1S, positions_S, attend), where attend(q, k, v) is the
        attention of all its layers; gives logits_1SV
    documents: the step's, whole, on every rank: each of its length + 1 tokens
    plan: the same on every rank
    groups: of make_groups

    Raises ValueError, before any message, for a plan of other documents, ranks or groups.
    """
    everyone = members(group)
    _check(documents, plan, groups, len(everyone.ranks))
    count = sum(len(document) - 1 for document in documents)
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]  # of earlier steps: already the ranks' sum
    for parameter in parameters:  # a rank without documents takes part in the sum
        parameter.grad = torch.zeros_like(parameter)
    total = torch.zeros((), dtype=torch.float64, device=documents[0].device)
    for micro in plan:
        if everyone.place in micro.ranks:
            loss = _loss(model, documents, micro, groups, everyone) / count
            loss.backward()
            total += loss.detach()
    sum_gradients(parameters, group)
    for parameter, earlier in zip(parameters, before, strict=True):
        if earlier is not None:
            parameter.grad += earlier
    dist.all_reduce(total, group=group)
    return total


def _loss(
    model: nn.Module,
    documents: Sequence[Tensor],
    micro: Micro,
    groups: dict[int, Group],
    everyone: Members,
) -> Tensor:
    """The sum over the own tokens of a micro-batch."""
    c, place = len(micro.ranks), micro.ranks.index(everyone.place)
    parts = [own_part(documents[i], place, c) for i in micro.documents]
    tokens_S, targets_S, positions_S = map(torch.cat, zip(*parts, strict=True))
    one = blockwise_attention if c == 1 else partial(ring_attention, group=groups[c])
    attend = partial(_each, one, [len(own_S) for own_S, _, _ in parts])
    logits_SV = model(tokens_S[None], positions_S, attend)[0]
    precise = torch.promote_types(logits_SV.dtype, torch.float32)
    return F.cross_entropy(
        logits_SV.to(precise), targets_S, ignore_index=IGNORED, reduction="sum"
    )


def own_part(document: Tensor, place: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a rank's tokens of a document, their targets and where in it they stand."""
    length = len(document) - 1
    own_S = torch.arange(length, device=document.device)
    if c > 1:
        whole = positions("zigzag", c * tokens(length, c), c)
        own_S = whole[place].flatten().to(document.device)
    there_S = own_S < length
    inputs_S = document[own_S.clamp_max(length)].where(there_S, 0)
    return inputs_S, document[(own_S + 1).clamp_max(length)].where(there_S, IGNORED), own_S


def _each(one: Callable[..., Tensor], lengths: list[int], *qkv: Tensor) -> Tensor:
    """Attention inside each document of a micro-batch; a token sees no other one's."""
    cut = zip(*(x.split(lengths, 2) for x in qkv), strict=True)
    return torch.cat([one(*parts) for parts in cut], 2)


def _check(
    documents: Sequence[Tensor], plan: Sequence[Micro], groups: dict[int, Group], n: int
) -> None:
    """Raises ValueError for what step refuses."""
    if short := [i for i, document in enumerate(documents) if len(document) < 2]:
        raise ValueError(
            f"documents {short} have no target: give 2 tokens or more, the last a target"
        )
    planned = sorted(i for micro in plan for i in micro.documents)
    if planned != list(range(len(documents))):
        raise ValueError(
            f"a plan of the documents {planned} for {len(documents)}: give these "
            "documents' own plan, with each of them once"
        )
    for micro in plan:
        if micro.ranks not in _blocks(n, c := len(micro.ranks)) or c not in groups:
            raise ValueError(
                f"{micro.ranks} in a plan for {n} ranks with groups of {sorted(groups)}: "
                "plan for these ranks, with the sizes that make_groups had"
            )
