"""The Ray Serve application: `build` for ``serve deploy``, and `start` for ``wfilter serve``."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import ipaddress
import logging
import os
import secrets
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from wfilter.serve import front
from wfilter.serve.engine import open_engine
from wfilter.serve.meters import ray_meters
from wfilter.serve.service import Batched, Question, Run, Service
from wfilter.serve.settings import Settings
from wfilter.serve.watch import PolicyFile
from wfilter.serve.web import make_app

if TYPE_CHECKING:
    from ray.serve import Application

LOOPBACK = "127.0.0.1"
TRIES = 3
LOGGING = {"log_level": "WARNING", "enable_access_log": False}  # wfilter has its audit log


class Server:
    """One replica: a model, and the application in front of it."""

    def __init__(self, settings: dict[str, Any]):
        from ray import serve

        logging.getLogger("wfilter.serve").addHandler(logging.StreamHandler())
        checked = Settings(**settings)
        name = serve.get_replica_context().replica_id.unique_id
        self.service = Service(checked, open_engine(checked), name, ray_meters(), ray_batch)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application of this replica; Ray asks for it once the replica is made."""
        return make_app(self.service)


def ray_batch(run: Run, settings: Settings) -> Any:
    """A function that answers one question, in a batch that Ray gathers from many requests.

    A batch runs when it has ``batch_size`` questions or has waited for ``batch_wait`` seconds.
    """
    from ray import serve

    async def gathered(questions: list[Question]) -> list[Batched]:
        return await run(questions)

    size, wait = settings.batch_size, settings.batch_wait
    batched: Any = serve.batch(max_batch_size=size, batch_wait_timeout_s=wait)(gathered)

    async def ask(question: Question) -> Batched:
        # Ray splits a batch by the header serve_multiplexed_model_id, which any client may send.
        # In an empty context Ray sees no such header: no client can split the batches of others.
        task = contextvars.Context().run(asyncio.create_task, batched(question))
        answer: Batched = await task
        return answer

    return ask


def build(args: dict[str, Any]) -> Application:
    """The application, for ``serve deploy`` and ``serve run``.

    Args:
        args: `Settings` by name, from an application's ``args`` in Ray's configuration file.
    """
    settings = Settings(**args)
    if settings.playground:
        raise ValueError("the playground is for wfilter serve on one machine alone.")
    if settings.policy is None:
        raise ValueError("no policy is given. Pass policy: the path of a TOML file.")
    return bind(settings)


def bind(settings: Settings) -> Application:
    """The deployment with its settings, which `build` or `check` must have checked before."""
    from ray import serve

    deployment: Any = serve.deployment(
        serve.ingress()(Server),
        name="wfilter",
        num_replicas=settings.replicas,
        # More than the seats: a request too many reaches `Seats`, which refuses it in our words.
        max_ongoing_requests=2 * settings.seats,
        max_queued_requests=settings.seats,
        backpressure_config={"status_code": 503, "retry_after_s": 1},
        health_check_period_s=2,
        logging_config=LOGGING,
        graceful_shutdown_timeout_s=settings.answer_seconds,
    )
    application: Application = deployment.bind(settings.model_dump())
    return application


def check(settings: Settings, host: str = LOOPBACK) -> None:
    """Raise before Ray starts if something would stop the server.

    Raises:
        ValueError: The settings contradict each other, or the policy has mistakes.
        FileNotFoundError: A file is missing.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("wfilter serve needs Ray. Run: pip install 'wfilter[serve]'")
    if settings.playground and settings.policy is not None:
        raise ValueError(
            "--playground lets every visitor choose what is forgotten, which a policy must not "
            "allow. Pass one of --playground and --policy."
        )
    if not settings.playground and settings.policy is None:
        raise ValueError("no policy is given. Pass --policy FILE.toml, or --playground to try out.")
    _keep_playground_here(settings, host)
    engine = open_engine(settings)
    if settings.policy is not None:
        PolicyFile(settings.policy, engine.class_names)


def _keep_playground_here(settings: Settings, host: str) -> None:
    if settings.playground and not _is_loopback(host):
        raise ValueError(f"--playground is for this machine alone, not --host {host}.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def start(
    settings: Settings, host: str = LOOPBACK, port: int = 8000, metrics_port: int | None = None
) -> None:
    """Start Ray on this machine alone and serve; `stop` ends it.

    Args:
        settings: How the server behaves.
        host: Address to listen on.
        port: Port to listen on.
        metrics_port: Port on loopback where Prometheus reads metrics; by default any free one.
    """
    _keep_playground_here(settings, host)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    # Ray kills a proxy that is not ready within 5 seconds, too few on a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault(front.VARIABLE, front.CALLBACK)
    # Ray runs its workers at niceness 15, as background jobs; here clients wait for them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if "ray" not in sys.modules:  # Ray reads the two below when it is imported
        # Ray's own ports listen on every address, and whoever may talk to them can run code.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray import serve

    # Else three lines of Ray's own stand before ours, one of which reads like a warning.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if not ray.is_initialized():
        _start_ray(settings.replicas, metrics_port)
        _end_quietly_on_sigterm()  # Ray's own handler prints a stack and aborts
    serve.start(
        http_options={"host": host, "port": port, "request_timeout_s": 2 * settings.answer_seconds},
        logging_config=LOGGING,
    )
    serve.run(bind(settings), name="wfilter", route_prefix="/")


def _end_quietly_on_sigterm() -> None:
    """Until `wait_for_interrupt` listens, SIGTERM ends this process, and Ray with it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _start_ray(replicas: int, metrics_port: int | None) -> None:
    """Start Ray, in up to `TRIES` tries: it gives a node 30 seconds, too few on a busy machine."""
    import ray

    for attempt in range(TRIES):
        try:
            ray.init(
                "local",
                num_cpus=max(replicas, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _metrics_export_port=metrics_port,
            )
            return
        except Exception as error:  # Ray has no class of error for a node that is too slow
            ray.shutdown()
            if attempt == TRIES - 1:
                raise RuntimeError(f"Ray did not start: {error}") from error


def stop() -> None:
    """Stop serving, and Ray with it."""
    import ray
    from ray import serve

    end: Any = serve.shutdown
    end()
    ray.shutdown()


def wait_for_interrupt() -> None:
    """Sleep until Ctrl-C or SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    while not stopped.wait(1):
        pass
