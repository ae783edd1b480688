"""A plan that cannot be says so, with a way out that is one."""

import re
from dataclasses import replace

import pytest

from manyranks.theory import Plan, clusters, memory, models, nd

H100 = clusters["h100-dgx"]


def refused(name: str, plan: Plan, cluster=H100) -> str:
    with pytest.raises(ValueError) as error:
        nd.check(models[name], plan, cluster)
    return str(error.value)


def test_a_plan_that_fits_is_not_refused():
    nd.check(models["llama3-70b"], Plan(dp=64, tp=8, pp=2, seq=8192, batch=1024), H100)


def test_degrees_are_refused_in_the_plans_words():
    assert "choose a divisor" in refused("llama3-70b", Plan(tp=3, seq=8190))
    assert "choose degrees whose product is 64" in refused("llama3-70b", Plan(dp=4, tp=8, seq=8192), H100.of(64))


def test_what_is_proposed_for_want_of_memory_fits_and_needs_what_is_said():
    plan = Plan(dp=128, tp=8, seq=8192, batch=1024, zero=1)
    text = refused("llama3-405b", plan)
    assert "of 80 GB" in text
    (stage, needs), *_ = re.findall(r"zero=(\d) it needs ([\d.]+) GB", text)
    total = memory.peak(models["llama3-405b"], replace(plan, zero=int(stage))).total
    assert total <= 80e9
    assert float(needs) == pytest.approx(total / 1e9, abs=0.05)


def test_two_fields_are_proposed_where_one_is_not_enough():
    text = refused("llama3-70b", Plan(dp=1024, seq=8192, batch=1024))
    assert re.search(r"with \w+=\S+ and \w+=\S+ it needs", text), text


def test_more_gpus_are_proposed_where_nothing_helps():
    assert "take more GPUs" in refused("llama3-405b", Plan(dp=8, seq=8192, batch=8))


def test_tensor_parallelism_across_nodes_is_refused_unless_it_is_meant():
    plan = Plan(dp=64, tp=16, seq=8192, batch=1024)
    assert "2 nodes of 8" in refused("llama3-70b", plan)
    nd.check(models["llama3-70b"], plan, H100, across_nodes=True)


def test_the_hosts_memory_counts():
    plan = Plan(dp=8, zero=1, offload="all", seq=2048, batch=8, recompute="full")
    assert "GB on the host, whose share for an accelerator is 256 GB: offload less" in refused("llama3-405b", plan, H100.of(8))
