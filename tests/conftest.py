"""What several tests share: where the project lies, the optional real data, a script run as a user runs it."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # two threads on a busy machine wait for each other

# GSM8K, MBPP and the Qwen2.5 tokenizer, as published; tests that want them are skipped where they are not at hand
DATA = Path(os.environ.get("DUET_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture
def real_data() -> Path:
    if not (DATA / "gsm8k_test.jsonl").exists():
        pytest.skip("set DUET_DATA to a folder with gsm8k_test.jsonl and qwen2.5-tokenizer/")
    return DATA


def run_script(*arguments, cwd=ROOT, **options) -> subprocess.CompletedProcess:
    """`python <arguments>`, with its output as text; one thread, no network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": options.pop("threads", "1"), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options
    )


def refused(script: str, *arguments) -> str:
    """What `python script arguments` says when it ends with one sentence and exit code 2. In this process, which has imported
    everything already; that the real command does the same is tested once, in test_script.py."""
    module, said = importlib.import_module(Path(script).stem), io.StringIO()
    interrupted = signal.getsignal(signal.SIGINT)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        with pytest.raises(SystemExit) as ended, module.plain_errors():
            module.main(tyro.cli(module.Args, args=[*map(str, arguments)]))
    signal.signal(signal.SIGINT, interrupted)
    assert ended.value.code == 2 and said.getvalue().count("error: ") == 1, said.getvalue()
    return said.getvalue()


def run_two_processes(script: str, *arguments) -> subprocess.CompletedProcess:
    """Two real processes on the CPU (gloo). `accelerate launch --cpu --num_processes 2` starts them through MPI only; without
    an MPI hostfile it runs one process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        return run_script(*launcher, script, *arguments, threads="1")
    finally:
        del os.environ["ACCELERATE_USE_CPU"]


def make_trainer(folder, micro_batch=8, kl=0.0, **change):
    """A Tango trainer on the embedded model, 2 questions with groups of 4."""
    from common.data import load_questions
    from common.model import load_model
    from tango import Args, Tango, solve_prompt

    from datasets import Dataset
    from trl import GRPOConfig

    change = {"group_size": 4, "rows_at_once": 256, **change}
    script = Args(questions=2, lr=1e-3, solution_tokens=64, judgement_tokens=96, ver_warmup=1, kl=kl, **change)
    model, tokenizer = load_model("tiny", ["generator", "verifier"], 4, False, seed=0)
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=script.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=8 // micro_batch,
        steps_per_generation=8 // micro_batch,
        num_generations=4,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
    train, _ = load_questions("tiny", 64, 8, seed=0)
    rows = Dataset.from_list([{"prompt": solve_prompt(row["question"]), **row} for row in train])
    return Tango(model, script, args=config, train_dataset=rows, processing_class=tokenizer)


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path)
