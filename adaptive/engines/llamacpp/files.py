"""Finds, loads and checks the GGUF file of a pair's model.

A draft in a GGUF file decodes from the file and is trained from a checkpoint of the same weights. This module checks
that the two are the same model: the same shape, and on a probe text the same predictions, up to quantisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.hub import hub_file
from adaptive.settings import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adaptive.engines.llamacpp.engine import LlamaCppEngine
    from adaptive.engines.llamacpp.tokenizer import GgufTokenizer
    from adaptive.settings import Settings

SUFFIX = ".gguf"
# Text for comparing predictions: ordinary text of several kinds, so that any model predicts parts of it well.
PROBE = (
    "The weather was fine when they set out in the morning, but by noon clouds had come up from the west. "
    "Question: if a train covers 60 miles in an hour, how far does it go in 3 hours and a half? Answer: it goes "
    "60 times 3.5 miles, which is 210 miles.\n\n"
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n        if number > best:\n"
    "            best = number\n    return best\n\nDear Anna, thank you for your help with the report last week."
)
# The largest mean total variation between a file's and its checkpoint's predictions, by the file's bits per weight.
# Quantisation of small models causes about half of each limit; other weights of the same shape are mostly above 0.3.
# Too low: coarsely quantised files of the right model are refused. Too high: training improves another model than the
# one that decodes.
MOST_APART = ((7.0, 0.05), (4.0, 0.15), (0.0, 0.3))


def is_gguf_name(name: str) -> bool:
    """Whether a name that the user entered is that of a GGUF file."""
    return name.lower().endswith(SUFFIX)


def find_gguf(name: str, revision: str | None) -> Path:
    """The file of that name: a path, or ``owner/repository/file.gguf`` on the hub.

    Raises AdaptiveError if it does not exist or is not a GGUF file, or if llama-cpp-python is not installed.
    """
    from adaptive.engines.llamacpp.model import binding, is_gguf, parts_of

    path = expanded(name)
    if not path.exists():
        path = _fetch(name, revision)
    if not path.is_file() or not is_gguf(path):
        raise AdaptiveError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    if missing := [part.name for part in parts_of(path) if not part.is_file()]:
        raise AdaptiveError(f"{path} is one of several parts, and {missing[0]} is not beside it")
    binding()  # raises before the file is read: a missing engine is the first error that a user should see
    return path


def _fetch(name: str, revision: str | None) -> Path:
    from adaptive.engines.llamacpp.model import parts_of

    parts = re.fullmatch(r"([\w.-]+/[\w.-]+)/(.+)", name)
    if parts is None or name.startswith((".", "/", "~")):
        raise AdaptiveError(f"GGUF file {name} does not exist")
    first, *_ = [hub_file(parts[1], part.as_posix(), revision) for part in parts_of(Path(parts[2]))]
    return first


def gguf_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer in a GGUF file. Raises AdaptiveError for a file that cannot be loaded."""
    from adaptive.engines.llamacpp.model import LlamaModel
    from adaptive.engines.llamacpp.tokenizer import GgufTokenizer

    return GgufTokenizer(LlamaModel(path, vocabulary_only=True))


def load_gguf(
    path: Path, settings: Settings, device: str, on_progress: Callable[[float], None] | None = None
) -> LlamaCppEngine:
    """Load ``path`` as an engine. With ``device`` cpu the library does not use an accelerator.

    Raises AdaptiveError for a file that cannot be loaded.
    """
    import torch

    from adaptive.engines.llamacpp.engine import LlamaCppEngine
    from adaptive.engines.llamacpp.model import LlamaModel
    from adaptive.engines.llamacpp.tokenizer import GgufTokenizer

    gpu = device != "cpu"
    model = LlamaModel(path, gpu=gpu, on_progress=on_progress)
    return LlamaCppEngine(model, GgufTokenizer(model).end_tokens, torch.get_num_threads(), gpu)


def check_checkpoint(engine: LlamaCppEngine, checkpoint: PreTrainedModel, name: str) -> None:
    """Raise AdaptiveError unless ``checkpoint`` (float32) and the engine's file hold the same model.

    Compares shapes and predictions; the tokenizers are compared elsewhere.
    """
    import torch

    from adaptive.engines.llamacpp.tokenizer import GgufTokenizer

    config, file = checkpoint.config.get_text_config(), engine.llama
    theirs = {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "query heads": config.num_attention_heads,
        "key heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
    }
    for what, number in theirs.items():
        if file.shape[what] != number:
            raise AdaptiveError(
                f"draft checkpoint {name} is another model than {file.path}: {number} {what}, and the file has "
                f"{file.shape[what]}"
            )
    tokens = torch.tensor(GgufTokenizer(file).encode(PROBE))
    sequence = engine.sequence()
    ours = sequence.extend(tokens, len(tokens)).softmax(-1)
    sequence.close()
    with torch.inference_mode():
        logits = checkpoint(input_ids=tokens[None].to(checkpoint.device)).logits[0].float().cpu()
    shared = min(ours.shape[1], logits.shape[1])
    apart = float((ours[:, :shared] - logits[:, :shared].softmax(-1)).abs().sum(-1).mean() / 2)
    library = file.library
    bits = 8 * library.llama_model_size(file.pointer) / library.llama_model_n_params(file.pointer)
    allowed = next(most for least, most in MOST_APART if bits >= least)
    if not apart <= allowed:
        raise AdaptiveError(
            f"draft checkpoint {name} predicts other tokens than {file.path}: {apart:.0%} of probability lies "
            f"elsewhere, and {bits:.1f} bits a weight explain at most {allowed:.0%}; name the checkpoint that the file "
            "was made from"
        )
