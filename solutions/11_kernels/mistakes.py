"""Answers to 11_kernels: what is right, and the mistakes that are made.

Kernels have no subclasses. Each takes the word HOW instead: what it does differently, "" for what is right.
"""

import torch

from manyranks.given.kernels import tl, triton
from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

INF = float("inf")

@triton.jit
def copy_kernel(x, out, R, C, BLOCK: tl.constexpr, HOW: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if HOW == "grid":
        i, j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    down, across = j[:, None], i[None, :]  # of a tile of x: R runs along memory
    tile = tl.load(x + across + down * R, mask=(across < R) & (down < C))
    i, j = i[:, None], j[None, :]
    if HOW == "not turned":
        tl.store(out + across * C + down, tile, mask=(across < R) & (down < C))
    elif HOW == "transposes":
        tl.store(out + down * R + across, tile, mask=(across < R) & (down < C))
    elif HOW == "reads across":
        tile = tl.load(x + i + j * R, mask=(i < R) & (j < C))
        tl.store(out + i * C + j, tile, mask=(i < R) & (j < C))
    elif HOW == "no mask":
        tl.store(out + i * C + j, tl.trans(tile), mask=i < R)
    elif HOW == "forgets trans":
        tl.store(out + i * C + j, tile, mask=(i < R) & (j < C))
    else:
        tl.store(out + i * C + j, tl.trans(tile), mask=(i < R) & (j < C))

@right("copy_rows")
class CopyRows:
    how, block = "", 32

    def __call__(self, x):
        R, C = x.shape
        out = torch.empty((R, C), dtype=x.dtype)
        copy_kernel[self.grid(R, C)](x, out, R, C, self.block, self.how)
        return out

    def grid(self, R, C):
        return triton.cdiv(R, self.block), triton.cdiv(C, self.block)

@also_right("copy_rows")
class LargerTiles(CopyRows):
    block = 64

STORES = (
    "neighboring lanes store elements that are a row of out apart: turn the tile with tl.trans, and store it along out's rows"
)
LOADS = (
    "neighboring lanes load elements that lie R apart: load the tile along x's memory, where i runs, and turn it with tl.trans"
)

slip("copy_rows", "NotTurned", 2.8, STORES, CopyRows, how="not turned")
slip("copy_rows", "ReadsAcross", 2.8, LOADS, CopyRows, how="reads across")
slip("copy_rows", "Transposes", 0,
    "element (i, j) came to row j of the memory: that's x's own order again. out has (i, j) at i · C + j", CopyRows,
    how="transposes")
slip("copy_rows", "NoMask", 0, "", CopyRows, says="give the store a mask, or correct the address", how="no mask")
slip("copy_rows", "ForgetsTrans", 0, "the tile is stored as it was loaded, along the other axis: turn it with tl.trans first",
    CopyRows, how="forgets trans")
slip("copy_rows", "GridSwapped", 0,
    "the grid and the program ids disagree: program_id(0) counts tiles of rows here, and program_id(1) of columns", CopyRows,
    how="grid")
slip("copy_rows", "contiguous", 0, "", lambda x: x.contiguous(), says="torch's clone was called")
slip("copy_rows", "by_numpy", 0, "", lambda x: torch.from_numpy(x.numpy().copy()), says="numpy() of a tensor was called")
slip("copy_rows", "starts_no_kernel", 0, "", lambda x: torch.empty(x.shape), says="the kernels stored 0 bytes")

@triton.jit
def softmax_kernel(x, out, R, C, ROWS: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    j = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    i = tl.arange(0, ROWS)[:, None]
    at, inside = i * C + j, (i < R) & (j < C)
    tile = tl.load(x + at, mask=inside, other=0.0 if HOW == "zeros" else -float("inf"))
    if HOW == "whole tile":
        tile = tl.where(j < C, tile, 0.0)
        powers = tl.exp(tile - tl.max(tl.max(tile, axis=0), axis=0))
    elif HOW == "no maximum":
        powers = tl.exp(tile)
    elif HOW == "rows":
        tile = tl.where(inside, tile, -1e30)
        powers = tl.exp(tile - tl.max(tile, axis=1)[:, None])
    else:
        tile = tl.where(j < C, tile, 0.0)
        powers = tl.exp(tile - tl.max(tile, axis=0)[None, :])
    if HOW == "stores twice":
        tl.store(out + at, powers, mask=inside)
        powers = tl.load(out + at, mask=inside, other=0.0)
    if HOW == "loads again":
        again = tl.load(x + at, mask=inside, other=-float("inf"))
        powers = tl.exp(tl.where(j < C, again, 0.0) - tl.max(tile, axis=0)[None, :])
    if HOW == "rows":
        tl.store(out + at, powers / tl.sum(tl.where(inside, powers, 0.0), axis=1)[:, None], mask=inside)
    else:
        tl.store(out + at, powers / tl.sum(powers, axis=0)[None, :], mask=inside)

@right("softmax_columns")
class Softmax:
    how, block = "", 32

    def __call__(self, x):
        R, C = x.shape
        out = torch.empty((R, C), dtype=x.dtype)
        softmax_kernel[(triton.cdiv(C, self.block),)](x, out, R, C, triton.next_power_of_2(R), self.block, self.how)
        return out

@also_right("softmax_columns")
class WiderTiles(Softmax):
    block = 64

slip("softmax_columns", "NoMaximum", 0, "exp of numbers of several hundred is infinite: subtract each column's maximum first",
    Softmax, how="no maximum")
slip("softmax_columns", "WholeTile", 0,
    "one maximum for the whole tile: far smaller columns become 0 / 0. Take each column's own, axis=0", Softmax,
    how="whole tile")
slip("softmax_columns", "Zeros", 0, "rows beyond R count as zeros in the sum: load them as −inf, of which exp makes 0", Softmax,
    how="zeros")
slip("softmax_columns", "Rows", 0,
    "that is the softmax of each row of a tile: reduce along axis 0, and put the result back as [None, :]", Softmax, how="rows")
slip("softmax_columns", "StoresTwice", 1.5,
    "the exponentials are stored and loaded again: keep them in registers, divide, and store once", Softmax, how="stores twice")
slip("softmax_columns", "LoadsAgain", 1.5,
    "x is loaded once for the maximum and once more for the sum: keep the tile that you have", Softmax, how="loads again")
slip("softmax_columns", "ByColumn", 2.4,
    "a program per column: its lanes run down the column, each in a sector of its own. Take 32 columns", Softmax, block=1)
slip("softmax_columns", "of_torch", 0, "", lambda x: torch.softmax(x, 0), says="softmax was called")

@triton.jit
def product_kernel(a, b, out, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, HOW: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, STEP):
        k = (start + tl.arange(0, STEP))[None, :]
        inside = k < K
        if HOW == "beyond K":
            inside = k < K + STEP
        a_tile = tl.load(a + i[:, None] * K + k, mask=(i[:, None] * K + k < M * K) & (i[:, None] < M) & inside, other=0.0)
        b_tile = tl.load(b + j[:, None] * K + k, mask=(j[:, None] * K + k < N * K) & (j[:, None] < N) & inside, other=0.0)
        if HOW == "no other":
            a_tile = tl.load(a + i[:, None] * K + k, mask=(i[:, None] < M) & inside)
        if HOW == "as K × N":
            b_tile = tl.load(b + k * N + j[:, None], mask=(j[:, None] < N) & (k < K), other=0.0)
        if HOW == "last step":
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        sums = tl.dot(a_tile, tl.trans(b_tile), sums)
        if HOW == "rounds":
            sums = sums.to(tl.bfloat16).to(tl.float32)
    tl.store(out + i[:, None] * N + j[None, :], sums.to(out.dtype.element_ty), mask=(i[:, None] < M) & (j[None, :] < N))

@right("product")
class Product:
    """Of all tiles that fit, the one that asks for the fewest bytes."""

    how, sizes = "", (16, 32, 64, 128, 256)

    def __call__(self, a, b, budget, shared):
        (M, K), N = a.shape, len(b)
        rows, columns, step = self.tile(M, N, K, a.element_size(), budget, shared)
        out = torch.empty((M, N), dtype=a.dtype)
        grid = (triton.cdiv(M, rows), triton.cdiv(N, columns))
        product_kernel[grid](a, b, out, M, N, K, rows, columns, step, self.how)
        return out

    def tile(self, M, N, K, itemsize, budget, shared):
        sizes = [(rows, columns) for rows in self.sizes for columns in self.sizes]
        fits = [(self.bytes(M, N, K, itemsize, *size), *size, 16) for size in sizes if sum(size) * 16 * itemsize <= shared]
        return min(fits)[1:]

    def bytes(self, M, N, K, itemsize, rows, columns):
        return itemsize * (M * K * triton.cdiv(N, columns) + N * K * triton.cdiv(M, rows) + M * N)

@also_right("product")
class FirstThatFits(Product):
    def tile(self, M, N, K, itemsize, budget, shared):
        for rows in self.sizes:
            for columns in self.sizes:
                for step in 64, 32, 16:
                    small = (rows + columns) * step * itemsize <= shared
                    if small and self.bytes(M, N, K, itemsize, rows, columns) <= budget:
                        return rows, columns, step
        raise ValueError("nothing fits")

slip("product", "BeyondK", 0,
    "elements beyond K are those of the next row: the mask asks for k < K, and other=0.0 makes the rest count nothing", Product,
    how="beyond K")
slip("product", "NoOther", 0,
    "what a masked lane loads without other= is undefined, and NaN here: with other=0.0 it counts nothing", Product,
    how="no other")
slip("product", "AsKN", 0, "b is N × K: element (j, k) lies at j · K + k. Load a tile of rows of b, and turn it with tl.trans",
    Product, how="as K × N")
slip("product", "LastStep", 0, "only the last step is left: add to the sums, tl.dot(a_tile, b_tile, sums)", Product,
    how="last step")
slip("product", "Rounds", 0, "the sums are rounded to 16 bits in each step: keep them in float32, and round when you store",
    Product, how="rounds")
slip("product", "SmallTiles", 3.5, "tiles of 16 × 16 read everything too often: take the largest that fit the shared memory",
    Product, sizes=(16,))

@mistake("product", "square tiles alone are not enough: try every pair of rows and columns", points=3.5)
class Squares(Product):
    def tile(self, M, N, K, itemsize, budget, shared):
        sizes = [size for size in self.sizes if 2 * size * 16 * itemsize <= shared]
        return max(sizes), max(sizes), 16

slip("product", "LongSteps", 4, "the tiles fit the byte budget, but not the shared memory: a step of 16 leaves more room",
    Product,
    tile=lambda self, M, N, K, itemsize, budget, shared: (*Product.tile(self, M, N, K, itemsize, budget, shared)[:2], 64))
slip("product", "OneTile", 4,
    "shared memory holds both tiles, the one of A and the one of B: (rows + columns) · step · itemsize", Product,
    tile=lambda self, M, N, K, itemsize, budget, shared: Product.tile(self, M, N, K, itemsize, budget, 2 * shared))
slip("product", "FourBytes", 3.5, "an element of float16 has 2 bytes: ask a_MK.element_size()", Product,
    tile=lambda self, M, N, K, itemsize, budget, shared: Product.tile(self, M, N, K, 4, budget, shared))

@triton.jit
def keeps_b_kernel(a, b, out, M, N, K):
    x, kept = tl.arange(0, 16)[:, None], []
    for j in range(0, N, 16):
        for k in range(0, K, 16):
            kept += [tl.load(b + (j + x) * K + k + x.T, mask=(j + x < N) & (k + x.T < K), other=0.0)]
    for i in range(0, M, 16):
        rows = []
        for k in range(0, K, 16):
            rows += [tl.load(a + (i + x) * K + k + x.T, mask=(i + x < M) & (k + x.T < K), other=0.0)]
        for j in range(0, N, 16):
            sums = tl.zeros((16, 16), tl.float32)
            for k in range(0, len(rows)):
                sums = tl.dot(rows[k], tl.trans(kept[j // 16 * len(rows) + k]), sums)
            tl.store(out + (i + x) * N + j + x.T, sums.to(out.dtype.element_ty), mask=(i + x < M) & (j + x.T < N))

@mistake("product", "a program can't keep all of B: it holds a step's two tiles, and makes one tile of the result", points=4)
def keeps_b(a, b, budget, shared):
    out = torch.empty((len(a), len(b)), dtype=a.dtype)
    keeps_b_kernel[(1,)](a, b, out, len(a), len(b), a.shape[1])
    keeps_b_kernel[(1000,)](a, b, out, 0, 0, 0)  # programs that do nothing make no tile smaller
    return out

@triton.jit
def loss_kernel(
    hidden, weight, targets, losses, logits, T, V, H, z,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, HIDDEN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    i, h = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HIDDEN)[None, :]
    target = tl.load(targets + i, mask=i < T, other=0)
    x = tl.load(hidden + i[:, None] * H + h, mask=(i[:, None] < T) & (h < H), other=0.0)
    most = tl.full((TOKENS,), -float("inf"), tl.float32)
    total, chosen = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    if HOW == "two loops":
        for start in range(0, V, WORDS):
            j = start + tl.arange(0, WORDS)
            w = tl.load(weight + j[:, None] * H + h, mask=(j[:, None] < V) & (h < H), other=0.0)
            most = tl.maximum(most, tl.max(tl.where(j[None, :] < V, tl.dot(x, tl.trans(w)), -float("inf")), axis=1))
    for start in range(0, V, WORDS):
        j = start + tl.arange(0, WORDS)
        if HOW == "x again":
            x = tl.load(hidden + i[:, None] * H + h, mask=(i[:, None] < T) & (h < H), other=0.0)
        w = tl.load(weight + j[:, None] * H + h, mask=(j[:, None] < V) & (h < H), other=0.0)
        tile = tl.dot(x, tl.trans(w))
        if HOW == "stores logits":
            tl.store(logits + i[:, None] * V + j[None, :], tile, mask=(i[:, None] < T) & (j[None, :] < V))
        if HOW != "edge":
            tile = tl.where(j[None, :] < V, tile, -float("inf"))
        higher = tl.maximum(most, tl.max(tile, axis=1))
        if HOW == "first tile" and start > 0:
            higher = most
        if HOW == "no maximum":
            higher = tl.zeros((TOKENS,), tl.float32)
        if HOW == "no rescaling" or HOW == "no maximum":
            total += tl.sum(tl.exp(tile - higher[:, None]), axis=1)
        else:
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(tile - higher[:, None]), axis=1)
        if HOW == "last target":
            chosen = tl.sum(tl.where(j[None, :] == target[:, None], tile, 0.0), axis=1)
        else:
            chosen += tl.sum(tl.where(j[None, :] == target[:, None], tile, 0.0), axis=1)
        most = higher
    lse = most + tl.log(total)
    if HOW == "no z":
        z = 0.0
    if HOW == "z of total":
        tl.store(losses + i, lse - chosen + z * tl.log(total) * tl.log(total), mask=i < T)
    else:
        tl.store(losses + i, lse - chosen + z * lse * lse, mask=i < T)

@right("loss")
class Loss:
    how, tokens, words = "", 16, 32

    def __call__(self, hidden, weight, targets, z):
        (T, H), V = hidden.shape, len(weight)
        losses, logits = torch.empty(T), torch.empty(T, V)
        sizes = self.tokens, self.words, max(16, triton.next_power_of_2(H))
        loss_kernel[(triton.cdiv(T, self.tokens),)](hidden, weight, targets, losses, logits, T, V, H, z, *sizes, self.how)
        return losses

@also_right("loss")
class OtherTiles(Loss):
    tokens, words = 32, 16

slip("loss", "NoRunningMaximum", 0, "logits of ±100 have no exponential in float32: subtract the largest logit seen so far",
    Loss, how="no maximum")
slip("loss", "FirstTile", 0, "the first tile's maximum stays: let later tiles raise it, and rescale the sum", Loss,
    how="first tile")
slip("loss", "NoRescaling", 0,
    "the sum is of exponentials below the old maximum: multiply it by exp(old − new) where the maximum rises", Loss,
    how="no rescaling")
slip("loss", "Edge", 0, "words beyond V count with a logit of 0: set them to −inf before the maximum and the sum", Loss,
    how="edge")
slip("loss", "LastTarget", 0,
    "the target's logit stands in one tile of words only: add what each tile finds, don't overwrite it", Loss,
    how="last target")
slip("loss", "NoZ", 0, "z · lse² is missing: it keeps the log-sum-exp near 0", Loss, how="no z")
slip("loss", "ZOfTotal", 0, "z goes with the square of the whole log-sum-exp, the maximum included", Loss, how="z of total")
slip("loss", "StoresLogits", 3.75, "the logits are written to memory, T · V of them: use each tile and drop it", Loss,
    how="stores logits")
slip("loss", "LoadsTokensAgain", 3.75,
    "the tile of tokens is loaded again for every tile of words: load it once, before the loop", Loss, how="x again")
slip("loss", "AllWordsAtOnce", 3.75,
    "a tile holds the whole vocabulary, and no chip holds 100,000 words: keep the launcher's 16 tokens and 32 words", Loss,
    words=128)
slip("loss", "TwoLoops", 3.75,
    "the weight is read twice, for the maximum and for the sum: one loop does both if the sum is rescaled", Loss,
    how="two loops")

@triton.jit
def attention_kernel(
    q, k, v, out, lse, S, D, window, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    a, first = tl.program_id(1), tl.program_id(0) * QUERIES
    i, d = first + tl.arange(0, QUERIES), tl.arange(0, HEAD)[None, :]
    base = a * S * D
    queries = tl.load(q + base + i[:, None] * D + d, mask=(i[:, None] < S) & (d < D), other=0.0)
    most = tl.full((QUERIES,), -float("inf"), tl.float32)
    total, sums = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, HEAD), tl.float32)
    begin, end = tl.maximum(0, first - window + 1) // KEYS * KEYS, tl.minimum(S, first + QUERIES)
    if HOW == "from the start":
        begin = 0
    if HOW == "one key early":
        begin = tl.maximum(0, first - window) // KEYS * KEYS
    if HOW == "to the end" or HOW == "sees all":
        end = S
    if HOW == "one tile less":
        end = tl.minimum(S, first)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        there = (j[:, None] < S) & (d < D)
        keys = tl.load(k + base + j[:, None] * D + d, mask=there, other=0.0)
        values = tl.load(v + base + j[:, None] * D + d, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        seen = (j[None, :] <= i[:, None]) & (j[None, :] > i[:, None] - window)
        if HOW == "window + 1":
            seen = (j[None, :] <= i[:, None]) & (j[None, :] >= i[:, None] - window)
        if HOW == "sees all":
            seen = j[None, :] < S
        if HOW == "not itself":
            seen = (j[None, :] < tl.maximum(i[:, None], 1)) & (j[None, :] > i[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        if HOW == "first tile" and start > begin:
            higher = most
        finite = higher if HOW == "nan" else tl.where(higher == -float("inf"), 0.0, higher)
        if HOW == "base 2":
            powers, shrink = tl.exp2((scores - finite[:, None]) * 1.44269504), tl.exp2((most - finite) * 1.44269504)
        else:
            powers, shrink = tl.exp(scores - finite[:, None]), tl.exp(most - finite)
        total = total * shrink + tl.sum(powers, axis=1)
        if HOW != "old sums":
            sums = sums * shrink[:, None]
        sums += tl.dot(powers, values)
        most = higher
    if HOW == "lse of total":
        tl.store(lse + a * S + i, tl.log(total), mask=i < S)
    else:
        tl.store(lse + a * S + i, most + tl.log(total), mask=i < S)
    if HOW != "no division":
        sums = sums / total[:, None]
    tl.store(out + base + i[:, None] * D + d, sums, mask=(i[:, None] < S) & (d < D))

@right("attend")
class WindowAttention:
    how, queries, keys = "", 16, 16

    def __call__(self, q, k, v, window):
        A, S, D = q.shape
        out, lse = torch.empty(A, S, D), torch.empty(A, S)
        sizes = max(16, triton.next_power_of_2(D)), self.queries, self.keys
        grid = (triton.cdiv(S, self.queries), A)
        attention_kernel[grid](q, k, v, out, lse, S, D, window, self.scale(D), *sizes, self.how)
        return out, lse

    def scale(self, D):
        return D**-0.5

@also_right("attend")
class FromItsFirstKey(WindowAttention):
    """One launch per head, and a finite number for what is hidden."""

    def __call__(self, q, k, v, window):
        parts = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        for a in range(len(q)):
            out, lse = parts[0][a], parts[1][a]
            sizes = max(16, triton.next_power_of_2(q.shape[2])), 16, 16
            grid = (triton.cdiv(q.shape[1], 16), 1)
            attention_kernel[grid](q[a], k[a], v[a], out, lse, *q.shape[1:], window, self.scale(q.shape[2]), *sizes, "")
        return parts

@also_right("attend")
class LargerTilesInBaseTwo(WindowAttention):
    how, queries, keys = "base 2", 32, 16

slip("attend", "FirstTileOfKeys", 0, "the first tile's maximum stays: let later tiles raise it, and rescale the sums",
    WindowAttention, how="first tile")
slip("attend", "AllKeysAtOnce", 4.2,
    "a tile holds all keys, and no chip holds those of a long sequence: keep the launcher's 16 queries and 16 keys",
    WindowAttention, queries=64, keys=64)
slip("attend", "NoScale", 0, "scores are not divided: multiply them by 1/√D", WindowAttention, scale=lambda self, D: 1.0)
slip("attend", "NoDivision", 0,
    "the output is not divided by the sum of the exponentials: divide by total once, after the loop", WindowAttention,
    how="no division")
slip("attend", "OldSums", 0,
    "the sums of values are still below the old maximum: multiply them by exp(old − new), as you do total", WindowAttention,
    how="old sums")
slip("attend", "NotANumber", 0,
    "a row that has seen no key yet makes −inf − (−inf), which is NaN: subtract 0 in place of −inf there", WindowAttention,
    how="nan")
slip("attend", "WindowPlusOne", 0, "a window of w keys ends at the query itself: j > i − w, so j = i − w is outside",
    WindowAttention, how="window + 1")
slip("attend", "SeesAll", 0, "queries see keys that come after them: the mask needs j ≤ i, and j > i − w", WindowAttention,
    how="sees all")
slip("attend", "NotItself", 0, "a query sees its own key, too: j ≤ i", WindowAttention, how="not itself")
slip("attend", "LseOfTotal", 2.1, "the log-sum-exp needs the maximum: most + log(total)", WindowAttention, how="lse of total")
slip("attend", "ToTheEnd", 4.2,
    "tiles past the diagonal are loaded, and nobody sees them: the loop ends with the tile's last query", WindowAttention,
    how="to the end")
slip("attend", "FromTheStart", 4.2,
    "tiles before the window are loaded, and nobody sees them: the loop begins with the first query's oldest key",
    WindowAttention, how="from the start")
slip("attend", "OneKeyEarly", 4.2,
    "a tile is loaded that ends just before the window: the oldest key of the first query is first − window + 1",
    WindowAttention, how="one key early")
slip("attend", "OneTileLess", 0, "the tile on the diagonal is left out: its queries see part of it", WindowAttention,
    how="one tile less")

@mistake("attend", says="was called")
def of_torch_attention(q, k, v, window):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), q.new_zeros(q.shape[:2])

class Steps:
    """What a pass does with a tile of queries and a tile of keys."""

    scale = staticmethod(lambda d: d**-0.5)
    last = staticmethod(lambda i, tile: i + tile)

    @classmethod
    def scores(cls, q, k, i, j):
        s = q @ k.mT * cls.scale(q.shape[-1])
        hidden = torch.arange(j, j + k.shape[1]) > torch.arange(i, i + q.shape[1])[:, None]
        return s.masked_fill(hidden, -INF)

    @classmethod
    def forward(cls, q, k, v, tile):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for i in range(0, q.shape[1], tile):
            rows = slice(i, i + tile)
            most, total = q.new_full((*q[:, rows].shape[:2], 1), -INF), 0.0
            sums = torch.zeros_like(q[:, rows])
            for j in range(0, min(q.shape[1], i + tile), tile):
                s = cls.scores(q[:, rows], k[:, j : j + tile], i, j)
                higher = torch.maximum(most, s.amax(-1, keepdim=True))
                p, shrink = (s - higher).exp(), cls.shrink(most, higher)
                total, sums = total * shrink + p.sum(-1, keepdim=True), sums * shrink + p @ v[:, j : j + tile]
                most = higher
            out[:, rows], lse[:, rows] = sums / total, (most + total.log())[..., 0]
        return out, lse

    @staticmethod
    def shrink(most, higher):
        return (most - higher).exp()

    @classmethod
    def backward(cls, q, k, v, out, lse, grad, tile):
        dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
        delta = cls.delta(out, grad)
        for i in range(0, q.shape[1], tile):
            rows = slice(i, i + tile)
            for j in range(0, min(q.shape[1], i + tile), tile):
                keys = slice(j, j + tile)
                p = (cls.scores(q[:, rows], k[:, keys], i, j) - lse[:, rows, None]).exp()
                dv[:, keys] += p.mT @ grad[:, rows]
                ds = cls.slope(p, grad[:, rows] @ v[:, keys].mT, delta[:, rows, None], q.shape[-1])
                dq[:, rows] += ds @ k[:, keys]
                cls.add(dk, keys, ds.mT @ q[:, rows])
        return dq, dk, dv

    @staticmethod
    def delta(out, grad):
        return (grad * out).sum(-1)

    @classmethod
    def slope(cls, p, dp, delta, d):
        return p * (dp - delta) * cls.scale(d)

    @staticmethod
    def add(dk, keys, part):
        dk[:, keys] += part

@right("Attention")
class Attention(torch.autograd.Function):
    steps = Steps

    @classmethod
    def forward(cls, ctx, q, k, v, tile):
        out, lse = cls.steps.forward(q, k, v, tile)
        ctx.tile = tile
        ctx.save_for_backward(q, k, v, *cls.saved(out, lse))
        return out

    @classmethod
    def saved(cls, out, lse):
        return out, lse

    @classmethod
    def backward(cls, ctx, grad):
        return *cls.steps.backward(*ctx.saved_tensors, grad, ctx.tile), None

@also_right("Attention")
class KeysOnly(Attention):
    """Tiles of keys, and all queries at once."""

    @classmethod
    def backward(cls, ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        delta, dq, dk, dv = (grad * out).sum(-1, keepdim=True), torch.zeros_like(q), [], []
        for j in range(0, q.shape[1], ctx.tile):
            keys = slice(j, j + ctx.tile)
            p = (cls.steps.scores(q, k[:, keys], 0, j) - lse[..., None]).exp()
            ds = p * (grad @ v[:, keys].mT - delta) * q.shape[-1] ** -0.5
            dv.append(p.mT @ grad)
            dk.append(ds.mT @ q)
            dq += ds @ k[:, keys]
        return dq, torch.cat(dk, 1), torch.cat(dv, 1), None

@mistake(
    "Attention", "Σ dO · O is missing in dS = P · (dO Vᵀ − Σ dO · O): softmax's gradient subtracts it", points=1.25
)
class NoDelta(Attention):
    class steps(Steps):
        @staticmethod
        def delta(out, grad):
            return torch.zeros_like(grad[..., 0])

@mistake("Attention", "dQ and dK lack the factor 1/√D of the scores", points=1.25)
class NoScaleInBackward(Attention):
    class steps(Steps):
        @classmethod
        def slope(cls, p, dp, delta, d):
            return p * (dp - delta)

@mistake("Attention", "dK of a tile is the sum over all tiles of queries: add to it", points=1.25)
class OverwritesKeys(Attention):
    class steps(Steps):
        @staticmethod
        def add(dk, keys, part):
            dk[:, keys] = part

@mistake("Attention", "scores are not divided by √D")
class Undivided(Attention):
    class steps(Steps):
        scale = staticmethod(lambda d: 1.0)

class AtOnce(Steps):
    @classmethod
    def forward(cls, q, k, v, tile):
        s = cls.scores(q, k, 0, 0)
        return s.softmax(-1) @ v, s.logsumexp(-1)

slip("Attention", "WholeScores", 3, "forward makes all scores at once, S × S of them: go through tiles of queries and of keys",
    Attention, steps=AtOnce)

@mistake("Attention", "forward keeps the probabilities, S × S of them: make them again from lse, a tile at a time", points=2.5)
class SavesProbabilities(Attention):
    @classmethod
    def forward(cls, ctx, q, k, v, tile):
        ctx.p = cls.steps.scores(q, k, 0, 0).softmax(-1)
        return super().forward(ctx, q, k, v, tile)

@mistake("Attention", "forward keeps a copy of q, k or v: save the tensors that you were given", points=4.5)
class SavesCopies(Attention):
    @classmethod
    def forward(cls, ctx, q, k, v, tile):
        return super().forward(ctx, q.clone(), k.clone(), v.clone(), tile)

@mistake("Attention", says="attention was called")
class Ready(Attention):
    @staticmethod
    def forward(ctx, q, k, v, tile):
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

@mistake("Attention", says="it's a class derived from torch.autograd.Function")
class NoFunction(torch.nn.Module):
    pass

@right("unsick")
class Unsick:
    """A word after each row."""

    def __call__(self, i, j, columns):
        return 4 * (i * (columns + self.pad()) + j)

    def pad(self):
        return 1

@also_right("unsick")
def swizzled(i, j, columns):
    return 4 * (i * columns + (j ^ i))

@also_right("unsick")
def rotated(i, j, columns):
    return 4 * (i * columns + (i + j) % columns)

@also_right("unsick")
def column_by_column(i, j, columns):
    return 4 * (j * 32 + (i + j) % 32)

CONFLICTS = "a row is a multiple of 32 words long, so a column lies in one bank: begin each row one bank further"

slip("unsick", "Sick", 0.4, CONFLICTS, Unsick, pad=lambda self: 0)
slip("unsick", "PadsTwo", 0.4, "two words after each row: rows 16 apart share a bank. 1 and 32 have no factor in common",
    Unsick, pad=lambda self: 2)
slip("unsick", "PadsALot", 1.8, "33 words after each row are 32 more than it takes", Unsick, pad=lambda self: 33)
slip("unsick", "Words", 0, "that counts words: an address is in bytes, 4 per word", Unsick,
    __call__=lambda self, i, j, columns: Unsick.__call__(self, i, j, columns) // 4)
slip("unsick", "Turned", 1.2, "a column is one row now, and a row lies in one bank: the other access is sick instead", Unsick,
    __call__=lambda self, i, j, columns: 4 * (j * 32 + i))
slip("unsick", "PadsAWarp", 0.4, "each row is 32 words longer: that's no bank further", Unsick, pad=lambda self: 32)
