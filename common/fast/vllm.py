"""Rollouts by a vLLM server that the user has started (`--rollouts URL`), in place of our sampler.

The server holds the base. An adapter is published to it as PEFT saves it, unmerged, when its player
first writes after a change; docs/scale.md has the server's command.

Every version has a new name and a new folder, with a word of the run in it. Traps: a name that the
server knows is not read again; its cache of prompts goes by names, so a name used twice would be
answered from the old adapter's keys; a server that was not stopped still knows the adapters of an
earlier run; and `load_inplace` reads the folder again at every token.
"""

import atexit
import itertools
import math
import re
import shutil
import threading
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.batch import Batch
from common.errors import UserError, say
from common.model import tokenize

import requests
import torch
from filelock import FileLock
from peft.tuners.lora import LoraLayer

RESTART = 600
"""Seconds for which a server that has gone is waited for."""
PATIENCE, SLOWEST = 300, 10
"""A request may take so many seconds, and one more for every SLOWEST tokens that are asked for."""
LARGEST_GAP = 0.2
"""Nats a token. Between bfloat16 here and there it is about a tenth of that."""
AT_ONCE = 256
"""Requests under way, one for each different prompt."""
WHOLE_VOCABULARY = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Without these the model's generation_config would count, and scoring knows nothing of it."""


def find_base(url: str) -> tuple[str, int]:
    """Returns the name under which the server has its base, and the tokens of its longest text.

    Raises:
        UserError: there is no vLLM server at this address.
    """
    try:
        models = requests.get(f"{url}/v1/models", timeout=10).json()["data"]
        base = next(model for model in models if not model.get("parent"))
        return base["id"], base["max_model_len"]
    except requests.ConnectionError:
        raise UserError(f"--rollouts {url}: nobody listens there; start it first.") from None
    except (requests.RequestException, LookupError, ValueError, TypeError, AttributeError):
        raise UserError(f"--rollouts {url}: this is not a vLLM server.") from None


