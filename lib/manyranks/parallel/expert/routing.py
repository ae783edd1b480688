"""The router: a small matrix that says which experts a token goes to.

    T tokens   H hidden size   E experts   K choices of a token   G groups   M of a group

Source: Shazeer et al., arXiv 1701.06538, section 2; DeepSeek-V3, arXiv 2412.19437,
section 2.1.2 (sigmoid scores, biases, groups).
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.expert.balance import auxiliary_loss
from manyranks.parallel.expert.capacity import capacity, check_factor, drop

SCORES = ("softmax", "sigmoid")
_TINY = 1e-20


class Routing(NamedTuple):
    """experts_TK: each token's choices, int64, −1 for a copy that was dropped.

    gates_TK: what each expert's output is multiplied by; 0 for a dropped copy.
    """

    experts_TK: Tensor
    gates_TK: Tensor


class Router(nn.Module):
    """Scores every expert for every token; the token goes to the top_k best.

    scores: "softmax" over all experts, or "sigmoid" of each. normalise: a token's gates add
    up to 1, before scale multiplies them. groups, groups_per_token: see choose().
    capacity: a factor, see capacity.capacity(); None drops nothing. auxiliary: weight of
    the balancing loss, which is then .loss after each forward. bias_speed: of the
    balancing biases, which balance.move_biases() moves.
    .counts_E: choices made in training since they were last taken, before capacity.
    Raises ValueError for sizes that do not go together, and for one choice whose gate is
    normalised: it would be 1 for ever.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        scores: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_per_token: int = 1,
        capacity: float | None = None,
        auxiliary: float = 0.0,
        bias_speed: float = 0.0,
    ):
        super().__init__()
        if scores not in SCORES:
            raise ValueError(f"scores={scores!r}: choose one of {', '.join(SCORES)}")
        check_choices(experts, top_k, groups, groups_per_token)
        if top_k == 1 < experts and normalise:
            raise ValueError(
                "top_k=1 with normalise=True: the only gate is 1 whatever the router "
                "does, so that it never learns; say normalise=False"
            )
        check_factor(capacity)
        for name, value in (("auxiliary", auxiliary), ("bias_speed", bias_speed)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: give 0 or more")
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=1 / math.sqrt(hidden))
        self.register_buffer("bias_E", torch.zeros(experts))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), False)
        self.top_k, self.scores = top_k, scores
        self.normalise, self.scale = normalise, scale
        self.groups, self.groups_per_token = groups, groups_per_token
        self.capacity, self.auxiliary, self.bias_speed = capacity, auxiliary, bias_speed
        self.loss: Tensor | None = None
        # Whose tokens the auxiliary loss counts: so many ranks of this group.
        self.ranks, self.group = 1, None

    def __getstate__(self) -> dict:
        """Without the loss: PyTorch copies no tensor that a graph hangs on."""
        return self.__dict__ | {"loss": None}

    def forward(self, x_TH: Tensor) -> Routing:
        """The routing of these tokens; scores and gates in fp32 or better."""
        scores_TE, probabilities_TE = self._scored(x_TH)
        limits = (self.groups, self.groups_per_token)
        experts_TK = choose(scores_TE, self.top_k, self.bias_E, *limits)
        gates_TK = scores_TE.gather(1, experts_TK)
        if self.normalise:
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
        if self.training and not _in_backward():
            self.counts_E += counts_E
        if self.auxiliary:
            if self.ranks > 1:
                dist.all_reduce(counts_E, group=self.group)
            loss = auxiliary_loss(probabilities_TE, counts_E, self.top_k, self.ranks)
            self.loss = self.auxiliary * loss


def _in_backward() -> bool:
    """A checkpointed layer computes again what is counted already."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def choose(
    scores_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_per_token: int = 1,
) -> Tensor:
    """experts_TK: the top_k experts of the largest score + bias; of equal ones the first.

    The bias chooses and does no more: gates are made of the scores. With groups, experts
    are cut into so many equal ones, and a token stays inside the groups_per_token whose
    top_k/groups_per_token best experts have the largest sum.
    Raises ValueError for sizes that do not go together.
    """
    check_choices(scores_TE.shape[1], top_k, groups, groups_per_token)
    wanted_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if groups > 1:
        wanted_TGM = wanted_TE.unflatten(1, (groups, -1))
        share = min(-(-top_k // groups_per_token), wanted_TGM.shape[2])
        sums_TG = wanted_TGM.topk(share).values.sum(-1)
        others_TG = torch.ones_like(sums_TG, dtype=torch.bool)
        others_TG.scatter_(1, _largest(sums_TG, groups_per_token), False)
        wanted_TE = wanted_TGM.masked_fill(others_TG[:, :, None], -math.inf).flatten(1)
    return _largest(wanted_TE, top_k)


def _largest(x_TE: Tensor, count: int) -> Tensor:
    """Stable, so that equal scores are chosen alike on every rank and device."""
    return x_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


def check_choices(experts: int, top_k: int, groups: int, groups_per_token: int) -> None:
    """Raises ValueError where a token cannot make so many choices."""
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k}: a token goes to 1 to {experts} experts")
    if groups < 1 or experts % groups:
        raise ValueError(
            f"groups={groups} does not divide {experts} experts: give a divisor"
        )
    if not 1 <= groups_per_token <= groups:
        raise ValueError(f"groups_per_token={groups_per_token}: 1 to groups={groups}")
    if top_k > (room := experts // groups * groups_per_token):
        raise ValueError(
            f"top_k={top_k}: {groups_per_token} of {groups} groups have {room} experts; "
            "give more groups_per_token, or a smaller top_k"
        )
