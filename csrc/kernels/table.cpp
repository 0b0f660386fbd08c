// The table of one instruction set.

#include "table.h"

#define QUIRE_STRING_OF(x) #x
#define QUIRE_STRING(x) QUIRE_STRING_OF(x)

namespace quire::QUIRE_ISA {

extern const Kernels table;
const Kernels table = {
    .isa = QUIRE_STRING(QUIRE_ISA),
    .activation_format = activation_format,
    .pack_activations = pack_activations,
    .multiply = multiply,
    .pack_panels = pack_panels,
    .lookup = lookup,
    .add = add,
    .scale = scale,
    .soft_cap = soft_cap,
    .activate = activate,
    .gate = gate,
    .bounded_gate = bounded_gate,
    .norm = norm,
    .rotate = rotate,
    .write_kv = write_kv,
    .attend = attend,
    .merge_segments = merge_segments,
    .score_segment = score_segment,
    .compress = compress,
    .convolve = convolve,
    .recur = recur,
    .apply_delta_rule = apply_delta_rule,
    .keep = keep,
    .choose = choose,
    .greatest = greatest,
    .exp_sum = exp_sum,
    .rank = rank,
    .top_ids = top_ids,
    .apply_state_space = apply_state_space,
};

}  // namespace quire::QUIRE_ISA
