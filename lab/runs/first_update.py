"""What a model as it is can earn in the first update of every script; nothing is trained:

    python -m lab.runs.first_update runs/smollm2                  all scripts, a process each
    python -m lab.runs.first_update runs/smollm2 tango cure --temperature 0.7

The model is a folder with an instruct model. mawps.jsonl and mbpp.jsonl are in the folder --data.
A script's own `main` runs with its own arguments, of which PLAN makes about 32 texts of a role.
Of every role lab/evidence/first_update.json has

    read        texts that the script's own parser reads, see READ
    right       solutions of the data's questions whose answer is right
    above       rewards above the role's worst reward, see WORST
    mixed       groups with two outcomes: different rewards, or right and wrong solutions where the
                first update has no rewards. A group has one prompt, or is what the script says

and four texts. What is there is not run again. Seconds are those of one CPU thread.
"""

import importlib
import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import aprm
import azr
import coverrl
import cure
import deepseekmath
import gar
import genrm
import mae
import raro
import self_rewarding
import self_taught
import self_verify
import ssp
import ssr
import tango
from common.core.cotrainer import CoTrainer
from common.core.errors import UserError
from common.run import launch
from common.run.session import Run
from common.tasks.answers import final_answer, is_correct, split_steps, without_thoughts
from common.tasks.code import parse_program
from common.tasks.verdicts import read_analysis, read_score
from lab import EVIDENCE, ROOT
from lab.runs import controls, evidence

import torch
import tyro

OUT = EVIDENCE / "first_update.json"
SHOWN = 4  # texts of a role that are kept

# ------------------------------------------------------------------ what is run
OF_ALL = "--eval-questions 8 --micro-batch 32 --show-every 0"
S, J, FOUR = "--solution-tokens 160 ", "--judgement-tokens 256 ", "--questions 4 --group-size 8 "
PLAN = {  # script -> (arguments, the numbers of the steps that are run)
    "tango": (FOUR + S + J + "--kl 0 --steps 2 --ver-warmup 1", (0, 1)),
    "cure": (FOUR + "--kl 0 --steps 1 --program-tokens 160 --test-tokens 256", (0,)),
    "gar": (FOUR + S + "--kl 0 --steps 1 --silent-share 1", (0,)),
    "prime": (
        FOUR + S + "--steps 1 --no-process-reward --keep-low 0 --keep-high 1 --max-refills 1",
        (0,),
    ),
    "deepseekmath": (
        FOUR + "--solution-tokens 320 --analysis-tokens 256 --kl 0 --solutions 32 --steps 4 "
        "--verifier-steps 1 --meta-steps 1 --generator-steps 1",
        (0, 1, 3),
    ),
    "mae": (
        S + J + "--questions 32 --seed-questions 64 --difficulty-samples 1 --steps 1 "
        "--silent-share 1",
        (0,),
    ),
    "azr": (
        "--questions 11 --references 2 --inputs 4 --seed-tasks 32 --difficulty-samples 1 "
        "--proposal-tokens 256 --answer-tokens 256 --steps 1",
        (0,),
    ),
    "ssr": (
        "--questions 4 --injections 8 --group-size 4 --second-order 0 --bug-tokens 256 "
        "--repair-tokens 256 --steps 1",
        (0,),
    ),
    "genrm": (S + J + "--questions 4 --pool 4 --samples 8 --steps 1", (0,)),
    "coverrl": (FOUR + S + J + "--kl 0 --samples 8 --steps 1", (0,)),
    "self_taught": (S + J + "--questions 4 --pool 16 --samples 1 --iterations 1 --steps 1", (0,)),
    "raro": (FOUR + S + J + "--kl 0 --steps 1", (0,)),
    "score": (FOUR + S + "--second-tokens 256 --kl 0 --first-kl 0 --steps 1", (0,)),
    "maporl": (
        S + "--questions 4 --group-size 4 --turns 2 --debate-tokens 256 --kl 0 --steps 1",
        (0,),
    ),
    "aprm": (FOUR + J + "--edit-tokens 96 --kl 0 --steps 1", (0,)),
    "self_verify": (FOUR + S + J + "--schedule mixed --steps 1", (0,)),
    "ssp": (S + "--questions 32 --group-size 2 --proposal-tokens 128 --kl 0 --steps 1", (0,)),
    "self_rewarding": (
        S + J + "--questions 4 --pool 8 --samples 4 --readings 1 --iterations 1 --steps 1",
        (0,),
    ),
    "vstar": (
        S + "--questions 4 --pool 4 --samples 8 --iterations 1 --steps 2 --ver-steps 1",
        (0,),
    ),
    "pvg": (S + FOUR + "--pool 4 --samples 8 --rounds 1 --steps 2 --ver-steps 1", (0,)),
    "rstar": (S + "--questions 4 --pool 8 --samples 4 --width 4 --steps 2 --ver-steps 1", (0,)),
    "spin": (S + "--questions 32 --no-mix-previous --iterations 1 --steps 1", (0,)),
    "apo": (
        S + "--questions 4 --pool 4 --samples 4 --labelled 4 --iterations 1 --steps 2 --rm-steps 1",
        (0,),
    ),
    "sweet_rl": (S + "--questions 4 --pool 4 --samples 8 --steps 2 --critic-steps 1", (0,)),
}
PROGRAMS = ("cure", "azr", "ssr")  # on MBPP; all others on MAWPS


