"""gar.py: slices of hostile text, verdicts and both rewards against hand-written cases, one step of
the two players, stage 1, its ablations, and what a run says of itself."""

import json
import math
import random
from types import SimpleNamespace

import gar
from common.args import fill_in, grpo_config
from common.model import load_model
from common.tasks.math import load_questions
from common.tiny.tasks import format_solution
from gar import (
    Args,
    Gar,
    are_sound,
    discriminator_rewards,
    discriminator_sft,
    evaluate,
    judge_prompt,
    parse_verdict,
    reasoner_reward,
    reasoning,
    sft_batch,
    slice_reasoning,
    solve_prompt,
)

import pytest
import torch
from conftest import answering, gradients, lora, moved, perturb, refused, small, weights
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

words = lambda text: len(text.split())  # noqa: E731
characters = len


# ------------------------------------------------------------------ slices
@given(
    st.lists(
        st.sampled_from(list("ab .\n\t!?é漢🙂") + ["Wait, ", "So ", "Therefore "]), max_size=200
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_and_nothing_is_too_long(text):
    for limit, least in ((7, 1), (20, 5), (1, 1), (1000, 10)):
        slices = slice_reasoning(text, characters, limit, least)
        assert "".join(slices) == text and all(slices)
        assert all(characters(part) <= limit for part in slices)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_000,
        "\n" * 500,
        "word " * 3000,
        "🙂" * 400,
        "",
        "\n",
        "So So So So " * 50,
        "a\r\nb\u2028c\n",
        "<step>" * 200,
    ],
    ids=[
        "one line",
        "newlines",
        "no cues",
        "emoji",
        "empty",
        "newline",
        "cues",
        "odd breaks",
        "tags",
    ],
)
def test_hostile_text(text):
    slices = slice_reasoning(text, characters, 64, 8)
    assert "".join(slices) == text and all(0 < len(part) <= 64 for part in slices)


def test_lines_are_merged_up_to_the_limit():
    text = "one two\nthree four\nfive six\nseven\n"
    assert slice_reasoning(text, words, 4, 1) == ["one two\nthree four\n", "five six\nseven\n"]
    assert slice_reasoning(text, words, 100, 1) == [text]


def test_a_cue_ends_a_slice_that_is_long_enough():
    text = "We add them. Wait, that is wrong. So we subtract. The end."
    assert slice_reasoning(text, words, 100, 3) == [
        "We add them. ",
        "Wait, that is wrong. ",
        "So we subtract. The end.",
    ]
    assert slice_reasoning(text, words, 100, 5) == [
        "We add them. Wait, that is wrong. ",
        "So we subtract. The end.",
    ]
    text = "<step>Let a be 1.</step>\n<step>Then b is 2.</step>\n<step>Thence c.</step>\n"
    assert slice_reasoning(text, words, 100, 3) == [
        "<step>Let a be 1.</step>\n",
        "<step>Then b is 2.</step>\n<step>Thence c.</step>\n",
    ]
    assert slice_reasoning("Somebody said so. Sofia agreed.", words, 100, 1) == [
        "Somebody said so. Sofia agreed."
    ]


def test_only_the_reasoning_is_sliced():
    assert reasoning("<step>1</step>\n<answer>\\boxed{1}</answer>") == "<step>1</step>\n"
    hiding = "ok.\n<answer></answer>\n<step>3+4=9</step>\n<answer>\\boxed{7}</answer>"
    # the box that counts is the last one, so what stands before it is reasoning
    assert "3+4=9" in reasoning(hiding)
    assert "3+4=9" in reasoning("ok.\n<answer><step>3+4=9</step>\nSo \\boxed{7}</answer>")
    assert reasoning("so \\boxed{7} it is") == "so \\boxed{7} it is"
    assert reasoning("ok.\n<answer>7</answer>") == "ok.\n"


