"""The sandbox: hostile programs are contained and told apart, and leave nothing behind.

Right programs find stdin and stdout as in a shell.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

from common.errors import UserError
from common.sandbox import LAYERS, Result, Sandbox, Status, pool, same_output, worker

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

OK, WRONG_EXIT, ERROR, TIMEOUT, MEMORY, OUTPUT = Status
SECRET = "hunter2-in-the-environment"


@pytest.fixture(scope="module")
def sandbox():
    os.environ["DUET_TEST_SECRET"] = SECRET
    with Sandbox(workers=6) as sandbox:
        yield sandbox
    del os.environ["DUET_TEST_SECRET"]


def processes(sandbox: Sandbox) -> int:
    """Children of this process, and forks of the sandbox's workers, whoever their parent is now."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        workers = command.split("\0")[4:7:2] == [worker.__file__, str(os.getpid())]
        count += parent == os.getpid() or workers
    return count


def footprint(sandbox: Sandbox) -> dict:
    """What must not grow: processes, descriptors."""
    workers = [one.process.pid for one in sandbox.workers]
    return {
        "processes": processes(sandbox),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the workers": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers),
    }


# ------------------------------------------------------------------ hostile programs
# name -> (program, the statuses it may have, what it may print); CANARY is a file of the user's,
# TRAINER the id of this process
HOSTILE = {
    # --- time
    "endless loop": ("while True: pass", TIMEOUT),
    "endless loop in C": ("10 ** 10 ** 9", TIMEOUT),
    "catastrophic regular expression": ("import re; re.match('(a+)+b', 'a' * 64)", TIMEOUT),
    "signals ignored": (
        """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """,
        TIMEOUT,
    ),
    "every exception swallowed": (
        """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
        TIMEOUT,
    ),
    "sleeping past the wall clock": ("import time; time.sleep(1000)", TIMEOUT),
    "waiting for a signal": ("import signal; signal.pause()", TIMEOUT),
    "a thread that never ends": (
        "import threading\ndef f():\n  while True: pass\nthreading.Thread(target=f).start()",
        TIMEOUT,
    ),
    "endless work at exit": (
        "import atexit\n@atexit.register\ndef f():\n  while True: pass",
        TIMEOUT,
    ),
    "stderr flooded": ("import sys\nwhile True: sys.stderr.write('x' * 100000)", TIMEOUT),
    # --- processes and threads
    "fork bomb": ("import os\nwhile True: os.fork()", ERROR),
    "fork bomb that carries on": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        TIMEOUT,
    ),
    "zombie children": ("import os\nfor _ in range(100):\n  if os.fork() == 0: os._exit(0)", ERROR),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(1000)",
        ERROR,
    ),
    "shell": ("import os; print(os.system('sleep 1000 &') != 0)", OK, b"True\n"),
    "subprocess": ("import subprocess; subprocess.run(['sleep', '1000'])", ERROR),
    "exec": ("import os; os.execv('/bin/sh', ['sh', '-c', 'sleep 1000'])", ERROR),
    "multiprocessing": ("import multiprocessing as m; m.Process(target=print).start()", ERROR),
    "thread bomb": (
        """
        import threading, time
        while True: threading.Thread(target=time.sleep, args=(99,)).start()
        """,
        TIMEOUT,
    ),
    "thread bomb, small stacks": (
        """
        import threading, time
        threading.stack_size(32768)
        for _ in range(300): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
        time.sleep(1)
        """,
        ERROR,
    ),
    # --- memory
    "memory balloon": ("x = bytearray(10 ** 10)", MEMORY),
    "memory balloon, slowly": ("x = []\nwhile True: x.append(bytes(10 ** 6))", MEMORY),
    "memory balloon by mmap": ("import mmap; mmap.mmap(-1, 10 ** 10)", MEMORY),
    "deep recursion": ("def f(): return f()\nf()", ERROR),
    "deep recursion, limit lifted": (
        "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(x): return f([x])\nf(0)",
        {MEMORY, WRONG_EXIT, TIMEOUT},
    ),
    "deep recursion in C": (
        """
        import sys; sys.setrecursionlimit(10 ** 9)
        class A:
            def __repr__(self): return repr([self])
        repr(A())
        """,
        {MEMORY, WRONG_EXIT, TIMEOUT},
    ),
    "source that the compiler cannot bear": (
        "x = " + "-" * 200_000 + "1",
        {MEMORY, WRONG_EXIT, ERROR},
    ),
    # --- output and files
    "10 GB of output": ("for _ in range(10 ** 4): print('x' * 10 ** 6)", OUTPUT),
    "10 GB of output, errors ignored": (
        """
        import os, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        while True:
            try: os.write(1, b'x' * 10 ** 6)
            except OSError: pass
        """,
        OUTPUT,
    ),
    "a file": ("open('a', 'w')", ERROR),
    "a file without a name": ("import os; os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", ERROR),
    "a file in shared memory": ("open('/dev/shm/escaped-TRAINER', 'w')", ERROR),
    "a folder": ("import os; os.mkdir('/tmp/escaped-TRAINER')", ERROR),
    "a file of the library's, made": ("import os; open(os.__file__ + 'c', 'w')", ERROR),
    "stdin filled": (
        "import os\nwhile True: os.write(0, bytes(10 ** 6))",
        OUTPUT,
    ),
    "stdout and stdin held by maps": (
        """
        import mmap, os
        held = []
        os.ftruncate(1, 2 ** 20)
        while True:
            for fd in (0, 1):
                held.append(mmap.mmap(os.open(f'/dev/fd/{fd}', os.O_RDWR), 2 ** 20))
                held[-1][:] = bytes(2 ** 20)
        """,
        {MEMORY, ERROR},
    ),
    # --- other people's files
    "write to the home folder": ("open('CANARY.new', 'w')", ERROR),
    "overwrite a file": ("open('CANARY', 'w')", ERROR),
    "append to a file": ("open('CANARY', 'a')", ERROR),
    "empty a file that is opened to read": (
        "import os; os.open('CANARY', os.O_RDONLY | os.O_TRUNC)",
        ERROR,
    ),
    "truncate": ("import os; os.truncate('CANARY', 0)", ERROR),
    "delete": ("import os; os.unlink('CANARY')", ERROR),
    "rename": ("import os; os.rename('CANARY', 'mine')", ERROR),
    "chmod": ("import os; os.chmod('CANARY', 0o777)", ERROR),
    "utime": ("import os; os.utime('CANARY', (0, 0))", ERROR),
    "setxattr": ("import os; os.setxattr('CANARY', 'user.x', b'1')", ERROR),
    "read a file": ("print(open('CANARY').read())", ERROR),
    "list the home folder": ("import os; print(os.listdir(os.path.dirname('CANARY')))", ERROR),
    "read /etc/shadow": ("print(open('/etc/shadow').read())", ERROR),
    "read /etc/passwd": ("print(open('/etc/passwd').read())", ERROR),
    "write to Python's library": ("import os; open(os.__file__, 'a')", ERROR),
    "symlink out of the folder": (
        "import os; os.symlink('CANARY', 'a'); print(open('a').read())",
        ERROR,
    ),
    "hard link into the folder": (
        "import os; os.link('CANARY', 'a'); print(open('a').read())",
        ERROR,
    ),
    "out of the folder by ..": ("open('../escaped-TRAINER', 'w')", ERROR),
    "out of the folder by chdir": (
        "import os; os.chdir('/tmp'); open('escaped-TRAINER', 'w')",
        ERROR,
    ),
    "named pipe": ("import os; os.mkfifo('a')", ERROR),
    # --- secrets and other processes
    "environment": (
        "import os; print('DUET_TEST_SECRET' in os.environ, 'HOME' in os.environ)",
        OK,
        b"False False\n",
    ),
    "environment of the trainer": ("print(open('/proc/TRAINER/environ').read())", ERROR),
    "environment of the worker": (
        "import os; print(open(f'/proc/{os.getppid()}/environ').read())",
        ERROR,
    ),
    "memory of the trainer": ("open('/proc/TRAINER/mem', 'rb')", ERROR),
    "memory of the worker": ("import os; open(f'/proc/{os.getppid()}/mem', 'rb')", ERROR),
    "open files of the trainer": ("import os; print(os.listdir('/proc/TRAINER/fd'))", ERROR),
    "an open file of the trainer": ("open('/proc/TRAINER/fd/0')", ERROR),
    "command line of the trainer": ("print(open('/proc/TRAINER/cmdline').read())", ERROR),
    "descriptors left open": (
        """
        import os
        for fd in range(3, 4096):
            try: print(fd, os.fstat(fd))
            except OSError: pass
        """,
        OK,
        b"",
    ),
    "killing the worker": ("import os; os.kill(os.getppid(), 9)", ERROR),
    "killing the trainer": ("import os; os.kill(TRAINER, 9)", ERROR),
    "killing everybody": ("import os; os.kill(-1, 9)", ERROR),
    "killing by a descriptor": (
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open(TRAINER), 9)",
        ERROR,
    ),
    "killing by the owner of a file": (
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, TRAINER)",
        ERROR,
    ),
    "pipes": ("import os; os.pipe()", ERROR),
    "killing its group": ("import os; os.killpg(0, 9)", ERROR),
    "killing itself": ("import signal; signal.raise_signal(signal.SIGKILL)", ERROR),
    "a group of its own": ("import os; os.setpgid(0, 0)", ERROR),
    "a higher priority": ("import os; os.nice(-5)", ERROR),
    "another core": ("import os; os.sched_setaffinity(0, {0})", ERROR),
    "where the trainer's links lead": (
        """
        import os
        for name in ('exe', 'cwd', 'root', 'fd/0', 'fd/1', 'ns/pid'):
            for process in ('TRAINER', os.getppid()):
                try: print(os.readlink(f'/proc/{process}/{name}'))
                except OSError: pass
        """,
        OK,
        b"",
    ),
    "what lies where it starts": (
        """
        import os
        for path in ('self/environ', 'self/mem', 'self/maps', 'TRAINER/environ', '../etc/passwd',
                     f'{os.getppid()}/environ', 'sys/kernel/core_pattern', 'self/fd/3', '.'):
            try: print(path, os.open(path, os.O_RDONLY))
            except OSError: pass
        """,
        OK,
        b"",
    ),
    "a file through a path that is no opening": (
        """
        import os
        fd = os.open('/etc/passwd', os.O_PATH)
        print(open(f'/dev/fd/{fd}').read())
        """,
        ERROR,
    ),
    "its own text and other tests'": (
        """
        import gc, os, sys
        for fd in range(3, 64):
            try: print(open(f'/dev/fd/{fd}', 'rb').read())
            except OSError: pass
        print([o for o in gc.get_objects() if isinstance(o, bytes) and b'expected' in o])
        """,
        OK,
        b"[]\n",
    ),
    "spawning": ("import os; os.posix_spawn('/bin/true', ['true'], {})", ERROR),
    "its own interpreter": ("import os; os.execv('/proc/self/exe', ['python', '-c', ''])", ERROR),
    "a file of no name, executed": (
        "import os; os.write(1, b'#!/bin/sh\\nsleep 9'); os.execve(1, ['x'], {})",
        ERROR,
    ),
    "more open files": (
        "import os\nwhile True: os.open('/dev/null', os.O_RDONLY)",
        ERROR,
    ),
    "more maps than the kernel has": (
        """
        import mmap
        held = [mmap.mmap(-1, 4096, prot=1 + 2 * (i % 2)) for i in range(70_000)]
        """,
        {MEMORY, ERROR, TIMEOUT},
    ),
    "limits of the trainer": (
        "import resource; resource.prlimit(TRAINER, resource.RLIMIT_CPU, (1, 1))",
        ERROR,
    ),
    "limits lifted": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", ERROR),
    # --- network
    "TCP": ("import socket; socket.create_connection(('127.0.0.1', 22))", ERROR),
    "UDP": (
        "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
        ERROR,
    ),
    "UNIX sockets": ("import socket as s; s.socket(s.AF_UNIX).connect('/dev/log')", ERROR),
    "netlink": ("import socket as s; s.socket(s.AF_NETLINK, s.SOCK_RAW)", ERROR),
    "socket pairs": ("import socket as s; s.socketpair()", ERROR),
    "web": ("import urllib.request; urllib.request.urlopen('http://127.0.0.1')", ERROR),
    # --- ctypes
    "null pointer": ("import ctypes; ctypes.string_at(0)", WRONG_EXIT),
    "ctypes: fork": ("import ctypes; print(ctypes.CDLL(None).fork())", OK, b"-1\n"),
    "ctypes: kill": ("import ctypes; print(ctypes.CDLL(None).kill(TRAINER, 9))", OK, b"-1\n"),
    "ctypes: ptrace": (
        "import ctypes; print(ctypes.CDLL(None).ptrace(16, TRAINER, 0, 0))",
        OK,
        b"-1\n",
    ),
    "ctypes: a second table of open files": (
        """
        import ctypes
        libc = ctypes.CDLL(None)
        CLOSE_RANGE_UNSHARE, CLONE_WITHOUT_FILES = 2, 0x10900
        print(libc.close_range(1000, 1001, CLOSE_RANGE_UNSHARE),
              libc.syscall(56, CLONE_WITHOUT_FILES, 0, 0, 0, 0))
        """,
        OK,
        b"-1 -1\n",
    ),
    "ctypes: privileges": (
        """
        import ctypes
        libc = ctypes.CDLL(None)
        print(*[getattr(libc, name)(*arguments) for name, arguments in dict(
            unshare=(0x10000000,), mount=(b'a', b'/', b'tmpfs', 0, 0), chroot=(b'.',), setuid=(1,),
            setns=(0, 0), prctl=(4, 1), shmget=(1, 4096, 0o1777), memfd_create=(b'a', 0),
            mlock=(0, 4096), sync_file_range=(0, 0, 0, 0), reboot=(0,),
        ).items()])
        """,
        OK,
        b"-1 " * 10 + b"-1\n",
    ),
    "ctypes: threads past the interpreter": (
        """
        import ctypes, time
        libc, one = ctypes.CDLL(None), ctypes.c_long()
        attributes = ctypes.create_string_buffer(64)
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
        for _ in range(600): libc.pthread_create(ctypes.byref(one), attributes, libc.pause, None)
        time.sleep(9)
        """,
        ERROR,
    ),
    "ctypes: other processes": (
        """
        import ctypes
        libc = ctypes.CDLL(None)
        room = ctypes.create_string_buffer(64)
        print({getattr(libc, name)(*arguments) for name, arguments in dict(
            process_vm_readv=(TRAINER, room, 1, room, 1, 0), vfork=(), tgkill=(TRAINER, TRAINER, 9),
            sigqueue=(TRAINER, 9, 0), setpriority=(0, TRAINER, 19), eventfd=(0, 0),
            inotify_init=(), timerfd_create=(1, 0), userfaultfd=(0,), socketpair=(1, 1, 0, room),
            mq_open=(b'/a', 66, 0o600, 0), sched_setscheduler=(0, 0, room),
        ).items() if hasattr(libc, name)})
        print({libc.syscall(number, TRAINER, 0, 0, 0, 0, 0) for number in (
            62, 200, 234, 297, 310, 311, 312, 424, 425, 426, 427, 434, 435, 438, 440, 448, 9999)})
        """,
        OK,
        b"{-1}\n{-1}\n",
    ),
    # --- how it ends
    "the runner's frames traced": (
        """
        import sys
        frame = sys._getframe()
        while frame:
            frame.f_trace = lambda *event: 1 / 0
            frame = frame.f_back
        sys.settrace(lambda *event: sys.settrace(None) or 1 / 0)
        print('wrong')
        raise SystemExit(3)
        """,
        {ERROR, WRONG_EXIT},
    ),
    "an exception that lies about its class": (
        """
        class Lie(BaseException):
            code = 0
            @property
            def __class__(self): raise MemoryError
        raise Lie
        """,
        {ERROR, WRONG_EXIT, MEMORY},
    ),
    "an exit code that is no number": (
        """
        class Code(int):
            def __and__(self, other): return 'text'
        raise SystemExit(Code(3))
        """,
        WRONG_EXIT,
    ),
    "stdin as stdout": ("import os; os.dup2(0, 1); print('wrong')", OK, b""),
    "output behind a hole": ("import os; os.lseek(1, 2 ** 20, 0); os.write(1, b'x')", OUTPUT),
    "no output allowed by itself": (
        "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (0, 0)); print(1)",
        OUTPUT,
    ),
    "NUL bytes": ("print('\\0' * 5)", OK, b"\0\0\0\0\0\n"),
    "a number of 100,000 digits": ("print(10 ** 100_000)", ERROR),
    "exit code 3": ("import sys; sys.exit(3)", WRONG_EXIT),
    "exit with a message": ("exit('bye')", WRONG_EXIT),
    "exit code 256 is 0": ("import sys; sys.exit(256)", OK, b""),
    "exit in a thread": (
        "import sys, threading; threading.Thread(target=sys.exit, args=(3,)).start(); print(1)",
        OK,
        b"1\n",
    ),
    "exit in finally": ("import sys\ntry: 1 / 0\nfinally: print(1); sys.exit(0)", OK, b"1\n"),
    "exit at exit": ("import atexit, sys; atexit.register(sys.exit, 0); 1 / 0", ERROR),
    "exit in __del__": (
        "import sys\nclass A:\n  def __del__(self): sys.exit(3)\na = A(); del a; print(1)",
        OK,
        b"1\n",
    ),
    "exit without a flush": (
        "import os, sys; print(1); sys.stdout.flush(); print(2); os._exit(0)",
        OK,
        b"1\n",
    ),
    "os._exit replaced": ("import os; os._exit = print; os.close = print; print(1)", OK, b"1\n"),
    "abort": ("import os; os.abort()", WRONG_EXIT),
    "alarm": (
        "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(9)",
        WRONG_EXIT,
    ),
    "interrupt": ("raise KeyboardInterrupt", ERROR),
    "syntax error": ("print(", ERROR),
    "prose": ("I cannot write this program.", ERROR),
    "null character": ("print(1)\0", ERROR),
    "lone surrogate": ("print('\ud800')", ERROR),
    "stdout closed": ("import sys; print(1); sys.stdout.close()", OK, b"1\n"),
    "stdout's descriptor closed": ("import os; os.close(1); print(1)", WRONG_EXIT, b""),
    "stdout is None": ("import sys; print(1); sys.stdout = None; print(2)", OK, b"1\n"),
    "text of a runner's error": ("print('Timeout Error')", OK, b"Timeout Error\n"),
    "everything equals everything": (
        """
        import builtins
        class Right(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        builtins.str = Right
        builtins.input = lambda *_: Right('42')
        builtins.print, say = None, print
        say(Right('wrong') == '42', Right('wrong'))
        """,
        OK,
        b"True wrong\n",
    ),
    "binary output": (
        "import sys; sys.stdout.buffer.write(bytes(range(256)))",
        OK,
        bytes(range(256)),
    ),
    "the worker's functions replaced": (
        """
        import sys
        frame = sys._getframe()
        while frame:
            names = ['exit_code', 'UNCAUGHT', 'NO_MEMORY', 'limit', 'watch']
            frame.f_globals.update(dict.fromkeys(names, 0))
            frame = frame.f_back
        1 / 0
        """,
        {ERROR, WRONG_EXIT},
    ),
}


@pytest.fixture(scope="module")
def contained(sandbox, tmp_path_factory):
    """All hostile programs, run side by side; name -> result."""
    home = tmp_path_factory.mktemp("home")
    (home / "canary").write_text("alive")
    os.utime(home / "canary", (1000, 1000))
    before = footprint(sandbox)
    programs = [textwrap.dedent(case[0]) for case in HOSTILE.values()]
    programs = [program.replace("CANARY", str(home / "canary")) for program in programs]
    programs = [program.replace("TRAINER", str(os.getpid())) for program in programs]
    results = sandbox.run(programs, [""] * len(programs), time_limit=0.5, memory_limit=128 * 2**20)
    yield dict(zip(HOSTILE, results))
    # the machine is as it was
    assert footprint(sandbox) == before
    assert [path.name for path in home.iterdir()] == ["canary"]
    assert (home / "canary").read_text() == "alive"
    status = (home / "canary").stat()
    assert status.st_mtime == 1000 and status.st_nlink == 1 and status.st_mode & 0o777 == 0o644
    assert not any(Path(f, f"escaped-{os.getpid()}").exists() for f in ("/tmp", "/dev/shm", "/"))
    results = sandbox.run(["print(int(input()) + 1)"] * 20, ["41\n"] * 20)
    assert results == [Result(OK, b"42\n")] * 20


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program(contained, name):
    (_, status, *output), result = HOSTILE[name], contained[name]
    statuses = status if isinstance(status, set) else {status}
    assert result.status in statuses, result.output[:200]
    if output:
        assert result.output == output[0]
    if name not in ("read a file",):
        assert b"alive" not in result.output
    assert SECRET.encode() not in result.output


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its numbers of system calls")
def test_system_calls_of_the_x32_interface(sandbox):
    """The same calls once more, with bit 30 set: 57 is fork."""
    program = "import ctypes; print(ctypes.CDLL(None).syscall(0x40000000 + 57))"
    (result,) = sandbox.run([program], [""])
    assert result in (Result(WRONG_EXIT, b""), Result(OK, b"-1\n"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of this architecture")
def test_system_calls_of_the_32_bit_interface(sandbox):
    """int 0x80 has other numbers for the same calls; there, 2 is fork."""
    program = """
    import ctypes, mmap
    code = bytes.fromhex('b802000000' 'cd80' 'c3')  # mov eax, 2; int 0x80; ret
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(code)
    print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
    """
    assert sandbox.run([textwrap.dedent(program)], [""]) == [Result(WRONG_EXIT, b"")]


def test_no_place_to_make_a_file(sandbox, tmp_path):
    """A file that is deleted but mapped takes disk in nobody's sight, so there are no files."""
    program = """
    import os, sys
    ways = [os.mkdir, os.mkfifo, os.mknod, lambda path: os.symlink('/', path)]
    ways += [lambda path: os.open(path, os.O_CREAT | os.O_RDWR)]
    ways += [lambda path: os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)]
    ways += [lambda path: os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR)]
    for folder in sys.stdin.read().split():
        for number, make in enumerate(ways):
            try: print(folder, number, make(folder + '/a'))
            except OSError: pass
    """
    folders = [tmp_path, *"/ . /tmp /var/tmp /dev/shm /dev/mqueue /run /proc /proc/self/fd".split()]
    folders += [*sys.path, *os.environ.get("HOME", "").split()]
    text = "\n".join(str(folder) for folder in folders if " " not in str(folder))
    assert sandbox.run([textwrap.dedent(program)], [text]) == [Result(OK, b"")]
    assert list(tmp_path.iterdir()) == []


LOOK = """
import fcntl, gc, os, resource, signal, sys
print([fcntl.fcntl(fd, fcntl.F_GETFL) for fd in range(3)], [os.lseek(fd, 0, 1) for fd in (0, 1)])
print(os.getcwd(), os.stat('.').st_size, os.stat('.').st_mtime, os.umask(0), dict(os.environ))
print([resource.getrlimit(number) for number in range(16)])
print([str(signal.getsignal(number)) for number in range(1, 65)], signal.pthread_sigmask(0, []))
print(signal.getitimer(0), sys.path, sys.flags, len(sys.modules), sys.getrecursionlimit())
print([os.fstat(fd).st_size for fd in (0, 1)], gc.isenabled(), os.listdir('/dev/fd/') if 0 else '')
"""
CHANGE = """
import fcntl, gc, os, resource, signal, sys
for fd in range(3):
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
os.chdir('/usr/lib'); os.umask(0o777); os.environ['A'] = 'b'; sys.path[:] = []; gc.disable()
resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); sys.setrecursionlimit(99)
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pthread_sigmask(0, [signal.SIGHUP])
for name in dir(__builtins__): setattr(__builtins__, name, None)
"""


def test_nothing_passes_to_the_next_program():
    """Of what a program can change, its open files' flags included: /dev/null was shared once."""
    with Sandbox(workers=1) as sandbox:
        first, _, second = sandbox.run([LOOK, CHANGE, LOOK], [""] * 3)
    assert first.status is OK
    assert first == second


def test_nothing_of_a_run_stays_in_the_worker():
    """A later program is a fork of the worker: what the worker knew, it would know."""
    words = [b"needle-" + kind for kind in (b"program", b"input", b"output")]
    assemble = "print('needle' + '-output', 'needle-program'[:0], input()[:0])"
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run([assemble] * 3, ["needle-input"] * 3)[0].status is OK
        pid = sandbox.workers[0].process.pid
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            content = b""
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw-p" in line:
                    memory.seek(start)
                    content += memory.read(end - start)
    assert b"sandbox/worker.py" in content  # it can be read
    assert [word for word in words if word in content] == []


# ------------------------------------------------------------------ limits
def test_cpu_time_is_limited_not_waiting(sandbox):
    """12 programs of 0.15 s on few cores: each waits longer than its limit lets it compute."""
    work = "import time\nwhile time.process_time() < 0.15: pass\nprint(1)"
    assert {result.status for result in sandbox.run([work] * 12, [""] * 12, time_limit=0.3)} == {OK}
    wait = "import time; time.sleep(1); print(1)"
    assert sandbox.run([wait], [""], time_limit=0.3) == [Result(OK, b"1\n")]


def test_cpu_time_of_all_threads_counts(sandbox):
    work = """
    import threading, time
    def spin():
        while time.thread_time() < 0.2: pass
    for _ in range(4): threading.Thread(target=spin).start()
    """
    program = textwrap.dedent(work)
    results = [sandbox.run([program], [""], time_limit=limit)[0] for limit in (0.4, 2.0)]
    assert [result.status for result in results] == [TIMEOUT, OK]


@pytest.mark.parametrize("megabytes", [64, 256])
def test_memory_limit_is_on_top_of_the_interpreter(sandbox, megabytes):
    allocate = "x = bytearray(int(input()) * 2**20); print(1)"
    inputs = [str(megabytes - 4), str(megabytes + 1)]
    # the kernel zeroes 252 MiB, which counts as the program's CPU time: on a busy machine more than
    # the default second
    results = sandbox.run([allocate] * 2, inputs, time_limit=10.0, memory_limit=megabytes * 2**20)
    assert [result.status for result in results] == [OK, MEMORY]


def test_output_limit(sandbox):
    program = "import sys; sys.stdout.write('x' * int(input()))"
    results = sandbox.run([program] * 3, ["1000", "1001", "1000000"], output_limit=1000)
    assert results == [Result(OK, b"x" * 1000), Result(OUTPUT, b""), Result(OUTPUT, b"")]


def test_large_output_arrives_whole(sandbox):
    """More than a pipe holds: the released executor took it for a time-out."""
    (result,) = sandbox.run(["for i in range(100_000): print(i)"], [""])
    assert result == Result(OK, "".join(f"{i}\n" for i in range(100_000)).encode())


# ------------------------------------------------------------------ stdin, stdout: as in a shell
SHELL = [  # (program, stdin)
    ("print(int(input()) + int(input()))", b"1\n2"),
    ("import sys; print(sys.stdin.read().split())", b"1 2\n3"),
    ("import sys; print(sys.stdin.buffer.read())", b"a\r\nb\0\xff"),
    ("import sys; print(repr(sys.stdin.read()))", b"a\r\nb\rc\n"),
    ("import sys; print(repr(sys.stdin.read()))", b"\xff"),
    ("print(repr(input()))", "caf\u00e9 \u2603\n".encode()),
    ("import sys; print(input(), sys.stdin.readline(), [*sys.stdin])", b"a\nb\nc\nd"),
    ("import sys; input(); print(sys.stdin.buffer.read())", b"a\nb\n"),
    ("import sys; print(sys.stdin.buffer.readline(), input())", b"a\nb\n"),
    ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", b"ab\ncd"),
    ("print(open(0).read())", b"a\nb"),
    ("print(open('/dev/stdin').read())", b"a\nb"),
    (
        "open('/dev/stdout', 'a').write('x'); open('/dev/stderr', 'a').write('y')\n"
        "open('/dev/null', 'w').write('z')",
        b"",
    ),
    ("import os; print(os.read(0, 3), os.read(0, 99), os.read(0, 1))", b"abcdef"),
    ("import sys; print(sys.stdin.seek(2), sys.stdin.read())", b"abcdef"),
    ("import fileinput\nfor line in fileinput.input(): print(repr(line))", b"a\nb"),
    (
        "import sys; print(sys.stdin.isatty(), sys.stdout.isatty())\n"
        "print(sys.stdin.encoding, sys.stdin.errors)",
        b"",
    ),
    ("input()", b""),
    ("import sys; print(repr(sys.stdin.read()))", b""),
    ("print(input('n? '))", b"5\n"),
    ("try:\n  while True: print(input())\nexcept EOFError: print('end')", b"a\n\nb"),
    (
        "import os, sys; sys.stdout.write('a'); os.write(1, b'b')\n"
        "print('c', flush=True); os.write(1, b'd')",
        b"",
    ),
    ("import sys; print('a', file=sys.stderr); print('b')", b""),
    (
        "import sys; sys.stdout.buffer.write(b'a'); print('b')\n"
        "sys.stdout.flush(); sys.stdout.buffer.write(b'\\xff')",
        b"",
    ),
    ("out = open(1, 'w'); out.write('not closed')", b""),
    (
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-16')\n"
        "print('x')",
        b"",
    ),
    (
        "import io, sys; sys.stdout = io.StringIO(); print(1)\n"
        "sys.__stdout__.write(sys.stdout.getvalue())",
        b"",
    ),
    ("import atexit; atexit.register(print, 'last'); print('first')", b""),
    (
        "import threading, time; late = lambda: (time.sleep(0.05), print('late'))\n"
        "threading.Thread(target=late).start(); print('main')",
        b"",
    ),
    (
        "if __name__ == '__main__':\n"
        "  print(__name__, __builtins__ is __import__('builtins'), __doc__)",
        b"",
    ),
    (
        "import __main__, sys\nx = 1\nprint(__main__.x, len(sys.argv), sorted(globals())[:3])",
        b"",
    ),
    ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", b""),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n  x: 'int'\nprint(P(1))", b""),
    (
        "import sys; print(sys.getrecursionlimit(), sys.flags.optimize)\n"
        "def f(n): return n and f(n - 1)\nprint(f(980))",
        b"",
    ),
    (
        "import threading\nthreading.stack_size(2**26)\n"
        "t = threading.Thread(target=print, args=(1,)); t.start(); t.join()",
        b"",
    ),
    ("import resource; resource.setrlimit(resource.RLIMIT_STACK, (2**26, 2**26)); print(1)", b""),
    (
        "import threading as t\nb = t.Barrier(16)\nf = lambda: (b.wait(), print(1))\n"
        "for i in range(16): t.Thread(target=f).start()",
        b"",
    ),
    (
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "print(*T(8).map(abs, range(-9, 9)))",
        b"",
    ),
    ("import random; random.seed(0); print(random.random(), random.randint(0, 9))", b""),
    (
        "import decimal, fractions, datetime, statistics, json, hashlib, zlib\n"
        "print(hashlib.sha256(b'').hexdigest())",
        b"",
    ),
    (
        "import heapq, bisect, itertools, functools, collections, math, re, string, typing\n"
        "import operator, copy; print(math.pi)",
        b"",
    ),
    ("# -*- coding: latin-1 -*-\nprint(len('\u00e9'))", b""),
    ("\ufeffprint(1)", b""),
    ("print(1)\r\nprint(2)\r\n", b""),
    ("from __future__ import annotations\ndef f(x: nothing): pass\nprint(f.__annotations__)", b""),
    ("import sys; sys.exit()", b""),
    ("import sys; sys.exit(True)", b""),
    ("import sys; sys.exit(-1)", b""),
    ("import sys; sys.exit('text')", b""),
    ("print(1); quit()", b""),
    ("print(1); raise SystemExit", b""),
    (
        "import sys\nclass W:\n  def write(self, text): sys.__stdout__.write(text.upper())\n"
        "sys.stdout = W(); print('a')",
        b"",
    ),
    ("import sys; del sys.stdout; 1", b""),
    ("assert False", b""),
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """(exit code, output) of each program by a plain interpreter: python program.py < in > out."""
    folder = tmp_path_factory.mktemp("shell")
    environment = {"PYTHONIOENCODING": "utf-8:strict", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}

    def run(number: int) -> tuple[int, bytes]:
        for suffix, content in zip((".py", ".in"), SHELL[number]):
            content = content if isinstance(content, bytes) else content.encode()
            (folder / f"{number}{suffix}").write_bytes(content)
        with open(folder / f"{number}.in") as stdin, open(folder / f"{number}.out", "wb") as stdout:
            command = [sys.executable, folder / f"{number}.py"]
            streams = {"stdin": stdin, "stdout": stdout, "stderr": subprocess.DEVNULL}
            code = subprocess.call(command, **streams, env=environment)
        return code, (folder / f"{number}.out").read_bytes()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, range(len(SHELL))))


def test_as_in_a_shell(sandbox, shell):
    results = sandbox.run([program for program, _ in SHELL], [stdin for _, stdin in SHELL])
    for (program, _), (code, output), result in zip(SHELL, shell, results):
        assert result.output == output, program
        assert (result.status is OK) == (code == 0), program


def test_solutions_of_mbpp(sandbox, real_data):
    """Reference solutions, each with its own assertions: right programs may import and do that."""
    lines = (real_data / "mbpp.jsonl").read_text().splitlines()[::4]  # all of them would pass
    rows = [json.loads(line) for line in lines]
    programs = ["\n".join([row["code"], row["test_setup_code"], *row["test_list"]]) for row in rows]
    results = sandbox.run(programs, [""] * len(programs), time_limit=5.0)
    assert [row["task_id"] for row, result in zip(rows, results) if result.status is not OK] == []


# ------------------------------------------------------------------ the pool
def test_many_pairs_in_order(sandbox):
    programs = ["print(int(input()) * 2)", "1 / 0"]
    programs += ["import sys; sys.exit(int(input()) + 1)", "print(input(), end='')"]
    results = sandbox.run(programs * 100, [str(number) for number in range(400)])
    expected = [Result(OK, b"%d\n"), Result(ERROR, b""), Result(WRONG_EXIT, b""), Result(OK, b"%d")]
    for number, result in enumerate(results):
        kind = expected[number % 4]
        output = kind.output.replace(b"%d", str(2 * number if number % 4 == 0 else number).encode())
        status = OK if number % 256 == 255 else kind.status
        assert result == Result(status, output), number


def test_no_pairs_and_unequal_lists(sandbox):
    assert sandbox.run([], []) == []
    with pytest.raises(ValueError, match="2 programs and 1 inputs"):
        sandbox.run(["", ""], [""])


def test_empty_program_and_inputs_of_any_kind(sandbox):
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    inputs = ["", b"", "\u2603", b"\xff\x00", "\ud800", b"x" * 10**6]
    outputs = [b"", b"", "\u2603".encode(), b"\xff\x00", b"\xed\xa0\x80", b"x" * 10**6]
    assert sandbox.run([echo] * 6, inputs) == [Result(OK, output) for output in outputs]
    assert sandbox.run([""], [""]) == [Result(OK, b"")]


def test_killed_workers_are_replaced(monkeypatch):
    """Killed with SIGKILL while they work, and one of them stopped: every result is still right."""
    monkeypatch.setattr(pool, "PATIENCE", 0.0)
    program = "import time; time.sleep(0.02); print(input())"
    inputs = [str(number) for number in range(120)]
    with Sandbox(workers=4) as sandbox:
        before = footprint(sandbox)
        first = [one.process.pid for one in sandbox.workers]

        def kill():
            os.kill(first[0], signal.SIGSTOP)
            for pid in first[1:]:
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        results = sandbox.run([program] * 120, inputs, time_limit=0.1)
        killer.join()
        assert results == [Result(OK, f"{text}\n".encode()) for text in inputs]
        assert not set(first) & {one.process.pid for one in sandbox.workers}
        assert footprint(sandbox) == before


def test_a_pair_that_kills_every_worker_is_given_up(sandbox):
    """From outside; no program can do that. The program goes with its worker."""
    before = footprint(sandbox)
    done = threading.Event()

    def kill():
        while not done.wait(0.01):
            for one in [one for one in sandbox.workers if one.stdout is not None]:  # those at work
                one.process.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = sandbox.run(["import time; time.sleep(3)"], [""])
    done.set()
    killer.join()
    assert result == [Result(ERROR, b"")]
    assert footprint(sandbox) == before
    assert sandbox.run(["print(1)"] * 12, [""] * 12) == [Result(OK, b"1\n")] * 12


def test_interrupted_run_leaves_no_answers_behind(sandbox):
    before = footprint(sandbox)

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(["while True: pass"] * 50, [""] * 50, time_limit=5.0)
    results = sandbox.run(["print(input())"] * 12, list("abcdefghijkl"))
    assert results == [Result(OK, f"{c}\n".encode()) for c in "abcdefghijkl"]
    assert footprint(sandbox) == before


def trainer_with(body: str, folder: Path) -> tuple[subprocess.Popen, list[int]]:
    """A trainer that is busy with `body`, and the process ids of its two workers."""
    script = """
    import os, signal, time
    from multiprocessing.connection import wait
    from common.sandbox import Sandbox, worker
    # what a shell starts in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Sandbox(workers=2) as sandbox:
        print(*[one.process.pid for one in sandbox.workers], flush=True)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script) + textwrap.indent(body, "    ")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    return trainer, [int(word) for word in trainer.stdout.readline().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


AT_WORK = """
print('ready', flush=True)
sandbox.run(['while True: pass'] * 9, [''] * 9, time_limit=60.0)
"""
ANSWERS_UNREAD = """
for one in sandbox.workers:
    one.start(b'', b'', worker.JOB.pack(1, 10, 2 ** 28, 2 ** 20))
while len(wait(sandbox.workers)) < 2: pass
print('ready', flush=True)
time.sleep(60)
"""
# as a data loader's process that is forked, and outlives the trainer for a while
SOCKETS_IN_A_CHILD = """
child = os.fork()
if child == 0:
    os.close(1), os.close(2), time.sleep(600), os._exit(0)
print('ready', child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "number, body",
    [
        (signal.SIGINT, AT_WORK),
        (signal.SIGTERM, AT_WORK),
        (signal.SIGKILL, AT_WORK),
        (signal.SIGTERM, ANSWERS_UNREAD),
        (signal.SIGKILL, ANSWERS_UNREAD),
        (signal.SIGKILL, SOCKETS_IN_A_CHILD),
    ],
    ids="SIGINT SIGTERM SIGKILL SIGTERM-unread SIGKILL-unread SIGKILL-forked".split(),
)
def test_nothing_outlives_the_trainer(number, body, tmp_path):
    trainer, workers = trainer_with(body, tmp_path)
    try:
        first, *forked = trainer.stdout.readline().split()
        assert first == b"ready"
        children = set(workers)
        deadline = time.monotonic() + 60
        while body is AT_WORK and len(children) < 4:  # and their programs
            assert time.monotonic() < deadline
            for pid in workers:
                children |= {
                    int(word)
                    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                }
        trainer.send_signal(number)
        trainer.wait(timeout=60)
        while any(map(alive, children)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        trainer.kill()
        for pid in forked:
            os.kill(int(pid), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
    with trainer.stdout, trainer.stderr:
        if number != signal.SIGINT:
            assert b"worker" not in trainer.stderr.read()  # no word of the workers'


def test_workers_killed_while_idle_cost_no_attempt():
    """By the kernel, for want of memory; or because the thread that started them has ended."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Sandbox(workers=6)))
    thread.start()
    thread.join()
    with made[0] as sandbox:
        for one in sandbox.workers:
            one.process.wait(timeout=60)
        assert sandbox.run(["print(1)"], [""]) == [Result(OK, b"1\n")]


def test_workers_outlive_a_signal_that_everybody_gets(sandbox):
    """A service manager sends SIGTERM to all: a worker ends after the trainer, whose last programs
    are still right.
    """
    pids = [one.process.pid for one in sandbox.workers]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert sandbox.run(["print(1)"] * 12, [""] * 12) == [Result(OK, b"1\n")] * 12
    assert pids == [one.process.pid for one in sandbox.workers]


# ------------------------------------------------------------------ a setup that fails
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), -float("inf")])
def test_a_time_limit_that_is_none_is_refused(sandbox, seconds):
    with pytest.raises(UserError, match="time limit"):
        sandbox.run(["print(1)"], [""], time_limit=seconds)


@pytest.mark.parametrize("limits", [{"memory_limit": -1}, {"output_limit": -1}])
def test_a_limit_below_zero_is_refused(sandbox, limits):
    with pytest.raises(UserError, match="below 0"):
        sandbox.run(["print(1)"], [""], **limits)


def test_a_program_that_cannot_be_started_is_not_wrong(sandbox):
    """More CPU time than the kernel can count to: no program would get its limits."""
    before = footprint(sandbox)
    with pytest.raises(UserError, match="RLIMIT_CPU"):
        sandbox.run(["print(1)"] * 100, [""] * 100, time_limit=1e300)
    assert sandbox.run(["print(1)"], [""]) == [Result(OK, b"1\n")]
    assert footprint(sandbox) == before


def test_a_program_cannot_pretend_that_it_could_not_be_started(sandbox):
    program = """
    import os, sys
    code = int(input())
    for fd in range(64):
        try: os.write(fd, b'RLIMIT_AS')
        except OSError: pass
    os._exit(code)
    """
    codes = [*range(1, 241), *range(243, 256)]
    results = sandbox.run([textwrap.dedent(program)] * len(codes), [str(code) for code in codes])
    assert {result.status for result in results} == {WRONG_EXIT}


TRY = """
from common.errors import UserError
from common.sandbox import Sandbox
try:
    with Sandbox(workers=1) as sandbox:
        print(sandbox.run(["print(input())"], ["x" * 50000])[0].output == b"x" * 50000 + b"\\n")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "shell, word",
    [
        ("ulimit -f 100", "RLIMIT_FSIZE"),
        ("ulimit -n 40", "RLIMIT_NOFILE"),
        ("ulimit -t 2", "RLIMIT_CPU"),
        ("ulimit -Sf 40", "RLIMIT_FSIZE"),  # what is handed over would be cut
        ("exec 2>&-", "True"),
        ("exec <&- 2>&-", "True"),
    ],
)
def test_a_shell_with_other_limits_or_files(shell, word):
    """Right or refused in a sentence; never a wrong program."""
    command = f'{shell}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, TRY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert word in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout


def test_steady_over_many_runs(sandbox):
    before = footprint(sandbox)
    programs = [
        "print(1)",
        "1 / 0",
        "import os; os.fork()",
        "x = bytearray(10 ** 10)",
        "import threading; threading.Thread(target=print).start()",
    ] * 100
    sandbox.run(programs, [""] * 500)
    assert footprint(sandbox) == before


# ------------------------------------------------------------------ a machine that lacks a layer
def on_a_machine_without(system_calls: list[str], script: str, tmp_path: Path):
    """Run `script` where the kernel does not know some system calls.

    "prctl" stands for prctl(PR_SET_SECCOMP) alone, "libseccomp" for a library that cannot be
    loaded.
    """
    lib = ctypes.CDLL("libseccomp.so.2")
    lib.seccomp_init.restype = ctypes.c_void_p

    def take_away():
        context = ctypes.c_void_p(lib.seccomp_init(0x7FFF0000))
        for name in system_calls:
            second = worker.Comparison(0, 4, 22, 0)
            arguments = (1, ctypes.byref(second)) if name == "prctl" else (0, None)
            number = lib.seccomp_syscall_resolve_name(name.encode())
            lib.seccomp_rule_add_array(context, 0x00050000 | errno.ENOSYS, number, *arguments)
        lib.seccomp_load(context)

    environment = {**os.environ}
    if "libseccomp" in system_calls:
        (tmp_path / "libseccomp.so.2").touch()
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
        system_calls = []
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=take_away,
    )


@pytest.mark.parametrize(
    "system_calls, missing, help",
    [
        (["landlock_create_ruleset"], ["Landlock"], ["Linux 5.13"]),
        (["landlock_restrict_self"], ["Landlock"], ["Linux 5.13"]),
        (["prctl"], ["seccomp"], ["libseccomp"]),
        (["libseccomp"], ["seccomp"], ["libseccomp2"]),
        (["landlock_create_ruleset", "prctl"], [*LAYERS], ["Linux 5.13", "libseccomp"]),
    ],
    ids=" ".join,
)
def test_missing_layer(system_calls, missing, help, tmp_path):
    script = f"""
    from common.errors import UserError
    from common.sandbox import Sandbox
    try:
        Sandbox(workers=2)
    except UserError as error:
        print(error)
    with Sandbox(workers=2, unsafe=True) as sandbox:
        assert sandbox.missing == {missing}
        programs = ["print(input())", "while True: pass", "x = bytearray(10 ** 10)"] * 2
        results = sandbox.run(programs, ["1"] * 6, time_limit=0.2)
        print(*[result.status.name for result in results], results[0].output)
    """
    done = on_a_machine_without(system_calls, script, tmp_path)
    assert done.returncode == 0, done.stderr
    refusal, ran = done.stdout.splitlines()
    assert ran == "OK TIMEOUT MEMORY OK TIMEOUT MEMORY b'1\\n'"
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("warning: ")
    for text in (refusal, done.stderr):
        assert all(word in text for word in missing + help)
    assert "--unsafe-sandbox" in refusal
    assert all(name in missing or name not in refusal for name in LAYERS)


def test_unsafe_still_ends_what_a_program_started(tmp_path):
    script = """
    import os, time
    from common.sandbox import Sandbox
    with Sandbox(workers=1, unsafe=True) as sandbox:
        program = "import os, time; p = os.fork(); p or time.sleep(60); print(p)"
        (result,) = sandbox.run([program], [""])
        print(result.status.name, flush=True)
        while os.path.exists(f"/proc/{int(result.output)}/exe"):
            time.sleep(0.01)
    """
    start = time.monotonic()
    done = on_a_machine_without(["landlock_create_ruleset", "prctl"], script, tmp_path)
    assert done.stdout == "OK\n", done.stderr
    assert time.monotonic() - start < 30


def test_layers_that_stand_are_named(sandbox):
    assert sandbox.missing == []
    with pytest.raises(UserError, match="0 sandbox workers"):
        Sandbox(workers=0)


# ------------------------------------------------------------------ comparison of outputs
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc", "Z"])
TOKENS = st.lists(st.text(CHARACTERS, min_size=1), max_size=8)
SPACE = st.text(" \t\n\r\u00a0\u2003", min_size=1)


@given(TOKENS, TOKENS, st.data())
def test_white_space_does_not_matter_and_all_else_does(ours, theirs, data):
    laid_out = "".join(token + data.draw(SPACE) for token in ours)
    assert same_output(laid_out.encode(), " ".join(ours))
    assert same_output(laid_out.encode(), "\n".join(theirs).encode()) == (ours == theirs)


@given(st.binary(), st.binary())
def test_any_bytes(ours, theirs):
    """Never raises; equal bytes are equal; what is not UTF-8 differs from all other bytes."""
    assert same_output(ours, ours) and same_output(ours, ours, tolerance=0.1)
    if len(ours.split()) == len(theirs.split()) == 1 and same_output(ours, theirs):
        a, b = (text.decode("utf-8", "surrogateescape").split() for text in (ours, theirs))
        assert a == b


DECIMALS = st.decimals(-1000, 1000, places=4)


@given(DECIMALS, DECIMALS, st.sampled_from(["0", "1e-3", "0.5"]))
def test_tolerance_against_exact_arithmetic(x, y, tolerance):
    gap = abs(Fraction(x) - Fraction(y))
    allowed = Fraction(tolerance) * max(1, abs(Fraction(x)), abs(Fraction(y)))
    if abs(gap - allowed) > Fraction(1, 10**9):  # but for rounding
        same = same_output(f"{x:f}".encode(), f"{y:f}", tolerance=float(tolerance))
        assert same == (gap <= allowed)


@pytest.mark.parametrize(
    "got, expected, tolerance, equal",
    [
        (b"", "", None, True),
        (b"\n", "", None, True),
        (b"1", "", None, False),
        (b"12", "1 2", None, False),
        (b"1.0", "1", None, False),
        (b"1.0", "1", 1e-9, True),
        (b"1e0", "1.0", 1e-9, True),
        (b"3.14159 yes", "3.1416 yes", 1e-3, True),
        (b"3.14159 no", "3.1416 yes", 1e-3, False),
        (b"3.14159", "3.1416", 1e-9, False),
        (b"1000001", "1000000", 1e-3, False),  # integers are exact
        (b"1000001.0", "1000000", 1e-3, True),
        (b"nan", "nan", 1e-3, True),  # as words
        (b"nan", "1.0", 1e9, False),
        (b"inf", "1.0", 1e9, False),
        (b"1e999", "2e999", 1e-3, False),
        (b"1_0", "10.0", 1e-3, False),
        ("\u0661".encode(), "1.0", 1e-3, False),  # a digit, but not one that a checker would read
        (b"0x10", "16.0", 1e-3, False),
        (b"1e400", "1e400", 1e-3, True),  # as words
        (b"1e400", "inf", 1e-3, False),
        (b"-nan", "nan", 1e-3, False),
        (b"infinity", "inf", 1e-3, False),
        (b"1e-400", "0.0", 1e-3, True),
        ("\u22121".encode(), "-1.0", 1e-3, False),  # a minus sign, but not ASCII's
        ("\uff11".encode(), "1.0", 1e-3, False),
        ("\u00b2".encode(), "2.0", 1e-3, False),
        ("4\u200b2".encode(), "42", 1e-3, False),
        (b"42\0", "42", 1e-3, False),
        (b"\0", "", None, False),
        (b"42 \r\n\n", "42", None, True),
        (b"4 2", "42", 1e9, False),
        (b"42 42", "42", 1e9, False),
        (b"", "0", 1e9, False),
        (b"1.0.0", "1.0", 1e9, False),
        (b"1e", "1.0", 1e9, False),
        (b"1+0j", "1.0", 1e9, False),
        (b"True", "1.0", 1e9, False),
        (b"-0.0", "0.0", 0.0, True),
        (b"\xff", b"\xff", None, True),
        (b"\xff", b"\xfe", None, False),
        (b"\xff", "\u00ff", None, False),
        (b"caf\xc3\xa9", "caf\u00e9", None, True),
        (b"a", "\ud800", None, False),
    ],
)
def test_same_output(got, expected, tolerance, equal):
    assert same_output(got, expected, tolerance) is equal
