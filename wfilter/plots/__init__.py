"""Pictures of what `wfilter.explain` measures. Every function writes one file and returns its path.

The suffix chooses the format. PNG has a white ground; SVG has none and keeps its text as text, so
that a page can show it in light and dark.
"""

from wfilter.plots.bars import audit_plot
from wfilter.plots.figure import BLUE, GREY, INK, MANY, ORANGE, PALETTE, STYLE, WIDTH
from wfilter.plots.forgetting import forgetting_plot
from wfilter.plots.gates import closed_plot, depth_plot, exactness_plot, heat_map, similarity_plot
from wfilter.plots.graph import graph_plot
from wfilter.plots.heads import has_heads, heads_plot
from wfilter.plots.images import as_pixels, pictures, routing_plot
from wfilter.plots.lines import curves_plot, history_plot

__all__ = [
    "BLUE",
    "GREY",
    "INK",
    "MANY",
    "ORANGE",
    "PALETTE",
    "STYLE",
    "WIDTH",
    "as_pixels",
    "audit_plot",
    "closed_plot",
    "curves_plot",
    "depth_plot",
    "exactness_plot",
    "forgetting_plot",
    "graph_plot",
    "has_heads",
    "heads_plot",
    "heat_map",
    "history_plot",
    "pictures",
    "routing_plot",
    "similarity_plot",
]
