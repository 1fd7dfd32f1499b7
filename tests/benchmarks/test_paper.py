"""The paper's tables: all of its numbers, and ours only from stored lines."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import imagenet
import wfilter
from common import RESULTS
from paper import cells as paper_cells
from paper import run as paper
from paper import runs as paper_runs
from paper import tables as paper_tables
from wfilter import data, zoo
from wfilter.evaluation.report import Report
from wfilter.metrics import METRICS, Budget, Cell, Problem

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paper"
METHODS = ["original", "auto", "distill", "paper", "random_labels", "negative_gradients"]


def line(**changes):
    """A stored line of a filtered model that closed every gate."""
    wf = wfilter.apply_weight_filtering(torch.nn.Linear(4, 3), targets="*", init=-1000.0)
    data = (torch.randn(30, 4), torch.arange(30) % 3)
    report = wfilter.evaluate(wf, data, metrics=["accuracy"])
    report = {**json.loads(report.to_json())}
    report["rows"] = {"wfilter": report["rows"]["wfilter"]}
    facts = {"dataset": "cifar10", "backbone": "resnet18", "method": "distill", "seed": 0}
    return {**facts, "rows": [0, 1, 2], "report": report, **changes}


def cells(table, *start):
    (row,) = [text for text in table.splitlines() if text.startswith(f"| {' | '.join(start)} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][len(start) :]


def runs(*lines):
    return [paper_runs.run_of(stored) for stored in lines]


def test_without_lines_the_tables_have_the_papers_numbers_and_dashes():
    table = paper_tables.table1([])
    assert cells(table, "cifar10", "resnet18", "paper") == [
        "79.7 / 9.25 / 63.9 / 94.3 (9)",
        "- (not run)",
        "-",
    ]
    assert table.count("\n| ") == len(paper_tables.PAPER) + 1
    assert cells(paper_tables.table2([]), "imagenet", "vit_tiny") == [
        "0.60 / 0.04",
        "-",
        "- (not run)",
        "-",
    ]


def test_a_stored_line_fills_its_cell_and_no_other():
    stored = line()
    table = paper_tables.table1(runs(stored))
    theirs, ours, count = cells(table, "cifar10", "resnet18", "distill")
    report = wfilter.Report.from_json(json.dumps(stored["report"]))
    assert theirs == "-"
    assert ours.startswith(f"{100 * report.value('wfilter', 'Acc_r'):.2f} / ")
    assert count == "3, 1, 30"
    assert cells(table, "cifar10", "resnet18", "paper")[1] == "- (not run)"


def test_seeds_have_a_spread_and_their_test_images_a_range():
    both = [run("resnet18", Acc_r=value, seed=seed) for seed, value in enumerate((90.0, 92.0))]
    both[1] = replace(both[1], test_images=1000)
    _, ours, count = cells(paper_tables.table1(both), "cifar10", "resnet18", "distill")
    assert ours == "91.00 ± 1.41 / - / - / -"
    assert count == "10, 2, 1,000 to 10,000"


def run(backbone, *, dataset="cifar10", method="distill", seed=0, epochs=(), cap=100, **numbers):
    facts = {"rows": 10, "test_images": 10_000, "epochs": epochs, "cap": cap}
    return paper_runs.Run(dataset, backbone, method, seed, numbers=numbers, **facts)


def listed(text):
    """The lines of the list at the end of a table."""
    part = text.split("## Where the paper")[1].split("\n## ")[0]
    rows = [row for row in part.split("\n") if row.startswith("| ")][1:]
    return [tuple(cell.strip() for cell in row.split("|")[1:-2]) for row in rows]


def test_the_list_has_the_numbers_of_the_paper_that_are_better_in_their_own_direction():
    ours = run("resnet18", Acc_r=79.0, Acc_f=9.26, ZRF=64.0, epochs=(95,) * 10)
    worse = [("cifar10", "resnet18", "Acc_r ↑", "79.7", "79.00")]
    worse += [("cifar10", "resnet18", "Acc_f ↓", "9.25", "9.26")]
    assert listed(paper_tables.table1([ours])) == worse
    assert "In 2 of the 4 numbers" in paper_tables.table1([ours])
    curves = run("resnet18", insertion=0.68, deletion=0.064)  # 0.69 and 0.06 in the paper
    worse = [("cifar10", "resnet18", "insertion ↑", "0.69", "0.680")]
    assert listed(paper_tables.table2([curves])) == worse


def test_the_default_has_a_list_of_its_own_and_each_number_in_it_a_reason():
    made = [run("vgg16", method="auto", ZRF=47.9), run("vgg16", method="paper", ZRF=57.2)]
    text = paper_tables.table1(made)
    part = text.split("better than our `auto`")[1].split("\n## ")[0]
    assert "| cifar10 | vgg16 | ZRF ↑ | 57.4 | 47.9 | 57.2 |" in part
    assert "- ZRF: how flat the answers on the forgotten class are." in part
    columns = {**paper_cells.COLUMNS, **paper_cells.CURVES}
    stored = paper_runs.read_runs(RESULTS / "paper.jsonl")
    for method in ("auto", "distill"):
        worse = [p.column for p in paper_cells.pairs(stored, columns, method) if p.behind]
        assert "unexplained" not in [paper_cells.reason(column, method) for column in worse]
    assert paper_cells.reason("Acc_f", "auto") == "unexplained"


def test_a_default_that_ended_with_feature_rows_has_its_reason_in_place_of_curves():
    table = paper_tables.table2([run("vgg16", method="auto", Acc_r=92.0)])
    assert cells(table, "cifar10", "vgg16")[1:3] == [
        "auto",
        "- (it ended with feature rows, which have no gates to order)",
    ]


def test_relearning_by_alphas_stands_beside_that_of_all_weights():
    made = replace(run("vgg16", epochs=(3, 5), cap=10), by_alphas=(2, None))
    shown = paper_cells.shown([made], paper_cells.RELEARN)
    assert shown == "4.0 (0 of 2; cap 10), by alphas 6.0 (1 of 2; cap 10)"


def test_the_few_images_behind_zrf_stand_beside_the_test_images():
    made = replace(run("vgg16", method="auto", ZRF=90.0), few=200)
    count = cells(paper_tables.table1([made]), "cifar10", "vgg16", "auto")[2]
    assert count == "10, 1, 10,000 (200)"
    assert paper_cells.few_of([replace(made, few=10_000)]) == ""
    assert paper_cells.few_of([replace(made, numbers={"Acc_r": 90.0})]) == ""


def test_a_number_that_the_paper_would_print_alike_is_not_worse():
    ours = run("vit_tiny", Acc_r=73.46, Acc_f=0.04)  # 73.5 and 0.0 in the paper
    assert "In 0 of the 2 numbers" in paper_tables.table1([ours])


@pytest.mark.parametrize(
    ("epochs", "cap", "verdict"),
    [
        ((None,) * 10, 100, None),  # the paper: >100 (10)
        ((20,) * 10, 30, "20.0 (0; cap 30)"),
        ((20,) * 9 + (None,), 30, "21.0 (1; cap 30)"),  # at best 28
        ((None,) * 10, 30, ">30 (10; cap 30), undecided: the cap came first"),
    ],
)
def test_relearning_that_was_stopped_early_is_not_called_worse(epochs, cap, verdict):
    found = listed(paper_tables.table1([run("vit_tiny", epochs=epochs, cap=cap)]))
    assert [row[-1] for row in found] == ([verdict] if verdict else [])


def test_a_line_of_another_original_than_the_tables_is_left_out(monkeypatch, tmp_path):
    stored = [
        line(method="original", base="new"),
        line(method="distill", base="old"),
        line(method="paper", base="new"),
        line(method="random_labels"),  # from before lines told it
        line(method="retrained"),  # starts from none, but relearns up to an original's accuracy
    ]
    (tmp_path / "paper.jsonl").write_text("\n".join(map(json.dumps, stored)) + "\n")
    run_of = paper_runs.run_of
    monkeypatch.setattr(
        paper_runs, "run_of", lambda line: dataclasses.replace(run_of(line), epochs=(3.0,))
    )
    kept = {run.method: run for run in paper_runs.read_runs(tmp_path / "paper.jsonl")}
    assert [*kept] == ["original", "paper", "retrained"]
    assert kept["paper"].epochs
    assert not kept["retrained"].epochs
    latest = paper_runs.read_latest(tmp_path / "paper.jsonl")
    assert [found["method"] for found in latest] == ["original", "paper"]
    accuracy = 100 * Report.from_json(json.dumps(stored[0]["report"])).value("wfilter", "Acc_r")
    more = {"model": "resnet18-cifar", "name": "distill", "acc_r": 93.0, "acc_f": 0.5, "seed": 0}
    for other, expected in ((accuracy + 1, []), (accuracy, [93.0])):  # of the original under it
        text = json.dumps({**more, "original": other, "test_images": 30})
        (tmp_path / "untraining.jsonl").write_text(text + "\n")
        made = paper_runs.read_runs(tmp_path / "paper.jsonl")
        assert [r.numbers["Acc_r"] for r in made if r.method == "distill"] == expected


def test_a_run_from_another_original_is_refused_before_it_begins(tmp_path):
    args = arguments(tmp_path, method="distill", quick=False, out=tmp_path / "paper.jsonl")
    stored = line(dataset=args.dataset, backbone=args.backbone, method="original", base="old")
    args.out.write_text(json.dumps(stored) + "\n")
    with pytest.raises(SystemExit, match="--method original --again"):
        paper.refuse_another_original(args, "new")
    paper.refuse_another_original(args, "old")
    for method, seed, told in (("original", 0, False), ("auto", 0, True), ("auto", 1, True)):
        args.method, args.seed = method, seed
        assert paper.refuse_another_original(args, "new") is told
    assert paper.refuse_another_original(args, "old") is False


def test_every_seed_starts_from_the_first_original_unless_it_has_its_own(tmp_path):
    for seed, bias in ((0, 1.0), (2, 3.0)):
        model = zoo.create("resnet18-mnist")
        torch.nn.init.constant_(model.fc.bias, bias)
        save_file(model.state_dict(), tmp_path / f"resnet18-mnist-s{seed}.safetensors")
    for seed, bias in ((0, 1.0), (1, 1.0), (2, 3.0)):
        model, _ = paper.original(arguments(tmp_path, seed=seed))
        assert float(model.fc.bias[0].detach()) == bias
    stored = [line(method="original", base="a"), line(seed=1, base="a"), line(seed=2, base="b")]
    (tmp_path / "paper.jsonl").write_text("\n".join(map(json.dumps, stored)))
    kept = paper_runs.read_runs(tmp_path / "paper.jsonl")
    assert [(run.method, run.seed) for run in kept] == [("original", 0), ("distill", 1)]


def test_accuracies_on_more_test_images_come_from_the_file_of_untraining(tmp_path):
    (tmp_path / "paper.jsonl").write_text(json.dumps(line()) + "\n")
    facts = {"model": "resnet18-cifar", "name": "distill", "original": 94.0, "acc_r": 93.0}
    more = [
        {**facts, "seed": seed, "acc_f": 0.5, "test_images": images}
        for seed, images in ((0, 10), (0, 5000), (1, 5000))
    ]
    more.append({**more[0], "name": "paper", "recipe": {"epsilon": 1e-6}})  # of another recipe
    (tmp_path / "untraining.jsonl").write_text("\n".join(map(json.dumps, more)) + "\n")
    table = paper_tables.table1(paper_runs.read_runs(tmp_path / "paper.jsonl"))
    theirs, ours, count = cells(table, "cifar10", "resnet18", "distill")
    assert (theirs, count) == ("-", "3 to 10, 2, 5,000")
    assert ours.startswith("93.00 ± 0.00 / 0.50 ± 0.00 / ")
    assert cells(table, "cifar10", "resnet18", "original")[1].startswith("94.00 / 94.00")
    assert cells(table, "cifar10", "resnet18", "paper")[1] == "- (not run)"


def test_imagenet_has_the_last_marked_line_of_each_part_held_out(tmp_path):
    line = {"original": 75.0, "acc_r": 70.0, "acc_f": 1.0, "zrf": 0.5, "rows": 1000, "seed": 0}
    line |= {f"{kind}{name}": 0.9 for kind in ("", "random_") for name in ("insertion", "deletion")}
    line |= {"test_images": 1000, "table": True}
    trial = {**line, "acc_r": 60.0, "test": "k1", "table": False}
    path = tmp_path / "imagenet.jsonl"
    path.write_text("\n".join(map(json.dumps, [{**line, "acc_r": 50.0}, line, trial])))
    assert "| 70.00 / 1.00 / 50.0 / - | 1,000, 1, 1,000 |" in table_in(tmp_path)
    assert cells(table_in(tmp_path), "imagenet", "vit_tiny", "original")[1].startswith("75.00 / 75")
    other, chosen_on = {**line, "acc_r": 72.0, "test": "k0"}, {**trial, "table": True}
    path.write_text("\n".join(map(json.dumps, [line, other, trial, chosen_on])))
    assert "| 71.00 ± 1.41 / 1.00 ± 0.00 / 50.0 ± 0.0 / - | 1,000, 2," in table_in(tmp_path)
    auto = {"backbone": "resnet18", "method": "auto", "acc_r": 66.0, "original_zrf": 0.35}
    path.write_text("\n".join(map(json.dumps, [line, other, {**line, **auto, "recipe": "auto"}])))
    assert "| 71.00 ± 1.41 / 1.00 ± 0.00 / 50.0 ± 0.0 / - | 1,000, 2," in table_in(tmp_path)
    assert cells(table_in(tmp_path), "imagenet", "resnet18", "auto")[1] == "66.00 / 1.00 / 50.0 / -"
    before = cells(table_in(tmp_path), "imagenet", "resnet18", "original")[1]
    assert before == "75.00 / 75.00 / 35.0 / -"
    again = {**line, "acc_r": 71.0, "seed": 1, "recipe": "new"}  # the other part has an old recipe
    path.write_text("\n".join(map(json.dumps, [line, other, again])))
    assert "| 71.00 / 1.00 / 50.0 / - | 1,000, 1," in table_in(tmp_path)


def test_imagenets_lines_of_the_default_fill_its_cells_until_there_is_zrf(tmp_path):
    line = {"original": 64.2, "acc_r": 63.7, "acc_f": 0.0, "test_images": 1000, "seed": 0}
    line |= {"problem": "resnet18-imagenet", "stage": "reroute"}
    digits = {**line, "problem": "cnn-digits"}
    (tmp_path / "auto.jsonl").write_text("\n".join(map(json.dumps, [line, digits])))
    assert cells(table_in(tmp_path), "imagenet", "resnet18", "auto")[1] == "63.70 / 0.00 / - / -"
    later = {**line, "zrf": 0.5, "backbone": "resnet18", "method": "auto", "rows": 1000}
    later |= {"table": True, "test": "k2", "recipe": "reroute"}
    (tmp_path / "imagenet.jsonl").write_text(json.dumps(later))
    assert cells(table_in(tmp_path), "imagenet", "resnet18", "auto")[1] == "63.70 / 0.00 / 50.0 / -"


def test_zrf_from_before_answers_were_as_unsure_as_due_is_left_out(tmp_path):
    line = {"original": 75.0, "acc_r": 76.0, "acc_f": 0.0, "rows": 1000, "test_images": 1000}
    line |= {"backbone": "vit_tiny", "method": "auto", "table": True, "recipe": "reroute"}
    old = {**line, "test": "k0", "zrf": 0.36, "commit": paper_runs.TOO_SURE[0]}
    new = {**line, "test": "k2", "zrf": 0.45, "commit": "later"}
    (tmp_path / "imagenet.jsonl").write_text("\n".join(map(json.dumps, [old, new])))
    ours = cells(table_in(tmp_path), "imagenet", "vit_tiny", "auto")[1]
    assert ours == "76.00 ± 0.00 / 0.00 ± 0.00 / 45.0 / -"


@pytest.mark.parametrize(
    ("options", "enters"),
    [
        ("", True),
        ("--train train1+k1+k2 --test k0", True),
        ("--train train1+k0+k2 --test k1", False),  # settings were chosen on it
        ("--train train1+k0 --test k2", False),
        ("--set margin=20", False),
        ("--units qkv", False),
        ("--others 1", False),
        ("--first 8", False),
    ],
)
def test_only_a_whole_run_with_the_usual_settings_enters_the_table(monkeypatch, options, enters):
    monkeypatch.setattr(sys, "argv", ["imagenet.py", *options.split()])
    assert imagenet.in_table(imagenet.parse_arguments()) is enters


def table_in(folder):
    return paper_tables.table1(paper_runs.read_runs(folder / "paper.jsonl"))


def test_the_pages_and_the_tables_are_those_of_the_stored_lines():
    made = paper_runs.read_runs(RESULTS / "paper.jsonl")
    for page in paper.PAGES:
        text = page.read_text(encoding="utf-8")
        assert paper_tables.with_tables(text, made) == text, "python benchmarks/paper --tables"
    for name, table in (("table1.md", paper_tables.table1), ("table2.md", paper_tables.table2)):
        assert (RESULTS / name).read_text(encoding="utf-8") == table(made), name


def test_the_readme_shows_ours_beside_the_papers_with_the_original_in_brackets():
    made = [run("vgg16", Acc_r=91.0, Acc_f=0.5), run("vgg16", method="original", Acc_r=92.0)]
    (row,) = [r for r in paper_tables.accuracies(made).split("\n") if "VGG-16 |" in r]
    assert row.split(" | ")[3:5] == ["80.2 / 18.3 (93.0)", "`distill` 91.0 / 0.50 (92.0)"]


def test_the_readme_shows_the_default_where_it_was_run_beside_the_original_it_started_from():
    parts = [run("vit_tiny", method="original", seed=seed, Acc_r=70.0 + seed) for seed in (0, 2)]
    made = [*parts, run("vit_tiny", Acc_r=60.0), run("vit_tiny", method="auto", seed=2, Acc_r=71.0)]
    (row,) = [r for r in paper_tables.accuracies(made).split("\n") if "ViT-T |" in r]
    assert row.split(" | ")[4] == "71.0 / - (72.0)"


@pytest.mark.parametrize("page", ["<!-- table: sizes -->\n", "<!-- table: x -->\n<!-- end -->"])
def test_a_page_without_the_markers_is_refused(page):
    with pytest.raises(ValueError, match="a page needs <!-- table: NAME --> with an <!-- end -->"):
        paper_tables.with_tables(page, [])


def test_the_default_on_a_network_of_its_own_has_its_cell_with_that_networks_accuracy(tmp_path):
    file = tmp_path / "paper.jsonl"
    lines = [line(method=name, base="a") for name in ("original", "distill")]
    lines += [line(method=name, base="b", original=87.5) for name in ("auto",)]
    file.write_text("".join(json.dumps(stored) + "\n" for stored in lines))
    told = {"problem": "vgg16-cifar", "seed": 0, "acc_r": 91.0, "acc_f": 0.0, "original": 90.0}
    (tmp_path / "auto.jsonl").write_text(json.dumps({**told, "test_images": 500}) + "\n")
    made = paper_runs.read_runs(file)
    table = paper_tables.table1(made)
    assert cells(table, "cifar10", "resnet18", "auto")[1].endswith("(from 87.50)")
    assert "from" not in cells(table, "cifar10", "resnet18", "distill")[1]
    ours, count = cells(table, "cifar10", "vgg16", "auto")[1:]
    assert (ours, count) == ("91.00 / 0.00 / - / - (from 90.00)", "10, 1, 500")
    assert " (87.5) |" in paper_tables.accuracies(made)
    assert "| 91.0 / 0.00 (90.0) |" in paper_tables.accuracies(made)


def relearning(epochs, cap, **changes):
    """A stored line of relearn times alone, one for each class."""
    problem = Problem(torch.nn.Identity(), [], None, (0,), 10, Budget(relearn_epochs=cap))
    columns = tuple(METRICS["relearn"].columns(problem))
    rows = {"wfilter": {"relearn weights": Cell(dict(enumerate(epochs)))}}
    report = Report(columns, rows, tuple(range(10)))
    return line(report=json.loads(report.to_json()), **changes)


@pytest.mark.parametrize(
    ("epochs", "cap", "printed"),
    [
        ([20] * 9 + [None], 100, "28.0 (1)"),
        ([None] * 10, 100, ">100 (10)"),
        ([5, None, 4], 30, "13.0 (1 of 3; cap 30)"),
        ([None, None], 30, ">30 (2 of 2; cap 30)"),
    ],
)
def test_relearn_times_are_printed_as_in_the_paper(epochs, cap, printed):
    assert paper_cells.relearned(runs(relearning(epochs, cap))) == printed


def test_relearn_times_of_seeds_are_pooled_and_a_lower_cap_is_left_out():
    lines = [relearning([10, None], 100), relearning([30, 20], 100, seed=1), relearning([1], 5)]
    assert paper_cells.relearned(runs(*lines)) == "40.0 (1 of 4)"


def test_of_two_lines_with_the_same_key_the_later_counts(tmp_path):
    lines = [relearning([1], 5), relearning([1], 5, seed=1), relearning([2], 5)]
    (tmp_path / "paper.jsonl").write_text("\n".join(map(json.dumps, lines)))
    kept = paper_runs.read_runs(tmp_path / "paper.jsonl")
    assert {made.seed: made.epochs for made in kept} == {0: (2,), 1: (1,)}


def test_relearn_times_of_the_same_filters_outlive_a_line_that_has_none(tmp_path):
    first = line(options={"verdict": "met"}, base="a")
    (rows,) = first["report"]["rows"].values()
    timed = relearning([4], 10, options={"verdict": "met"}, base="a")
    (times,) = timed["report"]["rows"].values()
    timed["report"]["columns"] += first["report"]["columns"]
    times |= rows
    others = [{**first, "options": {"verdict": "another"}}, {**first, "base": "b"}, line()]
    for later, expected in ((first, (4,)), *((other, ()) for other in others)):
        stored = [timed, later]
        (tmp_path / "paper.jsonl").write_text("\n".join(map(json.dumps, stored)))
        (kept,) = paper_runs.read_runs(tmp_path / "paper.jsonl")
        assert kept.epochs == expected


def arguments(folder, **changes):
    given = {"dataset": "mnist", "backbone": "resnet18", "seed": 0, "originals": folder}
    return argparse.Namespace(**{**given, "random_weights": False, **changes})


def test_lacking_retrained_models_are_asked_for_with_the_originals_own_command(tmp_path):
    command = "python benchmarks/references.py --model resnet18-mnist --lr 0.05 --out first"
    log = [
        {"command": "another seed", "settings": {"model": "resnet18-mnist", "seed": 1}},
        {"command": "an older one", "settings": {"model": "resnet18-mnist", "seed": 0}},
        {"command": f"{command} --each 1", "settings": {"model": "resnet18-mnist", "seed": 0}},
        {
            "command": "goes on",
            "settings": {
                "model": "resnet18-mnist",
                "seed": 0,
                "start": "resnet18-mnist-s0.safetensors",
            },
        },
        {"command": "lacks 0", "settings": {"model": "resnet18-mnist", "seed": 0, "without": 0}},
    ]
    (tmp_path / "references.jsonl").write_text("\n".join(map(json.dumps, log)))
    with pytest.raises(SystemExit) as stopped:
        paper.retrained(arguments(tmp_path), (3, 8))
    wanted = [f"{command} --out {tmp_path} --without {row}" for row in (3, 8)]
    assert str(stopped.value).splitlines()[1:] == wanted


def test_retrained_models_are_those_trained_without_the_class(tmp_path):
    model = zoo.create("resnet18-mnist")
    save_file(model.state_dict(), tmp_path / "resnet18-mnist-s0-without3.safetensors")
    models, files = paper.retrained(arguments(tmp_path), (3,))
    assert torch.equal(models[3].conv1.weight, model.conv1.weight)
    assert files == ["resnet18-mnist-s0-without3.safetensors"]


def test_rivals_take_the_options_given_and_tell_those_they_had(monkeypatch):
    asked = []

    def method(model, forget, train, *, epochs=7, lr=0.5, retain_weight=0.0, seed=0):
        half = torch.is_autocast_enabled("cpu")
        asked.append((forget, len(train), epochs, lr, retain_weight, half))
        return model

    images = data.load("digits", "test")
    options = {"rival_images": 12, "rival_batch_size": 6, "rival_epochs": None, "rival_lr": 0.1}
    for name, half in (("random_labels", False), ("negative_gradients", True)):
        monkeypatch.setitem(paper.baselines.METHODS, name, method)
        args = arguments(None, method=name, rival_retain=0.9, bfloat16=half, **options)
        _, told = paper.make_method(args, torch.nn.Identity(), images, (2, 5))
        weight = told.pop("retain_weight", 0.0)
        assert weight == (0.9 if name == "negative_gradients" else 0.0)
        assert asked[-2:] == [(row, 2, 7, 0.1, weight, half) for row in (2, 5)]
        assert told == {"images": 12, "batch_size": 6, "epochs": 7, "lr": 0.1, "bfloat16": half}


def test_rivals_in_half_precision_learn_from_the_weights_they_have_now():
    images = data.load("digits", "test")
    options = {"rival_images": 300, "rival_batch_size": 30, "rival_epochs": 6, "rival_lr": 0.05}
    args = arguments(None, method="random_labels", bfloat16=True, **options)
    torch.manual_seed(0)
    method, _ = paper.make_method(args, zoo.create("cnn-digits"), images, (2,))
    shown, labels = images.batch(torch.arange(300))
    kept = labels != 2
    assert (method.model(2)(shown[kept]).argmax(1) == labels[kept]).float().mean() > 0.8


def test_imagenets_vit_finds_its_weights_and_every_original_its_own_normalisation(
    monkeypatch, tmp_path
):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "timm-vit_tiny_patch16_224.safetensors").touch()
    asked = {}
    monkeypatch.setattr(zoo, "build", lambda spec, weights=None: asked.update({spec: weights}))
    for backbone in paper.TIMM:
        args = arguments(
            tmp_path, weights=None, root=tmp_path, random_weights=backbone != "vit_tiny"
        )
        args.dataset, args.backbone = "imagenet", backbone
        _, facts = paper.original(args)
        assert facts["mean"][0] == (0.5 if "vit" in backbone else 0.485)
    assert asked[f"timm:{paper.TIMM['vit_tiny']}"].parent == tmp_path / "weights"
    assert asked[f"timm:{paper.TIMM['resnet50']}"] is None


def test_a_few_images_have_some_of_the_classes_needed():
    digits = data.load("digits")
    assert (paper.shuffled(digits, 40, 0, [3]).labels == 3).sum() == 10
    plain, needless = paper.shuffled(digits, 40, 0), paper.shuffled(digits, 40, 0, [])
    assert torch.equal(plain.labels, needless.labels)


@pytest.mark.slow
@pytest.mark.skipif("WFILTER_DATA" not in os.environ, reason="WFILTER_DATA names no data folder")
@pytest.mark.parametrize(
    "options",
    [
        *(["--backbone", "vgg16", "--method", method] for method in METHODS),
        ["--dataset", "imagenet", "--backbone", "resnet18", "--random-weights"],
    ],
    ids=[*METHODS, "imagenet"],
)
def test_a_quick_run_goes_the_whole_way_and_stores_nothing(options, tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", *options]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "paper.jsonl")],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert "Acc_r" in done.stdout
    assert not list(tmp_path.iterdir())
