"""The plans that the trainer can run with the small GPT. Brings in no torch."""

from collections.abc import Iterator

from manyranks.theory.plan import Plan, multiples
from manyranks.training.config import GPTConfig

PRECISIONS = ("fp32", "bf16")


def check_plan(gpt: GPTConfig, plan: Plan, ranks: int | None = None) -> None:
    """Raises ValueError, with what to do about it, for a plan that cannot be run.

    ranks: how many there are, None for as many as the plan takes.
    """
    plan.check(gpt.shape(), ranks)
    for wrong in (*_model(gpt, plan), *_pipeline(gpt, plan), *_states(plan), *_not_there(plan)):
        raise ValueError(wrong)


def _model(gpt: GPTConfig, plan: Plan) -> Iterator[str]:
    if plan.seq != gpt.seq:
        yield f"seq={plan.seq} of the plan, and seq={gpt.seq} of the GPT: give both the same"
    if plan.cp > 1 and plan.seq % (2 * plan.cp):
        near, chunks = multiples(plan.seq, 2 * plan.cp), f"2·cp = {2 * plan.cp} chunks"
        yield f"seq={plan.seq} with cp={plan.cp}, whose zigzag has {chunks}: give {near}"
    if plan.cp > 1 and gpt.dropout:
        yield f"dropout={gpt.dropout} with cp={plan.cp}, whose attention has none: say dropout=0"
    if gpt.latent and plan.tp > 1:
        yield (
            f"tp={plan.tp} with latent attention, whose one rotary key all heads share: the small "
            "GPT's isn't cut; say tp=1, and give its ranks to dp, cp, pp or ep"
        )
    if gpt.latent and plan.cp > 1 and plan.context != "ring":
        yield (
            f"context={plan.context!r} with latent attention, whose latents travel in a ring; say "
            "context='ring'"
        )


def _pipeline(gpt: GPTConfig, plan: Plan) -> Iterator[str]:
    if plan.pp == 1 and plan.stages > 1:
        yield f"{plan.stages} stages with pp=1: one rank has one; say virtual=1, schedule='1f1b'"
    if plan.pp > 1 and plan.schedule == "dualpipe":
        yield "schedule='dualpipe' has each stage twice, and is not run here: say 'dualpipe-v'"
    if plan.pp > 1 and plan.zero == 2:
        yield (
            f"zero=2 with pp={plan.pp}: gradients would be reduced for each micro-batch, and take "
            "as many messages as stage 3's; say zero=1"
        )
    if plan.pp > 1 and plan.zero == 3 and gpt.tied:
        yield (
            f"zero=3 with pp={plan.pp}: the first and the last stage share the embedding, and have "
            "other shards of it; say tied=False, or zero=1"
        )


def _states(plan: Plan) -> Iterator[str]:
    if plan.dp_shard not in (None, plan.dp) and plan.zero == 0:
        yield f"dp_shard={plan.dp_shard} with zero=0, which shards nothing: say zero=1, 2 or 3"
    if plan.dp_shard not in (None, plan.dp) and plan.ep > 1:
        yield (
            f"dp_shard={plan.dp_shard} with ep={plan.ep}: experts are sharded over all ranks that "
            "have them; leave one of both out"
        )


def _not_there(plan: Plan) -> Iterator[str]:
    """Says what the plan has and the trainer has not."""
    if plan.precision not in PRECISIONS:
        yield f"precision={plan.precision!r}: the trainer has {' and '.join(PRECISIONS)}; say one"
    if plan.offload != "none":
        yield f"offload={plan.offload!r}: the trainer keeps all states there; say offload='none'"
    if plan.offload_layers:
        yield f"offload_layers={plan.offload_layers}: the trainer keeps them there; leave it out"
    if not plan.flash:
        yield "flash=False: the small GPT's attention never writes its scores; say flash=True"
    if plan.zero == 3 and not plan.reshard_after_forward:
        yield "reshard_after_forward=False: the trainer's ZeRO-3 frees each unit; leave it out"
