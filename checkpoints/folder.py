"""One adapter's folder: the files that it must contain, and whether they are still those that were published."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from checkpoints import files
from checkpoints.errors import AdaptiveError, true_error
from checkpoints.manifest import Kind, Manifest, Status

MANIFEST = "manifest.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# The files that a folder must contain, by kind: (weights, config).
FILES: dict[Kind, tuple[str, str]] = {"lora": (WEIGHTS, CONFIG), "head": ("model.safetensors", "config.json")}

# Extensions of formats that may contain pickled objects, which can run code when they are loaded.
PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})

# Errors of the process or the machine, not of the file: no other adapter could be opened either.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class DamagedAdapter(AdaptiveError):  # noqa: N818 - the thing that is damaged is the better word
    """A file of an adapter is missing or differs from the published one."""


class UnreadableAdapter(DamagedAdapter):
    """A file of an adapter cannot be read now: no permission, a network disk that is away."""


class UnreadableStore(AdaptiveError):  # noqa: N818 - as above
    """The store cannot be read now, or this process can read nothing: too many open files. Nothing is known to be
    damaged or missing, so nothing may be concluded; a moment later it may be readable."""


def check_written(folder: Path, kind: Kind = "lora") -> None:
    """Raise AdaptiveError unless ``folder`` has a PEFT adapter, or a head, whose tensors can be opened, and OSError if
    that cannot be said now."""
    from safetensors import SafetensorError, safe_open

    pickled = _pickled(folder)
    if pickled is not None:
        raise AdaptiveError(f"the adapter holds {pickled}, which may hold pickled code; save it as safetensors")
    weights, config = FILES[kind]
    for name in (weights, config):
        if not (folder / name).is_file():
            raise AdaptiveError(f"the adapter has no {name}; save it with PEFT's save_pretrained")
    try:
        with safe_open(folder / weights, framework="numpy") as tensors:
            if not tensors.keys():
                raise AdaptiveError(f"{weights} of the adapter holds no tensor; nothing was trained")
    except OSError as error:
        raise true_error(error) from None
    except SafetensorError as error:
        raise AdaptiveError(f"{weights} of the adapter is not a safetensors file: {error}") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``. Raises DamagedAdapter if it cannot be read or belongs to another adapter, or
    UnreadableStore."""
    name = folder.name
    try:
        manifest = Manifest.from_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedAdapter(f"adapter {name} is damaged: {MANIFEST} is missing from {folder}") from None
    except OSError as error:
        raise _unreadable(f"adapter {name}: {MANIFEST} in {folder}", error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedAdapter(f"adapter {name} is damaged: {MANIFEST} in {folder} is not a manifest") from error
    known = manifest.status in get_args(Status) and manifest.kind in FILES
    if manifest.id != name or not known or not isinstance(manifest.files, dict):
        raise DamagedAdapter(f"adapter {name} is damaged: {MANIFEST} in {folder} is not what was published")
    return manifest


def verify_folder(folder: Path) -> Manifest:
    """Hash every file that the manifest names. Raises DamagedAdapter, which names the first wrong file, or
    UnreadableStore."""
    manifest = read_manifest(folder)
    for file, digest in {**dict.fromkeys(FILES[manifest.kind], ""), **manifest.files}.items():
        try:
            actual = files.sha256(folder / file)
        except FileNotFoundError:
            raise DamagedAdapter(f"adapter {folder.name} is damaged: {file} is missing from {folder}") from None
        except OSError as error:
            raise _unreadable(f"adapter {folder.name}: {file} in {folder}", error) from error
        if actual != digest:
            raise DamagedAdapter(f"adapter {folder.name} is damaged: {file} in {folder} is not what was published")
    try:
        pickled = _pickled(folder)
    except OSError as error:
        raise _unreadable(f"adapter {folder.name}: {folder}", error) from error
    if pickled is not None:
        raise DamagedAdapter(f"adapter {folder.name}: {pickled} may hold pickled code; only safetensors are loaded")
    return manifest


def check_destination(destination: Path, force: bool) -> None:
    """Raise AdaptiveError if ``destination`` is a file, or is not empty and ``force`` is not set."""
    if destination.exists() and not destination.is_dir():
        raise AdaptiveError(f"{destination} is a file; name a folder to export to")
    if not force and destination.is_dir() and any(destination.iterdir()):
        raise AdaptiveError(f"{destination} is not empty; choose another folder, or --force to write over its files")


@contextlib.contextmanager
def filling(destination: Path) -> Iterator[None]:
    """In the block files are written into ``destination``. If it fails, or is interrupted, nothing stays in a folder
    that was empty or missing before."""
    there = destination.exists()
    if there and any(destination.iterdir()):
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for one in destination.iterdir() if there else [destination]:
                files.remove(one)
        raise


def check_writable(destination: Path) -> None:
    """Raise AdaptiveError if nothing can be written at ``destination``, or in the folder in which it would be made.
    Nothing is left there."""
    place = next(one for one in (destination.absolute(), *destination.absolute().parents) if one.exists())
    try:
        files.finished(files.unfinished(place))
    except OSError as error:
        raise AdaptiveError(f"{destination} cannot be written ({error.strerror}); choose another folder") from error


def _unreadable(what: str, error: OSError) -> AdaptiveError:
    kind = UnreadableStore if error.errno in EXHAUSTED else UnreadableAdapter
    return kind(f"{what} cannot be read ({error.strerror})")


def _pickled(folder: Path) -> str | None:
    return next((name for name in files.files_below(folder) if Path(name).suffix.lower() in PICKLED), None)
