"""measure.kinds and measure.profile: what is work, whose time it is, and what a GPU's events come to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.measure import kinds, profile
from manyranks.measure.budget import budget
from manyranks.measure.kinds import COMMUNICATION, MATMUL, OTHER, innermost, kind_of, one_after_another, works
from manyranks.measure.profile import Profile, profiled

PRODUCTS = [
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_convolution",
    "aten::mkldnn_convolution", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_flash_attention_forward",
    "aten::_efficient_attention_backward",
]  # fmt: skip
OTHERS = [
    "aten::copy_", "aten::_to_copy", "aten::clone", "aten::fill_", "aten::zero_", "aten::mul", "aten::add_",
    "aten::cat", "aten::silu", "aten::silu_backward", "aten::mish_backward", "aten::native_layer_norm",
    "aten::native_dropout", "aten::_softmax", "aten::var", "aten::max", "aten::index_select",
    "aten::embedding_dense_backward", "aten::_foreach_norm", "aten::_foreach_add_", "aten::_fused_adamw_",
    "aten::_local_scalar_dense", "## Call CompiledFxGraph fxyz ##",
]  # fmt: skip
NO_WORK = [
    "aten::linear", "aten::matmul", "aten::reshape", "aten::flatten", "aten::contiguous", "aten::to", "aten::dropout",
    "aten::cross_entropy_loss", "aten::scaled_dot_product_attention", "aten::layer_norm", "aten::repeat_interleave.none",
    "aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view", "aten::detach", "aten::expand", "aten::select",
    "aten::slice", "aten::split", "aten::unbind", "aten::as_strided", "aten::alias", "aten::chunk",
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::no_such_operator",
    "torch::autograd::AccumulateGrad", "autograd::engine::evaluate_function: MmBackward0", "MmBackward0",
    "Optimizer.step#AdamW.step", "c10d::allreduce_", "_c10d_functional::wait_tensor", "record_param_comms",
]  # fmt: skip


NCCL = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_SendRecv"]
KINDS = [(PRODUCTS, MATMUL), (OTHERS, OTHER), (NO_WORK, None), (NCCL, COMMUNICATION)]


@pytest.mark.parametrize(("names", "kind"), KINDS, ids=lambda value: value if isinstance(value, str) else None)
def test_what_touches_numbers_is_work_and_what_only_calls_views_or_allocates_is_not(names, kind):
    working = [] if kind in (None, COMMUNICATION) else names  # a collective's kernels are no calls of a thread
    assert [name for name in names if works(name)] == working
    assert kind is None or {kind_of(name) for name in names} == {kind}


# One thread's nested calls

STEPS = st.lists(st.sampled_from(["aten::mm", "aten::mul", "aten::linear", "end", "wait"]), max_size=30)


def nested(steps: list[str]) -> list[tuple[int, int, str]]:
    """Calls in the order they began in: a name opens one, "end" closes the innermost, "wait" lets a second go by."""
    calls, open_, now = [], [], 0
    for step in [*steps, *["end"] * len(steps)]:
        if step == "wait":
            now += 1
        elif step != "end":
            open_.append([now, now, step])
            calls.append(open_[-1])
        elif open_:
            open_.pop()[1] = now
    return [tuple(call) for call in calls]


def second_by_second(calls: list[tuple[int, int, str]]) -> list[tuple[str, int, int, bool]]:
    found: list[list] = []
    for t in range(max((finished for _, finished, _ in calls), default=0)):
        working = [i for i, (started, finished, name) in enumerate(calls) if started <= t < finished and works(name)]
        if not working:
            continue
        owner = working[-1]
        if found and found[-1][0] == owner and found[-1][2] == t:
            found[-1][2] = t + 1
        else:
            found.append([owner, t, t + 1, owner in [each[0] for each in found]])
    return [(calls[i][2], *rest) for i, *rest in found]


@given(STEPS)
def test_a_second_belongs_to_the_innermost_call_that_works(steps):
    calls = nested(steps)
    assert innermost(calls) == second_by_second(calls)


def test_an_operator_that_calls_others_counts_once():
    calls = [(0, 10, "aten::embedding_dense_backward"), (1, 4, "aten::zeros"), (2, 3, "aten::zero_"), (5, 6, "aten::empty")]
    spans = tuple(kinds.Span(name, OTHER, *rest) for name, *rest in innermost(calls))
    found = {"aten::embedding_dense_backward": (1, 7), "aten::zeros": (1, 2), "aten::zero_": (1, 1)}
    assert Profile(0, 10, spans, 4).by_name() == found
    assert next(iter(Profile(0, 10, spans, 4).by_name())) == "aten::embedding_dense_backward", "the longest is the first"


# Kernels of an accelerator's streams

KERNELS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6), st.sampled_from(["aten::mm", "aten::mul", "ncclA", "ncclB"])).map(
        lambda one: (one[0], one[0] + one[1], one[2])
    ),
    max_size=8,
)


@given(KERNELS)
def test_a_second_belongs_to_the_first_kernel_that_computes_and_else_to_the_first_that_communicates(kernels):
    found = one_after_another(kernels)
    assert [stretch[1] for stretch in found] == sorted(stretch[1] for stretch in found)
    for t in range(20):
        running = [kernel for kernel in sorted(kernels) if kernel[0] <= t < kernel[1]]
        running.sort(key=lambda kernel: "nccl" in kernel[2])  # those that compute first, else as they began
        assert [stretch[0] for stretch in found if stretch[1] <= t < stretch[2]] == [kernel[2] for kernel in running[:1]], t


def test_the_parts_of_a_hidden_collective_are_one_kernel():
    kernels = [(0, 10, "ncclDevKernel_AllGather"), (2, 4, "aten::mm"), (3, 6, "aten::mul"), (8, 12, "aten::mm")]
    assert [stretch[3] for stretch in one_after_another(kernels)] == [False, False, False, True, False]


# The profiler's events


class Event:
    """One of kineto's, as torch._C has them."""

    def __init__(self, type: str, name: str, start: int, end: int, number: int = 0, linked: int = 0, thread: int = 1):
        values = {
            "activity_type": type, "name": name, "start_ns": start, "end_ns": end, "correlation_id": number,
            "linked_correlation_id": linked, "start_thread_id": thread, "is_async": False,
        }  # fmt: skip
        for method, value in values.items():
            setattr(self, method, lambda value=value: value)


