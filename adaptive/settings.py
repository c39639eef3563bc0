"""All settings in one place. Flags override ``ADAPTIVE_*`` variables, which override ``adaptive.toml``.

The bundled pair is used if neither target nor draft is named. None means "not set": sampling defaults then come from
the target's own ``generation_config.json``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from adaptive.errors import AdaptiveError
from adaptive.settings_file import config_files, doubtful, require_consent
from adaptive.state import default_state_dir
from adaptive.types import SamplingParams, StopParams

# Most requests answered at once. More would only wait for each other, and each has caches.
MOST_SLOTS = 64
# Most tokens of a command's answer. Too high: the user waits when a small model repeats itself. Too low: usual answers
# are cut.
ANSWER_TOKENS = 512

Quantisation = Literal["none", "int8", "nf4"]
DraftQuantisation = Literal["auto", "none", "int8", "nf4"]


# Settings that are paths, and those that may be paths: a model may also have its name on the hub.
PLACES = ("home", "api_key_file", "draft_key_file")
MODELS = ("target", "draft", "draft_checkpoint")
# Keys, and the files that may have them instead.
KEYS = (("api_key", "api_key_file"), ("draft_key", "draft_key_file"))

# Most nodes of a drafted tree. One pass verifies them; with more it takes longer than the further nodes can be worth.
MOST_NODES = 256


def _bytes(value: object) -> object:
    """Bytes of a size, see ``_size``. Raises AdaptiveError."""
    if not isinstance(value, str) or _number(value) is not None:
        return value
    found = _size(value)
    if found is None:
        raise AdaptiveError(f"keep_caches is {value[:40]!r}; it must be a size such as 2GB or 500MB, or 0")
    return found


def _number(said: str) -> int | None:
    """A whole number in decimal digits; None for anything else, and for one that no setting can have."""
    return int(said) if re.fullmatch("[0-9]{1,18}", said) else None


def _size(said: str) -> int | None:
    """Bytes of a size such as ``4GB``, ``1.5GiB``, ``800 MB`` or ``2G``; None for anything else."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?) ?([kMGT])(i?)B?", said.strip(), re.IGNORECASE)
    if found is None:
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper()))


