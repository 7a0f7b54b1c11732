"""Rollouts by a vLLM server that the user has started (`--rollouts URL`), in place of our sampler.

The server holds the base. An adapter is published to it as PEFT saves it, unmerged, when its player
first writes after a change; docs/scale.md has the server's command.

Every version has a new name and a new folder, with a word of the run in it. Traps: a name that the
server knows is not read again; its cache of prompts goes by names, so a name used twice would be
answered from the old adapter's keys; a server that was not stopped still knows the adapters of an
earlier run; and `load_inplace` reads the folder again at every token.
"""

import atexit
import io
import math
import re
import shutil
import threading
import time
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.core.batch import Batch
from common.core.errors import UserError, say
from common.core.model import tokenize

import requests
import torch
import urllib3
from filelock import FileLock
from peft.tuners.lora import LoraLayer

RESTART = 600
"""Seconds for which a server that has gone is waited for."""
PATIENCE, SLOWEST = 300, 10
"""A request may take so many seconds, and one more for every SLOWEST tokens that are asked for."""
LARGEST_GAP = 0.2
"""Nats a token. Between bfloat16 here and there it is about a tenth of that."""
FEWEST = 32
"""Tokens of which that is the mean."""
AT_ONCE = 256
"""Requests under way, one for each different prompt."""
LARGEST, OF_A_TOKEN = 1 << 24, 1 << 10
"""Bytes of an answer, at most, and as many more for every token that it may name: vLLM needs a
tenth of that."""
WHOLE_VOCABULARY = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Without these the model's generation_config would count, and scoring knows nothing of it."""
UNREAD = {"stream": True, "allow_redirects": False, "headers": {"Accept-Encoding": "identity"}}
"""For `read_body`: `requests` would read a body of any size, as long as each read brings a byte."""
NO_VLLM = OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError
"""What reading an answer raises where it breaks off, is no JSON, or has another form."""


def find_base(url: str) -> tuple[str, int]:
    """Returns the name under which the server has its base, and the tokens of its longest text.

    Raises:
        UserError: there is no vLLM server at this address.
    """
    try:
        until = time.monotonic() + 10
        answer = requests.get(f"{url}/v1/models", timeout=10, **UNREAD)
        models = read_body(answer, until, LARGEST).json()["data"]
        (name, longest), *_ = [(m["id"], m["max_model_len"]) for m in models if not m.get("parent")]
        if isinstance(name, str) and type(longest) is int:
            return name, longest
    except requests.ConnectionError:
        raise UserError(f"--rollouts {url}: nobody listens there; start it first.") from None
    except NO_VLLM:
        pass
    raise UserError(f"--rollouts {url}: this is not a vLLM server.")


