"""azr.py: rewards and advantages against for-loops, tasks, what may join a buffer, answers judged
by value, every switch with completions that are given. How answers are read:
tests/data/texts.txt.
"""

import random

import azr
from common.tasks.functions import bare, call_each
from lab.make import program_demonstrations as demonstrations

import pytest
import torch
from trainers import whitened, without_model

PLUS = "def f(x):\n return (x+3)%100"
CLOCK = "def f(x): return __import__('time').time_ns()"  # no import statement


# ------------------------------------------------------------------ rewards
def test_proposer_reward_is_what_paper_and_code_say():
    """Released code: -0.5 at both extremes, 1/8 ... 7/8 between; paper: 0 at the extremes."""
    for right in range(9):
        rate, extreme = right / 8, right in (0, 8)
        assert azr.proposer_reward(True, rate) == (-0.5 if extreme else (8 - right) / 8)
        assert azr.proposer_reward(True, rate, extremes=0.0) == (0 if extreme else (8 - right) / 8)
        assert azr.proposer_reward(False, rate) == -1


def test_rzero_reward_prefers_an_even_chance():
    rewards = [azr.rzero_reward(True, k / 8, 0.0) for k in range(9)]
    assert rewards == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]
    assert azr.rzero_reward(True, 0.5, 0.25) == 0.75 and azr.rzero_reward(True, 0.2, 0.9) == 0
    assert azr.rzero_reward(False, 0.5, 0.0) == 0
    # a majority is of what can be read, but a share of all
    assert azr.majority_share(["1", None, "1", "2"]) == 0.5 and azr.majority_share([None]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_advantages_are_whitened_within_each_kind_and_role(seed):
    rng = random.Random(seed)
    group = [rng.randrange(6) for _ in range(60)]
    rewards = [rng.choice([-1, -0.5, 1, 0.25]) for _ in group]
    A = azr.task_role_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group))
    assert A.tolist() == pytest.approx(whitened([*zip(rewards, group)]), abs=1e-6)


def test_prompts_of_the_small_model_are_those_of_its_demonstrations():
    """It has been trained on exactly these words."""
    task = {"program": PLUS, "inputs": ["5", "6"], "outputs": ["8", "9"], "message": "add ?"}
    prompts = [azr.task_prompt(task | {"kind": kind}) for kind in azr.KINDS]
    prompts += [azr.propose_prompt("induction", [task], 6), azr.propose_prompt("deduction", [], 6)]
    taught = [demonstrations.deduce, demonstrations.abduce, demonstrations.induce]
    taught += [demonstrations.propose_inputs, demonstrations.propose_program]
    for demonstration, prompt in zip(taught, prompts, strict=True):
        ours = prompt[-1]["content"].splitlines()
        theirs = demonstration(random.Random(0), 0)[0].splitlines()
        assert ours[-1] == theirs[-1]
        # a demonstration of proposing may begin with references
        assert ours[0] == theirs[0] or demonstration is demonstrations.propose_program


# ------------------------------------------------------------------ tasks
def test_proposals():
    text = f"<answer>\n```python\n{PLUS}\n```\n```input\n5\n```\n</answer>"
    task = {"kind": "deduction", "program": PLUS, "inputs": ["5"], "message": ""}
    assert azr.parse_proposal("deduction", text, None, 6) == task
    assert azr.parse_proposal("abduction", text.replace("input", "output"), None, 6) is None
    whole = text.partition("\n```\n</answer>")[0]
    for same in (
        f"{whole}\n```\n",  # the answer is not closed
        f"{whole}\n</answer>",  # the block is not
        f"<answer>\n```input\n7\n```{text} 1\n```input\n8\n```",  # the last answer counts
    ):
        assert azr.parse_proposal("deduction", same, None, 6) == task
    for other in (text.removeprefix("<answer>"), f"{text}<answer>", whole):
        assert azr.parse_proposal("deduction", other, None, 6) is None
    named = text.replace(PLUS, "def plus(a):\n  return a+1\n\ndef f2(a):\n  return plus(a)+2")
    assert azr.parse_proposal("deduction", named, None, 6)["program"].endswith("\n\nf = f2")
    blocks = "".join(f"```input\n{x}\n```\n" for x in range(8))
    text = f"<answer>\n{blocks}```message\nadd ?\n```\n</answer>"
    task = azr.parse_proposal("induction", text, {"program": PLUS}, 6)
    assert task["inputs"] == ["2", "3", "4", "5", "6", "7"] and task["message"] == "add ?"
    assert azr.parse_proposal("induction", text, {"program": PLUS}, 9) is None
    for message in ("m", "message\n \n```\n```m"):  # none, and an empty one
        without = text.replace("message\nadd ?", message)
        assert azr.parse_proposal("induction", without, {"program": PLUS}, 6) is None


