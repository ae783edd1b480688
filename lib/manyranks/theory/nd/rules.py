"""The lectures' rules of thumb as a function, next to what the planner finds for the same model on the same cluster.

A rule fixes the degrees. The rest (the micro-batch, recomputation, stages per rank) is chosen as well for the rule as
for the planner, so that two plans differ by their regimes and not by care.
Sources: lecture A, "Train LLM from scratch 7: parallelism", page 56 (what fits where, and the order), 57 and 58 (Llama
3, DeepSeek-V3); lecture B, CS231n's on large-scale training, sections 3 and 6 (HSDP from 256 GPUs on, in groups of
about 100; context parallelism from 16K tokens on).
"""

from collections.abc import Iterator
from typing import NamedTuple

from manyranks.theory import checks, memory, planner, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, clusters
from manyranks.theory.plan import Plan
from manyranks.theory.planner import Found
from manyranks.theory.shapes import models

MANY = 256  # GPUs beyond which FSDP becomes HSDP; lecture B, section 6
GROUP = 128  # ranks that share one copy then; lecture B, section 3: about 100
LONG = 16384  # tokens of a sequence beyond which context parallelism comes in; lecture B, section 6
MANY_EXPERTS = 64  # ranks that share the experts at most; lecture A, page 58
POWERS = (1, 2, 4, 8, 16, 32, 64)
# The choices that a rule leaves open, with the schedules that the stack ships.
DETAILS = {"microbatch": (1, 2, 4), "recompute": ("none", "selective", "full"), "virtual": (1, 2, 4, 8)}


def rule(shape: ModelShape, cluster: Cluster, gpus: int, seq: int, batch: int, **choices: object) -> Found:
    """Finds the plan that the rules choose: the first of their candidates that fits, its details as fast as can be.

    choices: fields of Plan that hold whatever the rules say, as precision. Raises ValueError where no candidate fits.
    """
    checks.kinds(shape=shape, cluster=cluster)
    checks.whole(gpus=gpus, seq=seq, batch=batch)
    for degrees in candidates(shape, cluster, gpus, seq):
        tried = DETAILS | degrees | choices
        if found := planner.search(shape, cluster, gpus=gpus, seq=seq, batch=batch, **tried):
            return found[0]
    raise ValueError(f"{shape.name} on {gpus} {cluster.accelerator.name}: no rule's plan fits; take more GPUs, or offload")


