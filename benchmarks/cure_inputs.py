"""What cure.py's testers have learnt, by kind of task: python benchmarks/cure_inputs.py

Reads the run folders of `python benchmarks/evidence.py cure`. Every tester writes 16 tests for each held-out task, and 16
programs of the base per task, the same for all, are run on them. On products the inputs 0 and 5 tell little: does the tester
learn to leave them alone? Writes docs/evidence/cure_inputs.json and .md, and the block of docs/cure.md.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import cure  # noqa: E402
from common.model import load_model  # noqa: E402
from common.programming import load_tasks  # noqa: E402
from common.sampling import sample  # noqa: E402
from common.sandbox import Sandbox  # noqa: E402

import torch  # noqa: E402
from evidence import EXPERIMENTS, FOLDER, fill, markdown, spread  # noqa: E402
from peft import set_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

PER_TASK = 16
NOTE = """By kind of task, for wrong programs of the base, the same for all testers. Products: on the inputs 0 and 5 a wrong
factor seldom shows. Sums: one number is negative, and the base drops the sign in most tests and half of its programs.
Mean ± 95 % interval [range] over the seeds of `python benchmarks/evidence.py cure`.
"""


def write(model, tokenizer, prompts: list, parse, seed: int) -> list[list]:
    """PER_TASK parsed texts for every prompt, None where one cannot be read."""
    torch.manual_seed(seed)
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    ids = [row for row in ids for _ in range(PER_TASK)]
    texts = []
    for i in range(0, len(ids), 512):
        tokens, _ = sample(model, ids[i : i + 512], 96, 1.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return cure.grouped([parse(text) for text in texts], PER_TASK)


def measure(tables, rows: list[dict], programs: list[list], tests: list[list]) -> list[dict]:
    """Per kind of task: share of right tests, of inputs 0 and 5, and p01 and p00 of the programs."""
    own = [list(zip(row["test_input"], row["test_output"])) for row in rows]
    right = [table.all(1) for table in cure.Cure.run_tables(tables, programs, own)]  # (N,) per task
    passes = cure.Cure.run_tables(tables, programs, tests)
    good = [table[0] for table in cure.Cure.run_tables(tables, [[row["reference"]] for row in rows], tests)]  # (M,)
    found = []
    for kind in ("products", "sums"):
        of_kind = [i for i, row in enumerate(rows) if ("times" in row["question"]) == (kind == "products")]
        pairs = [cure.reward_precision(passes[i], right[i], good[i], programs[i], tests[i]) for i in of_kind]
        readable = [test for i in of_kind for test in tests[i] if test is not None]
        means = {key: statistics.mean(value for of_task in pairs for value in of_task[key]) for key in ("p01", "p00")}
        means["right"] = statistics.mean(value for i in of_kind for value in good[i].tolist())
        means["zero_or_five"] = statistics.mean(test[0].strip() in ("0", "5") for test in readable)
        found.append({"kind": kind, **means})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "evidence" / "cure")
    args = parser.parse_args()
    names = {re.sub(r"\W+", "_", variant): variant for variant in EXPERIMENTS["cure"].variants}
    folders = [folder for name in names for folder in sorted(args.runs.glob(f"{name}/*/policy"))]
    if not folders:
        sys.exit(f"--runs {args.runs}: no runs there. First: python benchmarks/evidence.py cure")
    model, tokenizer = load_model("tiny", ["policy"], 16, False, 0)  # an adapter that has not been trained changes nothing
    model.eval()
    rows = load_tasks("tiny", 1, 128, 0)[1]
    test_prompts = [cure.test_prompt(row["question"]) for row in rows]
    programs = write(model, tokenizer, [cure.code_prompt(row["question"]) for row in rows], cure.parse_program, 0)
    results = []
    with Sandbox(2) as sandbox:
        tables = SimpleNamespace(script=SimpleNamespace(time_limit=1.0, tolerance=None), sandbox=sandbox, runs={})
        todo = [("at the start", int(seed), None) for seed in sorted({folder.parent.name for folder in folders})]
        todo += [(names[folder.parent.parent.name], int(folder.parent.name), folder) for folder in folders]
        for variant, seed, folder in todo:
            if folder is not None:
                set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"), adapter_name="policy")
            tests = write(model, tokenizer, test_prompts, cure.parse_test, seed)
            results += [{"variant": variant, "seed": seed, **found} for found in measure(tables, rows, programs, tests)]
            print(*results[-2:], sep="\n", flush=True)
    (FOLDER / "cure_inputs.json").write_text(json.dumps(results) + "\n")
    cells = []
    for kind in ("products", "sums"):
        for variant in dict.fromkeys(r["variant"] for r in results):
            of = [r for r in results if (r["variant"], r["kind"]) == (variant, kind)]
            cells.append([kind, variant, *[spread([r[key] for r in of]) for key in ("right", "zero_or_five", "p01", "p00")]])
    table = markdown(["tasks", "tester", "right tests", "inputs 0 and 5", "p01", "p00"], cells)
    (FOLDER / "cure_inputs.md").write_text(f"# cure, by kind of task\n\n{NOTE}\n{table}")
    fill(ROOT / "docs" / "cure.md", "inputs", f"{NOTE}\n{table}")
    print(table)


if __name__ == "__main__":
    main()
