r"""CURE, co-evolving coder and unit tester (Wang et al. 2025, arXiv:2506.03136): one policy that writes programs and writes
tests for them, each part rewarded through the other, with GRPO.

The loop (paper, algorithm 1)
    repeat
      for each task sample N programs and M tests; run every program on the task's own tests and on the generated ones
      CODER step    R = number of the task's own tests passed
      TESTER step   for a test that ALL right programs pass    R = + share of wrong programs that fail it
                    for any other test                         R = - share of wrong programs that pass it            eq. 4
    A program is right when it passes all of the task's own tests. The tester's reward is, test by test, the estimate of
    mu = p_u (1 - p01) - (1 - p_u) p00: how much more the tests favour right programs than wrong ones (theorem 3.1).

Where we differ from the paper [P] or the released code [C], and why
     1. QLoRA: one adapter plays both parts. [P, C: all weights.] lr is LoRA's.
     2. Eq. 4 as printed takes its product over ALL programs, which is 0 as soon as one is wrong: no reward would ever be
        positive. Here, as the text and [C] have it, over the right programs only.
     3. No right program: no oracle, so that task's tests teach nothing, as in [C]; eq. 4's empty product would pay for tests
        that nobody passes. No wrong program: +1 or -1, as in [C]; in eq. 4 all zero.
     4. A test that cannot be read gets the worst reward, -1. In [C] it becomes an empty test, which no program passes: 0,
        more than a wrong test that some wrong program passes.
     5. KL (k3, 0.01) to a true reference, the base with the adapter off. In [C] the reference is the policy at the start of
        the update, so that the gradient of its KL term is exactly zero.
     6. One AdamW for the whole run. [C] starts a new one at every step and stores the weights in 16 bits in between.
     7. Token mean over the whole batch, as nearly in [C]; [P] per response. Groups without spread are no part of [C]'s batch;
        here they stay for the KL term.
     8. The tester does not see a public example test ([P]'s printed prompt). [C] shows one in training and none in evaluation.
     9. Chat template and a system prompt. [C]: hand-written markers, and stop strings that cut the text at "User:".
    10. Programs run in a sandbox (common/sandbox.py) and are limited in CPU time; [C] runs exec in forks, limited by the clock.
    11. Both parts' samples are from the policy at the step's start, so the tester's are one update old, as in [C]; its ratio
        is taken to the updated policy, and is 1.
    12. `--short-tests`, for long reasoning: [P] applies it to tests; [C] to programs, too, to the signs of the advantages, with
        the median clipped to [1000, 8000] tokens, and drops groups that this leaves flat. Where the transform of [P] is not
        defined (all good tests equally long) the advantages stay as they are.

Run
    python cure.py                                                                 # embedded default, CPU, five minutes
    python cure.py --tester-reward simple                                          # the paper's ablation
    python cure.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset mbpp.jsonl         # one GPU, in 4-bit

Shapes: P tasks, N programs and as many tests each, B = P * N rows, t tests of a task's own, T completion tokens.
"""

import math
import os
import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

from common.cotrainer import CoTrainer, Player
from common.data import UserError
from common.memory import check_memory, machine_options
from common.model import load_model
from common.programming import load_tasks
from common.run import check_batch, fill_in, mean, plain_errors, start_run
from common.sandbox import Sandbox, Status, same_output

