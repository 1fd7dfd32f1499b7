"""The live page."""

from __future__ import annotations

from fastapi import FastAPI

from wfilter.serve.service import Service


def add_playground(app: FastAPI, service: Service) -> None:
    """Add its routes."""
