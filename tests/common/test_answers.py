"""Answers and steps, on what models really write and on hostile text."""

import json
import re
import time

from common.sandbox import same_output
from common.tasks.answers import boxed, in_one_form, is_correct, split_steps, step_ends
from common.tiny import TINY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "x", "\\", "boxed"]), max_size=24).map("".join)
)
@settings(max_examples=300)
def test_boxed_against_counting_from_every_box(text):
    found = None
    for start in [match.end() for match in re.finditer(r"\\boxed\{", text)]:
        depths = [1]
        for character in text[start:]:
            depths.append(depths[-1] + {"{": 1, "}": -1}.get(character, 0))
        if 0 in depths:
            found = text[start : start + depths.index(0) - 1]
    assert boxed(text) == found


# ------------------------------------------------------------------ time
ROWS = r"1 { } {} \boxed{ \boxed{} \boxed{1} \boxed \ < <step> </step> <step></step> <step".split()
ROWS += "</ 1. .1 1e1 e1 +- \0 -".split() + ["1 ", " "]
ROWS += ["\u0661", "\u3000", "\ud800", "9" * 5000 + " "]


@pytest.mark.parametrize("row", ROWS, ids=ascii)
def test_time_is_linear_in_the_text(row):
    """Of rows that nearly are what is looked for: the end is missing, or comes once, or is another.
    CPU time, which a busy machine does not lengthen; what is quadratic takes minutes.
    """
    start, body = time.process_time(), row * (60_000 // len(row))
    for text in (body + "x", "x" + body + "}", body + "</step>", "<step>" + body):
        boxed(text), split_steps(text), is_correct(text, "7"), is_correct(text, text)
        for expected in ("42", "4.2", text[:-1], text + "x"):
            same_output(text, expected)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "99999999!", "7^{123456789}"])
def test_an_answer_that_takes_for_ever_is_wrong(answer, monkeypatch):
    monkeypatch.setattr("common.tasks.answers.SECONDS", 1)
    assert is_correct(rf"\boxed{{{answer}}}", "5") is False


def test_a_vote_waits_once_for_such_an_answer(monkeypatch):
    """In the second vote not at all; and nobody else is taken for it."""
    monkeypatch.setattr("common.tasks.answers.SECONDS", 1)
    answers = ["2^{9^{9^9}}", "3^{9^{9^9}}", r"\sqrt{8}", r"2\sqrt{2}"]
    found = in_one_form(answers)
    start = time.monotonic()
    assert in_one_form(answers) == found == [*answers[:3], answers[2]]
    assert time.monotonic() - start < 1


@given(st.text(alphabet="0123456789\\{}boxedfrac $^_-+()", max_size=60))
@settings(max_examples=150)
def test_hostile_answers_never_raise(text):
    assert is_correct(text, "7") in (True, False)
    assert is_correct(rf"\boxed{{{text}}}", r"\frac{1}{2}") in (True, False)


# ------------------------------------------------------------------ steps
def byte_level_bpe() -> PreTrainedTokenizerFast:
    """A real byte-level BPE whose merges run over tag boundaries: `>\\n`, `</`, `step>`, ...."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False)
    texts = ["</step>\n<step>", "x</step>\n", "step>\n<answer>"] * 50
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def oracle(ids, tokenizer):
    """The first token at which a growing prefix has one more complete step."""
    ends, seen = [], 0
    for i in range(len(ids)):
        count = len(split_steps(tokenizer.decode(ids[: i + 1])))
        ends += [i] * (count - seen)
        seen = count
    return ends


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama's: a mark for every space, single bytes for what is not in the vocabulary, and the
    first space of a text is dropped.
    """
    words = "\u2581 <step> </step> \u2581< step > </ < a \u2581a \n /".split(" ")
    words += ["\u2581step>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(dict(zip(words, range(len(words)))), [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


SENTENCE_PIECE, BPE = sentence_piece(), byte_level_bpe()


@given(st.lists(st.integers(0, 329), max_size=60), st.lists(st.integers(0, 12), max_size=60))
@settings(max_examples=200)
def test_step_ends_on_tokens_that_no_encoder_would_write(some, more):
    assert step_ends(some, BPE) == oracle(some, BPE)
    some = [i % 269 for i in some]
    for ids in (some, more, [1, *more, 2, *some, 2]):
        assert step_ends(ids, SENTENCE_PIECE) == oracle(ids, SENTENCE_PIECE)


def test_time_of_step_ends_is_linear_in_the_tokens():
    """Where tokens have to be decoded in context: alone, "<" and " step>" are the tag "<step>"."""
    ids = [7, 12, 2] + [1, 0, 2] * 10_000
    start = time.process_time()
    assert step_ends(ids, SENTENCE_PIECE) == [*range(5, len(ids), 3)]
    assert time.process_time() - start < 10


TEXTS = [
    "<step>3+4=7</step>\n<step>7*6=2</step>\n<answer>\\boxed{2}</answer>",
    "<step>a</step><step>b</step>",
    "no steps at all",
    "",
    "<step>never closed",
    "</step><step>closed before it opened",
    "<step>nested <step>inner</step> outer</step>",
    "<step>é漢🙂</step>\n\n<step>🙂🙂</step>!",
    "<step></step>" * 30,
    "<step>line\nbreak</step>\n\n\n<step> </step> trailing",
]


@pytest.mark.parametrize("name", ["tiny", "bpe", "qwen2.5-tokenizer"])
def test_step_ends(name, request):
    if name == "bpe":
        tokenizer = BPE
        pieces = tokenizer.batch_decode([[i] for i in tokenizer(TEXTS[0]).input_ids])
        assert any(">\n" in piece for piece in pieces)  # a tag shares a token with what follows
    else:
        folder = TINY if name == "tiny" else request.getfixturevalue("real_data") / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert step_ends(ids, tokenizer) == oracle(ids, tokenizer), text
        assert len(step_ends(ids, tokenizer)) == len(split_steps(tokenizer.decode(ids)))


def test_step_ends_on_gsm8ks_solutions(real_data):
    """Often `>` shares its token with the newline, which is the case this exists for."""
    tokenizer, shared = AutoTokenizer.from_pretrained(real_data / "qwen2.5-tokenizer"), 0
    for line in (real_data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:100]:
        reasoning = json.loads(line)["answer"].split("####")[0].strip()
        steps = "".join(f"<step>{step}</step>\n" for step in reasoning.splitlines())
        ids = tokenizer(steps + r"<answer>\boxed{1}</answer>").input_ids
        ends = step_ends(ids, tokenizer)
        assert ends == oracle(ids, tokenizer) and len(ends) == steps.count("</step>")
        shared += any(tokenizer.decode([ids[end]]) not in (">", "step>", "</step>") for end in ends)
    assert shared > 30
