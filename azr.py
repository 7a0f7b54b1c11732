r"""AZR, Absolute Zero: one model sets itself programming puzzles and solves them (Zhao et al. 2025,
arXiv:2505.03335); and a study of what keeps that from collapse (arXiv:2605.22217).

    python azr.py                                         the embedded model on a CPU, 5 minutes
    python azr.py --gate off --solver-pay vote            what execution is worth
    python azr.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --dataset mbpp.jsonl    one GPU, 4-bit

The loop (algorithm 1).  A buffer of tasks for each of three kinds, all about a program f:
    deduction  program, input -> output;  abduction  program, output -> input;
    induction  examples and a message -> program

    PROPOSER  writes a program and an input for deduction or abduction, or for a known program some
              inputs and a message; what runs, twice alike, joins its kind's buffer
              r = 1 - rate of n answers that are right, if 0 < rate < 1;  -0.5 if not     eq. 4, 6
              r = -1 if it is not valid
    SOLVER    answers tasks of the buffers, the newest ones first
              r = 1 right, -0.5 wrong, -1 no answer                                       eq. 5, 6

    A = (r - mean) / std within each kind and role, six of them; ONE update on all      eq. 8
    with the loss in common/cotrainer.py, `CoTrainer.loss`.

Python runs every program, in common/sandbox, and knows every answer; no human wrote a task. The
study takes that away piece by piece: --gate says who checks a task before it joins the buffer,
--proposer-pay and --solver-pay who knows the answers. A run that is paid by itself cannot see that
it goes wrong; co/paid_minus_true says how far from the truth it is.

What we changed and it matters (the full list is in docs/azr.md)
    1. The one model is one LoRA adapter; in the paper all weights. No entropy bonus.
    2. Advantages are whitened over rows; in the released code over tokens, so that long texts weigh
       more in the mean.
    3. Inputs and results travel as literals and are compared by value; the released code evaluates
       what the solver wrote, and takes results that it has cut at 400 characters for right ones.
    4. A full buffer drops its oldest task; the released code drops the new ones, silently.
    5. Answers for the rate are sampled at temperature 1; in the newer branch of the released code
       they are probably greedy, so that all n are alike and a rate is 0 or 1.
    6. The first tasks are made of a data set's programs; the paper grows them from one program.

Shapes: N rows of each kind and role, B = 6 * N rows of a step, n answers for a rate.
"""

import ast
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

from common.advantage import whiten
from common.args import (
    Bounds,
    Count,
    CountOrZero,
    RunArgs,
    Seconds,
    Several,
    Share,
    Tokens,
    Weight,
    per_model,
)
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.sandbox import Sandbox
from common.tasks.answers import grouped, prompt
from common.tasks.functions import call_all, load_functions, read_arguments, read_value, same_value

import torch
import tyro
from accelerate.utils import broadcast_object_list


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/args.py
    model: str = "tiny-programs"
    """the embedded model of programs, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded functions; or a .jsonl file or hub data set with program and inputs, or MBPP's
    columns"""
    steps: Count = 32
    """optimiser steps, each on both roles and all kinds (paper: 500)"""
    questions: Count = 16
    """N, rows of each kind and role per step and process (paper: 64)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    kinds: Literal["all", "deduction", "no-induction"] = "all"
    """ablation: the kinds of tasks"""
    train_proposer: bool = True
    """ablation: the solver only; the proposer still plays"""
    references: CountOrZero = per_model(tiny=2, real=6)
    """programs that a proposer is shown, to write another one (paper: 6); ablation: 0"""
    difficulty_samples: Several = per_model(tiny=4, real=8)
    """n, answers that a task's rate is measured with (paper: 8)"""
    paper_extremes: bool = False
    """pay the proposer 0 at the rates 0 and 1, as eq. 4 says, and not -0.5 as the released code"""
    inputs: Annotated[int, Bounds(2, 100)] = per_model(tiny=6, real=10)
    """inputs of an induction task, half of them hidden from the solver (paper: 10)"""
    gate: Literal["execution", "syntax", "off", "leak"] = "execution"
    """what joins a buffer: what runs, what Python can parse, what has its parts, or what runs and
    now and then (--leak) what does not"""
    leak: Share = 0.2
    """with --gate leak, the chance of a proposal that does not run"""
    proposer_pay: Literal["grounded", "own", "vote", "rzero"] = "grounded"
    """what the rate is measured against: execution, an answer of the model itself, or its majority;
    rzero: the same, with R-Zero's reward for rates near one half"""
    solver_pay: Literal["grounded", "vote"] = "grounded"
    """what the solver is paid for: being right, or agreeing with n other answers"""
    seed_tasks: Count = 64
    """tasks of each kind at the start (paper: 256)"""
    pool_size: Count = 16_384
    """most tasks of a kind (released code: 16,384)"""
    proposal_tokens: Tokens = per_model(tiny=96, real=1024)
    """length limit of a proposal (paper: 8096)"""
    answer_tokens: Tokens = per_model(tiny=96, real=1024)
    """length limit of an answer (paper: 8096)"""
    time_limit: Seconds = 1.0
    """CPU seconds of one run of a program (released code: 10, by the clock)"""
    unsafe_sandbox: bool = False
    """run model-written code even where a layer of the sandbox is missing on this machine"""

    def check(self):
        if self.seed_tasks > self.pool_size:
            seeds = f"--seed-tasks {self.seed_tasks}"
            raise UserError(f"{seeds} must be at most --pool-size {self.pool_size}.")
        if self.questions < 2:
            raise UserError("--questions 1: advantages compare two rows of a kind and role.")


