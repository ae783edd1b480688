"""Exercise 09, and that what is right there is what WorkCounter counts while real modules run."""

from dataclasses import replace

import pytest
import torch

from manyranks.grade import mfu
from manyranks.grade.check import shipped
from manyranks.measure.flops import WorkCounter
from manyranks.training.gpt import GPT
from tests.grading import records
from tests.grading.answered import *  # noqa: F403

HARDLY = 1e-30  # a rate of dropout that drops nothing, and builds the score matrix


def test_the_judge_draws_cases_of_its_own_and_asks_them_first(exercise, task):
    drawn = [[repr(case) for case in replace(records.tasks(exercise)[task], seed=seed).cases_on(3)] for seed in (0, 1, 2)]
    assert not {*drawn[1][:2]} & {*drawn[0], *drawn[2]}


def right(task: str, i: int) -> dict:
    return shipped("09_mfu")[task].right[f"1/{i}"][0].results


@pytest.mark.parametrize("i", range(len(mfu.product.cases)))
def test_a_product_has_the_flops_that_are_counted(i):
    m, k, n, _ = mfu.product.cases[i]
    x, w = torch.randn(m, k, requires_grad=True), torch.randn(k, n, requires_grad=True)
    with WorkCounter() as there:
        y = x @ w
    with WorkCounter() as back:
        y.backward(torch.ones_like(y))
    assert [*right("product", i).values()] == [there.flops, back.flops]


@pytest.mark.parametrize("i", range(len(mfu.intensity.cases)))
def test_an_intensity_is_of_the_flops_and_bytes_that_are_counted(i):
    m, k, n, itemsize = mfu.intensity.cases[i]
    x, w = torch.randn(m, k), torch.randn(k, n)
    with WorkCounter() as work:
        _ = x @ w
    assert right("intensity", i)["the intensity"] == pytest.approx(work.flops / (work.bytes * itemsize / 4))


@pytest.mark.parametrize("i", range(len(mfu.per_token.cases)))
def test_a_token_has_the_flops_that_are_counted(i):
    config = mfu.per_token.cases[i]
    model = GPT(config)
    for layer in model.layers:
        layer.attention.core.dropout.rate = HARDLY
    with WorkCounter() as work:
        model(torch.arange(config.seq).view(1, -1) % config.vocab).sum().backward()
    assert right("per_token", i)["with the whole score matrix"] == pytest.approx(work.flops / config.seq)
