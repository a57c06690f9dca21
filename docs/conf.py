"""Sphinx: ``make docs``. The package is read from this checkout, so no compiled library and no GPU is needed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def load(name: str, folder: Path) -> ModuleType:
    """A package from a folder of another name."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Schemas come from Python; only what they are implemented with is missing here, and nothing is called.
for library in ("kvc._C", "kvc._C_cuda"):
    sys.modules[library] = ModuleType(library)
release = load("kvc", ROOT / "ops").__version__
load("kvc.methods", ROOT / "methods")

project = "kvc"
copyright = "the kvc developers, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"kvc {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
default_role = "code"  # what docstrings put between single backquotes
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"  # the docstrings say more: shapes, units
autodoc_member_order = "bysource"
