"""Requests in Anthropic's form as chats: what Claude Code adds to each, and what a client does not ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaptive.drafting.archive import owner_name
from adaptive.errors import AdaptiveError
from adaptive.service.dialects.messages import MessagesRequest
from adaptive.service.schemas import ChatRequest

HEADER = "x-anthropic-billing-header: cc_version=2.1.36.f28; cc_entrypoint=cli; cch=%s;"


def chat(**fields: Any) -> ChatRequest:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}
    return MessagesRequest.model_validate(asked).translated()


def system(said: Any) -> list[str]:
    return [message.said() for message in chat(system=said).messages if message.role == "system"]


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_what_changes_with_each_request_is_not_in_the_prompt() -> None:
    prompts = [system(blocks(HEADER % number, "You help.", " Be brief.")) for number in ("36ee5", "00000")]
    assert prompts == [["You help. Be brief."]] * 2
    assert system(f"{HEADER % 1}\nx-anthropic-more: 2\nYou help.") == ["You help."]
    assert system(blocks(HEADER % 1)) == system(HEADER % 1) == []
    assert system("You help.\nx-anthropic-more: 2") == ["You help.\nx-anthropic-more: 2"]


def in_text(account: str, session: str) -> str:
    return f"user_0a1b_account_{account}_session_{session}"


def in_json(account: str, session: str) -> str:
    return json.dumps({"device_id": "0a1b", "account_uuid": account, "session_id": session})


@pytest.mark.parametrize("form", [in_text, in_json])
def test_the_sessions_of_a_user_have_one_owner(form: Any) -> None:
    said = [("6b1c-22", "9f00-1"), ("6b1c-22", "77aa-2"), ("other", "9f00-1")]
    first, second, other = (owner_name(chat(metadata={"user_id": form(*who)}).user or "") for who in said)
    assert first == second != other
    assert "" not in (first, other)


@pytest.mark.parametrize("name", ["ann", "my_session_1", "{ann}", "user_1_account_2"])
def test_the_user_of_another_client_is_left_as_it_is(name: str) -> None:
    assert chat(metadata={"user_id": name}).user == name


def test_a_session_alone_is_no_user() -> None:
    assert chat(metadata={"user_id": '{"session_id": "1"}'}).user is None


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "none"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"output_config": {"effort": "high"}}, "high"),
    ],
)
def test_a_model_thinks_only_for_clients_that_want_it(fields: dict[str, Any], effort: str) -> None:
    assert chat(**fields).reasoning_effort == effort


def test_the_beginning_of_an_answer_is_counted_and_not_gone_on_with() -> None:
    body = MessagesRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}]}
    )
    assert [message.role for message in body.translated().messages] == ["user", "assistant"]
    with pytest.raises(AdaptiveError, match="go on with it is not served"):
        body.refuse_continuation()
