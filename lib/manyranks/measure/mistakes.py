"""Known mistakes: what each of them changes in the facts of a run, and which of them explains what was seen.

A case is "3/0", the first one on 3 ranks; after the slash it is the same case on however many ranks. Facts have the names of
what a judge sees: "2 calls" is what judge 2 sees of a rank's calls.
"""

from collections.abc import Iterable
from typing import NamedTuple

from manyranks.measure.fingerprints import Fact, same

Facts = dict[str, list[dict[str, Fact]]]  # case -> by rank, name -> what is seen


class Mistake(NamedTuple):
    """A mistake.

    name: of the answer
    hint: what to tell who makes it
    changed: what judges see instead
    troubles: case -> how its run ends
    """

    name: str
    hint: str
    changed: Facts
    troubles: dict[str, str]

    def fits(self, seen: Facts, prefix: str = "") -> bool:
        """Returns whether all that the mistake changes is seen so.

        prefix: of the names that count
        """
        there = False
        for case, ranks in self.changed.items():
            facts = [{name: value for name, value in rank.items() if name.startswith(prefix)} for rank in ranks]
            if not any(facts) or case not in seen:  # the run broke off before: it counts as far as it came
                continue
            there = True
            pairs = zip(facts, seen[case], strict=True)
            if not all(same(got.get(name), value) for theirs, got in pairs for name, value in theirs.items()):
                return False
        return there

    def changes(self, case: str, prefix: str) -> bool:
        """Returns whether it changes something in this case, on however many ranks.

        prefix: of the names that count
        """
        here = [ranks for key, ranks in self.changed.items() if _alike(key, case)]
        return any(name.startswith(prefix) for ranks in here for facts in ranks for name in facts)

    def denied(self, seen: Facts, right: Facts) -> bool:
        """Returns whether something that the mistake changes is as it must be."""
        ranks = [(case, r, facts) for case, each in self.changed.items() if case in seen for r, facts in enumerate(each)]
        return any(same(seen[case][r].get(name), right[case][r].get(name)) for case, r, facts in ranks for name in facts)


def _alike(one: str, other: str) -> bool:
    return one.partition("/")[2] == other.partition("/")[2]


def changed(got: dict[str, Fact], right: dict[str, Fact]) -> dict[str, Fact]:
    """Returns a rank's facts that are not as they must be; None for a fact that is missing."""
    return {name: got.get(name) for name in {**right, **got} if name not in right or not same(got.get(name), right[name])}


def explained(known: Iterable[Mistake], seen: Facts, right: Facts, judge: int, case: str) -> tuple[str, str]:
    """The sentence of the mistake that explains what this judge saw, and of one that explains only that.

    A mistake explains what was seen where all that it changes is changed in the same way, and something in this case.
    The second one also changes other things, which are wrong in another way, or nothing in this case. Where several
    fit, one that explains all that is wrong goes first.
    """
    prefix = f"{judge} "
    wrong = {name for key in seen for got, must in zip(seen[key], right[key], strict=True) for name in changed(got, must)}
    mine = {name for name in wrong if name.startswith(prefix)}
    fitting = [one for one in known if one.hint and one.fits(seen, prefix)]

    def worth(one: Mistake) -> tuple[bool, bool, bool]:
        names = {name for ranks in one.changed.values() for facts in ranks for name in facts}
        return mine <= names, wrong <= names, case in one.changed

    whole = [one for one in fitting if one.fits(seen) and one.changes(case, prefix)]
    partly = [one for one in fitting if not one.denied(seen, right)]
    return tuple(max(some, key=worth).hint if some else "" for some in (whole, partly))


def ending_so(known: Iterable[Mistake], end: str, case: str) -> str:
    """The sentence of the mistake whose run ends so, in this case if there are several; "" where there is none."""
    fitting = [one for one in known if one.hint and end in one.troubles.values()]

    def here(one: Mistake) -> bool:
        return any(how == end and _alike(key, case) for key, how in one.troubles.items())

    return max(fitting, key=here).hint if fitting else ""
