"""One model for all tenants against one baked model each, and against one request at a time.

    python benchmarks/serve.py
    python benchmarks/serve.py --requests 96 --rounds 12    # the table in docs/serving.md

Three servers of one Ray, on loopback, asked by the same clients, in another order each round:
(a) ``wfilter serve`` as it is, with tokens; (b) Ray's multiplexing, one baked model per tenant, ten
of them in memory, requests of one model batched; (c) the filtered model, one request at a time.
(b) and (c) check no tokens and keep no log, which favours them. Answers are compared first.
Lines go to ``benchmarks/results/serve.jsonl`` and, as a table, ``serve.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from ray import serve

import wfilter
from common import RESULTS, origin
from wfilter.data import zoo
from wfilter.serve import application, front, new_token, tokens
from wfilter.serve.bodies import from_base64
from wfilter.serve.engine import open_engine
from wfilter.serve.images import decode
from wfilter.serve.settings import Settings

PORT = 8766
CLASSES, SET, IN_MEMORY, BATCH, WAIT = 10, 3, 10, 16, 0.02
PATHS = {"ours": "/v1/classify", "multiplexed": "/multiplexed", "single": "/single"}


def make_run(folder: Path, model: str) -> Path:
    """Random weights and alphas: only the time counts here, and that the servers agree."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network, inputs = zoo.create(model, CLASSES), zoo.input_format(f"wfilter:{model}")
    folder.mkdir()
    save_file(dict(network.state_dict()), folder / "base.safetensors")
    words = f'model = "wfilter:{model}"\nweights = "base.safetensors"\n'
    (folder / "settings.toml").write_text(words)
    example = torch.zeros(1, inputs.channels, inputs.size, inputs.size)
    wf = wfilter.apply_weight_filtering(network, example_input=example)
    with torch.no_grad():
        wf.alphas.normal_(2.0, 2.0)
    wf.save(folder)
    return folder


def best(logits: torch.Tensor, forget: list[int]) -> list[int]:
    logits = logits.clone()
    logits[forget] = -torch.inf
    return logits.argsort(descending=True)[:3].tolist()


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.01})
class Multiplexed:
    """One baked model per tenant, read from disk when it is asked for, the last ten kept."""

    def __init__(self, run: str, sets: dict[str, list[int]]):
        self.engine, self.sets = open_engine(Settings(run=run)), sets
        self.folder = Path(run) / "baked"
        self.twin = zoo.build(self.model_name(run), num_classes=CLASSES)

    def model_name(self, run: str) -> str:
        return Path(run, "settings.toml").read_text().split('"')[1]

    @serve.multiplexed(max_num_models_per_replica=IN_MEMORY)
    async def model(self, tenant: str) -> torch.nn.Module:
        import copy

        return zoo.load_weights(copy.deepcopy(self.twin), self.folder / f"{tenant}.safetensors")

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT)
    async def answer(self, asked: list[tuple[str, torch.Tensor]]) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(asked)
        for tenant in {tenant for tenant, _ in asked}:
            rows = [i for i, (other, _) in enumerate(asked) if other == tenant]
            model = await self.model(tenant)
            with torch.inference_mode():
                logits = model(torch.stack([asked[i][1] for i in rows]))
            for i, row in zip(rows, logits):
                found[i] = best(row, self.sets[tenant])
            await asyncio.sleep(0)
        return found

    async def __call__(self, request) -> dict:
        body = await request.json()
        image = await asyncio.to_thread(decode, from_base64(body["image"]), self.engine.inputs)
        return {"top": await self.answer((serve.get_multiplexed_model_id(), image))}


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.01})
class Single:
    """The filtered model without batches."""

    def __init__(self, run: str, sets: dict[str, list[int]]):
        self.engine, self.sets = open_engine(Settings(run=run)), sets

    async def __call__(self, request) -> dict:
        body = await request.json()
        image = await asyncio.to_thread(decode, from_base64(body["image"]), self.engine.inputs)
        forget = self.sets[request.headers["x-tenant"]]
        logits = self.engine.forward(image[None], self.engine.sets([frozenset(forget)]))[0]
        return {"top": best(logits, forget)}


