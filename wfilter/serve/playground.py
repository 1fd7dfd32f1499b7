"""The live page: tick classes, see what the model answers without them. For one machine alone.

Here the visitor chooses what is forgotten, which no tenant may. So the page exists only where
``wfilter serve --playground`` made it, never beside a policy, and answers only to a browser that
asks for this machine by a loopback name.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from torch import Tensor

from wfilter import data
from wfilter.metrics.layers import all_gates
from wfilter.serve.bodies import from_base64, parse_json, read_body
from wfilter.serve.engine import Engine
from wfilter.serve.limits import Refusal
from wfilter.serve.service import Service

PAGE = Path(__file__).with_name("playground.html")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_ITEMS, MOST_SAMPLES, SHOWN = 16, 24, 5
CLOSED = 0.5  # a gate below lets less than half of a unit through
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
    "script-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'",
}


def add_playground(app: FastAPI, service: Service) -> None:
    """Add the page and what it asks for to an application."""
    engine, settings = service.engine, service.settings
    shown = samples(engine)
    most_values = MOST_ITEMS * (len(engine.class_names) + 10)

    @app.get("/playground", include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        refuse_other_sites(request)
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=HEADERS)

    @app.get("/playground/facts", include_in_schema=False)
    async def facts(request: Request) -> JSONResponse:
        refuse_other_sites(request)
        rows = engine.wf.feature_rows is not None
        about = {"classes": engine.class_names, "samples": shown, "feature_rows": rows}
        return JSONResponse(about, headers=HEADERS)

    @app.post("/playground/classify", include_in_schema=False)
    async def classify(request: Request) -> JSONResponse:
        refuse_other_sites(request)
        with service.seats.taken("playground"):
            body = await read_body(request, settings.body_bytes)
            asked = parse_items(parse_json(body, most_values), engine)
            images = [await service.decoded(content, "playground") for content, _ in asked]
            work = partial(compared, engine, images, [forget for _, forget in asked])
            return JSONResponse(await service.aside(work), headers=HEADERS)


def refuse_other_sites(request: Request) -> None:
    """Answer only to this machine's own page.

    A page of another site could ask in its visitor's name, by a link or by a name that it lets
    point to this machine; the headers of Host and Origin tell.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    name = host if host.startswith("[") and host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOOPBACK or (origin is not None and origin != f"http://{host}"):
        raise Refusal(403, "the playground is for a browser on this machine.")


def parse_items(fields: dict[str, Any], engine: Engine) -> list[tuple[bytes, frozenset[int]]]:
    """Images and the classes each is to forget."""
    items = fields.get("items")
    if not isinstance(items, list) or not 1 <= len(items) <= MOST_ITEMS:
        raise Refusal(400, f"items is no list of 1 to {MOST_ITEMS} images.")
    return [_parse_item(item, len(engine.class_names)) for item in items]


def _parse_item(item: Any, classes: int) -> tuple[bytes, frozenset[int]]:
    image = item.get("image") if isinstance(item, dict) else None
    forget = item.get("forget", []) if isinstance(item, dict) else None
    if not isinstance(image, str) or not isinstance(forget, list):
        raise Refusal(400, "an item is no image with a list of classes to forget.")
    if not all(type(index) is int and 0 <= index < classes for index in forget):
        raise Refusal(400, f"forget has an entry outside 0..{classes - 1}.")
    if len(set(forget)) == classes:
        raise Refusal(400, "every class is forgotten: no answer is left.")
    return from_base64(image), frozenset(forget)


def compared(
    engine: Engine, images: Sequence[Tensor], forget: Sequence[frozenset[int]]
) -> dict[str, Any]:
    """What the model says of each image as it is and without its classes, in one forward."""
    nothing: list[frozenset[int]] = [frozenset()] * len(images)
    began = time.perf_counter()
    ranked = engine.answer([*images, *images], [*nothing, *forget], [SHOWN] * 2 * len(images))
    seconds = time.perf_counter() - began
    if not all(one.finite for one in ranked):
        raise RuntimeError("the model gave logits that are no finite numbers.")
    pairs = zip(ranked[: len(images)], ranked[len(images) :], forget)
    answers = [
        {
            "before": before.top,
            "after": after.top,
            "layers": closed_units(engine, classes),
            "nearest": nearest_classes(engine, classes),
        }
        for before, after, classes in pairs
    ]
    return {"answers": answers, "milliseconds": round(1000 * seconds, 1), "images": len(images)}


def closed_units(engine: Engine, forget: frozenset[int]) -> list[tuple[str, int, int]]:
    """For each filtered layer: its name, its gates, and those of them that a set closes.

    None where feature rows do the forgetting and every gate is open.
    """
    if not forget:
        return []
    layers: dict[str, tuple[int, int]] = {}
    with torch.no_grad():
        for name, gate in engine.wf.gates(set(forget)).items():
            layer = name.rpartition(".")[0] or name
            units, closed = layers.get(layer, (0, 0))
            layers[layer] = units + gate.numel(), closed + int((gate < CLOSED).sum())
    if engine.wf.feature_rows is not None and not any(closed for _, closed in layers.values()):
        return []
    return [(name, units, closed) for name, (units, closed) in layers.items()]


def nearest_classes(engine: Engine, forget: frozenset[int]) -> list[tuple[str, float]]:
    """The other classes most like a set, and how alike they are, in 0..1."""
    if not forget:
        return []
    with torch.no_grad():
        rows = engine.wf.feature_rows
        alike = like_by_gates(engine, forget) if rows is None else like_by_means(rows.means, forget)
    others = [index for index in alike.argsort(descending=True).tolist() if index not in forget]
    return [(engine.class_names[index], float(alike[index])) for index in others[:SHOWN]]


def like_by_gates(engine: Engine, forget: frozenset[int]) -> Tensor:
    """How much of what a set closes each class's row closes, too ``(num_classes,)``.

    The measure is that of `wfilter.explain.similarity`: sum of minima over sum of maxima.
    """
    mine = 1 - torch.cat([gate.flatten() for gate in engine.wf.gates(set(forget)).values()])
    closed = 1 - all_gates(engine.wf)
    both, either = torch.minimum(closed, mine).sum(1), torch.maximum(closed, mine).sum(1)
    return both / either.clamp_min(1e-12)


def like_by_means(means: Tensor, forget: frozenset[int]) -> Tensor:
    """Cosine of each class's mean features with a set's, about the mean of all ``(num_classes,)``.

    Feature rows leave gates open, so gates would tell nothing. Below 0 is no likeness: 0.
    """
    centred = means.double() - means.double().mean(0)
    mine = centred[sorted(forget)].mean(0, keepdim=True)
    return torch.cosine_similarity(centred, mine).clamp_min(0)


def samples(engine: Engine) -> list[dict[str, Any]]:
    """Test images to begin with, some of each class; none where the dataset is not at hand."""
    from PIL import Image

    if engine.dataset is None:
        return []
    try:
        images = data.load(engine.dataset, "test", **vars(engine.inputs))
    except (FileNotFoundError, ValueError):
        return []
    own = (images.labels == torch.arange(images.num_classes)[:, None]).int()
    rows = own.argsort(dim=1, descending=True, stable=True)
    index = rows[:, :3].t().flatten()[:MOST_SAMPLES]
    shown = []
    for row in index.tolist():
        pixels = images.images[torch.tensor([row])][0].permute(1, 2, 0).squeeze(-1).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        text = base64.b64encode(buffer.getvalue()).decode()
        shown.append({"image": text, "label": images.class_names[int(images.labels[row])]})
    return shown
