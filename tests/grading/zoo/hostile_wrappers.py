"""What a learner's wrapper may do to a check. Ranks import this file, so it imports little."""

import os

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import Right


def gives_nothing(module, first_bytes, cap_bytes):
    pass


def gives_itself(module, first_bytes, cap_bytes):
    return gives_itself


class IsNoModule:
    """Which is as good as one."""

    def __init__(self, module, first_bytes, cap_bytes):
        self.right = Right(module, first_bytes, cap_bytes)

    def __call__(self, *args):
        return self.right(*args)

    def finish(self):
        self.right.finish()


class HasOtherNames(Right):
    def __init__(self, model, smallest, largest):
        super().__init__(model, smallest, largest)


class RebindsGradients(Right):
    """They become views of the rows."""

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            for parameter, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)


class LooksForNone(Right):
    """As the chapter's first wrapper does, instead of counting."""

    def arrived(self, parameter):
        while (k := len(self.underway)) < len(self.buckets) and all(p.grad is not None for p in self.buckets[k]):
            self.send(k)


class HasRowsForGood(Right):
    def start(self, module):
        super().start(module)
        self.rows = {}

    def row(self, k):
        row = super().row(k)
        return self.rows.setdefault(k, torch.empty_like(row)).copy_(row)


class ForgetsSuper(torch.nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        self.module = module


class TakesMemory(Right):
    def start(self, module):
        super().start(module)
        self.spare = [torch.empty(300_000_000)]


class Prints(Right):
    def start(self, module):
        print("x" * 100_000)

    def arrived(self, parameter):
        print("arrived")
        super().arrived(parameter)


class Forks(Right):
    def start(self, module):
        if os.fork() == 0:
            os._exit(0)


class ForksAndGoesOn(Right):
    def start(self, module):
        os.fork()


class Exits(Right):
    def start(self, module):
        raise SystemExit(0)


class LoopsInFinish(Right):
    def finish(self):
        while len(self.underway) < len(self.buckets):
            pass


class WaitsForItsOwn(Right):
    """One rank waits for an all-reduce that no other starts."""

    def finish(self):
        super().finish()
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))


class LeavesBackward(Right):
    def arrived(self, parameter):
        raise StopIteration


class RemovesALayer(Right):
    def start(self, module):
        super().start(module)
        module.detour = torch.nn.Identity()


class MakesSparseGradients(Right):
    def collect(self):
        super().collect()
        for parameter in self.bucket_of:
            parameter.grad = parameter.grad.to_sparse()


class SaysThatWeightsAreRight(Right):
    """It changes the check in its rank, and sends nothing."""

    def __init__(self, module, first_bytes, cap_bytes):
        torch.nn.Module.__init__(self)
        self.module, self.cheated = module, False

    def forward(self, *inputs):
        if not self.cheated:
            self.cheat()
            self.cheated = True
        return self.module(*inputs)

    def cheat(self):
        from manyranks.grade.old.data_parallel import toy, wrapper

        right = wrapper.overlap_cases(dist.get_world_size())[0].expected[0]
        toy.weights = lambda model: right
        torch.equal = lambda *_: True

    def finish(self):
        pass


class SaysThatItHasSent(SaysThatWeightsAreRight):
    """It forges what the check notes, too."""

    def cheat(self):
        from manyranks.grade.old.data_parallel import buckets, toy
        from manyranks.grade.old.scripts import Seen
        from manyranks.grade.watch import Event

        super().cheat()
        sent = [Event("call", "broadcast", toy.Toy.bytes())]
        sent += [Event("call", "all_reduce", size) for size in buckets.sizes() * 4]
        Seen.__new__.__defaults__ = ()
        from manyranks.grade.old import scripts

        scripts.Seen = lambda tensors, events, held, peak: Seen(tensors, sent, held, peak)


class AsksTheCheck(SaysThatWeightsAreRight):
    """At once, when it is made."""

    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__(module, first_bytes, cap_bytes)
        self.cheat()


class SkipsTheJournal(Right):
    """It sends what it likes where the check does not look."""

    def __init__(self, module, first_bytes, cap_bytes):
        from manyranks.grade.watch import Watch

        super().__init__(module, first_bytes, cap_bytes)
        Watch._note = lambda *_: None


class SendsAWord(SaysThatWeightsAreRight):
    """In place of what the check notes."""

    def cheat(self):
        from manyranks.grade.old import scripts

        super().cheat()
        scripts.Seen = lambda *_: "all right"


class SendsPartsOfAnotherKind(SaysThatWeightsAreRight):
    def cheat(self):
        from manyranks.grade.old import scripts

        super().cheat()
        scripts._plain = lambda tensor: 7
