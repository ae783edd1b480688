"""Bytes on the wire: what the kernel of the operating system says each TCP socket sent and received.

Linux keeps the counters in `struct tcp_info` (include/uapi/linux/tcp.h, since 4.19): tcpi_bytes_received is the 64-bit
number at offset 128, tcpi_bytes_sent at 200 and tcpi_bytes_retrans at 208; tcpi_notsent_bytes, the 32-bit number at 144,
has been written to the socket and is about to leave, so it counts as sent. Other systems have no such counters.
"""

import os
import socket
import struct
import sys

TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_RECEIVED, _SENT, _RESENT, _WAITING = 128, 200, 208, 144

Counters = dict[str, tuple[int, int]]  # socket -> (bytes sent, bytes received)

_store: int | None = None  # where ranks are on several machines: the port at which the group's members find each other


def unavailable() -> str | None:
    """Says why bytes cannot be counted here, or returns None where they can."""
    if TCP_INFO is not None:
        return None
    return f"this system ({sys.platform}) does not count a socket's bytes; Linux does, through TCP_INFO"


def beyond_the_loopback(store: int) -> None:
    """Counts sockets to all machines from now on, but for those from and to this port."""
    global _store
    _store = store


def counters() -> Counters:
    """Bytes sent and received so far by each TCP socket that this process has open to other ranks."""
    counted: Counters = {}
    for fd in os.listdir("/proc/self/fd") if TCP_INFO is not None else ():
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                counted |= {name: pair} if (pair := _read(int(fd))) else {}
        except OSError:  # closed since the folder was listed, or not connected
            continue
    return counted


def moved(before: Counters, after: Counters) -> tuple[int, int]:
    """Bytes sent and received between two readings; a socket that is new counts from zero."""
    sent = sum(s - before.get(name, (0, 0))[0] for name, (s, _) in after.items())
    received = sum(r - before.get(name, (0, 0))[1] for name, (_, r) in after.items())
    return sent, received


def _read(fd: int) -> tuple[int, int] | None:
    # A socket object closes its fd when it goes: give it a duplicate, or gloo loses its connection.
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        if not _to_a_rank(sock.getsockname(), sock.getpeername()):
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
    sent = _number(info, _SENT) - _number(info, _RESENT) + struct.unpack_from("=I", info, _WAITING)[0]
    return sent, _number(info, _RECEIVED)


def _to_a_rank(mine: tuple, other: tuple) -> bool:
    if _store is None:
        return other[0].startswith(("127.", "::1", "::ffff:127."))
    return _store not in (mine[1], other[1])


def _number(info: bytes, offset: int) -> int:
    return struct.unpack_from("=Q", info, offset)[0]
