"""Pictures: each is written, holds what it was given, and keeps its text readable."""

import json
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import wfilter
from wfilter import explain, plots, zoo
from wfilter.explain import ClassCurves
from wfilter.metrics import Curve
from wfilter.untraining.history import History, Record

NAMES = [f"kind {row}" for row in range(10)]
MANY_NAMES = [f"a rather long class name {row}" for row in range(100)]


def filters(classes: int, units: int = 40) -> wfilter.FilteredModel:
    model = nn.Sequential(nn.Linear(2, units), nn.Linear(units, classes))
    wf = wfilter.apply_weight_filtering(model, targets="0.weight")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        wf.alphas.copy_(4 * torch.randn(classes, units, generator=generator))
    return wf


def curves() -> ClassCurves:
    shares = (0.0, 0.5, 1.0)
    up, down = Curve(shares, (0.0, 0.8, 1.0)), Curve(shares, (1.0, 0.1, 0.0))
    return ClassCurves(up, down, Curve(shares, (0.0, 0.3, 1.0)), Curve(shares, (1.0, 0.7, 0.0)))


def texts(path) -> list[str]:
    """All text of an SVG, as a reader sees it."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


def ink_share(path) -> float:
    """Share of a PNG's pixels that are not its ground."""
    from PIL import Image

    pixels = torch.frombuffer(bytearray(Image.open(path).convert("L").tobytes()), dtype=torch.uint8)
    return float((pixels < 200).float().mean())


def history() -> History:
    records = [Record(i, 0, 0.0, 1 / i, 0.9, 0.5 / i, 0.01 * i) for i in range(1, 20)]
    records[9].validation = 0.5
    return History({"name": "distill"}, 0, records)


ALL = {
    "history": lambda path: plots.history_plot(history(), path),
    "graph": lambda path: plots.graph_plot(explain.class_unit_graph(filters(10), "0"), path, NAMES),
    "heat map": lambda path: plots.heat_map(torch.rand(10, 40), path, NAMES, layer="conv.weight"),
    "similarity": lambda path: plots.similarity_plot(explain.similarity(filters(10)), path, NAMES),
    "curves": lambda path: plots.curves_plot({0: curves(), 1: curves()}, path),
    "depth": lambda path: plots.depth_plot(explain.closed_by_layer(filters(10)), path),
    "closed": lambda path: plots.closed_plot(torch.arange(10), path, NAMES),
    "exactness": lambda path: plots.exactness_plot(torch.rand(10, 40) / 2, path),
    "heads": lambda path: plots.heads_plot({"qkv.weight": torch.rand(10, 3, 4)}, path, 2),
    "routing": lambda path: plots.routing_plot(torch.tensor([0.0, 0.7, 0.3]), path, NAMES, 0),
    "pictures": lambda path: plots.pictures(torch.rand(7, 3, 8, 8), path, NAMES[:7]),
}


@pytest.mark.parametrize("name", ["graph", "heat map", "curves", "pictures"])
def test_a_plot_writes_a_png_with_something_on_it(tmp_path, name):
    path = ALL[name](tmp_path / "a.png")
    assert path == tmp_path / "a.png"
    assert 0.003 < ink_share(path) < 0.95


@pytest.mark.parametrize("name", ALL)
def test_every_plot_keeps_its_text_as_text_at_a_readable_size(tmp_path, name):
    text = ALL[name](tmp_path / "a.svg").read_text()
    sizes = [float(s) for s in re.findall(r"font(?:-size)?: (?:italic )?([\d.]+)px", text)]
    assert sizes
    assert min(sizes) >= 8  # points in a picture of at most 6.9 inches


def test_a_plotted_history_says_what_each_line_is(tmp_path):
    found = texts(history().plot(tmp_path / "a.svg"))
    assert {"loss", "validation", "retain accuracy", "forget accuracy", "closed gates"} <= {*found}


def test_a_history_read_back_from_json_has_what_the_plot_needs(tmp_path):
    stored = json.loads(history().to_json())
    again = History(stored["recipe"], 0, [Record(**record) for record in stored["records"]])
    assert plots.history_plot(again, tmp_path / "a.png").stat().st_size > 5_000


def test_an_empty_history_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the history has no records"):
        plots.history_plot(History({}, 0), tmp_path / "a.png")


def test_the_graph_names_every_class_and_shared_unit(tmp_path):
    graph = explain.class_unit_graph(filters(10), "0")
    found = texts(plots.graph_plot(graph, tmp_path / "a.svg", NAMES))
    assert {*NAMES} <= {*found}
    assert {str(unit) for unit in graph.units} <= {*found}


