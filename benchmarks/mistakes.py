"""The kinds of mistakes that robustness.py makes: what is broken, and what must be said.

Each is one `Mistake`: a script with a small run's arguments, what is done to its folder beforehand
or meanwhile, and a pattern for the sentence in which it must end. Kinds that must simply work are
among them, such as a template without a system role.
"""

import ctypes
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ROOT / "common" / "tiny" / "arithmetic"
SHORT = "--steps 3 --eval-questions 4 --eval-samples 1 --eval-every 0 --save-every 1 --show-every 0"
TOKENS = {
    "tango.py": "--solution-tokens 24 --judgement-tokens 24",
    "prime.py": "--solution-tokens 24",
    "gar.py": "--solution-tokens 24 --judgement-tokens 24 --slice-tokens 18 --min-slice-tokens 6",
    "cure.py": "--program-tokens 24 --test-tokens 24",
    "spin.py": "--solution-tokens 64",
    "mae.py": "--solution-tokens 24 --judgement-tokens 24",
    "azr.py": "--proposal-tokens 64 --answer-tokens 24 --inputs 4",
    "deepseekmath.py": "--solution-tokens 48 --analysis-tokens 24",
    "vstar.py": "--solution-tokens 80",
    "self_rewarding.py": "--solution-tokens 80 --judgement-tokens 176",
}
"""Its lengths, which are others with a model of one's own."""
SMALL = {
    "tango.py": "--questions 2 --group-size 4 --ver-warmup 1 --gen-steps 1",
    "prime.py": "--questions 2 --group-size 8 --keep-low 0 --keep-high 1 --max-refills 2",
    "gar.py": "--questions 2 --group-size 4 --silent-share 1",
    "cure.py": "--questions 2 --group-size 4",
    "spin.py": "--questions 16 --iterations 3",
    "mae.py": "--questions 4 --seed-questions 8 --silent-share 1",
    "azr.py": "--questions 2 --seed-tasks 8 --difficulty-samples 2 --references 2",
    "deepseekmath.py": "--questions 2 --group-size 4 --solutions 4 --verifier-steps 1"
    " --meta-steps 1 --generator-steps 1",
    "vstar.py": "--questions 2 --iterations 2 --ver-steps 1 --pool 12 --samples 4 --candidates 4",
    "self_rewarding.py": "--questions 2 --iterations 3 --pool 8 --readings 1",
}
SMALL = {script: f"{SMALL[script]} {TOKENS[script]} {SHORT}" for script in SMALL}
"""A run of a few seconds with a checkpoint after every step."""
SCRIPTS = list(SMALL)
GROUPS = [
    "model",
    "tokenizer and template",
    "checkpoints",
    "run folder",
    "arguments",
    "data sets",
    "interruptions",
    "disk and permissions",
]


class Impossible(Exception):
    """This machine has not what it takes to make the mistake."""


def nothing(*_):
    pass


@dataclass
class Mistake:
    group: str
    name: str
    says: str = ""  # a pattern for the sentence
    script: str = "tango.py"
    arguments: str = ""  # more of them; {place}: the folder of the case
    more: tuple = ()  # arguments with spaces in them, or none
    ends: str = "refused"  # see robustness.ENDS
    says_if_it_goes_on: str = ""
    start: str = ""  # a "finished" or "interrupted" run lies in the run folder
    out: str = "run"  # the run folder, in {place}
    default_out: bool = False  # no --out
    fresh: bool = False  # in an interpreter of its own, which first imports everything
    prepare: Callable = nothing  # place -> : breaks something before
    inside: Callable = nothing  # () -> : limits of the process itself
    meanwhile: Callable = nothing  # child, place -> : while it runs
    clean_up: Callable = nothing  # place -> : afterwards, and before it goes on
    resumes: bool = False  # afterwards, the same command must finish the run
    compare: str = ""  # what goes on must be the uninterrupted run: its "steps" or its "weights"
    companion: str = ""  # the same run "first", or at the same time ("together")
    may_change: set = field(default_factory=set)


MISTAKES: list[Mistake] = []


def add(group: str, name: str, says: str, script: str = "", **how):
    """The scripts take turns where none is named."""
    turn = SCRIPTS[sum(case.group == group for case in MISTAKES) % len(SCRIPTS)]
    MISTAKES.append(Mistake(group, name, says, script or turn, **how))


# ------------------------------------------------------------------ ways to break a file
def cut(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path):
    path.write_bytes(b"")


def garbage(path: Path):
    path.write_bytes(bytes(range(1, 256)) * 40)


def lfs_pointer(path: Path):
    oid = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 3233512\n")


def web_page(path: Path):
    path.write_text("<!DOCTYPE html><html><body>Sign in to go on</body></html>\n")


def change_json(path: Path, **change):
    """None takes a key away."""
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# ------------------------------------------------------------------ models
def model(break_it: Callable) -> Callable:
    """A copy of the embedded model in {place}/model, broken."""

    def prepare(place: Path):
        shutil.copytree(TINY, place / "model")
        break_it(place / "model")

    return prepare


def broken(file: str, how: Callable) -> Callable:
    return model(lambda folder: how(folder / file))


def config(**change) -> Callable:
    return model(lambda folder: change_json(folder / "config.json", **change))


def weights(change: Callable) -> Callable:
    """change: {name: tensor}, folder -> None, in place."""

    def on_disk(folder: Path):
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return model(on_disk)


def take_away_a_tensor(tensors: dict, _):
    del tensors[next(name for name in tensors if "layers.2" in name and "weight" in name)]


def fill_with_nan(tensors: dict, *_):
    for tensor in tensors.values():
        tensor.fill_(float("nan"))