def expanded(path: str | Path) -> Path:
    """``path`` with the home folder in place of a ``~`` or ``~user`` at its beginning. Raises AdaptiveError if there is
    no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise AdaptiveError(f"{path} begins with the home folder of a user who is not known here") from error


class Settings(BaseSettings):
    """All settings of one run. See ``docs/settings.md`` for what each means."""

    model_config = SettingsConfigDict(
        env_prefix="ADAPTIVE_", extra="forbid", env_ignore_empty=True, hide_input_in_errors=True
    )

    target: str | None = None
    draft: str | None = None
    draft_checkpoint: str | None = None
    draft_key: SecretStr | None = None
    draft_key_file: Path | None = None
    home: Path | None = None
    device: str = "auto"
    draft_device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    quantize: Quantisation = "none"
    draft_quantize: DraftQuantisation = "auto"
    memory: str | None = None
    cuda_graphs: Literal["auto", "off"] = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    draft_length: Annotated[str, BeforeValidator(str)] = "auto"
    history: Literal["auto", "session", "off"] = "auto"
    seed: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    record: bool = True
    keep_days: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    keep_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    feature_gb: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    keep_adapters: int = Field(default=5, ge=1)
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    cors: Annotated[tuple[str, ...], NoDecode] = ()
    queue: int = Field(default=64, ge=0)
    slots: Annotated[str, BeforeValidator(str)] = "auto"
    max_body_mb: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    cache_mb: int = Field(default=1024, ge=0)
    keep_caches: Annotated[int, BeforeValidator(_bytes)] = Field(default=0, ge=0)
    threads: int | None = Field(default=None, ge=1)
    distill: str = "idle"
    distill_after: int = Field(default=100, ge=1)
    distill_idle_seconds: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    distill_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    distill_nice: int = Field(default=19, ge=0, le=19)

    @property
    def answer_tokens(self) -> int:
        """The longest answer of a command, in tokens. A server uses the request's limit, and without one the room left
        in the context: clients that set no limit take a shorter answer for a broken one."""
        return ANSWER_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def model_post_init(self, context: Any) -> None:
        """Refuse impossible sampling before any model is loaded. Raises AdaptiveError."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        SamplingParams(
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty, seed=self.seed, **said
        )
        StopParams(self.answer_tokens)
        fixed_draft_length(self.draft_length)
        if self.memory is not None:
            memory_bytes(self.memory)
        if self.slots != "auto" and not 1 <= (_number(self.slots) or 0) <= MOST_SLOTS:
            raise AdaptiveError(f"slots is {self.slots[:80]!r}; it must be auto or a number from 1 to {MOST_SLOTS}")
        training_window(self.distill)
        if self.name is not None and not re.fullmatch(r"[\w.:/@+-]{1,128}", self.name):
            raise AdaptiveError(f"name is {self.name[:80]!r}; it must be 1 to 128 letters, digits and ._:/@+-")
        for origin in self.cors:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*?#@\s]+", origin):
                raise AdaptiveError(
                    f"cors is {origin!r}; it must be an origin such as https://chat.example or http://pc:3000"
                )

    @field_validator("cors", mode="before")
    @classmethod
    def _separated(cls, value: object) -> object:
        """Split the value of an environment variable, in which commas separate the origins."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("home", "api_key_file", "draft_key_file")
    @classmethod
    def _at_home(cls, value: Path | None) -> Path | None:
        """Expand a ``~``, which a shell leaves as it is in ``--state-dir=~/x``, and a file has in any case."""
        return None if value is None else expanded(value)

    def for_worker(self) -> dict[str, Any]:
        """The settings for the training process, as plain JSON values, without keys."""
        return self.model_dump(mode="json", exclude={"api_key", "api_key_file", "draft_key", "draft_key_file"})

    @property
    def state_dir(self) -> Path:
        """The folder that contains a folder per pair."""
        return self.home if self.home is not None else default_state_dir()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the files that ``settings_from`` sets in ``model_config``."""
        return (init_settings, env_settings, _Files(settings_cls))


class _Files(TomlConfigSettingsSource):
    """Settings files. A relative path in one of them is relative to the folder of the file, wherever the program
    runs."""

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads(file_path.read_text(encoding="utf-8-sig"))
        folder = file_path.resolve().parent
        for name in (*PLACES, *MODELS) if folder != Path.cwd() else ():
            if isinstance(found.get(name), str):
                there = folder / expanded(found[name])
                if name in PLACES or there.exists():
                    found[name] = str(there)
        return found


def model_name(settings: Settings) -> str:
    """The model id that clients see: ``name``, else the target's name without its owner or folder."""
    if settings.name is not None:
        return settings.name
    if settings.target is None:
        return "bundled"
    name = expanded(settings.target).resolve().name or "model"
    return re.sub(r"[^\w.+-]+", "-", name.removesuffix(".gguf"))


def fixed_draft_length(said: str) -> tuple[int, bool] | None:
    """The number of tokens that every round drafts, and whether they are the nodes of a tree; None for ``auto``. Raises
    AdaptiveError for anything else."""
    if said == "auto":
        return None
    number, tree = _number(said.removeprefix("tree:")), said.startswith("tree:")
    if number is None or not tree <= number <= (MOST_NODES if tree else 64):
        known = f"auto, a number from 0 to 64, or tree:N with N from 1 to {MOST_NODES}"
        raise AdaptiveError(f"draft_length is {said[:80]!r}; it must be {known}")
    return number, tree


def memory_bytes(said: str) -> int:
    """Bytes of a size such as ``4GB``, ``1.5GiB`` or ``800MB``. Raises AdaptiveError for anything else."""
    found = _size(said)
    if not found:
        raise AdaptiveError(f"memory is {said[:80]!r}; it must be a size such as 4GB, 1.5GiB or 800MB")
    return found


