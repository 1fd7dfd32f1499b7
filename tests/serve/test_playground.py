"""The live page: what it answers, to whom, and that a browser shows it without complaint."""

import asyncio
import base64
import json
import shutil
import time

import pytest
import torch

from servers import NAMES, call, png
from wfilter.serve.application import build, check, start
from wfilter.serve.playground import closed_units, nearest_classes
from wfilter.serve.settings import Settings

JSON = {"content-type": "application/json"}
TEXT = base64.b64encode(png()).decode()


@pytest.fixture
def page(serve_app):
    return serve_app(policy=None, playground=True)[0]


def asked(page, items, **headers):
    body = json.dumps({"items": items}).encode()
    return asyncio.run(call(page, "POST", "/playground/classify", body, JSON | headers))


def test_each_image_is_answered_before_and_after_its_own_set(page):
    items = [{"image": TEXT, "forget": [i]} for i in range(3)] + [{"image": TEXT, "forget": []}]
    answers = asked(page, items).json["answers"]
    for index, answer in enumerate(answers[:3]):
        assert NAMES[index] not in [name for name, _ in answer["after"]]
        assert all(closed <= units for _, units, closed in answer["layers"])
    assert [n for n, _ in answers[3]["after"]] == [n for n, _ in answers[3]["before"]]
    assert answers[3]["layers"] == answers[3]["nearest"] == []


def test_units_are_counted_by_layer_and_neighbours_are_those_of_explain(engine):
    from wfilter.explain import similarity

    gates = engine.wf.gates({2, 5})
    layers = closed_units(engine, frozenset({2, 5}))
    assert len(layers) == len({name.rpartition(".")[0] for name in gates})
    assert sum(units for _, units, _ in layers) == sum(gate.numel() for gate in gates.values())
    assert sum(shut for *_, shut in layers) == sum(int((g < 0.5).sum()) for g in gates.values())
    expected = similarity(engine.wf)[2]
    best = [i for i in expected.argsort(descending=True).tolist() if i != 2][:5]
    nearest = nearest_classes(engine, frozenset({2}))
    assert [name for name, _ in nearest] == [NAMES[i] for i in best]
    assert [p for _, p in nearest] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_feature_rows_close_no_unit_and_have_neighbours_by_their_means(page, engine, monkeypatch):
    from helpers import random_rows

    wf = engine.wf
    head = next(name for name, p in wf.base.named_parameters() if p.shape[0] == len(NAMES))
    rows = random_rows(len(NAMES), dict(wf.base.named_parameters())[head].shape[1], head=head)
    rows.means[4] = rows.means.mean(0) + 2 * (rows.means[2] - rows.means.mean(0))
    monkeypatch.setattr(wf, "feature_rows", rows)
    monkeypatch.setattr(wf, "gates", lambda _: {"stem.weight": torch.ones(6)})
    answer = asked(page, [{"image": TEXT, "forget": [2]}]).json["answers"][0]
    assert answer["layers"] == []
    assert answer["nearest"][0][0] == NAMES[4]
    assert 0.9 < answer["nearest"][0][1] <= 1
    assert NAMES[2] not in [name for name, _ in answer["nearest"] + answer["after"]]


@pytest.mark.parametrize(
    "items",
    [
        [],
        None,
        [3],
        [{"image": 3}],
        [{"image": TEXT, "forget": [10]}],
        [{"image": TEXT, "forget": [-1]}],
        [{"image": TEXT, "forget": [True]}],
        [{"image": TEXT, "forget": list(range(10))}],
        [{"image": "é", "forget": []}],
        [{"image": TEXT}] * 17,
    ],
)
def test_broken_question_is_refused(page, items):
    assert asked(page, items).status == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": ""},
    ],
)
def test_page_answers_no_other_site(page, headers):
    assert asked(page, [{"image": TEXT, "forget": []}], **headers).status == 403


def test_page_and_policy_exclude_each_other(run, book):
    both = Settings(run=str(run), policy=str(book.path), playground=True)
    with pytest.raises(ValueError, match="Pass one of --playground and --policy"):
        check(both)
    with pytest.raises(ValueError, match="on one machine alone"):
        build({"run": str(run), "playground": True})
    with pytest.raises(ValueError, match="no policy is given"):
        check(Settings(run=str(run)))
    with pytest.raises(ValueError, match=r"this machine alone, not --host 0\.0\.0\.0"):
        check(Settings(run=str(run), playground=True), "0.0.0.0")


