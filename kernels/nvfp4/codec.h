// What the cold-page codec needs of the memory its pools lie in. Torch-free.
#pragma once

#include <memory>
#include <vector>

#include "kvc/cold_page_codec.h"
#include "nvfp4/launch.h"

namespace kvc::nvfp4 {

// Moves pages between pools and cold memory. Errors are exceptions.
class PageMover {
 public:
  virtual ~PageMover() = default;
  // The cold memory as the mover reaches it.
  virtual uint8_t* address(void* cold) const { return static_cast<uint8_t*>(cold); }
  virtual void move(PageWork work, bool encode, const void* cold, void* stream) const = 0;
};

std::unique_ptr<PageMover> make_host_mover();

// Defined once in each library: the mover for pools that all lie where the first of them does.
std::unique_ptr<PageMover> make_mover(const std::vector<HotPool>& pools, int64_t max_ctas);

}  // namespace kvc::nvfp4
