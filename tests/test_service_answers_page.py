"""The dashboard's lists in a real browser: long names fit, and neither the focus nor a button stays behind."""

from __future__ import annotations

from typing import Any

from service_server import Server
from test_service_browser import (
    PHONE,
    browser,
    elsewhere,
    nothing_went_wrong,
    open_with_key,
    pytestmark,
    server,
    show,
    until,
)

__all__ = ["browser", "elsewhere", "pytestmark", "server"]

ROWS = "#answers-list > li"
LONG = "s" * 200


def asked(http: Any, session: str) -> None:
    body = {"prompt": f"Of {session[:9]}", "max_tokens": 8, "ignore_eos": True}
    assert http.post("/v1/completions", json=body, headers={"X-Session-Id": session}).status_code == 200


def rows(browser: Any) -> list[Any]:
    return list(browser.find_elements("css selector", ROWS))


def forget(browser: Any, number: int, button: int) -> None:
    """Press a row's button, and confirm."""
    before = len(rows(browser))
    rows(browser)[number].find_elements("css selector", "button.quiet")[button].click()
    until(lambda: browser.find_element("css selector", "#confirm").is_displayed())
    wide = "const box = document.getElementById('confirm'); return box.scrollWidth <= box.clientWidth"
    assert browser.execute_script(wide)
    browser.find_element("css selector", "#confirm-yes").click()
    until(lambda: len(rows(browser)) < before)


def focused(browser: Any) -> str:
    return str(browser.execute_script("return document.activeElement.getAttribute('aria-label')"))


def test_a_long_session_fits_and_the_focus_goes_to_the_next_answer(server: Server, browser: Any) -> None:
    show(browser, PHONE, "light")
    with server.http() as http:
        for session in ("one", "two", LONG):
            asked(http, session)
        open_with_key(browser, server.url)
        until(lambda: LONG in browser.find_element("css selector", "#answers-list").text)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
        assert " a round, " in rows(browser)[0].text
        forget(browser, 0, 1)
        until(lambda: focused(browser) == "Forget: Of two")
        forget(browser, 0, 0)
        until(lambda: focused(browser) == "Forget: Of one")
        assert http.get("/adaptive/sessions/two").json()["answers"] == 0
    last = len(rows(browser)) - 1
    forget(browser, last, 0)
    until(lambda: browser.execute_script("return document.activeElement.id") == "answers-title")
    nothing_went_wrong(browser)


def test_a_list_without_answers_has_none_that_are_older(server: Server, browser: Any) -> None:
    open_with_key(browser, server.url)
    until(lambda: bool(rows(browser)))
    shown = """const [more, done] = arguments
        stream.abort()
        window.fetch = async () => Response.json({answers: [], more})
        at("older").hidden = false
        showAnswers(true).then(() => done([at("older").hidden, at("no-answers").hidden]))"""
    for more in (False, True):  # every answer of a page may be damaged
        assert browser.execute_async_script(shown, more) == [True, False]


def test_a_table_of_adapters_that_changes_keeps_the_focus(server: Server, browser: Any) -> None:
    open_with_key(browser, server.url)
    until(lambda: bool(rows(browser)))
    table = """stream.abort()
        const row = (id, reason) => ({id, status: "rejected", recent: null, train_seconds: 0, reason, current: false})
        showAdapters([row("0001", arguments[0]), row("0002", "")], change)
        if (arguments[0] === "before") document.querySelector("[data-promote='0001']").focus()"""
    for reason in ("before", "after"):
        browser.execute_script(table, reason)
        assert focused(browser) == "Promote 0001"
