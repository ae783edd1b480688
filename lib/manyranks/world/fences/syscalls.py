"""System calls of Linux by name, with their numbers on x86-64 and ARM64: the ones that strangers' code may need.

The numbers are libseccomp's; tests/unit/test_syscalls.py compares them, and adds what is asked for here.
"""

PROCESSORS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as platform.machine() and as seccomp call them
FREE = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; close 3 57; fstat 5 80; newfstatat 262 79;
stat 4 -; lstat 6 -; statx 332 291; lseek 8 62; munmap 11 215; mprotect 10 226; mremap 25 216; madvise 28 233; brk 12 214;
rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; sigaltstack 131 132; setitimer 38 103; getitimer 36 102;
alarm 37 -; access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49;
fchdir 81 50; mkdir 83 -; mkdirat 258 34; getdents64 217 61; statfs 137 43; fstatfs 138 44; ftruncate 77 46; fsync 74 82;
fdatasync 75 83; fadvise64 221 223; flock 73 32; sendfile 40 71; copy_file_range 326 285; umask 95 166; dup 32 23; dup2 33
-; dup3 292 24; pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -;
epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; eventfd2 290 19; futex 202 98; nanosleep 35
101; clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; times 100 153; getpid 39
172; gettid 186 178; getppid 110 173; getpgrp 111 -; getpgid 121 155; getsid 124 156; getuid 102 174; geteuid 107 175;
getgid 104 176; getegid 108 177; getrlimit 97 163; getrusage 98 165; sysinfo 99 179; uname 63 160; sched_getaffinity 204
123; sched_yield 24 124; getcpu 309 168; set_robust_list 273 99; set_tid_address 218 96; rseq 334 293; getrandom 318 278;
exit 60 93; exit_group 231 94; restart_syscall 219 128; arch_prctl 158 -; connect 42 203; accept 43 202; accept4 288 242;
bind 49 200; listen 50 201; getsockname 51 204; getpeername 52 205; getsockopt 55 209; sendto 44 206; recvfrom 45 207;
recvmsg 47 212; shutdown 48 210
"""
LOOKED_AT = """
open 2 -; openat 257 56; mmap 9 222; clone 56 220; socket 41 198; socketpair 53 199; setsockopt 54 208; fcntl 72 25; ioctl
16 29; prctl 157 167; kill 62 129; tgkill 234 131; prlimit64 302 261
"""  # some of them with some arguments only
UNKNOWN = """
clone3 435 435; openat2 437 437; memfd_create 319 279; memfd_secret 447 447; close_range 436 436
"""  # libc does without where they are not there, and nobody looks into their arguments


def numbers(table: str, processor: str) -> dict[str, int]:
    """Returns the number of each call that this processor has."""
    place, rows = 1 + [*PROCESSORS].index(processor), [one.split() for one in table.split(";")]
    return {row[0]: int(row[place]) for row in rows if row[place] != "-"}
