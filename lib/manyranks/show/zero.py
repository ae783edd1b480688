"""Chapter 03's pictures: who holds what, memory over a step, what each stage of ZeRO holds and sends; the explorer."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from manyranks.show import drawings, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, log_slider
from manyranks.show.labels import word
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.show.units import count
from manyranks.theory import Plan, clusters, sharding
from manyranks.theory.names import Named


def who_holds_what() -> style.Figure:
    """Draws what each of 4 ranks holds of a model's states in stages 0 to 3, with Adam in mixed precision."""
    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}  # bytes per parameter
    panels = {}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        cut = list(sizes)[len(sizes) - stage :]
        panels[name] = [[(k, k, (r, 4) if k in cut else None, size) for k, size in sizes.items()] for r in range(4)]
    return drawings.who_holds(panels, below=("16", "4 + 12/N", "2 + 14/N", "16/N"), unit="bytes per\nparameter")


def stage_1() -> style.Figure:
    """Draws where each piece of the gradients goes in stage 1, and where the new weights come from."""
    gradients = [[f"{rank}{k}" for k in range(4)] for rank in "abcd"]
    means = [[f"Σ{k}" if k == rank else None for k in range(4)] for rank in range(4)]
    weights = [[f"w{k}" for k in range(4)] for _ in range(4)]
    columns = {"gradients": gradients, "sums": means, "weights": weights}
    steps = [("reduce-scatter", "", "+"), ("all-gather", "after Adam", "")]
    return drawings.pieces(columns, steps, ["gradients", "gradients", "parameters"])


def unit_by_unit() -> style.Figure:
    """Draws what 4 ranks hold of a GPT's parts in stage 3: between steps, and while one of its layers computes."""
    names = ["embedding", *(f"layer {k}" for k in range(4)), "head"]
    cut = [[(name, "parameters", (rank, 4)) for name in names] for rank in range(4)]
    whole = [[(block[0], "gathered") if block[0] == "layer 2" else block for block in rank] for rank in cut]
    return drawings.who_holds({"between steps": cut, "layer 2 computes": whole})


def step_over_time() -> style.Figure:
    """Draws one step of stage 3, without and with prefetching, on one axis of time."""
    lanes, phases = {}, {}
    for title, ahead in (("one at a time: stage 3", False), ("fetch ahead: FSDP", True)):
        lanes[title], forward_ends, end = _lanes(ahead)
        phases[title] = [(0, forward_ends, "forward"), (forward_ends, end, "backward")]
    return drawings.when(lanes, phases)


def _lanes(ahead: bool) -> tuple[dict[str, list], float, float]:
    """Two lanes, and when forward and backward end; a span starts as soon as its lane is free and what it needs is there."""
    units, gather, compute = 4, 1.0, 1.4  # a gather lasts as long as a reduce-scatter, a backward twice as a forward
    lanes: dict[str, list] = {"compute": [], "network": []}

    def run(lane: str, seconds: float, label: str, kind: str, after: float) -> float:
        start = max([after, *(end for _, end, *_ in lanes[lane][-1:])])
        lanes[lane].append((start, start + seconds, label, kind))
        return start + seconds

    ends, here = [0.0], {}  # of the passes; unit -> when it's whole
    for backward, order in enumerate((range(units), range(units)[::-1])):
        done = ends[-1]
        for k in order:
            if k not in here:
                here[k] = run("network", gather, f"gather {k}", "gathered", done)
            done, after = run("compute", (1 + backward) * compute, f"{k}", "compute", here[k]), k + order.step
            if ahead and after in order:
                here[after] = run("network", gather, f"gather {after}", "gathered", lanes["compute"][-1][0])
            if backward:
                reduced = run("network", gather, f"reduce {k}", "gradients", done)
                done = done if ahead else reduced
        ends.append(done)
        here = {units - 1: done} if ahead else {}
    return lanes, ends[1], max(lane[-1][1] for lane in lanes.values())


