"""The token ids of a request's prompt: by the target's own tokenizer and chat template, held against the server's.

The server's count of prompt tokens tells most differences at no cost. A few requests are also asked of the server's own
tokenizer; once that says otherwise, it is asked each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from adaptive.encoding import encode_rendered, encode_text
from adaptive.errors import AdaptiveError
from adaptive.service.chats import rendered
from adaptive.service.jobs import Prompt
from adaptive.service.schemas import ChatRequest
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, VLLM, Kind
from adaptive.upstream.models import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("adaptive.upstream")

# Prompts of which the ids are asked of the server, from the first one on, and then one of so many.
FIRST_CHECKED, EVERY = 4, 100
# Tokens of a prompt that any context holds: whether it fits is the server's business.
UNLIMITED = 2**31
# What the template has to do with; the rest of a request is the sampler's.
RENDERED = ("messages", "tools", "tool_choice", "chat_template_kwargs", "enable_thinking", "reasoning_effort")

# Posts a JSON object to a path of the server with the client's own key, or gets the path without one; None where it has
# no answer.
Ask = Callable[[str, Mapping[str, Any] | None], Any]


class Prompts:
    """Reads prompts, on one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> None:
        self.tokenizer = tokenizer
        self.kind = kind
        self.differs = False  # the server's ids are others than ours
        self._seen = 0

    def of(self, said: Mapping[str, Any], chat: bool, counted: int | None, ask: Ask) -> list[Prompt]:
        """The prompts of the request ``said``, of which the server has ``counted`` the tokens of all together.

        Raises AdaptiveError where they cannot be told for certain.
        """
        if not chat:
            return self._texts(said, counted, ask)
        self._seen += 1
        messages, ours, problem = self._chat(said)
        check = self.differs or self._seen <= FIRST_CHECKED or self._seen % EVERY == 0
        wrong = ours is None or (counted is not None and counted != len(ours))
        theirs = self._theirs(said, ask) if check or wrong else None
        if theirs is not None and theirs != ours and (counted is None or counted == len(theirs)):
            if not self.differs:
                logger.warning("the server makes other tokens of a chat than this target's template; its own are taken")
            self.differs = True
            return [Prompt(theirs, messages, "")]
        if ours is None:
            raise AdaptiveError(f"the chat is not understood: {problem}")
        if counted is not None and counted != len(ours):
            raise AdaptiveError(
                f"the server counts {counted} tokens in a prompt that has {len(ours)} by the target's template; "
                "--target must be the model that it serves"
            )
        return [Prompt(ours, messages, "")]

    def _chat(self, said: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[int] | None, str]:
        try:
            body = ChatRequest.model_validate({name: said[name] for name in RENDERED if said.get(name) is not None})
            messages = tuple(message.for_log() for message in body.messages)
        except (ValidationError, AdaptiveError) as error:
            raise AdaptiveError("the chat holds more than text") from error
        try:
            return messages, encode_rendered(self.tokenizer, rendered(body, self.tokenizer), UNLIMITED), ""
        except AdaptiveError as error:
            return messages, None, str(error)

    def _texts(self, said: Mapping[str, Any], counted: int | None, ask: Ask) -> list[Prompt]:
        given = said.get("prompt")
        listed: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not isinstance(listed, list) or not listed:
            raise AdaptiveError("the prompt is not understood")
        prompts = [self._raw(one) for one in listed]
        if counted is not None and counted != sum(len(prompt.ids) for prompt in prompts):
            prompts = [self._asked(prompt, said, ask) for prompt in prompts]
            if counted != sum(len(prompt.ids) for prompt in prompts):
                raise AdaptiveError("the server counts other tokens in the prompt than the target's tokenizer")
        return prompts

    def _raw(self, given: object) -> Prompt:
        if isinstance(given, str):
            return Prompt(encode_text(self.tokenizer, given, UNLIMITED), (), given)
        if isinstance(given, list) and all(isinstance(number, int) for number in given):
            return Prompt(list(given), (), str(self.tokenizer.decode(given)))
        raise AdaptiveError("the prompt is not understood")

    def _asked(self, prompt: Prompt, said: Mapping[str, Any], ask: Ask) -> Prompt:
        theirs = self._tokenized(prompt.text, said, ask, special=True)
        return prompt if theirs is None else Prompt(theirs, (), prompt.text)

    def _theirs(self, said: Mapping[str, Any], ask: Ask) -> list[int] | None:
        """The ids of a chat by the server's own template and tokenizer, where it tells."""
        body = {name: said[name] for name in (*RENDERED, "model") if said.get(name) is not None}
        if self.kind is VLLM:
            return _ids(ask("/tokenize", {**body, "add_generation_prompt": True}), "tokens")
        if self.kind not in (LLAMA_SERVER, ADAPTIVE):
            return None
        answer = ask("/apply-template", body)
        text = answer.get("prompt") if isinstance(answer, dict) else None
        special = self.kind is LLAMA_SERVER  # which adds its own where the template has not
        return self._tokenized(text, said, ask, special) if isinstance(text, str) else None

    def _tokenized(self, text: str, said: Mapping[str, Any], ask: Ask, special: bool) -> list[int] | None:
        if self.kind in (VLLM, SGLANG):
            return _ids(ask("/tokenize", {"model": model_of(said), "prompt": text}), "tokens")
        if self.kind in (LLAMA_SERVER, ADAPTIVE):
            body: dict[str, Any] = {"content": text, "add_special": special, "parse_special": True}
            if model := model_of(said):  # a router asks the server of this model
                body["model"] = model
            return _ids(ask("/tokenize", body), "tokens")
        return None


def _ids(answer: object, name: str) -> list[int] | None:
    ids = answer.get(name) if isinstance(answer, dict) else None
    return list(ids) if isinstance(ids, list) and all(isinstance(number, int) for number in ids) else None
