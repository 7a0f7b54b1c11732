"""common/fast/vllm.py, on a small server in a thread, and on vLLM itself where it is installed.

The small server reads a published folder by PEFT alone and answers by our sampler, from its own
copy of the small model.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from common.core.errors import UserError
from common.core.model import tokenize
from common.fast import vllm
from common.fast.sampling import sample
from common.run.models import load_model
from common.tiny import EMBEDDED

import pytest
import torch
from conftest import (
    evaluated_once,
    gradient,
    keys,
    make_trainer,
    module_of,
    perturb,
    refused,
    relative,
    run_here,
    run_module,
    small,
    steps_of,
    trained_adapters,
)
from peft import PeftModel
from trainers import close, logged, some_rows
from transformers import AutoModelForCausalLM

NO_SUCH_PATH = {"detail": "Not Found"}  # as vLLM says it


# ------------------------------------------------------------------ a small server
class Small(ThreadingHTTPServer):
    """Answers as vLLM does. `asked` holds the bodies of all requests, `told` the names of all
    adapters that were loaded or unloaded; `broken` (status, answer) is what it answers instead.
    """

    daemon_threads, request_queue_size = True, 256

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.one_at_a_time, self.loaded, self.asked, self.told = threading.Lock(), {}, [], []
        self.length, self.rank, self.may_load, self.broken, self.delay = 512, 64, True, None, 0
        self.base = self.a_base()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def a_base(self):
        return AutoModelForCausalLM.from_pretrained(EMBEDDED["tiny"], dtype=torch.float32)

    def stop(self):
        self.shutdown()
        self.server_close()
        with self.one_at_a_time:  # what is under way
            pass

    def handle_error(self, *_):
        """A client that has stopped listening is no news."""

    def models(self):
        mine = {"id": "tiny-base", "parent": None, "max_model_len": self.length}
        return 200, {"data": [mine, *({"id": name, "parent": "tiny-base"} for name in self.loaded)]}

    def load(self, lora_name, lora_path):
        rank = json.loads(Path(lora_path, "adapter_config.json").read_text())["r"]
        if not self.may_load:
            return 404, NO_SUCH_PATH
        if lora_name in self.loaded:
            return 400, failure(f"The lora adapter '{lora_name}' has already been loaded.")
        if rank > self.rank:
            return 500, failure(f"LoRA rank {rank} is greater than max_lora_rank {self.rank}.")
        self.loaded[lora_name] = PeftModel.from_pretrained(self.a_base(), lora_path)
        self.told.append(("load", lora_name))
        return 200, {}

    def unload(self, lora_name):
        self.told.append(("unload", lora_name))
        return (200, {}) if self.loaded.pop(lora_name, None) else (404, failure("not found"))

    def complete(self, **body):
        self.asked.append(body)
        name, ends = body["model"], body["stop_token_ids"]
        if name not in ("tiny-base", *self.loaded):
            return 404, failure(f"The model `{name}` does not exist.")
        model = self.loaded.get(name, self.base)
        limits = body["max_tokens"], body["temperature"], ends
        [ids], [logps] = sample(model, [body["prompt"]], *limits, [body["seed"]])
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logps}}
        choice["finish_reason"] = "stop" if ids[-1] in ends else "length"
        return 200, {"choices": [choice]}


def failure(message: str) -> dict:
    return {"error": {"message": message}}


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(*self.server.models())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kinds = {"completions": self.server.complete, "load_lora_adapter": self.server.load}
        kinds["unload_lora_adapter"] = self.server.unload
        with self.server.one_at_a_time, torch.random.fork_rng(devices=[]):
            time.sleep(self.server.delay)
            kind = self.path.removeprefix("/v1/")
            broken = self.server.broken if kind == "completions" else None
            answer = broken or kinds[kind](**body)
        self.say(*answer)  # not before: the client may draw random numbers at once

    def say(self, status: int, answer):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    one = Small()
    yield one
    one.stop()


@pytest.fixture
def asking(server, tmp_path):
    """A trainer whose two players are two other models than the base, on the small server."""
    limits = {"solution_tokens": 20, "judgement_tokens": 24}
    trainer = make_trainer(tmp_path, rollouts=server.url, **limits)
    perturb(trainer, 0.3)
    return trainer


def own(trainer, name, prompts, prefix=()) -> list[list[int]]:
    """Greedy, by the trainer's own sampler."""
    ids = tokenize(prompts, trainer.processing_class)
    ids = [[*one, *more] for one, more in zip(ids, prefix or [()] * len(ids))]
    with trainer.playing(name):
        ends, limit = trainer.eos_token_ids, trainer.player_named(name).max_tokens
        return trainer.engine.generate(trainer.model, ids, limit, 0.0, ends, keys(len(ids)))[0]