# ------------------------------------------------------------------ verdicts and rewards
@pytest.mark.parametrize(
    "text, verdict",
    [
        ("fine **YES** every step holds", 1),
        ("**NO** a step is wrong; **YES** would need 8", 0),
        ("YES", None),
        ("**yes**", None),
        ("** YES **", None),
        ("", None),
        ("**YE", None),
        ("**NOT** sure **YES**", 1),
        ("***YES***", 1),
    ],
)
def test_parse_verdict(text, verdict):
    assert parse_verdict(text) == verdict


def test_reasoner_reward():
    got = reasoner_reward([1, 0, 1, 0], [[1, 1, 0, 0], [1], [], [0, 1]])
    assert got == pytest.approx(
        [1.5, 1.0, 1.0, 0.5]
    )  # mean, not sum; no slices = 0; no verdict = 0
    assert reasoner_reward([0], [[1.0, 0.25, 0.0]]) == pytest.approx(
        [1.25 / 3]
    )  # shares of several judgements


def test_discriminator_rewards_in_every_case():
    #             reference        generated, right  generated, wrong  silent
    verdicts = [1, 0, 1, 0, 1, 0, None, None, None]
    reference = [True, True, False, False, False, False, True, False, False]
    right = [None, None, True, True, False, False, None, True, False]
    assert discriminator_rewards(verdicts, reference, right) == [
        1.0,
        0.0,
        0.5,
        1.0,
        0.0,
        1.5,
        0.0,
        0.0,
        0.0,
    ]
    assert discriminator_rewards(verdicts, reference, right, "adversarial") == [
        1,
        0,
        0,
        1,
        0,
        1,
        0,
        0,
        0,
    ]
    assert discriminator_rewards(verdicts, reference, right, "alignment") == [
        0,
        0,
        0.5,
        0,
        0,
        0.5,
        0,
        0,
        0,
    ]


# ------------------------------------------------------------------ one step
def make_gar(folder, **change) -> Gar:
    """4 questions, groups of 4, micro-batches of 4."""
    args = fill_in(Args(questions=4, group_size=4, micro_batch=4, **change), rows=16)
    model, tokenizer = load_model("tiny", ["reasoner", "discriminator"], 4, False, seed=0)
    train, _ = load_questions("tiny", 64, 8, seed=0)
    return Gar(
        model,
        args,
        args=grpo_config(args, folder, 16, 4, save_strategy="no"),
        train_dataset=Dataset.from_list(
            [{"prompt": solve_prompt(row["question"]), **row} for row in train]
        ),
        processing_class=tokenizer,
    )


def rows_of(trainer) -> list[dict]:
    return [trainer.train_dataset[i] for i in range(4) for _ in range(4)]


def test_a_step_judges_first_and_then_trains_both(tmp_path):
    trainer = make_gar(tmp_path)
    torch.manual_seed(0)
    before = lora(trainer, "discriminator"), lora(trainer, "reasoner")
    told, judge_often, asked, generate = [], trainer.judge_often, [], trainer.generate
    trainer.judge_often = lambda rows, some: told.extend(some) or judge_often(rows, some)
    trainer.generate = lambda name, *rest: asked.append(name) or generate(name, *rest)
    judgements, batch = trainer.step(rows_of(trainer))
    matches = [note["rewards"]["match_reward"] for note in batch["notes"]]
    assert 0 < sum(matches) < len(matches) and set(asked) == {"discriminator"}
    assert all(part["right"] == (matches[part["row"]] == 1) for part in told) and told
    assert (judgements["player"], batch["player"]) == ("discriminator", "reasoner")
    assert moved(before[0], lora(trainer, "discriminator")) == 0  # all was judged by the old one
    assert moved(before[1], lora(trainer, "reasoner")) == 0
    # the reasoner: its answer, and the mean over its slices of the share of YES
    for note, reward in zip(batch["notes"], batch["rewards"].tolist()):
        slices = note["verdicts"]
        assert len(slices) == len(note["parts"]) == len(note["gold"])
        R_s = sum(slices) / len(slices) if slices else 0.0
        assert reward == pytest.approx(note["rewards"]["match_reward"] + R_s)
        assert note["rewards"]["total"] == pytest.approx(reward)
    assert any(0 < r % 1 for r in batch["rewards"].tolist())  # some slices convince, some do not
    # the discriminator: half of the batch is about reference slices, M judgements of each slice
    prompts = [note["prompt"] for note in judgements["notes"]]
    kinds = [note["slice"] for note in judgements["notes"]]
    assert kinds == ["generated"] * 8 + ["reference"] * 8 and len(judgements["rewards"]) == 16
    assert [len(set(prompts[i : i + 4])) for i in range(0, 16, 4)] == [1] * 4
    references = [row["reference"] for row in rows_of(trainer)]
    for prompt in prompts[8:]:
        part = prompt.split("Reasoning:\n")[1].split("\nIs it sound?")[0]
        assert any(part in reference for reference in references)


