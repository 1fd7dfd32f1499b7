"""The HTTP side: routes, bodies, errors in words, and a description of it all as OpenAPI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from wfilter.serve.bodies import FORM, JSON, TOP_K, image_of
from wfilter.serve.limits import REFUSALS, Refusal
from wfilter.serve.playground import add_playground
from wfilter.serve.service import Service

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}


def make_app(service: Service) -> FastAPI:
    """The application of one replica."""
    # FastAPI's own pages of documentation load scripts from the internet; this server needs none.
    app = FastAPI(title="wfilter", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_health(app, service)
    if service.policy is not None:
        _add_classify(app, service)
    if service.settings.playground:
        add_playground(app, service)
    return app


def _add_classify(app: FastAPI, service: Service) -> None:
    top_k = {"type": "integer", "minimum": 1, "maximum": service.settings.top_k, "default": TOP_K}

    @app.post(
        "/v1/classify",
        summary="The classes of an image, without those that the tenant must not recognise.",
        responses={200: {"model": None, "content": {JSON: {"schema": _ANSWER}}}, **_refusals()},
        openapi_extra={"requestBody": _body(top_k), "security": [{"token": []}]},
    )
    async def classify(request: Request) -> JSONResponse:
        async def read() -> tuple[bytes, int]:
            return await image_of(request, service.settings.body_bytes)

        # Two tokens are refused: a proxy on the way may have checked the one not used here.
        tokens = request.headers.getlist("authorization")
        answer = await service.classify(tokens[0] if len(tokens) == 1 else None, read)
        return JSONResponse(answer, headers=HEADERS)

    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        scheme = {"type": "http", "scheme": "bearer"}
        schema.setdefault("components", {})["securitySchemes"] = {"token": scheme}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", summary="The process answers.")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Requests can be answered.", responses=_refusals(503))
    async def readyz() -> JSONResponse:
        state = service.ready()
        return JSONResponse(state, 200 if state["ready"] else 503, HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_docs(app.openapi()), headers=HEADERS)


# ---- errors -------------------------------------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    """Make every error JSON with a ``detail`` in words, which never shows the server's insides."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refusal)
        return JSONResponse({"detail": error.detail}, error.status, {**HEADERS, **error.headers})

    async def usual(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = {**HEADERS, **(error.headers or {})}
        return JSONResponse({"detail": error.detail}, error.status_code, headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the request is not as /openapi.json says."}, 400, HEADERS)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed. Its log says how."}, 500, HEADERS)

    handlers: list[tuple[Any, Callable[[Request, Exception], Awaitable[JSONResponse]]]] = [
        (Refusal, refused),
        (HTTPException, usual),
        (RequestValidationError, invalid),
        (Exception, failed),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)


# ---- OpenAPI ------------------------------------------------------------------------------------

_DETAIL = {
    "type": "object",
    "properties": {"detail": {"type": "string"}},
    "required": ["detail"],
}
_ANSWER = {
    "type": "object",
    "required": ["top", "tenant", "policy"],
    "additionalProperties": False,
    "properties": {
        "top": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["class", "probability"],
                "additionalProperties": False,
                "properties": {
                    "class": {"type": "string"},
                    "probability": {"type": "number", "minimum": 0, "maximum": 1},
                },
            },
        },
        "tenant": {"type": "string"},
        "policy": {"type": "string", "description": "Version of the policy in force."},
    },
}


def _body(top_k: dict[str, Any]) -> dict[str, Any]:
    def schema(image: dict[str, Any]) -> dict[str, Any]:
        return {
            "schema": {
                "type": "object",
                "required": ["image"],
                "additionalProperties": False,
                "properties": {"image": image, "top_k": top_k},
            }
        }

    text = {"type": "string", "format": "base64-image", "description": "JPEG or PNG as base64."}
    file = {"type": "string", "format": "binary", "description": "JPEG or PNG."}
    return {"required": True, "content": {JSON: schema(text), FORM: schema(file)}}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"description": REFUSALS[status], "content": {JSON: {"schema": _DETAIL}}}
        for status in statuses or REFUSALS
    }


def _docs(schema: dict[str, Any]) -> str:
    """The OpenAPI description as an HTML page that needs no script and no network."""
    rows = "".join(
        f"<tr><td>{escape(method.upper())}</td><td>{escape(path)}</td>"
        f"<td>{escape(operation.get('summary', ''))}</td></tr>"
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>wfilter API</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        'content="light dark"><style>body{font:16px system-ui;margin:2em;max-width:60em}'
        "td{padding:.3em 1em .3em 0}pre{overflow:auto}</style><h1>wfilter API</h1>"
        f"<table>{rows}</table><h2>OpenAPI</h2><p>The same as <a href='/openapi.json'>"
        f"openapi.json</a>.</p><pre>{escape(json.dumps(schema, indent=2))}</pre></html>"
    )
