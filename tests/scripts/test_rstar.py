"""rstar.py: the tree, its pairs and the loss against loops over the plain list of rollouts, hostile
rollouts."""

import math
import random

import rstar
from common.tasks.answers import solve_prompt

import pytest
from conftest import build, perturb
from trainers import (
    QUESTION,
    RIGHT,
    WRONG,
    encoded,
    likelihood,
    logged,
    loss_in_parts,
    without_model,
)

END = "\n<answer>\\boxed{50}</answer>"
FIRST = "<step>38+4=42</step>"


def text(steps) -> str:
    return "".join(f"<step>{step}</step>" for step in steps)


# ------------------------------------------------------------------ trees, from a list of rollouts
def some_rollouts(seed: int) -> list[tuple[tuple[str, ...], bool]]:
    """(steps, right): one to three steps of two or three kinds, and often the same ones again."""
    rng = random.Random(seed)
    kinds = "abc"[: rng.choice((2, 3))]
    found = [tuple(rng.choices(kinds, k=rng.randint(1, 3))) for _ in range(rng.randint(2, 30))]
    return [(steps, (hash_of(steps) + seed) % 3 > 0) for steps in found]


def hash_of(steps) -> int:
    return sum(ord(step) * (i + 1) for i, step in enumerate(steps))


def tree_of(rollouts) -> rstar.Tree:
    tree = {"": rstar.Node(False)}
    for steps, right in rollouts:
        rstar.back_up(tree, text(steps) + END, right)
    return tree


def value(rollouts, steps: tuple, whole=False) -> tuple[float, int, int]:
    """(Q, right, wrong): of the rollouts that begin with these steps, or are exactly these."""
    those = [z for its, z in rollouts if its == steps or not whole and its[: len(steps)] == steps]
    return (sum(those) - those.count(False)) / len(those), sum(those), those.count(False)


def beginnings(rollouts) -> list[tuple]:
    """Of all rollouts, each once, in the order in which they came."""
    return [*dict.fromkeys(its[:k] for its, _ in rollouts for k in range(1, len(its) + 1))]


@pytest.mark.parametrize("seed", range(20))
def test_a_nodes_value_is_that_of_the_rollouts_that_begin_with_it(seed):
    rollouts = some_rollouts(seed)
    tree = tree_of(rollouts)
    for steps in [(), *beginnings(rollouts)]:
        Q, right, wrong = value(rollouts, steps)
        node = tree[text(steps)]
        assert (node.Q, node.N, node.ended) == (pytest.approx(Q), right + wrong, False)
        children = [s for s in beginnings(rollouts) if s[:-1] == steps]
        assert node.steps == [*map(text, children)]
    whole = {its for its, _ in rollouts}
    assert {y for y, node in tree.items() if node.ended} == {text(its) + END for its in whole}
    wanted = {
        text(its) + END: sum(
            [value(rollouts, its[:k])[0] for k in range(1, len(its) + 1)],
            value(rollouts, its, whole=True)[0],
        )
        / (len(its) + 1)
        for its in whole
    }
    assert rstar.mean_Q(tree) == pytest.approx(wanted)
    right = [text(its) + END for its, z in dict.fromkeys(rollouts) if z]
    best = sorted(right, key=lambda y: -wanted[y])[:2]
    assert [wanted[y] for y in rstar.best_solutions(tree)] == pytest.approx(
        [wanted[y] for y in best]
    )
    assert {*rstar.best_solutions(tree)} <= {*right}


def pairs_by_hand(ys: list[tuple[str, float, int, int]]) -> dict[tuple[str, str], float]:
    """ys: (text, value, right, wrong) in order. y+ is one that at most one other has to make way
    for, and so is y-; loops over all pairs."""
    good = [y for y in ys if y[2]]
    bad = [y for y in ys if y[3]]
    found = []
    for a in good:
        for b in bad:
            before = sum(o[1] > a[1] or o[1] == a[1] and ys.index(o) < ys.index(a) for o in good)
            behind = sum(o[1] < b[1] or o[1] == b[1] and ys.index(o) < ys.index(b) for o in bad)
            if before < 2 and behind < 2 and a[1] > b[1]:
                found.append((a[0], b[0]))
    return {pair: 1 / len(found) for pair in found}


