"""Chapter 03's drawings: who holds what, where pieces go in stage 1, and the messages of stage 3."""

from manyranks.show import drawings, style


def who_holds_what(n: int = 4) -> style.Figure:
    """Draws what each of n ranks, 2 or more, holds of a model's states in stages 0 to 3, with Adam in mixed precision."""
    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}  # bytes per parameter
    panels = {}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        cut = list(sizes)[len(sizes) - stage :]
        panels[name] = [[(k, k, (r, n) if k in cut else None, size) for k, size in sizes.items()] for r in range(n)]
    return drawings.who_holds(panels, below=("16", "4 + 12/N", "2 + 14/N", "16/N"), unit="bytes per\nparameter")


def stage_1(n: int = 4) -> style.Figure:
    """Draws where each piece of the gradients goes in stage 1, and where the new weights come from. n: ranks, 2 to 8."""
    gradients = [[f"{rank}{k}" for k in range(n)] for rank in "abcdefgh"[:n]]
    means = [[f"Σ{k}" if k == rank else None for k in range(n)] for rank in range(n)]
    weights = [[f"w{k}" for k in range(n)] for _ in range(n)]
    columns = {"gradients": gradients, "sums": means, "weights": weights}
    steps = [("reduce-scatter", "", "+"), ("all-gather", "after Adam", "")]
    return drawings.pieces(columns, steps, ["gradients", "gradients", "parameters"])


def unit_by_unit(layers: int = 4, here: int = 2, n: int = 4) -> style.Figure:
    """Draws what n ranks hold of a GPT's parts in stage 3: between steps, and while one of its layers, `here`, computes."""
    names = ["embedding", *(f"layer {k}" for k in range(layers)), "head"]
    cut = [[(name, "parameters", (rank, n)) for name in names] for rank in range(n)]
    whole = [[(block[0], "gathered") if block[0] == f"layer {here}" else block for block in rank] for rank in cut]
    return drawings.who_holds({"between steps": cut, f"layer {here} computes": whole})


def step_over_time(units: int = 4, gather: float = 1.0, compute: float = 1.4) -> style.Figure:
    """Draws one step of stage 3, without and with prefetching, on one axis of time.

    units: 2 or more; gather: time of a gather, and of a reduce-scatter; compute: of a unit's forward, half its backward's
    """
    lanes, phases = {}, {}
    for title, ahead in (("one at a time: stage 3", False), ("fetch ahead: FSDP", True)):
        lanes[title], forward_ends, end = _lanes(units, gather, compute, ahead)
        phases[title] = [(0, forward_ends, "forward"), (forward_ends, end, "backward")]
    return drawings.when(lanes, phases)


def _lanes(units: int, gather: float, compute: float, ahead: bool) -> tuple[dict[str, list], float, float]:
    """Two lanes, and when forward and backward end; a span starts as soon as its lane is free and what it needs is there."""
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