import torch
import tyro
from datasets import Dataset
from trl import GRPOConfig


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded tasks, or a .jsonl file: MBPP's, or with question, test_input and test_output (lists of strings)"""
    out: str | None = None
    """run folder, runs/cure-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 32
    """optimiser steps, each of both parts (paper: 350)"""
    questions: int = 8
    """P, tasks per step and process (released code: 100)"""
    group_size: int = 16
    """N, programs of one task, and as many tests (paper: 16)"""
    micro_batch: int | None = None
    """rows per forward and backward pass (embedded 32, real 8); questions * group_size must be a multiple"""
    lr: float | None = None
    """learning rate of the adapter, constant (embedded 5e-4, real 2e-5; paper: 1e-6, all weights)"""
    kl: float = 0.01
    """weight of the k3 KL term to the base (paper: 0.01); 0 saves the reference pass and all rows without advantage"""
    lora_rank: int = 16
    """rank of the adapter"""
    four_bit: bool = torch.cuda.is_available()
    """base in 4-bit NF4; works on a CPU too, slowly"""
    rows_at_once: int | None = None
    """most rows sampled at a time, which bounds the KV cache (embedded 256, real 64)"""
    eight_bit_adam: bool = False
    """Adam's moments in 8 bits, paged to the CPU where the GPU is full"""
    vllm: bool = False
    """sample with vLLM, which needs a GPU and --no-four-bit"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: int = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: int = 128
    """held-out questions"""
    save_every: int = 20
    """steps between checkpoints"""
    show_every: int = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""
    # --- the paper
    tester_reward: Literal["precision", "simple"] = "precision"
    """ablation: 1 if all right programs pass the test, else 0"""
    short_tests: bool = False
    """the transform for long reasoning: among good tests, the shorter ones are better (sec. 3.4)"""
    own_tests: int = 8
    """t, at most this many of a task's own tests are run (released code: 8)"""
    program_tokens: int | None = None
    """length limit of a program (embedded 64, real 1024; released code: 8000)"""
    test_tokens: int | None = None
    """length limit of a test (embedded 96, real 1024; released code: 8000)"""
    time_limit: float = 1.0
    """CPU seconds of one run of a program (released code: 1, by the clock)"""
    tolerance: float | None = None
    """numbers this close are equal, relative to the larger one or to 1 (paper: words must be the same)"""
    unsafe_sandbox: bool = False
    """run model-written code even where a layer of the sandbox is missing on this machine"""


SMALL = {"lr": 5e-4, "program_tokens": 64, "test_tokens": 96}
REAL = {"lr": 2e-5, "program_tokens": 1024, "test_tokens": 1024}
OUTPUT_LIMIT = 1 << 16  # bytes; thousands of results are held at once
FEW, MANY = 4, 16  # programs and tests per task in evaluation: best of 4 by 4 tests, best of 16 by 16 (paper sec. 4.2)

# ------------------------------------------------------------------ prompts and parsing
CODE = r"""You are given a programming task. Think first, then write a Python program that reads its input with input() and
prints its output with print(). Put the whole program into one block that starts with ```python and ends with ```."""

TEST = r"""You are given a programming task. Write one new test for it: an input and the output that a right program gives. Work
the output out step by step, and choose an input whose output you can be sure of and that a wrong program would fail.
End in exactly this form:
**Test Input:**
```
the input
```
**Test Output:**
```
the output
```
**Explanation:** why this is the output"""


def code_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": CODE}, {"role": "user", "content": f"Task: {question}\nWrite a program."}]


def test_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": TEST}, {"role": "user", "content": f"Task: {question}\nWrite a test."}]


