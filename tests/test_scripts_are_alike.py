"""The scripts are meant to be read side by side: same order, same names, same words for the same thing."""

import ast
import re

import pytest
from conftest import ROOT

SCRIPTS = [name for name in ("tango.py", "gar.py", "prime.py", "cure.py", "spin.py", "mae.py") if (ROOT / name).exists()]
COMMON = "model dataset out seed steps questions group_size micro_batch lr kl lora_rank four_bit".split()
COMMON += "rows_at_once eight_bit_adam vllm dry_run eval_every eval_questions save_every show_every report_to".split()


def arguments(script) -> dict[str, tuple[str, str]]:
    """name -> (type, description), in order."""
    tree = ast.parse((ROOT / script).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    fields = {}
    for field, text in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign):
            fields[field.target.id] = (ast.unparse(field.annotation), text.value.value if isinstance(text, ast.Expr) else "")
    return fields


@pytest.mark.parametrize("script", SCRIPTS)
def test_common_arguments_come_first_in_one_order(script):
    names = list(arguments(script))
    shared = [name for name in COMMON if name in names]
    assert names[: len(shared)] == shared and {"model", "dataset", "seed", "steps", "lr", "four_bit"} <= set(shared)
    assert len(names) <= 35
    assert all(description for _, description in arguments(script).values())  # a sentence each


@pytest.mark.parametrize("script", SCRIPTS)
def test_plumbing_arguments_say_the_same(script):
    first = arguments(SCRIPTS[0])
    for name in ("model", "seed", *COMMON[COMMON.index("four_bit") :]):
        assert arguments(script)[name] == first[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_come_in_one_order(script):
    order = ["arguments", "prompts and parsing", "rewards", "the paper's mathematics", "the trainer", "evaluation", "main"]
    banners = re.findall(r"^# -{10,} (.*)$", (ROOT / script).read_text(), re.MULTILINE)
    places = [next((i for i, name in enumerate(order) if banner.startswith(name)), None) for banner in banners]
    known = [place for place in places if place is not None]
    assert known == sorted(known) and {0, 1, 2, 4, 5, 6} <= set(known)


@pytest.mark.parametrize("script", SCRIPTS)
def test_prompts_and_the_configuration_are_shared_word_for_word(script):
    texts = [(ROOT / name).read_text() for name in (SCRIPTS[0], script)]
    prompts = [re.findall(r'SOLVE = r""".*?"""', text, re.DOTALL) for text in texts]
    assert prompts[1] == ([] if script == "cure.py" else prompts[0])  # cure.py has no questions with a short answer
    settings = [set(re.findall(r"^        (\w+)=", text[text.index("config = GRPOConfig(") :], re.MULTILINE)) for text in texts]
    assert len(settings[0]) > 15 and len(settings[0] ^ settings[1]) <= 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_imports_another_and_none_is_long(script):
    text = (ROOT / script).read_text()
    for other in SCRIPTS:
        assert not re.search(rf"^(from|import) {other.removesuffix('.py')}\b", text, re.MULTILINE)
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
