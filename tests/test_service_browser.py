"""The dashboard in a real browser: it draws, fits every screen, and its buttons change what is in use."""

from __future__ import annotations

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

from checkpoints.store import AdapterStore

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium with chromedriver is not here"),
    pytest.mark.xdist_group("service_browser"),  # by one process, which starts one server and one browser
]

# CSS pixels of a desktop and of a phone.
DESKTOP, PHONE = (1280, 1000), (390, 844)
KEY = "correct-horse"
PROMPTS = ("Tell me a story.", "Name three colours.", "What is seven plus five?")
# Seconds for what takes a few on an idle machine.
PATIENCE_S = 60


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """The origin of another site, with a page that shows nothing."""

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
    one = Server(home, "--distill", "off", "--cors", elsewhere, key=KEY).wait_until_ready()
    try:
        with one.http() as http:
            for prompt in PROMPTS:
                http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24})
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def show(browser: Any, size: tuple[int, int], scheme: str) -> None:
    """A screen of this size, light or dark."""
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
    # The page asks for the key before it has any data, and takes a wrong one for what it is.
    until(lambda: bool(browser.find_elements("css selector", "#key:not([hidden])")))
    assert text("#answers") == "–"
    field = browser.find_element("css selector", "#key input")
    field.send_keys("wrong\n")
    until(lambda: "API key" in text("#problem"))
    field.clear()
    field.send_keys(f"{KEY}\n")
    until(lambda: text("#answers") == str(len(PROMPTS)))
    until(lambda: len(browser.find_elements("css selector", ".plot .main-svg")) >= len(("rate", "tokens", "positions")))

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
    assert store.current_id() == name
    # The engine follows: the page names the adapter that drafts now.
    until(lambda: f"adapter {name}" in text("#now"))
    browser.find_element("css selector", "#rollback").click()
    until(lambda: "rolled back" in text("#adapters"))
    assert store.current_id() is None
    until(lambda: "no adapter" in text("#now"))
    # The header says what the last answer was decoded by, as the server does.
    with server.http() as http:
        for tokens in (2, 40):
            http.post("/v1/completions", json={"prompt": "Once", "max_tokens": tokens, "ignore_eos": True})
            sentence = http.get("/props").json()["speculation"]["sentence"]
            assert sentence.startswith("drafting" if tokens > 2 else "plain"), sentence
            until(lambda said=sentence: said in text("#now"))
        until(lambda: text("#yield") not in ("", "–"))
        assert "drafted tokens accepted, last 5 answers" in text("#drafted")
        assert "saved against plain decoding; nothing was trained" in text("#within")
    browser.save_screenshot(str(tmp_path / "dashboard-after.png"))
    assert text("#problem") == ""
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all("401" in entry["message"] for entry in severe), severe


ASK = """
const [url, key, done] = arguments
fetch(url + "/v1/completions", {
    method: "POST",
    headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key},
    body: JSON.stringify({prompt: "Once", max_tokens: 2}),
}).then(async answer => done([answer.status, await answer.json()]), error => done([0, String(error)]))
"""


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
