"""The papers' claims in miniature, measured: python benchmarks/evidence.py tango gamed

First every variant's learning rate is swept on seeds 11 to 13, in runs that are kept apart in
docs/evidence/NAME_rates.json; then every variant runs at its own best rate on seeds 0, 1, ..., the
ones that are reported, in docs/evidence/NAME.json. A run is one process with one thread. What is
kept of it: its held-out evaluations, and of every step the metrics that the experiment compares.
Runs that are kept are not repeated, and one that was interrupted goes on where it stopped. Tables,
figures and docs/evidence/summary.json are made from these files alone, by evidence_pages.py;
`--tables-only` does just that.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"
SWEEP_SEEDS = (11, 12, 13)


@dataclass
class Variant:
    arguments: str = ""
    rates: tuple[float, ...] = ()
    """learning rates to choose from; none: the script's default"""
    patch: str = ""
    """a line of Python that changes the imported script, where it has no argument for it"""
    seeds: int = 5


@dataclass
class Experiment:
    script: str
    arguments: str
    """of all variants"""
    yardstick: str
    """the metric whose mean over a run chooses the learning rate; eval/...: its last value"""
    variants: dict[str, Variant]
    kept: tuple[str, ...]
    """metrics kept of every step"""
    prepare: tuple[str, ...] = ()
    """a script and its arguments, run first; what it makes is made once"""
    rate: str = "--lr"
    """the argument by which the learning rates of the variants are given"""


# A = (A_out + A_step) / 2 all along: at the paper's .1, falling, hardly anything is left to compare
HALF = "tango.alpha_at = lambda n, total, alpha: 0.5"
# A = A_step: the gold answer is no longer in the generator's reward
ONLY_STEPS = "tango.alpha_at = lambda n, total, alpha: 1.0"
# every row counts once
NO_CLASS_WEIGHTS = (
    f"tango.class_weights = lambda labels, counts: (labels == labels).float(); {HALF}"
)
# benchmarks/controls.py: verdicts from elsewhere
GOLD = f"import controls; controls.judged_by(controls.gold, tango.Tango); {HALF}"
COIN_ALONE = "import controls; controls.judged_by(controls.coin, tango.Tango)"
COIN = f"{COIN_ALONE}; {HALF}"
# benchmarks/controls.py: answers count that are right by luck
LUCK = "import controls; controls.paid_for_luck(tango)"
# of the two batches of a step, only one is trained on
ONE_ROLE = "step = cure.Cure.step; cure.Cure.step = lambda self, rows: step(self, rows)[{}]"
ONLY_CODER, ONLY_TESTER = ONE_ROLE.format(":1"), ONE_ROLE.format("1:")
# benchmarks/controls.py: scores from elsewhere
SCORES = "import controls; controls.scored_by({!r}, mae.Mae)"
# what chooses the pairs; in evaluations the judge reads as ever
SCORED_BY = "import controls; controls.read_by({!r}, self_rewarding.SelfRewarding)"
TRUE_SCORES, RANDOM_SCORES = SCORED_BY.format("truth"), SCORED_BY.format("chance")

TANGO = (
    "generator/accuracy",
    "generator/step_accuracy",
    "verifier/balanced_accuracy",
    "verifier/says_correct",
    "co/wrong_steps_accepted",
    "co/alpha",
)
RATES = (1e-3, 2e-3)  # half and twice as much were worse in single runs
VERIFIERS, VERIFIER_RATES = ("dpo", "orm", "prm", "genrm", "genrm-cot"), (3e-4, 1e-3)
SPIN_BASE = "runs/evidence/spin_base"

