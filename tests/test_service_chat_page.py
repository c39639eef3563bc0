"""The chat page in a real browser: nothing is lost if a request fails or the page is left, and a long talk scrolls."""

from __future__ import annotations

from typing import Any

from service_server import Server
from test_service_browser import DESKTOP, browser, elsewhere, open_with_key, pytestmark, server, show, until

__all__ = ["browser", "elsewhere", "pytestmark", "server"]

# Replaces the server's answer to chats: window.chunks are sent, then the stream waits for window.finish(). If they
# are null, the request is refused. window.asked are the conversations that were sent.
SCRIPTED = """
const before = window.fetch
window.asked = []
window.chunks = []
window.fetch = async (path, options = {}) => {
    if (path !== "v1/chat/completions") return before(path, options)
    window.asked.push(JSON.parse(options.body).messages)
    if (window.chunks === null) return Response.json({error: {message: "refused"}}, {status: 400})
    const encoded = one => new TextEncoder().encode(`data: ${JSON.stringify(one)}\\n\\n`)
    const body = new ReadableStream({start: to => {
        for (const one of window.chunks) to.enqueue(encoded(one))
        window.finish = () => to.close()
        options.signal.addEventListener("abort", () => to.error(new Error("aborted")))
    }})
    return new Response(body)
}
window.chunk = (content, finish_reason = null) => ({choices: [{delta: {content}, finish_reason}],
    timings: {predicted_n: 1, predicted_per_second: 1.26, draft_n: 0, draft_n_accepted: 0}})
"""


class ChatPage:
    """The chat page with a scripted server, and the elements that the tests look at."""

    def __init__(self, browser: Any, url: str, exchanges: int = 2) -> None:
        self.browser = browser
        open_with_key(browser, f"{url}/chat")
        talk = []
        for n in range(exchanges):
            talk.append({"role": "user", "content": f"question {n}"})
            talk.append({"role": "assistant", "content": f"answer {n}", "note": ""})
        # The page stores its own conversation when it is left, so this is stored from a page that does not.
        browser.get(f"{url}/assets/style.css")
        store = "sessionStorage.setItem('talk', JSON.stringify(arguments[0])); sessionStorage.setItem('typed', '')"
        browser.execute_script(store, talk)
        self.load(url)

    def load(self, url: str) -> None:
        self.browser.get(f"{url}/chat")
        until(lambda: self.one("#model").text == "bundled")
        self.browser.execute_script(SCRIPTED)

    def chunks(self, script: str) -> None:
        self.browser.execute_script(f"window.chunks = {script}")

    def one(self, css: str) -> Any:
        return self.browser.find_element("css selector", css)

    def press(self, name: str, item: int) -> None:
        buttons = self.browser.find_elements("css selector", "#talk > li")[item].find_elements("css selector", "button")
        next(button for button in buttons if button.text == name).click()

    def texts(self) -> list[str]:
        return [one.text for one in self.browser.find_elements("css selector", "#talk > li > .text")]

    def typed(self) -> str:
        return str(self.one("#ask textarea").get_property("value"))

    def say(self, text: str) -> None:
        self.one("#ask textarea").send_keys(text + "\n")

    def idle(self) -> bool:
        return bool(self.one("#send").is_displayed())


WHOLE = ["question 0", "answer 0", "question 1", "answer 1"]


