"""azr.py: rewards and advantages against for-loops, what may join a buffer, hostile proposals and
answers, every switch of the study with completions that are given, runs."""

import json
import random
import statistics
from types import SimpleNamespace

import azr
from common.cotrainer import Player
from common.sandbox import Sandbox

import pytest
import torch
from conftest import refused, small

PLUS = "def f(x):\n return (x+3)%100"


# ------------------------------------------------------------------ rewards
def test_proposer_reward_is_what_paper_and_code_say():
    """Released code: -0.5 at both extremes, 1/8 ... 7/8 between; paper: 0 at the extremes."""
    for right in range(9):
        rate = right / 8
        wanted = -0.5 if right in (0, 8) else (8 - right) / 8
        assert azr.proposer_reward(True, True, rate) == wanted
        assert azr.proposer_reward(True, True, rate, extremes=0.0) == (
            0 if right in (0, 8) else wanted
        )
        for valid, well_formed in ((False, True), (True, False), (False, False)):
            assert azr.proposer_reward(valid, well_formed, rate) == -1


def test_solver_reward_has_three_values():
    assert [azr.solver_reward(*case) for case in ((True, 1), (True, 0), (False, 1))] == [
        1,
        -0.5,
        -1,
    ]
    assert azr.solver_reward(True, 0.5) == 0.25  # half of the others agree


def test_rzero_reward_prefers_an_even_chance():
    rates = [k / 8 for k in range(9)]
    rewards = [azr.rzero_reward(True, rate, 0.0) for rate in rates]
    assert rewards == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]
    assert azr.rzero_reward(True, 0.5, 0.25) == 0.75 and azr.rzero_reward(True, 0.2, 0.9) == 0
    assert azr.rzero_reward(False, 0.5, 0.0) == 0


def test_a_majority_is_of_what_can_be_read_but_a_share_of_all():
    assert azr.majority(["1", None, "1", "2"]) == ("1", 0.5)
    assert azr.majority([None, None]) == (None, 0.0)


# ------------------------------------------------------------------ advantages
@pytest.mark.parametrize("seed", range(20))
def test_advantages_are_whitened_within_each_kind_and_role(seed):
    rng = random.Random(seed)
    group = [rng.randrange(6) for _ in range(60)]
    rewards = [rng.choice([-1, -0.5, 1, 0.25]) for _ in group]
    A = azr.task_role_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group))
    for g in range(6):
        of = [r for r, k in zip(rewards, group) if k == g]
        for a, r, k in zip(A.tolist(), rewards, group):
            if k == g:
                spread = statistics.stdev(of) if len(set(of)) > 1 else 0
                wanted = (r - statistics.mean(of)) / spread if spread else 0
                assert a == pytest.approx(wanted, abs=1e-6)


def test_a_constant_group_has_exactly_no_advantage():
    rewards = torch.tensor([0.1] * 7 + [1.0, -1.0])
    A = azr.task_role_advantages(rewards, torch.tensor([2] * 7 + [5] * 2))
    assert A[:7].tolist() == [0.0] * 7 and A[7] == -A[8] > 0.7


# ------------------------------------------------------------------ parsing
def answer(kind, content):
    return f"<think>1</think>\n<answer>\n```{kind}\n{content}\n```\n</answer>"


@pytest.mark.parametrize(
    "kind, text, found",
    [
        ("deduction", answer("output", "[1,2]"), "[1, 2]"),
        ("deduction", answer("output", "1") + answer("output", "2"), "2"),  # the last answer
        ("deduction", "<answer>\n```output\n1\n```", None),  # not closed
        ("deduction", "```output\n1\n```", None),  # outside
        ("deduction", "<answer>```output\n1\n```<answer>\n```output\n2\n```</answer>", "2"),
        ("deduction", answer("output", "1 + 1"), None),
        ("deduction", answer("output", "type('A', (), {'__eq__': lambda *_: True})()"), None),
        ("deduction", answer("input", "1"), None),
        ("abduction", answer("input", "3,  [1]"), "3, [1]"),
        ("abduction", answer("input", "3) or (True"), None),
        ("abduction", answer("input", "__import__('os').system('true')"), None),
        ("induction", answer("python", PLUS), PLUS),
        ("induction", answer("python", "import sys\n" + PLUS), "import sys\n" + PLUS),
        ("induction", answer("python", "def g(x): return x"), None),
        ("induction", answer("python", "def f(x:"), None),
    ],
)
def test_answers(kind, text, found):
    assert azr.parse_answer(kind, text) == found