class Server:
    """Its `generate` is that of common/core/plain.py."""

    def __init__(self, url: str, folder: str, word: str):
        """
        Args:
            folder: the run's, in which adapters are published; the server must see the same path.
            word: the same on all processes of a run, and another one in every run.
        """
        self.url, self.word, self.waiting = url, word, threading.Lock()
        self.base, self.longest = find_base(url)
        self.folder = Path(folder).resolve() / ".rollouts"
        self.gaps = []  # of tokens that `watch` has not judged yet
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
                asked = (trainer.model, prompts, FEWEST, player.temperature, trainer.eos_token_ids)
                ids, logps = self.generate(*asked, keys=[0])
            batch = Batch.of(name, prompts, ids, tokenizer.pad_token_id, base.device)
            found = trainer.log_probs(name, batch).cpu()  # (1, T)
            gap = (found - torch.tensor(logps)).abs().mean().item()
            if not gap <= LARGEST_GAP:  # not a number, either
                raise self.error(
                    f"its log-probs of what the {name} writes are {gap:.2f} nats a token from "
                    f"those of --model {trainer.cfg.model}: it has another base or number format, "
                    f"or, at a temperature of {player.temperature:g}, was started without "
                    f"--logprobs-mode processed_logprobs"
                )

    def watch(self, name: str, gaps: torch.Tensor):
        """`check` while the run lasts: the server may be restarted with another base, or answer
        from an adapter that is not the one it was given.

        name: the player that wrote. gaps: (N,) nats between the log-probs of N tokens here and
        there, of one micro-batch that is trained on.

        Raises:
            UserError: they are too far from each other.
        """
        self.gaps += gaps.tolist()
        if len(self.gaps) < FEWEST:
            return
        gap, self.gaps = sum(self.gaps) / len(self.gaps), []
        if not gap <= LARGEST_GAP:  # not a number, either
            raise self.error(
                f"its log-probs of what the {name} writes are now {gap:.2f} nats a token from "
                f"ours, and were not when the run began: it answers from another base or another "
                f"adapter than it should; stop it, and start it again as docs/scale.md says"
            )

    def check_length(self, tokens: int):
        if tokens > self.longest:
            raise self.error(
                f"a prompt with its completion may have {tokens} tokens, and the server was "
                f"started with --max-model-len {self.longest}"
            )

    # ------------------------------------------------------------------ asking
    def generate(self, model, prompt_ids, max_tokens: int, temperature: float, eos_ids, keys):
        """Returns the token ids of each row, and the log-prob of each token; see `plain.generate`.

        Rows that share a prompt are one request, whose seed is the key of the first of these rows;
        vLLM adds a row's number to the seed. The server draws with random numbers of its own and
        with logits that depend on what else it computes, so the same seed need not give the same
        texts once more.
        """
        self.check_length(max(map(len, prompt_ids)) + max_tokens)
        folder, rows = self.publish(model), defaultdict(list)
        for place, ids in enumerate(prompt_ids):
            rows[tuple(ids)].append(place)
        seeds = [keys[places[0]] & (1 << 48) - 1 for places in rows.values()]
        tokens = len(prompt_ids) * max_tokens
        body = {"model": folder.name if folder else self.base, "max_tokens": max_tokens}
        body |= {"temperature": temperature, "stop_token_ids": list(eos_ids), "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **WHOLE_VOCABULARY}
        vocabulary = model.get_base_model().config.get_text_config().vocab_size
        limits = max_tokens, vocabulary, {*eos_ids}

        def ask(prompt: tuple, places: list, seed: int) -> list[dict]:
            count = len(places) if temperature else 1  # greedy ones are equal
            asked = body | {"prompt": list(prompt), "n": count, "seed": seed}
            answer = self.post("/v1/completions", asked, tokens)
            if answer.status_code == 404 and folder:  # the server has been restarted
                self.load(folder)
                answer = self.post("/v1/completions", asked, tokens)
            if not answer.ok:
                raise self.error(f"it refuses a request: {message(answer)}")
            wrong = "it leaves out tokens or log-probs; take a newer vLLM"
            with suppress(*NO_VLLM):
                choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
                wrong = whats_wrong(choices, count, *limits)
            if wrong:
                raise self.error(wrong)
            return choices

        found = [None] * len(prompt_ids)
        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            answers = pool.map(ask, rows, rows.values(), seeds)
            for places, choices in zip(rows.values(), answers):
                for place, choice in zip(places, choices * len(places)):
                    found[place] = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        return [ids for ids, _ in found], [logps for _, logps in found]

    def post(self, path: str, body: dict, tokens: int = 0) -> requests.Response:
        """Returns the answer, whatever its status. A server that has gone is waited for."""
        seconds = PATIENCE + tokens / SLOWEST
        named = body.get("n", 0) * (body.get("max_tokens", 0) + len(body.get("prompt", ())))
        for _ in range(3):
            until, limits = time.monotonic() + seconds, (10, seconds)
            try:
                answer = self.session.post(self.url + path, json=body, timeout=limits, **UNREAD)
                return read_body(answer, until, LARGEST + OF_A_TOKEN * named)
            except requests.ReadTimeout:
                sentence = f"no whole answer to {path} within {seconds:.0f} seconds"
                raise self.error(sentence) from None
            except requests.ConnectionError:
                self.wait()
            except (requests.RequestException, ValueError) as error:
                raise self.error(f"its answer to {path} cannot be used: {error}") from None
        raise self.error(f"it breaks off {path} again and again")

    def wait(self):
        """Returns when the server is back. One thread asks for all."""
        with self.waiting:
            until, told = time.monotonic() + RESTART, False
            while time.monotonic() < until:
                with suppress(UserError):
                    self.base, self.longest = find_base(self.url)
                    return
                if not told:
                    say(f"--rollouts {self.url}: the server has gone; waiting until it is back")
                told = True
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
                url = f"{self.url}/v1/unload_lora_adapter"
                requests.post(url, json=body, timeout=10, **UNREAD)
        shutil.rmtree(self.folder, ignore_errors=True)


def read_body(answer: requests.Response, until: float, most: int) -> requests.Response:
    """Returns an answer that was opened UNREAD, now with its body.

    Raises:
        requests.RequestException: it breaks off, or is not whole in time.
        ValueError: it has more than `most` bytes, or is none.
    """
    body = io.BytesIO()
    if answer.is_redirect:
        raise ValueError("it leads to another address")
    try:
        while part := answer.raw.read1(1 << 16, decode_content=False):
            body.write(part)
            if body.tell() > most:
                raise ValueError(f"it has more than {most >> 20} MB")
            if time.monotonic() > until:
                raise requests.ReadTimeout
    except urllib3.exceptions.ReadTimeoutError:
        raise requests.ReadTimeout from None
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from None
    body.seek(0)
    answer.raw, answer.encoding = body, "utf-8"
    return answer


def whats_wrong(choices: list[dict], count: int, limit: int, vocabulary: int, ends: set) -> str:
    """'' if these are `count` completions, with tokens and log-probs that can be trained on."""
    if [choice["index"] for choice in choices] != [*range(count)]:
        return f"of {count} completions it returns {len(choices)}"
    texts = Counter(tuple(choice["token_ids"]) for choice in choices)
    for choice in choices:
        ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason = choice["finish_reason"]
        if not ids or len(ids) != len(logps):
            return f"of {len(ids)} tokens it returns {len(logps)} log-probs"
        for token, logp in zip(ids, logps):
            if type(token) is not int or not 0 <= token < vocabulary:
                known = f"those of --model are 0 to {vocabulary - 1}"
                return f"it writes the token {token!r:.40}, and {known}: it has another base"
            if type(logp) not in (int, float) or not -1e4 < logp < 1e-3:
                return f"it writes a token with the log-prob {logp!r:.40}"
        whole = ids[-1] in ends if reason == "stop" else reason == "length" and len(ids) == limit
        if not whole or len(ids) > limit or not ends.isdisjoint(ids[:-1]):
            return f"a completion ends after {len(ids)} of {limit} tokens with {reason!r:.40}"
        # P(`same` others of the n - 1 are this one, too) <= C(n - 1, same) p^same
        same = texts[tuple(ids)] - 1
        if math.log(math.comb(count - 1, same)) + same * sum(logps) < -30:  # one in 10^13
            return (
                f"{same + 1} of {count} completions of a prompt are the same text, which nobody "
                f"draws so often by chance: it takes no notice of seeds; take a newer vLLM"
            )
    return ""


def message(answer: requests.Response) -> str:
    """Returns what a server says of an error, in one line."""
    found = re.search(r'"message": ?"((?:[^"\\]|\\.)*)', answer.text)
    return " ".join((found[1] if found else answer.text).split())[:300].rstrip(".")
