"""Mistakes of users, made as they make them: a command line and files in, one sentence out, and
nothing of theirs is changed or lost. The mistakes themselves are in tests/data/mistakes.txt.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common.tiny import TINY

import pytest
import warm
from conftest import (
    ROOT,
    SMALL,
    metrics_of,
    refused,
    run_here,
    same_weights,
    small,
    table,
)

COMMANDS = r"""
cut() { for f; do truncate -s $(($(stat -c%s "$f") / 2)) "$f"; done; }
empty() { for f; do true > "$f"; done; }
many() { head -c "$2" /dev/zero | tr '\0' "$1"; }  # a character, so many times
garbage() { for f; do many '\377' 9999 > "$f"; done; }
nan() {  # every number in a file of safetensors
    head=$((8 + $(od -An -N8 -tu8 "$1"))); size=$(stat -c%s "$1")
    { head -c $head "$1"; many '\377' $((size - head)); } > nan; mv nan "$1"
}
json() {  # json FILE key=value ...
    "$PYTHON" -SEc '
import json, sys
file, *changes = sys.argv[1:]
content = json.load(open(file)) | {k: json.loads(v) for k, v in (c.split("=", 1) for c in changes)}
open(file, "w").write(json.dumps(content))' "$@"
}
good() {  # a row for every script
    printf '{"question": "1+%s", "answer": "%s", "reference": "<step>1+%s = %s</step>' $1 $2 $1 $2
    printf '<answer>\\\\boxed{%s}</answer>", "test_input": ["1"], "test_output": ["2"], ' $2
    printf '"program": "def f(x): return x+%s", "inputs": ["1", "2"]}\n' $1
}
data() { for n in {1..60}; do good $n $((n + 1)); done > data.jsonl; }
row() { { good 1 2; printf '%s\n' "$1"; } > data.jsonl; }  # the second one
label() { echo '{"question": "1", "slice": "1", "judgement": "**'$1'**"}' >> labels.jsonl; }
# for a process of its own
start() { touch start; until [ -s pid ]; do sleep 0.01; done; PID=$(cat pid); }
fresh() { bash -c "exec $COMMAND $1" >> out 2>&1 & PID=$!; }  # which imports everything first
printed() { until grep -qs "$1" out || ! kill -0 $PID; do sleep 0.01; done; }
loaded() { until grep -qs "$1" /proc/$PID/maps; do sleep 0.01; done; }  # a library
made() { until [ -e "$1" ] || ! kill -0 $PID; do :; done; }
disk() { mkdir run; mount -t tmpfs -o size=$1 none run || touch no-mount; }
set -m  # or what runs in the background would not hear Ctrl-C
"""


# ------------------------------------------------------------------ the table
def alternatives(text: str) -> list[str]:
    """'<a|b> c' -> ['a c', 'b c']"""
    found = re.search(r"<([^<>|\n]+(?:\|[^<>|\n]+)+)>", text)
    if not found:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    return [whole for one in found[1].split("|") for whole in alternatives(before + one + after)]


def cases(section: str) -> list[tuple[str, list[str], str, str]]:
    """(script, arguments, part of the sentence, commands) of a section's rows."""
    title = next(title for title in table("mistakes.txt") if title.split(" | ")[0] == section)
    _, always, first = [*title.split(" | "), "-", ""][:3]
    written, found = ["\t".join(row) for row in table("mistakes.txt")[title]], []
    for number, row in enumerate(row for rows in written for row in alternatives(rows)):
        words, says, commands = [*row.split("\t"), "", ""][:3]
        script, *given = words.split() or [""]
        if not script.endswith(".py"):
            script, given = [*SMALL][number % len(SMALL)], [script, *given]
        given = [word for word in [*always.split(), *given] if word.strip("-")]
        says = says or next(iter(given), "").split("=")[0]
        found.append((script, given, says, f"{first}\n{commands}".strip()))
    return found


def mistakes(*sections: str):
    """The decorator of a test that makes all mistakes of these sections."""
    found = [case for section in sections for case in cases(section)]
    names = [" ".join(f"{case[0]} {' '.join(case[1])} {case[3]}".split())[:90] for case in found]
    return pytest.mark.parametrize("script, given, says, commands", found, ids=names)


def bash(commands: str, folder: Path, **more: str) -> subprocess.Popen:
    names = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}
    names |= {"TINY": str(TINY), "PYTHON": sys.executable}
    script = ["bash", "-ec", f"{COMMANDS}\n{commands}"]
    # in a session of its own: job control would stop all that is behind a terminal's foreground
    return subprocess.Popen(script, cwd=folder, env=names, start_new_session=True)


def files(folder: Path) -> dict[Path, bytes | str]:
    """All that lies in a folder, but for a run's lock and report: path -> content, or its kind."""
    found = {}
    for path in folder.rglob("*"):
        plain = path.is_file() and not path.is_symlink()
        found[path] = path.read_bytes() if plain else f"mode {path.lstat().st_mode >> 12:o}"
    made_anew = {folder / "run" / name for name in (".lock", "report.html")}
    return {path: content for path, content in found.items() if path not in made_anew}


