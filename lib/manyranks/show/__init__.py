"""Floor 5: plots (data in, Figure out), the explorers around them, and tables of theory beside measurement."""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(
    __name__,
    "hardware",
    "collectives",
    "data_parallel",
    "zero",
    "checkpointing",
    "pipeline",
    "tensor",
    "context",
    "expert",
    "mfu",
    "nd",
    Explorer="explorer",
    choice="explorer",
    slider="explorer",
    log_slider="explorer",
    value_slider="explorer",
    size="units",
    duration="units",
    rate="units",
    flops="units",
    flop_rate="units",
    reconcile="tables",
    table="tables",
    source="listing",
    timeline="gantt",
    Gantt="gantt",
    curves="lines",
)
