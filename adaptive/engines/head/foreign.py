"""What heads that came from elsewhere have in common: a text's first token has no row, and they learn by LoRA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from adaptive.engines.head.kinds import HeadKind


class ForeignHead(nn.Module, ABC):
    """A head that somebody trained for the target; see ``HeadModule``."""

    kind: HeadKind
    config: Any
    width: int
    reads: int
    body: Any
    begins = 1
    base_model_prefix = ""  # PEFT takes what has a config of transformers for a model of its, and asks for it

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """See ``HeadModule``."""

    @property
    def device(self) -> torch.device:
        """See ``HeadModule``."""
        return torch.device(str(self._fusing.weight.device))

    @property
    def dtype(self) -> torch.dtype:
        """See ``HeadModule``."""
        return self._fusing.weight.dtype

    @property
    @abstractmethod
    def _fusing(self) -> nn.Linear:
        """What makes one of several things that a row reads."""

    @abstractmethod
    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""

    @abstractmethod
    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary projection, which takes no adapter: ``trainers.lora`` asks so of any model."""
