"""The virtual clock with sharing: transfers under way at the same time on one channel share its capacity equally.

Now the order of events matters, because a transfer that starts changes the ends of others. So the ranks run on until they are
held, as without sharing, and then the clock takes the next event of the network: a transfer joins its channels, or leaves.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field

from manyranks.timeline.clock import Clock
from manyranks.timeline.costs import Costs
from manyranks.timeline.program import Program
from manyranks.timeline.streams import Exchange

_LEAVE, _JOIN = 0, 1  # at one moment, what is over makes room first


@dataclass(slots=True, eq=False)
class _Channel:
    capacity: float
    flows: list["_Flow"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Flow:
    """An exchange whose latency is over: `left` bytes are still to go at the time `since`, at `rate` bytes/s."""

    exchange: Exchange
    channels: list[_Channel]
    left: float
    since: float = 0.0
    rate: float = 0.0
    leaving: int = -1  # the number of the event that will end it; older ones no longer hold


class SharedClock(Clock):
    """A Clock on which a transfer's rate is, of all its channels, the least of capacity / transfers that are on the channel."""

    sharing = True

    def __init__(self, program: Program, costs: Costs) -> None:
        super().__init__(program, costs)
        self.channels: dict[Hashable, _Channel] = {}
        self.events: list[tuple[float, int, int, _Flow]] = []  # a heap: when, what, number, whom
        self.numbers = 0

    def run(self) -> None:
        super().run()
        while self.events:
            now, what, number, flow = heapq.heappop(self.events)
            if what == _JOIN:
                self._join_channels(flow, now)
            elif flow.leaving == number:
                self._leave_channels(flow, now)
            super().run()

    def _start(self, exchange: Exchange) -> bool:
        seconds, transfer = exchange.price
        flow = _Flow(exchange, [self._channel(*channel) for channel in transfer.channels], transfer.amount)
        if seconds > transfer.latency:
            self._plan(exchange.ready + transfer.latency, _JOIN, flow)
        else:  # nothing to transfer, or on channels without limit
            flow.channels = []
            flow.leaving = self._plan(exchange.ready + seconds, _LEAVE, flow)
        return False

    def _channel(self, key: Hashable, capacity: float) -> _Channel:
        channel = self.channels.setdefault(key, _Channel(capacity))
        if channel.capacity != capacity:
            raise ValueError(f"channel {key!r} has {channel.capacity} bytes/s for one transfer and {capacity} for another")
        return channel

    def _plan(self, when: float, what: int, flow: _Flow) -> int:
        self.numbers += 1
        heapq.heappush(self.events, (when, what, self.numbers, flow))
        return self.numbers

    def _join_channels(self, flow: _Flow, now: float) -> None:
        for channel in flow.channels:
            channel.flows.append(flow)
        self._divide(flow.channels, now)

    def _leave_channels(self, flow: _Flow, now: float) -> None:
        for channel in flow.channels:
            channel.flows.remove(flow)
        self._divide(flow.channels, now)
        self._finish(flow.exchange, now)
        self._start_next(flow.exchange.lane.stream)

    def _divide(self, channels: list[_Channel], now: float) -> None:
        """Gives every transfer on these channels its rate from now on, and plans its end anew if the rate has changed."""
        for flow in dict.fromkeys(flow for channel in channels for flow in channel.flows):
            rate = min(channel.capacity / len(channel.flows) for channel in flow.channels)
            if rate == flow.rate:
                continue
            undisturbed = not flow.rate and rate == min(channel.capacity for channel in flow.channels)
            flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
            flow.since, flow.rate = now, rate
            # alone from the start, it ends to the bit when it does without sharing
            end = flow.exchange.ready + flow.exchange.price.seconds if undisturbed else now + flow.left / rate
            flow.leaving = self._plan(end, _LEAVE, flow)
