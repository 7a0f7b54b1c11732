"""The sandbox: hostile programs are contained and told apart, and leave nothing behind.

Right programs find stdin and stdout as in a shell.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.core.errors import UserError
from common.sandbox import LAYERS, Result, Sandbox, Status, pool, same_output, worker

import psutil
import pytest
from conftest import ROOT, table
from hypothesis import given
from hypothesis import strategies as st

OK, WRONG_EXIT, ERROR, TIMEOUT, MEMORY, OUTPUT = Status
SECRET = "k7q-never-told"


@pytest.fixture(scope="module")
def sandbox():
    os.environ["DUET_ANSWERS"] = SECRET
    with Sandbox(workers=6) as sandbox:
        yield sandbox
    del os.environ["DUET_ANSWERS"]


def processes() -> int:
    """Children of this process, and forks of the sandbox's workers, whoever their parent is now."""
    me, found = os.getpid(), psutil.process_iter(["ppid", "cmdline"])
    commands = [(one.info["ppid"], (one.info["cmdline"] or [])[4:7:2]) for one in found]
    return sum(parent == me or part == [worker.__file__, str(me)] for parent, part in commands)


def footprint(sandbox: Sandbox) -> tuple[int, ...]:
    """What must not grow: processes, descriptors, those of the workers."""
    workers = [one.process.pid for one in sandbox.workers]
    of_workers = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers)
    return processes(), len(os.listdir("/proc/self/fd")), of_workers


# ------------------------------------------------------------------ hostile programs
HOSTILE = {row[0]: row for rows in table("hostile_programs.txt").values() for row in rows}
X86 = [row[0] for row in table("hostile_programs.txt")["machine code of x86-64"]]
MODULES = """atexit ctypes fcntl gc json mmap os pickle resource signal socket struct subprocess sys
    threading time zlib""".split()
EXPECTED = ["90817263", "3.1415926", SECRET]
"""Expected outputs of tests that no program should pass."""
LOOK = """
import fcntl, gc, os, resource, signal, sys
print([fcntl.fcntl(fd, fcntl.F_GETFL) for fd in range(3)], [os.lseek(fd, 0, 1) for fd in (0, 1)])
print(os.getcwd(), os.stat('.').st_size, os.stat('.').st_mtime, os.umask(0), dict(os.environ))
print([resource.getrlimit(n) for n in range(16) if n != resource.RLIMIT_AS])
print([str(signal.getsignal(number)) for number in range(1, 65)], signal.pthread_sigmask(0, []))
print(signal.getitimer(0), sys.path, sys.flags, len(sys.modules), sys.getrecursionlimit())
print([os.fstat(fd).st_size for fd in (0, 1)], gc.isenabled(), os.sched_getaffinity(0), input())
"""  # an ordinary program, and all that a program before it could have changed


