"""What a forker gets wrong is said: the example of docs/your-own-script.md, each time with one
mistake in it, run as its author would. Those that one call shows: tests/common/test_checks.py.
"""

import re

import pytest
from conftest import ROOT, evaluated_once, load, run_module

PAGE = (ROOT / "docs" / "your-own-script.md").read_text()
EXAMPLE, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHORT = "--steps 1 --questions 2 --group-size 4 --eval-questions 4 --tokens 24 --eval-samples 1"

REWARD = "self.set_rewards(solver, [r + 0.5 * a for r, a in zip(right, accepted)])"
BACK = "return [judge, solver]"

PLAYER, LOADED = "Player([], args.lr, tokens, G)", "load=load_for_steps"
PROMPT = "prompt=solve_prompt"
FIGURES = 'return {"solver/accuracy": mean(right)}'
EVERY = "load=lambda a: tuple([{} for r in part] for part in load_for_steps(a))"
UPDATE = """more = trainer.rollout("solver", [{"prompt": solve_prompt("1+1")}] * 4)
    trainer.set_rewards(more, range(4))
    trainer.update(more)
    """
SPACE = "load=lambda a: (load_for_steps(a)[0], [r | {'question': r['question'] + ' '} for r in "
SPACE += "load_for_steps(a)[0]])"

ROLES = EXAMPLE[EXAMPLE.index(PLAYER) : EXAMPLE.index(BACK) + len(BACK)]
ONE = ROLES.replace(PLAYER, f'{PLAYER[:-1]}, adapter="judge")').replace(BACK, "return [judge]")
LOSS = "    def loss(self, batch):\n        loss, shown = super().loss(batch)\n"
LOSS += "        return {}, shown\n\n    def step("
MEAN = LOSS.format("loss * batch.total_tokens / batch.completion_mask.sum()")

REFUSED = [  # old, new, the sentence
    ("tokens, G, reads", "tokens, G, 0.0, reads", "the judge decodes greedily, so the 4"),
    (BACK, f"self.score(solver); {BACK}", "score belongs in `loss`, or in `with self.playing"),
    (BACK, f"solver.extras['x'] = [1]; {BACK}", "has 8 rows, and batch.extras['x'] has 1"),
    (REWARD, f"solver.advantages = solver.rewards * 0; {REWARD}", "would replace the advantages"),
    (REWARD, "self.set_rewards(solver, [1e30, *right[1:]])", "a reward of the solver is 1e+30"),
    ('["judge/reward"]', '"judge/reward"', "curves: 'judge' needs a list of metrics; got 'judge/"),
    ("tokens, G, reads", "tokens, 0, reads", "group_size 0"),
    (PLAYER, "Player([], args.lr)", "missing 1 required positional argument: 'max_tokens'"),
    (
        "    @staticmethod\n    def define_players(args",
        "    def define_players(self, args",
        "be a @staticmethod",
    ),
    (PROMPT, f"{PROMPT}, config={{'max_steps': 9}}", "or lead the run astray"),
    (LOADED, EVERY.format("r | {'answer': 7}"), "training row 0: 'answer' must be a text; got 7"),
    (LOADED, SPACE, "rollout trains the solver on a held-out question"),
    ("(completions, right, **_)", "(completions, rigth, **_)", "'rigth'. It is given completions"),
    (BACK, f"solver.notes[0]['a'] = {{1}}; {BACK}", "a note cannot hold {1}"),
    (FIGURES, UPDATE + FIGURES, "update inside of `evaluate` would train on held-out questions"),
    ('return {"solver/accuracy": mean(right)}', "return None", "evaluate must return a dict"),
]
SAID = [  # old, new, the line
    ("Verify its {steps} steps.", "Verify its {steps + 1} steps.", "what the judge is asked: 'Ver"),
    (
        PLAYER,
        PLAYER.replace("G", "G // 2"),
        "the solver comes 4 times in a row, and its group_size",
    ),
    (ROLES, ONE, "nobody was trained on what `rollout` sampled of the solver in this run"),
    ("    def step(", MEAN, "loss of a micro-batch is not the sum of those of its halves"),
    ('"solver", held_out,', '"solver", trainer.train_rows[:4],', "asks training questions"),
    ('self.log_mean("solver/', 'self.log_mean("solvr/', "no player's name; is it solver?"),
    (BACK, f"self.train_rows[0]['a'] = 1; {BACK}", "self.train_rows was set or changed in the"),
    (FIGURES, f"trainer.first = right; {FIGURES}", "self.first was set or changed in `evaluate`"),
    ('"solver": ["solver/accuracy"', '"solver": ["solver/acuracy"', "is it solver/accuracy?"),
    (BACK, "return [judge]", "note: the solver was never trained in this run"),
    (BACK, "self.log_mean('co/x', float('nan')); return [judge, solver]", "was logged as NaN"),
    ("[float(accepts", "[None and float(accepts", "agreement gave none of the judge's"),
    ("Verify its {steps} steps.", "Is this right?", "has not been taught to answer what the judge"),
    (
        '{"prompt": asked[i], "right": right[i]}',
        '{**rows[i], "prompt": judge_prompt("", rows[i]["reference"]), "right": right[i]}',
        "every prompt of the judge shows its row's reference solution",
    ),
]
UNSAID = [  # old, new, what shows it: no check can know what was meant
    (BACK, f"solver.advantages = solver.rewards - 0.5; {BACK}", "the credit of the report"),
    ("zip(completions, right)", "zip(completions, _.get('rigth', [0] * 99))", "a gradient of 0"),
    ("is_correct(text, row", "is_correct(boxed(text) or '', row", "an accuracy of exactly 0"),
    ('boxed(judgement) == "CORRECT"', '"CORRECT" in judgement', "the judge accepts everything"),
    ("[r + 0.5 * a for", "[r - 0.5 * a for", "the judge's opinion falls as the solver learns"),
    ('judge_prompt(row["question"]', 'judge_prompt(rows[0]["question"]', "the report's prompts"),
    ('("solver/accuracy", right)', '("solver/accuracy", accepted)', "held out and logged differ"),
    ("    def step(", LOSS.format("2 * loss"), "the learning rate"),
]


