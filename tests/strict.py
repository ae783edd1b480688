"""NCCL's rules, on gloo and without a GPU: a transport for tests that refuses what NCCL would not carry.

    no tags            a message that has one is refused, and so is a receive from anyone
    one queue a group  a group's collectives and batched messages run one after the other, in the order of the calls;
                       a batch runs as one. Other messages have a queue for each pair of ranks: a message that nobody
                       receives holds up those behind it
    one collective     what ranks of a group issue as their next collective has to be the same, with as many elements
    streams            until a call is waited for, its outputs are NaN, and its inputs are its own: who reads outputs early
                       computes NaN, who writes to either of them is told so
    contiguous         other tensors are refused

It stands below the recorder, which counts the calls as ever. A wait holds up the process, and not only its GPU's stream: what
comes through here comes through NCCL, as far as these rules go. It sees no waits in C++ and doesn't serve PyTorch's wrappers.
"""

import hashlib
import queue
import sys
import threading

import torch
import torch.distributed as dist

from manyranks.measure import calls, completions, flops, operators

_OUTPUTS = ("output_tensors", "output_tensor", "outputs", "output")
_IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_")
_UNEVEN = (
    "alltoall_",
    "alltoall_base_",
    "allgather_",
    "reduce_scatter_",
    "gather_",
    "scatter_",
    "barrier",
    "monitored_barrier_",
)
_GATHER = torch.ops.c10d._allgather_base_.default
_POISON = {torch.uint8: 171, torch.bool: True}
_real_wait = completions.wait


class BrokenRule(RuntimeError):
    """NCCL would hang here, or compute something else."""


class _Op:
    """One call. pairs: the caller's tensors with the queue's; outputs: the ones of these that it writes."""

    def __init__(self, operator, keyset, named: dict):
        self.name = operator._schema.name.removeprefix("c10d::")
        self.operator, self.keyset, self.named, self.done = operator, keyset, named, threading.Event()
        self.error: Exception | None = None
        self.waited = False
        own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        names = [a.name for a in operator._schema.arguments]
        self.arguments = [_staged(named[name], own) for name in names]
        written = [named[name] for name in names if name in _OUTPUTS or (name == "tensors" and self.name in _IN_PLACE)]
        out = {id(tensor) for tensor in flops.tensors_in(written)}
        self.outputs = [pair for key, pair in own.items() if key in out]
        taken = {tensor.untyped_storage().data_ptr() for tensor, _ in self.outputs}
        inputs = [pair for key, pair in own.items() if key not in out]
        self.inputs = [pair for pair in inputs if pair[0].untyped_storage().data_ptr() not in taken]
        for tensor, _ in (*self.inputs, *self.outputs):
            if not tensor.is_contiguous():
                raise BrokenRule(f"{self.name}: NCCL takes contiguous tensors only")
        for tensor, _ in self.outputs:
            _poison(tensor)

    def start(self) -> dist.Work | None:
        return operators.work_of(self.operator.redispatch(self.keyset, *self.arguments))

    def same_on_all_ranks(self) -> None:
        """Each rank tells the others what its next collective of this group is."""
        sizes = [] if self.name in _UNEVEN else [(t.numel(), str(t.dtype)) for t in flops.tensors_in(self.arguments)]
        said = f"{self.name} of {sizes}, root {self.named.get('root_rank')}"
        mine = torch.tensor(list(hashlib.sha256(said.encode()).digest()[:8]), dtype=torch.uint8)
        group = operators.group_of(self.named)
        each = torch.empty(8 * group.size(), dtype=torch.uint8)
        _real_wait(operators.work_of(_GATHER.redispatch(self.keyset, each, mine, self.named["process_group"], False, -1)))
        if not each.view(-1, 8).eq(mine).all():
            raise BrokenRule(f"the ranks of a group issued different collectives; this one {said}")

    def finish(self) -> None:
        """The caller has waited."""
        if self.error:
            raise self.error
        if self.waited:
            return
        self.waited = True
        for tensor, staged in self.outputs:
            if not _is_poison(tensor):
                raise BrokenRule(f"an output of {self.name} was written before the call was waited for")
            tensor.data.copy_(staged)
        for tensor, staged in self.inputs:
            if not torch.equal(_bits(tensor), _bits(staged)):
                raise BrokenRule(f"an input of {self.name} was changed before the call was waited for")
        self.outputs = self.inputs = self.arguments = self.named = ()  # nothing of the queue's stays in memory


