"""What a forker gets wrong is said: the example of docs/your-own-script.md, each time with one
mistake in it, run as its author would. Those that one call shows: tests/common/test_checks.py.
"""

import re

import pytest
from conftest import ROOT, evaluated_once, load, run_module

PAGE = (ROOT / "docs" / "your-own-script.md").read_text()
EXAMPLE, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHORT = "--steps 1 --questions 2 --group-size 4 --eval-questions 4 --tokens 24 --eval-samples 1"

REWARD = "self.set_rewards(solver, [r + 0.5 * a for r, a in zip(right, accepted)])"
BACK = "return [verifier, solver]"
PLAYER, LOADED = "Player([], args.lr, tokens, G)", "load=load_for_steps"
PROMPT = "prompt=solve_prompt"
FIGURES = 'return {"solver/accuracy": mean(right)}'
DEFINED = "    @staticmethod\n    def define_players(args"
UPDATE = """more = trainer.rollout("solver", [{"prompt": solve_prompt("1+1")}] * 4)
    trainer.set_rewards(more, range(4))
    trainer.update(more)
    """
ROLES = EXAMPLE[EXAMPLE.index(PLAYER) : EXAMPLE.index(BACK) + len(BACK)]
ONE = ROLES.replace(PLAYER, f'{PLAYER[:-1]}, adapter="verifier")').replace(
    BACK, "return [verifier]"
)
HALF = PLAYER.replace("G", "G // 2")

REFUSED = [  # old, new, the sentence
    ("tokens, G, reads", "tokens, G, 0.0, reads", "the verifier decodes greedily, so the 4"),
    (BACK, f"self.score(solver); {BACK}", "score belongs in `loss`, or in `with self.playing"),
    (DEFINED, "    def define_players(self, args", "be a @staticmethod"),
    (PROMPT, f"{PROMPT}, config={{'max_steps': 9}}", "or lead the run astray"),
    (BACK, f"solver.notes[0]['a'] = {{1}}; {BACK}", "a note cannot hold {1}"),
    (FIGURES, UPDATE + FIGURES, "update inside of `evaluate` would train on held-out questions"),
]
SAID = [  # old, new, the line
    (PLAYER, HALF, "the solver comes 4 times in a row, and its group_size"),
    (ROLES, ONE, "nobody was trained on what `rollout` sampled of the solver in this run"),
    ('"solver", held_out,', '"solver", trainer.train_rows[:4],', "asks training questions"),
    (BACK, "return [verifier]", "note: the solver was never trained in this run"),
    ("[float(accepts", "[None and float(accepts", "agreement gave none of the verifier's"),
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


def test_the_sentence_names_the_line(fork):
    """Not that of a library, nor of `main`."""
    _, errors, _ = fork(REWARD, "self.set_rewards(solver, right[:3])")
    number = next(i for i, text in enumerate(EXAMPLE.splitlines(), 1) if REWARD in text)
    assert f"fork.py, line {number} (self.set_rewards(solver, right[:3])): " in errors


@pytest.mark.parametrize("old, new, says", SAID)
def test_it_is_said_in_a_line(fork, old, new, says):
    output, errors, code = fork(old, new)
    assert code is None and says in output, output + errors


def test_of_the_example_itself_nothing_is_said(fork):
    """A beta of 0 is no mistake either, although spin.py's may not be: a bound belongs to the
    argument.
    """
    arguments = SHORT.replace("--tokens 24", "--tokens 80 --beta 0")
    output, errors, code = fork(
        "tokens: Tokens", "beta: float = 0.0\n    tokens: Tokens", arguments
    )
    assert code is None and not re.search("warning: |note: ", output), output + errors


def test_questions_that_come_again_are_said(fork):
    few = "load=lambda args: tuple(rows[:2] for rows in load_for_steps(args))"
    output, _, _ = fork(LOADED, few, SHORT.replace("--steps 1", "--steps 2"))
    assert "after 1 step its 2 questions come again" in output