# ---- in a browser -------------------------------------------------------------------------------


@pytest.fixture
def address(serve_app, listen):
    return listen(serve_app(policy=None, playground=True)[0]) + "/playground"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run")
    for flag in (
        *flags,
        "disable-background-networking",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def shown(browser, part):
    return texts(browser, f"{part} .bar span:first-child")


def texts(browser, what):
    script = "return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
    return browser.execute_script(script, what)


def click(browser, what, text):
    script = (
        "[...document.querySelectorAll(arguments[0])].find(x => x.textContent === arguments[1])"
    )
    browser.execute_script(f"{script}.click()", what, text)


def waited(browser, words, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if browser.execute_script(f"return {words}"):
            return
        time.sleep(0.05)
    raise AssertionError(words)


def test_ticking_a_class_changes_the_answer_and_never_shows_it_again(browser, address):
    browser.get(address)
    waited(browser, "document.body.dataset.answered === '1' && document.body.dataset.grid === '1'")
    for number in range(2, 8):
        best = shown(browser, "#after")[0]
        click(browser, "#classes label", best)
        waited(browser, f"document.body.dataset.answered === '{number}'")
        gone = texts(browser, "#classes label:has(:checked)")
        assert best in gone
        assert not set(gone) & set(shown(browser, "#after"))
        assert shown(browser, "#layers"), "and the page says which units close"
        assert not set(gone) & set(shown(browser, "#nearest"))
        assert shown(browser, "#nearest"), "and which classes are near"
    assert browser.execute_script("return document.getElementById('error').textContent") == ""
    assert browser.get_log("browser") == [], "the console is clean"


def test_each_card_of_the_batch_forgets_its_own_set(browser, address):
    from selenium.webdriver.support.ui import Select

    browser.get(address)
    waited(browser, "document.body.dataset.grid === '1'")
    cards = browser.find_elements("css selector", ".card")
    assert len(cards) == 10
    for number in range(2, 5):
        best = cards[1].find_element("css selector", "b").text
        Select(cards[1].find_element("css selector", "select")).select_by_visible_text(best)
        waited(browser, f"document.body.dataset.grid === '{number}'")
        assert cards[1].find_element("css selector", "b").text != best
    assert browser.get_log("browser") == []


def test_page_works_with_the_keyboard_alone(browser, address):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(address)
    waited(browser, "document.body.dataset.answered === '1'")
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element.get_attribute("type") == "checkbox":
            break
    ActionChains(browser).send_keys(Keys.SPACE).perform()
    waited(browser, "document.body.dataset.answered === '2'")
    assert browser.find_elements(By.CSS_SELECTOR, "#classes :checked")


def test_image_file_is_answered_and_a_broken_one_refused_in_words(browser, address, tmp_path):
    from selenium.webdriver.common.by import By

    (tmp_path / "good.jpg").write_bytes(png(4, 30, "RGB", "JPEG"))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    browser.get(address)
    waited(browser, "document.body.dataset.answered === '1'")
    chooser = browser.find_element(By.ID, "file")
    chooser.send_keys(str(tmp_path / "good.jpg"))
    waited(browser, "document.body.dataset.answered === '2'")
    assert browser.find_element(By.ID, "picture").get_attribute("src").startswith("data:image/jpeg")
    chooser.send_keys(str(tmp_path / "bad.png"))
    waited(browser, "document.getElementById('error').textContent")
    assert "no JPEG or PNG file" in browser.find_element(By.ID, "error").text
    browser.get_log("browser")  # Chromium notes the refusal itself; later tests begin afresh


@pytest.mark.parametrize("width", [400, 1280])
def test_page_never_scrolls_sideways(browser, address, width):
    browser.set_window_size(width, 900)
    browser.get(address)
    waited(browser, "document.body.dataset.grid === '1'")
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth + 1"
    )


def test_server_itself_keeps_the_playground_on_this_machine():
    with pytest.raises(ValueError, match="this machine alone"):
        start(Settings(run="x", playground=True), host="0.0.0.0")
