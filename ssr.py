r"""SSR, Self-play SWE-RL (Wei et al. 2025, arXiv:2512.18552): one model puts bugs into programs,
hides tests that would show them, and repairs them; the tests are the only ground truth.

    python ssr.py                                         the small model on a CPU, 3 minutes
    python ssr.py --train solver                          nobody teaches the injector
    python ssr.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --dataset mbpp.jsonl    one GPU

The loop is `Ssr.step`
    INJECTOR  sees a program and its tests, writes the program with a bug, and names tests to hide:
              these leave the suite, so that the tests that stay show less of the bug
    CHECKS    seven checks run programs: the program runs; it runs twice alike; then      `check`
              the checks of `failed_check`. The last check is inverse mutation: each edited line,
              put right alone, must make a failing test pass
    SOLVER    makes G attempts on each bug that passes. It sees the program and, as its   `attempt`
              specification, the hidden tests. An attempt is right if it passes ALL tests of the
              original
    AGAIN     some wrong attempts are bugs of second order: G more attempts on each

    r_injector = -1                    a check fails
               = -alpha                s is 0 or 1            s = share of the G attempts that
               = 1 - (1 + alpha) s     0 < s < 1                  are right
    r_solver   = 1 right, -1 wrong
    A = (r - mean) / (std + 1e-6) over a program's bugs, or a bug's attempts; ONE update on all

Our changes that matter (more in docs/ssr.md)
    1. A program with its tests stands for a repository; each player writes the whole program in one
       message. The paper's players are agents with a shell.
    2. The injector names the tests to hide by their numbers, and these tests are left out of the
       suite; the paper's injector edits test files, and writes the script and the parser that run
       the tests. Here the data set's tests are run as they are, so no player can change a test.
    3. The prompts are "change a line" and "remove a line"; the paper's are "remove code" and
       "revert a commit", which a lone program does not have.
    4. The paper does not say how rewards become advantages; we take the groups of GRPO.

Shapes: P programs, N bugs of each, G attempts on each bug, t tests, E edited lines of a bug.
"""

import difflib
import random
import re
from dataclasses import dataclass
from typing import Literal

