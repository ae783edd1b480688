"""Refuses what a cut model must not do, by its table, by its graph, or when it is used.

Between a column- and a row-parallel layer each rank has its own features. A parameter that
works on them and is whole on every rank, as a norm of single heads does, sees these only:
its gradient is the sum of what the ranks find. Nobody has to say where that is. The graph
that autograd keeps of the forward pass shows it:

    x ─ column-parallel ─ norm, attention ─ row-parallel ─ y
    whole                 own                               whole
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor import layers
from manyranks.parallel.tensor.cuts import (
    Cut,
    Masks,
    Style,
    Vocabulary,
    own_part,
    padded,
    rank,
    size,
)
from manyranks.parallel.wrappers import Conjugate

# In the table


def check_kind(name: str, module: nn.Module, style: Style) -> None:
    """Raises ValueError where the style is not for a module of this kind."""
    if isinstance(style, Masks):
        if not (hasattr(module, "p") or hasattr(module, "rate")):
            raise ValueError(
                f"{style!r} for {name}, a {type(module).__name__}: it is for dropout, a "
                "module with a probability p or a rate"
            )
        return
    kinds = (nn.Linear, nn.Embedding) if isinstance(style, Vocabulary) else (nn.Linear,)
    if not (isinstance(style, Style) and isinstance(module, kinds)):
        raise ValueError(
            f"{style!r} for {name}, a {type(module).__name__}: give Column() or Row() to "
            "an nn.Linear, Vocabulary() to an nn.Embedding or nn.Linear; cut a model once"
        )
    if more := _what_else_it_does(module, next(k for k in kinds if isinstance(module, k))):
        raise ValueError(
            f"{style!r} for {name}, a {type(module).__name__}: its part would ignore "
            f"{more}; move that into a module around it, or leave it out of the table"
        )


def _what_else_it_does(module: nn.Module, kind: type[nn.Module]) -> str:
    """Names what a part of a plain module of this kind would not do; "" for nothing."""
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return "a forward of its own"
    if parametrize.is_parametrized(module):
        return f"its parametrizations ({', '.join(module.parametrizations)})"
    hooks = [
        name for name, found in vars(module).items() if name.endswith("_hooks") and found
    ]
    if hooks:
        return f"its hooks ({', '.join(name.strip('_') for name in hooks)})"
    names = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    if more := sorted(names | {name for name, _ in module.named_buffers()}):
        return f"its {', '.join(more)}"
    return ""


# In the graph


def in_part(
    result: Any, columns: Collection[nn.Parameter] = ()
) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Finds parameters that work on own features of a rank, and those on whole ones.

    result: what a forward pass returned, tensors in any containers
    columns: what makes features the rank's own

    A parameter may be in both sets.
    """
    roots = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn]
    order = list(_inputs_first(roots))
    own: dict[Node, bool] = {}  # whether a node's result is of this rank's own features
    for node in order:
        edge, leaf = _edge(node), getattr(node, "variable", None)
        # A Function, as a checkpoint is, may have more inside than a product with a weight.
        opaque = isinstance(node, BackwardCFunction)
        read = [x for x in _inputs(node) if not (opaque and hasattr(x, "variable"))]
        from_own = any(own[other] for other in read) or leaf in columns
        own[node] = from_own if edge is None else edge
    # How a node's result is used: with own features, with whole ones.
    uses: dict[Node, set[bool]] = {node: {own[node]} for node in roots}
    with_own, with_whole = set(), set()
    for node in reversed(order):
        if hasattr(node, "variable"):
            for use in uses[node]:
                (with_own if use else with_whole).add(node.variable)
        for other in _inputs(node):
            use = {False} if _edge(node) else {True} if own[node] else uses[node]
            uses.setdefault(other, set()).update(use)
    return with_own, with_whole


