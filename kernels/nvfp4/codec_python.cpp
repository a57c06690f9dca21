// kvc._codec: a cold-page codec as a Python object. It loads one of the two codec libraries and hands the codec on to
// C++ engines in a capsule. Addresses and streams are plain integers, as tensors and torch streams give them.

#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kvc/cold_page_codec.h"

namespace py = pybind11;

namespace {

using Create = decltype(&kvc_create_cold_page_codec);

constexpr size_t kColumns = 12;  // of PageLayout.table
using Row = std::array<int64_t, kColumns>;
using Pool = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
using Layers = std::tuple<int32_t, std::vector<Row>, std::vector<float>>;
using PoolGroup = std::tuple<std::vector<Pool>, std::vector<Layers>>;

kvc::HotBuffer buffer_of(const Row& row, float global_scale) {
  kvc::HotBuffer b;
  b.layer = row[0];
  b.pool = row[1];
  b.offset = row[2];
  b.transform = static_cast<kvc::HotTransform>(row[3]);
  b.element = static_cast<kvc::HotElement>(row[4]);
  b.rows = row[5];
  b.row_elements = row[6];
  b.quantized_start = row[7];
  b.quantized_elements = row[8];
  b.residual_start = row[9];
  b.residual_elements = row[10];
  constexpr int64_t kItemsize[] = {2, 2, 4, 1};
  const bool copied = b.transform == kvc::HotTransform::kCopy || row[4] < 0 || row[4] > 3;
  b.nbytes = copied ? row[11] : b.rows * b.row_elements * kItemsize[row[4]];
  b.global_scale = global_scale;
  return b;
}

class Codec {
 public:
  Codec(const std::string& library, const std::string& format, int64_t max_ctas) {
    if (format != "lossless" && format != "nvfp4")
      throw py::value_error("kvc.Codec: format must be 'lossless' or 'nvfp4', got '" + format + "'");
    if (max_ctas < 0) throw py::value_error("kvc.Codec: max_ctas must be >= 0, got " + std::to_string(max_ctas));
    // Never closed: a codec may outlive this object in a capsule.
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw py::import_error(dlerror());
    const auto create = reinterpret_cast<Create>(dlsym(handle, "kvc_create_cold_page_codec"));
    if (create == nullptr) throw py::import_error(library + " is no codec library of kvc");
    codec_.reset(create(format == "lossless" ? kvc::ColdPageFormat::kLossless : kvc::ColdPageFormat::kNvfp4, max_ctas));
    if (codec_ == nullptr) throw std::bad_alloc();
  }

  void configure(const std::vector<PoolGroup>& groups) {
    std::vector<std::vector<kvc::HotPool>> pools;
    std::vector<std::vector<std::vector<kvc::HotBuffer>>> buffers;
    std::vector<std::vector<kvc::LayerGroup>> layer_groups;
    std::vector<kvc::HotPoolGroup> all;
    for (const auto& [given_pools, given_layers] : groups) {
      auto& p = pools.emplace_back();
      for (const auto& [base, slots, slot_bytes, stride] : given_pools)
        p.push_back({reinterpret_cast<void*>(base), slots, slot_bytes, stride});
      auto& group_buffers = buffers.emplace_back();
      auto& l = layer_groups.emplace_back();
      for (const auto& [id, rows, scales] : given_layers) {
        if (rows.size() != scales.size()) throw py::value_error("kvc.Codec: scales must be one for each buffer");
        auto& b = group_buffers.emplace_back();
        for (size_t i = 0; i < rows.size(); ++i) b.push_back(buffer_of(rows[i], scales[i]));
        l.push_back({id, b.data(), static_cast<int64_t>(b.size())});
      }
    }
    for (size_t g = 0; g < groups.size(); ++g)
      all.push_back({pools[g].data(), static_cast<int32_t>(pools[g].size()), layer_groups[g].data(),
                     static_cast<int32_t>(layer_groups[g].size())});
    check(codec_->configure(all.data(), static_cast<int32_t>(all.size())));
  }

  void encode(int32_t group, uintptr_t cold, uintptr_t pairs, int64_t count, uintptr_t stream) {
    const auto* p = reinterpret_cast<const kvc::PageIndexPair*>(pairs);
    py::gil_scoped_release unlocked;
    check(codec_->encode(group, reinterpret_cast<void*>(cold), p, count, reinterpret_cast<void*>(stream)));
  }

  void decode(int32_t group, uintptr_t cold, uintptr_t pairs, int64_t count, uintptr_t stream) {
    const auto* p = reinterpret_cast<const kvc::PageIndexPair*>(pairs);
    py::gil_scoped_release unlocked;
    check(codec_->decode(group, reinterpret_cast<const void*>(cold), p, count, reinterpret_cast<void*>(stream)));
  }

  int64_t cold_page_bytes(int32_t group) const { return codec_->queryColdPageBytes(group); }
  int32_t batching_id(int32_t group) const { return codec_->getBatchingLayerGroupId(group); }
  int32_t page_index_location(int32_t group) const {
    return static_cast<int32_t>(codec_->queryPageIndexLocation(group));
  }

  py::object capsule() const {
    auto kept = std::make_unique<std::shared_ptr<kvc::ColdPageCodec>>(codec_);
    PyObject* made = PyCapsule_New(codec_.get(), kvc::kColdPageCodecCapsule, [](PyObject* self) {
      delete static_cast<std::shared_ptr<kvc::ColdPageCodec>*>(PyCapsule_GetContext(self));
    });
    if (made == nullptr) throw py::error_already_set();
    auto capsule = py::reinterpret_steal<py::object>(made);
    if (PyCapsule_SetContext(made, kept.get()) != 0) throw py::error_already_set();
    kept.release();
    return capsule;
  }

 private:
  void check(bool done) const {
    if (done) return;
    const std::string why = codec_->lastError();
    if (why.find(" must be ") != std::string::npos) throw py::value_error(why);
    throw std::runtime_error(why);
  }

  std::shared_ptr<kvc::ColdPageCodec> codec_;
};

}  // namespace

PYBIND11_MODULE(_codec, m) {
  m.doc() = "The C++ cold-page codec of include/kvc/cold_page_codec.h.";
  py::class_<Codec>(m, "Codec")
      .def(py::init<const std::string&, const std::string&, int64_t>(), py::arg("library"), py::arg("format"),
           py::arg("max_ctas") = 0)
      .def("configure", &Codec::configure, py::arg("groups"))
      .def("cold_page_bytes", &Codec::cold_page_bytes, py::arg("layer_group"))
      .def("batching_id", &Codec::batching_id, py::arg("layer_group"))
      .def("page_index_location", &Codec::page_index_location, py::arg("layer_group"))
      .def("encode", &Codec::encode, py::arg("layer_group"), py::arg("cold"), py::arg("pairs"), py::arg("count"),
           py::arg("stream") = 0)
      .def("decode", &Codec::decode, py::arg("layer_group"), py::arg("cold"), py::arg("pairs"), py::arg("count"),
           py::arg("stream") = 0)
      .def("capsule", &Codec::capsule, "A capsule named kvc.ColdPageCodec with a kvc::ColdPageCodec*.");
}