class _Queue:
    """Runs slots one after the other, on its own thread. A slot is one call, or the calls of one batch."""

    def __init__(self):
        self._slots: queue.SimpleQueue = queue.SimpleQueue()
        self._open: tuple[object, queue.SimpleQueue, list[_Op]] | None = None
        threading.Thread(target=self._run, daemon=True, name="strict queue").start()

    def put(self, op: _Op, batch: object | None) -> list[_Op]:
        """Returns the calls of its slot; a batch's calls are in it when the batch is closed."""
        if self._open and self._open[0] is not batch:
            self.close()
        if self._open is None:
            self._open = batch, queue.SimpleQueue(), []
            self._slots.put(self._open[1])
        self._open[1].put(op)
        self._open[2].append(op)
        slot = self._open[2]
        if batch is None:
            self.close()
        return slot

    def close(self) -> None:
        """No more calls come to the batch that is open."""
        if self._open:
            self._open[1].put(None)
            self._open = None

    def _run(self) -> None:
        while True:
            slot = self._slots.get()
            started = [(op, self._started(op)) for op in iter(slot.get, None)]
            for op, work in started:
                try:
                    if work is not None:
                        _real_wait(work)
                except Exception as error:
                    op.error = op.error or error
                op.done.set()
            del slot, started, op, work

    @staticmethod
    def _started(op: _Op) -> dist.Work | None:
        try:
            if op.name not in ("send", "recv_"):
                op.same_on_all_ranks()
            return op.start()
        except Exception as error:
            op.error = error
            return None


class _Work(dist.Work):
    """The thing a caller waits for: a call, or a whole batch, for which NCCL has one Work."""

    def __init__(self, slot: list[_Op]):
        super().__init__()
        self.slot = slot

    def is_completed(self) -> bool:
        return all(op.done.is_set() for op in self.slot)


_queues: dict[tuple, _Queue] = {}
_lock, _finishing = threading.Lock(), threading.Lock()
_alive: set[_Work] = set()  # until they are waited for: C++ alone does not keep what Python has of them


def issue(operator, keyset, args: tuple, kwargs: dict):
    """In the place of calls.issue."""
    named = operators.arguments(operator, args, kwargs)
    op = _Op(operator, keyset, named)
    group = operators.group_of(named)
    key, batch = (group.group_name,), None
    if op.name == "recv_any_source_" or named.get("tag"):
        raise BrokenRule(f"{op.name} with tag {named.get('tag')}: NCCL has no tags, and receives from one rank")
    if op.name in ("send", "recv_"):
        batch = _batch(sys._getframe(2))
        if batch is None:
            key = (*key, *sorted((group.rank(), named["dst" if op.name == "send" else "src"])))
            op.arguments[[a.name for a in operator._schema.arguments].index("tag")] = 1  # apart from those in batches
    with _lock:
        if key not in _queues:
            _queues[key] = _Queue()
        slot = _queues[key].put(op, batch)
    work, returns = _Work(slot), operator._schema.returns
    if not returns:
        return _wait(work) and None
    _alive.add(work)
    if len(returns) == 1:
        return work.boxed()
    name = next(a.name for a in operator._schema.arguments if a.name in (*_OUTPUTS, "tensors"))
    return named[name], work.boxed()


def _wait(work: dist.Work, *args, **kwargs) -> bool:
    """In the place of completions.wait. The recorder's own threads wait for a call of a batch while others are still coming."""
    if threading.current_thread().name != completions.FOLLOWER:
        with _lock:
            for line in _queues.values():
                line.close()
    if not isinstance(work, _Work):
        return _real_wait(work, *args, **kwargs)
    _alive.discard(work)
    for op in work.slot:
        op.done.wait()
    with _finishing:
        for op in work.slot:
            op.finish()
    return True


def install() -> None:
    """From here on, all c10d calls of this process go by these rules."""
    calls.issue, completions.wait = issue, _wait


def _batch(frame) -> object | None:
    """The list of the batch_isend_irecv that a call comes from."""
    for _ in range(8):
        if frame is None:
            return None
        if frame.f_code.co_name == "batch_isend_irecv":
            return frame.f_locals["p2p_op_list"]
        frame = frame.f_back
    return None


def _staged(value, own: dict):
    if isinstance(value, torch.Tensor):
        return own.setdefault(id(value), (value, value.detach().clone()))[1]
    return [_staged(one, own) for one in value] if isinstance(value, (list, tuple)) else value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _poison(tensor: torch.Tensor) -> None:
    """`data` has a separate version, as a kernel's writes have none."""
    tensor.data.fill_(_POISON.get(tensor.dtype, float("nan") if tensor.dtype.is_floating_point else -85))


def _is_poison(tensor: torch.Tensor) -> bool:
    like = torch.empty_like(tensor.data)
    _poison(like)
    return torch.equal(_bits(tensor), _bits(like))