@pytest.mark.parametrize(
    "module", ["os", "os.path", "sys", "random", "time", "subprocess", "datetime", "threading"]
)
def test_banned_modules_are_found_in_all_forms(module):
    root = module.split(".")[0]
    forms = [f"import {module}", f"import math, {module} as m", f"from {module} import path"]
    forms += [f"def g():\n import {module}", f"from {root}.x import y"]
    for form in forms:
        assert not azr.is_program(f"{form}\n{PLUS}"), form
    assert azr.is_program(f"import math, osmium, re\n{PLUS}")


@pytest.mark.parametrize(
    "text, fine",
    [
        (PLUS, True),
        ("def g(x):\n def f(x): return x", False),  # f is not at the top level
        ("f = lambda x: x", True),
        ("class A:\n def f(self): pass", False),
        ("def helper(x): return x\n" + PLUS, True),
        ("def f(x):\n def inner(y): return y\n return inner(x)", True),  # nested ones are allowed
        ("\0", False),
        ("(" * 5000, False),
        ("", False),
    ],
)
def test_programs(text, fine):
    assert azr.is_program(text) is fine


def proposal(program=PLUS, given="5"):
    return f"<answer>\n```python\n{program}\n```\n```input\n{given}\n```\n</answer>"


def test_proposals():
    found = azr.parse_proposal("deduction", proposal(), None, 6)
    assert found == {"kind": "deduction", "program": PLUS, "inputs": ["5"], "message": ""}
    assert azr.parse_proposal("abduction", proposal().replace("input", "output"), None, 6) is None
    blocks = "".join(f"```input\n{x}\n```\n" for x in range(8))
    text = f"<answer>\n{blocks}```message\nadd ?\n```\n</answer>"
    found = azr.parse_proposal("induction", text, {"program": PLUS}, 6)
    assert found["inputs"] == ["2", "3", "4", "5", "6", "7"] and found["message"] == "add ?"
    assert azr.parse_proposal("induction", text, {"program": PLUS}, 9) is None
    for message in ("m", "message\n \n```\n```m"):  # none, and an empty one
        without = text.replace("message\nadd ?", message)
        assert azr.parse_proposal("induction", without, {"program": PLUS}, 6) is None


def test_a_held_out_program_is_known_by_what_it_says():
    same = ["def f(x):\n    return (x+3) % 100  # a comment\n\n", PLUS]
    assert azr.bare(same[0]) == azr.bare(same[1]) != azr.bare(PLUS.replace("3", "4"))
    for hopeless in ("def f(x", "\0", "(" * 10_000):
        assert azr.bare(hopeless) == hopeless


@pytest.mark.parametrize("count, seen", [(2, 1), (3, 2), (6, 3), (10, 5)])
def test_at_least_one_input_is_hidden_and_no_prompt_shows_an_answer(count, seen):
    inputs = [str(x) for x in range(70, 70 + count)]
    outputs = [f"'out {letter}'" for letter in "abcdefghij"[:count]]
    task = {"program": PLUS, "inputs": inputs, "outputs": outputs, "message": "add ?"}
    assert azr.shown(task) == seen < count
    text = azr.solve_prompt({**task, "kind": "induction"})[-1]["content"]
    assert [x in text for x in outputs] == [True] * seen + [False] * (count - seen)
    assert PLUS not in text
    assert outputs[0] not in azr.solve_prompt({**task, "kind": "deduction"})[-1]["content"]
    asked = azr.solve_prompt({**task, "kind": "abduction"})[-1]["content"]
    assert inputs[0] not in asked and outputs[0] in asked


