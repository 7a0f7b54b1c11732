"""The inside of pool.py: a small, warm process that forks once per program, behind walls.

    trainer  -- limits; memory files: program, stdin, stdout -->  worker  (this file, as a script)
             <-- one byte: how the program ended ---------------    |  fork
                                                                  program  behind the walls

A program can do no more than write to its stdout and end. How it ended is read from the kernel
(wait4), and what it wrote from the memory file, by the trainer: no message about it passes through
anything it can write to. The worker never reads a program, an input or an output, so that a fork,
which is a copy of its memory, holds nothing about earlier runs.

The walls are put up between the fork and the program's first line, and nothing inside can take them
down:

    Landlock    files by allow-list: Python's libraries, to read; /dev/null and the like. No home,
                no /etc, no /proc, and no place where it could make a file. Nor can the program see
                another process's memory, environment or files.
    seccomp     system calls by allow-list: no fork and no exec (a program is one process; it may
                have threads), no socket, no pipe, no signal to anybody, no ptrace, mount, chmod,
                shared memory, io_uring, bpf, ... All others fail with ENOSYS, as in a kernel that
                lacks them. So subprocess, multiprocessing and asyncio do not work.
    limits      CPU time, address space, size of a file, open files. Root's capabilities are given
                up, or it could lift the limits. What the kernel has no such limit for is watched:
                wall-clock time, threads.

Landlock and seccomp need Linux but no privilege, and work in containers, where namespaces often do
not.

What bounds what a program takes, besides time:

    disk        nothing to bound: a program makes no file. Files that are deleted but still mapped
                would be in nobody's sight, and no limit of the kernel's counts them.
    memory      its address space, and two memory files: what it writes to stdout, and over its
                stdin, each of at most the output limit.
    threads     not strictly. MAX_THREADS is looked at every TICK, or later on a busy machine: a
                program that calls the C library directly was seen to start 10,000 before it was
                ended. To count them as they start, one needs a cgroup of one's own, or a user who
                is not root and has nothing else running (RLIMIT_NPROC).

The next program finds nothing of the one before: no file, and file descriptors of its own.

Not protected against: bugs of the kernel; side channels (timing, caches, how many processes there
are, when a library was last read); asking whether a file of a known name exists, how large and how
old it is, where a symbolic link leads, which group a process belongs to.

Imports are few, but those of programs are made in advance: a fork costs what is loaded, an import
in the fork twenty times that.
"""

import atexit
import bisect  # noqa: F401  for programs, as are the next ones
import collections  # noqa: F401
import ctypes
import errno
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import math  # noqa: F401
import os
import re  # noqa: F401
import resource
import select
import signal
import site
import socket
import string  # noqa: F401
import struct
import sys
import time
import types
import typing  # noqa: F401

OK, WRONG_EXIT, ERROR, TIMEOUT, MEMORY, OUTPUT, FAILED = range(7)
"""How a program ended: the worker's answer, and the values of `Status`. FAILED: the worker could
not do its work, which says nothing about the program; the reason follows.
"""
JOB = struct.Struct("ddqq")
"""CPU seconds, wall-clock seconds, bytes of memory, bytes of output. Three file descriptors come
with it.
"""

TICK = 0.005  # seconds between two looks at a running program
MAX_THREADS = 64
MAX_OPEN_FILES = 64
# exit codes: an exception that nobody caught; one of no memory; the walls did not go up
UNCAUGHT, NO_MEMORY, NO_WALLS = 241, 242, 243
DEAF_TO = (15, 1)  # SIGTERM, SIGHUP: a worker ends when the trainer does, not before
SIG_DFL, SIG_IGN = None, ctypes.c_void_p(1)
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ------------------------------------------------------------------ wall 1: Landlock, files
# rights and system calls of linux/landlock.h
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446