def write_tenants(run: Path, count: int) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The policy with all tenants, and a baked model for each."""
    from safetensors.torch import save_file

    rng, sets, secrets, text = random.Random(0), {}, {}, ""
    wf = open_engine(Settings(run=str(run))).wf
    (run / "baked").mkdir()
    for index in range(count):
        name = f"t{index}"
        sets[name] = sorted(rng.sample(range(CLASSES), SET))
        secrets[name], line = new_token()
        text += f'[tenants.{name}]\nforget = {sets[name]}\ntokens = ["{line}"]\n'
        text += "requests_per_second = 1e6\nburst = 1000000\n"
        state = wf.bake(set(sets[name])).state_dict()
        plain = {key: value.contiguous().clone() for key, value in state.items()}
        save_file(plain, run / "baked" / f"{name}.safetensors")
    (run / "policy.toml").write_text(text)
    return sets, secrets


def ask(connection, kind: str, tenant: str, token: str, image: str) -> list[int]:
    headers = {"content-type": "application/json", "x-tenant": tenant}
    if kind == "multiplexed":
        headers["serve_multiplexed_model_id"] = tenant
    if kind == "ours":
        headers["authorization"] = f"Bearer {token}"
    body = json.dumps({"image": image} | ({"top_k": 3} if kind == "ours" else {}))
    connection.request("POST", PATHS[kind], body, headers)
    reply = connection.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{kind}: {reply.status} {content[:200]!r}")
    top = json.loads(content)["top"]
    return [int(entry["class"]) for entry in top] if kind == "ours" else top


def load(kind, names, secrets, images, count, clients) -> tuple[float, list[float]]:
    """Seconds for ``count`` requests of random tenants, and the latency of each."""
    left, lock, latencies, errors = iter(range(count)), threading.Lock(), [], []

    def work(seed):
        rng = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        try:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                tenant, began = rng.choice(names), time.perf_counter()
                ask(connection, kind, tenant, secrets[tenant], rng.choice(images))
                latencies.append(time.perf_counter() - began)
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(clients)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began, latencies


def check_equal(names, secrets, images) -> int:
    """The three servers give the same best classes; how many answers were compared."""
    connection, count = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120), 0
    for tenant in names[:5]:
        for image in images[:4]:
            found = [ask(connection, kind, tenant, secrets[tenant], image) for kind in PATHS]
            assert found[0] == found[1] == found[2], (tenant, found)
            count += 1
    connection.close()
    return count


def replicas() -> dict[str, Path]:
    """The /proc folder of each server's process, by the name Ray gives it."""
    names = {"ours": b"wfilter:wfilter", "multiplexed": b":Multiplexed", "single": b":Single"}
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        for kind, word in names.items():
            if b"ServeReplica" in title and word in title:
                found[kind] = entry
    return found


