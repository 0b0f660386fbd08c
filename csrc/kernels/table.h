// Declarations of the functions of one instruction set, for table.cpp.
#pragma once

#include "kernels.h"

namespace quire::QUIRE_ISA {

ActivationFormat activation_format(const Panels& weight);
void pack_activations(const PackedActivations& packed, const float* x, int64_t stride, int64_t tile);
// Packs rows of one tile for coded weights.
void pack_spans(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, int64_t span, uint8_t* out);
// The same for W8A8 weights.
void pack_rows(const float* x, int64_t stride, int64_t m_rows, int64_t inputs, uint8_t* out);
void multiply(const Product& product, const PackedActivations& packed, int64_t first, int64_t last);

void lookup(const Panels& table, int64_t row, float* out);
void lookup_coded(const Panels& table, int64_t row, float* out);
void add(const float* x, const float* y, float* out, int64_t count);
void scale(const float* x, float factor, float* out, int64_t count);
void soft_cap(const float* x, float cap, float* out, int64_t count);
void activate(Activation activation, const float* x, float* out, int64_t count);
void gate(Activation activation, const float* gate, const float* up, float* out, int64_t count);
void bounded_gate(float limit, const float* gate, const float* up, float* out, int64_t count);
void norm(const Norm& norm, const float* x, float* out, int64_t count);
void rotate(const float* x, float* out, const float* cos, const float* sin, int64_t heads, int64_t dim,
            int64_t pairs, bool interleaved);

bool pack_panels(const Source& source, const Panels& to, int64_t first, int64_t last, const float* tries,
                 int64_t num_tries, float* scratch);

void write_kv(const KVLayer& cache, int64_t block, int64_t offset, const float* k, const float* v);
void attend(const Attention& how, const AttentionUnit& unit, float* scratch);
void merge_segments(const Attention& how, int64_t head, const float* records, int64_t count, float* out);
void score_segment(const Attention& how, const AttentionUnit& unit, const float* factors, float* scores,
                   float* scratch);

void compress(const Compression& how, const int64_t* table, int64_t position, float* out);
void convolve(const Convolution& of);
void recur(const Recurrence& of);
void apply_delta_rule(const DeltaPiece& piece);
void apply_state_space(const SpacePiece& piece);
void keep(KVFormat format, const float* x, uint8_t* to, int64_t count);

Chosen choose(const float* logits, int64_t count, const Edits& edits, const Choosing& how, void* scratch);
Greatest greatest(const float* logits, int64_t count);
double exp_sum(const float* logits, int64_t count, double maximum);
int64_t rank(const float* logits, int64_t count, int64_t id);
void top_ids(const float* logits, int64_t count, int64_t k, int64_t* ids, void* scratch);

}  // namespace quire::QUIRE_ISA