def test_the_graph_of_100_classes_has_a_line_of_its_own_for_every_class(tmp_path):
    wf = filters(100)
    graph = explain.class_unit_graph(wf, "0")
    path = plots.graph_plot(graph, tmp_path / "a.svg", MANY_NAMES, explain.similarity(wf))
    text = path.read_text()
    heights = re.findall(r'translate\(([\d.]+) ([\d.]+)\)"[^>]*>a rather long', text)
    heights = heights or re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>a rather long', text)
    places = sorted(float(y) for _, y in heights)
    assert len(places) == 100
    assert min(b - a for a, b in pairwise(places)) >= 8  # one line apart
    assert any("clusters of classes" in line for line in texts(path))


def test_100_classes_are_bundled_in_clusters_of_classes_that_share_units(tmp_path):
    group = torch.arange(100) % 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 120), nn.Linear(120, 100))
    wf = wfilter.apply_weight_filtering(model, targets="0.weight")
    with torch.no_grad():
        wf.alphas.copy_(4 + 3 * torch.randn(20, 120)[group] + 0.5 * torch.randn(100, 120))
    graph = explain.class_unit_graph(wf, "0")
    for alike in (None, explain.similarity(wf)):
        bundles = plots.graph._bundles(graph, alike)
        assert sorted(row for rows in bundles for row in rows) == list(range(100))
        whole = sum(len({int(group[row]) for row in rows}) for rows in bundles)
        assert whole == 20, "no group is torn apart"


def test_two_matrices_can_be_drawn_in_one_order(tmp_path):
    path = plots.similarity_plot(torch.rand(3, 3), tmp_path / "a.svg", NAMES[:3], order=[2, 0, 1])
    shown = [text for text in texts(path) if text.startswith("kind")]
    assert shown == ["kind 2", "kind 0", "kind 1"] * 2


def test_a_matrix_of_100_classes_grows_so_that_names_do_not_overlap(tmp_path):
    path = plots.similarity_plot(explain.similarity(filters(100)), tmp_path / "a.svg", MANY_NAMES)
    heights = re.findall(r'y="([\d.]+)" transform="rotate\(-0[^>]*>a rather long', path.read_text())
    places = sorted(map(float, heights))
    assert len(places) == 100
    assert min(b - a for a, b in pairwise(places)) >= 7  # the font's size


def test_curves_show_their_areas(tmp_path):
    found = texts(plots.curves_plot({0: curves()}, tmp_path / "a.svg"))
    assert f"most closed gate first: area {curves().insertion.auc:.3f}" in found
    assert f"random order: area {curves().random_deletion.auc:.3f}" in found


def test_a_graph_without_shared_units_says_so(tmp_path):
    graph = explain.Graph("conv.weight", (0, 1), (), ())
    assert "no unit is shared" in texts(plots.graph_plot(graph, tmp_path / "a.svg", NAMES))


def test_heads_of_a_vit_are_drawn_block_by_block(tmp_path):
    wf = wfilter.apply_weight_filtering(zoo.create("vit-digits"))
    found = texts(plots.heads_plot(explain.head_usage(wf), tmp_path / "a.svg", 0))
    assert {"query", "key", "value", "blocks.0", "blocks.3"} <= {*found}


def test_heads_of_separate_projections_and_of_blocks_of_different_width_share_one_picture(tmp_path):
    usage = {
        "blocks.0.attn.qkv.weight": torch.rand(2, 3, 2),
        "blocks.0.attn.qkv.bias": torch.rand(2, 3, 2),
        "blocks.1.attn.q_proj.weight": torch.rand(2, 1, 4),
        "blocks.1.attn.kv.weight": torch.rand(2, 2, 4),
        "layers.2.self_attention.in_proj_weight": torch.rand(2, 3, 1),
        "blocks.1.attn.proj.weight": torch.rand(2, 1, 4),
    }
    found = plots.heads._by_block(usage)
    assert {block: "".join(parts) for block, parts in found.items()} == {
        "blocks.0": "qkv",
        "blocks.1": "qkv",
        "layers.2": "qkv",
    }
    assert torch.equal(found["blocks.1"]["v"], usage["blocks.1.attn.kv.weight"][:, 1])
    assert {"query", "blocks.0", "layers.2"} <= {
        *texts(plots.heads_plot(usage, tmp_path / "a.svg", 0))
    }
    assert not plots.has_heads({"blocks.1.attn.proj.weight": torch.rand(2, 1, 4)})


def test_heads_without_a_projection_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no q/k/v projection"):
        plots.heads_plot({}, tmp_path / "a.svg", 0)


def test_importing_wfilter_and_plots_does_not_import_matplotlib():
    import subprocess
    import sys

    code = "import sys, wfilter.plots, wfilter.page; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_plots_refuse_too_few_names(tmp_path):
    for draw in (plots.heat_map, plots.similarity_plot):
        with pytest.raises(ValueError, match="3 classes and 2 names"):
            draw(torch.rand(3, 3), tmp_path / "a.png", ["cat", "dog"])
    with pytest.raises(ValueError, match="3 classes and 2 names"):
        plots.closed_plot(torch.tensor([1, 2, 3]), tmp_path / "a.png", ["cat", "dog"])
    assert not list(tmp_path.iterdir())
