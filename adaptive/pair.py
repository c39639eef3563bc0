"""A pair of models: finds them, identifies them, checks that they are compatible, and loads them.

In: settings. Out: a ``Pair`` of engines with one tokenizer. The identity of a pair (the name of its state folder) is
known without loading any weights.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.engines import budget
from adaptive.engines.cpu.torch_threads import set_threads
from adaptive.engines.head.kinds import HeadKind, head_kind, mtp_weights
from adaptive.engines.identity import ends, weights_hash
from adaptive.engines.llamacpp.files import find_gguf, is_gguf_name
from adaptive.engines.llamacpp.model import parts_of
from adaptive.engines.load import (
    Forward,
    Source,
    check_readable,
    forward_of,
    load_engine,
    load_model,
    read_config,
    weight_bytes,
    weights_progress,
)
from adaptive.engines.load_head import check_head, head_for_training, load_head
from adaptive.engines.slower import why_slower
from adaptive.engines.threads import ThreadChoice, WorkClock
from adaptive.errors import AdaptiveError
from adaptive.hub import hub_folder
from adaptive.remote import Remote, is_address, remote_of, untrained
from adaptive.settings import Quantisation, Settings, expanded
from adaptive.tokenizers import checked_tokenizer, read_tokenizer
from checkpoints.manifest import BaseDraft

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.module import Head
    from adaptive.engines.protocol import Engine

BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled"
# Tokens of context below which a draft's is mentioned, if the target's is longer: a conversation soon has as many.
SHORT_CONTEXT = 8192
# Values of --draft that name no model. GROW: the head in the target's checkpoint, or, if there is none, one that is
# grown on it (also the default if only a target is named). MTP: only the head in the checkpoint. PLAIN: no draft, so
# the target decodes plainly.
GROW, MTP, PLAIN = "auto", "mtp", "none"
# Resolution in seconds up to which a thread's own clock is fine enough to time rounds.
FINE_S = 1e-5


@dataclass(frozen=True)
class PairIdentity:
    """``id`` names the state folder; ``base`` is the model that the draft's adapters belong to."""

    id: str
    base: BaseDraft


@dataclass(frozen=True)
class Pair:
    """Two loaded engines, their tokenizer, and warnings for the user about the combination. ``draft`` is None if a
    draft server (``remote``) drafts."""

    identity: PairIdentity
    target: Engine
    draft: Engine | None
    tokenizer: PreTrainedTokenizerBase
    warnings: tuple[str, ...]
    remote: Remote | None = None

    @property
    def clock(self) -> Callable[[], float]:
        """The clock for comparing rounds: ``WorkClock``. It is the wall clock if passes run elsewhere or wait for a
        disk, or if a thread's own clock is too coarse."""
        own = self.own_clock
        if own is time.perf_counter:
            return own
        engines = [engine for engine in (self.target, self.draft) if engine is not None]
        # The choices of target and draft, or the target's and one without effect.
        choices = [engine.threads for engine in engines if engine.threads is not None]
        return WorkClock(choices[0], choices[-1] if len(choices) > 1 else ThreadChoice(0))

    @property
    def own_clock(self) -> Callable[[], float]:
        """The processor time of the calling thread, for passes on one thread; the wall clock in the same cases."""
        engines = [engine for engine in (self.target, self.draft) if engine is not None]
        own = all(engine.device.type == "cpu" and engine.threads is not None for engine in engines)
        own = own and self.remote is None and Forward.STREAMED not in map(forward_of, engines)
        return (
            time.thread_time if own and time.get_clock_info("thread_time").resolution <= FINE_S else time.perf_counter
        )


def sources(settings: Settings) -> tuple[Source, Source | None]:
    """The target and the draft named in the settings; the bundled pair if neither is named.

    The draft may be a head in the target's checkpoint. It is None if the settings want none, if a head is to be grown
    (``grows_on``), or if a draft server drafts (``remote_of``). Raises AdaptiveError for a model that does not exist.
    """
    elsewhere = is_address(settings.draft)
    named = None if elsewhere or settings.draft in (GROW, MTP, PLAIN) else settings.draft
    if settings.target is None and settings.draft is None:
        target, draft = str(BUNDLED / "target"), str(BUNDLED / "draft")
    elif settings.target is None and named is not None:
        raise AdaptiveError("--draft is given without --target; name both, or neither for the bundled pair")
    else:
        target, draft = settings.target or str(BUNDLED / "target"), named or ""
    draft_quantize = "none" if settings.draft_quantize == "auto" else settings.draft_quantize
    whole = _source(target, settings.revision, settings.quantize, "--quantize")
    if whole.head:
        raise AdaptiveError(f"--target {target} is a head, which only drafts; name the model that it was made for")
    small = _source(draft, settings.draft_revision, draft_quantize, "--draft-quantize") if draft else None
    if not draft and not elsewhere and settings.draft != PLAIN:
        small = _inside(whole, settings.draft == MTP)
    if small is not None and small.head and whole.gguf is not None:
        raise AdaptiveError(
            f"draft {draft} is a head, which reads the target's hidden states, and llama.cpp gives none; name the "
            "target's Hugging Face checkpoint, or another draft"
        )
    return whole, small


