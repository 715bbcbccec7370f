"""A client of OpenAI-compatible vLLM servers: codes and their log-probs for prompts, from whichever server answers.

Spoken are POST /v1/chat/completions (with vLLM's `return_token_ids`, `allowed_token_ids` or `structured_outputs`, and
`chat_template_kwargs`), POST /v1/load_lora_adapter and /v1/unload_lora_adapter, GET /health. A request that fails, is
too slow or whose answer cannot be right is put to the next server, a few times in all, with growing pauses; then a
UserError says what the last one did. Nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from common.errors import UserError

log = logging.getLogger(__name__)

LOADING = "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, and let it see the run's directory."
PAUSES = (0.2, 1.0, 3.0, 10.0)  # seconds before the 2nd, 3rd, ... attempt; the last one repeats


class Refused(Exception):
    """Why an attempt does not count."""


@dataclass(frozen=True)
class Request:
    """One code to be written."""

    image: Image.Image
    text: str
    seed: int | None  # None: greedily
    temperature: float


@dataclass(frozen=True)
class Written:
    """A code's tokens, their log-probs, and the prompt's tokens as the server read them (None: it does not say)."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    prompt_ids: tuple[int, ...] | None


@dataclass(frozen=True)
class Legal:
    """Which tokens a code may have: the ids of the digits, and how many of them at each position."""

    digit_ids: tuple[int, ...]
    levels: tuple[int, ...]

    def parameters(self) -> dict[str, Any]:
        """What the server is told. Equal levels need no grammar."""
        if len(set(self.levels)) == 1:
            return {"allowed_token_ids": list(self.digit_ids[: self.levels[0]])}
        return {"structured_outputs": {"regex": "".join(f"[0-{level - 1}]" for level in self.levels)}}

    def check(self, ids: Sequence[int]) -> None:
        """Refuse what is not a code."""
        if len(ids) != len(self.levels):
            raise Refused(f"wrote {len(ids)} tokens where a code has {len(self.levels)}")
        for position, (token, level) in enumerate(zip(ids, self.levels, strict=True)):
            if token not in self.digit_ids[:level]:
                raise Refused(f"wrote token {token} at position {position + 1}, which is not a legal digit")


class Client:
    """Several servers in turn. Requests run in parallel, `concurrency` at a time; answers come back in order."""

    def __init__(self, servers: Sequence[str], *, timeout: float, retries: int, concurrency: int) -> None:
        if not servers:
            raise UserError(
                "rollout.servers is empty: give the address of a vLLM server, e.g. [http://localhost:8000]."
            )
        self.servers = [server.rstrip("/").removesuffix("/v1") for server in servers]
        self.timeout, self.retries = timeout, retries
        self._pool = ThreadPoolExecutor(concurrency)
        self._turn = 0
        self.failures = 0  # attempts that did not count, for the log

    # -- adapters ----------------------------------------------------------------------------------------------------

    def ready(self, wait: float = 0.0) -> None:
        """Wait until every server answers; UserError names the first that does not."""
        deadline = time.monotonic() + wait
        for server in self.servers:
            while not self._healthy(server):
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"rollout.servers: no vLLM server answers at {server}; start one (docs/closed-loop.md), or "
                        f"sample in process with rollout=hf."
                    )
                time.sleep(1.0)

    def _healthy(self, server: str) -> bool:
        try:
            with urllib.request.urlopen(f"{server}/health", timeout=min(5.0, self.timeout)) as answer:
                return answer.status == 200
        except OSError:
            return False

    def load(self, name: str, path: str) -> None:
        """Make the adapter in `path` known to every server as `name`."""
        for server in self.servers:
            body = {"lora_name": name, "lora_path": path}
            self._persistently([server], "/v1/load_lora_adapter", body, _anything, LOADING)

    def unload(self, name: str) -> None:
        """Forget an adapter; a server that does not know it is left alone."""
        for server in self.servers:
            try:
                self._post(server, "/v1/unload_lora_adapter", {"lora_name": name})
            except Refused as reason:
                log.debug("%s did not unload %s: %s", server, name, reason)

    # -- codes -------------------------------------------------------------------------------------------------------

    def write(self, adapter: str, requests: Sequence[Request], legal: Legal) -> list[Written]:
        """A code for each request, in order."""
        return list(self._pool.map(lambda request: self._write(adapter, request, legal), requests))

    def _write(self, adapter: str, request: Request, legal: Legal) -> Written:
        body = _body(adapter, request, legal)

        def understand(answer: Any) -> Written:
            return _understood(answer, adapter, legal)

        return self._persistently(self._in_turn(), "/v1/chat/completions", body, understand)

    def _in_turn(self) -> list[str]:
        self._turn += 1
        at = self._turn % len(self.servers)
        return self.servers[at:] + self.servers[:at]

    def _persistently(self, servers: Sequence[str], path: str, body: Any, understand: Any, advice: str = "") -> Any:
        reason, server = "", ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(PAUSES[min(attempt - 1, len(PAUSES) - 1)])
            server = servers[attempt % len(servers)]
            try:
                return understand(self._post(server, path, body))
            except Refused as error:
                self.failures += 1
                reason = str(error)
                log.warning("vLLM at %s %s (attempt %d of %d)", server, reason, attempt + 1, self.retries + 1)
        times = f"{self.retries + 1} times; the last time it"
        raise UserError(f"vLLM at {server}{path} failed {times} {reason}. {advice}".strip())

    def _post(self, server: str, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        message = urllib.request.Request(f"{server}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(message, timeout=self.timeout) as answer:
                text = answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise Refused(f"answered {error.code}: {error.read(300).decode('utf-8', 'replace')}") from None
        except TimeoutError:
            raise Refused(f"did not answer within {self.timeout:g} s") from None
        except (OSError, ValueError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise Refused(f"did not answer within {self.timeout:g} s") from None
            raise Refused(f"did not answer ({error})") from None
        try:
            return json.loads(text)
        except ValueError:
            return text


def _anything(answer: Any) -> Any:
    return answer


def _body(adapter: str, request: Request, legal: Legal) -> dict[str, Any]:
    buffer = io.BytesIO()
    request.image.save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": request.text}]
    return {
        "model": adapter,
        "messages": [{"role": "user", "content": content}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": len(legal.levels),
        "min_tokens": len(legal.levels),
        "temperature": 0.0 if request.seed is None else request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        **({} if request.seed is None else {"seed": request.seed}),
        **legal.parameters(),
    }


def _understood(answer: Any, adapter: str, legal: Legal) -> Written:
    """What the answer says, where it can be right."""
    try:
        served, choice = answer["model"], answer["choices"][0]
        ids = tuple(int(token) for token in choice["token_ids"])
        logps = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
        prompt_ids = answer.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused(f"sent an answer that is not understood ({type(error).__name__}: {error})") from None
    if served != adapter:
        raise Refused(f"answered with {served!r} instead of the adapter {adapter!r}")
    legal.check(ids)
    if len(logps) != len(ids) or not all(math.isfinite(one) and one <= 1e-3 for one in logps):
        raise Refused(f"sent log-probs that cannot be: {logps}")
    return Written(ids, logps, None if prompt_ids is None else tuple(prompt_ids))
