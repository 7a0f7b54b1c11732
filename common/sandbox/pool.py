"""Run model-written Python programs so that they cannot hurt the machine.

    with Sandbox() as sandbox:
        results = sandbox.run(["print(int(input()) + 1)"], ["41\\n"])
    results[0].status is Status.OK and same_output(results[0].output, "42")

Every pair of a program and an input is a process of its own, with stdin and stdout as in
`python program.py < in > out`, limits on what it may use, and an allow-list of what it may do;
common/sandbox/worker.py describes both and what they protect against. A pool of small, warm workers
forks these processes: a fork costs a millisecond or two, an interpreter's start fifty times that.

The released CURE forks the trainer and calls a bare `exec`. Its one limit is wall-clock time, which
turns right programs wrong on a busy machine, and its results travel as text that a program can
print itself.
"""

import fcntl
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import wait

from common.core.errors import UserError
from common.run.limits import cores
from common.sandbox import worker

LAYERS = {
    "Landlock": "Linux 5.13 or newer, with landlock among the security modules it is started with",
    "seccomp": "libseccomp.so.2 (the package libseccomp2 or libseccomp) and a kernel or container "
    "that allows filters",
}
"""What is between a program and the machine, and what a machine needs to have it."""
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONIOENCODING": "utf-8:strict",
    "PYTHONHASHSEED": "0",  # the order of a set is the same in every run
    "MALLOC_ARENA_MAX": "1",  # or every thread takes 64 MiB of address space,
    "OMP_NUM_THREADS": "1",  # and numpy a thread for every core
    "OPENBLAS_NUM_THREADS": "1",
}
ATTEMPTS = 3  # at a pair whose worker was killed from outside
PATIENCE = 10.0  # seconds past the wall-clock limit, after which a worker counts as stuck


class Status(Enum):
    """How a program ended."""

    OK = worker.OK
    """by itself, exit code 0"""
    WRONG_EXIT = worker.WRONG_EXIT
    """another exit code, or a signal such as SIGSEGV; 241 and 242 are read as ERROR and MEMORY"""
    ERROR = worker.ERROR
    """an exception that it did not catch, a syntax error among them; too many threads"""
    TIMEOUT = worker.TIMEOUT
    """CPU time or wall-clock time"""
    MEMORY = worker.MEMORY
    """MemoryError or ENOMEM that it did not catch"""
    OUTPUT = worker.OUTPUT
    """too much on stdout"""


@dataclass(frozen=True)
class Result:
    """What came of one program with one input."""

    status: Status
    output: bytes
    """stdout, every byte as written; nothing if it was too much"""


