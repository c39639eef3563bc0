"""Reads the tokenizers of a pair's models, and checks that they agree.

In: the models' sources. Out: one tokenizer, the target's, for both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.engines.head.kinds import raw_config
from adaptive.engines.llamacpp.files import gguf_tokenizer
from adaptive.engines.load import Source
from adaptive.errors import AdaptiveError, first_line
from adaptive.remote import Remote
from adaptive.vocabulary import difference_of, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Model types of Mistral AI. Many of their checkpoints have a tokenizer.json that splits a text into words by Llama 3's
# rules, and not by those that the model was trained with.
MISTRAL = frozenset({"ministral", "mistral", "mistral3", "pixtral", "voxtral"})
# A control token of Mistral's tokenizers, by which a model of these types with another tokenizer is recognised.
MISTRALS_OWN = b'"[INST]"'


def read_tokenizer(source: Source, trust: bool) -> PreTrainedTokenizerBase:
    """A model's tokenizer. ``trust``: run code that comes with the checkpoint. Raises AdaptiveError."""
    from transformers import AutoTokenizer

    if source.gguf is not None:
        return gguf_tokenizer(source.gguf)
    try:
        # Not mistral-common's, which transformers prefers where that is installed: it applies no chat templates.
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=trust, mistral_format=False, **_corrections(source.folder)
        )
        if not loaded.chat_template:
            loaded.chat_template = _processors_template(source.folder)
    except Exception as error:
        raise AdaptiveError(f"the tokenizer of {source.id} cannot be read: {first_line(error)}") from error
    if type(getattr(getattr(loaded, "backend_tokenizer", None), "model", None)).__name__ == "BPE":
        # transformers ignores this for BPE, with a warning at the first answer, but then decodes more slowly.
        loaded.clean_up_tokenization_spaces = False
    return loaded


def _corrections(folder: Path) -> dict[str, bool]:
    """transformers' option to correct Mistral's tokenizers, for those. It leaves alone what needs no correction."""
    file = folder / "tokenizer.json"
    mistrals = raw_config(folder).get("model_type") in MISTRAL and file.is_file() and MISTRALS_OWN in file.read_bytes()
    return {"fix_mistral_regex": True} if mistrals else {}


def _processors_template(folder: Path) -> str | None:
    """The chat template of a checkpoint with vision that has it with its processor alone, as Mistral Small 3.1 does;
    None if there is none."""
    file = folder / "chat_template.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    template = said.get("chat_template") if isinstance(said, dict) else None
    return template if isinstance(template, str) else None


def checked_tokenizer(
    target: Source, draft: Source | None, trained: Source | None, remote: Remote | None, trust: bool
) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises AdaptiveError if it is not also that of the draft, of the draft server's draft
    (``remote``), or of the checkpoint that a GGUF draft is ``trained`` from."""
    tokenizer = read_tokenizer(target, trust)
    if draft is not None and draft.head:
        return tokenizer  # a head uses the target's vocabulary
    ours, theirs = vocabulary_of(tokenizer), None
    if draft is not None:
        theirs, name = vocabulary_of(read_tokenizer(draft, trust)), f"draft {draft.id}"
    elif remote is not None and remote.hello.vocabulary != ours.digest:
        theirs, name = remote.vocabulary(), f"the draft {remote.hello.id} at {remote.url}"
    difference = None if theirs is None else difference_of(ours, theirs)
    if difference:
        raise AdaptiveError(
            f"target {target.id} and {name} have different tokenizers: {difference}; "
            "a draft must come from the target's own family"
        )
    if trained is not None and trained is not draft:
        difference = difference_of(ours, vocabulary_of(read_tokenizer(trained, trust)))
        if difference:
            raise AdaptiveError(
                f"draft checkpoint {trained.id} has another tokenizer than the target {target.id}: {difference}; "
                "name the checkpoint that the GGUF draft was made from"
            )
    return tokenizer
