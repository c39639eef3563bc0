"""Reads the tokenizers of a pair's models, and checks that they agree.

In: the models' sources. Out: one tokenizer, the target's, for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive.engines.llamacpp.files import gguf_tokenizer
from adaptive.engines.load import Source
from adaptive.errors import AdaptiveError, first_line
from adaptive.remote import Remote
from adaptive.vocabulary import difference_of, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(source: Source, trust: bool) -> PreTrainedTokenizerBase:
    """A model's tokenizer. ``trust``: run code that comes with the checkpoint. Raises AdaptiveError."""
    from transformers import AutoTokenizer

    if source.gguf is not None:
        return gguf_tokenizer(source.gguf)
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust)
    except Exception as error:
        raise AdaptiveError(f"the tokenizer of {source.id} cannot be read: {first_line(error)}") from error
    return loaded


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
