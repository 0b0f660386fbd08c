"""Fetching from a hub: a small server on this machine speaks its endpoints and notes what it is asked."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from quire.errors import ConfigError
from quire.weights.folder import ModelFolder
from quire.weights.hub import DEMO, open_model, resolve

pytest.importorskip("huggingface_hub")

OLD, NEW = "a" * 40, "b" * 40
MODEL = "org/tiny"
COMMON = {
    "config.json": b'{"model_type": "llama"}',
    "hf_quant_config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# about",
    "modeling_evil.py": b"open('canary', 'w')",
    "pytorch_model.bin": b"\x80\x04pickle",
    "onnx/model.safetensors": b"another format",
    "original/params.json": b"{}",
    "tokenizer_old/tokenizer.json": b"{}",
}
WEIGHTS = {"w": np.arange(50_000, dtype=np.float32)}


class Hub(ThreadingHTTPServer):
    """Repositories in memory: model id -> commit -> files, and branches that can move."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, str] = {}
        self.asked: list[tuple[str, str, str]] = []  # (method, revision, file or "info" or "tree")
        self.ranges: list[str] = []
        self.cut: dict[str, int] = {}  # file -> bytes after which the connection ends, once
        self.fail: set[str] = set()  # files that cannot be had
        self.refuse: dict[str, tuple[int, str]] = {}  # model -> (status, error code)
        self.move_to: str | None = None  # where the branch goes once the first file has been asked for
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files_asked(self) -> set[str]:
        return {file for _, _, file in self.asked if file not in ("info", "tree")}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        with self.server.lock:
            if api:
                self._api(*map(unquote, api.groups()))
            elif file:
                self._file(*map(unquote, file.groups()))
            else:
                self._send(404, b"")

    def _api(self, model: str, what: str, revision: str) -> None:
        self.server.asked.append((self.command, revision, "info" if what == "revision" else "tree"))
        found = self._commit(model, revision)
        if found is None:
            return
        commit, files = found
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": model, "modelId": model, "sha": commit, "siblings": siblings, "tags": []})
        else:
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
            self._json(
                [{"type": "file", "path": n, "size": len(d), "oid": oids[n]} for n, d in files.items()]
            )

    def _file(self, model: str, revision: str, name: str) -> None:
        self.server.asked.append((self.command, revision, name))
        found = self._commit(model, revision)
        if found is None:
            return
        commit, files = found
        if self.server.move_to:
            self.server.branches["main"] = self.server.move_to
        if name in self.server.fail:
            self._send(500, b"")
            return
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        headers |= {"X-Linked-Size": str(len(data)), "Accept-Ranges": "bytes"}
        start, status = 0, 200
        if wanted := self.headers.get("Range"):
            self.server.ranges.append(wanted)
            start, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.server.cut.pop(name, None) if self.command == "GET" else None
        self._send(status, data[start:], headers, cut)

    def _commit(self, model: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if model in self.server.refuse:
            status, code = self.server.refuse[model]
            self._send(status, b"", {"X-Error-Code": code} if code else {})
            return None
        if model not in self.server.repositories:
            # The real one answers 401 to those who are not logged in, so as not to tell what exists.
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        commit = self.server.branches.get(revision, revision)
        files = self.server.repositories[model].get(commit)
        if files is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, files

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        self.close_connection = cut is not None


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    weights = {name: save({"w": array}) for name, array in (("old", WEIGHTS["w"]), ("new", WEIGHTS["w"] + 1))}
    server.repositories[MODEL] = {
        OLD: {**COMMON, "model.safetensors": weights["old"], "consolidated.safetensors": b"the same again"},
        NEW: {**COMMON, "config.json": b'{"model_type": "new"}', "model.safetensors": weights["new"]},
    }
    server.branches["main"] = OLD
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bars in the tests' output, and whatever the machine's own settings say about the network."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    for name in ("HF_HUB_OFFLINE", "QUIRE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def wanted_files(*weights: str) -> set[str]:
    small = {n for n in COMMON if n.endswith((".json", ".jinja")) and "/" not in n}
    return {*small, *weights}


def fetch(hub: Hub, cache: Path, model: str = MODEL, revision: str | None = None) -> ModelFolder:
    return ModelFolder.at(resolve(model, revision, endpoint=hub.url, cache_dir=cache))


def test_only_what_is_read_is_fetched(hub: Hub, cache: Path) -> None:
    folder = fetch(hub, cache)
    assert folder.config() == {"model_type": "llama"}
    np.testing.assert_array_equal(folder.tensors().read("w"), WEIGHTS["w"])
    assert {file.name for file in folder.path.iterdir()} == wanted_files("model.safetensors")
    assert hub.files_asked() == wanted_files("model.safetensors")  # no code, no pickle, no second copy


def test_without_weights_only_small_files_are_fetched(hub: Hub, cache: Path) -> None:
    folder = ModelFolder.at(resolve(MODEL, weights=False, endpoint=hub.url, cache_dir=cache))
    assert hub.files_asked() == wanted_files()
    assert not folder.has_weights
    assert fetch(hub, cache).has_weights


def test_modules_of_sentence_transformers_are_fetched_with_their_weights(hub: Hub, cache: Path) -> None:
    dense = {"2_Dense/config.json": b"{}", "2_Dense/model.safetensors": save({"linear.weight": WEIGHTS["w"]})}
    files = {**COMMON, **dense, "modules.json": b"[]", "1_Pooling/config.json": b"{}"}
    more = {"model.safetensors": save(WEIGHTS), "2_Dense/pytorch_model.bin": b"\x80\x04pickle"}
    hub.repositories[MODEL][OLD] = {**files, **more}
    modules = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json"}
    resolve(MODEL, weights=False, endpoint=hub.url, cache_dir=cache)
    assert hub.files_asked() == wanted_files() | modules
    folder = fetch(hub, cache)
    np.testing.assert_array_equal(
        folder.module_tensors("2_Dense").pull("linear.weight").dense(), WEIGHTS["w"]
    )
    assert hub.files_asked() == wanted_files("model.safetensors", "2_Dense/model.safetensors") | modules


def test_templates_for_other_uses_are_fetched(hub: Hub, cache: Path) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    hub.repositories[MODEL][OLD] |= {name: b"{{ tools }}", f"{name}.md": b"about"}
    assert fetch(hub, cache).chat_templates() == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert hub.files_asked() == wanted_files("model.safetensors") | {name}


VOCABULARIES = {"tekken.json": b"{}", "tiktoken.model": b"", "vocab.json": b"{}", "merges.txt": b""}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_other_tokenizers_are_fetched_where_there_is_no_tokenizer_json(
    has_tokenizer: bool, hub: Hub, cache: Path
) -> None:
    hub.repositories[MODEL][OLD] |= VOCABULARIES
    if not has_tokenizer:
        del hub.repositories[MODEL][OLD]["tokenizer.json"]
    fetch(hub, cache)
    wanted = wanted_files("model.safetensors")
    assert hub.files_asked() == (
        wanted if has_tokenizer else wanted - {"tokenizer.json"} | VOCABULARIES.keys()
    )


def test_every_file_comes_from_one_commit_though_the_branch_moves(hub: Hub, cache: Path) -> None:
    hub.move_to = NEW
    folder = fetch(hub, cache)
    assert folder.config() == {"model_type": "llama"}
    np.testing.assert_array_equal(folder.tensors().read("w"), WEIGHTS["w"])
    assert [entry for entry in hub.asked if entry[1] == "main"] == [("GET", "main", "info")]
    assert {revision for _, revision, _ in hub.asked} == {"main", OLD}
    # Asked for again, the name means the new commit.
    assert fetch(hub, cache).config() == {"model_type": "new"}


@pytest.mark.parametrize("revision", [NEW, "v2", "release/2.0"])
def test_a_revision_is_honoured(hub: Hub, cache: Path, revision: str) -> None:
    hub.branches["v2"] = NEW
    hub.branches["release/2.0"] = NEW
    assert fetch(hub, cache, revision=revision).config() == {"model_type": "new"}
    assert "main" not in {asked for _, asked, _ in hub.asked}


def test_a_second_time_nothing_is_fetched_again(hub: Hub, cache: Path) -> None:
    first = fetch(hub, cache)
    hub.asked.clear()
    assert fetch(hub, cache) == first
    assert not hub.files_asked()


def test_a_cut_download_goes_on_where_it_was(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut["model.safetensors"] = 70_000
    folder = fetch(hub, cache)
    np.testing.assert_array_equal(folder.tensors().read("w"), WEIGHTS["w"])
    assert hub.ranges == ["bytes=70000-"]


def test_after_a_failed_download_complete_files_are_kept(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(hub)
    hub.fail = {"model-2.safetensors"}
    monkeypatch.setattr("huggingface_hub.file_download._DEFAULT_RETRY_ON_STATUS_CODES", (), raising=False)
    with pytest.raises(ConfigError, match="the download did not finish") as caught:
        fetch(hub, cache)
    assert "run it again" in str(caught.value)
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no complete copy"):
        fetch(hub, cache)
    monkeypatch.delenv("QUIRE_OFFLINE")
    hub.fail.clear()
    hub.asked.clear()
    assert sorted(fetch(hub, cache).tensors()) == ["a", "b"]
    assert hub.files_asked() == {"model-2.safetensors"}


def test_a_missing_shard_is_noticed_before_the_weights_are_fetched(hub: Hub, cache: Path) -> None:
    del sharded(hub)["model-2.safetensors"]
    with pytest.raises(ConfigError, match=r"index\.json names 'model-2\.safetensors', which is not there"):
        fetch(hub, cache)
    assert "model-1.safetensors" not in hub.files_asked()


def sharded(hub: Hub) -> dict[str, bytes]:
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    files = {file: save({name: WEIGHTS["w"]}) for name, file in names.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
    hub.repositories[MODEL][OLD] = {**COMMON, **files, "consolidated.safetensors": b"the same again"}
    return hub.repositories[MODEL][OLD]


def test_shards_are_those_of_the_index(hub: Hub, cache: Path) -> None:
    sharded(hub)
    folder = fetch(hub, cache)
    assert sorted(folder.tensors()) == ["a", "b"]
    assert "consolidated.safetensors" not in hub.files_asked()


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "*.safetensors", "onnx/model.safetensors"]
)
def test_an_index_cannot_ask_for_other_files(hub: Hub, cache: Path, name: str) -> None:
    files = sharded(hub)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    with pytest.raises(ConfigError, match=r"index\.json"):
        fetch(hub, cache)
    assert not any(file.endswith(".safetensors") for file in hub.files_asked())


def test_without_a_network_the_copy_in_the_cache_is_used(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sharded(hub)
    first = fetch(hub, cache)
    hub.asked.clear()
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    for revision in (None, "main", OLD):
        assert fetch(hub, cache, revision=revision) == first
    assert not hub.asked
    monkeypatch.delenv("QUIRE_OFFLINE")
    hub.refuse[MODEL] = (503, "")
    assert fetch(hub, cache) == first
    assert "cannot be reached" in caplog.text
    hub.server_close()
    assert fetch(hub, cache) == first


def test_without_a_network_an_incomplete_copy_is_not_used(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(hub)
    folder = fetch(hub, cache)
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    for name in ("model-2.safetensors", "config.json"):
        kept = (folder.path / name).readlink()
        (folder.path / name).unlink()
        with pytest.raises(ConfigError, match="the cache holds no complete copy"):
            fetch(hub, cache)
        (folder.path / name).symlink_to(kept)
    assert fetch(hub, cache) == folder
    for model, revision in ((MODEL, "v2"), (MODEL, NEW), ("org/never", None)):
        with pytest.raises(ConfigError, match="no complete copy"):
            fetch(hub, cache, model, revision)


def test_a_name_is_remembered_only_once_all_is_there(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(hub, cache)
    hub.branches["main"] = NEW
    del hub.repositories[MODEL][NEW]["model.safetensors"]
    with pytest.raises(ConfigError, match="no safetensors"):
        fetch(hub, cache)
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    assert fetch(hub, cache).config() == {"model_type": "llama"}


@pytest.mark.parametrize("files", [["pytorch_model.bin"], ["onnx/model.safetensors", "model.pt"], []])
def test_a_repository_without_safetensors_is_refused_before_a_byte(
    hub: Hub, cache: Path, files: list[str]
) -> None:
    hub.repositories[MODEL][OLD] = {"config.json": b"{}", "evil.py": b"", **dict.fromkeys(files, b"x")}
    with pytest.raises(ConfigError, match=f"{MODEL} at {OLD}: no safetensors weights") as caught:
        fetch(hub, cache)
    if files:
        assert "never read" in str(caught.value)
    assert not hub.files_asked()


GGUF = {f"tiny-{kind}.gguf": f"GGUF {kind}".encode() for kind in ("Q4_K_M", "Q8_0", "UD-Q8_0")}
GGUF |= {f"BF16/tiny-BF16-0000{n}-of-00002.gguf": b"GGUF" + bytes([n]) for n in (1, 2)}
GGUF |= {"mmproj-Q8_0.gguf": b"tower", "../tiny-Q5_0.gguf": b"outside", "README.md": b"about"}


@pytest.mark.parametrize(
    ("ending", "file", "num_files"),
    [
        ("", "tiny-Q4_K_M.gguf", 1),
        (":Q4_K_M", "tiny-Q4_K_M.gguf", 1),
        (":q4_k_m", "tiny-Q4_K_M.gguf", 1),
        (":UD-Q8_0", "tiny-UD-Q8_0.gguf", 1),
        (":tiny-Q8_0", "tiny-Q8_0.gguf", 1),
        (":BF16", "BF16/tiny-BF16-00001-of-00002.gguf", 2),
    ],
)
def test_gguf_models_are_named_by_their_ending(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, ending: str, file: str, num_files: int
) -> None:
    hub.repositories[MODEL][OLD] = GGUF
    path = resolve(MODEL + ending, endpoint=hub.url, cache_dir=cache)
    assert path.parts[-len(Path(file).parts) :] == Path(file).parts
    assert path.read_bytes() == GGUF[file]
    assert len(hub.files_asked()) == num_files + 1  # the tower, too
    assert path.parents[file.count("/")].joinpath("mmproj-Q8_0.gguf").read_bytes() == b"tower"
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    assert resolve(MODEL + ending, endpoint=hub.url, cache_dir=cache) == path


@pytest.mark.parametrize(
    ("ending", "less", "message"),
    [
        (":Q3_K_S", "", "no GGUF file ends in 'Q3_K_S'"),
        (":Q5_0", "", "no GGUF file ends in 'Q5_0'"),
        (":Q8_0", "", "2 GGUF files end in 'Q8_0'"),
        (":4_K_M", "", "no GGUF file ends in '4_K_M'"),
        ("", "tiny-Q4_K_M.gguf", "3 GGUF models, none of them Q4_K_M"),
        (":BF16", "BF16/tiny-BF16-00001-of-00002.gguf", "parts of 'BF16/tiny-BF16' are missing: 1 are there"),
    ],
)
def test_gguf_models_that_are_not_there(hub: Hub, cache: Path, ending: str, less: str, message: str) -> None:
    hub.repositories[MODEL][OLD] = {name: data for name, data in GGUF.items() if name != less}
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(MODEL + ending, endpoint=hub.url, cache_dir=cache)
    assert "tiny-Q8_0" in str(caught.value) or less.startswith("BF16")
    assert not hub.files_asked()


def test_an_ending_asks_for_gguf_even_beside_safetensors(hub: Hub, cache: Path) -> None:
    with pytest.raises(ConfigError, match="no GGUF files"):
        resolve(MODEL + ":Q4_0", endpoint=hub.url, cache_dir=cache)
    hub.repositories[MODEL][OLD]["tiny-Q4_0.gguf"] = b"GGUF"
    assert resolve(MODEL, endpoint=hub.url, cache_dir=cache).is_dir()
    assert resolve(MODEL + ":Q4_0", endpoint=hub.url, cache_dir=cache).read_bytes() == b"GGUF"


@pytest.mark.parametrize("other", ["tiny.mmproj-Q8_0", "mmproj-BF16-Q8_0", "imatrix-Q8_0", "tiny.imatrix"])
def test_projectors_and_statistics_are_no_models(hub: Hub, cache: Path, other: str) -> None:
    hub.repositories[MODEL][OLD] = {"tiny.Q8_0.gguf": b"GGUF", f"{other}.gguf": b"of the model"}
    for ending in ("", ":Q8_0"):
        assert resolve(MODEL + ending, endpoint=hub.url, cache_dir=cache).name == "tiny.Q8_0.gguf"


def test_no_gguf_file_is_fetched_to_look_at_a_model(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[MODEL][OLD] = GGUF
    assert not resolve(MODEL, weights=False, endpoint=hub.url, cache_dir=cache).exists()
    assert not hub.files_asked()
    monkeypatch.setattr("quire.weights.hub.resolve", lambda *_, **__: cache / "tiny-Q4_K_M.gguf")
    with pytest.raises(ConfigError, match=r"is in tiny-Q4_K_M\.gguf, which is not here"):
        open_model(MODEL, weights=False)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "not found on the hub"),
        (404, "RepoNotFound", "not found on the hub"),
        (401, "", "not found on the hub"),
        (401, "GatedRepo", "access is not granted"),
        (403, "GatedRepo", "access is not granted"),
        (403, "", "access is not granted"),
        (404, "RevisionNotFound", "has no revision 'main'"),
        (500, "", "cannot be reached"),
    ],
)
def test_refusals_are_one_clear_error(hub: Hub, cache: Path, status: int, code: str, message: str) -> None:
    hub.refuse[MODEL] = (status, code)
    with pytest.raises(ConfigError, match=message) as caught:
        fetch(hub, cache)
    assert MODEL in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_nobody_listening_is_one_clear_error(hub: Hub, cache: Path) -> None:
    hub.server_close()
    with pytest.raises(ConfigError, match=r"cannot be reached \(.*no complete copy"):
        fetch(hub, cache)


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        "a/b/c",
        "../org/tiny",
        "org/../../etc",
        "/etc/nothing/here",
        "./nothing",
        "~nobody/x",
        "~nosuchuserhere/x",
        "org/" + "x" * 300,
        "org/tiny\0",
        "\0",
        "",
        "org/",
        "/tiny",
        "org/ti ny",
        "org\\tiny",
        "org/.tiny",
        "org/tiny--x",
        "https://host/org/tiny",
        "file:///etc/passwd",
        "org/" + "x" * 5000,
        "org/tïny",
        "org/tiny:",
        "org/tiny:Q4/../x",
        "org/tiny:a:b",
        "tiny:Q4_0",
        "org/tiny:" + "x" * 101,
    ],
)
def test_names_that_cannot_be_ids_never_reach_the_network(hub: Hub, cache: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        fetch(hub, cache, model)
    assert not hub.asked


@pytest.mark.parametrize(
    "revision", ["../../x", "a/../b", "/abs", "-x", "a b", "x\0", "x" * 999, "?a=b", "a%2e"]
)
def test_revisions_that_cannot_be_names_never_reach_the_network(hub: Hub, cache: Path, revision: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a branch, tag or commit"):
        fetch(hub, cache, revision=revision)
    assert not hub.asked


def test_local_folders_and_the_demo_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("demo") == DEMO
    (tmp_path / "llama-1b").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("demo") == DEMO
    assert resolve("./demo") == Path("demo")
    assert resolve(str(tmp_path / "llama-1b")) == tmp_path / "llama-1b"
    assert resolve("llama-1b") == Path("llama-1b")
    file = tmp_path / "llama-1b" / "x.safetensors"
    file.touch()
    assert resolve(str(file)) == file
    with pytest.raises(ConfigError, match="is a local folder"):
        resolve("llama-1b", "main")
    for wrong in ("lama-1b", str(tmp_path / "llama-1B"), "./llama-1"):
        with pytest.raises(ConfigError, match="no such folder") as caught:
            resolve(wrong)
        assert "did you mean" in str(caught.value)
        assert "llama-1b" in str(caught.value)
    (tmp_path / "demo").rmdir()
    for wrong, hint in (("dem", "did you mean 'demo'?"), ("llm-8b-v2", "give the path"), ("./dem", "give")):
        with pytest.raises(ConfigError) as caught:
            resolve(wrong)
        assert (caught.value.hint or "").startswith(hint)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs huggingface_hub") as caught:
        resolve("org/tiny")
    assert "pip install 'quire[hub]'" in str(caught.value)


def test_the_users_own_settings_are_honoured(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME, read when the client is first imported: in a process of its own."""
    code = f"from quire.weights.hub import resolve; print(resolve({MODEL!r}))"
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def run(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-O", "-c", code],
            env={**settings, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    folder = run()
    assert folder == str(tmp_path / "hub" / "models--org--tiny" / "snapshots" / OLD)
    hub.asked.clear()
    assert run(HF_HUB_OFFLINE="1") == folder
    assert not hub.asked