def test_prompts_of_the_embedded_model_are_those_of_its_demonstrations():
    """It has been trained on exactly these words."""
    from common.tiny import demonstrations

    rng = random.Random(0)
    task = {"program": PLUS, "inputs": ["5", "6"], "outputs": ["8", "9"], "message": "add ?"}
    first_words = {
        "deduction": (demonstrations.deduce, azr.solve_prompt({**task, "kind": "deduction"})),
        "abduction": (demonstrations.abduce, azr.solve_prompt({**task, "kind": "abduction"})),
        "induction": (demonstrations.induce, azr.solve_prompt({**task, "kind": "induction"})),
        "proposal": (demonstrations.propose_program, azr.propose_prompt("deduction", [], 6)),
        "inputs": (demonstrations.propose_inputs, azr.propose_prompt("induction", [task], 6)),
    }
    for part, prompt in first_words.values():
        ours, theirs = prompt[-1]["content"], part(rng, 0)[0]
        assert ours.splitlines()[-1] == theirs.splitlines()[-1]
        assert (
            ours.splitlines()[0] == theirs.splitlines()[0] or part is demonstrations.propose_program
        )


# ------------------------------------------------------------------ the gate and the pay, with
# completions that are given
@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(1) as one:
        yield one


class Given(azr.Azr):
    """An Azr without a model: `texts` answer in order, whoever is asked."""

    def __init__(self, sandbox, texts=(), **change):
        self.cfg = azr.Args(**{"time_limit": 0.5, "inputs": 6, "difficulty_samples": 2} | change)
        self.sandbox, self.texts, self.kinds = sandbox, list(texts), azr.KINDS
        self.state = SimpleNamespace(global_step=0)
        self.memory = {"buffers": {k: [] for k in azr.KINDS}, "new": dict.fromkeys(azr.KINDS, 0)}
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0)
        self.players = {"solver": Player([], 1.0, 8, 1), "proposer": Player([], 1.0, 8, 1)}
        self.asked, self.never = [], {"held out"}

    def generate(self, name, prompts, greedy=False):
        self.asked += prompts
        return [self.texts.pop(0) for _ in prompts]

    def gather(self, values):
        return values


def deduction(program=PLUS, given="5"):
    return {"kind": "deduction", "program": program, "inputs": [given], "message": ""}


RUNS = [deduction(), deduction("def f(x):\n return {x}", "'a'")]
UNSOUND = {
    "fails": deduction("def f(x):\n return y"),
    "returns no literal": deduction("def f(x):\n return f"),
    "runs for ever": deduction("def f(x):\n while True: pass"),
    "imports time": deduction("import time\n" + PLUS),
    "has another input": deduction(PLUS, "5) or (True"),
    "cannot be parsed": deduction("def f(x:\n return x"),
}


def test_what_runs_joins_with_what_it_returns(sandbox):
    joins = Given(sandbox).check([RUNS[0], None, RUNS[1]])
    assert [*joins] == [0, 2] and joins[0]["outputs"] == ["8"] and joins[2]["outputs"] == ["{'a'}"]
    assert all(task["runs"] for task in joins.values())


@pytest.mark.parametrize("name", UNSOUND)
def test_the_gate_of_execution_keeps_the_rest_out(sandbox, name):
    assert Given(sandbox).check([UNSOUND[name]]) == {}


def test_a_program_that_returns_another_value_the_second_time_is_out(sandbox):
    clock = deduction("def f(x):\n return __import__('time').time_ns()")  # no import statement
    assert Given(sandbox).check([clock]) == {}