def files(folder: Path) -> dict:
    """All that can be seen of a folder's files."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        info, content = path.lstat(), path.read_bytes() if path.is_file() else b""
        found[path] = (content, info.st_mode, info.st_uid, info.st_mtime_ns, info.st_nlink)
    return found


@pytest.fixture(scope="module")
def contained(sandbox, tmp_path_factory):
    """All hostile programs, run side by side, with an ordinary one after each: (name -> result,
    results of the ordinary ones, what was there before, and what is there now).
    """
    home = tmp_path_factory.mktemp("home")
    (home / "answers.py").write_text("\n".join(f"{text!r}" for text in EXPECTED))
    words = {"FOLDER": home, "ANSWERS": home / "answers.py", "TRAINER": os.getpid(), "ROOT": ROOT}
    words |= {"NUL": "\0", "HALF": "\ud800", "libc": "ctypes.CDLL(None)"}
    programs = []
    for *_, program in HOSTILE.values():
        for word, value in words.items():
            program = program.replace(word, str(value))
        imports = [f"import {name}\n" for name in MODULES if re.search(rf"\b{name}\.", program)]
        programs += ["".join(imports) + program, LOOK]
    limits = {"time_limit": 0.5, "memory_limit": 128 * 2**20}
    see = lambda: (footprint(sandbox), [one.process.pid for one in sandbox.workers], files(home))  # noqa: E731
    before, looks = see(), sandbox.run([LOOK], ["7\n"], **limits)
    results = sandbox.run(programs, ["7\n"] * len(programs), **limits)
    return dict(zip(HOSTILE, results[::2])), looks + results[1::2], before, see()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program(contained, name):
    if name in X86 and platform.machine() != "x86_64":
        pytest.skip("machine code and numbers of system calls of x86-64")
    result, (statuses, _, printed) = contained[0][name], HOSTILE[name][1].partition(" prints ")
    assert result.status.name in statuses.split(" or "), result.output[:200]
    if printed:
        assert same_output(result.output, printed.replace("nothing", ""))
    assert SECRET.encode() not in result.output
    if result.status is OK:
        passed = [text for text in EXPECTED if same_output(result.output, text)]
        assert passed == [], result.output[:200]


def test_hostile_programs_leave_nothing(contained):
    """Every ordinary program finds what the first one found, its open files' flags included
    (/dev/null was shared once); no worker has been harmed."""
    _, looks, before, after = contained
    assert looks[0].status is OK and {*looks} == {looks[0]}
    assert before == after


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
    """12 programs of 0.3 s on few cores: each waits longer than its limit lets it compute."""
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint(1)"
    assert {result.status for result in sandbox.run([work] * 12, [""] * 12, time_limit=0.9)} == {OK}
    wait = "import time; time.sleep(1); print(1)"
    assert sandbox.run([wait], [""], time_limit=0.3) == [Result(OK, b"1\n")]


def test_cpu_time_of_all_threads_counts(sandbox):
    spin = "def spin():\n while time.thread_time() < 0.2: pass"
    start = "for _ in range(4): threading.Thread(target=spin).start()"
    program = f"import threading, time\n{spin}\n{start}"
    results = [sandbox.run([program], [""], time_limit=limit)[0] for limit in (0.4, 2.0)]
    assert [result.status for result in results] == [TIMEOUT, OK]


def test_memory_and_output_limits(sandbox):
    """That of memory is on top of what the interpreter has."""
    allocate = "x = bytearray(int(input()) * 2**20); print(1)"
    results = sandbox.run([allocate] * 2, ["60", "65"], time_limit=10.0, memory_limit=64 * 2**20)
    assert [result.status for result in results] == [OK, MEMORY]
    write = "print('x' * int(input()), end='')"
    results = sandbox.run([write] * 3, ["1000", "1001", "1000000"], output_limit=1000)
    assert results == [Result(OK, b"x" * 1000), Result(OUTPUT, b""), Result(OUTPUT, b"")]


# ------------------------------------------------------------------ stdin, stdout: as in a shell
SHELL = table("right_programs.txt")["right programs"]
SHELL += [["", "# -*- coding: latin-1 -*-\nprint(len('\u00e9'))"], ["", "\ufeffprint(1)"]]
SHELL += [["", "print(1)\r\nprint(2)\r\n"], ["", ""]]


def test_as_in_a_shell(sandbox, tmp_path):
    """Against a plain interpreter: python program.py < in > out."""
    environment = {"PYTHONIOENCODING": "utf-8:strict", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    programs, inputs = [row[1] for row in SHELL], [eval(f"b'{row[0]}'") for row in SHELL]

    def run(number: int) -> tuple[bool, bytes]:
        script, typed, printed = (tmp_path / f"{number}.{end}" for end in ("py", "in", "out"))
        script.write_bytes(programs[number].encode())
        typed.write_bytes(inputs[number])
        with open(typed) as stdin, open(printed, "wb") as stdout:
            streams = {"stdin": stdin, "stdout": stdout, "stderr": subprocess.DEVNULL}
            code = subprocess.call([sys.executable, script], **streams, env=environment)
        return code == 0, printed.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(run, range(len(SHELL))))
    for program, shell, found in zip(programs, expected, sandbox.run(programs, inputs)):
        assert (found.status is OK, found.output) == shell, program


def test_solutions_of_mbpp(sandbox, real_data):
    """Reference solutions, each with its own assertions: right programs may import and do that."""
    lines = (real_data / "mbpp.jsonl").read_text().splitlines()[::4]  # all of them would pass
    rows = [json.loads(line) for line in lines]
    programs = ["\n".join([row["code"], row["test_setup_code"], *row["test_list"]]) for row in rows]
    results = sandbox.run(programs, [""] * len(programs), time_limit=5.0)
    assert [row["task_id"] for row, result in zip(rows, results) if result.status is not OK] == []


# ------------------------------------------------------------------ the pool
def test_inputs_of_any_kind(sandbox):
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    inputs = ["", "\u2603", b"\xff\x00", "\ud800", b"x" * 10**6]
    outputs = [b"", "\u2603".encode(), b"\xff\x00", b"\xed\xa0\x80", b"x" * 10**6]
    assert sandbox.run([echo] * 5, inputs) == [Result(OK, output) for output in outputs]


def test_killed_workers_are_replaced(monkeypatch):
    """Killed with SIGKILL while they work, and one of them stopped: every result is still right,
    and in the order of the programs.
    """
    monkeypatch.setattr(pool, "PATIENCE", 0.0)
    program = "import time; time.sleep(0.05); print(input())"
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
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(["while True: pass"] * 50, [""] * 50, time_limit=5.0)
    results = sandbox.run(["print(input())"] * 12, list("abcdefghijkl"))
    assert results == [Result(OK, f"{c}\n".encode()) for c in "abcdefghijkl"]
    assert footprint(sandbox) == before


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


TRAINER = """
import os, signal, time
from multiprocessing.connection import wait
from common.sandbox import Sandbox, worker
# what a shell starts in the background ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)
with Sandbox(workers=2) as sandbox:
    print(*[one.process.pid for one in sandbox.workers], flush=True)
