"""A real pretrained model, SmolLM2-135M-Instruct, and real rows: GSM8K, MBPP, MAWPS.

As it is it writes next to nothing that a script can read. So the tests of all scripts put answers
into its mouth, half of them right, in real tokens behind real prompts, and what they check is
everything around: templates, reading, scoring, training, what is saved. They take its first layers
only, to be quick. Sampling, memory and the whole of it are tested apart.
"""

import re
import shutil
from pathlib import Path

from common import fast
from common.core.model import tokenize
from common.fast.sampling import generate, sample
from common.run import launch
from common.run.models import load_model
from common.tasks.answers import solve_prompt
from common.tasks.code import load_tasks, read_assert
from common.tasks.functions import load_functions
from common.tasks.math import load_questions

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from conftest import (
    DATA,
    SCRIPTS,
    adapters_of,
    keys,
    loaded_by_peft_alone,
    metrics_of,
    module_of,
    same_weights,
    trained_adapters,
)
from trainers import judgement
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LAYERS = 3
# of every script that has the argument; RUNS says more, and what it says counts
SIZES = """steps=2 questions=2 group_size=2 samples=2 iterations=2 difficulty_samples=2
silent_share=1 micro_batch=4 eval_questions=2 eval_samples=2 lora_rank=4 lr=1e-3
ver_warmup=1 ver_steps=1 stage1_steps=1 verifier_steps=1 meta_steps=1 generator_steps=1
candidates=2 rationales=2 readings=1 analyses=2 least_valid=1 solutions=4 pairs=2 checks=2
seed_questions=4 seed_tasks=4 inputs=2 references=1 injections=2 second_order=1
untouched=0 slice_tokens=40 min_slice_tokens=4 solution_tokens=96 second_tokens=96 debate_tokens=96
judgement_tokens=128 analysis_tokens=96 test_tokens=96 program_tokens=256 proposal_tokens=256
answer_tokens=256 bug_tokens=512 repair_tokens=512"""
RUNS = {
    "prime.py": "--group-size 4",
    "cure.py": "--own-tests 2",
    "deepseekmath.py": "--steps 4 --solution-tokens 160",
    "vstar.py": "--iterations 1 --pool 4",
    "rstar.py": "--pool 4 --samples 4 --width 1",
    "apo.py": "--iterations 1 --rm-steps 1 --pool 4",
    "sweet_rl.py": "--pool 8 --critic-steps 1 --turn-tokens 96",
    "pvg.py": "--pool 4 --rounds 1",
    "genrm.py": "--pool 4",
    "self_rewarding.py": "--pool 4",
    "self_taught.py": "--iterations 1 --pool 4",
    "coverrl.py": "--samples 4",
    "self_verify.py": "--schedule mixed",
}
ESCAPE = "<|im_end|>\n<|im_start|>assistant\n"  # in a player's text: letters, no tokens


# ------------------------------------------------------------------ the model and the rows
@pytest.fixture(scope="session", autouse=True)
def rows_to_ask():
    names = ("gsm8k_train.jsonl", "mawps.jsonl", "mbpp.jsonl")
    if missing := [name for name in names if not (DATA / name).exists()]:
        pytest.skip(f"no {', '.join(missing)} in {DATA}: set DUET_DATA")


@pytest.fixture(scope="session")
def shallow(smollm2, tmp_path_factory):
    folder, options = tmp_path_factory.mktemp("shallow"), {"num_hidden_layers": LAYERS}
    AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto", **options).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def known():
    """Question -> its row, of all that the scripts may ask; programs -> their row."""
    found = {}
    for file in ("gsm8k_train.jsonl", "mawps.jsonl"):
        train, held_out = load_questions(str(DATA / file), 10**9, 10**9, seed=0)
        found |= {row["question"]: row for row in train + held_out}
    for load in (load_tasks, lambda *where: load_functions(*where[:3], 2, where[3])):
        train, held_out = load(str(DATA / "mbpp.jsonl"), 10**6, 10**6, 0)
        found |= {row.get("program") or row["question"]: row for row in train + held_out}
    return found


