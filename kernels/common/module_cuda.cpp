#include "common/module.h"

namespace {

// One string, so that collect_env finds the list in a library that does not load.
#define KVC_BUILT_FOR "kvc was built for "
const char kBuiltFor[] = KVC_BUILT_FOR KVC_CUDA_ARCHS;

PyObject* built_architectures(PyObject*, PyObject*) {
  return PyUnicode_FromString(kBuiltFor + sizeof(KVC_BUILT_FOR) - 1);
}

}  // namespace

KVC_PYTHON_MODULE(_C_cuda, "kvc: CUDA implementations of torch.ops.kvc.*",
                  {"built_architectures", built_architectures, METH_NOARGS,
                   "Architectures compiled into this library."}, )
