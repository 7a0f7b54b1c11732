r"""AZR, Absolute Zero: one model writes programming tasks for itself and solves them (Zhao et al.
2025, arXiv:2505.03335).

    python azr.py                                         the small model on a CPU, 2 minutes
    python azr.py --gate off --solver-reward vote         what execution is worth
    python azr.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --dataset mbpp.jsonl    one GPU

The loop (algorithm 1).  There are three kinds of tasks about a program f, with a buffer for each:
    deduction  program, input -> output;  abduction  program, output -> input;
    induction  examples and a message -> program

    PROPOSER   writes a program and an input; for induction it writes inputs     `propose`
               and a message for a known program. A task that runs twice with
               equal results joins its kind's buffer                             `admitted`
               rate = share of n answers to the task that are right
               r = 1 - rate if 0 < rate < 1;  -0.5 if the rate is 0 or 1
               (released code; eq. 4 has 0);  -1 if the task did not join        eq. 4, 6
    SOLVER     answers tasks of the buffers, the newest tasks first              `solve`
               r = 1 right,  -0.5 wrong,  -1 without an answer                   eq. 5, 6
    A = (r - mean) / std within each kind and role;  ONE update on all groups    eq. 8

Python runs every program, in common/sandbox, and knows every answer: it decides which tasks join
and which answers are right. --gate, --proposer-reward and --solver-reward can take these decisions
away from Python. A run that rewards itself cannot detect its own failure, so the script logs
co/rewarded_minus_true.

Our changes that matter (more in docs/azr.md)
    1. One LoRA adapter plays both roles (paper: all weights). No entropy bonus.
    2. Advantages are whitened over rows. The released code whitens them over tokens.
    3. Inputs and results are literals, and are compared by value. The released code evaluates what
       the solver wrote, and cuts results at 400 characters.
    4. A full buffer drops its oldest task; the released code silently drops new tasks.
    5. The first tasks are made of a data set's programs; the paper grows them from one program.

Shapes: N rows of each kind and role, B = 6 * N rows of a step, n answers for a rate.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Seconds,
    Share,
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
    """our own functions; or a .jsonl file or hub data set with program and inputs, or MBPP"""
    steps: Count = 32
    """optimiser steps, each on both roles and all kinds (paper: 500)"""
    questions: GroupSize = 16
    """N, rows of each kind and role per step and process (paper: 64)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    kinds: Literal["all", "deduction", "no-induction"] = "all"
    """ablation: the kinds of tasks"""
    train_proposer: bool = True
    """ablation: train the solver only; the proposer still plays"""
    references: CountOrZero = per_model(tiny=2, real=6)
    """programs that a proposer is shown before it writes its own (paper: 6; ablation: 0)"""
    difficulty_samples: Count = per_model(tiny=4, real=8)
    """n, answers that a task's rate is measured with (paper: 8)"""
    paper_extremes: bool = False
    """the rates 0 and 1 earn 0, as in eq. 4, and not -0.5 as in the released code"""
    inputs: GroupSize = per_model(tiny=6, real=10)
    """inputs of an induction task, half of them hidden from the solver (paper: 10)"""
    gate: Literal["execution", "syntax", "off", "leak"] = "execution"
    """which tasks join: those that run; that Python can parse; all; that run, and --leak others"""
    leak: Share = 0.2
    """with --gate leak: the share of tasks that do not run and join all the same"""
    proposer_reward: Literal["grounded", "rzero"] = "grounded"
    """by the rate of right answers; or R-Zero's, by the share of the most frequent answer"""
    solver_reward: Literal["grounded", "vote"] = "grounded"
    """for being right; or for the share of n other answers that agree"""
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


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import whiten
from common.core.cotrainer import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.sandbox import Sandbox
from common.tasks import functions
from common.tasks.answers import prompt
from common.tasks.functions import (
    bare,
    call_each,
    is_program,
    read_arguments,
    read_value,
    same_value,
    with_f,
)

import torch
from accelerate.utils import broadcast_object_list

KINDS = ("deduction", "abduction", "induction")
"""A task is {kind, program, inputs, outputs, message}."""
BLOCK = {"deduction": "output", "abduction": "input", "induction": "python"}
"""kind -> the block that its answer is in"""
ABLATIONS = {"all": KINDS, "deduction": KINDS[:1], "no-induction": KINDS[:2]}
GATES = {  # what joins a buffer: (complete task, whether it is one of --leak's share) -> bool
    "execution": lambda task, leaked: task["runs"],
    "syntax": lambda task, leaked: is_well_formed(task),
    "off": lambda task, leaked: True,
    "leak": lambda task, leaked: task["runs"] or leaked,
}

