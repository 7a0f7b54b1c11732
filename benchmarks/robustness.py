"""What a user's mistakes and hostile programs do: python benchmarks/robustness.py

Mistakes (mistakes.py): each is made in a folder of its own beside files of somebody else's, by a
fork of this process, which has imported everything: a fresh Python spends seconds on imports. The
fork runs a script as `python script.py` would. Then every file is compared with what it was.
Hostile programs (hostile.py) run in common/sandbox, as model-written ones do, each followed by an
ordinary one; then thousands in a row.

    python benchmarks/robustness.py                     # what docs/evidence/robustness.json lacks
    python benchmarks/robustness.py --only checkpoints  # a group, again
    python benchmarks/robustness.py --kind "a file of weights that is empty"
    python benchmarks/robustness.py --tables-only

Results are kept as soon as there are any, with a hash of the code; those of other code are made
again. Writes docs/evidence/robustness.json and the tables of docs/robustness.md.
"""

import argparse
import atexit
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from hostile import HOSTILE, Stage  # noqa: E402
from mistakes import GROUPS, MISTAKES, SMALL, Impossible, Mistake, at_most, nothing  # noqa: E402

RESULTS = ROOT / "docs" / "evidence" / "robustness.json"
DOCS = ROOT / "docs" / "robustness.md"
LONGEST = 400  # characters of the sentence
PATIENCE = 100  # seconds; only a script that hangs takes so long
IN_A_ROW = 5000  # programs, every tenth of them hostile
ENDS = {
    "refused": "one sentence, exit code not 0",
    "works": "goes on as if nothing were wrong",
    "either": "one sentence, or goes on and loses nothing",
    "stopped": "stops by itself, says so, exit code not 0",
    "killed": "no time to say anything",
    "parser": "the argument parser's own message, exit code not 0",
}


# ------------------------------------------------------------------ a script in a fork
class Child:
    """A script, run as `python script.py ARGUMENTS` in `folder`, with its output in two files."""

    def __init__(self, case: Mistake, folder: Path, outputs: Path, arguments: list[str]):
        self.files = outputs.with_suffix(".out"), outputs.with_suffix(".err")
        self.code: int | None = None
        for path in self.files:
            path.unlink(missing_ok=True)  # those of the case before
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._become(case, folder)
                if case.fresh:
                    os.execv(sys.executable, [sys.executable, str(ROOT / case.script), *arguments])
                code = self._run(case.script, arguments)
            finally:
                os._exit(code)

    def _become(self, case: Mistake, folder: Path):
        os.setsid()
        os.chdir(folder)
        files = [os.open("/dev/null", os.O_RDONLY)]
        files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in self.files]
        for fd, file in enumerate(files):
            os.dup2(file, fd)
        sys.stdin, sys.stdout, sys.stderr = (open(fd, "r" if fd == 0 else "w") for fd in range(3))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        at_most(8 * 2**30)
        case.inside()

    @staticmethod
    def _run(script: str, arguments: list[str]) -> int:
        """The exit code, after all that an interpreter does at its end."""
        import tyro

        module = importlib.import_module(script.removesuffix(".py"))
        sys.argv = [script, *arguments]
        try:
            with module.plain_errors():
                module.main(tyro.cli(module.Args))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError as error:  # as the interpreter says and does
                code = 120
                with contextlib.suppress(OSError):
                    os.write(2, f"Exception ignored while flushing: {error!r}\n".encode())
        return code

    def printed(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.files if path.exists())

    def error(self) -> str:
        return self.files[1].read_text(errors="replace")

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait_for(self, pattern: str) -> bool:
        """Until it has printed that (True), or has ended."""
        latest = time.monotonic() + PATIENCE
        while self.running() and time.monotonic() < latest:
            if re.search(pattern, self.printed()):
                return True
            time.sleep(0.003)
        return False

    def send(self, number: int):
        if self.running():
            os.kill(self.pid, number)

    def wait(self):
        latest = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > latest:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.003)
        self.hung = time.monotonic() > latest
        with contextlib.suppress(ProcessLookupError):  # what it has started
            os.killpg(self.pid, signal.SIGKILL)
        return self


