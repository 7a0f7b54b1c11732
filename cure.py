r"""CURE: one policy writes programs and tests for them, and each role is rewarded through the other
role's output (Wang et al. 2025, arXiv:2506.03136).

    python cure.py                                        the small model on a CPU, 3 minutes
    python cure.py --tester-reward simple                 the paper's ablation
    python cure.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset mbpp.jsonl         one GPU

The loop (algorithm 1) is `Cure.step`
    for each of P tasks sample N programs and N tests
    run every program on the task's own tests and on the generated tests (`run_tables`)

    CODER   R = number of the task's own tests that the program passes                        eq. 3
    TESTER  R = + share of wrong programs that fail the test, if ALL correct programs pass it
            R = - share of wrong programs that pass the test, if not                          eq. 4

    A = (R - mean) / std within a task. One update on the programs, then one update on the tests.
    The loss of both is `CoTrainer.loss` in common/core/cotrainer.py.

A program is correct if it passes all of the task's own tests, which are the only oracle. A test's
reward estimates mu = p_u (1 - p01) - (1 - p_u) p00, how much more the test favours correct programs
than wrong programs. mu decides how well tests choose among programs (theorem 3.1). p_u is the
probability that a test is right. p01 is the probability that a wrong program passes a right test,
and p00 is the probability that a wrong program passes a wrong test.

Our changes that matter (more in docs/cure.md)
    1. One LoRA adapter plays both roles; the reference of the KL term is the base without it. In
       the released code it is the policy itself, so that the KL term has no gradient.
    2. Eq. 4 has a product that is 1 if all correct programs pass the test, else 0. Here it is over
       the correct programs, as in the text and the released code. The printed product is over all
       programs. With it no reward would ever be positive.
    3. A test that cannot be read gets the worst reward, -1. In the released code it gets 0, which
       beats a wrong test that some wrong program passes.
    4. One AdamW serves the whole run. The released code starts a new AdamW at every step.
    5. Programs run in a sandbox with a limit on CPU time and not on time by the clock.

Shapes: P tasks, N programs and N tests each, B = P * N rows, t own tests of a task, M tests in
general. The tables of which program passes which test are (N, t) and (N, M) bool, on the CPU.
"""

