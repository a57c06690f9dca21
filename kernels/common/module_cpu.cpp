#include "common/module.h"

KVC_PYTHON_MODULE(_C, "kvc: CPU implementations of torch.ops.kvc.*")
