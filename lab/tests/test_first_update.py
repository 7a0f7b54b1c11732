"""first_update.py: what is counted of texts that are known, and that every script can be run."""

import importlib
import itertools
import json
from types import SimpleNamespace

import aprm
import azr
import coverrl
import cure
import deepseekmath
import gar
import mae
import raro
import self_rewarding
import self_taught
import ssp
import ssr
from common import fast
from common.run import launch
from common.tasks.answers import SOLVED
from common.tasks.verdicts import VERIFIED
from lab.runs import first_update, pages
from lab.runs.first_update import PLAN, READ, WORST

import pytest
import torch
import tyro
from transformers import AutoTokenizer

EXAMPLES = {  # of each role that has a form of its own: what the user says and the model answers
    ("tango", "generator"): SOLVED,
    ("tango", "verifier"): VERIFIED,
    ("cure", "coder"): cure.PROGRAMS,
    ("cure", "tester"): cure.TESTS,
    ("gar", "discriminator"): gar.JUDGED,
    ("deepseekmath", "generator"): deepseekmath.PROVED,
    ("deepseekmath", "verifier"): deepseekmath.GRADED,
    ("deepseekmath", "meta"): deepseekmath.META_GRADED,
    ("mae", "proposer"): mae.PROPOSED,
    ("mae", "judge"): mae.SCORED_QUESTIONS,
    ("azr", "proposer"): azr.proposed("deduction", 4) + azr.proposed("induction", 4),
    ("azr", "solver"): [pair for kind in azr.KINDS for pair in azr.solved(kind)],
    ("ssr", "injector"): ssr.examples(of_injector=True),
    ("ssr", "solver"): ssr.examples(of_injector=False),
    ("genrm", "verifier"): VERIFIED,
    ("coverrl", "verifier"): VERIFIED,
    ("coverrl", "corrector"): coverrl.CORRECTED,
    ("self_taught", "judge"): self_taught.EXAMPLES,
    ("raro", "critic"): raro.EXAMPLES,
    ("aprm", "corruptor"): aprm.CORRUPTED,
    ("aprm", "verifier"): VERIFIED,
    ("self_verify", "verifier"): VERIFIED,
    ("ssp", "proposer"): ssp.PROPOSED,
    ("self_rewarding", "judge"): self_rewarding.GRADED,
}


@pytest.mark.parametrize("role", EXAMPLES)
def test_a_roles_reader_takes_its_form_and_no_prose(role):
    script, player = role
    for user, text in EXAMPLES[role]:
        assert READ[script][player](text, user)
        assert not READ[script][player]("I think that the answer is 7, and all of it holds.", user)


def test_a_reader_looks_at_what_was_asked():
    (asked, text), (other, _) = VERIFIED
    assert not READ["tango"]["verifier"](text, other)  # three verdicts on two steps
    assert not READ["aprm"]["verifier"](text, other)
    shown, test = cure.TESTS[0]
    repeated = next(line for line in shown.splitlines() if line.startswith("assert"))
    assert not READ["cure"]["tester"](repeated, shown)


@pytest.mark.parametrize("script", PLAN)
def test_a_scripts_plan_fits_it(script):
    """Its arguments are the script's, its steps are run, and its roles are players."""
    module, (words, numbers) = importlib.import_module(script), PLAN[script]
    words = [*first_update.OF_ALL.split(), *words.split()]
    args = tyro.cli(module.Args, args=["--model", "x", "--dataset", "x.jsonl", *words])
    assert max(numbers) < args.steps
    trainer = next(
        of
        for of in vars(module).values()
        if isinstance(of, type) and of.__module__ == script and hasattr(of, "define_players")
    )
    players = trainer.define_players(args)
    assert READ[script].keys() <= players.keys()
    assert {role for name, role in WORST if name == script} <= READ[script].keys()


