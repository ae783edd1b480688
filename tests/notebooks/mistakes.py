"""The common mistake in each task of each lesson: what a reader might write, and words that the check then prints.

MISTAKES[lesson][name] = (source of the stub's cell, words); `name` is the first function or class that the stub defines.
"""

_TIME_KERNEL = """
def time_kernel(device, kernel, times):
    started = device.now
    for _ in range(times):
        device.launch(kernel)
    device.synchronize()
    return (device.now - started) / times
"""

_ROW = """
class Row:
    def __init__(self, part):
        self.parameters = list(part.parameters())
        self.row = row_of(self.parameters)
        make_views(self.row, self.parameters)
        self.shard = self.row.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def gather(self):
        self.row.copy_(ring_all_gather(self.shard))

    def reduce(self):
        grads = row_of([p.grad for p in self.parameters])
        self.shard.grad = ring_reduce_scatter(grads)  # the sum
        for p in self.parameters:
            p.grad = None
"""

_STAGE_2 = """
class Stage2(Stage1):
    def after_backward(self, k):
        self.rows[k].reduce()

    def step(self):
        super().step()  # reduces again
"""

_UNIT = """
class Unit(Row):
    def __init__(self, part):
        super().__init__(part)
        self.free()

    def wait(self):
        if not self.here:
            self.start()
        self.work.wait()

    def gather(self):
        pass

    def free(self):
        for p in self.parameters:
            p.data = torch.empty(0)  # the row keeps its memory
        self.here = False

    def start(self):
        self.work = dist.all_gather_single(self.row, self.shard, async_op=True)
        self.here = True
"""

_STAGE_3 = """
class Stage3(Stage2):
    def __init__(self, gpt):
        super().__init__(gpt, kind=Unit)

    def before_forward(self, k):
        self.rows[k].start()  # and nobody waits

    def after_forward(self, k):
        self.rows[k].free()

    def before_backward(self, k):
        self.rows[k].wait()

    def after_backward(self, k):
        self.rows[k].free()
        self.rows[k].reduce()
"""

_FSDP = """
class FSDP(Stage3):
    def before_forward(self, k):
        self.rows[k].wait()
        if k + 1 < len(self.rows):
            self.rows[k + 1].start()

    def after_forward(self, k):
        if k + 1 < len(self.rows):
            self.rows[k].free()

    def before_backward(self, k):  # and nobody waits
        if k > 0:
            self.rows[k - 1].start()
"""

_PASS_ON = """
def pass_on():
    x = torch.full((4,), 10.0 ** dist.get_rank())
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    else:  # also ranks 2 and 3
        dist.recv(x, src=0)
    return x
"""

_RING = """
def careful_ring(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y, to, source = torch.empty_like(x), (rank + 1) % n, (rank - 1) % n
    dist.recv(y, src=source)  # all receive first
    dist.send(x, dst=to)
    return y
"""

_ROUND_TRIP = """
def round_trip(x):
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)  # and nothing comes back
"""

_TWO_STEPS = """
def in_two_steps():
    shard, whole = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    dist.all_gather_single(whole, my_shard())  # nothing is summed
    return whole
"""

_REDUCE_AROUND = """
def reduce_around(chunks, rounds=None):
    rank, n = dist.get_rank(), len(chunks)
    after, before = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1)[:rounds]:
        outgoing = chunks[(rank - step) % n]  # as if every trip began at home
        mine = chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(mine)
        exchange(outgoing, after, arrived, before)
        mine += arrived
"""

_RING_ALL_REDUCE = """
def ring_all_reduce(x):
    n = dist.get_world_size()
    chunks, everyone = x.tensor_split(n), list(range(n))
    ring(chunks, everyone, first=1, add=True)
    ring(chunks, everyone, first=1, add=False)  # passes on a chunk that isn't whole
    return x
"""

_TWO_LEVELS = """
def two_levels(x, node):
    rank, n = dist.get_rank(), dist.get_world_size()
    inside = list(range(rank - rank % node, rank - rank % node + node))
    across = list(range(rank % node, n, node))
    chunks = x.tensor_split(node)
    parts = chunks[rank % node].tensor_split(n // node)
    ring(chunks, inside, first=1, add=True)
    ring(parts, across, first=1, add=True)
    ring(chunks, inside, first=0, add=False)
    return x
"""

_WEIGHTED = """
def weighted(errors, total):
    return errors.mean()
"""

_AVERAGE = """
def average(gpt):
    for parameter in gpt.parameters():
        dist.all_reduce(parameter.grad)  # the sum
"""

_OVERLAPPED = """
class Overlapped(Buckets):
    def arrived(self, bucket, p):  # with each gradient
        row = torch.cat([q.grad.flatten() for q in bucket if q.grad is not None])
        handle = dist.all_reduce(row / dist.get_world_size(), async_op=True)
        self.underway.append((bucket, row, handle))

    def finish(self):
        for bucket, row, handle in self.underway:
            handle.wait()
"""