# ------------------------------------------------------------------ prompts and parsing
FORM = "Think first, then write your answer between <answer> and </answer>, and there nothing but"
SOLVE = {
    "deduction": f"""Work out what f returns for the input. {FORM} the value, as a Python literal in
an ```output block.""",
    "abduction": f"""Find an input for which f returns the output; any one will do. {FORM} the
arguments of f, as Python literals separated by commas, in an ```input block.""",
    "induction": f"""You are given inputs of a program, what f returns for each, and a message about
it. Write the program; it will be tried on other inputs. {FORM} the program in a ```python
block.""",
}
PROGRAM = f"""Write a new Python program and one input for it, such that it takes several steps of
thought to find {{wanted}}. The program is deterministic, uses no randomness, time, files or
printing, defines a function f, and imports none of {", ".join(sorted(functions.BANNED))}. Be
different from the programs shown. {FORM} the program in a ```python block, then the
arguments of f, as Python literals, in an ```input block."""
PROPOSE = {
    "deduction": PROGRAM.format(wanted="what f returns"),
    "abduction": PROGRAM.format(wanted="the input, given what f returns"),
    "induction": f"""Write {{inputs}} different inputs for the Python program, and a message that
helps to find the program from some of the inputs and what f returns for them, without giving it
away. {FORM} the inputs, each in an ```input block, then the message in a ```message
block.""",
}


# worked examples: a task of all kinds, what a solver thinks, and another program to propose
WEIGHTED = {
    "program": """def f(numbers):
    total = 0
    for place, number in enumerate(numbers):
        total += place * number
    return total""",
    "inputs": ["[4, 1, 3]", "[0, 7]", "[5]", "[]", "[1, 1, 1, 1]", "[-2, -3]", "[9, 0, 0, 2]"]
    + ["[8, 8, 0]", "[3, 2, 1]", "[10, 20, 30]"],
    "outputs": ["7", "7", "0"],
    "message": "How much a number counts depends on where it stands.",
    "deduction": "0*4 + 1*1 + 2*3 = 7.",
    "abduction": "The place of the first number is 0, so the second one can be 7: 0*0 + 1*7 = 7.",
    "found": "[0, 7]",
    "induction": "[0, 7] gives 1*7, and [4, 1, 3] gives 0*4 + 1*1 + 2*3: places times numbers.",
    "proposed": """def f(words, least):
    longest = ""
    for word in words:
        if least <= len(word) > len(longest):
            longest = word
    return longest.upper()""",
    "its_input": "['sea', 'river', 'lake', 'ocean'], 4",
}
MIRROR = {
    "program": """def f(text, n):
    return text[::-1] + "-" * n""",
    "inputs": ["'abc', 2", "'no', 1", "'', 3", "'x', 0", "'level', 1", "'a b', 4", "'Tom', 2"]
    + ["'12', 5", "'ZZ top', 1", "'end.', 0"],
    "outputs": ["'cba--'", "'on-'", "'---'"],
    "message": "The other way round, and then a line as long as you like.",
    "deduction": "'abc' from its end is 'cba', and 2 dashes follow.",
    "abduction": "It ends in 2 dashes, and before them 'cba' is 'abc' from its end.",
    "found": "'abc', 2",
    "induction": "Each text is turned round, and the number says how many dashes follow.",
    "proposed": """def f(n, step):
    values = [k for k in range(1, n) if k % step]
    return sum(values) - len(values)""",
    "its_input": "9, 4",
}


def answer(thought: str, *written: tuple[str, str]) -> str:
    """Returns a text in the form that the players are asked for. written: (kind, content)."""
    inside = "".join(f"```{kind}\n{content}\n```\n" for kind, content in written)
    return f"{thought}\n<answer>\n{inside}</answer>"


def solved(kind: str) -> list[tuple[str, str]]:
    """Returns the solver's worked examples."""
    content = {
        "deduction": lambda task: task["outputs"][0],
        "abduction": lambda task: task["found"],
    }
    content["induction"] = lambda task: task["program"]
    return [
        (task_text(task | {"kind": kind}), answer(task[kind], (BLOCK[kind], content[kind](task))))
        for task in (WEIGHTED, MIRROR)
    ]