"""
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
ENDS = {"interrupted": (signal.SIGINT, AT_WORK), "killed": (signal.SIGKILL, AT_WORK)}
ENDS["answers unread"] = signal.SIGKILL, ANSWERS_UNREAD
ENDS["sockets in a child"] = signal.SIGKILL, SOCKETS_IN_A_CHILD


@pytest.mark.parametrize("number, body", ENDS.values(), ids=ENDS)
def test_nothing_outlives_the_trainer(number, body, tmp_path):
    command = [sys.executable, "-c", TRAINER + textwrap.indent(body, "    ")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    workers = [int(word) for word in trainer.stdout.readline().split()]
    try:
        first, *forked = trainer.stdout.readline().split()
        assert first == b"ready"
        children, deadline = {*workers}, time.monotonic() + 600
        while body is AT_WORK and len(children) < 4:  # and their programs
            assert time.monotonic() < deadline
            for pid in workers:
                children |= {one.pid for one in psutil.Process(pid).children()}
        trainer.send_signal(number)
        trainer.wait(timeout=600)
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
        assert all(one.process.wait(timeout=600) for one in sandbox.workers)
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
def test_what_cannot_be_run_is_refused(sandbox):
    assert sandbox.run([], []) == []
    with pytest.raises(ValueError, match="2 programs and 1 inputs"):
        sandbox.run(["", ""], [""])
    before = footprint(sandbox)
    with pytest.raises(UserError, match="RLIMIT_CPU"):  # more than the kernel can count to
        sandbox.run(["print(1)"] * 100, [""] * 100, time_limit=1e300)
    assert sandbox.run(["print(1)"], [""]) == [Result(OK, b"1\n")]
    assert footprint(sandbox) == before


def test_a_program_cannot_pretend_that_it_could_not_be_started(sandbox):
    program = """
    import os
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
from common.core.errors import UserError
from common.sandbox import Sandbox
try:
    with Sandbox(workers=1) as sandbox:
        (one,) = sandbox.run(["print(input())"], ["x" * 50000], time_limit=1000)
        print(one.output == b"x" * 50000 + b"\\n")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "shell, word",
    [
        ("ulimit -f 100", "RLIMIT_FSIZE"),
        ("ulimit -n 40", "RLIMIT_NOFILE"),
        ("ulimit -t 900", "RLIMIT_CPU"),  # less than the program's, and enough to import
        ("ulimit -Sf 40", "RLIMIT_FSIZE"),  # what is handed over would be cut
        ("exec 2>&-", "True"),
        ("exec <&- 2>&-", "True"),
    ],
)
def test_a_shell_with_other_limits_or_files(shell, word):
    """Right or refused in a sentence; never a wrong program."""
    command = ["bash", "-c", f'{shell}; exec "$0" -c "$1"', sys.executable, TRY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert word in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout


# ------------------------------------------------------------------ a machine that lacks a layer
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
    """Without Landlock and seccomp, what a program has started still ends with it.

    "prctl" stands for prctl(PR_SET_SECCOMP) alone, "libseccomp" for a library that cannot be
    loaded.
    """
    lib = ctypes.CDLL("libseccomp.so.2")
    lib.seccomp_init.restype = ctypes.c_void_p

    def take_away():
        context = ctypes.c_void_p(lib.seccomp_init(0x7FFF0000))
        for name in {*system_calls} - {"libseccomp"}:
            arguments = (1, worker.COMPARISON.pack(0, 4, 22, 0)) if name == "prctl" else (0, None)
            number = lib.seccomp_syscall_resolve_name(name.encode())
            lib.seccomp_rule_add_array(context, 0x00050000 | errno.ENOSYS, number, *arguments)
        lib.seccomp_load(context)

    (tmp_path / "libseccomp.so.2").touch()
    path = {"LD_LIBRARY_PATH": str(tmp_path)} if "libseccomp" in system_calls else {}
    script = f"""
    import os, time
    from common.core.errors import UserError
    from common.sandbox import Sandbox
    try:
        Sandbox(workers=2)
    except UserError as error:
        print(error)
    with Sandbox(workers=2, unsafe=True) as sandbox:
        assert sandbox.missing == {missing}
        programs = ["print(input())", "while True: pass", "x = bytearray(10 ** 10)"] * 2
        results = sandbox.run(programs, ["1"] * 6, time_limit=0.2)
        fork = "import os, time; p = os.fork(); p or time.sleep(60); print(p)"
        started = sandbox.run([fork], [""])[0].output
        while started and os.path.exists("/proc/%d/exe" % int(started)):
            time.sleep(0.01)
        print(*[result.status.name for result in results], results[0].output)
    """
    options = {"cwd": ROOT, "env": {**os.environ, **path}, "preexec_fn": take_away, "timeout": 600}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    refusal, ran = done.stdout.splitlines()
    assert ran == "OK TIMEOUT MEMORY OK TIMEOUT MEMORY b'1\\n'"
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("warning: ")
    for text in (refusal, done.stderr):
        assert all(word in text for word in missing + help)
    assert "--unsafe-sandbox" in refusal
    assert all(name in missing or name not in refusal for name in LAYERS)


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
    assert same_output(ours, ours)
    if len(ours.split()) == len(theirs.split()) == 1 and same_output(ours, theirs):
        a, b = (text.decode("utf-8", "surrogateescape").split() for text in (ours, theirs))
        assert a == b