from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Seconds,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/run/args.py
    model: str = "tiny-repairs"
    """the small model of bugs and repairs, a hub id or a folder"""
    dataset: str = "tiny"
    """the repository's programs, or a .jsonl file: MBPP's, or with question, test_input,
    test_output and reference, the program"""
    steps: Count = 40
    """optimiser steps (paper: 150)"""
    questions: Count = 8
    """P, programs per step and process"""
    injections: GroupSize = 4
    """N, bugs of a program"""
    group_size: GroupSize = 8
    """G, attempts on a bug (paper: 8)"""
    second_order: CountOrZero = 2
    """wrong attempts that become bugs of second order, per step and process; ablation: 0"""
    inverse_mutation: bool = True
    """ablation: without it, edited lines need not matter to the bug"""
    train: Literal["both", "injector", "solver"] = "both"
    """ablation: whose completions are trained on; both players play in any case"""
    alpha: Weight = 0.8
    """what a bug costs that is always, or never, repaired (paper: 0.8)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 3e-6, all weights)"""
    own_tests: Count = 4
    """t, the most tests of a program that are shown and run"""
    bug_tokens: Tokens = per_model(tiny=64, real=1024)
    """length limit of a bug"""
    repair_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a repair"""
    time_limit: Seconds = 1.0
    """CPU seconds of one run of a program (paper: 90 seconds for all tests)"""
    unsafe_sandbox: bool = False
    """run model-written code even where a layer of the sandbox is missing on this machine"""


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.cotrainer import Batch
from common.core.errors import UserError
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.sandbox import Sandbox
from common.tasks.answers import prompt
from common.tasks.code import given, load_tasks, parse_program, passes, run_pairs
from common.tasks.functions import bare
from common.tasks.math import count_for_steps
from common.tiny.repairs import sample_rows

import torch

# ------------------------------------------------------------------ prompts and parsing
INJECT = r"""You are given a Python program and its numbered {tests}. Put a bug into the
program: {how}, so that it still runs but fails at least one test. No edit may be without need. Then
say which tests to hide from the test suite, so that the bug is harder to notice; at least one of
them must fail. {think} the whole program with the bug, then the numbers, in exactly this form:
```python
the program
```
**Hidden tests:** {numbers}"""
HOW = [("change a line or a few", "Change a line."), ("remove a line or a few", "Remove a line.")]
REPAIR = r"""I am improving the test suite of a Python program. Below are the program, which has a
bug, and the {tests} that I am about to add. Make them pass, and break nothing else: other tests
will be run, too. Write the whole program in one block that starts with ```python and ends with
```."""

# worked examples: a program, its tests, what becomes what to make the bug, the tests to hide, and
# what the injector says
EXAMPLES = [
    (
        """def total(numbers):
    result = 0
    for number in numbers:
        if number > 0:
            result += number
    return result""",
        ["total([3, 1]) == 4", "total([2, -5, 1]) == 3", "total([-7, 8]) == 8"],
        ("        if number > 0:", "        if number > 1:"),
        [1],
        "I change `number > 0` to `number > 1`. Now the 1 is left out: tests 1 and 2 fail.",
    ),
    (
        """def initials(text):
    letters = ""
    for word in text.split():
        word = word.upper()
        letters += word[0]
    return letters""",
        ['initials("ann Lee") == "AL"', 'initials("X Y") == "XY"', 'initials("to be") == "TB"'],
        ("        word = word.upper()\n", ""),
        [1, 3],
        "I remove `word = word.upper()`. Now small letters stay small: tests 1 and 3 fail.",
    ),
]


def examples(of_injector: bool) -> list[tuple[str, str]]:
    """Returns the worked examples of a player, for programs that are functions."""
    turns = []
    for (program, tests, edit, hidden, plan), (_, ending) in zip(EXAMPLES, HOW):
        tests, broken = [f"assert {test}" for test in tests], program.replace(*edit)
        if of_injector:
            numbers = ", ".join(map(str, hidden))
            answer = f"{plan}\n```python\n{broken}\n```\n**Hidden tests:** {numbers}"
            turns.append((shown(program, tests, number=True) + ending, answer))
        else:
            tests = [tests[k - 1] for k in hidden]
            asked = shown(broken, tests, number=False) + "Repair it."
            turns.append((asked, f"```python\n{program}\n```"))
    return turns


def shown(program: str, tests: list[tuple[str, str] | str], number: bool) -> str:
    """Returns what a player sees, each test on a line of its own."""
    one_line = lambda text: text.strip().replace("\n", "\\n")  # noqa: E731
    lines = [t if isinstance(t, str) else f"{one_line(t[0])}->{one_line(t[1])}" for t in tests]
    lines = [f"{line}\n" for line in lines]
    lines = [f"{k}: {line}" for k, line in enumerate(lines, 1)] if number else lines
    return f"```python\n{program}\n```\nTests:\n{''.join(lines)}"


def inject_prompt(question: str) -> list[dict]:
    """question: program and tests as `shown`. A question always gets the same prompt of two."""
    how, ending = random.Random(question).choice(HOW)
    if "\nTests:\n1: assert " in question:
        system = INJECT.format(
            how=how,
            tests="tests",
            think="Say first what you change and what then fails. Write",
            numbers="the numbers",
        )
        return prompt(system, question + ending, examples(of_injector=True))
    system = INJECT.format(how=how, tests="tests, input->output", think="Write", numbers="1, 3")
    return prompt(system, question + ending)


def repair_prompt(bug: "Bug") -> list[dict]:
    tests = [bug.row["tests"][k - 1] for k in bug.hidden]
    user = shown(bug.program, tests, number=False) + "Repair it."
    if isinstance(tests[0], str):
        return prompt(REPAIR.format(tests="tests"), user, examples(of_injector=False))
    return prompt(REPAIR.format(tests="tests, input->output,"), user)


HELD_OUT = "it is held out"


@dataclass
class Bug:
    row: dict  # program and tests: the original
    program: str
    hidden: list[int]  # numbers of tests, from 1 on


# `1, 2 and 3`, not the 1 of `1-3`, `1 to 3` or `1 & 2`: no other number follows on the line
NAMED = r"Hidden tests\**:\**\s*([0-9]{1,3}(?:(?:\s*,|,? and)\s*[0-9]{1,3})*)"
NAMED += r"(?!(?:[^\n0-9]*|\s+)[0-9])"


def parse_bug(text: str, row: dict) -> Bug | None:
    """Returns the last program and the tests that are named after it; None if the program or the
    tests are missing, or if there is no test of a named number.

    >>> row = {"program": "print(1)", "tests": [("1", "1"), ("2", "1")]}
    >>> bug = parse_bug("```python\\nprint(2)\\n```\\n**Hidden tests:** 2, 1", row)
    >>> bug.program, bug.hidden
    ('print(2)', [1, 2])
    """
    program, (_, _, behind) = parse_program(text), text.rpartition("```")
    named = re.search(NAMED, behind)
    hidden = sorted({*map(int, re.findall("[0-9]+", named[1]))}) if named else []
    exist = all(1 <= k <= len(row["tests"]) for k in hidden)
    return Bug(row, program, hidden) if program and hidden and exist else None


# ------------------------------------------------------------------ the paper's mathematics
def reverted(before: str, after: str) -> list[str]:
    r"""Returns for each edited line the text `after` with this line alone as it was `before`. Blank
    lines and white space at the end of a line do not count as edits.

    >>> reverted("a\n\nb\nc", "a\nB\n"), reverted("a\nb", "a\nnew\nb"), reverted("a", "a ")
    (['a\nb', 'a\nB\nc'], ['a\nb'], [])
    """
    old, new = ([x.rstrip() for x in t.splitlines() if x.strip()] for t in (before, after))
    found = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind != "equal":  # old[i:i_end] became new[j:j_end]; line by line as far as both reach
            for k in range(max(i_end - i, j_end - j)):
                start, end = min(j + k, j_end), min(j + k + 1, j_end)
                found.append("\n".join(new[:start] + old[i:i_end][k : k + 1] + new[end:]))
    return found


def failed_check(passed: torch.Tensor, hidden: list[int], inverse_mutation=True) -> str | None:
    """Returns the first check that a bug fails; None if the bug is valid.

    Args:
        passed: (2 + E, t) bool, the tests that pass. Row 0 is the program without the bug, row 1 is
            the program with it, and each further row has one edited line put right.
        hidden: numbers of the hidden tests, from 1 on.
    """
    original, fails, undone = passed[0], ~passed[1], passed[2:]  # (t,), (t,), (E, t)
    if not original.all():
        return "a test fails at first"
    if not len(undone):
        return "nothing was changed"
    if not fails.any():
        return "no test fails"
    if not fails[[k - 1 for k in hidden]].any():
        return "no failing test is hidden"
    # inverse mutation: each edited line, put right alone, makes a failing test pass
    if inverse_mutation and not (undone & fails).any(1).all():
        return "a line needs no edit"
    return None


def injector_reward(s: float | None, alpha: float) -> float:
    """s: share of the attempts on a bug that are right; None for a bug that fails a check."""
    if s is None:
        return -1.0
    # r = 1 - (1 + alpha) s  where 0 < s < 1,  -alpha where s is 0 or 1
    return 1 - (1 + alpha) * s if 0 < s < 1 else -alpha


# ------------------------------------------------------------------ the trainer
class Ssr(CoTrainer):
    """`step` is the loop. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs, sandbox: Sandbox):
        super().__init__(*inputs)
        self.sandbox = sandbox
        self.never = {bare(row["program"]) for row in self.held_out}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        bug, repair, N, G = args.bug_tokens, args.repair_tokens, args.injections, args.group_size
        read = max(bug, repair)  # a bug, or a wrong repair
        return {
            "injector": Player([], args.lr, bug, N, adapter="agent"),
            "solver": Player([], args.lr, repair, G, adapter="agent", reads=read),
        }

    def step(self, rows):
        """rows: P * N, every program N times in a row."""
        injector = self.rollout("injector", rows)  # P * N bugs
        bugs = [parse_bug(text, row) for text, row in zip(injector.texts, rows)]
        failed = self.check(bugs)
        valid = [bug for bug, reason in zip(bugs, failed) if reason is None]
        solver, right, wrong = self.attempt(valid)  # G attempts on each
        rates = iter([mean(hits) for hits in chunk(right, self.cfg.group_size)])
        s = [next(rates) if reason is None else None for reason in failed]  # P * N
        # to punish held-out programs would also be to train on them
        rewards = [
            torch.nan if reason == HELD_OUT else injector_reward(rate, self.cfg.alpha)
            for rate, reason in zip(s, failed)
        ]
        self.set_rewards(injector, rewards)

        # these are wrong attempts on top of the bug, with the same tests hidden. Their repairs say
        # nothing of the injector, and their own wrong attempts go no further
        wrong, count = self.gather(wrong), self.cfg.second_order * self.accelerator.num_processes
        second = self.random_numbers().sample(wrong, min(count, len(wrong)))
        again, right_again, _ = self.attempt(self.shard(second))

        batches = [injector, solver, again]
        for batch in batches:
            if self.cfg.train not in (batch.player, "both"):
                batch.advantages = torch.zeros_like(batch.rewards)
        self.report_step(injector, valid, failed, s, right, right_again)
        return [self.concat(batches)]

    def check(self, bugs: list[Bug | None]) -> list[str | None]:
        """Returns of each bug the first check that it fails, None if the bug is valid."""
        several = []  # of each bug 2 + E programs
        for bug in bugs:
            one_undone = reverted(bug.row["program"], bug.program) if bug else []
            several.append([bug.row["program"], bug.program, *one_undone] if bug else [])
        tried = [(program, bug.row) for bug, its in zip(bugs, several) for program in its]
        passed, failed = iter(self.run_tests(tried)), ["it cannot be read"] * len(bugs)
        tried = [(bug.program, bug.row) for bug in bugs if bug]
        twice = zip(self.outputs(tried), self.outputs(tried))
        for i, (bug, its) in enumerate(zip(bugs, several)):
            if bug:
                table = torch.stack([next(passed) for _ in its])  # (2 + E, t)
                failed[i] = failed_check(table, bug.hidden, self.cfg.inverse_mutation)
                first, second = next(twice)
                if bare(bug.program) in self.never:
                    failed[i] = HELD_OUT
                elif not any(out and out.strip() for out in first):
                    failed[i] = "it does not run"  # ends and prints something for no test's input
                elif first != second:
                    failed[i] = "it is random"
        return failed

    def attempt(self, bugs: list[Bug]) -> tuple[Batch, list[bool], list[Bug]]:
        """Makes G repairs of each bug -> (batch with rewards, whether each repair is right, wrong
        repairs as bugs of the next order: programs that differ from the bug).
        """
        G = self.cfg.group_size
        prompts = [repair_prompt(bug) for bug in bugs for _ in range(G)]
        batch = self.rollout("solver", [{"prompt": p} for p in prompts])
        several = [bug for bug in bugs for _ in range(G)]
        repairs = [parse_program(text) for text in batch.texts]
        right = self.pass_all_tests([*zip(repairs, several)])
        self.set_rewards(batch, [1.0 if r else -1.0 for r in right])
        wrong = []
        for note, program, bug, r in zip(batch.notes, repairs, several, right):
            note |= {"right": r, "original": bug.row["program"]}
            if not r and program not in (None, bug.program) and bare(program) not in self.never:
                wrong.append(Bug(bug.row, program, bug.hidden))
        return batch, right, wrong

    def pass_all_tests(self, attempts: list[tuple[str | None, Bug]]) -> list[bool]:
        """Returns whether each program passes all tests of the original, hidden or not. The tests
        are those of the data set; what a player wrote about tests does not matter.
        """
        passed = self.run_tests([(program, bug.row) for program, bug in attempts])
        return [bool(tests.all()) for tests in passed]

    def run_tests(self, tried: list[tuple[str | None, dict]]) -> list[torch.Tensor]:
        """(t,) bool for each (program, row): which of the row's tests it passes."""
        return [
            torch.tensor([passes(*both) for both in zip(outputs, row["tests"])])
            for outputs, (_, row) in zip(self.outputs(tried), tried)
        ]

    def outputs(self, tried: list[tuple[str | None, dict]]) -> list[list[bytes | str | None]]:
        """Returns for each (program, row) what it prints or returns for each of the row's tests;
        None if it fails or cannot be read. What occurs twice is run once.
        """
        runs = dict.fromkeys((p, given(test)) for p, row in tried if p for test in row["tests"])
        out = dict(zip(runs, run_pairs(self.sandbox, [*runs], self.cfg.time_limit)))
        return [[out.get((p, given(test))) for test in row["tests"]] for p, row in tried]

    # --- what is logged and shown; no method below affects training
    def report_step(self, injector, valid, failed, s, right, right_again):
        rates = [rate for rate in s if rate is not None]
        lines = [len(reverted(bug.row["program"], bug.program)) for bug in valid]
        self.log_mean("injector/valid", [reason is None for reason in failed])
        self.log_mean("injector/solve_rate", rates)
        self.log_mean("injector/too_easy", [rate == 1 for rate in rates])
        self.log_mean("injector/too_hard", [rate == 0 for rate in rates])
        self.log_mean("injector/edited_lines", lines)
        self.log_mean("injector/different", len({bug.program for bug in valid}) / len(s))
        self.log_mean("solver/accuracy", right)
        self.log_mean("solver/second_order", right_again)
        for note, reason, rate in zip(injector.notes, failed, s):
            note |= {"failed_check": reason} if reason else {"solve_rate": rate}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Ssr, held_out: list[dict]) -> dict[str, float]:
    """Measures the solver on bugs that nobody chose, the same in every evaluation: each is a
    held-out program without one of its lines. Measures the injector on held-out programs.
    """
    bugs, n = removals(trainer, held_out), trainer.cfg.eval_samples
    result = {}
    # without a bug there is no share of repairs
    for name, samples, greedy in [("accuracy", n, False), ("greedy", 1, True)] if bugs else []:
        several = [bug for bug in bugs for _ in range(samples)]
        texts = trainer.generate_all("solver", [repair_prompt(b) for b in several], greedy)
        attempts = [(parse_program(text), bug) for text, bug in zip(texts, several)]
        result[f"solver/{name}"] = mean(trainer.in_parallel(trainer.pass_all_tests, attempts))
    texts = trainer.generate_all("injector", [inject_prompt(row["question"]) for row in held_out])
    written = [parse_bug(text, row) for text, row in zip(texts, held_out)]
    failed = trainer.in_parallel(trainer.check, written)
    return result | {"injector/valid": mean([reason is None for reason in failed])}