class Server:
    """Its `generate` is that of common/plain.py."""

    def __init__(self, url: str, folder: str, word: str):
        """
        Args:
            folder: the run's, in which adapters are published; the server must see the same path.
            word: the same on all processes of a run, and another one in every run.
        """
        self.url, self.word, self.waiting = url, word, threading.Lock()
        self.base, self.longest = find_base(url)
        self.folder = Path(folder).resolve() / ".rollouts"
        self.session = requests.Session()
        self.session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=AT_ONCE))
        atexit.register(self.forget)

    def error(self, sentence: str) -> UserError:
        return UserError(f"--rollouts {self.url}: {sentence}.")

    # ------------------------------------------------------------------ before a run
    def check(self, trainer):
        """Publishes every adapter and lets every player write a few tokens, whose log-probs must be
        those of the trainer.

        Raises:
            UserError: the server cannot load the adapters, has another base, or shorter texts.
        """
        base, tokenizer = trainer.model.get_base_model(), trainer.processing_class
        prompts = tokenize([[{"role": "user", "content": "2+3"}]], tokenizer)
        for name, player in trainer.players.items():
            self.check_length(player.reads + player.max_tokens + 1)
            with trainer.playing(name):
                asked = (trainer.model, prompts, 32, player.temperature, trainer.eos_token_ids)
                ids, logps = self.generate(*asked)
            gap = math.inf
            if max(ids[0]) < base.config.get_text_config().vocab_size:
                batch = Batch.of(name, prompts, ids, tokenizer.pad_token_id, base.device)
                found = trainer.log_probs(name, batch).cpu()  # (1, T)
                gap = (found - torch.tensor(logps)).abs().mean().item()
            if gap > LARGEST_GAP:
                raise self.error(
                    f"its log-probs of what the {name} writes are {gap:.2f} nats a token from "
                    f"those of --model {trainer.cfg.model}: it has another base or number format, "
                    f"or, at a temperature of {player.temperature:g}, was started without "
                    f"--logprobs-mode processed_logprobs"
                )

    def check_length(self, tokens: int):
        if tokens > self.longest:
            raise self.error(
                f"a prompt with its completion may have {tokens} tokens, and the server was "
                f"started with --max-model-len {self.longest}"
            )

    # ------------------------------------------------------------------ asking
    def generate(self, model, prompt_ids, max_tokens: int, temperature: float, eos_ids):
        """Returns the token ids of each row, and the log-prob of each token; see `plain.generate`.

        Seeds are drawn from torch, whose random numbers a checkpoint keeps. Rows that share a
        prompt are one request, in which vLLM adds a row's number to the seed.
        """
        self.check_length(max(map(len, prompt_ids)) + max_tokens)
        folder, rows = self.publish(model), defaultdict(list)
        for place, ids in enumerate(prompt_ids):
            rows[tuple(ids)].append(place)
        seeds, tokens = torch.randint(1 << 48, (len(rows),)).tolist(), len(prompt_ids) * max_tokens
        body = {"model": folder.name if folder else self.base, "max_tokens": max_tokens}
        body |= {"temperature": temperature, "stop_token_ids": list(eos_ids), "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **WHOLE_VOCABULARY}

        def ask(prompt: tuple, places: list, seed: int) -> list[dict]:
            count = len(places) if temperature else 1  # greedy ones are equal
            asked = body | {"prompt": list(prompt), "n": count, "seed": seed}
            answer = self.post("/v1/completions", asked, tokens)
            if answer.status_code == 404 and folder:  # the server has been restarted
                self.load(folder)
                answer = self.post("/v1/completions", asked, tokens)
            if not answer.ok:
                raise self.error(f"it refuses a request: {message(answer)}")
            return sorted(answer.json()["choices"], key=lambda choice: choice["index"])

        found = [None] * len(prompt_ids)
        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            answers = pool.map(ask, rows, rows.values(), seeds)
            for places, choices in zip(rows.values(), answers):
                for place, choice in zip(places, itertools.cycle(choices)):
                    found[place] = self.read(choice, eos_ids)
        return [ids for ids, _ in found], [logps for _, logps in found]

    def read(self, choice: dict, eos_ids) -> tuple[list[int], list[float]]:
        """Returns token ids and log-probs of one completion, with its end token."""
        ids, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        ended = choice.get("finish_reason") == "stop"
        if not ids or len(ids) != len(logps or ()) or ended != (ids[-1] in eos_ids):
            raise self.error("it leaves out tokens or log-probs; take a newer vLLM")
        return ids, logps

    def post(self, path: str, body: dict, tokens: int = 0) -> requests.Response:
        """Returns the answer, whatever its status. A server that has gone is waited for."""
        seconds = PATIENCE + tokens / SLOWEST
        for _ in range(3):
            try:
                return self.session.post(self.url + path, json=body, timeout=(10, seconds))
            except requests.ReadTimeout:
                raise self.error(f"no answer to {path} within {seconds:.0f} seconds") from None
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                self.wait()
        raise self.error(f"it breaks off {path} again and again")

    def wait(self):
        """Returns when the server is back. One thread asks for all."""
        with self.waiting:
            for second in range(RESTART):
                with suppress(UserError):
                    self.base, self.longest = find_base(self.url)
                    return
                if second == 0:
                    say(f"--rollouts {self.url}: the server has gone; waiting until it is back")
                time.sleep(1)
        raise self.error(f"the server has been gone for {RESTART} seconds")

    # ------------------------------------------------------------------ publishing
    def publish(self, model) -> Path | None:
        """Returns the folder of the adapter that plays, as it is now, whose name is the server's;
        None where the base plays. Of several processes the first one to ask publishes for all:
        their weights are equal, and the name holds a checksum of them.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        if layers[0].disable_adapters:
            return None
        adapter, checksum = model.active_adapter, 0
        for layer in layers:
            for part in (layer.lora_A, layer.lora_B):
                checksum = zlib.crc32(part[adapter].weight.detach().cpu().numpy(), checksum)
        folder = self.folder / adapter / f"{adapter}-{checksum:08x}-{self.word}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            if not folder.exists():
                new = self.folder / ".new"  # whole, and then renamed
                model.save_pretrained(new, selected_adapters=[adapter], save_embedding_layers=False)
                (new / adapter).rename(folder)
                shutil.rmtree(new)
                self.load(folder)
                for old in {*folder.parent.iterdir()} - {folder}:
                    self.post("/v1/unload_lora_adapter", {"lora_name": old.name})
                    shutil.rmtree(old)
        return folder

    def load(self, folder: Path):
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        answer = self.post("/v1/load_lora_adapter", body)
        if not answer.ok and "already been loaded" not in answer.text:
            helps = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
            reason = helps if '"detail"' in answer.text else message(answer)  # no such path
            raise self.error(f"it cannot load the adapter in {folder}: {reason}")

    def forget(self):
        """At the end the server is to know nothing of this run."""
        for folder in self.folder.glob("*/*"):
            with suppress(requests.RequestException):
                body = {"lora_name": folder.name}
                requests.post(f"{self.url}/v1/unload_lora_adapter", json=body, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def message(answer: requests.Response) -> str:
    """Returns what a server says of an error, in one line."""
    found = re.search(r'"message": ?"((?:[^"\\]|\\.)*)', answer.text)
    return " ".join((found[1] if found else answer.text).split())[:300].rstrip(".")
