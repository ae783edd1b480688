"""The way out an explorer suggests: another value for one control that makes a step faster, or makes it fit in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from manyranks.show.scenario import Scenario

BETTER = 0.97  # of the cost: what takes no more of it helps
MUCH = 0.1  # of the time: what takes more of it limits


class Setting:
    """Holds what the controls say, as a tuple with names, and the scenario that they make.

    possible: whether the model allows it; fits: in memory; cost: what to minimize, the seconds of a step unless a
    chapter has its own.
    """

    scenario: Scenario

    @property
    def possible(self) -> bool:
        try:
            return self.scenario is not None
        except ValueError:
            return False

    @property
    def fits(self) -> bool:
        return self.scenario.fits

    @property
    def cost(self) -> float:
        return self.scenario.time.seconds


S = TypeVar("S", bound=Setting)


class Limits(NamedTuple):
    """The ways out of a chapter's settings.

    choices: control -> its values; remedies: what limits -> the controls that may help; room: the controls that may make room,
    those to be tried first first; said: control -> how its value is written, such as "TP {}"
    """

    choices: Mapping[str, Sequence]
    remedies: Mapping[str, Sequence[str]]
    room: Sequence[str] = ()
    said: Mapping[str, str] = {}

    def others(self, now: S, name: str) -> Iterator[S]:
        """The other values of this control that can be."""
        each = (now._replace(**{name: value}) for value in self.choices[name] if value != getattr(now, name))
        return (other for other in each if other.possible)

    def faster(self, now: S, limit: str) -> S | None:
        """Another value of one control that costs less, and fits if this does; None where none is worth it."""
        others = (each for name in self.remedies.get(limit, ()) for each in self.others(now, name) if each.fits or not now.fits)
        best = min(others, key=lambda each: each.cost, default=now)
        return best if best.cost <= BETTER * now.cost else None

    def fitting(self, now: S) -> S | None:
        """Another value of one control that fits in memory: of the first control that has some, the nearest."""
        for name in self.room:
            values = list(self.choices[name])
            at, near = getattr(now, name), [other for other in self.others(now, name) if other.fits]
            if near:
                here = values.index(at) if at in values else 0
                return min(near, key=lambda other: (abs(values.index(getattr(other, name)) - here), other.cost))
        return None

    def memory(self, now: S, else_helps: str) -> str:
        """What is said where memory limits: a change that fits, or what helps where there is none."""
        other = self.fitting(now)
        return f"memory; {self.change(now, other)} fits" if other else f"memory; {else_helps}"

    def takes(self, now: S, limit: str, unit: Callable[[float], str]) -> str:
        """What is said after another limit: "; with TP 4: 8 s", or nothing where no change is worth it."""
        other = self.faster(now, limit)
        return f"; with {self.change(now, other)}: {unit(other.cost)}" if other else ""

    def change(self, now: S, other: S) -> str:
        """Names the value that changed: "TP 4"."""
        name = next(name for name in self.choices if getattr(now, name) != getattr(other, name))
        return self.said.get(name, "{}").format(getattr(other, name))
