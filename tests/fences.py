"""Things that strangers try on their ranks, in Python, and must not reach. _FILE_, _UNIX_, _PORT_, _PID_ are put in."""

OUTSIDE = {
    "chmod": "os.chmod(_FILE_, 0)",
    "utime": "os.utime(_FILE_, (0, 0))",
    "a UNIX socket": "socket.socket(socket.AF_UNIX).connect(_UNIX_)",
    "a UNIX socket of a pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', _UNIX_)",
    "shared memory": "open('/dev/shm/of-manyranks', 'w').write('x')",
    "passwords": "found = open('/etc/shadow').read()",
    "the network outside": "socket.create_connection(('127.0.0.1', _PORT_), timeout=3).send(b'x')",
    "a signal": "os.kill(_PID_, 0)",
    "a thread's signal": "done(libc.syscall(234 if x86 else 131, _PID_, _PID_, 0))",
    "another's limits": "resource.prlimit(_PID_, resource.RLIMIT_CPU, resource.prlimit(_PID_, resource.RLIMIT_CPU))",
    "another's priority": "os.setpriority(os.PRIO_PROCESS, _PID_, os.getpriority(os.PRIO_PROCESS, _PID_))",
    "another's cores": "os.sched_setaffinity(_PID_, os.sched_getaffinity(0))",
    "signals of files": "fcntl.fcntl(0, 8, _PID_)",
    "signals of sockets": "fcntl.ioctl(socket.socket(), 0x8901, struct.pack('i', _PID_))",
    "a file's flags": "fcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40086602, struct.pack('i', 0))",
    "what others open": "done(libc.inotify_add_watch(libc.inotify_init(), b'/tmp', 0xFFF))",
    "a file in memory": "os.memfd_create('x')",
    "memory that is shared": "mmap.mmap(-1, 1 << 20)",
    "memory of a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
    "memory that is written and sealed, again and again": "for _ in range(50): done(libc.mprotect(pages(0x22), 1 << 28, 1))",
    "memory that grows downwards": "for _ in range(50): pages(0x122)",
    "memory of pipes": "done(libc.syscall(278 if x86 else 75, os.pipe()[1], struct.pack('QQ', 0, 0), 1, 0))",
    "memory of sockets": "found = len([socket.socketpair() for _ in range(150)])",
    "memory that outlives a process": "socket.socket().setsockopt(socket.IPPROTO_IP, 21, 255)",
    "more memory of a socket": "socket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)",
    "a filter of its own": "socket.socket().setsockopt(socket.SOL_SOCKET, 26, bytes(16))",
    "memory that stays": "done(libc.mlock(ctypes.c_void_p(pages(0x22)), ctypes.c_size_t(4096)))",
    "files of a thread": "done(libc.syscall(436, 900, 901, 2))",
    "a file for another process": "found = socket.socketpair()[0].sendmsg([b'x'])",
    "a lease": "fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 1)",
    "what happens in a folder": "fcntl.fcntl(os.open('/usr', os.O_RDONLY), 1026, 1)",
    "the user's watches": "done(libc.inotify_init())",
    "the machine's queues": "done(libc.syscall(206 if x86 else 0, 8, ctypes.byref(ctypes.c_ulong())))",
    "the kernel's lists of sockets": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)",
    "a file that is cut": "os.truncate(os.__file__, 0)",
    "a file that is emptied by who reads": "os.open('x', os.O_RDONLY | os.O_CREAT | os.O_TRUNC)",
    "a file to neither read nor write": "open('x', 'w'); os.open('x', 3)",
    "a file that is emptied by who neither reads nor writes": "open('x', 'w'); os.open('x', 3 | os.O_TRUNC)",
    "attributes of files": "done(libc.getxattr(b'/etc/passwd', b'user.x', None, 0))\n        found = ctypes.get_errno()",
    "attributes by name": "os.listxattr(os.__file__)",
    "memory that others have": "done(libc.syscall(31 if x86 else 195, 0, 13, ctypes.byref(ctypes.create_string_buffer(256))))",
    "rules of its own": "done(libc.prctl(22, 2, struct.pack('HQ', 0, 0), 0, 0))",
    "a life of its own": "done(libc.prctl(1, 0, 0, 0, 0))",
    "rules by seccomp": "done(libc.syscall(317 if x86 else 277, 2, 0, struct.pack('4x')))",
    "room without size": "done(libc.fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 1, 0, 4096))",
    "a file without a name": "os.open('.', os.O_TMPFILE | os.O_RDWR)",
    "removal": "open('y', 'w'); os.remove('y')",
    "a new name": "open('y', 'w'); os.rename('y', 'z')",
    "a link": "os.symlink('/etc/passwd', 'link')",
    "a hard link": "open('y', 'w'); os.link('y', 'z')",
    "a pipe": "os.mkfifo('pipe')",
}
TOOLS = """
import ctypes, fcntl, mmap, os, platform, resource, socket, struct
libc, x86 = ctypes.CDLL(None, use_errno=True), platform.machine() == "x86_64"
libc.mmap.restype, libc.mprotect.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
def pages(flags):
    found = libc.mmap(None, ctypes.c_size_t(1 << 28), 3, flags, -1, ctypes.c_size_t(0))
    done(-1 if found == 2**64 - 1 else 0)
    return found
"""
SOCKETS = """
import gc, socket, struct, threading, time
def shard(tensor):
    found = sorted((one for one in gc.get_objects() if isinstance(one, socket.socket)), key=lambda one: one.fileno())
    ATTEMPT
"""

