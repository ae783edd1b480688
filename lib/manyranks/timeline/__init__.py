"""Floor 0: the value types that theory and measurement share. Standard library only."""

from manyranks.timeline.spans import Span, Timeline

__all__ = ["Span", "Timeline"]
