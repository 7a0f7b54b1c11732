"""What tests share: where the project lies, the optional real data, small runs of every script.

A fresh Python spends five CPU seconds on imports, so scripts run in this process where they can
(`run_here`, `refused`), those that need one of their own get it from warm.py, and one uninterrupted
run of each is made once for all files (`finished`).
"""

import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import real_model
import torch
import tyro
import warm
from filelock import FileLock
from hypothesis import settings
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a busy machine is slow, and nothing here may fail for that
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # also of processes that are no test's
torch.set_num_threads(1)  # two threads on a busy machine wait for each other
# Behind `&` or nohup a process does not hear these two, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# GSM8K, MBPP and the Qwen2.5 tokenizer, as published; tests that want them are skipped without them
DATA = Path(os.environ.get("DUET_DATA", ROOT.parent / "shared" / "data"))

SMALL = {
    "tango.py": "--steps 6 --questions 2 --group-size 4 --micro-batch 4 --ver-warmup 1"
    " --solution-tokens 48 --judgement-tokens 72",
    "few_labels.py": "--dataset tiny --steps 6 --questions 2 --group-size 4 --micro-batch 4"
    " --ver-warmup 1 --solution-tokens 64 --judgement-tokens 112",
    "prime.py": "--steps 3 --questions 2 --group-size 8 --micro-batch 8 --keep-low 0.1",
    "gar.py": "--steps 3 --questions 4 --group-size 4 --micro-batch 8 --seed 1",
    "cure.py": "--steps 3 --questions 2 --group-size 8 --micro-batch 8 --test-tokens 72",
    "spin.py": "--steps 8 --questions 8 --micro-batch 4 --iterations 4",
    "coverrl.py": "--steps 3 --questions 2 --group-size 4 --samples 6 --micro-batch 8",
    "raro.py": "--steps 3 --questions 2 --group-size 4 --pairs 2 --micro-batch 8",
    "score.py": "--steps 3 --stage1-steps 1 --questions 2 --group-size 4 --micro-batch 8",
    "maporl.py": "--steps 3 --questions 2 --group-size 2 --micro-batch 8",
    "aprm.py": "--steps 3 --questions 2 --group-size 4 --micro-batch 8",
    "ssr.py": "--steps 3 --questions 2 --injections 4 --group-size 4 --micro-batch 16",
    "ssp.py": "--steps 3 --questions 6 --group-size 3 --micro-batch 8",
    "mae.py": "--steps 4 --questions 8 --micro-batch 8 --seed-questions 16"
    " --solution-tokens 48 --judgement-tokens 64",
    "azr.py": "--steps 4 --questions 4 --micro-batch 4 --seed-tasks 16 --difficulty-samples 2"
    " --proposal-tokens 64 --answer-tokens 64",
    "deepseekmath.py": "--steps 6 --questions 2 --group-size 8 --micro-batch 8 --solutions 8"
    " --verifier-steps 1 --meta-steps 1 --generator-steps 1 --solution-tokens 112"
    " --analysis-tokens 64",
    "vstar.py": "--steps 8 --ver-steps 2 --questions 4 --micro-batch 4 --pool 12 --samples 4"
    " --candidates 4 --solution-tokens 48",
    "rstar.py": "--steps 4 --ver-steps 2 --questions 4 --micro-batch 4 --pool 12 --samples 6"
    " --width 2 --candidates 4 --solution-tokens 48",
    "sweet_rl.py": "--steps 4 --critic-steps 2 --questions 4 --micro-batch 4 --pool 12 --samples 4"
    " --candidates 4 --solution-tokens 48",
    "genrm.py": "--steps 4 --questions 4 --micro-batch 4 --pool 12 --samples 4 --candidates 4"
    " --rationales 2 --solution-tokens 48 --judgement-tokens 80",
    "self_rewarding.py": "--steps 4 --iterations 2 --questions 4 --micro-batch 4 --pool 12"
    " --solution-tokens 48 --judgement-tokens 80",
    "apo.py": "--steps 8 --rm-steps 2 --iterations 2 --questions 4 --micro-batch 4 --pool 8"
    " --solution-tokens 64",
    "pvg.py": "--steps 6 --rounds 2 --ver-steps 1 --questions 2 --group-size 4 --micro-batch 8"
    " --pool 8 --samples 4 --pairs 4 --solution-tokens 48",
    "self_verify.py": "--steps 4 --questions 2 --group-size 4 --micro-batch 8 --interval 2",
    "self_taught.py": "--steps 4 --iterations 2 --questions 4 --micro-batch 4 --pool 16 --samples 2"
    " --solution-tokens 48",
}
"""A run of a few seconds in which every player is trained, with checkpoints to resume from."""


