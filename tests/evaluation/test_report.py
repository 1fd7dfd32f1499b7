"""A report keeps every class's number, says what each column means, and survives being saved."""

import io
import json
from dataclasses import replace

import pytest

from wfilter.evaluation.report import Report
from wfilter.metrics.cells import Cell, Column

ACC_R = Column("Acc_r", "accuracy", "higher", "Accuracy on the other classes.")
ACC_F = Column("Acc_f", "accuracy", "lower", "Accuracy on the forgotten class.")
WORST = Column("worst Acc_f", "accuracy", "lower", "Worst.", derived="worst", source="Acc_f")
EPOCHS = Column("relearn", "relearning", "higher", "Epochs.", "epochs", cap=100)
GAP = Column("gap", "bar", "lower", "Gap.", derived="gap", source="Acc_r, Acc_f")
ROUTING = Column("routing", "bar", "lower", "Routing.", derived="routing")
COLUMNS = (ACC_R, ACC_F, WORST, EPOCHS, GAP, ROUTING)


def report():
    rows = {
        "ours": {
            "Acc_r": Cell({0: 0.9, 2: 0.8}),
            "Acc_f": Cell({0: 0.0, 2: 0.1}),
            "relearn": Cell({0: 4.0, 2: None}),
        },
        "rival_x": {"Acc_r": Cell({0: 0.7}), "Acc_f": Cell({0: 0.5}), "relearn": Cell({0: None})},
        "retrained": {"Acc_r": Cell({0: 1.0, 2: 0.8}), "Acc_f": Cell({0: 0.0, 2: 0.0})},
    }
    details = {"routing": {"ours": {0: {1: 1.0}}, "retrained": {0: {1: 0.5, 2: 0.5}}}}
    return Report(COLUMNS, rows, (0, 2), ("cat", "dog", "emu"), {"seed": 7}, details)


def test_mean_worst_and_failures_come_from_the_numbers_of_the_classes():
    assert report().value("ours", "Acc_r") == pytest.approx(0.85)
    assert report().worst("ours", "Acc_r") == (0.8, 2)
    assert report().value("ours", "worst Acc_f") == 0.1
    assert report().value("ours", "relearn") == 52
    assert report().value("retrained", "relearn") is None


def test_gap_and_routing_compare_with_the_retrained_model_on_the_classes_of_both():
    assert report().value("ours", "gap") == pytest.approx((0.05 + 0.05) / 2)
    assert report().value("rival_x", "gap") == pytest.approx((0.3 + 0.5) / 2)
    assert report().value("retrained", "gap") is None
    assert report().value("ours", "routing") == 0.5


def test_printed_report_is_plain_text_with_directions_and_definitions():
    text = str(report())
    assert "Acc_f ↓" in text
    assert "Accuracy on the forgotten class. (%, lower is better)" in text
    assert "10.0 emu" in text
    assert "52 (1)" in text
    assert "> 100 (1)" in text
    assert "seed: 7" in text
    assert "cat to dog 100 %" in text
    assert "\x1b" not in text
    lines = [line.split()[0] for line in text.splitlines() if line.startswith(("ours", "retr"))]
    assert lines[:2] == ["retrained", "ours"]


def test_rich_console_shows_the_same_numbers():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120)
    console.print(report())
    shown = console.file.getvalue()
    assert "10.0 emu" in shown
    assert "seed: 7" in shown


def test_markdown_has_a_table_for_each_group_of_columns():
    text = report().to_markdown()
    assert "### Accuracy\n\n| method | Acc_r ↑ | Acc_f ↓ | worst Acc_f ↓ |\n| --- | ---: |" in text
    assert "| ours | 85.0 | 5.0 | 10.0 emu |" in text
    assert text.count("\n### ") == 3


def test_report_names_methods_that_were_measured_on_some_classes_only():
    notes = [note for note in report().notes() if note.startswith("measured on")]
    assert len(notes) == 1
    assert notes[0].startswith("measured on cat only")
    assert notes[0].endswith(": rival_x")


def test_report_warns_of_a_retrained_model_that_is_too_weak_to_be_a_bar():
    rows = dict(report().rows)
    rows["original"] = {"Acc_r": Cell({0: 0.92, 2: 0.93})}
    assert "too little" not in str(replace(report(), rows=rows))
    rows["retrained"] = {"Acc_r": Cell({0: 0.6, 2: 0.7})}
    weak = replace(report(), rows=rows)
    assert "the retrained model has Acc_r 65.0, the original 92.5" in str(weak)
    assert "too little to be a bar" in weak.to_markdown()


