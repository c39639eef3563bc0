"""Models of OpenAI's requests: validation, and conversion to the parameters of an ``Ask``. Other dialects are
translated to these.

An unknown field is refused by name, and so is a known one with an unsupported value. Fields and values that would not
change an answer (``PASSED_OVER``, ``AS_EVER``, empty values) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar, json_schema, notation
from adaptive.service.errors import problem_of
from adaptive.service.formats import function_of
from adaptive.service.loose import LooseModel, Text
from adaptive.service.required import GrammarText, ResponseFormat, StructuredOutputs
from adaptive.types import Message, SamplingParams, StopParams

# Maximum number of answers of one request, prompts times n. More would keep other clients waiting.
MOST_ANSWERS = 16

# -1 means no limit, as in llama.cpp: until the model ends the answer or its context is full.
MOST_TOKENS = 2**31 - 1
MaxTokens = Literal[-1] | Annotated[int, Field(ge=1, le=MOST_TOKENS)]
MOST_OF_A_NAME = 1000


def _short(name: str) -> str:
    if len(name) > MOST_OF_A_NAME:
        raise PydanticCustomError("too_long", f"string should have at most {MOST_OF_A_NAME} characters")
    return name


# A client's name for its user. StringConstraints would refuse one that ends in half a character.
UserName = Annotated[str, AfterValidator(_short)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


# Ignored fields, which some clients always send: the client's own names and labels, service tiers, cache options,
# preferred verbosity. docs/service.md lists them.
PASSED_OVER = frozenset(
    {
        "metadata", "service_tier", "safety_identifier", "prediction", "verbosity", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "usage", "include_reasoning", "reasoning_format",
        "cache_prompt", "id_slot", "timings_per_token", "return_progress", "keep_alive", "chat_id", "session_id",
        "id", "title",
    }
)  # fmt: skip
# Ignored fields if they have this value, because it is the server's behaviour anyway, such as a sampler that is off.
AS_EVER: dict[str, Any] = {
    "modalities": ["text"],
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    **dict.fromkeys(("add_generation_prompt", "parse_special"), True),
    **dict.fromkeys(("typical_p", "tfs", "tfs_z", "smoothing_curve", "guidance_scale", "length_penalty"), 1),
    "repeat_penalty": 1,
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), -1),
}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _closed(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = False


class RequestBody(LooseModel):
    """A request of any dialect. ``passed_over`` are the fields that it ignores."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra=_closed)

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER

    def refuse_unknown(self) -> None:
        """Raise AdaptiveError for an unknown field, unless it or its value is ignored."""
        for name, value in (self.model_extra or {}).items():
            turned_off = value is False and AS_EVER.get(name) is True
            if name not in self.passed_over and (value or turned_off) and AS_EVER.get(name) != value:
                raise AdaptiveError(f"{name[:64]} is not served; leave it out")


class StreamOptions(LooseModel):
    """Extra contents of a stream. ``include_drafted``: each chunk says whether its token was drafted."""

    include_usage: bool = False
    include_drafted: bool = False


class Part(LooseModel):
    """One part of a message's content. Only text and refusals are accepted."""

    type: str
    text: Text | None = None
    refusal: Text | None = None

    def said(self) -> str:
        """The text of the part. Raises AdaptiveError if the part is not text."""
        known = {"text": self.text, "refusal": self.refusal}.get(self.type)
        if known is None:
            raise AdaptiveError(f"messages: a part of type {self.type!r} is not understood; send text")
        return known


class Readable(Protocol):
    """A part of a message. ``said`` is its text; it raises AdaptiveError if the part is none."""

    type: str

    def said(self) -> str: ...


def result_of(parts: Iterable[Readable]) -> str:
    """The text of a tool's result, with a note in place of other parts, such as pictures. They are not refused: an
    agent sends a result again in every later request, so that its session could not go on."""
    said = []
    for part in parts:
        try:
            said.append(part.said())
        except AdaptiveError:
            said.append(f"[{part.type[:64]}: not shown, as the model reads only text]")
    return "".join(said)


class ChatMessage(LooseModel):
    """One message, with fields for tool calls, their results and thinking. ``reasoning``: as ``reasoning_content``, the
    name in vLLM and OpenRouter."""

    model_config = ConfigDict(extra="ignore")

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | list[Part] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def said(self) -> str:
        """The text of the message. Raises AdaptiveError for a part that is not text, except in a tool's result."""
        if isinstance(self.content, list):
            return result_of(self.content) if self.role == "tool" else "".join(part.said() for part in self.content)
        return self.content or self.refusal or ""

    def for_template(self) -> dict[str, Any]:
        """The message in the form that chat templates expect."""
        extra = self.model_dump(include={"name", "tool_calls", "tool_call_id", "reasoning_content"}, exclude_none=True)
        if isinstance(self.reasoning, str):
            extra.setdefault("reasoning_content", self.reasoning)
        calls = extra.pop("tool_calls", [])
        if calls:  # some templates refuse an empty list
            extra["tool_calls"] = [_with_arguments(call) for call in calls]
        return {"role": self.role, "content": self.said(), **extra}

    def for_log(self) -> Message:
        """The message for the log, with tool calls as JSON after the text."""
        calls = json.dumps(self.tool_calls, ensure_ascii=False) if self.tool_calls else ""
        return Message(self.role, self.said() + calls)


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments parsed: OpenAI's form has them as JSON text, templates expect the object. Some clients
    write an empty text for no arguments."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return call


