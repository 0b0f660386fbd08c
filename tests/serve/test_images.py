"""Images through every API: read alike, found in the prefix cache, refused clearly, and in nobody's way."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from outside_values import VALUES
from PIL import Image
from server import Server, running
from tiny_vision import (
    CONFIG2,
    CONFIG4,
    CONFIG4E,
    CONFIG25,
    CONFIG_PADDLE,
    NUM_TOKENS,
    data_url,
    flat,
    picture,
    write_gemma3,
    write_gemma4,
    write_glm4v,
    write_internvl,
    write_llama4,
    write_llava,
    write_paddleocr_vl,
    write_pixtral,
    write_qwen3_vl,
)

from quire.cli.main import main

Object = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = "What is it?"
MAX_IMAGES = 3
GREEDY = {"temperature": 0}
SLOW_READING = """
import time
from quire.images.reader import ImageReader
read = ImageReader.read
ImageReader.read = lambda *asked: time.sleep(1.0) or read(*asked)
"""
QUICK_RESTARTS = """
import quire.server.remote as remote
Policy = remote.RestartPolicy
remote.RestartPolicy = lambda: Policy(first_delay_s=0.01, longest_delay_s=0.01, max_deaths=1000)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_qwen3_vl(tmp_path_factory.mktemp("models") / "seeing"))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose files may be named, beside one whose files may not."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "open").mkdir()
    (folder / "open" / "cat.png").write_bytes(picture(1))
    (folder / "secret.png").write_bytes(picture(1))
    (folder / "open" / "link.png").symlink_to(folder / "secret.png")
    return folder


@pytest.fixture(scope="module")
def seeing(model: str, media: Path) -> Iterator[Server]:
    flags = ("--max-images", str(MAX_IMAGES), "--allowed-local-media-path", str(media / "open"))
    with running("--device", "reference", *flags, model=model) as server:
        yield server


@pytest.fixture
def sight(seeing: Server) -> Iterator[httpx.Client]:
    """A client of a model that sees."""
    with seeing.client() as client:
        yield client


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image_url(url: str) -> Object:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def user(*parts: Any) -> list[Object]:
    return [{"role": "user", "content": list(parts)}]


def chat_body(data: bytes, text: str = ASKED, **more: Any) -> Object:
    return {"messages": user(image_url(data_url(data)), {"type": "text", "text": text}), **more}


def post(client: httpx.Client, path: str, body: Object) -> Object:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: Object = reply.json()
    return found


def error_of(client: httpx.Client, path: str, body: Object) -> str:
    reply = client.post(path, json=body)
    assert reply.status_code == 400, (reply.status_code, reply.text)
    error = reply.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


# What each API answers: the number of tokens of its prompt, and its text


def by_chat(client: httpx.Client, data: bytes) -> tuple[int, str]:
    found = post(client, CHAT, chat_body(data, max_tokens=8, **GREEDY))
    return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]


def by_responses(client: httpx.Client, data: bytes) -> tuple[int, str]:
    image = {"type": "input_image", "image_url": data_url(data), "detail": "auto"}
    asked = user(image, {"type": "input_text", "text": ASKED})
    found = post(client, RESPONSES, {"input": asked, "max_output_tokens": 8, **GREEDY})
    return found["usage"]["input_tokens"], found["output"][0]["content"][0]["text"]


def anthropic_image(data: bytes) -> Object:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    return {"type": "image", "source": source}