def has_page(script: str) -> bool:
    return (ROOT / "docs" / script).with_suffix(".md").exists()


def find_scripts() -> list[str]:
    """Files with an `Args` beside this folder that git tracks, so that a file of your own next to
    ours is not tested as one of ours; without git those of SMALL.
    """
    command = ["git", "-C", str(ROOT), "ls-files", "--", ":(glob)*.py"]
    tracked = subprocess.run(command, capture_output=True, text=True).stdout.split()
    has_args = [name for name in tracked if "\nclass Args(" in (ROOT / name).read_text()]
    return has_args or [*SMALL]


TRACKED = find_scripts()
SCRIPTS = [name for name in TRACKED if name in SMALL and has_page(name)]
"""The others fail in one test, `test_every_script_has_a_page_and_a_small_run`."""


def pytest_configure(config):
    """`pytest -m gpu` is about a GPU; all else is about the CPU, also where there is one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not (DATA / "gsm8k_test.jsonl").exists():
        pytest.skip("set DUET_DATA to a folder with gsm8k_test.jsonl and qwen2.5-tokenizer/")
    return DATA


def pytest_collection_modifyitems(items):
    """`pytest -m quick`: tests that are given no folder; whatever trains has one."""
    for item in items:
        if not {"tmp_path", "tmp_path_factory"} & set(item.fixturenames):
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish():
    """Every trainer collects garbage when it starts. What the imports have made is none, and going
    through it took a third of a second each time.
    """
    gc.freeze()


# ------------------------------------------------------------------ tables in tests/data
def table(name: str) -> dict[str, list[list[str]]]:
    """Section -> its rows, of a file in tests/data. A row is up to three cells between bars, - for
    none; indented lines belong to the last cell of the line above.
    """
    text, found = (ROOT / "tests" / "data" / name).read_text(), {}
    for line in text[text.index("\n== ") :].splitlines():
        if line.startswith("== "):
            rows = found[line[3:]] = []
        elif line.startswith("    "):
            rows[-1][-1] += "\n" + line[4:]
        elif line:
            cells = re.split(r" \|(?: |$)", line, maxsplit=2)
            rows.append(["" if cell == "-" else cell for cell in cells])
    return found


# ------------------------------------------------------------------ runs of a script
def small(script: str, out: Path, *more) -> list[str]:
    """The arguments of a small run; what `more` says counts."""
    shared = "--eval-questions 8 --save-every 2 --show-every 3"
    return [*f"{SMALL[script]} {shared} --out {out}".split(), *map(str, more)]


def run_module(module, *arguments) -> tuple[str, str, int | None]:
    """What a script prints, run in this process, which has imported everything: (output, errors,
    exit code, None where it returns).
    """
    printed, said, code = io.StringIO(), io.StringIO(), None
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    before = [signal.getsignal(sign) for sign in handled]
    state = torch.get_rng_state()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            with module.exit_with_one_sentence():
                module.main(tyro.cli(module.Args, args=[*map(str, arguments)]))
    except SystemExit as ended:
        code = ended.code
    finally:
        for sign, handler in zip(handled, before):
            signal.signal(sign, handler)
        torch.set_rng_state(state)
    return printed.getvalue(), said.getvalue(), code


def module_of(script: str):
    return importlib.import_module(Path(script).stem)


def load(path: Path):
    """A script as a module, whether it lies in the project or not."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def run_here(script: str, *arguments) -> str:
    """What `python script arguments` prints, run in this process, to its end."""
    printed, said, code = run_module(module_of(script), *arguments)
    assert code is None, printed + said
    return printed


def refused(script: str, *arguments) -> str:
    """The one sentence with which `python script arguments` ends, with exit code 2."""
    printed, said, code = run_module(module_of(script), *arguments)
    assert code == 2 and said.count("error: ") == 1, printed + said
    return said


def evaluated_once(module, most_tokens: int | None = None):
    """The last evaluation repeats the first; in it, completions are at most this long."""
    real, once = module.evaluate, []

    def evaluate(trainer, *rest):
        if not once:
            with pytest.MonkeyPatch.context() as patch:
                for player in trainer.players.values():
                    limit = min(most_tokens or player.max_tokens, player.max_tokens)
                    patch.setattr(player, "max_tokens", limit)
                once.append(real(trainer, *rest))
        return once[0]

    module.evaluate = evaluate