def _inside(target: Source, wanted: bool) -> Source | None:
    """The multi-token head in the target's checkpoint, or None. Raises AdaptiveError if it is ``wanted`` and there is
    none."""
    if target.gguf is None and mtp_weights(target.folder) is not None:
        return Source(MTP, target.folder, "none", head=HeadKind.MTP)
    if not wanted:
        return None
    if target.gguf is not None:
        raise AdaptiveError(
            f"--draft {MTP} reads the target's hidden states, and llama.cpp gives none; name the target's Hugging Face "
            "checkpoint, or another draft"
        )
    raise AdaptiveError(
        f"--draft {MTP}: the checkpoint of {target.id} has no multi-token head that is known here; name another draft, "
        f"or --draft {GROW} for one that is grown here"
    )


def grows_on(settings: Settings) -> Source | None:
    """The target on which a head is to be grown; None if another draft is named or in the target's checkpoint, or if
    the settings want no draft. A GGUF target gives no hidden states, so none can grow. Raises AdaptiveError as
    ``sources``, and for a GGUF target with ``--draft auto``.
    """
    if settings.draft not in (GROW, None) or (settings.target is None and settings.draft is None):
        return None
    target, inside = sources(settings)
    if inside is not None:
        return None
    if target.gguf is None:
        return target
    if settings.draft is None:
        return None
    raise AdaptiveError(
        f"--draft {GROW} grows a head on the target's hidden states, and llama.cpp gives none; name the target's "
        "Hugging Face checkpoint, or another draft"
    )


def trained_draft(settings: Settings) -> Source | None:
    """The checkpoint that training starts from and adapters belong to: the draft, or the checkpoint named for a GGUF
    draft. (A grown head starts from its target: ``grows_on``.)

    None without a draft, and for a GGUF draft without ``draft_checkpoint``. Raises AdaptiveError as ``sources``.
    """
    return _trained(sources(settings)[1], settings)


def _trained(draft: Source | None, settings: Settings) -> Source | None:
    name = settings.draft_checkpoint
    if draft is None or draft.gguf is None:
        if name is not None:
            raise AdaptiveError(
                f"--draft-checkpoint {name} goes with a GGUF draft, and the draft is "
                f"{f'the checkpoint {draft.id} itself' if draft else 'none'}; leave it out"
            )
        return draft
    if name is None:
        return None
    if is_gguf_name(name):
        raise AdaptiveError(f"--draft-checkpoint is {name}; it must be the Hugging Face checkpoint of the GGUF draft")
    return Source(name, _folder(name, settings.draft_revision), "none")


def _source(name: str, revision: str | None, quantize: Quantisation, option: str) -> Source:
    if not is_gguf_name(name):
        folder = _folder(name, revision)
        return Source(name, folder, quantize, head=head_kind(folder))
    if quantize != "none":
        raise AdaptiveError(f"{option} {quantize} is for checkpoints; a GGUF file is quantised as it is, leave it out")
    file = find_gguf(name, revision)
    return Source(name, file.parent, quantize, file)