def landlock(libraries: list[str]):
    """A function that confines the process calling it. OSError: the kernel has no Landlock."""
    abi = checked(LIBC.syscall(CREATE_RULESET, None, 0, 1))
    # everything that this kernel can take away: +REFER in version 2, +TRUNCATE in 3, +IOCTL_DEV in
    # 5
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0  # TCP: bind, connect
    scope = 3 if abi >= 6 else 0  # abstract UNIX sockets, signals
    rules = checked(LIBC.syscall(CREATE_RULESET, struct.pack("QQQ", rights, network, scope), 24, 0))
    allowed = {path: READ_FILE | READ_DIR for path in libraries}
    allowed |= {"/dev/null": READ_FILE | WRITE_FILE}
    allowed |= {"/dev/zero": READ_FILE, "/dev/urandom": READ_FILE}
    for path in filter(os.path.exists, allowed):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        wanted = allowed[path] if os.path.isdir(path) else allowed[path] & ~READ_DIR
        checked(LIBC.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", wanted, fd), 0))
        os.close(fd)

    return lambda: checked(LIBC.syscall(RESTRICT_SELF, rules, 0))


# ------------------------------------------------------------------ wall 2: seccomp, system calls
ALLOWED = """
    read readv pread64 write writev pwrite64 lseek close dup dup2 dup3 poll ppoll select pselect6
    fstat stat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
    readlink readlinkat getcwd chdir fchdir getdents getdents64 ftruncate umask
    brk mmap munmap mremap mprotect madvise
    futex set_robust_list rseq gettid exit exit_group sched_yield sched_getaffinity getcpu
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait
    sigaltstack pause restart_syscall alarm setitimer getitimer
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage
    getpid getppid getpgrp getpgid getsid
    getuid geteuid getgid getegid getresuid getresgid getgroups
    uname sysinfo getrandom getrlimit setrlimit
""".split()
COMPARISON = struct.Struct("IiQQ")  # struct scmp_arg_cmp
EQUAL, MASKED_EQUAL = 4, 7  # SCMP_CMP_EQ: argument == a. SCMP_CMP_MASKED_EQ: argument & a == b
THREAD = 0x00010500  # CLONE_THREAD, CLONE_VM, CLONE_FILES
NAMESPACES = 0x7E020080  # every CLONE_NEW*
MODE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
# system call, number of the argument, comparison, a, b; several lines of a call are alternatives
ALLOWED_IF = [
    # threads only; glibc falls back to it from clone3
    ("clone", 0, MASKED_EQUAL, THREAD | NAMESPACES, THREAD),
    # no second table of open files, by either call: the limit is one for each
    ("close_range", 2, EQUAL, 0, 0),
    ("prlimit64", 0, EQUAL, 0, 0),  # one's own limits, not another process's
    # To open a file read-only with O_TRUNC empties it, which Landlock takes for reading before
    # Linux 6.2
    ("openat", 2, MASKED_EQUAL, os.O_TRUNC, 0),
    ("openat", 2, MASKED_EQUAL, os.O_TRUNC | MODE, os.O_TRUNC | os.O_WRONLY),
    ("openat", 2, MASKED_EQUAL, os.O_TRUNC | MODE, os.O_TRUNC | os.O_RDWR),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG:
    # signals to anybody
    *[("fcntl", 1, EQUAL, command, 0) for command in (0, 1, 2, 3, 4, 1030)],
    # TCGETS, which is isatty; TIOCGWINSZ; FIONCLEX, FIOCLEX
    *[("ioctl", 1, EQUAL, request, 0) for request in (0x5401, 0x5413, 0x5450, 0x5451)],
]


def seccomp():
    """A function that confines the process calling it. OSError: libseccomp is not installed."""
    lib = ctypes.CDLL("libseccomp.so.2")
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(0x00050000 | errno.ENOSYS))  # SCMP_ACT_ERRNO
    rules = [(name, 0, None) for name in ALLOWED]
    rules += [(name, 1, COMPARISON.pack(*comparison)) for name, *comparison in ALLOWED_IF]
    for name, count, comparison in rules:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # not on this architecture
            continue
        allow = 0x7FFF0000  # SCMP_ACT_ALLOW
        if lib.seccomp_rule_add_array(context, allow, number, count, comparison):
            raise OSError(f"seccomp: no rule for {name}")

    # Once here, to a file and back; `seccomp_load` would make it anew for every program
    file = os.memfd_create("filter")
    lib.seccomp_export_bpf(context, file)
    code = ctypes.create_string_buffer(os.pread(file, 1 << 20, 0))
    os.close(file)
    program = struct.pack("HP", (len(code) - 1) // 8, ctypes.addressof(code))  # struct sock_fprog

    return lambda keep_alive=code: checked(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


# ------------------------------------------------------------------ wall 3: privileges and limits
def give_up_privileges():
    """Root's capabilities, with which a program could lift its limits, and those that a setuid
    program would give. Forks inherit both.
    """
    # version 3 of the interface; the empty sets
    checked(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))  # which Landlock and seccomp need, too


def limit(cpu: float, memory: int, output: int):
    """For the process calling it, for good. memory: of address space, the interpreter's too."""
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))  # no core dump, whoever collects them
    for name, value in [
        # in whole seconds only, so `watch` comes first; this is for want of it
        ("RLIMIT_CPU", int(cpu) + 2),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", output + 1),  # one more, to tell too much from just enough
        ("RLIMIT_NOFILE", MAX_OPEN_FILES),
    ]:
        what = getattr(resource, name)
        try:
            resource.setrlimit(what, (value, value))
        except (ValueError, OverflowError):
            hard = resource.getrlimit(what)[1]
            raise OSError(f"{name} cannot be {value}, its hard limit is {hard} (ulimit)") from None