def proposed(kind: str, inputs: int) -> list[tuple[str, str]]:
    """Returns the proposer's worked examples. inputs: of an induction task."""
    turns = []
    for task in (WEIGHTED, MIRROR):
        if kind == "induction":
            thought = "The inputs are of unlike kinds, so that the program shows in them."
            parts = [("input", given) for given in task["inputs"][:inputs]]
            parts.append(("message", task["message"]))
        else:
            thought = "This program is about something else."
            parts = [("python", task["proposed"]), ("input", task["its_input"])]
        turns.append((propose_text(kind, [task]), answer(thought, *parts)))
    return turns


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def task_prompt(task: dict) -> list[dict]:
    return prompt(SOLVE[task["kind"]], task_text(task), solved(task["kind"]))


def task_text(task: dict) -> str:
    """What the solver sees: never the answer, and half of an induction task's inputs."""
    if task["kind"] == "deduction":
        return f"{fenced(task['program'])}\nInput: {task['inputs'][0]}\nWhat is the output?"
    if task["kind"] == "abduction":
        return f"{fenced(task['program'])}\nOutput: {task['outputs'][0]}\nWhat is the input?"
    pairs = list(zip(task["inputs"], task["outputs"]))[: shown(task)]
    examples = "".join(f"{given}->{returned}\n" for given, returned in pairs)
    return f"Examples:\n{examples}Message: {task['message']}\nWrite the program."


def shown(task: dict) -> int:
    """The solver sees half of an induction task's inputs, of which there are at least two."""
    return (len(task["inputs"]) + 1) // 2


def propose_prompt(kind: str, references: list[dict], inputs: int) -> list[dict]:
    user = propose_text(kind, references)
    return prompt(PROPOSE[kind].format(inputs=inputs), user, proposed(kind, inputs))


def propose_text(kind: str, references: list[dict]) -> str:
    """references: tasks whose programs are shown; for induction the one that gets inputs."""
    programs = [fenced(task["program"]) for task in references]
    if kind == "induction":
        return f"{programs[0]}\nPropose inputs and a message."
    examples = [f"{p}\n```input\n{t['inputs'][0]}\n```\n" for p, t in zip(programs, references)]
    return f"{''.join(examples)}Propose a program and its input."


def blocks(text: str, kind: str) -> list[str]:
    """The contents of the ```kind blocks of the last <answer>, in order; [] without an answer.

    Models that nobody has taught often close the answer but not its last block, or the last block
    but not the answer. Both are read. A text that was cut closes neither.
    """
    _, opened, inside = text.rpartition("<answer>")
    inside, closed, _ = inside.partition("</answer>") if opened else ("", "", "")
    end = r"(?:```|\Z)" if closed else "```"
    found = [block.strip() for block in re.findall(rf"```{kind}\n(.*?){end}", inside, re.DOTALL)]
    return [*map(with_f, found)] if kind == "python" else found


def parse_answer(kind: str, text: str) -> str | None:
    """A solver's output, input or program; None if it is missing or is not a literal."""
    written = blocks(text, BLOCK[kind])
    if not written:
        return None
    try:
        if kind == "deduction":
            return repr(read_value(written[0]))
        if kind == "abduction":
            return ", ".join(map(repr, read_arguments(written[0])))
    except ValueError:
        return None
    return written[0] if is_program(written[0], banned=set()) else None  # no rule for solvers


def parse_proposal(kind: str, text: str, reference: dict | None, count: int) -> dict | None:
    """A proposer's task, without outputs; None if a part is missing. Only its form is checked.

    reference: the task that lends an induction task its program. count: the number of its inputs.
    """
    inputs = blocks(text, "input")
    if kind == "induction":
        message = blocks(text, "message")
        if len(inputs) < count or not message or not message[0]:
            return None
        parts = {"program": reference["program"], "inputs": inputs[-count:]}
        return {"kind": kind, **parts, "message": message[0]}
    program = blocks(text, "python")
    if not program or not inputs:
        return None
    return {"kind": kind, "program": program[0], "inputs": inputs[:1], "message": ""}


# ------------------------------------------------------------------ Python's verdict
def is_well_formed(task: dict) -> bool:
    """Whether Python can parse its program and its inputs; nothing is run."""
    try:
        return is_program(task["program"]) and all(map(read_arguments, task["inputs"]))
    except ValueError:
        return False