def by_messages(client: httpx.Client, data: bytes) -> tuple[int, str]:
    asked = user(anthropic_image(data), {"type": "text", "text": ASKED})
    found = post(client, MESSAGES, {"messages": asked, "max_tokens": 8, **GREEDY})
    usage = found["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], found["content"][0]["text"]


def by_ollama_chat(client: httpx.Client, data: bytes) -> tuple[int, str]:
    messages = [{"role": "user", "content": ASKED, "images": [base64_of(data)]}]
    body = {"messages": messages, "stream": False, "options": {"num_predict": 8, **GREEDY}}
    found = post(client, "/api/chat", body)
    return found["prompt_eval_count"], found["message"]["content"]


def by_ollama_generate(client: httpx.Client, data: bytes) -> tuple[int, str]:
    options = {"num_predict": 8, **GREEDY}
    body = {"prompt": ASKED, "images": [base64_of(data)], "stream": False, "options": options}
    found = post(client, "/api/generate", body)
    return found["prompt_eval_count"], found["response"]


APIS: list[Callable[[httpx.Client, bytes], tuple[int, str]]] = [
    by_chat,
    by_responses,
    by_messages,
    by_ollama_chat,
    by_ollama_generate,
]


@pytest.mark.parametrize("ask", APIS)
def test_every_api_reads_an_image_alike(sight: httpx.Client, ask: Any) -> None:
    cat, dog = by_chat(sight, picture(1)), by_chat(sight, picture(2))
    assert cat[0] == dog[0] > NUM_TOKENS
    assert cat[1] != dog[1]
    assert ask(sight, picture(1)) == cat
    assert ask(sight, picture(2)) == dog


OTHERS: dict[str, Callable[[Path], Path]] = {
    "qwen 2": lambda folder: write_qwen3_vl(folder, flat(CONFIG2)),
    "qwen 2.5": lambda folder: write_qwen3_vl(folder, flat(CONFIG25)),
    "gemma 3": write_gemma3,
    "gemma 4": lambda folder: write_gemma4(folder, CONFIG4),
    "gemma 4, small": lambda folder: write_gemma4(folder, CONFIG4E),
    "glm 4.1": write_glm4v,
    "internvl": write_internvl,
    "llava": write_llava,
    "mistral 3": write_pixtral,
    "llama 4": write_llama4,
    "paddleocr": lambda folder: write_paddleocr_vl(folder, flat(CONFIG_PADDLE)),
}


@pytest.mark.parametrize("family", OTHERS)
def test_every_api_reads_an_image_alike_with_other_families(family: str, tmp_path: Path) -> None:
    model = str(OTHERS[family](tmp_path))
    with running("--device", "reference", model=model) as server, server.client() as client:
        cat, dog = by_chat(client, picture(1)), by_chat(client, picture(2))
        assert cat[0] == dog[0] > 16  # the tokens of an image
        assert logprobs(client, picture(1))[0] != logprobs(client, picture(2))[0]
        for ask in APIS:
            assert ask(client, picture(1)) == cat, ask.__name__


def test_a_stream_is_what_the_whole_is(sight: httpx.Client) -> None:
    body = chat_body(picture(1), max_tokens=8, stream=True, **GREEDY)
    with sight.stream("POST", CHAT, json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(deltas) == by_chat(sight, picture(1))[1]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_formats_without_loss_are_the_same_picture(sight: httpx.Client, kind: str) -> None:
    pixels = Image.open(io.BytesIO(picture(1)))
    file = io.BytesIO()
    pixels.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert by_chat(sight, file.getvalue()) == by_chat(sight, picture(1))


def test_a_larger_picture_has_more_tokens_and_its_own_shape(sight: httpx.Client) -> None:
    def num_tokens(width: int, height: int) -> int:
        return by_chat(sight, picture(1, width, height))[0] - by_chat(sight, picture(1))[0] + NUM_TOKENS

    assert num_tokens(56, 24) == 7 * 3
    assert num_tokens(1000, 1000) == 8 * 8  # no more than its processor allows


def logprobs(client: httpx.Client, data: bytes, **more: Any) -> tuple[list[float], int]:
    """The log-probabilities of an answer, and the tokens of its prompt found in the cache."""
    found = post(client, CHAT, chat_body(data, max_tokens=6, logprobs=True, **GREEDY, **more))
    entries = found["choices"][0]["logprobs"]["content"]
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [entry["logprob"] for entry in entries], cached


def test_the_prefix_cache_knows_images_apart(sight: httpx.Client) -> None:
    cold, _ = logprobs(sight, picture(11), text="Look")
    warm, cached = logprobs(sight, picture(11), text="Look")
    assert cached == 32
    assert warm == cold
    other, cached = logprobs(sight, picture(12), text="Look")
    assert cached == 0
    assert other != cold


def test_two_images_in_their_order(sight: httpx.Client) -> None:
    cat, dog = (image_url(data_url(picture(seed))) for seed in (1, 2))

    def answer(*parts: Object) -> list[Object]:
        body = {"messages": user(*parts), "max_tokens": 4, "logprobs": True, **GREEDY}
        entries: list[Object] = post(sight, CHAT, body)["choices"][0]["logprobs"]["content"]
        return entries

    text = {"type": "text", "text": "Both?"}
    assert answer(cat, dog, text) != answer(dog, cat, text)


def test_images_that_tools_return(sight: httpx.Client) -> None:
    """Each API has its own form of a result with an image; the prompts are the same."""
    call: Object = {"id": "A", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = [{"type": "text", "text": "seen:"}, image_url(data_url(picture(1)))]
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "A", "content": result},
    ]
    counted = post(sight, "/tokenize", {"messages": turns})["count"]
    items = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "A", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "A",
            "output": [
                {"type": "input_text", "text": "seen:"},
                {"type": "input_image", "image_url": data_url(picture(1))},
            ],
        },
    ]
    assert post(sight, f"{RESPONSES}/input_tokens", {"input": items})["input_tokens"] == counted
    blocks = [{"type": "text", "text": "seen:"}, anthropic_image(picture(1))]
    said: list[Object] = [
        *[{"role": "user", "content": "Look"}],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "A", "name": "look", "input": {}}]},
        *user({"type": "tool_result", "tool_use_id": "A", "content": blocks}),
    ]
    assert post(sight, f"{MESSAGES}/count_tokens", {"messages": said})["input_tokens"] == counted
    text = post(sight, "/apply-template", {"messages": turns})["prompt"]
    assert "seen:<|vision_start|><|image_pad|><|vision_end|>" in text


