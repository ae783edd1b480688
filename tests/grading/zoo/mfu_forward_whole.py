"""Wrong answers to forward_flops of 09_mfu: the head, all parts alike, and what is no answer."""

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyranks.theory import flops
from tests.grading.zoo.mfu_right import RightForward
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "forward_flops"
EXPERTS = slice(1, 2)  # the case with experts
READY = "what is ready is no answer"
FORM = 'it returns a dict: {"attention": …'


@wrong(TASK, "logits are counted for all tokens")
class AllLogits(RightForward):
    cases = EXPERTS

    def rows(self):
        return self.tokens


@wrong(TASK, "the head is missing")
class NoHead(RightForward):
    def head(self):
        return 0


@wrong(TASK, "the head's rows are those of all sequences")
class HeadOfOneSequence(RightForward):
    def rows(self):
        return self.predicted


@wrong(TASK, "the head comes once, after all layers")
class HeadInEachLayer(RightForward):
    def rows(self):
        return self.batch * self.predicted * self.m.layers


@wrong(TASK, "a multiply-add is counted as one: it is two FLOPs")
class MultiplyAddsAreOne(RightForward):
    def form(self, found):
        return {name: flops // 2 for name, flops in found.items()}


@wrong(TASK, "backward is counted, too")
class WithBackward(RightForward):
    def form(self, found):
        return {name: 3 * flops for name, flops in found.items()}


@wrong(TASK, "that is one token's: there are batch · seq of them")
class OfOneToken(RightForward):
    def form(self, found):
        return {name: flops / self.tokens for name, flops in found.items()}


@wrong(TASK, "that is one layer's")
class OfOneLayer(RightForward):
    def form(self, found):
        return {name: flops / (1 if name == "head" else self.m.layers) for name, flops in found.items()}


@wrong(TASK, "each row times hidden × hidden, twice hidden × (kv_heads · hidden / heads)")
class SomethingElse(RightForward):
    def attention(self):
        return super().attention() + 17


@wrong(TASK, FORM)
class ATuple(RightForward):
    def form(self, found):
        return tuple(found.values())


@wrong(TASK, "has no 'router'")
class WithoutAName(RightForward):
    def form(self, found):
        return {name: flops for name, flops in found.items() if name != "router"}


@wrong(TASK, "head is a str")
class Words(RightForward):
    def form(self, found):
        return found | {"head": f"{found['head']:,}"}


@wrong(TASK, "the table above has the names of what you are given")
class AnotherName(RightForward):
    def chosen(self):
        return self.m.topk


@wrong(TASK, READY)
class FromTheory(RightForward):
    def head(self):
        flops.training(1, 1)
        return super().head()


@wrong(TASK, READY)
class FromTheCounter(RightForward):
    def head(self):
        with FlopCounterMode(display=False):
            nn.Linear(self.m.hidden, self.m.vocab)
        return super().head()


@wrong(TASK, f"the check calls {TASK}(m, batch, seq, predicted)")
class TooFewArguments:
    def __call__(self, m, batch, seq):
        return {}