def calls_to_check(task: dict, answer: str | None) -> list[tuple]:
    """The pairs (program, input) that must run to show whether an answer is right."""
    if answer is None or task["kind"] == "deduction":
        return []
    if task["kind"] == "abduction":
        return [(task["program"], answer)]
    return [(answer, given) for given in task["inputs"][shown(task) :]]


def is_right(task: dict, answer: str | None, returned: list[str | None]) -> bool:
    """Whether an answer is right. returned: what the calls of `calls_to_check` returned."""
    if answer is None:
        return False
    if task["kind"] == "deduction":
        returned = [answer]
    first = shown(task) if task["kind"] == "induction" else 0
    wanted = task["outputs"][first : first + len(returned)]
    hits = [same_value(value or "", output) for value, output in zip(returned, wanted)]
    return bool(hits) and all(hits)


def make_tasks(
    sandbox: Sandbox, rows: list[dict], inputs: int, time_limit: float
) -> dict[str, list[dict]]:
    """Kind -> tasks made of a data set's programs. A program makes no task if it does not run twice
    with equal results or imports what is banned. With a single input it makes no induction task.

    inputs: most inputs of an induction task.
    """
    calls = [[(row["program"], given) for given in row["inputs"]] for row in rows]
    first, second = (call_each(sandbox, calls, time_limit) for _ in range(2))
    tasks = {kind: [] for kind in KINDS}
    for row, outputs, again in zip(rows, first, second):
        if None in outputs or outputs != again or not is_program(row["program"]):
            continue
        for kind in KINDS:
            count = inputs if kind == "induction" else 1
            if len(outputs) >= min(2, count):
                values = {"inputs": row["inputs"][:count], "outputs": outputs[:count]}
                task = {"kind": kind, "program": row["program"], "message": row["message"]}
                tasks[kind].append(task | {"runs": True} | values)
    return tasks


# ------------------------------------------------------------------ rewards
def proposer_reward(joined: bool, rate: float, extremes: float = -0.5) -> float:
    """Eq. 4 and 6: 1 - rate within (0, 1), `extremes` at 0 and 1, -1 if the task did not join.

    The paper prints 0 for the extremes; the released code rewards them with -0.5.
    """
    if not joined:
        return -1.0
    return 1 - rate if 0 < rate < 1 else extremes


def rzero_reward(joined: bool, majority: float, repetition: float) -> float:
    """R-Zero's challenger: max(0, 1 - 2 |majority - 1/2| - repetition), 0 if it did not join.

    majority: share of the most frequent answer. repetition: share of the step's proposals that are
    the same; R-Zero counts similar proposals, by BLEU. R-Zero's released code has min(majority,
    1 - majority), which is half of the first two terms.
    """
    return max(0.0, 1 - 2 * abs(majority - 0.5) - repetition) if joined else 0.0


def majority_share(answers: list[str | None]) -> float:
    """Share of the most frequent answer. An unreadable answer agrees with no other answer."""
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts.values(), default=0) / len(answers)


def solver_reward(answered: bool, correct: float) -> float:
    """Eq. 5 and 6: 1 right, -0.5 wrong, -1 without an answer; with votes, between 1 and -0.5."""
    return -0.5 + 1.5 * correct if answered else -1.0


