"""All parts in the order in which they run: first the checks of exactness, then the timings. Parts with the same models
are adjacent, so that these are made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpu_parts.breakdown import breakdown
from gpu_parts.exact import architectures, graphs, greedy, short_memory, swap
from gpu_parts.learning import training
from gpu_parts.models import planned_bytes
from gpu_parts.sampled import sampled
from gpu_parts.scale import Scale
from gpu_parts.several import several
from gpu_parts.speed import bandwidth, first_token, other_kind, plain, quantised, speculation, verification
from gpu_parts.work import Figures, Part

# Minutes that all parts take together with the seconds below.
MINUTES = 8.0
# Share of a part's seconds that it gets at each scale; the tiny scale is for tests.
SHARE = {"full": 1.0, "tiny": 0.02}
# Tokens of the texts that most parts decode; bytes of recordings, workspaces and intermediate results.
TEXT, BESIDE = 2048, 1 << 30
# Bytes of a training pass in addition to the draft's copy: logits and activations of 2,048 tokens.
PASS = 3 << 30


def cache_bytes(scale: Scale, tokens: int) -> int:
    """Bytes of keys and values of ``tokens`` tokens in the inflated target and its draft, with heads of size 64."""
    numbers = sum(2 * 64 * size.heads * size.layers for size in (scale.target, scale.draft))
    return numbers * scale.dtype.itemsize * tokens


def a_text(scale: Scale) -> int:
    """Bytes in addition to the weights for a text, with the inflated pair or a smaller one."""
    return BESIDE + cache_bytes(scale, TEXT) if scale.name == "full" else 1 << 26


def a_prompt(scale: Scale) -> int:
    """Bytes in addition to the weights for the long prompt."""
    return a_text(scale) + cache_bytes(scale, scale.first)


def several_texts(scale: Scale) -> int:
    """Bytes in addition to the weights for several texts of up to 512 tokens."""
    return a_text(scale) + 2 * max(scale.texts) * cache_bytes(scale, 512)


def a_copy(scale: Scale) -> int:
    """Bytes in addition to the weights while a float32 copy of the draft is trained."""
    if scale.name != "full":
        return 1 << 28
    size = scale.draft
    numbers = size.layers * (4 * size.width * size.heads * 64 + 3 * size.width * size.feed_forward)
    return a_text(scale) + 4 * numbers + PASS


def _part(
    name: str,
    words: str,
    seconds: float,
    run: Callable[..., Figures],
    kind: str | None = None,
    beside: Callable[[Scale], int] = a_text,
) -> Part:
    """A part with one pair of the workshop, whose kind ``run`` receives, or with none."""
    if kind is None:
        return Part(name, words, seconds, (), run, beside)
    return Part(name, words, seconds, (kind,), partial(run, kind=kind), beside)


PARTS = (
    _part("bandwidth", "bytes a second of a copy within the device", 5, bandwidth, beside=lambda s: 2 * s.copied),
    _part("greedy-float32", "greedy answers with drafts against the target alone", 30, greedy, "bundled float32"),
    _part("sampled", "sampled answers by chi-square, seeded ones token for token", 25, sampled),
    _part("graphs", "captured passes against eager ones, captured once", 22, graphs, "bundled float32"),
    _part("swap", "an adapter swapped in mid-answer", 8, swap, "bundled float32"),
    _part("short-memory", "memory that is not there", 5, short_memory, "bundled float32"),
    _part("architectures", "small models of other architectures", 25, architectures),
    _part("greedy-bfloat16", "greedy answers in bfloat16", 25, greedy, "bundled bfloat16"),
    _part("plain", "tokens a second without a draft", 25, plain, "large"),
    _part("verification", "passes over 1 to 64 tokens", 20, verification, "large"),
    _part("breakdown", "where a round's time goes", 20, breakdown, "large"),
    _part("speculation", "fixed lengths, the controller, transformers' own", 60, speculation, "large"),
    _part("training", "training beside decoding", 30, training, "large", a_copy),
    _part("first-token", "the first token after a long prompt", 20, first_token, "large", a_prompt),
    _part("several", "several answers at once", 30, several, "large", several_texts),
    _part("nf4", "the target in nf4", 35, quantised, "nf4"),
    _part("int8", "the target in int8", 20, quantised, "int8"),
    _part("mixture", "a mixture of experts", 35, other_kind, "mixture"),
    _part("hybrid", "a hybrid with recurrent layers", 40, other_kind, "hybrid"),
)


def needs(scale: Scale) -> Callable[[Part], int]:
    """A function that returns the peak device memory of a part in bytes, computed from models without weights."""
    known: dict[str, int] = {}

    def need(part: Part) -> int:
        for kind in part.kinds:
            if kind not in known:
                known[kind] = planned_bytes(scale, kind)[1]
        return max((known[kind] for kind in part.kinds), default=0) + part.beside(scale)

    return need


def table(scale: Scale, minutes: float) -> str:
    """The plan as a Markdown table: parts, their seconds, bytes of the device's memory."""
    need, factor = needs(scale), minutes / MINUTES * SHARE[scale.name]
    lines = ["| part | what | seconds | GB of memory |", "|---|---|---|---|"]
    for part in PARTS:
        lines.append(f"| `{part.name}` | {part.words} | {factor * part.seconds:.3g} | {need(part) / 1e9:.1f} |")
    seconds = factor * sum(part.seconds for part in PARTS)
    most = max(need(part) for part in PARTS)
    return "\n".join([*lines, f"| all | | {seconds:.3g} | at most {most / 1e9:.1f} |"])
