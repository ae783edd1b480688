"""The virtual clock: each rank runs through its instructions with its own time, and waits where it must.

No order of events is kept here: when an exchange ends depends only on the ranks that take part and on the exchange before it.
So a rank runs on until it needs an end that is not known yet, and again when it is. This is what makes replay fast.
"""

from collections.abc import Callable, Hashable
from operator import length_hint

from manyranks.timeline.costs import Costs, Transfer, check_transfer, is_size
from manyranks.timeline.program import Collective, Compute, Program, Recv, Send, Wait, at
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span
from manyranks.timeline.streams import Exchange, Group, Host, Lane, Memo, Messages, Pair, Price, Stream

_new = tuple.__new__  # Span(...) takes half as long again


class Clock:
    """Runs a program once; then it has its Timeline's `spans`, and `held` says which rank waits for what.

    Here each exchange takes the time that it takes alone. Raises ValueError that shows the instruction for a bad one.
    """

    sharing = False

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.spans: list[Span] = []
        self.left = [iter(instructions) for instructions in program.ranks]  # what each rank has not begun
        self.runnable: list[Host] = [self._host(rank) for rank in range(len(program.ranks))]
        self.held: dict[int, tuple[Lane, int]] = {}  # rank -> the lane, and the number of the exchange
        self.pairs: dict[tuple[int, int], Pair] = Memo(lambda pair: self._pair(*pair))
        self.groups: dict[tuple[int, ...], Group] = Memo(self._group)

    def run(self) -> None:
        """Lets every rank run until it has ended or is held by what never comes."""
        runnable = self.runnable
        while runnable:
            host = runnable.pop()
            stream = next(host, None)
            if stream is not None:
                stream.waiting.append(host)

    def at(self, rank: int) -> str:
        """The instruction at which the rank stands."""
        number = len(self.program.ranks[rank]) - length_hint(self.left[rank]) - 1
        return at(rank, number, self.program.ranks[rank][number])

    def _host(self, rank: int) -> Host:
        try:
            yield from self._instructions(rank)
        except ValueError as error:
            raise ValueError(f"{self.at(rank)}: {error}") from error
        self.held.pop(rank, None)

    def _instructions(self, rank: int) -> Host:
        """Goes through the rank's instructions; yields a stream when the rank needs an end on it that is not known yet."""
        spans = self.spans
        seconds: dict[Hashable, float] = Memo(lambda work: self._seconds(rank, work))
        outgoing: dict[int, Pair] = Memo(lambda to: self.pairs[rank, to])
        incoming: dict[int, Pair] = Memo(lambda source: self.pairs[source, rank])
        issued: dict[Hashable, tuple[Lane, int]] = {}  # by handle
        now = 0.0  # the rank's time
        for instruction in self.left[rank]:
            kind = type(instruction)
            if kind is Compute:
                name, work = instruction
                end = now + seconds[work]
                if end > now:
                    spans.append(_new(Span, (rank, COMPUTE, name, now, end)))
                    now = end
                continue
            if kind is Send:
                to, size, tag, handle, rendezvous = instruction
                stream = outgoing[to]
                lane, price = stream.lanes[tag], stream.prices[size]
                k = len(lane.sent)
                lane.sent.append(size)
                if rendezvous or stream.queue or self.sharing:
                    self._queue(lane, k, price, now, rendezvous)
                else:
                    self._deliver(stream, lane, price.seconds, now)
            elif kind is Recv:
                source, size, tag, handle = instruction
                stream = incoming[source]
                lane = stream.lanes[tag]
                k = len(lane.received)
                lane.received.append(size)
                if k >= len(lane.sent):
                    stream.posted[tag, k] = now
                elif stream.unmet and (tag, k) in stream.unmet:
                    self._arrive(stream.unmet.pop((tag, k)), rank, now)
            elif kind is Wait:
                lane, k = _waited_for(instruction, issued)
                handle = None
            else:
                lane, k = self._join(rank, instruction, now)
                handle = instruction.handle
            if handle is not None:
                issued[handle] = lane, k
                continue
            while k >= len(lane.ends):
                self.held[rank] = lane, k
                yield lane.stream
            now = max(now, lane.ends[k])

    def _deliver(self, stream: Pair, lane: Messages, seconds: float, started: float) -> None:
        """A message that depends on nothing but its sender and its stream: its end is known at once."""
        started = max(started, stream.free)
        end = started + seconds
        if end > started:
            source, to = stream.source, stream.to
            self.spans.append(_new(Span, (source, COMMUNICATION, stream.names[source], started, end)))
            self.spans.append(_new(Span, (to, COMMUNICATION, stream.names[to], started, end)))
        self._ended(lane, end)

    def _ended(self, lane: Lane, end: float) -> None:
        stream = lane.stream
        stream.free = end
        lane.ends.append(end)
        if stream.waiting:
            self.runnable += stream.waiting
            stream.waiting.clear()

    def _queue(self, lane: Messages, k: int, price: Price, now: float, rendezvous: bool) -> None:
        """A message that must wait for its Recv, for one before it, or for others on its channels."""
        stream = lane.stream
        exchange = Exchange(lane, price, stream.names, {stream.source, stream.to} if rendezvous else {stream.source})
        stream.queue.append(exchange)
        self._arrive(exchange, stream.source, now)
        if rendezvous and (lane.tag, k) in stream.posted:
            self._arrive(exchange, stream.to, stream.posted.pop((lane.tag, k)))
        elif rendezvous:
            stream.unmet[lane.tag, k] = exchange

    def _join(self, rank: int, instruction: Collective, now: float) -> tuple[Lane, int]:
        if type(instruction) is not Collective:
            raise ValueError("must be a Compute, Send, Recv, Collective or Wait")
        op, size, group, _, name = instruction
        stream = self.groups[tuple(group)]
        if rank not in stream.joined:
            raise ValueError(f"rank {rank} must be in the group")
        k = stream.joined[rank]
        stream.joined[rank] += 1
        if k == len(stream.issued):
            exchange = Exchange(stream.lane, stream.prices[op, size], dict.fromkeys(group, op), set(group), instruction)
            stream.issued.append(exchange)
            stream.queue.append(exchange)
        exchange = stream.issued[k]
        if exchange.instruction[:2] != instruction[:2]:
            raise ValueError(f"meets another rank's {exchange.instruction}; op and bytes must be the same on all ranks")
        exchange.names[rank] = name or op
        self._arrive(exchange, rank, now)
        return stream.lane, k

    def _arrive(self, exchange: Exchange, rank: int, now: float) -> None:
        """A rank has come to the exchange. If it is the last, and the stream is free, the exchange starts."""
        exchange.absent.discard(rank)
        exchange.ready = max(exchange.ready, now)
        if not exchange.absent and exchange.lane.stream.queue[0] is exchange:
            self._start_next(exchange.lane.stream)

    def _start_next(self, stream: Stream) -> None:
        """Starts the first exchange of the queue, if all have come to it."""
        while stream.queue and not stream.queue[0].absent:
            exchange = stream.queue[0]
            exchange.ready = max(exchange.ready, stream.free)
            if not self._start(exchange):
                return

    def _start(self, exchange: Exchange) -> bool:
        """Starts an exchange at the time it is ready. Returns whether it is over, so that the next one may start."""
        self._finish(exchange, exchange.ready + exchange.price.seconds)
        return True

    def _finish(self, exchange: Exchange, end: float) -> None:
        if end > (started := exchange.ready):
            self.spans += (Span(rank, COMMUNICATION, name, started, end) for rank, name in exchange.names.items())
        exchange.lane.stream.queue.popleft()
        self._ended(exchange.lane, end)

    def _seconds(self, rank: int, work: Hashable) -> float:
        seconds = self.costs.compute(rank, work)
        if not is_size(seconds):
            raise ValueError(f"its cost of {seconds!r} s must be finite and not negative")
        return seconds

    def _pair(self, source: int, to: int) -> Pair:
        n = len(self.program.ranks)
        if source == to or not (source in range(n) and to in range(n)):
            raise ValueError(f"the peer must be another rank, from 0 to {n - 1}")
        prices = Memo(lambda size: _price(size, self.costs.message, source, to, size))
        return Pair({source: f"send → {to}", to: f"recv ← {source}"}, prices, source=source, to=to)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        n = len(self.program.ranks)
        if len(set(ranks)) < len(ranks) or not all(rank in range(n) for rank in ranks):
            raise ValueError(f"the group must be different ranks, from 0 to {n - 1}")
        prices = Memo(lambda what: _price(what[1], self.costs.collective, *what, ranks))
        return Group({}, prices, joined=dict.fromkeys(ranks, 0))


def _price(size: float, ask: Callable[..., Transfer], *question) -> Price:
    if not is_size(size):
        raise ValueError("bytes must be finite and not negative")
    transfer = ask(*question)
    check_transfer(transfer)
    return Price(transfer.seconds, transfer)


def _waited_for(wait: Wait, issued: dict[Hashable, tuple[Lane, int]]) -> tuple[Lane, int]:
    if wait.handle not in issued:
        raise ValueError(f"no instruction before it has this handle; there are {', '.join(map(repr, issued)) or 'none'}")
    return issued[wait.handle]
