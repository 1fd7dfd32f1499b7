"""Filter every classifier of timm, torchvision and transformers, and check each by the oracle.

    python benchmarks/registry                       # all of them; about an hour on one core
    python benchmarks/registry --match 'timm/swin*'  # some of them
    python benchmarks/registry --redo fail           # once more what failed
    python benchmarks/registry --summary             # only rebuild the Markdown table

Each architecture is built without pretrained weights, with 10 classes and at the smallest input it
takes, filtered with ``targets="auto"`` and checked (see ``check``). Its row goes to
``results/registry.jsonl`` at once: the same command, given again, goes on where it stopped. Blocks
that repeat another one are left out, except in one architecture per family (``representatives``),
which has its full depth; transformers has one small configuration per family. A crash, a time-out
or too much memory is a row as well.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import multiprocessing
import os
import queue
import subprocess
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, read_lines
from registry.checks import examine
from registry.models import Architecture, architectures, representatives
from registry.page import by_library, summarise

# ---- the sweep -------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """A worker process: examine what comes through the pipe until None does."""
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        pipe.send(examine(*job))
        gc.collect()


class Worker:
    """A process that examines one architecture at a time, replaced when it dies or hangs."""

    def __init__(self, seconds: float, gigabytes: float):
        self.seconds, self.gigabytes = seconds, gigabytes
        self.process: Any = None
        self.pipe: Any = None

    def examine(self, architecture: Architecture, full_depth: bool = False) -> dict[str, Any]:
        if self.process is None:
            self._start()
        self.pipe.send((architecture, full_depth))
        deadline = time.monotonic() + self.seconds
        why = f"took more than {self.seconds:.0f} seconds"
        while time.monotonic() < deadline:
            try:
                if self.pipe.poll(0.2):
                    return self.pipe.recv()
            except EOFError:
                why = f"the process ended with code {self.process.exitcode}"
                break
            if self._resident() > self.gigabytes:
                why = f"took more than {self.gigabytes:.0f} GB of memory"
                break
        self.stop()
        status = "large" if "memory" in why else "fail"
        return {
            "key": architecture.key,
            "family": architecture.family,
            "status": status,
            "why": why,
            "seconds": self.seconds,
        }

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def _resident(self) -> float:
        """Gigabytes in use; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None


def sweep(todo: list[Architecture], deep: set[str], args: argparse.Namespace) -> None:
    """Examine all of ``todo``, ``deep`` ones in full, appending a row for each as it is done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    waiting: queue.SimpleQueue[Architecture | None] = queue.SimpleQueue()
    for item in [*todo, *[None] * args.jobs]:
        waiting.put(item)
    lock, facts = threading.Lock(), environment()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("architectures", total=len(todo))

        def work() -> None:
            worker, done = Worker(args.timeout, args.memory), 0
            while (architecture := waiting.get()) is not None:
                row = {**worker.examine(architecture, architecture.key in deep), **facts}
                with lock, args.out.open("a") as log:
                    log.write(json.dumps(row) + "\n")
                progress.advance(task)
                if row["status"] != "pass":
                    progress.console.print(f"{row['key']}: {row['status']}, {row.get('why', '')}")
                done += 1
                if done % 100 == 0:  # a fresh process: fragmented memory goes back
                    worker.stop()
            worker.stop()

        threads = [threading.Thread(target=work) for _ in range(args.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def environment() -> dict[str, str]:
    """Versions, for every row."""
    import timm
    import torchvision
    import transformers

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "date": date.today().isoformat(),
    }


def load_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The latest row of each architecture."""
    if not path.exists():
        return {}
    rows = read_lines(path)
    return {row["key"]: row for row in rows}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="*", help="glob over library/name, such as 'timm/vit_*'")
    parser.add_argument("--representatives", action="store_true", help="one per family only")
    parser.add_argument("--redo", default="", help="do rows of this status again")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=900, help="seconds per architecture")
    parser.add_argument("--memory", type=float, default=10, help="gigabytes per worker")
    parser.add_argument("--out", type=Path, default=RESULTS / "registry.jsonl")
    parser.add_argument("--summary", action="store_true", help="only rebuild the Markdown page")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = load_rows(args.out)
    found = architectures()
    if not args.summary:
        deep = {a.key for a in representatives(found)}
        todo = [a for a in found if fnmatch.fnmatchcase(a.key, args.match)]
        if args.representatives:
            todo = [a for a in todo if a.key in deep]
        done = {key for key, row in rows.items() if row["status"] != args.redo}
        sweep([a for a in todo if a.key not in done], deep, args)
        rows = load_rows(args.out)
    if not rows:
        raise SystemExit(f"no rows in {args.out}: --match {args.match} found no architecture.")
    order = {a.key: index for index, a in enumerate(found)}
    kept = sorted(rows.values(), key=lambda row: order.get(row["key"], len(order)))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in kept))
    args.out.with_suffix(".md").write_text(summarise(kept))
    print(by_library(kept))


if __name__ == "__main__":
    main()
