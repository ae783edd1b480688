"""Chapter 02's explorer shows the theory's figures, and every setting is shown or refused in words."""

import itertools

import pytest
from matplotlib.collections import PolyCollection

from manyranks.show import data_parallel
from manyranks.show.data_parallel import RANKS, Scaling, Setting, explorer
from manyranks.theory import Plan, clusters, memory, models, step

DEFAULT = {"model": "gpt2-xl", "cluster": "h100-dgx", "n": 64, "sequences": 8, "reduce": "overlapped", "noise": 2**20}


def widths(stacks: data_parallel.Stacks) -> list[list[float]]:
    """Of each part's boxes, from the top bar to the last."""
    boxes = [artist for artist in stacks.moving if isinstance(artist, PolyCollection)]
    return [[path.get_extents().width for path in part.get_paths()] for part in boxes]


def test_it_opens_on_a_setting_that_fits_and_says_what_limits():
    status = explorer().status
    assert status.startswith("gpt2-xl on 64 GPUs, 48.1 GB of 80 GB: 203 ms a step of 524 thousand tokens, efficiency 100%")
    assert status.endswith("Limit: compute-bound.")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "llama3-8b"}, "Does not fit: 169 GB of 80 GB a GPU. Every GPU holds the whole model"),
        ({"n": 512}, "the batch is 4 times the critical one: more GPUs hardly save time"),
        ({"reduce": "after backward", "sequences": 1}, "of a step waits for gradients"),
        ({"n": 1}, "one GPU: nothing to communicate"),
    ],
)
def test_the_status_line_names_the_limit(change, said):
    assert said in explorer().set(**change).status


def test_a_step_s_bars_are_the_theory_s_estimate():
    plot = Scaling()
    plot.update(**DEFAULT)
    parts = widths(plot._step)
    for row, overlap in enumerate((True, False)):
        plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none", overlap=overlap)
        time = step.estimate(models["gpt2-xl"], plan, clusters["h100-dgx"])
        shown = [part[row] for part in parts]
        expected = [time.compute, time.data, time.optimizer]
        assert [w / sum(shown) for w in shown] == pytest.approx([s / time.seconds for s in expected])


def test_memory_is_what_every_rank_holds_whatever_their_number():
    plot = Scaling()
    plot.update(**DEFAULT)
    one = widths(plot._held)
    plot.update(**DEFAULT | {"n": 1024})
    assert widths(plot._held) == one
    plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none")
    shape = models["gpt2-xl"]
    states = memory.model_states(shape, plan)
    expected = [states.parameters, states.gradients, states.optimizer, memory.activations(shape, plan)]
    shares = [part[0] for part in one]
    assert [share / sum(shares) for share in shares] == pytest.approx([bytes / sum(expected) for bytes in expected])


def test_efficiency_falls_from_one_gpu_on_and_is_never_worse_with_overlap():
    now = Setting("gpt2-xl", "h100-dgx", 1, 8, True, 2**20)
    for overlap in (True, False):
        values = [now.efficiency(n, overlap) for n in RANKS]
        assert values[0] == 1
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(values))
    assert all(now.efficiency(n, True) >= now.efficiency(n, False) for n in RANKS)


def test_every_choice_gives_a_status_line_or_a_reason():
    shown = explorer()
    options = {name: [shown.values[name]] for name in DEFAULT}
    for name in ("model", "cluster", "reduce"):
        options[name] = list(shown._controls[name].options)
    options["n"] = [1, 8, 1024]
    options["sequences"] = [1, 64]
    for values in itertools.product(*options.values()):
        status = shown.set(**dict(zip(options, values, strict=True))).status
        assert "nan" not in status
        assert len(status) > 40, status


def test_losses_are_drawn_a_curve_a_run():
    (axes,) = data_parallel.losses({"4 ranks": [5.0, 4.0, 3.0], "1 rank": [5.0, 4.0]}).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [3, 2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4 ranks", "1 rank"]
