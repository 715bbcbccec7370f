"""A local HTTP server that speaks the part of vLLM's protocol which the client uses, well or badly as it is told.

Well: a second policy on the same base answers, with the adapters that were loaded by name from their folders.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from bt_policy.encoding import Prompts
from bt_policy.frames import from_array


class Engine:
    """What a vLLM server would compute, from a VLMPolicy."""

    def __init__(self, policy):
        self.policy, self.adapters, self.known, self.lock = policy, {}, {}, threading.Lock()
        policy.encoder.prompt = lambda text, memory: text  # the client sends the prompt as it is

    def load(self, name, path):
        self.adapters[name] = load_file(Path(path) / "adapter_model.safetensors")

    def answer(self, body):
        """A fresh copy of the answer; computed once, because a machine under load would look like a slow server."""
        key = json.dumps(body)
        with self.lock:
            if key not in self.known:
                self.known[key] = json.dumps(self.compute(body))
        return json.loads(self.known[key])

    def compute(self, body):
        name = body["model"]
        parts = body["messages"][0]["content"]
        picture = base64.b64decode(parts[0]["image_url"]["url"].partition(",")[2])
        frame = from_array(np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")))
        prompts = Prompts([frame], [parts[1]["text"]], [None], torch.ones(1, dtype=torch.bool))
        self.policy.load_state(self.adapters[name])
        uniforms = None
        if "seed" in body:
            generator = torch.Generator().manual_seed(body["seed"])
            uniforms = torch.rand(1, body["max_tokens"], generator=generator, dtype=torch.float64)
        sample = self.policy.sample(prompts, temperature=body["temperature"] or 1.0, uniforms_NA=uniforms)
        _, grid = self.policy.vision(frame)
        prompt_ids = self.policy.encoder.encode(parts[1]["text"], None, grid).ids_P.tolist()
        content = [{"logprob": value} for value in sample.logps_NA[0].tolist()]
        choice = {"token_ids": sample.answers_NA[0].tolist(), "logprobs": {"content": content}}
        return {"model": name, "choices": [choice], "prompt_token_ids": prompt_ids}


class FakeVLLM:
    """`with FakeVLLM(engine) as server:`; `server.misbehave` is a queue of what the next chat answers do wrong."""

    def __init__(self, engine):
        self.engine, self.misbehave, self.requests, self.calls = engine, deque(), [], []

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.reply(200, "")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.calls.append((self.path, body))
                if self.path == "/v1/load_lora_adapter":
                    outer.engine.load(body["lora_name"], body["lora_path"])
                    self.reply(200, "Success: LoRA adapter added.")
                elif self.path == "/v1/chat/completions":
                    outer.requests.append(body)
                    self.reply(*outer.chat(body))
                else:
                    self.reply(404, "unknown")

            def reply(self, status, text):
                data = text.encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client did not wait
                    pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()

    def chat(self, body):
        wrong = self.misbehave.popleft() if self.misbehave else None
        if wrong == "fail":
            return 500, "out of memory"
        if wrong == "slow":
            time.sleep(6.0)
        answer = self.engine.answer(body)
        if wrong == "adapter":
            answer["model"] = "base"
        if wrong == "garbled":
            return 200, json.dumps(answer)[: len(json.dumps(answer)) // 2]
        if wrong == "illegal":
            answer["choices"][0]["token_ids"][1] = 0
        if wrong == "short":
            answer["choices"][0]["token_ids"].pop()
        if wrong == "nan":
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
        if wrong == "prompt":
            answer["prompt_token_ids"][3] += 1
        if wrong == "raw":  # log-probs of another distribution
            for one in answer["choices"][0]["logprobs"]["content"]:
                one["logprob"] -= 1.0
        return 200, json.dumps(answer)