@pytest.mark.parametrize("seed", range(20))
def test_the_two_best_siblings_are_held_against_the_two_worst(seed):
    rollouts, wanted = some_rollouts(seed), {}
    for parent in [(), *beginnings(rollouts)]:
        children = [s for s in beginnings(rollouts) if s[:-1] == parent]
        wanted |= pairs_by_hand([(text(s), *value(rollouts, s)) for s in children])
    tree = tree_of(rollouts)
    found = rstar.sibling_pairs(tree)
    assert {(p["chosen"], p["rejected"]): p["weight"] for p in found} == wanted
    for pair in found:  # all but the last step is the same
        one, other = (pair[y].rpartition("<step>") for y in ("chosen", "rejected"))
        assert one[0] == other[0] and one[2] != other[2]
    values, whole = rstar.mean_Q(tree), dict.fromkeys(its for its, _ in rollouts)
    ys = [(text(s) + END, values[text(s) + END], *value(rollouts, s, True)[1:]) for s in whole]
    found = rstar.best_against_worst(tree, values)
    assert {(p["chosen"], p["rejected"]): p["weight"] for p in found} == pairs_by_hand(ys)


def test_the_next_rollout_goes_on_from_the_most_promising_node():
    """a: N 4, Q .5;  b: N 2, Q 0;  at c = 2 UCT is .5 + 2 sqrt(ln 6 / 4) = 1.839 against 1.893."""
    rollouts = [(("a", "x"), True)] * 3 + [(("a",), False)] + [(("b",), z) for z in (True, False)]
    tree = tree_of(rollouts)
    assert rstar.uct(4, 0.5, 6, 2.0) == pytest.approx(0.5 + 2 * math.sqrt(math.log(6) / 4))
    assert rstar.next_start(tree, 3, 2.0) == text("b")
    assert rstar.next_start(tree, 5, 0.0) == text("a")
    assert rstar.next_start(tree, 4, 0.0) == text("ax")
    assert rstar.next_start(tree, 3, 0.0) == text("ax")  # behind which there are only answers
    assert rstar.next_start(tree, 7, 0.0) == ""  # not yet as many as --width
    assert rstar.next_start({"": rstar.Node(False)}, 1, 2.0) == ""
    assert rstar.next_start(tree_of([((), True)] * 9), 1, 2.0) == ""  # nothing but an answer


# ------------------------------------------------------------------ search, with given completions
def given_texts(texts=(), **change) -> rstar.RStar:
    cfg = rstar.Args(**{"pool": 1, "samples": 4, "width": 2, "questions": 2} | change)
    rows = [{"question": QUESTION, "answer": "50"}]
    trainer = without_model(rstar.RStar, cfg, texts, train_rows=rows)
    trainer.saved = {"solutions": [], "pairs": []}
    return trainer


def test_a_rollout_goes_on_from_a_beginning_and_counts_for_all_of_it():
    rest = RIGHT.removeprefix(FIRST)
    trainer = given_texts([RIGHT, WRONG, "…", rest, END.replace("50", "49")])
    tree = {"": rstar.Node(False)}
    trainer.search(trainer.train_rows, [tree], 4)
    assert trainer.prefix == ["", "", FIRST, FIRST]  # a cut one is no rollout
    assert (tree[""].N, tree[FIRST].N, tree[FIRST].q) == (3, 2, 2)
    trainer.search(trainer.train_rows, [tree], 1)
    assert trainer.prefix[4:] == [RIGHT.removesuffix(END)]
    assert (tree[""].q, tree[FIRST].N, tree[FIRST].q) == (0, 3, 1)
    assert {name for name, _ in trainer.asked} == {"generator"}