def test_what_is_counted_of_known_texts(monkeypatch, tmp_path):
    """Of a group of four solutions the first two are right, the third is wrong, and the fourth is
    cut; another group's are all wrong. The verifier writes one judgement that fits four steps, one
    that can be read and does not, and otherwise nothing that can be read.
    """
    rows = [{"question": f"Question {k}?", "answer": "7"} for k in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(launch.load_model.__globals__["EMBEDDED"]["tiny"])
    steps = "<step>3+4=7</step>\n<step>7+0=7</step>\n"
    right, wrong = (rf"{steps}<answer>\boxed{{{a}}}</answer>" for a in (7, 8))
    verdict = r"<step>\boxed{CORRECT}</step>"
    final = r"<final_verification>\boxed{CORRECT}</final_verification>"
    fits, does_not = (
        f"<step_verification>{verdict * n}</step_verification>{final}" for n in (2, 3)
    )
    solutions = itertools.chain([wrong] * 2, [right, right, wrong, steps], [wrong] * 4)
    judgements = itertools.chain([fits, does_not], itertools.repeat("Right."))

    def generate(model, prompt_ids, max_tokens, temperature, ends, keys):
        written = []
        for ids in prompt_ids:
            asked = tokenizer.decode(ids)
            text = next(judgements if "Verify its" in asked else solutions)
            end = [] if text == steps else [tokenizer.eos_token_id]
            written.append(tokenizer(text, add_special_tokens=False).input_ids + end)
        return written, [[0.0] * len(row) for row in written]

    monkeypatch.setattr(fast, "generate", generate)
    words = "--questions 2 --group-size 4 --kl 0 --steps 2 --ver-warmup 1"
    monkeypatch.setitem(PLAN, "tango", (words, (0, 1)))
    before = launch.load_model, launch.players_of
    found = first_update.run_script("tango", "tiny", str(file), 0.5)
    assert (launch.load_model, launch.players_of) == before and found["ended"] == ""
    solver, verifier = found["roles"]["generator"], found["roles"]["verifier"]
    # two solutions for the verifier's step, then two groups of four
    counts = {"texts": 10, "read": 9, "cut": 1, "solutions": 10, "right": 2, "rollouts": 8}
    counts |= {"above": 2, "worst": 0, "groups": 2, "mixed": 1, "temperature": 0.5}
    assert solver.items() >= counts.items()
    shown = [row["right"] for row in solver["shown"]]
    assert shown == [False, True, False, False] and solver["shown"][1]["reward"] == 1
    # two groups of four judgements, of wrong solutions; a judgement of form alone earns something
    counts = {"texts": 16, "read": 1, "cut": 0, "solutions": 0, "rollouts": 8, "above": 2}
    assert verifier.items() >= (counts | {"groups": 2, "mixed": 1}).items()
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (fits, does_not)]
    other = len(tokenizer("Right.", add_special_tokens=False).input_ids) + 1
    assert verifier["tokens"] == sum(map(len, ids)) + 2 + 14 * other
    file = tmp_path / "first_update.json"
    file.write_text(json.dumps({"M": {"tango": found}}))
    monkeypatch.setattr(pages, "EVIDENCE", tmp_path)
    table = pages.first_update().splitlines()
    assert table[0] == "M:"
    assert table[4].startswith("| `tango.py` | generator | 9 of 10 | 2 of 10 | 2 of 8 | 1 of 2 | ")
    assert table[5].startswith("| `tango.py` | verifier | 1 of 16 | - | 2 of 8 | 1 of 2 | ")


def test_groups_without_rewards_are_those_of_a_prompt():
    """Of all calls together, as rstar.py has a call for each solution of a question. Of a question
    that has no known answer nothing is counted as right.
    """
    texts = [r"<step>a</step> \boxed{7}", r"<step>a</step> \boxed{8}", "nothing", r"\boxed{7}"]
    asked = ["p", "p", "q", "r"]
    call = first_update.Call("generator", asked, asked, texts, [1] * 4, [False] * 4, 1.0)
    other = first_update.Call("verifier", ["p"], ["p"], ["x"], [1], [True], 1.0)
    found = first_update.figures("vstar", "generator", [call, other, call], {"p": "7", "q": "7"})
    counts = {"texts": 8, "read": 4, "solutions": 6, "right": 2, "rollouts": 0, "above": 0}
    assert found.items() >= (counts | {"groups": 2, "mixed": 1, "seconds": 2.0}).items()


def test_coverrl_compares_rows_by_its_own_keys(monkeypatch):
    call = first_update.Call("verifier", ["q"] * 3, ["p"] * 3, ["t"] * 3, [1] * 3, [False] * 3, 0.0)
    call.batch, keys = (
        SimpleNamespace(rewards=torch.tensor([1.0, 0.0, 1.0])),
        [(0, 1), (0, 1), (0, 2)],
    )
    monkeypatch.setattr(coverrl.CoVerRL, "set_advantages", lambda *_: None)
    with first_update.watched([call]):
        coverrl.CoVerRL.set_advantages(None, call.batch, [], keys, [])
    rows = first_update.rows_of(0, call, {})
    assert [row["group"] for row in rows] == [(0, key) for key in keys]
