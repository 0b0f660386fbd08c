// Flat functions over the C API of ik_llama.cpp, for ctypes: one model, and one context at a time.
#include <algorithm>

#include "llama.h"

namespace {

struct Engine {
  llama_model* model;
  llama_context* context;
  int threads;
};

}  // namespace

extern "C" {

const char* ik_commit() { return COMMIT; }

// Loads a GGUF file with its matrices repacked for this processor; null if it is refused, its log says why.
Engine* ik_open(const char* path, int threads) {
  llama_backend_init();
  llama_model_params params = llama_model_default_params();
  params.repack_tensors = true;
  llama_model* model = llama_model_load_from_file(path, params);
  return model ? new Engine{model, nullptr, threads} : nullptr;
}

// Makes a context for `streams` sequences of `length` tokens together, computed in batches; 0 if it could.
int ik_begin(Engine* engine, int streams, int length, int batch) {
  if (engine->context) llama_free(engine->context);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = streams * length;
  params.n_seq_max = streams;
  params.n_batch = params.n_ubatch = batch;
  params.n_threads = params.n_threads_batch = engine->threads;
  params.flash_attn = true;
  engine->context = llama_init_from_model(engine->model, params);
  return engine->context ? 0 : 1;
}

void ik_clear(Engine* engine) { llama_kv_cache_clear(engine->context); }

// Computes rows of a token, its position and its sequence; for each that is wanted its likeliest next token
// is written to `likeliest`, one after the other. What is not 0 is llama_decode's error.
int ik_decode(Engine* engine, int rows, int* tokens, int* positions, int* sequences, signed char* wanted,
              int* likeliest) {
  llama_batch batch = llama_batch_init(rows, 0, 1);
  batch.n_tokens = rows;
  for (int i = 0; i < rows; ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = positions[i];
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequences[i];
    batch.logits[i] = wanted[i];
  }
  const int status = llama_decode(engine->context, batch);
  const int vocab = llama_n_vocab(engine->model);
  for (int i = 0; i < rows && status == 0; ++i) {
    if (!wanted[i]) continue;
    const float* logits = llama_get_logits_ith(engine->context, i);
    *likeliest++ = static_cast<int>(std::max_element(logits, logits + vocab) - logits);
  }
  llama_batch_free(batch);
  return status;
}

}  // extern "C"
