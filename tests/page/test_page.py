"""The report: one file that says what was measured, and works in a real browser."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import digits
import wfilter
from wfilter import data, metrics
from wfilter.page import html, write_page
from wfilter.page.sample import take_page_sample
from wfilter.page.write import Maker

NAMES = [f"digit <{i}> & co" for i in range(10)]
PANELS = (3, 5, 8)


def small_filters(classes: int) -> wfilter.FilteredModel:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, classes))
    example = torch.zeros(1, 1, 2, 2)
    wf = wfilter.apply_weight_filtering(model, targets="1.*", example_input=example)
    with torch.no_grad():
        wf.alphas.copy_(3 * torch.randn(wf.alphas.shape))
    return wf


def named_digits() -> data.ImageSet:
    return dataclasses.replace(data.load("digits", "test"), class_names=tuple(NAMES))


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    images, labels = digits.data()[0]
    wf = wfilter.apply_weight_filtering(
        digits.trained_cnn(), class_names=NAMES, example_input=images[:1]
    )
    stored = wfilter.InMemory(images, labels, batch_size=32)
    history = wfilter.untrain(wf, stored, recipe="distill", steps=60, progress=False)
    return wf, history


@pytest.fixture(scope="module")
def page(untrained, tmp_path_factory) -> Path:
    wf, history = untrained
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_page(
        wf,
        named_digits(),
        path,
        title="Digits & filters",
        about={"model": "cnn <digits>", "recipe": "distill"},
        history=history,
        classes=PANELS,
        per_class=8,
        curve_images=3,
        steps=5,
    )


# ---- the file ------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_refers_to_nothing_outside_it(page):
    text = page.read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\((?!#)|@import|<link rel=.stylesheet", text)
    assert len(text) < 3_000_000


def test_names_and_facts_are_escaped(page):
    text = page.read_text()
    assert "digit &lt;3&gt; &amp; co" in text
    assert "<digits>" not in text
    assert "cnn &lt;digits&gt;" in text
    assert not re.search(r"digit <\d>", text)


def test_ids_are_unique_and_every_reference_has_its_target(page):
    text = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    repeated = {i for i in ids if ids.count(i) > 1}
    assert not repeated
    wanted = re.findall(r'href="#([^"]+)"', text) + re.findall(r"url\(#([^)]+)\)", text)
    assert {*wanted} <= {*ids}


def test_the_first_screen_says_in_one_sentence_what_is_forgotten_and_how_well(untrained, page):
    wf, _ = untrained
    sample = take_page_sample(wf, named_digits(), 8)
    with torch.no_grad():
        after = metrics.forget_accuracy(
            wf(sample.images, forget=sample.labels), sample.labels, sample.labels
        )
    lead = re.search(r'<p class="lead">(.*?)</p>', page.read_text()).group(1)
    assert lead.startswith("Told to forget any one of 10 classes, this model recognises ")
    assert f"<b>{100 * after.mean:.1f} %</b> of that class" in lead
    known = sorted((r for r, x in after.by_row.items() if x > 0.05), key=lambda r: -after.by_row[r])
    assert ("Still known: " in lead) == bool(known)
    assert all(f"digit &lt;{row}&gt;" in lead for row in known[:5])


def test_classes_that_are_not_forgotten_are_named_on_the_first_screen(tmp_path):
    wf = small_filters(3)
    with torch.no_grad():
        wf.alphas.fill_(20.0)  # open gates: nothing is forgotten
        wf.base[2].weight.zero_()
        wf.base[2].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))  # every image is taken for class 1
    batch = (torch.rand(6, 1, 2, 2), torch.arange(6) % 3)
    page = write_page(wf, [batch], tmp_path / "a.html", steps=2, classes=[1])
    assert "<strong>Still known: class 1 (100.0 %).</strong>" in page.read_text()


def test_the_outline_names_every_section_in_order(page):
    text = page.read_text()
    outline = re.search(r"<nav.*?</nav>", text).group(0)
    links = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', outline)
    assert links[0] == ("summary", "Summary")
    assert links[1:] == re.findall(r'<section id="([^"]+)"><h2>([^<]+)</h2>', text)


def test_the_table_holds_the_accuracies_of_the_filtered_model(untrained, page):
    wf, _ = untrained
    sample = take_page_sample(wf, named_digits(), 8)
    with torch.no_grad():
        after = metrics.forget_accuracy(
            wf(sample.images, forget=sample.labels), sample.labels, sample.labels
        )
        before = metrics.accuracy(wf(sample.images), sample.labels)
        others = sample.labels != 4
        retain = metrics.accuracy(wf(sample.images, forget=4)[others], sample.labels[others])
    row = re.search(r"<tr><th[^>]*>digit &lt;4&gt;.*?</tr>", page.read_text())
    cells = re.findall(r"<td>([^<]*)</td>", row.group(0))
    assert cells[1] == f"{100 * after.by_row[4]:.1f} %"
    assert cells[2] == f"{100 * retain:.1f} %"
    assert f"<dd>{100 * before:.1f} %</dd>" in page.read_text()


def test_the_table_holds_the_areas_of_the_curves_and_their_control(untrained, page):
    text = page.read_text()
    row = re.search(r"<tr><th[^>]*>digit &lt;3&gt;.*?</tr>", text).group(0)
    cells = re.findall(r"<td>([^<]*)</td>", row)
    assert re.fullmatch(r"[01]\.\d\d \([01]\.\d\d\)", cells[5])
    assert re.fullmatch(r"[01]\.\d\d \([01]\.\d\d\)", cells[6])
    assert re.search(r"<tr><th[^>]*>digit &lt;4&gt;.*?<td>-</td><td>-</td>", text), "no panel"


def test_matrices_report_their_rank_correlation_with_the_gates(page):
    text = page.read_text()
    assert len(re.findall(r"Rank correlation with the overlap of closed gates: [+-]\d", text)) == 2


def test_with_many_classes_each_image_meets_its_own_row_and_a_few_others():
    wf = small_filters(25)
    sample = take_page_sample(wf, [(torch.rand(50, 1, 2, 2), torch.arange(50) % 25)], 2)
    made = Maker(wf, sample, {}, Path(), [3], ())
    assert set(made.forget.by_row) == set(range(25))
    assert len(made.retain.by_row) == 25
    with torch.no_grad():
        expected = metrics.routing(wf(sample.images, forget=3), sample.labels, 3, 25)
    assert torch.equal(made.routing(3), expected)


def test_more_than_20_panels_are_chosen_from_a_list():
    panels = [(f"class {i}", "text") for i in range(21)]
    assert html.tabs(panels, "class").count("<option") == 21
    assert html.tabs(panels, "class").count("<button") == 0
    assert html.tabs(panels[:20], "class").count("<button") == 20


def test_a_class_without_images_is_refused(tmp_path):
    wf = small_filters(5)
    batch = (torch.rand(4, 1, 2, 2), torch.arange(4))
    with pytest.raises(ValueError, match=r"the data has no images of \['class 4'\]"):
        write_page(wf, [batch], tmp_path / "a.html", classes=[4])


def test_data_of_another_number_of_classes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the data has 10 classes\nand the filters 5"):
        write_page(small_filters(5), data.load("digits", "test"), tmp_path / "a.html")


def test_large_photographs_are_reduced():
    tag = html.image_tag(torch.rand(3, 224, 224), "noise")
    assert 'width="112"' in tag
    assert "image/jpeg" in tag
    assert len(tag) < 20_000


# ---- in a browser --------------------------------------------------------------------------------

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
browser_only = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"),
        *("disable-background-networking", "disable-sync", "disable-component-update"),
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def opened(browser, page: Path, width: int = 1280, scheme: str = "light"):
    """The page in a window of this width, in light or dark mode."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())
    return browser


