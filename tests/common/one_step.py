"""Trains one `--plain` step of tango.py's generator and prints, as JSON, what of ours it calls.
test_plain.py starts it in a process of its own, in which no test has replaced anything.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import ROOT  # isort: skip  it finds the project

import tango
from common.core.cotrainer import CoTrainer

# Not all that lies in the project's folder is ours: an environment may lie there, too.
OURS = (*map(str, ROOT.glob("*.py")), f"{ROOT}/common/")
called = set()  # (file, function)
step = CoTrainer.training_step


def look(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(OURS):
        called.add((code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname))


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
    print(json.dumps(sorted(called)))
