"""The picture of the dashboard in docs/images: a real server on the bundled pair, real answers, a headless browser.

    python scripts/screenshot.py [--out docs/images/dashboard.png] [--answers 60] [--distill]

Needs chromium with chromedriver, and selenium (in the extra dev).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from selenium import webdriver

from adaptive.pair import BUNDLED

# CSS pixels.
WIDTH, HEIGHT = 1280, 1250


def started(home: Path) -> tuple[subprocess.Popen[str], str]:
    """``adaptive serve`` on a free port, ready to answer, and its address."""
    command = [sys.executable, "-m", "cli.main", "serve", "--state-dir", str(home), "--port", "0", "--distill", "off"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(found[1] for line in server.stderr if (found := re.search(r"listening on (\S+)", line)))
    while httpx.get(f"{url}/health", timeout=60).status_code != 200:
        time.sleep(0.2)
    return server, url


def ask(url: str, prompts: list[str]) -> None:
    """Have the prompts answered."""
    for prompt in prompts:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 120}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def photograph(url: str, out: Path) -> None:
    """The page at ``url`` as a PNG file."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(url)
        time.sleep(8)  # until it has drawn
        out.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(out))
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/dashboard.png"))
    parser.add_argument("--answers", type=int, default=60, help="before, and again after distilling")
    parser.add_argument("--distill", action="store_true", help="let the draft learn in between")
    args = parser.parse_args()
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    with tempfile.TemporaryDirectory() as home:
        server, url = started(Path(home))
        try:
            ask(url, prompts[: args.answers])
            if args.distill:
                command = [sys.executable, "-m", "cli.main", "distill", "--state-dir", home]
                subprocess.run(command, check=True)
                ask(url, prompts[args.answers : 2 * args.answers])
            photograph(url, args.out)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