KINDS = ("deduction", "abduction", "induction")
# Modules that a program may not import: what they give is not a function of the input
BANNED = set(
    "bcrypt calendar datetime hashlib hmac logging multiprocessing os pebble random subprocess sys "
    "threading time".split()
)

# ------------------------------------------------------------------ prompts and parsing
FORM = "Think first, then write your answer between <answer> and </answer>."
FUNCTION = f"""The program is deterministic, uses no randomness, time, files or printing, and
defines a function f. It may not import {", ".join(sorted(BANNED))}."""

SOLVE = {
    "deduction": f"""You are given a Python program and an input. Work out what f returns for it.
{FORM} In it stands nothing but the value, as a Python literal in a block that starts with ```output
and ends with ```.""",
    "abduction": f"""You are given a Python program and an output. Find an input for which f returns
it; any one will do. {FORM} In it stand nothing but the arguments of f, as Python literals separated
by commas, in a block that starts with ```input and ends with ```.""",
    "induction": f"""You are given inputs of a program, what f returns for each, and a message about
it. Write the program; it will be tried on other inputs. {FORM} In it stands nothing but the
program, in a block that starts with ```python and ends with ```.""",
}
PROPOSE = {
    "deduction": f"""Write a new Python program and one input for it, such that it takes several
steps of thought to tell what f returns. {FUNCTION} Be different from the programs shown. {FORM} In
it stand the program in a block that starts with ```python and ends with ```, then the arguments of
f, as Python literals, in a block that starts with ```input and ends with ```.""",
    "abduction": f"""Write a new Python program and one input for it, such that it takes several
steps of thought to find the input, given what f returns. {FUNCTION} Be different from the programs
shown. {FORM} In it stand the program in a block that starts with ```python and ends with ```, then
the arguments of f, as Python literals, in a block that starts with ```input and ends with ```.""",
    "induction": f"""You are given a Python program. Write {{inputs}} different inputs for it, and a
message that helps to find the program from some of the inputs and what f returns for them, without
giving it away. {FORM} In it stand the inputs, each in a block that starts with ```input and ends
with ```, then the message in a block that starts with ```message and ends with ```.""",
}


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def solve_prompt(task: dict) -> list[dict]:
    """What the solver sees of a task: never its answer, of an induction task half of the inputs."""
    if task["kind"] == "deduction":
        user = f"{fenced(task['program'])}\nInput: {task['inputs'][0]}\nWhat is the output?"
    elif task["kind"] == "abduction":
        user = f"{fenced(task['program'])}\nOutput: {task['outputs'][0]}\nWhat is the input?"
    else:
        pairs = list(zip(task["inputs"], task["outputs"]))[: shown(task)]
        examples = "".join(f"{given}->{returned}\n" for given, returned in pairs)
        user = f"Examples:\n{examples}Message: {task['message']}\nWrite the program."
    return prompt(SOLVE[task["kind"]], user)


