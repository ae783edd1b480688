"""Plans for the page "Plan your run": Pyodide runs `answer` in the reader's browser, and build.py puts `lists` into the form.

Standard library and theory only. tests/browser/plan.py compares the page with the library.
"""

import html
import json
from collections.abc import Callable
from pathlib import Path

from manyranks.theory import ModelShape, clusters, from_hf_config, models, planner, written
from manyranks.theory.names import Named
from manyranks.theory.planner import Found
from manyranks.theory.published import confidence, peak_confidence

MOST = 8  # plans, each with other TP, PP and EP; the fastest that's checked comes on top
# What the search gets beside the task. torchtitan has no ZeRO-1.
STACKS = Named("stack", {"megatron-core": {}, "torchtitan-2025": {"zero": (2, 3)}})
_FIRST = ("llama3-70b", "h100-dgx", "megatron-core")  # chosen until the reader chooses
_COMMANDS = {"Megatron-Core": written.megatron_core, "torchtitan": written.torchtitan}


def lists() -> dict[str, str]:
    """The options of the page's lists, as HTML, by the name of the list."""
    named = {
        "model": {name: f"{name}, {_billions(shape)}" for name, shape in models.items()},
        "cluster": {name: f"{name}, {on.accelerator.name}" for name, on in clusters.items() if name == on.name != "laptop"},
        "stack": {name: name for name in STACKS},
    }
    option = "<option value='{}'{}>{}</option>".format
    return {
        kind: "".join(option(name, " selected" * (name in _FIRST), html.escape(said)) for name, said in each.items())
        for kind, each in named.items()
    }


def answer(choices: str, say: Callable[[str], object]) -> str:
    """The planner's plans for what the form holds, as JSON; {"error": a sentence} for what can't be planned.

    choices: JSON of _plans' arguments; say: gets words for what goes on
    """
    try:
        return json.dumps(_plans(say, **json.loads(choices)))
    except ValueError as error:
        return json.dumps({"error": str(error)})


def _plans(say: Callable, model: str, config: str, cluster: str, gpus: int, seq: int, batch: int, stack: str) -> dict:
    shape, on = _pasted(config) if config else models[model], clusters[cluster]
    say("Trying plans")
    found = planner.search(shape, on, gpus=gpus, seq=seq, batch=batch, stack=stack, **STACKS[stack])
    shown: dict[tuple, Found] = {}
    for one in found:
        shown.setdefault((one.plan.tp, one.plan.pp, one.plan.ep), one)
        if len(shown) == MOST:
            break
    if not shown:
        raise ValueError(
            f"no plan for {shape.name} fits in {_size(on.accelerator.memory)} per GPU: use more GPUs, or another model or chip"
        )
    say("Trying plans like which runs were published")
    others = [found.checked] if found.checked and found.checked.plan not in [one.plan for one in shown.values()] else []
    plans = sorted([*shown.values(), *others], key=lambda one: one.seconds)
    size = f"{shape.name}, {_billions(shape)} parameters"
    return {"task": f"{size}, on {gpus:,} GPUs of {cluster}", "plans": [_row(shape, one) for one in plans]}


def _pasted(config: str) -> ModelShape:
    """The shape of a config.json. It's written to a file, so that the library reads it, and says what's wrong with it."""
    file = Path("your model", "config.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(config, encoding="utf-8")
    return from_hf_config(file)


def _row(shape: ModelShape, one: Found) -> dict:
    sure, room = str(confidence(one.time)), _size(one.time.cluster.accelerator.memory)
    parts = ", ".join(f"{_size(held)} {name}" for name, held in one.peak._asdict().items() if held)
    return {
        "plan": f"{written.degrees(one.plan)}; {written.kept(one.plan)}",
        "seconds": one.seconds,
        "step": f"{one.seconds:.4g} s" if one.seconds < 1000 else f"{one.seconds:,.0f} s",
        "error": sure,
        "mfu": f"{one.time.mfu:.1%}",
        "bytes": one.peak.total,
        "memory": _size(one.peak.total),
        "memory_error": "; ".join(filter(None, (str(peak_confidence(shape, one.plan)), one.tight))),
        "why": one.why.removesuffix(f"; {sure}"),
        "held": f"{parts}; a GPU has {room}",
        "python": repr(one.plan),
        "commands": {} if one.time.cluster.torus else {name: _command(shape, one, name) for name in _COMMANDS},
    }


def _size(held: int) -> str:
    return f"{held / 1e9:.3g} GB"


def _billions(shape: ModelShape) -> str:
    return f"{shape.parameters / 1e9:.3g}B"


def _command(shape: ModelShape, one: Found, name: str) -> str:
    try:
        return _COMMANDS[name](shape, one.plan)
    except ValueError as error:
        return f"# {name} doesn't run this plan: {error}"