# ------------------------------------------------------------------ the paper's mathematics
def task_role_advantages(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Eq. 8: A = (r - mean) / std within each kind and role; 0 where all of a group are equal.

    Args:
        rewards, group: (B,); group is 3 * role + kind, in 0 .. 5.

    >>> task_role_advantages(torch.tensor([1.0, 0.0, -1.0, 0.5]), torch.tensor([0, 0, 0, 3]))
    tensor([ 1.,  0., -1.,  0.])
    """
    A = torch.zeros_like(rewards)  # (B,)
    for g in group.unique():
        A += whiten(rewards, group == g)  # 0 in all other groups
    return A


# ------------------------------------------------------------------ the trainer
class Azr(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates.

    `saved` is the same on all processes. It holds the buffers, kind -> tasks, oldest first, and how
    many tasks of a kind joined in the last step. A task is {kind, program, inputs, outputs,
    message, runs}. If its program does not run, its outputs are what the model expects.
    """

    def __init__(self, *inputs, sandbox: Sandbox):
        super().__init__(*inputs)
        self.sandbox, self.kinds = sandbox, ABLATIONS[self.cfg.kinds]
        buffers, self.held_out, self.never = first_tasks(self)
        self.saved = {"buffers": buffers, "new": dict.fromkeys(self.kinds, 0)}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        """The players have no reward functions: `step` rewards them after the programs ran."""
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
        batch = self.concat([self.propose(references), self.solve(tasks)])
        groups = [KINDS.index(kind) for kind, _ in references]
        groups += [3 + KINDS.index(task["kind"]) for task in tasks]
        group = torch.tensor(groups).to(batch.rewards)  # (B,): role and kind of each row
        # A = (r - mean) / std within each kind and role, over the rows of all processes
        A = self.over_all_processes(task_role_advantages, batch.rewards, group)  # (B,)
        if not self.cfg.train_proposer:
            A = A * (group >= 3)
        batch.advantages = A
        return [batch]

    def draw(self) -> tuple[list, list]:
        """(kind, references) of 3 N proposals, and 3 N tasks to solve, newest first."""
        cfg, buffers = self.cfg, self.saved["buffers"]
        rng = random.Random(f"{cfg.seed} {self.state.global_step}")
        count = cfg.questions * self.accelerator.num_processes  # everyone's; each takes its share
        references, tasks = [], []
        for kind in self.kinds:
            if kind == "induction":  # a program to write inputs for
                known = [task for k in KINDS[:2] for task in buffers[k]]
                references += [(kind, [rng.choice(known)]) for _ in range(count)]
            else:
                K = min(cfg.references, len(buffers[kind]))
                references += [(kind, rng.sample(buffers[kind], K)) for _ in range(count)]
            newest = buffers[kind][len(buffers[kind]) - self.saved["new"][kind] :][-count:]
            tasks += newest + rng.choices(buffers[kind], k=count - len(newest))
        return self.shard(references), self.shard(tasks)

    # --- the proposer, and the gate
    def propose(self, references: list[tuple]) -> Batch:
        prompts = [propose_prompt(kind, tasks, self.cfg.inputs) for kind, tasks in references]
        batch = self.rollout("proposer", [{"prompt": prompt} for prompt in prompts])
        proposals = [
            parse_proposal(kind, text, tasks[0] if tasks else None, self.cfg.inputs)
            for (kind, tasks), text in zip(references, batch.texts)
        ]
        joined = self.admitted(proposals)  # row -> task with outputs
        rates = dict(zip(joined, self.rates([*joined.values()])))  # row -> rate
        # of induction's proposals, whose program is given, the message counts
        written = [task and (bare(task["program"]), task["message"]) for task in proposals]
        everyones = self.gather(written)
        rewards = torch.zeros(len(proposals))  # (B,)
        for i in range(len(proposals)):
            if self.cfg.proposer_reward == "rzero":
                repetition = everyones.count(written[i]) / len(everyones)
                rewards[i] = rzero_reward(i in joined, rates.get(i, 0.0), repetition)
            else:
                extremes = 0.0 if self.cfg.paper_extremes else -0.5
                rewards[i] = proposer_reward(i in joined, rates.get(i, 0.0), extremes)
        self.set_rewards(batch, rewards)
        self.join(joined.values())
        self.report_proposals(batch, references, joined, rates)
        return batch

    def admitted(self, proposals: list[dict | None]) -> dict[int, dict]:
        """Row -> task with outputs, for proposals that pass --gate and are not held out."""
        passes, joined, rng = GATES[self.cfg.gate], {}, self.random_numbers("the gate")
        coins = self.over_all_processes(lambda all: [rng.random() for _ in all], proposals)
        for i, task in enumerate(self.executed(proposals)):
            new = task and bare(task["program"]) not in self.never
            if new and passes(task, coins[i] < self.cfg.leak):
                joined[i] = task
        self.guess_outputs([task for task in joined.values() if not task["runs"]])
        return joined

    def executed(self, proposals: list[dict | None]) -> list[dict | None]:
        """Each proposal with what f returns for its inputs, and whether it runs. It runs if f
        returns a literal for every input, and the same literal in a second run.
        """
        calls = [[(t["program"], given) for given in t["inputs"]] if t else [] for t in proposals]
        tasks = []
        for task, outputs, again in zip(proposals, self.run(calls), self.run(calls)):
            runs = bool(task) and None not in outputs and outputs == again and is_well_formed(task)
            tasks.append(task and task | {"outputs": outputs, "runs": runs})
        return tasks

    def guess_outputs(self, tasks: list[dict]):
        """Asks the model what f returns, for tasks that joined without running."""
        asked = [t | {"kind": "deduction", "inputs": [x]} for t in tasks for x in t["inputs"]]
        answers = iter(self.answers(asked))
        for task in tasks:
            task["outputs"] = [next(answers) or "" for _ in task["inputs"]]

    def rates(self, tasks: list[dict]) -> list[float]:
        """Each task's share of right answers; for R-Zero, of the most frequent answer."""
        n = self.cfg.difficulty_samples
        tries = [task for task in tasks for _ in range(n)]
        answers = self.answers(tries)
        if self.cfg.proposer_reward == "rzero":
            return [majority_share(several) for several in chunk(answers, n)]
        return [mean(hits) for hits in chunk(self.right([*zip(tries, answers)]), n)]

    def join(self, tasks):
        """Add everyone's tasks; a full buffer drops its oldest."""
        tasks = self.gather([*tasks])
        for kind in self.kinds:
            buffer, new = self.saved["buffers"][kind], [t for t in tasks if t["kind"] == kind]
            buffer += new
            del buffer[: max(0, len(buffer) - self.cfg.pool_size)]
            self.saved["new"][kind] = min(len(new), len(buffer))

    # --- the solver
    def solve(self, tasks: list[dict]) -> Batch:
        batch = self.rollout("solver", [{"prompt": task_prompt(task)} for task in tasks])
        answers = [parse_answer(task["kind"], t) for task, t in zip(tasks, batch.texts)]
        right = self.right([*zip(tasks, answers)])
        correct = self.votes(tasks, answers) if self.cfg.solver_reward == "vote" else right
        rewards = [solver_reward(answer is not None, c) for answer, c in zip(answers, correct)]
        self.set_rewards(batch, rewards)
        self.report_solutions(batch, tasks, answers, right, correct)
        return batch

    def votes(self, tasks: list[dict], answers: list[str | None]) -> list[float]:
        """Share of n other answers to each task that are the same text as its answer."""
        n = self.cfg.difficulty_samples
        others = chunk(self.answers([task for task in tasks for _ in range(n)]), n)
        return [
            mean([answer is not None and other == answer for other in several])
            for answer, several in zip(answers, others)
        ]

    def answers(self, tasks: list[dict]) -> list[str | None]:
        """The solver's answer to each task, None if unreadable. Nothing is trained on it."""
        texts = self.generate("solver", [task_prompt(task) for task in tasks])
        return [parse_answer(task["kind"], text) for task, text in zip(tasks, texts)]

    def right(self, answered: list[tuple[dict, str | None]]) -> list[bool]:
        """Whether each (task, answer) is right. Deduction: the values are equal. Abduction: f
        returns the output for the answer. Induction: the answer returns all hidden outputs.
        """
        returned = self.run([calls_to_check(*one) for one in answered])
        return [is_right(*one, values) for one, values in zip(answered, returned)]

    def run(self, calls: list[list[tuple]]) -> list[list[str | None]]:
        """What f returns for each task's calls (program, input)."""
        return call_each(self.sandbox, calls, self.cfg.time_limit)

    # --- what is logged and shown; no method below affects training
    def report_proposals(self, batch, references, joined, rates):
        runs = [i in joined and joined[i]["runs"] for i in range(len(references))]
        self.log_mean("proposer/valid", runs)
        self.log_mean("proposer/joined", [i in joined for i in range(len(references))])
        self.log_mean("proposer/rate", list(rates.values()))
        self.log_mean("proposer/too_easy", [rate == 1 for rate in rates.values()])
        self.log_mean("proposer/too_hard", [rate == 0 for rate in rates.values()])
        everything = [task for kind in self.kinds for task in self.saved["buffers"][kind]]
        self.log_mean("co/tasks", len(everything))
        self.log_mean("co/tasks_that_run", [task["runs"] for task in everything])
        for i, note in enumerate(batch.notes):
            note |= {"kind": references[i][0], "runs": runs[i], "rate": rates.get(i)}
            if i in joined:
                note["outputs"] = joined[i]["outputs"]

    def report_solutions(self, batch, tasks, answers, right, correct):
        truly = [hit and task["runs"] for hit, task in zip(right, tasks)]
        for kind in self.kinds:
            hits = [hit for hit, task in zip(truly, tasks) if task["kind"] == kind]
            self.log_mean(f"solver/{kind}", hits)
        self.log_mean("solver/accuracy", truly)
        self.log_mean("solver/parsed", [answer is not None for answer in answers])
        self.log_mean("co/rewarded_minus_true", mean(correct) - mean(truly))
        for note, task, answer, hit in zip(batch.notes, tasks, answers, truly):
            note |= {"kind": task["kind"], "answer": answer, "right": hit}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Azr, held_out: list[dict]) -> dict[str, float]:
    """Figures on held_out: tasks of all kinds, about programs that never join a buffer."""
    sampled = share_right(trainer, held_out, trainer.cfg.eval_samples)
    greedy = share_right(trainer, held_out, 1, greedy=True)
    result = {f"solver/{name}": share for name, share in sampled.items()}
    result |= {f"solver/{name}_greedy": share for name, share in greedy.items()}
    return result | evaluate_proposer(trainer, held_out)