def test_tokenize_returns_the_prompt(sight: httpx.Client) -> None:
    body = chat_body(picture(1), max_tokens=1, return_token_ids=True)
    ids = post(sight, "/tokenize", {"messages": body["messages"]})["tokens"]
    assert ids == post(sight, CHAT, body)["prompt_token_ids"]


def test_what_looks_like_an_image_in_a_text_is_text(sight: httpx.Client) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    assert by_chat(sight, picture(1)) != by_text(sight, text)
    body = chat_body(picture(1), text=text, max_tokens=1)
    assert post(sight, CHAT, body)["usage"]["prompt_tokens"] > by_chat(sight, picture(1))[0]


def by_text(client: httpx.Client, text: str) -> tuple[int, str]:
    found = post(client, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **GREEDY})
    return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]


def test_the_packages_of_openai_and_anthropic(seeing: Server, sight: httpx.Client) -> None:
    cat, url = by_chat(sight, picture(1)), data_url(picture(1))
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="any", max_retries=0) as package:
        parts: Any = [image_url(url), {"type": "text", "text": ASKED}]
        said = package.chat.completions.create(
            model="seeing", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0
        )
        assert (said.usage and said.usage.prompt_tokens, said.choices[0].message.content) == cat
        parts = [{"type": "input_image", "image_url": url, "detail": "low"}]
        parts.append({"type": "input_text", "text": ASKED})
        asked: Any = [{"role": "user", "content": parts}]
        told = package.responses.create(model="seeing", input=asked, max_output_tokens=8, temperature=0)
        assert told.output_text == cat[1]
    with anthropic.Anthropic(base_url=seeing.url, api_key="any", max_retries=0) as other:
        turns: Any = user(anthropic_image(picture(1)), {"type": "text", "text": ASKED})
        wrote = other.messages.create(model="seeing", max_tokens=8, messages=turns, extra_body=GREEDY)
        assert [block.text for block in wrote.content if block.type == "text"] == [cat[1]]
        assert other.messages.count_tokens(model="seeing", messages=turns).input_tokens == cat[0]


def test_a_file_of_requests_may_have_images(sight: httpx.Client, model: str, tmp_path: Path) -> None:
    body = chat_body(picture(1), max_tokens=8, **GREEDY)
    wrong = {"messages": user(image_url("http://a/b.png"))}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": one}
        for number, one in enumerate((body, wrong))
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["-o", str(tmp_path / "out"), "--model", model, "--device", "reference"]
    with pytest.raises(SystemExit):
        main(["batch", str(tmp_path / "in"), *flags])
    found = {one["custom_id"]: one for one in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    answer = found["0"]["response"]["body"]
    text = answer["choices"][0]["message"]["content"]
    assert (answer["usage"]["prompt_tokens"], text) == by_chat(sight, picture(1))
    assert "fetches nothing from the network" in found["1"]["error"]["message"]


PLACE = "?"  # of an odd value
ODDLY: list[tuple[str, Object]] = [
    (CHAT, {"messages": user({"type": "image_url", "image_url": PLACE})}),
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": PLACE}})}),
    (RESPONSES, {"input": user({"type": "input_image", "image_url": PLACE})}),
    (MESSAGES, {"messages": user({"type": "image", "source": PLACE}), "max_tokens": 1}),
    (MESSAGES, {"messages": user(anthropic_image(b"") | {"source": {"type": PLACE}}), "max_tokens": 1}),
    (
        MESSAGES,
        {
            "messages": user(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PLACE}}
            ),
            "max_tokens": 1,
        },
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [PLACE]}]}),
]


