"""Messages between the notebook and its ranks: what is sent arrives equal, and tensors' bytes never pass the pickle."""

import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from manyranks.world.processes.handle import RankProcess
from manyranks.world.rank import messages

SECONDS = 20.0  # after which a message that does not arrive fails the test
MEGABYTE = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def carried(value):
    """The value as it arrives on the other side of a socket."""
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(SECONDS)
        sender = threading.Thread(target=messages.send, args=(here, messages.pack(value)))
        sender.start()
        received = messages.unpack(messages.receive(there))
        sender.join(SECONDS)
    return received


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 7 - 1).reshape(shape).to(dtype)


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert (received.dtype, received.shape, received.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert (type(received), received.requires_grad) == (type(sent), sent.requires_grad)
    assert torch.equal(received, sent)


@pytest.mark.parametrize("value", [None, 3, "ü", b"\0", [1, (2, {3: "x"})], float("inf"), slice(1, None)])
def test_plain_values_arrive(value):
    assert carried(value) == value


def test_a_closure_arrives_with_what_it_closes_over():
    weights, scale = torch.arange(4.0), 3

    def scaled(x):
        return scale * weights + x

    assert torch.equal(carried(scaled)(1), 3 * torch.arange(4.0) + 1)


def test_a_method_in_a_decorator_of_pytorch_arrives():
    """It brings torch._C._functions, a module that nobody can import."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * grad

    assert messages.unpack(messages.pack(torch._C._functions)) is torch._C._functions
    x = torch.ones(3, requires_grad=True)
    carried(Double).apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_function_beside_a_module_of_a_class_of_its_own_arrives():
    config = torch.distributed.config  # reached through torch, and named in the function
    assert type(config) is not type(sys)

    def settings():
        return torch.distributed.config

    assert carried(settings)() is config
    assert carried([config])[0] is config


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_this_type_arrives(dtype):
    assert_same(carried(some(dtype, 3, 5)), some(dtype, 3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 3), ()])
def test_an_empty_tensor_and_one_without_dims_arrive(dtype, shape):
    assert_same(carried(some(dtype, *shape)), some(dtype, *shape))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[1:, ::2],
        lambda x: x[2, 3],
        lambda x: x[1:1],
        lambda x: x[:, :1].expand(6, 5),
        lambda x: x.as_strided((3, 3), (2, 5), 1),
        lambda x: x.view(torch.int32),
    ],
    ids=["transposed", "strided", "element", "empty", "expanded", "as_strided", "other type"],
)
def test_a_view_keeps_its_strides(view):
    sent = view(some(torch.float32, 6, 8))
    received = carried(sent)
    assert_same(received, sent)
    assert received.storage_offset() == sent.storage_offset()


def test_a_conjugate_view_arrives():
    sent = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    assert torch.equal(carried(sent).resolve_conj(), torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64))


def test_a_sparse_tensor_arrives():
    sent = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    assert torch.equal(carried(sent).to_dense(), sent.to_dense())


def test_a_meta_tensor_arrives_without_bytes():
    received = carried(torch.empty(1000, 1000, device="meta"))
    assert (received.device.type, received.shape) == ("meta", (1000, 1000))


@pytest.mark.parametrize("leaf", [torch.nn.Parameter(torch.arange(3.0)), torch.arange(3.0, requires_grad=True)])
def test_a_leaf_that_requires_grad_arrives_as_one(leaf):
    received = carried(leaf)
    assert_same(received, leaf)
    assert received.is_leaf
    received.sum().backward()
    assert torch.equal(received.grad, torch.ones(3))


def test_a_frozen_parameter_arrives_frozen():
    assert_same(*(f(torch.nn.Parameter(torch.arange(3.0), requires_grad=False)) for f in (carried, lambda x: x)))


def test_a_tensor_that_was_computed_arrives_without_its_graph():
    sent = torch.arange(3.0, requires_grad=True) * 2
    received = carried(sent)
    assert torch.equal(received, torch.tensor([0.0, 2.0, 4.0]))
    assert received.is_leaf


def test_what_arrives_can_be_written_to_and_is_a_copy():
    sent = torch.zeros(4)
    received = carried(sent)
    received += 1
    assert (sent.tolist(), received.tolist()) == ([0.0] * 4, [1.0] * 4)


def test_tensors_that_share_a_storage_still_share_it():
    whole = torch.zeros(4, 4)
    received, row, flat = carried([whole, whole[1], whole.view(-1)[2:]])
    row += 1
    assert received[1].tolist() == [1.0] * 4
    assert flat[2:6].tolist() == [1.0] * 4
    assert received.sum() == 4


def test_a_shared_storage_is_sent_once():
    whole = torch.zeros(MEGABYTE)
    frames = messages.pack({"whole": whole, "part": whole[5:], "again": whole})
    assert sum(len(memoryview(frame)) for frame in frames[1:]) == 4 * MEGABYTE


def test_one_tensor_twice_arrives_as_one_tensor():
    first, second = carried([tensor := torch.zeros(2), tensor])
    assert first is second


def test_equal_tensors_with_storages_of_their_own_stay_apart():
    first, second = carried([torch.zeros(2), torch.zeros(2)])
    first += 1
    assert second.tolist() == [0.0, 0.0]


def test_a_module_with_tied_weights_keeps_the_tie():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    received = carried(model)
    assert received[1].weight is received[0].weight
    assert len(list(received.parameters())) == 1
    tokens = torch.tensor([1, 4])
    assert torch.equal(received(tokens), model(tokens))


def test_an_optimizer_arrives_with_the_parameters_of_its_module():
    model = torch.nn.Linear(2, 1, bias=False)
    received, optimizer = carried((model, torch.optim.SGD(model.parameters(), lr=1.0)))
    before = received.weight.detach().clone()
    received(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(received.weight, before - 1)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(7.5),
        np.empty((0, 3)),
        np.array([True, False]),
        np.array(["a", "bc"]),
        np.array([{"a": 1}, None], dtype=object),
    ],
    ids=["C order", "Fortran order", "strided", "no axes", "empty", "bool", "text", "objects"],
)
def test_an_array_arrives(array):
    received = carried(array)
    assert (received.dtype, received.shape) == (array.dtype, array.shape)
    assert np.array_equal(received, array)


def test_an_array_that_arrives_can_be_written_to():
    received = carried(np.zeros(3))
    received += 1
    assert received.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [torch.zeros, lambda count: np.zeros(count, dtype=np.float32)], ids=["tensor", "array"])
def test_the_bytes_of_64_megabytes_are_out_of_band(make):
    first, *rest = messages.pack({"weights": make(16 * MEGABYTE)})
    assert len(memoryview(first)) < 10_000
    assert [memoryview(frame).nbytes for frame in rest] == [64 * MEGABYTE]


def test_packing_copies_no_tensor():
    tensor = torch.zeros(MEGABYTE, dtype=torch.uint8)
    frame = memoryview(messages.pack(tensor)[1])
    tensor[3] = 5
    assert frame[3] == 5


def test_what_no_socket_holds_arrives():
    sent = torch.arange(4 * MEGABYTE, dtype=torch.int32)
    assert torch.equal(carried(sent), sent)


def test_messages_and_answers_arrive_one_after_the_other():
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(SECONDS)
        for value in ("first", [0, 1, 2], "third"):
            messages.send(here, messages.pack(value))
            assert messages.unpack(messages.receive(there)) == value
            messages.send(there, messages.pack("answer"))
            assert messages.unpack(messages.receive(here)) == "answer"


def test_a_side_that_closes_is_an_end_of_file():
    here, there = socket.socketpair()
    with there:
        there.settimeout(SECONDS)
        here.close()
        with pytest.raises(EOFError):
            messages.receive(there)


@pytest.mark.parametrize("arrived", [1, 4, 9, 60], ids=["in the count", "before the lengths", "in the lengths", "in a frame"])
def test_a_side_that_closes_in_the_middle_of_a_message_is_an_end_of_file(arrived):
    whole, end = socket.socketpair()
    with whole, end:
        messages.send(whole, messages.pack(list(range(100))))
        beginning = end.recv(arrived, socket.MSG_WAITALL)
    here, there = socket.socketpair()
    with there:
        there.settimeout(SECONDS)
        here.sendall(beginning)
        here.close()
        with pytest.raises(EOFError):
            messages.receive(there)


def test_frames_in_a_reference_cycle_survive_the_collector():
    # A memoryview over a PickleBuffer crashed CPython here, and with it the reader's kernel.
    program = """
import gc, torch
from manyranks.world.rank import messages
def keep():
    frames = messages.pack(torch.ones(1000))
    frames.append(frames)
for _ in range(3):
    keep()
    gc.collect()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_who_had_no_processor_when_a_message_came_still_reads_it():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(theirs, [b"whole", b"", b"message"])
        assert [bytes(frame) for frame in messages.receive(ours, messages.EXACTLY, seconds=-0.3)] == [b"whole", b"", b"message"]
        messages.send(theirs, [b"whole"])
        for late in (-5.0, -0.3, 0.1):  # far too late; and nothing is there
            with pytest.raises(TimeoutError):
                messages.receive(ours if late == -5.0 else theirs, messages.EXACTLY, seconds=late)


def test_a_rank_whose_answer_was_cut_short_says_nothing_more_and_harms_nobody():
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "faults", "status")}
    (command, far), (control, theirs) = socket.socketpair(), socket.socketpair()
    rank = RankProcess(0, command, control, {name: ends[0] for name, ends in pipes.items()})
    rank.confined = True
    with command, far, control, theirs:
        theirs.sendall(bytes([2, 0, 0]))
        assert rank.whereabouts(0.01) is None
        theirs.sendall(bytes(64))
        assert rank.whereabouts(0.01) is None
    for fd in sum(pipes.values(), ()):
        os.close(fd)


def test_a_message_goes_whole_in_its_time_however_much_the_reader_takes_at_a_time():
    ours, theirs = socket.socketpair()
    frames, over = [bytes(1 << 17)] * 8, threading.Event()

    def read_slowly() -> None:
        while not over.wait(0.1):
            theirs.recv(1 << 17)

    reader = threading.Thread(target=read_slowly)
    with ours, theirs:
        reader.start()
        with pytest.raises(TimeoutError):
            messages.send(ours, frames, seconds=0.3)
        over.set()
        reader.join()
