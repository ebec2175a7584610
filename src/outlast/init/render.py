"""Render templates into text. Each is one file, in ``templates/``, that reads like its result.

An argument is written so that the reader of the file gets it back as it was. Three readers: bash,
YAML, and Kubernetes, which replaces ``$(NAME)`` in what YAML has given it.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from typing import Any

import jinja2

from outlast.errors import ConfigError


def check(argument: str) -> str:
    """An argument that a process can be given; raises ConfigError for any other."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{argument!r} is not UTF-8; no manifest can hold it") from None
    if "\0" in argument:
        raise ConfigError(f"{argument!r} holds a zero byte; no process can be given that")
    return argument


def bash(argument: str) -> str:
    """The argument as one word of bash, on one line.

    A line break in single quotes would be right in a script, and wrong in a script within YAML.
    """
    if argument.isprintable():
        return shlex.quote(argument)
    return "$'" + "".join(map(_in_dollar_quotes, argument)) + "'"


def _in_dollar_quotes(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def yaml(text: object) -> str:
    """The text as a YAML string, on one line: never a number, a date or a truth value."""
    return '"' + "".join(map(_in_double_quotes, str(text))) + '"'


def _in_double_quotes(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def kubernetes(argument: str) -> str:
    """The argument as an item of a container's ``args``."""
    return yaml(argument.replace("$", "$$"))


def bash_line(arguments: Iterable[str]) -> str:
    """Several arguments as one line of bash."""
    return " ".join(map(bash, arguments))


def render(template: str, **values: Any) -> str:
    """Render a template; a value that it names and nobody gave is an error."""
    return _environment().get_template(template).render(**values)


@functools.cache  # it keeps the templates that it has compiled
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("outlast.init"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - shell and YAML, each value quoted by its filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["bash"] = bash
    environment.filters["bash_line"] = bash_line
    environment.filters["yaml"] = yaml
    environment.filters["kubernetes"] = kubernetes
    return environment