# ------------------------------------------------------------------ what is read
def solution_in(user: str) -> tuple[str, str]:
    """Returns question and solution of `Problem: ...\\nSolution:\\n...\\nwhat is asked`."""
    question, _, rest = user.removeprefix("Problem: ").partition("\nSolution:\n")
    return question, rest.rpartition("\n")[0]


def steps_in(user: str) -> int:
    return len(split_steps(solution_in(user)[1]))


def box(text: str, user: str) -> bool:
    return final_answer(without_thoughts(text)) is not None


def steps_and_box(text: str, user: str) -> bool:
    return raro.is_whole(text)


def judged(text: str, user: str) -> bool:
    """A final verdict, and a verdict on each step."""
    verdicts, final = tango.parse_judgement(text)
    return final is not None and len(verdicts) == steps_in(user)


def edited(text: str, user: str) -> bool:
    question, solution = solution_in(user)
    return aprm.parse_edit(text, {"question": question, "reference": solution}) is not None


def proposed(text: str, user: str) -> bool:
    kind = "induction" if user.endswith("Propose inputs and a message.") else "deduction"
    return azr.parse_proposal(kind, text, {"program": ""}, 4) is not None  # --inputs of PLAN


def answered(text: str, user: str) -> bool:
    kinds = {"What is the output?": "deduction", "What is the input?": "abduction"}
    kind = kinds.get(user.rpartition("\n")[2], "induction")
    return azr.parse_answer(kind, text) is not None


def tested(text: str, user: str) -> bool:
    return cure.parse_test(text, user.removeprefix("Task: ").rpartition("\n")[0]) is not None


def broken(text: str, user: str) -> bool:
    tests = user.partition("\nTests:\n")[2].splitlines()[:-1]
    return ssr.parse_bug(text, {"tests": tests}) is not None


def program(text: str, user: str) -> bool:
    return parse_program(text) is not None


READ = {  # script -> role -> whether its text can be read: (text, what the user says) -> bool
    "tango": {"generator": lambda text, _: tango.has_countable_steps(text), "verifier": judged},
    "cure": {"coder": program, "tester": tested},
    "gar": {"reasoner": box, "discriminator": lambda text, _: gar.parse_verdict(text) is not None},
    "prime": {"policy": box},
    "deepseekmath": {
        "generator": lambda text, _: deepseekmath.parse_solution(text)[1] is not None,
        "verifier": lambda text, user: (
            read_analysis(text, solution_in(user)[1], deepseekmath.SCORES) is not None
        ),
        "meta": lambda text, _: read_score(text, deepseekmath.SCORES) is not None,
    },
    "mae": {
        "proposer": lambda text, _: bool(mae.proposed_question(text)),
        "solver": lambda text, _: mae.tag_format(text, "answer") > 0,
        "judge": lambda text, _: mae.judge_score(text) is not None,
    },
    "azr": {"proposer": proposed, "solver": answered},
    "ssr": {"injector": broken, "solver": program},
    "genrm": {
        "generator": steps_and_box,
        "verifier": lambda text, _: genrm.rationale(text) is not None,
    },
    "coverrl": {
        "solver": box,
        "verifier": lambda text, _: coverrl.parse_judgement(text)[0] is not None,
        "corrector": box,
    },
    "self_taught": {
        "solver": box,
        "judge": lambda text, _: self_taught.parse_choice(text) is not None,
    },
    "raro": {
        "policy": steps_and_box,
        "critic": lambda text, _: raro.parse_choice(text) is not None,
    },
    "score": {"first": box, "second": box},
    "maporl": {"alice": box, "bob": box, "alice_again": box, "bob_again": box},
    "aprm": {
        "corruptor": edited,
        "verifier": lambda text, user: aprm.parse_marks(text, steps_in(user)) is not None,
    },
    "self_verify": {
        "generator": box,
        "verifier": lambda text, _: self_verify.parse_verdict("solution", text) is not None,
    },
    "ssp": {"proposer": lambda text, _: bool(ssp.proposed_question(text)), "solver": box},
    "self_rewarding": {
        "solver": box,
        "judge": lambda text, _: self_rewarding.parse_score(text) is not None,
    },
    "vstar": {"generator": steps_and_box},
    "pvg": {"helpful": steps_and_box},
    "rstar": {"generator": steps_and_box},
    "spin": {"writer": box},
    "apo": {"generator": box},
    "sweet_rl": {"actor": steps_and_box},
}
WORST = {  # the worst reward of a role; 0 of all others. maporl.py's bonuses can be below 0
    ("cure", "tester"): -1.0,
    ("azr", "proposer"): -1.0,
    ("azr", "solver"): -1.0,
    ("ssr", "injector"): -1.0,
    ("ssr", "solver"): -1.0,
    ("aprm", "corruptor"): -1.0,
}
# in mae.py and azr.py all rows of a role are compared, in ssp.py a proposal with nothing
WITHOUT_GROUPS = {("ssp", "proposer"), *((s, role) for s in ("mae", "azr") for role in READ[s])}


