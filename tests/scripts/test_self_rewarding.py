"""self_rewarding.py: scores and pairs by hand, the loss against TRL, the reference that is
the model of the round before, what the judge learns from, hostile texts, runs."""

import json
import math
import random
from types import SimpleNamespace

import self_rewarding as sr
from common.args import fill_in, grpo_config
from common.errors import UserError
from common.model import TINY, load_model
from common.tiny.tasks import gold_solution

import pytest
import torch
from conftest import answering, refused, small
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

QUESTION = "(38+4)*7 mod 100"
RIGHT = gold_solution(QUESTION)
WRONG = "<step>38+4=41</step>\n<step>41*7=87</step>\n<answer>\\boxed{87}</answer>"
EOS = 4


# ------------------------------------------------------------------ scores and pairs
def test_a_reading_that_cannot_be_read_is_no_zero():
    assert sr.mean_score([1.0, None, 0.5]) == 0.75
    assert sr.mean_score([None, None]) is None and sr.mean_score([]) is None
    assert sr.mean_score([0.0]) == 0.0
    assert sr.mean_score([1.0, None]) is None  # one lucky reading of two is no score
    assert sr.place_of([None]) < sr.place_of([0.0]) < sr.place_of([0.5, 0.0])


@pytest.mark.parametrize("seed", range(50))
def test_best_and_worst_by_sorting(seed):
    rng = random.Random(seed)
    scores = [rng.choice([None, 0.0, 0.5, 1.0]) for _ in range(rng.randint(0, 5))]
    known = sorted((s, i) for i, s in enumerate(scores) if s is not None)
    found = sr.best_and_worst(scores)
    if not known or known[0][0] == known[-1][0]:
        assert found is None
    else:
        best, worst = found
        assert (scores[best], scores[worst]) == (known[-1][0], known[0][0])
        assert scores.index(scores[best]) == best and scores.index(scores[worst]) == worst


def test_judgements_are_balanced_between_the_orders():
    some = [{"choice": n, "id": i} for i, n in enumerate([1, 1, 2, 1, 2])]
    assert [j["id"] for j in sr.balanced(some)] == [0, 1, 2, 4]
    assert sr.balanced([{"choice": 1}] * 3) == []  # who always says 1 teaches nothing


# ------------------------------------------------------------------ parsing
@pytest.mark.parametrize(
    "text, score",
    [
        ("Defects: none\nScore: \\boxed{1}", 1.0),
        ("Score: \\boxed{0.5}\n", 0.5),
        ("Defects: 1\nScore:\\boxed{0}", 0.0),
        ("Score: \\boxed{1}\nScore: \\boxed{0}", 0.0),  # the last word counts
        ("**Score:** $\\boxed{ 1.0 }$.", 1.0),
        ("  **Score**: \\boxed{.5}", 0.5),
        ("Score: \\boxed{1} or so", None),
        ("Score: \\boxed{1}\nDefects: 2", None),
        ("My Score: \\boxed{1}", None),
        ("Score: \\boxed{2}", None),
        ("Score: \\boxed{0.50}", None),
        ("Score: \\boxed{-1}", None),
        ("Score: \\boxed{١}", None),  # an Arabic 1
        ("", None),
    ],
)
def test_scores_are_read_from_the_last_line(text, score):
    assert sr.parse_score(text) == score


@pytest.mark.parametrize(
    "text, choice",
    [
        ("\\boxed{1}", 1),
        ("<step>a:3\\boxed{CORRECT}</step>\n\\boxed{2} \n", 2),
        ("\\boxed{1}\\boxed{2}", 2),
        ("\\boxed{1} is right", None),
        ("\\boxed{3}", None),
        ("\\boxed{CORRECT}", None),
        ("", None),
        (r"The second. $\boxed{ 2 }$.", 2),
        (r"\boxed{1}, or \boxed{12}", None),
    ],
)
def test_choices_are_read_from_the_end(text, choice):
    assert sr.parse_choice(text) == choice


@given(st.text(max_size=60))
def test_any_text_can_be_read(text):
    assert sr.parse_score(text) in (None, 0.0, 0.5, 1.0) and sr.parse_choice(text) in (None, 1, 2)
    changed = sr.changed_question(random.Random(0), text)
    assert changed is None or changed != text


