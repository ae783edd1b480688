"""Chapter 01's explorer: a collective, its algorithm, ranks, size and topology; its messages, contents, bytes and time."""

from manyranks.show import style, units
from manyranks.show.collectives.circle import MOST, Circle
from manyranks.show.collectives.panels import LOOKS, Grid, Sent, Times
from manyranks.show.collectives.setting import TOPOLOGIES, Setting
from manyranks.show.explorer import Explorer, Measure, Panels, choice, log_slider, slider, value_slider
from manyranks.show.said import Said
from manyranks.show.scenario import in_code
from manyranks.theory.collectives import ALGORITHMS, contents, least_bytes, sent_bytes, topology

_CODE = """\
from manyranks.theory import clusters
from manyranks.theory.collectives import {name}, sent_bytes

cluster = {cluster}
sent = {sent}
"""
_CLUSTERS = {name: f'clusters["{each.name}"]' for name, each in TOPOLOGIES.items()}
_CLUSTERS |= {"one H100 node (NVLink)": 'clusters["h100-dgx"].of(8)'}
_RANKS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64]


class Knobs(Panels):
    """One collective: a round's messages, what the ranks then hold, the bytes that each sends, and time against size.

    On a torus the messages and bytes shown are those of one ring (of pairs for all_to_all), the time is the torus's own.
    """

    @style.styled
    def __init__(self):
        self.figure, (circle, grid, sent, times) = style.figure(columns=2, rows=2, width=9, height=4.4)
        self.panels = self._circle, self._grid, self._sent, self._times = Circle(circle), Grid(grid), Sent(sent), Times(times)
        _ = Setting("all_reduce", "ring", _RANKS[-1], 1, [*TOPOLOGIES][1]).times  # many messages, counted once: not in a redraw

    def update(self, step: int, **values) -> Said:
        """Shows round `step`, or the last one. Raises ValueError for what cannot be, and then changes nothing."""
        now = Setting(**values)
        time, total, drawn = now.seconds(now.size), now.steps, now.n <= MOST
        sent, last = sent_bytes(now.operation, now.size, 1, now.n, now.algorithm, node=now.node), min(step, total)
        title = f"round {last} of {total}" if drawn else f"{total:,} rounds"
        title += " on one ring" * (drawn and now.cluster.torus > 0 and now.algorithm == "ring")
        self._circle.update(now.n, now.messages(last) if drawn else [], title if total else "no rounds")
        self._grid.update(now.counts(last) if drawn else [], contents.complete(now.operation, now.n), _held(now.operation))
        self._sent.update(sent, least_bytes(now.operation, now.size, now.n))
        self._times.update(now.times, now.algorithm, (now.size, time))
        return _said(now)

    def code(self, step: int, **values) -> str:
        """Returns Python that prints what is shown; nothing for one rank, which sends nothing."""
        now = Setting(**values)
        if now.n == 1:
            return ""
        torus, group = now.cluster.torus, f"{now.n}, cluster"
        if torus:
            group = f"{topology.cube(now.n)}, cluster.levels[0].link"
        name, way = ("torus_seconds", "") if torus else ("cluster_seconds", f', "{now.algorithm}"')
        sent = f'sent_bytes("{now.operation}", {now.size}, 1, {now.n}, "{now.algorithm}", node={now.node})'
        text = _CODE.format(name=name, cluster=_CLUSTERS[now.topology], sent=sent)
        seconds = f'duration({name}("{now.operation}", {{}}, {group}{way}))'
        prints = {next(iter(_said(now).numbers)): "size(max(sent))", "time": seconds.format(now.size)}
        return in_code(text, prints | {"latency": seconds.format(0)})


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 01. measure: what "Measure it" runs, manyranks.small's collectives."""
    return Explorer(
        Knobs(),
        presets={
            "the same bytes": {"algorithm": "halving_doubling"},
            "6 ranks": {"algorithm": "halving_doubling", "n": 6},
            "1 MB, 64 ranks": {"algorithm": "recursive_doubling", "n": 64, "size": 2**20},
            "17 GB, 64 ranks": {"algorithm": "hierarchical", "n": 64, "size": 2**34},
            "a torus": {"topology": "TPU v5p torus", "n": 64},
        },
        measure=measure,
        operation=choice("operation", "all_reduce", list(ALGORITHMS)),
        algorithm=choice("algorithm", "ring", list(LOOKS)),
        n=value_slider("ranks N", 8, _RANKS),
        size=log_slider("tensor size", 2**30, 0, 36, show=units.size),
        topology=choice("topology", "H100 nodes of 8 (InfiniBand)", {name.partition(" (")[0]: name for name in TOPOLOGIES}),
        step=slider("round", 1, 1, 30),
    )


def _held(operation: str) -> str:
    arrived = "chunks received, by sender" if operation == "all_to_all" else "chunks that have arrived"
    return "ranks summed into each chunk" if operation in contents.ADDING else arrived


def _said(now: Setting) -> Said:
    where = f"{now.operation} by {now.algorithm}, {now.n:,} rank{'s' * (now.n != 1)}, {units.size(now.size)}"
    if now.n == 1:
        return Said(where, limit="none: one rank sends nothing")
    sent = sent_bytes(now.operation, now.size, 1, now.n, now.algorithm, node=now.node)
    seconds, latency, most = now.seconds(now.size), now.seconds(0), units.size(max(sent))
    numbers = {"each rank sends" if units.size(min(sent)) == most else "the busiest rank sends": most}
    if now.cluster.torus:
        numbers["torus"] = "×".join(str(side) for side in topology.cube(now.n) if side > 1)
    else:
        numbers["rounds"] = f"{now.steps:,}"
    numbers |= {"time": units.duration(seconds), "latency": f"{units.duration(latency)}, {latency / seconds:.0%}"}
    return Said(where, numbers, f"{'latency' if latency > seconds / 2 else 'bandwidth'}; {_fastest(now)}")


def _fastest(now: Setting) -> str:
    if len(now.times) == 1:
        return "there is no other algorithm here"
    seconds = {name: now._replace(algorithm=name).seconds(now.size) for name in now.times}
    best = min(seconds, key=seconds.get)
    if best == now.algorithm:
        return f"{best} is the fastest here"
    if seconds[now.algorithm] <= 1.01 * seconds[best]:
        return f"{now.algorithm} is within 1% of the fastest here"
    return f"the fastest here is {best}, {units.duration(seconds[best])}"
