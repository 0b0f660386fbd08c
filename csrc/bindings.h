// Parts of the module with a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_nodes(nanobind::module_& m);     // nodes and placement
void bind_weights(nanobind::module_& m);   // Matrix and packing
void bind_adapters(nanobind::module_& m);  // matrices of adapters
void bind_sampling(nanobind::module_& m);  // the sampler
void bind_texts(nanobind::module_& m);     // indices of texts
void bind_steps(nanobind::module_& m);     // execution of steps