EXPERIMENTS = {
    # credit for steps, where answers are seldom right: 60 generator steps each
    "tango": Experiment(
        "tango.py",
        "--dataset tiny-hard --eval-every 0 --show-every 0 --save-every 1000",
        "generator/accuracy",
        {
            "answer only": Variant("--steps 60 --verifier none", RATES, seeds=8),
            "co-trained": Variant("--steps 84", RATES, HALF, seeds=8),
            "gold step verdicts": Variant("--steps 60 --verifier frozen", RATES, GOLD),
            "frozen verifier": Variant("--steps 60 --verifier frozen", RATES, HALF),
            "random step verdicts": Variant("--steps 60 --verifier frozen", RATES, COIN),
            "co-trained, no class weights": Variant("--steps 84", (1e-3,), NO_CLASS_WEIGHTS),
            "co-trained, the paper's alpha": Variant("--steps 84", (1e-3,), seeds=8),
            # the rate of the two before
            "answer only, at 1e-3": Variant("--steps 60 --verifier none", (1e-3,), seeds=8),
            # is it training along that helps there, or the verdicts, or any noise?
            "frozen verifier, the paper's alpha": Variant(
                "--steps 60 --verifier frozen", (1e-3,), seeds=8
            ),
            "random step verdicts, the paper's alpha": Variant(
                "--steps 60 --verifier frozen", (1e-3,), COIN_ALONE, seeds=8
            ),
        },
        TANGO,
    ),
    # nothing but the verifier's verdicts on steps: 60 generator steps each. In 30 steps, on seeds
    # 11 to 13, 2e-3 was worse than 1e-3 for both, and they did not part.
    "gamed": Experiment(
        "tango.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "generator/accuracy",
        {
            "frozen": Variant("--steps 60 --verifier frozen", (1e-3,), ONLY_STEPS, seeds=8),
            "co-trained": Variant("--steps 84", (1e-3,), ONLY_STEPS, seeds=8),
        },
        TANGO,
    ),
    # a reward that luck earns: of the wrong answers, every second one; 40 generator steps
    "lucky": Experiment(
        "tango.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "eval/generator/step_accuracy",
        {
            "the number counts": Variant("--steps 40 --verifier none", RATES),
            "odd or even counts": Variant("--steps 40 --verifier none", RATES, LUCK),
            "odd or even, co-trained": Variant("--steps 57", RATES, f"{LUCK}; {HALF}"),
            "odd or even, frozen verifier": Variant(
                "--steps 40 --verifier frozen", RATES, f"{LUCK}; {HALF}"
            ),
            "odd or even, true verdicts": Variant(
                "--steps 40 --verifier frozen", RATES, f"{LUCK}; {GOLD}"
            ),
        },
        TANGO,
    ),
    # samples, filtered ones included, and how many of them it takes
    "prime": Experiment(
        "prime.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "policy/accuracy",
        {
            "outcome only": Variant("--steps 40 --no-process-reward", RATES),
            "PRIME": Variant("--steps 40", RATES),
            "offline PRM": Variant("--steps 55 --prm-update none --prm-warmup 15", RATES),
        },
        ("policy/accuracy", "co/samples", "prm/accuracy", "prm/loss"),
    ),
    "gar": Experiment(
        "gar.py",
        "--steps 24 --eval-every 0 --show-every 0 --save-every 1000",
        "reasoner/accuracy",
        {
            "2 GRPO, exact match only": Variant("--discriminator none", RATES),
            "4 fixed discriminator": Variant("--discriminator frozen", RATES),
            "5 trained, R_a only": Variant("--reward alignment", RATES),
            "6 trained, R_d only": Variant("--reward adversarial", RATES),
            "7 trained, both": Variant("", RATES),
        },
        (
            "reasoner/accuracy",
            "discriminator/yes_reference",
            "discriminator/yes_generated_right",
            "discriminator/yes_generated_wrong",
            "discriminator/spread_in_groups",
        ),
    ),
    "cure": Experiment(
        "cure.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "coder/accuracy",
        {
            "both": Variant(),
            "both, simple reward": Variant("--tester-reward simple"),
            "only the coder": Variant(patch=ONLY_CODER),
            "only the tester": Variant(patch=ONLY_TESTER),
            "only the tester, simple reward": Variant("--tester-reward simple", patch=ONLY_TESTER),
        },
        (
            "coder/accuracy",
            "tester/accuracy",
            "tester/p01",
            "tester/p00",
            "co/tasks_with_a_right_program",
        ),
    ),
    # from a model that continued SFT on the same answers makes no better: benchmarks/spin_base.py
    "spin": Experiment(
        "spin.py",
        f"--model {SPIN_BASE}/model --dataset {SPIN_BASE}/questions.jsonl --steps 64 "
        "--eval-every 16 --show-every 0 --save-every 1000 --eval-questions 256 --micro-batch 16 "
        "--solution-tokens 80",
        "eval/player/accuracy",
        {
            "SPIN": Variant("", (1e-4, 3e-4, 1e-3)),
            "continued SFT": Variant("--opponent none", (1e-4, 3e-4, 1e-3)),
            "opponent fixed at the first": Variant("--opponent sft", (1e-4, 3e-4, 1e-3)),
        },
        (
            "player/spin_loss",
            "player/pair_accuracy",
            "player/logp_human",
            "opponent/equal_to_human",
        ),
        ("benchmarks/spin_base.py", SPIN_BASE),
    ),
    "mae": Experiment(
        "mae.py",
        "--steps 48 --eval-every 0 --show-every 0 --save-every 1000",
        "eval/solver/accuracy",
        {
            "all parts trained": Variant(),
            "no proposer training": Variant("--no-train-proposer"),
            "no solver training": Variant("--no-train-solver"),
            "no judge training": Variant("--no-train-judge"),
            "no quality gate": Variant("--no-quality-gate"),
            "judge paid for agreement with gold": Variant("--judge-reward agreement"),
            "shuffled scores": Variant(patch=SCORES.format("shuffled")),
            "format only": Variant(patch=SCORES.format("constant")),
            "gold scores": Variant(patch=SCORES.format("gold")),
        },
        ("solver/judged", "proposer/difficulty", "proposer/accepted", "judge/unparsable"),
    ),
    # who checks a task before it is learnt from, and who knows its answer
    "azr": Experiment(
        "azr.py",
        "--steps 32 --eval-every 8 --show-every 0 --save-every 1000",
        "eval/solver/accuracy",
        {
            "execution": Variant(),
            "leak of .2": Variant("--gate leak --leak 0.2"),
            "no gate": Variant("--gate off"),
            "voting solver": Variant("--solver-pay vote"),
            "voting solver and proposer": Variant("--solver-pay vote --proposer-pay vote"),
            "no gate, voting solver": Variant("--gate off --solver-pay vote"),
            "no gate, all voting": Variant("--gate off --solver-pay vote --proposer-pay vote"),
        },
        (
            "solver/accuracy",
            "solver/total_reward",
            "proposer/valid",
            "proposer/rate",
            "proposer/too_easy",
            "co/tasks_that_run",
            "co/paid_minus_true",
        ),
    ),
    # who checks the verifier's claims, and whether the generator is paid for honesty
    "deepseekmath": Experiment(
        "deepseekmath.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "eval/generator/accuracy",
        {
            "all": Variant(),
            "no meta-reward": Variant("--no-meta-reward"),
            "no self-reward": Variant("--no-self-reward"),
            "labels by the truth": Variant("--labels truth"),
        },
        (
            "generator/accuracy",
            "generator/well_formed",
            "verifier/balanced_accuracy",
            "verifier/claims_real",
            "verifier/defects_found",
            "meta/accuracy",
            "labels/agreement",
            "labels/single",
            "labels/kept",
            "co/over_claim",
            "co/verdict_minus_gold",
        ),
    ),
    # who ranks the same solutions best, and what the loop does to the generator
    "vstar": Experiment(
        "vstar.py",
        "--eval-questions 128 --show-every 0 --save-every 1000",
        "eval/co/best_of_16",
        {
            **{kind: Variant(f"--verifier {kind}", VERIFIER_RATES) for kind in VERIFIERS},
            # the same solutions, ranked by a verifier that has learnt nothing of them
            **{
                f"{kind}, not trained": Variant(f"--verifier {kind} --steps 48 --ver-steps 0")
                for kind in VERIFIERS
            },
            "dpo, at 1e-3": Variant("--ver-lr 1e-3"),  # too high a rate, and what that does
            "dpo, generator goes on": Variant("--no-restart"),
            "dpo, in the loop": Variant("--verifier-in-loop"),
        },
        ("generator/accuracy", "co/right_solutions", "verifier/pair_accuracy"),
        rate="--ver-lr",
    ),
    # what comes of a model's own scores; 24 steps on pairs in each of three rounds. On seed 11 half
    # of 3e-4 was slower, 5e-4 lost what it had gained, 1e-3 ruined the model
    "self_rewarding": Experiment(
        "self_rewarding.py",
        "--eval-every 0 --show-every 0 --save-every 1000",
        "eval/solver/accuracy",
        {
            "own scores": Variant("--steps 72"),
            "own scores, self-taught judge": Variant("--steps 96 --train-judge self-taught"),
            "scores by the truth": Variant("--steps 72", patch=TRUE_SCORES),
            "scores at random": Variant("--steps 72", patch=RANDOM_SCORES),
        },
        (
            "solver/accuracy",
            "solver/length",
            "judge/unreadable",
            "co/pairs",
            "co/pairs_right_way",
            "co/pairs_one_right",
            "co/length_gap",
        ),
    ),
}


