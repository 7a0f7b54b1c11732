"""vstar.py: best of k against enumeration, every loss against a softmax by hand or TRL's own, step
labels against brute force, hostile solutions, what the data hold, runs."""

import itertools
import json
import math
import random
from types import SimpleNamespace

import vstar
from common.args import fill_in, grpo_config
from common.errors import UserError
from common.model import TINY, load_model
from common.tiny.tasks import gold_solution

import pytest
import torch
from conftest import lora, moved, perturb, refused, run_here, small
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

QUESTION = "(38+4)*7 mod 100"
RIGHT = gold_solution(QUESTION)
WRONG = "<step>38+4=41</step>\n<step>41*7=87</step>\n<answer>\\boxed{87}</answer>"
EOS = 4


# ------------------------------------------------------------------ best of k
@pytest.mark.parametrize("seed", range(20))
def test_best_of_k_is_the_mean_over_all_choices(seed):
    rng = random.Random(seed)
    N = rng.randint(1, 8)
    correct = [rng.random() < 0.5 for _ in range(N)]  # the best first
    for k in range(1, N + 1):
        choices = list(itertools.combinations(range(N), k))
        wanted = sum(correct[min(choice)] for choice in choices) / len(choices)
        assert vstar.best_of_k(correct, k) == pytest.approx(wanted)


def test_best_of_one_is_the_mean_and_of_all_the_first():
    correct = [True, False, False, True]
    assert vstar.best_of_k(correct, 1) == 0.5 and vstar.best_of_k(correct, 4) == 1.0


# ------------------------------------------------------------------ losses
def test_dpo_by_hand():
    torch.manual_seed(0)
    chosen, ref_chosen, rejected, ref_rejected = torch.randn(4, 16, dtype=torch.float64) * 20
    for beta in (0.1, 1.0):
        ours = vstar.dpo_loss(chosen, ref_chosen, rejected, ref_rejected, beta)
        for i in range(16):
            r = [
                beta * (a[i] - b[i]).item()
                for a, b in ((chosen, ref_chosen), (rejected, ref_rejected))
            ]
            assert ours[i].item() == pytest.approx(math.log1p(math.exp(r[1] - r[0])), rel=1e-9)


