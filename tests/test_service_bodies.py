"""What the bodies of requests say is kept to, or refused."""

from __future__ import annotations

import pytest

from adaptive.errors import AdaptiveError
from adaptive.service.dialects.response_request import ResponsesRequest
from adaptive.service.items import MOST_CHARACTERS, MOST_ITEMS, KeptItems
from adaptive.service.schemas import ChatRequest


def test_thinking_belongs_to_what_comes_after_it() -> None:
    body = ResponsesRequest.model_validate(
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "?"},
                {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "A"}]},
                {"role": "assistant", "content": "Let me look."},
                {"type": "reasoning", "id": "2", "summary": [], "content": [{"type": "reasoning_text", "text": "B"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
        }
    )
    said = [(m["role"], m.get("reasoning_content")) for m in body._messages(KeptItems())]
    assert said == [("user", None), ("assistant", "A"), ("assistant", "B"), ("tool", None)]


def test_kept_items_are_the_newest_that_fit() -> None:
    kept = KeptItems()
    items = [{"id": str(number), "type": "function_call", "arguments": "{}"} for number in range(MOST_ITEMS + 1)]
    for item in items[:-1]:
        kept.keep(item)
    assert kept.find("0") is items[0]  # which counts as new again
    kept.keep(items[-1])
    assert kept.find("1") is None
    assert kept.find("0") is items[0]
    items[5]["arguments"] = "x" * MOST_CHARACTERS  # an item grows after it was kept
    kept.keep({"id": "more", "type": "reasoning", "summary": [{"text": "a"}]})
    assert [kept.find(name) is None for name in ("4", "5", "6", "more")] == [True, True, False, False]


@pytest.mark.parametrize("name", ["add_generation_prompt", "parse_special", "skip_special_tokens"])
def test_what_is_always_done_cannot_be_turned_off(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "?"}]}
    ChatRequest.model_validate({**body, name: True}).refuse_unknown()
    with pytest.raises(AdaptiveError, match=f"{name} is not served"):
        ChatRequest.model_validate({**body, name: False}).refuse_unknown()
    ChatRequest.model_validate({**body, name: None}).refuse_unknown()  # as some clients write what is not set
