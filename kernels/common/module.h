// The Python module object of a kvc library: importing it runs the op registrations of its translation units.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "common/checks.h"

namespace kvc {

inline PyObject* set_debug(PyObject*, PyObject* enabled) {
  const int value = PyObject_IsTrue(enabled);
  if (value < 0) return nullptr;
  debug_mode = value != 0;
  Py_RETURN_NONE;
}

}  // namespace kvc

#define KVC_PYTHON_MODULE(name, doc, ...)                                                                         \
  PyMODINIT_FUNC PyInit_##name() {                                                                                \
    static PyMethodDef methods[] = {{"set_debug", kvc::set_debug, METH_O, "Check device values, synchronising."}, \
                                    __VA_ARGS__{nullptr}};                                                        \
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #name, doc, -1, methods};                                 \
    return PyModule_Create(&module);                                                                              \
  }
