"""The server's tests need the extra ``serve``; without it they are skipped, with the reason."""

import socket
import threading
import time
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own use of pydantic
    try:
        import fastapi  # noqa: F401
        import ray.serve
        import ray.util.metrics  # noqa: F401
    except ModuleNotFoundError as error:
        pytest.skip(f"needs pip install 'wfilter[serve]' ({error})", allow_module_level=True)

from servers import Book, Gathered, make_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def book(tmp_path):
    return Book(tmp_path / "policy.toml", {"museum": [1, 7], "bank": [0, 8, 9], "school": []})


@pytest.fixture(scope="session")
def engine(run):
    from wfilter.serve.engine import open_engine
    from wfilter.serve.settings import Settings

    return open_engine(Settings(run=str(run)))


@pytest.fixture
def serve_app(run, book, engine):
    """Makes an application in process, with settings changed."""
    from wfilter.serve.meters import Meters
    from wfilter.serve.service import Service
    from wfilter.serve.settings import Settings
    from wfilter.serve.web import make_app

    def make(**changes):
        values = {"run": str(run), "policy": str(book.path), "batch_wait": 0.001, **changes}
        service = Service(Settings(**values), engine, "test", Meters(), Gathered)
        return make_app(service), service

    return make


@pytest.fixture
def listen():
    """Puts an application behind uvicorn on loopback, in a thread, and gives its address."""
    import uvicorn

    started = []

    def begin(app):
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run)
        thread.start()
        started.append((server, thread))
        while not server.started:
            time.sleep(0.02)
        return f"http://127.0.0.1:{port}"

    yield begin
    for server, thread in started:
        server.should_exit = True
        thread.join()