@pytest.mark.parametrize("count, seen", [(2, 1), (3, 2), (6, 3), (10, 5)])
def test_at_least_one_input_is_hidden_and_no_prompt_shows_an_answer(count, seen):
    inputs = [str(x) for x in range(70, 70 + count)]
    outputs = [f"'out {letter}'" for letter in "abcdefghij"[:count]]
    task = {"program": PLUS, "inputs": inputs, "outputs": outputs, "message": "add ?"}
    assert azr.shown(task) == seen < count
    text = azr.task_prompt({**task, "kind": "induction"})[-1]["content"]
    assert [x in text for x in outputs] == [True] * seen + [False] * (count - seen)
    assert PLUS not in text
    assert outputs[0] not in azr.task_prompt({**task, "kind": "deduction"})[-1]["content"]
    asked = azr.task_prompt({**task, "kind": "abduction"})[-1]["content"]
    assert inputs[0] not in asked and outputs[0] in asked


def test_tasks_are_made_of_what_runs_twice_alike(sandbox):
    programs = {PLUS: ["1", "2", "3"], f"{PLUS}\n": ["4"], "def f(x): return y": ["1", "2"]}
    programs |= {f"import time\n{PLUS}": ["1", "2"], CLOCK: ["1", "2"]}
    rows = [{"message": "m", "program": p, "inputs": inputs} for p, inputs in programs.items()]
    tasks = azr.make_tasks(sandbox, rows, 2, 0.5)
    assert [t["inputs"] for t in tasks["deduction"]] == [["1"], ["4"]]
    assert [(t["inputs"], t["outputs"]) for t in tasks["induction"]] == [(["1", "2"], ["4", "5"])]


# ------------------------------------------------------------------ with completions that are given
def given_texts(sandbox, texts=(), **change) -> azr.Azr:
    cfg = azr.Args(**{"time_limit": 0.5, "inputs": 6, "difficulty_samples": 2} | change)
    trainer = without_model(azr.Azr, cfg, texts, sandbox=sandbox, kinds=azr.KINDS)
    trainer.saved = {"buffers": {k: [] for k in azr.KINDS}, "new": dict.fromkeys(azr.KINDS, 0)}
    trainer.never = {bare("def f(x): return 'held out'")}
    return trainer


def answer(kind, content):
    return f"<think>1</think>\n<answer>\n```{kind}\n{content}\n```\n</answer>"


def proposal(program=PLUS, given="5"):
    return f"<answer>\n```python\n{program}\n```\n```input\n{given}\n```\n</answer>"


def deduction(program=PLUS, given="5"):
    return {"kind": "deduction", "program": program, "inputs": [given], "message": ""}


RUNS = [deduction(), deduction("def f(x):\n return {x}", "'a'")]
FAILS, IMPORTS = deduction("def f(x):\n return y"), deduction("import time\n" + PLUS)
NOT_PYTHON, CODE_AS_INPUT = deduction("def f(x:\n return x"), deduction(PLUS, "5) or (True")
CHANGES = deduction("def f(x):\n return __import__('time').time_ns()")  # no import statement


# ------------------------------------------------------------------ the gate
@pytest.mark.parametrize(
    "gate, said, tasks, joined",
    [
        ("execution", [], [RUNS[0], None, RUNS[1]], {0: (["8"], True), 2: (["{'a'}"], True)}),
        ("execution", [], [FAILS, IMPORTS, CODE_AS_INPUT, NOT_PYTHON, CHANGES], {}),
        # what fails has the model's own answer, if there is one
        ("syntax", ["7", ""], [FAILS, IMPORTS, FAILS], {0: (["7"], False), 2: ([""], False)}),
        ("syntax", [], [NOT_PYTHON, RUNS[0]], {1: (["8"], True)}),
        ("off", ["7"], [NOT_PYTHON], {0: (["7"], False)}),
    ],
)
def test_a_gate_lets_in(sandbox, gate, said, tasks, joined):
    texts = [answer("output", value) if value else "nothing" for value in said]
    found = given_texts(sandbox, texts, gate=gate).admitted(tasks)
    assert {i: (task["outputs"], task["runs"]) for i, task in found.items()} == joined