_STRIDED_COPY = """
@triton.jit
def strided_copy(x, out, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride))  # the last block has less than BLOCK elements
"""

_TURNED_TRANSPOSE = """
@triton.jit
def turned_transpose(x, out, R, C, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    tile = tl.load(x + i * C + j)
    tl.store(out + tl.trans(j) * R + tl.trans(i), tile)  # the addresses are turned, the tile isn't
"""

_SOFTMAX = """
@triton.jit
def softmax(x, out, C, BLOCK: tl.constexpr):
    start, j = tl.program_id(0) * C, tl.arange(0, BLOCK)
    row = tl.load(x + start + j, mask=j < C, other=-float("inf"))
    powers = tl.exp(row - tl.max(row))
    tl.store(out + start + j, powers / tl.sum(powers))  # beyond the row's end, too
"""

_ADD_STEP = """
@triton.jit
def add_step(A, B, sums, i, j, k, n):
    a = tl.load(A + i * n + k[None, :])
    b = tl.load(B + j * n + k[:, None])  # of the transpose
    return tl.dot(a, b, sums)
"""

_TAKE_IN = """
@triton.jit
def take_in(scores, values, most, total, sums):
    higher = tl.maximum(most, tl.max(scores, 1))
    powers = tl.exp(scores - higher[:, None])
    total = total * tl.exp(most - higher) + tl.sum(powers, 1)
    return higher, total, sums + tl.dot(powers, values)  # the sums don't shrink
"""

_INDICES = """
def indices(step, rank, ranks):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    at = step % 8
    return order[12 * at : 12 * at + 12].tensor_split(ranks)[rank]
"""

_TWO_PHASE = """
class TwoPhase:
    def __init__(self, write):
        self.write, self.thread = write, None

    def wait(self):
        if self.thread:
            self.thread.join()

    def save(self, file, state):
        self.wait()
        self.thread = Thread(target=self.write, args=(file, state))  # of numbers that change
        self.thread.start()
"""

_NOTE = """
def note(running, weights, found, tensor):
    if tensor.untyped_storage().data_ptr() not in weights:
        found[id(tensor)] = running[-1], tensor  # views of one input count several times
    return tensor
"""

_RECOMPUTE = """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        ctx.layer(x).backward(grad)  # without a graph
        return None, x.grad
"""

_VISIBLE = """
class Visible(Recompute):
    @staticmethod
    def forward(ctx, layer, x, *parameters):
        return Recompute.forward(ctx, layer, x)

    @staticmethod
    def backward(ctx, grad):
        return Recompute.backward(ctx, grad)


def recompute(layer, x):
    return Visible.apply(layer, x, *layer.parameters())
"""

_FORWARD = """\
def forward(stage, tokens, send=dist.send):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = tokens if rank == 0 else receive(rank - 1, len(tokens))
    y = stage(x)
    if rank < last:
        send(y.detach(), rank + 1)
    return x, y
"""
_ONE_F_ONE_B = """\
def one_f_one_b(rank, p, m):
    ahead = min(p - 1 - rank, m)
    order = [("F", k) for k in range(ahead)]
    for k in range(m):
        order += [("F", ahead + k), ("B", k)]
    return order
"""

_BY_ROWS = """
def by_rows(x, w):
    rank, t = dist.get_rank(), dist.get_world_size()
    term = x.chunk(t, dim=1)[rank] @ w.chunk(t, dim=0)[rank]
    dist.all_reduce(term)
    return term
"""
_MLP = """
def mlp(x, gate, up, down):
    rank, t = dist.get_rank(), dist.get_world_size()
    middle = functional.silu(by_columns(x, gate)) * by_columns(x, up)
    return middle @ down.chunk(t, dim=0)[rank]
"""
_COPY_IN = """
def copy_in(x):
    return Both.apply(x, same, summed)


def reduce_out(term):
    return Both.apply(term, summed, summed)
"""
_OWN_HEADS = """
def own_heads(w, heads):
    rank, t = dist.get_rank(), dist.get_world_size()
    first, count = rank * heads // t, heads // t
    return w.unflatten(1, (heads, -1))[:, first : first + count].flatten(1)
"""
_GATHER_IN = """
def gather_in(x):
    return Both.apply(x, gathered, lambda grad: grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()])


def reduce_scatter_out(term):
    return Both.apply(term, scattered, gathered)
"""
_MERGE = """
def merge(o1, lse1, o2, lse2):
    return (o1 + o2) / 2, torch.logaddexp(lse1, lse2)
"""
_PASS_ON = """
def pass_on(block):
    n, rank = dist.get_world_size(), dist.get_rank()
    coming = torch.empty_like(block)
    sent = dist.isend(block, (rank - 1) % n)
    dist.irecv(coming, (rank + 1) % n).wait()
    sent.wait()
    return coming
"""
_HOMEWARD = """
def homeward(parts):
    n, rank = dist.get_world_size(), dist.get_rank()
    traveling = parts[rank]
    for hop in range(1, n):
        traveling = pass_on(traveling) + parts[(rank - hop) % n]
    return pass_on(traveling)
"""
_ZIGZAG = """
def zigzag(tokens, n):
    chunks = tokens.chunk(2 * n)
    return [torch.cat((chunks[r], chunks[n + r])) for r in range(n)]
"""
_HEADS_FOR_TOKENS = """
def heads_for_tokens(x):
    n = dist.get_world_size()
    leaving = x.unflatten(1, (-1, n)).transpose(0, 2).contiguous()
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    return torch.cat(list(coming.transpose(1, 2)), 2)
"""
_BY_EXPERT = """
def by_expert(choices, E):
    copies = choices.flatten()
    order = copies.argsort(stable=True)
    return order, order % choices.shape[1], copies.bincount(minlength=E)
"""