@pytest.mark.parametrize("gate, joins", [("off", True), ("syntax", False), ("leak", False)])
def test_gates_differ_in_what_cannot_be_parsed(sandbox, gate, joins):
    trainer = Given(sandbox, [answer("output", "7")] * 2, gate=gate, leak=0.0)
    found = trainer.check([UNSOUND["cannot be parsed"]])
    assert bool(found) is joins
    if joins:  # its answer is the model's own
        assert found[0]["outputs"] == ["7"] and found[0]["runs"] is False


def test_syntax_lets_in_what_fails(sandbox):
    trainer = Given(sandbox, [answer("output", "7"), "nothing"], gate="syntax")
    found = trainer.check([UNSOUND["fails"], RUNS[0], UNSOUND["imports time"], UNSOUND["fails"]])
    assert [*found] == [0, 1, 3]
    assert [found[i]["outputs"] for i in (0, 1, 3)] == [["7"], ["8"], [""]]


def test_a_leak_lets_in_its_share(sandbox):
    tasks = [{**UNSOUND["fails"], "message": str(i)} for i in range(400)]
    trainer = Given(sandbox, [answer("output", "7")] * 400, gate="leak", leak=0.2)
    assert 50 < len(trainer.check(tasks)) < 110


def test_own_answers_stand_for_the_truth_where_they_are_paid_by(sandbox):
    trainer = Given(sandbox, [answer("output", "9")], proposer_pay="own")
    found = trainer.check([RUNS[0]])
    assert found[0]["outputs"] == ["8"] and found[0]["own"] == ["9"]
    texts = [answer("output", "9"), answer("output", "8")]
    assert trainer.rates([found[0]] * 2, texts, 2) == [1.0, 0.0]
    trainer.cfg.proposer_pay = "grounded"
    assert trainer.rates([found[0]] * 2, texts, 2) == [0.0, 1.0]
    trainer.cfg.proposer_pay = "vote"
    texts = [answer("output", "9"), answer("output", "9"), answer("output", "8"), "nothing"]
    assert trainer.rates([found[0]] * 4, texts, 4) == [0.5] * 4


def test_all_three_kinds_are_judged_by_value(sandbox):
    trainer = Given(sandbox)
    returns = {"kind": "deduction", "program": PLUS, "inputs": ["5"], "outputs": ["{1, 2}"]}
    finds = {"kind": "abduction", "program": PLUS, "inputs": ["5"], "outputs": ["8"]}
    writes = {
        "kind": "induction",
        "program": PLUS,
        "inputs": [str(x) for x in range(6)],
        "outputs": [str(x + 3) for x in range(6)],
    }
    tables = "def f(x):\n return {0: 3, 1: 4, 2: 5}.get(x, 0)"  # the examples by heart
    cases = [
        (returns, answer("output", "{2,1}"), True),
        (returns, answer("output", "[1, 2]"), False),
        (finds, answer("input", "105"), True),  # not the proposer's input, but it returns 8
        (finds, answer("input", "6"), False),
        (finds, answer("input", "5) or (True"), False),
        (finds, answer("input", "5, 6"), False),
        (finds, answer("input", "'a'"), False),
        (writes, answer("python", "def f(x):\n return x + 3"), True),
        (writes, answer("python", tables), False),
        (writes, answer("python", "def f(x):\n while True: pass"), False),
        (writes, "no answer", False),
        (finds, answer("input", "5"), True),  # nobody took another one's result
    ]
    tasks, texts, right = zip(*cases)
    assert trainer.right(list(tasks), list(texts)) == list(right)


def test_a_task_without_an_answer_of_its_own_is_answered_by_nothing(sandbox):
    task = {"kind": "deduction", "program": PLUS, "inputs": ["5"], "outputs": [""]}
    assert Given(sandbox).right([task], [answer("output", "''")]) == [False]