@pytest.fixture(scope="module")
def sandbox():
    from common.sandbox import Sandbox

    with Sandbox(1) as one:
        yield one


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr("common.run.session.write_report", lambda *_: None)


@pytest.fixture
def brief(monkeypatch, no_report):
    """brief("tango.py", ...) is `run_here` without a report, and evaluates once: half of
    a short run's time.
    """

    def run(script: str, *arguments, most_tokens: int | None = 2) -> str:
        module = module_of(script)
        monkeypatch.setattr(module, "evaluate", module.evaluate)  # put back in the end
        evaluated_once(module, most_tokens)
        return run_here(script, *arguments)

    return run


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id) -> Path:
    """A folder that all workers have."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def smollm2(shared_folder) -> Path:
    """A real pretrained model as a folder, made once: see real_model.py."""
    if missing := real_model.missing():
        pytest.skip(f"no real model: {' and '.join(missing)} not installed (tests/real_model.py)")
    folder = shared_folder / "smollm2"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            real_model.make(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
    return folder


@pytest.fixture(scope="session")
def finished(shared_folder):
    """finished("tango.py") -> (folder, stdout, stderr) of the small run, uninterrupted, in a
    process of its own. It is made once for these arguments, whichever file or worker asks first,
    and must not be changed.
    """

    def run(script: str, *more) -> tuple[Path, str, str]:
        name = "".join([Path(script).stem, *map(str, more)])
        folder = shared_folder / "finished" / name
        out, err, said, lock = (Path(f"{folder}.{end}") for end in ("out", "err", "said", "lock"))
        folder.parent.mkdir(exist_ok=True)
        with FileLock(lock):
            if not err.exists():
                process = warm.start(script, small(script, folder, *more), out, said)
                process.join(timeout=900)
                assert process.exitcode == 0, out.read_text() + said.read_text()
                said.rename(err)
        return folder, out.read_text(), err.read_text()

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All adapters of a run or a checkpoint: "generator/base_model...lora_A.weight" -> tensor."""
    files = sorted(folder.glob("*/adapter_model.safetensors"))
    assert files, folder
    return {f"{f.parent.name}/{n}": t for f in files for n, t in load_file(f).items()}


def players_of(script: str) -> dict:
    """The script's players, as `launch` derives them."""
    from common.checked import CoTrainer
    from common.core.cotrainer import with_adapters

    module = module_of(script)
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    (trainer,) = [k for k in kinds if issubclass(k, CoTrainer) and k.__module__ == module.__name__]
    return with_adapters(trainer.define_players(module.Args()))


def adapters_of(script: str) -> set[str]:
    return {player.adapter for player in players_of(script).values()}


def trained_adapters(folder: Path) -> set[str]:
    """Adapters whose B matrices are no longer zero."""
    return {n.split("/")[0] for n, t in weights(folder).items() if "lora_B" in n and t.any()}


def loaded_by_peft_alone(folder: Path, base) -> dict[str, torch.Tensor]:
    """All adapters of a run, which PEFT has read as they were saved, on a base of transformers'."""
    from peft import PeftModel

    first, *others = sorted({name.split("/")[0] for name in weights(folder)})
    model = PeftModel.from_pretrained(base, folder / first, adapter_name=first)
    for name in others:
        model.load_adapter(folder / name, name)
    loaded = {n: p for n, p in model.named_parameters() if "lora_" in n}
    saved = weights(folder)
    assert len(saved) == len(loaded)
    for name, tensor in saved.items():
        adapter, key = name.split("/")
        assert torch.equal(loaded[key.replace(".weight", f".{adapter}.weight")], tensor)
    return saved


