"""theory.step: what single fields of a plan and of a shape do to a step, and arguments of the wrong kind."""

from dataclasses import replace

import pytest

from manyranks.theory import Plan, clusters, models
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.step import estimate


def test_offload_costs_the_time_of_the_host_s_link():
    shape, cluster = models["llama3-8b"], clusters["h100-dgx"]
    kept, states, everything = (
        estimate(shape, Plan(dp=8, seq=8192, zero=3, offload=name), cluster) for name in ("none", "optimizer", "all")
    )
    assert kept.seconds < states.seconds < everything.seconds
    elements = shape.parameters / 8
    assert states.optimizer == pytest.approx(4 * elements / (64e9 * DEFAULT.bandwidth), rel=1e-3)


def test_flash_attention_leaves_selective_recomputation_no_core_to_run_again():
    shape, cluster = models["gpt3-175b"], clusters["a100-dgx"]
    flash, scores = (estimate(shape, Plan(dp=8, pp=8, tp=8, batch=64, zero=1, flash=kind), cluster) for kind in (True, False))
    assert flash.hfu == flash.mfu
    assert scores.hfu > scores.mfu


def test_a_window_shortens_attention():
    wide, cluster = replace(models["mistral-7b"], window=0, window_layers=0), clusters["h100-dgx"]
    plan = Plan(dp=8, zero=3, seq=32768)
    assert estimate(models["mistral-7b"], plan, cluster).seconds < estimate(wide, plan, cluster).seconds


@pytest.mark.parametrize("wrong", [("llama3-8b", 1, 2), (0, "a plan", 2), (0, 1, "h100-dgx")])
def test_names_in_place_of_values_are_refused_with_the_way_to_get_them(wrong):
    right = (models["llama3-8b"], Plan(), clusters["h100-dgx"])
    arguments = [given if isinstance(given, str) else right[i] for i, given in enumerate(wrong)]
    with pytest.raises(ValueError, match=r"give a .*, as theory\."):
        estimate(*arguments)
