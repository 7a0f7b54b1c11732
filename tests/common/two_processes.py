"""What must hold in two processes. test_two_processes.py has torchrun start it, once for all of it.

Every check prints its name when it holds, once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import lora, make_players, moved, perturb  # isort: skip  it finds the project

from common import scoring
from common.cotrainer import Player
from common.model import add_players

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config

NAMES = ("ann", "bob", "cat")
KL = 0.1


def length_reward(completions, **_):
    return [float(len(c[0]["content"])) for c in completions]


# ------------------------------------------------------------------ a run of three steps
def whole_batch(trainer, player: str, step: int) -> dict:
    """Eight rows, the same in both processes, of unlike length; with `base_logps`."""
    generator = torch.Generator().manual_seed(step * 10 + NAMES.index(player))
    P, T = 6, 9
    lengths = torch.randint(2, T + 1, (8, 1), generator=generator)
    mask = (torch.arange(T) < lengths).long()
    batch = {
        "player": player,
        "prompt_ids": torch.randint(5, 40, (8, P), generator=generator),
        "prompt_mask": torch.ones(8, P, dtype=torch.long),
        "completion_ids": torch.randint(5, 40, (8, T), generator=generator),
        "completion_mask": mask,
        "advantages": torch.randn(8, T, generator=generator) * mask,
        "num_items_in_batch": mask.sum(),
    }
    return batch | {"base_logps": trainer.log_probs(None, batch)}


def my_rows(trainer, batch: dict) -> dict:
    first = 4 * trainer.accelerator.process_index
    whole = ("player", "num_items_in_batch")
    return {k: v if k in whole else v[first : first + 4] for k, v in batch.items()}


def plain_gradient(trainer, batch: dict) -> dict:
    """Of the whole batch by plain autograd: (-sum A log pi + kl * sum k3) / tokens."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    T = batch["completion_ids"].shape[1]
    with trainer.playing(batch["player"]):
        logits = model(input_ids=ids, attention_mask=seen).logits[:, -T - 1 : -1]
        chosen = batch["completion_ids"][..., None]
        logp = logits.log_softmax(-1).gather(2, chosen).squeeze(2)
        log_q = batch["base_logps"] - logp
        terms = -batch["advantages"] * logp + trainer.kl * (log_q.exp() - log_q - 1)
        loss = (terms * batch["completion_mask"]).sum() / batch["num_items_in_batch"]
        named = {n: p for n, p in model.named_parameters() if f".{batch['player']}." in n}
        return dict(zip(named, torch.autograd.grad(loss, named.values())))


def step(trainer, rows):
    """`ann` is trained at once, by `update`, and `bob` by Trainer's own step; `cat` is idle."""
    now = trainer.state.global_step
    trainer.weights.append({name: lora(trainer, name) for name in NAMES})
    if now == 0:
        inner = trainer.optimizer.optimizer  # AdamW itself: what both ways of training end in
        original = inner.step

        def remember(*arguments, **options):
            model = trainer.accelerator.unwrap_model(trainer.model)
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            trainer.gradients += [grads] if grads else []
            return original(*arguments, **options)

        inner.step = remember
    batches = [whole_batch(trainer, name, now) for name in ("ann", "bob")]
    if now > 0:
        trainer.kl = 0.0
        for batch in batches:  # one live row, of one process; then none
            batch["advantages"][1 if now == 1 else 0 :] = 0
    for batch in batches:
        trainer.expected.append(plain_gradient(trainer, batch))
    return [my_rows(trainer, batch) for batch in batches]


def make_trainer(folder):
    players = {name: Player([length_reward], 1e-3, 8, 4, max_grad_norm=1e9) for name in NAMES}
    trainer = make_players(folder, players, step, rows=4, micro_batch=2, kl=KL, steps=3)
    perturb(trainer)
    trainer.gradients, trainer.expected, trainer.weights = [], [], []
    return trainer


