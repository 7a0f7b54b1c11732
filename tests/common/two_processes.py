"""What must hold in two processes. test_two_processes.py starts it, once for all of it.

Every check prints its name when it holds, once.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import lora, make_players, moved, perturb  # isort: skip  it finds the project
from trainers import gathered, length_reward  # isort: skip

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.errors import ScriptError
from common.run.models import load_model

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig

NAMES = ("ann", "bob", "cat")
KL = 0.1


# ------------------------------------------------------------------ three steps on a base in NF4
def whole_batch(trainer, player: str, step: int) -> Batch:
    """Eight rows, the same in both processes, of unlike length; with `base_logps`."""
    generator = torch.Generator().manual_seed(step * 10 + NAMES.index(player))
    P, T = 6, 9
    lengths = torch.randint(2, T + 1, (8, 1), generator=generator)
    mask = (torch.arange(T) < lengths).long()
    prompts = torch.randint(5, 40, (8, P), generator=generator)
    completions = torch.randint(5, 40, (8, T), generator=generator)
    seen = torch.ones(8, P, dtype=torch.long)
    batch = Batch(player, prompts, seen, completions, mask, row=torch.arange(8))
    batch.advantages = torch.randn(8, T, generator=generator) * mask
    batch.total_tokens = int(mask.sum())
    batch.base_logps = trainer.log_probs(None, batch)
    return batch


def my_rows(trainer, batch: Batch) -> Batch:
    first = 4 * trainer.accelerator.process_index
    return batch.take(torch.arange(first, first + 4))


def step(trainer, rows):
    """All rows; one live row, of one process, and no KL term; none. `cat` is idle."""
    now = trainer.state.global_step
    batches = [whole_batch(trainer, player, now) for player in ("ann", "bob")]
    if now > 0:
        trainer.kl = 0.0
        for batch in batches:
            batch.advantages[1 if now == 1 else 0 :] = 0
    trainer.weights.append({name: lora(trainer, name) for name in NAMES})
    metrics = dict(trainer._sums)
    for batch in batches:  # test_loss.py compares `loss` with TRL's
        with trainer.playing(batch.player):
            loss, _ = trainer.loss(batch)
            gradient = torch.autograd.grad(loss, trainer.parameters_of(batch.player))
        trainer.expected.append((loss.item(), dict(enumerate(gradient))))
    trainer._sums = metrics
    return [my_rows(trainer, batch) for batch in batches]


class Remembers(CoTrainer):
    def add_up_gradients(self, name, parameters):
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            super().add_up_gradients(name, parameters)
        self.found.append(dict(enumerate(p.grad.clone() for p in parameters)))
        self.calls.append(calls.call_count)


def make_trainer(folder):
    players = {name: Player([length_reward], 1e-3, 8, 4, max_grad_norm=0) for name in NAMES}
    options = {"rows": 4, "micro_batch": 3, "kl": KL, "steps": 3, "kind": Remembers}
    options["four_bit"] = True
    trainer = make_players(folder, players, step, **options)
    perturb(trainer)
    trainer.found, trainer.expected, trainer.calls, trainer.weights = [], [], [], []
    return trainer


def check_two_processes_have_the_gradient_of_one_by_one_collective_call(trainer):
    """With all rows, with a live one in one process only, and with none."""
    assert trainer.accelerator.num_processes == dist.get_world_size() == 2
    assert len(trainer.found) == len(trainer.expected) == 6 and trainer.calls == [1] * 6
    logs = [row for row in trainer.state.log_history if "step_time" in row]
    losses = [row[f"{name}/loss"] for row in logs for name in ("ann", "bob")]
    for number, (got, (loss, expected)) in enumerate(zip(trainer.found, trainer.expected)):
        scale = max(g.abs().max() for g in expected.values())
        assert (scale > 1e-4) == (number < 4) and moved(got, expected) <= 1e-4 * scale
        assert abs(losses[number] - loss) < 1e-5


def check_who_is_trained_moves_alike_and_the_others_by_exactly_zero(trainer):
    trainer.weights.append({name: lora(trainer, name) for name in NAMES})
    pairs = zip(trainer.weights, trainer.weights[1:])
    moves = [{name: moved(a[name], b[name]) for name in NAMES} for a, b in pairs]
    assert all(move["cat"] == 0 for move in moves)
    for trained in ("ann", "bob"):
        assert moves[0][trained] > 0 and moves[1][trained] > 0
        assert moves[2][trained] == 0  # flat in both processes: momentum must not move it
    for name in NAMES:
        for tensor in lora(trainer, name).values():
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, tensor)


# ------------------------------------------------------------------ the verbs
def check_work_is_shared_and_all_get_all(trainer):
    me = trainer.accelerator.process_index
    items = [*range(5)]
    mine = []

    def double(share):
        mine.extend(share)
        return [2 * x for x in share]

    assert trainer.in_parallel(double, items) == [0, 2, 4, 6, 8]
    assert mine == trainer.shard(items) == [[0, 1], [2, 3, 4]][me]
    assert trainer.in_parallel(double, []) == [] and trainer.in_parallel(double, [7]) == [14]
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(3)]
    alone = trainer.generate("ann", prompts, greedy=True)
    assert trainer.generate_all("ann", prompts, greedy=True) == alone
    assert trainer.generate_all("ann", prompts[:1], greedy=True) == alone[:1]
    assert trainer.generate_all("ann", []) == []


def check_copies_of_a_question_get_different_texts_in_an_evaluation(trainer):
    """Both processes ask the same prompts then."""
    with patch.object(trainer, "asked_in_evaluation", Counter()):
        texts = trainer.generate_all("ann", [trainer.train_dataset[0]["prompt"]] * 32)
    assert texts[:16] != texts[16:]


def check_a_function_of_everybodys_rows(trainer):
    """Two rows here, three there; tensors of unlike width."""
    me = trainer.accelerator.process_index
    texts = [["a", "b"], ["c", "d", "e"]][me]
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0, 5.0]][me])
    grid = torch.ones(len(texts), 2 + 2 * me) * numbers[:, None]
    seen = []

    def fn(texts, numbers, grid):
        seen.append((texts, numbers.tolist(), grid))
        return grid - numbers.mean()

    got = trainer.over_all_processes(fn, texts, numbers, grid)
    all_texts, all_numbers, all_rows = seen[0]
    assert all_texts == ["a", "b", "c", "d", "e"] and all_numbers == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all_rows.shape == (5, 4) and (all_rows[:2, 2:] == 0).all()
    assert torch.equal(got, grid - 3.0)
    lists = trainer.over_all_processes(
        lambda t, n: [x + str(int(max(n))) for x in t], texts, numbers
    )
    assert lists == [f"{x}5" for x in texts]
    row = trainer.over_all_processes(lambda n: n / n.sum(), numbers)
    assert torch.equal(row, numbers / 15)


def check_metrics_are_means_over_all_rows(trainer):
    me = trainer.accelerator.process_index
    trainer.log_mean("co/rows", [[1.0], [2.0, 3.0, 6.0]][me])
    trainer.log_mean("co/one", [[], [5.0]][me])
    trainer.log_mean("co/none", [])
    trainer.log_mean("co/number", torch.tensor(float(me)))
    if me == 1:
        trainer.log_mean("co/alone", 7)
    expected = {"co/rows": 3.0, "co/one": 5.0, "co/number": 0.5, "co/alone": 7.0}
    assert gathered(trainer) == expected


def check_a_rollout_has_the_rewards_of_its_own_rows(trainer):
    me = trainer.accelerator.process_index
    batch = trainer.rollout("ann", [trainer.train_dataset[2 * me + i // 4] for i in range(4)])
    assert batch.rewards.tolist() == length_reward([[{"content": t}] for t in batch.texts])
    assert batch.notes[0]["prompt"] == trainer.train_dataset[2 * me]["question"]
    tokens = trainer.gather([int(batch.completion_mask.sum())])
    assert batch.total_tokens == sum(tokens)
    trainer.set_rewards(batch, [float(me)] * 4)
    assert gathered(trainer)["ann/total_reward"] == 0.5


def check_rows_that_differ_in_number_are_refused_where_trl_gathers_rewards(trainer):
    rows = [trainer.train_dataset[0]] * (4 + 4 * trainer.accelerator.process_index)
    with pytest.raises(ScriptError, match="the ann has 4, 8 rows on the processes"):
        trainer.rollout("ann", rows)


def check_a_process_without_a_row_takes_part_in_rollout_and_update(trainer):
    """Of a player without reward functions; its gradient is the other process's."""
    me, ann = trainer.accelerator.process_index, trainer.players["ann"]
    trainer.kl = KL
    with patch.object(ann, "rewards", []):
        batch = trainer.rollout("ann", [trainer.train_dataset[0]] * (4 * me))
        assert len(batch) == len(batch.texts) == 4 * me and batch.total_tokens > 0
        trainer.set_rewards(batch, [0.0, 1.0, 0.0, 1.0][: 4 * me])
        none = trainer.rollout("ann", [])
        trainer.set_rewards(none, [])
        whole = trainer.concat([batch, none])
        before = lora(trainer, "ann")
        trainer.update(whole)
    assert moved(before, lora(trainer, "ann")) > 0
    for tensor in lora(trainer, "ann").values():
        first = tensor.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)
    gathered(trainer)