def prompts_of(trainer, count=6) -> list:
    return [row["prompt"] for row in trainer.train_dataset][:count]


# ------------------------------------------------------------------ who is asked
def test_two_players_write_what_they_write_here(asking, server):
    """Token for token, greedy, of both adapters and of the base, whoever's name is called."""
    prompts, found = prompts_of(asking, 3), {}
    for name in ("generator", "verifier", "generator"):
        found[name] = asking.generate_ids(name, prompts, greedy=True)
        assert found[name] == own(asking, name, prompts)
    with asking.playing(None):  # as genrm.py and raro.py do
        base = asking.generate_ids("generator", prompts, greedy=True)
        assert base == own(asking, "generator", prompts)
    assert base != found["generator"] != found["verifier"] != base
    names = list(dict.fromkeys(body["model"] for body in server.asked))
    assert [name.split("-")[0] for name in names] == ["generator", "verifier", "tiny"]
    prefix = [ids[: 1 + i % 3] for i, ids in enumerate(found["verifier"])]
    rest = asking.generate_ids("verifier", prompts, greedy=True, prefix=prefix)
    assert rest == own(asking, "verifier", prompts, prefix)


def test_what_is_asked_is_what_is_scored(asking, server):
    """Every row in its place: the log-probs of the server are the trainer's. The whole vocabulary,
    our end tokens, and the row's key as its seed: so a row's text depends on nothing else, and is
    the same again in the same call of the same step.
    """
    rows = some_rows(asking, 8)
    asking.sample_calls = 0
    batch = asking.rollout("generator", rows)
    logps = asking.log_probs("generator", batch)
    close(batch.sampled_logps, logps, 1e-4)
    assert (logps != 0).any(1).all() and len(server.asked) == 8
    texts = batch.texts
    assert any(len(set(texts[i : i + 4])) > 1 for i in range(0, 8, 4)), "one seed for all"
    for body in server.asked:
        assert (body["top_p"], body["top_k"], body["min_p"]) == (1, -1, 0)
        assert (body["repetition_penalty"], body["temperature"]) == (1, 1.0)
        assert body["stop_token_ids"] == asking.eos_token_ids and body["ignore_eos"]
    assert len({body["seed"] for body in server.asked}) == 8
    asking.sample_calls = 0
    assert asking.rollout("generator", rows).texts == texts
    assert asking.rollout("generator", rows).texts != texts
    ids = tokenize([row["prompt"] for row in rows], asking.processing_class)
    limits, its = (8, 1.0, asking.eos_token_ids), keys(8)
    with asking.playing("generator"):
        whole = asking.sampler.generate(asking.model, ids, *limits, its)
        part = asking.sampler.generate(asking.model, ids[:3:-1], *limits, its[:3:-1])
    assert part[0] == whole[0][:3:-1]