def eager(module: nn.Module) -> AbstractContextManager:
    """Inside, what of a model is compiled isn't: compiled code's graph shows nothing."""
    compiled = any(
        getattr(part, "_compiled_call_impl", None) or hasattr(part, "_orig_mod")
        for part in module.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _edge(node: Node) -> bool | None:
    """True where features become the rank's own, False where whole; else None."""
    if getattr(node, "_forward_cls", None) is not Conjugate:
        return None
    if node.back is layers.same:  # reduce_out
        return False
    return True if getattr(node.back, "func", None) is layers.all_reduce else None


def _inputs(node: Node) -> list[Node]:
    return [other for other, _ in node.next_functions if other is not None]


def _inputs_first(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node that the roots depend on, each after those that it depends on."""
    waiting, begun, done = list(roots), set(), set()
    while waiting:
        node = waiting.pop()
        if node in done:
            continue
        if node in begun:
            done.add(node)
            yield node
        else:
            begun.add(node)
            waiting += [node, *(other for other in _inputs(node) if other not in done)]


# When it is used


def refuse_steps(parameter: nn.Parameter, name: str) -> None:
    """Lets an optimizer that would step it raise ValueError.

    The mark is the tensor's own, and goes with it.
    """
    parameter.was_cut = name


def _refuse_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if name := getattr(parameter, "was_cut", ""):
            raise ValueError(
                f"{type(optimizer).__name__} was made before {name} was cut, and would "
                "step what no model has any more: make it after parallelize"
            )


register_optimizer_step_pre_hook(_refuse_step)


def makes_logits(module: nn.Module, cuts: Collection[str]) -> bool:
    """Returns whether the output layer that a model of transformers names is cut."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return any(m is head and f"{name}.weight" in cuts for name, m in module.named_modules())


def refuse_whole_logits(module: nn.Module) -> None:
    """Forbids the module, which has a part of the logits, to do what needs all."""
    if hasattr(module, "generate"):
        module.generate = _no_generate
    module.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _no_generate(*_, **__) -> None:
    raise ValueError(
        "generate() while the vocabulary is cut: each rank would choose among its own "
        "tokens; leave the head out of the table, or give a whole model full_state_dict()"
    )


def _refuse_labels(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
    given = inspect.signature(module.forward).bind_partial(*inputs, **named).arguments
    if {**given, **given.get("kwargs", {})}.get("labels") is not None:
        raise ValueError(
            "labels= while the vocabulary is cut: the model's own loss would be of this "
            "rank's logits; give what it returns without them, and the next tokens, to the "
            "TensorParallel model's loss(logits, targets)"
        )


# Against the whole model

OF_SHAPES = (RuntimeError, IndexError, AssertionError)  # what code raises for wrong ones
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads")
Example = Mapping[str, Any] | Sequence[Any] | Tensor | bool


class Whole:
    """The results and gradients of a model before it is cut, to compare with afterwards.

    example: what it is called with; None, or for sure False, for no comparison. There is
    none on one rank either, nor of parameters without numbers. Dropout is off. Nothing
    stays changed.
    """

    def __init__(self, model: nn.Module, example: Example | None, group: Group):
        alone = size(group) == 1 or any(p.is_meta for p in model.parameters())
        self.asks = example is None and not alone
        self.group, self.example = group, None if alone or example is False else example
        if self.example is not None:
            self._before = _seen(model, partial(self._call, model), _directions)

    def check(self, cut: Any) -> None:
        """Compares with a TensorParallel model.

        A count of heads, such as num_heads, is divided by t where that makes them equal.
        Raises ValueError on all ranks where it differs.
        """
        if self.example is None:
            if self.asks and (found := next(_counts(cut.module), None)):
                module, name, heads = found
                raise ValueError(
                    f"{type(module).__name__}.{name}={heads} counts heads that are cut: "
                    "give example=, what the model is called with, so that it is compared "
                    "with the whole one; or example=False where this is no matter"
                )
            return
        if not (said := self._differs(cut)):
            return
        counts = list(_counts(cut.module))
        for module, name, heads in counts:
            setattr(module, name, max(1, heads // size(self.group)))
        if counts and not (said := self._differs(cut)):
            return
        for module, name, heads in counts:
            setattr(module, name, heads)
            tried = f"; to divide {type(module).__name__}.{name}={heads} by t did not help"
            said += "" if tried in said else tried
        raise ValueError(said)

    def _call(self, model: nn.Module, own: Callable[[Any], Any] = lambda x: x) -> Any:
        if isinstance(self.example, Mapping):
            return model(**{name: own(value) for name, value in self.example.items()})
        several = [self.example] if isinstance(self.example, Tensor) else self.example
        return model(*map(own, several))

    def _differs(self, cut: Any) -> str:
        """Says what differs, and what to do, the same on all ranks; "" for nothing."""
        group = self.group

        def own(x: Any) -> Any:
            shares = cut.how.sequence_parallel and isinstance(x, Tensor) and x.dim() > 1
            return own_part(x, group) if shares and x.is_floating_point() else x

        def directions(results: list[Tensor]) -> list[Tensor]:
            pairs = zip(_directions(self._before.results), results, strict=True)
            parts = [(_part(whole, y, group), y) for whole, y in pairs]
            return [torch.zeros_like(y) if d is None else d for d, y in parts]

        try:
            run = partial(self._call, cut.module, own)
            after = _seen(cut.module, run, directions, cut.finish)
            said = _compared(cut, self._before, after)
        except Exception as error:  # whatever code of others raises
            said = failed(cut, error) or str(error)
        cut.watch()
        everyone = [""] * size(group)
        dist.all_gather_object(everyone, said, group)
        return next(filter(None, everyone), "")


class _Seen(NamedTuple):
    """The tensors of a pass.

    outputs: of each module its first, in the order of ends
    """

    results: list[Tensor]
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]


def _seen(
    model: nn.Module,
    call: Callable[[], Any],
    directions: Callable[[list[Tensor]], list[Tensor]],
    finish: Callable[[], None] = lambda: None,
) -> _Seen:
    """Runs the model forward, and backward from gradients of the results."""
    outputs: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, inputs: tuple, result: Any) -> None:
        for y in _numbers(result)[:1]:
            outputs.setdefault(name, y.detach().clone())

    with _as_it_was(model), eager(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        results = _numbers(call())
        pairs = zip(results, directions(results), strict=True)
        if learn := [pair for pair in pairs if pair[0].requires_grad]:
            torch.autograd.backward(*zip(*learn, strict=True))
            finish()
        named = model.named_parameters()
        grads = {name: p.grad for name, p in named if p.grad is not None}
    return _Seen([y.detach() for y in results], outputs, grads)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside, the model is without dropout and gradients; after it, as it was."""
    modules = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module, _ in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {p.device for p, _ in grads if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)), torch.enable_grad():
        try:
            model.eval()
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, training in modules:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                buffer.data.copy_(before)


def _numbers(result: Any) -> list[Tensor]:
    tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point()]


def _directions(results: list[Tensor]) -> list[Tensor]:
    """Gradients of the results, the same each time."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(y.shape, generator=random, device="cpu").to(y) for y in results]


def _part(whole: Tensor, y: Tensor, group: Group, cut: Cut | None = None) -> Tensor | None:
    """Returns what y ought to be on this rank: by its shape all, or tokens, or features.

    cut: of the features, None for a vocabulary's. None where that gives another shape.
    """
    if whole.dim() == y.dim() > 0:
        if whole.dim() > 1 and whole.shape[1] == size(group) * y.shape[1]:
            whole = own_part(whole, group)
        if whole.shape[-1] != y.shape[-1]:
            cut = cut or padded(whole.shape[-1], size(group), rank(group))
            whole = cut._replace(dim=whole.dim() - 1).own(whole)
    return whole if whole.shape == y.shape else None


def _compared(cut: Any, before: _Seen, after: _Seen) -> str:
    """Says what differs by more than rounding; of outputs, where it first shows."""
    pairs = zip(before.results, after.results, strict=True)
    if _off([(_part(x, y, cut.group), y) for x, y in pairs]):
        for name, x in before.outputs.items():
            own, y = cut.cuts.get(f"{name}.weight"), after.outputs.get(name, x)
            x = _part(x, y, cut.group, own if own and own.dim == 0 else None)
            if x is not None and _off([(x, y)]):
                inside = cut.module.get_submodule(name.rpartition(".")[0])
                return f"{name} gives something else than it did; {_hint(inside)}"
        return f"the model gives something else than it did; {_hint(cut.module)}"
    grads = {}
    for name, p in cut.module.named_parameters():
        if name in before.grads or name in after.grads:  # to have none is to have zeros
            x = before.grads.get(name)
            part = cut.cuts[name].own if x is not None and name in cut.cuts else lambda x: x
            x = torch.zeros_like(p) if x is None else part(x)
            grads[name] = x, after.grads.get(name, torch.zeros_like(p))
    if wrong := _off(list(grads.values())):
        return (
            f"the gradient of {list(grads)[wrong[0]]} is a part of the whole model's that "
            "nobody adds up: enter what it works on by copy_in, or leave layers around it "
            "whole"
        )
    return ""


def _off(pairs: list[tuple[Tensor | None, Tensor]]) -> list[int]:
    """Finds pairs that differ by more than rounding, of small ones by the largest one's.

    That is half of the digits, for there are many layers, and norms compute in 32 bits.
    """
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    most, off = max((norm(x) for x, _ in pairs if x is not None), default=0), []
    for k, (x, y) in enumerate(pairs):
        digit = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps)
        if x is None or not norm(x - y) <= 4 * digit**0.5 * max(norm(x), most / 32):
            off.append(k)
    return off


def _counts(module: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Yields modules that count the heads of a column-parallel layer in them, and how."""
    for parent in module.modules():
        heads = {count for child in _columns(parent) for count in child.heads}
        for name in _COUNTS:
            if vars(parent).get(name) in heads:
                yield parent, name, vars(parent)[name]


def failed(cut: Any, error: Exception) -> str:
    """Says which module of a TensorParallel model raised it, and what to do.

    Empty for what isn't the module's code: messages, and what this library refuses.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = frames[-1].f_globals["__name__"]
    refused = isinstance(error, ValueError) and place.startswith("manyranks.")
    if refused or place.startswith("torch.distributed"):
        return ""
    names = {module: name for name, module in cut.module.named_modules()}
    found = [frame.f_locals.get("self") for frame in frames]
    where = [
        module for module in found if isinstance(module, nn.Module) and module in names
    ]
    inside = where[-1] if where else cut.module
    name = names[inside] or "the model"
    hint = _hint(cut.module.get_submodule(names[inside].rpartition(".")[0]))
    if cut.how.sequence_parallel:
        hint = (
            "with sequence_parallel=True a rank has S/t tokens between the parts; gather "
            "all for what mixes them, or leave the option out"
        )
    return f"{name} ({type(inside).__name__}) fails once the model is cut: {error}; {hint}"


def _hint(module: nn.Module) -> str:
    """Says what in this module may count the whole, and what to do."""
    found = []
    for parent, name, heads in _counts(module):
        found.append(
            f"{type(parent).__name__}.{name}={heads} counts whole heads: divide by t"
        )
    for parent in module.modules():
        rows = [c for c in parent.children() if isinstance(c, layers.RowParallelLinear)]
        for column in _columns(parent):
            parts = len(column.cut.spans[column.cut.place])
            several = {len(column.weight) / row.weight.shape[1] for row in rows}
            found += [
                f"a layer makes {many:.0f} times what the next one takes: if these are "
                f"parts end to end, give it Column(parts={many:.0f})"
                for many in several
                if many > parts and many == int(many)
            ]
    general = (
        "what counts heads or features must count this rank's, or the layers around it "
        "stay out of the table"
    )
    return "; ".join(dict.fromkeys(found)) or general


def _columns(parent: nn.Module) -> list[layers.ColumnParallelLinear]:
    return [c for c in parent.children() if isinstance(c, layers.ColumnParallelLinear)]
