"""What cure.py's testers have learnt, by kind of task: python benchmarks/cure_inputs.py

Reads the run folders of `python benchmarks/evidence.py cure`. Every tester writes 16 tests for each
held-out task, and 16 programs of the base per task, the same for all, are run on them. On products
the inputs 0 and 50 tell little: does the tester learn to leave them alone? Writes
docs/evidence/cure_inputs.json and .md, and the block of docs/cure.md; --tables-only makes the
latter two from what is in the JSON file.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import cure  # noqa: E402
from common.model import load_model  # noqa: E402
from common.sampling import sample  # noqa: E402
from common.sandbox import Sandbox  # noqa: E402
from common.tasks.code import load_tasks  # noqa: E402

import torch  # noqa: E402
from evidence import EXPERIMENTS, FOLDER, folder_name  # noqa: E402
from evidence_pages import cell, fill, markdown  # noqa: E402
from peft import set_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

PER_TASK = 16
RESULT = FOLDER / "cure_inputs.json"
NOTE = """By kind of task, for wrong programs of the base, the same for all testers. Products: on
the inputs 0 and 50 a wrong factor seldom shows. Sums: one number is negative, and the base drops
the sign in most tests and half of its programs.
Mean ± half of the 95 % interval over the seeds of `python benchmarks/evidence.py cure`.
"""


def write(model, tokenizer, prompts: list, parse, seed: int) -> list[list]:
    """PER_TASK parsed texts for every prompt, None where one cannot be read."""
    torch.manual_seed(seed)
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    ids = [row for row in ids for _ in range(PER_TASK)]
    end, pad, texts = [tokenizer.eos_token_id], tokenizer.pad_token_id, []
    for i in range(0, len(ids), 512):
        tokens, _ = sample(model, ids[i : i + 512], 96, 1.0, end, pad)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return cure.grouped([parse(text) for text in texts], PER_TASK)


class Tables:
    """As much of a trainer as `Cure.run_tables` needs: who passes what."""

    run = cure.Cure.run_tables

    def __init__(self, sandbox: Sandbox):
        self.cfg = SimpleNamespace(time_limit=1.0, tolerance=None)
        self.sandbox, self.runs = sandbox, {}


def measure(tables: Tables, rows: list[dict], programs: list[list], tests: list[list]) -> list:
    """Per kind of task: share of right tests, of inputs 0 and 50, and the programs' p01 and p00."""
    own = [list(zip(row["test_input"], row["test_output"])) for row in rows]
    correct = [table.all(1) for table in tables.run(programs, own)]  # (N,) for each task
    passes = tables.run(programs, tests)  # (N, M)
    references = [[row["reference"]] for row in rows]
    good = [table[0] for table in tables.run(references, tests)]  # (M,)
    found = []
    for kind in ("products", "sums"):
        tasks = [
            i for i, r in enumerate(rows) if ("times" in r["question"]) == (kind == "products")
        ]
        pairs = [
            cure.reward_precision(passes[i], correct[i], good[i], programs[i], tests[i])
            for i in tasks
        ]
        inputs = [test[0].strip() for i in tasks for test in tests[i] if test is not None]
        p01, p00 = ([hit for task in pairs for hit in task[key]] for key in ("p01", "p00"))
        found.append(
            {
                "kind": kind,
                "p01": statistics.mean(p01),
                "p00": statistics.mean(p00),
                "right": statistics.mean(value for i in tasks for value in good[i].tolist()),
                "zero_or_fifty": statistics.mean(given in ("0", "50") for given in inputs),
            }
        )
    return found


def measure_all(folders: list[Path]) -> list[dict]:
    """The base first, then every tester's adapter."""
    # an adapter that has not been trained changes nothing
    model, tokenizer = load_model("tiny-programs", ["policy"], 16, False, 0)
    model.eval()
    rows = load_tasks("tiny", 1, 128, 0)[1]
    code_prompts = [cure.code_prompt(row["question"]) for row in rows]
    test_prompts = [cure.test_prompt(row["question"]) for row in rows]
    programs = write(model, tokenizer, code_prompts, cure.parse_program, 0)
    names = {folder_name(variant): variant for variant in EXPERIMENTS["cure"].variants}
    seeds = sorted({folder.parent.name for folder in folders})
    testers = [("at the start", seed, None) for seed in seeds]
    testers += [(names[f.parent.parent.name], f.parent.name, f) for f in folders]
    results = []
    with Sandbox(2) as sandbox:
        tables = Tables(sandbox)
        for variant, seed, folder in testers:
            if folder is not None:
                adapter = load_file(folder / "adapter_model.safetensors")
                set_peft_model_state_dict(model, adapter, adapter_name="policy")
            tests = write(model, tokenizer, test_prompts, cure.parse_test, int(seed))
            for found in measure(tables, rows, programs, tests):
                results.append({"variant": variant, "seed": int(seed), **found})
                print(results[-1], flush=True)
    return results


def page(results: list[dict]) -> str:
    rows = []
    for kind in ("products", "sums"):
        for variant in dict.fromkeys(r["variant"] for r in results):
            runs = [r for r in results if (r["variant"], r["kind"]) == (variant, kind)]
            cells = [[r[key] for r in runs] for key in ("right", "zero_or_fifty", "p01", "p00")]
            rows.append([kind, variant, *[cell(values, True) for values in cells]])
    header = ["tasks", "tester", "right tests", "inputs 0 and 50", "p01", "p00"]
    return f"{NOTE}\n{markdown(header, rows)}"


def block() -> str:
    """What docs/cure.md shows."""
    if RESULT.exists():
        return page(json.loads(RESULT.read_text()))
    return "Not measured yet on these embedded models: `python benchmarks/cure_inputs.py`.\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "evidence" / "cure")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.tables_only:
        names = map(folder_name, EXPERIMENTS["cure"].variants)
        folders = [folder for n in names for folder in sorted(args.runs.glob(f"{n}/*/policy"))]
        if not folders:
            found = f"--runs {args.runs}: no runs in it."
            sys.exit(f"{found} First: python benchmarks/evidence.py cure")
        RESULT.write_text(json.dumps(measure_all(folders)) + "\n")
    text = block()
    (FOLDER / "cure_inputs.md").write_text(f"# cure, by kind of task\n\n{text}")
    fill(ROOT / "docs" / "cure.md", "inputs", text)
    print(text)


if __name__ == "__main__":
    main()
