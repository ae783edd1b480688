"""Chapter 03's drawings: who holds what, where pieces go in stage 1, and the messages of stage 3."""

from manyranks.show import drawings, style


def who_holds_what(n: int = 4) -> style.Figure:
    """Draws what each of n ranks holds of a model's states in stages 0 to 3, with Adam in mixed precision.

    n: ranks, 2 or more
    """
    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}  # bytes per parameter
    panels = {}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        cut = list(sizes)[len(sizes) - stage :]
        panels[name] = [[(k, k, (r, n) if k in cut else None, size) for k, size in sizes.items()] for r in range(n)]
    return drawings.who_holds(panels, below=("16", "4 + 12/N", "2 + 14/N", "16/N"), unit="bytes per\nparameter")


def stage_1(n: int = 4) -> style.Figure:
    """Draws where each piece of the gradients goes in stage 1, and where the new weights come from.

    n: ranks, 2 to 8
    """
    gradients = [[f"{rank}{k}" for k in range(n)] for rank in "abcdefgh"[:n]]
    means = [[f"Σ{k}" if k == rank else None for k in range(n)] for rank in range(n)]
    weights = [[f"w{k}" for k in range(n)] for _ in range(n)]
    columns = {"gradients": gradients, "sums": means, "weights": weights}
    steps = [("reduce-scatter", "", "+"), ("all-gather", "after Adam", "")]
    return drawings.pieces(columns, steps, ["gradients", "gradients", "parameters"])


def unit_by_unit(layers: int = 4, here: int = 2, n: int = 4) -> style.Figure:
    """Draws what n ranks hold of a GPT's parts in stage 3: between steps, and while one layer computes.

    layers: of the GPT; here: the number of the layer that computes
    """
    names = ["embedding", *(f"layer {k}" for k in range(layers)), "head"]
    panels = {}
    for title, whole in (("between steps", None), (f"layer {here} computes", f"layer {here}")):
        panels[title] = [
            [(name, "gathered", None) if name == whole else (name, "parameters", (r, n)) for name in names] for r in range(n)
        ]
    return drawings.who_holds(panels)


def step_over_time(units: int = 4, gather: float = 1.0, compute: float = 1.4) -> style.Figure:
    """Draws one step of stage 3, without and with prefetching, on one axis of time.

    units: of the model, 2 or more; gather: time of a gather, and of a reduce-scatter; compute: of a unit's forward, half of
    its backward's
    """
    lanes, phases = {}, {}
    for title, ahead in (("one at a time: stage 3", False), ("fetch ahead: FSDP", True)):
        lanes[title], forward_ends, end = _lanes(units, gather, compute, ahead)
        phases[title] = [(0, forward_ends, "forward"), (forward_ends, end, "backward")]
    return drawings.when(lanes, phases)


def _lanes(units: int, gather: float, compute: float, ahead: bool) -> tuple[dict[str, list], float, float]:
    """Two lanes; every span starts as soon as its lane is free and what it needs is there."""
    lanes: dict[str, list] = {"compute": [], "network": []}

    def run(lane: str, seconds: float, label: str, kind: str, after: float) -> float:
        start = max(free(lane), after)
        lanes[lane].append((start, start + seconds, label, kind))
        return start + seconds

    def free(lane: str) -> float:
        return lanes[lane][-1][1] if lanes[lane] else 0.0

    ends, here = [0.0], {}  # of the passes; unit -> when it's whole
    for backward, order in enumerate((range(units), range(units)[::-1])):
        done = ends[-1]
        for k in order:
            if k not in here:
                here[k] = run("network", gather, f"gather {k}", "gathered", done)
            start, after = max(here[k], free("compute")), k + order.step
            if ahead and after in order:
                here[after] = run("network", gather, f"gather {after}", "gathered", start)
            done = run("compute", (1 + backward) * compute, f"{k}", "compute", here[k])
            if backward:
                reduced = run("network", gather, f"reduce {k}", "gradients", done)
                done = done if ahead else reduced
        ends.append(done)
        here = {units - 1: done} if ahead else {}
    return lanes, ends[1], max(map(free, lanes))
