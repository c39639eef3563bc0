"""The findings of ``adaptive doctor`` on the pair: its models, the forwards that will run them, and their abilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adaptive.errors import AdaptiveError
from cli.cells import size
from cli.finding import Finding

if TYPE_CHECKING:
    from adaptive.engines.budget import Need
    from adaptive.engines.hf.kinds import Kinds
    from adaptive.engines.hf.quantised import Quantised
    from adaptive.engines.hf.tried import Tried
    from adaptive.engines.load import Choice, Forward, Source
    from adaptive.settings import Settings


def pair_findings(settings: Settings) -> Iterator[Finding]:
    """The models and resources of a run with these settings, as far as known without loading or fetching a model."""
    from adaptive.devices import choose_device
    from adaptive.engines.head.kinds import head_kind
    from adaptive.engines.llamacpp.files import is_gguf_name
    from adaptive.pair import BUNDLED, GROW, MTP, PLAIN, pair_identity
    from adaptive.remote import is_address
    from adaptive.settings import expanded

    for option, name in (("device", settings.device), ("draft device", settings.draft_device or settings.device)):
        try:
            device = choose_device(name)
            yield Finding("used", option, "ok", device)
        except AdaptiveError as error:
            yield Finding("used", option, "broken", str(error), "choose another device, or leave it to auto")
            return
    target, draft = settings.target, settings.draft
    if target is None:
        target, draft = str(BUNDLED / "target"), draft or str(BUNDLED / "draft")
    local = True
    for role, model in (("target", target), ("draft", draft)):
        bundled = model is not None and Path(model).is_relative_to(BUNDLED)
        if model is not None and is_gguf_name(model):
            yield from _gguf_file(role, model)
            local = local and expanded(model).is_file()
            continue
        if role == "draft" and is_address(model):
            found = _draft_server(settings)
            yield found
            local = local and found.status == "ok"
            continue
        if role == "draft" and model in (GROW, MTP, PLAIN, None):
            yield _no_model(settings, local)
            continue
        assert model is not None
        if expanded(model).is_dir():
            kind = head_kind(expanded(model))
            what = " (bundled)" if bundled else "" if kind is None else f" ({kind.words})"
            yield Finding("used", role, "ok", f"{model}{what}")
            continue
        local = False
        if bundled:
            yield Finding(
                "used", role, "broken", f"{model} is not there", "get the repository whole, or name your own pair"
            )
        else:
            yield Finding("used", role, "note", f"{model} is no folder here", "it will be fetched, if the hub has it")
    yield _history(settings)
    trained = settings.draft_checkpoint
    if trained is not None and not expanded(trained).is_dir():
        yield Finding("used", "draft checkpoint", "note", f"{trained} is no folder here", "it will be fetched")
        local = False
    if target is None or not local:
        return
    try:
        yield Finding("used", "pair", "ok", pair_identity(settings).id)
        yield from _forwards(settings)
        yield from _memory(settings)
    except AdaptiveError as error:
        yield Finding("used", "pair", "broken", str(error), "choose other models with --target and --draft")


def _draft_server(settings: Settings) -> Finding:
    """Whether a draft server answers, and its draft."""
    from adaptive.remote import remote_of

    try:
        found = remote_of(settings)
    except AdaptiveError as error:
        return Finding("used", "draft", "broken", str(error), "start it, or name another draft")
    assert found is not None
    adapter = "no adapter" if found.hello.adapter is None else f"adapter {found.hello.adapter}"
    shapes = "chains and trees" if found.hello.trees else "chains"
    said = f"{found.hello.id} at {found.url}, {adapter}, drafts {shapes}; it is not trained from here"
    return Finding("used", "draft", "ok", said)


def _history(settings: Settings) -> Finding:
    """The text that history drafts from, and its largest size in memory."""
    from adaptive.drafting.archive import MOST_BYTES, MOST_PLAIN_TOKENS, MOST_TOKENS
    from adaptive.drafting.suffixes import compiled

    if settings.history == "off":
        return Finding("used", "history", "ok", "off")
    if settings.history == "session" or not settings.record:
        return Finding("used", "history", "ok", "drafts from the running conversation")
    built = compiled() is not None
    most, memory = MOST_TOKENS if built else MOST_PLAIN_TOKENS, size(MOST_BYTES)
    said = f"drafts from the running conversation and the log: {most:,} tokens at most, {memory} of memory"
    if built:
        return Finding("used", "history", "ok", said)
    return Finding("used", "history", "note", f"{said}; its index is not compiled", "install with a C++ compiler")


def _no_model(settings: Settings, local: bool) -> Finding:
    """The drafter if no draft model is named; not yet known for a target that is not ``local``."""
    from adaptive.engines.head.module import unsuitable
    from adaptive.engines.load import read_config
    from adaptive.pair import MTP, PLAIN, grows_on, sources

    if settings.draft == PLAIN:
        return Finding("used", "draft", "ok", "none: no model drafts")
    if not local:
        said = "the multi-token head in the target's checkpoint"
        grown = "" if settings.draft == MTP else "; where it has none, one that is grown on it"
        return Finding("used", "draft", "ok", f"{said}{grown}")
    try:
        inside = sources(settings)[1]
        if inside is not None and inside.head is not None:
            return Finding("used", "draft", "ok", f"{inside.head.words}: docs/heads.md")
        target = grows_on(settings)
        if target is None:
            return Finding("used", "draft", "ok", "none: no model drafts")
        reason = unsuitable(read_config(target, settings).get_text_config())
    except AdaptiveError as error:
        return Finding("used", "draft", "broken", str(error), "name another draft, or --draft none")
    if reason is not None:
        return Finding("used", "draft", "note", f"none: {reason}", "name a draft with --draft")
    return Finding("used", "draft", "ok", "a head, grown here on the logged answers: docs/heads.md")


def _forwards(settings: Settings) -> Iterator[Finding]:
    """The forward that will run each model of the pair, and its dtype."""
    from adaptive.engines.budget import need, without_copy
    from adaptive.engines.head.kinds import HeadKind
    from adaptive.engines.hf import tried
    from adaptive.engines.hf.kinds import Kinds
    from adaptive.engines.load import choose_forward, eagle_on, read_config
    from adaptive.engines.slower import NO_ROOM
    from adaptive.pair import sources

    target, draft = sources(settings)
    needs: list[Need] = []
    eagle = draft is not None and draft.head is HeadKind.EAGLE3
    measured = " (the faster one here)" if settings.dtype == "auto" else ""
    for role, source in (("target", target), ("draft", draft)):
        if source is None:
            continue
        is_draft = role == "draft"
        device = (settings.draft_device or settings.device) if is_draft else settings.device
        if eagle and is_draft:
            chosen = eagle_on(choose_forward(target, settings, settings.device))
        else:
            chosen = choose_forward(source, settings, device, draft=is_draft)
        needs.append(need(source, settings, device, is_draft, needs[0] if needs else None))
        if not needs[-1].packs:
            chosen = without_copy(chosen, source)
        if chosen.dtype is not None and not is_draft:
            yield Finding("used", "dtype", "ok", f"{str(chosen.dtype).removeprefix('torch.')}{measured}")
        if chosen.held is not None:
            yield _weights(role, chosen.held, source)
        quantised = f", {chosen.quantize} by bitsandbytes" if chosen.quantize != "none" else ""
        said = f"{chosen.forward.value} ({chosen.weights}{quantised})"
        packs = needs[-1].packs
        yield Finding("used", f"{role} forward", "ok" if packs else "note", said, "" if packs else f"slower: {NO_ROOM}")
        if not is_draft:
            yield _at_once(chosen.forward)
            if settings.memory is not None:
                yield _streamed(source, settings, chosen)
        if chosen.quantize == "nf4":
            yield _four_bits(role, source, settings)
        if source.gguf is None and not source.head:
            kinds = Kinds.of(read_config(source, settings).get_text_config())
            found = tried.Tried(None) if chosen.forward.own else None
            yield _layers(role, source, kinds, found or tried.kept(settings.state_dir, source.folder, chosen.how))


def _weights(role: str, held: Quantised, source: Source) -> Finding:
    """How the weights of a quantised checkpoint are held, and their size."""
    from adaptive.engines.hf.quantised import float32_bytes

    advice = f"{size(float32_bytes(source.folder))} in float32, half of that in 16 bits" if held.dense else ""
    return Finding("used", f"{role} weights", "ok", held.text, advice)


def _memory(settings: Settings) -> Iterator[Finding]:
    """What fits into the memory of each device: weights, text, training."""
    from adaptive.engines.budget import budgets, ways_out
    from adaptive.pair import grows_on, sources, trained_draft

    (target, draft), grows = sources(settings), grows_on(settings) is not None
    for found in budgets(target, draft, grows, settings, trained_draft(settings)):
        trains = found.tokens(training=True) != 0
        status: Literal["ok", "note", "broken"] = "broken" if not found.fits else "ok" if trains else "note"
        advice = "training waits until there is memory for it: a smaller draft, or --distill off" * (not trains)
        if not found.fits:
            advice = ", or ".join(ways_out(target, draft, grows, settings))
        yield Finding("used", f"memory of {found.device}", status, found.text, advice)


def _streamed(source: Source, settings: Settings, chosen: Choice) -> Finding:
    """Whether the target's packed weights are on the disk, or whether there is room for them."""
    import shutil

    from adaptive.engines.load import weight_bytes
    from adaptive.engines.streamed.packed import packed_folder

    where = packed_folder(settings.state_dir, source.folder, chosen.weights)
    if where.exists():
        return Finding("used", "streamed weights", "ok", f"within {settings.memory}, packed in {where}")
    there = next(folder for folder in where.parents if folder.exists())
    free, said = shutil.disk_usage(there).free, f"within {settings.memory}, to be packed into {where}"
    if free < weight_bytes(source):
        advice = "make room there, or choose another folder with --state-dir"
        return Finding("used", "streamed weights", "broken", f"{said}, where {size(free)} are free", advice)
    return Finding("used", "streamed weights", "ok", said)