def watched(train: Callable, stage: type, held: Callable) -> list:
    """Returns what held(stage) says after each part's forward and backward, in the second step."""
    seen = []

    class Watched(stage):
        def after_forward(self, k: int) -> None:
            seen.append(held(self))
            super().after_forward(k)

        def after_backward(self, k: int) -> None:
            seen.append(held(self))
            super().after_backward(k)

    train(Watched, steps=2)
    return seen[len(seen) // 2 :]


def steps_over_time(run: Callable, train: Callable, held: Callable, stages: Mapping[str, type]) -> style.Figure:
    """Draws what rank 0 holds over the second step of several stages, by name, side by side."""
    steps = {name: run(watched, train, stage, held)[0] for name, stage in stages.items()}
    samples = {name: {kind: [moment[kind] for moment in step] for kind in step[0]} for name, step in steps.items()}
    events = len(next(iter(steps.values())))
    return drawings.memory_over_time(samples, [(0, events / 2, "forward"), (events / 2, events, "backward")])


class _Gather:
    """The handle of a gather that notes whether anyone has waited for it."""

    def __init__(self, work):
        self._work, self.waited = work, False

    def wait(self, *timeout) -> bool:
        self.waited = True
        return self._work.wait(*timeout)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def carefully(function: Callable, *args) -> Any:
    """Calls function(*args) on a rank and refuses a gather into memory that isn't there, which could crash the process.

    Raises RuntimeError for a gather into a row whose storage is too small.
    """
    with _gathers():
        return function(*args)


def whole_units(run: Callable, train: Callable, stage: type) -> str:
    """Returns the units that have memory while each part of a step computes. If nobody has waited for one, it's in parentheses.

    With three units that's "0 1 2 2 1 0" one at a time, and "0(1) 1(2) 2 (1)2 (0)1 0" if the next one is fetched ahead.
    Raises RankFailed if a unit is read before its wait, even if its gather happens to be done by then.
    """
    return " ".join(run(carefully, _moments, train, stage)[0])


def late_gradients(train: Callable, stage: type) -> int:
    """Returns how many parameters still have a gradient when a rank's step begins. If none has, refuses to reduce again."""
    found = []

    def refuse() -> None:
        raise RuntimeError("`step` reduces a row whose gradients have already left")

    class Counting(stage):
        def step(self) -> None:
            found.append(sum(p.grad is not None for row in self.rows for p in row.parameters))
            for row in () if found[0] else self.rows:
                row.reduce = refuse
            super().step()

    train(Counting, steps=1)
    return found[0]


def _moments(train: Callable, stage: type) -> list[str]:
    class Careful(stage):
        def before_forward(self, k: int) -> None:
            super().before_forward(k)
            _must_be_there(self.rows[k], k, "forward")

        def before_backward(self, k: int) -> None:
            super().before_backward(k)
            _must_be_there(self.rows[k], k, "backward")

    return watched(train, Careful, _whole)


def _must_be_there(unit, k: int, when: str) -> None:
    free = unit.row.untyped_storage().nbytes() < unit.row.nbytes
    if free or not unit.work.waited:
        cause = "it's free" if free else "its gather may still be under way"
        raise RuntimeError(f"in {when}, unit {k} was read before its wait: {cause}")


def _whole(stage) -> str:
    there = [(k, unit.work.waited) for k, unit in enumerate(stage.rows) if unit.row.untyped_storage().nbytes()]
    return "".join(f"{k}" if waited else f"({k})" for k, waited in there) or "-"


@contextmanager
def _gathers() -> Iterator[None]:
    """Lets gathers return a _Gather, on this rank."""
    import torch.distributed as dist

    def gathering(gather: Callable) -> Callable:
        def noted(row, *args, **kwargs):
            if row.untyped_storage().nbytes() < row.nbytes:
                raise RuntimeError(f"a gather needs {row.nbytes} bytes, and its row has {row.untyped_storage().nbytes()}")
            work = gather(row, *args, **kwargs)
            return work and _Gather(work)

        return noted

    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    with mock.patch.multiple(dist, **{name: gathering(getattr(dist, name)) for name in names}):
        yield


STAGES = Named("stage", {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "HSDP": 3})
RECIPES = {"16: 2 + 2 + 12": "bf16", "18: 2 + 4 + 12 (fp32 gradients)": "bf16-fp32-gradients"}
RECIPES |= {"20: 2 + 2 + 16 (fp32 copies of both)": "fp16-fp32-gradients"}
ONLY = {"model": ("gpt2-xl", "megatron-7.5b", "llama3-70b", "gpt3-175b", "llama3-405b", "megatron-1t")}
ONLY |= {"cluster": ("v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, ""), "optimizer": (style.GREEN, "")}
_HELD |= {"activations": (style.PINK, "")}
_SENT = {"gathers, forward": (style.BLUE, ""), "gathers, backward": (style.PINK, "\\\\\\\\")}
_SENT |= {"reduce-scatter": (style.ORANGE, "////"), "all-reduce": (style.YELLOW, "xxxx")}
_PRINTS = {"states": "size(peak.states)", "activations": "size(peak.total - peak.states)"}


class Stage(namedtuple("Stage", "model cluster dp stage k precision"), Setting):
    """Holds what the controls say. stage: a key of STAGES; k: shards of HSDP; precision: a key of theory.plan.RECIPES."""

    choices, remedies = {"stage": [*STAGES]}, {"network": ("stage",)}

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Takes one sequence a GPU; all layers run again; no overlap. Raises ValueError for K above d in HSDP."""
        if self.stage == "HSDP" and self.dp % self.k:
            now = f"K = {self.k:,} and d = {self.dp:,}"
            raise ValueError(f"HSDP needs K ≤ d (replicas × shards = d), but {now}: lower K or raise d")
        how = {"zero": STAGES[self.stage], "dp_shard": self.k if self.stage == "HSDP" else None, "overlap": False}
        plan = Plan(dp=self.dp, seq=1024, recompute="full", precision=self.precision, **how)
        return Scenario(SHAPES[self.model], plan, clusters[self.cluster])

    def held(self) -> dict[str, int]:
        """Returns bytes of one GPU; their sum is the peak."""
        *states, activations, buffers = self.scenario.held.values()
        return dict(zip(_HELD, (*states, activations + buffers), strict=True))

    def sent(self) -> dict[str, int]:
        """Returns what a rank sends in a step, in bytes, with one forward and one backward, the units being the layers."""
        plan, cut = self.scenario.plan, sharding.unit_sizes(self.scenario.shape)
        itemsizes = plan.recipe.parameters, min(4, plan.recipe.gradients)
        sent = sharding.sent(cut, self.dp, plan.zero, *itemsizes, replicas=self.dp // plan.shards)
        return dict(zip(_SENT, sent, strict=True))

    def largest(self) -> int:
        """Returns the parameters of the largest model by its states alone, as in Table 2 of arXiv 1910.02054."""
        plan, room = self.scenario.plan, self.scenario.cluster.accelerator.memory
        return sharding.largest(plan.zero, self.dp, int(room), self.precision, self.dp // plan.shards)

    def where(self) -> str:
        return f"{self.model} on {self.dp:,} GPU{'s' if self.dp > 1 else ''}, {self.stage}, {self.cluster}"

    def numbers(self) -> dict[str, str]:
        numbers = {"states": units.size(self.scenario.peak.states), "activations": units.size(self.held()["activations"])}
        if self.dp > 1:
            own, alone = (sum(each.sent().values()) for each in (self, self._replace(stage="data parallelism")))
            numbers["sent per GPU per step"] = f"{units.size(own)}, {units.three(own / alone)} × data parallelism"
        return numbers

    def code(self) -> str:
        plan = self.scenario.plan
        more = f", {plan.recipe.parameters}, {min(4, plan.recipe.gradients)}, replicas={self.dp // plan.shards}"
        lines = f"sent = sharding.sent(sharding.unit_sizes(shape), plan.dp, plan.zero{more})\n"
        prints = _PRINTS | ({"sent per GPU per step": "size(sent.total)"} if self.dp > 1 else {})
        return self.scenario.code(prints, "sharding", lines)

    def limits(self) -> str:
        """Says what limits, and what would help. Compute grows with a step's tokens, what is sent does not."""
        if not self.fits:
            held = self.held()
            most = f"memory, mainly {max(held, key=held.get)}".replace("optimizer", "optimizer states")
            ways = ((says, self._replace(**change)) for says, change in self._ways().items())
            way = next((says for says, each in ways if each.possible and each.fits), None)
            return f"{most}: {way or 'no control here helps; chapters 05 and 06 split the model itself'}"
        if self.dp == 1:
            return "compute: one GPU sends nothing"
        sequences = self.scenario.time.data / self.scenario.time.compute
        if sequences <= 1:
            return f"compute; messages take {sequences:.0%} as long"
        faster = self.takes("network", units.duration)
        return f"the network: messages take {units.three(sequences)} times as long as compute{faster}"

    def _ways(self) -> dict[str, dict]:
        """Lists what shards more: another value of one control, then of two."""
        ranks = [2**k for k in range(11)]
        stages = [] if self.stage == "HSDP" else [*STAGES][1:4]
        ways = {f"{name} fits": {"stage": name} for name in stages} or {f"K = {k:,} fits": {"k": k} for k in ranks}
        return ways | {f"ZeRO-3 fits on {dp:,} GPUs or more": {"stage": "ZeRO-3", "dp": dp} for dp in ranks}


class Stages(Board):
    """Shows a row for each stage: the memory of one GPU, what it sends in a step, and the largest model that fits."""

    setting, over = Stage, "dp"

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(6.45, 4.3), layout="constrained")
        axes = self.figure.subplot_mosaic("aa;bc", width_ratios=(1.25, 1), height_ratios=(1.15, 1))
        bars, phi = functools.partial(Bars, rows=[*STAGES], outline=word), {"parameters": _HELD["parameters"]}
        title = "memory: states + activations (log; | is the sum)"
        self._held = bars(axes["a"], _HELD, title, columns=4, ends=(1e6, 3e13), ticks=(1e6, 1e9, 1e12))
        self._sent = bars(axes["b"], _SENT, "sent per GPU per step")
        self._largest = bars(axes["c"], phi, "largest Φ (log)", unit=count, ends=(1e8, 1.2e13), ticks=(1e9, 1e12))
        axes["c"].set_yticklabels([])
        look = {"color": style.INK, "markersize": 20, "markeredgewidth": 2, "gid": "sums"}
        self._sums = axes["a"].plot([], [], "|", **look)[0]
        self.panels, self.others = (self._held, self._sent, self._largest), (self._sums,)

    def draw(self, now: Stage) -> None:
        here, row, missing = now.scenario, [*STAGES].index(now.stage), "K > d"  # HSDP, where it isn't possible
        shown = [each for each in (now._replace(stage=name) for name in STAGES) if each.possible]
        room, phi = here.cluster.accelerator.memory, here.shape.parameters
        bars, mark = [each.held() for each in shown], (room, f"memory: {units.size(room)}")
        both = [(each.scenario.peak.states, bar["activations"]) for each, bar in zip(shown, bars, strict=True)]
        self._held.update(bars, ["|+ ".join(map(units.size, each)) for each in both], row, limit=mark, missing=missing)
        self._sums.set_data([self._held.place(sum(bar.values())) for bar in bars], range(len(bars)))
        bars = [each.sent() for each in shown]
        self._sent.update(bars, [units.size(sum(bar.values())) for bar in bars], row, missing=missing)
        sizes, mark = [each.largest() for each in shown], (phi, f"Φ = {count(phi)}")
        self._largest.update([{"parameters": size} for size in sizes], [*map(count, sizes)], row, limit=mark, missing=missing)

    def idle(self, stage: str, **values) -> dict[str, bool]:
        return {"k": stage != "HSDP"}


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 03, on figure 1 of arXiv 1910.02054.

    measure: what "Measure it" runs, few_ranks.zero
    """
    presets = {"data parallelism": {"stage": "data parallelism"}, "ZeRO-3": {"stage": "ZeRO-3"}}
    presets["Llama 70B"] = {"model": "llama3-70b", "cluster": "h100-dgx", "stage": "ZeRO-3"}
    presets["a trillion"] = {"model": "megatron-1t", "cluster": "h100-dgx", "dp": 1024, "stage": "ZeRO-3"}
    presets["32-bit gradients"] = {"precision": "bf16-fp32-gradients"}
    shared = controls(ONLY, model="megatron-7.5b", cluster="v100-dgx", dp=64)
    own = {"stage": choice("stage", "ZeRO-2", list(STAGES)), "k": log_slider("HSDP shards K", 16, 0, 10, show="{:,}".format)}
    return Explorer(Stages(), presets, measure, **shared, **own, precision=choice("bytes/parameter", "bf16", RECIPES))
