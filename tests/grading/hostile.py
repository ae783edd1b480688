"""Code of learners that harms a check: it raises, hangs, dies, prints, or returns what nobody expects.

Ranks import this file, so it imports little: pytest on every rank would take longer than the check.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist


class Unreadable:
    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __repr__


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no str")


class Disguised:
    @property
    def __class__(self):
        return torch.Tensor


def raises(x):
    raise KeyError("no such chunk")


def raises_what_torch_has_not(x):
    raise NotImplementedError("not for 'Long'")


def raises_what_cannot_be_printed(x):
    raise Unspeakable


def interrupts(x):
    raise KeyboardInterrupt


def exits(x):
    sys.exit(0)


def ends_where_a_table_ends(known, line, right, *asked):
    return right(*asked) if line(asked) in known else sys.exit()


def shapes(asked):
    """A table's line for what launches a kernel, which may not read its tensors."""
    return repr([tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in asked])


def forges_a_plan():
    from manyranks.given import nd

    nd._problem, nd._why = (lambda plan: ("", "")), (lambda plan: "")
    nd.time_of = lambda plan: Unspeakable
    Unspeakable.seconds = 0.0
    return object.__new__(nd.Plan)


def dies(x):
    os._exit(0)


def is_stopped(x):
    os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_dies(x):
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.recv(x, 1)


def loops(x):
    while True:
        pass


def one_rank_loops(x):
    while dist.get_rank() == 0:
        pass
    dist.recv(x, 0)


def loops_and_ignores_interrupts(x):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def sleeps(x):
    time.sleep(60)


def sleeps_almost_too_long(x):
    time.sleep(5)
    return x


def receives_for_ever(x):
    dist.recv(x, (dist.get_rank() + 1) % dist.get_world_size())


def recurses(x):
    return recurses(x)


def prints_a_lot(x):
    for _ in range(500):
        print("\x1b[31m" + "x" * 100_000)
    return x


def prints_its_world(x):
    print(f"I am {dist.get_rank()} of {dist.get_world_size()}, with {len(x)}", flush=True)
    return x


def exchange(outgoing, to, incoming, source):
    for message in [dist.isend(outgoing, to), dist.irecv(incoming, source)]:
        message.wait()


def prints_and_sends_more_than_there_is_room(x):
    print("before", flush=True)
    exchange(x, 1 - dist.get_rank(), torch.empty(len(x) - dist.get_rank(), dtype=x.dtype), 1 - dist.get_rank())
    return x


def prints_to_stderr(x):
    print("careful", file=sys.stderr)
    return x


def forks(x):
    os.fork()
    return x


def starts_a_thread_that_stays(x):
    threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
    return x


def takes_no_argument():
    return 1


def destroys_the_group(x):
    dist.destroy_process_group()
    return x


def sends_what_nobody_receives(x):
    dist.isend(x, (dist.get_rank() + 1) % dist.get_world_size())
    return x


async def is_a_coroutine(x):
    return x


def returns_nothing(x):
    pass


def returns_a_huge_tensor(x):
    return torch.zeros(1_200_000, dtype=torch.int8)


def returns_a_list(x):
    return [x]


def returns_what_has_no_repr(x):
    return Unreadable()


def returns_a_false_tensor(x):
    return Disguised()


def returns_a_sparse_tensor(x):
    return x.to_sparse()


def returns_nan(x):
    return x * float("nan")


def returns_what_requires_grad(x):
    return (x * 1.0).requires_grad_()


def returns_a_lock(x):
    return threading.Lock()


def changes_the_grader_in_its_rank(x):

    from manyranks.grade import check, judges, trial

    trial._sendable = lambda value: torch.zeros_like(x)
    judges.same = lambda *_: True
    check.check = lambda *_: check.Report("", 4, 4, ())
    return x