def test_a_leak_lets_in_its_share_and_all_that_runs(sandbox):
    tasks = [FAILS | {"message": str(i)} for i in range(400)]
    assert [*given_texts(sandbox, gate="leak", leak=0.0).admitted([*tasks[:9], RUNS[0]])] == [9]
    trainer = given_texts(sandbox, [answer("output", "7")] * 400, gate="leak", leak=0.2)
    assert 50 < len(trainer.admitted(tasks)) < 110


def test_a_held_out_program_neither_joins_nor_is_rewarded(sandbox):
    repeated = proposal("def f(number):  # under another name\n return 'held out'")
    trainer = given_texts(sandbox, [repeated])
    assert trainer.propose([("deduction", [RUNS[0]])]).rewards.tolist() == [-1]
    assert trainer.saved["buffers"]["deduction"] == []


# ------------------------------------------------------------------ who is right
def test_all_three_kinds_are_judged_by_value(sandbox):
    returns = deduction() | {"outputs": ["{1, 2}"]}
    finds = deduction() | {"kind": "abduction", "outputs": ["8"]}
    writes = deduction() | {"kind": "induction", "inputs": [*"012345"], "outputs": [*"345678"]}
    by_heart = "def f(x):\n return {0: 3, 1: 4, 2: 5}.get(x, 0)"  # the examples
    cases = [
        (returns, "{2,1}", True),
        (returns, "[1, 2]", False),
        (returns, None, False),
        (finds, "105", True),  # not the proposer's input, but it returns 8
        (finds, "6", False),
        (finds, "5, 6", False),
        (finds, "'a'", False),
        (writes, "def f(x):\n return x + 3", True),
        (writes, by_heart, False),
        (writes, "def f(x):\n while True: pass", False),
        (writes, None, False),
        (deduction() | {"outputs": [""]}, "''", False),  # the model knows no answer
        (finds, "5", True),  # nobody took another one's result
    ]
    answered, right = [case[:2] for case in cases], [case[2] for case in cases]
    assert given_texts(sandbox).right(answered) == right


def test_a_vote_rewards_agreement_and_silence_agrees_with_nothing(sandbox):
    one, two = answer("output", "8"), answer("output", "9")
    tasks = [deduction() | {"outputs": ["8"], "runs": True}] * 3
    written, others = [one, "nothing", two], [two, one, "?", "?", two, two]
    trainer = given_texts(sandbox, written + others, solver_reward="vote")
    assert trainer.solve(tasks).rewards.tolist() == [0.25, -1.0, 1.0]
    assert trainer.logged["co/rewarded_minus_true"] == [(0.5 + 0 + 1) / 3 - 1 / 3]


# ------------------------------------------------------------------ the buffers
def test_a_buffer_drops_its_oldest_and_knows_what_is_new(sandbox):
    trainer = given_texts(sandbox, pool_size=4, seed_tasks=4)
    trainer.saved["buffers"]["deduction"] = [deduction(str(i)) for i in range(3)]
    other = deduction("5") | {"kind": "abduction"}
    trainer.join([deduction("3"), deduction("4"), other])
    kept = [task["program"] for task in trainer.saved["buffers"]["deduction"]]
    assert kept == ["1", "2", "3", "4"]
    assert trainer.saved["new"] == {"deduction": 2, "abduction": 1, "induction": 0}
    trainer.join([deduction(str(i)) for i in range(6)])
    assert trainer.saved["new"]["deduction"] == 4  # more than the buffer holds


def test_the_first_tasks_and_the_held_out_ones(sandbox):
    row, trainer = {"inputs": [*"0123"], "message": "m"}, given_texts(sandbox, inputs=4)
    rows = [row | {"program": f"def f(x):\n return x + {i}"} for i in range(9)]
    trainer.train_rows, trainer.held_out = rows[:3], rows[3:]
    buffers, held_out, never = azr.first_tasks(trainer)
    assert [len(tasks) for tasks in buffers.values()] == [3] * 3
    assert [task["inputs"] for task in buffers["induction"]] == [[*"0123"]] * 3
    # of six held-out programs two tasks of each kind
    assert [task["kind"] for task in held_out] == [kind for kind in azr.KINDS for _ in range(2)]
    assert never == {bare(row["program"]) for row in rows[3:]}