def test_a_new_version_answers_after_an_update_and_only_then(asking, server):
    """The version before is never asked again, and gone; the other player's stays."""
    prompts = prompts_of(asking, 3)
    for name in ("generator", "verifier", "verifier", "generator"):
        asking.generate(name, prompts)
    assert [what for what, _ in server.told] == ["load", "load"]
    first, verifiers = (name for _, name in server.told)
    batch = asking.rollout("generator", some_rows(asking))
    batch.advantages = torch.linspace(-1, 1, 8)
    before = len(server.asked)
    asking.create_optimizer()
    asking.update(batch)
    assert logged(asking)["co/sampler_gap"] < 1e-4
    found = asking.generate_ids("generator", prompts, greedy=True)
    assert found == own(asking, "generator", prompts)
    (_, second), gone = server.told[2:]
    assert gone == ("unload", first) and second != first
    assert {body["model"] for body in server.asked[before:]} == {second}
    assert set(server.loaded) == {second, verifiers}
    folders = {path.name for path in asking.sampler.folder.glob("*/*")}
    assert folders == {second, verifiers}
    asking.sampler.forget()
    assert not server.loaded and not asking.sampler.folder.exists()


def test_of_two_processes_one_publishes(asking, server):
    """They have the same weights; here two clients in one process stand for them."""
    other = vllm.Server(server.url, asking.args.output_dir, asking.sampler.word)
    ids = tokenize(prompts_of(asking), asking.processing_class)
    limits = 8, 0.0, asking.eos_token_ids, keys(len(ids))
    with asking.playing("generator"), ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(s.generate, asking.model, ids, *limits) for s in (asking.sampler, other)
        ]
    assert both[0].result() == both[1].result() and [what for what, _ in server.told] == ["load"]
    perturb(asking, 0.03)
    with asking.playing("generator"):
        other.generate(asking.model, ids, *limits)
        asking.sampler.generate(asking.model, ids, *limits)
    assert [what for what, _ in server.told] == ["load", "load", "unload"]


# ------------------------------------------------------------------ the loss
def test_the_weight_of_a_token_is_truncated_importance_sampling(asking, monkeypatch):
    """The gradient with it is the one with advantages times min(p_trainer / p_server, 2); without
    the argument nothing changes.
    """
    monkeypatch.setattr(vllm, "LARGEST_GAP", math.inf)  # the run would end at such a gap
    batch = asking.rollout("generator", some_rows(asking))
    mask, A = batch.completion_mask, torch.linspace(-1, 1, 8)
    batch.advantages, exact = A, batch.sampled_logps
    batch.sampled_logps = exact + torch.linspace(-1.5, 1, mask.numel()).view(mask.shape) * mask
    logps = asking.log_probs("generator", batch).double()
    ratios = (logps - batch.sampled_logps).exp().tolist()
    ratio = torch.tensor([[min(x, 2.0) for x in row] for row in ratios])
    assert (ratio == 2).any() and (ratio < 1).any()
    plain = gradient(asking, batch)
    by_hand = gradient(asking, dataclasses.replace(batch, advantages=A[:, None] * ratio))
    asking.clip_max = 2.0
    weighted = gradient(asking, batch)
    assert relative(weighted, by_hand) < 1e-5 < 1e-2 < relative(weighted, plain)
    asking.clip_max = None
    assert relative(gradient(asking, dataclasses.replace(batch, sampled_logps=exact)), plain) == 0


# ------------------------------------------------------------------ refusals
NO_MODELS = [[], ["hello"], {"a": 1}, [{"id": "a", "max_model_len": None}]]
NO_MODELS = [*({"data": data} for data in NO_MODELS), [], b"<html>", b"[" * 100_000]


@pytest.mark.parametrize("answer", NO_MODELS)
def test_who_listens_is_no_vllm(server, answer):
    server.models = lambda: (200, answer)
    assert "not a vLLM server" in refused("tango.py", "--rollouts", f"{server.url}/v1/")


