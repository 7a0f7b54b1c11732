"""spin.py: its loss against TRL's DPO trainer, its outer loop, its traps."""

import json
import math
import shutil
from types import SimpleNamespace

from common.adapters import copy_adapter
from common.args import fill_in, grpo_config
from common.model import TINY, load_model
from common.tasks.answers import is_correct
from common.tasks.math import load_questions
from spin import Args, Spin, evaluate, human_ids, learning_rate_at, solve_prompt, spin_loss

import pytest
import torch
from conftest import answering, refused, run_here, small, weights
from datasets import Dataset
from transformers import AutoTokenizer

LN2 = math.log(2)
IDS = ("completion_ids", "completion_mask")


# ------------------------------------------------------------------ eq. 4.7
def test_the_loss_is_ln2_and_rewards_are_zero_while_player_and_opponent_are_the_same():
    logps = torch.tensor([-3.0, -40.0]), torch.tensor([-7.0, -0.5])
    loss, real, generated = spin_loss(logps[0], logps[0], logps[1], logps[1], 0.1)
    assert loss.item() == pytest.approx(LN2, abs=1e-7)
    assert not real.any() and not generated.any()


def test_the_loss_equals_the_loop_and_its_gradient_pushes_the_right_way():
    g = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(6, generator=g, dtype=torch.float64) * 5 for _ in range(4))
    h = [0.3 * ((a[i] - b[i]) - (c[i] - d[i])).item() for i in range(6)]
    expected = sum(math.log(1 + math.exp(-x)) for x in h) / 6
    a.requires_grad_(), c.requires_grad_()
    loss, *_ = spin_loss(a, b, c, d, 0.3)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    assert (a.grad < 0).all() and (c.grad > 0).all()
    assert torch.isfinite(spin_loss(a * 1e6, b, c, d, 5.0)[0])


def test_equal_to_trls_dpo_sigmoid_loss(tmp_path):
    """The whole of TRL's DPOTrainer on the same pairs, opponent = reference model."""
    from common.model import TINY

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    player, opponent = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    with torch.no_grad():
        for p in player.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    pairs = [
        ("3+4 mod 100", "<step>3+4=7</step>", "<step>3+4=8</step>\n<step>8</step>"),
        ("(1+2)*3 mod 100", "<step>1", "9"),
    ]

    def message(role, text):
        return [{"role": role, "content": text}]

    rows = [
        {
            "prompt": message("user", question),
            "chosen": message("assistant", chosen),
            "rejected": message("assistant", rejected),
        }
        for question, chosen, rejected in pairs
    ]
    config = DPOConfig(
        str(tmp_path),
        beta=0.1,
        loss_type="sigmoid",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list(rows)
    dpo = DPOTrainer(player, opponent, config, train_dataset=data, processing_class=tokenizer)
    batch = dpo._prepare_inputs(dpo.data_collator([dpo.train_dataset[i] for i in range(2)]))
    dpo.model.eval()
    theirs = dpo.compute_loss(dpo.model, batch)

    def logp(model, question, answer):
        prompt = tokenizer(f"<|user|>{question}<|assistant|>").input_ids
        ids = prompt + tokenizer(f"{answer}<|end|>").input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[len(prompt) :])[:, None]).sum()

    columns = [
        torch.stack([logp(model, q, answers[which]) for q, *answers in pairs])
        for which in (0, 1)
        for model in (player, opponent)
    ]
    assert spin_loss(*columns, 0.1)[0].item() == pytest.approx(theirs.item(), abs=1e-5)
    assert abs(theirs.item() - LN2) > 1e-3  # the models do differ


def test_schedule():
    rates = [learning_rate_at(step, 20) for step in range(80)]
    # warm-up over a tenth, every iteration anew
    assert rates[0] == rates[20] == 0.5 and rates[1] == rates[21] == 1.0
    assert rates[1] > rates[10] > rates[19] > 0
    assert [r / rates[i] for i, r in enumerate(rates[40:60])] == pytest.approx([0.2] * 20)
    assert all(learning_rate_at(step, 1) > 0 for step in range(4))


# ------------------------------------------------------------------ `step` and `loss`, one by one
class Processes:
    """trainer.accelerator as process `process_index` of `num_processes` sees it."""

    def __init__(self, accelerator, process_index, num_processes):
        self.accelerator = accelerator
        self.process_index, self.num_processes = process_index, num_processes

    def __getattr__(self, name):
        return getattr(self.accelerator, name)