def propose_prompt(kind: str, references: list[dict], inputs: int) -> list[dict]:
    """references: tasks whose programs are shown; for induction one, whose program is meant."""
    if kind == "induction":
        user = f"{fenced(references[0]['program'])}\nPropose inputs and a message."
    else:
        parts = [f"{fenced(t['program'])}\n```input\n{t['inputs'][0]}\n```\n" for t in references]
        user = f"{''.join(parts)}Propose a program and its input."
    return prompt(PROPOSE[kind].format(inputs=inputs), user)


def shown(task: dict) -> int:
    """How many of an induction task's inputs the solver sees: half, but at least one is hidden."""
    return min((len(task["inputs"]) + 1) // 2, len(task["inputs"]) - 1)


def blocks(text: str, kind: str) -> list[str]:
    """What stands in the ```kind blocks of the last <answer>, in order; [] without an answer."""
    answers = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    inside = answers[-1] if answers else ""
    return [found.strip() for found in re.findall(rf"```{kind}\n(.*?)```", inside, re.DOTALL)]


def parse_answer(kind: str, text: str) -> str | None:
    """A solver's output, input or program; None if there is none, or it is no literal."""
    block = {"deduction": "output", "abduction": "input", "induction": "python"}[kind]
    found = blocks(text, block)
    if not found:
        return None
    try:
        if kind == "deduction":
            return repr(read_value(found[0]))
        if kind == "abduction":
            return ", ".join(map(repr, read_arguments(found[0])))
    except ValueError:
        return None
    return found[0] if is_program(found[0], banned=set()) else None  # no rule for solvers


def parse_proposal(kind: str, text: str, reference: dict | None, count: int) -> dict | None:
    """A task without outputs; None if a part is missing. Nothing is checked but the form.

    reference: the task of whose program an induction task is made; count: its inputs.
    """
    inputs = blocks(text, "input")
    if kind == "induction":
        message = blocks(text, "message")
        if len(inputs) < count or not message or not message[0].strip():
            return None
        return {
            "kind": kind,
            "program": reference["program"],
            "inputs": inputs[-count:],
            "message": message[0],
        }
    program = blocks(text, "python")
    if not program or not inputs:
        return None
    return {"kind": kind, "program": program[0], "inputs": inputs[:1], "message": ""}


def is_program(text: str, banned: set = BANNED) -> bool:
    """Whether Python can parse it, it defines f at its top level, and imports nothing banned."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    return "f" in names and not imported & banned


def bare(program: str) -> str:
    """A program without comments and needless spaces; what Python cannot parse stays as it is."""
    try:
        return ast.unparse(ast.parse(program))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def is_well_formed(task: dict) -> bool:
    """Whether Python can parse its program and its inputs; nothing is run."""
    try:
        return is_program(task["program"]) and all(map(read_arguments, task["inputs"]))
    except ValueError:
        return False


# ------------------------------------------------------------------ rewards
def proposer_reward(valid: bool, well_formed: bool, rate: float, extremes: float = -0.5) -> float:
    """Eq. 4 and 6: 1 - rate inside of (0, 1), `extremes` at 0 and 1, -1 if it is no task.

    The paper prints 0 for the extremes, the released code pays -0.5.
    """
    if not (valid and well_formed):
        return -1.0
    return 1 - rate if 0 < rate < 1 else extremes


def rzero_reward(valid: bool, rate: float, repetition: float) -> float:
    """R-Zero's challenger: max(0, 1 - 2 |rate - 1/2| - repetition), 0 if it is no task.

    rate: share of the majority among the answers; repetition: share of this process's proposals of
    the step that are the same program. R-Zero finds repetitions by BLEU, over natural language; its
    released code pays min(rate, 1 - rate), half of this.
    """
    return max(0.0, 1 - 2 * abs(rate - 0.5) - repetition) if valid else 0.0


def solver_reward(well_formed: bool, correct: float) -> float:
    """Eq. 5 and 6: 1 right, -0.5 wrong, -1 without an answer that can be read.

    correct: in [0, 1]; between them is the share of answers that agree, with --solver-pay vote.
    """
    return -0.5 + 1.5 * correct if well_formed else -1.0


def majority(answers: list[str | None]) -> tuple[str | None, float]:
    """(the most frequent answer, its share of all); what cannot be read agrees with nothing."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return None, 0.0
    answer, count = counts.most_common(1)[0]
    return answer, count / len(answers)


# ------------------------------------------------------------------ the paper's mathematics
def task_role_advantages(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Eq. 8: A = (r - mean) / std within each kind and role; 0 where all of a group are equal.

    Args:
        rewards: (B,)
        group: (B,) in 0 .. 5, 3 * role + kind.

    Returns:
        (B,)
    """
    A = torch.zeros_like(rewards)
    for g in group.unique():
        A += whiten(rewards, group == g)  # 0 in all other groups
    return A


# ------------------------------------------------------------------ the trainer
class Azr(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates.

    The buffers are in `saved`, the same on all processes: kind -> tasks, oldest first, and how
    many of them joined in the last step. A task is {kind, program, inputs, outputs, message, runs};
    one whose program does not run has the outputs that the model itself expects.
    """

    def __init__(self, *inputs, sandbox: Sandbox):
        super().__init__(*inputs)
        self.sandbox, self.kinds = sandbox, kinds_of(self.cfg)
        found = [seed_tasks(rows, sandbox, self.cfg) for rows in (self.train_rows, self.held_out)]
        # a program near the time limit may run in one process and not in another
        seeds, held_out = broadcast_object_list(found)
        # what may not join a buffer, whatever its comments or spaces
        self.never = {bare(task["program"]) for tasks in held_out.values() for task in tasks}
        for kind, tasks in seeds.items():
            seeds[kind] = [task for task in tasks if bare(task["program"]) not in self.never]
        if not all(seeds[kind] and held_out[kind] for kind in self.kinds):
            raise UserError(
                f"--dataset {self.cfg.dataset}: no program of its training or held-out part makes "
                f"a task of every kind; they must define f, run, and have two inputs."
            )
        # as many questions as asked for, equally many of each kind
        self.held_out = [t for kind in self.kinds for t in held_out[kind][:: len(self.kinds)]]
        self.saved = {"buffers": seeds, "new": dict.fromkeys(self.kinds, 0)}

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        """Without reward functions: `step` rewards them when the programs have been run."""
        shared = {"group_size": 1, "adapter": "agent"}
        proposal, reads = args.proposal_tokens, args.references * args.proposal_tokens
        return {
            "proposer": Player([], args.lr, proposal, reads=reads, **shared),
            "solver": Player([], args.lr, args.answer_tokens, reads=proposal, **shared),
        }

    def step(self, rows):
        """The loader's rows are not used. Tasks and references come from the buffers as the last
        step left them, as in the released code.
        """
        references, tasks = self.draw()
        proposals = self.propose(references)
        solutions = self.solve(tasks)
        batch = self.concat([proposals, solutions])
        of = [KINDS.index(kind) for kind, _ in references]
        of += [3 + KINDS.index(task["kind"]) for task in tasks]
        group = torch.tensor(of).to(batch["rewards"])  # (B,): role and kind of each row
        # A = (r - mean) / std within each kind and role, over the rows of all processes
        A = self.over_all_processes(task_role_advantages, batch["rewards"], group)  # (B,)
        if not self.cfg.train_proposer:
            A = A * (group >= 3)
        batch["advantages"] = A
        return [batch]

    def draw(self) -> tuple[list, list]:
        """(kind, references) of 3 N proposals, and 3 N tasks to solve: the ones that joined in the
        last step, and others at random.
        """
        cfg, buffers = self.cfg, self.saved["buffers"]
        rng = random.Random(f"{cfg.seed} {self.state.global_step}")
        count = cfg.questions * self.accelerator.num_processes  # everyone's; each takes its share
        references, tasks = [], []
        for kind in self.kinds:
            if kind == "induction":  # a program to write inputs for
                known = [task for k in KINDS[:2] for task in buffers[k]]
                references += [(kind, [rng.choice(known)]) for _ in range(count)]
            else:
                some = min(cfg.references, len(buffers[kind]))
                references += [(kind, rng.sample(buffers[kind], some)) for _ in range(count)]
            newest = buffers[kind][len(buffers[kind]) - self.saved["new"][kind] :][-count:]
            tasks += newest + rng.choices(buffers[kind], k=count - len(newest))
        return self.my_share(references), self.my_share(tasks)

    def propose(self, references: list[tuple]) -> dict:
        cfg, n = self.cfg, self.cfg.difficulty_samples
        asked = [propose_prompt(kind, shown, cfg.inputs) for kind, shown in references]
        batch = self.rollout("proposer", [{"prompt": prompt} for prompt in asked])
        tasks = [
            parse_proposal(kind, text, shown[0] if shown else None, cfg.inputs)
            for (kind, shown), text in zip(references, batch["texts"])
        ]
        valid = self.check(tasks)  # of those that join their buffer: row -> task
        # rate = share of n answers of the solver that are right
        texts = self.generate("solver", [solve_prompt(t) for t in valid.values() for _ in range(n)])
        tried = [task for task in valid.values() for _ in range(n)]
        rate = dict(zip(valid, map(mean, grouped(self.rates(tried, texts, n), n))))
        rewards = torch.zeros(len(tasks))
        # of induction's proposals, whose program is given, the message counts
        written = [task and (task["program"], task["message"]) for task in tasks]
        copies = Counter(written)
        for i, task in enumerate(tasks):
            if cfg.proposer_pay == "rzero":
                repetition = copies[written[i]] / len(tasks)
                rewards[i] = rzero_reward(i in valid, rate.get(i, 0.0), repetition)
            else:
                extremes = 0.0 if cfg.paper_extremes else -0.5
                formed = task is not None
                rewards[i] = proposer_reward(i in valid, formed, rate.get(i, 0.0), extremes)
        self.set_rewards(batch, rewards)
        self.join(list(valid.values()))
        self.report_proposals(batch, references, tasks, valid, rate)
        return batch

    def check(self, tasks: list[dict | None]) -> dict[int, dict]:
        """The gate: row -> task with its outputs, of the tasks that join their buffer.

        A task runs if f returns a literal for all its inputs, and the same one a second time.
        """
        cfg, joins = self.cfg, {}
        calls = [(t["program"], given) for t in tasks if t for given in t["inputs"]]
        first, second = (iter(self.run(calls)) for _ in range(2))
        for i, task in enumerate(tasks):
            if task is None:
                continue
            outputs = [next(first) for _ in task["inputs"]]
            again = [next(second) for _ in task["inputs"]]
            well_formed = is_well_formed(task)
            runs = well_formed and None not in outputs and outputs == again
            draw = random.Random(f"{cfg.seed} {self.state.global_step} {i} {task}").random()
            if (
                runs
                or cfg.gate == "off"
                or (cfg.gate == "syntax" and well_formed)
                or (cfg.gate == "leak" and draw < cfg.leak)
            ):
                joins[i] = {**task, "outputs": outputs, "runs": runs}
        # what execution does not say, or is not asked for, the model itself says
        unknown = [t for t in joins.values() if not t["runs"] or cfg.proposer_pay == "own"]
        asked = [{**t, "kind": "deduction", "inputs": [x]} for t in unknown for x in t["inputs"]]
        said = iter(self.generate("solver", [solve_prompt(task) for task in asked]))
        for task in unknown:
            task["own"] = [parse_answer("deduction", next(said)) or "" for _ in task["inputs"]]
            task["outputs"] = task["outputs"] if task["runs"] else task["own"]
        return joins

    def rates(self, tasks: list[dict], texts: list[str], n: int) -> list[float]:
        """How right each of n answers per task is, by --proposer-pay."""
        if self.cfg.proposer_pay in ("vote", "rzero"):
            answers = [parse_answer(task["kind"], text) for task, text in zip(tasks, texts)]
            return [majority(some)[1] for some in grouped(answers, n) for _ in some]
        if self.cfg.proposer_pay == "own":
            tasks = [{**task, "outputs": task["own"]} for task in tasks]
        return [float(hit) for hit in self.right(tasks, texts)]

    def solve(self, tasks: list[dict]) -> dict:
        n, prompts = self.cfg.difficulty_samples, [solve_prompt(task) for task in tasks]
        batch = self.rollout("solver", [{"prompt": prompt} for prompt in prompts])
        answers = [parse_answer(task["kind"], t) for task, t in zip(tasks, batch["texts"])]
        right = self.right(tasks, batch["texts"])
        paid = [float(hit) for hit in right]
        if self.cfg.solver_pay == "vote":  # share of n other answers that say the same
            others = self.generate("solver", [prompt for prompt in prompts for _ in range(n)])
            kinds = [task["kind"] for task in tasks for _ in range(n)]
            said = grouped([parse_answer(kind, text) for kind, text in zip(kinds, others)], n)
            paid = [
                mean([answer is not None and other == answer for other in some])
                for answer, some in zip(answers, said)
            ]
        rewards = [solver_reward(answer is not None, p) for answer, p in zip(answers, paid)]
        self.set_rewards(batch, rewards)
        self.report_solutions(batch, tasks, answers, right, paid)
        return batch

    def right(self, tasks: list[dict], texts: list[str]) -> list[bool]:
        """Whether each text answers its task, by the task's outputs: an equal value, an input for
        which f returns an equal value, or a program that does so for all hidden inputs.
        """
        answers = [parse_answer(task["kind"], text) for task, text in zip(tasks, texts)]
        calls, wanted = [], []
        for task, answer in zip(tasks, answers):
            wanted.append([])
            if answer is not None and task["kind"] == "abduction":
                calls.append((task["program"], answer))
                wanted[-1] = task["outputs"][:1]
            elif answer is not None and task["kind"] == "induction":
                calls += [(answer, given) for given in task["inputs"][shown(task) :]]
                wanted[-1] = task["outputs"][shown(task) :]
        outputs, right = iter(self.run(calls)), []
        for task, answer, values in zip(tasks, answers, wanted):
            if task["kind"] == "deduction":
                right.append(answer is not None and same_value(answer, task["outputs"][0]))
            else:  # all of them are taken from `outputs`, right or not
                found = [same_value(next(outputs) or "", value) for value in values]
                right.append(bool(found) and all(found))
        return right

    def run(self, calls: list[tuple]) -> list[str | None]:
        """What f returns; a call that occurs several times is run once."""
        different = list(dict.fromkeys(calls))
        found = dict(zip(different, call_all(self.sandbox, different, self.cfg.time_limit)))
        return [found[call] for call in calls]

    def join(self, tasks: list[dict]):
        """Add everyone's tasks to the buffers, but for held-out programs; a full buffer drops its
        oldest.
        """
        fresh = [task for task in tasks if bare(task["program"]) not in self.never]
        tasks = self.gather([{k: v for k, v in task.items() if k != "own"} for task in fresh])
        for kind in self.kinds:
            buffer, new = self.saved["buffers"][kind], [t for t in tasks if t["kind"] == kind]
            buffer += new
            del buffer[: max(0, len(buffer) - self.cfg.pool_size)]
            self.saved["new"][kind] = min(len(new), len(buffer))

    # --- what is logged and shown; nothing below affects training
    def report_proposals(self, batch, references, tasks, valid, rate):
        runs = [i in valid and valid[i]["runs"] for i in range(len(tasks))]
        self.log_mean("proposer/valid", runs)
        self.log_mean("proposer/joined", [i in valid for i in range(len(tasks))])
        self.log_mean("proposer/rate", list(rate.values()))
        self.log_mean("proposer/too_easy", [r == 1 for r in rate.values()])
        self.log_mean("proposer/too_hard", [r == 0 for r in rate.values()])
        everything = [task for kind in self.kinds for task in self.saved["buffers"][kind]]
        self.log_mean("co/tasks", len(everything))
        self.log_mean("co/tasks_that_run", [task["runs"] for task in everything])
        for i, note in enumerate(batch["notes"]):
            note["kind"] = references[i][0]
            note["runs"], note["rate"] = runs[i], rate.get(i)
            if i in valid:
                note["outputs"] = valid[i]["outputs"]

    def report_solutions(self, batch, tasks, answers, right, paid):
        truly = [hit and task["runs"] for hit, task in zip(right, tasks)]
        for kind in self.kinds:
            hits = [hit for hit, task in zip(truly, tasks) if task["kind"] == kind]
            self.log_mean(f"solver/{kind}", hits)
        self.log_mean("solver/accuracy", truly)
        self.log_mean("solver/parsed", [answer is not None for answer in answers])
        self.log_mean("co/paid_minus_true", mean(paid) - mean(truly))
        for note, task, answer, hit in zip(batch["notes"], tasks, answers, truly):
            note |= {"kind": task["kind"], "answer": answer, "right": hit}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Azr, held_out: list[dict]) -> dict[str, float]:
    """The solver on held-out tasks, each kind sampled and greedily; the proposer by what its
    proposals are worth to Python, and how many are new programs.
    """
    n, result = trainer.cfg.eval_samples, {}
    right = lambda share: trainer.right([t for t, _ in share], [x for _, x in share])  # noqa: E731
    for suffix, samples, greedy in (("", n, False), ("_greedy", 1, True)):
        several = [task for task in held_out for _ in range(samples)]
        texts = trainer.generate_all("solver", [solve_prompt(task) for task in several], greedy)
        hits = trainer.in_parallel(right, list(zip(several, texts)))
        result[f"solver/accuracy{suffix}"] = mean(hits)
        for kind in trainer.kinds:
            of_kind = [hit for hit, task in zip(hits, several) if task["kind"] == kind]
            result[f"solver/{kind}{suffix}"] = mean(of_kind)
    # proposals about held-out programs, so that they are the same prompts all along
    rng, kinds = random.Random(0), [kind for kind in trainer.kinds for _ in held_out[::6]]
    references = [(kind, rng.sample(held_out, 1)) for kind in kinds]
    asked = [propose_prompt(kind, some, trainer.cfg.inputs) for kind, some in references]
    texts = trainer.generate_all("proposer", asked)
    tasks = [
        parse_proposal(kind, text, some[0], trainer.cfg.inputs)
        for (kind, some), text in zip(references, texts)
    ]
    calls = [[(t["program"], x) for x in t["inputs"]] if t else [] for t in tasks]
    runs = trainer.in_parallel(lambda share: [None not in trainer.run(c) for c in share], calls)
    fine = [t is not None and is_well_formed(t) and ran for t, ran in zip(tasks, runs)]
    result["proposer/valid"] = mean(fine)
    buffers = [trainer.saved["buffers"][kind] for kind in trainer.kinds]
    known = {task["program"] for some in (held_out, *buffers) for task in some}
    written = [task["program"] for task in tasks if task and task["kind"] != "induction"]
    result["proposer/new"] = mean([program not in known for program in written])
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "solver": ["solver/accuracy", *[f"solver/{kind}" for kind in KINDS]],
    "proposer": ["proposer/valid", "proposer/rate", "proposer/too_easy", "proposer/too_hard"],
    "against the truth": ["co/paid_minus_true", "co/tasks_that_run"],
}


