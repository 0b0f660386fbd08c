"""Resolve the name of a model to its folder: a local path, the embedded demo, or a hub download.

A download uses one commit: the revision is resolved once, and every file is fetched at that commit. Only
files that are read are fetched, and the repository is checked for safetensors before downloading gigabytes.
Of GGUF files a single model is fetched: that named after a colon ("organisation/name:Q8_0"), or Q4_K_M; and
the vision tower that the repository has for it.
`huggingface_hub` (extra "hub") does the transfers, with progress bars, resumed retries, and a cache in which
complete files are never fetched again.
"""

from __future__ import annotations

import difflib
import glob
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quire.environment import hub_offline
from quire.errors import ConfigError
from quire.weights.folder import ModelFolder
from quire.weights.gguf.choice import choose_gguf, towers_by_preference
from quire.weights.gguf.model import GgufModel, is_gguf, only_gguf
from quire.weights.safetensors import INDEX_NAME, read_index, weight_files
from quire.weights.sentence import MODULE_SETTINGS, MODULE_WEIGHTS, SETTINGS
from quire.weights.source import ModelSource, OverriddenSource
from quire.weights.templates import ADDITIONAL
from quire.weights.vocabularies.files import FILES as VOCABULARIES

DEMO = Path(__file__).parent.parent / "assets" / "demo"
EMBEDDED = {"demo": DEMO, "demo-draft": DEMO.with_name("demo-draft")}

# Files fetched besides weights. Weights are listed by name; code and pickles are never fetched.
PATTERNS = (
    "config.json",
    "hf_quant_config.json",
    "quant*_config.json",
    "generation_config.json",
    "*processor_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.json",
    "chat_template*.jinja",
    *SETTINGS,
    INDEX_NAME,
)

_LOG = logging.getLogger(__name__)
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_ENDING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+/-]{0,200}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 15.0


