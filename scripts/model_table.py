"""Tries tiny checkpoints of every architecture below and writes ``docs/models.md``: which are exact, which are refused.

    python scripts/model_table.py                  # all, and the page
    python scripts/model_table.py qwen3_5_text     # some, printed

Each checkpoint has a few layers of random weights in float32. It is saved, loaded as any model is, and decodes
greedily after prompts of three lengths: plain, and with 1, 4 and 9 drafted tokens and the default policy. The draft is
a copy with noise on its weights, so that some tokens are accepted and others rejected. The output must equal that of
transformers' own ``generate`` with the same checkpoint. Then the model is its own draft, and every token must be
accepted; and an adapter is trained on the draft for some steps, swapped in, and removed again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from counted_reads import counted_reads
from tiny_models import GREEDY, Greedy, alone, noisy, prompt_of, randomise, tiny_config, tiny_model
from transformers.utils import logging as transformers_logging

from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Source, forward_of, load_engine
from adaptive.errors import AdaptiveError, first_line
from adaptive.pair import instead
from adaptive.settings import Settings, load_settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TOKENS = 40
PROMPTS = (5, 40, 90)
LENGTHS: tuple[int | None, ...] = (1, 4, 9, None)

# Types by their heading in the page.
FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": (
        "apertus", "arcee", "bloom", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4", "falcon", "gemma",
        "gemma2", "gemma3_text", "gemma4_unified_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
        "gptj", "granite", "helium", "hunyuan_v1_dense", "llama", "minicpm3", "ministral", "ministral3", "mistral",
        "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    ),
    "attention, with keys that layers share": ("gemma3n_text", "gemma4_text"),
    "mixtures": (
        "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
        "gpt_oss", "granitemoe", "hunyuan_v1_moe", "jetmoe", "llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe",
        "qwen2_moe", "qwen3_moe",
    ),
    "recurrent layers": (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3",
        "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
        "zamba", "zamba2",
    ),
    "others": ("deepseek_v32", "recurrent_gemma", "rwkv", "xlstm"),
}  # fmt: skip
# Types for several kinds of input, mapped to the type of their language model; only that part is loaded.
SEVERAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
}


@dataclass
class Result:
    """The results of one type. ``problems``: everything it did wrong."""

    name: str
    family: str
    forward: str = ""
    plain: bool = False
    plain_reason: str = ""
    accepted: float = 0.0
    distilled: str = ""
    read: str = ""  # bytes that loading reads, of those in the file, if the file has more than a language model
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The verdict in the words of the page."""
        if self.problems:
            return f"wrong: {'; '.join(self.problems)}"
        if self.plain:
            return f"plain only: it {self.plain_reason}; {instead(Source(self.name, Path(), 'none'))}"
        return "exact"


def examine(name: str, family: str) -> Result:
    """Try one type."""
    result = Result(name, family)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _examine(result, Path(folder))
        except AdaptiveError as error:
            result.problems.append(f"refused: {error}")
        except Exception as error:
            traceback.print_exc()
            result.problems.append(f"{type(error).__name__}: {first_line(error)}")
    return result


def _examine(result: Result, folder: Path) -> None:
    settings = load_settings({"device": "cpu", "dtype": "float32"})
    whole = folder / "target"
    reference = several(result.name) if result.name in SEVERAL else tiny_model(result.name)
    reference.save_pretrained(whole)
    with counted_reads() as read:
        target = _load(whole, settings)
    if result.name in SEVERAL:
        size = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
        language = sum(parameter.nbytes for parameter in target.model.parameters())
        result.read = f"{sum(read.values()) / 1e6:.2f} of {size / 1e6:.2f} MB ({language / 1e6:.2f})"
        if any("vis" in name for name in read):
            result.problems.append("weights of vision are read")
    noisy(reference).save_pretrained(folder / "draft")
    draft = _load(folder / "draft", settings)
    result.forward = forward_of(target).name
    result.plain, result.plain_reason = target.undraftable is not None, target.undraftable or ""
    for size in PROMPTS:
        prompt = prompt_of(size)
        expected = alone(reference, prompt, TOKENS)
        if Greedy(target, None).say(prompt, TOKENS) != expected:
            result.problems.append(f"plain decoding differs after {size} tokens")
        if result.plain:
            continue
        for length in LENGTHS:
            greedy = Greedy(target, draft, length)
            if greedy.say(prompt, TOKENS) != expected:
                result.problems.append(f"length {length or 'auto'} differs after {size} tokens")
            if length == 4:
                result.accepted = max(result.accepted, greedy.accepted)
        itself = Greedy(target, target, 4)
        if itself.say(prompt, TOKENS) != expected or itself.accepted < 1:
            result.problems.append(f"its own drafts are rejected after {size} tokens")
    if not result.plain:
        _distil(result, folder, target, draft, settings)


