"""All axes at once on a few ranks: what a rank sends on each axis in a step, and what it holds."""

from math import prod

from manyranks.few_ranks.ranks import OnRanks, bytes_sent
from manyranks.measure.compared import Compared, SmallRun
from manyranks.parallel.mesh import Mesh
from manyranks.theory import Plan
from manyranks.theory.nd import of_rank, payload
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.parallelize import mesh_of
from manyranks.training.trainer import Trainer
from manyranks.world.counted import measurement

_CONFIG = GPTConfig(seq=64)
_NAMED = {"tp": "TP", "cp": "CP", "pp": "PP", "data": "DP"}
_kept: dict = {}  # on a rank: its trainer, and the bytes that it held after the last backward


@OnRanks
def nd(values, ranks, say):
    """The course's GPT on a mesh of 4 or 8 ranks with the explorer's axes: what rank 0 sends and holds against theory.nd."""
    plan, shape = _plan(values), _CONFIG.shape()
    mesh, theory, world = mesh_of(plan), payload(shape, plan), ranks(plan.gpus)
    axes = ", ".join(f"{name.upper()} {getattr(plan, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(plan, name) > 1)
    say(0.3, f"a first step of {plan.gpus} ranks: {axes}")
    world.run(_first_step, plan)
    say(0.7, "a step")
    counted = world.measure(_step)
    rows = [Compared("sent, with headers", sum(theory.values()), bytes_sent(counted)[0])]
    for group, shared in _groups(mesh).items():
        sent = sum(measurement.payload(call, 0) for call in counted.calls[0] if call.ranks == group)
        name = " and ".join(_NAMED[axis] for axis in shared)
        rows.append(Compared(f"payload on {name}", sum(theory[axis] for axis in shared), sent))
    rows.append(Compared("model states", of_rank(shape, plan).total, counted.results[0]))
    where = f"rank 0 of {plan.gpus} on this machine: {axes}, ZeRO-{plan.zero}, {plan.schedule}"
    return SmallRun(f"{where}; {shape.parameters:,} parameters in float32", tuple(rows))


def _plan(values) -> Plan:
    """Every axis in use has 2 ranks, data parallelism the rest of 4 or 8. Stages keep gradients, so they have ZeRO 0 or 1."""
    few = {axis: min(2, values[axis]) for axis in ("tp", "cp", "pp")}
    others, piped = prod(few.values()), few["pp"] > 1
    few["dp"] = max(4 // others, 2 if others < 8 else 1)
    schedule = values["schedule"] if piped else "1f1b"
    how = {"schedule": "dualpipe-v" if schedule == "dualpipe" else schedule, "recompute": values["recompute"]}
    how |= {"virtual": min(2, values["virtual"]) if piped else 1, "zero": min(values["zero"], 1 if piped else 3)}
    return Plan(**few, **how, precision="fp32", seq=_CONFIG.seq, batch=4 * few["dp"])


def _groups(mesh: Mesh) -> dict[tuple[int, ...], list[str]]:
    """The groups of rank 0 that send, and their axes: without data parallelism, DP's group is CP's."""
    found: dict[tuple[int, ...], list[str]] = {}
    for axis in (axis for axis in _NAMED if mesh.size(axis) > 1):
        found.setdefault(mesh.group(axis, 0), []).append(axis)
    return found


def _first_step(plan: Plan) -> None:
    """A step where stages also tell each other shapes."""
    _kept["trainer"] = trainer = Trainer(_CONFIG, TrainingConfig(plan=plan))
    trainer.run(1)
    complete = trainer.spread.complete

    def look() -> None:
        _kept["held"] = sum(tensor.nbytes for kind in trainer.spread.held() for tensor in kind)
        complete()

    trainer.spread.complete = look


def _step() -> int:
    _kept["trainer"].run(1)
    return _kept["held"]
