"""The settings file: TOML tables [gateway], [target] and [draft], checked before anything starts.

Knows the settings classes and nothing of how flags and variables win over it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from outrider.serving.settings import SettingsError

TOML_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

Tables = dict[str, dict[str, Any]]


class ConfigFileError(ValueError):
    """The file cannot be used; the message names it, the key, and the nearest known one."""


def load(path: Path, services: Mapping[str, type[Any]]) -> Tables:
    """The tables of the file, every value of its setting's type and inside its limits."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigFileError(f"{path}: {error}") from error
    for service, table in tables.items():
        if service not in services:
            raise ConfigFileError(f"{path}: unknown table [{service}]{_hint(service, services)}")
        if not isinstance(table, dict):
            raise ConfigFileError(f"{path}: {service} must be a table, [{service}]")
        try:
            _check_table(table, services[service])
        except SettingsError as error:
            raise ConfigFileError(f"{path}: [{service}] {error}") from error
    return tables


def _check_table(table: dict[str, Any], settings_class: type[Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    for key, value in table.items():
        if key not in fields:
            raise SettingsError(f"unknown key {key}{_hint(key, fields)}")
        wanted = type(fields[key].default)
        # TOML tells true from 1, and 1 is a fine float.
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits:
            raise SettingsError(f"{key} must be {TOML_TYPES[wanted]}, got {value!r}")
    settings_class(**table)  # the limits


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(known))}"


def toml_value(value: bool | int | float | str) -> str:
    """One value as TOML spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON allows as it is,
        # and for what a terminal may lack: two of four digits make no character in TOML.
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return "".join(char if char < "\U00010000" else f"\\U{ord(char):08x}" for char in quoted)
    return repr(value)
