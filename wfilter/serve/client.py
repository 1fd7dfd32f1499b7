"""A client in a few lines, on the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would take the token to an address its holder never named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class ServerError(RuntimeError):
    """The server gave no answer; ``status`` says why, 0 if it could not be reached.

    ``retry_after`` is the number of seconds after which to try again, if the server named one.
    """

    def __init__(self, status: int, detail: str, retry_after: float | None = None):
        super().__init__(f"{detail} (status {status})" if status else detail)
        self.status, self.retry_after = status, retry_after


class Client:
    """Asks a ``wfilter serve`` for the classes of images.

    Example:
        >>> client = Client("http://127.0.0.1:1", token="wf_...")
        >>> client.classify(b"")
        Traceback (most recent call last):
        ...
        wfilter.serve.client.ServerError: http://127.0.0.1:1 cannot be reached: ...
    """

    def __init__(self, url: str, token: str, *, timeout: float = 30.0):
        self.url, self.token, self.timeout = url.rstrip("/"), token, timeout

    def classify(self, image: bytes | str | Path, top_k: int = 5) -> dict[str, Any]:
        """The server's answer: ``top`` (class and probability), ``tenant`` and ``policy``.

        Args:
            image: A JPEG or PNG file: its path, or its bytes.
            top_k: How many classes to answer with, at most.

        Raises:
            ServerError: There is no answer.
        """
        content = image if isinstance(image, bytes) else Path(image).read_bytes()
        body = {"image": base64.b64encode(content).decode(), "top_k": top_k}
        request = urllib.request.Request(
            f"{self.url}/v1/classify",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        return self._answer(request)

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until the server can answer.

        Raises:
            ServerError: It still cannot after ``seconds``.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                self._answer(urllib.request.Request(f"{self.url}/readyz"))
                return
            except ServerError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def _answer(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            wait = error.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() else None  # a proxy may name a date instead
            raise ServerError(error.code, _detail(error), seconds) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(0, f"{self.url} cannot be reached: {reason}") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