def same_weights(one: Path, other: Path):
    """Asserts that two runs have the same adapters, bit for bit."""
    ours, expected = weights(one), weights(other)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def metrics_of(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def write_rows(path: Path, rows: list[dict]) -> str:
    """A file of JSON lines, as --dataset names it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def steps_of(folder: Path) -> list[dict]:
    """The metrics of its steps, without those of evaluations."""
    return [row for row in metrics_of(folder) if "step_time" in row]


def saved_of(folder: Path) -> dict:
    """`saved` of the last checkpoint."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((last / "saved.json").read_text())


# ------------------------------------------------------------------ a trainer to ask questions of
@pytest.fixture
def copied(finished, tmp_path):
    """(a copy of Tango's finished run of six steps, the run itself)"""
    whole, _, _ = finished("tango.py")
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy", whole


def build(kind, folder, args, players, prompt, rows=8, **config):
    """A trainer on the small model, with adapters of rank 4; groups of 4 from the loader."""
    from common import fast
    from common.core import plain
    from common.core.cotrainer import with_adapters
    from common.fast import vllm
    from common.run.launch import grpo_config
    from common.run.models import load_model
    from common.run.report.recording import Recorder
    from common.tasks.math import load_questions

    from datasets import Dataset

    players = with_adapters(players)
    adapters = [*dict.fromkeys(player.adapter for player in players.values())]
    kind_of_base = config.pop("four_bit", False), 0, getattr(args, "plain", False)
    model, tokenizer = load_model("tiny", adapters, 4, *kind_of_base)
    train, _ = load_questions("tiny", 64, 8, seed=0)
    data = Dataset.from_list([{"prompt": prompt(row["question"]), **row} for row in train])
    config = grpo_config(args, folder, rows, 4, **{"save_strategy": "no"} | config)
    trainer = kind(model, players, args, config, data, tokenizer, train)
    trainer.engine = trainer.sampler = plain if args.plain else fast
    trainer.recorder = Recorder(trainer, Path(folder) / "rollouts.jsonl")
    if args.rollouts:
        trainer.sampler = vllm.Server(args.rollouts, folder, "word")
        trainer.generation_batch_size = 1 << 30
    return trainer


def make_trainer(folder, micro_batch=8, kl=0.0, **change):
    """A Tango trainer on the small model: 2 questions, groups of 4, a verifier step first."""
    from tango import Args, Tango, solve_prompt

    cfg = {"questions": 2, "group_size": 4, "lr": 1e-3, "ver_warmup": 1, "kl": kl} | change
    args = Args(micro_batch=micro_batch, **cfg)
    return build(Tango, folder, args, Tango.define_players(args), solve_prompt)


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path)


def make_players(
    folder, players, step=None, micro_batch=8, kl=0.0, kind=None, steps=4,
    gradient_checkpointing="off", **more,
):  # fmt: skip
    """A trainer of no paper: `step(trainer, rows)` is what a script writes.

    players: name -> Player. kind: a subclass of CoTrainer, for a script with more than a `step`.
    more: see `build`.
    """
    from common.checked import CoTrainer
    from common.run.args import RunArgs

    class Script(kind or CoTrainer):
        def step(self, rows):
            return step(self, rows)

    args = RunArgs(micro_batch=micro_batch, gradient_checkpointing=gradient_checkpointing)
    args.steps, args.kl = steps, kl
    question = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    return build(Script, folder, args, players, question, **more)


def lora(trainer, adapter: str) -> dict[str, torch.Tensor]:
    """A copy of an adapter's weights."""
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if f".{adapter}." in name}


def moved(before: dict, after: dict) -> float:
    """The largest difference between two copies."""
    return max((before[name] - after[name]).abs().max().item() for name in before)


def gradient(trainer, batch, max_grad_norm=0.0) -> dict[str, torch.Tensor]:
    """What `update` hands to the optimiser for this batch; nobody moves by it."""
    found, player = {}, trainer.player_named(batch.player)
    trainer.create_optimizer()

    def step():
        named = trainer.model.named_parameters()
        found.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.optimizer, "step", step)
        patch.setattr(player, "max_grad_norm", max_grad_norm)
        trainer.update(dataclasses.replace(batch, rollouts=[]))  # it may be trained on again
    return found


def relative(one: dict, other: dict) -> float:
    """The largest difference of two gradients, as a share of the largest entry."""
    assert one.keys() == other.keys() and one
    return moved(one, other) / max(g.abs().max().item() for g in other.values())


def perturb(trainer, size: float = 0.02):
    """Adapters start as the base itself. Here each one becomes another model, so that mixing them
    up shows. Of a trainer, or of the model that `load_model` returns.
    """
    generator = torch.Generator().manual_seed(1)
    for name, p in trainer.model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * size


def keys(count: int, word="keys") -> list[int]:
    """Keys of so many rows, for an engine's `generate`."""
    from common.core.draws import row_key

    return [row_key(word, i) for i in range(count)]
