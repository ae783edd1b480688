"""The operating system's own fences around a rank that runs strangers' code, put up before any of that code runs.

On Linux it reads Python and its packages only, writes into one folder, starts no process, signals none outside, changes
no file's owner, rights or times, makes no UNIX socket, and has a limit on memory and on the size of files: Landlock,
seccomp and rlimits. Its network is a private loopback, where the system gives one to the process that forks the ranks.
On macOS the limits alone hold. Nothing on either keeps it from asking whether a file exists, or from reading the
library's own source.
Sources: Linux, Documentation/userspace-api/landlock.rst and seccomp_filter.rst; include/uapi/linux/landlock.h.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from manyranks.world.fences.syscalls import FREE, LOOKED_AT, PROCESSORS, UNKNOWN, numbers

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on all machines
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_READ = 1 << 0 | 1 << 2 | 1 << 3  # run a file, read one, list a folder
_WRITE = (
    _READ | 1 << 1 | 1 << 7 | 1 << 8 | 1 << 14 | 1 << 15
)  # and write one, make folders and files, cut one; no links or pipes
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # version of Landlock -> number of rights to files that it knows
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not zero: shared, it is memory that nobody counts
_ETC = ("hosts", "resolv.conf", "nsswitch.conf", "host.conf", "localtime", "ld.so.cache", "passwd", "group", "gai.conf")
_SYSTEM = (
    *("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/share", "/usr/local/lib", "/usr/local/cuda"),
    *("/sys/devices", "/sys/class/net", "/sys/bus"),
    *(f"/etc/{name}" for name in _ETC),
)
_OF_PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")  # what else is there may be a course, or nbgrader's exchange
_OF_PROCESSES = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/sys")


_A_THREAD = 0x10400  # of clone: a thread, which has its process's files
_NAMELESS = 0x400000  # of open: a file that no folder has
_EMPTIED, _NEITHER = 0x200, 3  # of open: a file that is emptied, by who only reads; one to neither read nor write
_SHARED = 0x21  # of mmap: memory that no process's limit counts
_OPEN = 256  # files, sockets and pipes, whose buffers nobody counts
_RESERVED = 2 * 2**30  # bytes of addresses that threads and malloc take, beside memory
_FILES = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # of fcntl: F_DUPFD, a file's flags, its locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
_NAMED = (3, 15, 16, 0x53564D41)  # of prctl: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, a name of memory
_THREADS, _FEW = 32, 32  # of a rank, and more for all ranks
# What ioctl may be asked: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, and of an interface its name, list, flags,
# address, MTU, hardware's address, index and speed.
_ASKED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x8910, 0x8912, 0x8913, 0x8915, 0x8921, 0x8927, 0x8933, 0x8946)
# What sockets may be told, by level: addresses used again, keepalive, lingering, times to wait; no delay, keepalive's numbers;
# IPv6 only. Not the size of their buffers, nor what to drop: with such a socket, memory outlives the process.
_TOLD = {1: (2, 9, 13, 15, 20, 21, 66, 67), 6: (1, 4, 5, 6), 41: (26,)}
_IPV4, _IPV6, _NETLINK = 2, 10, 16  # sockets; by the last, Linux's own, gloo finds its interface
_NEW_USER, _NEW_IPC, _NEW_NET = 0x10000000, 0x08000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x41  # of an interface
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # of the environment
KEPT += ("TRITON_INTERPRET",)  # Triton chooses when it is imported, and ranks as their judge
IMPORTANT = ("files", "processes", "network")  # without these nobody's code should be judged
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050000 | 38  # EPERM; ENOSYS, after which libc tries clone
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06


own_users = False  # whether this process has a user's processes that no other program has


@dataclass(frozen=True)
class Confined:
    """The limits of a rank that runs strangers' code.

    scratch: the folder that may be written to
    seen: the same folder, as the notebook sees it
    memory: bytes that a rank may have beside what it has at the start
    file: bytes of the largest file
    """

    scratch: str
    seen: str = ""
    memory: int = 4 * 2**30
    file: int = 16 * 2**20


def confine(how: Confined, size: int = 1) -> None:
    """Puts up the fences around this process. It has one thread still: fences hold for a thread and those that it starts.

    size: how many ranks there are, whose threads are limited together.

    Raises OSError where the system has the fences and refuses to put them up.
    """
    limit(how.file, how.memory)
    os.environ |= {"HOME": how.scratch, "TMPDIR": how.scratch}  # where matplotlib and others keep their files
    tempfile.tempdir = how.scratch  # to find it, tempfile would remove a file
    limits = [(resource.RLIMIT_NOFILE, _OPEN), (resource.RLIMIT_MEMLOCK, 0)]
    if own_users:  # else the threads of all that the teacher runs would count
        limits.append((resource.RLIMIT_NPROC, _FEW + _THREADS * size))
    for what, most in limits:
        resource.setrlimit(what, (min(most, resource.getrlimit(what)[1]),) * 2)
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as first_to_go:
        first_to_go.write("1000")  # where the machine runs out of memory, no process of the teacher's
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _fence_files(libc, how)
    _done(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)), "capset")  # what root has more than others
    _fence_processes(libc)


def fences() -> str:
    """Names, for a teacher, the fences that hold on this machine."""
    if sys.platform != "linux":
        return "time, size of files"
    version = ctypes.CDLL(None).syscall(_CREATE, None, 0, 1)
    files = ["files"] if version > 0 else []
    processes = ["processes"] if platform.machine() in PROCESSORS else []
    network = ["network"] if _has_namespaces() else []
    return ", ".join(["time", "memory", "size of files", *files, *processes, *network])


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of a teacher's environment that strangers' code may see."""
    return {name: environment[name] for name in KEPT if name in environment}


