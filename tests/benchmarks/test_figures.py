import json

import pytest

import figures


def audit_line(method, row, retain, probe):
    cells = {"Acc_r": {"by_class": {str(row): retain}}, "probe f": {"by_class": {str(row): probe}}}
    line = {"method": method, "class": row, "network": "net"}
    return {**line, "report": {"rows": {method: cells}}}


def served(server, tenants):
    return {"server": server, "tenants": tenants, "memory_mib": 900, "cpu_ms": 7.5}


@pytest.fixture
def results(tmp_path):
    audits = [
        audit_line("retrained", 3, 0.99, 0.7),
        audit_line("logit_mask", 3, 0.98, 0.9),
        audit_line("logit_mask", 5, 0.10, 0.1),
        audit_line("some_rival", 3, 0.97, 0.8),
    ]
    rows = [
        {"model": "wfilter:net", "method": m, "forget": 1, "acc_r": 90.0, "linear_probe": 5.0}
        for m in ("row", "retrained")
    ]
    serve = [served(s, n) for s in figures.SERVERS for n in (1, 10, 100)]
    stored = {"audit_mnist": audits, "feature_rows": rows, "serve": serve}
    for name, lines in stored.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def test_methods_are_compared_on_the_classes_that_all_were_measured_on(results):
    (points,) = figures.audits(results)
    assert points.classes == {3}
    assert points.point("logit mask") == pytest.approx((90, 98))


def test_every_figure_is_drawn_for_light_and_for_dark_pages(results, tmp_path):
    made = figures.draw_all(results, tmp_path / "out")
    assert {path.stem for path in made} == {
        name + end for name in ("probe-mnist", "probe-rows-net", "tenants") for end in ("", "-dark")
    }
    texts = {path.stem: path.read_text() for path in made}
    assert (tmp_path / "out" / "probe.md").read_text().count("figures/probe-") == 4
    assert "some rival" in texts["probe-mnist"]
    assert "forgetting class 3" in texts["probe-mnist"]
    assert figures.INK in texts["tenants"]
    assert figures.INK not in texts["tenants-dark"]
