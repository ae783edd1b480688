"""training.runnable: a plan that cannot be run says what was given and what would do, before anything starts."""

import re
from dataclasses import replace

import pytest

from manyranks.theory import Plan
from manyranks.theory.architecture import LatentAttention
from manyranks.training.config import GPTConfig
from manyranks.training.runnable import check_plan

GPT = GPTConfig(layers=4, hidden=32, heads=4, kv_heads=2, seq=32)
MOE = replace(GPT, experts=4, expert_ffn=32)
LATENT = replace(GPT, kv_heads=None, latent=LatentAttention(12, 8, 6, 4, 5))
USUAL = {"seq": 32, "precision": "fp32", "recompute": "none"}
# What is wrong, and then what is proposed: of the plan, or of the GPT.
REFUSED: dict[str, tuple[GPTConfig, dict, str, dict]] = {
    "seq": (GPT, {"seq": 64}, "seq=64 of the plan, and seq=32 of the GPT: give both the same", {"seq": 32}),
    "zigzag": (replace(GPT, seq=36), {"seq": 36, "cp": 4}, "seq=36 with cp=4.*8 chunks: give 32 or 40", {"seq": 40}),
    "dropout and cp": (replace(GPT, dropout=0.1), {"cp": 2}, "dropout=0.1 with cp=2.*: say dropout=0", {"dropout": 0.0}),
    "dualpipe": (
        GPT,
        {"pp": 2, "schedule": "dualpipe"},
        "schedule='dualpipe'.*say 'dualpipe-v'",
        {"schedule": "dualpipe-v"},
    ),
    "stages of one rank": (GPT, {"virtual": 2}, "2 stages with pp=1: one rank has one; say virtual=1", {"virtual": 1}),
    "a V of one rank": (GPT, {"schedule": "zb-v"}, "2 stages with pp=1.*schedule='1f1b'", {"schedule": "1f1b"}),
    "zero 2 and pp": (GPT, {"pp": 2, "zero": 2}, "zero=2 with pp=2.*; say zero=1", {"zero": 1}),
    "zero 3, pp, tied": (GPT, {"pp": 2, "zero": 3}, "zero=3 with pp=2.*say tied=False, or zero=1", {"tied": False}),
    "zero 3, pp, tied: or less": (GPT, {"pp": 2, "zero": 3}, "or zero=1", {"zero": 1}),
    "shards of nothing": (GPT, {"dp": 4, "dp_shard": 2, "zero": 0}, "dp_shard=2 with zero=0.*say zero=1, 2 or 3", {"zero": 1}),
    "HSDP and experts": (MOE, {"dp": 4, "dp_shard": 2, "ep": 2}, "dp_shard=2 with ep=2.*leave one", {"dp_shard": None}),
    "precision": (GPT, {"precision": "fp16"}, "precision='fp16': the trainer has fp32 and bf16", {"precision": "bf16"}),
    "offload": (GPT, {"offload": "optimizer"}, "offload='optimizer'.*say offload='none'", {"offload": "none"}),
    "flash": (GPT, {"flash": False}, "flash=False.*say flash=True", {"flash": True}),
    "ZeRO-3 that keeps": (
        GPT,
        {"zero": 3, "reshard_after_forward": False},
        "reshard_after_forward=False.*leave it out",
        {"reshard_after_forward": True},
    ),
    # What theory.Plan says
    "heads": (GPT, {"tp": 8}, "tp=8 does not divide the 4 heads.*: choose a divisor", {"tp": 4}),
    "key/value heads": (
        replace(GPT, hidden=48, heads=12, kv_heads=2, ffn=96, seq=48),
        {"seq": 48, "tp": 3},
        "tp=3 and 2 key/value heads.*: one must divide the other",
        {"tp": 2},
    ),
    "ffn": (replace(GPT, ffn=66), {"tp": 4}, "tp=4 does not divide ffn=66.*: choose a divisor", {"tp": 2}),
    "sequence parallelism": (
        replace(GPT, seq=6),
        {"seq": 6, "tp": 4},
        "seq=6 must be a multiple of cp·tp = 1·4 = 4.*: use 4 or 8, or set sequence_parallel=False",
        {"sequence_parallel": False},
    ),
    "layers": (GPT, {"pp": 8}, "4 layers.*on 8 stages: lower pp=8", {"pp": 4}),
    "virtual": (GPT, {"pp": 4, "virtual": 2}, "4 layers.*on 8 stages: lower pp=4 or virtual=2", {"virtual": 1}),
    "latent and tp": (LATENT, {"dp": 2, "tp": 2}, "tp=2 with latent attention.*say tp=1, and give its ranks to dp", {"tp": 1}),
    "latents' way": (
        LATENT,
        {"cp": 2, "context": "all-gather"},
        "latents travel in a ring; say context='ring'",
        {"context": "ring"},
    ),
    "no experts": (GPT, {"dp": 2, "ep": 2}, "ep=2: .* has no experts; say ep=1", {"ep": 1}),
    "experts": (MOE, {"dp": 8, "ep": 8}, "ep=8 does not divide the 4 routed experts.*: choose a divisor", {"ep": 4}),
    "ulysses": (GPT, {"cp": 8, "context": "ulysses"}, "cp=8 does not divide a rank's 4 heads.*use context='ring'", {"cp": 4}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_is_refused_and_what_is_proposed_can_be_run(name):
    gpt, fields, said, way_out = REFUSED[name]
    plan = Plan(**USUAL | fields)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        check_plan(gpt, plan)
    of_gpt = {field: value for field, value in way_out.items() if field in ("seq", "dropout", "tied")}
    of_plan = {field: value for field, value in way_out.items() if field not in ("dropout", "tied")}
    check_plan(replace(gpt, **of_gpt), replace(plan, **of_plan))


def test_the_ranks_have_to_be_as_many_as_the_plan_s():
    with pytest.raises(
        ValueError, match=re.escape("dp·cp·tp·pp = 2·1·2·1 = 4 ranks for 3 GPUs: choose degrees whose product is 3")
    ):
        check_plan(GPT, Plan(dp=2, tp=2, **USUAL), 3)
    check_plan(GPT, Plan(dp=2, tp=2, **USUAL), 4)


@pytest.mark.parametrize("fields", [{"dp": 2, "tp": 2, "etp": 2}, {"tp": 2, "etp": 1, "ep": 2}, {"dp": 4, "etp": 4}], ids=str)
def test_experts_may_have_axes_of_their_own(fields):
    check_plan(MOE, Plan(**USUAL | fields))


def test_a_plan_of_one_rank_may_name_what_only_several_need():
    check_plan(replace(GPT, dropout=0.1), Plan(schedule="dualpipe", zero=2, dp_shard=1, **USUAL))
