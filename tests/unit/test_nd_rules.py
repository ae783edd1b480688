"""The lectures' rules of thumb: what they choose, what the planner says of it, and where they lose."""

import pytest

from manyranks.theory import Plan, clusters
from manyranks.theory.nd import rules
from manyranks.theory.shapes import models

H100 = clusters["h100-dgx"]
LOSES = {
    "70B on 1,024, 1M tokens",
    "Mixtral on 1,024",
    "70B on 128, 4M tokens",
    "70B on 1,024, 4M tokens",
    "405B on 16,384, sequences of 131,072",
    "DeepSeek-V3 on 16,384",
}


@pytest.fixture(scope="module")
def compared() -> dict[str, rules.Comparison]:
    return {case.name: case.compare() for case in rules.CASES}


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(), "one GPU"),
        (Plan(dp=8), "DP"),
        (Plan(dp=8, zero=3), "FSDP"),
        (Plan(dp=512, dp_shard=128, zero=3), "HSDP"),
        (Plan(tp=8, pp=4, dp=16), "TP in the node + PP + DP"),
        (Plan(tp=16, dp=2), "TP across nodes + DP"),
        (Plan(tp=8, cp=2, zero=3), "TP in the node + CP + FSDP"),
        (Plan(tp=8, cp=2), "TP in the node + CP"),
        (Plan(dp=64, ep=8), "EP in the node + DP"),
        (Plan(dp=64, pp=16, ep=64), "EP across nodes + PP + DP"),
        (Plan(dp=32, tp=2, ep=8), "TP in the node + EP across nodes + DP"),
        (Plan(dp=32, tp=2, ep=8, etp=1), "TP in the node + EP in the node + DP"),
    ],
)
def test_a_regime_names_the_axes_from_the_inside_out(plan, name):
    assert rules.regime(plan, H100) == name


@pytest.mark.parametrize(
    ("model", "gpus", "seq", "batch", "regime"),
    [
        ("llama3.2-1b", 1, 4096, 8, "one GPU"),
        ("llama3.2-3b", 8, 4096, 64, "DP"),
        ("llama3-8b", 8, 4096, 64, "FSDP"),
        ("llama3-8b", 256, 4096, 256, "FSDP"),
        ("llama3-8b", 512, 4096, 512, "HSDP"),
        ("llama3-8b", 16, 65536, 16, "CP + FSDP"),
        ("llama3-405b", 1024, 4096, 1024, "TP in the node + PP + DP"),
        ("deepseek-v2", 512, 4096, 2048, "EP across nodes + PP + DP"),
    ],
)
def test_the_rules_choose_by_what_fits(model, gpus, seq, batch, regime):
    plan = rules.rule(models[model], H100, gpus, seq, batch).plan
    assert (rules.regime(plan, H100), plan.gpus) == (regime, gpus)


def test_the_rules_details():
    assert rules.rule(models["llama3-8b"], H100, 512, 4096, 512).plan.dp_shard == rules.GROUP
    long = rules.rule(models["llama3-8b"], H100, 16, 65536, 16).plan
    assert long.seq // long.cp == rules.LONG
    assert rules.rule(models["mixtral-8x7b"], H100, 128, 4096, 128).plan.tp == 1


def test_the_planner_reproduces_the_rules_but_where_they_lose(compared):
    assert {name for name, one in compared.items() if one.regime_loss > 0.05} == LOSES
    assert all(one.loss >= 0 for one in compared.values())


def test_tensor_parallelism_by_rule_loses_where_every_gpu_has_many_tokens(compared):
    many, few = compared["70B on 1,024, 4M tokens"], compared["70B on 1,024, 1M tokens"]
    assert (many.tokens, few.tokens) == (4096, 1024)
    assert many.best_regime == "FSDP"
    assert many.loss > 0.2
    assert next(iter(many.lost)) == "tensor"
    assert many.lost["tensor"] > 0.9 * (many.rule.seconds - many.best.seconds)
    assert few.best_regime == "TP in the node + PP + DP"  # so the rule's tensor parallelism stays
    assert few.loss < many.loss / 2


def test_a_pipeline_by_rule_loses_where_the_batch_has_few_sequences(compared):
    one = compared["405B on 16,384, sequences of 131,072"]
    assert next(iter(one.lost)) == "bubble"
    assert one.rule.plan.microbatches < one.rule.plan.pp


def test_the_smallest_pipeline_that_fits_leaves_no_room_for_dualpipe(compared):
    one = compared["DeepSeek-V3 on 2,048"]
    assert one.same
    assert (one.rule.plan.pp, one.rule.plan.schedule) == (8, "1f1b")
    assert (one.best.plan.pp, one.best.plan.schedule, one.best.plan.ep) == (16, "dualpipe", 64)  # theirs
    assert next(iter(one.lost)) == "expert"


def test_regimes_are_sorted_and_hold_their_fastest_plan(compared):
    for one in compared.values():
        seconds = [found.seconds for found in one.regimes.values()]
        assert seconds == sorted(seconds)
        assert one.regimes[one.best_regime] is one.best


def test_a_model_that_no_rule_can_place_is_refused():
    with pytest.raises(ValueError, match=r"llama3-405b on 8 .* no rule's plan fits"):
        rules.rule(models["llama3-405b"], H100, 8, 4096, 64)
