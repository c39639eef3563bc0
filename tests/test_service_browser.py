"""The pages in a real browser: they draw, fit every screen, show text as text, and their buttons work."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from service_server import Server
from test_service_learning import publish_random_adapter

from adaptive.service.overview import overview
from adaptive.state import PairState
from checkpoints.store import AdapterStore
from cli.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
exceptions = pytest.importorskip("selenium.common.exceptions", reason="selenium is not installed")
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium with chromedriver is not here"),
    pytest.mark.xdist_group("service_browser"),  # one xdist worker, since it starts one server and one browser
]

# The browser fetches nothing but the pages.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# CSS pixels of a desktop and of a phone.
DESKTOP, PHONE = (1280, 1000), (390, 844)
KEY = "correct-horse"
PROMPTS = ("Tell me a story.", "Name three colours.", "What is seven plus five?")
# Timeout in seconds of work that takes a few on an idle machine.
PATIENCE_S = 60


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """The origin of another site, with an empty page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, elsewhere: str) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("browser")
    one = Server(home, "--distill", "off", "--history", "off", "--cors", elsewhere, key=KEY).wait_until_ready()
    try:
        with one.http() as http:
            for prompt in PROMPTS:
                http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24})
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(what: Callable[[], bool]) -> None:
    """Wait until ``what`` is true. Elements that the page replaces meanwhile are looked up again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(exceptions.StaleElementReferenceException):
            if what():
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def show(browser: Any, size: tuple[int, int], scheme: str) -> None:
    """Emulate a screen of this size, light or dark."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def test_the_dashboard_draws_fits_a_phone_and_its_buttons_promote_and_roll_back(
    server: Server, browser: Any, tmp_path: Path
) -> None:
    store = AdapterStore(next(server.home.glob("*/records.db")).parent / "adapters")
    name = publish_random_adapter(store, tmp_path / "adapter")

    def text(css: str) -> str:
        return str(browser.find_element("css selector", css).text)

    def colour(css: str) -> str:
        return str(browser.find_element("css selector", css).value_of_css_property("background-color"))

    browser.get(server.url)
    # The page asks for the key before it shows any data, and rejects a wrong one.
    until(lambda: bool(browser.find_elements("css selector", "#key:not([hidden])")))
    assert text("#answers") == "–"
    field = browser.find_element("css selector", "#key input")
    field.send_keys("wrong\n")
    until(lambda: "API key" in text("#problem"))
    field.clear()
    field.send_keys(f"{KEY}\n")
    until(lambda: text("#answers") == str(len(PROMPTS)))
    until(lambda: len(browser.find_elements("css selector", ".plot svg[role=img]")) >= 4)
    until(lambda: len(browser.find_elements("css selector", "#answers-list > li")) == len(PROMPTS))
    # There is nothing to roll back.
    until(lambda: bool(browser.find_elements("css selector", f"[data-promote='{name}']")))
    assert not browser.find_element("css selector", "#rollback").is_enabled()
    # A figure without data says when it will have some.
    until(lambda: "when a training run has ended" in text("#costs"))
    # Whole numbers on the axes of answers and positions.
    labels = [one.text for one in browser.find_elements("css selector", "#positions svg text[text-anchor=middle]")]
    assert labels[: len(labels) - 1] == [str(n) for n in range(1, len(labels))]

    papers = {}
    for size in (DESKTOP, PHONE):
        for scheme in ("light", "dark"):
            show(browser, size, scheme)
            papers[scheme] = colour("body")
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= size[0], f"the page is {wide} wide on a screen of {size[0]}"
            browser.save_screenshot(str(tmp_path / f"dashboard-{size[0]}-{scheme}.png"))
    assert papers["light"] != papers["dark"]

    show(browser, DESKTOP, "light")
    browser.find_element("css selector", f"[data-promote='{name}']").click()
    until(lambda: f"{name} in use" in text("#adapters"))
    assert browser.execute_script("return document.activeElement.id") == "rollback"
    assert store.current_id() == name
    # The engine follows: the page names the adapter now in use.
    until(lambda: f"adapter {name}" in text("#now"))
    browser.find_element("css selector", "#rollback").click()
    until(lambda: "rolled back" in text("#adapters"))
    assert store.current_id() is None
    assert not browser.find_element("css selector", "#rollback").is_enabled()
    until(lambda: "no adapter" in text("#now"))
    # The header describes the decoding of the last answer as the server does.
    with server.http() as http:
        for tokens in (2, 40):
            http.post("/v1/completions", json={"prompt": "Once", "max_tokens": tokens, "ignore_eos": True})
            sentence = http.get("/props").json()["speculation"]["sentence"]
            assert sentence.startswith("drafting" if tokens > 2 else "plain"), sentence
            until(lambda said=sentence: said in text("#now"))
        until(lambda: text("#yield") not in ("", "–"))
        until(lambda: "drafted tokens accepted, last 5 answers" in text("#drafted"))
        assert "saved against plain decoding; nothing was trained" in text("#within")
    browser.save_screenshot(str(tmp_path / "dashboard-after.png"))
    assert text("#problem") == ""
    nothing_went_wrong(browser)


