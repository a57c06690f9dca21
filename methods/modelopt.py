"""The KV-cache scales that ModelOpt leaves in a checkpoint."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

__all__ = ["load_kv_scales"]

_NAME = re.compile(r"^(?:model\.(?:language_model\.)?)layers\.(\d+)\.self_attn\.([kv])_proj\.([kv])_scale$")


def load_kv_scales(folder: str | Path) -> dict[int, dict[str, float]]:
    """Per layer, the multipliers that a ModelOpt checkpoint applies to NVFP4 keys ("k") and values ("v") on decode.

    Parameters
    ----------
    folder : str or Path
        A checkpoint: ``*.safetensors`` beside ``hf_quant_config.json`` or a ``config.json`` with a
        ``quantization_config``.

    Returns
    -------
    dict
        ``{layer: {"k": scale, "v": scale}}``, of several scales for one name the largest; a layer or a name the
        checkpoint does not have is missing. Empty unless the checkpoint says that ModelOpt made it for an NVFP4
        cache.

    Raises
    ------
    FileNotFoundError
        There is no ``*.safetensors``.
    ValueError
        A scale is not one finite number above 0 within [2^-100, 2^100], or a file is damaged: metadata that are not
        the JSON objects they should be, tensors that are not whole.

    Notes
    -----
    Files named ``consolidated*`` are read only when there are no others: they repeat the same tensors under other
    names.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    files = [f for f in files if not f.name.startswith("consolidated")] or files
    if not files:
        raise FileNotFoundError(f"kvc.methods: no *.safetensors in {folder}")
    if not _made_for_nvfp4_cache(folder):
        return {}
    scales: dict[int, dict[str, float]] = {}
    for file in files:
        try:
            _read_scales(file, scales)
        except SafetensorError as error:
            raise ValueError(f"kvc.methods: {file} must be a whole safetensors file, got {error}") from None
    return scales


def _read_scales(file: Path, scales: dict[int, dict[str, float]]) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (no mapping)
            match = _NAME.match(name)
            if match is None or match[2] != match[3]:
                continue
            found = scales.setdefault(int(match[1]), {})
            value = _scale(f"{name} of {file.name}", tensors.get_tensor(name))
            found[match[2]] = max(found.get(match[2], 0.0), value)


def _scale(name: str, tensor: Any) -> float:
    if tensor.numel() != 1:
        raise ValueError(f"kvc.methods: {name} must be one number, got shape {list(tensor.shape)}")
    value = float(tensor.float())
    if not (math.isfinite(value) and 2.0**-100 <= value <= 2.0**100):
        raise ValueError(f"kvc.methods: {name} must be in [2^-100, 2^100], got {value}")
    return value


def _made_for_nvfp4_cache(folder: Path) -> bool:
    """Whether the metadata names ModelOpt and an NVFP4 cache."""
    own, config = folder / "hf_quant_config.json", folder / "config.json"
    if own.is_file():
        file, metadata = own, _json(own)
        settings = _part(own, metadata, "quantization")
    elif config.is_file():
        file, metadata = config, _part(config, _json(config), "quantization_config")
        settings = metadata
    else:
        return False
    producer = str(_part(file, metadata, "producer").get("name") or metadata.get("quant_method") or "")
    return producer.lower() == "modelopt" and settings.get("kv_cache_quant_algo") == "NVFP4"


def _part(path: Path, metadata: dict[str, Any], name: str) -> dict[str, Any]:
    part = {} if metadata.get(name) is None else metadata[name]
    if not isinstance(part, dict):
        raise ValueError(f"kvc.methods: {name} of {path} must be a JSON object, got {type(part).__name__}")
    return part


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"kvc.methods: {path} must be JSON, got {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"kvc.methods: {path} must be a JSON object, got {type(loaded).__name__}")
    return loaded