# ------------------------------------------------------------------ watching
@dataclass
class Call:
    """What a player has written in one call of `sample`."""

    player: str
    asked: list[str]  # the last message of each prompt
    prompts: list[str]  # each prompt as a whole
    texts: list[str]
    lengths: list[int]  # in tokens
    cut: list[bool]  # at the length limit
    seconds: float
    batch: object = None  # if it is a rollout; its rewards are set later
    groups: list = field(default_factory=list)  # the script's, if it names them


def watched(calls: list[Call]) -> ExitStack:
    """Inside of this block every call of `sample` is noted, except for greedy ones."""
    sample, rollout, set_rewards = CoTrainer.sample, CoTrainer.rollout, CoTrainer.set_rewards

    def watched_sample(self, name, prompts, greedy=False, prefix=None):
        start = time.perf_counter()
        found = sample(self, name, prompts, greedy, prefix)
        if prompts and not greedy:
            asked, whole = [p[-1]["content"] for p in prompts], [json.dumps(p) for p in prompts]
            cut = [row[-1] not in self.eos_token_ids for row in found[1]]
            lengths, seconds = [*map(len, found[1])], time.perf_counter() - start
            calls.append(Call(name, asked, whole, self.decode(found[1]), lengths, cut, seconds))
        return found

    def watched_rollout(self, name, rows):
        batch = rollout(self, name, rows)
        if rows:
            calls[-1].batch = batch
        return batch

    def watched_rewards(self, batch, rewards, groups=None):
        set_rewards(self, batch, rewards, groups)
        for call in calls:
            if groups is not None and call.batch is batch:
                call.groups = list(groups)

    its_advantages = coverrl.CoVerRL.set_advantages

    def watched_keys(self, batch, rewards, keys, asked):  # it compares rows itself
        its_advantages(self, batch, rewards, keys, asked)
        for call in calls:
            if call.batch is batch:
                call.groups = list(keys)

    stack = ExitStack()
    stack.enter_context(patch.object(coverrl.CoVerRL, "set_advantages", watched_keys))
    stack.enter_context(patch.object(CoTrainer, "sample", watched_sample))
    stack.enter_context(patch.object(CoTrainer, "rollout", watched_rollout))
    stack.enter_context(patch.object(CoTrainer, "set_rewards", watched_rewards))
    # an adapter that nobody has trained changes nothing, and without it a token takes less time
    playing = CoTrainer.playing
    stack.enter_context(patch.object(CoTrainer, "playing", lambda self, _: playing(self, None)))
    return stack


def run_script(name: str, model: str, dataset: str, temperature: float | None) -> dict:
    """Runs a script's `main` up to its first update, and returns what the JSON file has of it."""
    script, (arguments, numbers) = importlib.import_module(name), PLAN[name]
    players_of, calls, trainers, ended = launch.players_of, [], [], ""

    def at_temperature(Trainer, args):
        players, more = players_of(Trainer, args), {"temperature": temperature}
        return {n: p if temperature is None else replace(p, **more) for n, p in players.items()}

    def first_steps(run, trainer, evaluate, curves):
        trainers.append(trainer)
        trainer.create_optimizer()  # some scripts clear it
        trainer.model.train()
        for number, rows in zip(numbers, trainer.get_train_dataloader()):
            trainer.state.global_step = number
            trainer.run_step(rows)  # and no update

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out, watched(calls) as stack:
        stack.enter_context(patch.object(launch, "players_of", at_temperature))
        stack.enter_context(patch.object(Run, "train", first_steps))
        stack.enter_context(patch.object(launch, "load_model", launch.load_model))
        stack.enter_context(patch.object(launch, "grpo_config", launch.grpo_config))
        controls.in_bfloat16(script)
        words = ["--model", model, "--dataset", dataset, "--out", f"{out}/run"]
        words += [*OF_ALL.split(), *arguments.split()]
        try:
            script.main(tyro.cli(script.Args, args=words))
        except UserError as error:  # for instance, that nothing can be learnt from these texts
            if not trainers:
                raise
            ended = str(error)
    [trainer] = trainers
    gold = {row.get("question"): row.get("answer") for row in trainer.train_rows}
    roles = {role: figures(name, role, calls, gold) for role in READ[name]}
    for role, of_role in roles.items():
        of_role["temperature"] = trainer.players[role].temperature
    known = {"commit": evidence.commit(), "torch": torch.__version__}
    seconds = round(time.perf_counter() - start)
    about = {"arguments": arguments, "ended": ended, "base": "bfloat16, its head float32"}
    return about | known | {"seconds": seconds, "roles": roles}


