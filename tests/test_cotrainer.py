"""Invariants of co-training: what must not move does not, what must not matter does not, and resume is exact."""

from common.data import UserError
from tango import verify_prompt

import pytest
import torch
from conftest import make_trainer
from transformers import TrainerCallback


def adapter(trainer, name):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if f".{name}." in n}


def moved(before, after):
    return max((before[n] - after[n]).abs().max().item() for n in before)


def gradients(trainer):
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("trained, idle", [("generator", "verifier"), ("verifier", "generator")])
def test_each_step_moves_one_adapter_and_the_other_by_exactly_zero(tmp_path, trained, idle):
    frozen = {"verifier": "frozen"} if trained == "generator" else {"generator": "frozen"}
    trainer = make_trainer(tmp_path, kl=0.001, steps=3, **frozen)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    before = adapter(trainer, trained), adapter(trainer, idle)
    trainer.train()
    assert moved(before[0], adapter(trainer, trained)) > 0
    assert moved(before[1], adapter(trainer, idle)) == 0
    assert moved(base, {n: p.detach() for n, p in trainer.model.named_parameters() if "lora_" not in n}) == 0


def test_momentum_does_not_move_the_idle_adapter(tmp_path):
    """After steps of its own, when Adam has momentum for both."""
    trainer = make_trainer(tmp_path, kl=0.001, steps=6)
    seen = []

    class Remember(TrainerCallback):
        def on_step_end(self, *_, **__):
            seen.append((trainer.player, adapter(trainer, "generator"), adapter(trainer, "verifier")))

    trainer.add_callback(Remember())
    trainer.train()
    players = [player for player, _, _ in seen]
    assert players == ["verifier"] + ["generator"] * 3 + ["verifier", "generator"]
    for (_, g0, v0), (player, g1, v1) in zip(seen, seen[1:]):
        assert moved(v0 if player == "generator" else g0, v1 if player == "generator" else g1) == 0


def rollouts(trainer, per_token):
    """One batch with two groups, the second one flat, and ragged lengths."""
    trainer.model.train()
    torch.manual_seed(0)
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[3]] * 4
    batch = trainer.turn("generator", rows)
    A = torch.tensor([1.0, -0.5, 0.25, -0.75, 0, 0, 0, 0])
    T = batch["completion_mask"].shape[1]
    batch["advantages"] = A[:, None] * torch.linspace(1, 2, T) * batch["completion_mask"] if per_token else A
    return batch


