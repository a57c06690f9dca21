// What the top-k ops do on a GPU.
#pragma once

#include "common/cuda.h"
#include "topk/arguments.h"

namespace kvc::topk {

// Each fills s.out on the scope's stream and needs at least one row and one column of the result.
void select(const Context& ctx, const Selection& s, const DeviceScope& scope);
void settle(const Context& ctx, const Selection& s, const Provisional& p, const DeviceScope& scope);

}  // namespace kvc::topk