def rate_of(name: str, variant: str) -> float | None:
    """The learning rate at which a variant did best in the sweep."""
    rates, experiment = EXPERIMENTS[name].variants[variant].rates, EXPERIMENTS[name]
    if len(rates) < 2:
        return rates[0] if rates else None
    scores = {rate: [] for rate in rates}
    for r in read(f"{name}_rates")["runs"]:
        if r["variant"] == variant and r["rate"] in scores:
            scores[r["rate"]].append(score(experiment, r))
    if any(len(found) < len(SWEEP_SEEDS) for found in scores.values()):
        raise RuntimeError(f"{name}, {variant}: its rates are not swept yet")
    return max(rates, key=lambda rate: statistics.mean(scores[rate]))


def score(experiment: Experiment, run: dict) -> float:
    """What a sweep compares: the yardstick's mean over all steps, or its last held-out value."""
    key = experiment.yardstick
    if key.startswith("eval/"):
        return run["evaluations"][-1][key]
    return statistics.mean(step[key] for step in having(run, key))


def having(run: dict, key: str) -> list[dict]:
    """A run's steps that have a metric. In tango.py a verifier's step, too, says how many of the
    few solutions are right that it judges; the generator's own steps have an alpha, and count.
    """
    steps = run["steps"]
    if key.startswith("generator/") and any("co/alpha" in step for step in steps):
        steps = [step for step in steps if "co/alpha" in step]
    return [step for step in steps if key in step]


