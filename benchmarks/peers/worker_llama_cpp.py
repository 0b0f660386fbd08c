"""llama.cpp, through llama-cpp-python's low-level API: llama_decode on batches of token ids."""

from __future__ import annotations

import logging
from pathlib import Path

import llama_cpp
import numpy as np
from batches import BATCH, BatchEngine, Row
from worker import serve


class LlamaCpp(BatchEngine):
    package = "llama-cpp-python"

    def load(self, path: Path, kind: str, threads: int) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # or every node of a graph is a line
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError("llama.cpp refused the file; its log says why")
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.context = None

    def make_context(self, streams: int, length: int) -> None:
        if self.context:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * length, streams
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def compute(self, rows: list[Row]) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        return [self._likeliest(i) for i, row in enumerate(rows) if row[3]]

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.num_vocab,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