def visible_panels(browser) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#class .panel')].filter(p => p.offsetHeight > 0)"
        ".map(p => p.querySelector('h3').textContent)"
    )
    return browser.execute_script(script)


@browser_only
def test_the_page_opens_without_console_errors_and_fetches_nothing(browser, page):
    opened(browser, page)
    assert browser.title == "Digits & filters"
    fetched = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert [n for n in browser.execute_script(fetched) if not n.startswith("data:")] == []
    assert browser.get_log("browser") == []


@browser_only
def test_clicks_and_arrow_keys_switch_the_class(browser, page):
    opened(browser, page)
    tabs = browser.find_elements("css selector", '#class [role="tab"]')
    assert [tab.text for tab in tabs] == [NAMES[row] for row in PANELS]
    assert visible_panels(browser) == [NAMES[3]]
    tabs[1].click()
    assert visible_panels(browser) == [NAMES[5]]
    assert tabs[1].get_attribute("aria-selected") == "true"
    tabs[1].send_keys("\ue014")  # right arrow
    assert visible_panels(browser) == [NAMES[8]]
    tabs[2].send_keys("\ue014")
    assert visible_panels(browser) == [NAMES[3]]
    assert browser.get_log("browser") == []


@browser_only
@pytest.mark.parametrize("width", [1280, 400])
def test_a_definition_appears_on_focus_inside_the_window_and_goes_with_escape(browser, page, width):
    opened(browser, page, width)
    for term in browser.find_elements("css selector", "header .term"):
        browser.execute_script("arguments[0].focus()", term)
        tip = browser.find_element("id", "tip")
        assert tip.text == term.get_attribute("data-tip")
        assert tip.rect["x"] >= 0
        assert tip.rect["x"] + tip.rect["width"] <= width
        term.send_keys("\ue00c")  # escape
        assert not tip.is_displayed()
    assert browser.get_log("browser") == []


