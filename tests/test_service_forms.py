"""Chats that a template refuses as they are: another form of them is answered, with every word at its place."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BUNDLED
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adaptive.encoding import RefusedChatError
from adaptive.service.chats import encoded, rendered
from adaptive.service.dialects.messages import MessagesRequest
from adaptive.service.schemas import ChatRequest

SHOW = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
# As Qwen 3.5.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + SHOW
)
# As Mistral Small 4: calls and results are not counted.
IN_TURNS = (
    "{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system in the middle') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}{% if tools %}[tools]\n{% endif %}" + SHOW
)


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED / "target")
    loaded.chat_template = template
    return loaded


def chat(*said: tuple[str, str], **more: Any) -> ChatRequest:
    messages = [{"role": role, "content": content} for role, content in said]
    return ChatRequest.model_validate({"messages": messages, **more})


def test_a_chat_that_is_taken_stays_as_it_is() -> None:
    body = chat(("system", "A"), ("user", "B"), ("system", "C"), ("user", "D"))
    assert rendered(body, tokenizer(SHOW)) == "[system] A\n[user] B\n[system] C\n[user] D\n"


def test_a_later_system_message_is_said_by_the_user_at_its_place() -> None:
    known = tokenizer(SYSTEM_FIRST)
    body = chat(("developer", "A"), ("system", "B"), ("user", "C"), ("assistant", "D"), ("system", "E"), ("user", "F"))
    assert rendered(body, known) == "[system] A\n\nB\n[user] C\n[assistant] D\n[user] E\n[user] F\n"
    assert known.decode(encoded(body, known, 1000)) == rendered(body, known)
    after = chat(("user", "A"), ("system", "B"))
    assert rendered(after, known) == "[user] A\n\nB\n"


def test_a_user_who_speaks_behind_a_tool_or_twice_in_a_row() -> None:
    """What Claude Code sends with each result of a tool."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "20 C"},
        {"type": "text", "text": "Remember: SI."},
    ]
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    said = {
        "model": "m",
        "max_tokens": 9,
        "tools": [tool],
        "messages": [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": blocks},
            {"role": "system", "content": "Be short."},
        ],
    }
    body = MessagesRequest.model_validate(said).translated()
    wanted = "[tools]\n[user] Rome?\n[assistant] \n[tool] 20 C\n\nRemember: SI.\n\nBe short.\n"
    assert rendered(body, tokenizer(IN_TURNS)) == wanted
    twice = chat(("user", "A"), ("user", "B"), ("assistant", "C"), ("user", "D"))
    assert rendered(twice, tokenizer(IN_TURNS)) == "[user] A\n\nB\n[assistant] C\n[user] D\n"


def test_a_template_without_system_messages_gets_them_from_the_user() -> None:
    """As Gemma 2's."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    body = chat(("system", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E"))
    assert rendered(body, tokenizer(refuses + IN_TURNS)) == "[user] A\n\nB\n[assistant] C\n[user] D\n\nE\n"
    with pytest.raises(RefusedChatError, match="System role not supported"):
        rendered(chat(("system", "A"), ("assistant", "B")), tokenizer(refuses + "{{ raise_exception('never') }}"))


def test_a_template_that_takes_no_form_says_why_it_refuses_the_chat_as_it_is() -> None:
    with pytest.raises(RefusedChatError, match="roles must alternate"):
        rendered(chat(("assistant", "A"), ("assistant", "B")), tokenizer(IN_TURNS))


KNOWS = (
    "{% if reasoning_effort is defined and reasoning_effort not in KNOWN %}{{ raise_exception('no such effort') }}"
    "{% endif %}<{{ reasoning_effort }}>"
)


@pytest.mark.parametrize(
    ("efforts", "asked", "given"),
    [
        (["none", "high"], "medium", "high"),
        (["none", "high"], "minimal", "none"),
        (["high", "no_think"], "none", "no_think"),
        (["low", "medium"], "low", "low"),
        (["low"], "xhigh", ""),  # the template's own
    ],
)
def test_an_effort_that_a_template_refuses_has_a_neighbour(efforts: list[str], asked: str, given: str) -> None:
    known = tokenizer(KNOWS.replace("KNOWN", str(efforts)))
    assert rendered(chat(("user", "A"), reasoning_effort=asked), known) == f"<{given}>"


def test_an_effort_that_the_client_gives_the_template_itself_stays() -> None:
    known = tokenizer(KNOWS.replace("KNOWN", "['high']"))
    with pytest.raises(RefusedChatError, match="no such effort"):
        rendered(chat(("user", "A"), chat_template_kwargs={"reasoning_effort": "low"}), known)


def test_a_format_turns_thinking_off_where_only_an_effort_does_so() -> None:
    known = tokenizer(KNOWS.replace("KNOWN", "['none', 'high']"))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert rendered(chat(("user", "A"), reasoning_effort="high", response_format=schema), known) == "<none>"


def test_gpt_oss_sees_every_call_of_a_message() -> None:
    """Its template shows the first call of a message only."""
    shown = (
        "{# <|channel|> <|message|> #}{% for m in messages %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }} "
        "{% elif m.role == 'tool' %}{{ m.content }} {% endif %}{% endfor %}"
    )
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("a", "b")]
    body = ChatRequest.model_validate({"messages": messages})
    assert rendered(body, tokenizer(shown)) == "a A b B "