def check_two_processes_have_the_gradient_of_one(trainer):
    """By `update` and through DDP; with all rows, and with a live one in one process only."""
    assert len(trainer.gradients) == 4  # two in each of two steps; the third one is flat
    for got, expected in zip(trainer.gradients, trainer.expected):
        assert got.keys() == expected.keys()  # nobody else has one
        scale = max(g.abs().max() for g in expected.values())
        assert scale > 1e-4 and moved(got, expected) <= 1e-4 * scale


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
    assert mine == trainer.my_share(items) == items[me::2]
    assert trainer.in_parallel(double, []) == [] and trainer.in_parallel(double, [7]) == [14]
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(3)]
    alone = trainer.generate("ann", prompts, greedy=True)
    assert trainer.generate_all("ann", prompts, greedy=True) == alone
    assert trainer.generate_all("ann", prompts[:1], greedy=True) == alone[:1]
    assert trainer.generate_all("ann", []) == []


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
    trainer._means.clear()
    trainer.log_mean("co/rows", [[1.0], [2.0, 3.0, 6.0]][me])
    trainer.log_mean("co/one", [[], [5.0]][me])
    trainer.log_mean("co/none", [])
    trainer.log_mean("co/number", torch.tensor(float(me)))
    assert trainer._means == {"co/rows": [3.0], "co/one": [5.0], "co/number": [0.5]}


def check_a_rollout_has_the_rewards_of_its_own_rows(trainer):
    me = trainer.accelerator.process_index
    trainer.kl = 0.0
    batch = trainer.rollout("ann", [trainer.train_dataset[2 * me + i // 4] for i in range(4)])
    assert batch["rewards"].tolist() == length_reward([[{"content": t}] for t in batch["texts"]])
    assert batch["notes"][0]["prompt"] == trainer.train_dataset[2 * me]["question"]
    tokens = trainer.gather([int(batch["completion_mask"].sum())])
    assert int(batch["num_items_in_batch"]) == sum(tokens)
    trainer.pay(batch, [float(me)] * 4)
    assert trainer._means["ann/total_reward"] == [0.5]


def check_unlike_batches_are_refused_before_one_process_waits_for_the_other(trainer):
    me = trainer.accelerator.process_index
    batch = my_rows(trainer, whole_batch(trainer, "ann", 0))
    fewer = {k: v if k in ("player", "num_items_in_batch") else v[:3] for k, v in batch.items()}
    other = batch | {"player": "bob"}
    for unlike, got in (
        (fewer, "4 rows of the ann, 3 rows"),
        (other, "of the ann, 4 rows of the bob"),
    ):
        try:
            trainer.update(dict([batch, unlike][me]))
        except ValueError as error:
            assert got in str(error) and "all processes must train one player" in str(error)
        else:
            raise AssertionError


# ------------------------------------------------------------------ a sharded base
def check_a_sharded_four_bit_base_gives_the_gradients_of_the_whole_one(folder):
    """What docs/scale.md says of FSDP2."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads)).save_pretrained(folder)
    dist.barrier()

    def build(storage):
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=storage,
        )
        options = {"dtype": torch.float32, "quantization_config": settings}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        model = add_players(model, ["generator", "verifier"], 4, 0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_B" in name:
                parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
        scoring.install_scoring(model.get_base_model())
        return model

    ids = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    ids = ids[dist.get_rank() : dist.get_rank() + 1]

    def gradients(model):
        logp, _ = model(input_ids=ids, attention_mask=torch.ones_like(ids), score=(6, 1.0))
        logp.sum().backward()
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
    for name in whole:
        assert torch.allclose(whole[name] / 2, sharded[name], atol=1e-6), name
    assert max(g.abs().max() for g in whole.values()) > 0.01
    named = model.named_parameters()
    weight = next(p for name, p in named if "q_proj.base_layer.weight" in name)
    assert weight.to_local().numel() == weight.numel() // 2


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = make_trainer(folder)
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    for name in [name for name in globals() if name.startswith("check_")]:
        globals()[name](folder / "model" if "sharded" in name else trainer)
        if dist.get_rank() == 0:
            print("holds:", name, flush=True)
    dist.barrier()
    dist.destroy_process_group()