def kinds_of(args: Args) -> tuple[str, ...]:
    return {"all": KINDS, "deduction": KINDS[:1], "no-induction": KINDS[:2]}[args.kinds]


def seed_tasks(rows: list[dict], sandbox: Sandbox, args: Args) -> dict[str, list]:
    """Kind -> tasks made of a data set's programs. A program that does not run, twice alike, or
    imports what is banned makes none; one with too few inputs makes no induction task.
    """
    calls = [(row["program"], given) for row in rows for given in row["inputs"]]
    found, again = (iter(call_all(sandbox, calls, args.time_limit)) for _ in range(2))
    tasks = {kind: [] for kind in KINDS}
    for row in rows:
        outputs, second = ([next(some) for _ in row["inputs"]] for some in (found, again))
        task = {"program": row["program"], "message": row["message"], "runs": True}
        if None in outputs or outputs != second or not is_program(row["program"]):
            continue
        for kind in KINDS:
            count = args.inputs if kind == "induction" else 1
            if len(outputs) >= min(2, count):
                inputs = {"inputs": row["inputs"][:count], "outputs": outputs[:count]}
                tasks[kind].append({"kind": kind, **task, **inputs})
    return tasks


def load(args: Args):
    return load_functions(
        args.dataset, args.seed_tasks, args.eval_questions, args.inputs, args.seed
    )


def main(args: Args):
    with Sandbox(unsafe=args.unsafe_sandbox) as sandbox:
        launch(Azr, args, load, evaluate, CURVES, sandbox=sandbox)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
