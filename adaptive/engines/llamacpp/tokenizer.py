"""The tokenizer of a GGUF file, run by llama.cpp, with transformers' interface.

Tokens are the same as in llama.cpp's own programs, for any pre-tokenizer that the file names. The chat template and the
special tokens come from the file's metadata.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from transformers import BatchEncoding, PreTrainedTokenizerBase

from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.errors import AdaptiveError

# Bits of llama.cpp's token attributes.
UNKNOWN, UNUSED, CONTROL = 1 << 0, 1 << 1, 1 << 3


class GgufTokenizer(PreTrainedTokenizerBase):
    """Encodes, decodes and renders chats with the vocabulary and template of ``model``. It is immutable, so several
    threads may share it."""

    def __init__(self, model: LlamaModel) -> None:
        library, vocab = model.library, model.vocab
        special = {
            "bos_token": library.llama_vocab_bos(vocab),
            "eos_token": library.llama_vocab_eos(vocab),
            "pad_token": library.llama_vocab_pad(vocab),
        }
        self._model, self._library, self._vocab = model, library, vocab
        texts = {name: self._text(token) for name, token in special.items() if token >= 0}
        template = model.metadata("tokenizer.chat_template")
        super().__init__(**texts, name_or_path=str(model.path), model_max_length=model.context_length)
        self.chat_template = template

    def __deepcopy__(self, memo: object) -> GgufTokenizer:
        return self

    def _text(self, token: int) -> str:
        return str(self._library.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"))

    @cached_property
    def _attributes(self) -> list[int]:
        return [self._library.llama_vocab_get_attr(self._vocab, token) for token in range(self.vocab_size)]

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every token at which llama.cpp ends an answer."""
        ends = self._library.llama_vocab_is_eog
        return frozenset(token for token in range(self.vocab_size) if ends(self._vocab, token))

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._model.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def is_fast(self) -> bool:
        """False, because the tokenizers library does not run it."""
        return False

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The control tokens by id."""
        return {
            token: AddedToken(self._text(token), special=True, normalized=False)
            for token, attribute in enumerate(self._attributes)
            if attribute & CONTROL
        }

    def get_vocab(self) -> dict[str, int]:
        """Ids by token text, without the unused tokens that pad the vocabulary."""
        return {self._text(i): i for i, attribute in enumerate(self._attributes) if not attribute & UNUSED}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.get_vocab()

    def _convert_token_to_id_with_added_voc(self, token: str) -> int | None:
        return self._ids.get(token)

    def convert_ids_to_tokens(self, ids: int | list[int], skip_special_tokens: bool = False) -> Any:
        """The token texts of ids, as in the vocabulary."""
        if isinstance(ids, int):
            return self._text(ids)
        return [self._text(i) for i in ids if not (skip_special_tokens and self._attributes[i] & CONTROL)]

    def encode(self, text: Any, *args: Any, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of ``text``. Special tokens written out in it, as in a rendered chat, are recognised.

        ``add_special_tokens`` adds the special tokens that the file requires at the beginning and the end of a text.
        """
        data = str(text).encode("utf-8", "surrogatepass")
        size = len(data) + 2
        buffer = (ctypes.c_int32 * size)()
        count = self._library.llama_tokenize(self._vocab, data, len(data), buffer, size, add_special_tokens, True)
        if count < 0:  # the library's result for too small a buffer; more than one token per byte does not happen
            raise AdaptiveError(f"llama.cpp cannot turn a text of {len(data)} bytes into tokens")
        return buffer[:count]

    def _encode_plus(  # type: ignore[override]
        self, text: Any, *args: Any, add_special_tokens: bool = True, **kwargs: Any
    ) -> BatchEncoding:
        several = isinstance(text, (list, tuple))
        found = [self.encode(one, add_special_tokens=add_special_tokens) for one in (text if several else [text])]
        masks = [[1] * len(ids) for ids in found]
        return BatchEncoding(
            {"input_ids": found, "attention_mask": masks}
            if several
            else {"input_ids": found[0], "attention_mask": masks[0]}
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        """The text of a list of ids, without the overhead of transformers' ``decode``, which handles other types."""
        if type(token_ids) is list and token_ids and type(token_ids[0]) is int:
            return self._decode(token_ids, skip_special_tokens)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        pieces = self._said if skip_special_tokens else self._whole
        return b"".join(map(pieces.__getitem__, ids)).decode("utf-8", "replace")

    @cached_property
    def _said(self) -> _Pieces:
        return _Pieces(self._model, special=False)

    @cached_property
    def _whole(self) -> _Pieces:
        return _Pieces(self._model, special=True)


class _Pieces(dict[int, bytes]):
    """The bytes of tokens, requested from the library once each. Special tokens have no bytes unless ``special``."""

    def __init__(self, model: LlamaModel, special: bool) -> None:
        super().__init__()
        self._model, self._special = model, special

    def __missing__(self, token: int) -> bytes:
        model = self._model
        if not 0 <= token < model.vocab_size:
            raise AdaptiveError(f"token {token} does not exist: the vocabulary has {model.vocab_size}")
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = model.library.llama_token_to_piece(model.vocab, token, buffer, size, 0, self._special)
            if length >= 0:
                break
            size = -length  # the size that the piece needs
        self[token] = buffer.raw[:length]
        return self[token]
