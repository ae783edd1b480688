"""The router: which experts a token goes to, how many copies an expert takes, and balance.

    T tokens   H hidden size   E experts   K choices of a token   L layers with experts

Source: Shazeer et al., arXiv 1701.06538, section 2; DeepSeek-V3, arXiv 2412.19437,
section 2.1.2 (sigmoid scores, biases, groups).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.expert.checks import (
    check_choices,
    check_devices,
    check_factor,
    check_router,
)
from manyranks.parallel.expert.dispatch import Routing, choose
from manyranks.parallel.wrappers import in_backward

_TINY = 1e-20


class Router(nn.Module):
    """Scores every expert for every token; the token goes to the top_k best.

    scores: "softmax" over all experts, or "sigmoid" of each
    normalize: a token's gates add up to 1, before scale multiplies them
    groups, groups_per_token: see choose()
    capacity: a factor, see capacity(); None drops nothing
    auxiliary: weight of the balancing loss, which is then .loss after each forward
    bias_speed: of the balancing biases, which move_biases() moves

    .counts_E: choices made in training since they were last taken, before capacity
    .ranks, .group: whose tokens the auxiliary loss counts, so many ranks of this group
    Raises ValueError for sizes that don't go together, and for one choice whose gate is
    normalized: it would be 1 forever.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_per_token: int = 1,
        capacity: float | None = None,
        auxiliary: float = 0.0,
        bias_speed: float = 0.0,
    ):
        super().__init__()
        check_choices(experts, top_k, groups, groups_per_token)
        weights = {"auxiliary": auxiliary, "bias_speed": bias_speed}
        check_router(scores, top_k, experts, normalize, **weights)
        check_factor(capacity)
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=1 / math.sqrt(hidden))
        self.register_buffer("bias_E", torch.zeros(experts))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), False)
        self.top_k, self.scores = top_k, scores
        self.normalize, self.scale = normalize, scale
        self.groups, self.groups_per_token = groups, groups_per_token
        self.capacity, self.auxiliary, self.bias_speed = capacity, auxiliary, bias_speed
        self.loss: Tensor | None = None
        self.ranks: int = 1
        self.group: Group = None

    def __getstate__(self) -> dict:
        """Leaves out the loss: PyTorch copies no tensor that a graph hangs on."""
        return self.__dict__ | {"loss": None}

    def forward(self, x_TH: Tensor) -> Routing:
        """Routes these tokens; scores and gates are in fp32 or better."""
        scores_TE, probabilities_TE = self._scored(x_TH)
        limits = (self.groups, self.groups_per_token)
        experts_TK = choose(scores_TE, self.top_k, self.bias_E, *limits)
        gates_TK = scores_TE.gather(1, experts_TK)
        if self.normalize:
            # All chosen by their bias may have scores of 0.
            gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + _TINY)
        self._count(experts_TK, probabilities_TE)
        if self.capacity is not None:
            sizes = len(x_TH), self.top_k, len(self.weight)
            experts_TK = drop(experts_TK, capacity(*sizes, self.capacity), len(self.weight))
        return Routing(experts_TK, gates_TK.masked_fill(experts_TK < 0, 0) * self.scale)

    def _scored(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and what of them adds up to 1 over the experts."""
        precise = torch.promote_types(x_TH.dtype, torch.float32)
        with torch.autocast(x_TH.device.type, enabled=False):
            logits_TE = x_TH.to(precise) @ self.weight.to(precise).mT
        if self.scores == "softmax":
            scores_TE = logits_TE.softmax(-1)
            return scores_TE, scores_TE
        scores_TE = logits_TE.sigmoid()
        return scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True)

    def _count(self, experts_TK: Tensor, probabilities_TE: Tensor) -> None:
        counts_E = experts_TK.flatten().bincount(minlength=len(self.weight))
        if self.training and not in_backward():  # where a checkpoint computes again
            self.counts_E += counts_E
        if self.auxiliary:
            if self.ranks > 1:
                dist.all_reduce(counts_E, group=self.group)
            loss = auxiliary_loss(probabilities_TE, counts_E, self.top_k, self.ranks)
            self.loss = self.auxiliary * loss


# Capacity: the most copies that an expert takes of one rank's tokens


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Copies that one expert takes of so many tokens: factor times the mean, rounded up.

    Copies beyond it are dropped: the token passes that expert by, on the residual
    connection. Raises ValueError for a factor that isn't above 0.
    Source: GShard, arXiv 2006.16668, section 2.2 and algorithm 1.
    """
    check_factor(factor)
    return math.ceil(factor * tokens * top_k / experts)


def drop(experts_TK: Tensor, capacity: int, experts: int) -> Tensor:
    """Puts −1 in the place of choices that come when their expert is full.

    First come, first served: all tokens' first choices, then their second ones, and so on,
    each in the order of the tokens.
    """
    in_turn_R = experts_TK.mT.flatten()
    asked_RE = torch.nn.functional.one_hot(in_turn_R, experts)
    place_R = asked_RE.cumsum(0).gather(1, in_turn_R[:, None])[:, 0]  # 1 for the first
    kept_R = in_turn_R.masked_fill(place_R > capacity, -1)
    return kept_R.view(experts_TK.mT.shape).mT.contiguous()


# Balance: a loss, or biases that need none


def auxiliary_loss(
    probabilities_TE: Tensor, counts_E: Tensor, top_k: int, ranks: int = 1
) -> Tensor:
    """E·Σ f·P over the experts: 1 if all are as likely, more if tokens want the same.

    f: the share of the choices that an expert got, which has no gradient. P: the mean
    probability that the router gave it, which has. A rank knows P of its own tokens
    only, so this is its share, times `ranks`: the mean over the ranks is the loss of one
    process with all tokens.

    probabilities_TE: of the own tokens
    counts_E: choices of ALL ranks' tokens

    Source: Switch Transformers, arXiv 2101.03961, equations 4 to 6.
    """
    counts_E = counts_E.to(probabilities_TE.dtype)
    choices = counts_E.sum().clamp(min=1)
    P_E = probabilities_TE.sum(0) * (ranks * top_k / choices)
    return len(counts_E) * (counts_E / choices * P_E).sum()


def device_loss(
    probabilities_TE: Tensor, counts_E: Tensor, top_k: int, devices: int, ranks: int = 1
) -> Tensor:
    """Returns auxiliary_loss() of devices, which have E/devices neighboring experts each.

    Experts of one device may differ: only what each device computes has to be equal.
    Raises ValueError where the devices don't divide the experts.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.2.3, L_DevBal.
    """
    check_devices(probabilities_TE.shape[1], devices)
    probabilities_TD = probabilities_TE.unflatten(1, (devices, -1)).sum(-1)
    counts_D = counts_E.unflatten(0, (devices, -1)).sum(-1)
    return auxiliary_loss(probabilities_TD, counts_D, top_k, ranks)


def communication_loss(
    probabilities_TE: Tensor, visits_D: Tensor, most: int, ranks: int = 1
) -> Tensor:
    """D·Σ f·P over the devices: 1 where as many tokens are sent to each.

    f: the tokens that are sent to a device ÷ most · all tokens. A token counts once for a
    device, however many of its experts are there. P: the mean probability of the device's
    experts. The mean over ranks with as many tokens each is the loss of one process.

    visits_D: of ALL ranks' tokens, each device's; two_hops.visits() lists them
    most: devices that a token may reach

    Raises ValueError where the devices don't divide the experts.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.2.3, L_CommBal.
    """
    devices, tokens = len(visits_D), ranks * len(probabilities_TE)
    check_devices(probabilities_TE.shape[1], devices)
    P_D = probabilities_TE.unflatten(1, (devices, -1)).sum(-1).mean(0)
    f_D = visits_D.to(P_D.dtype) / (most * tokens)
    return devices * (f_D * P_D).sum()


def new_bias(bias_E: Tensor, counts_E: Tensor, speed: float) -> Tensor:
    """Moves biases: up by `speed` for an expert that got less than the mean, else down.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664.
    """
    missing_E = counts_E.double().mean() - counts_E
    return bias_E + speed * missing_E.sign().to(bias_E.dtype)


def take_counts(routers: Sequence[nn.Module]) -> Tensor:
    """Takes counts_LE, what each router has counted since the last time, and zeroes it."""
    counts_LE = torch.stack([router.counts_E for router in routers])
    for router in routers:
        router.counts_E.zero_()
    return counts_LE


def move_biases(routers: Sequence[nn.Module], counts_LE: Tensor) -> None:
    """Moves biases once a step, by the counts of all ranks: they stay equal on them."""
    for router, counts_E in zip(routers, counts_LE, strict=True):
        if router.bias_speed:
            router.bias_E.copy_(new_bias(router.bias_E, counts_E, router.bias_speed))
