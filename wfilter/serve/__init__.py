"""A server for one model and many customers: each token decides which classes are forgotten.

``wfilter serve`` runs it (``pip install "wfilter[serve]"``); docs/serving.md tells how. Importing
this module needs no Ray: clients, policies and tokens work without it.
"""

from wfilter.serve.client import Client, ServerError
from wfilter.serve.policy import Policy, PolicyError, Tenant, parse_policy
from wfilter.serve.tokens import new_token

__all__ = [
    "Client",
    "Policy",
    "PolicyError",
    "ServerError",
    "Tenant",
    "new_token",
    "parse_policy",
]