# ------------------------------------------------------------------ counting
def figures(script: str, role: str, calls: list[Call], gold: dict[str, str]) -> dict:
    """The figures of a role, see the top of this file. gold: question -> answer."""
    calls = [call for call in calls if call.player == role]
    rows = [row for number, call in enumerate(calls) for row in rows_of(number, call, gold)]
    for row in rows:
        row["read"] = bool(READ[script][role](row["text"], row["asked"]))
    right = [row["right"] for row in rows if row["right"] is not None]
    rollouts, worst = [row for row in rows if row["rollout"]], WORST.get((script, role), 0.0)
    groups = defaultdict(list)  # group -> its outcomes
    for row in rollouts or rows:
        outcome = row["reward"] if rollouts else row["right"]
        if outcome is not None and (script, role) not in WITHOUT_GROUPS:
            groups[row["group"]].append(outcome)
    differ = [len({*outcomes}) > 1 for outcomes in groups.values() if len(outcomes) > 1]
    shown = rows[:: max(1, len(rows) // SHOWN)][:SHOWN]
    found = {
        "texts": len(rows),
        "read": sum(row["read"] for row in rows),
        "cut": sum(row["cut"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "seconds": round(sum(call.seconds for call in calls), 1),
        "solutions": len(right),
        "right": sum(right),
        "rollouts": len(rollouts),
        "worst": worst,
        "above": sum(
            row["reward"] is not None and row["reward"] > worst + 1e-6 for row in rollouts
        ),
        "groups": len(differ),
        "mixed": sum(differ),
    }
    keys = ("asked", "text", "read", "right", "reward")
    return found | {"shown": [{key: row[key] for key in keys} for row in shown]}


def rows_of(number: int, call: Call, gold: dict[str, str]) -> list[dict]:
    """A dict for each text of a call. Its reward is None if it has none; so is `right`."""
    rewards = [None] * len(call.texts)
    if call.batch is not None:
        rewards = [None if r != r else r for r in call.batch.rewards.tolist()]
    rows = zip(call.asked, call.texts, call.lengths, call.cut, rewards, call.groups or call.prompts)
    return [
        {
            "asked": asked,
            "text": text,
            "tokens": tokens,
            "cut": cut,
            "reward": reward,
            "group": (number, group) if call.batch is not None else group,
            "rollout": call.batch is not None,
            "right": is_correct(text, gold[asked]) if gold.get(asked) else None,
        }
        for asked, text, tokens, cut, reward, group in rows
    ]


# ------------------------------------------------------------------ running
def read_all() -> dict:
    """Model -> script -> what was found."""
    return json.loads(OUT.read_text()) if OUT.exists() else {}


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("scripts", nargs="*", help="all, if there are none")
    parser.add_argument("--data", type=Path, default=ROOT)
    parser.add_argument("--temperature", type=float, help="the player's own, if there is none")
    given = parser.parse_args()
    model = Path(given.model).resolve().name
    model += f", temperature {given.temperature:g}" if given.temperature is not None else ""
    wanted = given.scripts or [*PLAN]
    missing = [name for name in wanted if name not in read_all().get(model, {})]
    if len(wanted) > 1:
        options = ["--data", str(given.data)]
        if given.temperature is not None:
            options += ["--temperature", str(given.temperature)]
        for name in missing:  # a process each, so that an error ends one script alone
            command = [sys.executable, "-m", "lab.runs.first_update", given.model, name, *options]
            print(name, "ends with", subprocess.run(command, cwd=ROOT).returncode, flush=True)
        return
    for name in missing:
        torch.set_num_threads(1)
        dataset = given.data / ("mbpp.jsonl" if name in PROGRAMS else "mawps.jsonl")
        result = run_script(name, given.model, str(dataset), given.temperature)
        found = read_all()
        of_model = found.get(model, {}) | {name: result}
        found[model] = {script: of_model[script] for script in PLAN if script in of_model}
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{model}, {name}, {result['seconds']} s {result['ended']}")
        for role, its in result["roles"].items():
            print(" ", role, {key: x for key, x in its.items() if key != "shown"}, flush=True)


if __name__ == "__main__":
    main()
