"""Takes the pictures in docs/images: dashboard, chat and report of a real server on the bundled pair, in a headless
browser.

    python scripts/screenshots.py [--out docs/images] [--answers 40] [--no-distill]

Each page is taken 400 CSS pixels wide, 1280 wide, and 1280 wide in dark mode. Needs chromium with chromedriver, and
selenium (in the extra dev).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver

from adaptive.pair import BUNDLED

# Width in CSS pixels, color scheme, and the ending of the picture's name.
VIEWS = ((400, "light", "400"), (1280, "light", "1280"), (1280, "dark", "1280-dark"))
HIGHEST = 6000
# The browser requests nothing but the pages, and keeps nothing of an earlier run.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
# Seconds allowed until a page is complete, on a busy machine.
PATIENCE_S = 120
QUESTION = "Write a Python function that returns the sum of a list."


def at_home(home: Path) -> dict[str, str]:
    """The environment of a user with this home folder and no ADAPTIVE_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ADAPTIVE_")}
    return {**kept, "HOME": str(home), "XDG_DATA_HOME": str(home / ".local" / "share")}


@contextmanager
def served(home: Path) -> Iterator[str]:
    """The address of ``adaptive serve`` on a free port, ready to answer."""
    command = [sys.executable, "-m", "cli.main", "serve", "--port", "0", "--distill", "off"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, stderr=log, env=at_home(home))
    try:
        while (found := re.search(r"listening on (\S+)", (home / "server.log").read_text())) is None:
            time.sleep(0.2)
        while httpx.get(f"{found[1]}/health", timeout=60).status_code != 200:
            time.sleep(0.2)
        yield found[1]
    finally:
        server.terminate()
        server.wait()


def ask(url: str, prompts: list[str]) -> None:
    """Send the prompts to the server, ten to a session."""
    for number, prompt in enumerate(prompts):
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 100}
        headers = {"X-Session-Id": f"maths-{1 + number // 10}"}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120).raise_for_status()


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium with a new profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def until(what: Callable[[], bool]) -> None:
    """Wait until ``what`` returns true. Raises TimeoutError after ``PATIENCE_S`` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("the page does not come to what it is to show")
        time.sleep(0.1)


def photograph(driver: Any, name: str, out: Path) -> None:
    """Take the open page in every view, at most HIGHEST pixels high."""
    for width, scheme, ending in VIEWS:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 800}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        time.sleep(0.5)  # until the plots have adapted to the width
        high = min(driver.execute_script("return document.documentElement.scrollHeight"), HIGHEST)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "height": high})
        driver.execute_script("scrollTo(0, 0)")
        time.sleep(0.5)
        clip = {"x": 0, "y": 0, "width": width, "height": high, "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
        (out / f"{name}-{ending}.png").write_bytes(base64.b64decode(shot["data"]))


def dashboard(driver: Any, url: str, out: Path) -> None:
    """Take the dashboard with the newest answer open."""
    driver.get(url)
    until(lambda: len(driver.find_elements("css selector", "#answers-list > li")) > 3)
    until(lambda: len(driver.find_elements("css selector", ".plot svg[role=img]")) >= 4)
    until(lambda: bool(driver.find_elements("css selector", "#adapters tr, #no-adapters:not([hidden])")))
    driver.find_element("css selector", "#answers-list .asked").click()
    until(lambda: bool(driver.find_elements("css selector", ".whole .said")))
    # Keep only the first rows: the rest of a long list shows nothing new.
    script = "document.querySelectorAll('#answers-list > li:nth-child(n + 5)').forEach(row => row.remove())"
    driver.execute_script(script)
    photograph(driver, "dashboard", out)


def chat(driver: Any, url: str, out: Path) -> None:
    """Take the chat page after one answer."""
    driver.get(f"{url}/chat")
    driver.find_element("css selector", "#ask textarea").send_keys(f"{QUESTION}\n")
    until(lambda: "tokens" in driver.find_element("css selector", "#talk .assistant .note").text)
    until(lambda: driver.find_element("css selector", "#send").is_displayed())
    photograph(driver, "chat", out)


def report(driver: Any, home: Path, out: Path) -> None:
    """Take the report that ``adaptive history --html`` writes."""
    file = home / "report.html"
    command = [sys.executable, "-m", "cli.main", "history", "--html", str(file)]
    subprocess.run(command, check=True, env=at_home(home))
    driver.get(file.as_uri())
    until(lambda: len(driver.find_elements("css selector", ".plot svg[role=img]")) >= 4)
    photograph(driver, "report", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--answers", type=int, default=40, help="before, and again after distilling")
    parser.add_argument("--no-distill", action="store_true", help="do not let the draft learn in between")
    parser.add_argument("--home", type=Path, help="a home folder to keep, or to go on with what it has")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    with tempfile.TemporaryDirectory() as temporary:
        home = args.home or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        known = any(home.rglob("records.db"))
        with served(home) as url:
            if not known:
                ask(url, prompts[: args.answers])
            if not known and not args.no_distill:
                subprocess.run([sys.executable, "-m", "cli.main", "distill"], check=True, env=at_home(home))
                ask(url, prompts[args.answers : 2 * args.answers])
            with browser() as driver:
                chat(driver, url, args.out)
                dashboard(driver, url, args.out)
                report(driver, home, args.out)


if __name__ == "__main__":
    main()