def parse_program(text: str) -> str | None:
    r"""The last complete ```python block, None if there is none.

    >>> parse_program("```python\nprint(1)\n``` or better\n```python\nprint(2)\n```")
    'print(2)\n'
    """
    blocks = re.findall(r"^```python[ \t]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks and blocks[-1].strip() else None


BLOCK = r"\s*```(?:plaintext|text)?[ \t]*\n((?:(?!```).)*)```"  # up to its own fence: a draft before it is not part of it
PARSED_TEST = re.compile(rf"\*\*Test Input:\*\*{BLOCK}\s*\*\*Test Output:\*\*{BLOCK}", re.DOTALL)


def parse_test(text: str) -> tuple[str, str] | None:
    """(input, expected output) of the last complete test; None if there is none, or one that expects nothing: programs that
    print nothing would pass it. The text is taken as it is. ([C] also turns a written backslash-n into a new line.)"""
    found = PARSED_TEST.findall(text)
    return found[-1] if found and found[-1][1].strip() else None


# ------------------------------------------------------------------ rewards
def coder_rewards(passes_own: torch.Tensor) -> torch.Tensor:
    """Eq. 3 as a share: (N, t) bool, program j passes own test k -> (N,). A program that cannot be read passes none."""
    return passes_own.double().mean(1)


def tester_rewards(passes_own: torch.Tensor, passes_unit: torch.Tensor, kind: str = "precision") -> torch.Tensor | None:
    """Eq. 4 over the right programs: (N, t) and (N, M) bool -> (M,), None if no program is right.

    kind: "precision", or "simple": 1 if all right programs pass the test, else 0."""
    right = passes_own.all(1)  # (N,): I_j
    if not right.any():
        return None
    good = passes_unit[right].all(0)  # (M,): every right program passes test k
    if kind == "simple":
        return good.double()
    if right.all():
        return 2 * good.double() - 1
    passing = passes_unit[~right].double().mean(0)  # (M,): share of wrong programs that pass test k
    # R_k = good_k * (1 - p01) - (1 - good_k) * p00, this test's own estimate of mu
    return torch.where(good, 1 - passing, -passing)


# ------------------------------------------------------------------ the paper's mathematics
def normalised(rewards: torch.Tensor) -> torch.Tensor | None:
    """A = (r - mean) / std over one group, (N,) -> (N,): population standard deviation, no epsilon; None if all are equal."""
    if rewards.max() == rewards.min():
        return None
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def coder_advantages(passes_own: torch.Tensor) -> torch.Tensor | None:
    """(N, t) bool -> (N,), None if all programs of the task are equally good."""
    return normalised(coder_rewards(passes_own))


def tester_advantages(passes_own: torch.Tensor, passes_unit: torch.Tensor, kind: str = "precision") -> torch.Tensor | None:
    """(N, t) and (N, M) bool -> (M,), None if no program is right or all tests are equally good."""
    rewards = tester_rewards(passes_own, passes_unit, kind)
    return None if rewards is None else normalised(rewards)


def shorter_is_better(advantages: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Section 3.4: (M,) advantages r and token lengths l -> (M,). With T the median and l_max the maximum of l where r > 0

        rhat = T - l where r > 0, T - l_max elsewhere;  scaled to equal positive and negative mass, then to standard deviation 1

    so a good test longer than the median is worse than none, and the longest is as bad as a wrong one."""
    good, lengths = advantages > 0, lengths.double()
    middle, longest = lengths[good].quantile(0.5), lengths[good].max()
    shaped = torch.where(good, middle - lengths, middle - longest)
    gains, losses = shaped.clamp(min=0).sum(), -shaped.clamp(max=0).sum()
    if gains == 0 or losses == 0:
        return advantages
    shaped = torch.where(shaped > 0, shaped * losses / gains, shaped)  # alpha = losses / gains
    return shaped / shaped.std(correction=0)


def reward_precision(passes_unit: torch.Tensor, right: torch.Tensor, good: torch.Tensor, programs: list, tests: list) -> dict:
    """The pairs of one task whose means are p01 (a wrong program passes a right test) and p00 (it passes a wrong test).

    (N, M), (N,) and (M,) bool, N programs and M tests, None = cannot be read -> {"p01": [bool], "p00": [bool]}. Only what can
    be read counts: there is no passing of the rest, and both rates would fall with every answer that loses its format."""
    wrong = ~right & torch.tensor([program is not None for program in programs])  # (N,)
    bad = ~good & torch.tensor([test is not None for test in tests])  # (M,)
    return {"p01": passes_unit[wrong][:, good].flatten().tolist(), "p00": passes_unit[wrong][:, bad].flatten().tolist()}


# ------------------------------------------------------------------ the trainer: one optimiser step
class Cure(CoTrainer):
    """Inherited: sampling, reward calls, log-probs, the clipped loss, the optimiser, logging, checkpoints.
    Here: the table of programs and tests, both rewards, and two updates in one step."""

    def __init__(self, model, script: Args, sandbox: Sandbox, **kwargs):
        self.script, self.sandbox = script, sandbox
        N = script.group_size
        players = {
            "coder": Player([self.own_tests_reward], script.lr, script.program_tokens, N, adapter="policy"),
            "tester": Player([self.precision_reward], script.lr, script.test_tokens, N, adapter="policy"),
        }
        super().__init__(model, players, kl=script.kl, rows_at_once=script.rows_at_once, **kwargs)
        self.example = ""
        self.runs = {}  # (program, input) -> result, of this step or evaluation

    # --- rewards: one number per row, called by TRL; they leave the tables behind
    def own_tests_reward(self, completions, test_input, test_output, **_) -> list[float]:
        """Coder: the share of the task's own tests passed."""
        N, t = self.script.group_size, self.script.own_tests
        self.programs = grouped([parse_program(c[0]["content"]) for c in completions], N)
        own = [list(zip(inputs, outputs))[:t] for inputs, outputs in zip(test_input[::N], test_output[::N])]
        self.passes_own = self.run_tables(self.programs, own)  # P tables (N, t)
        return torch.cat([coder_rewards(table) for table in self.passes_own]).tolist()

    def precision_reward(self, completions, **_) -> list[float]:
        """Tester: what its test tells of the programs. 0 where no program is right: such a group is never trained on."""
        self.tests = grouped([parse_test(c[0]["content"]) for c in completions], self.script.group_size)
        self.passes_unit = self.run_tables(self.programs, self.tests)  # P tables (N, M)
        self.paid = [unit.clone() for unit in self.passes_unit]
        for own, unit, tests in zip(self.passes_own, self.paid, self.tests):
            unreadable = torch.tensor([test is None for test in tests])
            unit[:, unreadable] = ~own.all(1)[:, None]  # the worst there is: exactly the wrong programs pass
        rewards = [tester_rewards(own, unit, self.script.tester_reward) for own, unit in zip(self.passes_own, self.paid)]
        none = torch.zeros(self.script.group_size)
        return torch.cat([none if of_task is None else of_task for of_task in rewards]).tolist()

    def run_tables(self, programs: list[list], tests: list[list]) -> list[torch.Tensor]:
        """For every task the table of who passes what, (N, t) bool. A pair that occurs twice is run once: samples repeat, and
        a generated input may be one of the task's own."""
        pairs = {}
        for of_task, its_tests in zip(programs, tests):
            pairs.update(((p, t[0]), None) for p, t in product(of_task, its_tests) if p is not None and t is not None)
        new = [pair for pair in pairs if pair not in self.runs]
        programs_, inputs = [p for p, _ in new], [x for _, x in new]
        results = self.sandbox.run(programs_, inputs, self.script.time_limit, output_limit=OUTPUT_LIMIT)
        self.runs.update(zip(new, results))

        def passes(program, test) -> bool:
            if program is None or test is None:
                return False
            result = self.runs[program, test[0]]
            return result.status is Status.OK and same_output(result.output, test[1], self.script.tolerance)

        return [
            torch.tensor([[passes(p, t) for t in its_tests] for p in of_task], dtype=torch.bool)
            for of_task, its_tests in zip(programs, tests)
        ]

    # --- one step
    def _generate_and_score_completions(self, rows):
        """rows: B of them, every task N times in a row."""
        self.runs.clear()
        coder = self.turn("coder", rows)  # N programs per task
        tester = self.turn("tester", [{**row, "prompt": test_prompt(row["question"])} for row in rows])  # N tests per task
        device = coder["rewards"].device
        advantages = [coder_advantages(own) for own in self.passes_own]
        coder["advantages"] = self.joined(advantages).to(device)  # (B,)
        advantages = [tester_advantages(own, unit, self.script.tester_reward) for own, unit in zip(self.passes_own, self.paid)]
        if self.script.short_tests:
            lengths = tester["completion_mask"].sum(1).cpu().reshape(-1, self.script.group_size)  # (P, M)
            advantages = [None if A is None else shorter_is_better(A, length) for A, length in zip(advantages, lengths)]
        tester["advantages"] = self.joined(advantages).to(device)  # (B,)
        self.log_tables()
        for notes in (coder["notes"], tester["notes"]):  # for the report: the table, with the first row of its group
            for note, own, unit in zip(notes[:: self.script.group_size], self.passes_own, self.passes_unit):
                note["table"] = {"passes": torch.cat([own, unit], 1).int().tolist(), "own": own.shape[1]}
        share, worth = coder["rewards"][0], tester["rewards"][0]
        self.example = f"--- {rows[0]['question']}\n{coder['texts'][0]}\n--- passes {share:.0%} of the task's tests\n"
        self.example += f"--- the tester\n{tester['texts'][0]}\n--- reward {worth:.2f}\n---"
        self.become("coder")
        self.update(coder)  # the coder's step first; the tester's is the trainer's own, from the policy just updated
        self.become("tester")
        return tester

    def joined(self, advantages: list[torch.Tensor | None]) -> torch.Tensor:
        """(B,): the groups one after the other, 0 for those that teach nothing."""
        none = torch.zeros(self.script.group_size)
        return torch.cat([none if A is None else A.float() for A in advantages])

    def log_tables(self):
        """Per task, against the task's right programs as the only oracle there is in training."""
        numbers = {"cod/accuracy": [], "cod/parsed": [], "tes/parsed": [], "tes/accuracy": [], "tes/p01": [], "tes/p00": []}
        for programs, tests, own, unit in zip(self.programs, self.tests, self.passes_own, self.passes_unit):
            right = own.all(1)
            numbers["cod/accuracy"] += right.tolist()
            numbers["cod/parsed"] += [program is not None for program in programs]
            numbers["tes/parsed"] += [test is not None for test in tests]
            if right.any():
                good = unit[right].all(0)
                numbers["tes/accuracy"] += good.tolist()
                for name, pairs in reward_precision(unit, right, good, programs, tests).items():
                    numbers[f"tes/{name}"] += pairs
        for name, values in numbers.items():
            values = self.gather(values)
            if values:
                self.log_metric(name, mean(values))
        oracle = [bool(own.all(1).any()) for own in self.passes_own]
        self.log_metric("co/tasks_with_a_right_program", mean(self.gather(oracle)))


def grouped(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Cure, held_out: list[dict]) -> dict[str, float]:
    """The coder's programs by the tasks' own tests; the tester's tests by right programs, and by the wrong ones they let pass:
    the coder's of now, as in the paper, and the base's, written once, so that the tester is measured on the same ones all
    along; and both: tests pick the best program."""
    state = trainer.accelerator
    rows = held_out[state.process_index :: state.num_processes]
    own = [list(zip(row["test_input"], row["test_output"]))[: trainer.script.own_tests] for row in rows]
    texts = trainer.act("coder", [code_prompt(row["question"]) for row in rows for _ in range(MANY)])
    programs = grouped([parse_program(text) for text in texts], MANY)
    texts = trainer.act("tester", [test_prompt(row["question"]) for row in rows for _ in range(MANY)])
    tests = grouped([parse_test(text) for text in texts], MANY)
    if "base_programs" not in trainer.memory:  # step 0: the coder is still the base
        everyone = trainer.gather(list(zip([row["question"] for row in rows], programs)))
        trainer.memory["base_programs"] = dict(everyone)
    base = [trainer.memory["base_programs"][row["question"]] for row in rows]
    # who passes what: own tests, generated tests; and so for the reference program
    trainer.runs.clear()
    passes_own, base_own = trainer.run_tables(programs, own), trainer.run_tables(base, own)
    passes_unit, base_unit = trainer.run_tables(programs, tests), trainer.run_tables(base, tests)
    references = [[row["reference"] or None] for row in rows]
    reference_own, reference_unit = trainer.run_tables(references, own), trainer.run_tables(references, tests)  # (1, t), (1, M)
    good = []
    for i in range(len(rows)):  # without a reference that passes the task's tests, every right program there is
        right = torch.cat([passes_unit[i][passes_own[i].all(1)], base_unit[i][base_own[i].all(1)]])
        oracle = reference_unit[i] if reference_own[i].all() else right
        good.append(oracle.all(0) & torch.tensor(len(oracle) > 0))  # (M,)
    measured = {
        "cod/accuracy": [r for table in passes_own for r in table.all(1).tolist()],
        "cod/parsed": [program is not None for of_task in programs for program in of_task],
        "tes/accuracy": [g for of_task in good for g in of_task.tolist()],
        "tes/parsed": [test is not None for of_task in tests for test in of_task],
    }
    for size in (FEW, MANY):  # the program that passes most tests, the first one of several
        best = [int(unit[:size, :size].sum(1).argmax()) for unit in passes_unit]
        measured[f"co/best_of_{size}"] = [bool(table[i].all()) for table, i in zip(passes_own, best)]
    result = {name: mean(trainer.gather(values)) for name, values in measured.items()}
    cells = {key: [] for key in ("tes/p01", "tes/p00", "tes/p01_base", "tes/p00_base", "co/precision")}
    for i in range(len(rows)):
        for whose, written, own_table, unit in (
            ("", programs, passes_own, passes_unit),
            ("_base", base, base_own, base_unit),
        ):
            for name, pairs in reward_precision(unit[i], own_table[i].all(1), good[i], written[i], tests[i]).items():
                cells[f"tes/{name}{whose}"] += pairs
        right, score = base_own[i].all(1), base_unit[i].sum(1)  # (N,) each
        cells["co/precision"] += (score[right][:, None] > score[~right][None]).flatten().tolist()
    everyone = {name: trainer.gather(values) for name, values in cells.items()}
    result |= {name: mean(values) for name, values in everyone.items() if values}  # what is not defined is not shown
    # theorem 3.1, with the base's programs: P(right program scores higher than a wrong one) >= 1 - exp(-mu^2 m / 8)
    if "tes/p01_base" in result and "tes/p00_base" in result:
        p_u, wrong = result["tes/accuracy"], result["tes/parsed"] - result["tes/accuracy"]
        result["co/mu"] = p_u * (1 - result["tes/p01_base"]) - wrong * result["tes/p00_base"]  # unreadable: favours nobody
        result["co/precision_bound"] = 1 - math.exp(-(max(0.0, result["co/mu"]) ** 2) * MANY / 8)
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "coder": ["cod/accuracy"],
    "tester": ["tes/accuracy", "tes/p01", "tes/p00"],
    "health": ["co/tasks_with_a_right_program", "cod/parsed", "tes/parsed"],
}


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    check_batch(args.questions, args.group_size, args.micro_batch)
    if args.own_tests < 1 or args.time_limit <= 0 or (args.tolerance or 0) < 0:
        limits = f"--own-tests {args.own_tests}, --time-limit {args.time_limit}, --tolerance {args.tolerance}"
        raise UserError(f"{limits}: at least one test, more than no time, no negative tolerance.")
    check_memory(args, [(0, args.program_tokens), (0, args.test_tokens)], adapters=1)
    train, held_out = load_tasks(args.dataset, args.steps * args.questions * 4, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    model, tokenizer = load_model(args.model, ["policy"], args.lora_rank, args.four_bit, args.seed)
    accumulation = args.questions * args.group_size // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one optimiser step per batch of rollouts: strictly on-policy, the ratio is 1
        num_generations=args.group_size,
        max_completion_length=args.program_tokens,
        loss_type="dapo",  # token mean over the whole batch
        scale_rewards="group",
        max_grad_norm=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=args.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = [{"prompt": code_prompt(row["question"]), **row} for row in train]
    processes = int(os.environ.get("WORLD_SIZE", 1))
    with Sandbox(max(1, os.cpu_count() // processes), args.unsafe_sandbox) as sandbox:
        data = Dataset.from_list(rows)
        trainer = Cure(model, args, sandbox, args=config, train_dataset=data, processing_class=tokenizer)
        run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