class Sandbox:
    """A pool of warm workers, as a context manager. Neither they nor programs make any file;
    `close`, or the end of this process by whatever means, leaves no process of theirs.

    Args:
        workers: programs that run at the same time; by default this process's share of the cores.
        unsafe: run programs even on a machine that lacks a layer.

    Raises:
        UserError: a layer is missing (which one, and what brings it), this is not Linux, or
            programs cannot be run here (why).
    """

    def __init__(self, workers: int | None = None, unsafe: bool = False):
        if workers is None:
            beside = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
            workers = cores() // int(beside)
        if sys.platform != "linux":
            raise UserError("model-written programs need Linux; a Linux container would do.")
        self.count, self.workers = max(1, workers), []
        try:
            self._fill()
            # what keeps programs from running, hard limits for example, says so here
            (result,) = self.run(["pass"], [""])
            if result.status is not Status.OK:
                raise _cannot_run(f"an empty program ends with {result.status.name}")
        except BaseException:
            self.close()
            raise
        # the layers that this machine does not offer
        found = set(LAYERS).intersection(*(one.layers for one in self.workers))
        self.missing = [name for name in LAYERS if name not in found]
        lacking = "; ".join(f"no {name}, which needs {LAYERS[name]}" for name in self.missing)
        if self.missing and not unsafe:
            self.close()
            raise UserError(
                f"model-written programs could harm this machine: {lacking} (--unsafe-sandbox runs "
                f"them anyway)."
            )
        if self.missing:
            warning = f"warning: model-written programs can harm this machine: {lacking}."
            print(warning, file=sys.stderr, flush=True)

    def run(
        self,
        programs: list[str],
        inputs: list[bytes | str],
        time_limit: float = 1.0,
        memory_limit: int = 256 * 2**20,
        output_limit: int = 2**20,
    ) -> list[Result]:
        """programs[i] with inputs[i] on stdin, for all i; results in the same order.

        Args:
            programs: source texts; whatever Python does not accept has the status ERROR.
            inputs: a str is encoded in UTF-8.
            time_limit: CPU seconds per run. Wall-clock time is limited to 10 times that, and at
                least 5 s more.
            memory_limit: bytes of address space per run, on top of the interpreter's own.
            output_limit: bytes on stdout per run.

        Raises:
            UserError: programs cannot be started with these limits (why).
        """
        if len(programs) != len(inputs):
            raise ValueError(f"{len(programs)} programs and {len(inputs)} inputs")
        wall = max(10 * time_limit, time_limit + 5)
        limits = worker.JOB.pack(time_limit, wall, memory_limit, output_limit)
        self._fill()
        results: list[Result | None] = [None] * len(programs)
        waiting = deque((i, 1) for i in range(len(programs)))  # (pair, attempt)
        # worker -> (pair, attempt, when it must have answered)
        busy: dict[_Worker, tuple[int, int, float]] = {}
        try:
            while waiting or busy:
                idle = [one for one in self.workers if one not in busy]
                for one in idle[: len(waiting)]:
                    i, attempt = waiting.popleft()
                    busy[one] = i, attempt, time.monotonic() + wall + PATIENCE
                    one.start(_encode(programs[i]), _encode(inputs[i]), limits)
                for one in wait(list(busy), timeout=1):
                    i, attempt, _ = busy[one]
                    results[i] = one.finish()
                    del busy[one]
                    if results[i] is None:  # the worker was killed, or failed
                        self._discard(one)
                        self._fill()
                        if attempt < ATTEMPTS:
                            waiting.appendleft((i, attempt + 1))  # if none can run, it says so soon
                        elif one.failure:  # which says nothing about the program
                            raise _cannot_run(one.failure)
                        else:
                            results[i] = Result(Status.ERROR, b"")
                for one, (_, _, latest) in busy.items():
                    if time.monotonic() > latest:
                        one.process.kill()  # it hangs; the next turn finds it killed
        finally:
            for one in busy:  # after Ctrl-C; its answer would be taken for one of the next run's
                self._discard(one)
        return results

    def close(self):
        for one in self.workers:
            one.link.shutdown(socket.SHUT_RDWR)  # all at once, then wait for each
        while self.workers:
            self._discard(self.workers[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _fill(self):
        """Start as many workers as are missing, or were killed while they had nothing to do."""
        for one in [one for one in self.workers if one.stdout is None]:
            if one.process.poll() is not None:
                self._discard(one)
        while len(self.workers) < self.count:
            self.workers.append(_Worker())
        for one in self.workers:
            one.wait_until_ready()

    def _discard(self, one: "_Worker"):
        self.workers.remove(one)
        one.close()


class _Worker:
    """common/sandbox/worker.py in a process of its own, and the socket to it."""

    def __init__(self):
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        site_packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # -S -s -P: nothing that is the user's
        command = [sys.executable, "-S", "-s", "-P", os.path.abspath(worker.__file__)]
        environment = dict(ENVIRONMENT)
        if "LD_LIBRARY_PATH" in os.environ:  # Python itself may need it
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        # Where our stderr is closed, 2 is free, and would be taken by the socket or by a program's
        # files: the worker's 0, 1 and 2 are open in any case, and the socket comes after them
        passed = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        theirs.close()
        self.process = subprocess.Popen(
            [*command, str(passed), str(os.getpid()), *site_packages],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[passed],
            start_new_session=True,  # Ctrl-C is for the trainer alone
        )
        os.close(passed)
        self.layers: list[str] | None = None  # those that hold here: its first message
        self.stdout: int | None = None  # of the program that it is running
        self.failure = ""  # why it could not go on, in its own words

    def wait_until_ready(self):
        if self.layers is None:
            message = self._receive()
            if not message:
                reason = self.failure or f"a worker ended with exit code {self.process.wait()}"
                raise _cannot_run(reason)
            self.layers = message.decode().split(",")

    def _receive(self) -> bytes:
        """Empty: it is gone, and `failure` says why if it could."""
        try:
            message = self.link.recv(1024)
        except ConnectionResetError:
            return b""
        if message[:1] == bytes([worker.FAILED]):
            self.failure = message[1:].decode(errors="replace")
            return b""
        return message

    def fileno(self) -> int:
        return self.link.fileno()  # readable when the program has ended

    def start(self, program: bytes, stdin: bytes, limits: bytes):
        files = [os.memfd_create(name) for name in ("program", "stdin", "stdout")]
        *sent, self.stdout = files
        try:
            for fd, content in zip(sent, (program, stdin)):
                if os.pwrite(fd, content, 0) < len(content):  # a part would be another program
                    raise _cannot_run(f"RLIMIT_FSIZE (ulimit) is below {len(content)} bytes")
            socket.send_fds(self.link, [limits], files)
        except ConnectionError:
            pass  # it is gone: `finish` will say so
        finally:
            for fd in sent:
                os.close(fd)

    def finish(self) -> Result | None:
        """None: the worker is gone, and the program with it."""
        answer = self._receive()
        stdout, self.stdout = self.stdout, None
        output = os.pread(stdout, os.fstat(stdout).st_size, 0)
        os.close(stdout)
        if not answer:
            return None
        status = Status(answer[0])
        return Result(status, b"" if status is Status.OUTPUT else output)

    def close(self):
        self.link.close()  # the worker ends its program and itself
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.stdout is not None:
            os.close(self.stdout)


def _cannot_run(reason: str) -> UserError:
    return UserError(f"model-written programs cannot be run on this machine: {reason}.")


def _encode(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


# ------------------------------------------------------------------ comparison, in the trainer
def same_output(got: bytes | str, expected: bytes | str) -> bool:
    """The same words in the same order, whatever the white space between them [C execute.py].

    Bytes that are not UTF-8 are compared as they are.

    >>> same_output(b"1  2\\n3", "1 2 3\\n"), same_output(b"12 3", "1 2 3")
    (True, False)
    """
    ours, theirs = (
        (text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")).split()
        for text in (got, expected)
    )
    return ours == theirs