def _load(folder: Path, settings: Settings) -> TransformersEngine:
    engine = load_engine(Source(folder.name, folder, "none"), settings, "cpu", lambda share: None)
    assert isinstance(engine, TransformersEngine)
    return engine


def _distil(
    result: Result, folder: Path, target: TransformersEngine, draft: TransformersEngine, settings: Settings
) -> None:
    """Train an adapter and swap it in and out: the target's answer stays, the draft's logits change and change back."""
    from adaptive.engines.load import load_model
    from trainers.dataset import Example
    from trainers.fit import fit
    from trainers.lora import attach, snapshot, write
    from trainers.recipe import Recipe

    prompt = prompt_of(40)
    answer = Greedy(target, None).say(prompt, TOKENS)
    model = attach(load_model(Source("draft", folder / "draft", "none"), settings, "cpu"), Recipe(rank=4))
    examples = [
        Example(
            id=number, domain="", prompt=np.array(prompt, np.int32), output=np.array(answer, np.int32),
            sampling=GREEDY, limited=True, supervision=None,
        )
        for number in range(2)
    ]  # fmt: skip
    fit(model, examples, lambda _: 1.0, Recipe(rank=4, loss="cross-entropy", epochs=3, learning_rate=0.01))
    adapter = folder / "adapter"
    adapter.mkdir()
    write(model, snapshot(model), adapter)
    before = draft.sequence().extend(prompt, 1).clone()
    draft.apply_adapter(adapter)
    changed = draft.sequence().extend(prompt, 1).clone()
    if Greedy(target, draft, 4).say(prompt, TOKENS) != answer:
        result.problems.append("differs with an adapter")
    draft.apply_adapter(None)
    if torch.equal(before, changed) or not torch.equal(before, draft.sequence().extend(prompt, 1)):
        result.problems.append("an adapter changes nothing, or stays")
    result.distilled = "yes"


def several(name: str) -> Any:
    """A tiny checkpoint for several kinds of input."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text = tiny_config(SEVERAL[name])
    config = CONFIG_MAPPING[name]()
    small = {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 2, "depth": 2,
        "num_heads": 2, "out_hidden_size": text.hidden_size, "image_size": 28, "patch_size": 14,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    # Some configs have no vision config by default.
    usual = config.sub_configs["vision_config"]() if config.vision_config is None else config.vision_config
    known = {key: value for key, value in small.items() if hasattr(usual, key)}
    given = {"text_config": text, "vision_config": type(usual)(**known), "tie_word_embeddings": False}
    if getattr(config, "audio_config", None) is not None:
        given["audio_config"] = None
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(type(config)(**given), dtype=torch.float32).eval()
    randomise(model, 0)
    return model


HEAD = """# Which models work

Find your model's type (`model_type` in its `config.json`) in the table. `python scripts/model_table.py` writes it: it
tries a tiny checkpoint of each type in float32. Larger ones compute the same.

- *exact*: token for token the output of transformers' own `generate`, plain, with 1, 4, 9 drafted tokens, and under the
  default policy. As its own draft, the model has every token accepted.
- *plain only*: decoding, chat and the log work, without drafts.
- *distilled, swapped*: a trained adapter changes the draft, not the answer.
- *forward*: `cpu fused` is ours on a CPU, `transformers` transformers' own, which is slower.
- *read*: of checkpoints that also see or hear, the bytes of weights that loading reads, of those in the file, and in
  brackets those of the language model's weights. Their vision parts are made large here, so that the difference shows.

`adaptive doctor` says which forward runs your model.

The multi-token head in checkpoints of `deepseek_v3`, `glm4_moe`, `qwen3_5`, `qwen3_5_moe` (also their text models) and
`qwen3_next`, if present, drafts unless another draft is named: [heads.md](heads.md).

Quantised checkpoints: [quantised.md](quantised.md).
"""


def page(results: list[Result]) -> str:
    """The whole page as Markdown."""
    lines = [HEAD]
    exact = sum(result.verdict == "exact" for result in results)
    lines.append(f"{len(results)} types tried, {exact} exact.\n")
    for family in dict.fromkeys(result.family for result in results):
        found = [one for one in results if one.family == family]
        columns = [
            "type",
            "result",
            "forward",
            "distilled, swapped",
            *(["read"] if any(one.read for one in found) else []),
        ]
        lines += [f"## {family.capitalize()}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for result in found:
            cells = [f"`{result.name}`", result.verdict, result.forward.lower().replace("_", " "), result.distilled]
            cells += [result.read] if result.read else []
            lines.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Try the named types, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    asked = parser.parse_args().types
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    families = {**FAMILIES, "several kinds of input, of which the language model is loaded": tuple(SEVERAL)}
    results = []
    for family, names in families.items():
        for name in names:
            if not asked or name in asked:
                results.append(examine(name, family))
                found = results[-1]
                print(f"{name}: {found.verdict}, {found.forward}, accepted {found.accepted:.2f}", flush=True)
    if not asked:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
