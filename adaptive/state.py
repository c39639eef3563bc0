"""The state on disk: one private folder per pair, under ``ADAPTIVE_HOME``."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from adaptive.errors import AdaptiveError
from checkpoints import files

logger = logging.getLogger("adaptive")


@dataclass(frozen=True)
class PairState:
    """The folder of one pair, in the state folder."""

    root: Path

    @property
    def records(self) -> Path:
        """The log, an SQLite file."""
        return self.root / "records.db"

    @property
    def adapters(self) -> Path:
        """The adapter store."""
        return self.root / "adapters"

    @property
    def training(self) -> Path:
        """The state of an interrupted training run, if there is one."""
        return self.root / "training.safetensors"

    @property
    def replays(self) -> Path:
        """What that run has replayed so far (``trainers.replayed``)."""
        return self.root / "training.replays.json"

    @property
    def rehearsal(self) -> Path:
        """Text that the plain draft wrote for training (``trainers.rehearsal``)."""
        return self.root / "rehearsal.safetensors"

    @property
    def answering(self) -> Path:
        """The prompts that ``adaptive distill --prompts`` has had answered for an interrupted run, as a hash."""
        return self.root / "answering.json"

    @property
    def in_use(self) -> Path:
        """Its time is that at which somebody was last answered (``adaptive.service.presence``)."""
        return self.root / "in-use"

    @property
    def features(self) -> Path:
        """The feature spool: hidden states of the target at logged positions."""
        return self.root / "features"

    @property
    def caches(self) -> Path:
        """Caches of conversations that are kept across restarts."""
        return self.root / "caches"

    @property
    def typed(self) -> Path:
        """The input history of ``adaptive chat``, for the arrow keys."""
        return self.root / "typed.txt"

    @property
    def controller(self) -> Path:
        """Learned costs and acceptance priors."""
        return self.root / "controller.json"

    @property
    def promotions(self) -> Path:
        """The expected and the measured speed of each promotion."""
        return self.root / "promotions.json"

    @property
    def doubts(self) -> Path:
        """The adapter that was rolled back and is to be judged again, and how far training has read."""
        return self.root / "doubts.json"


def default_state_dir() -> Path:
    """The platform's user data folder for adaptive (``--state-dir`` and ADAPTIVE_HOME override it)."""
    import platformdirs

    return Path(platformdirs.user_data_dir("adaptive"))


def packed_root(state_dir: Path) -> Path:
    """The folder of all weights that ``--memory`` has packed (``adaptive.engines.streamed.packed``)."""
    return state_dir / "packed"


def open_state(state_dir: Path, pair_id: str) -> PairState:
    """Create (0700) or open the folder of ``pair_id``, remove unfinished files of killed processes, and restrict new
    files to the user. If it is new, and these models were used by other names before, a warning says so.

    Raises AdaptiveError if the folder cannot be created or written.
    """
    root = state_dir / pair_id
    os.umask(0o077)
    try:
        if not root.exists():
            _warn_of_other_names(root)
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.finished(files.unfinished(root))  # checks that the folder is writable
        files.sweep(root)
    except OSError as error:
        raise AdaptiveError(
            f"state folder {root} cannot be written ({error.strerror}); choose another with --state-dir"
        ) from error
    return PairState(root)


def _warn_of_other_names(root: Path) -> None:
    """Name the folder of the same models by other names: those with the same hash after the last hyphen."""
    same = root.name.rpartition("-")[2]
    others = [state.root.name for state in existing_states(root.parent) if state.root.name.endswith(f"-{same}")]
    if len(others) == 1:
        logger.warning(
            "state folder %s is new: the same models were used by other names before, and their log and adapters are "
            "in %s; to go on with these, end this program, delete the new folder, and rename the old one to %s",
            root,
            root.with_name(others[0]),
            root.name,
        )


def existing_states(state_dir: Path) -> list[PairState]:
    """Every pair's folder under ``state_dir`` that holds a log or an adapter store, most recently used first.

    Raises AdaptiveError if ``state_dir`` cannot be read.
    """
    try:
        found = [(_used(folder), folder) for folder in state_dir.iterdir()] if state_dir.is_dir() else []
    except OSError as error:
        raise AdaptiveError(f"state folder {state_dir} cannot be read ({error.strerror})") from error
    return [PairState(folder) for used, folder in sorted(found, reverse=True) if used]


def _used(folder: Path) -> float:
    """When a pair's folder was last used; 0 for other folders."""
    try:
        known = (folder / "records.db").exists() or (folder / "adapters").is_dir()
        return folder.stat().st_mtime if known else 0.0
    except OSError:  # a folder of another user
        return 0.0
