"""Runs small runs of several scripts one after the other, under torchrun; test_every_script.py
starts it.

    torchrun --nproc_per_node 2 in_two_processes.py FOLDER SCRIPT ...

One start for all of them: imports cost more than the runs.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import small  # isort: skip  it finds the project

from common.run import plain_errors, this_process

import tyro

MORE = {"spin.py": "--steps 4 --iterations 2"}
"""Arguments of the runs here. All other scripts train every player within two steps."""


def main(folder: Path, scripts: list[str]):
    for script in scripts:
        if this_process().is_main_process:
            print(f"=== {script}", flush=True)
        module = importlib.import_module(Path(script).stem)
        more = MORE.get(script, "--steps 2") + " --save-every 100 --eval-every 0"
        arguments = small(script, folder / Path(script).stem, *more.split())
        module.main(tyro.cli(module.Args, args=arguments))
    if this_process().is_main_process:
        print("=== the end", flush=True)


if __name__ == "__main__":
    with plain_errors():  # parts the processes in order, as every script does
        main(Path(sys.argv[1]), sys.argv[2:])
