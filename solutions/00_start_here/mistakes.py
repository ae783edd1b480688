"""Answers to 00_start_here: what is right, and the mistakes that are made."""

from statistics import mean

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

@right("shift")
class Shift:
    """Each rank that sends upwards sends first."""

    def __call__(self, x, by):
        rank, n = dist.get_rank(), dist.get_world_size()
        to, source = self.neighbors(rank, by, n)
        if self.stays(to, rank, by):
            return x.clone()
        y = torch.empty_like(x)
        steps = [lambda: dist.send(x, to), lambda: dist.recv(y, source)]
        for step in steps if self.sends_first(rank, to) else steps[::-1]:
            step()
        return y

    def neighbors(self, rank, by, n):
        return (rank + by) % n, (rank - by) % n

    def stays(self, to, rank, by):
        return to == rank

    def sends_first(self, rank, to):
        return rank < to

@also_right("shift")
def both_at_once(x, by):
    rank, n = dist.get_rank(), dist.get_world_size()
    if by % n == 0:
        return x.clone()
    y = torch.empty_like(x)
    for work in [dist.isend(x, (rank + by) % n), dist.irecv(y, (rank - by) % n)]:
        work.wait()
    return y

@also_right("shift")
def by_the_round_of_its_circle(x, by):
    rank, n = dist.get_rank(), dist.get_world_size()
    to, first, at = (rank + by) % n, True, rank
    if to == rank:
        return x.clone()
    while (at := (at + by) % n) != rank:
        first &= at > rank
    y = torch.empty_like(x)
    if not first:  # the lowest of each cycle sends first
        dist.recv(y)  # from whoever sends
    dist.send(x, to)
    if first:
        dist.recv(y)
    return y

CIRCLE = "every rank in a cycle sends first: some must receive first. With by = 2 on 4 ranks, 0 and 2 are a cycle"
BACK = "you returned the tensor from the rank `by` places ahead: send to (r + by) % N, receive from (r − by) % N"

slip("shift", "AllSendFirst", 0, CIRCLE, Shift, on=(2, 3, 4), sends_first=lambda self, rank, to: True)
slip("shift", "AllReceiveFirst", 0, "", Shift, says="every rank in a cycle receives first",
    sends_first=lambda self, rank, to: False)
slip("shift", "SendsToItself", 0, "with by = N or 0 a rank would send to itself: return a copy of x instead", Shift,
    on=(2, 3, 4), stays=lambda self, to, rank, by: False)
slip("shift", "Downwards", 0.5, BACK, Shift, neighbors=lambda self, rank, by, n: ((rank - by) % n, (rank + by) % n))
slip("shift", "ByOne", 0.5, "each rank sends to the next one, whatever `by` is: the next rank is (r + by) % N", Shift,
    neighbors=lambda self, rank, by, n: ((rank + 1) % n, (rank - 1) % n))

@mistake("shift", "that is the rank's own tensor: return what was received", points=1)
class ReturnsItsOwn(Shift):
    def __call__(self, x, by):
        super().__call__(x, by)
        return x.clone()

slip("shift", "AlwaysAhead", 0.5, "(r + by) % N is right for a negative `by`, too: use `by` as it is", Shift, on=(4,),
    neighbors=lambda self, rank, by, n: Shift.neighbors(self, rank, abs(by), n))
slip("shift", "LeavesTheModuloOut", 0, "", Shift, says="a rank is a number from 0 to N − 1",
    neighbors=lambda self, rank, by, n: (rank + by, rank - by))

@mistake("shift", "return a new tensor: receive into one, or return x.clone()", points=4.5)
class ReceivesIntoItsInput(Shift):
    def __call__(self, x, by):
        x.copy_(y := super().__call__(x, by))
        return y

@mistake("shift", "the tensor makes `by` hops of one rank: send it straight to rank (r + by) % N, once", points=3.5)
class StepByStep(Shift):
    def __call__(self, x, by):
        for _ in range(by % dist.get_world_size()):
            x = super().__call__(x, 1)
        return x.clone()

@right("culprits")
def three():
    return {"A": 2, "B": 1, "C": 3}

slip("culprits", "named_first", 2, "", lambda: {"A": 0, "B": 1, "C": 3}, says="isn't its neighbor")
slip("culprits", "majority", 1, "", lambda: {"A": 2, "B": 0, "C": 0}, says="the line about calls that diverge")
slip("culprits", "two_only", 0, "", lambda: {"A": 2, "B": 1}, says="culprits() has no 'C'")
slip("culprits", "the_form", 0, "", lambda: {"A": 0, "B": 0, "C": 0}, says="the rank of report A is 0\n")
slip("culprits", "a_list", 0, "", lambda: [2, 1, 3], says="returned")

class Fit:
    """The line through the smallest and the largest size."""

    def __call__(self, sizes, seconds):
        times = {n: self.of(each) for n, each in zip(sizes, seconds, strict=True)}
        n, m = min(sizes), max(sizes)
        return self.line(n, m, times[n], times[m])

    def of(self, each):
        return min(each)

    def line(self, n, m, t, u):
        beta = (m - n) / (u - t)
        return t - n / beta, beta

right("fit")(Fit)

NOISE = "noise only makes messages slower: of the five times take the smallest, not their "

@also_right("fit")
def by_least_squares(sizes, seconds):
    times = [min(each) for each in seconds]
    n, t = mean(sizes), mean(times)
    slope = sum((a - n) * (b - t) for a, b in zip(sizes, times, strict=True)) / sum((a - n) ** 2 for a in sizes)
    return t - slope * n, 1 / slope

slip("fit", "OfTheMean", 0, NOISE + "mean", Fit, of=lambda self, each: mean(each))
slip("fit", "TheOtherWayRound", 0, "these are β and α: α comes first", Fit,
    __call__=lambda self, sizes, seconds: Fit.__call__(self, sizes, seconds)[::-1])

@mistake("fit", "α is asked for in seconds and β in bytes per second, not in µs and GB/s")
class InOtherUnits(Fit):
    def line(self, n, m, t, u):
        alpha, beta = super().line(n, m, t, u)
        return alpha * 1e6, beta / 1e9

slip("fit", "TakesSizesAsSorted", 0,
    "these are the times of other sizes: sizes are not always in order, and seconds[i] belongs to sizes[i]", Fit,
    __call__=lambda self, sizes, seconds: self.line(min(sizes), max(sizes), min(seconds[0]), min(seconds[-1])))
slip("fit", "OfTheFirst", 0, "that is the time of the first of the five: take the smallest of them", Fit,
    of=lambda self, each: each[0])
slip("fit", "AlphaIsTheSmallest", 2, "α is not the time of the smallest message: that one also takes n/β", Fit,
    line=lambda self, n, m, t, u: (t, Fit.line(self, n, m, t, u)[1]))
slip("fit", "BetaOfTheLargest", 2, "β is not n/T(n) of the largest message: that time has α in it", Fit,
    line=lambda self, n, m, t, u: (Fit.line(self, n, m, t, u)[0], m / u))

@mistake("fit", "that is 1/β, seconds per byte: β is bytes per second", points=2)
class SecondsPerByte(Fit):
    def line(self, n, m, t, u):
        alpha, beta = super().line(n, m, t, u)
        return alpha, 1 / beta

@also_right("fit")
class FirstAndLast(Fit):
    """Any two sizes will do."""

    def __call__(self, sizes, seconds):
        return self.line(sizes[0], sizes[-1], min(seconds[0]), min(seconds[-1]))

slip("fit", "a_single_number", 0, "", lambda sizes, seconds: min(map(min, seconds)), says="returned", on=(1,))