@pytest.mark.parametrize("seed", range(30))
def test_one_number_is_changed_and_keeps_its_digits(seed):
    changed = sr.changed_question(random.Random(seed), QUESTION)
    assert len(changed) == len(QUESTION) and changed.endswith(" mod 100")
    before, after = (
        [
            n
            for n in text.replace("(", " ")
            .replace(")", " ")
            .replace("+", " ")
            .replace("*", " ")
            .split()
        ]
        for text in (QUESTION, changed)
    )
    assert sum(a != b for a, b in zip(before, after)) == 1 and len(before) == len(after)


def test_questions_of_other_data_are_changed_too():
    text = "Natalia sold 48 clips in April and half as many in May."
    assert sr.changed_question(random.Random(0), text) not in (None, text)  # its only number
    assert sr.changed_question(random.Random(0), "How many?") is None
    words = "In H2O the 2nd x_1 is v1.0 of 7."
    assert sr.changed_question(random.Random(0), words)[:-2] == words[:-2]
    for seed in range(20):  # neither decimals nor thousands are torn apart
        assert "1,200" in sr.changed_question(random.Random(seed), "Of 1,200 or 3.5 take 7 and 8.")
        assert "3.5" in sr.changed_question(random.Random(seed), "Of 1,200 or 3.5 take 7 and 8.")


# ------------------------------------------------------------------ the loss
def test_dpo_by_hand():
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 16, dtype=torch.float64) * 20
    for beta in (0.1, 1.0):
        ours = sr.dpo_loss(chosen, rejected, beta)
        for i in range(16):
            wanted = math.log1p(math.exp(-beta * (chosen[i] - rejected[i]).item()))
            assert ours[i].item() == pytest.approx(wanted, rel=1e-9)


