"""A small run to serve, tenants with tokens, and a client that calls an application in process."""

import asyncio
import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import wfilter
from helpers import shuffle_alphas
from wfilter.data import zoo
from wfilter.serve import tokens

NAMES = tuple(f"digit-{index}" for index in range(10))
JSON = {"content-type": "application/json"}
CHEAP = 2**12  # scrypt's cost in tests: 10 ms


def make_run(folder: Path, model: str = "cnn-digits") -> Path:
    """A folder as untrain writes it, with random weights and alphas: every class counts."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = zoo.create(model)
    folder.mkdir(parents=True)
    save_file(dict(network.state_dict()), folder / "base.safetensors")
    facts = f'model = "wfilter:{model}"\nweights = "base.safetensors"\ndataset = "digits"\n'
    (folder / "settings.toml").write_text(facts)
    size = zoo.input_format(f"wfilter:{model}")
    example = torch.zeros(1, size.channels, size.size, size.size)
    wf = wfilter.apply_weight_filtering(network, class_names=NAMES, example_input=example)
    shuffle_alphas(wf).save(folder)
    return folder


@dataclass
class Book:
    """Tenants, what each forgets, and their tokens; written as a policy."""

    path: Path
    forget: dict[str, list[int]]
    tokens: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    more: str = ""

    def __post_init__(self):
        before, tokens.N = tokens.N, CHEAP
        try:
            for name in self.forget:
                self.tokens[name], self.lines[name] = tokens.new_token()
        finally:
            tokens.N = before
        self.write()

    def text(self) -> str:
        return "\n".join(
            f"[tenants.{name}]\nforget = {classes}\ntokens = [{json.dumps(self.lines[name])}]\n"
            f"{self.more}"
            for name, classes in self.forget.items()
        )

    def write(self) -> None:
        """Replace the file in one step, as a deployment would."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(self.text())
        fresh.replace(self.path)


def png(seed: int = 0, size: int = 8, mode: str = "L", kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    shape = (size, size) if mode == "L" else (size, size, len(mode))
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode).save(buffer, kind)
    return buffer.getvalue()


def as_json(image: bytes, **fields) -> bytes:
    return json.dumps({"image": base64.b64encode(image).decode(), **fields}).encode()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def names(self):
        return [entry["class"] for entry in self.json["top"]]


class Gathered:
    """Stands for ``serve.batch``, which runs only inside a replica of a Ray cluster."""

    def __init__(self, run, settings):
        self.run, self.settings, self.waiting = run, settings, []

    async def __call__(self, question):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((question, future))
        if len(self.waiting) == 1:
            self.task = asyncio.create_task(self.later())
        return await future

    async def later(self):
        await asyncio.sleep(self.settings.batch_wait)
        while self.waiting:
            size = self.settings.batch_size
            batch, self.waiting = self.waiting[:size], self.waiting[size:]
            try:
                answers = await self.run([question for question, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.cancelled() or future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers):
                    future.cancelled() or future.set_result(answer)


async def call(app, method, path, body=b"", headers=(), chunks=None, pause=0.0) -> Reply:
    """One request to an ASGI application, its body in chunks with pauses if asked for."""
    parts = list(chunks if chunks is not None else [body])
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
    scope |= {
        "query_string": query.encode(),
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
    }
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "extensions": {}}
    given = list(headers.items() if isinstance(headers, dict) else headers)
    if "host" not in dict(given):
        given.insert(0, ("host", "127.0.0.1:8000"))
    scope["headers"] = [(k.lower().encode(), v.encode()) for k, v in given]
    status, heads, content = 0, {}, b""

    async def receive():
        if not parts:
            await asyncio.sleep(3600)
        part = parts.pop(0)
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        nonlocal status, content
        if message["type"] == "http.response.start":
            status = message["status"]
            heads.update({k.decode(): v.decode() for k, v in message["headers"]})
        else:
            content += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        if not status:  # Starlette sends its 500 and raises again, for the server's log
            raise
    return Reply(status, heads, content)


async def classify(app, token, image, **fields) -> Reply:
    headers = JSON | {"authorization": f"Bearer {token}"}
    return await call(app, "POST", "/v1/classify", as_json(image, **fields), headers)
