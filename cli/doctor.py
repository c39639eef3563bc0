"""``adaptive doctor``: reports the machine's resources, what will be used, what is missing and how to get it.

No line comes from a table of known machines: each is the result of querying the machine, or of actually running
a small piece of the code that decoding runs.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from adaptive.errors import AdaptiveError, first_line
from adaptive.printable import counted, printable
from cli.cells import size
from cli.doctor_pair import pair_findings
from cli.finding import Finding
from cli.options import PAIR, shared_options
from cli.output import print_json

if TYPE_CHECKING:
    import torch

    from adaptive.settings import Settings


@shared_options(*PAIR, "trust_remote_code", "device", "draft_device", "dtype", "quantize", "draft_quantize", "memory")
def doctor(settings: Settings, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What this machine has, what will be used, and what is missing. Exit status 1 if something needed is broken.

    Example: adaptive doctor

    Example: adaptive doctor --target ./my-target --draft ./my-draft --json
    """
    from rich.console import Console

    with Console(stderr=True).status("looking at this machine and at the pair"):
        findings = list(examine(settings))
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        report = {"ok": not broken, "findings": [asdict(finding) for finding in findings]}
        print_json(report, indent=2)
    else:
        _print(findings)
    if broken:
        raise typer.Exit(1)


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings, the machine first. Downloads nothing and writes nothing."""
    yield _python()
    yield from _packages()
    yield from _processor()
    yield _disk(settings.state_dir)
    try:
        import torch
    except Exception as error:
        yield Finding("machine", "torch", "broken", first_line(error), _torch_anew())
        return
    yield from _devices(torch, settings)
    yield _kernels()
    yield from _bitsandbytes(settings)
    yield _llama_cpp(settings)
    yield from pair_findings(settings)


def _python() -> Finding:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("machine", "python", "ok", version)


def _torch_anew() -> str:
    from adaptive.installation import install_command, requirement

    return install_command(requirement("torch"), again=True)


def _packages() -> Iterator[Finding]:
    """Each dependency of the installed project, checked against the required version."""
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
    """The kernels for linear layers and attention that decoding uses."""
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

    from adaptive.machine import memory, processor_name

    cores, threads = psutil.cpu_count(logical=False), psutil.cpu_count()
    known = "? cores" if cores is None else counted(cores, "core")
    yield Finding("machine", "processor", "ok", f"{processor_name()}, {known}, {counted(threads or 0, 'thread')}")
    found = memory()
    tight = found.available < 2 * 2**30  # a small pair, its caches and a training run take about this (bytes)
    yield Finding(
        "machine",
        "memory",
        "note" if tight else "ok",
        f"{size(found.available)} free of {size(found.total)}",
        "close other programs, or expect only small models to fit" if tight else "",
    )


def _disk(state_dir: Path) -> Finding:
    """Free space and permissions of the folder for the log and the adapters (which may not exist yet)."""
    there = next(path for path in (state_dir, *state_dir.absolute().parents) if os.path.exists(path))
    free = shutil.disk_usage(there).free
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding(
            "machine", "state folder", "broken", f"{state_dir} cannot be written", "choose another with --state-dir"
        )
    tight = free < 2**30  # a year of daily use fits in this (bytes)
    advice = "free some room, `adaptive adapters prune`, or choose another folder with --state-dir" if tight else ""
    return Finding("machine", "state folder", "note" if tight else "ok", f"{state_dir}, {size(free)} free", advice)


def _devices(torch: Any, settings: Settings) -> Iterator[Finding]:
    from adaptive.engines.cpu.torch_threads import threads_of

    yield Finding("machine", "torch", "ok", f"{torch.__version__}, {threads_of(settings.threads)} threads")
    yield _arithmetic(torch, "cpu", "processor arithmetic")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding("machine", f"cuda:{number}", "ok", f"{name}, {size(free)} free of {size(total)}")
        yield _arithmetic(torch, f"cuda:{number}", f"cuda:{number} arithmetic")
    if torch.backends.mps.is_available():
        yield Finding("machine", "mps", "ok", "Apple graphics, for --device mps only: nothing has been run on them")
        found = _arithmetic(torch, "mps", "mps arithmetic")
        named = any((name or "").startswith("mps") for name in (settings.device, settings.draft_device))
        yield found if named or found.status == "ok" else replace(found, status="note")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = f"an NVIDIA driver is there, for a build of torch with CUDA: {_torch_anew()}" if driver else ""
        yield Finding("machine", "accelerator", "note" if driver else "ok", "none that torch can use", advice)


def _arithmetic(torch: Any, device: str, name: str) -> Finding:
    """Run eight rows through a layer, in float32 and bfloat16: whether it works, whether it is right, and how fast."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(2048, 2048, generator=generator).to(device)
        rows = torch.randn(8, 2048, generator=generator).to(device)
        times, results = {}, {}
        for dtype in (torch.float32, torch.bfloat16):
            layer, x = weight.to(dtype), rows.to(dtype)
            times[dtype] = _milliseconds(lambda x=x, layer=layer: torch.nn.functional.linear(x, layer).sum().item())  # type: ignore[misc]
            results[dtype] = torch.nn.functional.linear(x, layer).cpu().double()  # MPS has no float64
        error = _difference(results[torch.bfloat16], results[torch.float32])
    except Exception as reason:
        return Finding("machine", name, "broken", first_line(reason), _torch_anew())
    value = f"float32 {times[torch.float32]:.2f} ms, bfloat16 {times[torch.bfloat16]:.2f} ms for 8 rows of 2048 x 2048"
    if not error <= 0.02:  # also if it is not a number. bfloat16 keeps 8 bits; a sum of 2048 products stays within 1%
        return Finding("machine", name, "broken", f"{value}, bfloat16 is off by {error:.0%}", "use --dtype float32")
    return Finding("machine", name, "ok", value)


