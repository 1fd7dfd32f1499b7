"""``wfilter token``: make a token for a tenant."""

from __future__ import annotations

from typing import Annotated

import typer

from wfilter.cli.app import app
from wfilter.cli.options import Debug, Json, Output, Quiet


@app.command(epilog="Example: wfilter token --tenant museum")
def token(
    tenant: Annotated[str, typer.Option(help="For whom, in the lines to paste.")] = "NAME",
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a token for a tenant of wfilter serve, and the hashed line for the policy."""
    from wfilter.serve.tokens import new_token

    secret, line = new_token()
    text = (
        f"Give this token to its holder; it is kept nowhere:\n  {secret}\n\n"
        f'Put this into the policy:\n  [tenants.{tenant}]\n  forget = []\n  tokens = ["{line}"]'
    )
    Output(quiet, as_json).result(text, {"token": secret, "line": line})