def test_a_vote_pays_for_agreement_and_silence_agrees_with_nothing(sandbox):
    one, two = answer("output", "8"), answer("output", "9")
    tasks = [{**deduction(), "outputs": ["8"], "runs": True} for _ in range(3)]
    trainer = Given(sandbox, [two, one, "?", "?", two, two], solver_pay="vote")
    texts, paid = [one, "nothing", two], {}
    trainer.rollout = lambda name, rows: {"texts": texts}
    trainer.pay = lambda batch, rewards: paid.update(rewards=rewards)
    trainer.report_solutions = lambda batch, tasks, answers, right, p: paid.update(shares=p)
    trainer.solve(tasks)
    assert paid == {"rewards": [0.25, -1.0, 1.0], "shares": [0.5, 0.0, 1.0]}


def test_a_buffer_drops_its_oldest_and_knows_what_is_new(sandbox):
    trainer = Given(sandbox, pool_size=4)
    old = [{"kind": "deduction", "program": str(i)} for i in range(3)]
    trainer.memory["buffers"]["deduction"] = old
    new = [{"kind": "deduction", "program": str(i), "own": ["1"]} for i in (3, 4)]
    kept_out = {"kind": "deduction", "program": "held out"}
    trainer.join([*new, {"kind": "abduction", "program": "5"}, kept_out])
    assert [t["program"] for t in trainer.memory["buffers"]["deduction"]] == ["1", "2", "3", "4"]
    assert trainer.memory["new"] == {"deduction": 2, "abduction": 1, "induction": 0}
    assert all("own" not in task for task in trainer.memory["buffers"]["deduction"])


def test_the_newest_tasks_are_solved_first(sandbox):
    trainer = Given(sandbox, questions=3, references=2)
    for kind in azr.KINDS:
        tasks = [{"kind": kind, "program": f"{kind} {i}", "inputs": ["1"]} for i in range(5)]
        trainer.memory["buffers"][kind] = tasks
    trainer.memory["new"] = {"deduction": 2, "abduction": 0, "induction": 5}
    references, tasks = trainer.draw()
    of = {kind: [t["program"] for t in tasks if t["kind"] == kind] for kind in azr.KINDS}
    assert of["deduction"][:2] == ["deduction 3", "deduction 4"] and len(of["deduction"]) == 3
    assert of["induction"] == ["induction 2", "induction 3", "induction 4"]
    assert len(of["abduction"]) == 3
    for kind, some in references:
        assert len(some) == (1 if kind == "induction" else 2)
        assert all(("induction" not in t["program"]) for t in some)
    assert trainer.draw() == (references, tasks)  # the same on all processes, and after a resume


def proposing(sandbox, texts, solver_says, **change):
    """What proposals of deduction tasks are paid, and the buffer afterwards."""
    trainer, paid = Given(sandbox, solver_says, **change), []
    trainer.rollout = lambda name, rows: {"texts": texts, "notes": [{} for _ in rows]}
    trainer.pay = lambda batch, rewards: paid.extend(rewards.tolist())
    trainer.log_mean = lambda *_: None
    trainer.propose([("deduction", [RUNS[0]])] * len(texts))
    return paid, trainer.memory["buffers"]["deduction"]


@pytest.mark.parametrize(
    "change, paid",
    [
        ({}, [0.5, -0.5, -0.5, -1, -1]),
        ({"paper_extremes": True}, [0.5, 0, 0, -1, -1]),
        # R-Zero pays for a majority of one half, and little for agreement, right or wrong
        ({"proposer_pay": "rzero"}, [0.8, 0, 0, 0, 0]),
        ({"proposer_pay": "vote"}, [0.5, -0.5, -0.5, -1, -1]),
    ],
)
def test_a_proposer_is_paid_for_what_the_solver_can_half_do(sandbox, change, paid):
    """n = 2: of two answers to 5 + 3 one is right, of those to 5 + 4 none, to 5 + 5 both. The
    fourth program fails, and the last text has not the form."""
    programs = [PLUS.replace("3", n) for n in "345"] + ["def f(x):\n return y"]
    said = [answer("output", value) for value in ("8", "7", "1", "1", "10", "10")]
    texts = [*map(proposal, programs), "I would rather not."]
    found, buffer = proposing(sandbox, texts, said, **change)
    assert found == pytest.approx(paid)
    assert [task["outputs"] for task in buffer] == [["8"], ["9"], ["10"]]