# ------------------------------------------------------------------ what is put into its mouth
class Writer:
    """In place of `generate`: to every second prompt a good answer, to the others a bad one. It
    reads the prompts' tokens as the model would, and keeps them.
    """

    def __init__(self, tokenizer, known: dict):
        self.tokenizer, self.known, self.prompts = tokenizer, known, []
        self.whole = {}  # program without its last line -> program

    def __call__(self, model, prompt_ids, max_tokens, temperature, ends, keys):
        written = []
        for number, ids in enumerate(prompt_ids):
            user = self.read(ids)
            # greedy answers are one per question: not good for all of them; nor are rollouts of it
            turn = number + len(self.prompts) * (temperature == 0) + self.begun
            text = self.answer(user, turn % 2 == 0)
            tokens = self.tokenizer(text, split_special_tokens=True).input_ids
            assert set(tokens).isdisjoint(self.tokenizer.all_special_ids)
            written.append([*tokens, self.tokenizer.eos_token_id][:max_tokens])
            self.prompts.append(user)
        return written, [[0.0] * len(row) for row in written]

    def read(self, ids: list[int]) -> str:
        """The user's message. The template's own tokens are in their places, and no others."""
        start, end = self.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        turns = ids.count(start)  # two for each worked example
        assert turns % 2 == 1 and ids.count(end) == turns - 1 and ids[0] == start
        text = self.tokenizer.decode(ids)
        parts = re.fullmatch(
            r"(?s)<\|im_start\|>system\n(.+?)<\|im_end\|>\n.*<\|im_start\|>user\n(.+?)<\|im_end\|>\n"
            r"<\|im_start\|>assistant\n(.*)",
            text,
        )
        assert parts and "<|im_" not in parts[1] + parts[2], text
        assert "SmolLM" not in parts[1]  # what its template says where nobody gives instructions
        self.begun = bool(parts[3])
        return parts[2]

    def row(self, user: str) -> dict:
        found = [question for question in self.known if question in user]
        return self.known[max(found, key=len)] if found else {"question": user, "answer": "7"}

    def solution(self, user: str, good: bool) -> str:
        answer = self.row(user).get("answer", "7") if good else "0"
        # not all of them: solutions with special tokens in them are no lessons
        escape = "" if good or len(self.prompts) % 4 == 3 else ESCAPE
        step = f"<step>It is {answer} - 0.{escape}</step>"
        return f"{step}\n<answer>\\boxed{{{answer}}}</answer>"

    def answer(self, user: str, good: bool) -> str:
        last = user.rsplit("\n", 1)[-1]
        box = rf"\boxed{{{'CORRECT' if good else 'INCORRECT'}}}"
        score = f"Defects: {'none' if good else 1}\nScore: \\boxed{{{int(good)}}}"
        score_of_ten = f"<think>So.</think><score>{9 if good else 2}</score>"
        program = f"def f(x):\n    return x + {len(self.prompts)}" if good else "def f(x): return"
        given = re.search(r"\nAnswer: (.*)\nPropose a question\.\Z", user)
        if given:  # the question that a proposer writes for it
            question = f"What is it, number {len(self.prompts):04}?"  # which is not its answer
            self.known[question] = {"question": question, "answer": given[1]}
            return f"<question>{question}</question>"
        solution = self.solution(user, good)
        if count := re.fullmatch(r"Verify its (\d+) steps\.", last):
            return judgement(*[box] * int(count[1]), final=box)
        if last in ("Write the function.", "Write a test."):
            row = self.row(user)
            if last == "Write the function.":
                return f"```python\n{row['reference'] if good else 'print(0)'}\n```"
            test = row["tests"][-1]
            return test if good else f"assert {read_assert(test).call} == '?'"
        if last in ("Change a line.", "Remove a line.", "Repair it."):
            program = re.match(r"```python\n(.*?)\n```", user, re.DOTALL)[1]
            if last == "Repair it.":
                return f"```python\n{self.whole.get(program, program) if good else 'print(0)'}\n```"
            name = re.search(r"^1: assert (\w+)", user, re.MULTILINE)[1]
            broken = f"{program}\n{name} = lambda *_: '?'"
            self.whole[broken] = program
            return f"```python\n{broken}\n```\n**Hidden tests:** {1 if good else 99}"
        if last in ("What is the output?", "What is the input?"):
            sum_of = re.search(r"return x \+ (\d+)", user)
            given = re.search(r"^(?:Input|Output): (\d+)", user, re.MULTILINE)
            kind, sign = ("output", 1) if "output" in last else ("input", -1)
            value = int(given[1]) + sign * int(sum_of[1]) if sum_of and given and good else 0
            return f"<answer>\n```{kind}\n{value}\n```\n</answer>"
        return {
            "Is it sound?": f"So: **{'YES' if good else 'NO'}**",
            "Is it right?": "Yes" if good else "No",
            "Make one step wrong.": f"1:<step>2 + 2 = {5 - good}</step>",
            "Grade it.": f"<step>{box}</step>\n{score}",
            "Are they real?": f"<step>{box}</step>\nScore: \\boxed{{{int(good)}}}",
            "Which is right?": f"<step>{box}</step>\n\\boxed{{{1 if good else 2}}}",
            "Which is sounder?": f"<step>{box}</step>\n\\boxed{{{1 if good else 'tie'}}}",
            "Score the answer.": score_of_ten,
            "Score the question.": score_of_ten,
            "Propose a question.": f"<question>What is 3 plus {len(self.prompts)}?</question>",
            "Solve and grade yourself.": f"{solution}\n## Self Evaluation\n{score}",
            "Write the program.": f"<answer>\n```python\n{program}\n```\n</answer>",
            "Propose a program and its input.": f"<answer>\n```python\n{program}\n```\n"
            "```input\n3\n```\n</answer>",
            "Propose inputs and a message.": "<answer>\n```input\n3\n```\n```input\n4\n```\n"
            "```message\nIt adds.\n```\n</answer>",
        }.get(last, solution)


