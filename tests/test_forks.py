"""What a forker gets wrong is said: the example of docs/your-own-script.md, each time with one
mistake in it, run as its author would. Those that one call shows: tests/common/test_checks.py.
"""

import re

import pytest
from conftest import ROOT, evaluated_once, load, run_module

PAGE = (ROOT / "docs" / "your-own-script.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHORT = "--steps 1 --questions 2 --group-size 4 --eval-questions 4 --tokens 24 --eval-samples 1"

REWARD = "self.set_rewards(solver, [r + 0.5 * a for r, a in zip(right, accepted)])"
BACK = "return [judge, solver]"

REFUSED = [  # old, new, the sentence
    ("tokens, G, reads", "tokens, 0, reads", "group_size 0"),
    ('rollout("solver"', 'rollout("sover"', "there is no player 'sover'"),
    ("args.group_size)", "args.group_size, config={'top_p': 0.9})", "would have no effect"),
    ('return {"solver/accuracy": mean(right)}', "return None", "evaluate must return a dict"),
    (
        "load_for_steps, evaluate",
        "lambda _: ([{'question': '1+1'}, {'questions': '1+2'}], []), evaluate",
        "training row 1 differs from row 0 in its columns: question, questions",
    ),
]
SAID = [  # old, new, the line
    ('"solver": ["solver/accuracy"', '"solver": ["solver/acuracy"', "is it solver/accuracy?"),
    (BACK, "return [judge]", "note: the solver was never trained in this run"),
    (BACK, "self.pool = [1]; return [judge, solver]", "self.pool was set or changed in the first"),
    (BACK, "self.log_mean('co/x', float('nan')); return [judge, solver]", "was logged as NaN"),
    ("[float(accepts", "[None and float(accepts", "agreement gave none of the judge's"),
    ("Verify its {steps} steps.", "Is this right?", "has not been taught to answer what the judge"),
    (
        '{"prompt": asked[i], "right": right[i]}',
        '{**rows[i], "prompt": judge_prompt("", rows[i]["reference"]), "right": right[i]}',
        "every prompt of the judge shows its row's reference solution",
    ),
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


def test_questions_that_come_again_are_said(fork):
    four = "lambda args: tuple(rows[:4] for rows in load_for_steps(args)), evaluate"
    steps = SHORT.replace("--steps 1", "--steps 3")
    output, _, _ = fork("load_for_steps, evaluate", four, steps)
    assert "after 2 steps its 4 questions come again" in output


def test_a_fork_may_call_its_arguments_as_it_likes(fork):
    """`beta` may be 0 although spin.py's may not: a bound belongs to the argument."""
    code = fork("tokens: Tokens", "beta: float = 0.0\n    tokens: Tokens", f"{SHORT} --beta 0")[2]
    assert code is None
