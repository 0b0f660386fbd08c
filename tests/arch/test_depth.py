"""The depth of imports: the longest chain of files, each of which needs the next one to be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

from sources import Import, Source, module_imported, package, snippet

DEPTH = 15  # imports, one inside the other


def longest_chain(sources: Sequence[Source]) -> list[str]:
    """The longest chain of imports from file to file, those inside functions and for types alone left out.

    A name that a package passes on counts as imported from the file that defines it.
    """
    by_module = {source.module: source for source in sources}
    graph = {
        module: sorted(
            {
                _defining_module(other, by_module)
                for other in source.imports
                if not other.typing_only and not other.in_function
            }
            & by_module.keys() - {module}
        )
        for module, source in by_module.items()
    }
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        below = max((chains[other] for other in graph[module]), key=len, default=[])
        chains[module] = [module, *below]
    return max(chains.values(), key=len, default=[])


def _defining_module(other: Import, by_module: Mapping[str, Source]) -> str:
    module = module_imported(other, by_module.keys())
    if module in by_module and by_module[module].path.endswith("/__init__.py"):
        for passed_on in by_module[module].imports:
            if passed_on.name == other.name:
                return _defining_module(passed_on, by_module)
    return module


def test_chains_of_imports_are_short() -> None:
    chain = longest_chain(package())
    assert len(chain) - 1 <= DEPTH, f"{len(chain) - 1} imports, at most {DEPTH}: " + " -> ".join(chain)


def test_the_longest_chain_is_found() -> None:
    a = snippet("from quire import b\nfrom quire.d import x", "quire/a.py")
    b = snippet("import json\nfrom .c import x", "quire/b.py")
    c = snippet("from quire.c.e import x", "quire/c/__init__.py")
    e = snippet("def f():\n    from quire import d", "quire/c/e.py")
    d = snippet("if TYPE_CHECKING:\n    from quire import a", "quire/d.py")
    assert longest_chain([d, b, a, c, e]) == ["quire.a", "quire.b", "quire.c.e"]
    assert longest_chain([a, d]) == ["quire.a", "quire.d"]
    assert longest_chain([]) == []
