"""The page itself, from files of our own; served file by file, or joined into one.

Our modules import names by single lines, without circles, and export only functions and constants. So a few replacements
make one script of them, and a page without a server needs no build step.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

from plotly.offline import get_plotlyjs

_FOLDER = files("draftmill.dashboard").joinpath("static")
_PAGE, _FIRST = "index.html", "main.js"
STATIC = {entry.name: entry.read_bytes() for entry in _FOLDER.iterdir() if entry.name.endswith((".js", ".css", ".svg"))}
"""Every file that is served, by name."""

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.M)
_COMMENT = re.compile(r"^ *(?://.*|/\*\*(?:.|\n)*?\*/)\n", re.M)


@lru_cache(maxsize=1)
def page() -> str:
    """The served page."""
    return _FOLDER.joinpath(_PAGE).read_text(encoding="utf-8")


def joined() -> str:
    """All modules as one script: each is a function that gives what it exports, called once, in the order of imports."""
    done: dict[str, str] = {}
    _join(_FIRST, done)
    return "".join(done.values())


def _join(name: str, done: dict[str, str]) -> None:
    if name in done:
        return
    text = STATIC[name].decode()
    for _, other in _IMPORT.findall(text):
        _join(other, done)
    taken = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};\n", text)
    given = ", ".join(_EXPORT.findall(text))
    body = _COMMENT.sub("", _EXPORT.sub(lambda found: found[0].removeprefix("export "), taken))
    done[name] = f"const {_variable(name)} = (() => {{\n{body}return {{ {given} }};\n}})();\n"


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"


def whole(data: str) -> str:
    """The page with everything inside: styles, scripts, plotly, and the data as JSON that was made safe to embed."""
    style = STATIC["style.css"].decode()
    icon = base64.b64encode(STATIC["icon.svg"]).decode()
    scripts = [get_plotlyjs(), joined()]
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {' '.join(_digest(script) for script in scripts)}"
    )
    parts = {
        '<link rel="icon" href="static/icon.svg">': f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        '<link rel="stylesheet" href="static/style.css">': f"<style>\n{style}</style>",
        '<script type="module" src="static/main.js"></script>\n': "",
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "</body>": (
            f'<script type="application/json" id="data">{data}</script>\n'
            f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>'
        ),
    }
    text = page()
    for before, after in parts.items():
        text = text.replace(before, after)
    return text


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
