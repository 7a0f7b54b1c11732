"""Real input: GSM8K questions, the real Qwen2.5 tokenizer, a 4-bit Qwen2-shaped model with random
weights, on a CPU."""

import json

from common.adapters import with_adapters
from common.args import grpo_config
from common.cotrainer import CoTrainer, Player
from common.model import load_model
from common.tasks.answers import split_steps, step_ends
from common.tasks.math import load_questions
from tango import Args, solve_prompt

import pytest
import torch
from conftest import DATA, metrics_of
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    if not (DATA / "qwen2.5-tokenizer").exists():
        pytest.skip("set DUET_DATA to a folder with gsm8k_test.jsonl and qwen2.5-tokenizer/")
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "qwen2.5-tokenizer")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 151936}
    Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_gsm8k_rows(real_data):
    train, held_out = load_questions(str(real_data / "gsm8k_test.jsonl"), 10_000, 10_000, seed=0)
    assert len(train) + len(held_out) == 1319 and 80 < len(held_out) < 200
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    for row in train + held_out:
        assert row["answer"] and "#" not in row["answer"] and "," not in row["answer"]
    assert {"18"} <= {row["answer"] for row in train + held_out if "Janet" in row["question"]}


def test_step_ends_on_every_gsm8k_solution(real_data, qwen):
    """Published solutions as steps: the k-th end is the first token with which k steps are
    complete. Often `>` shares its token with the newline, which is the case this exists for.
    """
    tokenizer, shared = AutoTokenizer.from_pretrained(qwen), 0
    for line in (real_data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:300]:
        reasoning = json.loads(line)["answer"].split("####")[0].strip()
        steps = "".join(f"<step>{step}</step>\n" for step in reasoning.splitlines())
        text = steps + r"<answer>\boxed{1}</answer>"
        ids = tokenizer(text).input_ids
        ends = step_ends(ids, tokenizer)
        assert len(ends) == len(split_steps(text))
        for k, end in enumerate(ends, start=1):
            assert len(split_steps(tokenizer.decode(ids[: end + 1]))) == k
            assert len(split_steps(tokenizer.decode(ids[:end]))) == k - 1
        shared += any(tokenizer.decode([ids[end]]) not in (">", "step>", "</step>") for end in ends)
    assert shared > 100


FOUR_BIT = {
    "tango.py": "--steps 3 --ver-warmup 1 --group-size 2 --micro-batch 2 --judgement-tokens 16",
    "prime.py": "--steps 1 --group-size 2 --micro-batch 2 --keep-low 0 --keep-high 1",
    "spin.py": "--steps 2 --iterations 2 --micro-batch 2 --solution-tokens 64",
}


@pytest.mark.parametrize("script", FOUR_BIT)
def test_four_bit_steps_on_rows_as_gsm8k_has_them(qwen, tmp_path, brief, script):
    """Reasoning and "#### 72" in one column, through each kind of loss, on a 4-bit base with a real
    tokenizer. The references are right, so none refuses them."""
    folder, data = tmp_path / "run", tmp_path / "rows.jsonl"
    rows = [
        {"question": f"Add {i} and 3.", "answer": f"{i}+3=<<{i}+3={i + 3}>>{i + 3}\n#### {i + 3}"}
        for i in range(60)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = "--questions 2 --four-bit --eval-questions 2 --lora-rank 4 --solution-tokens 16"
    where = ["--model", qwen, "--dataset", data, "--out", folder]
    printed = brief(script, *where, *shared.split(), *FOUR_BIT[script].split())
    assert "step_f1" not in printed  # there are no gold step labels for GSM8K
    losses = [key for row in metrics_of(folder) for key in row if key.endswith("/loss")]
    if script == "tango.py":
        assert losses == ["verifier/loss", "generator/loss", "generator/loss"]
    assert losses
    config = json.loads((folder / "args.json").read_text())
    assert config["four_bit"] is True and config["lr"] in (1e-5, 2e-5)


def test_adapters_on_a_four_bit_base_stay_float32_in_the_trainer(qwen, tmp_path):
    """TRL makes trainable weights on a 4-bit base bfloat16. There a step of 2e-5 on a weight of
    0.01 is rounded away.
    """
    weight = torch.tensor(0.01)
    assert weight.bfloat16() + 2e-5 == weight.bfloat16() and weight + 2e-5 != weight
    names = ["generator", "verifier"]
    model, tokenizer = load_model(str(qwen), names, 4, True, seed=0)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    args = Args(model=str(qwen), micro_batch=2)
    rows = Dataset.from_list([{"prompt": solve_prompt("What is 2+2?")}] * 2)
    players = with_adapters({name: Player([], 2e-5, 8, 2) for name in names})
    trainer = CoTrainer(model, players, args, grpo_config(args, tmp_path, 2), rows, tokenizer)
    assert {p.dtype for n, p in trainer.model.named_parameters() if "lora_" in n} == {torch.float32}
    optimizer = trainer.create_optimizer()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(trained) == 2 * 2 * 14 and all(p.dtype == torch.float32 for p in trained)


def test_four_bit_layers_have_a_gradient_after_evaluation(qwen):
    """A pass in eval mode without gradient, as an evaluation makes, must not change what training
    computes.
    """
    model, tokenizer = load_model(str(qwen), ["generator"], 4, True, seed=0)
    ids = torch.tensor([tokenizer("What is 2+2?").input_ids] * 2)

    def gradient():
        model.train().zero_grad()
        model(input_ids=ids).logits.square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    before = gradient()
    with torch.no_grad():
        model.eval()(input_ids=ids)
    after = gradient()
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    assert any(g.abs().max() > 0 for g in before.values())
