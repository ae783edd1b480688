"""What the table of names says of a module: how it is cut, or what it does on t ranks."""

from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Column:
    """A linear layer by its output features; heads: how many they are, not to be cut.

    entered: the module around it has its input from mappings.gather_in or copy_in already.
    """

    heads: int | None = None
    entered: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class Row:
    """A linear layer by its input features; heads: as in Column."""

    heads: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, or the logits' linear layer, by tokens; filled up to t equal parts."""


@dataclass(frozen=True)
class Masks:
    """Dropout: with sequence parallelism each rank has masks of its own.

    always: without it, too, for each rank has activations of its own there.
    """

    always: bool = False


@dataclass(frozen=True)
class Positions:
    """A module called with (tokens_BS, positions_S).

    With sequence parallelism it gets the positions of this rank's shard.
    """


Style = Column | Row | Vocabulary | Masks | Positions


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
    """What a part of a plain module of this kind would not do; empty where nothing."""
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