def test_latex_escapes_names_and_keeps_definitions_as_comments():
    text = report().to_latex()
    assert r"rival\_x & 70.0 & 50.0" in text
    assert r"Acc\_f $\downarrow$" in text
    assert r"$>$ 100 (1)" in text
    assert "% Acc_r: Accuracy on the other classes." in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3


def test_json_round_trip_gives_an_equal_report(tmp_path):
    report().to_json(tmp_path / "a.json")
    assert Report.from_json(tmp_path / "a.json") == report()
    assert Report.from_json(str(tmp_path / "a.json")) == report()
    assert Report.from_json(report().to_json()) == report()


def test_files_that_are_no_reports_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.json does not exist"):
        Report.from_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not a report"):
        Report.from_json(tmp_path / "a.json")
    stored = json.loads(report().to_json()) | {"format": 2}
    with pytest.raises(ValueError, match="reads format 1"):
        Report.from_json(json.dumps(stored))


def test_joining_unites_methods_and_classes():
    def part(method, row, value):
        return Report((ACC_F,), {method: {"Acc_f": Cell({row: value})}}, (row,), None, {"seed": 1})

    whole = Report.join([part("a", 0, 0.0), part("a", 1, 1.0), part("b", 1, 0.5)])
    assert whole.classes == (0, 1)
    assert whole.value("a", "Acc_f") == whole.value("b", "Acc_f") == 0.5
    with pytest.raises(ValueError, match="two reports have a number for a, Acc_f, class 0"):
        Report.join([part("a", 0, 0.0), part("a", 0, 1.0)])
    other = replace(part("b", 0, 0.0), columns=(replace(ACC_F, definition="Another."),))
    with pytest.raises(ValueError, match="define Acc_f differently"):
        Report.join([part("a", 0, 0.0), other])
    with pytest.raises(ValueError, match="name their classes differently"):
        Report.join([part("a", 0, 0.0), replace(part("b", 0, 0.0), class_names=("x", "y"))])
    with pytest.raises(ValueError, match="no report to join"):
        Report.join([])


def test_comparison_says_which_numbers_are_better():
    new = report()
    old = replace(new, rows={"ours": {"Acc_r": Cell({0: 0.5}), "Acc_f": Cell({0: 0.0})}})
    found = {(line.method, line.column.name): line for line in new.against(old).lines}
    assert found["ours", "Acc_r"].verdict == "better"
    assert found["ours", "Acc_f"].verdict == "worse"
    assert ("rival_x", "Acc_r") not in found
    assert "| ours | Acc_r ↑ | 85.0 | 50.0 | +35.0 better |" in new.against(old).to_markdown()
    assert all(line.verdict == "" for line in new.against(new).lines)


def test_comparison_tells_where_a_column_was_measured_otherwise():
    old = replace(
        report(), columns=(ACC_R, replace(ACC_F, definition="Of 3 images."), *COLUMNS[2:])
    )
    compared = report().against(old)
    assert compared.notes == ("Acc_f is not the same there: Of 3 images.",)
    assert str(compared).endswith(compared.notes[0])
    assert f"\n- {compared.notes[0]}\n" in compared.to_markdown()
    assert report().against(report()).notes == ()


def test_report_for_other_classes_is_refused():
    with pytest.raises(ValueError, match=r"for the classes cat, emu\nand the other for cat\."):
        report().against(replace(report(), classes=(0,)))
    with pytest.raises(ValueError, match="share no number"):
        report().against(replace(report(), rows={"other": {"Acc_r": Cell({0: 1.0})}}))


def test_unknown_columns_and_methods_are_refused_with_the_known_names():
    with pytest.raises(KeyError, match="this report has Acc_r, Acc_f"):
        report().value("ours", "speed")
    with pytest.raises(KeyError, match="this report has ours, rival_x"):
        report().value("theirs", "Acc_r")


def test_a_class_that_failed_needs_a_cap_to_be_counted():
    assert Cell({0: 3.0, 1: None}).mean(cap=100) == 51.5
    with pytest.raises(ValueError, match="1 of 2 classes have no number: pass the cap"):
        Cell({0: 3.0, 1: None}).mean()
