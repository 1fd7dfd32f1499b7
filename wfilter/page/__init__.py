"""One self-contained HTML report of a filtered model: opens from disk, needs no network."""

from wfilter.page.audit import write_audit
from wfilter.page.write import write_page

__all__ = ["write_audit", "write_page"]
