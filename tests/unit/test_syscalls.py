"""The numbers of system calls are those that libseccomp has, for each processor."""

import ctypes
import ctypes.util

import pytest

from manyranks.world.fences import syscalls

LIBRARY = ctypes.util.find_library("seccomp")


@pytest.mark.skipif(not LIBRARY, reason="needs libseccomp")
@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
@pytest.mark.parametrize("table", ["FREE", "LOOKED_AT", "UNKNOWN"])
def test_numbers_are_those_of_libseccomp(table, processor):
    resolve = ctypes.CDLL(LIBRARY).seccomp_syscall_resolve_name_arch
    text, number = getattr(syscalls, table), syscalls.PROCESSORS[processor]
    own = {one.split()[0]: resolve(number, one.split()[0].encode()) for one in text.split(";")}
    assert syscalls.numbers(text, processor) == {name: found for name, found in own.items() if found >= 0}


def test_nothing_is_there_twice_and_what_reaches_others_is_not_there():
    names = [one.split()[0] for table in (syscalls.FREE, syscalls.LOOKED_AT, syscalls.UNKNOWN) for one in table.split(";")]
    assert len(names) == len({*names})
    others = {"fork", "execve", "ptrace", "process_vm_readv", "io_uring_setup", "keyctl", "unshare", "mount", "sendmsg"}
    others |= {"sync", "modify_ldt", "membarrier", "personality", "open_tree", "splice", "tee", "shmget", "unlink", "rename"}
    assert not others & {*names}
