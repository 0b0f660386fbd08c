"""The modules of the page as one script: what it contains, in which order, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from quire.server.page.bundle import bundle

SOURCES = {
    "js/main.js": 'import { f as g, K } from "./a.js";\nimport * as b from "../lib/b.js";\ng(K, b.x);\n'
    'const later = () => import("./parts/c.js");\nconst lost = () => import("./lost.js");\n',
    "js/a.js": 'import {\n  x,\n  y as z,\n} from "../lib/b.js";\nexport const K = x + z;\n'
    "export async function* f() {}\nexport const [p, q] = [1, 2];\nfunction own() {}\n",
    "js/parts/c.js": 'import { K } from "../a.js";\nexport default function Part() { return K; }\n'
    "export class C {}\n",
    "lib/b.js": "var a=1,c=2;export{a as x,c as y};\n",
}


def test_modules_come_before_those_that_need_them() -> None:
    found = bundle(SOURCES, "js/main.js")
    assert found.keys() == SOURCES.keys()
    code = found["js/main.js"]
    assert re.findall(r"^const (m\d) =", code, re.MULTILINE) == ["m0", "m1", "m2", "m3"]
    b, a, c, main = re.split(r"^const m\d = \(\(\) => \{\n", code, flags=re.MULTILINE)[1:]
    assert b.startswith("var a=1,c=2;")
    assert "return {x: a, y: c};" in b
    assert a.startswith("const {x, y: z} = m0;\nconst K = x + z;\nasync function* f() {}\n")
    assert "return {K, f, p, q};" in a
    assert c.startswith("const {K} = m1;\nfunction Part()")
    assert "return {default: Part, C};" in c
    assert main.startswith("const {f: g, K} = m1;\nconst b = m0;\ng(K, b.x);\n")
    assert "() => Promise.resolve(m2);" in main
    assert 'import("./lost.js")' in main  # fails when it is wanted, and not before
    assert code.endswith("export {m0, m1, m2, m3};\n")


def test_a_module_of_its_own_is_the_same_module() -> None:
    found = bundle(SOURCES, "js/main.js")
    assert found["js/a.js"] == ('import { m1 } from "./main.js";\nexport const { K, f, p, q } = m1;\n')
    assert found["js/parts/c.js"] == (
        'import { m2 } from "../main.js";\nexport const { C } = m2;\nexport default m2.default;\n'
    )
    assert found["lib/b.js"].startswith('import { m0 } from "../js/main.js";\n')


def test_the_script_runs() -> None:
    """Where there is Node.js; Chromium runs the page's in tests/browser."""
    if (node := shutil.which("node")) is None:
        return
    sources = {
        "main.js": 'import { log } from "./a.js";\nimport("./b.js").then((b) => log(b.default(), b.two));\n',
        "a.js": "export const log = (...all) => console.log(...all);\n",
        "b.js": 'import * as a from "./a.js";\nexport default function one() { return typeof a.log; }\n'
        "export const two = 2;\n",
    }
    command = [node, "--input-type=module", "-e", bundle(sources, "main.js")["main.js"]]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "function 2\n"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lib/b.js": 'import { K } from "../js/a.js";\n'}, "js/a.js -> lib/b.js -> js/a.js"),
        (
            {"js/a.js": 'import { x } from "./none.js";\n'},
            "js/main.js -> js/a.js -> js/none.js: it is not there",
        ),
        ({"lib/b.js": "export const x = 1;\n"}, "js/a.js imports y of ../lib/b.js"),
        ({"js/parts/c.js": 'import C from "./d.js";\n'}, "js/parts/c.js: 'import C from"),
        ({"js/parts/c.js": 'import "../a.js";\n'}, "js/parts/c.js: 'import"),
        ({"js/parts/c.js": "export let x = 1;\n"}, "js/parts/c.js: 'export let x"),
        ({"js/parts/c.js": "export default () => 1;\n"}, "js/parts/c.js: 'export default"),
        ({"js/parts/c.js": 'export * from "../a.js";\n'}, "js/parts/c.js: 'export "),
        ({"js/parts/c.js": 'export { K } from "../a.js";\nf();\n'}, "js/parts/c.js: 'export "),
    ],
)
def test_what_is_not_known_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        bundle(SOURCES | changed, "js/main.js")