def _folder(name: str, revision: str | None) -> Path:
    """The local folder of a checkpoint, downloaded from the hub if ``name`` is not a folder."""
    path = expanded(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise AdaptiveError(f"{path} holds no model: it has no config.json")
        return path
    if path.exists():
        raise AdaptiveError(f"{path} is a file, not a model folder")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise AdaptiveError(f"model folder {name} does not exist (and it is not a hub id like owner/name)")
    return hub_folder(name, revision)


def _weights_hash(source: Source, needed: bool = True, counted: bool = True) -> str:
    """``weights_hash``, extended to GGUF files: a hash of size, first and last megabyte of each part, or of the first
    part alone if the others are not ``counted``."""
    if source.gguf is None:
        return weights_hash(source.folder, needed, counted)
    digest = hashlib.sha256()
    for part in parts_of(source.gguf) if counted else [source.gguf]:
        digest.update(ends(part))
    return digest.hexdigest()[:16]


def pair_identity(settings: Settings, thin: bool = False) -> PairIdentity:
    """The identity of the pair, from ids and hashes, without loading weights. For a target that another server runs, a
    folder with config and tokenizer is enough. With ``thin`` it is the identity that the pair has with such a folder,
    and that a pair whose target is a GGUF file in several parts had in earlier versions."""
    target, draft = sources(settings)
    grows = grows_on(settings) is not None
    trained = _trained(draft, settings)
    return _identity(target, draft, trained, grows, whole=grows and not thin, remote=remote_of(settings), thin=thin)


def _identity(
    target: Source,
    draft: Source | None,
    trained: Source | None,
    grows: bool,
    whole: bool = True,
    remote: Remote | None = None,
    thin: bool = False,
) -> PairIdentity:
    """``trained`` is the checkpoint that adapters belong to; without one, a GGUF draft's adapters belong to its file. A
    head that ``grows`` shares the folder of its target without a draft, and so its log. The draft of a draft server
    shares the folder of the same draft used here. ``whole``: the target needs weights; ``thin``: they do not count."""
    target_hash = _weights_hash(target, whole, not thin)
    base = base_of(draft) if draft else BaseDraft("none", "none")
    if remote is not None:
        base = BaseDraft(remote.hello.id, remote.hello.weights)
    both = hashlib.sha256(f"{target_hash}{base.weights}".encode()).hexdigest()[:8]
    names = [re.sub(r"[^\w.-]+", "-", Path(name).name) for name in (target.id, base.id)]
    if grows:
        base = BaseDraft(f"a head on {target.id}", target_hash)
    if trained is not None and trained is not draft:
        base = BaseDraft(trained.id, _weights_hash(trained))
    return PairIdentity(f"{names[0]}--{names[1]}-{both}", base)


def base_of(draft: Source) -> BaseDraft:
    """The identity of a draft: its id and weights hash. Raises AdaptiveError for a folder without weights."""
    return BaseDraft(draft.id, _weights_hash(draft))


def draft_alone(settings: Settings) -> tuple[Source, PreTrainedTokenizerBase]:
    """The draft model and its tokenizer, for a draft server; the bundled draft if none is named. Raises AdaptiveError
    if it does not exist, or is a head, which cannot draft without its target."""
    named = settings.draft or str(BUNDLED / "draft")
    if is_address(named) or named in (GROW, MTP, PLAIN):
        raise AdaptiveError(f"--draft is {named}; name a model's folder, hub id or GGUF file to serve")
    quantize = "none" if settings.draft_quantize == "auto" else settings.draft_quantize
    draft = _source(named, settings.draft_revision, quantize, "--draft-quantize")
    if draft.head:
        raise AdaptiveError(f"{named} is a head, which drafts beside its target only; name a model")
    return draft, read_tokenizer(draft, settings.trust_remote_code)


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises AdaptiveError if the draft's differs."""
    target, draft = sources(settings)
    return checked_tokenizer(target, draft, _trained(draft, settings), remote_of(settings), settings.trust_remote_code)


def load_pair(settings: Settings, on_progress: Callable[[str, float], None] | None = None) -> Pair:
    """Load both models, and set the calling thread's number of torch threads (``set_threads``). ``on_progress(what,
    share done)`` receives the progress.

    Raises AdaptiveError for anything missing, broken, incompatible or too large, before any weights are read.
    """
    tell = on_progress or (lambda what, share: None)
    tell("tokenizers", 0.0)
    target, draft = sources(settings)
    trained = _trained(draft, settings)
    grows, refused, remote = grows_on(settings) is not None, None, remote_of(settings)
    identity = _identity(target, draft, trained, grows, remote=remote)
    if grows:
        refused = _refused(target, settings)
    tokenizer = checked_tokenizer(target, draft, trained, remote, settings.trust_remote_code)
    set_threads(settings.threads)
    where = settings.draft_device or settings.device
    check_readable(target, settings, settings.device)
    has_head = (draft is not None and draft.head is not None) or (grows and refused is None)
    if has_head:
        check_head(settings)
    if draft is not None:
        check_readable(draft, settings, where, draft=True)
    budget.check(target, draft, grows and refused is None, settings)
    sizes = [weight_bytes(source) for source in (target, draft)]
    border = sizes[0] / max(1, sum(sizes))
    target_engine = load_engine(target, settings, settings.device, lambda share: tell("target", border * share))
    draft_engine: Engine | None = None
    alone = target_engine.undraftable
    if alone is not None:
        pass
    elif has_head:
        draft_engine = load_head(draft, settings, target_engine, target.folder)
    elif draft is not None:
        draft_engine = load_engine(
            draft, settings, where, lambda share: tell("draft", border + (1 - border) * share), draft=True
        )
        if trained is not None and trained is not draft:
            tell("checkpoint", 1.0)
            _check_checkpoint(settings, identity, draft_engine, trained)
    tell("ready", 1.0)
    warnings = [] if refused is None or alone is not None else [f"{refused}; no model drafts"]
    if alone is not None:
        warnings.append(f"{target.id} {alone}; it decodes plainly, and nothing is drafted; {instead(target)}")
    if draft is not None and draft_engine is not None and draft_engine.undraftable is not None:
        warnings.append(f"the draft {draft.id} {draft_engine.undraftable}; no model drafts")
        draft_engine = None
    if draft is not None:
        warnings += _about_draft(draft, trained, draft_engine, target_engine, sizes)
    slower = [why_slower(target_engine, target, settings, settings.device)]
    if draft is not None and draft_engine is not None and not draft.head:
        slower.append(why_slower(draft_engine, draft, settings, where, draft=True))
    warnings += dict.fromkeys(reason for reason in slower if reason is not None)
    remote = None if alone is not None else remote
    return Pair(identity, target_engine, draft_engine, tokenizer, tuple(warnings), remote)


def _about_draft(
    draft: Source, trained: Source | None, engine: Engine | None, target: Engine, sizes: list[int]
) -> Iterator[str]:
    """Warnings that the ``draft`` suits the target badly or cannot learn. ``sizes``: bytes of both models' weights, the
    target's first. ``engine`` is None if the draft is not used."""
    if engine is not None and engine.context_length < min(SHORT_CONTEXT, target.context_length):
        yield (
            f"the draft {draft.id} reads texts of up to {engine.context_length:,} tokens, and the target of "
            f"{target.context_length:,}: beyond that nothing is drafted"
        )
    if sizes[1] > sizes[0]:
        yield (
            f"the draft ({sizes[1] / 1e6:.0f} MB of weights) is larger than the target ({sizes[0] / 1e6:.0f} MB): "
            "drafting costs more than it can save; swap them, or take a smaller draft"
        )
    if draft.gguf is not None and trained is None:
        yield (
            f"the draft {draft.id} decodes but cannot learn; name the Hugging Face checkpoint it was made from with "
            "--draft-checkpoint"
        )


def instead(source: Source) -> str:
    """Advice for users whose model decodes plainly."""
    file = "" if source.gguf is not None else ", or its GGUF file, if llama.cpp takes its states back"
    return f"to draft, take another model{file}"


def no_head_on(target: Source, settings: Settings) -> str | None:
    """The reason why no head can be grown on the target, or None."""
    from adaptive.engines.head.module import unsuitable

    return unsuitable(read_config(target, settings).get_text_config())


def _refused(target: Source, settings: Settings) -> str | None:
    """``no_head_on``. Raises AdaptiveError with the reason if a head was requested."""
    reason = no_head_on(target, settings)
    if reason is not None and settings.draft == GROW:
        raise AdaptiveError(f"{reason}; name another draft, or --draft {PLAIN}")
    return reason


def _check_checkpoint(settings: Settings, identity: PairIdentity, engine: Engine, trained: Source) -> None:
    """Check that the draft's GGUF file and its checkpoint are the same model. A positive result is remembered, because
    the check loads the checkpoint."""
    from adaptive.engines.llamacpp.engine import LlamaCppEngine
    from adaptive.engines.llamacpp.files import check_checkpoint

    state = settings.state_dir / identity.id
    seen = state / f"checkpoint-{identity.base.weights}"
    if seen.exists():
        return
    assert isinstance(engine, LlamaCppEngine)
    with weights_progress(lambda share: None):
        model = load_model(trained, settings.model_copy(update={"dtype": "float32"}), "cpu")
    check_checkpoint(engine, model, trained.id)
    if state.is_dir():
        seen.touch()


def load_draft_for_training(settings: Settings) -> PreTrainedModel | Head | ForeignHead:
    """A fresh float32 copy of the draft, unquantised, on the device it decodes on. For a head: the head with its
    target's embedding and vocabulary projection, without the target's other weights."""
    from adaptive.devices import choose_device

    elsewhere = untrained(settings)
    if elsewhere is not None:
        raise AdaptiveError(elsewhere)
    draft, grown = trained_draft(settings), grows_on(settings)
    device = settings.draft_device or settings.device
    if grown is not None or (draft is not None and draft.head):
        full = head_for_training(draft, sources(settings)[0].folder, settings.trust_remote_code)
        return full.to(choose_device(device))
    if draft is None and settings.draft not in (None, PLAIN):
        raise AdaptiveError(
            f"draft {settings.draft} is a GGUF file, which cannot be trained; name the Hugging Face checkpoint it was "
            "made from with --draft-checkpoint"
        )
    if draft is None:
        raise AdaptiveError(f"there is no draft to train; name one with --draft, or --draft {GROW}")
    plain = Source(draft.id, draft.folder, "none")
    with weights_progress(lambda share: None):
        return load_model(plain, settings.model_copy(update={"dtype": "float32"}), device)