def bent(factor: float = 2):
    """Another model with the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED["tiny"], dtype=torch.float32)
    model.model.norm.weight.data *= factor
    return model


@pytest.mark.parametrize(
    "broken, sentence",
    [
        ({"may_load": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2"),
        ({"length": 100}, "--max-model-len 100"),
        ({"a_base": bent}, "another base"),
    ],
)
def test_what_the_server_cannot_do_is_a_sentence_before_the_run(server, tmp_path, broken, sentence):
    vars(server).update(broken)
    trainer = make_trainer(tmp_path, rollouts=server.url)
    with pytest.raises(UserError, match=sentence) as error:
        trainer.sampler.check(trainer)
    assert str(error.value).startswith(f"--rollouts {server.url}: ")


def choice(**other):
    """What answers the first question to a server, but for what is other."""
    ids = other.pop("token_ids", [5] * 32)
    logps = {"token_logprobs": other.pop("logps", [-1.0] * 32)}
    one = {"index": 0, "token_ids": ids, "logprobs": logps, "finish_reason": "length"} | other
    return 200, {"choices": [one]}


REFUSED = [
    ((400, failure("Token id 7 is out of vocabulary")), "Token id 7 is out"),
    ((404, failure("The model does not exist.")), "does not exist"),
    ((500, b"<html>busy"), "busy"),
]
WRONG = [
    *((200, text) for text in (b"", b"hello", b"\xff", b"[" * 100_000)),
    *(
        (200, odd)
        for odd in ([], None, {}, {"choices": None}, {"choices": [None]}, {"choices": []})
    ),
    (200, {"choices": choice()[1]["choices"] * 2}),
    *(choice(token_ids=ids) for ids in (None, [], 5, [5] * 31, [5] * 33)),
    *(choice(token_ids=[5, i] * 16) for i in (5.0, True, -1, 10**30, None)),
    *(choice(logps=[x] * 32) for x in (math.nan, -math.inf, 50.0, None, "-1", True, -(10**400))),
    *(choice(logprobs=x) for x in (None, 1, {}, {"token_logprobs": None})),
    *(choice(finish_reason=x) for x in ("abort", "stop", None)),
    *(choice(token_ids=[5] * n, logps=[-1.0] * n) for n in (9, 40)),
]


def test_a_wrong_answer_is_a_sentence(asking, server):
    asking.sampler.check(asking)
    end, limit = asking.eos_token_ids[0], 32
    early = choice(token_ids=[5, end] * 16), choice(token_ids=[end] * limit, finish_reason="stop")
    for broken, sentence in [*REFUSED, *((answer, "this is no") for answer in (*WRONG, *early))]:
        server.broken = broken
        with pytest.raises(UserError, match=sentence) as error:
            asking.sampler.check(asking)
        assert str(error.value).startswith(f"--rollouts {server.url}: "), (broken, error)


# ------------------------------------------------------------------ what goes wrong later
def test_another_adapter_is_noticed_in_the_update_that_trains_on_its_texts(asking, server):
    """The server answers from another adapter than the one whose name it is asked for."""
    asking.create_optimizer()
    asking.generate("verifier", prompts_of(asking, 1))
    old = server.loaded[server.told[0][1]]
    asking.sampler.check(asking)
    answers = server.complete

    def outdated(**body):
        server.loaded = dict.fromkeys(server.loaded, old)
        return answers(**body)

    def update():
        batch = asking.rollout("generator", some_rows(asking))
        batch.advantages = torch.linspace(-1, 1, 8)
        asking.update(batch)
        asking.log({})

    asking.add_callback(asking.sampler)
    update()
    server.complete = outdated
    with pytest.raises(UserError, match="log-probs are now .* another adapter"):
        update()


def test_a_gap_that_is_more_than_rounding_ends_the_run(asking):
    for logs in (None, {}, {"co/sampler_gap": 0.1}):
        asking.sampler.on_log(None, None, None, logs)
    for gap in (0.27, math.nan):
        with pytest.raises(UserError, match=f"now {gap} nats"):
            asking.sampler.on_log(None, None, None, {"co/sampler_gap": gap})


def test_a_server_that_takes_no_notice_of_seeds_is_refused(asking, server):
    """Three rows of a prompt get one text, of four. What is likely may come four times."""
    answers, seeds = server.complete, []

    def draws_once(**body):
        seeds.append(body["seed"])
        return answers(**body | {"seed": seeds[0] if len(seeds) <= 3 else body["seed"]})

    asked = tokenize(prompts_of(asking, 1) * 4, asking.processing_class), 20
    asked = *asked, 3.0, asking.eos_token_ids, keys(4)  # texts that hardly come twice
    with asking.playing("generator"):
        asking.sampler.generate(asking.model, *asked)
        server.complete = draws_once
        with pytest.raises(UserError, match="3 of 4 completions of a prompt are the same"):
            asking.sampler.generate(asking.model, *asked)
    likely = [5, asking.eos_token_ids[0]], [-2.0, -0.1]
    for count in (2, 4):
        asking.sampler.check_seeds([[1]] * count, [likely] * count)
    asking.sampler.check_seeds([[n] for n in range(40)], [likely] * 40)  # of 40 prompts
    with pytest.raises(UserError, match="40 of 40 completions of a prompt"):
        asking.sampler.check_seeds([[1]] * 40, [likely] * 40)


def test_a_server_that_hangs_or_goes_away_ends_the_run(asking, server, monkeypatch):
    asking.generate("generator", prompts_of(asking, 1))  # which publishes
    monkeypatch.setattr(vllm, "TIMEOUT", (10, 0.2))
    server.delay = 0.5
    with pytest.raises(UserError, match="no answer to /v1/completions .*ReadTimeout"):
        asking.generate("generator", prompts_of(asking, 1))
    server.stop()
    with pytest.raises(UserError, match="no answer to /v1/completions .*; start the server again"):
        asking.generate("generator", prompts_of(asking, 1))


def test_a_run_asks_the_server_only_and_the_gap_is_rounding(
    server, tmp_path, monkeypatch, no_report
):
    """Training and evaluation. In the second step the server has been started again and knows no
    adapters: that costs this step only. Another base is refused when the run resumes.
    """
    monkeypatch.setattr("common.fast.generate", None)
    more = "--steps 2 --questions 1 --eval-samples 1 --eval-questions 1 --save-every 1 --rollouts"
    command = small("tango.py", tmp_path / "run", *more.split(), server.url)
    answers, right = server.complete, server.a_base

    def restarts(**body):
        if (tmp_path / "run" / "checkpoint-1").exists():
            server.loaded = {}
        return answers(**body)

    server.complete = restarts
    said = refused("tango.py", *command)
    assert re.search(rf"{server.url}: it refuses a request: The model `.*` does not exist", said)
    assert f"safe: resume with the same command and --out {tmp_path / 'run'}." in said
    server.complete, server.a_base = answers, lambda: bent(0.2)
    said = refused("tango.py", *command)
    assert "nats a token from those of --model" in said and "another base" in said
    server.a_base, server.loaded = right, {}
    assert "resumes from checkpoint-1" in run_here("tango.py", *command)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 and all(0 <= row["co/sampler_gap"] < 1e-4 for row in steps)
    assert {body["temperature"] for body in server.asked} == {0.0, 1.0}


# ------------------------------------------------------------------ vLLM itself
@pytest.fixture(scope="module")
def real(request, tmp_path_factory):
    """(URL of a vLLM server of SmolLM2-135M on the CPU, in float32; that model's folder)"""
    python = os.environ.get("DUET_VLLM")
    if not python:
        pytest.skip("no vLLM: DUET_VLLM names no Python that has it (.ci/run makes one)")
    smollm2 = request.getfixturevalue("smollm2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += "--host 127.0.0.1 --dtype float32 --max-model-len 2048 --enforce-eager".split()
    command += "--enable-lora --max-loras 2 --max-lora-rank 16 --port".split() + [port]
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    # its threads spin while they wait, and with ours on two cores all of them would
    more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"}
    more |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    said, url = tmp_path_factory.mktemp("vllm") / "said", f"http://127.0.0.1:{port}"
    with open(said, "w") as file:
        server = subprocess.Popen(command, env=os.environ | more, stdout=file, stderr=file)
    try:
        until = time.time() + 900
        while True:
            with contextlib.suppress(UserError):
                vllm.find_base(url)
                break
            if server.poll() is not None or time.time() > until:  # nothing of ours is in it yet
                pytest.skip(f"vLLM does not start on this machine: {said.read_text()[-500:]}")
            time.sleep(1)
        yield url, smollm2
    finally:
        server.terminate()
        server.wait()


def test_on_vllm_two_players_learn(real, tmp_path, monkeypatch, no_report):
    """Two adapters write, greedy, what they write here; a changed one what it would write now; and
    a run of tango.py is stopped, and resumes.
    """
    url, smollm2 = real
    model, tokenizer = load_model(str(smollm2), ["generator", "verifier"], 16, False, 0)
    asked, ends = ["What is 2 + 3?", "Name a colour.", "Who are you?"], [2]
    assert tokenizer.eos_token_id in ends
    prompts = tokenize([[{"role": "user", "content": text}] for text in asked], tokenizer)
    client, written = vllm.Server(url, tmp_path, "test"), []
    perturb(SimpleNamespace(model=model))
    for name in ("generator", "verifier", "generator"):
        model.set_adapter(name)
        asked = model, prompts * 2, 12, 0.0, ends, keys(2 * len(prompts))
        theirs, ours = client.generate(*asked), sample(*asked)
        assert theirs[0] == ours[0]
        for one, other in zip(theirs[1], ours[1]):
            close(torch.tensor(one), torch.tensor(other), 1e-3)
        written.append(theirs[0])
        for parameter_name, p in model.named_parameters():
            if "lora_B.generator" in parameter_name and len(written) == 2:
                p.data *= 2  # an update
    assert len({str(ids) for ids in written}) == 3
    ids, logps = client.generate(model, prompts[:1] * 4, 12, 1.0, ends, keys(4))
    assert len({str(row) for row in ids}) > 1  # a seed for each row of a group
    client.forget()

    tango, turns = module_of("tango.py"), []
    odd = lambda completions, **_: [len(c[0]["content"]) % 2.0 for c in completions]  # noqa: E731
    odd.__name__ = "verdict_reward"
    monkeypatch.setattr(tango, "verdict_reward", odd)  # that a model which knows no format learns
    monkeypatch.setattr(tango, "is_correct", lambda text, _: len(text) % 2 == 0)
    monkeypatch.setattr(tango, "evaluate", tango.evaluate)
    evaluated_once(tango, most_tokens=2)
    step = tango.Tango.step

    def stopped_in_the_second(trainer, rows):
        turns.append(trainer.state.global_step)
        if turns == [0, 1]:
            signal.raise_signal(signal.SIGINT)
        return step(trainer, rows)

    monkeypatch.setattr(tango.Tango, "step", stopped_in_the_second)
    command = f"--model {smollm2} --steps 3 --ver-warmup 1 --gen-steps 1 --ver-steps 1 --lr 1e-3"
    command += " --questions 2 --group-size 4 --solution-tokens 12 --judgement-tokens 12"
    command += f" --eval-questions 2 --eval-samples 1 --out {tmp_path / 'run'} --rollouts {url}"
    printed, said, code = run_module(tango, *command.split())
    assert code == 130 and "stopped at step 2" in printed, printed + said
    printed, said, code = run_module(tango, *command.split())
    assert code is None and "resumes from checkpoint-2" in printed, printed + said
    steps = steps_of(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3] and turns == [0, 1, 2]
    assert all(0 < row["co/sampler_gap"] < 1e-3 for row in steps)
    assert trained_adapters(tmp_path / "run") == {"generator", "verifier"}