@pytest.mark.parametrize("value", VALUES)
def test_odd_values_in_place_of_images(sight: httpx.Client, value: str) -> None:
    for path, body in ODDLY:
        content = json.dumps(body).replace(json.dumps(PLACE), VALUES[value]).encode()
        reply = sight.post(path, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, (path, reply.text[:300])
        assert len(reply.text) < 1000


# Files


def test_a_file_in_the_folder_that_is_allowed(sight: httpx.Client, media: Path) -> None:
    by_name = {**chat_body(b""), "max_tokens": 8, **GREEDY}
    by_name["messages"][0]["content"][0] = image_url((media / "open" / "cat.png").as_uri())
    found = post(sight, CHAT, by_name)
    assert found["choices"][0]["message"]["content"] == by_chat(sight, picture(1))[1]


@pytest.mark.parametrize("name", ["secret.png", "open/link.png", "open/../secret.png", "open/none.png"])
def test_a_file_elsewhere_is_not_read(sight: httpx.Client, media: Path, name: str) -> None:
    words = "cannot be read" if "none" in name else "not in the folder"
    message = error_of(sight, CHAT, {"messages": user(image_url(f"file://{media}/{name}"))})
    assert words in message
    assert str(media) not in message


# Refusals


def bomb() -> bytes:
    """A small file of more pixels than are decoded."""
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return file.getvalue()


REFUSED: dict[str, tuple[str, str]] = {
    "network": ("https://127.0.0.1:1/a.png", "fetches nothing from the network"),
    "scheme": ("ftp://127.0.0.1/a.png", "this is not an image"),
    "text": ("data:text/plain;base64,aGk=", "this is not an image"),
    "base64": ("data:image/png;base64,a!", "not valid base64"),
    "empty": ("data:image/png;base64,", "not a picture"),
    "other": (data_url(b"<svg/>"), "not a picture"),
    "damaged": (data_url(picture(1)[:-2000]), "damaged"),
    "bomb": (data_url(bomb()), "a picture of 9000 x 9000 pixels has more than 64,000,000"),
    "narrow": (data_url(picture(1, 1000, 2)), "too narrow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused(sight: httpx.Client, name: str) -> None:
    url, words = REFUSED[name]
    reply = sight.post(CHAT, json={"messages": user({"type": "text", "text": "x"}, image_url(url))})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == "messages[0].content[1].image_url"
    block = {"type": "image", "source": {"type": "url", "url": url}}
    message = error_of(sight, MESSAGES, {"messages": user(block), "max_tokens": 1})
    assert message.startswith("messages[0].content[0]: ")
    assert words in message
    message = error_of(sight, RESPONSES, {"input": user({"type": "input_image", "image_url": url})})
    assert message.startswith("input[0].content[0]: ")
    assert words in message
    assert by_chat(sight, picture(1))  # the server goes on


NEITHER: dict[str, tuple[str, Object, str]] = {
    "many": (CHAT, {"messages": user(*[image_url(data_url(picture(1)))] * 4)}, "a request may have 3"),
    "no url": (CHAT, {"messages": user({"type": "image_url"})}, "has no image"),
    "audio": (CHAT, {"messages": user({"type": "input_audio", "input_audio": {}})}, "'input_audio' is not"),
    "video": (CHAT, {"messages": user({"type": "video_url", "video_url": {}})}, "'video_url' is not"),
    "cut": (CHAT, chat_body(picture(1), truncate_prompt_tokens=20), "images cannot be cut"),
    "file id": (RESPONSES, {"input": user({"type": "input_image", "file_id": "f"})}, "without image_url"),
    "source": (
        MESSAGES,
        {"messages": user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "max_tokens": 1},
        "the source of an image is not supported",
    ),
    "kind": (
        MESSAGES,
        {
            "messages": user(
                {"type": "image", "source": {"type": "base64", "media_type": "a/b", "data": "x"}}
            ),
            "max_tokens": 1,
        },
        "this is not an image",
    ),
    "ollama": ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images[0]: not a picture"),
    "raw": ("/api/generate", {"prompt": "x", "images": ["aGk="], "raw": True}, "raw uses the prompt"),
    "llama.cpp": ("/completion", {"prompt": "x", "image_data": [{"data": "", "id": 1}]}, "image_data"),
    "resizing": (CHAT, chat_body(picture(1), mm_processor_kwargs={"a": 1}), "--max-image-tokens"),
}


@pytest.mark.parametrize("name", NEITHER)
def test_other_requests_are_refused(sight: httpx.Client, name: str) -> None:
    path, body, words = NEITHER[name]
    assert words in error_of(sight, path, body)


def test_a_prompt_of_images_may_be_too_long(model: str) -> None:
    flags = ("--device", "reference", "--max-model-len", "64")
    with running(*flags, model=model) as server, server.client() as client:
        reply = client.post(CHAT, json=chat_body(picture(1, 1000, 1000)))
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert by_chat(client, picture(1))


# Models without sight


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(picture(1))),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [base64_of(picture(1))]}]}),
        ("/api/generate", {"prompt": "x", "images": [base64_of(picture(1))]}),
        ("/tokenize", {"messages": chat_body(picture(1))["messages"]}),
        ("/apply-template", {"messages": chat_body(picture(1))["messages"]}),
    ],
)
def test_a_model_that_reads_text_says_so(client: httpx.Client, path: str, body: Object) -> None:
    assert "this model reads no images" in error_of(client, path, body)