def folder_name(variant: str) -> str:
    return re.sub(r"\W+", "_", variant)


def run(name: str, variant: str, seed: int, rate: float | None) -> dict:
    """One run of a variant, in a process of its own -> what is kept of it."""
    experiment, chosen = EXPERIMENTS[name], EXPERIMENTS[name].variants[variant]
    place = f"{folder_name(variant)}-{rate}" if rate else folder_name(variant)
    folder = ROOT / "runs" / "evidence" / name / place / str(seed)
    options = f"{experiment.arguments} {chosen.arguments} --seed {seed}".split()
    options += [experiment.rate, str(rate)] if rate else []
    module = experiment.script.removesuffix(".py")
    start = f"import sys, tyro, {module}; sys.path.append('benchmarks'); {chosen.patch or 'pass'}"
    start += f"; {module}.main(tyro.cli({module}.Args))"
    done = subprocess.run(
        [sys.executable, "-c", start, *options, "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    hopeless = "steps in a row. The run ends" in done.stderr  # mae.py stops itself: a result, too
    if done.returncode and not hopeless:
        output = f"{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{name}, {variant}, seed {seed}:\n{output}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    steps = [row for row in rows if row not in evaluations]
    kept = ("step", "co/sampled_tokens", *experiment.kept)
    short = lambda value: round(value, 5) if isinstance(value, float) else value  # noqa: E731
    return {
        "variant": variant,
        "seed": seed,
        "rate": rate,
        "seconds": rows[-1]["seconds"],
        "versions": json.loads((folder / "versions.json").read_text()),
        "evaluations": [{key: short(value) for key, value in row.items()} for row in evaluations],
        "steps": [{key: short(row[key]) for key in kept if key in row} for row in steps],
    }


def read(name: str) -> dict:
    """What docs/evidence/NAME.json holds: the machine, and the finished runs."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"machine": f"{platform.machine()} CPU, 1 thread a run", "runs": []}


def with_runs(name: str) -> list[str]:
    """The variants of the experiment that have a run, in its order."""
    ran = {r["variant"] for r in read(name)["runs"]}
    return [variant for variant in EXPERIMENTS[name].variants if variant in ran]


def run_missing(file: str, name: str, jobs: list[tuple], at_once: int):
    """The jobs (variant, seed, rate) that docs/evidence/FILE.json does not hold yet; each run is
    kept as soon as it ends.
    """
    path, kept = FOLDER / f"{file}.json", read(file)
    done = {(r["variant"], r["seed"], r["rate"]) for r in kept["runs"]}
    with ThreadPoolExecutor(at_once) as pool:
        for result in pool.map(lambda job: run(name, *job), [j for j in jobs if j not in done]):
            kept["runs"].append(result)
            path.write_text(json.dumps(kept) + "\n")
            score_now = score(EXPERIMENTS[name], result)
            took = f"seed {result['seed']}, {result['seconds']:.0f} s, {score_now:.3f}"
            print(f"{file}: {result['variant']}, rate {result['rate']}, {took}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--seeds", type=int, help="only the first so many")
    parser.add_argument("--variants", nargs="+", help="only these")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--sweep-only", action="store_true", help="choose learning rates, no more")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    from evidence_pages import fill_all, write_up  # they import what stands above

    for name in EXPERIMENTS if "all" in args.names else args.names:
        variants, prepare = EXPERIMENTS[name].variants, EXPERIMENTS[name].prepare
        if prepare and not args.tables_only:
            subprocess.run([sys.executable, *prepare], cwd=ROOT, check=True)
        some = {v: variants[v] for v in args.variants or variants}
        if not args.tables_only:
            sweep = [(v, s, r) for s in SWEEP_SEEDS for v in some for r in some[v].rates]
            sweep = [job for job in sweep if len(some[job[0]].rates) > 1]
            run_missing(f"{name}_rates", name, sweep, args.at_once)
        if not args.tables_only and not args.sweep_only:
            count = args.seeds or max(variant.seeds for variant in some.values())
            jobs = [(v, s, rate_of(name, v)) for s in range(count) for v in some]
            jobs = [job for job in jobs if job[1] < some[job[0]].seeds]
            run_missing(name, name, jobs, args.at_once)
        if with_runs(name):
            write_up(name)
    fill_all()


if __name__ == "__main__":
    main()