def test_what_cannot_be_read_is_no_rollout():
    spelled = RIGHT.replace("42</step>", "42<|end|></step>")  # would be cut in two when encoded
    long = RIGHT.replace("38+4", "38+4" + " " * 80)
    texts = [f"{RIGHT}…", spelled, "\\boxed{50}", FIRST, RIGHT.replace("{50}", "{ }"), long]
    texts += [r"<step>38+4=42</step><step>\boxed{50}</step>"]  # its answer is no node of its own
    trainer, tree = given_texts(texts, solution_tokens=120), {"": rstar.Node(False)}
    trainer.search(trainer.train_rows, [tree], len(texts))
    assert tree == {"": rstar.Node(False)} and trainer.texts == []
    # a box in the beginning is no answer that the rest has come to; both count for the length
    part = r"<step>38+4=\boxed{50}</step>"
    trainer.texts = ["\nso it is", "\n<answer>\\boxed{49}</answer>", END + " " * 80 + "."]
    found = trainer.sample_solutions([trainer.train_rows[0] | {"prefix": part}] * 3)
    assert [row["well_formed"] for row in found] == [False, True, False]
    assert found[1]["solution"] == part + "\n<answer>\\boxed{49}</answer>" and not found[1]["right"]


@pytest.mark.parametrize("kind", ["ppm", "orm"])
def test_what_the_players_learn_of_a_tree(kind):
    another = RIGHT.replace("\n", " ")
    trainer = given_texts([RIGHT, WRONG, RIGHT, another], verifier=kind, width=9)
    trainer.start()
    assert [row["solution"] for row in trainer.saved["solutions"]] == [RIGHT, another]
    pairs = [(p["chosen"], p["rejected"], p["ended"]) for p in trainer.saved["pairs"]]
    steps = [(FIRST, WRONG.partition("\n")[0], False)] * (kind == "ppm")
    assert pairs == [*steps, (RIGHT, WRONG, True), (another, WRONG, True)]
    assert sum(p["weight"] for p in trainer.saved["pairs"] if p["ended"]) == 1
    logged = {name: values[0] for name, values in trainer.logged.items()}
    wanted = {"co/right_rollouts": 0.75, "co/sibling_pairs": 1, "co/true_pairs": True}
    assert logged == wanted


# ------------------------------------------------------------------ losses, on the small model
def real(folder) -> rstar.RStar:
    """The trainer on the small model, its two adapters apart."""
    args = rstar.Args(questions=2, micro_batch=2, beta=0.3, steps=2, ver_steps=1)
    trainer = build(rstar.RStar, folder, args, rstar.RStar.define_players(args), solve_prompt)
    perturb(trainer, 0.05)
    return trainer


def step_loss(trainer) -> float:
    """Of the step that the trainer would take, micro-batch by micro-batch."""
    (batch,) = trainer.step([])
    return loss_in_parts(trainer, batch)


def test_both_losses_by_hand(tmp_path):
    """A pair of siblings of a parent with four, without end tokens, and one of solutions."""
    trainer, losses, ahead = real(tmp_path), [], []
    step = WRONG.partition("\n")[0]
    pairs = [(FIRST, step, 0.25, False), (RIGHT, WRONG, 1.0, True)]
    names = ("chosen", "rejected", "weight", "ended")
    rows = [{"question": QUESTION} | dict(zip(names, pair)) for pair in pairs]
    both = [{"question": QUESTION, "solution": y} for y in (RIGHT, WRONG)]
    trainer.saved |= {"solutions": both, "pairs": rows}
    tokens = len(encoded(trainer, RIGHT)) + len(encoded(trainer, WRONG))
    wanted = -sum(likelihood(trainer, "generator", y) for y in (RIGHT, WRONG)) / tokens
    assert step_loss(trainer) == pytest.approx(wanted, rel=1e-4)
    trainer.state.global_step = 1  # the verifier's
    for chosen, rejected, weight, ended in pairs:
        r = [
            0.3 * (likelihood(trainer, "verifier", y, ended) - likelihood(trainer, None, y, ended))
            for y in (chosen, rejected)
        ]
        losses.append(-weight * math.log(1 / (1 + math.exp(r[1] - r[0]))) / 1.25)
        ahead.append(r[0] > r[1])
    assert step_loss(trainer) == pytest.approx(sum(losses), rel=1e-4)
    assert logged(trainer)["verifier/pair_accuracy"] == sum(ahead) / 2
    # and a score is the verifier's likelihood
    scores = trainer.scores([both[0], {"question": QUESTION, "solution": step, "ended": False}])
    by_hand = [likelihood(trainer, "verifier", *y) for y in ((RIGHT, True), (step, False))]
    assert scores == pytest.approx(by_hand, rel=1e-4) and trainer.scores([]) == []
