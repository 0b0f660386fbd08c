"""The modules of the page as one script, which compresses better than they do one by one.

The sources are ES modules that a browser could load as they are, so nothing has to be built. Imports and
exports have few forms here; any other form is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{([^}]*)\}) from "(\.[^"]+)";\n', re.MULTILINE)
_LATER = re.compile(r'\bimport\("(\.[^"]+)"\)')
_EXPORT = re.compile(
    r"^export (default )?(?=(?:const|class|(?:async )?function\*?) (\w+|\[[\w, ]+\]))", re.MULTILINE
)
_LIST = re.compile(r"\bexport ?\{([^}]*)\};?\n?\Z")
_WORD = re.compile(r"\w+")
_OTHER = re.compile(r"^(?:import|export)\b.*|\bexport ?\{", re.MULTILINE)


def bundle(sources: Mapping[str, str], entry: str) -> dict[str, str]:
    """Return scripts by the names of the `sources`, which are paths with slashes.

    `entry` has all modules that it needs, sooner or later, and loads nothing else. The others are what a
    script gets that imports one of them, too: the exports of the same module. Raises ValueError.
    """
    modules: dict[str, _Module] = {}
    _add(modules, sources, entry, ())
    code = [
        f"const {one.variable} = (() => {{\n{one.code}return {{{one.shown}}};\n}})();\n"
        for one in modules.values()
    ]
    listed = ", ".join(one.variable for one in modules.values())
    scripts = {entry: f"{''.join(code)}export {{{listed}}};\n"}
    for name, module in modules.items():
        if name != entry:
            scripts[name] = module.script(posixpath.relpath(entry, posixpath.dirname(name)))
    return scripts


class _Module:
    """One module: its code without imports and exports, and the names it exports with what they stand for."""

    def __init__(self, variable: str, code: str, exports: dict[str, str]) -> None:
        self.variable = variable
        self.code = code
        self.exports = exports

    @property
    def shown(self) -> str:
        return _fields(self.exports.items())

    def script(self, entry: str) -> str:
        """Return a script that exports what this module does."""
        own, named = self.variable, ", ".join(one for one in self.exports if one != "default")
        lines = [f'import {{ {own} }} from "./{entry}";'.replace("./../", "../")]
        lines += [f"export const {{ {named} }} = {own};"] if named else []
        lines += [f"export default {own}.default;"] if "default" in self.exports else []
        return "\n".join(lines) + "\n"


def _add(modules: dict[str, _Module], sources: Mapping[str, str], name: str, above: tuple[str, ...]) -> None:
    """Add a module after all that it needs."""
    if name in modules:
        return
    if name in above:
        raise ValueError(f"{name} needs itself: {' -> '.join((*above, name))}")
    if name not in sources:
        raise ValueError(f"{' -> '.join((*above, name))}: it is not there")
    code = sources[name]
    folder = posixpath.dirname(name)

    def needed(path: str) -> _Module:
        other = posixpath.normpath(posixpath.join(folder, path))
        _add(modules, sources, other, (*above, name))
        return modules[other]

    def given(match: re.Match[str]) -> str:
        module = needed(match[3])
        if match[1]:
            return f"const {match[1]} = {module.variable};\n"
        pairs = _pairs(match[2])
        if missing := [own for own, _ in pairs if own not in module.exports]:
            raise ValueError(f"{name} imports {', '.join(missing)} of {match[3]}, which does not export it")
        return f"const {{{_fields(pairs)}}} = {module.variable};\n"

    def later(match: re.Match[str]) -> str:
        if posixpath.normpath(posixpath.join(folder, match[1])) not in sources:
            return match[0]  # it fails when it is wanted
        return f"Promise.resolve({needed(match[1]).variable})"

    code = _IMPORT.sub(given, code)
    code = _LATER.sub(later, code)
    exports: dict[str, str] = {}

    def noted(match: re.Match[str]) -> str:
        exports.update({"default": match[2]} if match[1] else {own: own for own in _WORD.findall(match[2])})
        return ""

    code = _EXPORT.sub(noted, code)
    if (found := _LIST.search(code)) is not None:
        exports |= {outside: own for own, outside in _pairs(found[1])}
        code = code[: found.start()] + "\n"
    if (other := _OTHER.search(code)) is not None:
        raise ValueError(f"{name}: {other[0][:80]!r} is no form of import or export that is known here")
    modules[name] = _Module(f"m{len(modules)}", code, exports)


def _pairs(names: str) -> list[tuple[str, str]]:
    """Return (name there, name here) of each of `a, b as c`."""
    parts = [part.split() for part in names.split(",") if part.strip()]
    return [(words[0], words[-1]) for words in parts]


def _fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the fields of an object, to take it apart or to make it: `a, b: c`."""
    return ", ".join(f"{name}: {own}" if name != own else name for name, own in pairs)
