#!/usr/bin/env python3
"""Install packages into an environment: ``install.py PYTHON ARGUMENT...``, as ``PYTHON -m pip install ARGUMENT...``.

uv does it, in a tenth of pip's time, with pip's settings, none of which it reads itself. pip does where uv cannot be
had, where a setting has no counterpart, and where uv fails.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

# By pip's name: what says the same to uv for each of the setting's values.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
SWITCHES = {"no-index": "--no-index", "pre": "--prerelease=allow"}
# Of pip's own running: they change nothing of what is installed.
WITHOUT_EFFECT = {
    "disable-pip-version-check",
    "no-input",
    "no-color",
    "quiet",
    "verbose",
    "progress-bar",
    "retries",
    "no-python-version-warning",
    "root-user-action",
    "cache-dir",
    "no-cache-dir",
    "no-compile",
    "no-warn-script-location",
}
# Which of pip's sections hold for ``pip install``, the later before the earlier.
SECTIONS = ("global", "install", ":env:")


def settings_of(listed: str) -> dict[str, str]:
    """What ``pip config list`` printed: each setting that holds for ``pip install``, with its value."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def for_uv(settings: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """The arguments and variables that tell uv the same, or ``None`` where one has no counterpart."""
    # pip takes the best version of all indexes; uv by itself that of the first which has the package.
    arguments, variables = ["--index-strategy", "unsafe-best-match"], {}
    for name, value in settings.items():
        if name in OPTIONS:
            arguments += [part for one in value.split() for part in (OPTIONS[name], one)]
        elif name in VARIABLES:
            variables[VARIABLES[name]] = value
        elif name in SWITCHES:
            arguments += [SWITCHES[name]] if value.lower() in ("1", "true", "yes", "on") else []
        elif name not in WITHOUT_EFFECT:
            return None
    return arguments, variables


def main(python: str, *arguments: str) -> int:
    """Install, by uv if it can be had; the exit status of what did."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=False)
    told = for_uv(settings_of(listed.stdout)) if listed.returncode == 0 else None
    if told is not None and by_uv(pip, Path(python).with_name("uv"), told, arguments):
        return 0
    return subprocess.run([*pip, "install", "--quiet", "--no-compile", *arguments], check=False).returncode


def by_uv(pip: list[str], uv: Path, told: tuple[list[str], dict[str, str]], arguments: tuple[str, ...]) -> bool:
    """Fetch uv where it lacks, and have it install; whether that went well."""
    pinned = Path(__file__).parent.parent / "constraints.txt"
    fetch = [*pip, "install", "--quiet", "--constraint", str(pinned), "uv"]
    if not uv.exists() and subprocess.run(fetch, stderr=subprocess.DEVNULL, check=False).returncode:
        return False
    options, variables = told
    command = [str(uv), "pip", "install", "--quiet", "--python", pip[0], *options, *arguments]
    if subprocess.run(command, env=os.environ | variables, check=False).returncode == 0:
        return True
    print("install: uv could not; pip tries", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