# ------------------------------------------------------------------ one sentence
@mistakes("arguments", "models", "data sets", "rows of a data set", "run folders",
          "runs that cannot be resumed")  # fmt: skip
def test_a_mistake_ends_in_one_sentence(
    script, given, says, commands, tmp_path, monkeypatch, finished
):
    run = finished(script)[0] if "$RUN" in commands else ""
    assert bash(commands, tmp_path, RUN=str(run)).wait() == 0
    monkeypatch.chdir(tmp_path)
    before, there = files(tmp_path), (tmp_path / "run").exists()
    said = refused(script, *small(script, "run", *given))
    assert says in said, said
    assert "row 2" in said or "\nrow " not in commands
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before
    made = {path.relative_to(tmp_path).parts[0] for path in after.keys() - before.keys()}
    assert made <= ({"run"} if not there else set())


# ------------------------------------------------------------------ nothing is lost
def test_what_is_harmless_in_a_run_stays_and_the_run_resumes(finished, tmp_path):
    """All at once, in a folder with a name that a shell would take apart."""
    folder, whole = tmp_path / "a 'b' \"c\" \u263a", finished("tango.py")[0]
    shutil.copytree(whole, folder)
    harmless = cases("harmless in an interrupted run")
    for *_, commands in harmless:
        assert bash(commands, folder).wait() == 0, commands
    more = "--save-every 5 --eval-every 0 --show-every 0".split()
    shown = run_here("tango.py", *small("tango.py", "run", "--out", folder, *more))
    assert "from checkpoint-4" in shown and all(says in shown for _, _, says, _ in harmless)
    assert "--- the verifier" not in shown
    assert (folder / "tango.py").read_text() == "# as it was\n"
    now = folder / "tango-from-checkpoint-4.py"
    assert now.read_text() == (whole / "tango.py").read_text()
    planted = ("checkpoint-", "checkpoint-best", "checkpoint-4-old", "checkpoint-9")
    assert all((folder / name).exists() for name in planted)
    same_weights(folder, whole)
    steps, expected = ([row["step"] for row in metrics_of(run)] for run in (folder, whole))
    assert steps == expected
    assert (folder / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()


def test_what_is_harmless_in_a_model_trains(tmp_path, brief):
    shutil.copytree(TINY, tmp_path / "model")
    for *_, commands in cases("harmless in a model"):
        assert bash(commands, tmp_path / "model").wait() == 0, commands
    brief("tango.py", *small("tango.py", tmp_path / "run", "--model", tmp_path / "model", *SHORT))
    assert (tmp_path / "run" / "checkpoint-3").exists()


SHORT = """--steps 3 --save-every 1 --group-size 4 --solution-tokens 24 --judgement-tokens 24
    --eval-questions 4 --eval-samples 1 --eval-every 0 --show-every 0""".split()


@mistakes("in a process of its own")
def test_what_a_process_meets_loses_nothing(
    script, given, says, commands, tmp_path, brief, finished
):
    """It ends with this exit code, and afterwards the same command finishes the run bit for bit."""
    out, process, (code, _, says) = tmp_path / "out", None, says.partition(" ")
    command, whole = small(script, tmp_path / "run", *SHORT), finished(script, *SHORT)[0]
    words = shlex.join(map(str, [sys.executable, ROOT / script, *command, *given]))
    end = "wait $PID" if "fresh" in commands else ""
    story = bash(f"{commands}\n{end}", tmp_path, COMMAND=words)
    while story.poll() is None and process is None:
        time.sleep(0.01)
        if (tmp_path / "start").exists():
            process = warm.start(script, [*command, *given], out, out)
            (tmp_path / "pid").write_text(str(process.pid))
    try:
        story.wait(timeout=600)
        process and process.join(timeout=600)
        printed = out.read_text() if out.is_file() else ""
        if (tmp_path / "no-mount").exists():
            pytest.skip("no right to mount a small disk")
        ended = process.exitcode if process else story.returncode
        assert str(ended) in code.split(",") and says in printed, printed
        assert "Traceback" not in printed and ("\n" + printed).count("\nerror: ") == (ended == 2)
        bash("! mountpoint -q run || mount -o remount,size=200m run", tmp_path).wait()
        brief(script, *command)
        same_weights(tmp_path / "run", whole)
    finally:
        bash("! mountpoint -q run || umount -l run", tmp_path).wait()


def test_the_same_folder_twice_at_a_time(tmp_path, finished):
    command, out = small("tango.py", tmp_path / "run", *SHORT), tmp_path / "out"
    process = warm.start("tango.py", command, out, out)
    while process.is_alive() and "step 1/" not in (out.read_text() if out.exists() else ""):
        time.sleep(0.01)
    assert "another run" in refused("tango.py", *command)
    process.join(timeout=600)
    assert process.exitcode == 0, out.read_text()
    same_weights(tmp_path / "run", finished("tango.py", *SHORT)[0])