WHOLE = Event("user_annotation", profile._WHOLE, 1000, 2000, 1)
ON_A_GPU = [
    WHOLE,
    Event("gpu_user_annotation", profile._WHOLE, 1000, 2000),
    Event("cpu_op", "aten::linear", 1010, 1100, 2),
    Event("cpu_op", "aten::mm", 1020, 1090, 3),
    Event("kernel", "sm90_xmma_gemm_bf16", 1200, 1500, 4, linked=3),
    Event("cpu_op", "aten::add_", 1110, 1120, 4, thread=2),  # autograd's own thread
    Event("cuda_runtime", "cudaLaunchKernel", 1030, 1040, 4, linked=3),  # its number is CUDA's: another than the operator's
    Event("kernel", "vectorized_elementwise_kernel", 1500, 1600, 5, linked=4),
    Event("cpu_op", "c10d::allreduce_", 1130, 1140, 6),
    Event("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 1400, 1800, 7, linked=6),
    Event("gpu_user_annotation", "nccl:all_reduce", 1400, 1800),
    Event("cpu_op", "aten::copy_", 1150, 1160, 8),
    Event("gpu_memcpy", "Memcpy DtoH", 1850, 1900, 9, linked=8),
    Event("kernel", "left_over_from_before", 900, 1100, 10),
    Event("kernel", "by_nobody_s_operator", 1990, 2010, 11, linked=99),
]


def test_on_an_accelerator_the_kernels_of_all_threads_are_the_spans_each_its_operator_s():
    found = profile._read(ON_A_GPU, 1.1e-6, 2e-6)  # so that its clock is the events'
    nanoseconds = [(span.name, span.kind, round(1e9 * span.started), round(1e9 * span.finished)) for span in found.spans]
    assert nanoseconds == [
        ("left_over_from_before", OTHER, 1000, 1100),
        ("aten::mm", MATMUL, 1200, 1500),
        ("aten::add_", OTHER, 1500, 1600),
        ("ncclDevKernel_AllReduce_Sum_bf16", COMMUNICATION, 1600, 1800),
        ("aten::copy_", OTHER, 1850, 1900),
        ("by_nobody_s_operator", OTHER, 1990, 2000),
    ]
    assert found.on_device
    assert found.operators == 2 + 1, "the main thread's: linear, mm, copy_"
    assert [round(1e9 * part) for part in budget(found)] == [300, 260, 200, 0, 240]


def test_without_kernels_the_spans_are_the_main_thread_s_operators():
    found = profile._read([event for event in ON_A_GPU if event.activity_type() in ("user_annotation", "cpu_op")], 1e-6, 2.3e-6)
    nanoseconds = [(span.name, round(1e9 * span.started), round(1e9 * span.finished)) for span in found.spans]
    assert nanoseconds == [("aten::mm", 1020, 1090), ("aten::copy_", 1150, 1160)]
    assert not found.on_device


# The profiler itself is tested on ranks, tests/ranks/test_profile.py


@pytest.mark.gpu(1)
def test_on_a_gpu_a_step_s_parts_are_its_seconds():
    from manyranks.training import GPTConfig
    from manyranks.training.gpt import GPT, loss

    gpt = GPTConfig(hidden=256, seq=256)
    model, tokens = GPT(gpt).cuda(), torch.randint(256, (16, 257), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()

    step()
    found = profiled(step)[1]
    assert found.on_device
    parts = budget(found)
    assert parts.seconds == pytest.approx(found.seconds, rel=1e-6)
    assert min(parts.matmul, parts.other) > 0
    assert parts.communication == parts.waiting == 0
    assert found.by_name()["aten::mm"][0] >= 3 * (4 * 7 + 1)
