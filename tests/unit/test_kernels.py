"""The kernels: values against PyTorch, what they move against theory, refusals. Compiled where there is a GPU."""

import subprocess
import sys
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

pytest.importorskip("triton", reason="Triton exists for Linux only")
from manyranks import kernels
from manyranks.kernels import attention, copying
from manyranks.measure import kernel
from manyranks.measure.interpreter import tl, triton
from manyranks.measure.journal import Stopped
from manyranks.theory import blocks
from manyranks.theory.blocks import Attention
from tests.conftest import matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative, of the largest; bfloat16 has 8 bits
pytestmark = [pytest.mark.gpu(1)] if torch.cuda.is_available() else []
counting = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and not counted")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, right, dtype) -> bool:
    right = right.double()
    return bool((got.double() - right).abs().max() <= TOLERANCE[dtype] * right.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_transposes_whatever_the_strides(dtype):
    x = random(45, 70, dtype=dtype)
    assert torch.equal(kernels.copy(x.flatten()[3::7]), x.flatten()[3::7])
    assert kernels.copy(x[0, :0]).shape == (0,)
    for view in (x, x.T, x[::2, 1:]):
        for turned in (True, False):
            assert torch.equal(kernels.transpose(view, 16, turned), view.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_pytorchs(dtype):
    x = random(7, 300, dtype=dtype)
    x[2, 5:], x[3] = -torch.inf, -torch.inf  # masked in part; a row without any column is NaN, as in PyTorch
    for view in (x, x[:, ::3], x[:, :1]):
        torch.testing.assert_close(kernels.softmax(view), view.softmax(1), equal_nan=True, rtol=TOLERANCE[dtype], atol=1e-6)
    assert kernels.softmax(x[:0]).shape == (0, 300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_pytorchs(dtype):
    a, b = random(45, 70, dtype=dtype), random(33, 70, dtype=dtype, seed=1).T
    assert close(kernels.product(a, b, 32, 16, 16), a.double() @ b.double(), dtype)
    assert torch.equal(kernels.product(a[:, :0], b[:0]), torch.zeros(45, 33, device=DEVICE, dtype=dtype))


def qkv(dtype=torch.float32, heads=4, groups=2, rows=21, columns=35, size=24, batch=2):
    # Heads lie beside one another in memory, as a projection leaves them: not contiguous.
    sizes = ((rows, heads), (columns, groups), (columns, groups))
    made = (random(batch, length, count, size, dtype=dtype, seed=i).transpose(1, 2) for i, (length, count) in enumerate(sizes))
    return [each.requires_grad_() for each in made]


def seen():
    mask = torch.rand(2, 1, 21, 35, generator=torch.Generator().manual_seed(9)) > 0.3
    mask[:, :, 5] = False  # a query that sees no key
    return mask.to(DEVICE)


HOW = ("full", "causal", "masked", "causal and masked")
SOON = [*product([torch.float32], HOW), (torch.bfloat16, "causal and masked")]


@pytest.mark.parametrize(("dtype", "how"), matrix(product(DTYPES, HOW), SOON))
def test_flash_attention_and_its_gradients_are_pytorchs(dtype, how):
    q, k, v = qkv(dtype)
    mask, causal = seen() if "masked" in how else None, "causal" in how
    out = kernels.flash_attention(q, k, v, mask, causal, queries=16, keys=32)
    grad = random(*out.shape, dtype=dtype, seed=7)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    both = torch.ones(21, 35, dtype=torch.bool, device=DEVICE).tril() if causal else True
    both = mask & both if mask is not None else both if causal else None
    right = F.scaled_dot_product_attention(*exact, attn_mask=both, enable_gqa=True)
    assert close(out, right, dtype)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    for got, should in zip(gradients, torch.autograd.grad(right, exact, grad.double()), strict=True):
        assert close(got, should, dtype)
        assert got.isfinite().all()


def test_blocks_of_keys_merge_as_in_ring_attention():
    """Two blocks' outputs, weighed by their log-sum-exp, are the whole one's; backward takes the whole's, and the queries'
    gradients add up. The second block starts at key 32, so query i sees its keys up to i − 32: the first queries see none."""
    q, k, v = (each.detach() for each in qkv(groups=4, rows=53, columns=53, batch=1))
    tiles = {"queries": 16, "keys": 16, "causal": True}
    out, lse = attention.forward(q, k, v, **tiles)
    halves = [(k[:, :, :32], v[:, :, :32], 0), (k[:, :, 32:], v[:, :, 32:], -32)]
    parts = [attention.forward(q, keys, values, shift=shift, **tiles) for keys, values, shift in halves]
    weights = [(part - lse).exp()[..., None] for _, part in parts]
    assert parts[1][1][0, 0, 0] == -torch.inf
    torch.testing.assert_close(sum(w * part for w, (part, _) in zip(weights, parts, strict=True)), out)
    grad = random(*out.shape, seed=7)
    whole = attention.backward(q, k, v, out, lse, grad, **tiles)
    blocks_ = [attention.backward(q, keys, values, out, lse, grad, shift=shift, **tiles) for keys, values, shift in halves]
    torch.testing.assert_close(blocks_[0][0] + blocks_[1][0], whole[0])
    torch.testing.assert_close(torch.cat([blocks_[0][1], blocks_[1][1]], 2), whole[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_and_its_gradients_are_pytorchs(dtype):
    hidden, weight = random(50, 40, dtype=dtype), random(40, 130, dtype=dtype, seed=1).T
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(130, (50,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    targets[3] = -100
    loss = kernels.cross_entropy(hidden, weight, targets, tokens=16, words=32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = F.cross_entropy(exact[0] @ exact[1].T, targets)
    assert close(loss, right, torch.float32)
    for got, should in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(right, exact), strict=True):
        assert close(got, should, dtype)


def test_the_loss_keeps_small_gradients_in_float16_and_its_own_dtype():
    """With 2,048 tokens a slope divided by their number lies below float16's normal numbers."""
    hidden, weight = random(2048, 16, dtype=torch.float16).requires_grad_(), random(64, 16, dtype=torch.float16, seed=1) / 8
    targets = torch.zeros(2048, dtype=torch.int64, device=DEVICE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = kernels.cross_entropy(hidden, weight, targets, tokens=256)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    exact = hidden.detach().double().requires_grad_()
    F.cross_entropy(exact @ weight.double().T, targets).backward()
    (got,) = torch.autograd.grad(loss * 1024, hidden)  # as a loss is scaled in float16
    error = (got.double() / 1024 - exact.grad).norm() / exact.grad.norm()
    assert error < 1e-3


# What moves: counted on the kernels, and computed


@counting
@pytest.mark.parametrize("stride", [0, 1, 2, 7, 8, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sectors_of_a_strided_copy_are_theorys(stride, dtype):
    x = random(7 * 256 * 32, dtype=dtype).as_strided((256,), (stride,))
    counted = kernel.count(kernels.copy, x, block=64)
    assert counted.sectors("x") == 8 * blocks.sectors(stride, itemsize=x.element_size())
    assert counted.sectors("out") == 256 * x.element_size() // blocks.SECTOR
    lines = {(lane // 32, lane * stride * x.element_size() // 128) for lane in range(256)}
    assert counted.accesses[0].lines == len(lines)


@counting
def test_a_transpose_moves_a_sector_per_element_unless_it_turns_its_tiles():
    for turned in (True, False):
        counted = kernel.count(kernels.transpose, random(64, 96), 32, turned)
        assert counted.sectors() == blocks.transpose_sectors(64, 96, turned)
        assert counted.launches[0].trans_bytes == (32 * 32 * 4 if turned else 0)
        assert counted.accesses[-1].coalescing == (1 if turned else 1 / 8)


@counting
def test_bytes_of_softmax_product_and_loss_are_theorys():
    x, itemsize = random(45, 70), 4
    assert kernel.count(kernels.softmax, x).requested_bytes() == blocks.softmax_bytes(45, 70)
    counted = kernel.count(kernels.product, x, random(70, 33), 32, 16, 16)
    assert counted.requested_bytes() == blocks.product_bytes(45, 70, 33, 32, 16, itemsize)
    assert counted.launches[0].dot_bytes == (32 * 16 + 16 * 16) * itemsize
    targets = torch.arange(45)
    counted = kernel.count(kernels.cross_entropy, x, random(130, 70), targets, tokens=16, words=32)
    assert counted.requested_bytes() == blocks.loss_bytes(45, 70, 130, 16, itemsize, 32)
    assert counted.requested_bytes(kind="store") == 2 * 4 * 45  # two numbers per token, and no logit


@counting
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_of_flash_attention_are_theorys_forward_and_backward(causal):
    q, k, v = qkv(rows=37, columns=21)
    sizes = Attention(2, 4, 2, 37, 21, 24, 16, 32, causal, itemsize=4)
    counted = kernel.count(kernels.flash_attention, q, k, v, causal=causal, queries=16, keys=32)
    assert counted.requested_bytes() == blocks.attention_bytes(sizes)
    counted = kernel.count(torch.autograd.grad, counted.result, (q, k, v), torch.ones(2, 4, 37, 24))
    assert counted.requested_bytes() == blocks.attention_backward_bytes(sizes)
    assert [launch.kernel for launch in counted.launches] == ["keys_kernel", "queries_kernel"]


@triton.jit
def odd_one(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i // 2, tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(out, tl.load(x))


@counting
def test_masked_lanes_atomics_and_scalars_are_counted():
    x, out = random(40), torch.zeros(32)
    counted = kernel.count(lambda: odd_one[1,](x, out, 40, 64))
    load, atomic, one, store = counted.accesses
    assert (load.kind, load.tensor, load.lanes, load.masked, load.warps) == ("load", "x", 40, 24, 2)
    assert (load.sectors, load.lines) == (5, 2)  # 40 · 4 bytes; two warps
    assert (atomic.kind, atomic.tensor, atomic.sectors) == ("atomic", "out", 2 + 1)
    assert (one.lanes, one.sectors, store.tensor, store.sectors) == (1, 1, "out", 1)
    assert load.first == tuple(range(0, 128, 4))
    assert load.where.line + 1 == one.where.line


@triton.jit
def wide_one(out):
    words = tl.full((4,), 1, tl.int64).to(tl.pointer_type(tl.int8), bitcast=True)
    tl.store(out.to(tl.pointer_type(tl.pointer_type(tl.int8))) + 32 * tl.program_id(0) + 8 * tl.arange(0, 4), words)


@triton.jit
def swapping_one(out):
    tl.atomic_cas(out + 2 * tl.arange(0, 4), tl.full((4,), 1, tl.int64), tl.zeros((4,), tl.int32))


@counting
def test_stores_count_what_they_write_and_how_much_each_program_stores():
    counted = kernel.count(lambda: wide_one[2,](torch.zeros(16)))
    assert counted.requested_bytes(kind="store") == 64
    assert counted.launches[0].stored == 4
    assert kernel.count(lambda: swapping_one[1,](torch.zeros(8))).requested_bytes(kind="atomic") == 32
    with pytest.raises(kernel.OutOfBounds, match="4 lanes store outside out"):
        kernel.count(lambda: wide_one[3,](torch.zeros(16)))


@counting
def test_a_relaunched_source_is_checked_as_python_writes_it(monkeypatch):
    """Python 3.11.2 writes some f-strings as other code."""
    from manyranks.measure.relaunch import relaunch

    monkeypatch.setattr("manyranks.measure.relaunch.ast.unparse", lambda tree: "def kernel():\n    import os")
    with pytest.raises(Stopped, match="kernel uses Import"):
        relaunch({"memories": [], "launches": [], "sources": [["kernel", "def kernel():\n    pass", {}]]}, [], [])


@counting
def test_a_relaunched_kernel_runs_no_text():
    from manyranks.measure.relaunch import computes_only

    text = "tensordesc<fp32[16],exec('tl.ran = True')"
    with computes_only(), pytest.raises(Stopped, match="a kernel runs text as code"):
        tl.str_to_ty(text, None)
    assert not hasattr(tl, "ran")


@counting
def test_a_lane_out_of_bounds_is_refused_before_it_reads_or_writes():
    x, out = random(10), torch.zeros(10)
    with pytest.raises(kernel.OutOfBounds, match=r"copy_kernel, line \d+: 6 lanes load outside x, the first at element 10"):
        kernel.count(lambda: copying.copy_kernel[1,](x, out, 16, 1, 16))
    assert not out.any()
    assert kernel.count(kernels.copy, x).requested_bytes() == 80  # and the next one counts as if nothing had been


@counting
def test_nothing_is_left_of_counting_and_unknown_names_are_refused():
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_masked_load
    counted = kernel.count(kernels.copy, random(10))
    assert InterpreterBuilder.create_masked_load is before
    with pytest.raises(ValueError, match="tensor='y': the kernels use out, x"):
        counted.sectors("y")
    with pytest.raises(ValueError, match="kind='read'"):
        counted.sectors(kind="read")
    assert kernel.count(sum, [1, 2]) == (3, [])
    with pytest.raises(ValueError, match="x is on meta: count with tensors on the CPU"):
        kernel.count(lambda: odd_one[1,](torch.empty(4, device="meta"), torch.empty(4), 4, 4))


@triton.jit
def between(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = 2 <= i < n
    tl.store(out + i, inside.to(tl.float32))


@counting
def test_a_chained_comparison_is_right_or_refused():
    """Before Triton 3.9 the compiler refuses 2 <= i < n, and the interpreter made it i < n."""
    out, refused = torch.zeros(8), Version(triton.__version__) < Version("3.9")
    with pytest.raises(ValueError, match=r"^2 <= i < n: Triton 3\.") if refused else nullcontext():
        between[1,](out, 4, 8)
    assert out.tolist() == ([0] * 8 if refused else [0, 0, 1, 1, 0, 0, 0, 0])


@counting
def test_bfloat16_products_are_mended():
    """Triton's interpreter multiplies bit patterns; without the mend this product is off by ten orders of magnitude."""
    a = random(16, 16, dtype=torch.bfloat16)
    assert close(kernels.product(a, a, 16, 16, 16), a.double() @ a.double(), torch.bfloat16)


# Refusals, and the compiler


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: kernels.copy(x), "x_N has shape"),
        (lambda x: kernels.copy(x[0], block=100), "block=100: give a power of two"),
        (lambda x: kernels.softmax(x.double()), "x_RC is torch.float64"),
        (lambda x: kernels.softmax([1.0]), "x_RC is a list"),
        (lambda x: kernels.softmax(x.expand(4, 4, 4)), r"x_RC has shape \(4, 4, 4\): give any × any"),
        (lambda x: kernels.product(x, x[:3]), r"b_KN has shape \(3, 4\): give 4 × any"),
        (lambda x: kernels.product(x, x.bfloat16()), "give both the same dtype"),
        (lambda x: kernels.product(x, x, rows=8), "rows=8: give a power of two, 16 or more"),
        (lambda x: kernels.cross_entropy(x, x, torch.tensor([0, 1, 4, 2])), "targets_T has 4: words are 0 to 3"),
        (lambda x: kernels.cross_entropy(x, x, torch.zeros(4)), "targets_T is torch.float32"),
        (lambda x: kernels.flash_attention(x, x, x), "q_BASD has shape"),
        (lambda x: kernels.flash_attention(*(x[None, None],) * 3, mask=torch.ones(3, 3) > 0), "give one that expands to"),
        (lambda x: kernels.flash_attention(x.expand(1, 3, 4, 4), *(x.expand(1, 2, 4, 4),) * 2), "3 heads of queries and 2"),
        (lambda x: kernels.flash_attention(*(x[None, None, :, :0],) * 3), "head size is 0"),
        (lambda x: kernels.flash_attention(*(x[None, None],) * 3, causal=True, shift=0.5), "shift=0.5"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_it_runs(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.zeros(4, 4))


LATE = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch._dynamo  # as DDP, FSDP and torch.compile do
import triton
import triton.language as tl

@triton.jit
def mine(x, out, BLOCK: tl.constexpr):
    tile = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tile.sum() + tl.max(tile, axis=0))

import torch
from manyranks import kernels
from manyranks.measure import kernel

x, out = torch.arange(16.0), torch.zeros(1)
counted = kernel.count(kernels.softmax, x[None])
torch.testing.assert_close(counted.result, x[None].softmax(1))
assert counted.requested_bytes() == 2 * 16 * 4
mine[1,](x, out, 16)
assert out.item() == 120 + 15
"""


@counting
def test_triton_may_be_imported_before_the_kernels(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    ran = subprocess.run([sys.executable, tmp_path / "late.py"], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr


def test_without_triton_one_sentence_says_what_to_do():
    code = "import sys; sys.modules['triton'] = None; import manyranks.measure.interpreter"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1].endswith("kernels need Triton: pip install triton")


@pytest.mark.parametrize(
    "capability", [90, pytest.param(80, marks=pytest.mark.whole), pytest.param(100, marks=pytest.mark.whole)]
)
def test_every_kernel_compiles_for_a_gpu_and_needs_the_shared_memory_that_was_counted(capability):
    from manyranks.kernels.compiled import compiled

    made = compiled(capability)
    assert all(one.registers and one.ptx for one in made.values())
    assert made["transpose"].shared == 32 * 32 * 2  # the tile that tl.trans turns, in bfloat16
    assert made["transpose, as written"].shared == 32 * 32 * 2  # the compiler turns it all the same
    stages = made["product"].stages - (capability == 80)  # an A100's last stage is read straight into registers
    assert made["product"].shared - stages * 2 * (128 * 32 + 32 * 128) in (0, 16)  # and a B200's barriers
    product = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[capability]
    assert product in made["product"].ptx
    assert product in made["attention"].ptx
    with pytest.raises(ValueError, match="capability=91"):
        compiled(91)