def nothing_went_wrong(browser: Any) -> None:
    """Check that no script failed and no missing resource was requested."""
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("401" in entry["message"] for entry in severe), severe


MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>Say it: </b>"


def open_with_key(browser: Any, url: str) -> None:
    browser.get(url)
    until(lambda: browser.execute_script("return document.readyState") == "complete")
    browser.execute_script("sessionStorage.setItem('key', arguments[0])", KEY)
    browser.get(url)


def test_an_answer_shows_who_drafted_its_tokens_and_is_forgotten_after_a_question(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    with server.http() as http:
        body = {"prompt": MARKUP, "max_tokens": 40, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body, headers={"X-Session-Id": "markup"}).json()
    open_with_key(browser, server.url)

    def first(css: str) -> Any:
        return browser.find_element("css selector", f"#answers-list > li:first-child {css}")

    until(lambda: bool(browser.find_elements("css selector", "#answers-list > li")))
    until(lambda: first(".asked").text == MARKUP)  # as typed
    first(".asked").click()
    until(lambda: bool(browser.find_elements("css selector", ".whole .said")))
    shown = first(".said").get_property("textContent")
    assert shown == answer["choices"][0]["text"]
    drafted = browser.find_elements("css selector", ".whole .said .token.model")
    assert len(drafted) == answer["drafters"]["model"]["accepted"] > 0
    assert all(one.get_attribute("title") == "drafted by the draft model" for one in drafted)
    assert {" ".join(one.text.split()) for one in browser.find_elements("css selector", ".whole .legend li")} >= {
        "drafted by the draft model",
        "plain the target's own",
    }
    assert f"{len(drafted)} drafted by the draft model" in first(".whole").text
    assert browser.title != "owned"
    assert not browser.find_elements("css selector", "#answers-list img")

    def forget(confirm: bool) -> None:
        first("button.quiet").click()
        until(lambda: browser.find_element("css selector", "#confirm").is_displayed())
        value = "yes" if confirm else "no"
        browser.find_element("css selector", f"#confirm button[value={value}]").click()

    with server.http() as http:
        before = http.get("/adaptive/answers").json()["answers"]
        forget(confirm=False)
        time.sleep(0.2)
        assert http.get("/adaptive/answers").json()["answers"] == before
        forget(confirm=True)
        until(lambda: http.get("/adaptive/answers").json()["answers"] == before[1:])
    until(lambda: first(".asked").text != MARKUP)
    nothing_went_wrong(browser)


def test_the_report_draws_without_a_network(server: Server, browser: Any, tmp_path: Path) -> None:
    state = PairState(next(server.home.glob("*/records.db")).parent)
    file = tmp_path / "report.html"
    write_report(overview(state, "session"), state.root.name, "session", file)
    browser.get(file.as_uri())
    until(lambda: len(browser.find_elements("css selector", ".plot svg[role=img]")) >= 4)
    assert int(browser.find_element("css selector", "#answers").text) >= len(PROMPTS)
    assert browser.find_element("css selector", "#sizes dt").text == "answers, on the disk"
    for size in (DESKTOP, PHONE):
        show(browser, size, "dark")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    nothing_went_wrong(browser)


def test_the_chat_streams_stops_edits_regenerates_and_marks_what_was_drafted(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    browser.get(f"{server.url}/chat")
    browser.execute_script("sessionStorage.clear()")
    browser.get(f"{server.url}/chat")

    def all_of(css: str) -> list[Any]:
        return list(browser.find_elements("css selector", css))

    def one(css: str) -> Any:
        return browser.find_element("css selector", css)

    def say(text: str) -> None:
        one("#ask textarea").send_keys(text + "\n")

    def done() -> bool:
        return one("#send").is_displayed() and bool(all_of("#talk .assistant"))

    # The page asks for the key, then continues with it.
    until(lambda: one("#key").is_displayed())
    one("#key input").send_keys(f"{KEY}\n")
    until(lambda: one("#model").text == "bundled" and not one("#key").is_displayed())

    say(MARKUP)
    until(done)
    assert one("#talk .user .text").text == MARKUP
    answer = one("#talk .assistant > .text").get_property("textContent")
    assert answer
    assert "tokens accepted" in one("#talk .assistant .note").text
    drafted = "".join(token.get_property("textContent") for token in all_of("#talk .assistant .token.drafted"))
    assert 0 < len(drafted) < len(answer)
    assert browser.title == "bundled"
    assert not all_of("#talk img, #talk b")

    # A regenerated answer replaces the first.
    all_of("#talk .assistant button")[0].click()
    until(lambda: done() and "tokens accepted" in one("#talk .assistant .note").text)
    assert len(all_of("#talk .assistant")) == len(all_of("#talk .user")) == 1
    with server.http() as http:
        asked = [one["asked"] for one in http.get("/adaptive/answers?limit=2").json()["answers"]]
    assert asked == [MARKUP, MARKUP]

    # An edited question replaces the first, and everything after it is gone.
    say("And now?")
    until(lambda: done() and len(all_of("#talk .assistant")) == 2)
    all_of("#talk .user button")[0].click()
    box = one("#talk textarea")
    box.clear()
    box.send_keys("Name three colours.")
    one("#talk .user button").click()
    until(lambda: done() and "accepted" in one("#talk .assistant .note").text)
    assert [item.text for item in all_of("#talk .user .text")] == ["Name three colours."]

    # The page remembers the chat, and a new chat begins empty.
    browser.refresh()
    until(lambda: len(all_of("#talk .assistant")) == 1)
    one("#new").click()
    assert not all_of("#talk li")
    one("#back").click()
    assert len(all_of("#talk .assistant")) == 1
    assert one("#talk .user button").get_attribute("aria-label") == "Edit: Name three colours."
    one("#new").click()
    assert not all_of("#talk li")
    browser.refresh()
    until(lambda: one("#back").is_displayed())
    with server.http() as http:
        newest = http.get("/adaptive/answers").json()["answers"][0]
    assert newest["session"].startswith("page-")
    assert newest["asked"] == "Name three colours."
    nothing_went_wrong(browser)


def test_a_chat_that_is_stopped_keeps_what_was_said(server: Server, browser: Any) -> None:
    open_with_key(browser, f"{server.url}/chat")
    browser.execute_script("document.getElementById('new').click()")
    # No earlier answer may be running when SLOW makes the page's next one endless.
    with server.http() as http:
        assert http.get("/slots").json()[0]["is_processing"] is False
    browser.execute_script(SLOW)
    browser.find_element("css selector", "#ask textarea").send_keys("Tell me a long story.\n")
    until(lambda: len(browser.find_element("css selector", "#talk .assistant .text").text) > 0)
    browser.find_element("css selector", "#stop").click()
    until(lambda: browser.find_element("css selector", "#talk .assistant .note").text == "stopped")
    kept = browser.find_element("css selector", "#talk .assistant > .text").get_property("textContent")
    with server.http() as http:
        until(lambda: http.get("/adaptive/answers").json()["answers"][0]["finish_reason"] == "cancelled")
    assert kept


# Fails the fetches of paths that contain window.broken.
BROKEN = """
const before = window.fetch
window.broken = "adaptive/"
window.fetch = (path, options) => window.broken && path.includes(window.broken) && !path.endsWith("events")
    ? Promise.resolve(Response.json({error: {message: "broken"}}, {status: 500})) : before(path, options)
"""


def test_the_dashboard_fetches_again_what_failed_and_clears_the_error(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    open_with_key(browser, server.url)

    def rows() -> list[Any]:
        return list(browser.find_elements("css selector", "#answers-list > li"))

    def problem() -> str:
        return str(browser.find_element("css selector", "#problem").text)

    until(lambda: len(rows()) >= len(PROMPTS))
    rows()[-1].find_element("css selector", ".asked").click()
    until(lambda: bool(browser.find_elements("css selector", ".whole .said")))
    newest = rows()[0].get_attribute("data-answer")
    browser.execute_script("document.querySelector('#answers-list > li:last-child .asked').focus()")
    browser.execute_script(BROKEN)
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    until(lambda: problem() == "broken")
    assert rows()[0].get_attribute("data-answer") == newest
    browser.execute_script("window.broken = ''")
    until(lambda: problem() == "")
    until(lambda: rows()[0].get_attribute("data-answer") != newest)
    # The open box and the focus are still there.
    assert len(browser.find_elements("css selector", ".whole .said")) == 1
    assert browser.execute_script("return document.activeElement.className") == "asked"

    # An error of an action goes with the next action.
    browser.execute_script("window.broken = 'rollback'; change('adaptive/adapters/rollback')")
    until(lambda: problem() == "broken")
    browser.execute_script("window.broken = ''; document.querySelector('.asked').click()")
    until(lambda: len(browser.find_elements("css selector", ".whole .said")) == 2)
    assert problem() == ""


def test_figures_say_what_they_leave_out_and_show_slow_speeds(server: Server, browser: Any) -> None:
    open_with_key(browser, server.url)
    until(lambda: browser.find_element("css selector", "#answers").text not in ("", "–"))
    browser.execute_script("stream.abort()")
    with server.http() as http:
        found = http.get("/adaptive/history").json()
    for figures in (found["latest"], found["totals"]):
        figures["speculative_decoding"]["num_draft_tokens"] = 0
        figures["mean_draft_length"] = 0.4
    for point in found["series"]:
        point["acceptance_rate"] = None
        point["tokens_per_second"] = 0.04
    found["positions"] = []
    for speed, text in ((0.26, "0.26"), (1.26, "1.3"), (9.97, "10"), (23.4, "23")):
        found["latest"]["tokens_per_second"] = speed
        browser.execute_script("showHistory(arguments[0])", found)
        assert browser.find_element("css selector", "#speed").text == text
    slow = browser.find_element("css selector", "#tokens svg").get_attribute("aria-label")
    assert "measured 0.04 at last, between 0.04 and 0.04" in slow
    others = "drafted only by trees, history or a grammar, which this figure leaves out"
    for place in ("drafted", "rate", "positions"):
        assert others in browser.find_element("css selector", f"#{place}").text


# Makes the page request an answer without an end.
SLOW = """
const before = window.fetch
window.fetch = (path, options) => {
    const body = options.body && {...JSON.parse(options.body), ignore_eos: true, max_tokens: 4000}
    return before(path, {...options, body: body && JSON.stringify(body)})
}
"""


ASK = """
const [url, key, done] = arguments
fetch(url + "/v1/completions", {
    method: "POST",
    headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key},
    body: JSON.stringify({prompt: "Once", max_tokens: 2}),
}).then(async answer => done([answer.status, await answer.json()]), error => done([0, String(error)]))
"""


@pytest.mark.thorough
def test_a_page_of_a_listed_site_is_answered_with_the_key_and_another_is_not(
    server: Server, browser: Any, elsewhere: str
) -> None:
    browser.get(elsewhere)
    status, answer = browser.execute_async_script(ASK, server.url, KEY)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] <= 2
    status, answer = browser.execute_async_script(ASK, server.url, "wrong")
    assert status == 401
    assert "API key" in answer["error"]["message"]
    browser.get(elsewhere.replace("127.0.0.1", "localhost"))
    assert browser.execute_async_script(ASK, server.url, KEY)[0] == 0