def standing_walls(libraries: list[str]) -> dict:
    """Name of a wall -> function that puts it up. A wall stands if a process of its own has run
    into it.
    """
    standing = {}
    for name, build, forbidden in [
        ("Landlock", lambda: landlock(libraries), lambda: os.listdir("/")),
        ("seccomp", seccomp, os.fork),
    ]:
        try:
            put_up = build()
        except OSError:
            continue
        pid = os.fork()
        if pid == 0:
            try:
                put_up()
            except OSError:
                os._exit(1)
            try:
                forbidden()
            except OSError:
                os._exit(0)
            os._exit(1)
        if os.waitpid(pid, 0)[1] == 0:
            standing[name] = put_up
    return standing


# ------------------------------------------------------------------ the program's side of the fork
def become(files: list[int], limits: tuple, walls: list, worker: int, failure: int):
    """From a copy of the worker, of that process id, to the program. Never returns.

    failure: a pipe for the reason why it cannot. The program itself does not have it, so it cannot
    pretend.
    """
    program, stdin, stdout = files
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the program goes with its worker
        for number in DEAF_TO:
            LIBC.signal(number, SIG_DFL)
        os.setsid()
        # opened anew for each: flags such as O_NONBLOCK belong to what was opened, and would pass
        # to the next program
        stderr = os.open("/dev/null", os.O_WRONLY)
        for fd, file in enumerate([stdin, stdout, stderr]):
            os.dup2(file, fd)
        text = os.pread(program, os.fstat(program).st_size, 0)
        limit(*limits)
        for put_up in walls:
            put_up()
    except BaseException as error:
        os.write(failure, (str(error) or type(error).__name__).encode()[:500])
        os._exit(NO_WALLS)
    os.closerange(3, 1 << 20)  # the pipe and the rest
    if os.getppid() == worker:  # or else it was gone before the prctl
        try:
            os._exit(run(text))
        finally:  # `run` has been tampered with
            os._exit(1)
    os._exit(1)


def run(text: bytes) -> int:
    """What `python program.py` does with a file of this text, until the interpreter has ended.

    Returns the exit code.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(
        __file__="program.py", __builtins__=__builtins__, __annotations__={}, __cached__=None
    )
    sys.argv = [main.__file__]
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), main.__dict__)
        code = 0
    except BaseException as error:
        code = exit_code(error)
    # Now what Py_FinalizeEx does, but for taking every module apart, which would be most of a short
    # run's time
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        stdout = getattr(sys, "stdout", None)
        if not getattr(stdout, "closed", stdout is None):
            stdout.flush()
    except BaseException as error:
        # 120 is Python's, too: stdout cannot be written
        code = NO_MEMORY if isinstance(error, MemoryError) else code or 120
    try:
        main.__dict__.clear()  # finalises what it held: a file of its own over stdout is flushed
        sys.__stdout__.flush()
    except BaseException:
        pass
    return code


def exit_code(error: BaseException) -> int:
    """What a shell sees of sys.exit's argument; codes of ours for exceptions that nobody caught."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        return 1
    enomem = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return NO_MEMORY if enomem or isinstance(error, MemoryError) else UNCAUGHT


