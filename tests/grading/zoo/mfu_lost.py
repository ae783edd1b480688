"""Wrong answers to lost_time of 09_mfu."""

from tests.grading.zoo.mfu_right import RightLost
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "lost_time"
SOFTMAX = slice(1, 2)  # the case with sums of rows, which are needed
MEMORY, NEEDED, ALL = "that is the bytes' time", "a fused kernel writes what is needed afterwards", "everything is fused"
ORDER = "the numbers stand in another order"


@wrong(TASK, "that is how long an operator takes: lost is what is beyond")
class WholeTime(RightLost):
    def lost(self, one):
        return self.takes(one)


@wrong(TASK, MEMORY)
class BytesTime(RightLost):
    def lost(self, one):
        return self.moved(one) / self.bandwidth


@wrong(TASK, MEMORY)
class BytesTimeWhereLonger(RightLost):
    def lost(self, one):
        return self.takes(one) if self.takes(one) > one.flops / self.peak else 0.0


@wrong(TASK, "an operator takes the longer of both, not their sum")
class OneAfterTheOther(RightLost):
    def lost(self, one):
        return one.flops / self.peak + self.moved(one) / self.bandwidth


@wrong(TASK, "what an operator writes is missing")
class OnlyReads(RightLost):
    def lost(self, one):
        return max(0.0, sum(one.reads.values()) / self.bandwidth - one.flops / self.peak)


@wrong(TASK, "what an operator reads is missing")
class OnlyWrites(RightLost):
    def lost(self, one):
        return max(0.0, sum(one.writes.values()) / self.bandwidth - one.flops / self.peak)


@wrong(TASK, "nothing is lost where the FLOPs take longer")
class BelowZero(RightLost):
    def lost(self, one):
        return self.moved(one) / self.bandwidth - one.flops / self.peak


@wrong(TASK, "peak and bandwidth are swapped")
class Swapped(RightLost):
    def lost(self, one):
        return max(0.0, self.moved(one) / self.peak - one.flops / self.bandwidth)


@wrong(TASK, "operators without FLOPs lose time, too")
class OnlyProducts(RightLost):
    def lost(self, one):
        return super().lost(one) if one.flops else 0.0


@wrong(TASK, ORDER)
class MostFirst(RightLost):
    def form(self, lost, saved):
        return sorted(lost, reverse=True), saved


@wrong(TASK, ORDER)
class LastFirst(RightLost):
    def form(self, lost, saved):
        return lost[::-1], saved


@wrong(TASK, "for 13 operators")
class OnlyWhatIsLost(RightLost):
    def form(self, lost, saved):
        return [one for one in lost if one], saved


@wrong(TASK, "max(FLOPs ÷ peak, bytes ÷ bandwidth) − FLOPs ÷ peak")
class HalfOfIt(RightLost):
    def lost(self, one):
        return super().lost(one) / 2


@wrong(TASK, NEEDED)
class WritesItsLast(RightLost):
    def written(self, run, behind, made):
        return sum(run[-1].writes.values())


@wrong(TASK, "what operators behind the run read is written, too")
class WritesTheNeeded(RightLost):
    def written(self, run, behind, made):
        return super().written(run, [], made)


@wrong(TASK, "what is in `needed` is written, too")
class WritesForOthers(RightLost):
    def written(self, run, behind, made):
        return sum(size for name, size in made.items() if any(name in one.reads for one in behind))


@wrong(TASK, "what only the run itself reads is not written")
class WritesAll(RightLost):
    def written(self, run, behind, made):
        return sum(made.values())


@wrong(TASK, "what the run made itself is not read from memory")
class ReadsItsOwn(RightLost):
    def read(self, run, made):
        return sum({name: size for one in run for name, size in one.reads.items()}.values())


@wrong(TASK, "a tensor that several operators of the run read is read once")
class ReadsTwice(RightLost):
    def read(self, run, made):
        return sum(size for one in run for name, size in one.reads.items() if name not in made)


@wrong(TASK, "a fused kernel still reads what comes from outside")
class ReadsNothing(RightLost):
    def read(self, run, made):
        return 0


@wrong(TASK, "that is how long the fused kernels take")
class TimeOfTheFused(RightLost):
    def saved(self):
        return sum(self.after(*run) for run in self.runs()) / self.bandwidth


@wrong(TASK, "those are bytes: divide by the bandwidth")
class SavedBytes(RightLost):
    def saved(self):
        return super().saved() * self.bandwidth


@wrong(TASK, "that is all time of the runs")
class AllOfTheRuns(RightLost):
    def after(self, start, end):
        return 0


@wrong(TASK, ALL)
class OneKernel(RightLost):
    def ends(self, one):
        return False


@wrong(TASK, "of each run of neighbours without FLOPs")
class OnlyTheFirstRun(RightLost):
    def runs(self):
        return super().runs()[:1]


@wrong(TASK, "it returns a pair: a list with one number for each operator")
class OnlyTheSum(RightLost):
    def form(self, lost, saved):
        return sum(lost), saved


@wrong(TASK, "it returns a pair: a list with one number for each operator")
class OnlySaved(RightLost):
    def form(self, lost, saved):
        return saved


@wrong(TASK, "products lose time, too")
class ProductsLoseNothing(RightLost):
    def lost(self, one):
        return 0.0 if one.flops else super().lost(one)


@wrong(TASK, "what any operator behind the run reads is written")
class WritesForTheNext(RightLost):
    cases = SOFTMAX

    def written(self, run, behind, made):
        return super().written(run, behind[:1], made)


@wrong(TASK, "the run at the end is missing")
class NotTheLastRun(RightLost):
    def runs(self):
        return super().runs()[:-1]


@wrong(TASK, "a product ends a run")
class OneKernelForAllRuns(RightLost):
    cases = SOFTMAX

    def saved(self):
        operators, products = [[one for one in self.operators if bool(one.flops) == kind] for kind in (False, True)]
        made = {name: size for one in operators for name, size in one.writes.items()}
        moved = self.read(operators, made) + self.written(operators, products, made)
        return (sum(map(self.moved, operators)) - moved) / self.bandwidth