def leave_the_network() -> bool:
    """Gives this process, which has one thread, and all that it forks a private loopback. Returns whether it could."""
    global own_users
    if sys.platform != "linux":
        return False
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NET | _NEW_IPC) < 0:  # who is not root needs a user namespace for it
        if libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC) < 0:
            return False
        own_users = True
        with contextlib.suppress(OSError):
            for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
                with open(f"/proc/self/{file}", "w") as opened:
                    opened.write(text)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
        return True
    return False


@cache
def _has_namespaces() -> bool:
    """Returns whether a process can leave the network. A new one tries it."""
    if (pid := os.fork()) == 0:
        try:
            os._exit(0 if leave_the_network() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def limit(file: int, memory: int) -> None:
    """Limits the files that this process writes, and its memory.

    file: bytes of the largest file
    memory: bytes beside what it has
    Memory that can no longer be written to, or that grows downwards like a stack, counts among the addresses only.
    """
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file)):
        resource.setrlimit(what, (most, most))
    if sys.platform != "linux":  # macOS does not count it
        return
    for what, name, room in ((resource.RLIMIT_DATA, "VmData", memory), (resource.RLIMIT_AS, "VmSize", memory + _RESERVED)):
        most, highest = _kept(name) + room, resource.getrlimit(what)[1]
        most = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(what, (most, most))


def _kept(name: str) -> int:
    """Bytes of this process.

    name: VmData, private memory that can be written to, or VmSize, all addresses
    """
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def readable() -> list[str]:
    """Files and folders that ranks may read: the system's, Python's, and the packages that they need."""
    import numpy
    import torch

    # Not all of sys.path: its first entry may be the course's own folder.
    library = sys.modules["manyranks"]
    packages = [os.path.dirname(os.path.dirname(one.__file__)) for one in (library, torch, numpy)]
    python = [os.path.join(prefix, part) for prefix in (sys.base_prefix, sys.prefix) for part in _OF_PYTHON]
    return list(dict.fromkeys((*_SYSTEM, *python, *packages)))


def opened(folder: str | os.PathLike) -> str:
    """Returns which of the readable ones has this folder in it, so that ranks may read it; empty where none has."""
    inside, places = os.path.realpath(folder), map(os.path.realpath, readable())
    return next((place for place in places if os.path.commonpath([place, inside]) == place), "")