def test_proposals_that_repeat_each_other_are_paid_less_by_rzero(sandbox):
    said, texts = [answer("output", x) for x in "8787"], [proposal()] * 2 + ["none"] * 2
    paid, _ = proposing(sandbox, texts, said, proposer_pay="rzero")
    assert paid == [0.5, 0.5, 0, 0]  # 1 - 2 / 4


@pytest.mark.parametrize("train_proposer", [True, False])
def test_a_step_whitens_proposals_and_answers_of_each_kind_apart(sandbox, train_proposer):
    trainer = Given(sandbox, train_proposer=train_proposer)
    kinds = ["deduction", "deduction", "abduction", "abduction"]
    trainer.draw = lambda: ([(kind, []) for kind in kinds], [{"kind": kind} for kind in kinds])
    trainer.propose = lambda references: {"rewards": torch.tensor([0.5, -1.0, 0.25, 0.75])}
    trainer.solve = lambda tasks: {"rewards": torch.tensor([1.0, -0.5, -0.5, -0.5])}
    trainer.concat = lambda parts: {"rewards": torch.cat([part["rewards"] for part in parts])}
    trainer.over_all_processes = lambda fn, *rows: fn(*rows)
    (batch,) = trainer.step([])
    z = 0.5**0.5  # of two values, one above and one below: +-1/sqrt(2)
    proposals = [z, -z, -z, z] if train_proposer else [0.0] * 4
    assert batch["player"] == "agent"
    assert batch["advantages"].tolist() == pytest.approx([*proposals, z, -z, 0, 0], abs=1e-5)


def test_evaluation_by_hand(sandbox):
    """12 held-out tasks of all kinds, 2 answers each; what the proposer writes is tried, too."""
    one = {"kind": "deduction", "program": PLUS, "inputs": ["5"], "outputs": ["8"], "runs": True}
    many = {"inputs": [*"012345"], "outputs": [*"345678"], "message": "add ?"}
    held_out = [one] * 6 + [one | {"kind": "abduction"}] * 3
    held_out += [one | many | {"kind": "induction"}] * 3
    right = {"deduction": answer("output", "8"), "abduction": answer("input", "105")}
    right["induction"] = answer("python", PLUS)
    # the first of two samples is right; greedily deductions are
    samples = [text for task in held_out for text in (right[task["kind"]], "nothing")]
    likeliest = [right["deduction"] if t["kind"] == "deduction" else "nothing" for t in held_out]
    inputs = "".join(f"```input\n{x}\n```\n" for x in range(6))
    proposals = [proposal(PLUS.replace("3", "9")), proposal("def f(x):\n return y")]
    proposals += [proposal(), proposal(PLUS.replace("3", "8"))]
    proposals += [f"<answer>\n{inputs}```message\nadd ?\n```\n</answer>", "nothing"]
    trainer = Given(sandbox, [*samples, *likeliest, *proposals], eval_samples=2)
    trainer.memory["buffers"]["abduction"] = [one | {"program": PLUS.replace("3", "8")}]
    trainer.generate_all = trainer.generate
    trainer.in_parallel = lambda fn, items: fn(items)
    assert azr.evaluate(trainer, held_out) == pytest.approx(
        {f"solver/{what}": 1 / 2 for what in ("accuracy", *azr.KINDS)}
        | {"solver/accuracy_greedy": 1 / 2, "solver/deduction_greedy": 1.0}
        | {"solver/abduction_greedy": 0.0, "solver/induction_greedy": 0.0}
        | {
            "proposer/valid": 4 / 6,
            # two of four programs: of the others one is held out, and one is in a buffer
            "proposer/new": 2 / 4,
        }
    )