class Common(RequestBody):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = 1
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: MaxTokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    store: bool | None = None
    user: UserName | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: GrammarText | None = None
    regex: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def streams(self) -> StreamOptions:
        """The extra contents of a stream."""
        return self.stream_options or StreamOptions()

    def constrained(self) -> Grammar | None:
        """The grammar of the answers, None for no constraint. Raises AdaptiveError if there are several constraints."""
        wanted: dict[str, Grammar] = {}
        if self.response_format is not None and (schema := self.response_format.wanted()) is not None:
            wanted["response_format"] = json_schema(schema)
        if self.json_schema is not None:
            wanted["json_schema"] = json_schema(self.json_schema)
        if self.grammar:
            wanted["grammar"] = notation(self.grammar)
        if self.regex:
            wanted["regex"] = Grammar("regex", self.regex)
        if self.structured_outputs is not None:
            wanted["structured_outputs"] = self.structured_outputs.wanted()
        if len(wanted) > 1:
            raise AdaptiveError(f"{' and '.join(wanted)} are given; an answer keeps to one of them")
        return next(iter(wanted.values()), None)

    def sampling(self, default: SamplingParams, vocab_size: int) -> SamplingParams:
        """The request's sampling parameters, else the ``default`` ones. Raises AdaptiveError naming a wrong one."""

        def said(name: str) -> Any:
            value = getattr(self, name)
            return getattr(default, name) if value is None else value

        # As in llama.cpp, top_p 0 keeps only the likeliest token.
        likeliest = self.top_p == 0
        return SamplingParams(
            temperature=said("temperature"),
            top_k=1 if likeliest else max(0, said("top_k")),
            top_p=1.0 if likeliest else said("top_p"),
            min_p=said("min_p"),
            repetition_penalty=said("repetition_penalty"),
            presence_penalty=said("presence_penalty"),
            frequency_penalty=said("frequency_penalty"),
            logit_bias=self._bias(vocab_size),
            seed=None if said("seed") is None else said("seed") % 2**63,
        )

    def _bias(self, vocab_size: int) -> dict[int, float]:
        bias = {}
        for key, value in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
                raise AdaptiveError(f"logit_bias: {key[:40]!r} is no token id; ids go from 0 to {vocab_size - 1}")
            if not -100 <= value <= 100:
                raise AdaptiveError(f"logit_bias: {value} lies outside -100 to 100")
            bias[int(key)] = value
        return bias

    def stopping(self, limit: int | None, default: int | None) -> StopParams:
        """When an answer ends. ``limit``: the request's maximum number of tokens; ``default``: the server's; None for
        both: as many as the context holds."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        longest = limit or default or MOST_TOKENS
        longest = MOST_TOKENS if longest == -1 else longest
        return StopParams(longest, stop, tuple(self.stop_token_ids or ()), self.ignore_eos)


class ChatRequest(Common):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def must_call(self) -> list[dict[str, Any]]:
        """The tools of which the model must call one; empty if it need not call any. Raises AdaptiveError if the chosen
        tool is not among the tools."""
        if self.tool_choice in (None, "none", "auto"):
            return []
        if not self.tools:
            raise AdaptiveError("tool_choice: there are no tools to choose from")
        if self.tool_choice == "required":
            return self.tools
        chosen = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = chosen.get("name") if isinstance(chosen, dict) else None
        found = [tool for tool in self.tools if function_of(tool).get("name") == name]
        if not found:
            raise AdaptiveError(f"tool_choice: there is no tool {str(name)[:64]!r}")
        return found

    def refuse_unbuilt(self) -> None:
        """Raise AdaptiveError for unsupported fields and values."""
        self.refuse_unknown()
        if self.top_logprobs and not self.logprobs:
            raise AdaptiveError("top_logprobs needs logprobs to be true")


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """A chat request from the ``fields`` of another dialect. Raises AdaptiveError for an invalid value."""
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        field, reason = problem_of(error.errors())
        raise AdaptiveError(f"{field}: {reason}") from error


class CompletionRequest(Common):
    """``POST /v1/completions``."""

    prompt: Text | list[TokenId] | list[Text] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    def refuse_unbuilt(self) -> None:
        """Raise AdaptiveError for unsupported fields and values."""
        self.refuse_unknown()
        if self.echo or self.suffix:
            raise AdaptiveError("echo and suffix are not served")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise AdaptiveError("best_of is not served; it must equal n")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids. Raises AdaptiveError if there are none or too many."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise AdaptiveError("prompt: the list is empty; give at least one prompt")
        if len(given) * (self.n or 1) > MOST_ANSWERS:
            raise AdaptiveError(f"prompt: {len(given)} prompts make more than {MOST_ANSWERS} answers; send fewer")
        return list(given)


class TokenizeRequest(RequestBody):
    """``POST /tokenize``."""

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {"model"}

    content: Text
    add_special: bool = False


class DetokenizeRequest(RequestBody):
    """``POST /detokenize``."""

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {"model"}

    tokens: Annotated[list[TokenId], Field(max_length=10_000_000)]