def quantise(tensors: dict, folder: Path):
    """As GPTQ leaves it."""
    import torch

    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    method = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    change_json(folder / "config.json", quantization_config=method)


class MakesAFile:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pickled_command(folder: Path):
    (folder / "model.safetensors").unlink()
    file = folder.parent / "home" / "made-by-a-pickle"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(MakesAFile(file)))


def own_code(folder: Path):
    code = f"open({str(folder.parent / 'home' / 'made-by-a-model')!r}, 'w')\nclass C: pass\nM = C\n"
    (folder / "modeling_own.py").write_text(code)
    auto = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    change_json(folder / "config.json", model_type="own", auto_map=auto, architectures=["M"])


def shards(folder: Path):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {}}
    for i, name in enumerate(("model.embed_tokens.weight", "model.norm.weight")):
        index["weight_map"][name] = f"model-0000{i + 1}-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dangling(path: Path):
    path.unlink()
    path.symlink_to("../../blobs/0123456789abcdef")


def larger_vocabulary(folder: Path):
    """The tokenizer knows a token for which there is no embedding."""
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {"content": "Problem", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"id": 151, "normalized": False, "special": True}
    content["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("Problem" + template_text())


def template_text() -> str:
    return (TINY / "chat_template.jinja").read_text()


OWN = r"--model \S*model\b.*"
for kind, says, prepare in [
    ("weights cut in half", OWN, broken("model.safetensors", cut)),
    ("a file of weights that is empty", OWN, broken("model.safetensors", empty)),
    ("an LFS pointer for weights", OWN, broken("model.safetensors", lfs_pointer)),
    ("a web page for weights", OWN, broken("model.safetensors", web_page)),
    ("garbage for weights", OWN, broken("model.safetensors", garbage)),
    ("no weights", OWN, broken("model.safetensors", Path.unlink)),
    ("weights that are a dangling link", OWN, broken("model.safetensors", dangling)),
    ("a pickle that runs a command", OWN, model(pickled_command)),
    ("a model with code of its own", OWN, model(own_code)),
    ("a shard that is missing", OWN, model(shards)),
    (
        "an index of shards cut in half",
        OWN,
        model(lambda m: (shards(m), cut(m / "model.safetensors.index.json"))),
    ),
    ("more layers than weights", OWN, config(num_hidden_layers=6, layer_types=None)),
    ("another hidden size than the weights'", OWN, config(hidden_size=64)),
    ("another vocabulary than the weights'", OWN, config(vocab_size=300)),
    ("a tensor that is missing", OWN, weights(take_away_a_tensor)),
    ("weights that are all NaN", r"(?i)nan|not finite|--model", weights(fill_with_nan)),
    ("no config.json", OWN, broken("config.json", Path.unlink)),
    ("an empty config.json", OWN, broken("config.json", empty)),
    ("config.json cut in half", OWN, broken("config.json", cut)),
    ("a list for config.json", OWN, broken("config.json", lambda f: f.write_text("[1, 2]"))),
    ("an architecture nobody knows", OWN, config(model_type="qwen9", architectures=["Qwen9"])),
    ("a model that is no causal one", OWN, config(model_type="t5", architectures=["T5Model"])),
    ("a quantised model whose library is missing", OWN, weights(quantise)),
    ("heads that do not divide", OWN, config(num_key_value_heads=3)),
    ("an empty folder", OWN, lambda place: (place / "model").mkdir()),
    ("a file where a folder should be", OWN, lambda place: (place / "model").write_text("model")),
    (
        "a token that has no embedding",
        r"--model \S*model\b.*(?i:tok|vocab|embed)",
        model(larger_vocabulary),
    ),
]:
    add("model", kind, says, arguments="--model {place}/model", prepare=prepare)
for kind, says, arguments in [
    ("a folder that does not exist", r"--model \S*/none\b", "--model {place}/none"),
    ("a hub name without a network", "--model no/such-model", "--model no/such-model"),
    ("an address for a hub name", "--model https://", "--model https://huggingface.co/Qwen/Qwen3"),
    ("another run's adapter", r"--model \S*player", "--model {place}/player"),
]:
    add("model", kind, says, arguments=f"{arguments}")


def an_adapter(place: Path):
    (place / "player").mkdir()
    base = {"base_model_name_or_path": str(TINY), "peft_type": "LORA", "r": 4}
    (place / "player" / "adapter_config.json").write_text(json.dumps(base))
    garbage(place / "player" / "adapter_model.safetensors")


MISTAKES[-1].prepare = an_adapter
add("model", "an empty name", "--model", more=("--model", ""))


# ------------------------------------------------------------------ tokenizers and templates
def template(text: str) -> Callable:
    return broken("chat_template.jinja", lambda path: path.write_text(text))


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}"
)
for kind, says, prepare in [
    ("no tokenizer file", r"--model \S*model\b.*(?i:tokenizer)", Path.unlink),
    ("an empty tokenizer file", r"--model \S*model\b.*", empty),
    ("a tokenizer file cut in half", r"--model \S*model\b.*", cut),
    ("an LFS pointer for a tokenizer", r"--model \S*model\b.*", lfs_pointer),
    ("a list for a tokenizer", r"--model \S*model\b.*", lambda path: path.write_text("[]")),
]:
    MISTAKE = {
        "arguments": "--model {place}/model",
        "prepare": broken("tokenizer.json", prepare),
    }
    add("tokenizer and template", kind, says, **MISTAKE)
