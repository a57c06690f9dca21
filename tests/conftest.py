"""Fixtures shared by every family: the device to run on, and outputs that cannot pass by luck."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("kvc", deadline=None, print_blob=True)
settings.load_profile("kvc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``cuda`` needs a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """``torch.empty`` returns NaN (or the largest integer), so an unwritten element shows."""
    deterministic: Any = torch.utils.deterministic  # properties of a module, which type checkers do not know
    before = deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    deterministic.fill_uninitialized_memory = before[0]
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture
def debug_mode() -> Iterator[None]:
    import kvc

    kvc.set_debug(True)
    yield
    kvc.set_debug(False)


@pytest.fixture
def launches() -> Callable[[Callable[[], object]], list[str]]:
    """What a call puts on the GPU: the names of kernels, copies and fills."""

    def run(call: Callable[[], object]) -> list[str]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]

    return run


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A model of two layers and 96 tokens, as the examples describe theirs; their tests put examples/ on the path."""
    import smollm
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=96,
        initializer_range=0.2,
    )
    return smollm.describe(LlamaForCausalLM(config).eval())
