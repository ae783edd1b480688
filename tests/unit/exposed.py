"""The part of one micro-batch's calls that nothing hides, axis by axis, as theory.pace finds it."""

from manyranks.theory import communicate, compute, data_parallel, pace, stages, states
from manyranks.theory.communicate import BETWEEN, Passing
from manyranks.theory.kernels import DEFAULT


def seconds(shape, plan, cluster, part="dense", imbalance=1.0, constants=DEFAULT, pipeline=(1, 1)):
    at = compute.site(shape, plan.layer_plan, cluster, constants, imbalance)
    return communicate.seconds(Passing(at, part, pipeline), at.speeds)


def tensor(shape, plan, cluster, moe=False, behind=0.0, imbalance=1.0, constants=DEFAULT):
    sent = seconds(shape, plan, cluster, "moe" if moe else "dense", imbalance, constants)
    return pace.tensor_shown(plan.layer_plan, sent, behind)


def context(shape, plan, cluster, core, constants=DEFAULT):
    return pace.context_shown(plan.layer_plan, seconds(shape, plan, cluster, constants=constants), core)


def expert(shape, plan, cluster, imbalance=1.0):
    found = seconds(shape, plan, cluster, "moe", imbalance)
    return found["ep", "forward"], found["ep", "backward"]


def stage_message(shape, plan, cluster, pipeline):
    return sum(seconds(shape, plan, cluster, BETWEEN, pipeline=pipeline).values())


def of_stage(shape, plan, cluster, stage, imbalance=1.0):
    at = compute.site(shape, plan.layer_plan, cluster, DEFAULT, imbalance)
    each = [(count, compute.of_part(at, part), Passing(at, part)) for count, part in stages.parts(shape, stage)]
    return pace.total([(count, pace.shown(busy, communicate.seconds(said, at.speeds))) for count, busy, said in each])


def data(shape, plan, cluster, ranks):
    held = tuple(each for each, *_ in ranks)
    rows = states.rows(states.RankParameters(held, held), shape, plan)
    timed = communicate.timed(rows, compute.speeds(cluster, DEFAULT))
    return data_parallel.exposed(plan, cluster, DEFAULT, rows, timed, ranks)
