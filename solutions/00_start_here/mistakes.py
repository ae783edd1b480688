"""Answers to 00_start_here: what is right, and the mistakes that are made."""

from statistics import mean, median

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right


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
    to, source, first, at = (rank + by) % n, (rank - by) % n, True, rank
    if to == rank:
        return x.clone()
    while (at := (at + by) % n) != rank:
        first &= at > rank
    y = torch.empty_like(x)
    if not first:  # the lowest of each cycle sends first
        dist.recv(y, source)
    dist.send(x, to)
    if first:
        dist.recv(y, source)
    return y


CIRCLE = "every rank in a cycle sends first: some must receive first. With by = 2 on 4 ranks, 0 and 2 are a cycle"
BACK = "you returned the tensor from the rank `by` places ahead: send to (r + by) % N, receive from (r − by) % N"


@mistake("shift", CIRCLE, on=(2, 3, 4))
class AllSendFirst(Shift):
    def sends_first(self, rank, to):
        return True


@mistake("shift", says="every rank in a cycle receives first")
class AllReceiveFirst(Shift):
    def sends_first(self, rank, to):
        return False


@mistake("shift", CIRCLE, on=(4,))
class EvenSendFirst(Shift):
    def sends_first(self, rank, to):
        return rank % 2 == 0


@mistake("shift", "with by = N or 0 a rank would send to itself: return a copy of x instead", on=(2, 3, 4))
class SendsToItself(Shift):
    def stays(self, to, rank, by):
        return False


@mistake("shift", BACK, points=0.5)
class Downwards(Shift):
    def neighbors(self, rank, by, n):
        return (rank - by) % n, (rank + by) % n


@mistake("shift", "each rank sends to the next one, whatever `by` is: the next rank is (r + by) % N", points=0.5)
class ByOne(Shift):
    def neighbors(self, rank, by, n):
        return (rank + 1) % n, (rank - 1) % n


@mistake("shift", "that is the rank's own tensor: return what was received", points=1)
class ReturnsItsOwn(Shift):
    def __call__(self, x, by):
        super().__call__(x, by)
        return x.clone()


@mistake("shift", "(r + by) % N is right for a negative `by`, too: use `by` as it is", on=(4,), points=0.5)
class AlwaysAhead(Shift):
    def neighbors(self, rank, by, n):
        return super().neighbors(rank, abs(by), n)


@mistake("shift", says="rank 2 receives from rank 0; right is rank 1: rank r sends to (r + by) % N and receives from")
class ReceivesFromWhereItSends(Shift):
    def neighbors(self, rank, by, n):
        return (rank + by) % n, (rank + by) % n


@mistake("shift", says="a rank is a number from 0 to N − 1")
class LeavesTheModuloOut(Shift):
    def neighbors(self, rank, by, n):
        return rank + by, rank - by


@mistake("shift", "receive into a new tensor: torch.empty_like(x)", points=4.5)
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


@mistake("culprits", says="isn't its neighbor", points=2)
def named_first():
    return {"A": 0, "B": 1, "C": 3}


@mistake("culprits", says="the line about calls that diverge", points=1)
def majority():
    return {"A": 2, "B": 0, "C": 0}


@mistake("culprits", says="culprits() has no 'C'")
def two_only():
    return {"A": 2, "B": 1}


@mistake("culprits", says="the rank of report A is 0\n", points=0)
def the_form():
    return {"A": 0, "B": 0, "C": 0}


@mistake("culprits", says="returned")
def a_list():
    return [2, 1, 3]


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


@mistake("fit", NOISE + "mean")
class OfTheMean(Fit):
    def of(self, each):
        return mean(each)


@mistake("fit", NOISE + "median")
class OfTheMedian(Fit):
    def of(self, each):
        return median(each)


@mistake("fit", NOISE + "largest")
class OfTheSlowest(Fit):
    def of(self, each):
        return max(each)


@mistake("fit", "these are β and α: α comes first")
class TheOtherWayRound(Fit):
    def __call__(self, sizes, seconds):
        return super().__call__(sizes, seconds)[::-1]


@mistake("fit", "α is asked for in seconds and β in bytes per second, not in µs and GB/s")
class InOtherUnits(Fit):
    def line(self, n, m, t, u):
        alpha, beta = super().line(n, m, t, u)
        return alpha * 1e6, beta / 1e9


@mistake("fit", "these are the times of other sizes: sizes are not always in order, and seconds[i] belongs to sizes[i]")
class TakesSizesAsSorted(Fit):
    def __call__(self, sizes, seconds):
        return self.line(min(sizes), max(sizes), min(seconds[0]), min(seconds[-1]))


@mistake("fit", "that is the time of the first of the five: take the smallest of them")
class OfTheFirst(Fit):
    def of(self, each):
        return each[0]


@mistake("fit", "α is not the time of the smallest message: that one also takes n/β", points=2)
class AlphaIsTheSmallest(Fit):
    def line(self, n, m, t, u):
        return t, super().line(n, m, t, u)[1]


@mistake("fit", "β is not n/T(n) of the largest message: that time has α in it", points=2)
class BetaOfTheLargest(Fit):
    def line(self, n, m, t, u):
        return super().line(n, m, t, u)[0], m / u


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


@mistake("fit", says="returned", on=(1,))
def a_single_number(sizes, seconds):
    return min(map(min, seconds))
