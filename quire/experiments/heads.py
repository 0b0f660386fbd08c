"""The experiment "heads": the demo with other numbers of key and value heads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from quire.experiments.demo import DemoEngine, text_of_length
from quire.experiments.parameters import HeadsParameters, Line
from quire.quantize.kinds import DTYPE_NAMES, Array
from quire.weights.hub import open_model
from quire.weights.source import ModelSource

NUM_BUILT = 3  # models


def run(asked: HeadsParameters) -> Iterator[Line]:
    """Run a batch with each number of heads, step by step in turns; yield figures of each.

    With as many key and value heads as query heads, those of the demo are repeated: the same mathematics in
    more bytes, so the answers must be equal. With one, that of the first group serves all query heads: its
    bytes and times are those of such a model, its answers are not those of the demo.
    """
    demo = open_model("demo")
    config = demo.config()
    num_heads, own = config["num_attention_heads"], config["num_key_value_heads"]
    engines: dict[int, DemoEngine] = {}
    with tempfile.TemporaryDirectory(prefix="quire-heads-") as folder:
        for count in (num_heads, own, 1):
            path = Path(folder) / str(count)
            if count != own:
                write_model(demo, path, count)
            model = "demo" if count == own else str(path)
            engines[count] = DemoEngine(model, max_num_seqs=asked.batch)
            yield {"progress": len(engines) / (NUM_BUILT + asked.num_tokens)}
    tokens = text_of_length(engines[own], asked.context + asked.batch)
    for engine in engines.values():
        for row in range(asked.batch):  # each begins at another token
            engine.start(tokens[row : row + asked.context], asked.num_tokens + asked.batch)
    answers: dict[int, list[int]] = {count: [] for count in engines}
    times: dict[int, list[float]] = {count: [] for count in engines}
    while len(times[own]) < asked.num_tokens:  # which is so of all at once: they have the same steps
        for count, engine in engines.items():
            step = engine.step()
            answers[count] += step.token_ids
            if step.num_tokens == asked.batch:  # no prompt is computed any more
                times[count].append(step.seconds)
        yield {"progress": (NUM_BUILT + len(times[own])) / (NUM_BUILT + asked.num_tokens)}
    for count, engine in engines.items():
        equal = answers[count] == answers[own] if count >= own else None
        figures = _figures(engine, asked, 1e3 * median(times[count]))
        yield {"heads": {"num_kv_heads": count, **figures, "tokens_equal": equal}}
    yield {
        "done": {"num_heads": num_heads, "num_kv_heads": own, "batch": asked.batch, "context": asked.context}
    }


def write_model(source: ModelSource, folder: Path, num_kv_heads: int) -> None:
    """Write a model with another number of key and value heads to a new folder."""
    config = source.config()
    own, head_dim = config["num_key_value_heads"], config["head_dim"]
    taken = [head * own // num_kv_heads for head in range(num_kv_heads)]
    arrays: dict[str, Array] = {}
    tensors = source.tensors()
    for name in tensors:
        array = tensors.pull(name).floats()
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            array = array.reshape(own, head_dim, -1)[taken].reshape(num_kv_heads * head_dim, -1)
        arrays[name] = array
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": num_kv_heads}), "utf-8")
    _write_safetensors(folder / "model.safetensors", arrays)
    tensors.close()


def _write_safetensors(path: Path, arrays: dict[str, Array]) -> None:
    header: dict[str, Line] = {}
    end = 0
    for name, array in arrays.items():
        kind = DTYPE_NAMES[array.dtype].upper()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def _figures(engine: DemoEngine, asked: HeadsParameters, step_ms: float) -> Line:
    """Return bytes, the measured time of a step, and how many such sequences the memory holds."""
    memory = engine.description.memory
    sizing = memory.sizing
    each = sizing.nbytes(sizing.blocks(1, asked.context))
    return {
        "kv_bytes_per_token": memory.kv_block_bytes // sizing.block_size,
        "weight_bytes": memory.weight_bytes,
        **engine.step_bytes(asked.batch, asked.context),
        "step_ms": step_ms,
        "num_fitting": asked.memory_bytes // each,
    }
