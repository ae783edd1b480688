"""Floor 4: the small GPT, its corpus and the trainer that composes every axis."""

from importlib import import_module

_MODULES = ("checkpoint", "config", "corpus", "gpt", "initial", "progress", "trainer")
_NAMES = {
    "GPT": "gpt",
    "GPTConfig": "config",
    "Trainer": "trainer",
    "TrainingConfig": "config",
    "train": "trainer",
}
__all__ = [*_MODULES, *_NAMES]


def __getattr__(name: str):
    # Lazy: the command line reads its arguments before torch is loaded.
    if name in _NAMES:
        return getattr(import_module(f"manyranks.training.{_NAMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"manyranks.training.{name}")
    raise AttributeError(f"module 'manyranks.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
