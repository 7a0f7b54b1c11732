"""Trains one `--plain` step of tango.py's generator and prints, as JSON, what of ours it calls.
test_plain.py starts it in a process of its own, in which no test has replaced anything.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import ROOT  # isort: skip  it finds the project

import tango
from common.cotrainer import CoTrainer

WATCHERS = {
    "common/errors.py": "*",
    "common/run/checks.py": "*",
    "common/run/recording.py": "*",
    "common/run/trainer.py": ["RunTrainer.log_mean", "RunTrainer.log_rewards"],
    "common/cotrainer.py": ["CoTrainer.log_tokens", "CoTrainer.record"],
    "tango.py": ["Tango.report_generator", "Tango.report_verdicts"],
}
"""What looks at a step, raises or writes something down, and hands nothing back that the step goes
on with. There is one exception: `checks.checked` wraps a reward function, which it calls."""
# Not all that lies in the project's folder is ours: an environment may lie there, too.
OURS = (*map(str, ROOT.glob("*.py")), f"{ROOT}/common/")
called = {}  # (file, function) -> whether the step goes on with what it returns
step = CoTrainer.training_step


def name_of(code) -> tuple[str, str]:
    """(file, qualified name); a comprehension or an inner function belongs to the one around it."""
    return code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname.partition(".<locals>")[0]


def watches(code) -> bool:
    file, function = name_of(code)
    return WATCHERS.get(file) == "*" or function in WATCHERS.get(file, ())


def look(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(OURS):
        key, acts = name_of(frame.f_code), not watches(frame.f_code)
        while acts and (frame := frame.f_back):  # what is called by a watcher only watches
            acts = not watches(frame.f_code) or frame.f_code.co_name == "call"
        called[key] = called.get(key, False) or acts


def traced(*given):
    sys.setprofile(look)
    try:
        return step(*given)
    finally:
        sys.setprofile(None)


if __name__ == "__main__":  # pytest imports this file to look for doctests
    CoTrainer.training_step, tango.evaluate = traced, lambda *_: {}
    sizes = {"questions": 2, "group_size": 4, "micro_batch": 4, "solution_tokens": 48}
    schedule = {"steps": 1, "ver_warmup": 0, "gen_steps": 1, "eval_every": 0}
    tango.main(tango.Args(**sizes, **schedule, plain=True, out=sys.argv[1]))
    print(json.dumps([[*key, acts] for key, acts in sorted(called.items())]))
