"""What clients send: bodies within limits, JSON or a form, and nothing but the known fields."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from wfilter.serve.limits import Refusal

TOP_K = 5
MOST_VALUES = 100  # of JSON in a body; an honest one has two
JSON, FORM = "application/json", "multipart/form-data"


async def read_body(request: Request, most: int) -> bytes:
    """The body; more than ``most`` bytes are refused, whatever length its head claims."""
    words = f"the body is larger than {most} bytes."
    claimed = request.headers.get("content-length", "0")
    if not claimed.isdecimal() or len(claimed) > 12 or int(claimed) > most:
        raise Refusal(413, words)
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise Refusal(413, words)
    except ClientDisconnect:
        raise Refusal(400, "the body was cut short.") from None
    return bytes(content)


async def image_of(request: Request, most: int) -> tuple[bytes, int]:
    """The image and ``top_k`` of a body, which is JSON or a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (JSON, FORM):
        raise Refusal(415, f"send {JSON} or {FORM}, not {kind[:40] or 'nothing'}.")
    body = await read_body(request, most)
    fields = parse_json(body) if kind == JSON else await _form(request, body)
    unknown = sorted(fields.keys() - {"image", "top_k"})
    if unknown:
        raise Refusal(
            400,
            f"the field {unknown[0][:40]!r} is unknown. Send image and top_k; which classes are "
            "forgotten is decided by the token.",
        )
    return _bytes_of(fields.get("image")), _number(fields.get("top_k", TOP_K), kind)


def parse_json(body: bytes, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """The JSON object in a body; anything else is refused."""
    # To parse ten megabytes of brackets would hold up every request for most of a second.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > most_values:
        raise Refusal(400, f"the body is JSON of more than {most_values} values.")
    try:
        fields = json.loads(body, object_pairs_hook=_each_once)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is no JSON.") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "the body is JSON, but no object.")
    return fields


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a proxy on the way may have read the other one of two equal names."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        _refuse_second(name, fields)
        fields[name] = value
    return fields


def _refuse_second(name: str, fields: dict[str, Any]) -> None:
    if name in fields:
        raise Refusal(400, f"the field {name[:40]!r} is there twice.")


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    # The body has been read already, to count its bytes; Starlette parses only a whole request.
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    again = Request(request.scope, replay)
    fields: dict[str, Any] = {}
    try:
        async with again.form(max_files=1, max_fields=2, max_part_size=1024) as form:
            for name, value in form.multi_items():
                _refuse_second(name, fields)
                fields[name] = await value.read() if isinstance(value, UploadFile) else value
    except HTTPException as error:
        raise Refusal(400, "the form is broken or has too many parts.") from error
    return fields


def _bytes_of(image: Any) -> bytes:
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise Refusal(400, "image is missing. Send a JPEG or PNG file, in JSON as base64.")
    return from_base64(image)


def from_base64(text: str) -> bytes:
    """The bytes that a base64 text stands for; any other text is refused."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, "image is no base64 text.") from None


def _number(value: Any, kind: str) -> int:
    """``top_k`` as a number: digits in a form; in JSON 5 or 5.0, but not the text "5"."""
    digits = kind == FORM and isinstance(value, str) and value.isascii() and value.isdecimal()
    if digits and len(value) < 9:
        return int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0:
        return int(value)
    raise Refusal(400, "top_k is no whole number.")