def share_right(trainer: Azr, held_out: list[dict], samples: int, greedy=False) -> dict[str, float]:
    """Share of the solver's answers that are right, of all tasks and of each kind."""
    tasks = [task for task in held_out for _ in range(samples)]
    texts = trainer.generate_all("solver", [task_prompt(task) for task in tasks], greedy)
    answers = [parse_answer(task["kind"], text) for task, text in zip(tasks, texts)]
    right = trainer.in_parallel(trainer.right, [*zip(tasks, answers)])
    hits = {kind: [h for h, t in zip(right, tasks) if t["kind"] == kind] for kind in trainer.kinds}
    return {"accuracy": mean(right)} | {kind: mean(of_kind) for kind, of_kind in hits.items()}


def evaluate_proposer(trainer: Azr, held_out: list[dict]) -> dict[str, float]:
    """Proposals about held-out programs, checked by Python. The prompts are always the same."""
    rng, count = random.Random(0), trainer.cfg.inputs
    kinds = [kind for kind in trainer.kinds for _ in held_out[::6]]
    references = [rng.choice(held_out) for _ in kinds]
    prompts = [propose_prompt(kind, [shown], count) for kind, shown in zip(kinds, references)]
    texts = trainer.generate_all("proposer", prompts)
    proposals = [parse_proposal(*row, count) for row in zip(kinds, texts, references)]
    tasks = trainer.in_parallel(trainer.executed, proposals)
    valid = [task is not None and task["runs"] for task in tasks]
    buffers = trainer.saved["buffers"].values()
    known = {bare(task["program"]) for several in (held_out, *buffers) for task in several}
    written = [task["program"] for task in tasks if task and task["kind"] != "induction"]
    new = [bare(program) not in known for program in written]
    return {"proposer/valid": mean(valid), "proposer/new": mean(new)}


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/accuracy", *[f"solver/{kind}" for kind in KINDS]],
    "proposer": ["proposer/valid", "proposer/rate", "proposer/too_easy", "proposer/too_hard"],
    "against the truth": ["co/rewarded_minus_true", "co/tasks_that_run"],
}