def resolve(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Return the folder (or file) of an embedded model, an existing path, or a hub id "organisation/name".

    Of a repository of GGUF files it is a file; the end of its name may follow the id after a colon.
    `revision` is a branch, tag or commit of a hub model (default "main"); without `weights` only the
    small files are fetched, of GGUF files none. `endpoint` and `cache_dir` default to those of
    huggingface_hub (HF_ENDPOINT, HF_HOME). Raises ConfigError if the model cannot be obtained: not found, no
    access, neither network nor cache, no weights in a format that is read.
    """
    if model in EMBEDDED:
        return EMBEDDED[model]
    if (path := _local(model)) is not None:
        if revision is not None:
            raise ConfigError(f"revision = {revision!r}, but {model!r} is a local folder", "leave it out")
        return path
    if model.lower().endswith(".gguf"):
        raise ConfigError(f"model {model[:200]!r}: no such file", _nearest(model))
    name, colon, ending = model.partition(":")
    if not _ID.fullmatch(name) or ".." in name or "--" in name or (colon and not _ENDING.fullmatch(ending)):
        raise ConfigError(
            f"model {model[:200]!r}: no such folder, and not a hub id",
            _nearest(model) or "give the path of a model's folder, or an id such as 'organisation/name'",
        )
    revision = revision or "main"
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ConfigError(f"revision = {revision[:200]!r} is not the name of a branch, tag or commit")
    return _Repository(name, ending or None, revision, endpoint, cache_dir, weights).fetch()


def open_model(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Open the model of this name, found by `resolve`: a folder, or GGUF files.

    `overrides` replace fields of its configuration.
    """
    path = resolve(model, revision, weights=weights)
    if not weights and not path.exists():
        hint = f"fetch it, as `quire run {model}` does"
        raise ConfigError(f"model {model!r}: all that it says is in {path.name}, which is not here", hint)
    gguf = path if is_gguf(path) else only_gguf(path)
    source: ModelSource = ModelFolder.at(path) if gguf is None else GgufModel(gguf)
    return OverriddenSource(source, overrides) if overrides else source


def _local(model: str) -> Path | None:
    """Return the path named by `model`, if it exists."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, unknown user
        return None


def _nearest(model: str) -> str | None:
    """Return a hint with the closest name: "demo", or a sibling folder or file."""
    try:
        path = Path(model).expanduser()
        beside = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError, RuntimeError):
        return None
    if path.name == model:
        beside.append("demo")
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.6)
    return f"did you mean {str(path.parent / near[0])!r}?" if near else None


class _Repository:
    """One model of the hub at one revision: safetensors, or a GGUF file whose name has this ending."""

    def __init__(
        self,
        model: str,
        ending: str | None,
        revision: str,
        endpoint: str | None,
        cache_dir: Path | None,
        weights: bool,
    ) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            raise ConfigError(
                f"model {model!r}: no such folder, and fetching from the hub needs huggingface_hub",
                "pip install 'quire[hub]'",
            ) from error
        self._hub: Any = huggingface_hub
        self.model, self.ending, self.revision = model, ending, revision
        self._endpoint, self._cache_dir, self._weights = endpoint, cache_dir, weights

    def fetch(self) -> Path:
        """Return the folder with all files, or the GGUF file: from the network, or the cache if offline."""
        if hub_offline():
            return self._from_cache("no network was asked for (HF_HUB_OFFLINE or QUIRE_OFFLINE)")
        try:
            info = self._hub.HfApi(endpoint=self._endpoint).model_info(
                self.model, revision=self.revision, timeout=_TIMEOUT_S
            )
        except Exception as error:  # network errors depend on the version of the hub's client
            if (refusal := self._refusal(error)) is not None:
                raise refusal from error
            reason = f"the hub cannot be reached ({_brief(error)})"
            folder = self._from_cache(reason)
            _LOG.warning("%s: %s; using the copy in the cache: %s", self.model, reason, folder)
            return folder
        names = [sibling.rfilename for sibling in info.siblings or ()]
        if self._is_gguf(names):
            folder, file = self._take_gguf(info.sha, names, local=False)
        else:
            weight_files([name for name in names if "/" not in name], f"{self.model} at {info.sha}")
            folder, file = self._take(info.sha, names, local=False), ""
        if self._weights:
            self._remember(folder, info.sha)
        return folder / file

    def _from_cache(self, reason: str) -> Path:
        try:
            folder = self._snapshot(self.revision, PATTERNS, local=True)
            names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
            if self._is_gguf([path.name for path in folder.iterdir()] + names):
                return folder.joinpath(*self._take_gguf(self.revision, names, local=True))
            return self._take(self.revision, None, local=True)
        except ConfigError as error:
            raise ConfigError(
                f"model {self.model!r} at {self.revision!r}: {reason}, and the cache holds no complete copy",
                "connect once to fetch it, or give the path of a folder",
            ) from error

    def _is_gguf(self, names: Sequence[str]) -> bool:
        """Return True if a GGUF file is asked for, or there is nothing else among these files."""
        if self.ending is not None:
            return True
        return any(n.lower().endswith(".gguf") for n in names) and not any(
            n.endswith(".safetensors") and "/" not in n for n in names
        )

    def _take_gguf(self, revision: str, names: Sequence[str], local: bool) -> tuple[Path, str]:
        """Fetch a GGUF model, and its vision tower; return the folder and the name of its first file."""
        files = choose_gguf(names, self.ending, f"{self.model} at {revision}")
        wanted = (*files, *towers_by_preference(names)[:1]) if self._weights else ()
        folder = self._snapshot(revision, map(glob.escape, wanted), local)
        return folder, files[0]

    def _take(self, revision: str, names: list[str] | None, local: bool) -> Path:
        """Fetch small files, then the weights they name. `names` are the files of the repository."""
        if names:
            others = () if "tokenizer.json" in names else VOCABULARIES
            small = [glob.escape(name) for name in names if _is_small(name) or name in others]
        else:
            small = [*PATTERNS, *VOCABULARIES]
        folder = self._snapshot(revision, small, local)
        if not self._weights:
            return folder
        (chosen,) = weight_files(names or [file.name for file in folder.iterdir()], str(folder))
        weights = [chosen]
        if chosen == INDEX_NAME:
            weights = sorted(set(read_index(folder / INDEX_NAME).values()))
            if names is not None and (absent := sorted(set(weights) - set(names))):
                raise ConfigError(f"{self.model}: {INDEX_NAME} names {absent[0]!r}, which is not there")
        weights += [name for name in names or () if fnmatchcase(name, MODULE_WEIGHTS)]
        self._snapshot(revision, [glob.escape(name) for name in weights], local)
        if absent := [name for name in weights if not (folder / name).exists()]:
            raise ConfigError(f"{folder / absent[0]}: no such file")
        return folder

    def _snapshot(self, revision: str, patterns: Iterable[str], local: bool) -> Path:
        try:
            return Path(
                self._hub.snapshot_download(
                    self.model,
                    revision=revision,
                    allow_patterns=[*patterns],
                    # A * in patterns would also match subfolders. Names as listed have none.
                    ignore_patterns=["*/*"] if local else None,
                    local_files_only=local,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                )
            )
        except Exception as error:
            raise self._refusal(error) or ConfigError(
                f"model {self.model!r}: the download did not finish ({_brief(error)})",
                "run it again: files that are complete are kept",
            ) from error

    def _refusal(self, error: Exception) -> ConfigError | None:
        """Return the hub's response as a readable error; None if there was no response."""
        errors, what = self._hub.errors, f"model {self.model!r}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError) or status == 403:
            hint = "accept its terms on the hub's page of the model, then `hf auth login`"
            return ConfigError(f"{what}: access is not granted", hint)
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"{what} has no revision {self.revision!r}", "give a branch, tag or commit")
        if isinstance(error, errors.EntryNotFoundError):
            return None
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
            hint = _nearest(self.model) or "check the name; for a private model, `hf auth login` first"
            return ConfigError(f"{what}: not found on the hub, and no such folder", hint)
        return None

    def _remember(self, folder: Path, commit: str) -> None:
        """Record the commit of the revision, in the place used by huggingface_hub, for offline use.

        Written last, so that a recorded commit is complete.
        """
        if _COMMIT.fullmatch(self.revision):
            return
        ref = folder.parent.parent / "refs" / self.revision
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            partial = ref.with_name(ref.name + ".partial")
            partial.write_text(commit)
            partial.replace(ref)
        except OSError as error:
            _LOG.warning("%s cannot be written (%s): offline use will need the commit", ref, error.strerror)


def _is_small(name: str) -> bool:
    patterns = PATTERNS if "/" not in name else (*MODULE_SETTINGS, f"{ADDITIONAL}/*.jinja")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _brief(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
