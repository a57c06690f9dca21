// The selection of radix_topk on a GPU.
#pragma once

#include "common/cuda.h"
#include "topk/arguments.h"

namespace kvc::topk {

// Fills s.out on the scope's stream. Needs at least one row and one column of the result.
void select(const Context& ctx, const Selection& s, const DeviceScope& scope);

}  // namespace kvc::topk