@browser_only
def test_the_sentence_its_picture_and_the_numbers_fit_the_first_screen(browser, page):
    opened(browser, page)
    bottom = "return document.querySelector('header').getBoundingClientRect().bottom"
    assert browser.execute_script(bottom) <= 900


@browser_only
def test_every_picture_has_something_in_it(browser, page):
    opened(browser, page)
    widths = browser.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert len(widths) >= 3 * (6 + 3 * 8)
    assert min(widths) == 8
    script = """
        document.querySelectorAll('.panel').forEach(p => { p.hidden = false; });
        return [...document.querySelectorAll('figure svg')].map(s => {
            const box = s.getBBox();
            return [box.width, box.height, s.clientWidth, s.querySelectorAll('path').length];
        })"""
    boxes = browser.execute_script(script)
    # the first screen's, two per panel, all classes, one live layer, matrices
    assert len(boxes) == 1 + 3 * 2 + 5 + 2 + 3
    assert all(w > 200 and h > 60 and shown > 200 and n > 3 for w, h, shown, n in boxes)


@browser_only
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_and_text_stays_readable(browser, page, width):
    opened(browser, page, width)
    script = """
        document.querySelectorAll('.panel').forEach(p => { p.hidden = false; });
        return document.documentElement.scrollWidth"""
    assert browser.execute_script(script) <= width
    script = """
        const sizes = [...document.querySelectorAll('svg text')].map(text => {
            const scale = text.ownerSVGElement.getScreenCTM().a;
            return scale * parseFloat(getComputedStyle(text).fontSize);
        });
        return Math.min(...sizes)"""
    assert browser.execute_script(script) >= 9


@browser_only
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_axes_stand_out_from_the_ground_in_light_and_dark(browser, page, scheme):
    opened(browser, page, scheme=scheme)
    ground, panel, ink, axis, caption = browser.execute_script("""
        const style = (s, k) => getComputedStyle(document.querySelector(s))[k];
        return [style('body', 'backgroundColor'), style('figure', 'backgroundColor'),
                style('h1', 'color'), style('figure svg text', 'fill'),
                style('figcaption', 'color')]""")
    assert (luminance(ground) < 0.1) == (scheme == "dark")
    assert contrast(ink, ground) > 7
    assert contrast(axis, panel) > 7
    assert contrast(caption, panel) > 4.5


def luminance(colour: str) -> float:
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_old_name_of_what_the_header_shows_works_with_a_warning(untrained, tmp_path):
    with pytest.warns(DeprecationWarning, match=r"write_page\(facts=\.\.\.\) is now"):
        path = write_page(
            untrained[0],
            named_digits(),
            tmp_path / "old.html",
            facts={"data": "some digits"},
            classes=[3],
            per_class=2,
            curve_images=1,
            steps=2,
        )
    assert "some digits" in path.read_text()