def memory(replica: Path) -> float:
    """MiB in memory, without pages of files that the kernel may drop."""
    status = (replica / "status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def cpu_seconds(replica: Path) -> float:
    """What a server's process has computed so far: other work on the machine is not in it."""
    ticks = (replica / "stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def start(run: Path, sets: dict[str, list[int]]) -> None:
    settings = Settings(
        run=str(run), policy=str(run / "policy.toml"), batch_size=BATCH, batch_wait=WAIT
    )
    os.environ[front.VARIABLE] = ""  # it would take off the header by which Ray chooses a model
    application.start(settings, port=PORT)
    serve.run(Multiplexed.bind(str(run), sets), name="multiplexed", route_prefix="/multiplexed")
    serve.run(Single.bind(str(run), sets), name="single", route_prefix="/single")


def images_for(model: str) -> list[str]:
    import base64
    import io

    import numpy as np
    from PIL import Image

    inputs, rng, found = zoo.input_format(f"wfilter:{model}"), np.random.default_rng(0), []
    for _ in range(16):
        shape = (
            (inputs.size, inputs.size, 3) if inputs.channels == 3 else (inputs.size, inputs.size)
        )
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(buffer, "PNG")
        found.append(base64.b64encode(buffer.getvalue()).decode())
    return found


def measure(options, sets, secrets) -> list[dict]:
    images, names, found = images_for(options.model), list(sets), replicas()
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    for name in names:  # the first scrypt of each token is not timed
        ask(connection, "ours", name, secrets[name], images[0])
    connection.close()
    cells: dict = {(kind, count): [] for count in options.tenants for kind in PATHS}
    sizes = {}
    for number in range(options.rounds + 1):
        order = list(cells)
        if number == 1:
            print(f"{check_equal(names, secrets, images)} answers agree", flush=True)
        if number > 0:
            random.Random(number).shuffle(order)  # all of them, so that a drift meets all alike
        for kind, count in order:
            before = cpu_seconds(found[kind])
            took, each = load(
                kind, names[:count], secrets, images, options.requests, options.clients
            )
            cpu = cpu_seconds(found[kind]) - before
            if number > 0:
                cells[kind, count].append((took, cpu, each))
            else:  # the first round warms up, and tenants become more: so memory is read here
                sizes[kind, count] = memory(found[kind])
            print(
                number, count, kind, f"{options.requests / took:.1f}/s", f"{cpu:.2f} s", flush=True
            )
    at_end = {kind: memory(replica) for kind, replica in found.items()}
    return [line(options, kind, count, cells, sizes, at_end) for kind, count in cells]


def ratios(above: list, below: list, which: int) -> list[float]:
    """Quartiles of what one server took over what another took in the same round."""
    each = [a[which] / b[which] for a, b in zip(above, below)]
    return [round(x, 3) for x in statistics.quantiles(each, n=4, method="inclusive")]


def line(options, kind, count, cells, sizes, at_end) -> dict:
    mine, first = cells[kind, count], cells[kind, options.tenants[0]]
    each = sorted(latency for cell in mine for latency in cell[2])
    return {
        "server": kind,
        "tenants": count,
        "model": options.model,
        "requests": options.requests * options.rounds,
        "clients": options.clients,
        "per_second": round(options.requests / statistics.median(cell[0] for cell in mine), 1),
        "p50_ms": round(1000 * each[len(each) // 2], 1),
        "p99_ms": round(1000 * each[int(0.99 * len(each))], 1),
        "memory_mib": round(sizes[kind, count]),
        "memory_at_end_mib": round(at_end[kind]),
        "cpu_ms": round(1000 * statistics.median(c[1] for c in mine) / options.requests, 1),
        "seconds_over_ours": ratios(mine, cells["ours", count], 0),
        "seconds_over_first": ratios(mine, first, 0),
        "cpu_over_ours": ratios(mine, cells["ours", count], 1),
        "cpu_over_first": ratios(mine, first, 1),
        "load": [round(x, 1) for x in os.getloadavg()],
        "rounds": options.rounds,
        **origin(),
    }


def quartiles(three: list[float]) -> str:
    return f"{three[1]:.2f} ({three[0]:.2f}-{three[2]:.2f})"


def table(lines: list[dict]) -> str:
    """Ratios are medians over rounds, with quartiles."""
    head = (
        "| tenants | server | requests/s | p50 ms | p99 ms | replica MiB | CPU ms | time / ours | "
        "time / 1 tenant | CPU / 1 tenant |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    return head + "".join(
        f"| {x['tenants']} | {x['server']} | {x['per_second']} | {x['p50_ms']} | {x['p99_ms']} | "
        f"{x['memory_mib']} | {x['cpu_ms']} | {quartiles(x['seconds_over_ours'])} | "
        f"{quartiles(x['seconds_over_first'])} | {quartiles(x['cpu_over_first'])} |\n"
        for x in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18-cifar")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "serve.jsonl")
    options = parser.parse_args()
    tokens.N = 2**12
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", options.model)
        sets, secrets = write_tenants(run, max(options.tenants))
        start(run, sets)
        try:
            lines = measure(options, sets, secrets)
        finally:
            application.stop()
    options.out.write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = table(lines)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
