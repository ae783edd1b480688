"""Wrong answers to the fourth task of 04_checkpointing: which layers to checkpoint within a budget."""

import time
from itertools import combinations

from tests.grading.zoo.checkpointing_right import chosen, flops, peak, table
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "choose"
GREEDY = "taking one layer after the other, the best by some measure first, can miss the best choice"
MORE = "a part of your choice is enough"


def one_after_the_other(layers, budget, order):
    """Until it fits."""
    mine = []
    for k in [*order, None]:
        if peak(layers, mine) <= budget:
            return mine
        mine.append(k)
    raise ValueError("nothing fits")


def by(layers, key):
    return sorted(range(len(layers)), key=lambda k: key(layers[k]))


def least_of(layers, fits, key):
    """Of all choices, where they can be tried."""
    n = len(layers)
    if n > 10:
        return chosen(layers, 800)
    every = [mine for count in range(n + 1) for mine in combinations(range(n), count) if fits(mine)]
    if not every:
        raise ValueError("nothing fits")
    return min(every, key=key)


@wrong(TASK, "without checkpoints everything is kept")
def chooses_none(layers, budget):
    return set()


@wrong(TASK, "a part of your choice is enough", right_values=True)
def chooses_all(layers, budget):
    return set(range(len(layers)))


@wrong(TASK, "where nothing fits, raise ValueError", right_values=True, cases=slice(None))
def chooses_all_where_nothing_fits(layers, budget):
    try:
        return chosen(layers, budget)
    except ValueError:
        return range(len(layers))


@wrong(TASK, "the last layer's checkpoint frees nothing", right_values=True)
def chooses_the_last_too(layers, budget):
    mine = chosen(layers, budget)
    return {*mine, len(layers) - 1} if mine else mine


@wrong(TASK, GREEDY, right_values=True)
def frees_most_bytes_first(layers, budget):
    return one_after_the_other(layers, budget, by(layers, lambda layer: layer.input - layer.saved))


@wrong(TASK, "the last layer's checkpoint frees nothing", right_values=True)
def frees_most_bytes_a_flop_first(layers, budget):
    return one_after_the_other(layers, budget, by(layers, lambda layer: (layer.input - layer.saved) / layer.forward))


@wrong(TASK, "computes 664", right_values=True, cases=slice(None))
def frees_most_bytes_a_flop_first_and_drops_what_is_too_much(layers, budget):
    mine = set(frees_most_bytes_a_flop_first(layers, budget))
    for k in sorted(mine, key=lambda k: -layers[k].forward):
        mine -= {k} if peak(layers, mine - {k}) <= budget else set()
    return mine


@wrong(TASK, MORE, right_values=True)
def takes_the_cheapest_first(layers, budget):
    return one_after_the_other(layers, budget, by(layers, lambda layer: layer.forward))


@wrong(TASK, GREEDY, right_values=True)
def goes_from_the_front(layers, budget):
    return one_after_the_other(layers, budget, range(len(layers)))


@wrong(TASK, GREEDY, right_values=True)
def goes_from_the_back(layers, budget):
    return one_after_the_other(layers, budget, reversed(range(len(layers))))


@wrong(TASK, "with 40 layers, ", right_values=True, cases=slice(None))
def drops_the_dearest_first(layers, budget):
    """From all; right for the short chains."""
    mine = set(range(len(layers)))
    if peak(layers, mine) > budget:
        raise ValueError("nothing fits")
    for k in sorted(mine, key=lambda k: -layers[k].forward):
        mine -= {k} if peak(layers, mine - {k}) <= budget else set()
    return mine


@wrong(TASK, "what is held when forward ends fits, and backward needs more")
def counts_the_end_of_forward(layers, budget):
    def held(mine):
        return sum(layer.input if k in mine else layer.saved for k, layer in enumerate(layers))

    return least_of(layers, lambda mine: held(mine) <= budget, lambda mine: flops(layers, mine))


@wrong(TASK, "{1, 2, 3} computes 282,624 FLOPs again; {1, 2, 5} fits, too, and computes 171,008", right_values=True)
def chooses_the_fewest(layers, budget):
    return least_of(layers, lambda mine: peak(layers, mine) <= budget, len)


@wrong(TASK, "compare it with the budget")
def ignores_the_budget(layers, budget):
    """Every second one."""
    return set(range(0, len(layers), 2))


@wrong(TASK, "compare it with the budget", cases=slice(None))
def takes_those_that_save_more_than_the_mean(layers, budget):
    mean = sum(layer.saved for layer in layers) / len(layers)
    return {k for k, layer in enumerate(layers) if layer.saved > mean}


@wrong(TASK, "a choice that holds just the budget fits, too: <=, not <", right_values=False, cases=slice(None))
def leaves_no_byte_free(layers, budget):
    """< where <= is meant."""
    return chosen(layers, budget - 1)


@wrong(TASK, "holds", right_values=False, cases=slice(None))
def allows_a_little_more(layers, budget):
    return chosen(layers, budget * 1.1)


@wrong(TASK, "computes", right_values=True)
def frees_as_much_as_it_can(layers, budget):
    """The least held, of all that fit."""
    return min((held, way) for held, way in table(layers, budget).items())[1][1]


@wrong(TASK, "raised ValueError; to checkpoint", right_values=False)
def always_raises(layers, budget):
    raise ValueError("nothing fits")


@wrong(TASK, "in which nothing fits, choose returned None", right_values=True, cases=slice(None))
def returns_none_where_nothing_fits(layers, budget):
    try:
        return chosen(layers, budget)
    except ValueError:
        return None


@wrong(TASK, "with a budget in which nothing fits, choose raised RuntimeError", right_values=True, cases=slice(None))
def raises_something_else(layers, budget):
    try:
        return chosen(layers, budget)
    except ValueError as error:
        raise RuntimeError("nothing fits") from error


@wrong(TASK, "not a list of yes and no")
def returns_booleans(layers, budget):
    mine = chosen(layers, budget)
    return [k in mine for k in range(len(layers))]


@wrong(TASK, "return the numbers of the layers to checkpoint")
def counts_from_one(layers, budget):
    return {k + 1 for k in range(len(layers))}


@wrong(TASK, "return the numbers of the layers to checkpoint")
def returns_layers(layers, budget):
    return [layers[k] for k in chosen(layers, budget)]


@wrong(TASK, "return the numbers of the layers to checkpoint")
def returns_flops(layers, budget):
    return min(table(layers, budget).values())[0]


@wrong(TASK, "40 layers have 2 to the 40 choices", cases=slice(None))
def tries_all(layers, budget):
    if len(layers) > 10:
        time.sleep(60)  # so it would seem
    return least_of(layers, lambda mine: peak(layers, mine) <= budget, lambda mine: flops(layers, mine))


tries_all.seconds = 3


@wrong(TASK, "not written yet")
def choose(layers, budget):
    raise NotImplementedError  # your code here


@wrong(TASK, "the check calls choose(layers, budget)")
def takes_the_layers_only(layers):
    return set()
