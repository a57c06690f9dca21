// libkvc_codec.so: pools in host memory alone.

#include "nvfp4/codec.h"

namespace kvc::nvfp4 {

std::unique_ptr<PageMover> make_mover(const std::vector<HotPool>&, int64_t) { return make_host_mover(); }

}  // namespace kvc::nvfp4
