"""What a server is told when it starts: on the command line, or as ``args`` of ``serve deploy``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Everything that decides how a server behaves, except the policy's own content.

    Attributes:
        run: The folder that ``wfilter untrain`` or ``wfilter demo`` wrote.
        policy: The policy's file; every replica must be able to read it.
        engine: ``eager``, ``compiled``, or a ``.onnx`` or ``.pt2`` file that ``wfilter export RUN
            --forget sets`` wrote.
        model: As ``--model``; by default the one that was untrained.
        weights: As ``--weights``.
        size: As ``--size``.
        replicas: Processes that answer, each with a model of its own.
        batch_size: Requests in a forward at most.
        batch_wait: Seconds to wait for a batch to fill.
        seats: Requests inside a replica at once; more are refused with 503.
        seats_per_tenant: Requests of one tenant inside at once; more are refused with 429.
        body_bytes: Most bytes of a request body.
        pixels: Most pixels of an image.
        body_seconds: Seconds in which a body must have arrived.
        answer_seconds: Seconds in which an answer must be there.
        top_k: Most classes that may be asked for.
        audit: The folder of the audit log; none by default.
        audit_bytes: Size at which a file of the audit log is put aside.
        audit_keep: Files put aside before the oldest is deleted.
        audit_failure: Whether to ``refuse`` or ``serve`` what cannot be logged.
        playground: Serve the live page instead of tenants; only ``wfilter serve`` sets it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    run: str
    policy: str | None = None
    engine: str = "eager"
    model: str | None = None
    weights: str | None = None
    size: int | None = Field(None, ge=1)
    replicas: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    batch_wait: float = Field(0.005, ge=0)
    seats: int = Field(256, ge=1)
    seats_per_tenant: int = Field(64, ge=1)
    body_bytes: int = Field(10 * 2**20, ge=1)
    pixels: int = Field(25_000_000, ge=1)
    body_seconds: float = Field(10.0, gt=0)
    answer_seconds: float = Field(30.0, gt=0)
    top_k: int = Field(20, ge=1)
    audit: str | None = None
    audit_bytes: int = Field(2**26, ge=1)
    audit_keep: int = Field(10, ge=0)
    audit_failure: Literal["refuse", "serve"] = "refuse"
    playground: bool = False
