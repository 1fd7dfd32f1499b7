"""``wfilter serve`` around the server itself: settings from options, start, and a clean end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wfilter.serve import application
from wfilter.serve.settings import Settings


@dataclass(frozen=True)
class ServeOptions:
    """The options that become settings of the server."""

    run: Path
    policy: Path | None
    playground: bool
    engine: str
    replicas: int
    batch_size: int
    batch_wait: float
    audit: Path | None
    audit_failure: str
    model: str | None
    weights: str | None
    size: int | None

    def settings(self) -> Settings:
        """The options as the server takes them; paths absolute, as replicas start elsewhere."""
        values = asdict(self)
        if self.audit_failure not in ("refuse", "serve"):
            raise ValueError(f"--audit-failure {self.audit_failure} is neither refuse nor serve.")
        if self.weights not in (None, "data"):
            values["weights"] = str(Path(str(self.weights)).absolute())
        if Path(self.engine).suffix:
            values["engine"] = str(Path(self.engine).absolute())
        for name, value in values.items():
            values[name] = str(value.absolute()) if isinstance(value, Path) else value
        return Settings(**values)


@contextmanager
def served(
    options: ServeOptions, host: str, port: int, metrics_port: int | None = None
) -> Iterator[dict[str, Any]]:
    """Run a server inside the block and yield its addresses; mistakes raise before Ray starts."""
    settings = options.settings()
    application.check(settings, host)
    refuse_taken(host, port)
    if metrics_port is not None:
        refuse_taken(application.LOOPBACK, metrics_port, "--metrics-port")
    application.start(settings, host, port, metrics_port)
    try:
        place = f"http://{host}:{port}"
        yield {"url": place, "playground": f"{place}/playground" if options.playground else None}
    finally:
        application.stop()


def refuse_taken(host: str, port: int, option: str = "--port") -> None:
    """Say at once that a port is in use; Ray would try for a minute."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"{host}:{port} cannot be listened on ({error.strerror}). Pass another {option}."
            ) from error


def greeting(places: dict[str, Any]) -> str:
    """The line to print once the server runs: what to open, and how to stop it."""
    page = places["playground"]
    if page:
        return f"Open {page} in a browser on this machine. Ctrl-C stops the server."
    return (
        f"Serving at {places['url']}: POST /v1/classify, GET /healthz, /readyz, /docs. "
        "Ctrl-C stops the server."
    )


def wait() -> None:
    """Wait until Ctrl-C or SIGTERM."""
    try:
        application.wait_for_interrupt()
    except KeyboardInterrupt:
        return