def test_the_loss_is_what_trls_trainer_computes(tmp_path):
    """The trainer's own loss, adapters and micro-batches and all, with another model than the
    reference, against DPOTrainer on the merged models.
    """
    pairs = [(RIGHT, WRONG), (RIGHT, "<step>38+4=40</step>\n<answer>\\boxed{40}</answer>")]
    args = sr.Args(questions=2, micro_batch=2, beta=0.3, four_bit=False, out=str(tmp_path))
    args = fill_in(args, rows=2)
    model, tokenizer = load_model("tiny", ["agent", "previous"], 4, False, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # both adapters, each in its own way
                p += 0.05 * torch.randn_like(p)
    ids = lambda text: [*tokenizer(text, add_special_tokens=False).input_ids, EOS]  # noqa: E731
    trainer = sr.SelfRewarding(
        model,
        args,
        [],
        args=grpo_config(args, tmp_path, rows=2),
        train_dataset=Dataset.from_list([{"prompt": sr.solve_prompt("")}] * 2),
        processing_class=tokenizer,
    )
    rows = [
        {
            "question": QUESTION,
            "scores": [1.0, 0.0],
            "chosen": {"ids": ids(a), "right": True},
            "rejected": {"ids": ids(b), "right": False},
        }
        for a, b in pairs
    ]
    with trainer.playing("solver"):
        ours = trainer.loss(trainer.model, trainer.preference_batch(rows)).item()
    shown = sr.compare_prompt(QUESTION, RIGHT, WRONG)
    said = [ids("The first. \\boxed{1}"), ids("\\boxed{2}")]
    with trainer.playing("judge"):
        lesson = trainer.judgement_batch([{"prompt": shown, "ids": some} for some in said])
        taught = trainer.loss(trainer.model, lesson).item()

    def merged(adapter):
        model.set_adapter(adapter)
        model.merge_adapter([adapter])
        plain = AutoModelForCausalLM.from_pretrained(TINY).eval()
        state = {
            k.removeprefix("base_model.model.").replace(".base_layer", ""): v.clone()
            for k, v in model.state_dict().items()
            if "lora_" not in k
        }
        plain.load_state_dict(state)
        model.unmerge_adapter()
        return plain

    policy, previous = merged("agent"), merged("previous")
    theirs = DPOTrainer(
        policy,
        previous,
        DPOConfig(str(tmp_path), beta=0.3, use_cpu=True, report_to="none", bf16=False),
        train_dataset=Dataset.from_list(
            [
                {"prompt": f"<|user|>{QUESTION}<|assistant|>", "chosen": a, "rejected": b}
                for a, b in pairs
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    batch = dict(next(iter(theirs.get_train_dataloader())))
    wanted = theirs.compute_loss(policy.eval(), batch).item()
    assert ours == pytest.approx(wanted, rel=1e-5) and abs(ours - math.log(2)) > 1e-3
    # the judge's: minus the mean log-prob of all tokens of its judgements
    text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    asked, logps = tokenizer(text, add_special_tokens=False).input_ids, []
    for some in said:
        rows = policy(torch.tensor([asked + some])).logits[0, len(asked) - 1 : -1]
        logps += [row.double().log_softmax(0)[i].item() for row, i in zip(rows, some)]
    assert taught == pytest.approx(-sum(logps) / len(logps), rel=1e-4)


# ------------------------------------------------------------------ the schedule
def test_a_round_begins_with_its_judge():
    cfg = sr.Args(steps=8, iterations=2, judge_steps=1)
    assert [sr.round_at(s, cfg) for s in range(8)] == [(s // 4, False) for s in range(8)]
    cfg.train_judge = "self-taught"
    assert [sr.round_at(s, cfg) for s in range(8)] == [(s // 4, s % 4 == 0) for s in range(8)]


# ------------------------------------------------------------------ data, with given completions
class Characters:
    """A tokenizer with a token per character, and 4 at the end."""

    def batch_decode(self, ids, skip_special_tokens=True):
        return ["".join(chr(i - 10) for i in row if i != EOS) for row in ids]


class Given(sr.SelfRewarding):
    """The trainer without a model: completions are given."""

    def __init__(self, texts=(), **change):
        self.cfg = sr.Args(**{"pool": 1, "samples": 2, "readings": 2, "questions": 2} | change)
        self.texts, self.asked, self.logged, self.afresh = list(texts), [], {}, 0
        self.processing_class = Characters()
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
        self.train_rows = [{"question": QUESTION, "answer": "94"}]
        self.memory = {"paired": -1, "pairs": [], "taught": -1, "judgements": []}

    def generate_ids(self, name, prompts, greedy=False):
        self.asked += [(name, prompt[-1]["content"]) for prompt in prompts]
        return [[*(ord(c) + 10 for c in self.texts.pop(0)), EOS] for _ in prompts]

    def start_afresh(self):
        self.afresh += 1

    def gather(self, values):
        return values

    def log_mean(self, name, values):
        self.logged[name] = values


def said(score):
    return f"Defects: none\nScore: \\boxed{{{score}}}"


def test_the_best_is_preferred_to_the_worst_whatever_the_truth():
    trainer = Given([RIGHT, WRONG, said(0), said(0.5), "hm", said(1), said(1), "?"], readings=3)
    trainer.start_round(0)
    (pair,) = trainer.memory["pairs"]
    assert pair["chosen"]["text"] == WRONG and pair["rejected"]["text"] == RIGHT
    assert pair["scores"] == [1.0, 0.25] and trainer.afresh == 1
    assert pair["chosen"]["ids"][-1] == EOS and trainer.memory["paired"] == 0
    assert trainer.logged["co/pairs_right_way"] == [False]
    assert trainer.logged["judge/unreadable"] == [False, False, True, False, False, True]
    judged = [text for who, text in trainer.asked if who == "judge"]
    assert judged == [
        sr.score_prompt(QUESTION, t)[-1]["content"] for t in [RIGHT] * 3 + [WRONG] * 3
    ]


def test_gold_answers_change_nothing_but_the_log():
    found = []
    for answer in ("94", "87"):
        trainer = Given([RIGHT, WRONG, said(1), said(1), said(0), said(0)])
        trainer.train_rows = [{"question": QUESTION, "answer": answer}]
        trainer.start_round(0)
        (pair,) = trainer.memory["pairs"]
        found.append((pair["chosen"]["ids"], pair["rejected"]["ids"], pair["scores"]))
    assert found[0] == found[1]


def test_ties_teach_nothing():
    trainer = Given([RIGHT, WRONG, said(1), said(1), said(1), said(1)])
    with pytest.raises(UserError, match="two different answers differ in score"):
        trainer.start_round(0)
    trainer = Given([RIGHT, WRONG] + ["hm"] * 4)
    with pytest.raises(UserError, match="a share of 1.00 of the judgements could not be read"):
        trainer.start_round(0)
    assert trainer.logged["judge/unreadable"] == [True] * 4


def test_answers_that_read_the_same_are_one_with_all_their_readings():
    readings = [said(1), said(0), said(1), said(1), said(0.5), said(0.5)]
    trainer = Given([RIGHT, RIGHT, WRONG, *readings], samples=3)
    trainer.start_round(0)
    (pair,) = trainer.memory["pairs"]
    assert (pair["chosen"]["text"], pair["scores"]) == (RIGHT, [0.75, 0.5])
    trainer = Given([RIGHT, RIGHT, said(1), said(1), said(0), said(0)])
    with pytest.raises(UserError, match="two different answers"):  # not one against itself
        trainer.start_round(0)


def test_the_judge_learns_what_prefers_the_own_question():
    worse = "<step>1+1=2</step>\n<answer>\\boxed{2}</answer>"
    trainer = Given([RIGHT, worse, "hm\\boxed{1}", "hm\\boxed{2}"])
    trainer.start_judging(0)
    shown = [text for who, text in trainer.asked if who == "judge"]
    assert shown[0].index(RIGHT) < shown[0].index(worse)
    assert shown[1].index(worse) < shown[1].index(RIGHT)
    assert all(text.startswith(f"Problem: {QUESTION}\n") for text in shown)
    assert trainer.asked[1][1] != QUESTION  # the changed one, which the judge is not shown
    assert sorted(j["choice"] for j in trainer.memory["judgements"]) == [1, 2]
    assert trainer.afresh == 1 and trainer.memory["taught"] == 0


@pytest.mark.parametrize("said", ["\\boxed{1}", "no idea"])
def test_a_judge_with_one_answer_only_teaches_nothing(said):
    trainer = Given([RIGHT, WRONG, said, said])
    with pytest.raises(UserError, match="the judge would learn a place and nothing else"):
        trainer.start_judging(0)
    assert trainer.logged["judge/judgements"] == 0


def test_answers_that_agree_are_not_compared():
    trainer = Given([RIGHT, RIGHT.replace("38+4=42", "30+12=42")])
    with pytest.raises(UserError, match="of 0 comparisons"):
        trainer.start_judging(0)


def test_every_round_has_new_questions():
    trainer = Given(pool=2)
    trainer.train_rows = [{"question": str(i)} for i in range(5)]
    found = [[row["question"] for row in trainer.pool(t)] for t in range(3)]
    assert found == [["0", "1"], ["2", "3"], ["4", "0"]]


def test_a_judge_is_measured_by_hand():
    good = {"question": QUESTION, "text": RIGHT, "ids": [], "right": True}
    bad = good | {"text": WRONG, "right": False}
    read = [[1.0, None, 1.0], [0.0, 0.0, 0.5], [0.0, None, 0.5], [None, None, 0.0]]
    trainer = Given()
    trainer.readings = lambda answers: read
    trainer.compare = lambda rows: [row | {"choice": c} for row, c in zip(rows, [1, 2, 1, None])]
    found = sr.evaluate_judge(trainer, [(good, bad)] * 2)
    assert found == {
        "judge/first_pairs": 1.0,
        "judge/readings_right": 6 / 12,
        "judge/first_compared": 0.75,
        "judge/both_orders": 0.5,
    }
    assert sr.evaluate_judge(trainer, []) == {}


def test_evaluation_by_hand():
    """3 questions, 3 samples of each. The judge prefers a right answer, then a wrong one; the third
    question has wrong ones only."""
    read = {"a1": [1.0, 0.5], "a7": [0.0, 0.5], "a8": [None, None]}
    read |= {"b7": [1.0, 1.0], "b1": [0.5, 0.5], "b8": [0.0, 0.0]}
    samples = {"a": ["a1", "a7", "a8"], "b": ["b7", "b1", "b8"], "c": ["c7", "c8", "c9"]}
    held_out = [{"question": question, "answer": "1"} for question in "abc"]
    trainer = answering(lambda *_: "\\boxed{1}", eval_samples=3)

    def answers(rows):
        questions = [row["question"] for row in rows]
        texts = [samples[q][questions[:i].count(q)] for i, q in enumerate(questions)]
        return [
            {"question": q, "text": text, "ids": [5] * (4 + (q == "c")), "right": text[1] == "1"}
            for q, text in zip(questions, texts)
        ]

    trainer.answers = answers
    trainer.readings = lambda some: [read.get(a["text"], [0.0, 0.0]) for a in some]
    trainer.compare = lambda rows: [row | {"choice": 1} for row in rows]
    result = sr.evaluate(trainer, held_out)
    judge = {
        "judge/first_pairs": 1 / 2,
        "judge/readings_right": (2 + 1 + 2 + 0) / 8,
        "judge/first_compared": 1 / 2,
        "judge/both_orders": 0.0,
    }
    assert result == pytest.approx(
        judge
        | {
            "solver/greedy": 1.0,
            "solver/accuracy": 2 / 9,
            "solver/length": (6 * 4 + 3 * 5) / 9,
            "co/best_of_3": 1 / 3,
            "judge/own_pairs": 1 / 2,
        }
    )
    assert [[a["text"] for a in pair] for pair in trainer.memory["bank"]] == [
        ["a1", "a7"],
        ["b1", "b7"],
    ]
    # a solver that is always right has no pairs of its own; the first ones stay
    samples |= {"a": ["a1"] * 3, "b": ["b1"] * 3, "c": ["c1"] * 3}
    later = sr.evaluate(trainer, held_out)
    assert later["solver/accuracy"] == 1.0 and "judge/own_pairs" not in later
    assert {name: later[name] for name in judge} == pytest.approx(judge)


# ------------------------------------------------------------------ runs
def test_the_reference_is_the_model_of_the_round_before(finished):
    """And not the first one, nor the model as it is now."""
    folder, _, _ = finished("self_rewarding.py")
    found = {}
    for step in (2, 4):
        for name in ("agent", "previous"):
            file = folder / f"checkpoint-{step}" / name / "adapter_model.safetensors"
            found[step, name] = load_file(file)
    for key, value in found[2, "agent"].items():
        assert torch.equal(found[4, "previous"][key], value)  # as it was after round one
    B = [key for key in found[2, "previous"] if "lora_B" in key]
    assert not any(found[2, "previous"][key].any() for key in B)  # the first model: the base
    assert any(not torch.equal(found[4, "agent"][key], found[4, "previous"][key]) for key in B)


def test_the_judge_is_taught(tmp_path, brief):
    folder = tmp_path / "run"
    more = "--train-judge self-taught --judge-steps 1"
    arguments = small("self_rewarding.py", folder, *more.split())
    out = brief("self_rewarding.py", *arguments, most_tokens=None)
    assert "judge/first_compared" in out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [("judge/loss" in r or "judge/logp" in r) for r in rows if "step_time" in r] == [
        True, False, True, False
    ]  # fmt: skip
    memory = json.loads((folder / "checkpoint-4" / "memory.json").read_text())
    choices = [j["choice"] for j in memory["judgements"]]
    assert choices.count(1) == choices.count(2) > 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--questions 3 --micro-batch 1", "--questions 3 must be even"),
        ("--steps 10", "--steps 10 must be a multiple of --iterations 3"),
        ("--train-judge self-taught --judge-steps 24", "of a round's 24 steps to the solver"),
        ("--train-judge self-taught --judge-steps 0", "--judge-steps 0 must leave some"),
        ("--samples 1", "--samples 1: of one answer there is no best and no worst"),
        ("--readings 0", "--readings 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, arguments, sentence):
    assert sentence in refused("self_rewarding.py", *arguments.split(), "--out", tmp_path / "run")
