"""A small twin of a plan: the same axes, schedule and sharding on a few ranks, with a model that they can train.

A plan for thousands of accelerators takes the same formulas for memory and traffic, with other numbers. The twin is
small enough to be run, and there every number can be measured, rank by rank.
"""

from dataclasses import dataclass, replace
from math import prod

from manyranks.theory import checks
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan, why_no_ulysses

AXES = ("pp", "dp", "cp", "tp")  # where two are equally small, the first of them grows: only p > 2 has stages in the middle
_VOCAB = 256  # a token for each byte
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab")
_EXPERTS = ("experts", "top_k", "expert_ffn", "shared_experts", "dense_layers", "expert_groups", "groups_per_token")
_DEGREES = ("dp", "pp", "cp", "tp", "ep", "dp_shard", "virtual", "microbatch", "microbatches", "seq")


@dataclass(frozen=True)
class Twin:
    """A small copy of a layout.

    shape, plan: the twin's
    gpt: the shape as fields of training's GPTConfig, seq among them
    kept, shrunk, changed: by name, in words: what is as in the original, what is smaller, and what is something else because
        the small GPT or the trainer does not have it
    """

    shape: ModelShape
    plan: Plan
    gpt: dict[str, object]
    kept: dict[str, str]
    shrunk: dict[str, str]
    changed: dict[str, str]


def twin(shape: ModelShape, plan: Plan, ranks: int = 16) -> Twin:
    """The plan on at most so many ranks.

    Each axis in use begins with 2 ranks, dp with 4 where it is replicas × shards. While there are ranks, dp becomes 4 where
    several ranks have the same experts; then the smallest axis doubles, pp before dp, cp and tp, none beyond the original.
    Stages have 1 or 2 layers, and some one more where the original's are uneven; two stages per rank stand for more.
    Micro-batches keep their ratio to p, up to 2. Heads keep how many read one key/value head, and whether a rank has
    several of these, one, or a copy. Each rank has 4 experts, and they are whole on every tensor-parallel rank.
    Raises ValueError where an axis would be left with 1 rank, and where plan and shape do not fit.
    """
    checks.kinds(shape=shape, plan=plan)
    checks.whole(ranks=ranks)
    plan.check(shape)
    if plan.ep > 1 and plan.dp * plan.cp == 1:
        raise ValueError(
            f"ep={plan.ep} with dp=1 and cp=1: the twin's experts are dealt to dp·cp ranks; give the plan some of these"
        )
    small = _plan(shape, plan, _degrees(plan, ranks))
    scaled = _shape(shape, plan, small)
    small.check(scaled)
    names = ("layers", "hidden", "heads", "ffn", "vocab", "kv_heads", "tied", *(_EXPERTS if shape.experts else ()))
    gpt = {name: getattr(scaled, name) for name in names} | {"seq": small.seq, "style": scaled.name.removeprefix("small ")}
    return Twin(scaled, small, gpt, _kept(shape, plan, small), *_differences(shape, plan, scaled, small))


# Degrees


def _degrees(plan: Plan, ranks: int) -> dict[str, int]:
    given = {axis: getattr(plan, axis) for axis in AXES}
    found = {axis: min(2, degree) for axis, degree in given.items()}
    if _replicated(plan) and plan.dp_shard > 1 and plan.cp == 1:  # with cp > 1 those ranks are the shards
        found["dp"] = 4
    if (least := prod(found.values())) > ranks:
        used = ", ".join(f"{axis}={found[axis]}" for axis in AXES if found[axis] > 1)
        raise ValueError(f"ranks={ranks}: a twin with {used} needs {least}; give ranks={least}, or a plan with fewer axes")

    def grows(axis: str) -> bool:
        return 2 * found[axis] <= given[axis] and 2 * prod(found.values()) <= ranks

    if 1 < plan.ep < plan.dp * plan.cp and found["dp"] * found["cp"] < 4 and (axes := [a for a in ("dp", "cp") if grows(a)]):
        found[axes[0]] *= 2
    while growing := [axis for axis in AXES if grows(axis)]:
        found[min(growing, key=found.__getitem__)] *= 2
    return found


def _replicated(plan: Plan) -> bool:
    """Returns whether data parallelism is replicas × shards."""
    return plan.zero > 0 and plan.ep == 1 and plan.dp_shard is not None and plan.dp_shard < plan.dp