def removals(trainer: Ssr, held_out: list[dict]) -> list[Bug]:
    """Returns each program without an inner line, drawn once, if a test then fails; the solver sees
    three tests.
    """
    bugs = []
    for row in held_out:
        lines = row["program"].splitlines()
        k = random.Random(row["question"]).randrange(1, max(2, len(lines) - 1))
        shorter, hidden = "\n".join(lines[:k] + lines[k + 1 :]), [1, 2, 3][: len(row["tests"])]
        bugs.append(Bug(row, shorter, hidden))
    runs = [(program, bug) for bug in bugs for program in (bug.row["program"], bug.program)]
    fine = chunk(trainer.in_parallel(trainer.pass_all_tests, runs), 2)
    return [bug for bug, (before, after) in zip(bugs, fine) if before and not after]


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/accuracy", "solver/second_order"],
    "injector": ["injector/valid", "injector/solve_rate", "injector/too_easy", "injector/too_hard"],
    "bugs": ["injector/edited_lines", "injector/different"],
}


def load(args: Args):
    """Rows {question: program and tests as the injector sees them, program, tests}."""
    wanted, held_out = count_for_steps(args), args.eval_questions
    if args.dataset == "tiny":
        parts = sample_rows(args.seed + 1, wanted, False), sample_rows(0, held_out, True)
    else:
        parts = load_tasks(args.dataset, wanted, held_out, args.seed, args.held_out)
    train, held_out = ([row for row in part if row["reference"]] for part in parts)
    if not train or not held_out:
        raise UserError(f"--dataset {args.dataset}: no task has a reference, the program to break.")
    for row in train + held_out:
        tests = row["tests"][: args.own_tests]
        row |= {"program": row.pop("reference").strip(), "tests": tests}
        row["question"] = shown(row["program"], tests, number=True)
    return train, held_out


def main(args: Args):
    with Sandbox(unsafe=args.unsafe_sandbox) as sandbox:
        more = {"prompt": inject_prompt, "group_size": args.injections, "sandbox": sandbox}
        launch(Ssr, args, load=load, evaluate=evaluate, curves=CURVES, **more)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