import math
import re
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from common.run.args import (
    Count,
    GroupSize,
    RunArgs,
    Seconds,
    Several,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/run/args.py
    model: str = "tiny-programs"
    """the small model of programs that comes with the repository, a hub id or a folder"""
    dataset: str = "tiny"
    """our own tasks, or a .jsonl file: functions of MBPP, HumanEval or LiveCodeBench, or with
    question, test_input and test_output (lists of strings)"""
    eval_questions: Count = per_model(tiny=128, real=64)
    """held-out tasks"""
    eval_samples: Several = 16
    """programs per held-out task, and as many tests (paper: 16)"""
    steps: Count = 32
    """optimiser steps, in each of which both roles are trained (paper: 350; 50 for Qwen3-4B)"""
    questions: Count = 8
    """P, tasks per step and process (released code: 100)"""
    group_size: GroupSize = 16
    """N, programs of a task, and as many tests (paper: 16)"""
    lr: Weight = per_model(tiny=5e-4, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    kl: Weight = 0.01
    """weight of the k3 penalty towards the base (paper: 0.01); 0 saves a forward pass"""
    tester_reward: Literal["precision", "simple"] = "precision"
    """ablation: 1 if all correct programs pass the test, else 0"""
    short_tests: bool = False
    """the transform for long reasoning: among good tests, shorter tests earn more (sec. 3.4)"""
    own_tests: Count = 8
    """t, most of a task's own tests that are run (released code: 8)"""
    program_tokens: Tokens = per_model(tiny=64, real=1024)
    """length limit of a program (released code: 10000, trained on the first 8000)"""
    test_tokens: Tokens = per_model(tiny=96, real=1024)
    """length limit of a test (released code: the same)"""
    time_limit: Seconds = 1.0
    """CPU seconds of one run of a program (released code: 1, by the clock)"""
    unsafe_sandbox: bool = False
    """run model-written code even where a layer of the sandbox is missing on this machine"""


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.cotrainer import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.sandbox import Sandbox
from common.tasks.answers import prompt
from common.tasks.code import (
    given,
    load_tasks,
    parse_assert,
    parse_program,
    passes,
    run_pairs,
    shown_assert,
)
from common.tasks.math import count_for_steps

import torch

# ------------------------------------------------------------------ prompts and parsing
CODE = r"""You are given a programming task. Think first, then write a Python program that reads its
input with input() and prints its output with print(). Put the whole program into one block that
starts with ```python and ends with ```."""

TEST = r"""You are given a programming task. Write one new test for it: an input and the output that
a right program gives. Work the output out step by step, and choose an input whose output you can be
sure of and that a wrong program would fail. End in exactly this form:
**Test Input:**
```
the input
```
**Test Output:**
```
the output
```
**Explanation:** why this is the output"""

FUNCTION = """You are given a programming task and one of its tests. Write the Python function;
other tests will be run, too. Put the whole program into one block that starts with ```python and
ends with ```."""

ASSERT = """You are given a programming task and one of its tests. Write one new test with other
arguments: one line `assert f(...) == value` for the function f of the task, with literals alone.
Choose arguments whose value you can be sure of and that a wrong program would fail."""

# worked examples: a task, a program and a test
SPREAD = """Task: Write a function to find how far the largest number is from the smallest.
assert spread([4, 9, 2]) == 7"""
SPREAD_PROGRAM = """```python
def spread(numbers):
    return max(numbers) - min(numbers)
```"""
INITIAL = """Task: Write a function to count the words of a text that begin with a given letter.
assert count_initial("a big bad dog", "b") == 2"""
INITIAL_PROGRAM = """```python
def count_initial(text, letter):
    count = 0
    for word in text.split():
        if word.startswith(letter):
            count += 1
    return count
```"""
PROGRAMS = [
    (f"{SPREAD}\nWrite the function.", SPREAD_PROGRAM),
    (f"{INITIAL}\nWrite the function.", INITIAL_PROGRAM),
]
TESTS = [
    (f"{SPREAD}\nWrite a test.", "assert spread([5, -1, 5, 3]) == 6"),
    (f"{INITIAL}\nWrite a test.", 'assert count_initial("ten apples", "x") == 0'),
]


def code_prompt(question: str) -> list[dict]:
    if shown_assert(question):
        return prompt(FUNCTION, f"Task: {question}\nWrite the function.", PROGRAMS)
    return prompt(CODE, f"Task: {question}\nWrite a program.")


def test_prompt(question: str) -> list[dict]:
    if shown_assert(question):
        return prompt(ASSERT, f"Task: {question}\nWrite a test.", TESTS)
    return prompt(TEST, f"Task: {question}\nWrite a test.")


def parse_test(text: str, question: str = "") -> tuple[str, str] | str | None:
    """Returns the last whole test of a text in the form of the question: an assert line, or (input,
    expected output). None without a whole test, or if an assert repeats the call that the question
    shows, or if no output is expected, because programs that print nothing would pass. A part with
    an unclosed fence counts as missing.
    """
    if shown_assert(question):
        return parse_assert(text, question)
    text = text.replace("\r\n", "\n")
    start, expected = last_part(text, "**Test Output:**", r"\*\*Explanation:|\*\*Test Input:")
    _, _, own = text[:start].rpartition("**Test Output:**")  # without the tests before it
    _, wanted = last_part(own, "**Test Input:**", r"\*\*Test Output:")
    return (wanted, expected) if wanted and expected.strip() else None


def last_part(text: str, heading: str, end: str) -> tuple[int, str]:
    r"""Where the last part with this heading begins, and its content: the fenced block after the
    heading, or the text up to `end` if there are no such blocks; (0, "") without the heading.

    >>> last_part("**A:** ```plaintext\n1\n``` **A:** 2", "**A:**", r"\*\*")
    (0, '1\n')
    >>> last_part("**A:** 1 **A:** 2 **B:** 3", "**A:**", r"\*\*")
    (9, '2\n')
    """
    mark = r"(?:[ \t]*(?:plain)?text[ \t]*\n)?"
    fenced = list(re.finditer(re.escape(heading) + rf"\s*```{mark}(.*?)```", text, re.DOTALL))
    if fenced:
        start, content = fenced[-1].start(), fenced[-1][1].lstrip("\n")
    else:
        start = text.rfind(heading)
        content = re.split(end, text[start + len(heading) :], maxsplit=1)[0].strip()
        if start < 0 or "```" in content:  # an unclosed fence: cut at the length limit
            return 0, ""
    return start, content.replace("\\n", "\n").removesuffix("\n") + "\n"


# ------------------------------------------------------------------ rewards
def coder_rewards(passes_own: torch.Tensor) -> torch.Tensor:
    """Eq. 3 as a share: (N, t) bool, which program passes which own test -> (N,)."""
    return passes_own.double().mean(1)


def tester_rewards(
    passes_own: torch.Tensor, passes_unit: torch.Tensor, kind: str = "precision"
) -> torch.Tensor:
    """Eq. 4 over the correct programs: (M,); NaN, no reward, if no program is correct.

    Args:
        passes_own: (N, t) bool, which program passes which of the task's own tests.
        passes_unit: (N, M) bool, which program passes which generated test.
        kind: "precision", or "simple": 1 if all correct programs pass the test, else 0.

    >>> own = torch.tensor([[1], [1], [0], [0]]).bool()  # two correct programs, two wrong ones
    >>> unit = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0]])
    >>> tester_rewards(own, unit.bool()).tolist()
    [1.0, 0.5, 0.0, -1.0, -0.0]
    """
    correct = passes_own.all(1)  # (N,): I_j
    if not correct.any():
        return torch.full((passes_unit.shape[1],), torch.nan, dtype=torch.double)
    good = passes_unit[correct].all(0)  # (M,): every correct program passes test k
    if kind == "simple":
        return good.double()
    if correct.all():
        return 2 * good.double() - 1
    passing = passes_unit[~correct].double().mean(0)  # (M,): share of wrong ones that pass k
    # R_k = good_k * (1 - p01) - (1 - good_k) * p00, this test's own estimate of mu
    return torch.where(good, 1 - passing, -passing)


# ------------------------------------------------------------------ the paper's mathematics
def normalised(rewards: torch.Tensor) -> torch.Tensor:
    """A = (R - mean) / std over one group, (N,) -> (N,). A is 0 if all rewards are equal, or NaN.
    The standard deviation is the population's, without an epsilon.
    """
    if not rewards.max() > rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def shorter_is_better(advantages: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Section 3.4: (M,) advantages r and lengths l in tokens -> (M,).

    Trap: good tests, r > 0, that are longer than their median turn negative, and the longest turns
    as low as a bad test. Where the median is their shortest or longest length, r does not change.
    """
    good, lengths = advantages > 0, lengths.double()
    if not good.any():
        return advantages
    # rhat = T - l where r > 0, else T - l_max;  T median, l_max maximum of l where r > 0
    median, longest = lengths[good].quantile(0.5), lengths[good].max()
    shaped = torch.where(good, median - lengths, median - longest)
    # then scaled to equal positive and negative mass, and to a standard deviation of 1
    gains, losses = shaped.clamp(min=0).sum(), -shaped.clamp(max=0).sum()
    if gains == 0 or losses == 0:
        return advantages
    shaped = torch.where(shaped > 0, shaped * losses / gains, shaped)  # alpha = losses / gains
    return shaped / shaped.std(correction=0)


# ------------------------------------------------------------------ the trainer
class Cure(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs, sandbox: Sandbox):
        super().__init__(*inputs)
        self.sandbox = sandbox

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        N = args.group_size
        return {
            "coder": Player([], args.lr, args.program_tokens, N, adapter="policy"),
            "tester": Player([], args.lr, args.test_tokens, N, adapter="policy"),
        }

    def step(self, rows):
        """rows: B, every task N times in a row."""
        N, runs = self.cfg.group_size, {}

        # CODER: N programs per task, rewarded by the task's own tests
        coder = self.rollout("coder", rows)
        programs = chunk([parse_program(text) for text in coder.texts], N)
        own = [row["tests"][: self.cfg.own_tests] for row in rows[::N]]
        passes_own = self.run_tables([*zip(programs, own)], runs)  # (N, t) for each of P tasks
        rewards = [coder_rewards(table) for table in passes_own]  # (N,) each
        self.set_rewards(coder, torch.cat(rewards))
        A = torch.cat([normalised(R) for R in rewards])  # (B,)
        coder.advantages = A.to(coder.rewards)  # instead of GRPO's

        # TESTER: N tests per task, rewarded by what they tell about these programs
        tester = self.rollout("tester", [{"prompt": test_prompt(row["question"])} for row in rows])
        tests = [parse_test(t, row["question"]) for t, row in zip(tester.texts, rows)]
        tests = chunk(tests, N)
        passes_unit = self.run_tables([*zip(programs, tests)], runs)  # (N, N) for each of P tasks
        rewards = []  # (N,) each
        for group, by_own, by_unit in zip(tests, passes_own, passes_unit):
            # a test that cannot be read counts as the worst: exactly the wrong programs pass it
            unreadable = torch.tensor([test is None for test in group])  # (N,)
            by_unit = torch.where(unreadable, ~by_own.all(1)[:, None], by_unit)
            rewards.append(tester_rewards(by_own, by_unit, self.cfg.tester_reward))
        self.set_rewards(tester, torch.cat(rewards))
        A = [normalised(R) for R in rewards]
        if self.cfg.short_tests:
            lengths = tester.completion_mask.sum(1).cpu().reshape(-1, N)  # (P, N)
            A = [shorter_is_better(a, l) for a, l in zip(A, lengths)]
        tester.advantages = torch.cat(A).to(tester.rewards)  # (B,)

        self.report_tables(coder, tester, Ran(programs, passes_own, passes_unit), tests)
        # Two updates of one adapter. Both were sampled before the first, so the tests are one
        # update old, as in the released code; no importance ratio corrects that.
        return [coder, tester]

    def run_tables(self, tasks: list[tuple[list, list]], runs: dict) -> list[torch.Tensor]:
        """For every task, (its programs, its tests), the table (N, M) of which program passes which
        test. A program that cannot be read passes nothing, and nothing passes an unreadable test.

        runs: (program, input or call) -> result, which grows. A pair that occurs twice is run once:
            samples repeat, and a generated test may repeat an own test's input.
        """
        pairs = {
            (program, given(test)): None  # a set that keeps the order
            for programs, tests in tasks
            for program, test in product(programs, tests)
            if program is not None and test is not None
        }
        new = [pair for pair in pairs if pair not in runs]
        runs.update(zip(new, run_pairs(self.sandbox, new, self.cfg.time_limit)))

        def passed(program, test) -> bool:
            readable = program is not None and test is not None
            return readable and passes(runs[program, given(test)], test)

        return [
            torch.tensor([[passed(program, test) for test in tests] for program in programs]).bool()
            for programs, tests in tasks
        ]

    # --- what is logged and shown; no method below affects training
    def report_tables(self, coder: Batch, tester: Batch, ran: "Ran", tests: list[list]):
        """Logs training figures, in which a task's correct programs are its tests' only oracle."""
        correct = [own.all(1) for own in ran.own]  # (N,) for each of P tasks
        good = {i: ran.unit[i][right].all(0) for i, right in enumerate(correct) if right.any()}
        for name, values in figures(ran, tests, good).items():
            self.log_mean(name, values)
        self.log_mean("co/tasks_with_a_right_program", len(good) / len(correct))
        for batch in (coder, tester):  # a task's table goes with the first row of its group
            for note, own, unit in zip(batch.notes[:: self.cfg.group_size], ran.own, ran.unit):
                passes = torch.cat([own, unit], 1).int().tolist()
                note["table"] = {"passes": passes, "own": own.shape[1]}


def are_read(groups: list[list]) -> list[bool]:
    """Of every program or test, whether it could be read."""
    return [item is not None for group in groups for item in group]


# ------------------------------------------------------------------ evaluation
class Ran(NamedTuple):  # of every task
    programs: list[list[str | None]]  # N; None = cannot be read
    own: list[torch.Tensor]  # (N, t) bool, who passes which own test
    unit: list[torch.Tensor]  # (N, M) bool, who passes which generated test


def reward_precision(ran: Ran, tests: list[list], good: dict[int, torch.Tensor]) -> dict[str, list]:
    """p01, p00 and mu of theorem 3.1, as lists. good: task -> (M,) bool, its right tests.

    p01 has, for every wrong program and right test, whether the program passes the test. p00 has
    the same for wrong tests. mu has a figure for every task with a wrong program.

    p01 and p00 count only what can be read. Nothing passes the rest, and both would fall with every
    completion that loses its format. A test that cannot be read adds 0 to mu.
    """
    found = {"p01": [], "p00": [], "mu": []}
    for i, right in good.items():
        readable = torch.tensor([program is not None for program in ran.programs[i]])
        wrong = readable & ~ran.own[i].all(1)  # (N,)
        bad = ~right & torch.tensor([test is not None for test in tests[i]])  # (M,)
        passes = ran.unit[i][wrong]  # (wrong programs, M)
        found["p01"] += passes[:, right].flatten().tolist()
        found["p00"] += passes[:, bad].flatten().tolist()
        if wrong.any():
            passing = passes.double().mean(0)  # (M,)
            # eq. 4 test by test
            found["mu"].append(mean(torch.where(right, 1 - passing, -passing).tolist()))
    return found


def figures(ran: Ran, tests: list[list], good: dict[int, torch.Tensor]) -> dict[str, list]:
    """Figures of both players, in training and held out. good: see `reward_precision`."""
    rates = reward_precision(ran, tests, good)
    return {
        "coder/accuracy": [r for own in ran.own for r in own.all(1).tolist()],
        "coder/parsed": are_read(ran.programs),
        "tester/accuracy": [g for right in good.values() for g in right.tolist()],
        "tester/parsed": are_read(tests),
        "tester/p01": rates["p01"],
        "tester/p00": rates["p00"],
    }


def evaluate(trainer: Cure, held_out: list[dict]) -> dict[str, float]:
    """Figures of the coder, by the tasks' own tests; of the tester, by right programs and by the
    wrong programs that its tests let pass; and of both together. Wrong programs are the coder's, as
    in the released code, and programs of the base, which are the same in every evaluation.
    """
    n, runs = trainer.cfg.eval_samples, {}
    questions = [row["question"] for row in held_out for _ in range(n)]
    texts = trainer.generate_all("coder", [code_prompt(question) for question in questions])
    programs = chunk([parse_program(text) for text in texts], n)
    texts = trainer.generate_all("tester", [test_prompt(question) for question in questions])
    tests = chunk([parse_test(*both) for both in zip(texts, questions)], n)
    base_programs = trainer.saved.setdefault("base_programs", programs)  # step 0: it is the base
    references = [[row["reference"] or None] for row in held_out]
    own = [row["tests"][: trainer.cfg.own_tests] for row in held_out]

    def run(programs: list[list], tests: list[list]) -> list[torch.Tensor]:
        tasks = [*zip(programs, tests)]  # each process runs its share of them
        return trainer.in_parallel(lambda share: trainer.run_tables(share, runs), tasks)

    now, base, reference = (
        Ran(written, run(written, own), run(written, tests))
        for written in (programs, base_programs, references)
    )
    good = oracle(reference, base)
    of_base = reward_precision(base, tests, good)
    values = figures(now, tests, good) | {f"tester/{p}_base": of_base[p] for p in ("p01", "p00")}
    values["co/tasks_with_an_oracle"] = [i in good for i in range(len(tests))]
    for size in {min(4, n), n}:  # the program that passes most tests, the first one of several
        best = [int(unit[:size, :size].sum(1).argmax()) for unit in now.unit]
        values[f"co/best_of_{size}"] = [bool(own[i].all()) for own, i in zip(now.own, best)]
    # theorem 3.1: P(a correct program scores higher than a wrong program) >= 1 - exp(-mu^2 m / 8)
    values["co/mu"], values["co/precision"] = of_base["mu"], []
    values["co/precision_bound"] = [1 - math.exp(-(max(0, x) ** 2) * n / 8) for x in of_base["mu"]]
    for passes_own, passes_unit in zip(base.own, base.unit):
        correct, score = passes_own.all(1), passes_unit.sum(1)  # (N,) each
        wins = score[correct][:, None] > score[~correct][None]
        values["co/precision"] += wins.flatten().tolist()
    return {name: mean(v) for name, v in values.items() if v}  # what is undefined is not shown


def oracle(reference: Ran, base: Ran) -> dict[int, torch.Tensor]:
    """Task -> (M,) bool, which of its tests are right: the tests that its reference program passes.
    Without a valid reference, they are the tests that all correct programs of the base pass. The
    current coder never decides. A task that has neither is left out, because by an empty oracle all
    its tests would be right.
    """
    good = {}
    for i in range(len(reference.own)):
        known = reference if reference.own[i].all() else base
        judges = known.unit[i][known.own[i].all(1)]  # (correct programs, M)
        if len(judges):
            good[i] = judges.all(0)
    return good


# ------------------------------------------------------------------ main
CURVES = {
    "coder": ["coder/accuracy"],
    "tester": ["tester/accuracy", "tester/p01", "tester/p00"],
    "choice by tests, held out": ["co/mu", "co/precision", "co/best_of_4", "co/best_of_16"],
    "health": ["co/tasks_with_a_right_program", "coder/parsed", "tester/parsed"],
}


def load(args: Args):
    count = count_for_steps(args)
    return load_tasks(args.dataset, count, args.eval_questions, args.seed, args.held_out)


def main(args: Args):
    config = {"adam_beta2": 0.95}  # as in the released code
    with Sandbox(unsafe=args.unsafe_sandbox) as sandbox:
        more = {"prompt": code_prompt, "config": config, "sandbox": sandbox}
        launch(Cure, args, load=load, evaluate=evaluate, curves=CURVES, **more)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
