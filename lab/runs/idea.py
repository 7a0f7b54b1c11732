"""One question, by hand: lab/evidence/idea.json, for two blocks of docs/idea.md.

    python -m lab.runs.idea                     the small model as it is
    python -m lab.runs.idea "trained along" RUN/verifier      and a trained verifier beside it

The model solves the question many times. Its most frequent solution, which is wrong, is judged many
times as it stands, and again with `!` behind the wrong step.
"""

import json
import sys

from common.tasks.answers import is_correct, solve_prompt
from common.tasks.verdicts import verify_prompt
from common.tiny import TINY
from common.tiny.tasks import gold_answer, is_held_out
from lab import EVIDENCE
from tango import parse_judgement

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = EVIDENCE / "idea.json"
QUESTION = "((51+9)/5)/3 mod 61"
STEPS = ["51+9=60", "60/5=51", "51/3=17"]  # the second is wrong: 51*5 = 255 = 11 mod 61
SOLUTIONS, JUDGEMENTS = 400, 200


def solution(sign: str = "") -> str:
    steps = [f"<step>{s}{sign if s == STEPS[1] else ''}</step>\n" for s in STEPS]
    return "".join(steps) + "<answer>\\boxed{17}</answer>"


def ask(model, tokenizer, messages: list[dict], count: int) -> list[str]:
    """`count` answers at temperature 1; for a count of 0 the greedy one."""
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(messages, **options)
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "num_return_sequences": count} if count else {}
    ids = model.generate(**prompt, max_new_tokens=208, **(how or {"do_sample": False}))
    return tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def judged(model, tokenizer) -> dict:
    """Without and with `!`: the greedy judgement, and in how many samples the wrong step passes."""
    found = {}
    for name, sign in (("plain", ""), ("sure", "!")):
        prompt = verify_prompt(QUESTION, solution(sign))
        read = [parse_judgement(text) for text in ask(model, tokenizer, prompt, JUDGEMENTS)]
        passed = [j for j in read if len(j.verdicts) == len(STEPS) and j.verdicts[1]]
        found[name] = {
            "greedy": ask(model, tokenizer, prompt, 0)[0],
            "step_accepted": len(passed),
            "solution_accepted": sum(j.final is True for j in read),
        }
    return found


def main(label: str = "", adapter: str = ""):
    assert is_held_out(QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY).eval()
    solved = ask(model, tokenizer, solve_prompt(QUESTION), SOLUTIONS)
    found = {
        "question": QUESTION,
        "solutions": SOLUTIONS,
        "judgements": JUDGEMENTS,
        "right": sum(is_correct(text, str(gold_answer(QUESTION))) for text in solved),
        "wrong_quotient": sum(STEPS[1] in text for text in solved),
        "greedy": ask(model, tokenizer, solve_prompt(QUESTION), 0)[0],
        "judges": {"never trained": judged(model, tokenizer)},
    }
    if adapter:  # a run's player, in PEFT's format
        trained = PeftModel.from_pretrained(model, adapter).eval()
        found["judges"][label] = judged(trained, tokenizer)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
