"""Which collectives are given tensors that are not contiguous: Gloo copies those in silence, NCCL refuses them."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.grade.old.tensor.traffic import traffic
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict

_STRIDED = "not contiguous: "  # a mark
_INPUT_SECOND = {  # only what is sent: lists of results are copied into; their inputs, too
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
}
_HINT = "collectives want contiguous tensors, and a gradient need not be one: x.contiguous(). NCCL refuses others"


class Strides(TorchDispatchMode):
    """found: the operations, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::").strip("_")
        if name in _INPUT_SECOND and not all(one.is_contiguous() for one in tree_leaves(args[1]) if isinstance(one, Tensor)):
            self.found.add(_INPUT_SECOND[name])
        return func(*args, **(kwargs or {}))

    def note(self, watch) -> None:
        """For `contiguous_traffic`."""
        for op in sorted(self.found):
            watch.mark(_STRIDED + op)


def contiguous_traffic(task, trial: Trial) -> Verdict:
    """Each rank calls what it must, with contiguous tensors."""
    verdict = traffic(task, trial)
    for rank, seen in enumerate(trial.answers):
        for event in seen.events:
            if verdict.ok and event.what.startswith(_STRIDED):
                op = event.what.removeprefix(_STRIDED)
                return Verdict(False, f"rank {rank} gave {op} a tensor that is not contiguous", _HINT)
    return verdict
