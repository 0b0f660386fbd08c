"""Images as callers send them: sizes, formats, damage, limits, and their places in a prompt."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_vision import data_url, picture

from quire.errors import RequestError
from quire.images import reader as reader_module
from quire.images.decode_job import run
from quire.images.learned import Learned
from quire.images.normalization import Normalization
from quire.images.patches import MergedPatches, NaflexPatches
from quire.images.prompt import PromptImages, Source, digest, has_images, image_part, take_images
from quire.images.prompt import given as images_given
from quire.images.reader import ImageReader, Pixels
from quire.images.sizes import Cut, KeptShape, OneSquare, Tiles

PATCHING = MergedPatches(4, 2, 2, Learned(6, ends=True), 4 * 64, 40 * 64, Normalization())
TOKEN = 9


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    with closing(ImageReader(PATCHING)) as made:
        yield made


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    """What the job makes of a file at its own size."""
    found = run({"data": base64.b64encode(data).decode(), "max_pixels": 10**6, "size": OWN, "resample": 3})
    (part,) = found["parts"]
    return np.frombuffer(base64.b64decode(part["pixels"]), np.uint8).reshape(part["height"], -1, 3)


OWN = ["KeptShape", [1, 1, 10**6]]
HALVES = np.zeros((8, 4, 3), np.uint8)
HALVES[:4] = (250, 10, 30)


# Sizes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((37, 61), (40, 64)),  # 37 / 8 = 4.6 -> 5 rows, 61 / 8 = 7.6 -> 8
        ((4, 4), (16, 16)),  # at least 256 pixels
        ((1000, 1000), (48, 48)),  # at most 2,560: 50.6 a side, down to a multiple of 8
        ((10, 1000), (8, 320)),  # the shorter side is never nothing
        ((20, 20), (16, 16)),  # 2.5 is rounded to the even number, as Python and so transformers do
        ((28, 28), (32, 32)),
    ],
)
def test_a_shape_is_kept(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert PATCHING.size.of(*size) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([8, 28, 32]), st.integers(4, 2000))
def test_every_size_is_in_its_bounds(height: int, width: int, unit: int, most: int) -> None:
    rule = KeptShape(unit, 4 * unit**2, most * unit**2)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="too narrow"):
            rule.of(height, width)
        return
    found = rule.of(height, width)
    assert all(side % unit == 0 and side > 0 for side in found)
    assert found[0] * found[1] <= rule.max_pixels


def test_an_image_has_a_token_whatever_its_most_pixels_are() -> None:
    assert KeptShape(28, 1, 100).of(50, 300) == (28, 28)


def test_a_fixed_size_is_that() -> None:
    assert OneSquare(224).cut(1, 9999) == Cut((224, 224))


# Formats


def test_a_picture_without_loss_is_read_exactly(reader: ImageReader) -> None:
    (part,) = reader.read(picture(1), "x").parts
    pixels = np.frombuffer(part.values, np.uint8).reshape(40, 40, 3)
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(picture(1)))))
    assert reader.read(data_url(picture(1)), "x") == reader.read(picture(1), "x")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_camera_says_which_side_is_up(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # by half a turn
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100}
    turned = pixels_of(saved(Image.fromarray(HALVES), kind, exif=exif, **options))
    assert turned[0, 0, 0] < 30
    assert turned[-1, 0, 0] > 200


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "I;16", "CMYK", "RGB"])
def test_every_mode_becomes_three_colours(mode: str) -> None:
    image = Image.new("I;16", (8, 8), 60000) if mode == "I;16" else Image.new(mode, (8, 8))
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert pixels_of(saved(image, kind)).shape == (8, 8, 3)


def test_grey_of_16_bits_keeps_its_shades() -> None:
    """As scanners, microscopes and depth cameras write it: 257 shades are one of 8 bits."""
    shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 4
    found = pixels_of(saved(Image.fromarray(shades * 257)))
    np.testing.assert_array_equal(found, np.repeat(shades[..., None], 3, -1))


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("P", "GIF"), ("RGBA", "WEBP")])
def test_what_is_transparent_is_white(mode: str, kind: str) -> None:
    """Black writing on nothing, as in many logos and diagrams, would be black on black."""
    drawn = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    drawn.paste((0, 0, 0, 255), (0, 0, 4, 8))
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    found = pixels_of(saved(drawn if mode == "P" else drawn.convert(mode), kind, **options))
    assert found[:, :4].max() == 0
    assert found[:, 4:].min() == 255


def test_what_is_partly_transparent_is_mixed_with_white() -> None:
    colours = [(200, 100, 50, 255), (200, 100, 50, 51), (200, 100, 50, 0)]
    image = Image.new("RGBA", (3, 1))
    image.putdata(colours)
    found = pixels_of(saved(image.resize((24, 8), Image.Resampling.NEAREST)))
    assert [found[0, at].tolist() for at in (4, 12, 20)] == [[200, 100, 50], [244, 224, 214], [255] * 3]


def test_of_a_film_the_first_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels_of(data)[4, 4].tolist() == [255, 0, 0]


# What is refused, and that the process goes on


def bmp() -> bytes:
    return saved(Image.new("RGB", (8, 8)), "BMP")


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "nothing": (b"", "not a picture in one of the formats PNG, JPEG, WEBP, GIF"),
    "noise": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a picture"),
    "another format": (bmp(), "not a picture"),
    "damaged": (picture(1)[:-1500], "the file of the picture is damaged"),
    "damaged in the middle": (picture(1)[:500] + bytes(9) + picture(1)[509:], "damaged"),
    "pixels": (saved(Image.new("1", (9000, 9000))), "9000 x 9000 pixels has more than 64,000,000"),
    "narrow": (picture(1, 1000, 2), "1000 x 2 pixels is too narrow"),
    "base64": ("data:image/png;base64,iVBO?", "not valid base64"),
    "url": ("data:image/png,iVBO", "this is not an image"),
    "no url": ("iVBORw0KGgo=", "this is not an image"),
    "network": ("HTTPS://example.org/a.png", "fetches nothing from the network"),
    "bytes": (bytes(reader_module.MAX_BYTES + 1), "may have 20 MiB"),
    "base64 of many bytes": ("data:image/png;base64," + "A" * (28 << 20), "may have 20 MiB"),
    "file": ("file:///etc/passwd", "files of the server may not be named"),
}


def test_base64_may_have_lines(reader: ImageReader) -> None:
    """Encoders for mail, such as Ruby's and one of Python's, write them, and Ollama reads them."""
    lines = base64.encodebytes(picture(1)).decode()
    assert lines.count("\n") > 1
    for text in (lines, lines.replace("\n", "\r\n")):
        assert reader.read(f"data:image/png;base64,{text}", "x") == reader.read(picture(1), "x")


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_error(reader: ImageReader, name: str) -> None:
    source, words = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        reader.read(source, "images[3]")
    assert words in refused.value.message
    assert refused.value.message.startswith("images[3]")
    assert refused.value.param == "images[3]"
    assert reader.read(picture(1), "x").parts[0].height == 40


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"TIME_LIMIT_S": 1e-4}, "more than 0.0001 s"), ({"MEMORY_LIMIT_BYTES": 220 << 20}, "too much memory")],
)
def test_a_decoder_is_bounded(monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], words: str) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(reader_module, name, value)
    large = saved(Image.new("RGB", (6000, 6000)))
    with closing(ImageReader(PATCHING)) as reader, pytest.raises(RequestError, match=words):
        reader.read(large, "x")


def test_only_files_in_a_folder_may_be_named(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(picture(1))
    (inside / "link.png").symlink_to(outside / "a b.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    with closing(ImageReader(PATCHING, inside)) as reader:
        own = reader.read((inside / "a b.png").as_uri(), "x")
        assert own == reader.read(picture(1), "x")
        for name in ("../out/a%20b.png", "link.png", "loop.png", "none.png", "%00", "."):
            with pytest.raises(RequestError, match=r"not in the folder|cannot be read"):
                reader.read(f"file://{inside}/{name}", "x")
        with pytest.raises(RequestError, match="may not be named"):
            reader.read(f"file://elsewhere{inside}/a%20b.png", "x")


# Messages


def test_images_are_taken_out_of_messages() -> None:
    text = {"type": "text", "text": "and"}
    image = Image.new("RGB", (4, 4), "red")
    parts = [
        *[
            {"type": "image_url", "image_url": {"url": "data:1"}},
            text,
            {"type": "image_url", "image_url": "u"},
        ],
        *[{"type": "image", "image": b"file"}, {"type": "image", "url": "file:///a"}],
        *[image_part("data:2", "images[7]"), {"type": "image", "image": image}],
    ]
    messages: list[Any] = [{"role": "system", "content": "Hi"}, {"role": "user", "content": parts}, 3]
    taken, found = take_images(messages)
    assert [part["type"] for part in taken[1]["content"]] == ["image", "text", *["image"] * 5]
    assert taken[::2] == messages[::2]
    assert messages[1]["content"] is parts  # of the caller, as it was
    values = [one.value for one in found]
    assert values[:5] == ["data:1", "u", b"file", "file:///a", "data:2"]
    assert pixels_of(bytes(values[5]))[0, 0].tolist() == [255, 0, 0]
    assert found[0].where == "messages[1].content[0].image_url"
    assert found[2].where == "messages[1].content[3]"
    assert found[4].where == "images[7]"
    assert has_images(messages)
    assert not has_images([messages[0], 3, {"content": [text, "x"]}])


@pytest.mark.parametrize(
    "part",
    [{"type": "image"}, {"type": "image_url"}, {"type": "image_url", "image_url": {"url": 3}}],
)
def test_a_part_without_an_image_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\].* has no image"):
        take_images([{"role": "user", "content": [part]}])


def test_images_of_multi_modal_data() -> None:
    assert images_given({"image": b"x"}) == [Source(b"x", "multi_modal_data")]
    assert len(images_given({"image": [b"x", "y"]})) == 2
    for wrong in (None, {}, {"image": b"x", "audio": b"y"}, {"video": []}):
        with pytest.raises(RequestError, match="multi_modal_data"):
            images_given(wrong)


# Prompts


@pytest.fixture(scope="module")
def images() -> Iterator[PromptImages]:
    with closing(PromptImages(PATCHING, TOKEN, 2, work=lambda num_tokens: 5 * num_tokens)) as made:
        yield made


def test_a_token_becomes_those_of_its_image(images: PromptImages) -> None:
    sources = [Source(picture(1), "a"), Source(picture(2, 16, 24), "b")]
    placed = images.place([1, TOKEN, 2, TOKEN, 3], sources)
    assert placed.token_ids == (1, *[TOKEN] * 25, 2, *[TOKEN] * 6, 3)
    first, second = placed.images
    assert (first.first, first.rows, first.columns, first.height, first.width) == (1, 5, 5, 40, 40)
    assert (second.first, second.rows, second.columns) == (27, 3, 2)
    assert (first.work, second.work) == (125, 30)
    assert [position for position, _ in placed.block_keys] == [1, 27]
    assert placed.block_keys[0][1] != placed.block_keys[1][1]


def test_parts_are_images_with_tokens_between() -> None:
    """Each is identified by its own pixels: here two images differ in the second tile, and so as a whole."""
    rule = Tiles(4, 8, 1, 4, 16, 2, 4, 1.0, True)
    tiled = NaflexPatches(4, 2, 5, rule, Normalization(), 2)

    def around(rows: int, columns: int, count: int) -> list[list[int]]:
        assert (rows, columns) == (1, 2)
        return [[20 + number, 30] for number in range(count + 1)]

    other = Image.open(io.BytesIO(picture(1, 32, 16)))
    other.putpixel((31, 15), (0, 0, 0))
    with closing(PromptImages(tiled, TOKEN, 2, around=around, work=lambda count: count)) as images:
        placed = images.place([1, TOKEN, TOKEN], [Source(picture(1, 32, 16), "a"), Source(saved(other), "b")])
    parts = [20, 30, *[TOKEN] * 4, 21, 30, *[TOKEN] * 4, 22, 30, *[TOKEN] * 2, 23, 30]
    assert placed.token_ids == (1, *parts, *parts)
    assert [image.first for image in placed.images] == [3, 9, 15, 21, 27, 33]
    assert [(image.rows, image.columns) for image in placed.images[:3]] == [(2, 2), (2, 2), (1, 2)]
    assert [position for position, _ in placed.block_keys] == [image.first for image in placed.images]
    keys = [key for _, key in placed.block_keys]
    assert keys[0] == keys[3]
    assert len({*keys}) == 5


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        ([TOKEN] * 3, 3, "3 images, and a request may have 2"),
        ([1, 2], 1, "0 places for 1 images"),
        ([TOKEN, TOKEN], 1, "2 places for 1 images"),
    ],
)
def test_places_and_images_are_as_many(images: PromptImages, ids: list[int], count: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        images.place(ids, [Source(picture(1), "x")] * count)


def test_images_are_told_apart_by_pixels_and_shape() -> None:
    one, other = Pixels(2, 4, bytes(24)), Pixels(4, 2, bytes(24))
    assert digest(one) == digest(Pixels(2, 4, bytes(24)))
    assert len({digest(one), digest(other), digest(Pixels(2, 4, bytes(23) + b"\1"))}) == 3
