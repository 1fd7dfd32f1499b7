"""The audit: a mask is found out, a retrained model is not, and what makes no sense is refused."""

import copy
import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import digits
import wfilter
from wfilter import Audit, Budget, baselines
from wfilter.core.mask import Mask

SMALL = Budget(test_images=300, train_images=400, zrf_draws=1, shots=(1, 5), shot_steps=8)
FORGET = 3


@cache
def retrained():
    """A network of the same kind that never saw the class."""
    images, labels = digits.data()[0]
    kept = labels != FORGET
    return digits.trained_on((images[kept], labels[kept]))


@cache
def found() -> Audit:
    base = digits.trained_cnn()
    return wfilter.audit(
        nn.Sequential(copy.deepcopy(base), Mask([FORGET])),
        digits.data()[1],
        train=digits.data()[0],
        forget=FORGET,
        original=base,
        retrained=retrained(),
        others={"another retrained": {FORGET: copy.deepcopy(retrained())}},
        name="mask",
        budget=SMALL,
    )


def test_a_logit_mask_is_hidden_at_the_output_only():
    said = found().verdict("mask", FORGET)
    assert said.said == "hidden at the output only"
    assert any("1-shot Acc_f" in reason for reason in said.because)
    assert found().report.of_class("mask", "Acc_f", FORGET) == 0


def test_a_retrained_model_is_as_if_never_learned():
    assert found().verdict("another retrained", FORGET).said == "as if never learned"
    assert found().report.value("another retrained", "IDI") == pytest.approx(0, abs=1e-6)
    assert found().report.value("mask", "IDI") == pytest.approx(1)
    assert found().report.value("another retrained", "average gap") == 0


def test_a_model_that_forgot_nothing_is_still_known():
    base = digits.trained_cnn()
    test, train = digits.data()[1], digits.data()[0]
    copied = copy.deepcopy(base)
    alone = wfilter.audit(copied, test, train=train, forget=FORGET, budget=SMALL)
    assert alone.verdict("model", FORGET).said == "still known"
    masked = nn.Sequential(copied, Mask([FORGET]))
    hidden = wfilter.audit(
        masked, test, train=train, forget=FORGET, original=base, budget=SMALL
    ).verdict("model", FORGET)
    assert hidden.said == "hidden at the output only"
    assert "original" in hidden.because[0]


def test_a_ruined_network_is_told_at_what_cost_it_forgets():
    ruined = copy.deepcopy(digits.trained_cnn())
    nn.init.zeros_(list(ruined.parameters())[-2])  # the head's weight: one answer for all images
    test, train = digits.data()[1], digits.data()[0]
    asked = {"train": train, "forget": FORGET, "retrained": retrained(), "budget": SMALL}
    said = wfilter.audit(ruined, test, original=digits.trained_cnn(), **asked)
    assert re.search(
        r"at the cost of the other classes: Acc_r 1\d\.\d, retrained 9\d\.\d",
        str(said.verdict("model", FORGET)),
    )
    assert "cost" not in str(found().verdict("mask", FORGET))


def test_what_was_not_measured_cannot_be_as_if_never_learned():
    whole = found().report
    rows = {m: {n: c for n, c in row.items() if "shot" not in n} for m, row in whole.rows.items()}
    said = Audit(replace(whole, rows=rows)).verdict("another retrained", FORGET)
    assert str(said) == (
        "nothing found, but not all was measured (without relearning from few images)"
    )


def test_the_audit_is_a_section_of_the_page_of_a_filtered_model(tmp_path):
    wf = wfilter.apply_weight_filtering(copy.deepcopy(digits.trained_cnn()))
    options = {"per_class": 2, "curve_images": 1, "steps": 1, "classes": [FORGET]}
    batches = digits.batches(digits.data()[1])
    page = wfilter.page.write_page(wf, batches, tmp_path / "a.html", audit=found(), **options)
    ids = re.findall(r'\bid="([^"]+)"', page.read_text())
    assert len(ids) == len(set(ids))
    assert "Verdicts" in page.read_text()


def test_every_share_has_a_standard_error_that_falls_with_more_images():
    report = found().report
    images = int((digits.data()[1][1] == FORGET).sum())
    share = report.of_class("mask", "probe f", FORGET)
    expected = (share * (1 - share) / min(images, 30)) ** 0.5
    assert report.error("mask", "probe f", FORGET) == pytest.approx(expected, abs=0.02)
    assert report.error("mask", "ZRF") is None
    assert "±" in str(found())


def test_audit_is_written_as_text_markdown_latex_json_and_a_page(tmp_path):
    audit = found()
    assert "hidden at the output only" in str(audit)
    assert "### Verdicts" in audit.to_markdown()
    assert r"\begin{tabular}" in audit.to_latex()
    again = Audit.from_json(audit.to_json())
    assert again == audit
    assert json.loads(audit.to_json())["details"]["verdict"]["mask"][str(FORGET)]
    page = wfilter.page.write_audit(audit, tmp_path / "a.html").read_text()
    for table in page.split("<table>")[1:]:  # a table of text has no tags of its own in its cells
        assert "&lt;" not in table.split("</table>")[0]
        assert all(f'scope="row">{m}<' in table for m in audit.methods)
    assert "hidden at the output only" in page
    assert "<svg" in page
    assert all(column.definition in audit.to_markdown() for column in audit.report.columns[:3])


def test_filters_are_audited_for_all_their_classes_or_some():
    wf = wfilter.apply_weight_filtering(copy.deepcopy(digits.trained_cnn()))
    budget = replace(SMALL, shots=())
    audit = wfilter.audit(
        wf, digits.data()[1], train=digits.data()[0], forget=[2, 5], budget=budget
    )
    assert audit.methods == ("wfilter",)
    assert audit.report.classes == (2, 5)
    assert audit.verdict("wfilter", 2).said == "still known"


# ---- refusals -----------------------------------------------------------------------------------


def refused(match: str, model: nn.Module, **options) -> None:
    given = {"train": digits.data()[0], "forget": FORGET, "budget": SMALL, **options}
    with pytest.raises(ValueError, match=match):
        wfilter.audit(model, digits.data()[1], **given)


def test_models_with_another_number_of_classes_are_refused():
    base = digits.trained_cnn()
    wide = nn.Sequential(copy.deepcopy(base), nn.Linear(10, 12))
    refused("retrained has 12 outputs\nand the audited problem 10 classes", base, retrained=wide)


def test_a_reference_that_knows_the_class_is_refused():
    base = digits.trained_cnn()
    masked = baselines.logit_mask(base, FORGET, digits.batches(digits.data()[0]))
    refused("it has seen the class", masked, retrained=copy.deepcopy(base))


def test_a_model_with_its_classes_in_another_order_is_refused():
    base = digits.trained_cnn()
    order = torch.arange(10).roll(1)

    class Rolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(base)

        def forward(self, x):
            return self.inner(x)[:, order]

    refused("its classes in another order", Rolled(), original=base)


def test_a_plain_model_without_a_class_and_one_reference_for_two_are_refused():
    base = digits.trained_cnn()
    refused("say which with forget=", base, forget=None)
    models = {2: base, 3: base}
    refused("one retrained model for 2 classes", models, forget=None, retrained=base)
