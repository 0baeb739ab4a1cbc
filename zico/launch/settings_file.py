"""The user's settings file: the same settings as the flags, in TOML, for what is always the same.

# ~/.config/zico/config.toml
device = "cuda:0"
budget = "80%"
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from zico.config import NO_FILE, Flags, SettingsFile
from zico.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "ZICO_CONFIG"
KEYS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Flags))


def read_settings(environ: Mapping[str, str] = os.environ) -> SettingsFile:
    """Return what the file that ``ZICO_CONFIG`` names says, else the user's own; nothing if that one is missing.

    Raises:
        ConfigError: It cannot be read, is no TOML, or has a setting that there is not.
    """
    named = environ.get(VARIABLE)
    path = Path(named) if named else platformdirs.user_config_path("zico") / "config.toml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        if not named:
            return NO_FILE
        raise ConfigError(f"{VARIABLE}: the file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from None
    return SettingsFile(str(path), _values(path, text))


def _values(path: Path, text: str) -> dict[str, str]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from None
    for key, value in found.items():
        if key not in KEYS:
            raise ConfigError(f"{key!r} in {path} is not a setting: give some of {', '.join(KEYS)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key} in {path} is neither text nor a number: give it as on the command line")
    return {key: str(value) for key, value in found.items()}
