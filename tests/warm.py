"""Runs of a script in processes of their own that need not import everything first: a server that
has done so is forked for each of them.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tango", "common.sandbox", "common.run.report"])


def start(
    script: str, arguments: list, out: Path, err: Path, **environment: str
) -> multiprocessing.Process:
    """`python script arguments`, begun; what it prints goes to the end of these files."""
    arguments = [str(script), *map(str, arguments)]
    given = (arguments, os.fspath(out), os.fspath(err), environment)
    process = SERVER.Process(target=play, args=given)
    process.start()
    return process


def start_two(script: str, arguments: list, out: Path, err: Path) -> int:
    """What `torchrun --nproc_per_node 2 script arguments` does, to its end; the exit code. A
    process that fails takes the other one with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    two = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    two |= {"ACCELERATE_USE_CPU": "true"}
    running = [
        start(script, arguments, out, err, RANK=rank, LOCAL_RANK=rank, **two) for rank in "01"
    ]
    while any(process.is_alive() for process in running):
        for process in running:
            process.join(timeout=0.05)
        if any(process.exitcode for process in running):
            for process in running:
                process.terminate()
    return next((process.exitcode for process in running if process.exitcode), 0)


def play(arguments: list[str], out: str, err: str, environment: dict[str, str]):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(ROOT)
    os.environ |= {"COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment}
    torch.set_num_threads(1)
    gc.freeze()  # see conftest.py
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