def test_every_slice_counts_once_however_often_it_is_judged(monkeypatch):
    """R_s = mean over slices: a slice that is judged M times weighs no more than the others."""
    rows = [{"question": "?"}] * 2
    trainer = SimpleNamespace(cfg=Args(group_size=2), log_mean=lambda *_: None)
    rewards, paid = torch.tensor([1.0, 0.0]), []
    trainer.rollout = lambda *_: {"rewards": rewards, "texts": ["three", "blank"]}
    trainer.slices = lambda text: ["a", "b", "c"] if text == "three" else []
    trainer.pay = lambda batch, rewards: paid.append(rewards)
    trainer.stop_if_silent = trainer.report_reasoner = lambda *_: None

    def judge_often(rows, generated):
        generated[0]["verdicts"] = [1, 1, 1, 1, 1, 1, None, 0]

    def judge_once(slices):
        assert [part["text"] for part in slices] == ["b", "c"]  # "a" has its verdicts
        for part, verdict in zip(slices, (0, None)):
            part["verdicts"] = [verdict]

    trainer.judge_often, trainer.judge_once = judge_often, judge_once
    Gar.step(trainer, rows)
    assert paid == [pytest.approx([1.0 + 0.75 / 3, 0.0])]


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("both", {"reference": 1.0, "right": -0.5, "wrong": -1.5}),
        ("adversarial", {"reference": 1.0, "right": -1.0, "wrong": -1.0}),
    ],
)
def test_both_rewards_are_heard_in_the_discriminators_advantages(kind, expected):
    """YES minus NO, in units of the batch's std. Normalised slice by slice all of them would be
    +-1, and R_a unheard."""
    rows = [{"question": "?", "reference": "ref"}] * 8  # P = 4, M = 2: two slices of each kind
    generated = [
        {"question": "?", "text": "first", "right": True},
        {"question": "?", "text": "second", "right": False},
    ]
    trainer = SimpleNamespace(
        cfg=Args(questions=4, group_size=2, reward=kind),
        state=SimpleNamespace(global_step=0),
        random_numbers=lambda: random.Random(0),
        gather=lambda values: values,
        over_all_processes=lambda fn, *columns: fn(*columns),
        log_mean=lambda *_: None,
        report_discriminator=lambda *_: None,
        slices=lambda text: [text],
    )

    def rollout(_, judged):
        texts = ["**YES**", "**NO**"] * (len(judged) // 2)
        columns = {name: [row[name] for row in judged] for name in ("reference", "right", "kind")}
        rewards = gar.judgement_reward([[{"content": text}] for text in texts], **columns)
        return {"rewards": torch.tensor(rewards), "texts": texts, "judged": judged}

    trainer.rollout = rollout
    batch = Gar.judge_often(trainer, rows, generated)
    assert [part["verdicts"] for part in generated] == [[1, 0], [1, 0]]
    std = batch["rewards"].std().item()
    for (yes, no), row in zip(batch["advantages"].reshape(-1, 2).tolist(), batch["judged"][::2]):
        which = "reference" if row["reference"] else "right" if row["right"] else "wrong"
        assert yes - no == pytest.approx(expected[which] / std, rel=1e-4)
        assert yes + no == pytest.approx(0)


def test_too_few_slices_leave_the_discriminator_as_it_is(tmp_path):
    """Without solutions to cut, or references, there is no batch for it, and the step goes on."""
    trainer = make_gar(tmp_path)
    rows = [row | {"reference": ""} for row in rows_of(trainer)]
    assert [batch["player"] for batch in trainer.step(rows)] == ["reasoner"]


def test_white_space_is_no_slice():
    count = lambda text: len(text.split())  # noqa: E731
    trainer = SimpleNamespace(cfg=Args(slice_tokens=4, min_slice_tokens=1), count_tokens=count)
    assert Gar.slices(trainer, "\n\n\n<answer>\\boxed{1}</answer>") == []
    parts = Gar.slices(trainer, "one two three four\n\n\nfive")
    assert parts == ["one two three four\n\n\n", "five"]


def test_are_sound():
    question = "((3+4)*6)-5 mod 100"
    parts = ["<step>3+4=7</step>\n", "<step>7*6=3</step>\n<step>3-", "5=98</step>\n", "so\n"]
    # the third carries on correctly; no step ends in the last
    assert are_sound(question, parts) == [True, False, True, None]
    assert are_sound(question, ["gibberish 3+4=7\n"]) == [None]
    assert are_sound("Who?", parts) == [None] * 4


def test_evaluation_by_hand():
    """4 questions, 2 samples of each, of which the first are judged: right, wrong, right for the
    wrong reason, and without a step."""

    def solution(i, kind):
        if kind == "no steps":
            return "<answer>\\boxed{0}</answer>"
        right, lucky = kind == "right", kind == "lucky"
        steps = [f"{i}+4={i + 4}", f"{i + 4}+1={i + 5}"] if right else [f"{i}+4=1", "7+7=0"]
        return format_solution(steps, i + 5 if right or lucky else 0)

    held_out = [
        {"question": f"({i}+4)+1 mod 100", "answer": str(i + 5), "reference": solution(i, "right")}
        for i in range(10, 14)
    ]
    held_out[0]["reference"] = "by hand\n"

    def say(player, asked, greedy, before):
        if player == "reasoner":
            i = int(asked[1:3])
            kind = ["right", "wrong", "lucky", "no steps"][i - 10] if before == 0 else "right"
            return solution(i, "wrong" if greedy else kind)
        if "by hand" in asked:
            return "hm"
        return "**NO** for **YES**" if "(12+4)+1" in asked else "**YES**"

    trainer = answering(say, eval_samples=2, discriminator="co-trained")
    trainer.slices = lambda text: [
        line for line in text.splitlines(keepends=True) if "<answer>" not in line
    ]
    result = evaluate(trainer, held_out)
    assert result == pytest.approx(
        {
            "reasoner/accuracy": 6 / 8,
            "reasoner/greedy": 0.0,
            "discriminator/yes_generated_right": 1 / 2,
            "discriminator/yes_generated_wrong": 1.0,
            "discriminator/yes_reference": 2 / 4,
            # of what the reasoner wrote; a NO to a right reference is not in it
            "discriminator/yes_sound": 1.0,
            "discriminator/yes_unsound": 1 / 2,
            "discriminator/says_yes": 4 / 7,
        }
    )
    judged = [asked for player, asked, _ in trainer.calls if player == "discriminator"]
    assert evaluate(trainer, held_out) == result and len(judged[0]) == 7
    again = [asked for player, asked, _ in trainer.calls if player == "discriminator"]
    assert again == judged * 2  # the same slice of the same text
    alone = answering(say, eval_samples=2, discriminator="none")
    assert {name.split("/")[0] for name in evaluate(alone, held_out)} == {"reasoner"}


# ------------------------------------------------------------------ stage 1
LABELS = [
    {"question": f"{a}+4 mod 100", "slice": f"<step>{a}+4={r}</step>\n", "rationale": " it is so"}
    | {"label": "YES" if r == a + 4 else "NO"}
    for a, r in ((3, 7), (3, 8), (2, 6), (2, 5), (1, 5), (5, 9), (5, 1))
]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_stage_one_is_adamw_on_the_cross_entropy_of_what_is_written(tmp_path, checkpointing):
    """The first step against log-softmax over whole sequences, row by row. Checkpointing runs the
    forward pass again in backward: then, too, with the discriminator's adapter."""
    trainer = make_gar(tmp_path)
    perturb(trainer)  # so that the adapters are two models
    trainer.args.gradient_checkpointing = checkpointing
    # one YES and one NO, so that a balanced draw is both; of unlike length, so that one is padded
    rows = [LABELS[0] | {"question": "(3+4)*1 mod 100", "rationale": " every step"}, LABELS[1]]
    tokenizer, model = trainer.processing_class, trainer.model
    before = lora(trainer, "reasoner"), lora(trainer, "discriminator")
    nll, count = 0.0, 0
    with trainer.playing("discriminator"):
        for row in rows:
            messages = judge_prompt(row["question"], row["slice"])
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            text = f"**{row['label']}**{row['rationale']}"
            written = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            logits = model(input_ids=torch.tensor([prompt + written])).logits[0]
            logp = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            nll = nll - logp[range(len(written)), written].sum()
            count += len(written)
        (nll / count).backward()
    expected = gradients(trainer)
    model.zero_grad(set_to_none=True)
    assert all(".discriminator." in name for name in expected)

    loss = discriminator_sft(trainer, rows)
    assert loss == pytest.approx((nll / count).item(), rel=1e-5)
    assert trainer.player == "reasoner" and moved(before[0], lora(trainer, "reasoner")) == 0
    after, compared = lora(trainer, "discriminator"), 0
    for name, g in expected.items():  # AdamW's first step: decay, then lr * g / (|g| + eps)
        large = g.abs() > 1e-5
        wanted = before[1][name] * (1 - 1e-3 * 1e-4) - 1e-3 * g / (g.abs() + 1e-8)
        assert torch.allclose(after[name][large], wanted[large], rtol=0, atol=1e-5), name
        compared += int(large.sum())
    assert compared > 1000


def test_stage_one_is_balanced_and_trains_on_what_is_written_only(tmp_path, monkeypatch):
    trainer, seen = make_gar(tmp_path), []
    monkeypatch.setattr(gar, "sft_batch", lambda rows, t: seen.append(rows) or sft_batch(rows, t))
    discriminator_sft(trainer, LABELS)
    labels = [row["label"] for rows in seen for row in rows]
    assert sorted(labels) == ["NO"] * 3 + ["YES"] * 3 and [len(rows) for rows in seen] == [4, 2]
    labels = [{**row, "analysis": None} for row in LABELS[:3]]  # null is no text
    batch, tokenizer = sft_batch(labels, trainer.processing_class), trainer.processing_class
    for row, ids, mask in zip(LABELS, batch["completion_ids"], batch["completion_mask"].bool()):
        text = tokenizer.decode(ids[mask])
        assert text == f"**{row['label']}** it is so" + tokenizer.eos_token


def test_labels_that_cannot_be_used_end_in_a_sentence(tmp_path):
    path = tmp_path / "labels.jsonl"

    def says(*rows):
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return refused("gar.py", *small("gar.py", tmp_path / "run", "--sft-labels", path))

    expected = "row 1 needs question, slice, and label YES or NO"
    assert expected in says({**LABELS[0], "label": "MAYBE"})
    assert expected in says({**LABELS[0], "slice": ""})
    assert expected in says({**LABELS[0], "question": ["q"]})
    assert expected in says({**LABELS[0], "rationale": 7})
    assert "does not have both labels" in says(LABELS[0])
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ the script
def is_trained(folder, player) -> bool:
    adapter = {n: t for n, t in weights(folder).items() if n.startswith(f"{player}/")}
    return any(t.abs().max() > 0 for name, t in adapter.items() if "lora_B" in name)


def test_a_run_trains_both_in_every_step(finished):
    folder, _, _ = finished("gar.py")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "epoch" in row]
    assert len(steps) == 4
    assert sum("discriminator/grad_norm" in row for row in steps) >= 2
    for row in steps:  # where all verdicts are paid alike, there is no gradient
        assert row["discriminator/updated"] == 1 and 0 < row["reasoner/grad_norm"] < 1e3
        assert 0 < row.get("discriminator/grad_norm", 1) < 1e3
        spread = row["reasoner/total_reward"] - row["reasoner/accuracy"]  # the slices' part
        assert 0 <= spread <= 1 and 0 <= row["discriminator/silent"] < 0.5
        assert math.isfinite(row.get("discriminator/loss", 0))
    assert is_trained(folder, "reasoner") and is_trained(folder, "discriminator")
    last = [row for row in rows if "eval/reasoner/greedy" in row][-1]
    assert {"eval/discriminator/yes_reference", "eval/discriminator/says_yes"} <= last.keys()


