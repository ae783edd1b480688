"""theory.sharding: what ranks hold and send, against counting element by element, and against the tables of ZeRO's papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import Plan, accelerators, collectives, memory, models, published, sharding
from manyranks.theory.plan import RECIPES

BILLION = 1e9
V100 = accelerators["V100 SXM2"].memory
STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}

rows = st.lists(st.integers(0, 40), max_size=6)
groups = st.integers(0, 3).flatmap(
    lambda stage: st.tuples(st.just(stage), st.integers(1, 6), st.integers(1, 4) if stage else st.just(1))
)  # stage, shards, replicas; stage 0 has as many ranks as "shards" here


# Rows and shards


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shards_are_equal_hold_every_element_and_waste_less_than_one_each(elements, n):
    whole, part = sharding.padded(elements, n), sharding.shard(elements, n)
    assert whole == n * part
    assert elements <= whole < elements + n


@given(rows, groups, st.sampled_from([(2, 2, 4, (4, 4)), (4, 4, 0, (4, 4)), (0, 4, 4, (4,)), (4, 4, 0, ())]))
def test_what_is_held_is_what_counting_the_last_rank_s_elements_gives(each, group, sizes):
    stage, n, replicas = group
    parameter, gradient, master, states = sizes
    k = 1 if stage == 0 else n
    expected = dict.fromkeys(sharding.HeldBytes._fields, 0)
    for elements in each:
        row = list(range(elements))
        while len(row) % k:
            row.append(None)
        mine = row[len(row) - len(row) // k :]
        own = [element for element in mine if element is not None]
        parts = {
            "parameters": (parameter, own if stage == 3 else row),
            "gradients": (gradient, mine if stage >= 2 else row[:elements]),
            "masters": (master, own),
            "states": (sum(states), own),
        }
        for name, (size, kept) in parts.items():
            expected[name] += size * len(kept)
            expected["padding"] += size * kept.count(None)
        expected["counters"] += 4
    found = sharding.held(each, n * replicas, stage, parameter, gradient, master, states, 4, replicas, rank=k - 1)
    assert found._asdict() == expected
    assert found.total == sum(found) - found.padding


@given(st.integers(10**9, 10**12), st.integers(1, 1024), st.integers(0, 3), st.sampled_from(sorted(RECIPES)), st.booleans())
def test_states_are_those_of_theory_memory_up_to_padding(phi, half, stage, precision, replicated):
    replicas, recipe = 2 if replicated and stage else 1, RECIPES[precision]
    plan = Plan(dp=2 * half, dp_shard=2 * half // replicas, zero=stage, precision=precision)
    states = memory.model_states(phi, plan)
    sizes = (recipe.parameters, recipe.gradients, 0, (recipe.optimizer,))
    found = sharding.held([phi], 2 * half, stage, *sizes, replicas=replicas)
    assert (found.gradients, found.states) == (states.gradients, states.optimizer)
    assert 0 <= found.parameters - states.parameters < 2 * half * recipe.parameters  # rows are padded, the formula's are not
    divides = phi - phi % (2 * half)
    exact = sharding.held([divides], 2 * half, stage, *sizes, replicas=replicas)
    assert exact.total == memory.model_states(divides, plan).total


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3-8b", "deepseek-v3"])
def test_the_units_of_a_model_are_all_of_it(name):
    shape = models[name]
    units = sharding.unit_sizes(shape)
    assert len(units) == shape.layers + 2
    assert sum(units) == shape.parameters


# Gathered units


def gathered_at_each_moment(units: list[int], prefetch: int, keep_last: bool) -> list[int]:
    """Played through as a wrapper does it: gather, start what comes next, free what is done with."""
    last, whole, seen = len(units) - 1, set(), []

    def use(unit: int, ahead: int) -> None:
        for k in [unit, *(unit + ahead * step for step in range(1, prefetch + 1))]:
            whole.update({k} if 0 <= k <= last else ())
            seen.append(sum(units[k] for k in whole))

    for unit in range(len(units)):
        use(unit, 1)
        if unit < last or not keep_last:
            whole.discard(unit)
    for unit in reversed(range(len(units))):
        use(unit, -1)
        whole.discard(unit)
    assert not whole
    return seen


@given(st.lists(st.integers(0, 40), max_size=7), st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_the_peak_of_gathered_units_is_that_of_a_step_played_through(units, n, prefetch, keep_last):
    moments = gathered_at_each_moment([sharding.padded(u, n) for u in units], prefetch, keep_last)
    assert sharding.gathered_peak(units, n, 2, prefetch) == 2 * max(moments, default=0)


# Traffic


@given(rows, groups, st.sampled_from([(2, 2), (2, 4), (4, 4)]), st.booleans(), st.data())
def test_what_is_sent_is_the_sum_of_the_collectives(units, group, itemsizes, keep_last, draw):
    stage, k, m = group
    k, m = (1, k) if stage == 0 else (k, m)
    gather, reduce = itemsizes
    replica = draw.draw(st.integers(0, m - 1))
    found = sharding.sent(units, k * m, stage, gather, reduce, keep_last, 1 if stage == 0 else m, replica)

    def by(op: str, elements: int, itemsize: int, ranks: int, place: int) -> int:
        return collectives.sent_bytes(op, elements, itemsize, ranks)[place]

    padded = [sharding.padded(unit, k) for unit in units]
    gathers = [by("all_gather", e, gather, k, k - 1) for e in padded]
    again = gathers[:-1] if keep_last else gathers
    assert found.gather_forward == sum(gathers)
    assert found.gather_backward == (sum(again) if stage == 3 else 0)
    assert found.reduce_scatter == sum(by("reduce_scatter", e, reduce, k, 0) for e in padded)
    assert found.all_reduce == sum(by("all_reduce", e // k, reduce, m, replica) for e in padded)
    assert found.total == sum(found)


def test_the_last_unit_is_not_gathered_again():
    units = [3200, 640, 6400]
    each = [63 * unit // 64 for unit in units]
    expected = (2 * sum(each), 2 * sum(each[:2]), 4 * sum(each), 0)
    assert sharding.sent(units, 64, 3, gather_itemsize=2, reduce_itemsize=4) == expected


# The largest model


@given(groups, st.integers(0, 10**6), st.sampled_from(sorted(RECIPES)))
def test_the_largest_model_fits_and_one_parameter_more_does_not(group, room, precision):
    stage, k, replicas = group
    recipe = RECIPES[precision]

    def total(phi: int) -> int:
        sizes = (recipe.parameters, recipe.gradients, 0, (recipe.optimizer,))
        return sharding.held([phi], k * replicas, stage, *sizes, replicas=replicas).total

    phi = sharding.largest(stage, k * replicas, room, precision, replicas)
    assert total(phi) <= room < total(phi + 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("row", published.rows("zero_table2_max_model"), ids=lambda row: row["gpus"])
def test_every_cell_of_table_2(row, stage):
    mp = int(row["mp_degree"])
    assert int(row["gpus"]) == 64 * mp
    text = row[f"theory_{stage}"]
    ours = sharding.largest(STAGES[stage], 64, V100, model_parallel=mp) / BILLION
    if text.endswith("T"):
        assert f"{ours / 1000:.{len(text[:-1].partition('.')[2])}f}T" == text
        return
    digits, printed = len(text.rstrip("B").partition(".")[2]), float(text[:-1])
    assert mp > 1 or f"{ours:.{digits}f}B" == text  # the first row
    assert printed == pytest.approx(round(ours / mp, 1) * mp)  # the first row's, rounded, times the degree
    assert printed == pytest.approx(ours, rel=0.006)


@pytest.mark.parametrize("row", published.rows("zero_table2_max_model"), ids=lambda row: row["gpus"])
def test_what_the_paper_s_authors_could_train_is_below_the_largest(row):
    for stage in ("baseline", "Pos"):
        measured = float(row[f"measured_{stage}"][:-1]) * BILLION
        most = sharding.largest(STAGES[stage], 64, V100, model_parallel=int(row["mp_degree"]))
        assert 0.6 * most < measured < most


# From DeepSpeed: docs/code-docs/source/memory.rst (HEAD edaa7221), bytes a GPU in GiB.
T5_3B, T5_LARGE = (2_851_000_000, 32_000_000), (737_670_000, 32_900_000)


@pytest.mark.parametrize(
    ("model", "n", "offload", "printed"),
    [
        (T5_3B, 8, "none", 6.09),
        (T5_3B, 8, "optimizer", 0.78),
        (T5_3B, 8, "all", 0.12),
        (T5_LARGE, 4, "none", 3.214),
        (T5_LARGE, 4, "optimizer", 0.466),
        (T5_LARGE, 4, "all", 0.122),
    ],
)
def test_deepspeed_s_estimates_of_stage_3(model, n, offload, printed):
    phi, layer = model
    kept = {"none": (2, 4, 4, (4, 4)), "optimizer": (2, 0, 0, ()), "all": (0, 0, 0, ())}[offload]
    one_layer = 2 * sharding.gathered_peak([layer], n, 2)  # its parameters, and its gradients
    ours = (sharding.held([phi], n, 3, *kept).total + one_layer) / 2**30
    assert ours == pytest.approx(printed, abs=0.006 if offload != "all" else 0.001)


# From DeepSpeed: docs/assets/files/SC21-ZeRO-Infinity.pdf (HEAD edaa7221): what was trained on a DGX-2, 16 V100s.
@pytest.mark.parametrize(("stage", "trained"), [(0, 1.4), (3, 20)])
def test_what_was_trained_on_a_dgx_2_is_below_the_largest(stage, trained):
    assert 0.6 < trained / (sharding.largest(stage, 16, V100) / BILLION) < 1
    if stage == 3:  # that paper counts 20 bytes a parameter
        assert 0.75 < trained / (sharding.largest(3, 16, V100, "fp16-fp32-gradients") / BILLION) < 1


@pytest.mark.parametrize(
    ("layers", "hidden", "states", "working"),
    [(80, 10240, 1.83, 1.56), (100, 20480, 9.16, 6.25), (128, 25600, 18.31, 9.77), (195, 65536, 182.81, 64.0)],
)
def test_zero_infinity_s_figure_2a(layers, hidden, states, working):
    phi = 12 * layers * hidden**2
    found = sharding.held([phi], 1, 0, 2, 2, 0, (16,)).total  # 20 bytes
    assert round(found / 2**40, 2) == pytest.approx(states, abs=0.005)
    largest = 4 * hidden**2  # of one operator: from h to 4h
    assert round(2 * sharding.gathered_peak([largest], 1, 2) / 2**30, 2) == pytest.approx(working, abs=0.005)


# Offloading: arXiv 2104.07857, section 4. A V100 reaches 70 TFLOP/s.

REACHED = 70e12


def test_intensities_are_flops_over_bytes():
    assert sharding.intensity(2048, 8192) == (2048, 512, 24 * 8192)
    assert sharding.intensity(1024, 2048, interval=3) == (1024, 256, 24 * 2048 * 3)


@given(st.floats(1, 1e6), st.floats(1e6, 1e13), st.floats(1e9, 1e15))
def test_an_efficiency_needs_its_bandwidth(intensity, bandwidth, flops):
    reached = sharding.efficiency(intensity, bandwidth, flops)
    computing, moving = 1 / flops, 1 / (intensity * bandwidth)
    assert reached == pytest.approx(computing / (computing + moving))
    if reached < 0.999999:
        assert sharding.bandwidth_for(reached, intensity, flops) == pytest.approx(bandwidth, rel=1e-6)


def test_the_paper_s_bandwidths_keep_a_v100_busy():
    of = sharding.intensity
    assert 0.5 < sharding.efficiency(of(1024, 8192).parameters, 70e9, REACHED) < 0.51  # one sequence: just over a half
    assert sharding.efficiency(of(1024, 2048).activations, 2e9, REACHED) > 0.5
    assert sharding.bandwidth_for(0.5, of(1024, 8192).activations, REACHED) < 1e9
    halves = [sharding.bandwidth_for(0.5, each, REACHED) for each in of(1024, 8192)[:2]]
    assert halves[1] == 4 * halves[0]
    # "nearly 1.5 TB/s" for 90 %: 1.23 TB/s by the formula.
    assert 1.2e12 < sharding.bandwidth_for(0.9, of(2048, 8192).optimizer, REACHED) < 1.5e12


# SC21-ZeRO-Infinity.pdf: GB/s needed on 1,024 GPUs with 2k tokens each; those of ZeRO-Infinity over NVMe and host memory.
NEEDED = {"parameters": (60, 70, 70), "optimizer": (1500, 1792, 4096), "activations": (4, 1.75, 4)}


@pytest.mark.parametrize(("kind", "reached"), [("parameters", 0.637), ("optimizer", 0.916), ("activations", 0.737)])
def test_the_slides_needs_are_these_efficiencies(kind, reached):
    intensity = getattr(sharding.intensity(2048, 2048), kind)
    needed, nvme, host = (sharding.efficiency(intensity, 1e9 * rate, REACHED) for rate in NEEDED[kind])
    assert needed == pytest.approx(reached, abs=0.0005)
    assert host >= needed
    assert (nvme >= needed) == (kind != "activations")
    if kind == "parameters":  # ZeRO-Offload: one accelerator's share of PCIe, 12 GB/s
        assert sharding.efficiency(intensity, 12e9, REACHED) < 0.3


# Errors


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sharding.padded(-1, 2), "elements=-1: must be a whole number, 0 or more"),
        (lambda: sharding.shard(4, 0), "n=0: must be a whole number, 1 or more"),
        (lambda: sharding.shard(2.0, 2), "elements=2.0: must be a whole number, 0 or more"),
        (lambda: sharding.held([4], 2, 4), "stage=4: the stages are 0, 1, 2 and 3"),
        (lambda: sharding.held([4, -1], 2, 1), "elements=-1: must be"),
        (lambda: sharding.held([4], 2, 1, master=-4), "master=-4: must be"),
        (lambda: sharding.held([4], 2, 1, states=(4, 0.5)), "states=0.5: must be"),
        (lambda: sharding.held([4], 6, 3, replicas=4), "replicas=4 does not divide n=6: replicas × shards = n"),
        (lambda: sharding.sent([4], 4, 0, replicas=2), "replicas=2 with stage=0, where every rank is a replica"),
        (lambda: sharding.sent([4], 4, 3, replicas=2, replica=2), "replica=2: there are 2, counted from 0"),
        (lambda: sharding.sent([4], 4, 3, gather_itemsize=-2), "gather_itemsize=-2: must be"),
        (lambda: sharding.gathered_peak([4], 2, 4, prefetch=-1), "prefetch=-1: must be"),
        (lambda: sharding.largest(1, 4, -1.0), "memory=-1.0: give bytes, 0 or more"),
        (lambda: sharding.largest(1, 4, float("nan")), "memory=nan: give bytes"),
        (lambda: sharding.largest(1, 4, 32e9, "bf61"), "precision='bf61': did you mean 'bf16'"),
        (lambda: sharding.largest(5, 4, 32e9), "stage=5: the stages"),
        (lambda: sharding.largest(1, 4, 32e9, model_parallel=0), "model_parallel=0: must be"),
        (lambda: sharding.unit_sizes("gpt2"), "shape='gpt2': give a ModelShape"),
        (lambda: sharding.intensity(0, 8), "tokens=0: must be a number above 0"),
        (lambda: sharding.efficiency(1, -1, 1), "bandwidth=-1: must be a number above 0"),
        (lambda: sharding.bandwidth_for(1.0, 1, 1), "efficiency=1.0: give a share above 0 and below 1"),
    ],
)
def test_wrong_arguments_are_refused_in_words(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(said)
