"""Tensor parallelism applied from outside: a model, a mesh, and a table of names.

    styles = {"embedding.tokens": Vocabulary(), "layers.*.mlp.up": Column(), …}
    model = parallelize(GPT(config), mesh, styles, sequence_parallel=True)
    model.loss(model(tokens), targets).backward(); model.finish(); optimizer.step()

A parameter that the table does not name is whole on every rank: the norms, and biases after
a sum. Where it works on features of one rank only, as norms of single heads do, the first
forward pass shows it, and finish() sums its gradient.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from manyranks.parallel import clipping
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor import checks, state
from manyranks.parallel.tensor.cuts import (
    Column,
    Cut,
    Masks,
    Positions,
    Row,
    Style,
    Vocabulary,
    own_part,
    padded,
    rank,
    size,
)
from manyranks.parallel.tensor.dropout import draw_own_masks
from manyranks.parallel.tensor.layers import (
    ColumnParallelLinear,
    How,
    RowParallelLinear,
    column_parallel,
)
from manyranks.parallel.tensor.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from manyranks.parallel.wrappers import (
    Accumulating,
    matching,
    only_whole,
    saves,
    sum_gradients,
)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    styles: Mapping[str, Style],
    axis: str = "tp",
    example: checks.Example | None = None,
    **how: bool,
) -> "TensorParallel":
    """Cuts the model's parts over the ranks of the mesh's axis, in place.

    model: the same on every rank
    mesh: None for all ranks in one row
    styles: by patterns of the modules' names
    how: sequence_parallel, regather, overlap: see layers.How
    example: what the model is called with, a tensor, several, or a dict of names, for a
        comparison: without dropout, forward and gradients are the same before the cut and
        after it, or that's an error

    A count of heads, such as num_heads, is divided by t if need be; a model that has one
    needs an example, or False. With sequence_parallel, tensors of floating-point numbers in
    it are cut along dim 1.
    A module whose attribute `project(x, *linears)` says how it calls linear layers that
    read the same input gets column_parallel there, so that these share one communication.
    Raises ValueError for an axis that the mesh has not, a pattern that fits no module or
    one of another kind, sizes that t does not divide, a tied parameter that is cut in one
    place only or in two ways, on a rank that the mesh has not, and where the cut model
    differs from the whole one on the example.
    """
    cut_how = How(group_of(mesh, axis), **how).check()
    whole = checks.Whole(model, example, cut_how.group)
    cutter = _Cutter(model, cut_how)
    for pattern, style in styles.items():
        for name, module in matching(model, pattern):
            cutter.apply(name, module, style)
    cutter.check_tied()
    cut = TensorParallel(model, cut_how, cutter.cuts, cutter.vocabulary)
    whole.check(cut)
    return cut


class TensorParallel(Accumulating):
    """A model whose parts are cut over the ranks of a group, as parallelize returns it.

    .module; .group; .cuts, by the parameters' names. All ranks of the group give it the
    same tokens and draw the same random numbers.
    """

    def __init__(
        self, module: nn.Module, how: How, cuts: dict[str, Cut], vocabulary: int | None
    ):
        super().__init__(module)
        self.how, self.group = how, how.group
        self.cuts, self.vocabulary = cuts, vocabulary
        self._copies = _copies(cuts, how.group)
        self._looks: dict[nn.Module, RemovableHandle] = {}
        self.watch()
        self._has_run = size(how.group) == 1
        if self._has_run:
            return
        saves(module, only_whole)
        cut = [p for name, p in module.named_parameters() if name in cuts]
        clipping.refuse_alone(cut, "the TensorParallel model's own clip_grad_norm_")
        if vocabulary is not None or checks.makes_logits(module, cuts):
            checks.refuse_whole_logits(module)

    def __deepcopy__(self, memo: dict) -> "TensorParallel":
        other = TensorParallel.__new__(TensorParallel)
        shared = self.group, *self._copies.values()
        memo |= {id(group): group for group in shared} | {id(self): other}
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Runs the module. Raises ValueError where the first pass fails, as by shapes."""
        if self._has_run and not self._looks:
            return self.module(*inputs, **named)
        if torch.compiler.is_compiling():  # see checks.eager
            return torch.compiler.disable(self._first)(*inputs, **named)
        return self._first(*inputs, **named)

    def _first(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        try:
            with checks.eager(self.module):
                result = self.module(*inputs, **named)
        except Exception as error:
            shapes = not self._has_run and type(error) in checks.OF_SHAPES
            if shapes and (said := checks.failed(self, error)):
                raise ValueError(said) from error
            raise
        self._has_run = True
        return result

    def watch(self) -> None:
        """Has the first forward pass looked at, which shows whose gradients are parts."""
        for handle in self._looks.values():
            handle.remove()
        self._in_part: set[str] = set()  # whole parameters on this rank's features only
        self._frozen: set[str] | None = None  # in that pass: its graph has not shown them
        looks = size(self.group) > 1 and not self.how.sequence_parallel
        modules = self._with_whole_parameters() if looks else ()
        self._looks = {m: m.register_forward_hook(self._look) for m in modules}

    def loss(self, logits_BSW: Tensor, targets_BS: Tensor, **options) -> Tensor:
        """vocab_parallel_cross_entropy of what forward gave: W is this rank's ⌈V/t⌉.

        Raises ValueError as that does, and where no linear layer is cut by Vocabulary().
        """
        if self.vocabulary is None:
            raise ValueError(
                "no linear layer is cut by Vocabulary(): give the head this style, or, "
                "where the logits are whole, use cross_entropy"
            )
        return vocab_parallel_cross_entropy(
            logits_BSW, targets_BS, self.group, self.vocabulary, **options
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Sums the gradients of what several ranks hold whole and see only a part of.

        With sequence parallelism all that is not cut: norms, positions, biases after a sum,
        in one all-reduce for all. With fewer key/value heads than ranks, heads that have
        copies. And whole parameters that work on features of one rank only. Call it once a
        step, after the last backward. Raises ValueError for a whole parameter that was
        thawed after the first forward pass.
        """
        if self._accumulates or size(self.group) == 1:
            return
        self._check_names()
        apart: dict[Group, list[nn.Parameter]] = {}
        for name, parameter in self.module.named_parameters():
            if name in (self._frozen or ()) and parameter.grad is not None:
                raise ValueError(
                    f"{name} was frozen in the first forward pass, which shows whose "
                    "gradients are parts: thaw it before, or parallelize a model anew"
                )
            for group in self.summed_over(name):
                apart.setdefault(group, []).append(parameter)
        for group, parameters in apart.items():
            sum_gradients(parameters, group)

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Scales all gradients so that the whole model's norm is at most that.

        Call it after finish(). Returns the norm before. Raises ValueError for most below 0.
        """
        named = dict(self.module.named_parameters())
        holders = [self.holders(name) for name in named]
        return clipping.clip_grad_norm(named.values(), most, self.group, holders)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state_dict, on every rank; all ranks call it."""
        self._check_names()
        return state.full_state_dict(self.module, self.cuts, self.group)

    def load_full_state_dict(self, whole: dict[str, Tensor]) -> None:
        """Takes this rank's parts of a whole model's, cut into however many, or not."""
        self._check_names()
        state.load_full_state_dict(self.module, whole, self.cuts)

    def _check_names(self) -> None:
        named = dict(self.module.named_parameters(remove_duplicate=False))
        if gone := [name for name in self.cuts if name not in named]:
            raise ValueError(
                f"{gone[0]} was cut, and has another name now, as after torch.compile(part)"
                ": call part.compile(), which keeps names"
            )

    def summed_over(self, name: str) -> list[Group]:
        """The ranks whose gradients of a parameter are parts of one: a group, or none."""
        if name not in self.cuts:
            sums = self.how.sequence_parallel or name in self._in_part
            return [self.group] if sums else []
        copies = self.cuts[name].copies
        return [self._copies[copies]] if len(copies) > 1 else []

    def holders(self, name: str) -> int:
        """Counts the ranks that hold the same elements of a parameter."""
        return len(self.cuts[name].copies) if name in self.cuts else size(self.group)

    def _with_whole_parameters(self) -> set[nn.Module]:
        """The model, and all modules that directly have a whole parameter."""
        names = [
            n.rpartition(".")[0]
            for n, _ in self.module.named_parameters()
            if n not in self.cuts
        ]
        return {self.module, *map(self.module.get_submodule, names)}

    def _look(self, module: nn.Module, _: tuple, result: Any) -> None:
        """Looks at a module after its first forward pass that has a graph.

        A checkpoint hides the graph of what it runs from what comes after it, so the whole
        model's alone would not show all.
        """
        named = list(self.module.named_parameters())
        columns = {p for n, p in named if n in self.cuts and self.cuts[n].dim == 0}
        own, whole = checks.in_part(result, columns)
        if not own | whole:
            return
        self._looks.pop(module).remove()
        uncut = [(name, p) for name, p in named if name not in self.cuts]
        if self._frozen is None:
            self._frozen = {name for name, p in uncut if not p.requires_grad}
        both = [name for name, p in uncut if p in own and p in whole]
        if both:
            near = max(both, key=lambda name: max(_common(name, cut) for cut in self.cuts))
            raise ValueError(
                f"{near} works on features of one rank and on whole ones: a rank's "
                "gradient would be a part in one place and not in the other; enter the "
                "part by copy_in, or cut it by Column(), or leave whole what it meets"
            )
        self._in_part.update(name for name, p in uncut if p in own)


def _common(name: str, other: str) -> int:
    """Counts the parts of two dotted names that are the same, from the first on."""
    same = [a == b for a, b in zip(name.split("."), other.split("."), strict=False)]
    return [*same, False].index(False)


class _Cutter:
    """Replaces modules of one model; a parameter that two of them share is cut once."""

    def __init__(self, model: nn.Module, how: How):
        self.model, self.how = model, how
        self.cuts: dict[str, Cut] = {}
        self.vocabulary: int | None = None
        # By the whole parameter: what stands for it, and its cut, None where that is whole.
        self._made: dict[nn.Parameter, tuple[nn.Parameter, Cut | None]] = {}

    def apply(self, name: str, module: nn.Module, style: Style) -> None:
        if isinstance(style, Masks):
            checks.check_kind(name, module, style)
            if style.always or self.how.sequence_parallel:
                draw_own_masks(module, self.how.group)
        elif isinstance(style, Positions):
            if self.how.sequence_parallel:
                module.register_forward_pre_hook(_own_positions(self.how.group))
        else:
            self._replace(name, module, style)

    def check_tied(self) -> None:
        """Raises ValueError where a module that no style names still has what was cut."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter in self._made and self._made[parameter][0] is not parameter:
                raise ValueError(
                    f"{name} is tied to a parameter that was cut: give its module a style"
                )

    def _replace(self, name: str, module: nn.Module, style: Style) -> None:
        checks.check_kind(name, module, style)
        above, _, own = name.rpartition(".")
        parent, part = self.model.get_submodule(above), self._part(name, module, style)
        for which, parameter in part.named_parameters(recurse=False):
            # A row-parallel bias is whole.
            cut = part.cut if which == "weight" or part.cut.dim == 0 else None
            setattr(part, which, self._tied(getattr(module, which), parameter, cut, name))
            if cut is not None:
                self.cuts[f"{name}.{which}"] = cut
        heads = getattr(style, "heads", None)
        part.heads = heads if isinstance(heads, tuple) else (heads,) if heads else ()
        part.training = module.training
        setattr(parent, own, part)
        own_way = isinstance(style, Column) and not style.entered
        if own_way and hasattr(parent, "project"):
            parent.project = column_parallel

    def _tied(
        self, whole: nn.Parameter, part: nn.Parameter, cut: Cut | None, name: str
    ) -> nn.Parameter:
        """Returns what stands for the whole parameter: this part, or another module's."""
        made, before = self._made.setdefault(whole, (part, cut))
        if made is not whole:
            checks.refuse_steps(whole, name)
        if cut != before:
            raise ValueError(
                f"{name} has a parameter that another module has, too, which is cut in "
                "another way: give both the same style"
            )
        return made

    def _part(self, name: str, module: nn.Module, style: Style) -> nn.Module:
        how, t, place = self.how, size(self.how.group), rank(self.how.group)
        if isinstance(style, Vocabulary):
            rows = padded(module.weight.shape[0], t, place)
            if isinstance(module, nn.Embedding):
                return VocabParallelEmbedding.of(module, how, rows)
            if self.vocabulary not in (None, module.out_features):
                raise ValueError(
                    f"{name} has {module.out_features} tokens, another head "
                    f"{self.vocabulary}: loss() needs one vocabulary; give one Column()"
                )
            self.vocabulary = module.out_features
            return ColumnParallelLinear.of(module, how, rows)
        kind = RowParallelLinear if isinstance(style, Row) else ColumnParallelLinear
        kind = _EnteredColumn if getattr(style, "entered", False) else kind
        features = module.weight.shape[kind.dim]
        return kind.of(module, how, style.cut(features, t, place, f"features of {name}"))


class _EnteredColumn(ColumnParallelLinear):
    """A layer whose input is whole already, from gather_in or copy_in: it sends nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def group_of(mesh: DeviceMesh | None, axis: str) -> Group:
    """The ranks of the mesh's axis. Raises ValueError where there is none, or on others."""
    if mesh is None:
        return None
    if axis not in (names := mesh.mesh_dim_names or ()):
        has = ", ".join(map(repr, names)) or "no names"
        raise ValueError(
            f"axis={axis!r}: the mesh has {has}; make it by init_device_mesh("
            f'"cpu", (d, t), mesh_dim_names=("dp", {axis!r})), or say axis='
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: call "
            "parallelize on the ranks of the mesh only"
        )
    return mesh.get_group(axis)


def _own_positions(group: Group):
    def hook(module: nn.Module, inputs: tuple) -> tuple:
        tokens_BS, positions_S = (*inputs, None)[:2]
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return tokens_BS, own_part(positions_S[None], group)[0]

    return hook


def _copies(cuts: dict[str, Cut], group: Group) -> dict[tuple[int, ...], Group]:
    """Makes groups by places: this rank and others with the same part of a parameter."""
    found: dict[tuple[int, ...], Group] = {}
    for places in dict.fromkeys(cut.copies for cut in cuts.values() if len(cut.copies) > 1):
        ranks = [dist.get_global_rank(group or dist.group.WORLD, r) for r in places]
        found[places] = group
        if len(places) < size(group):
            found[places] = dist.new_group(ranks, use_local_synchronization=True)
    return found