# ------------------------------------------------------------------ the worker's side of the fork
def watch(pid: int, link: socket.socket, cpu: float, wall: float) -> int | None:
    """Wait until the program ends by itself (None), or must be ended (why)."""
    ended, deadline = os.pidfd_open(pid), time.monotonic() + wall
    clock = (~pid << 3) | 2  # CPU time of all its threads, clock_getcpuclockid(3)
    poll, why = select.poll(), None
    poll.register(ended, select.POLLIN)
    poll.register(link, select.POLLIN)  # nothing is sent during a run: readable means closed
    while why is None:
        events = dict(poll.poll(1000 * TICK))
        if ended in events:
            break
        if events or time.clock_gettime(clock) > cpu or time.monotonic() > deadline:
            why = TIMEOUT  # or the trainer is gone, and nobody will be told
        elif os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS:
            why = ERROR
    os.close(ended)
    return why


def supervise(pid: int, stdout: int, link: socket.socket, limits: tuple, failure: int) -> int:
    """How the program ended; when this returns, nothing of it is left but its output.

    OSError: it could not be started.
    """
    cpu, wall, _, output = limits
    why = watch(pid, link, cpu, wall)
    # only where seccomp is missing is there a group, which outlives the program
    for kill in (os.kill, os.killpg):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == NO_WALLS:
        try:
            raise OSError(os.read(failure, 500).decode())
        except BlockingIOError:
            pass  # the program's own exit code
    if code == -signal.SIGXFSZ or os.fstat(stdout).st_size > output:
        return OUTPUT
    if why is not None:
        return why
    if usage.ru_utime + usage.ru_stime > cpu:
        return TIMEOUT
    if code == -signal.SIGKILL:  # not ours, and not its own: the kernel's, for want of memory
        return MEMORY
    return {0: OK, UNCAUGHT: ERROR, NO_MEMORY: MEMORY}.get(code, WRONG_EXIT)


def prepare(site_packages: list[str]) -> dict:
    """What is the same for all programs; returns `standing_walls`."""
    give_up_privileges()
    # Nobody can make a file in /proc, even where Landlock is missing
    os.chdir("/proc")
    for number in DEAF_TO:
        LIBC.signal(number, SIG_IGN)  # the module's is slow to undo in every fork
    # Python ignores this signal; here, too large an output ends a program
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.path += site_packages
    # `exit` and `quit`; what else site.py does is for interactive use, and reads the user's files
    site.setquit()
    site.setcopyright()
    site.sethelper()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should memory run out, then not the trainer
    libraries = [*sys.path, f"{sys.base_prefix}/lib", "/lib", "/lib64"]
    libraries += ["/usr/lib", "/usr/lib64", "/usr/local/lib"]
    libraries += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return standing_walls(libraries)


def serve(link: socket.socket, walls: dict):
    """One program after the other, until the trainer closes the socket."""
    with open("/proc/self/statm") as file:
        own_memory = int(file.read().split()[0]) * resource.getpagesize()
    failure, told = os.pipe2(os.O_NONBLOCK)
    compile("", "program.py", "exec")  # the first call makes 200 classes, which every fork then has
    gc.collect()
    gc.freeze()  # a program's own collections leave these objects, and so their memory pages, alone
    worker = os.getpid()
    link.send(",".join(walls).encode() or b"-")
    while True:
        message, files, _, _ = socket.recv_fds(link, JOB.size, 3)
        if not message:  # closed
            break
        cpu, wall, memory, output = limits = JOB.unpack(message)
        pid = os.fork()
        if pid == 0:
            bounds = (cpu, own_memory + memory, output)
            become(files, bounds, list(walls.values()), worker, told)
        answer = supervise(pid, files[2], link, limits, failure)
        for fd in files:
            os.close(fd)
        link.send(bytes([answer]))  # ConnectionError: the trainer is gone


def main(link: socket.socket, parent: int, site_packages: list[str]):
    """parent: the trainer's process id."""
    # Should a process that the trainer has forked outlive it, then so does this one's socket. The
    # kernel sends the signal when the thread ends that started this process: `_fill` in pool.py
    # starts another one if that thread alone has ended
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if os.getppid() == parent:  # or else it was gone before the prctl
            serve(link, prepare(site_packages))
    except ConnectionError:
        pass  # the trainer is gone, and has not read the last answer
    except Exception as error:
        reason = str(error) or type(error).__name__
        link.send(bytes([FAILED]) + reason.encode()[:500])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
