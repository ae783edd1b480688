"""What a learner's code keeps that is no tensor: lists, bytes, numpy's arrays, as tracemalloc sees them."""

import tracemalloc

from manyranks.measure.place import machinery

_LARGE = 4096  # bytes of one block; torch and Python keep smaller ones for themselves, as they meet operators and modules
_IMPORT = "<frozen importlib"


def start() -> None:
    """What Python and numpy take from now on is traced. It never stops: `stop` can crash other threads (CPython 128679)."""
    if tracemalloc.is_tracing():
        tracemalloc.clear_traces()
    else:
        tracemalloc.start()


def held_bytes() -> int:
    """That were taken since the start and are held: blocks that the learner's lines have made, and large ones of anybody."""
    traces = tracemalloc.take_snapshot().traces
    return sum(trace.size for trace in traces if _counts(trace.traceback[0].filename, trace.size))


def _counts(file: str, size: int) -> bool:
    return not file.startswith(_IMPORT) and (size >= _LARGE or not machinery(file))