def _bitsandbytes(settings: Settings) -> Iterator[Finding]:
    """Quantise and run one layer, in each of the two ways."""
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

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about optional parts that are not needed
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
        return _difference(layer(x).cpu().double(), plain(row).double()), took


def _llama_cpp(settings: Settings) -> Finding:
    """Whether GGUF files can be run, and whether on an accelerator."""
    from adaptive.engines.llamacpp.files import is_gguf_name
    from adaptive.engines.llamacpp.model import binding

    wanted = any(name is not None and is_gguf_name(name) for name in (settings.target, settings.draft))
    try:
        library = binding()
    except AdaptiveError as error:
        status: Literal["note", "broken"] = "broken" if wanted else "note"
        advice = f"{error} (needed only for GGUF files: docs/llamacpp.md)"
        return Finding("machine", "llama.cpp", status, "cannot be used", advice)
    where = "an accelerator" if library.llama_supports_gpu_offload() else "the processor"
    return Finding("machine", "llama.cpp", "ok", f"llama-cpp-python {library.__version__}, built for {where}")


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[bold red]broken[/]"}
    for group, title in (("machine", "This machine"), ("packages", "Packages"), ("used", "What will be used")):
        console.print(f"[bold]{title}[/]")
        table = Table(show_header=False, box=None, padding=(0, 1))
        for _ in range(3):
            table.add_column(overflow="fold")  # a truncated path would be useless
        for finding in findings:
            if finding.group == group:
                table.add_row(marks[finding.status], finding.name, escape(printable(finding.value)))
        console.print(table)
    wanting = [finding for finding in findings if finding.status != "ok"]
    console.print("[bold]What is missing[/]" if wanting else "Nothing is missing.")
    for finding in wanting:
        said = f" {marks[finding.status]} {finding.name}: {escape(printable(finding.advice or finding.value))}"
        console.print(said, soft_wrap=True)  # so that a command in it can be copied


def _milliseconds(work: Callable[[], object]) -> float:
    """The best of several runs: the first ones load code, and other programs can only slow a run down."""
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