for kind, says, change in [
    ("tokenizer_config.json cut in half", OWN, broken("tokenizer_config.json", cut)),
    ("no tokenizer_config.json", OWN, broken("tokenizer_config.json", Path.unlink)),
    (
        "a tokenizer class nobody knows",
        OWN,
        broken("tokenizer_config.json", lambda p: change_json(p, tokenizer_class="NoTokenizer")),
    ),
    (
        "no end token",
        r"--model \S*model\b.*(?i:end|eos)",
        broken("tokenizer_config.json", lambda p: change_json(p, eos_token=None)),
    ),
    ("no chat template", r"--model .*template", broken("chat_template.jinja", Path.unlink)),
    ("an empty chat template", r"--model .*template", template("")),
    ("a template with a syntax error", r"--model .*template", template("{% for m in %}{{ m }}")),
    ("a template that is no UTF-8", r"--model", broken("chat_template.jinja", garbage)),
    (
        "a template that refuses everything",
        r"--model .*template",
        template("{{ raise_exception('no') }}"),
    ),
    (
        "a template that calls what is not there",
        r"--model .*template",
        template("{{ strftime_now_and_then('%d') }}" + template_text()),
    ),
    (
        "a template that reaches for Python",
        r"--model .*template",
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    ),
    ("a template without the question", r"--model .*template", template("Hello.")),
]:
    fallback = kind in ("no tokenizer_config.json", "a tokenizer class nobody knows")
    shared = {"ends": "either" if fallback else "refused", "compare": "steps"}
    shared |= {"arguments": "--model {place}/model", "prepare": change}
    add("tokenizer and template", kind, says, **shared)
for kind, script, prepare in [  # scripts that go on where no answer is right
    ("a template without a system role", "tango.py", template(NO_SYSTEM + template_text())),
    ("a template of strictly alternating roles", "mae.py", template(ALTERNATE + template_text())),
    (
        "no padding token",
        "gar.py",
        broken("tokenizer_config.json", lambda p: change_json(p, pad_token=None)),
    ),
    ("no generation_config.json", "spin.py", broken("generation_config.json", Path.unlink)),
]:
    more = {"arguments": "--model {place}/model", "prepare": prepare, "compare": "steps"}
    add("tokenizer and template", kind, "", script, ends="works", **more)


# ------------------------------------------------------------------ checkpoints
def newest(place: Path) -> Path:
    return place / "run" / "checkpoint-2"


def older(place: Path) -> Path:
    return place / "run" / "checkpoint-1"


def in_newest(pattern: str, how: Callable) -> Callable:
    return lambda place: how(sorted(newest(place).glob(pattern))[0])


SAID = r"(?i)checkpoint-2"  # what is wrong with it, and that the one before is taken
for what, pattern in [
    ("an adapter", "*/adapter_model.safetensors"),
    ("an adapter's config", "*/adapter_config.json"),
    ("the optimiser", "optimizer.pt"),
    ("the random numbers", "rng_state.pth"),
    ("the schedule", "scheduler.pt"),
    ("the trainer's state", "trainer_state.json"),
    ("the memory", "memory.json"),
]:
    ways = {"cut in half": cut, "empty": empty, "missing": Path.unlink, "garbage": garbage}
    for way, how in ways.items():
        add(
            "checkpoints",
            f"{what}: {way}",
            SAID,
            start="interrupted",
            ends="either",
            says_if_it_goes_on=SAID,
            prepare=in_newest(pattern, how),
            compare="weights",
        )


def both(how: Callable) -> Callable:
    def prepare(place: Path):
        for folder in (newest(place), older(place)):
            how(folder / "optimizer.pt")

    return prepare


def planted(name: str, *files: str) -> Callable:
    """Somebody else's folder among the checkpoints."""

    def prepare(place: Path):
        (place / "run" / name).mkdir()
        for file in files:
            (place / "run" / name / file).write_text("{}")

    return prepare


