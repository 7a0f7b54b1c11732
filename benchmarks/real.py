"""RL on a real pretrained model: python benchmarks/real.py --model warm --dataset mawps.jsonl

warm is what `python -m common.warm_up tango.py` has left. Three variants of tango.py, all on the
same questions: the answer alone (plain GRPO), with a verifier that is never trained, and
co-trained. One run at a time on one thread; a run that was interrupted resumes, and a finished one
is kept in docs/evidence/real.json and not repeated: its evaluations on held-out questions, the
figures of every step, and twenty of its last rollouts to read. docs/real-model.md has the table.

Questions that differ in their punctuation or capitals only are one question here: of the 2,876 in
mawps.jsonl 392 are such copies, and copies would stand on both sides of the split.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from evidence import FOLDER, ROOT, machine

VARIANTS = {
    "answer only": "--verifier none --steps 16",
    "co-trained": "--steps 22 --ver-warmup 2 --gen-steps 4 --ver-steps 1",
    "frozen": "--verifier frozen --steps 16",
}
SHARED = (
    "--questions 4 --group-size 8 --micro-batch 8 --lr 2e-4 --kl 0.001 --solution-tokens 64"
    " --judgement-tokens 96 --eval-questions 32 --eval-samples 2 --eval-every 0 --save-every 2"
    " --show-every 0"
)
KEPT = re.compile(
    r"step|co/sampled_tokens|(generator|verifier)/(accuracy|balanced_accuracy|tpr|tnr|parsed|"
    r"says_correct|entropy|frac_reward_zero_std|grad_norm)"
)
ROLLOUTS = 20


def without_copies(dataset: Path, folder: Path) -> Path:
    """The data set with every question once."""
    found = {}
    for line in dataset.read_text(encoding="utf-8").splitlines():
        words = re.findall(r"\w+", json.loads(line)["question"].lower())
        found.setdefault(" ".join(words), line)
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{line}\n" for line in found.values()), encoding="utf-8")
    return path


def run(variant: str, seed: int, model: str, dataset: Path, folder: Path) -> dict:
    out = folder / f"{variant.replace(' ', '-')}-{seed}"
    words = ["tango.py", "--model", model, "--dataset", dataset, "--seed", seed, "--out", out]
    words += [*SHARED.split(), *VARIANTS[variant].split()]
    one = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=one, check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    short = lambda value: round(value, 4) if isinstance(value, float) else value  # noqa: E731
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    steps = [row for row in rows if "step_time" in row]
    return {
        "variant": variant,
        "seed": seed,
        "arguments": f"{SHARED} {VARIANTS[variant]}",
        "seconds": round(rows[-1]["seconds"]),
        "evaluations": [{key: short(x) for key, x in row.items()} for row in evaluations],
        "steps": [{k: short(x) for k, x in row.items() if KEPT.fullmatch(k)} for row in steps],
        "rollouts": [
            {key: row[key] for key in ("step", "player", "prompt", "rewards")}
            | {"text": "".join(row["tokens"]), "judgement": row.get("judgement")}
            for row in rollouts[-ROLLOUTS:]
        ],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the folder of a warm-up")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real")
    parser.add_argument("--out", type=Path, default=FOLDER / "real.json")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    dataset = without_copies(args.dataset, args.runs)
    notes = json.loads((Path(args.model) / "warm_up.json").read_text())
    kept = {"machine": machine("1 thread a run"), "warm_up": notes, "runs": []}
    kept = json.loads(args.out.read_text()) if args.out.exists() else kept
    args.out.write_text(json.dumps(kept, indent=1) + "\n")
    done = {(found["variant"], found["seed"]) for found in kept["runs"]}
    for seed in args.seeds:
        for variant in args.variants:
            if (variant, seed) not in done:
                kept["runs"].append(run(variant, seed, args.model, dataset, args.runs))
                args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
