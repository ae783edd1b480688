"""The report's parts, where the first form of the checks looks for them."""

from manyranks.grade.check import Line, Report
from manyranks.grade.trial import listed, size

__all__ = ["Line", "Report", "listed", "size"]