def training_window(policy: str) -> tuple[int, int] | None:
    """The daily window of a training policy in minutes after midnight; None for idle, always and off.

    The window may cross midnight (``22:00-06:00``). Raises AdaptiveError for anything else, and for an empty window.
    """
    if policy in ("idle", "always", "off"):
        return None
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", policy)
    if found is None:
        raise AdaptiveError(f"distill is {policy!r}; it must be idle, always, off or a daily window like 22:00-06:00")
    hours = [int(part) for part in found.groups()]
    begin, end = 60 * hours[0] + hours[1], 60 * hours[2] + hours[3]
    if begin == end:
        raise AdaptiveError(
            f"distill is {policy!r}, a window that ends when it begins, so nothing would be trained; choose another "
            "end, or idle for the whole day"
        )
    return begin, end


def load_settings(
    overrides: dict[str, Any], config: Path | None = None, ask: Callable[[str], bool] | None = None
) -> Settings:
    """Settings from ``overrides`` (the given flags), the environment and the settings files: ``config`` alone, or
    without it those of ``config_files``.

    If a file in the current folder sets more than it may without consent (``settings_file.py``), ``ask`` puts a
    question to the user; without ``ask`` the file is refused. Raises AdaptiveError that names the wrong setting and its
    source.
    """
    files = config_files(config)
    for file in files if config is None else ():
        require_consent(file, doubtful(file, written_in(file), {*overrides, *set_in_environment()}), ask)
    return settings_from(overrides, files)


def settings_from(overrides: dict[str, Any], files: Sequence[Path]) -> Settings:
    """``load_settings`` from these ``files``, without a question. A later file overrides an earlier one."""

    class FromFiles(Settings):
        model_config = SettingsConfigDict(toml_file=files)

    for file in files:
        written_in(file)  # raises an AdaptiveError that names the file
    settings = _checked(FromFiles, overrides, files)
    # A key hides a file with another key that is named in a place of lower precedence.
    for key, key_file in KEYS:
        for said in ({name for name, value in overrides.items() if value is not None}, set_in_environment()):
            if key in said and key_file not in said:
                settings = settings.model_copy(update={key_file: None})
            if key in said or key_file in said:
                break
    return settings


def written_in(file: Path) -> dict[str, Any]:
    """The settings that ``file`` sets. Raises AdaptiveError if it cannot be read or is not TOML."""
    try:
        return dict(_Files(Settings, file).toml_data)
    except OSError as error:
        raise AdaptiveError(f"settings file {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise AdaptiveError(f"settings file {file} is not valid TOML: {error}") from error


def set_in_environment() -> frozenset[str]:
    """The settings that an ``ADAPTIVE_*`` variable sets."""
    variables = {name.upper() for name, value in os.environ.items() if value}
    return frozenset(name for name in Settings.model_fields if f"ADAPTIVE_{name.upper()}" in variables)


def change_settings(settings: Settings, said: dict[str, Any]) -> Settings:
    """A copy of the settings with changes. Raises AdaptiveError as ``load_settings``."""
    return _checked(Settings, {**settings.model_dump(), **said}, ())


def _checked(kind: type[Settings], values: dict[str, Any], files: Sequence[Path]) -> Settings:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":  # in a file, or by a Python program
            where = f" ({' or '.join(map(str, files))})" if files else ""
            raise AdaptiveError(f"there is no setting {name}{where}") from error
        # A key is not shown, nor what may be one: the value of a misspelt name, all settings at once.
        public = {*Settings.model_fields} - {name for names in KEYS for name in names}
        got = f", got {repr(first.get('input'))[:80]}" if public.intersection(first["loc"]) else ""
        raise AdaptiveError(f"setting {name}: {first['msg'].lower()}{got} ({_places(name, files)})") from error
    except AdaptiveError as error:  # the checks of this module name the setting first
        name = str(error).partition(" ")[0]
        if name not in Settings.model_fields:
            raise
        raise AdaptiveError(f"{error} ({_places(name, files)})") from error


def _places(name: str, files: Sequence[Path]) -> str:
    """Where a setting may have been set."""
    return " or ".join((f"{'flags, ' if files else 'flag or '}ADAPTIVE_{name.upper()}", *map(str, files)))
