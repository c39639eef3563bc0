"""``adaptive doctor``: what this machine has, what will be used, what is missing and how to get it.

Nothing here is looked up in a table: each line comes from asking the machine, or from really running
a small piece of what decoding runs.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from adaptive.errors import AdaptiveError, first_line
from cli.options import shared_options

if TYPE_CHECKING:
    import torch

    from adaptive.engines.hf.kinds import Kinds
    from adaptive.engines.hf.tried import Tried
    from adaptive.engines.load import Forward, Source
    from adaptive.settings import Settings


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``note`` costs something, ``broken`` stops something that is needed."""

    group: Literal["machine", "packages", "used"]
    name: str
    status: Literal["ok", "note", "broken"]
    value: str
    advice: str = ""


@shared_options("target", "draft", "draft_checkpoint", "device", "draft_device", "dtype", "quantize", "draft_quantize")
def doctor(settings: Settings, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What this machine has, what will be used, and what is missing. Exit status 1 if something needed is broken.

    Example: adaptive doctor

    Example: adaptive doctor --target ./my-target --draft ./my-draft --json
    """
    findings = list(examine(settings))
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        report = {"ok": not broken, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print(findings)
    if broken:
        raise typer.Exit(1)


def examine(settings: Settings) -> Iterator[Finding]:
    """Everything worth knowing, the machine first. Downloads nothing and writes nothing."""
    yield _python()
    yield from _packages()
    yield from _processor()
    yield _disk(settings.state_dir)
    try:
        import torch
    except Exception as error:
        yield Finding(
            "machine", "torch", "broken", first_line(error), "install torch for this machine, see its web page"
        )
        return
    yield from _devices(torch)
    yield _kernels()
    yield from _bitsandbytes(settings)
    yield _llama_cpp(settings)
    yield from _used(settings)


def _python() -> Finding:
    good = sys.version_info >= (3, 10)
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(
        "machine", "python", "ok" if good else "broken", version, "" if good else "install Python 3.10 or later"
    )


def _packages() -> Iterator[Finding]:
    """Each dependency of the installed project against the version it asks for."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    from adaptive.installation import DISTRIBUTION, install_command, requirements

    asked = requirements()
    if asked is None:
        yield Finding("packages", DISTRIBUTION, "broken", "not installed", install_command())
        return
    for requirement in map(Requirement, asked):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        needs = install_command(f"{requirement.name}{requirement.specifier}")
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Finding("packages", requirement.name, "broken", "missing", needs)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding("packages", requirement.name, "ok", found)
        else:
            yield Finding("packages", requirement.name, "broken", f"{found}, needs {requirement.specifier}", needs)


def _kernels() -> Finding:
    """The linear layers and the attention that decoding runs on."""
    from adaptive.engines.cpu.kernels import library, problem

    found = library()
    if found is not None:
        return Finding("machine", "kernels", "ok", f"our own, for {found.name}")
    reason = problem()
    if reason is None:
        return Finding("machine", "kernels", "ok", "torch's; there are none of our own for this processor")
    return Finding("machine", "kernels", "note", "torch's", reason)


def _processor() -> Iterator[Finding]:
    import psutil

    from adaptive.machine import processor_name

    cores, threads = psutil.cpu_count(logical=False), psutil.cpu_count()
    yield Finding("machine", "processor", "ok", f"{processor_name()}, {cores or '?'} cores, {threads} threads")
    memory = psutil.virtual_memory()
    tight = memory.available < 2 * 2**30  # a small pair, its caches and a training run take about this (bytes)
    yield Finding(
        "machine",
        "memory",
        "note" if tight else "ok",
        f"{_size(memory.available)} free of {_size(memory.total)}",
        "close other programs, or expect only small models to fit" if tight else "",
    )


def _disk(state_dir: Path) -> Finding:
    """Room and permission where the log and the adapters go (the folder itself may not exist yet)."""
    there = next(path for path in (state_dir, *state_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding(
            "machine", "state folder", "broken", f"{state_dir} cannot be written", "choose another with --state-dir"
        )
    tight = free < 2**30  # a year of daily use fits in this (bytes)
    advice = "free some room, `adaptive adapters prune`, or choose another folder with --state-dir" if tight else ""
    return Finding("machine", "state folder", "note" if tight else "ok", f"{state_dir}, {_size(free)} free", advice)


def _devices(torch: Any) -> Iterator[Finding]:
    yield Finding("machine", "torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield _arithmetic(torch, "cpu", "processor arithmetic")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding("machine", f"cuda:{number}", "ok", f"{name}, {_size(free)} free of {_size(total)}")
        yield _arithmetic(torch, f"cuda:{number}", f"cuda:{number} arithmetic")
    if torch.backends.mps.is_available():
        yield Finding("machine", "mps", "ok", "Apple graphics")
        yield _arithmetic(torch, "mps", "mps arithmetic")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = "an NVIDIA driver is there: install the CUDA build of torch" if driver else ""
        yield Finding("machine", "accelerator", "note" if driver else "ok", "none that torch can use", advice)


def _arithmetic(torch: Any, device: str, name: str) -> Finding:
    """Eight rows through a layer, in float32 and bfloat16: does it work, is it right, which is faster."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(2048, 2048, generator=generator).to(device)
        rows = torch.randn(8, 2048, generator=generator).to(device)
        times, results = {}, {}
        for dtype in (torch.float32, torch.bfloat16):
            layer, x = weight.to(dtype), rows.to(dtype)
            times[dtype] = _milliseconds(lambda x=x, layer=layer: torch.nn.functional.linear(x, layer).sum().item())  # type: ignore[misc]
            results[dtype] = torch.nn.functional.linear(x, layer).double().cpu()
        error = _difference(results[torch.bfloat16], results[torch.float32])
    except Exception as reason:
        return Finding("machine", name, "broken", first_line(reason), "reinstall torch for this machine")
    value = f"float32 {times[torch.float32]:.2f} ms, bfloat16 {times[torch.bfloat16]:.2f} ms for 8 rows of 2048 x 2048"
    if error > 0.02:  # bfloat16 keeps 8 bits; a sum of 2048 products stays within 1%
        return Finding("machine", name, "broken", f"{value}, bfloat16 is off by {error:.0%}", "use --dtype float32")
    return Finding("machine", name, "ok", value)


def _bitsandbytes(settings: Settings) -> Iterator[Finding]:
    """One layer really quantised and run, in each of the two ways."""
    from adaptive.devices import cure

    wanted = {settings.quantize, settings.draft_quantize}
    for kind in ("nf4", "int8"):
        try:
            error, took = _quantised_layer(kind, settings)
            works = error < 0.2  # nf4 keeps a random layer's output within some 10%
            value = (
                f"works, {took:.2f} ms a row of 512, {error:.1%} off"
                if works
                else f"computes nonsense ({error:.0%} off)"
            )
        except Exception as reason:
            works, value = False, first_line(reason)
        status: Literal["ok", "note", "broken"] = "ok" if works else "broken" if kind in wanted else "note"
        advice = "" if works else f"needed only for --quantize {kind}: {cure()}"
        yield Finding("machine", f"bitsandbytes {kind}", status, value, advice)


def _quantised_layer(kind: str, settings: Settings) -> tuple[float, float]:
    """Relative error and milliseconds of one 512 x 512 layer in ``kind``, on the device that will be used."""
    import logging

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it names optional parts it can do without
    import bitsandbytes
    import torch

    from adaptive.devices import choose_device

    quantised: Any = bitsandbytes.nn
    device = choose_device(settings.device)
    plain = torch.nn.Linear(512, 512, bias=False)
    layer: torch.nn.Module
    if kind == "nf4":
        layer = quantised.Linear4bit(512, 512, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    else:
        layer = quantised.Linear8bitLt(512, 512, bias=False, has_fp16_weights=False)
    layer.load_state_dict(plain.state_dict())
    layer = layer.to(device).eval()
    row = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        x = row.to(device, torch.float32 if kind == "nf4" else torch.float16)
        took = _milliseconds(lambda: layer(x).sum().item())
        return _difference(layer(x).double().cpu(), plain(row).double()), took


def _llama_cpp(settings: Settings) -> Finding:
    """Whether GGUF files can be run, and on what."""
    from adaptive.engines.llamacpp.files import is_gguf_name
    from adaptive.engines.llamacpp.model import binding

    wanted = any(name is not None and is_gguf_name(name) for name in (settings.target, settings.draft))
    try:
        library = binding()
    except AdaptiveError as error:
        status: Literal["note", "broken"] = "broken" if wanted else "note"
        return Finding("machine", "llama.cpp", status, str(error), "needed only for GGUF files: see docs/llamacpp.md")
    where = "an accelerator" if library.llama_supports_gpu_offload() else "the processor"
    return Finding("machine", "llama.cpp", "ok", f"llama-cpp-python {library.__version__}, built for {where}")


def _used(settings: Settings) -> Iterator[Finding]:
    """What a run with these settings would take, as far as it is known without loading or fetching a model."""
    from adaptive.devices import choose_device
    from adaptive.engines.head.kinds import head_kind
    from adaptive.engines.llamacpp.files import is_gguf_name
    from adaptive.pair import BUNDLED, GROW, MTP, PLAIN, pair_identity

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
            local = local and Path(model).expanduser().is_file()
            continue
        if role == "draft" and model in (GROW, MTP, PLAIN, None):
            yield _no_model(settings, local)
            continue
        assert model is not None
        if Path(model).expanduser().is_dir():
            kind = head_kind(Path(model).expanduser())
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
    if target is None or not local:
        return
    try:
        yield Finding("used", "pair", "ok", pair_identity(settings).id)
        yield from _forwards(settings)
    except AdaptiveError as error:
        yield Finding("used", "pair", "broken", str(error), "choose other models with --target and --draft")


def _no_model(settings: Settings, local: bool) -> Finding:
    """What drafts where no model is named for it; of a target that is not ``local`` it is not known yet."""
    from adaptive.engines.head.module import unsuitable
    from adaptive.engines.load import read_config
    from adaptive.pair import MTP, PLAIN, grows_on, sources

    if settings.draft == PLAIN:
        return Finding("used", "draft", "ok", "none: the target decodes alone")
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
            return Finding("used", "draft", "ok", "none: the target decodes alone")
        reason = unsuitable(read_config(target, settings).get_text_config())
    except AdaptiveError as error:
        return Finding("used", "draft", "broken", str(error), "name another draft, or --draft none")
    if reason is not None:
        return Finding("used", "draft", "note", f"none: {reason}", "name a draft with --draft")
    return Finding("used", "draft", "ok", "a head, grown here from what is said: docs/heads.md")


def _forwards(settings: Settings) -> Iterator[Finding]:
    """Which forward will serve each model of the pair, in what numbers."""
    from adaptive.engines.head.kinds import HeadKind
    from adaptive.engines.hf import tried
    from adaptive.engines.hf.kinds import Kinds
    from adaptive.engines.load import beside_eagle, choose_forward, read_config
    from adaptive.pair import sources

    target, draft = sources(settings)
    eagle = draft is not None and draft.head is HeadKind.EAGLE3
    measured = " (the faster one here)" if settings.dtype == "auto" else ""
    for role, source in (("target", target), ("draft", draft)):
        if source is None:
            continue
        is_draft = role == "draft"
        device = (settings.draft_device or settings.device) if is_draft else settings.device
        if eagle:
            chosen = beside_eagle(choose_forward(target, settings, settings.device))[is_draft]
        else:
            chosen = choose_forward(source, settings, device, draft=is_draft)
        if chosen.dtype is not None and not is_draft:
            yield Finding("used", "dtype", "ok", f"{str(chosen.dtype).removeprefix('torch.')}{measured}")
        quantised = f", {chosen.quantize} by bitsandbytes" if chosen.quantize != "none" else ""
        yield Finding("used", f"{role} forward", "ok", f"{chosen.forward.value} ({chosen.weights}{quantised})")
        if not is_draft:
            yield _at_once(chosen.forward)
        if chosen.quantize == "nf4":
            yield _four_bits(role, source, settings)
        if source.gguf is None and not source.head:
            kinds = Kinds.of(read_config(source, settings).get_text_config())
            found = tried.Tried(None) if chosen.forward.own else None
            yield _layers(role, kinds, found or tried.kept(settings.state_dir, source.folder, chosen.how))


def _at_once(forward: Forward) -> Finding:
    """How many answers a server can decode in one pass of the target."""
    from adaptive.engines.load import Forward

    said = {
        Forward.CPU_FUSED: "several, with adaptive serve --slots",
        Forward.TRANSFORMERS: "several, where a try shows it when the model is loaded",
        Forward.CUDA_GRAPHS: "several, where a try shows it when the model is loaded",
    }
    return Finding("used", "answers at once", "ok", said.get(forward, "one: this forward takes one text a pass"))


def _four_bits(role: str, source: Source, settings: Settings) -> Finding:
    """Which layers of a model will really be held in four bits."""
    from adaptive.engines.load import four_bits, read_config

    name = f"{role} nf4"
    try:
        fit = four_bits(source, read_config(source, settings), settings)
    except AdaptiveError as error:
        return Finding("used", name, "broken", str(error), "leave --quantize out, or take int8")
    if fit.misfits:
        return Finding("used", name, "note", fit.text, "the other layers stay as they are, and take more memory")
    return Finding("used", name, "ok", fit.text)


def _layers(role: str, kinds: Kinds, found: Tried | None) -> Finding:
    """What the layers of a model hold, and whether it can be drafted for (or draft), as was found at loading."""
    name = f"{role} layers"
    problem = kinds.problem or (found.problem if found else None)
    if problem is not None:
        advice = "it decodes plainly, without a draft" if role == "target" else "name another draft"
        return Finding("used", name, "note", f"no drafting: it {problem}", advice)
    held = f"{kinds.recurrent} with a recurrent state, " * bool(kinds.recurrent) + f"{kinds.attention} of attention"
    can = "drafting is possible" if found else "whether drafting is possible is tried when it is loaded"
    return Finding("used", name, "ok", f"{held}; {can}")


def _gguf_file(role: str, name: str) -> Iterator[Finding]:
    """What is in a GGUF file, by its header."""
    from adaptive.engines.llamacpp.model import LlamaModel

    path = Path(name).expanduser()
    if not path.is_file():
        yield Finding("used", role, "note", f"{name} is no file here", "it will be fetched, if the hub has it")
        return
    try:
        model = LlamaModel(path, vocabulary_only=True)
    except AdaptiveError as error:
        yield Finding("used", role, "broken", str(error), "get the file again, or name another")
        return
    described = f"{model.architecture}, {_size(path.stat().st_size)}, {model.vocab_size} tokens"
    yield Finding("used", role, "ok", f"{name} ({described}), by llama.cpp")


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[bold red]broken[/]"}
    for group, title in (("machine", "This machine"), ("packages", "Packages"), ("used", "What will be used")):
        console.print(f"[bold]{title}[/]")
        table = Table(show_header=False, box=None, padding=(0, 1))
        for finding in findings:
            if finding.group == group:
                table.add_row(marks[finding.status], finding.name, escape(finding.value))
        console.print(table)
    wanting = [finding for finding in findings if finding.status != "ok"]
    console.print("[bold]What is missing[/]" if wanting else "Nothing is missing.")
    for finding in wanting:
        console.print(f" {marks[finding.status]} {finding.name}: {escape(finding.advice or finding.value)}")


def _milliseconds(work: Callable[[], object]) -> float:
    """The best of several: the first ones load code, and other programs only ever slow it down."""
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
