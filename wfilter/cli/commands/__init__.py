"""Every command, one file each, in the order of the help: a thin layer over the library."""

# ruff: noqa: I001 - the order is that of `wfilter --help`
from wfilter.cli.commands import (
    plan as plan,
    untrain as untrain,
    evaluate as evaluate,
    audit as audit,
    explain as explain,
    bake as bake,
    export as export,
    serve as serve,
    token as token,
    bench as bench,
    demo as demo,
)
