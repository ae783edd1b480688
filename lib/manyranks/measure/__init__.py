"""Floor 1: what happened. Calls, bytes on the wire, bytes in memory and FLOPs, counted on real ranks."""

from manyranks.measure.calls import Call, Recorder
from manyranks.measure.divergence import first_divergence

__all__ = ["Call", "Recorder", "first_divergence"]
