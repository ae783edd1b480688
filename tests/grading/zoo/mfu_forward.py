"""Wrong answers to forward_flops of 09_mfu: one part of the model."""

from tests.grading.zoo.mfu_right import RightForward
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "forward_flops"
EXPERTS = slice(1, 2)  # the case with experts


@wrong(TASK, "the embedding is counted as a matrix product")
class EmbeddingIsAProduct(RightForward):
    def rows(self):
        return self.batch * (self.predicted + self.seq)


@wrong(TASK, "the embedding is counted as a matrix product")
class EmbeddingAsLargeAsTheHead(RightForward):
    cases = EXPERTS

    def rows(self):
        return 2 * self.batch * self.predicted


@wrong(TASK, "keys and values are counted as if all heads had their own")
class AllHeadsHaveKeys(RightForward):
    def kv(self):
        return self.m.hidden


@wrong(TASK, "keys and values are counted as wide as one head")
class OneHeadOfKeys(RightForward):
    def kv(self):
        return self.m.hidden // self.m.heads


@wrong(TASK, "keys and values are counted as wide as one head, or with kv_heads numbers")
class KeysWithoutTheirSize(RightForward):
    def kv(self):
        return self.m.kv_heads


@wrong(TASK, "the output projection is missing")
class NoOutput(RightForward):
    def attention(self):
        return 2 * self.tokens * self.m.layers * self.m.hidden * (self.m.hidden + 2 * self.kv())


@wrong(TASK, "the output's product is as wide as the query's")
class OutputOfGroups(RightForward):
    def attention(self):
        return 2 * self.tokens * self.m.layers * self.m.hidden * (self.m.hidden + 3 * self.kv())


@wrong(TASK, "the attention scores are missing")
class NoScores(RightForward):
    def scores(self):
        return 0


@wrong(TASK, "that is half of it: either one of the two products is missing")
class CausalScores(RightForward):
    def scores(self):
        return super().scores() // 2


@wrong(TASK, "that is half of it: either one of the two products is missing")
class ScoresOfTheTriangle(RightForward):
    def scores(self):
        return 2 * self.batch * self.seq * (self.seq + 1) * self.m.hidden * self.m.layers


@wrong(TASK, "scores are counted for the key/value heads only")
class ScoresOfGroups(RightForward):
    def scores(self):
        return super().scores() * self.m.kv_heads // self.m.heads


@wrong(TASK, "each head's product is hidden / heads deep")
class HeadsAsWideAsAll(RightForward):
    def scores(self):
        return super().scores() * self.m.heads


@wrong(TASK, "each token looks at seq tokens")
class ScoresOfOneRow(RightForward):
    def scores(self):
        return super().scores() // self.seq


@wrong(TASK, "tokens look at those of their own sequence only")
class ScoresAcrossTheBatch(RightForward):
    def scores(self):
        return super().scores() * self.batch


@wrong(TASK, "the gate is missing")
class NoGate(RightForward):
    def matrices(self):
        return 2


@wrong(TASK, "a gate is counted where there is none")
class AlwaysAGate(RightForward):
    cases = slice(2, 3)

    def matrices(self):
        return 3


@wrong(TASK, "all experts are counted: a token's row goes to top_k of them")
class AllExperts(RightForward):
    cases = EXPERTS

    def chosen(self):
        return self.m.experts + self.m.shared_experts


@wrong(TASK, "all experts are counted: a token's row goes to top_k of them")
class AllRoutedExperts(RightForward):
    cases = EXPERTS

    def chosen(self):
        return self.m.experts


@wrong(TASK, "one expert is counted")
class OneExpert(RightForward):
    cases = EXPERTS

    def chosen(self):
        return 1 + self.m.shared_experts


@wrong(TASK, "the shared experts are missing")
class NoSharedExperts(RightForward):
    cases = EXPERTS

    def chosen(self):
        return self.m.top_k


@wrong(TASK, "each token goes to the shared experts besides its top_k")
class SharedOnceAChoice(RightForward):
    cases = EXPERTS

    def chosen(self):
        return self.m.top_k * (1 + self.m.shared_experts)


@wrong(TASK, "an expert's products are expert_ffn wide")
class ExpertsOfFfn(RightForward):
    cases = EXPERTS

    def width(self):
        return (self.m.dense_layers + self.moe * self.chosen()) * self.m.ffn


@wrong(TASK, "all layers are counted with an MLP")
class AllDense(RightForward):
    cases = EXPERTS

    def width(self):
        return self.m.layers * self.m.ffn


@wrong(TASK, "all layers are counted with experts")
class NoneDense(RightForward):
    cases = EXPERTS

    def width(self):
        return self.m.layers * self.chosen() * self.m.expert_ffn if self.m.experts else super().width()


@wrong(TASK, "the MLPs of the first dense_layers are missing")
class ExpertsOnly(RightForward):
    cases = EXPERTS

    def width(self):
        return self.moe * self.chosen() * self.m.expert_ffn


@wrong(TASK, "the router is counted twice")
class RouterInTheMlp(RightForward):
    cases = EXPERTS

    def mlp(self):
        return super().mlp() + self.router()


@wrong(TASK, "the router is a product, too")
class NoRouter(RightForward):
    cases = EXPERTS

    def router(self):
        return 0


@wrong(TASK, "the router gives each of the experts a logit")
class RouterOfTheChosen(RightForward):
    cases = EXPERTS

    def router(self):
        return 2 * self.tokens * self.m.hidden * self.m.top_k * self.moe


@wrong(TASK, "a router is counted in each layer")
class RouterInEachLayer(RightForward):
    cases = EXPERTS

    def router(self):
        return 2 * self.tokens * self.m.hidden * self.m.experts * self.m.layers


@wrong(TASK, "experts are counted without their gate")
class ExpertsWithoutGate(RightForward):
    cases = EXPERTS

    def mlp(self):
        experts = self.moe * self.chosen() * self.m.expert_ffn
        return super().mlp() - 2 * self.tokens * self.m.hidden * experts


@wrong(TASK, "the shared experts are as large as the others")
class SharedExpertsOfFfn(RightForward):
    cases = EXPERTS

    def width(self):
        return super().width() + self.moe * self.m.shared_experts * (self.m.ffn - self.m.expert_ffn)