ATTEMPTS_ON_SOCKETS = {
    "a message that says it is huge": "[one.sendall(struct.pack('<IQ', 1, 1 << 50)) for one in found]",
    "a flood of frames": "[one.sendall(struct.pack('<I', 3_000_000) + bytes(1 << 20)) for one in found]; time.sleep(60)",
    "half a message to every question": "[one.sendall(struct.pack('<IQ', 1, 500) + b'x') for one in found]; time.sleep(60)",
    "late answers without end": """
    from manyranks.world.rank import process as rank
    send, one = rank.messages.send, struct.pack("<IQ", 1, 1) + b"0"
    rank.messages.send = lambda sock, frames: sock is found[1] or send(sock, frames)
    found[1].sendall(one[:6])
    while time.sleep(0.015) is None:
        found[1].sendall(one[6:] + one[:6])
""",
    "a reply that drips": "[one.sendall(struct.pack('<IQ', 1, 500)) for one in found]; "
    "[(one.sendall(b'x'), time.sleep(0.5)) for _ in range(600) for one in found]",
    "replies without end while one rank raises and another waits": """
    from manyranks.world.rank import plain, process as rank
    while dist.get_world_size() > 2:
        1 / dist.get_rank()
        [rank.messages.send(one, [b"r", *plain.pack(rank.Reply())]) for one in found[:1] if dist.get_rank() == 1]
        time.sleep(0.03)
""",
}

BESIDE = """
import socket, threading
def shard(tensor):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        other, _ = server.accept()
        sender = threading.Thread(target=sock.sendall, args=(bytes(5_000_000),))
        sender.start()
        got = 0
        while got < 5_000_000:
            got += len(other.recv(1 << 20))
        other.close()
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n)).chunk(n)[rank].clone()
"""

COOKIE = """
import socket
with socket.socket() as one:
    cookie = one.getsockopt(socket.SOL_SOCKET, 71, 8).hex()  # SO_NETNS_COOKIE: no network's comes twice, its inode may
"""

PORTS = """
import socket
def shard(tensor):
    server = socket.create_server(("127.0.0.1", 20000), backlog=64)
    for port in range(*map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
                one.connect(("127.0.0.1", 20000))
                other, _ = server.accept()
            except OSError:
                continue
        other.close()
"""

FULL = {
    "many files": "for i in range(3000): open(f'{i}', 'w').write('x')",
    "large files": "for i in range(40): open(f'{i}', 'wb').write(bytes(15_000_000))",
    "large files while what is sent is read": """
    def later():
        for i in range(40):
            open(f'{i}', 'wb').write(bytes(15_000_000))
    import threading
    threading.Timer(1, later).start()
    return tensor
""",
    "folders in folders": "name = str(os.getpid())\n    for i in range(3000):\n        os.mkdir(name); os.chdir(name)",
}

ATTEMPTS = {
    "changes the check": """
import builtins, manyranks.grade.trial
manyranks.grade.trial.run_script = lambda *a: 1 / 0
builtins.AssertionError = int
""",
    "changes torch": """
dist.get_world_size = lambda *a: 1
torch.equal = torch.allclose = lambda *a, **k: True
""",
    "changes what is noted": """
from manyranks.measure.journal import Journal
Journal.__exit__ = lambda *a: True
""",
    "ends Python": "import sys\nsys.exit(0)\n",
    "raises": "1 / 0\n",
    "is no Python": "%matplotlib inline\n!ls\nthis is no Python\n",
    "prints without end": "for _ in range(50_000): print('x' * 1000)\n",
    "has its own atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
}

SLOW_TO_COLOR = [  # where a cell says what language its lines are in
    "!echo $'" + 120 * "\\",
    "'\"'+'\\\\'*120+'\\n!'",
    "%%perl\nx = m{" + 120 * "\\" + "\n!",
    '"""' + 9_000 * '\\"',
]

GROUP = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
ACCIDENTS = {  # honest cells of a notebook, which has no process group, before a right answer
    "a group that ends": [GROUP, "dist.all_reduce(torch.ones(2))", "dist.destroy_process_group()"],
    "a group that stays": [f"if not dist.is_initialized():\n    {GROUP}", "dist.new_group([0])"],
    "a message to nobody": ["dist.isend(torch.ones(3), 1).wait()", "dist.recv(torch.ones(3), 1)"],
    "annotations": [
        "from __future__ import annotations",
        "del dist\ndef helper(x: Nowhere): pass\nimport torch.distributed as dist",  # which comes back if the line before runs
    ],
    "a home": [  # as matplotlib looks for one
        "del torch\nimport os, tempfile\nopen(tempfile.mkdtemp(dir=os.environ['HOME']) + '/x', 'x').close()",
        "open(tempfile.mkdtemp() + '/x', 'x').close()\nimport torch",  # which comes back if the line before runs
    ],
    "modes of torch": [
        "import warnings\nwarnings.simplefilter('error')\ntorch.set_grad_enabled(False)",
        "torch.set_default_dtype(torch.float16)\ntorch.set_default_device('meta')",
        "torch.use_deterministic_algorithms(True)\ntorch.autograd.set_detect_anomaly(True)",
    ],
}
