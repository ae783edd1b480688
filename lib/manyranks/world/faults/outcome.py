"""The outcome of a run: what each rank replied, and what those did that did not."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from manyranks.world.rank import watch


@dataclass
class Outcome:
    """The outcome of a run: the ranks' replies with the frames of their results, those that died, and what the others did."""

    ranks: tuple[int, ...]
    replies: dict[int, tuple] = field(default_factory=dict)  # rank -> (Reply, frames)
    deaths: dict[int, int] = field(default_factory=dict)  # rank -> exit code
    debugged: set[int] = field(default_factory=set)  # ranks whose debugger waits for a line
    stopped: set[int] = field(default_factory=set)  # ranks that still ran when the run was given up
    deadlock: bool = False
    late: bool = False
    whereabouts: dict[int, watch.Whereabouts | None] = field(default_factory=dict)  # of the ranks that did not reply
    faults: dict[int, str] = field(default_factory=dict)  # faulthandler's lines of those that did not even say where

    @property
    def missing(self) -> list[int]:
        """Ranks that have neither replied nor died."""
        return [rank for rank in self.ranks if rank not in self.replies and rank not in self.deaths]

    @property
    def failed(self) -> list[int]:
        """Ranks that raised, the first one first."""
        failures = {rank: reply.failure for rank, (reply, _) in self.replies.items() if reply.failure}
        return sorted(failures, key=lambda rank: failures[rank].when)

    @property
    def agrees(self) -> bool:
        """Whether groups are as good as new: all of their ranks issued every collective, and every message was received."""
        replies = {rank: reply for rank, (reply, _) in self.replies.items()}
        if self.missing or self.deaths or any(reply.broken for reply in replies.values()):
            return False
        collectives: dict[str, set[int]] = defaultdict(set)
        unreceived: Counter = Counter()
        for rank, reply in replies.items():
            for group in reply.members:
                collectives[group].add(reply.counts.get(group, 0))
            for key, count in reply.counts.items():
                if isinstance(key, tuple):
                    group, op, peer, _ = key
                    unreceived[group, peer if op == "send" else rank] += count if op == "send" else -count
        for group, ranks in {group: ranks for reply in replies.values() for group, ranks in reply.members.items()}.items():
            if any(rank in replies and group not in replies[rank].members for rank in ranks):
                collectives[group].add(0)  # of a member that did not meet it in this run
        return all(len(counts) == 1 for counts in collectives.values()) and not any(unreceived.values())