def filled(sandbox, size, **change):
    trainer = given_texts(sandbox, **change)
    for kind in azr.KINDS:
        tasks = [{"kind": kind, "program": f"{kind} {i}", "inputs": ["1"]} for i in range(size)]
        trainer.saved["buffers"][kind] = tasks
    return trainer


def test_the_newest_tasks_are_solved_first(sandbox):
    trainer = filled(sandbox, 5, questions=3, references=2)
    trainer.saved["new"] = {"deduction": 2, "abduction": 0, "induction": 5}
    references, tasks = trainer.draw()
    programs = {kind: [t["program"] for t in tasks if t["kind"] == kind] for kind in azr.KINDS}
    assert programs["deduction"][:2] == ["deduction 3", "deduction 4"]
    assert programs["induction"] == ["induction 2", "induction 3", "induction 4"]
    assert [len(of_kind) for of_kind in programs.values()] == [3, 3, 3]
    assert all(len(shown) == 1 + (kind != "induction") for kind, shown in references)
    assert trainer.draw() == (references, tasks)  # the same on all processes, and after a resume


def test_references_come_from_the_whole_buffer_and_of_their_kind(sandbox):
    """Evenly: of 40 rows with 2 of 30 programs, most programs are shown."""
    trainer = filled(sandbox, 30, questions=40, references=2)
    references, tasks = trainer.draw()
    # induction is about a program of the other two kinds
    both = {"deduction", "abduction"}
    for kind, of in zip(azr.KINDS, ({"deduction"}, {"abduction"}, both), strict=True):
        shown = {task["program"] for k, several in references for task in several if k == kind}
        assert len(shown) > 20 and {program.split()[0] for program in shown} == of
    assert all(len({t["program"] for t in tasks if t["kind"] == kind}) > 10 for kind in azr.KINDS)
    trainer.state.global_step = 1
    assert trainer.draw()[0] != references


# ------------------------------------------------------------------ a step
@pytest.mark.parametrize(
    "change, wanted",
    [
        ({}, [0.5, -0.5, -0.5, 0.5, -1, -1]),
        ({"paper_extremes": True}, [0.5, 0, 0, 0.5, -1, -1]),
        # R-Zero rewards a majority of one half, and agreement little, right or wrong; less what
        # two of the six have in common
        ({"proposer_reward": "rzero"}, [1 - 2 / 6, 0, 0, 1 - 2 / 6, 0, 0]),
    ],
)
def test_a_proposer_is_rewarded_for_what_the_solver_can_half_do(sandbox, change, wanted):
    """n = 2: of two answers to 5 + 3 one is right, of those to 5 + 4 none, to 5 + 5 both. The
    fourth program repeats the first in another spelling, the fifth fails, and the last text has not
    the form."""
    programs = [PLUS.replace("3", n) for n in "345"] + [PLUS.replace("x", "y"), FAILS["program"]]
    said = [answer("output", value) for value in ("8", "7", "1", "1", "10", "10", "7", "8")]
    texts = [*map(proposal, programs), "I would rather not."]
    trainer = given_texts(sandbox, texts + said, **change)
    batch = trainer.propose([("deduction", [RUNS[0]])] * 6)
    assert batch.rewards.tolist() == pytest.approx(wanted)
    buffer = trainer.saved["buffers"]["deduction"]
    assert [task["outputs"] for task in buffer] == [["8"], ["9"], ["10"], ["8"]]


# ------------------------------------------------------------------ worked examples
def test_worked_examples_are_right(sandbox):
    """Read by the script's own parsers, and run: answers are right, and proposals run."""
    trainer = without_model(azr.Azr, azr.Args(), {}, sandbox=sandbox)
    for number, task in enumerate((azr.WEIGHTED, azr.MIRROR)):
        assert len(task["inputs"]) == 10
        calls = [(task["program"], given) for given in task["inputs"]]
        (outputs,) = call_each(sandbox, [calls], 1.0)
        assert outputs[: len(task["outputs"])] == task["outputs"] and None not in outputs
        for kind in azr.KINDS:
            asked, text = azr.solved(kind)[number]
            whole = task | {"kind": kind, "outputs": outputs}
            answer = azr.parse_answer(kind, text)
            assert trainer.right([(whole, answer)]) == [True]
            assert answer not in asked
            proposal = azr.parse_proposal(kind, azr.proposed(kind, 6)[number][1], task, 6)
            assert [one["runs"] for one in trainer.executed([proposal])] == [True]
            messages = azr.task_prompt(whole)
            assert [m["content"] for m in messages if m.get("example")][1::2][number] == text