def _fence_files(libc, how: Confined) -> None:
    version = libc.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return
    every = (1 << max(rights for least, rights in _RIGHTS.items() if version >= least)) - 1
    scoped = 3 if version >= 6 else 0  # abstract sockets, and signals
    made = struct.pack("<QQQ", every, 0, scoped)[: 24 if scoped else 16 if version >= 4 else 8]
    rules = _done(libc.syscall(_CREATE, made, len(made), 0), "landlock_create_ruleset")
    allowed = dict.fromkeys((*readable(), *_OF_PROCESSES), _READ)
    allowed |= dict.fromkeys((*_DEVICES, how.scratch), _WRITE)  # and remove nothing: what is still open would take room unseen
    for path, rights in allowed.items():
        _allow(libc, rules, path, rights & every)
    _done(libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(libc, rules: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                rights &= 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # a file's own
            _done(libc.syscall(_ADD, rules, 1, struct.pack("<Qi", rights, place), 0), f"landlock_add_rule {path}")
        finally:
            os.close(place)


def _fence_processes(libc) -> None:
    """Allows the calls of syscalls.py alone: threads, but no fork, no other program, nothing that reaches another process."""
    processor = platform.machine()
    if processor not in PROCESSORS:
        return
    look, me = numbers(LOOKED_AT, processor), os.getpid()
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, PROCESSORS[processor]), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    for number in numbers(FREE, processor).values():
        steps += _calls(number, (_RETURN, 0, 0, _ALLOW))
    for number in numbers(UNKNOWN, processor).values():
        steps += _calls(number, (_RETURN, 0, 0, _UNKNOWN))
    for name, own in {"kill": (me,), "tgkill": (me,), "prlimit64": (0, me)}.items():
        steps += _calls(look[name], *_one_of(0, own, _ALLOW, _REFUSE))
    for number, place in ((look[name], place) for name, place in (("open", 1), ("openat", 2)) if name in look):
        flags, refuse = (_LOAD, 0, 0, 16 + 8 * place), (_RETURN, 0, 0, _REFUSE)
        neither = [flags, (_AND, 0, 0, _NEITHER), (_EQUAL, 0, 1, _NEITHER), refuse]  # Landlock asks no right for these
        emptied = [flags, (_AND, 0, 0, _EMPTIED | 3), (_EQUAL, 0, 1, _EMPTIED), refuse]
        steps += _calls(number, *neither, *emptied, *_bits(place, _NAMELESS, _REFUSE, _ALLOW))
    steps += _calls(look["mmap"], *_bits(3, _SHARED, _REFUSE, _ALLOW))
    steps += _calls(look["clone"], *_bits(0, _A_THREAD, _ALLOW, _REFUSE))
    about_links = [(_EQUAL, 0, 2, _NETLINK), (_LOAD, 0, 0, 32), (_EQUAL, 1, 0, 0)]  # of its protocols, the one that gloo asks
    family = [(_LOAD, 0, 0, 16), (_EQUAL, 5, 0, _IPV4), (_EQUAL, 4, 0, _IPV6), *about_links]
    steps += _calls(look["socket"], *family, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW))
    pair = [(_LOAD, 0, 0, 16), (_EQUAL, 0, 3, 1), (_LOAD, 0, 0, 24), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1)]
    steps += _calls(look["socketpair"], *pair, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW))  # others reach UNIX sockets
    told = [step for level, names in _TOLD.items() for step in _calls(level, *_one_of(2, names, _ALLOW, _REFUSE))]
    steps += _calls(look["setsockopt"], (_LOAD, 0, 0, 24), *told, (_RETURN, 0, 0, _REFUSE))
    steps += _calls(look["fcntl"], *_one_of(1, _FILES, _ALLOW, _REFUSE))
    steps += _calls(look["prctl"], *_one_of(0, _NAMED, _ALLOW, _REFUSE))
    steps += _calls(look["ioctl"], *_one_of(1, _ASKED, _ALLOW, _REFUSE))
    steps += [(_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code))
    _done(libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0), "seccomp")


def _calls(number: int, *steps: tuple) -> list[tuple]:
    """These steps for the system call of this number. The last one returns."""
    return [(_EQUAL, 0, len(steps), number), *steps]


def _one_of(argument: int, values: tuple[int, ...], then: int, otherwise: int) -> list[tuple]:
    looks = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LOAD, 0, 0, 16 + 8 * argument), *looks, (_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, then)]


def _bits(argument: int, bits: int, then: int, otherwise: int) -> list[tuple]:
    """Steps that return `then` where all of these bits are set."""
    look = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, bits), (_EQUAL, 1, 0, bits)]
    return [*look, (_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, then)]


def _done(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
