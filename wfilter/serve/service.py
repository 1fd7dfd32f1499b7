"""A request, apart from HTTP: whose token, in time, within limits; what is forgotten and logged.

Everything here runs in one event loop; decoding, scrypt and the forward run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wfilter.serve.audit import AuditError, AuditLog
from wfilter.serve.engine import Engine, Ranked
from wfilter.serve.images import decode
from wfilter.serve.limits import Buckets, Refusal, Seats
from wfilter.serve.meters import Meters
from wfilter.serve.policy import Policy, Tenant
from wfilter.serve.settings import Settings
from wfilter.serve.tokens import Remembered, token_id
from wfilter.serve.watch import PolicyFile

WRONG_TOKENS = 5  # tries in a row for one id; then one try a second
DECODERS, DECODERS_PER_TENANT = 4, 2

Read = Callable[[], Awaitable[tuple[bytes, int]]]


@dataclass(frozen=True)
class Question:
    """One image in a batch."""

    image: Tensor
    forget: frozenset[int]
    top_k: int


@dataclass(frozen=True)
class Batched:
    """An answer, and the batch it was made in."""

    ranked: Ranked
    batch: int
    batch_size: int


Run = Callable[[list[Question]], Awaitable[list[Batched]]]
Batch = Callable[[Run, Settings], Callable[[Question], Awaitable[Batched]]]


class Service:
    """One replica: the engine, the policy, and what is kept about clients.

    ``batch`` turns a function that answers many questions into one that answers a single one, as
    ``serve.batch`` does.
    """

    def __init__(self, settings: Settings, engine: Engine, name: str, meters: Meters, batch: Batch):
        self.settings, self.engine, self.name, self.meters = settings, engine, name, meters
        self.policy = (
            None if settings.policy is None else PolicyFile(settings.policy, engine.class_names)
        )
        self.audit = _audit_log(settings, name)
        self.seats = Seats(settings.seats, settings.seats_per_tenant)
        self._rates, self._failures = Buckets(), Buckets()
        self._strangers, self._strangers_logged = 0, 0.0
        self._tokens = Remembered()
        self._hashing = asyncio.Lock()
        self._forwards = ThreadPoolExecutor(1, "forward")
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")
        # The largest images take half a second each: one tenant's must not hold up all others'.
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(DECODERS_PER_TENANT)
        )
        self._batches = 0
        self._ask = batch(self._run_aside, settings)

    # ---- a tenant's request -------------------------------------------------------------------

    async def classify(self, authorization: str | None, read: Read) -> dict[str, Any]:
        """The answer to one request.

        Args:
            authorization: The header of that name.
            read: Gives the image's bytes and ``top_k``; called only once the client is admitted.

        Raises:
            Refusal: There is no answer, for a reason the client may know.
        """
        began = time.monotonic()
        assert self.policy is not None
        policy = self.policy.current()  # for the whole request, even if the file changes
        tenant = await self._admitted(authorization, policy)
        record: dict[str, Any] = {"tenant": tenant.name, "policy": policy.version}
        record |= {"set": tenant.set_hash, "batch": None, "batch_size": None, "status": 500}
        try:
            answer = await self._answered(tenant, read)
            record |= {"batch": f"{self.name}-{answer.batch}", "batch_size": answer.batch_size}
            record["status"] = 200
        except Refusal as refusal:
            record["status"] = refusal.status
            raise
        except asyncio.CancelledError:
            record["status"] = 499  # the client went away
            raise
        finally:
            self._log(record, began)
        top = [{"class": name, "probability": p} for name, p in answer.ranked.top]
        return {"top": top, "tenant": tenant.name, "policy": policy.version}

    async def _answered(self, tenant: Tenant, read: Read) -> Batched:
        wait = self._rates.wait(tenant.name, tenant.requests_per_second, tenant.burst)
        if wait:
            raise Refusal(429, "you have asked too often. Try again later.", wait)
        with self.seats.taken(tenant.name):
            content, top_k = await _within(
                self.settings.body_seconds, read(), 408, "the request did not arrive in time."
            )
            answer: Batched = await _within(
                self.settings.answer_seconds,
                self._decoded_and_answered(content, tenant, top_k),
                503,
                "the answer took too long. Try again later.",
            )
            return answer

    async def _decoded_and_answered(self, content: bytes, tenant: Tenant, top_k: int) -> Batched:
        if not 1 <= top_k <= self.settings.top_k:
            raise Refusal(400, f"top_k is {top_k}, outside 1..{self.settings.top_k}.")
        image = await self.decoded(content, tenant.name)
        return await self.ask(Question(image, tenant.forget, top_k))

    async def decoded(self, content: bytes, tenant: str) -> Tensor:
        """One image, decoded in one of the threads for it once the tenant has its turn."""
        loop, turns = asyncio.get_running_loop(), self._turns[tenant]
        inputs, pixels = self.engine.inputs, self.settings.pixels
        await turns.acquire()

        def end_turn(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the server with it
                loop.call_soon_threadsafe(turns.release)

        work = self._decoders.submit(decode, content, inputs, pixels)
        # A thread cannot be stopped. The turn lasts as long as it works, though the client is gone:
        # else a tenant that asks and hangs up would have all threads.
        work.add_done_callback(end_turn)
        return await asyncio.wrap_future(work)

    async def aside(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, called in the one thread that may use the model."""
        return await asyncio.get_running_loop().run_in_executor(self._forwards, work)

    async def ask(self, question: Question) -> Batched:
        """The answer to one question, made in one batch with those of others."""
        answer = await self._ask(question)
        if not answer.ranked.finite:
            raise RuntimeError("the model gave logits that are no finite numbers.")
        return answer

    # ---- who asks -----------------------------------------------------------------------------

    async def _admitted(self, authorization: str | None, policy: Policy) -> Tenant:
        """The tenant whose token this is; unknown, wrong and revoked tokens look alike."""
        scheme, _, token = (authorization or "").partition(" ")
        name = token_id(token.strip()) if scheme.lower() == "bearer" else None
        if name is None or name not in policy.holders:
            raise self._stranger()
        tenant, hashed = policy.holders[name]
        token = token.strip()
        if self._tokens.knows(token, hashed):
            return tenant
        async with self._hashing:  # one at a time: a hash takes 16 MiB and most of a core
            if self._tokens.knows(token, hashed):
                return tenant
            wait = self._failures.wait(name, 1.0, WRONG_TOKENS)
            if wait:
                self._stranger()  # counted with them, though answered by 429
                raise Refusal(429, "too many wrong tokens. Try again later.", wait)
            if not await asyncio.to_thread(self._tokens.check, token, hashed):
                raise self._stranger()
            self._failures.fill(name)
        return tenant

    def _stranger(self) -> Refusal:
        self.meters.refused.inc()
        self._strangers += 1
        # One line a second for all of them: else strangers could fill the log until the records of
        # tenants are deleted as the oldest.
        if self.audit is not None and time.monotonic() - self._strangers_logged > 1:
            self._strangers_logged = time.monotonic()
            with contextlib.suppress(AuditError):
                self._write({"tenant": None, "status": 401, "count": self._strangers})
                self._strangers = 0
        return Refusal(401, "the token is not valid.")

    # ---- batches ------------------------------------------------------------------------------

    async def _run_aside(self, questions: list[Question]) -> list[Batched]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._forwards, self._run, questions)

    def _run(self, questions: list[Question]) -> list[Batched]:
        self._batches += 1
        number, size = self._batches, len(questions)
        self.meters.batch_size.observe(size)
        ranked = self.engine.answer(
            [q.image for q in questions],
            [q.forget for q in questions],
            [q.top_k for q in questions],
        )
        return [Batched(one, number, size) for one in ranked]

    # ---- records ------------------------------------------------------------------------------

    def _log(self, record: dict[str, Any], began: float) -> None:
        seconds = time.monotonic() - began
        tags = {"tenant": record["tenant"], "status": str(record["status"])}
        self.meters.requests.inc(tags=tags)
        self.meters.latency.observe(1000 * seconds)
        if self.audit is None:
            return
        try:
            self._write(record | {"latency_ms": round(1000 * seconds, 2)})
        except AuditError as error:
            raise Refusal(503, "the request could not be logged and is refused.", 5) from error

    def _write(self, record: dict[str, Any]) -> None:
        assert self.audit is not None
        lost = self.audit.lost
        self.audit.write({"time": round(time.time(), 3), **record})
        if self.audit.lost > lost:
            self.meters.unlogged.inc(self.audit.lost - lost)

    def ready(self) -> dict[str, Any]:
        """Whether this replica can answer, for a load balancer; no names, no reasons."""
        policy = None if self.policy is None else self.policy.current().version
        return {
            "ready": not (self.audit and self.audit.failing and self.audit.on_failure == "refuse"),
            "policy": policy,
            "policy_file_refused": bool(self.policy and self.policy.problem),
            "audit_failing": bool(self.audit and self.audit.failing),
        }


def _audit_log(settings: Settings, name: str) -> AuditLog | None:
    if settings.audit is None:
        return None
    return AuditLog(
        settings.audit,
        name,
        most_bytes=settings.audit_bytes,
        keep=settings.audit_keep,
        on_failure=settings.audit_failure,
    )


async def _within(seconds: float, work: Awaitable[Any], status: int, words: str) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise Refusal(status, words, 1 if status == 503 else None) from None
