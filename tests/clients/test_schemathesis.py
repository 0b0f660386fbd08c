"""schemathesis reads /openapi.json and asks whatever that allows, and what it does not.

What may not be: a server error, an answer in another form than the document says, an unknown method that is
not refused as one. QUIRE_TEST_TIMES=10 asks for ten times as long.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from requests_over_http import idle, wait_for
from server import Server

schemathesis = pytest.importorskip("schemathesis")

SECONDS = 10 * int(os.environ.get("QUIRE_TEST_TIMES", "1"))
MIN_CASES = 300
# Left out: positive_data_acceptance, as a schema cannot say which fields go together; those of accounts.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
# What llama.cpp and Ollama have and this server has not: the only answer is 501.
REFUSED = "^/(infill|slots/.*|api/(embed|embeddings|pull|push|create|copy|delete|blobs/.*))$"


def test_the_document_is_valid(server: Server) -> None:
    schemathesis.openapi.from_url(f"{server.url}/openapi.json").validate()


def test_all_that_the_document_allows(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-time", str(SECONDS)]
    command += ["--exclude-path-regex", REFUSED, "--exclude-name", "POST /props"]
    command += ["--seed", "1", "--continue-on-failure", "--request-timeout", "30", "--warnings", "off"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:]
    found = re.search(r"(\d+) generated", run.stdout)
    assert found is not None, run.stdout
    assert int(found[1]) >= MIN_CASES
    wait_for(lambda: idle(server), 2.0, "nothing is left")