def candidates(shape: ModelShape, cluster: Cluster, gpus: int, seq: int) -> Iterator[dict[str, object]]:
    """Degrees in the rules' order, as choices for planner.search."""
    node = min(gpus, cluster.node)
    cp = next(c for c in POWERS if seq // c <= LONG or c == POWERS[-1])
    ep = max(e for e in POWERS if e <= min(gpus, MANY_EXPERTS) and (shape.experts or 1) % e == 0)
    data = {"cp": cp, "ep": ep, "tp": 1, "pp": 1}
    if fits(shape, cluster, 1, seq // cp):  # page 56: a model that one GPU can train is copied
        yield data | {"zero": 1}
    if fits(shape, cluster, node, seq // cp):  # page 56: one that a node can train is sharded
        shards = max(size for size in range(1, GROUP + 1) if (gpus // cp) % size == 0)
        yield data | {"zero": 3, "dp_shard": shards if gpus > MANY else None}
    # Page 56: tensor parallelism takes the node, the pipeline as many of these as it must, data parallelism the rest. Page 58:
    # with experts, expert parallelism instead of tensor parallelism.
    tp = 1 if shape.experts else node
    for recompute in (DETAILS["recompute"][:2], "full"):
        yield from (data | {"tp": tp, "pp": pp, "zero": 1, "recompute": recompute} for pp in POWERS)


def fits(shape: ModelShape, cluster: Cluster, gpus: int, seq: int) -> bool:
    """Returns whether so many GPUs hold the model with all its states sharded over them, on one sequence, fully recomputed."""
    plan = Plan(dp=gpus, seq=seq, zero=3, recompute="full")
    return memory.peak(shape, plan).total <= cluster.accelerator.memory


def regime(plan: Plan, cluster: Cluster) -> str:
    """The axes that a plan uses, from the inside out, as "TP in the node + PP + DP"; "DP" has ZeRO-0, 1 or 2."""
    node = cluster.node
    degrees = {f"TP {_where(plan.tp, node)}": plan.tp, "CP": plan.cp}
    degrees |= {f"EP {_where(plan.expert_tp * plan.ep, node)}": plan.ep, "PP": plan.pp}
    named = [name for name, degree in degrees.items() if degree > 1]
    if plan.dp * plan.cp > 1 and plan.zero == 3:
        named.append("HSDP" if plan.shards < plan.dp * plan.cp else "FSDP")
    elif plan.dp > 1:
        named.append("DP")
    return " + ".join(named) or "one GPU"


def _where(ranks: int, node: int) -> str:
    return "in the node" if node % ranks == 0 else "across nodes"


class Comparison(NamedTuple):
    """The rule's plan and the planner's.

    regimes: the fastest plan of each, the fastest regime first
    """

    name: str
    tokens: float  # per GPU
    rule: Found
    best: Found
    rule_regime: str
    regimes: dict[str, Found]

    @property
    def best_regime(self) -> str:
        return next(iter(self.regimes))

    @property
    def same(self) -> bool:
        """Returns whether the planner's best plan lies in the rule's regime."""
        return self.rule_regime == self.best_regime

    @property
    def loss(self) -> float:
        """Time of the rule's plan ÷ time of the best plan, − 1."""
        return self.rule.seconds / self.best.seconds - 1

    @property
    def regime_loss(self) -> float:
        """The loss of the best plan of the rule's regime: what the regime costs, and not the rule's degrees."""
        return min(self.rule.seconds, self.regimes.get(self.rule_regime, self.rule).seconds) / self.best.seconds - 1

    @property
    def lost(self) -> dict[str, float]:
        """Seconds by part that the rule's plan takes longer than the best, the largest first."""
        parts = {name: seconds - self.best.time.parts[name] for name, seconds in self.rule.time.parts.items()}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))


def compare(name: str, shape: ModelShape, cluster: Cluster, gpus: int, seq: int, batch: int, **choices: object) -> Comparison:
    """The rule and the planner on the same work. The planner tries degrees that are powers of two, ZeRO-1 and ZeRO-3, and
    context parallelism only for what the lectures call long sequences; choices: fields of Plan, for both of them.

    Raises ValueError where the rule has no plan that fits.
    """
    chosen = rule(shape, cluster, gpus, seq, batch, **choices)
    found = planner.search(shape, cluster, gpus=gpus, seq=seq, batch=batch, **_free(shape, cluster, seq) | choices)
    best = found[0]
    regimes: dict[str, Found] = {}
    for one in found:
        regimes.setdefault(regime(one.plan, cluster), one)
    chosen = best if chosen.plan == best.plan else Found(chosen.plan, chosen.time, chosen.peak, best.time)
    return Comparison(name, batch * seq / gpus, chosen, best, regime(chosen.plan, cluster), regimes)


def _free(shape: ModelShape, cluster: Cluster, seq: int) -> dict[str, object]:
    powers = tuple(t for t in POWERS if t <= 2 * cluster.node)
    degrees = {"tp": powers, "cp": POWERS[:5] if seq > LONG else 1, "pp": POWERS[:5], "ep": 1}
    if shape.experts:
        degrees |= {"tp": (1, cluster.node), "ep": POWERS}
    return DETAILS | {"zero": (1, 3)} | degrees


class Case(NamedTuple):
    """A row of the chapter's table."""

    name: str
    model: str
    cluster: str
    gpus: int
    seq: int
    batch: int
    choices: dict[str, object]

    def compare(self) -> Comparison:
        shape = SMALL_MOE if self.model == SMALL_MOE.name else models[self.model]
        return compare(self.name, shape, clusters[self.cluster], self.gpus, self.seq, self.batch, **self.choices)


SMALL_MOE = ModelShape("gpt2-moe", 12, 768, 3072, 12, 50257, experts=8, top_k=2, expert_ffn=3072, source="ours, for a laptop")


def _case(row: dict[str, str]) -> Case:
    """Reads a case. choices: fields of Plan. 405B has 126 layers and two more places: arXiv 2407.21783, section 3.3.2."""
    choices = {name: tables.value(text) for name, text in tables.pairs(row["choices"]).items()}
    return Case(row["name"], row["model"], row["cluster"], *(int(row[name]) for name in ("gpus", "seq", "batch")), choices)


CASES = tuple(map(_case, tables.rows("regimes")))