def test_a_failed_or_stopped_request_leaves_the_conversation_as_it_was(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    page = ChatPage(browser, server.url)
    page.chunks("null")
    page.press("Regenerate", 1)
    until(lambda: page.idle() and page.one("#problem").text == "refused")
    assert (page.texts(), page.typed()) == (WHOLE, "")

    # Of an edited question the new text is still in its field, and can be sent again.
    page.press("Edit", 0)
    page.one("#talk textarea").send_keys(", changed")
    page.press("Send again", 0)
    until(lambda: page.idle() and page.one("#problem").text == "refused")
    assert page.texts() == WHOLE[1:]
    assert page.one("#talk textarea").get_property("value") == "question 0, changed"
    page.press("Cancel", 0)
    assert page.texts() == WHOLE

    page.chunks("[]")
    page.press("Regenerate", 3)
    until(lambda: not page.idle())
    page.one("#stop").click()
    until(page.idle)
    assert (page.texts(), page.typed()) == (WHOLE, "")

    # A question without an answer goes back into the field, before what was typed meanwhile.
    page.say("And now?")
    until(lambda: not page.idle())
    page.one("#ask textarea").send_keys("more")
    page.one("#stop").click()
    until(page.idle)
    assert (page.texts(), page.typed()) == (WHOLE, "And now?\nmore")
    # So that the next request alternates. An answer that ended without a text is kept.
    page.chunks("[chunk('', 'stop')]")
    page.one("#send").click()
    until(lambda: len(browser.find_elements("css selector", "#talk > li")) == 6)
    browser.execute_script("finish()")
    until(page.idle)
    assert page.one("#talk li:last-child .note").text == "(no text) 1 token, 1.3 a second, nothing drafted"
    roles = browser.execute_script("return asked.at(-1).map(one => one.role)")
    assert roles == ["user", "assistant"] * 2 + ["user"]
    browser.execute_script("take({said: talk.at(-1)}, {...chunk('', 'stop'), tokens_per_round: 2.345})")
    note = page.one("#talk li:last-child .note").text
    assert note == "(no text) 1 token, 1.3 a second, 2.35 a round, nothing drafted"
    # A stream that ends early is an error, and what it said is kept.
    page.chunks("[chunk('Once')]")
    page.say("Go on")
    until(lambda: page.texts()[-1] == "Once")
    browser.execute_script("finish()")
    until(page.idle)
    assert page.one("#talk li:last-child .note").text == "interrupted"
    assert "connection ended" in page.one("#problem").text


def test_leaving_the_chat_during_an_answer_loses_neither_question_nor_text(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    page = ChatPage(browser, server.url)
    page.say("And now?")
    until(lambda: not page.idle())
    page.load(server.url)
    assert (page.texts(), page.typed()) == (WHOLE, "And now?")
    page.chunks("[chunk('Once'), chunk(' more')]")
    page.one("#send").click()
    until(lambda: page.texts()[-1] == "Once more")
    page.one("#ask textarea").send_keys("half")
    page.one("nav a").click()
    until(lambda: browser.title != "Chat" and bool(browser.find_elements("css selector", "#answers-list")))
    page.load(server.url)
    assert (page.texts(), page.typed()) == ([*WHOLE, "And now?", "Once more"], "half")
    assert page.one("#talk li:last-child .note").text == "interrupted"
    # An edited question is kept too.
    page.chunks("[]")
    page.press("Edit", 2)
    page.one("#talk textarea").send_keys(", changed")
    page.press("Send again", 2)
    until(lambda: not page.idle())
    page.load(server.url)
    assert (page.texts(), page.typed()) == ([*WHOLE, "And now?", "Once more"], "question 1, changed\nhalf")


def test_a_first_question_that_fails_does_not_lose_the_chat_before(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    page = ChatPage(browser, server.url)
    page.one("#new").click()
    page.chunks("null")
    page.say("And now?")
    until(lambda: page.idle() and page.one("#problem").text == "refused")
    page.load(server.url)
    page.one("#back").click()
    assert page.texts() == WHOLE
    page.one("#new").click()
    page.chunks("[chunk('Once', 'stop')]")
    page.one("#send").click()
    until(lambda: page.texts() == ["And now?", "Once"])
    browser.execute_script("finish()")
    until(page.idle)
    assert browser.execute_script("return left") is None


def test_the_chat_scrolls_to_a_new_question_and_follows_its_answer(server: Server, browser: Any) -> None:
    show(browser, DESKTOP, "light")
    page = ChatPage(browser, server.url, exchanges=20)
    browser.execute_script("scrollTo(0, 0); items.get(talk[1]).dataset.same = 'yes'")
    page.chunks("[chunk('line\\\\n'.repeat(40))]")
    page.say("And now?")
    until(lambda: page.texts()[-1].startswith("line"))
    assert browser.execute_script("return innerHeight + scrollY >= document.body.scrollHeight - 2")
    # Elements of earlier messages are not replaced.
    assert page.one("#talk [data-same]").text.startswith("Answer")
    browser.execute_script("chunks = [chunk('', 'stop')]; finish()")
    until(page.idle)
    assert page.one("#talk [data-same]").text.startswith("Answer")


def test_the_chat_copies_without_a_clipboard_keeps_compositions_and_turns_with_the_script(
    server: Server, browser: Any
) -> None:
    show(browser, DESKTOP, "light")
    page = ChatPage(browser, server.url)
    browser.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.press("Copy", 1)
    until(lambda: "Copied" in page.one("#talk li:nth-child(2)").text)
    until(lambda: "Copied" not in page.one("#talk li:nth-child(2)").text)
    browser.execute_script("document.execCommand = () => false")
    page.press("Copy", 1)
    until(lambda: "does not let this page copy" in page.one("#problem").text)
    assert browser.execute_script("return getSelection().toString()").strip() == "answer 0"

    # In Safari the Enter that confirms a composition has this key code.
    enter = """const one = new KeyboardEvent("keydown", {key: "Enter", keyCode: arguments[0], cancelable: true})
        field.value = "composed"
        field.dispatchEvent(one)
        return one.defaultPrevented"""
    assert not browser.execute_script(enter, 229)
    assert page.idle()
    page.chunks("[chunk('\u05e9\u05dc\u05d5\u05dd')]")
    assert browser.execute_script(enter, 13)
    until(lambda: page.texts()[-1] == "\u05e9\u05dc\u05d5\u05dd")
    # A Hebrew answer begins at the right.
    far = """const range = document.createRange()
        range.selectNodeContents(document.querySelector("#talk li:last-child > .text"))
        return range.getClientRects()[0].left > innerWidth / 2"""
    assert browser.execute_script(far)
