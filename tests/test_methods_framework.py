"""Admission, the five hooks, and the engine's side of kvc.methods."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pydantic
import pytest
import torch
from kvc import methods
from paged_engine import PagedEngine, facts

HOOKS = (
    "on_request_init",
    "on_context_step_end",
    "on_generation_step_begin",
    "on_generation_step_end",
    "on_request_finish",
)


class Manager(methods.KVCacheCompressionManager):
    """A method that does nothing."""


class Config(methods.KvCacheCompressionConfig):
    changes_physical_kv_length: ClassVar[bool] = True
    reuse: bool = True
    speculation: bool = True
    strength: int = 1

    def supports_block_reuse(self) -> bool:
        return self.reuse

    def supports_speculative_decoding(self) -> bool:
        return self.speculation

    def create_manager(self, facts: methods.EngineFacts) -> Manager:
        return Manager(self, facts)


class TestConfig:
    def test_is_immutable_and_closed(self) -> None:
        config: Any = Config()
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            config.strength = 2
        with pytest.raises(pydantic.ValidationError, match="extra"):
            Config(strenght=2)  # type: ignore[call-arg]

    def test_base_cannot_be_made(self) -> None:
        base: Any = methods.KvCacheCompressionConfig
        with pytest.raises(TypeError, match="abstract"):
            base()

    @pytest.mark.parametrize(
        ("config", "changes", "reason"),
        [
            ({"reuse": False}, {"block_reuse": True}, "block reuse"),
            ({"speculation": False}, {"max_draft_tokens": 3}, "speculative decoding"),
            (
                {"speculation": False},
                {"draft_layers": (methods.LayerFacts(index=0, num_kv_heads=1, head_dim=8),)},
                "speculative decoding",
            ),
            ({}, {"logical_positions": False}, "position"),
            ({}, {"beam_width": 2}, "beam"),
        ],
    )
    def test_refuses_with_the_reason(self, config: Any, changes: Any, reason: str) -> None:
        with pytest.raises(ValueError, match=rf"kvc\.methods\.Config: not supported here: .*{reason}"):
            methods.create_kv_cache_compression_manager(Config(**config), facts(**changes))
        assert isinstance(methods.create_kv_cache_compression_manager(Config(**config), facts()), Manager)
        assert isinstance(
            methods.create_kv_cache_compression_manager(Config(), facts(block_reuse=True)), Manager
        )

    def test_names_every_reason(self) -> None:
        with pytest.raises(ValueError, match=r"block reuse.*speculative.*position"):
            methods.create_kv_cache_compression_manager(
                Config(reuse=False, speculation=False),
                facts(block_reuse=True, max_draft_tokens=1, logical_positions=False),
            )

    def test_one_method_per_instance(self) -> None:
        both: Any = [Config(), Config()]
        with pytest.raises(TypeError, match="config must be one KvCacheCompressionConfig, got list"):
            methods.create_kv_cache_compression_manager(both, facts())

    def test_facts_are_checked(self) -> None:
        with pytest.raises(pydantic.ValidationError, match="tokens_per_page"):
            facts(tokens_per_page=0)
        with pytest.raises(pydantic.ValidationError, match="layers"):
            facts(layers=[])
        with pytest.raises(
            pydantic.ValidationError, match="tensor_parallel_rank must be below the size of 2"
        ):
            facts(tensor_parallel_size=2, tensor_parallel_rank=2)
        numbers: Any = {"num_q_heads": 4}
        with pytest.raises(TypeError, match="engine_facts must be EngineFacts, got dict"):
            methods.create_kv_cache_compression_manager(Config(), numbers)

    def test_the_device_gets_an_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert facts(device="cuda").device == torch.device("cuda", 1)
        assert facts(device="cuda:0").device == torch.device("cuda", 0)
        assert facts(device="cpu").device == torch.device("cpu")


class TestManager:
    def test_hooks_do_nothing(self) -> None:
        f = facts()
        manager = methods.create_kv_cache_compression_manager(Config(), f)
        engine = PagedEngine(f)
        manager.bind(engine)
        request = engine.admit("a", 5)
        before = [pool.clone() for pools in engine.target.pools for pool in pools]
        for hook in HOOKS:
            takes_one = "request" in inspect.signature(getattr(manager, hook)).parameters
            assert getattr(manager, hook)(request if takes_one else [request]) is None
        after = [pool for pools in engine.target.pools for pool in pools]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert engine.changes == []

    def test_binds_once(self) -> None:
        f = facts()
        manager = methods.create_kv_cache_compression_manager(Config(), f)
        manager.bind(PagedEngine(f))
        with pytest.raises(RuntimeError, match="already bound"):
            manager.bind(PagedEngine(f))

    def test_a_refused_engine_leaves_it_unbound(self) -> None:
        class Picky(Manager):
            refuse = True

            def _bind(self, engine: methods.Engine) -> None:
                if self.refuse:
                    raise ValueError("no")

        f = facts()
        manager = Picky(Config(), f)
        with pytest.raises(ValueError, match="no"):
            manager.bind(PagedEngine(f))
        manager.refuse = False
        manager.bind(PagedEngine(f))