def make_spin(folder, processes=(0, 1), **change):
    """A Spin trainer in the middle of iteration 0, its eight pairs made, its two adapters apart."""
    args = fill_in(Args(steps=8, questions=8, micro_batch=8), rows=8)
    args = Args(**{**vars(args), **change})
    model, tokenizer = load_model("tiny", ["player", "ref"], 4, False, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    rows, _ = load_questions("tiny", 16, 8, seed=0)
    data = [{"prompt": solve_prompt(row["question"]), **row} for row in rows]
    trainer = Spin(
        model,
        args,
        args=grpo_config(args, folder, rows=args.questions, save_strategy="no"),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )
    trainer.accelerator = Processes(trainer.accelerator, *processes)
    trainer.pairs_per_step = args.questions * trainer.accelerator.num_processes
    human = [human_ids(row, tokenizer) for row in rows]
    pairs = [
        {"question": row["question"], "real": y, "generated": other[: 30 + i]}
        for i, (row, y, other) in enumerate(zip(rows[:8], human, human[8:]))
    ]
    trainer.memory = {"iteration": 0, "pairs": pairs, "previous_pairs": []}
    return trainer


def loss_and_gradient(trainer):
    """Of one step, over all its micro-batches, as Trainer adds them up."""
    trainer.model.zero_grad()
    total = torch.zeros(())
    with trainer.playing("player"):
        for part in trainer.micro_batches(trainer.step([])[0]):
            loss = trainer._compute_loss(trainer.model, part)
            loss.backward()
            total += loss.detach()
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return total, grads


def oracle_loss(trainer, opponent):
    """Eq. 4.7, or minus the log-likelihood per human token, one completion at a time."""
    from peft import PeftModel

    tokenizer, model = trainer.processing_class, trainer.model
    assert isinstance(model, PeftModel)

    def logp(adapter, question, ids):
        text = tokenizer.apply_chat_template(
            solve_prompt(question), add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        model.set_adapter(adapter)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()

    pairs = trainer.memory["pairs"]
    if opponent == "none":
        nats = [logp("player", pair["question"], pair["real"]) for pair in pairs]
        return -sum(nats) / sum(len(pair["real"]) for pair in pairs)
    losses = []
    for pair in pairs:
        ratios = [
            logp("player", pair["question"], pair[which])
            - logp("ref", pair["question"], pair[which])
            for which in ("real", "generated")
        ]
        losses.append(math.log(1 + math.exp(-0.1 * (ratios[0] - ratios[1]))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("opponent", ["previous", "none"])
def test_the_step_is_the_papers_loss_however_it_is_cut(tmp_path, opponent):
    """Also at another temperature: it is the opponent's when it writes, never when it is scored."""
    trainer = make_spin(tmp_path, opponent=opponent)
    total, expected = loss_and_gradient(trainer)
    assert total.item() == pytest.approx(oracle_loss(trainer, opponent), abs=1e-5)
    assert all(".player." in name for name in expected)
    change = {"micro_batch": 2, "opponent_temperature": 0.5, "opponent": opponent}
    again, grads = loss_and_gradient(make_spin(tmp_path, **change))
    assert again.item() == pytest.approx(total.item(), abs=1e-6)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("opponent", ["previous", "none"])
def test_two_processes_take_the_step_of_one(tmp_path, opponent):
    """Each takes half of the pairs, of unlike length, and DDP averages their gradients: the divisor
    of continued SFT must be the human tokens of both."""
    whole = make_spin(tmp_path, opponent=opponent)
    total, expected = loss_and_gradient(whole)
    halves = [
        make_spin(tmp_path, (rank, 2), opponent=opponent, questions=4, micro_batch=4)
        for rank in range(2)
    ]
    losses, grads = zip(*[loss_and_gradient(half) for half in halves])
    questions = [[pair["question"] for pair in half.taken] for half in halves]
    assert [len(q) for q in questions] == [4, 4] and not set(questions[0]) & set(questions[1])
    tokens = [sum(len(pair["real"]) for pair in half.taken) for half in halves]
    assert tokens[0] != tokens[1]
    assert sum(losses).item() / 2 == pytest.approx(total.item(), abs=1e-6)
    for name in expected:
        mean = (grads[0][name] + grads[1][name]) / 2
        torch.testing.assert_close(mean, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mix, processes, count", [(True, 1, 8), (False, 1, 16), (True, 2, 16)])
def test_prompts_make_one_pass_over_the_mixed_pairs(tmp_path, mix, processes, count):
    """Two steps of 8 pairs per iteration and process; there are 16 questions in all."""
    trainer = make_spin(tmp_path, (0, processes), mix_previous=mix)
    assert len(trainer.prompts()) == count and trainer.length == 2


def test_an_iteration_is_one_pass_over_the_mixed_pairs(tmp_path):
    trainer, taken = make_spin(tmp_path), []
    previous = [{**pair, "question": f"old {pair['question']}"} for pair in trainer.memory["pairs"]]
    trainer.memory["previous_pairs"] = previous
    for trainer.state.global_step in range(2):
        trainer.step([])
        taken += [pair["question"] for pair in trainer.taken]
    questions = [pair["question"] for pair in trainer.memory["pairs"] + previous]
    assert sorted(taken) == sorted(questions) and taken != questions


def test_the_last_iteration_has_its_own_lambda(tmp_path):
    trainer, found = make_spin(tmp_path), []
    for trainer.state.global_step in range(8):
        found.append(trainer.scale())
    assert found == [0.1] * 6 + [5.0] * 2


def test_a_copy_is_exact_and_leaves_the_player_alone(tmp_path):
    model = make_spin(tmp_path).model

    def adapter(name):
        found = {n: p.clone() for n, p in model.named_parameters() if f".{name}." in n}
        return {n.replace(f".{name}.", "."): p for n, p in found.items()}

    player = adapter("player")
    assert any(not torch.equal(player[n], p) for n, p in adapter("ref").items())
    copy_adapter(model, "player", "ref")
    assert all(torch.equal(player[n], p) for n, p in adapter("ref").items())
    assert all(torch.equal(player[n], p) for n, p in adapter("player").items())


# ------------------------------------------------------------------ a run: four iterations of two
def steps(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/player/accuracy" not in row]


def memory(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "memory.json").read_text())


def test_every_iteration_has_the_schedule_anew_and_an_optimiser_without_a_past(finished, tmp_path):
    folder, *_ = finished("spin.py")
    lr = json.loads((folder / "args.json").read_text())["lr"]
    rates = [row["player/learning_rate"] for row in steps(folder)]
    # Trainer logs a step's rate when the schedule has moved on
    assert rates == pytest.approx([lr * learning_rate_at(step, 2) for step in range(1, 9)])
    trainer = make_spin(tmp_path)
    trainer.create_optimizer()
    for p in trainer._parameters_of("player"):
        trainer.optimizer.state[p] = {"step": torch.tensor(3.0)}
    trainer.start_iteration(1)
    assert not trainer.optimizer.state


def test_the_opponent_is_frozen_anew_in_every_iteration(finished):
    """Steps 1, 3, 5 and 7 open iterations: loss ln 2, rewards 0, to float32 rounding of a sum of
    log-probs times lambda = 5."""
    folder, *_ = finished("spin.py")
    assert len(steps(folder)) == 8
    for row in steps(folder):
        opens = row["step"] % 2 == 1
        assert (abs(row["player/spin_loss"] - LN2) < 1e-4) == opens, row["step"]
        for key in ("reward_human", "reward_generated", "pair_accuracy"):
            assert (f"player/{key}" in row) != opens  # rounding is no figure
        assert ("opponent/accuracy" in row) == opens  # it writes then


def test_the_opponent_is_the_player_as_the_iteration_before_left_it(finished):
    folder, *_ = finished("spin.py")
    player = {n: t for n, t in weights(folder / "checkpoint-6").items() if n.startswith("player/")}
    opponent = weights(folder / "checkpoint-8")
    assert player
    for name, tensor in player.items():
        assert torch.equal(opponent[name.replace("player/", "ref/")], tensor)


def test_previous_pairs_are_mixed_in_and_cut_completions_get_no_end(finished):
    from common.model import TINY

    from transformers import AutoTokenizer

    folder, *_ = finished("spin.py")
    before, now = memory(folder, 6), memory(folder, 8)
    assert now["previous_pairs"] == before["pairs"]
    assert (before["iteration"], now["iteration"]) == (2, 3)
    end = AutoTokenizer.from_pretrained(TINY).eos_token_id
    for pair in now["pairs"] + now["previous_pairs"]:
        assert pair["real"][-1] == end
        assert pair["generated"][-1] == end or len(pair["generated"]) == 80


def test_the_opponents_figures_are_those_of_its_pairs(finished):
    from common.model import TINY

    from transformers import AutoTokenizer

    folder, *_ = finished("spin.py")
    tokenizer, pairs = AutoTokenizer.from_pretrained(TINY), memory(folder, 8)["pairs"]
    assert len(pairs) == 8  # half of what two steps take: the other half is mixed in
    train, _ = load_questions("tiny", 32, 8, seed=0)
    gold = {row["question"]: row["answer"] for row in train}
    texts = [tokenizer.decode(pair["generated"], skip_special_tokens=True) for pair in pairs]
    right = [is_correct(text, gold[pair["question"]]) for text, pair in zip(texts, pairs)]
    row = steps(folder)[6]
    assert row["opponent/accuracy"] == pytest.approx(sum(right) / 8)
    equal = sum(pair["real"] == pair["generated"] for pair in pairs)
    assert row["opponent/equal_to_human"] == pytest.approx(equal / 8)
    tokens = sum(len(pair["generated"]) for pair in pairs)
    assert row["opponent/completions/mean_length"] == pytest.approx(tokens / 8)
    cut = sum(pair["generated"][-1] != tokenizer.eos_token_id for pair in pairs)
    assert row["opponent/completions/clipped_ratio"] == pytest.approx(cut / 8)


def test_both_completions_of_a_pair_are_recorded_with_their_share_of_the_reward(finished):
    folder, *_ = finished("spin.py")
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for step in range(1, 9):
        shown = [row for row in rows if row["step"] == step]
        prompts = {
            who: sorted(row["prompt"] for row in shown if row["player"] == who)
            for who in ("human", "opponent")
        }
        assert prompts["human"] and prompts["human"] == prompts["opponent"]
        for row in shown:
            total = sum(row["advantages"])
            assert total == pytest.approx(row["rewards"]["reward"], abs=1e-2)
            assert step % 2 == 0 or abs(total) < 1e-3
    assert any(abs(row["rewards"]["reward"]) > 1e-2 for row in rows)


def test_resumed_between_two_iterations_is_the_same_run_bit_for_bit(finished, tmp_path):
    whole, *_ = finished("spin.py")
    shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-8")
    printed = run_here("spin.py", *small("spin.py", tmp_path / "resumed"))
    assert "step 7/8" in printed and "step 6/8" not in printed
    ours, expected = weights(tmp_path / "resumed"), weights(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert memory(tmp_path / "resumed", 8) == memory(whole, 8)


def test_resumed_within_an_iteration_is_the_same_run_bit_for_bit(finished, tmp_path):
    whole, *_ = finished("spin.py")
    arguments = [*small("spin.py", tmp_path / "run"), "--save-every", "1", "--eval-every", "0"]
    run_here("spin.py", *arguments)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    printed = run_here("spin.py", *arguments)
    assert "step 8/8" in printed and "step 7/8" not in printed
    ours, expected = weights(tmp_path / "run"), weights(whole)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


# ------------------------------------------------------------------ evaluation
def test_evaluation_by_hand():
    """Of 3 questions with 2 samples each; the log-likelihood of a human answer is the sum over its
    tokens and its end."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    references = ["<step>3+4=7</step>", "7", "12"]
    held_out = [
        {"question": q, "answer": str(i), "reference": reference}
        for i, (q, reference) in enumerate(zip("abc", references))
    ]
    said = {"a": "07", "b": "11", "c": "77"}  # two samples; greedily all say 1

    def say(player, asked, greedy, before):
        return rf"\boxed{{{1 if greedy else said[asked][before]}}}"

    seen = []

    def log_probs(player, batch):
        seen.extend(i[m.bool()].tolist() for i, m in zip(*map(batch.get, IDS)))
        return -0.5 * batch["completion_mask"]

    trainer = answering(say, eval_samples=2)
    trainer.processing_class, trainer.log_probs = tokenizer, log_probs
    trainer.accelerator = SimpleNamespace(device="cpu")
    result = evaluate(trainer, held_out)
    human = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for text in references
    ]
    assert seen == human and len({*map(len, human)}) > 1
    assert result == pytest.approx(
        {
            "player/accuracy": 3 / 6,
            "player/greedy": 1 / 3,
            "player/logp_human": -0.5 * sum(map(len, human)) / 3,
        }
    )
    assert {player for player, *_ in trainer.calls} == {"player"}


# ------------------------------------------------------------------ variants, and data as it comes
def short(out, *more):
    return small("spin.py", out, "--steps", 2, "--iterations", 2, "--eval-every", 0, *more)


@pytest.mark.parametrize(
    "flags",
    [
        "--no-mix-previous",
        "--opponent sft",
        "--opponent none",
        "--opponent-temperature 0 --questions 24 --iterations 1",
        "--opponent-temperature 0.5 --iterations 1",
    ],
)
def test_variants(tmp_path, brief, flags):
    brief("spin.py", *short(tmp_path / "run", *flags.split()))
    trained = weights(tmp_path / "run")

    def moved(adapter):
        found = [t for n, t in trained.items() if n.startswith(f"{adapter}/") and "lora_B" in n]
        return max(t.abs().max().item() for t in found)

    stays = any(flag in flags for flag in ("sft", "none", "--iterations 1"))
    assert moved("player") > 0 and (moved("ref") == 0) == stays
    first, second = steps(tmp_path / "run")
    if "none" in flags:
        assert "player/spin_loss" not in first and 0 < first["player/loss"] < 1
    else:
        assert first["player/spin_loss"] == pytest.approx(LN2, abs=1e-4)
        assert stays == (abs(second["player/spin_loss"] - LN2) > 1e-4)
    if "no-mix" in flags:
        assert memory(tmp_path / "run", 2)["previous_pairs"] == []


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_completion_cut_at_the_limit_keeps_its_cut(tmp_path, brief):
    rows = [
        {"question": f"({i}+4)*3 mod 100", "answer": "1", "reference": r"\boxed{1}"}
        for i in range(200)
    ]
    data = write(tmp_path / "data.jsonl", rows)
    flags = ["--dataset", data, "--solution-tokens", 8]
    brief("spin.py", *short(tmp_path / "run", *flags))
    pairs = memory(tmp_path / "run", 2)["pairs"]
    cut = [pair["generated"] for pair in pairs if len(pair["generated"]) == 8]
    end = pairs[0]["real"][-1]
    assert cut and any(end not in ids for ids in cut)
    assert all(ids.count(end) <= 1 for ids in cut)
    assert steps(tmp_path / "run")[0]["opponent/completions/clipped_ratio"] > 0


def test_fewer_pairs_than_a_step_takes(tmp_path, brief):
    """20 questions for steps of 32 pairs: a step goes through as many passes as it needs."""
    rows = [
        {
            "question": f"{i}+4 mod 100",
            "answer": str(i),
            "reference": rf"<step>x</step>\boxed{{{i}}}",
        }
        for i in range(22)
    ]
    data = write(tmp_path / "data.jsonl", rows)
    flags = ["--dataset", data, "--questions", 32, "--no-mix-previous"]
    printed = brief("spin.py", *short(tmp_path / "run", *flags, "--micro-batch", 4))
    count = len(memory(tmp_path / "run", 2)["pairs"])
    assert f"{count} training" in printed and 16 < count < 32
    assert steps(tmp_path / "run")[0]["player/spin_loss"] == pytest.approx(LN2, abs=1e-4)


def test_human_answers_missing_or_too_long(tmp_path, brief):
    rows = [
        {
            "question": f"{i}+4 mod 100",
            "answer": "1",
            "reference": r"<step>1</step>\boxed{1}" if i % 3 else "",
        }
        for i in range(200)
    ]
    long = "1" * 70 + r"\boxed{1}"
    rows += [{"question": f"{i}*4 mod 100", "answer": "1", "reference": long} for i in range(10)]
    data = write(tmp_path / "data.jsonl", rows)
    printed = brief("spin.py", *short(tmp_path / "run", "--dataset", data))
    assert "have no human answer" in printed and "--solution-tokens 80; left out" in printed
    write(data, [{**row, "reference": ""} for row in rows])
    message = refused("spin.py", *short(tmp_path / "other", "--dataset", data))
    assert "no question has a human answer" in message


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--steps 5", "--steps 5 is not a multiple of --iterations 4"),
        ("--questions 3", "--questions 3 must be even"),
        ("--questions 0", "--questions 0 must be at least 1"),
        ("--questions 8 --micro-batch 3", "--micro-batch 3 does not divide the 8 rows"),
    ],
)
def test_arguments(tmp_path, arguments, sentence):
    assert sentence in refused("spin.py", *arguments.split(), "--out", tmp_path / "run")


def test_an_opponent_that_writes_the_human_answers_ends_the_run(tmp_path, monkeypatch):
    def human_answers(trainer, name, prompts, greedy=False):
        rows = {row["question"]: row for row in trainer.train_dataset}
        questions = [prompt[-1]["content"] for prompt in prompts]
        return [human_ids(rows[question], trainer.processing_class) for question in questions]

    monkeypatch.setattr(Spin, "generate_ids", human_answers)
    monkeypatch.setattr(Spin, "generate", lambda *args: [""] * len(args[2]))
    assert "nothing is left to learn" in refused("spin.py", *short(tmp_path / "run"))