def check_two_players_at_once_are_refused_before_gradients_are_mixed(trainer):
    mine = my_rows(trainer, whole_batch(trainer, NAMES[trainer.accelerator.process_index], 0))
    with pytest.raises(ScriptError, match="must train one player together; got ann, bob"):
        trainer.update(mine)


def check_rows_of_all_processes_with_one_key_are_compared(trainer):
    me = trainer.accelerator.process_index
    batch = trainer.rollout("ann", [trainer.train_dataset[0]] * 4)
    trainer.set_rewards(batch, [[1.0, 2.0, 0.0, 0.0], [4.0, 5.0, 1.0, 3.0]][me], [*"aabb"])
    everyones = {"a": [1.0, 2.0, 4.0, 5.0], "b": [0.0, 0.0, 1.0, 3.0]}
    for key, place, reward in (("a", 0, [1.0, 4.0][me]), ("b", 3, [0.0, 3.0][me])):
        group = torch.tensor(everyones[key])
        expected = (reward - group.mean()) / (group.std() + 1e-6)
        assert abs(batch.advantages[place] - expected) < 1e-5


def check_two_processes_write_what_one_would(trainer):
    """In training, and in an evaluation, in which a question's copies lie on both processes."""
    prompts = [[{"role": "user", "content": str(i // 3)}] for i in range(5)]
    for asked in (lambda: None, Counter):
        trainer.sample_calls, trainer.asked_in_evaluation = 0, asked()
        both = trainer.gather(trainer.generate_ids("ann", trainer.shard(prompts)))
        trainer.sample_calls, trainer.asked_in_evaluation = 0, asked()
        one = SimpleNamespace(process_index=0, num_processes=1)
        one.autocast = trainer.accelerator.autocast
        with patch.multiple(trainer, gather=lambda values: values, accelerator=one):
            assert trainer.generate_ids("ann", prompts) == both
        assert len({*map(str, both)}) > 3
    trainer.asked_in_evaluation = None


def check_steps_of_more_batches_than_another_processs_are_refused(trainer):
    batches = [whole_batch(trainer, "ann", 0), whole_batch(trainer, "bob", 0)]
    trainer.step = lambda rows: batches[trainer.accelerator.process_index :]
    with pytest.raises(ScriptError, match="step returned 2, 1 batches on the processes"):
        trainer.training_step(trainer.model, [])


# ------------------------------------------------------------------ a sharded base
def check_a_sharded_four_bit_base_gives_the_gradients_of_the_whole_one(_):
    """What docs/real-models.md says of FSDP2."""

    def build(storage):
        stored = partial(BitsAndBytesConfig, bnb_4bit_quant_storage=storage)
        with patch("common.run.models.BitsAndBytesConfig", stored):
            model, _ = load_model("tiny", ["generator", "verifier"], 4, True, seed=0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        perturb(model)
        return model

    ids = torch.randint(5, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    ids = ids[dist.get_rank() : dist.get_rank() + 1]

    def gradients(model):
        logits = model(input_ids=ids).logits[:, :-1]
        logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    whole = gradients(build(torch.uint8))
    for gradient in whole.values():
        dist.all_reduce(gradient)
    model, mesh = build(torch.float32), init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = {name: gradient.full_tensor() for name, gradient in gradients(model).items()}
    assert whole.keys() == sharded.keys() and all(".generator." in name for name in whole)
    largest = max(gradient.abs().max() for gradient in whole.values())
    halves = {name: gradient / 2 for name, gradient in whole.items()}
    assert largest > 0.01 and moved(halves, sharded) <= 1e-5 * largest
    named = model.named_parameters()
    weight = next(p for name, p in named if "q_proj.base_layer.weight" in name)
    assert weight.to_local().numel() == weight.numel() // 2


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = make_trainer(folder)
    trainer.train()
    for name in [name for name in globals() if name.startswith("check_")]:
        globals()[name](trainer)
        if dist.get_rank() == 0:
            print("holds:", name, flush=True)
    dist.barrier()
    dist.destroy_process_group()
