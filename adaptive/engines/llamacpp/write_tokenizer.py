"""Writes a tokenizer into a GGUF file: vocabulary, merges, special tokens, chat template, and the name of llama.cpp's
pre-tokenizer that splits text in the same way.

In: a byte-level BPE tokenizer of transformers. Out: entries of the file's metadata.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, pre_tokenizers

from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.engines.llamacpp.names import package
from adaptive.engines.llamacpp.tokenizer import GgufTokenizer
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The patterns by which llama.cpp's pre-tokenizers of the usual models split text into words, applied in order.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    LLAMA3.replace("{1,3}", "")
    .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
)
SPLITS = {
    "gpt-2": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "qwen2": (LLAMA3.replace("{1,3}", ""),),
    "qwen35": (QWEN35,),
    "smollm": (r"\p{N}", GPT2),
}
# Pre-tokenizers that are tested by running llama.cpp with each.
OTHERS = (
    *("deepseek-llm", "deepseek-coder", "falcon", "tekken", "gpt-4o", "stablelm2", "command-r", "olmo", "dbrx"),
    *("chatglm-bpe", "bloom", "viking", "default"),
)
# Text that pre-tokenizers split differently: digits, contractions, case, spaces and line ends, punctuation, other
# scripts, emoji.
SAMPLE = (
    "Hello, World!  3.14 + 2710 = 2713.14; 1234567 items, can't, WE'LL, it's 'RE\n\n\n  indented\t\ttabs \n"
    "def f(x_1):\r\n\treturn [x**2 for x in range(10)]  # ok???!!! naïve Straße 你好，世界 мир नमस्ते 🙂🦙🦙 … — “q” $5"
)


def finish(writer: Any) -> None:
    """Write everything that was given to ``writer``, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int, splitter: str) -> None:
    """Add vocabulary, merges, special tokens and chat template to the metadata; ``splitter`` is llama.cpp's
    pre-tokenizer, ``rows`` the number of tokens, padded with unused ones."""
    gguf = package()
    merges = _bpe(tokenizer)["merges"]
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for i in range(rows):
        tokens.append(by_id.get(i, f"[PAD{i}]"))
        if i not in by_id:
            kinds.append(gguf.TokenType.UNUSED)
        elif i in added:
            kinds.append(gguf.TokenType.CONTROL if added[i].special else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    whole, plain = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    writer.add_add_bos_token(len(whole) > len(plain) and whole[0] == tokenizer.bos_token_id)
    for name in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, of which "default" is the usual one
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)


def _bpe(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The tokenizer's byte-level BPE model. Raises AdaptiveError for another kind of tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    model: dict[str, Any] = whole.get("model", {})
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(whole.get("decoder")):
        raise AdaptiveError(
            "only byte-level BPE tokenizers can be written as GGUF here; llama.cpp's convert_hf_to_gguf.py knows others"
        )
    return model


def pre_tokenizer(tokenizer: PreTrainedTokenizerBase, rows: int) -> str:
    """The first of llama.cpp's pre-tokenizers that splits text like ``tokenizer``. The usual ones are compared by their
    patterns; the others by the tokens that llama.cpp makes, for which the binding must be installed. ``rows``:
    see ``add_tokenizer``. Raises AdaptiveError if none matches."""
    _bpe(tokenizer)
    expected = _split(tokenizer.backend_tokenizer.pre_tokenizer)  # type: ignore[attr-defined]
    for name, patterns in SPLITS.items():
        stages = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if _split(pre_tokenizers.Sequence([*stages, bytewise])) == expected:
            return name
    return _tried(tokenizer, rows)


def _split(pre_tokenizer: Any) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(SAMPLE)]


def _tried(tokenizer: PreTrainedTokenizerBase, rows: int) -> str:
    """The one of OTHERS with which llama.cpp makes the same tokens as ``tokenizer``. Raises AdaptiveError if there is
    none."""
    gguf = package()
    expected = tokenizer.encode(SAMPLE, add_special_tokens=False)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for splitter in OTHERS:
                file = Path(scratch) / f"{splitter}.gguf"
                writer = gguf.GGUFWriter(file, "llama")  # any architecture: only the vocabulary is read
                add_tokenizer(writer, tokenizer, rows, splitter)
                finish(writer)
                theirs = GgufTokenizer(LlamaModel(file, vocabulary_only=True))
                if theirs.encode(SAMPLE, add_special_tokens=False) == expected:
                    return splitter
    except OSError as error:
        place = tempfile.gettempdir()
        raise AdaptiveError(
            f"the tokenizer cannot be compared with llama.cpp's: {place} cannot be written ({error.strerror})"
        ) from error
    raise AdaptiveError(
        "llama.cpp has no pre-tokenizer that splits text as this tokenizer does, so that it cannot be written as GGUF"
    )
