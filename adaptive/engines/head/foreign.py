"""The base of heads that were trained elsewhere: the first token of a text has no row, and they learn by LoRA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.head.vocabulary import spread


class ForeignHead(nn.Module, ABC):
    """A head that was trained elsewhere for the target; see ``HeadModule``."""

    kind: HeadKind
    config: Any
    width: int
    reads: int
    body: Any
    ids: torch.Tensor | None
    begins = 1
    base_model_prefix = ""  # PEFT reads it from any module with a transformers config

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
        """The linear layer that combines the inputs of a row."""

    @abstractmethod
    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""
        own = self.own_logits(hidden)
        return own if self.ids is None else spread(own, self.ids, self.vocab_size)

    @abstractmethod
    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""

    @abstractmethod
    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary projection, which takes no adapter; ``trainers.lora`` calls this on every model."""