def test_dpo_is_what_trls_trainer_computes(tmp_path):
    """On the same pairs of different lengths, with another policy than the reference."""
    policy, base = (AutoModelForCausalLM.from_pretrained(TINY).eval() for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.02 * p.std() * torch.randn_like(p)
    pairs = [
        {"prompt": f"<|user|>{QUESTION}<|assistant|>", "chosen": RIGHT, "rejected": rejected}
        for rejected in (WRONG, "<step>38+4=40</step>")
    ]
    trainer = DPOTrainer(
        policy,
        base,
        DPOConfig(str(tmp_path), beta=0.3, use_cpu=True, report_to="none", disable_dropout=True),
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(policy.eval(), dict(batch)).item()

    def sums(model) -> torch.Tensor:
        """(4,): of the chosen, then of the rejected."""
        with torch.no_grad():
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        logps = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        return (logps * batch["completion_mask"][:, 1:]).sum(1)

    (chosen, rejected), (ref_chosen, ref_rejected) = (sums(m).chunk(2) for m in (policy, base))
    ours = vstar.dpo_loss(chosen, ref_chosen, rejected, ref_rejected, 0.3).mean().item()
    assert ours == pytest.approx(theirs, rel=1e-4) and abs(ours - math.log(2)) > 1e-3


def test_a_verdicts_loss_is_cross_entropy_with_soft_labels_too():
    for logit, z in itertools.product((-3.0, 0.0, 0.7), (0.0, 0.25, 1.0)):
        p = 1 / (1 + math.exp(-logit))
        wanted = -(z * math.log(p) + (1 - z) * math.log(1 - p))
        found = vstar.verdict_loss(torch.tensor([logit]), torch.tensor([z])).item()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_steps_are_aggregated():
    scores = [0.5, 0.9, 0.8]
    wanted = {"min": 0.5, "prod": 0.36, "last": 0.8}
    for how, value in wanted.items():
        assert vstar.aggregated(scores, how) == pytest.approx(value)


# ------------------------------------------------------------------ parsing
def test_beginnings_end_with_a_step_and_the_last_is_all():
    first, last = vstar.beginnings(RIGHT)
    assert first == "<step>38+4=42</step>" and last == RIGHT
    twice = "<step>1+1=2</step><step>1+1=2</step>\nend"
    assert vstar.beginnings(twice) == ["<step>1+1=2</step>", twice]
    assert vstar.beginnings("nothing") == ["nothing"]
    stray = "x</step><step>x</step><step>y</step>end"
    assert vstar.beginnings(stray) == ["x</step><step>x</step>", stray]
    assert vstar.beginnings("<step></step>\n<step>a</step>x") == [
        "<step></step>",
        "<step></step>\n<step>a</step>x",
    ]


def test_a_rationale_ends_where_its_verdict_begins():
    thoughts = "<step_verification>\n<step>a\\boxed{INCORRECT}</step>\n</step_verification>\n"
    text = thoughts + vstar.OPENING + "\\boxed{INCORRECT}</final_verification>"
    assert vstar.rationale(text) == (thoughts + vstar.OPENING, False)
    assert vstar.rationale(text.replace("INCORRECT", "CORRECT"))[1] is True
    for bad in ("", thoughts, "\\boxed{CORRECT}", vstar.OPENING, vstar.OPENING + "yes"):
        assert vstar.rationale(bad) is None
    assert vstar.rationale(vstar.OPENING * 3 + vstar.VERDICTS[0])[1] is True


# ------------------------------------------------------------------ the schedule
def test_the_generator_learns_in_all_iterations_and_then_the_verifier():
    cfg = vstar.Args(steps=8, ver_steps=2, iterations=3)
    found = [vstar.player_at(step, cfg) for step in range(8)]
    assert found[:6] == [("generator", t) for t in (0, 0, 1, 1, 2, 2)]
    assert found[6:] == [("verifier", 2)] * 2
    cfg = vstar.Args(steps=9, ver_steps=3, iterations=3, verifier_in_loop=True)
    names = ["generator", "generator", "verifier"]
    assert [vstar.player_at(s, cfg) for s in range(9)] == [(n, t) for t in range(3) for n in names]


@pytest.fixture
def real(tmp_path):
    """real(verifier) -> the trainer on the embedded model, its two adapters apart."""

    def make(verifier="dpo"):
        args = vstar.Args(verifier=verifier, questions=2, micro_batch=2, beta=0.3, four_bit=False)
        args = fill_in(args, rows=2)
        model, tokenizer = load_model("tiny", ["generator", "verifier"], 4, False, seed=0)
        trainer = vstar.VStar(
            model,
            args,
            [],
            args=grpo_config(args, tmp_path, rows=2),
            train_dataset=Dataset.from_list([{"prompt": vstar.solve_prompt("")}] * 2),
            processing_class=tokenizer,
        )
        perturb(trainer, 0.05)
        return trainer

    return make


def test_each_player_has_its_own_learning_rate(real):
    rates = {name: player.lr for name, player in real().players.items()}
    assert rates == {"generator": 1e-3, "verifier": 3e-4}


def log_probs_by_hand(trainer, adapter, prompt, ids) -> list[float]:
    """Of each of the tokens, by a softmax in float64; adapter None: the base."""
    text = trainer.processing_class.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True
    )
    asked = trainer.processing_class(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        if adapter is None:
            with trainer.model.disable_adapter():
                logits = trainer.model(torch.tensor([asked + ids])).logits[0]
        else:
            trainer.model.set_adapter(adapter)
            logits = trainer.model(torch.tensor([asked + ids])).logits[0]
    logps = logits.double().log_softmax(-1)[len(asked) - 1 : -1]
    return [logps[i, token].item() for i, token in enumerate(ids)]


def one_loss(trainer, batch) -> float:
    with trainer.playing(batch["player"]):
        return sum(
            trainer.loss(trainer.model, part).item() for part in trainer.micro_batches(batch)
        )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpos_loss_by_hand(real):
    """The verifier against the base, of the right solution and of the wrong one."""
    trainer = real()
    others = [WRONG, "<step>38+4=42</step>\n<answer>\\boxed{42}</answer>"]
    rows = [row(RIGHT, True, rejected=wrong) for wrong in others]
    ours = one_loss(trainer, trainer.lesson(rows))
    asked, wanted = vstar.solve_prompt(QUESTION), 0.0
    for wrong in others:
        r = [
            0.3 * (sum(log_probs_by_hand(trainer, "verifier", asked, trainer.ids(text)))
                   - sum(log_probs_by_hand(trainer, None, asked, trainer.ids(text))))
            for text in (RIGHT, wrong)
        ]  # fmt: skip
        wanted -= math.log(sigmoid(r[0] - r[1])) / 2
    assert ours == pytest.approx(wanted, rel=1e-4)
    # and its score is the verifier's likelihood
    likely = sum(log_probs_by_hand(trainer, "verifier", asked, trainer.ids(RIGHT)))
    assert trainer.scores(rows)[0] == pytest.approx(likely, rel=1e-4)


@pytest.mark.parametrize("kind", ["orm", "prm"])
def test_the_heads_losses_by_hand(real, kind):
    """The token for good against the one for bad, behind what is judged; z may be soft."""
    trainer = real(kind)
    part = vstar.beginnings(WRONG)[0]
    rows = [row(RIGHT, True, z=1.0), row(WRONG, False, z=0.25, part=part)]
    ours = one_loss(trainer, trainer.lesson(rows))
    asked, wanted = vstar.solve_prompt(QUESTION), 0.0
    for text, z in ((RIGHT, 1.0), (part, 0.25)):
        ids = trainer.processing_class(text + "+", add_special_tokens=False).input_ids
        bad = trainer.processing_class(text + "-", add_special_tokens=False).input_ids
        assert ids[:-1] == bad[:-1]
        logit = (
            log_probs_by_hand(trainer, "verifier", asked, ids)[-1]
            - log_probs_by_hand(trainer, "verifier", asked, bad)[-1]
        )
        wanted -= (z * math.log(sigmoid(logit)) + (1 - z) * math.log(sigmoid(-logit))) / 2
    assert ours == pytest.approx(wanted, rel=1e-4)


def a_mean(trainer, player, texts: list[tuple]) -> float:
    """Minus the mean log-prob of all tokens of (prompt, text) pairs."""
    logps = []
    for asked, text in texts:
        logps += log_probs_by_hand(trainer, player, asked, trainer.ids(text))
    return -sum(logps) / len(logps)


def test_the_losses_of_those_that_write_by_hand(real):
    trainer = real("genrm")
    rows = [row(RIGHT, True), row(WRONG, False), row(RIGHT, True), row(WRONG, False)]
    ours = one_loss(trainer, trainer.lesson(rows))
    verdicts = [
        (vstar.ask_prompt(QUESTION, RIGHT), "Yes"),
        (vstar.ask_prompt(QUESTION, WRONG), "No"),
    ]
    right = [(vstar.solve_prompt(QUESTION), RIGHT)]  # of the other half, the right ones
    wanted = a_mean(trainer, "verifier", verdicts) + 0.25 * a_mean(trainer, "verifier", right)
    assert ours == pytest.approx(wanted, rel=1e-4)
    trainer = real("genrm-cot")
    said = "<step>4:\\boxed{CORRECT}</step>\n<final_verification>"
    rows = [row(r["solution"], r["right"], rationale=said) for r in rows[:2]]
    ours = one_loss(trainer, trainer.lesson([*rows, row(WRONG, False), row(WRONG, False)]))
    verdicts = [
        (vstar.verify_prompt(QUESTION, text), f"{said}\\boxed{{{word}}}</final_verification>")
        for text, word in ((RIGHT, "CORRECT"), (WRONG, "INCORRECT"))
    ]
    assert ours == pytest.approx(a_mean(trainer, "verifier", verdicts), rel=1e-4)


def test_the_generators_loss_and_its_restart(real):
    """A mean over the tokens, of texts of different lengths; then the adapter is the base again,
    and Adam knows nothing of it, while the other one keeps everything."""
    trainer = real()
    trainer.memory |= {"iteration": 0, "D_gen": [row(RIGHT, True), row(WRONG, True)]}
    (batch,) = trainer.step([])
    texts = [(vstar.solve_prompt(QUESTION), text) for text in (RIGHT, WRONG)]
    assert one_loss(trainer, batch) == pytest.approx(a_mean(trainer, "generator", texts), rel=1e-4)
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            trainer.optimizer.state[p] = {"step": torch.tensor(3.0)}
    other = lora(trainer, "verifier")
    trainer.restart("generator")
    own = lora(trainer, "generator")
    assert not any(p.any() for name, p in own.items() if "lora_B" in name)
    assert all(p.any() for name, p in own.items() if "lora_A" in name)
    assert moved(other, lora(trainer, "verifier")) == 0
    kept = set(trainer.optimizer.state)
    assert kept == set(trainer._parameters_of("verifier"))


# ------------------------------------------------------------------ data, with given completions
class Characters:
    """A tokenizer with a token per character, and 4 at the end."""

    eos_token_id, all_special_tokens, added_tokens_decoder = EOS, ["<|end|>"], {}

    def __call__(self, text, add_special_tokens=False):
        return SimpleNamespace(input_ids=[ord(c) + 10 for c in text])

    def batch_decode(self, ids, skip_special_tokens=True):
        return ["".join(chr(i - 10) for i in row if i != EOS) for row in ids]


class Given(vstar.VStar):
    """The trainer without a model: completions are given."""

    def __init__(self, texts=(), **change):
        self.cfg = vstar.Args(**{"pool": 1, "samples": 4, "questions": 4} | change)
        self.texts, self.begun, self.asked, self.logged = list(texts), [], [], {}
        self.processing_class = Characters()
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
        self.pool = [{"question": QUESTION, "answer": "94"}]
        self.memory = {"iteration": -1, "D_gen": [], "D_ver": [], "lessons": [], "taught": -1}
        self.restarted = []

    def generate(self, name, prompts, greedy=False):
        self.asked += prompts
        return [self.texts.pop(0) for _ in prompts]

    def generate_ids(self, name, prompts, greedy=False, begun=None):
        self.begun += self.processing_class.batch_decode(begun)
        return [self.processing_class(self.texts.pop(0)).input_ids for _ in prompts]

    def restart(self, name):
        self.restarted.append(name)

    def gather(self, values):
        return values

    def log_mean(self, name, values):
        self.logged[name] = values


def row(solution, right, **more):
    return {"question": QUESTION, "solution": solution, "right": right, "answer": "94"} | more


def test_right_ones_are_learnt_once_and_all_are_judged():
    trainer = Given([RIGHT, RIGHT, WRONG, "cut off"])
    trainer.start_iteration(0)
    assert [r["solution"] for r in trainer.memory["D_gen"]] == [RIGHT]
    assert [r["right"] for r in trainer.memory["D_ver"]] == [True, True, False]
    assert trainer.restarted == ["generator"]
    trainer.texts = [RIGHT, WRONG, WRONG, WRONG]
    trainer.start_iteration(1)
    assert len(trainer.memory["D_gen"]) == 1  # it is there already
    assert [r["iteration"] for r in trainer.memory["D_ver"]] == [0] * 3 + [1] * 4
    spelled = RIGHT.replace("</step>", "<|end|></step>")  # would be cut in two when it is encoded
    trainer = Given([RIGHT, WRONG, spelled, "42"], restart=False)
    trainer.start_iteration(0)
    assert trainer.restarted == [] and len(trainer.memory["D_ver"]) == 2


def test_in_the_loop_the_better_half_of_the_right_ones_is_learnt():
    others = [f"{i}\n{RIGHT}" for i in range(4)]
    trainer = Given(others, verifier_in_loop=True)
    trainer.scores = lambda rows: [int(r["solution"][0]) for r in rows]
    trainer.start_iteration(1)
    assert [r["solution"] for r in trainer.memory["D_gen"]] == [others[3], others[2]]
    easy = {"question": "1+1 mod 100"}  # however sure it is of this one
    rows = [row(RIGHT, True) | easy, row("a", True), row("b", True), row("c", True)]
    trainer.scores = lambda rows: [9, 1, 3, 2]
    assert [r["solution"] for r in trainer.better_half(rows)] == [RIGHT, "b", "c"]
    trainer = Given(others, verifier_in_loop=True)
    trainer.start_iteration(0)  # nobody has been taught to judge yet
    assert len(trainer.memory["D_gen"]) == 4


def test_nothing_right_or_nothing_wrong_ends_in_a_sentence():
    with pytest.raises(UserError, match="of 4 solutions have steps and a box, and none is right"):
        Given([WRONG] * 4).start_iteration(0)
    for solution, right, says in ((RIGHT, True, "right"), (WRONG, False, "wrong")):
        trainer = Given()
        trainer.cfg.seed, trainer.memory["D_ver"] = 0, [row(solution, right)]
        with pytest.raises(UserError, match=f"all solutions are {says}"):
            trainer.start_verifier(0)


def test_pairs_are_of_one_question():
    trainer, other = Given(), {"question": "1+1 mod 100"}
    trainer.memory["D_ver"] = [row(RIGHT, True), row(WRONG, False), row(RIGHT, True) | other]
    pairs = trainer.preferences(random.Random(0))
    assert [(p["question"], p["solution"], p["rejected"]) for p in pairs] == [
        (QUESTION, RIGHT, WRONG)
    ]


@pytest.mark.parametrize("how", ["hard", "soft"])
def test_step_labels_are_what_comes_of_a_beginning(how):
    rest = RIGHT.removeprefix("<step>38+4=42</step>")
    lost = "\n<step>41*7=87</step>\n<answer>\\boxed{87}</answer>"
    trainer = Given([rest, lost, lost, "", lost, lost], step_samples=3, step_labels=how)
    rows = [row(RIGHT, True, z=1.0), row(WRONG, False, z=0.0)]
    starts = [r | {"part": part} for r in rows for part in vstar.beginnings(r["solution"])]
    labelled = trainer.with_step_labels(starts)
    assert [r["z"] for r in labelled] == [
        1.0 if how == "hard" else pytest.approx(1 / 3),
        1.0,
        0.0,
        0.0,
    ]
    assert trainer.begun == ["<step>38+4=42</step>"] * 3 + ["<step>38+4=41</step>"] * 3


def test_a_box_in_a_step_is_no_answer_of_what_follows():
    solution = RIGHT.replace("38+4=42", r"38+4=\boxed{94}")
    trainer = Given(["cut off", "again"], step_samples=2)
    part = vstar.beginnings(solution)[0]
    (found,) = trainer.with_step_labels([row(solution, True, z=1.0) | {"part": part}])
    assert r"\boxed{94}" in part and found["z"] == 0.0


def test_rationales_are_kept_if_they_are_right():
    good, bad = (f"thoughts{vstar.OPENING}{verdict}" for verdict in vstar.VERDICTS)
    trainer = Given([good, bad, "nothing", bad, f"<|end|>{good}"])
    rows = [row(RIGHT, True), row(RIGHT, True), row(WRONG, False), row(WRONG, False)]
    rows += [row(RIGHT, True)]  # a special token, spelled out, would be taught as one
    kept = trainer.rationales(rows)
    assert [(r["right"], r["rationale"]) for r in kept] == [
        (True, "thoughts" + vstar.OPENING),
        (False, "thoughts" + vstar.OPENING),
    ]


# ------------------------------------------------------------------ scores, by hand
def test_p_yes_is_normalised_over_all_forms():
    trainer = Given()
    logps = {form: -1.0 - i for i, form in enumerate(vstar.YES + vstar.NO)}
    decode = trainer.processing_class.batch_decode
    trainer.likelihoods = lambda prompts, ids: [logps[text] for text in decode(ids)]
    (found,) = trainer.p_yes([[]], [""], (vstar.YES, vstar.NO))
    yes, no = (sum(math.exp(logps[form]) for form in forms) for forms in (vstar.YES, vstar.NO))
    assert found == pytest.approx(yes / (yes + no), rel=1e-5)


@pytest.mark.parametrize("kind", ["orm", "prm"])
def test_orm_and_prm_compare_two_tokens_behind_the_same_text(kind):
    trainer, seen = Given(verifier=kind), []

    def likelihoods(prompts, ids):
        seen.extend(trainer.processing_class.batch_decode(ids))
        return [2.0, 1.0, -1.0, 1.0][: len(ids)]  # logits 1 and -2

    trainer.likelihoods = likelihoods
    (score,) = trainer.scores([row(RIGHT, True)])
    parts = vstar.beginnings(RIGHT) if kind == "prm" else [RIGHT]
    assert seen == [part + sign for part in parts for sign in "+-"]
    logit = -2.0 if kind == "prm" else 1.0  # the worst step
    assert score == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-5)


def test_dpo_scores_by_the_likelihood_itself():
    trainer = Given(verifier="dpo")
    trainer.likelihoods = lambda prompts, ids: [-float(len(row)) for row in ids]
    assert trainer.scores([row("abc", True)]) == [-4.0]  # with its end token
    assert trainer.scores([]) == []


def test_a_verdict_is_scored_as_it_was_taught():
    """Encoded whole, with the closing tag: a tokenizer may join signs over the verdict's border."""
    thoughts, seen = f"thoughts{vstar.OPENING}", []
    trainer = Given([thoughts + vstar.VERDICTS[0]], verifier="genrm-cot", rationales=1)

    def likelihoods(prompts, ids):
        seen.extend(trainer.processing_class.batch_decode(ids))
        return [math.log(0.6), math.log(0.2)]

    trainer.likelihoods = likelihoods
    assert trainer.scores([row(RIGHT, True)]) == [pytest.approx(0.75)]
    taught = [
        trainer.judged_text(row(RIGHT, z) | {"rationale": thoughts})[1] for z in (True, False)
    ]
    assert seen == taught


def test_the_mean_over_rationales_counts_silence_as_one_half():
    good = f"thoughts{vstar.OPENING}{vstar.VERDICTS[0]}"
    trainer = Given([good, "nothing", good, "nothing"], verifier="genrm-cot", rationales=4)
    trainer.p_yes = lambda prompts, begun, says: [0.9, 0.7]
    assert trainer.scores([row(RIGHT, True)]) == [pytest.approx((0.9 + 0.5 + 0.7 + 0.5) / 4)]


# ------------------------------------------------------------------ runs
VERIFIERS = ["orm", "prm", "genrm", "genrm-cot"]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_runs(finished, tmp_path, verifier):
    """And all of them judge the same solutions: what the generator does must not depend on it."""
    folder = tmp_path / "run"
    out = run_here("vstar.py", *small("vstar.py", folder, "--verifier", verifier))
    assert "verifier/rank_agreement" in out
    memory = json.loads((folder / "checkpoint-8" / "memory.json").read_text())
    assert memory["lessons"] and {r["right"] for r in memory["lessons"]} == {True, False}
    last = [
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        for run in (finished("vstar.py")[0], folder)
    ]
    for key in ("generator/accuracy", "generator/greedy", "co/oracle"):
        assert last[0][f"eval/{key}"] == last[1][f"eval/{key}"]


@pytest.mark.parametrize("more", ["--verifier-in-loop --steps 9 --ver-steps 3", "--no-restart"])
def test_ablations_run(tmp_path, brief, more):
    out = brief("vstar.py", *small("vstar.py", tmp_path / "run", *more.split()))
    assert "co/oracle" in out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--questions 3 --micro-batch 1", "--questions 3 must be even"),
        ("--steps 10 --ver-steps 2", "which is not a multiple of --iterations 3"),
        ("--steps 10 --ver-steps 12", "leaves the generator -2"),
        ("--ver-steps 48 --steps 96 --iterations 5", "is not a multiple of --iterations 5"),
        ("--verifier-in-loop --ver-steps 0", "above 0, as --verifier-in-loop needs it"),
        ("--verifier-in-loop --ver-steps 49 --steps 97", "as --verifier-in-loop needs it"),
        ("--samples 0", "--samples 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, arguments, sentence):
    assert sentence in refused("vstar.py", *arguments.split(), "--out", tmp_path / "run")