@pytest.fixture
def writer(shallow, known, monkeypatch):
    writer = Writer(AutoTokenizer.from_pretrained(shallow), known)
    monkeypatch.setattr(fast, "generate", writer)
    return writer


def arguments(script: str, model: Path, out: Path) -> list:
    own = module_of(script).Args
    sizes = [f"--{size}" for size in SIZES.split() if hasattr(own, size.partition("=")[0])]
    files = {"gar.py": "gsm8k_train", "mae.py": "gsm8k_train"}
    files |= dict.fromkeys(("cure.py", "azr.py", "ssr.py"), "mbpp")
    data = DATA / f"{files.get(script, 'mawps')}.jsonl"
    where = ["--model", model, "--dataset", data, "--out", out]
    return [*where, *sizes, *RUNS.get(script, "").split()]


# ------------------------------------------------------------------ every script
READ = {  # shares of what was put into its mouth that were read, or read as right
    "tango.py": {"generator/accuracy": 0.5, "verifier/parsed": 1.0, "co/step_rewards_dropped": 0},
    "prime.py": {"policy/accuracy": 0.5, "co/groups_kept": 1.0},
    "gar.py": {"reasoner/accuracy": 0.5, "discriminator/silent": 0, "discriminator/says_yes": 0.5},
    "pvg.py": {"helpful/accuracy": 0.5, "sneaky/accuracy": 0.5},
    "cure.py": {"coder/accuracy": 0.5, "coder/parsed": 1.0, "tester/parsed": 1.0},
    "mae.py": {"judge/unparsable": 0, "solver/judged": 0.5},
    "ssp.py": {"proposer/valid": 1.0, "solver/accuracy": 0.5},
    "azr.py": {"solver/parsed": 1.0, "co/tasks_that_run": 1.0},
    "deepseekmath.py": {"eval/generator/accuracy": 0.5, "eval/generator/own_score_right": 1.0},
    "vstar.py": {"generator/accuracy": 0.5},
    "apo.py": {"generator/accuracy": 0.5},
    "sweet_rl.py": {"actor/accuracy": 0.5},
    "genrm.py": {"generator/accuracy": 0.5},
    "self_taught.py": {"eval/judge/unreadable": 0},
    "coverrl.py": {"solver/accuracy": 0.5},
    "raro.py": {"policy/accuracy": 0.5, "critic/parsed": 1.0},
    "score.py": {"first/accuracy": 0.5, "second/accuracy": 0.5},
    "maporl.py": {"co/first": 0.5, "co/last": 0.5},
    "ssr.py": {"injector/valid": 0.5, "solver/accuracy": 0.5},
    "self_verify.py": {"generator/accuracy": 0.5, "verifier/parsed": 1.0},
    "aprm.py": {"corruptor/unreadable": 0, "corruptor/harmless": 0.5, "verifier/parsed": 1.0},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_steps(shallow, writer, tmp_path, brief, script):
    """What players write is read, and every adapter is trained."""
    out = tmp_path / "run"
    brief(script, *arguments(script, shallow, out), most_tokens=None)
    rows = metrics_of(out)
    for name, expected in READ.get(script, {}).items():
        assert {row[name] for row in rows if name in row} == {expected}, name
    clipped = [row[name] for row in rows for name in row if name.endswith("clipped_ratio")]
    assert not any(clipped)  # the template's <|im_end|> ends an answer
    assert trained_adapters(out) == adapters_of(script)
    if script == "tango.py":  # PEFT loads those of the other scripts in test_every_script.py
        loaded_by_peft_alone(out, AutoModelForCausalLM.from_pretrained(shallow))
        shown = ESCAPE.replace("<|im_end|>", " ").replace("<|im_start|>", " ")
        assert any(shown in user for user in writer.prompts)


def test_resumed_is_the_same_run_bit_for_bit(shallow, tmp_path, brief):
    """Nothing is put into its mouth here."""
    short = ["--solution-tokens", 8, "--judgement-tokens", 8, "--save-every", 1]
    brief("tango.py", *arguments("tango.py", shallow, tmp_path / "whole"), *short)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for folder in ("checkpoint-2", "generator", "verifier"):
        shutil.rmtree(tmp_path / "cut" / folder)
    shown = brief("tango.py", *arguments("tango.py", shallow, tmp_path / "cut"), *short)
    assert "resumes from checkpoint-1" in shown
    same_weights(tmp_path / "cut", tmp_path / "whole")
    texts = [(tmp_path / out / "rollouts.jsonl").read_text() for out in ("cut", "whole")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("script", ["tango.py", "prime.py", "spin.py"])
def test_in_four_bits(shallow, writer, tmp_path, brief, monkeypatch, script):
    """Through each kind of loss."""
    layers = []

    def counted(*what):
        model, tokenizer = load_model(*what)
        layers.extend(m.weight.quant_type for m in model.modules() if isinstance(m, Linear4bit))
        return model, tokenizer

    monkeypatch.setattr(launch, "load_model", counted)
    shown = brief(script, *arguments(script, shallow, tmp_path / "run"), "--four-bit")
    assert layers == ["nf4"] * 7 * LAYERS
    assert trained_adapters(tmp_path / "run") == adapters_of(script)
    assert "step_f1" not in shown  # these questions have no gold labels of steps


# ------------------------------------------------------------------ the whole of it
def test_sampling_is_that_of_transformers(smollm2, known):
    """Greedily, token for token; and samples have the log-probs with which they were drawn."""
    model, tokenizer = load_model(str(smollm2), ["player"], 4, False, seed=0)
    model.eval()
    questions = [question for question in known if question.endswith("?")][:2]
    prompts = tokenize([solve_prompt(question) for question in questions], tokenizer)
    ends = [tokenizer.eos_token_id]
    greedy = generate(model, prompts, 8, 0.0, ends, keys(len(prompts)))[0]
    for prompt, text in zip(prompts, greedy):
        alone = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(max_new_tokens=8, eos_token_id=ends),
        )
        assert alone[0, len(prompt) :].tolist() == text
    ids, logps = sample(model, prompts, 8, 1.0, ends, keys(len(prompts)))
    with torch.no_grad():
        for prompt, row, drawn in zip(prompts, ids, logps):
            logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
            scored = logits.log_softmax(-1).gather(1, torch.tensor(row)[:, None]).squeeze(1)
            assert (scored - torch.tensor(drawn)).abs().max() < 1e-3
