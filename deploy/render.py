"""Templates -> the files of a release.

A template that names a value it was not given fails (StrictUndefined): half a file never reaches a host.
A value enters a rendered file only through the filter of that file's language, so that blanks, quotes,
``$(...)`` and newlines arrive as what they are:

============  ==================================================================================
filter        the value as
============  ==================================================================================
``shell``     one word of a POSIX shell
``envfile``   a value in an env file, as Compose v2 reads it (``KEY={{ value | envfile }}``)
``yaml``      a YAML scalar, or a list or mapping on one line
``compose``   the same in a Compose file, where ``$`` starts a variable unless it is doubled
``systemd``   one word of a command in a unit of systemd
``comment``   the rest of a comment's line
``pct``       a path within a property of a Proxmox container, like ``mp0: {{ path | pct }},mp=/data``
``pct_path``  a path in its raw ``lxc.mount.entry``
``pct_value`` the rest of a line there
============  ==================================================================================
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import jinja2

from deploy import CHECKOUT
from deploy.errors import DeployError

TEMPLATES = CHECKOUT / "templates"


class Unfit(DeployError, ValueError):
    """A value that its file cannot hold: a sentence for people, since most are names that people chose."""


def shell(value: object) -> str:
    """`value` as one word of a POSIX shell. Raises Unfit for a NUL byte, which no argument can hold."""
    text = str(value)
    if "\0" in text:
        raise Unfit(f"{text!r} has a NUL byte, which no shell word can hold; remove it")
    return shlex.quote(text)


def envfile(value: object) -> str:
    """`value` as the right-hand side of a line in an env file, byte-exact once Compose v2 has read it.

    Always in double quotes: only there can every character be written, and only there is ``#`` no comment.
    `shlex.quote` is no help: the file is not read by a shell, and `'"'"'` ends the value. Raises Unfit
    for a NUL byte, which no environment can hold.
    """
    text = str(value)
    if "\0" in text:
        raise Unfit(f"{text!r} has a NUL byte, which no environment variable can hold; remove it")
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")  # the order matters: \ first
    return '"' + text.replace("\n", "\\n").replace("\r", "\\r") + '"'


# Plain YAML scalars that nothing reads as anything but a string. Everything else is written as JSON.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/_](?:[A-Za-z0-9/_.+-]*[A-Za-z0-9/_])?|--")
# What YAML 1.1 wants escaped and JSON does not: C1 controls, Unicode's line breaks, the byte order mark.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_NOT_STRINGS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


def yaml(value: object) -> str:
    """`value` on one line of YAML: a bare word where that is safe, else JSON, which is YAML too."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def compose(value: object) -> str:
    """`value` on one line of a Compose file, where a single ``$`` would be taken for a variable."""
    return yaml(value).replace("$", "$$")


_BARE = re.compile(r"[A-Za-z0-9/_.,:=@+-]+")


def systemd(value: object) -> str:
    """`value` as one word of ExecStart= (systemd.service(5), COMMAND LINES).

    ``%`` starts a specifier and ``$`` a variable, also within quotes, unless they are doubled. Raises
    Unfit for a NUL byte or a newline.
    """
    text = str(value)
    if "\0" in text or "\n" in text:
        raise Unfit(f"{text!r} has a zero byte or a newline, which no unit can hold; remove it")
    text = text.replace("%", "%%").replace("$", "$$")
    if _BARE.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def comment(value: object) -> str:
    """The first line of `value`: what follows a newline would be no comment any more."""
    return next(iter(str(value).splitlines()), "")


_PROPERTY = re.compile(r"[^,=\s\0-\x1f\x7f]+")


def pct(value: object) -> str:
    """`value` as a word of a Proxmox property, where ``,`` and ``=`` part words and nothing quotes them.

    Raises Unfit for what cannot be written there.
    """
    text = str(value)
    if not _PROPERTY.fullmatch(text):
        raise Unfit(
            f"{text!r} has a blank, a comma or '=', which no entry of a Proxmox container can hold; choose "
            "another place for it"
        )
    return text


def pct_path(value: object) -> str:
    """`value` as a field of a mount entry, in which blanks are written by their octal numbers."""
    text = pct_value(value)
    return text.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def pct_value(value: object) -> str:
    """`value` as the rest of a line of a container's configuration. Raises Unfit for a line break."""
    text = str(value)
    if re.search(r"[\0-\x08\n-\x1f\x7f]", text) or text != text.strip():
        raise Unfit(
            f"{text!r} has a control character or blanks at its ends, which no line of a Proxmox container's "
            "configuration can hold; choose another name for it"
        )
    return text


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    undefined=jinja2.StrictUndefined,
    autoescape=False,  # (nothing here is HTML; each file's own filter quotes)
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_environment.filters.update(
    shell=shell,
    envfile=envfile,
    yaml=yaml,
    compose=compose,
    systemd=systemd,
    comment=comment,
    pct=pct,
    pct_path=pct_path,
    pct_value=pct_value,
)


def render(template: str, **values: Any) -> str:
    """The text of `template` (a file's name in templates/) with `values`.

    Raises jinja2.UndefinedError if the template names a value that is not given, jinja2.TemplateNotFound
    if there is no such template, and Unfit for a value that its file cannot hold.
    """
    return _environment.get_template(template).render(**values)
