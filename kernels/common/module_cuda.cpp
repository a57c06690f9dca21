#include "common/module.h"

namespace {

PyObject* built_architectures(PyObject*, PyObject*) { return PyUnicode_FromString(KVC_CUDA_ARCHS); }

}  // namespace

KVC_PYTHON_MODULE(_C_cuda, "kvc: CUDA implementations of torch.ops.kvc.*",
                  {"built_architectures", built_architectures, METH_NOARGS, "Architectures compiled into this library."}, )