def gradient_of(trainer, micro_batches):
    trainer.model.zero_grad(set_to_none=True)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    for micro_batch in micro_batches:
        trainer._compute_loss(trainer.model, micro_batch).backward()
    return gradients(trainer)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_dead_rows_trimming_and_micro_batches_change_nothing(tmp_path, per_token, count, kl):
    trainer = make_trainer(tmp_path, micro_batch=8 // count, kl=kl)
    batch = rollouts(trainer, per_token)
    plain = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    trainer.args.steps_per_generation = 1
    expected = gradient_of(trainer, [plain])
    trainer.args.steps_per_generation = count
    ours = trainer._micro_batches(batch, count)
    assert len(ours) == count and ours[-1]
    rows = sum(len(m["completion_ids"]) for m in ours if m)
    assert rows == (4 if kl == 0 else 8)  # with a KL term every row counts
    if kl == 0 and count == 1:
        assert ours[0]["completion_ids"].shape[1] == int(plain["completion_mask"][:4].sum(1).max())
    got = gradient_of(trainer, ours)
    assert expected.keys() == got.keys() and all(".generator." in name for name in got)
    scale = max(g.abs().max() for g in expected.values())
    assert max((expected[n] - got[n]).abs().max() for n in got) <= 1e-5 * scale


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_fewer_rows_than_parts(tmp_path, kl):
    """A filter or a second player may leave fewer rows than there are micro-batches."""
    trainer = make_trainer(tmp_path, micro_batch=1, kl=kl)
    batch = {k: v[:3] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in rollouts(trainer, False).items()}
    parts = trainer._micro_batches(batch, 8)
    assert [len(part["completion_ids"]) for part in parts if part] == [1, 1, 1] and len(parts) == 8 and not parts[0]


def test_a_text_cannot_pass_for_the_templates_own_marks(trainer):
    """<|im_end|> and its like, spelled out by a model, must not end the message that quotes it."""
    tokenizer, player = trainer.processing_class, trainer
    marks = tokenizer.all_special_tokens
    assert marks
    nested = marks[0][: len(marks[0]) // 2] + marks[-1] + marks[0][len(marks[0]) // 2 :]  # removing one must not make another
    say = lambda text: player._tokenize_prompts([verify_prompt("3+4 mod 10", text)])[0][0]  # noqa: E731
    special = [sum(id_ in tokenizer.all_special_ids for id_ in say(text)) for text in ("7", "7".join(marks), nested)]
    assert special[1] == special[2] == special[0]
    assert (
        say("<step>3+4=7</step>")
        == tokenizer.apply_chat_template(verify_prompt("3+4 mod 10", "<step>3+4=7</step>"), add_generation_prompt=True)[
            "input_ids"
        ]
    )


def test_marks_that_are_in_no_named_list_are_blanked_too(trainer):
    """As Llama's <|start_header_id|>: special, but neither eos nor pad nor among the additional ones."""
    tokenizer = trainer.processing_class
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>"]})
    mark = tokenizer.convert_tokens_to_ids("<|header|>")
    named = property(lambda self: ["<|im_end|>"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "all_special_tokens", named)
        ids = trainer._tokenize_prompts([verify_prompt("3+4 mod 10", "7<|header|>judge<|header|>")])[0][0]
    assert mark not in ids


def test_gradient_is_the_policy_gradient(tmp_path):
    """Against autograd through plain logits: sum_t A_t grad log p_t / number of tokens."""
    trainer = make_trainer(tmp_path)
    batch = rollouts(trainer, per_token=True)
    got = gradient_of(trainer, trainer._micro_batches(batch, 1))
    trainer.model.zero_grad(set_to_none=True)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -batch["completion_ids"].shape[1] - 1 : -1]
    logp = logits.double().log_softmax(-1).gather(2, batch["completion_ids"][..., None]).squeeze(2)
    (-(logp * batch["advantages"] * batch["completion_mask"]).sum() / batch["completion_mask"].sum()).backward()
    expected = gradients(trainer)
    scale = max(g.abs().max() for g in expected.values())
    assert max((expected[n] - got[n]).abs().max() for n in got) <= 1e-5 * scale


def test_a_flat_batch_moves_nothing(tmp_path, monkeypatch):
    """All advantages zero: not even Adam's momentum of the steps before may move the weights."""
    trainer = make_trainer(tmp_path, steps=4, verifier="none")
    seen, flat_from = [], 2

    def step(rows):
        batch = trainer.turn("generator", rows)
        batch["advantages"] = (
            torch.linspace(-1, 1, len(rows)) if trainer.state.global_step < flat_from else torch.zeros(len(rows))
        )
        seen.append(adapter(trainer, "generator"))
        return batch

    trainer._generate_and_score_completions = step
    trainer.train()
    seen.append(adapter(trainer, "generator"))
    assert moved(seen[0], seen[1]) > 0 and moved(seen[1], seen[2]) > 0
    assert moved(seen[2], seen[3]) == 0 and moved(seen[3], seen[4]) == 0


def test_nothing_decays(trainer):
    assert [group["weight_decay"] for group in trainer.create_optimizer().param_groups] == [0.0, 0.0]


def test_act_neither_trains_nor_changes_the_player(trainer):
    trainer.model.train()
    trainer.become("verifier")
    trainer.rows_at_once = 2
    texts = trainer.act("generator", [trainer.train_dataset[i]["prompt"] for i in range(3)], greedy=True)
    assert len(texts) == 3 and all("<step>" in text for text in texts)
    assert trainer.player == "verifier" and trainer.model.active_adapter == "verifier"
    assert trainer.generation_config.do_sample and trainer.generation_config.max_new_tokens == 96
    assert not gradients(trainer)


def test_generate_gives_the_same_texts_in_parts_and_chunks(trainer, monkeypatch):
    """What a GPU does: transformers' `generate`, a few rows at once, prompts read a few tokens at a time."""
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(5)]
    ours = trainer.act("generator", prompts, greedy=True)
    calls = []
    original = trainer.model.get_base_model().generate
    monkeypatch.setattr(
        trainer.model.get_base_model(), "generate", lambda **k: calls.append(len(k["input_ids"])) or original(**k)
    )
    monkeypatch.setattr("common.cotrainer.PREFILL_TOKENS", 8)
    trainer.top_k, trainer.rows_at_once = 1, 2  # a filter, which common/sampling.py does not have
    assert trainer.act("generator", prompts, greedy=True) == ours and calls == [2, 2, 1]
    assert trainer.act("generator", []) == []


def test_sampling_under_checkpointing_leaves_no_hooks_behind(trainer, monkeypatch):
    """TRL adds one to the embedding at every call of `generate`; thousands of them cost more than the embedding."""
    trainer.model.gradient_checkpointing_enable()
    trainer.top_k = 1  # a filter, so that transformers' `generate` samples
    embedding, counts = trainer.model.get_input_embeddings(), []
    for _ in range(4):
        trainer.model.train()
        trainer.act("generator", [trainer.train_dataset[0]["prompt"]])
        counts.append(len(embedding._forward_hooks))
    assert counts[-1] == counts[0] <= 2


def test_players_differ_in_what_they_were_given(trainer):
    trainer.become("generator")
    assert (trainer.max_completion_length, trainer.reward_func_names) == (64, ["outcome_reward"])
    trainer.become("verifier")
    assert (trainer.max_completion_length, trainer.reward_func_names) == (96, ["verdict_reward", "format_reward"])


def test_turn_rewards_are_those_of_the_reward_functions(trainer):
    trainer.model.train()
    row = {"prompt": verify_prompt("3+4 mod 10", "<step>3+4=7</step>"), "solution": "<step>3+4=7</step>", "label": True}
    batch = trainer.turn("verifier", [row] * 4)
    names = trainer.reward_func_names
    expected = [
        sum(f([[{"content": text}]], label=[True], solution=[row["solution"]])[0] for f in trainer.reward_funcs)
        for text in batch["texts"]
    ]
    assert names and batch["rewards"].tolist() == pytest.approx(expected)


def test_join_pads_prompts_left_and_completions_right(trainer):
    trainer.model.train()
    row = {"prompt": verify_prompt("3+4 mod 10", "<step>3+4=7</step>"), "solution": "<step>3+4=7</step>", "label": True}
    one = trainer.turn("verifier", [row] * 4)
    two = trainer.turn("verifier", [{**row, "prompt": verify_prompt("(3+4)*6 mod 10", "<step>3+4=7</step>\n" * 2)}] * 4)
    one["advantages"], two["advantages"] = torch.linspace(-1, 1, 4), torch.linspace(-2, 2, 4)
    parts = [{k: v for k, v in b.items()} for b in (one, two)]
    joined = trainer.join([dict(b) for b in parts])
    assert len(joined["texts"]) == 8 and joined["advantages"].dim() == 2
    assert int(joined["num_items_in_batch"]) == int(joined["completion_mask"].sum())
    total = float(joined["num_items_in_batch"])
    expected: dict = {}
    for b in parts:
        share = float(b["num_items_in_batch"]) / total
        for name, g in gradient_of(trainer, [{k: v for k, v in b.items() if isinstance(v, torch.Tensor)}]).items():
            expected[name] = expected.get(name, 0) + share * g
    got = gradient_of(trainer, [{k: v for k, v in joined.items() if isinstance(v, torch.Tensor)}])
    scale = max(g.abs().max() for g in expected.values())
    assert max((expected[n] - got[n]).abs().max() for n in got) <= 1e-5 * scale


def test_rows_must_fill_every_players_groups(tmp_path):
    with pytest.raises(UserError, match="8 rows per step and process are not a multiple of the generator's group of 3"):
        make_trainer(tmp_path, group_size=3)


def test_heads_we_do_not_score_are_refused(tmp_path):
    from common.cotrainer import _install_scoring

    trainer = make_trainer(tmp_path)
    base = trainer.model.get_base_model()
    base.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        _install_scoring(base)
