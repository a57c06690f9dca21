// The scorer of score.py, for GPUs and geometries that it has kernels for.
#pragma once

#include "common/cuda.h"
#include "triattention/arguments.h"

namespace kvc::triattention {

// Writes all of `out`, or launches nothing and returns false: the caller then takes the scorer that runs everywhere.
// `like` is any tensor on the device, for scratch memory.
bool launch_cute_scorer(const Context& ctx, const Scoring& s, const Tensor& like, const Rows& out,
                        const DeviceScope& scope);

}  // namespace kvc::triattention