def first_tasks(trainer: Azr) -> tuple[dict[str, list], list[dict], set[str]]:
    """(kind -> the first tasks of its buffer, held-out tasks, bare forms of held-out programs)."""
    parts = (trainer.train_rows, trainer.held_out)
    cfg, sandbox = trainer.cfg, trainer.sandbox
    both = [make_tasks(sandbox, rows, cfg.inputs, cfg.time_limit) for rows in parts]
    # a program near the time limit may run in one process and not in another
    buffers, held_out = broadcast_object_list(both)
    never = {bare(task["program"]) for tasks in held_out.values() for task in tasks}
    if not all(buffers[kind] and held_out[kind] for kind in trainer.kinds):
        raise UserError(
            f"--dataset {cfg.dataset}: no program of its training or held-out part makes a "
            f"task of every kind; they must define f, run, and have two inputs."
        )
    # as many questions as asked for, equally many of each kind
    tasks = [task for kind in trainer.kinds for task in held_out[kind][:: len(trainer.kinds)]]
    return buffers, tasks, never


def load(args: Args):
    counts = (args.seed_tasks, args.eval_questions, args.inputs)
    return functions.load_functions(args.dataset, *counts, args.seed, args.held_out)


def main(args: Args):
    with Sandbox(unsafe=args.unsafe_sandbox) as sandbox:
        launch(Azr, args, load=load, evaluate=evaluate, curves=CURVES, sandbox=sandbox)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
