"""An outer line around ranks of strangers, where bubblewrap is installed: a private root folder, gone when they are.

Inside are Python, its packages and this library, to read; a folder to write into, in memory, of a few MB; no process but
theirs; no network but theirs. The fences of `confine` stand there as well, for they refuse what this one lets through.
"""

import os
import shutil
import subprocess
from functools import cache

from manyranks.world.fences.confine import readable

SCRATCH = "/manyranks-judge-scratch"  # the folder to write into, as ranks see it
_ROOM, _SHARED, _SECONDS = 80 << 20, 1 << 20, 20  # bytes of the folder, and of /dev/shm; to see whether it works


def command() -> list[str]:
    """Returns the words that stand before the command that runs inside. It ends with the thread that starts it."""
    binds = [part for path in readable() for part in ("--ro-bind-try", os.path.realpath(path), path)]
    memory = [
        part for size, path in ((_SHARED, "/dev/shm"), (_ROOM, SCRATCH)) for part in ("--size", f"{size}", "--tmpfs", path)
    ]
    alone = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "rank"]
    places = ["--proc", "/proc", "--dev", "/dev", *memory, "--remount-ro", "/", "--chdir", "/"]
    return ["bwrap", *alone, *binds, *places, "--setenv", "TMPDIR", SCRATCH, "--"]


@cache
def works() -> bool:
    """Returns whether bubblewrap is installed, and this system lets it do what it has to."""
    if not shutil.which("bwrap"):
        return False
    try:
        return subprocess.run([*command(), "true"], check=False, capture_output=True, timeout=_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
