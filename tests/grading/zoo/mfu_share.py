"""Wrong answers to mfu of 09_mfu: FLOPs of a token, tokens, chips and peak."""

from tests.grading.zoo.mfu_right import LOOKED_UP, RightMfu
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "mfu"
CAUSAL, PARAMETERS, PALM = slice(1, 2), slice(2, 3), slice(3, 4)  # cases by their convention; the first is "full"
EMBEDDING, NO_HEAD = "the embedding is counted as a matrix product", "the head is missing: where it is tied"
VECTORS, SPARSE = "biases and norms' weights are counted as products", "that is the peak for sparse matrices"


@wrong(TASK, EMBEDDING)
class EmbeddingIsAProduct(RightMfu):
    def matrices(self):
        return [name for name, shape in self.run.shapes.items() if len(shape) == 2]


@wrong(TASK, EMBEDDING)
class TiedEmbeddingCountsTwice(RightMfu):
    cases = CAUSAL

    def matrices(self):
        return [*super().matrices(), LOOKED_UP[0]]


@wrong(TASK, "the embedding of positions is counted as a matrix product")
class PositionsAreAProduct(RightMfu):
    cases = CAUSAL

    def matrices(self):
        return [*super().matrices(), LOOKED_UP[1]]


@wrong(TASK, NO_HEAD)
class NoTiedHead(RightMfu):
    cases = CAUSAL

    def products(self):
        return sum(map(self.size, self.matrices()))


@wrong(TASK, VECTORS)
class VectorsAreProducts(RightMfu):
    def matrices(self):
        return [name for name in self.run.shapes if name not in LOOKED_UP]


@wrong(TASK, "all parameters are counted")
class AllParameters(RightMfu):
    def products(self):
        return self.parameters()


@wrong(TASK, 'not all parameters are counted: "parameters" and "palm" say 6Φ')
class ProductsOnly(RightMfu):
    cases = PARAMETERS

    def parameters(self):
        return self.products()


@wrong(TASK, 'not all parameters are counted: "parameters" and "palm" say 6Φ')
class WithoutTheEmbedding(RightMfu):
    cases = PALM

    def parameters(self):
        return super().parameters() - self.size(LOOKED_UP[0])


@wrong(TASK, "the tied matrix is counted twice")
class TiedTwice(RightMfu):
    cases = PARAMETERS

    def parameters(self):
        return super().parameters() + (self.size(LOOKED_UP[0]) if self.run.tied else 0)


@wrong(TASK, "causal attention is counted full")
class CausalInFull(RightMfu):
    cases = CAUSAL

    def causal(self):
        return self.whole()


@wrong(TASK, "half of the scores is counted")
class AlwaysCausal(RightMfu):
    def whole(self):
        return super().whole() / 2


@wrong(TASK, "the attention scores are missing")
class NoScores(RightMfu):
    def whole(self):
        return 0


@wrong(TASK, '"parameters" is 6Φ and nothing else')
class ScoresInParameters(RightMfu):
    cases = PARAMETERS

    def token(self):
        return super().token() + (self.whole() if self.convention == "parameters" else 0)


@wrong(TASK, "backward is counted once")
class BackwardOnce(RightMfu):
    def six(self):
        return 4

    def whole(self):
        return super().whole() * 2 / 3


@wrong(TASK, "backward is missing")
class NoBackward(RightMfu):
    def token(self):
        return super().token() / 3


@wrong(TASK, "the scores' FLOPs of a token grow with seq")
class ScoresWithoutSeq(RightMfu):
    def whole(self):
        return super().whole() / self.run.seq


@wrong(TASK, "that is a sequence's scores")
class ScoresOfASequence(RightMfu):
    def whole(self):
        return super().whole() * self.run.seq


@wrong(TASK, "the peak is that of the dtype in which the weights are kept", cases=slice(None))
class PeakOfTheWeights(RightMfu):
    def dtype(self):
        return self.run.weights_dtype


@wrong(TASK, "the peak is that of another dtype")
class PeakOfTheFastest(RightMfu):
    def dtype(self):
        return max(self.sheet, key=lambda name: self.sheet[name].flops)


@wrong(TASK, "the peak is that of another dtype")
class PeakOfTheFirst(RightMfu):
    def dtype(self):
        return next(iter(self.sheet))


@wrong(TASK, SPARSE)
class PeakOfSparse(RightMfu):
    def peak(self):
        return self.sheet[self.dtype()].flops


@wrong(TASK, SPARSE)
class SparseTheWrongWay(RightMfu):
    def peak(self):
        row = self.sheet[self.dtype()]
        return row.flops * 2 if row.sparse else row.flops


@wrong(TASK, "the peak is halved where the row says nothing of sparsity")
class AlwaysHalved(RightMfu):
    cases = PALM

    def peak(self):
        return self.sheet[self.dtype()].flops / 2


@wrong(TASK, "the tokens are one replica's")
class TokensOfAReplica(RightMfu):
    def tokens(self):
        return super().tokens() / self.run.replicas


@wrong(TASK, "the peak is one chip's")
class OneChip(RightMfu):
    def chips(self):
        return 1


@wrong(TASK, "the peak is one replica's")
class ChipsOfAReplica(RightMfu):
    def chips(self):
        return self.run.chips


@wrong(TASK, "a replica has several chips")
class AChipAReplica(RightMfu):
    def chips(self):
        return self.run.replicas


@wrong(TASK, "a step has `accumulate` micro-batches")
class OneMicrobatch(RightMfu):
    def tokens(self):
        return super().tokens() / self.run.accumulate


@wrong(TASK, "a micro-batch has several sequences")
class OneSequence(RightMfu):
    def tokens(self):
        return super().tokens() / self.run.sequences


@wrong(TASK, "those are sequences a second, not tokens")
class SequencesASecond(RightMfu):
    def tokens(self):
        return super().tokens() / self.run.seq


@wrong(TASK, VECTORS)
class BiasesAreProducts(RightMfu):
    """All but what is called a norm."""

    cases = CAUSAL

    def matrices(self):
        return [name for name in self.run.shapes if "norm" not in name and name not in LOOKED_UP]


@wrong(TASK, "the peak is halved where the row says nothing of sparsity")
class SparseByName(RightMfu):
    cases = CAUSAL

    def peak(self):
        return self.sheet[self.dtype()].flops / (2 if self.dtype() in ("bf16", "fp8") else 1)
