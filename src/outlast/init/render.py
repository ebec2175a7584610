"""Templates into text. Each is one file, in ``templates/``, that reads like its result."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from outlast.init import quoting


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
    environment.filters["bash"] = quoting.bash
    environment.filters["bash_line"] = quoting.bash_line
    environment.filters["yaml"] = quoting.yaml
    environment.filters["kubernetes"] = quoting.kubernetes
    return environment