def nan_adapter(path: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    fill_with_nan(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def of_another_run(place: Path):
    shutil.rmtree(newest(place))
    shutil.copytree(older(place), newest(place))


for kind, prepare in [
    ("the newest one is an empty folder", planted("checkpoint-3")),
    ("the newest one holds its memory only", planted("checkpoint-3", "memory.json")),
    ("adapters that are NaN", in_newest("*/adapter_model.safetensors", nan_adapter)),
    ("the newest one is an older one, copied", of_another_run),
    (
        "the newest one is a link to nowhere",
        lambda place: (shutil.rmtree(newest(place)), newest(place).symlink_to("none")),
    ),
]:
    add(
        "checkpoints",
        kind,
        r"checkpoint-\d",
        start="interrupted",
        ends="either",
        says_if_it_goes_on=r"checkpoint-\d",
        prepare=prepare,
        compare="weights",
        may_change={"run/checkpoint-3", "run/checkpoint-3/memory.json", "run/checkpoint-2"},
    )
for kind, how in {"cut in half": cut, "missing": Path.unlink}.items():
    says = r"--out \S*run\b.*checkpoint-2"
    add("checkpoints", f"all of them: {kind}", says, start="interrupted", prepare=both(how))
for name in ("checkpoint-best", "checkpoint-", "checkpoint-1-old", "checkpoint-final"):
    add(
        "checkpoints",
        f"a folder named {name} beside them",
        "--out",
        start="interrupted",
        ends="works",
        prepare=planted(name, "adapter.bin"),
        compare="weights",
    )
add(
    "checkpoints",
    "a file named checkpoint-9",
    "--out",
    start="interrupted",
    ends="either",
    prepare=lambda place: (place / "run" / "checkpoint-9").write_text("mine"),
    compare="weights",
)
add(
    "checkpoints",
    "a pickle that runs a command, for an optimiser",
    SAID,
    start="interrupted",
    ends="either",
    says_if_it_goes_on=SAID,
    prepare=lambda place: (newest(place) / "optimizer.pt").write_bytes(
        pickle.dumps(MakesAFile(place / "home" / "made-by-a-checkpoint"))
    ),
    compare="weights",
)


# ------------------------------------------------------------------ the run folder
def in_home(*names: str) -> Callable:
    """Files in a folder of the user's that look like a run's, and are not."""

    def prepare(place: Path):
        for name in names:
            path = place / "home" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"lr": 7}' if name.endswith(".json") else "mine")

    return prepare


LOOKALIKES = {
    "a folder with somebody's README.md and metrics.jsonl": (),
    "a folder with somebody's args.json": ("args.json",),
    "a folder with somebody's checkpoint-7": ("checkpoint-7/model.bin",),
    "a folder with somebody's args.json and checkpoint-7": ("args.json", "checkpoint-7/model.bin"),
    "a folder with somebody's report.html": ("report.html", "curves.png"),
    "a folder with somebody's generator": ("generator/adapter_model.safetensors",),
}
for kind, files in LOOKALIKES.items():
    shared = {"ends": "either", "prepare": in_home(*files)}
    add("run folder", kind, r"--out \S*home", out="home", **shared)
add(
    "run folder",
    "--out . in a folder with files",
    r"--out \.",
    out="home",
    arguments="--out .",
    ends="either",
)
for kind, says, arguments in [
    ("a run folder that is a file", r"--out \S*README.md", "--out {place}/home/README.md"),
    ("a run folder inside of a file", r"--out \S*README.md", "--out {place}/home/README.md/run"),
    ("a run folder in /proc", r"--out /proc", "--out /proc/run"),
    ("a run folder in /dev/null", r"--out /dev/null", "--out /dev/null/run"),
    ("a name that is too long", r"--out \S*xxx", "--out {place}/run/" + "x" * 300),
]:
    add("run folder", kind, says, arguments=arguments)
add(
    "run folder",
    "an empty name of a run folder",
    "--out|in runs/",
    more=("--out", ""),
    ends="either",
    default_out=False,
    out="home/runs",
)
add(
    "run folder",
    "a link to nowhere",
    "--out",
    prepare=lambda place: (place / "run").symlink_to("none/at/all"),
)
add(
    "run folder",
    "a name with spaces, quotes and a smile",
    "",
    ends="works",
    out="run",
    more=("--out", "{place}/run/a 'b' \"c\" \u263a"),
    compare="",
)
OTHERS = {
    "tango.py": "--lr 0.5",
    "prime.py": "--beta 0.5",
    "gar.py": "--steps 5",
    "cure.py": "--seed 7",
    "spin.py": "--iterations 1",
    "mae.py": "--no-quality-gate",
    "azr.py": "--gate off",
    "deepseekmath.py": "--no-meta-reward",
    "vstar.py": "--verifier orm",
    "self_rewarding.py": "--samples 3",
}
for script, arguments in OTHERS.items():
    says = rf"--out \S*run\b.*other arguments.*{arguments.split()[0].replace('--no-', '')}"
    shared = {"start": "interrupted", "arguments": arguments}
    add("run folder", f"{script} with another argument", says, script, **shared)


def another_script(place: Path):
    """The folder is that of a run of prime.py."""
    for name in ("about.json", "args.json"):
        path = place / "run" / name
        if path.exists():
            path.write_text(path.read_text().replace("tango", "prime"))
    (place / "run" / "tango.py").rename(place / "run" / "prime.py")


def change_args(place: Path):
    """What prime.py would have written."""
    another_script(place)
    path = place / "run" / "args.json"
    given = json.loads(path.read_text())
    change_json(path, **{key: None for key in given if "ver" in key or "gen" in key}, beta=0.05)


add(
    "run folder",
    "the folder of another script",
    r"--out \S*run\b",
    "tango.py",
    start="interrupted",
    prepare=change_args,
    may_change={"run/prime.py"},
)
for kind, file, how, ends in [
    ("no args.json", "args.json", Path.unlink, "either"),
    ("an empty args.json", "args.json", empty, "either"),
    ("args.json cut in half", "args.json", cut, "either"),
    ("a list for args.json", "args.json", lambda path: path.write_text("[]"), "either"),
    ("no metrics.jsonl", "metrics.jsonl", Path.unlink, "either"),
    ("garbage for metrics.jsonl", "metrics.jsonl", garbage, "either"),
    (
        "a list among the metrics",
        "metrics.jsonl",
        lambda p: p.write_text("[1]\n" + p.read_text()),
        "either",
    ),
    ("a folder for rollouts.jsonl", "rollouts.jsonl", lambda p: (p.unlink(), p.mkdir()), "either"),
    ("no versions.json", "versions.json", Path.unlink, "works"),
    ("no about.json", "about.json", Path.unlink, "either"),
    ("a broken report.html", "report.html", garbage, "works"),
]:
    compare = "" if "metrics" in file else "weights"
    add(
        "run folder",
        f"{kind} in an interrupted run",
        r"--out \S*run\b|\S*run/",
        start="interrupted",
        ends=ends,
        prepare=lambda place, file=file, how=how: how(place / "run" / file),
        compare=compare,
    )


def half_a_line(place: Path):
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(place / "run" / name, "a") as file:
            file.write('{"step": 3, "sec')


def without_checkpoints(place: Path):
    for folder in (place / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)


add(
    "run folder",
    "half a line of metrics",
    "",
    start="interrupted",
    ends="works",
    prepare=half_a_line,
    compare="weights",
)
for script in SCRIPTS:
    add(
        "run folder",
        f"{script}: a finished run whose checkpoints were deleted",
        r"--out \S*run\b|finished",
        script,
        start="finished",
        ends="either",
        prepare=without_checkpoints,
        compare="weights",
        says_if_it_goes_on="finished",
    )
add(
    "run folder",
    "a finished run once more",
    "",
    "mae.py",
    start="finished",
    ends="works",
    compare="weights",
    says_if_it_goes_on="finished",
)
for script in ("tango.py", "cure.py"):
    add(
        "run folder",
        f"{script}: the same folder twice at a time",
        r"--out \S*run\b",
        script,
        companion="first",
        compare="weights",
        ends="refused",
    )
add(
    "run folder",
    "two runs in the same second",
    r"runs/",
    "spin.py",
    default_out=True,
    companion="together",
    compare="weights",
    ends="either",
)
add(
    "run folder",
    "the folder of a model for a run folder",
    r"--out \S*model",
    "gar.py",
    out="model",
    prepare=model(nothing),
    ends="either",
)


# ------------------------------------------------------------------ arguments
def huge(arguments: str) -> bool:
    return any(len(word) > 6 and word.isdigit() for word in arguments.split())


def at_most(more: int):
    """Bytes that this process may still take: no mistake must take the machine with it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def little():
    """For sizes without an end."""
    at_most(4 * 2**30)
    resource.setrlimit(resource.RLIMIT_CPU, (25, 25))


ARGUMENTS = {
    "tango.py": """
        --solution-tokens 0 | --judgement-tokens 0 | --lr nan | --lr -1 | --lr inf | --alpha nan
        --alpha -1 | --kl nan | --kl -0.1 | --seed -1 | --seed 99999999999999999999
        --gen-steps -1 | --ver-steps -1 | --ver-warmup -1 | --verifier none --generator frozen
        --group-size 1 | --steps 0 | --steps -3 | --lora-rank 0 | --lora-rank 1000000000
        --report-to no-such-tracker | --report-to wandb | --questions 1000000000
        """,
    "prime.py": """
        --prm-lr -1 | --prm-lr nan | --beta nan | --beta 0 | --keep-low 0.9 --keep-high 0.1
        --keep-low nan | --max-refills 0 | --prm-warmup -1 | --solution-tokens -5
        --micro-batch 0 | --micro-batch 7 | --eval-questions 0
        """,
    "gar.py": """
        --slice-tokens 0 | --min-slice-tokens -1 | --silent-share nan | --silent-share -1
        --sft-labels {place}/none.jsonl | --lr 1e400 | --eval-samples 0 | --save-every 0
        --rows-at-once 0 | --steps 1000000000000
        """,
    "cure.py": """
        --time-limit 0 | --time-limit nan | --time-limit inf | --time-limit -1 | --tolerance nan
        --tolerance -1 | --own-tests 0 | --program-tokens 0 | --test-tokens 0 | --group-size 0
        --eval-every -1
        """,
    "spin.py": """
        --questions 0 | --iterations 0 | --iterations 2 | --beta -1 | --last-beta nan
        --last-beta 0 | --opponent-temperature -1 | --opponent-temperature nan
        --questions 16 --micro-batch 3 | --show-every -1
        """,
    "mae.py": """
        --reference-share 2 | --reference-share nan | --reference-share -0.5 | --seed-questions -1
        --pool-size 0 | --difficulty-samples 0 | --silent-share nan | --judgement-tokens 0
        --no-train-proposer --no-train-solver --no-train-judge | --eval-questions 1000000000
        """,
    "azr.py": """
        --seed-tasks 20 --pool-size 10 | --seed-tasks 0 | --leak nan | --leak 2 | --inputs 0
        --references -1 | --difficulty-samples 0 | --time-limit inf | --proposal-tokens 0
        """,
    "deepseekmath.py": """
        --least-valid 9 --analyses 3 | --analyses 0 | --votes 0 | --solutions 0 | --meta-steps -1
        --verifier-steps 0 --generator-steps 0 | --group-size 1 | --analysis-tokens 0
        """,
    "vstar.py": """
        --steps 4 --ver-steps 9 | --steps 4 --iterations 2 | --verifier-in-loop --iterations 2
        --questions 3 | --samples 0 | --candidates 0 | --beta 0 | --rationales 0 | --pool 0
        --step-samples 0
        """,
    "self_rewarding.py": """
        --steps 4 --iterations 3 | --train-judge self-taught --judge-steps 3 | --samples 1
        --readings 0 | --beta nan | --questions 5 | --pool 0 | --iterations 0
        """,
}
for script, lists in ARGUMENTS.items():
    for arguments in lists.replace("\n", "|").split("|"):
        if arguments := arguments.strip():
            flags = [word for word in arguments.split() if word.startswith("--")]
            says = "|".join(flag.replace("--no-", "--(no-)?") for flag in flags)
            add(
                "arguments",
                f"{script} {arguments}".replace("{place}/", ""),
                says,
                script,
                arguments=arguments,
                inside=little if huge(arguments) else nothing,
            )
for script, arguments, says in [
    ("tango.py", "--learning-rate 1", "learning-rate"),
    ("prime.py", "--steps ten", "steps"),
    ("gar.py", "--discriminator cotrained", "discriminator"),
    ("spin.py", "--seed 1.5", "seed"),
    ("mae.py", "--steps 3 --lr", "lr"),
    ("cure.py", "4", "4"),
    ("azr.py", "--gate open", "gate"),
    ("vstar.py", "--verifier prime", "verifier"),
]:
    add("arguments", f"{script} {arguments}", says, script, arguments=arguments, ends="parser")


# ------------------------------------------------------------------ data sets
def rows(script: str, count: int = 60) -> list[dict]:
    if script == "cure.py":
        tests = {"test_input": ["1\n", "2\n"], "test_output": ["2\n", "3\n"]}
        return [{"question": f"Add {i} to x.", **tests} for i in range(count)]
    solution = "<step>1+{0} = {1}.</step>\n<answer>\\boxed{{{1}}}</answer>"
    return [
        {"question": f"1+{i}", "answer": str(1 + i), "reference": solution.format(i, 1 + i)}
        for i in range(count)
    ]


def data(script: str, line: str = "", at: int = 7, drop: tuple = (), **change) -> Callable:
    """{place}/data.jsonl, with one line replaced, or some columns of all rows changed."""

    def prepare(place: Path):
        table = [{k: v for k, v in (row | change).items() if k not in drop} for row in rows(script)]
        lines = [json.dumps(row) for row in table]
        if line:
            lines[at - 1] = line
        text = "\n".join(lines) + "\n"
        (place / "data.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))

    return prepare


def file(write: Callable) -> Callable:
    return lambda place: write(place / "data.jsonl")


FILE, ROW = r"--dataset \S*data\.jsonl", r"--dataset \S*data\.jsonl.*row 7"
DATA = "--dataset {place}/data.jsonl"
QUESTIONS = [script for script in SCRIPTS if script not in ("cure.py", "mae.py", "azr.py")]
"""Scripts that take questions with their answers."""
for kind, says, line in [
    ("half a row", ROW, '{"question": "1+1", "answ'),
    ("a row that is a list", ROW, "[1, 2]"),
    ("a row without an answer", ROW, '{"question": "1+1"}'),
    ("a row without a question", ROW, '{"answer": "2"}'),
    ("an answer that is null", ROW, '{"question": "1+1", "answer": null}'),
    ("an answer that is empty", ROW, '{"question": "1+1", "answer": " "}'),
    ("an answer that is NaN", ROW, '{"question": "1+1", "answer": NaN}'),
    ("an answer that is infinite", ROW, '{"question": "1+1", "answer": Infinity}'),
    ("an answer that is a list", ROW, '{"question": "1+1", "answer": [2]}'),
    ("an answer that is true", ROW, '{"question": "1+1", "answer": true}'),
    ("an answer that is an object", ROW, '{"question": "1+1", "answer": {"value": 2}}'),
    ("a question that is a number", ROW, '{"question": 11, "answer": "2"}'),
    ("half a character", ROW, '{"question": "1+\\ud83d", "answer": "2"}'),
    ("a number of 5,000 digits", ROW, '{"question": "1+1", "answer": ' + "1" * 5000 + "}"),
    ("brackets 100,000 deep", ROW, '{"question": "1+1", "answer": ' + "[" * 100_000),
]:
    script = QUESTIONS[len(MISTAKES) % len(QUESTIONS)]
    add("data sets", kind, says, script, arguments=DATA, prepare=data(script, line))
TESTS = '"test_input": ["1"], "test_output": ["2"]'
MBPP = '"text": "Add.", "code": "def f(x): return x"'
for kind, says, line in [
    ("a task without tests", ROW, '{"question": "Add."}'),
    (
        "a task with more inputs than outputs",
        ROW,
        '{"question": "A", "test_input": ["1", "2"], "test_output": ["1"]}',
    ),
    (
        "a test whose input is a number",
        ROW,
        '{"question": "A", "test_input": [1], "test_output": ["1"]}',
    ),
    (
        "a test that expects nothing",
        ROW,
        '{"question": "A", "test_input": ["1"], "test_output": [""]}',
    ),
    (
        "half a character in a test",
        ROW,
        '{"question": "A", "test_input": ["\\ud83d"], "test_output": ["1"]}',
    ),
    ("tests that are a string", ROW, '{"question": "A", "test_input": "1", "test_output": "2"}'),
    (
        "an MBPP row whose code is null",
        ROW,
        '{"text": "Add.", "code": null, "test_list": ["assert f(1) == 1"]}',
    ),
    (
        "an MBPP row whose code is a list",
        ROW,
        '{"text": "Add.", "code": ["x"], "test_list": ["assert f(1) == 1"]}',
    ),
    ("an MBPP row whose tests are a string", ROW, f'{{{MBPP}, "test_list": "assert f(1) == 1"}}'),
    ("an MBPP row whose tests are numbers", ROW, f'{{{MBPP}, "test_list": [1, 2]}}'),
    ("an MBPP row without tests", ROW, f'{{{MBPP}, "test_list": []}}'),
]:
    add("data sets", kind, says, "cure.py", arguments=DATA, prepare=data("cure.py", line))
add(
    "data sets",
    "an MBPP assertion 3,000 brackets deep",
    ROW,
    "cure.py",
    ends="either",
    arguments=DATA,
    prepare=data(
        "cure.py", f'{{{MBPP}, "test_list": ["assert f({"[" * 3000}1{"]" * 3000}) == 1"]}}'
    ),
)
for kind, says, prepare in [
    ("a file that does not exist", FILE, nothing),
    ("an empty file", FILE, file(empty)),
    ("a file of white space", FILE, file(lambda p: p.write_text("\n \n\n"))),
    ("a folder named like a file", FILE, file(Path.mkdir)),
    ("a pipe named like a file", FILE, file(os.mkfifo)),
    ("a link to nowhere for data", FILE, file(lambda p: p.symlink_to("none"))),
    ("garbage for data", FILE, file(garbage)),
    ("UTF-16", FILE, file(lambda p: p.write_text('{"question": "1"}\n', encoding="utf-16"))),
    ("a table of comma-separated values", FILE, file(lambda p: p.write_text("question,answer\n"))),
    ("a web page for data", FILE, file(web_page)),
    ("one row", FILE, file(lambda p: p.write_text('{"question": "1+1", "answer": "2"}\n'))),
    (
        "one question, sixty times",
        FILE,
        file(lambda p: p.write_text('{"question": "1+1", "answer": "2"}\n' * 60)),
    ),
]:
    add("data sets", kind, says, arguments=DATA, prepare=prepare)
for kind, says, script, arguments, prepare in [
    (
        "a hub data set without a network",
        "--dataset no/such-data",
        "mae.py",
        "--dataset no/such-data",
        nothing,
    ),
    ("math questions for programs", ROW.replace("7", r"\d+"), "cure.py", DATA, data("gar.py")),
    ("programs for math questions", ROW.replace("7", r"\d+"), "prime.py", DATA, data("cure.py")),
    (
        "human answers that miss the format",
        FILE,
        "spin.py",
        DATA,
        data("spin.py", reference="It is what it is."),
    ),
    ("no human answers", FILE, "spin.py", DATA, data("spin.py", drop=("reference",))),
    ("no reference solutions", FILE, "gar.py", DATA, data("gar.py", drop=("reference",))),
]:
    add("data sets", kind, says, script, arguments=arguments, prepare=prepare)
LABELS = "--sft-labels {place}/data.jsonl"
for kind, line in [
    ("a label that is neither YES nor NO", '{"question": "1", "slice": "1", "label": "MAYBE"}'),
    ("a label without a slice", '{"question": "1", "label": "YES"}'),
    ("a label that is a list", '{"question": "1", "slice": "1", "label": ["YES"]}'),
]:
    good = {"question": "1+1", "slice": "1+1 = 2", "label": "YES"}
    text = f"{json.dumps(good)}\n" * 6 + line + "\n"
    add(
        "data sets",
        kind,
        r"--sft-labels \S*data\.jsonl.*row 7",
        "gar.py",
        arguments=LABELS,
        prepare=file(lambda path, text=text: path.write_text(text)),
    )


# ------------------------------------------------------------------ interruptions
def signals(pattern: str, *numbers: int) -> Callable:
    """The first one when it has printed `pattern`, the next as soon as that is answered."""

    def meanwhile(child, _):
        child.wait_for(pattern)
        for number in numbers:
            child.send(number)
            child.wait_for("stopping")

    return meanwhile


STOPPED = r"(?i)stopp|interrupt|terminated"
BEGUN = r"training and \d+ held-out questions"
for kind, pattern, numbers, ends in [
    ("Ctrl-C in step 2", r"step 1/", [signal.SIGINT], "stopped"),
    ("Ctrl-C while the model is loaded", BEGUN, [signal.SIGINT], "stopped"),
    ("Ctrl-C in the first evaluation", r"step 0|questions, in", [signal.SIGINT], "stopped"),
    ("Ctrl-C twice", r"step 1/", [signal.SIGINT, signal.SIGINT], "stopped"),
    ("SIGTERM in step 2", r"step 1/", [signal.SIGTERM], "stopped"),
    ("SIGTERM while the model is loaded", BEGUN, [signal.SIGTERM], "stopped"),
    ("SIGTERM twice", r"step 1/", [signal.SIGTERM, signal.SIGTERM], "stopped"),
    ("SIGTERM, then Ctrl-C", r"step 1/", [signal.SIGTERM, signal.SIGINT], "stopped"),
    ("the terminal closed (SIGHUP)", r"step 1/", [signal.SIGHUP], "stopped"),
    ("killed in step 3", r"step 2/", [signal.SIGKILL], "killed"),
    ("killed while the model is loaded", BEGUN, [signal.SIGKILL], "killed"),
    ("out of memory's SIGKILL after the first evaluation", r"step 0", [signal.SIGKILL], "killed"),
]:
    add(
        "interruptions",
        kind,
        STOPPED,
        ends=ends,
        meanwhile=signals(pattern, *numbers),
        resumes=True,
        compare="weights",
    )
for script in SCRIPTS[1:]:
    for name, number in (("Ctrl-C", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
        add(
            "interruptions",
            f"{script}: {name} in step 2",
            STOPPED,
            script,
            ends="stopped",
            meanwhile=signals(r"step 1/", number),
            resumes=True,
            compare="weights",
        )


def after(seconds: float, number: int) -> Callable:
    def meanwhile(child, _):
        time.sleep(seconds)
        child.send(number)

    return meanwhile


for seconds, script in [(0.5, "tango.py"), (1.5, "cure.py"), (3.0, "prime.py")]:
    add(
        "interruptions",
        f"Ctrl-C {seconds} s after the start, while libraries are imported",
        STOPPED,
        script,
        ends="killed",
        meanwhile=after(seconds, signal.SIGINT),
        fresh=True,
        resumes=True,
        compare="weights",
    )
add(
    "interruptions",
    "SIGTERM while libraries are imported",
    STOPPED,
    "gar.py",
    ends="killed",
    meanwhile=after(1.0, signal.SIGTERM),
    fresh=True,
    resumes=True,
    compare="weights",
)


def while_saving(number: int) -> Callable:
    """Killed when the folder of a checkpoint is there, and its last file is not."""

    def meanwhile(child, place: Path):
        folder = place / "run" / f"checkpoint-{number}"
        while child.running() and not folder.exists():
            pass
        child.send(signal.SIGKILL)

    return meanwhile


def delete_the_run(child, place: Path):
    child.wait_for(r"step 1/")
    shutil.rmtree(place / "run", ignore_errors=True)


def delete_a_checkpoint(child, place: Path):
    child.wait_for(r"step 2/")
    shutil.rmtree(place / "run" / "checkpoint-1", ignore_errors=True)


def nobody_reads():
    """As in `python tango.py | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


for number, script in [(1, "tango.py"), (2, "spin.py"), (3, "cure.py")]:
    add(
        "interruptions",
        f"killed while checkpoint {number} of 3 is written",
        "",
        script,
        ends="killed",
        meanwhile=while_saving(number),
        resumes=True,
        compare="weights",
    )
add(
    "interruptions",
    "the run folder is deleted meanwhile",
    r"run\b",
    "gar.py",
    meanwhile=delete_the_run,
)
add(
    "interruptions",
    "a checkpoint is deleted meanwhile",
    r"run\b",
    "mae.py",
    meanwhile=delete_a_checkpoint,
    ends="works",
    compare="weights",
)
add(
    "interruptions",
    "nobody reads its output",
    r"(?i)output|pipe",
    "prime.py",
    ends="killed",
    inside=nobody_reads,
    resumes=True,
    compare="weights",
)
add(
    "interruptions",
    "stdout and stderr are closed",
    "",
    "cure.py",
    ends="either",
    inside=lambda: [os.close(1), os.close(2)],
    compare="weights",
)


# ------------------------------------------------------------------ disk and permissions
def without_privileges():
    """Root's capabilities would open every file. The empty sets, version 3 of the interface."""
    ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def small_disk(size: str) -> Callable:
    def prepare(place: Path):
        (place / "run").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place / "run")]
        if subprocess.run(command, capture_output=True).returncode:
            raise Impossible("no right to mount a small disk")

    return prepare


def larger_disk(place: Path, purpose: str = ""):
    where = str(place / "run")
    if purpose:  # somebody has made room
        subprocess.run(["mount", "-o", "remount,size=200m", where], capture_output=True)
    elif os.path.ismount(where):
        subprocess.run(["umount", "-l", where], capture_output=True)


def no_file_above(size: int) -> Callable:
    """`ulimit -f`, and quotas like it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


FULL = r"(?i)(space|full|written|disk)"
for size, script in [
    ("4k", "prime.py"),
    ("300k", "tango.py"),
    ("2m", "gar.py"),
    ("3m", "mae.py"),
    ("6m", "tango.py"),
    ("9m", "prime.py"),
]:
    add(
        "disk and permissions",
        f"{script}: a disk of {size}",
        FULL,
        script,
        prepare=small_disk(size),
        clean_up=larger_disk,
        resumes=True,
        compare="weights",
    )
for size, script in [(5000, "spin.py"), (20_000, "tango.py"), (300_000, "mae.py")]:
    add(
        "disk and permissions",
        f"{script}: no file above {size:,} bytes (ulimit -f)",
        r"(?i)large|written|space|full|disk",
        script,
        inside=no_file_above(size),
        resumes=False,
    )


def mode(name: str, bits: int) -> Callable:
    def prepare(place: Path):
        (place / name).mkdir(exist_ok=True)
        (place / name).chmod(bits)

    return prepare


NO_RIGHT = {"inside": without_privileges}
for kind, says, how in [
    ("a run folder that cannot be written", r"--out \S*run\b", {"prepare": mode("run", 0o555)}),
    ("a run folder that cannot be entered", r"--out \S*run\b", {"prepare": mode("run", 0o600)}),
    (
        "a folder above it that cannot be written",
        r"--out \S*run\b",
        {"prepare": mode("locked", 0o555), "arguments": "--out {place}/locked/run"},
    ),
]:
    add("disk and permissions", kind, says, **how, **NO_RIGHT)
for kind, name, bits, ends in [
    ("metrics.jsonl that cannot be written", "metrics.jsonl", 0o444, "either"),
    ("metrics.jsonl that cannot be read", "metrics.jsonl", 0o200, "refused"),
    ("args.json that cannot be read", "args.json", 0o200, "refused"),
    ("a newest checkpoint that cannot be entered", "checkpoint-2", 0o000, "either"),
    ("an optimiser that cannot be read", "checkpoint-2/optimizer.pt", 0o000, "either"),
    ("an old checkpoint that cannot be deleted", "checkpoint-1", 0o555, "either"),
]:
    add(
        "disk and permissions",
        kind,
        r"--out \S*run\b|\S*run/",
        start="interrupted",
        ends=ends,
        prepare=lambda place, n=name, b=bits: (place / "run" / n).chmod(b),
        compare="weights",
        **NO_RIGHT,
    )


def unreadable(path: str, make: Callable) -> Callable:
    def prepare(place: Path):
        make(place)
        (place / path).chmod(0)

    return prepare


add(
    "disk and permissions",
    "data that cannot be read",
    FILE,
    "spin.py",
    arguments=DATA,
    prepare=unreadable("data.jsonl", data("spin.py")),
    **NO_RIGHT,
)
add(
    "disk and permissions",
    "weights that cannot be read",
    OWN,
    "mae.py",
    arguments="--model {place}/model",
    prepare=unreadable("model/model.safetensors", model(nothing)),
    **NO_RIGHT,
)
add(
    "disk and permissions",
    "a model folder that cannot be entered",
    OWN,
    "gar.py",
    arguments="--model {place}/model",
    prepare=unreadable("model", model(nothing)),
    **NO_RIGHT,
)
add(
    "disk and permissions",
    "too few open files (ulimit -n)",
    r"(?i)open files|ulimit|limit",
    "tango.py",
    inside=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12)),
)
add(
    "disk and permissions",
    "a home folder that cannot be written",
    "",
    "prime.py",
    ends="works",
    inside=lambda: (without_privileges(), os.environ.update(HOME="/proc", HF_HOME="/proc/hf")),
    compare="weights",
)
add(
    "disk and permissions",
    "no temporary folder",
    "",
    "cure.py",
    ends="works",
    inside=lambda: os.environ.update(TMPDIR="/none"),
    compare="weights",
)


assert len({case.name for case in MISTAKES}) == len(MISTAKES), "two kinds have one name"
