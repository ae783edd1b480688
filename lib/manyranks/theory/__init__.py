"""Floor 1: what should happen. Bytes, seconds and FLOPs from formulas. Standard library only."""

from importlib import import_module

_MODULES = (
    "architecture",
    "batch",
    "charges",
    "checks",
    "cluster",
    "collectives",
    "data",
    "flops",
    "hardware",
    "kept",
    "kernels",
    "layer",
    "memory",
    "passes",
    "pipeline",
    "planner",
    "published",
    "sharding",
    "stages",
    "step",
    "traffic",
)
_NAMES = {
    "accelerators": "hardware",
    "links": "hardware",
    "clusters": "cluster",
    "models": "shapes",
    "Accelerator": "hardware",
    "Cluster": "cluster",
    "ClusterCosts": "charges",
    "Link": "hardware",
    "LatentAttention": "architecture",
    "ModelShape": "architecture",
    "Plan": "plan",
    "from_hf_config": "huggingface",
}
__all__ = [*_MODULES, *_NAMES]


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(import_module(f"manyranks.theory.{_NAMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"manyranks.theory.{name}")
    raise AttributeError(f"module 'manyranks.theory' has no attribute {name!r}")