def test_a_frozen_discriminator_judges_and_is_not_trained(tmp_path):
    trainer = make_gar(tmp_path, discriminator="frozen")
    (batch,) = trainer.step(rows_of(trainer))
    assert batch["player"] == "reasoner"
    assert any(verdict for note in batch["notes"] for verdict in note["verdicts"])


def test_without_a_discriminator_it_is_plain_grpo(tmp_path, brief):
    folder = tmp_path / "run"
    brief("gar.py", *small("gar.py", folder, "--steps", 1, "--discriminator", "none"))
    assert is_trained(folder, "reasoner") and not is_trained(folder, "discriminator")
    text = (folder / "metrics.jsonl").read_text()
    assert "reasoner/accuracy" in text and "discriminator/" not in text


@pytest.mark.parametrize("kind, highest", [("alignment", 0.5), ("adversarial", 1.0)])
def test_the_discriminators_reward_alone(tmp_path, kind, highest):
    trainer = make_gar(tmp_path, reward=kind)
    torch.manual_seed(0)
    steps = [trainer.step(rows_of(trainer))[0] for _ in range(4)]  # both occur in some of them
    assert {r for batch in steps for r in batch["rewards"].tolist()} == {0.0, highest}


def test_stage_one_comes_before_the_first_step_and_only_then(tmp_path, brief):
    path, folder = tmp_path / "labels.jsonl", tmp_path / "run"
    path.write_text("\n".join(map(json.dumps, LABELS)))
    more = ["--steps", 1, "--sft-labels", path]
    assert "stage 1: 7 labels, last loss" in brief("gar.py", *small("gar.py", folder, *more))
    again = brief("gar.py", *small("gar.py", folder, *more))
    assert "this run is finished" in again and "stage 1" not in again


def test_one_question_has_no_room_for_a_reference(tmp_path):
    message = refused(
        "gar.py", *small("gar.py", tmp_path / "run", "--questions", 1, "--micro-batch", 4)
    )
    assert "--questions 1" in message and not (tmp_path / "run").exists()


def test_no_references_and_a_silent_discriminator_end_in_a_sentence(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"{i}+4 mod 100", "answer": str((i + 4) % 10)} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    message = refused("gar.py", *small("gar.py", tmp_path / "run", "--dataset", path))
    assert "no question has a reference solution" in message
    message = refused("gar.py", *small("gar.py", tmp_path / "other", "--judgement-tokens", 2))
    assert "have no **YES** or **NO**" in message