def _at_once(forward: Forward) -> Finding:
    """How many answers a server can decode in one pass of the target."""
    from adaptive.engines.load import Forward

    said = {
        Forward.CPU_FUSED: "several, as many as adaptive serve has slots",
        Forward.STREAMED: "several, as many as adaptive serve has slots",
        Forward.TRANSFORMERS: "several, where a try shows it when the model is loaded",
        Forward.CUDA_GRAPHS: "several, where a try shows it when the model is loaded",
    }
    return Finding("used", "answers at once", "ok", said.get(forward, "one: this forward takes one text a pass"))


def _four_bits(role: str, source: Source, settings: Settings) -> Finding:
    """Which layers of a model are actually held in four bits."""
    from adaptive.engines.load import four_bits, read_config

    name = f"{role} nf4"
    try:
        fit = four_bits(source, read_config(source, settings), settings)
    except AdaptiveError as error:
        return Finding("used", name, "broken", str(error), "leave --quantize out, or take int8")
    if fit.misfits:
        return Finding("used", name, "note", fit.text, "the other layers stay as they are, and take more memory")
    return Finding("used", name, "ok", fit.text)


def _layers(role: str, source: Source, kinds: Kinds, found: Tried | None) -> Finding:
    """The kinds of a model's layers, and whether drafting is possible with them, as found when it was loaded."""
    from adaptive.pair import instead

    name = f"{role} layers"
    problem = kinds.problem or (found.problem if found else None)
    if problem is not None:
        advice = f"it decodes plainly; {instead(source)}" if role == "target" else "name another draft"
        return Finding("used", name, "note", f"no drafting: it {problem}", advice)
    held = f"{kinds.recurrent} with a recurrent state, " * bool(kinds.recurrent) + f"{kinds.attention} of attention"
    can = "drafting is possible" if found else "whether drafting is possible is tried when it is loaded"
    return Finding("used", name, "ok", f"{held}; {can}")


def _gguf_file(role: str, name: str) -> Iterator[Finding]:
    """The contents of a GGUF file, from its header."""
    from adaptive.engines.llamacpp.model import LlamaModel
    from adaptive.settings import expanded

    path = expanded(name)
    if not path.is_file():
        yield Finding("used", role, "note", f"{name} is no file here", "it will be fetched, if the hub has it")
        return
    try:
        model = LlamaModel(path, vocabulary_only=True)
    except AdaptiveError as error:
        yield Finding("used", role, "broken", str(error), "get the file again, or name another")
        return
    described = f"{model.architecture}, {size(path.stat().st_size)}, {model.vocab_size} tokens"
    yield Finding("used", role, "ok", f"{name} ({described}), by llama.cpp")
