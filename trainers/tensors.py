"""A file of tensors beside the log, replaced whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from checkpoints import files


def replace_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Replace ``path`` by a private file (0600) of contiguous ``tensors``, atomically. Raises OSError."""
    temporary = files.unfinished(path.parent)
    try:
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        os.chmod(temporary, 0o600)
        files.flush(temporary)
        os.replace(temporary, path)
        files.flush(path.parent)
    except SafetensorError as error:  # safetensors' error for a full disk
        raise OSError(str(error)) from error
    finally:
        files.finished(temporary)
