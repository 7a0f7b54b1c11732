"""What the laboratory's tests share."""

import json
import os
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is measured on a GPU is tried on a CPU
torch.set_num_threads(1)  # two threads on a busy machine wait for each other


def write_rows(path: Path, rows: list[dict]):
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
