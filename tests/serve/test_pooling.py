"""Endpoints of models that give embeddings or scores, with OpenAI's SDK and without."""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from gguf_pooled import write_encoder_file
from server import Server, running
from tiny_encoders import write_bert, write_cross_encoder, write_embedding_gemma, write_encoder

TEXTS = ["a cat sat on the mat", "b", "dogs run far away"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(model=str(write_bert(tmp_path_factory.mktemp("models") / "bert"))) as server:
        yield server


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(model=str(write_cross_encoder(tmp_path_factory.mktemp("models") / "cross"))) as server:
        yield server


@pytest.mark.parametrize("model", ["embedder", "scorer"])
def test_the_first_request_that_is_printed_is_answered(model: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(model)
    printed = re.search(rf"curl {re.escape(server.url)}(\S+) [^{{]*-d '({{.*}})'", server.log)
    assert printed is not None, server.log
    with server.client() as client:
        reply = client.post(printed[1], content=printed[2], headers={"Content-Type": "application/json"})
    assert reply.status_code == 200, reply.text


def ask(server: Server, path: str, **body: Any) -> Any:
    with server.client() as client:
        reply = client.post(path, json=body)
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"])


def test_ollama_embeds_texts(embedder: Server) -> None:
    numbers = [one["embedding"] for one in ask(embedder, "/v1/embeddings", input=TEXTS)["data"]]
    found = ask(embedder, "/api/embed", input=TEXTS, keep_alive=0, options={"num_thread": 1, "top_k": 1})
    assert found["embeddings"] == numbers
    assert found["prompt_eval_count"] > 20
    assert found["total_duration"] > 0
    assert found["warnings"] == ["option 'top_k' has no effect on embeddings"]
    assert ask(embedder, "/api/embeddings", prompt=TEXTS[0]) == {"embedding": numbers[0]}
    assert ask(embedder, "/api/embed")["embeddings"] == []
    short = ask(embedder, "/api/embed", input=TEXTS[0], dimensions=4, model=found["model"] + ":latest")
    assert [len(one) for one in short["embeddings"]] == [4]
    long = "a " * 200
    assert len(ask(embedder, "/api/embed", input=long)["embeddings"]) == 1
    status, error = ask(embedder, "/api/embed", input=long, truncate=False)
    assert status == 400
    assert "40 tokens" in error
    assert ask(embedder, "/api/show")["capabilities"] == ["embedding"]


def test_files_of_llama_cpp(embedder: Server, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    with running(model=str(write_encoder_file(folder, tmp_path / "bert.gguf", 1))) as server:
        for path, body in (("/v1/embeddings", {"input": TEXTS}), ("/api/embed", {"input": TEXTS})):
            found, known = (ask(one, path, **body) for one in (server, embedder))
            key = "data" if "data" in known else "embeddings"
            assert found[key] == known[key]
    folder = write_encoder(tmp_path / "ranking", "XLMRobertaForSequenceClassification", "score")
    replies = []
    for model in (folder, write_encoder_file(folder, tmp_path / "ranking.gguf", None)):
        with running(model=str(model)) as server:
            replies.append(ask(server, "/rerank", query="a cat", documents=TEXTS)["results"])
    assert replies[0] == replies[1]
    assert len({one["relevance_score"] for one in replies[0]}) == len(TEXTS)


def test_openai_embeds_with_dense_modules(tmp_path: Path) -> None:
    with (
        running(model=str(write_embedding_gemma(tmp_path / "model"))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (name,) = (model.id for model in client.models.list())
        found = client.embeddings.create(model=name, input=TEXTS)
        assert [len(one.embedding) for one in found.data] == [12, 12, 12]
        assert len(client.embeddings.create(model=name, input="a", dimensions=6).data[0].embedding) == 6
        with pytest.raises(openai.BadRequestError, match="embeddings of this model have 12 numbers"):
            client.embeddings.create(model=name, input="a", dimensions=16)
        with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
            client.completions.create(model=name, prompt="a")


def test_openai_embeds_texts_and_tokens(embedder: Server) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        (name,) = (model.id for model in client.models.list())
        found = client.embeddings.create(model=name, input=TEXTS)  # base64, which the SDK decodes
        assert [one.index for one in found.data] == [0, 1, 2]
        plain = client.embeddings.create(model=name, input=TEXTS, encoding_format="float")
        for one, other in zip(found.data, plain.data, strict=True):
            np.testing.assert_array_equal(np.float32(one.embedding), np.float32(other.embedding))
        assert found.usage.prompt_tokens == found.usage.total_tokens > 20
        ids = [2, 5, 3]
        both = client.embeddings.create(model=name, input=[ids, ids], dimensions=4, encoding_format="float")
        assert both.data[0].embedding == both.data[1].embedding
        assert np.linalg.norm(both.data[0].embedding) == pytest.approx(1, abs=1e-6)
        assert both.usage.prompt_tokens == 6
        one = client.embeddings.create(model=name, input=ids, encoding_format="float").data
        assert len(one) == 1
        with pytest.raises(openai.BadRequestError, match="gives embeddings of texts: it generates none"):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="gives embeddings of texts: it generates none"):
            client.completions.create(model=name, prompt="hi")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


def test_base64_is_little_endian_float32(embedder: Server) -> None:
    plain = ask(embedder, "/v1/embeddings", input="a cat")["data"][0]["embedding"]
    coded = ask(embedder, "/v1/embeddings", input="a cat", encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(plain)}f", b64decode(coded))) == plain


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": ["a", 1]}, "input", "mixes"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [[99]]}, "input", "vocabulary"),
        ({"input": "a " * 60}, "input", "40 tokens"),
        ({"input": "a", "dimensions": 17}, "dimensions", "16 numbers"),
        ({"input": "a", "dimensions": 0}, "dimensions", "16 numbers"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "query"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 40"),
        ({"input": ["a"] * 2049}, "input", "2,048"),
        ({}, "input", "missing"),
    ],
)
def test_requests_for_embeddings_that_are_refused(
    body: dict[str, Any], param: str, words: str, embedder: Server
) -> None:
    status, error = ask(embedder, "/v1/embeddings", **body)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


def test_scores_and_ranks(scorer: Server) -> None:
    query, documents = "a cat", ["dogs run", "a cat", "zebra"]
    found = ask(scorer, "/v1/score", text_1=query, text_2=documents)
    scores = [one["score"] for one in found["data"]]
    assert len(set(scores)) == 3
    assert all(0 < one < 1 for one in scores)
    assert found == {**found, "object": "list", "usage": {"prompt_tokens": 37, "total_tokens": 37}}
    assert ask(scorer, "/score", queries=query, documents=documents)["data"] == found["data"]
    raw = ask(scorer, "/score", text_1=query, text_2=documents, use_activation=False)["data"]
    np.testing.assert_allclose(1 / (1 + np.exp([-one["score"] for one in raw])), scores, rtol=1e-6)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = ask(scorer, path, query=query, documents=["dogs run", {"text": "a cat"}, "zebra"], top_n=2)
        best = sorted(range(3), key=lambda i: -scores[i])[:2]
        assert [one["index"] for one in ranked["results"]] == best
        assert [one["relevance_score"] for one in ranked["results"]] == [scores[i] for i in best]
        assert [one["document"]["text"] for one in ranked["results"]] == [documents[i] for i in best]
    bare = ask(scorer, "/rerank", query=query, documents=documents, return_documents=False)["results"]
    assert all(one.keys() == {"index", "relevance_score"} for one in bare)
    assert ask(scorer, "/score", text_1=[query], text_2=[])[0] == 400
    assert ask(scorer, "/score", text_1=[query] * 2, text_2=documents)[0] == 400
    assert ask(scorer, "/rerank", query=query, documents=[])[0] == 400
    assert ask(scorer, "/rerank", query=query, documents=documents, instruction="x")[0] == 400
    status, error = ask(scorer, "/v1/embeddings", input="a")
    assert (status, "/rerank" in error["message"]) == (400, True)


def test_an_embedding_model_ranks_by_cosine(embedder: Server) -> None:
    ranked = ask(embedder, "/rerank", query="a cat", documents=["dogs run", "a cat"])["results"]
    assert ranked[0]["index"] == 1
    assert ranked[0]["relevance_score"] == pytest.approx(1)
    assert -1 <= ranked[1]["relevance_score"] < 1


def test_a_model_that_generates_gives_no_vectors(server: Server) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        status, error = ask(server, path, **body)
        assert (status, "generates text" in error["message"]) == (400, True)
