"""Models of the fields that require a form of an answer: a JSON schema, a grammar, a regular expression, a choice."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar, json_schema, notation
from adaptive.service.loose import LooseModel, Text

# A grammar or regular expression. Longer ones would take seconds to compile, and are no real grammars.
GrammarText = Annotated[str, StringConstraints(max_length=200_000)]
# Texts to choose from.
MOST_CHOICES = 10_000


class JsonSchema(LooseModel):
    """A named JSON schema. The answer matches it, whether it is ``strict`` or not."""

    name: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(LooseModel):
    """The required format of an answer's text. ``json_object`` may have a schema, as ``schema`` (as in llama.cpp) or
    as ``value``, which clients of Hugging Face's servers send."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    value: dict[str, Any] | None = None

    def wanted(self) -> dict[str, Any] | None:
        """The required JSON schema; None for plain text. Raises AdaptiveError if it is missing."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema_ or self.value or {"type": "object"}
        if self.json_schema is None:
            raise AdaptiveError("response_format: json_schema is missing, with a name and a schema in it")
        return self.json_schema.schema_


class StructuredOutputs(BaseModel):
    """vLLM's field of this name: the required form of an answer, exactly one of these. ``json`` may be text."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    schema_: dict[str, Any] | Text | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Annotated[list[GrammarText], Field(max_length=MOST_CHOICES)] | None = None
    grammar: GrammarText | None = None

    def wanted(self) -> Grammar:
        """The grammar of the answer. Raises AdaptiveError if there is none or several of them, or an unknown field."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value is not False:
                raise AdaptiveError(f"structured_outputs: {name[:64]} is not served; leave it out")
        forms: dict[str, Grammar] = {}
        if self.schema_ is not None:
            forms["json"] = json_schema(_schema(self.schema_))
        if self.json_object:
            forms["json_object"] = json_schema({"type": "object"})
        if self.regex is not None:
            forms["regex"] = Grammar("regex", self.regex)
        if self.choice:
            forms["choice"] = Grammar("regex", "|".join(map(re.escape, self.choice)))
        if self.grammar is not None:
            forms["grammar"] = notation(self.grammar)
        if len(forms) != 1:
            given = " and ".join(forms) or "nothing"
            raise AdaptiveError(f"structured_outputs has {given}; give it json, json_object, regex, choice or grammar")
        (form,) = forms.values()
        return form


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    """A JSON schema that may be text. Raises AdaptiveError if the text is not a JSON object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise AdaptiveError(f"structured_outputs: json is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise AdaptiveError("structured_outputs: json is no JSON schema, which is an object")
    return given
