"""Time to encode images, against the peak of bfloat16 products of this machine; and how long streams wait.

    python benchmarks/images.py
    python benchmarks/images.py --sides 512 --threads 1 --chunk 256

The tower has the sizes of Qwen3-VL-2B's (24 layers of 1,024 numbers, 300 million parameters) and random
weights, the text model has two layers. An image of 512 x 512 pixels has 256 tokens, for which the tower
computes 1,024 patches; attention over patches grows with their square. Sizes are measured in turns; medians
and minima are printed.

Then a stream gets tokens while an image is encoded in slices, each of as many operations as a chunk of
`--chunk` tokens of a prompt. The longest time between two of its tokens is printed, and that while a text of
2,000 tokens is computed in such chunks; for each the least of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from quire import LLM, SamplingParams
from quire.backends.native.device import NativeDevice
from quire.models import Model, read_model
from quire.program import Load, Program
from quire.roofline.probe import ceilings

IMAGE_TOKEN = 5
TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN,
    "text_config": TEXT,
    "vision_config": VISION,
}
PROCESSOR: dict[str, Any] = {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}}


def write(folder: Path) -> Model:
    """Write the model; return it without its weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    model = read_model(CONFIG, PROCESSOR)
    assert model.vision is not None
    rng, arrays = np.random.default_rng(0), {}
    for program in (model.program, model.vision.program):
        for spec in program.weights().values():
            values = 0.02 * rng.standard_normal(spec.stored or spec.shape, np.float32)
            arrays[spec.sources[0]] = (values + (len(spec.shape) == 1)).astype(ml_dtypes.bfloat16)
    save_file(arrays, folder / "model.safetensors")
    return model


def operations(tower: Program, num_tokens: int) -> float:
    """Return the operations of encoding an image."""
    load = Load(((0, 4 * num_tokens),), num_tokens)
    return tower.cost(load, lambda spec: 2 * spec.size).flops


def longest_gap_s(llm: LLM, prompt: dict[str, Any]) -> float:
    """Return the longest time between two tokens of a stream while another prompt is computed."""
    engine, frontend = llm.engine, llm.frontend
    stream = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0, detokenize=False)
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    asked = frontend.encode({"prompt_token_ids": [1, 2, 3]}), frontend.encode(prompt)
    engine.add(frontend.request(asked[0], stream, request_id="stream", arrival_s=engine.clock()))
    for _ in range(5):
        engine.step()
    engine.add(frontend.request(asked[1], one, request_id="other", arrival_s=engine.clock()))
    last_s, longest_s, ended = engine.clock(), 0.0, False
    while not ended:
        outputs = engine.step()
        ended = any(output.request_id == "other" for output in outputs)
        if any(output.request_id == "stream" for output in outputs):
            now_s = engine.clock()
            last_s, longest_s = now_s, max(longest_s, now_s - last_s)
    engine.abort("stream")
    while engine.has_work:
        engine.step()
    engine.records.clear()
    return longest_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512, 1024], help="of images, in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of prompts in a step beside a stream")
    args = parser.parse_args()
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    with tempfile.TemporaryDirectory() as name:
        model = write(Path(name))
        assert model.vision is not None
        found: dict[int, list[float]] = {side: [] for side in args.sides}
        gaps: dict[int, list[float]] = {side: [] for side in (0, *args.sides)}
        options = {
            "num_threads": args.threads,
            "enable_prefix_caching": False,
            "max_model_len": 8192,
            "max_num_prefill_tokens": args.chunk,
            "max_num_batched_tokens": args.chunk + 64,
        }
        with LLM(name, **options) as llm:
            peak = ceilings(NativeDevice(name, num_threads=args.threads).loops()).operations["bf16"]
            rng, tokens = np.random.default_rng(0), dict[int, int]()
            for _ in range(args.rounds):
                for side in args.sides:
                    image = Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8))
                    prompt = {"prompt_token_ids": [1, IMAGE_TOKEN, 2], "multi_modal_data": {"image": image}}
                    (output,) = llm.generate(prompt, params, use_tqdm=False)
                    tokens[side] = len(output.prompt_token_ids) - 2
                    found[side].append(max(record.image_s for record in llm.engine.records))
                    llm.engine.records.clear()
                    gaps[side].append(longest_gap_s(llm, prompt))
                gaps[0].append(longest_gap_s(llm, {"prompt_token_ids": [2] * 2000}))
    print(f"{'pixels':>12} {'tokens':>7} {'median s':>9} {'best s':>7} {'tokens/s':>9} {'of the peak':>12}")
    for side, seconds in found.items():
        best, median = min(seconds), statistics.median(seconds)
        share, rate = operations(model.vision.program, tokens[side]) / best / peak, tokens[side] / median
        size = f"{side} x {side}"
        print(f"{size:>12} {tokens[side]:>7} {median:>9.2f} {best:>7.2f} {rate:>9.0f} {share:>12.0%}")
    print(
        f"longest time between two tokens of a stream, beside chunks of {args.chunk} tokens or such slices:"
    )
    for side, seconds in gaps.items():
        print(f"{f'{side} x {side}' if side else 'a text':>12} {min(seconds):>7.3f} s")


if __name__ == "__main__":
    main()