# ------------------------------------------------------------------ runs
def test_buffers_grow_by_what_runs(finished):
    folder, out, _ = finished("azr.py")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "proposer/valid" in row]
    grown = [b["co/tasks"] - a["co/tasks"] for a, b in zip(steps, steps[1:])]
    joined = [round(row["proposer/joined"] * 12) for row in steps[1:]]  # 3 kinds of 4 proposals
    assert grown == joined and all(row["co/tasks_that_run"] == 1 for row in steps)
    assert all(row["proposer/valid"] == row["proposer/joined"] for row in steps)
    assert all(row["co/paid_minus_true"] == pytest.approx(0, abs=1e-6) for row in steps)


@pytest.mark.parametrize(
    "flags",
    ["--kinds deduction --references 0", "--kinds no-induction --no-train-proposer"]
    + ["--gate off --solver-pay vote --proposer-pay vote", "--gate leak --proposer-pay rzero"]
    + ["--gate syntax --proposer-pay own --paper-extremes"],
)
def test_switches(tmp_path, brief, flags):
    micro = "" if "all" in flags else " --micro-batch 8"
    brief("azr.py", *small("azr.py", tmp_path, *f"{flags}{micro} --steps 2".split()))
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2 and any("eval/solver/deduction" in row for row in rows)
    recorded = [json.loads(row) for row in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    if "--no-train-proposer" in flags:
        of = [row for row in recorded if row["player"] == "proposer"]
        assert all(not any(row["advantages"]) for row in of)


def test_programs_from_a_file(tmp_path, brief):
    rows = [
        {"program": f"def f(x):\n return (x+{1 + i % 9})%100", "inputs": ["1", "2", "3", "4"]}
        | {"message": f"m{i}"}
        for i in range(40)
    ]
    rows = [row | {"program": row["program"] + f"  # {i}"} for i, row in enumerate(rows)]
    file = tmp_path / "functions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = f"--dataset {file} --inputs 4 --steps 1"
    assert "held-out" in brief("azr.py", *small("azr.py", tmp_path / "run", *more.split()))


def test_a_held_out_program_is_not_learnt_from_under_another_comment(tmp_path, brief):
    """All rows but some are one program: where it is held out, the seeds have none of it."""
    program = "def f(x):\n return (x+{})%100  # {}"
    rows = [{"program": program.format(1, i), "inputs": ["1", "2", "3", "4"]} for i in range(40)]
    rows += [{"program": program.format(i, 0), "inputs": ["1", "2", "3", "4"]} for i in range(2, 9)]
    file = tmp_path / "functions.jsonl"
    file.write_text("".join(json.dumps(row | {"message": "m"}) + "\n" for row in rows))
    more = f"--dataset {file} --inputs 4 --steps 1 --save-every 1"
    brief("azr.py", *small("azr.py", tmp_path / "run", *more.split()))
    memory = json.loads((tmp_path / "run" / "checkpoint-1" / "memory.json").read_text())
    learnt = {azr.bare(task["program"]) for some in memory["buffers"].values() for task in some}
    assert learnt and azr.bare(program.format(1, "")) not in learnt


def test_one_row_of_a_kind_has_nothing_to_be_compared_with(tmp_path):
    said = refused("azr.py", "--questions", 1, "--micro-batch", 1, "--out", tmp_path / "run")
    assert "--questions 1: advantages compare at least two rows" in said


def test_programs_of_which_none_runs_are_refused(tmp_path):
    rows = [{"program": f"def f(x): return y{i}", "inputs": ["1", "2"]} for i in range(60)]
    file = tmp_path / "functions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused("azr.py", *small("azr.py", tmp_path / "run", "--dataset", file))
    assert str(file) in said and "makes a task of every kind" in said
