"""Files of strangers: reading one of theirs, and a folder that their ranks may write into."""

import contextlib
import hashlib
import os
import stat
import subprocess
import time
import warnings
from pathlib import Path

MOST, MOST_FILES = 64 * 2**20, 500  # bytes, files and folders that ranks may leave there
LARGEST, LINK = 20 * 2**20, "it is a link"  # bytes of a file that is read; why one is not
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


def contents(folder: Path, path: Path) -> tuple[str, str, bytes]:
    """Why a file below the folder is not read; else its version, and what it has. No part of its path may be a link."""
    place = os.open(folder, os.O_RDONLY)
    for part in path.relative_to(folder).parts:
        above = place
        try:
            place = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except OSError as error:
            return no_file(path) or os.strerror(error.errno or 0), "", b""
        finally:
            os.close(above)
    with open(place, "rb") as file:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            return LINK if stat.S_ISREG(status.st_mode) else "it is no file", "", b""
        if status.st_size > LARGEST:
            return f"it has {status.st_size >> 20} MB; at most {LARGEST >> 20} are read", "", b""
        text = file.read(LARGEST + 1)
        return "", hashlib.sha256(text).hexdigest(), text


def no_file(path: Path) -> str:
    """Why nobody looks into it; empty for a file, and what else is there."""
    try:
        return LINK if stat.S_ISLNK(path.lstat().st_mode) else ""
    except OSError as error:
        return os.strerror(error.errno or 0)