# ------------------------------------------------------------------ what is in a folder
def listing(folder: Path) -> dict[str, str]:
    """Path -> kind and content, of everything below."""
    found = {}
    for path in folder.rglob("*"):
        name, info = str(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif stat.S_ISREG(info.st_mode):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = f"mode {info.st_mode:o}"
    return found


def whole_steps(folder: Path) -> list[int] | None:
    """The steps of metrics.jsonl, without evaluations; None: not a list of whole lines."""
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["step"] for row in rows if not any(k.startswith("eval/") for k in row)]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def adapters(folder: Path) -> dict[str, str]:
    files = folder.glob("*/adapter_model.safetensors")
    return {f.parent.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


# ------------------------------------------------------------------ a mistake
class Bench:
    """Where mistakes are made; the runs that they start from are made once."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="duet-"))  # not TemporaryDirectory: forks end

    def base(self, script: str, which: str) -> Path:
        """A small run: "finished", uninterrupted; or "interrupted" after step 2 of 3."""
        folder = self.folder / which / script.removesuffix(".py")
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            case = Mistake("", "", script=script)
            arguments = [*SMALL[script].split(), "--out", str(folder)]
            child = Child(case, self.folder, self.folder / f"{which}-{script}", arguments)
            if which == "interrupted":
                child.wait_for(r"step 1/3")
                child.send(signal.SIGINT)
            child.wait()
            step = 2 if which == "interrupted" else 3
            if not (folder / f"checkpoint-{step}").exists():
                raise RuntimeError(f"{script}, {which}: {child.printed()[-3000:]}")
        return folder

    def make(self, case: Mistake) -> dict:
        """Make a mistake, and say what came of it."""
        place = self.folder / "place"
        place.mkdir()
        home = place / "home"  # somebody else's, as in a folder that runs are started in
        (home / "photos").mkdir(parents=True)
        for name in ("README.md", "metrics.jsonl", "tango.py", "photos/one.jpg"):
            (home / name).write_text(f"{name}: not of a run\n")
        run, own = place / case.out, set()
        if case.start:
            shutil.copytree(self.base(case.script, case.start), run, symlinks=True)
            own = {f"{case.out}/{name}" for name in listing(run)}
        try:
            case.prepare(place)
            return self._judge(case, place, run, own)
        except Impossible as reason:
            return {"ended": "not tried here", "says": str(reason), "fails": []}
        finally:
            case.clean_up(place)
            for path in [place, *place.rglob("*")]:
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
            shutil.rmtree(place)

    def _judge(self, case: Mistake, place: Path, run: Path, own: set[str]) -> dict:
        before = listing(place)
        was_empty = not run.is_dir() or not any(run.iterdir())
        words = f"{SMALL[case.script]} --out {{place}}/{case.out} {case.arguments}"
        words = [word.replace("{place}", str(place)) for word in words.split(" ") if word]
        words += [word.replace("{place}", str(place)) for word in case.more]
        if case.default_out:
            at = words.index("--out")
            del words[at : at + 2]
        start = lambda name, case=case: Child(case, place / "home", self.folder / name, words)  # noqa: E731
        companion = start("companion") if case.companion else None
        if case.companion == "first":
            companion.wait_for(r"step 1/")
        child = start("child")
        case.meanwhile(child, place)
        child.wait()
        after = listing(place)
        fails, ended, sentence = judge_end(case, child)
        fails += [
            f"foreign: {what}" for what in foreign(case, before, after, own, was_empty, ended)
        ]
        if companion:
            companion.wait()
            if case.companion == "first" and companion.code:
                fails.append(f"lost: the first run ended with exit code {companion.code}")
        elif case.start and "goes on from" in child.printed():
            if len(set(whole_steps(run) or [])) != len(whole_steps(run) or [0]):
                fails.append(f"lost: the steps in metrics.jsonl are {whole_steps(run)}")
        elif case.start and ended != "went on":
            gone = [n for n in own if n in before and protected(n) and after.get(n) != before[n]]
            fails += [f"lost: {name} was changed or deleted" for name in sorted(gone)]
        if case.resumes:
            case.clean_up(place, "to go on")
            case = dataclasses.replace(case, fresh=False, inside=nothing)
            again = start("again", case).wait()
            if again.code:
                fails.append(f"lost: it cannot go on: {again.printed()[-300:]}")
        if case.compare and (case.resumes or ended == "went on" or companion):
            fails += self._lost(case, run if not case.default_out else None, place)
        if fails:
            print(f"----\n{child.printed()[-1500:]}----", flush=True)
        clean = lambda text: text.replace(str(place), "").replace(str(ROOT), ".")  # noqa: E731
        return {
            "ended": ended,
            "says": clean(sentence),
            "fails": [clean(text)[:400] for text in fails],
        }

    def _lost(self, case: Mistake, run: Path | None, place: Path) -> list[str]:
        """A run that went on ends as the uninterrupted one, bit for bit."""
        whole = self.base(case.script, "finished")
        runs = [run] if run else sorted((place / "home" / "runs").iterdir())
        fails = []
        for one in runs:
            if whole_steps(one) != [1, 2, 3]:
                fails.append(f"lost: the steps in metrics.jsonl are {whole_steps(one)}")
            if case.compare == "weights" and adapters(one) != adapters(whole):
                fails.append("lost: the adapters are not those of the uninterrupted run")
        return fails


def judge_end(case: Mistake, child: Child) -> tuple[list[str], str, str]:
    """(what is wrong with it, how it ended, its sentence)"""
    printed, lines = child.printed(), child.error().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    sentence = errors[-1].removeprefix("error: ") if errors else ""
    trace = "Traceback" in printed
    if child.hung:
        ended = "hung"
    elif trace:
        ended, sentence = "stack trace", (lines or [""])[-1]
    elif child.code == 0:
        ended = "went on"
    elif child.code < 0:
        ended = f"killed by signal {-child.code}"
    elif case.ends == "parser":
        ended, sentence = "refused", " ".join(re.findall(r"[\w'\"-]+", child.error()))
    elif len(errors) == 1:
        ended = "refused"
    elif case.ends == "stopped" and not errors:
        ended = "refused"
        sentence = next((line for line in printed.splitlines() if re.search(case.says, line)), "")
    else:
        ended = f"exit code {child.code}, {len(errors)} sentences"
    fails = []
    good = {"works": ["went on"], "either": ["refused", "went on"]}.get(case.ends, ["refused"])
    if case.ends == "killed":
        good = [f"killed by signal {n}" for n in (1, 2, 3, 9, 15)] + ["refused"]
        good += ["exit code 141, 0 sentences"]  # what a shell makes of SIGPIPE
    if ended not in good:
        fails.append(f"ended: {ended}" + (f" ({sentence})" if trace else ""))
    elif case.ends != "killed":
        text = printed if ended == "went on" else sentence
        if ended == "refused" and case.ends != "parser" and len(sentence) > LONGEST:
            fails.append(f"sentence: {len(sentence)} characters")
        wanted = case.says if ended == "refused" else case.says_if_it_goes_on
        if wanted and not re.search(wanted, text):
            fails.append(f"sentence: does not say {wanted}: {sentence[:200]}")
        noise = [line for line in lines if line.strip() and line not in errors]
        if ended == "refused" and case.ends == "refused" and len(noise) > 5:
            fails.append(f"sentence: among {len(noise)} other lines on stderr")
    return fails, ended, sentence


def foreign(case, before, after, own: set[str], was_empty: bool, ended: str) -> list[str]:
    """What was changed, deleted or made that is not the run's."""
    touched = []
    for name, content in before.items():
        if name not in own and name not in case.may_change and after.get(name) != content:
            if not (name == case.out and before[name].startswith("mode")):  # the folder itself
                touched.append(f"{name} was {'changed' if name in after else 'deleted'}")
    for name in after.keys() - before.keys():
        ours = name == case.out or name.startswith(f"{case.out}/")
        ours = ours and (was_empty or case.start or ended == "went on")
        default = case.default_out and re.match(r"home/runs(/|$)", name)
        if not (ours or default):
            touched.append(f"{name} was made")
    return touched


def protected(name: str) -> bool:
    """What a refused run must leave as it was, of its own: all that took time to make."""
    return bool(
        re.search(r"checkpoint-\d|adapter_|metrics\.jsonl|rollouts\.jsonl|args\.json", name)
    )


# ------------------------------------------------------------------ hostile programs
def same_as_before(stage: Stage, before: dict) -> list[str]:
    """What hostile programs have left."""
    stage.settle(before)
    return [f"left: {k}: {v}, was {before[k]}" for k, v in stage.count().items() if v > before[k]]


def run_hostile(names: list[str], stage: Stage) -> dict[str, dict]:
    """Each hostile program, and an ordinary one after it in the same worker."""
    found = {}
    for name in names:
        before, start = stage.count(), time.monotonic()
        fails, status = stage.judge(name)
        if time.monotonic() - start > stage.LONGEST:
            fails.append(f"time: {time.monotonic() - start:.0f} s")
        found[name] = {"ended": status, "fails": fails + same_as_before(stage, before)}
    return found


def run_in_a_row(stage: Stage) -> dict:
    before, memory = stage.count(), stage.memory()
    wrong, statuses = stage.run_in_a_row(IN_A_ROW)
    fails = same_as_before(stage, before)
    grown = stage.memory() - memory
    if grown > stage.MOST_MEMORY:
        fails.append(f"left: {grown / 2**20:.0f} MiB in this process")
    if wrong:
        fails.append(f"{wrong} ordinary programs had another result")
    return {"ended": str(dict(statuses)), "programs": IN_A_ROW, "wrong": wrong, "fails": fails}


# ------------------------------------------------------------------ results and tables
def code_hash() -> str:
    """Of everything that a result depends on."""
    files = [
        *ROOT.glob("*.py"),
        *(ROOT / "common").rglob("*.py"),
        *(ROOT / "common").rglob("*.json"),
    ]
    files += [Path(__file__).parent / f"{n}.py" for n in ("robustness", "mistakes", "hostile")]
    content = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.sha256(content).hexdigest()[:12]


def read(path: Path = RESULTS) -> dict:
    if path.exists():
        return json.loads(path.read_text())
    return {"machine": f"{platform.machine()} CPU", "mistakes": {}, "hostile": {}, "row": {}}


def keep(kept: dict):
    """With counts per group, for whoever reads the file without the page."""
    kept["counts"] = {group: counts(kept, group) for group in GROUPS}
    kept["failing"] = {
        name: result["fails"]
        for part in ("mistakes", "hostile")
        for name, result in kept[part].items()
        if result["fails"]
    }
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def counts(kept: dict, group: str) -> dict[str, int]:
    """Of a group of mistakes: how many kinds, how they ended, how many lost or touched what."""
    rows = [kept["mistakes"].get(case.name) for case in MISTAKES if case.group == group]
    rows = [row for row in rows if row and row["ended"] != "not tried here"]
    starting = lambda word: sum(any(f.startswith(word) for f in r["fails"]) for r in rows)  # noqa
    ended = Counter(row["ended"] for row in rows if not starting_badly(row))
    return {
        "kinds": len(rows),
        "sentence": ended["refused"],
        "went on": ended["went on"],
        "stopped": ended.total() - ended["refused"] - ended["went on"],
        "otherwise": sum(map(starting_badly, rows)),
        "lost": starting("lost"),
        "foreign": starting("foreign"),
    }


def starting_badly(row: dict) -> bool:
    return any(fail.startswith(("ended", "sentence")) for fail in row["fails"])


def line(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


COLUMNS = {
    "kinds": "kinds",
    "sentence": "one sentence, exit code not 0",
    "went on": "went on, as it should",
    "stopped": "killed, and resumed",
    "otherwise": "ended otherwise",
    "lost": "lost something",
    "foreign": "touched something foreign",
}


def mistakes_table(kept: dict) -> str:
    text = line("mistakes", *COLUMNS.values()) + "|" + "---|" * (len(COLUMNS) + 1) + "\n"
    rows = {group: counts(kept, group) for group in GROUPS}
    for group, row in rows.items():
        text += line(group, *[row[key] for key in COLUMNS])
    return text + line("all", *[sum(row[key] for row in rows.values()) for key in COLUMNS])


def hostile_table(kept: dict) -> str:
    rows = [kept["hostile"][name] for name in HOSTILE]
    having = lambda word: sum(any(f.startswith(word) for f in r["fails"]) for r in rows)  # noqa
    row = kept["row"]
    leaks = having("left") + sum(fail.startswith("left") for fail in row["fails"])
    titles = "hostile programs | passed a test | harmed the next program | touched a file"
    titles += " | past their time | programs in a row | ordinary ones judged wrongly | leaks"
    values = (len(rows), having("forged"), having("next"), having("foreign"), having("time"))
    text = line(titles) + "|" + "---|" * 8 + "\n"
    return text + line(*values, f"{row['programs']:,}", row["wrong"], leaks)


def failing_table(kept: dict) -> str:
    failing = [
        (name, "; ".join(result["fails"]).replace("|", "\\|"))
        for part in ("mistakes", "hostile")
        for name, result in kept[part].items()
        if result["fails"]
    ]
    if not failing:
        return "None.\n"
    text = line("kind", "what is wrong") + "|---|---|\n"
    return text + "".join(line(name, fails[:200]) for name, fails in sorted(failing))


TABLES = {"mistakes": mistakes_table, "hostile": hostile_table, "failing": failing_table}


def with_tables(text: str, kept: dict) -> str:
    """The page with what is between the marks of every table made anew."""
    for key, table in TABLES.items():
        start, end = f"<!-- table: {key} -->\n", f"<!-- end: {key} -->"
        before, rest = text.split(start)
        text = before + start + table(kept) + rest[rest.index(end) :]
    return text


def complete(kept: dict) -> bool:
    return bool(
        {case.name for case in MISTAKES} <= kept["mistakes"].keys()
        and HOSTILE.keys() <= kept["hostile"].keys()
        and kept["row"]
    )


# ------------------------------------------------------------------ the command
def wanted(args, kept: dict, code: str) -> tuple[list[Mistake], list[str], bool]:
    """(mistakes, hostile programs, whether thousands in a row) that are to be run."""
    asked = bool(args.only or args.kind)
    chosen = lambda group, name: (  # noqa: E731
        (not args.only or group in args.only) and (not args.kind or name in args.kind)
    )
    new = lambda part, name: asked or kept[part].get(name, {}).get("code") != code  # noqa: E731
    mistakes = [c for c in MISTAKES if chosen(c.group, c.name) and new("mistakes", c.name)]
    hostile = [name for name in HOSTILE if chosen("sandbox", name) and new("hostile", name)]
    row = chosen("sandbox", "in a row") and (asked or kept["row"].get("code") != code)
    return mistakes, hostile, row


def run_mistakes(mistakes: list[Mistake], kept: dict, code: str):
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
    import torch

    torch.set_num_threads(1)  # before any fork: threads do not survive one
    for module in ("matplotlib.pyplot", *[script.removesuffix(".py") for script in SMALL]):
        importlib.import_module(module)
    bench = Bench()
    try:
        for case in mistakes:
            start = time.monotonic()
            try:
                result = bench.make(case)
            except Exception as error:  # the next kind may work
                result = {"ended": "not made", "says": "", "fails": [f"ended: not made: {error!r}"]}
            kept["mistakes"][case.name] = {"group": case.group, "script": case.script, **result}
            kept["mistakes"][case.name]["code"] = code
            keep(kept)
            say(case.group, case.name, result, time.monotonic() - start)
    finally:
        shutil.rmtree(bench.folder)


def say(group: str, name: str, result: dict, seconds: float):
    what = "; ".join(result["fails"]) or f"good: {result['ended']}"
    shown = f": {result['says']}" if result.get("says") else ""
    print(f"{seconds:5.1f} s  {group}: {name}: {what}{shown}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, "sandbox"], help="groups, again")
    parser.add_argument("--kind", nargs="+", help="kinds by name, again")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    kept, code = read(), code_hash()
    mistakes, hostile, row = wanted(args, kept, code) if not args.tables_only else ([], [], False)
    if hostile or row:
        with Stage() as stage:
            for name, result in run_hostile(hostile, stage).items():
                kept["hostile"][name] = {**result, "code": code}
                say("sandbox", name, result, 0)
            if row:
                kept["row"] = {**run_in_a_row(stage), "code": code}
                say("sandbox", "in a row", kept["row"], 0)
    if mistakes:
        run_mistakes(mistakes, kept, code)
    kept["mistakes"] = {
        c.name: kept["mistakes"][c.name] for c in MISTAKES if c.name in kept["mistakes"]
    }
    kept["hostile"] = {name: kept["hostile"][name] for name in HOSTILE if name in kept["hostile"]}
    keep(kept)
    if complete(kept):
        DOCS.write_text(with_tables(DOCS.read_text(), kept))
    print(f"{len(kept['failing'])} kinds are not as they should be: {', '.join(kept['failing'])}")


if __name__ == "__main__":
    main()
