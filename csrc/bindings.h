// Parts of the module that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_weights(nanobind::module_& m);   // Matrix and what packs it
void bind_sampling(nanobind::module_& m);  // what chooses a token from a row of logits
void bind_steps(nanobind::module_& m);     // what computes step by step