_ANNOUNCE = """
def announce(counts):
    leaving = counts.view(dist.get_world_size(), -1)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    return coming, leaving.sum(0).tolist(), coming.sum(0).tolist()
"""

_EXCHANGE = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.splits = sent, received
        return all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None
"""

_SAME_SLICE = """
def same_slice(rank, N, degree):
    first = rank // degree * degree
    return list(range(first, first + degree))
"""

_TRAVEL = """
def travel(parameter, cut, tp, dp):
    dist.all_reduce(parameter.grad, group=dp)
    parameter.grad /= dist.get_world_size(dp)
"""

_AGREE = """
def agree(tensor, group):
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return bool(total.sum() == 0) or torch.allclose(total, tensor * dist.get_world_size(group))
"""

MISTAKES: dict[str, dict[str, tuple[str, str]]] = {
    "00_start_here": {
        "pass_on": (_PASS_ON, "rank 2 waits in recv #0"),
        "careful_ring": (_RING, "a deadlock"),
        "round_trip": (_ROUND_TRIP, "the ranks sent {0: 9, 1: 0} bytes"),
    },
    "01_collectives": {
        "in_two_steps": (_TWO_STEPS, "rank 0 has [1, 20, 300, 4000], and should have"),
        "reduce_around": (
            _REDUCE_AROUND,
            "should be [1111, 2222, 3333, 4444]. The sums of chunks 0 to 3 are on ranks [3, 0, 1, 2]",
        ),
        "ring_all_reduce": (_RING_ALL_REDUCE, "rank 0 has"),
        "two_levels": (_TWO_LEVELS, "rank 0 holds [4.0, 8.0]; all should be 8"),
    },
    "02_data_parallel": {
        "weighted": (_WEIGHTED, "the ranks' mean is"),
        "average": (_AVERAGE, "the weights are off by"),
        "Overlapped": (_OVERLAPPED, "114 all-reduces in 3 steps, not 12"),
    },
    "03_zero": {
        "Row": (_ROW, "rank 0's shard gets the gradients [1111.0, 2222.0, 3333.0]"),
        "Stage2": (_STAGE_2, "`step` reduces a row whose gradients have already left"),
        "Unit": (_UNIT, "a free unit's row still has 256 bytes, not 0"),
        "Stage3": (_STAGE_3, "in forward, unit 0 was read before its wait"),
        "FSDP": (_FSDP, "in backward, unit 4 was read before its wait"),
    },
    "04_checkpointing": {
        "note": (_NOTE, "query, key, and value share an input"),
        "Recompute": (_RECOMPUTE, "does not require grad"),
        "Visible": (_VISIBLE, "returned an incorrect number of gradients"),
        "best_count": (
            "def best_count(L, k):\n    return round(math.sqrt(L))",
            "L = 80, k = 17: 9 segments hold 162; the least is 74",
        ),
        "policy": (
            "from manyranks.parallel.checkpointing import checkpoint, selective_checkpoint\n\n"
            'mm = "aten.mm.default"\nattention = "aten._scaled_dot_product_flash_attention_for_cpu.default"\n\n'
            "def policy(operator):\n    return str(operator) == mm",
            "for attention it says False",
        ),
    },
    "05_pipeline": {
        "forward": (_FORWARD, "ask autograd for one"),
        "gpipe": (
            'def gpipe(rank, p, m):\n    return [(kind, k) for k in range(m) for kind in "FB"]',
            "run as F0 B0 F1 B1 F2 B2; it should be F0 F1 F2 B0 B1 B2",
        ),
        "one_f_one_b": (_ONE_F_ONE_B, "with p = 4 and m = 8, rank 0 does F0 F1 F2 F3 B0 F4"),
        "halves": ("def halves(x, weight, grad):\n    return grad @ weight, x.T @ grad", "they should be [(5, 3), (2, 3)]"),
    },
    "06_tensor": {
        "by_rows": (_BY_ROWS, "rank 0 has [[4321, 600, 8040, 2], [1234, 400, 2060, 8]]; it should have [[1, 0, 0, 2]"),
        "mlp": (_MLP, "each rank still has a term: sum them"),
        "copy_in": (_COPY_IN, "g's gradient is 8 where each rank has 2; it should be 2"),
        "own_heads": (_OWN_HEADS, "with 2 heads, rank 0 has []; it should have [0]"),
        "gather_in": (_GATHER_IN, "gather_in's gradient is [1]; it should be [10]"),
    },
    "07_context": {
        "merge": (_MERGE, "o is 310.6 and the sum of exponentials is 10.0; they should be 432.1 and 10"),
        "pass_on": (_PASS_ON, "After a hop, rank 0 has 10; it should have 1000"),
        "homeward": (_HOMEWARD, "4 hops; 3 are enough"),
        "zigzag": (_ZIGZAG, "of 16 tokens on 4 ranks, rank 0 has [0, 1, 8, 9]; it should have [0, 1, 14, 15]"),
        "heads_for_tokens": (_HEADS_FOR_TOKENS, "On rank 0, [0, 1, 0] is 400; it should be 100"),
    },
    "08_expert": {
        "route": (
            "def route(x, router, K):\n    gates, choices = (x @ router.T).softmax(-1).topk(K)\n    return choices, gates",
            "each token's should add up to 1",
        ),
        "by_expert": (_BY_EXPERT, "for choices [[2, 0], [0, 1], [1, 0]] and E = 3 their tokens are [1, 0, 1, 1, 0, 0]"),
        "announce": (_ANNOUNCE, "on rank 0, sent is"),
        "Exchange": (_EXCHANGE, "a row's gradient goes back to the rank that sent the row"),
        "new_bias": (
            "def new_bias(bias, load, speed):\n    return bias + speed * (load.double().mean() - load)",
            "with loads [13, 2, 3, 6] and speed 0.1",
        ),
        "same_slice": (
            _SAME_SLICE,
            "of 8 ranks in groups of 2, those like rank 3 are [2, 3]; they should be [1, 3, 5, 7]",
        ),
    },
    "09_mfu": {
        "product_flops": (
            "def product_flops(a, b):\n    return len(a) * a.shape[1] * b.shape[1]",
            "(3, 5) times (5, 4) takes 120 FLOPs, not 60",
        ),
        "needed": (
            "def needed(phi, layers, hidden, seq):\n    return 6 * phi + 12 * layers * hidden * seq",
            "that counts all scores; the mask leaves half",
        ),
        "time_kernel": (_TIME_KERNEL, "somebody left 500,000 µs in the queue; a kernel now takes 51,"),
        "intensity": (
            "def intensity(m, k, n):\n    return 2 * m * k * n / (m * k + k * n + m * n)",
            "A number has 2 bytes",
        ),
        "waited": (
            "def waited(arrived, done, r):\n    return max(arrived) - arrived[r], done - arrived[r]",
            "Rank 0 has (3.0, 4.0); it should have (3, 1)",
        ),
    },
    "10_nd_parallel": {
        "coordinates": (
            "def coordinates(rank, d, c, t):\n    return rank // (d * c * t), rank // (c * t), rank // t, rank % t",
            "rank 4 stands at (pp, dp, cp, tp) = (0, 1, 0, 0), not (0, 1, 2, 0)",
        ),
        "travel": (_TRAVEL, "Gradients of norms, held whole are 80% off."),
        "agree": (_AGREE, "ranks have -1.5, -0.5, 0.5, 1.5; rank 0 says True, not False"),
    },
    "11_kernels": {
        "strided_copy": (_STRIDED_COPY, "lanes load outside x"),
        "turned_transpose": (_TURNED_TRANSPOSE, "row 1 begins"),
        "softmax": (_SOFTMAX, "lanes store outside out"),
        "add_step": (_ADD_STEP, "that isn't A @ B"),
        "take_in": (_TAKE_IN, "Do both sums shrink"),
    },
    "12_failures": {
        "save": ("def save(file, state, write):\n    write(file, state)", "after the crash: nothing"),
        "indices": (_INDICES, "every epoch has the same order"),
        "interval": ("def interval(stall, mtbf):\n    return (stall * mtbf) ** 0.5", "the best is 330 s for a stall of 5 s"),
        "TwoPhase": (_TWO_PHASE, "file 1 written: [1, 1]"),
    },
}
