"""Tokenizers of published checkpoints that need more than their files say."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import BUNDLED
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils.logging import get_logger

from adaptive.engines.load import Source
from adaptive.service.dialects.completions import ALPHABET
from adaptive.tokenizers import read_tokenizer

# How Llama 3 splits a text into words. The published tokenizer.json of Mistral Small 3.1 and others does the same,
# while these models were trained with words that end before a capital letter.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def save(folder: Path, tokens: list[str], model_type: str = "mistral3", **config: Any) -> Source:
    """A checkpoint's tokenizer like Mistral's, without its weights. ``tokens``: some of its first ones."""
    # transformers looks at a tokenizer of such a size alone.
    filled = [f"<SPECIAL_{number}>" for number in range(100_001)]
    vocabulary = {token: number for number, token in enumerate([*tokens, *ALPHABET, "oW", *filled])}
    built = Tokenizer(models.BPE(vocabulary, [("o", "W")]))
    words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(tokens)
    built.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "4.50.0.dev0"}))
    return Source("it", folder, "none")


MISTRALS = ["<s>", "</s>", "[INST]", "[/INST]"]


@pytest.mark.parametrize(
    ("tokens", "model_type", "words"),
    [
        (MISTRALS, "mistral3", ["o", "W"]),
        (MISTRALS, "llama", ["oW"]),
        (["<s>", "</s>"], "mistral", ["oW"]),
    ],
    ids=["Mistral's", "another model type", "another tokenizer"],
)
def test_mistrals_tokenizers_split_words_as_their_models_were_trained(
    tokens: list[str], model_type: str, words: list[str], tmp_path: Path
) -> None:
    known = read_tokenizer(save(tmp_path, tokens, model_type), trust=False)
    assert known.convert_ids_to_tokens(known.encode("oW", add_special_tokens=False)) == words


@pytest.mark.thorough
def test_a_checkpoint_may_have_its_chat_template_with_its_processor_alone(tmp_path: Path) -> None:
    source = save(tmp_path, MISTRALS)
    assert not read_tokenizer(source, trust=False).chat_template
    template = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert read_tokenizer(source, trust=False).chat_template == template


def test_a_chat_template_is_applied_where_mistral_common_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM installs it. transformers then reads ``tekken.json`` by it, and such a tokenizer has no chat template."""
    from transformers.integrations.mistral import tokenizer
    from transformers.models.auto import tokenization_auto

    monkeypatch.setattr(tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "ministral3", "MistralCommonBackend")
    source = save(tmp_path, MISTRALS, "ministral3", chat_template="{{ messages[0].content }}")
    (tmp_path / "tekken.json").write_text("{}")
    assert read_tokenizer(source, trust=False).chat_template == "{{ messages[0].content }}"


def test_an_answer_is_decoded_without_a_warning_of_an_option_that_has_no_effect(tmp_path: Path) -> None:
    """Llama 3's checkpoints ask for spaces to be cleaned up, which transformers does not do, and says."""
    shutil.copytree(BUNDLED / "target", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}))
    known = read_tokenizer(Source("it", tmp_path, "none"), trust=False)
    warned: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warned.append  # type: ignore[method-assign]
    logger = get_logger("transformers.tokenization_utils_tokenizers")
    logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    try:
        assert known.decode(known.encode("x != y .", add_special_tokens=False)) == "x != y ."
    finally:
        logger.removeHandler(handler)
    assert not warned
