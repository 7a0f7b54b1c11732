"""Runs of a script in processes of their own that need not import everything first: a server that
has done so is forked for each of them.
"""

import gc
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tango", "common.sandbox", "common.report"])


def start(script: str, arguments: list, out: Path, err: Path) -> multiprocessing.Process:
    """`python script arguments`, begun; what it prints goes to the end of these files."""
    arguments = [script, *map(str, arguments)]
    process = SERVER.Process(target=play, args=(arguments, os.fspath(out), os.fspath(err)))
    process.start()
    return process


def play(arguments: list[str], out: str, err: str):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(ROOT)
    os.environ |= {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    gc.freeze()  # see conftest.py
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