def _plan(shape: ModelShape, plan: Plan, degrees: dict[str, int]) -> Plan:
    data, pp = degrees["dp"] * degrees["cp"], degrees["pp"]
    some = plan.ep < plan.dp * plan.cp and data > 2
    microbatch = min(2, plan.microbatch)
    m = max(1, round(pp * min(2, plan.microbatches / plan.pp)))
    shards = (1 if plan.dp_shard == 1 or degrees["cp"] > 1 else degrees["dp"] // 2) if _replicated(plan) else None
    return replace(
        plan,
        **degrees,
        ep=1 if plan.ep == 1 else data // 2 if some else data,
        dp_shard=shards,
        seq=16 * max(2, degrees["cp"] * degrees["tp"]),
        batch=degrees["dp"] * microbatch * m,
        microbatch=microbatch,
        virtual=min(2, plan.virtual),
        schedule="dualpipe-v" if plan.schedule == "dualpipe" and pp > 1 else plan.schedule,
        sequence_parallel=plan.sequence_parallel or (shape.experts > 0 and plan.tp > 1),
        zero=1 if plan.zero == 2 and pp > 1 else plan.zero,
        reshard_after_forward=plan.reshard_after_forward or plan.zero == 3,
        precision="fp32",
        flash=True,
        offload="none",
        offload_layers=0,
        etp=1 if shape.experts and degrees["tp"] > 1 else None,
    )


# Sizes


def _shape(shape: ModelShape, plan: Plan, small: Plan) -> ModelShape:
    heads, kv_heads = _heads(shape, plan, small)
    hidden = heads * max(2, 32 // heads * 2)  # rotary positions turn pairs

    def scaled(size: int) -> int:
        return max(1, round(size / shape.hidden * hidden / small.tp)) * small.tp

    classic = shape.bias and not shape.gated
    options = {"gated": False, "norm": "layernorm", "bias": True, "positions": small.seq} if classic else {}
    layers = _layers(shape, plan, small)
    if shape.experts:
        options = _experts(shape, small, layers) | {"expert_ffn": scaled(shape.expert_ffn)}
    return ModelShape(
        f"small {'gpt2' if classic and not shape.experts else 'llama'}",
        layers,
        hidden,
        scaled(shape.ffn),
        heads,
        _VOCAB + 1 if shape.vocab % plan.tp else _VOCAB,
        kv_heads,
        tied=shape.tied and not _must_untie(shape, small),
        **options,
    )


def _heads(shape: ModelShape, plan: Plan, small: Plan) -> tuple[int, int]:
    each = shape.heads // shape.kv_heads
    kv_heads = small.tp * min(2, max(1, shape.kv_heads // plan.tp))
    if shape.kv_heads < plan.tp:
        kv_heads = max(1, small.tp // 2)
    heads = each * kv_heads
    while heads % small.tp or (small.context == "ulysses" and _unread(heads, kv_heads, small)):
        heads, kv_heads = 2 * heads, 2 * kv_heads
    return heads, kv_heads


def _unread(heads: int, kv_heads: int, plan: Plan) -> str:
    return why_no_ulysses(ModelShape("heads", 1, heads, 1, heads, 1, kv_heads), plan.tp, plan.cp)


def _layers(shape: ModelShape, plan: Plan, small: Plan) -> int:
    slots = 2 if plan.embedding_slots else 0
    each, larger = divmod(shape.layers + slots, plan.stages)
    few = small.stages <= 4 or slots
    found = small.stages * (2 if each > 1 and few else 1) - slots
    if larger:
        found += min(small.stages - 1, max(1, round(larger / plan.stages * small.stages)))
    return max(found, 2 if 0 < shape.dense_layers < shape.layers else 1)


def _experts(shape: ModelShape, small: Plan, layers: int) -> dict[str, int]:
    groups = min(4, 2 ** (shape.expert_groups.bit_length() - 1))
    chosen = groups if shape.groups_per_token == shape.expert_groups else min(2, shape.groups_per_token, groups)
    return {
        "experts": 4 * max(small.ep, groups // 2) if groups > 1 else 4 * small.ep,
        "top_k": min(2, shape.top_k),
        "shared_experts": min(2, shape.shared_experts),
        "dense_layers": min(1, shape.dense_layers) if layers > 1 else 0,
        "expert_groups": groups,
        "groups_per_token": chosen,
    }


def _must_untie(shape: ModelShape, small: Plan) -> bool:
    """Stages cannot add up the gradients of one parameter that each of them shards."""
    return shape.tied and small.pp > 1 and small.zero >= 2


# In words


def _kept(shape: ModelShape, plan: Plan, small: Plan) -> dict[str, str]:
    used = [axis for axis in ("dp", "cp", "tp", "pp", "ep") if getattr(plan, axis) > 1]
    kept = {"axes": ", ".join(used) or "none", "recompute": plan.recompute}
    if plan.zero == small.zero:
        kept["zero"] = str(plan.zero)
    if _replicated(plan):
        kept["data"] = "replicas × shards"
    if plan.pp > 1:
        kept |= {"schedule": plan.schedule} if plan.schedule == small.schedule else {}
        slots = 2 if plan.embedding_slots else 0
        even = (shape.layers + slots) % plan.stages == 0
        kept["stages"] = "even" if even else "some have a layer more"
        kept["stages"] += ", embedding and head count as layers" if plan.embedding_slots else ""
    if plan.cp > 1:
        kept["context"] = plan.context
    if plan.tp > 1 and plan.sequence_parallel == small.sequence_parallel:
        kept["sequence_parallel"] = str(plan.sequence_parallel)
    if shape.experts:
        kept["experts"] = "dense layers first, then experts" if shape.dense_layers else "in all layers"
        kept["experts"] += ", shared ones" if shape.shared_experts else ""
        kept["experts"] += ", of some groups for a token" if shape.groups_per_token < shape.expert_groups else ""
    kept["attention"] = f"{shape.heads // shape.kv_heads} query heads for a key/value head"
    return kept


def _differences(shape: ModelShape, plan: Plan, scaled: ModelShape, small: Plan) -> tuple[dict[str, str], dict[str, str]]:
    pairs = {"ranks": (plan.gpus, small.gpus)}
    pairs |= {name: (getattr(plan, name), getattr(small, name)) for name in _DEGREES}
    pairs |= {name: (getattr(shape, name), getattr(scaled, name)) for name in (*_SIZES, *_EXPERTS)}
    pairs = {name: pair for name, pair in pairs.items() if None not in pair}
    shrunk = {name: f"{a:,} → {b:,}" for name, (a, b) in pairs.items() if a > b}
    grown = {name: f"{a:,} → {b:,}: a twin needs no less" for name, (a, b) in pairs.items() if a < b}
    return shrunk, grown | {name: words for name, words in _changed(shape, plan, scaled, small).items() if words}


def _changed(shape: ModelShape, plan: Plan, scaled: ModelShape, small: Plan) -> dict[str, str]:
    pairs = {name: (getattr(plan, name), getattr(small, name)) for name in _REASONS}
    words = {name: f"{a} → {b}: {_REASONS[name]}" for name, (a, b) in pairs.items() if a != b}
    if plan.dp_shard not in (None, plan.dp) and small.dp_shard is None:
        words["dp_shard"] = "left out: with zero=0 nothing is sharded, and the trainer's experts have no replicas of shards"
    if shape.experts and plan.expert_tp != small.expert_tp:
        words["etp"] = f"{plan.expert_tp} → {small.expert_tp}: the trainer's experts are whole on every tensor-parallel rank"
    if _must_untie(shape, small):
        words["tied"] = "True → False: stages cannot add up the gradients of one parameter that each of them shards"
    if shape.latent:
        words["latent"] = "attention is an ordinary one: the small GPT has no latent attention"
    if lost := [name for name in _LOST if getattr(shape, name) != getattr(scaled, name)]:
        words["shape"] = f"not as in the original: {', '.join(lost)}"
    return words


_REASONS = {
    "precision": "so that numbers can be compared",
    "schedule": "two stages a rank in a V, instead of a copy of the stage at the other end",
    "sequence_parallel": "a rank's experts work on its part of the sequence",
    "zero": "with a pipeline, stage 2 would reduce the gradients of each micro-batch",
    "reshard_after_forward": "the trainer's ZeRO-3 frees each unit",
    "flash": "the small GPT never writes its scores",
    "offload": "the trainer keeps all states on the rank",
    "offload_layers": "the trainer keeps activations, too",
}
_LOST = ("norms_per_layer", "qkv_bias", "qk_norm", "embedding_norm", "dropout", "shared_gate", "router_bias")
_LOST += ("mtp_depth", "window", "parallel_layers", "norm", "bias", "gated")