def test_servers_tell_whether_their_model_sees(sight: httpx.Client, client: httpx.Client) -> None:
    for one, sees in ((sight, True), (client, False)):
        assert one.get("/props").json()["modalities"] == {"vision": sees, "audio": False}
        shown = post(one, "/api/show", {})
        assert ("vision" in shown["capabilities"]) is sees
        listed = one.get("/api/tags").json()["models"][0]
        assert ("vision" in listed["capabilities"]) is sees


def test_images_can_be_left_out(model: str) -> None:
    flags = ("--device", "reference", "--max-images", "0")
    with running(*flags, model=model) as server, server.client() as client:
        assert "reads no images" in error_of(client, CHAT, chat_body(picture(1)))
        assert by_text(client, "Hi")[0]
        assert client.get("/props").json()["modalities"]["vision"] is False


# Beside other requests, other models, and deaths of the engine


def test_texts_never_wait_for_pictures(model: str) -> None:
    """More images than there are threads for texts are being read when a text comes."""
    with (
        running("--device", "reference", model=model, before=SLOW_READING) as server,
        server.client() as client,
        ThreadPoolExecutor(6) as threads,
    ):
        running_ = {threads.submit(by_chat, client, picture(seed)): "image" for seed in range(5)}
        running_[threads.submit(by_text, client, "Hi")] = "text"
        order = [running_[done] for done in as_completed(running_)]
    assert order[0] == "text"


def kill_engines(server: Server) -> None:
    pid = server.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == "quire-engine":
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("flags", [("--replicas", "2"), ()])
def test_the_engine_may_die(model: str, flags: tuple[str, ...]) -> None:
    """An image passes to each process that computes the request, whichever that is."""
    body = chat_body(picture(1), max_tokens=40, ignore_eos=True, stream=True, **GREEDY)
    with running("--device", "reference", *flags, model=model, before=QUICK_RESTARTS) as server:

        def answer(kill_at: int | None) -> str:
            pieces = []
            with server.client() as client, client.stream("POST", CHAT, json=body) as reply:
                lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
                for number, line in enumerate(lines):
                    if number == kill_at:
                        kill_engines(server)
                    if line != "[DONE]":
                        pieces.append(json.loads(line)["choices"][0]["delta"].get("content", ""))
            return "".join(pieces)

        undisturbed = answer(None)
        assert undisturbed
        assert answer(2) == undisturbed


def test_several_models_one_of_which_sees(model: str) -> None:
    with running("--device", "reference", model, model="demo") as server, server.client() as client:
        body = chat_body(picture(1), max_tokens=4, **GREEDY)
        assert post(client, CHAT, {**body, "model": "seeing"})["usage"]["prompt_tokens"] > NUM_TOKENS
        assert "reads no images" in error_of(client, CHAT, {**body, "model": "demo"})
        tags = client.get("/api/tags").json()["models"]
        seen = {tag["name"]: "vision" in tag["capabilities"] for tag in tags}
        assert seen == {"demo:latest": False, "seeing:latest": True}
