"""A folder that ranks of strangers may write into: whether too much is in it, and how it goes away."""

import contextlib
import os
import subprocess
import time
import warnings

MOST, MOST_FILES = 64 * 2**20, 500  # bytes, files and folders that ranks may leave there
_TRIES, _MOMENT = 5, 0.2  # how often it is removed; seconds


def remove(folder: str) -> None:
    """Removes it, also where there is a folder in it that nobody can list."""
    for _ in range(_TRIES):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            with contextlib.suppress(OSError):
                subprocess.run([*command, "--", folder], check=False, stderr=subprocess.DEVNULL)
        if not os.path.lexists(folder):
            return
        time.sleep(_MOMENT)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)


def _raised(error: OSError) -> None:
    raise error


def too_much(folder: str) -> bool:
    """Returns whether more is in it than strangers may leave."""
    taken = count = 0
    try:
        for _, folders, files, place in os.fwalk(folder, onerror=_raised):
            count += len(folders) + len(files)
            sizes = (os.stat(file, dir_fd=place, follow_symlinks=False) for file in files[:MOST_FILES])
            taken += sum(max(one.st_size, 512 * one.st_blocks) for one in sizes)
            if count > MOST_FILES or taken > MOST:
                return True
    except FileNotFoundError:  # a check has ended in between
        return False
    except (OSError, RecursionError):  # so deep that it has no name
        return True
    return False