@pytest.fixture
def fork(tmp_path, no_report):
    """fork(old, new) runs the example with that change -> (output, errors, exit code)."""

    def run(old: str, new: str, arguments: str = SHORT):
        assert EXAMPLE.count(old) == 1, old
        path = tmp_path / "fork.py"
        path.write_text(EXAMPLE.replace(old, new))
        module = load(path)
        evaluated_once(module, most_tokens=2)
        return run_module(module, *arguments.split(), "--out", tmp_path / "run")

    return run


@pytest.mark.parametrize("old, new, says", REFUSED)
def test_it_ends_in_a_sentence(fork, old, new, says):
    _, errors, code = fork(old, new)
    assert code == 2 and errors.count("error: ") == 1 and says in errors, errors
    assert "Traceback" not in errors


def test_the_sentence_names_the_line(fork):
    """Not that of a library, nor of `main`."""
    _, errors, _ = fork(REWARD, "self.set_rewards(solver, right[:3])")
    number = next(i for i, text in enumerate(EXAMPLE.splitlines(), 1) if REWARD in text)
    assert f"fork.py, line {number} (self.set_rewards(solver, right[:3])): " in errors


@pytest.mark.parametrize("old, new, says", SAID)
def test_it_is_said_in_a_line(fork, old, new, says):
    output, errors, code = fork(old, new)
    assert code is None and says in output, output + errors


@pytest.mark.parametrize("old, new, shows", UNSAID)
def test_nothing_can_know_it(fork, old, new, shows):
    """One that is said after all belongs to the mistakes above. (With two tokens in the evaluation
    the accuracy there is 0, of too few samples to say anything.)"""
    output, errors, code = fork(old, new, SHORT.replace("--tokens 24", "--tokens 80"))
    assert code is None and not re.search("warning: |note: ", output), output + errors


def test_few_mistakes_are_unsaid():
    assert len(UNSAID) <= 20 and all(len(shows) > 10 for *_, shows in UNSAID)


@pytest.mark.parametrize("questions, after", [(4, "2 steps"), (2, "1 step")])
def test_questions_that_come_again_are_said(fork, questions, after):
    few = f"load=lambda args: tuple(rows[:{questions}] for rows in load_for_steps(args))"
    steps = SHORT.replace("--steps 1", "--steps 3")
    output, _, _ = fork(LOADED, few, steps)
    assert f"after {after} its {questions} questions come again" in output


def test_a_fork_may_call_its_arguments_as_it_likes(fork):
    """`beta` may be 0 although spin.py's may not: a bound belongs to the argument."""
    code = fork("tokens: Tokens", "beta: float = 0.0\n    tokens: Tokens", f"{SHORT} --beta 0")[2]
    assert code is None
