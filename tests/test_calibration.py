"""Query statistics: measured as defined, kept without loss, and refused when they do not fit."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDS = "needs kvc[calibrate]"
transformers = pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("typer", reason=NEEDS)
pytest.importorskip("rich", reason=NEEDS)
pytest.importorskip("matplotlib", reason=NEEDS)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=NEEDS)

from kvc import calibrate, calibration  # noqa: E402
from kvc.calibration import Calibration  # noqa: E402
from rich.console import Console  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

VOCABULARY = 96
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def tiny(family: str = "Llama", rope: str | dict[str, Any] = "default", **options: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": dict(ROPE[rope]) if isinstance(rope, str) else rope,
    }
    config = getattr(transformers, f"{family}Config")(**{**settings, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("q_norm.weight", "q_proj.bias")
        ):  # 1 and 0 at first, which would hide a missing step
            torch.nn.init.uniform_(parameter, 0.5, 2)
    return model


def text(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def queries(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Queries before rotation, fp64 ``[layers, query_heads, tokens, head_dim]``, from each layer's own input."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(ids[None])
        found = []
        for layer, hidden in zip(model.model.layers, inputs, strict=True):
            attention = layer.self_attn
            q = attention.q_proj(hidden[0]).unflatten(-1, (QUERY_HEADS, HEAD_DIM))
            if hasattr(attention, "q_norm"):
                q = attention.q_norm(q)
            found.append(q.transpose(0, 1).double())
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def assert_describes(found: Calibration, q: torch.Tensor, tolerance: float = 2e-5) -> None:
    """The statistics are those of `q` by their definition."""
    z = torch.complex(q[..., : HEAD_DIM // 2], q[..., HEAD_DIM // 2 :])
    mean, norm = z.mean(2), z.abs().mean(2)
    close: Callable[..., None] = torch.testing.assert_close
    close(found.q_mean_real, mean.real.float(), rtol=tolerance, atol=tolerance)
    close(found.q_mean_imag, mean.imag.float(), rtol=tolerance, atol=tolerance)
    close(found.q_norm_excess, (norm - mean.abs()).float(), rtol=tolerance, atol=tolerance)
    close(found.resultant_length, (mean.abs() / norm).float(), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def measured(llama: Any) -> Calibration:
    return calibration.collect(llama, text(100))


class TestCollect:
    @pytest.mark.parametrize("rope", ROPE)
    @pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
    def test_is_the_definition(self, family: str, rope: str) -> None:
        model = tiny(family, rope)
        found = calibration.collect(model, text(150), window=150, chunk=64)
        assert_describes(found, queries(model, text(150)))
        assert (found.num_layers, found.num_query_heads, found.num_kv_heads) == (
            LAYERS,
            QUERY_HEADS,
            KV_HEADS,
        )
        assert found.head_dim == HEAD_DIM
        assert found.tokens_seen == 150
        assert found.omega.equal(model.model.rotary_emb.inv_freq)
        assert found.rope["rope_type"] == rope
        factor = model.model.rotary_emb.attention_scaling
        assert (factor > 1.1) == (rope == "yarn")
        torch.testing.assert_close(found.freq_scale_sq, torch.full((HEAD_DIM // 2,), factor**2))
        assert found.offsets.tolist() == [2**i for i in range(17)]

    @pytest.mark.parametrize("rope", ["default", "yarn"])
    def test_is_what_the_cached_rotation_needs(self, rope: str) -> None:
        """Re(E[q] exp(i w t) conj(K)) is the mean logit, which the next tokens then have."""
        model, ids = tiny(rope=rope), text(40)
        found = calibration.collect(model, ids)
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model(ids[None], None, None, cache)
        half, at = HEAD_DIM // 2, 57
        for layer, q in enumerate(queries(model, ids)):
            keys = cache.layers[layer].keys[0].double().repeat_interleave(QUERY_HEADS // KV_HEADS, 0)
            cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[at]]))
            rotated = q * cos[0] + torch.cat([-q[..., half:], q[..., :half]], -1) * sin[0]
            logits = (rotated @ keys.mT).mean(1)
            phase = torch.polar(torch.ones(half).double(), at * found.omega.double())
            mean = torch.complex(found.q_mean_real[layer].double(), found.q_mean_imag[layer].double()) * phase
            predicted = mean.real @ keys[..., :half].mT + mean.imag @ keys[..., half:].mT
            scale = found.freq_scale_sq[0].sqrt()
            torch.testing.assert_close(scale * predicted.diagonal().T, logits, rtol=1e-4, atol=1e-3)

    def test_result_does_not_depend_on_chunks_or_parts(self, llama: Any) -> None:
        ids = text(200)
        whole = calibration.collect(llama, ids, window=80, stride=50, chunk=80)
        for chunk, parts in ((1, 200), (7, 13), (33, 1), (64, 81)):
            found = calibration.collect(llama, iter(ids.split(parts)), window=80, stride=50, chunk=chunk)
            assert found.tokens_seen == whole.tokens_seen == 200
            for name in calibration.STATISTICS:
                torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("count", "window", "stride"),
        [(200, 80, 50), (200, 80, 80), (200, 80, 1), (160, 80, 80), (80, 80, 30), (110, 80, 30), (5, 80, 40)],
    )
    def test_windows_count_every_token_once(self, llama: Any, count: int, window: int, stride: int) -> None:
        ids = text(count)
        found = calibration.collect(llama, ids, window=window, stride=stride, chunk=32)
        assert found.tokens_seen == count
        # By hand: a token is counted in the first window that holds it.
        kept, first, done = [], 0, 0
        while done < count:
            end = min(first + window, count)
            kept.append(queries(llama, ids[first:end])[:, :, done - first :])
            first, done = first + stride, end
        assert_describes(found, torch.cat(kept, dim=2))

    def test_memory_does_not_grow_with_the_text(self, llama: Any) -> None:
        """Parts are read one at a time, and none is held once its window is over."""
        import weakref

        living: list[weakref.ref[torch.Tensor]] = []
        most = 0

        def parts() -> Iterator[torch.Tensor]:
            nonlocal most
            for seed in range(30):
                part = text(20, seed)
                living.append(weakref.ref(part))
                most = max(most, sum(ref() is not None for ref in living))
                yield part
                del part

        shapes: set[tuple[int, ...]] = set()
        found = calibration.collect(
            llama, parts(), window=40, chunk=10, on_progress=lambda n: shapes.add((n,))
        )
        assert found.tokens_seen == 600
        assert most <= 4
        assert max(shapes) == (600,)
        assert len(shapes) == 60

    def test_max_tokens(self, llama: Any) -> None:
        def endless() -> Iterator[torch.Tensor]:
            while True:
                yield text(30)

        found = calibration.collect(llama, endless(), max_tokens=70)
        assert found.tokens_seen == 70
        assert_describes(found, queries(llama, torch.cat([text(30), text(30), text(10)])))

    def test_sums_are_exact_over_long_texts(self, llama: Any) -> None:
        """A thousand equal windows have the statistics of one."""
        ids = text(8)
        one = calibration.collect(llama, ids)
        many = calibration.collect(llama, ids.repeat(1000), window=8)
        for name in calibration.STATISTICS:
            torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=0, atol=1e-7)

    def test_low_precision_models(self) -> None:
        model = tiny("Qwen3").to(torch.bfloat16)
        model.model.rotary_emb.inv_freq.data = tiny("Qwen3").model.rotary_emb.inv_freq
        found = calibration.collect(model, text(100))
        assert_describes(found, queries(model, text(100)), tolerance=0.02)

    def test_sliding_window_layers(self) -> None:
        model = tiny("Mistral", sliding_window=16)
        found = calibration.collect(model, text(100), chunk=10)
        assert_describes(found, queries(model, text(100)))

    @pytest.mark.parametrize("family", ["Olmo2", "Gemma2", "Starcoder2", "GptOss"])
    def test_other_families_in_the_half_layout(self, family: str) -> None:
        options: dict[str, Any] = (
            {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "GptOss" else {}
        )
        found = calibration.collect(tiny(family, **options), text(40))
        assert found.tokens_seen == 40

    def test_leaves_the_model_as_it_was(self, llama: Any) -> None:
        module = sys.modules[type(llama).__module__]
        original = module.apply_rotary_pos_emb

        def broken() -> Iterator[torch.Tensor]:
            yield text(10)
            raise RuntimeError("from the text")

        llama.train()
        calibration.collect(llama, text(10))
        with pytest.raises(RuntimeError, match="from the text"):
            calibration.collect(llama, broken())
        assert llama.training
        llama.eval()
        assert module.apply_rotary_pos_emb is original
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in llama.modules())

    @pytest.mark.parametrize(
        "options",
        [{"window": 0}, {"stride": 0}, {"stride": 9, "window": 8}, {"chunk": 0}, {"max_tokens": 0}],
        ids=str,
    )
    def test_refuses_bad_numbers(self, llama: Any, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=rf"^kvc\.calibration: {next(iter(options))} must be "):
            calibration.collect(llama, text(10), **options)  # type: ignore[arg-type]

    def test_refuses_an_empty_text_and_what_is_no_token(self, llama: Any) -> None:
        with pytest.raises(ValueError, match="tokens must be at least one token, got an empty text"):
            calibration.collect(llama, text(0))
        with pytest.raises(TypeError, match=r"tokens must be integers, got torch\.float32"):
            calibration.collect(llama, torch.zeros(4))
        with pytest.raises(TypeError, match=r"tokens must be integers, got torch\.complex64"):
            calibration.collect(llama, torch.zeros(4, dtype=torch.complex64))
        with pytest.raises(TypeError, match="tokens must be one dense tensor or several, got int"):
            calibration.collect(llama, [1, 2])  # type: ignore[list-item]

    @pytest.mark.parametrize("token", [-1, "vocab_size"])
    def test_refuses_tokens_that_the_model_does_not_have(self, llama: Any, token: int | str) -> None:
        size = llama.config.vocab_size
        wrong = size if token == "vocab_size" else token
        with pytest.raises(ValueError, match=rf"tokens must be 0 to {size - 1}, got {wrong}$"):
            calibration.collect(llama, [text(5), torch.tensor([size - 1, wrong])])

    def test_refuses_a_configuration(self, llama: Any) -> None:
        with pytest.raises(
            ValueError, match="model must be a model, which can read the text, got LlamaConfig"
        ):
            calibration.collect(llama.config, text(5))

    def test_refuses_queries_that_are_not_finite(self) -> None:
        model = tiny()
        model.model.layers[2].self_attn.q_proj.weight.data[3] = float("nan")
        with pytest.raises(ValueError, match=r"must be "):
            calibration.collect(model, text(10))


class TestOtherModels:
    """What the score does not describe is refused, by what the model does and not by its name."""

    @pytest.mark.parametrize(
        ("family", "options", "message"),
        [
            ("Cohere", {}, "cos of layer 0 of cohere must be that of position . inv_freq in the half layout"),
            ("Helium", {}, r"rotation of layer 0 of helium must be of elements f and f \+ F"),
            ("HunYuanDenseV1", {}, "cached keys of layer 0 of hunyuan_v1_dense must be the rotated keys"),
            ("StableLm", {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
             r"partial_rotary_factor must be 1 \(whole heads rotated\), got 0.25"),
            ("Llama", {"rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
             "rope_type must be one of default, linear, llama3, yarn, got dynamic"),
            ("GPTJ", {"rope": None}, "model must be "),
        ],
    )  # fmt: skip
    def test_is_refused(self, family: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=rf"^kvc\.calibration: {message}"):
            calibration.collect(tiny(family, **options), text(40))

    def test_one_rotation_per_kind_of_layer(self) -> None:
        config = transformers.Gemma3TextConfig()
        with pytest.raises(ValueError, match="rope_parameters must be the same for all layers"):
            calibration.load(__file__, config)

    def test_latent_attention(self) -> None:
        with pytest.raises(ValueError, match="multi-head or grouped-query attention"):
            calibration.load(__file__, transformers.DeepseekV3Config())

    def test_no_rotation(self) -> None:
        with pytest.raises(ValueError, match="rotary position embeddings"):
            calibration.load(__file__, transformers.GPT2Config())

    def test_no_language_model(self) -> None:
        with pytest.raises(ValueError, match="num_hidden_layers"):
            calibration.load(__file__, transformers.LlavaConfig())

    def test_frequencies_that_are_not_the_configurations(self) -> None:
        model = tiny()
        model.model.rotary_emb.inv_freq.mul_(1 + 2e-5)
        with pytest.raises(ValueError, match=r"inv_freq of the model must be .* within 1e-05"):
            calibration.collect(model, text(10))

    def test_a_layer_without_rotation(self) -> None:
        model = tiny()
        silent = model.model.layers[1].self_attn.forward
        model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
        with pytest.raises(
            ValueError, match=r"layers of llama that rotate queries must be 0 to 2, got \[0, 2\]"
        ):
            calibration.collect(model, text(10))
        model.model.layers[1].self_attn.forward = silent


class TestCalibration:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"q_mean_real": torch.zeros(2, 3)}, ValueError, r"q_mean_real must be \[layers, query_heads, F\]"),
            ({"q_mean_real": torch.zeros(3, 0, 16)}, ValueError, r"q_mean_real must be .*got \[3, 0, 16\]"),
            ({"q_mean_imag": torch.zeros(3, 4, 8)}, ValueError, r"q_mean_imag must be of shape \[3, 4, 16\]"),
            ({"q_norm_excess": torch.zeros(3, 4, 16).double()}, TypeError, "q_norm_excess must be float32"),
            ({"omega": torch.ones(8)}, ValueError, r"omega must be of shape \[16\], got \[8\]"),
            ({"omega": torch.zeros(16)}, ValueError, "omega must be positive"),
            ({"freq_scale_sq": -torch.ones(16)}, ValueError, "freq_scale_sq must be positive"),
            ({"q_mean_real": torch.full((3, 4, 16), torch.inf)}, ValueError, "q_mean_real must be finite, got 192"),
            ({"freq_scale_sq": torch.full((16,), torch.nan)}, ValueError, "freq_scale_sq must be finite, got 16"),
            ({"offsets": torch.ones(0, dtype=torch.int64)}, ValueError, "offsets must be int64"),
            ({"offsets": torch.ones(3)}, ValueError, "offsets must be int64"),
            ({"num_kv_heads": 3}, ValueError, "num_kv_heads must be a divisor of the 4 query heads, got 3"),
            ({"tokens_seen": -1}, ValueError, "tokens_seen must be at least 0, got -1"),
            ({"q_mean_real": None}, TypeError, "q_mean_real must be a dense tensor, got NoneType"),
            ({"omega": torch.ones(16).to_sparse()}, TypeError, "omega must be a dense tensor, got a torch.sparse_coo"),
            ({"offsets": torch.ones(3, device="meta")}, TypeError, "offsets must be a dense tensor, got a meta"),
        ],
    )  # fmt: skip
    def test_is_checked_when_made(
        self, measured: Calibration, change: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=rf"^kvc\.calibration: {message}"):
            dataclasses.replace(measured, **change)

    def test_is_frozen(self, measured: Calibration) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            measured.omega = torch.ones(16)  # type: ignore[misc]

    def test_moves(self, measured: Calibration, device: torch.device) -> None:
        moved = measured.to(device)
        for name in (*calibration.STATISTICS, *calibration.FREQUENCIES, "offsets"):
            assert getattr(moved, name).device.type == device.type
            assert getattr(moved, name).cpu().equal(getattr(measured, name))
        assert moved.rope == measured.rope

    def test_is_what_the_ops_take(self, measured: Calibration, device: torch.device) -> None:
        import kvc

        c = measured.to(device)
        pools = [torch.randn(2, KV_HEADS, 8, HEAD_DIM).to(device) for _ in range(LAYERS)]
        source = torch.tensor([13], dtype=torch.int32, device=device)
        table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
        cos, sin = kvc.mean_phase(source, c.omega, c.offsets)
        statistics = (c.q_mean_real, c.q_mean_imag, c.q_norm_excess, c.freq_scale_sq)
        scores = kvc.triattention_score(
            pools, table, torch.zeros_like(source), source, cos, sin, *statistics, "per_head", True, 16
        )
        assert scores.shape == (1, KV_HEADS, 16)
        assert scores[..., :13].isfinite().all()
        assert (scores[..., 13:] == -torch.inf).all()


class TestFile:
    def test_round_trip_keeps_every_bit(self, llama: Any, measured: Calibration, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        calibration.save(measured, path)
        for model in (None, llama, llama.config):
            found = calibration.load(path, model)
            for field in dataclasses.fields(Calibration):
                got, expected = getattr(found, field.name), getattr(measured, field.name)
                assert got.equal(expected) if isinstance(got, torch.Tensor) else got == expected

    def test_says_what_it_is(self, measured: Calibration, tmp_path: Path) -> None:
        from safetensors import safe_open

        calibration.save(measured, tmp_path / "c.safetensors")
        with safe_open(str(tmp_path / "c.safetensors"), "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "kvc.calibration"
        assert metadata["version"] == "1"
        assert metadata["model"] == "llama"
        assert metadata["tokens_seen"] == "100"
        shape = [metadata[n] for n in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim")]
        assert shape == ["3", "4", "2", "32"]
        assert json.loads(metadata["rope"]) == measured.rope

    def test_tensors_that_share_memory_are_written(self, measured: Calibration, tmp_path: Path) -> None:
        shared = dataclasses.replace(measured, q_mean_imag=measured.q_mean_real)
        calibration.save(shared, tmp_path / "c.safetensors")
        assert calibration.load(tmp_path / "c.safetensors").q_mean_imag.equal(measured.q_mean_real)

    def test_unknown_kv_heads_are_not_written(self, measured: Calibration, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="num_kv_heads must be known"):
            calibration.save(dataclasses.replace(measured, num_kv_heads=None), tmp_path / "c.safetensors")

    @pytest.mark.parametrize(
        ("family", "options", "message"),
        [
            ("Llama", {"num_hidden_layers": 2}, r"layers in c.safetensors must be 2 as in llama, got 3"),
            ("Llama", {"num_attention_heads": 8}, r"query heads in c.safetensors must be 8 as in llama, got 4"),
            ("Llama", {"num_key_value_heads": 4}, r"KV heads in c.safetensors must be 4 as in llama, got 2"),
            ("Llama", {"head_dim": 64}, r"head size in c.safetensors must be 64 as in llama, got 32"),
            ("Llama", {"rope": "llama3"}, r"omega in c.safetensors must be llama's inv_freq within 1e-05"),
            ("Llama", {"rope": {**ROPE["default"], "rope_theta": 1e4 * (1 + 3e-5)}}, r"omega in c.safetensors must"),
        ],
    )  # fmt: skip
    def test_of_another_model_is_refused(
        self, measured: Calibration, tmp_path: Path, family: str, options: dict[str, Any], message: str
    ) -> None:
        calibration.save(measured, tmp_path / "c.safetensors")
        with pytest.raises(ValueError, match=rf"^kvc\.calibration: {message}"):
            calibration.load(tmp_path / "c.safetensors", tiny(family, **options).config)

    def test_of_another_attention_factor_is_refused(self, tmp_path: Path) -> None:
        model = tiny(rope="yarn")
        calibration.save(calibration.collect(model, text(20)), tmp_path / "c.safetensors")
        other = tiny(rope={**ROPE["yarn"], "attention_factor": 1.5})
        with pytest.raises(ValueError, match=r"freq_scale_sq in c.safetensors must be 2.25 as in llama"):
            calibration.load(tmp_path / "c.safetensors", other)

    def test_nearly_equal_frequencies_pass(self, measured: Calibration, tmp_path: Path) -> None:
        calibration.save(measured, tmp_path / "c.safetensors")
        near = tiny(rope={"rope_type": "default", "rope_theta": 1e4 * (1 + 5e-6)})
        assert calibration.load(tmp_path / "c.safetensors", near).omega.equal(measured.omega)

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            *(
                (name, None)
                for name in ("format", "version", "model", "rope", "head_dim", "num_layers", "tokens_seen")
            ),
            *(
                (name, "7")
                for name in ("format", "version", "rope", "head_dim", "num_layers", "num_kv_heads")
            ),
            *(
                (name, "no number")
                for name in ("format", "rope", "num_query_heads", "num_kv_heads", "tokens_seen")
            ),
        ],
    )
    def test_wrong_metadata_is_refused(
        self, measured: Calibration, tmp_path: Path, entry: str, value: str | None
    ) -> None:
        from safetensors import safe_open

        path = tmp_path / "c.safetensors"
        calibration.save(measured, path)
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata.pop(entry)
        if value is not None:
            metadata[entry] = value
        safetensors_torch.save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=r"^kvc\.calibration: .* must be "):
            calibration.load(path)

    @pytest.mark.parametrize("change", ["missing", "extra", "nan", "shape", "dtype"])
    def test_wrong_tensors_are_refused(self, measured: Calibration, tmp_path: Path, change: str) -> None:
        from safetensors import safe_open

        path = tmp_path / "c.safetensors"
        calibration.save(measured, path)
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if change == "missing":
            del tensors["omega"]
        elif change == "extra":
            tensors["more"] = torch.zeros(1)
        elif change == "nan":
            tensors["q_mean_imag"][1, 2, 3] = torch.nan
        elif change == "shape":
            tensors["q_norm_excess"] = tensors["q_norm_excess"][:2].contiguous()
        else:
            tensors["omega"] = tensors["omega"].half()
        safetensors_torch.save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=r"^kvc\.calibration: .* must be "):
            calibration.load(path)

    def test_damaged_files_are_refused(self, measured: Calibration, tmp_path: Path) -> None:
        path = tmp_path / "c.safetensors"
        calibration.save(measured, path)
        whole = path.read_bytes()
        for content in (b"", b"text", whole[:5], whole[:20], whole[:-4], b"PK\x03\x04 not a torch file"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"^kvc\.calibration: c.safetensors must be "):
                calibration.load(path)
        with pytest.raises(FileNotFoundError):
            calibration.load(tmp_path / "nowhere")

    def test_other_safetensors_are_refused(self, tmp_path: Path) -> None:
        safetensors_torch.save_file({"weight": torch.zeros(2)}, tmp_path / "m.safetensors")
        with pytest.raises(ValueError, match=r"format of m.safetensors must be kvc.calibration version 1"):
            calibration.load(tmp_path / "m.safetensors")


def per_head(layers: int = LAYERS, heads: int = QUERY_HEADS, half: int = HEAD_DIM // 2) -> dict[str, Any]:
    """The official layout, with numbers that say where they are from."""
    stats = {}
    for layer in range(layers):
        for head in range(heads):
            stats[f"layer{layer:02d}_head{head:02d}"] = {
                "q_mean_real": torch.full((half,), 10.0 * layer + head),
                "q_mean_imag": torch.full((half,), float(layer - head)),
                "q_abs_mean": torch.full((half,), 1.0 + layer + head),
            }
    sampled = [[layer, head] for layer in range(layers) for head in range(heads)]
    return {
        "metadata": {"sampled_heads": sampled, "head_dim": 2 * half, "rope_style": "half"},
        "stats": stats,
    }


def flat() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    shape = (LAYERS, QUERY_HEADS, HEAD_DIM // 2)
    mean = torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    return {
        "E_q": mean,
        "E_q_norm": mean.abs() + torch.rand(shape, generator=generator),
        "omega": 1e4 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)),
        "freq_scale_sq": torch.ones(HEAD_DIM // 2),
    }


class TestOfficialFiles:
    def write(self, tmp_path: Path, content: Any) -> Path:
        torch.save(content, tmp_path / "stats.pt")
        return tmp_path / "stats.pt"

    @pytest.mark.parametrize("rope", ["default", "yarn"])
    def test_one_entry_for_each_head(self, tmp_path: Path, rope: str) -> None:
        model = tiny(rope=rope)
        found = calibration.load(self.write(tmp_path, per_head()), model)
        layer, head = torch.meshgrid(torch.arange(LAYERS), torch.arange(QUERY_HEADS), indexing="ij")
        for f in range(HEAD_DIM // 2):
            assert found.q_mean_real[..., f].equal((10 * layer + head).float())
            assert found.q_mean_imag[..., f].equal((layer - head).float())
            excess = 1 + layer + head - torch.hypot((10 * layer + head).double(), (layer - head).double())
            torch.testing.assert_close(found.q_norm_excess[..., f], excess.float())
        assert found.q_norm_excess[1, 1, 0] == 3 - 11  # as official software has it, though no query could
        assert found.omega.equal(model.model.rotary_emb.inv_freq)
        assert found.freq_scale_sq[0] == pytest.approx(model.model.rotary_emb.attention_scaling**2)
        assert (found.num_kv_heads, found.model, found.tokens_seen) == (KV_HEADS, "llama", 0)
        calibration.save(found, tmp_path / "c.safetensors")
        assert calibration.load(tmp_path / "c.safetensors", model).q_norm_excess.equal(found.q_norm_excess)

    def test_without_a_list_of_heads(self, llama: Any, tmp_path: Path) -> None:
        content = per_head()
        content["metadata"] = {}
        assert calibration.load(self.write(tmp_path, content), llama).num_layers == LAYERS
        del content["metadata"]
        assert calibration.load(self.write(tmp_path, content), llama).num_query_heads == QUERY_HEADS

    @pytest.mark.parametrize("with_model", [False, True])
    def test_flat(self, llama: Any, tmp_path: Path, with_model: bool) -> None:
        content = flat()
        found = calibration.load(
            self.write(tmp_path, {**content, "note": "more"}), llama if with_model else None
        )
        assert torch.complex(found.q_mean_real, found.q_mean_imag).equal(content["E_q"])
        torch.testing.assert_close(found.q_norm_excess, content["E_q_norm"] - content["E_q"].abs())
        assert found.omega.equal(content["omega"])
        assert found.num_kv_heads == (KV_HEADS if with_model else None)

    def test_needs_a_model_for_frequencies(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"model must be given, since stats.pt holds no rotary frequencies"
        ):
            calibration.load(self.write(tmp_path, per_head()))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1, 2], "content of stats.pt must be a dictionary, got list"),
            ({"E_q": 1, "other": 2}, r"keys of stats.pt must be .*got \['E_q', 'other'\]"),
            ({**flat(), "E_q": torch.zeros(3, 4, 16)}, "E_q in stats.pt must be a complex tensor, got torch.float32"),
            ({**flat(), "omega": [1.0]}, "omega in stats.pt must be a real tensor, got list"),
            ({**flat(), "omega": torch.ones(16)}, "omega in stats.pt must be llama's inv_freq within 1e-05"),
            ({**flat(), "freq_scale_sq": torch.full((16,), 1.1)}, "freq_scale_sq in stats.pt must be 1 as in llama"),
            ({**flat(), "E_q_norm": torch.ones(3, 4, 8)}, r"E_q_norm in stats.pt must be of shape \[3, 4, 16\]"),
            ({**flat(), "E_q_norm": torch.full((3, 4, 16), torch.nan)}, "q_norm_excess must be finite, got 192"),
            (per_head(heads=5), r"stats in stats.pt must be 3 layers of 4 .*got layer 2 head 4"),
            (per_head(layers=2), r"stats in stats.pt must be 3 layers of 4 .*got 4 missing, the first layer 2 head 0"),
            (per_head(half=8), "head_dim in stats.pt must be 32 as in llama, got 16"),
            ({"stats": {"mean": torch.ones(3)}}, r"stats in stats.pt must be named layer<l>_head<h>, got mean"),
            ({"stats": [1]}, "stats and metadata in stats.pt must be dictionaries"),
            ({"stats": {}, "metadata": 3}, "stats and metadata in stats.pt must be dictionaries"),
            ({"stats": {}}, "stats in stats.pt must be .*got 12 missing"),
            ({**flat(), "E_q": flat()["E_q"].to_sparse()}, "E_q in stats.pt must be a complex tensor, got a torch"),
            ({**flat(), "omega": torch.ones(16, device="meta")}, "omega in stats.pt must be a real tensor, got a meta"),
            ({"stats": {"layer0_head0": {}, "layer00_head00": {}}}, "stats in stats.pt must be one entry for each"),
            ({"stats": {f"layer{'9' * 5000}_head0": {}}}, "stats in stats.pt must be named"),
        ],
    )  # fmt: skip
    def test_wrong_content_is_refused(self, llama: Any, tmp_path: Path, content: Any, message: str) -> None:
        with pytest.raises(ValueError, match=rf"^kvc\.calibration: {message}"):
            calibration.load(self.write(tmp_path, content), llama)

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"q_mean_real": torch.ones(16), "q_mean_imag": torch.ones(16)}, "q_abs_mean of .* got NoneType"),
            ({"q_mean_real": torch.ones(8)}, r"q_mean_real of .* must be a real tensor \[16\], got .* \[8\]"),
            ([1.0], "q_mean_real of layer01_head02 in stats.pt must be a real tensor"),
            ({"q_mean_real": torch.ones(16, device="meta")}, "q_mean_real of .* a real tensor .* got a meta tensor"),
            (dict.fromkeys(("q_mean_real", "q_mean_imag", "q_abs_mean"), torch.full((16,), torch.inf)),
             "q_mean_real must be finite, got 16"),
        ],
    )  # fmt: skip
    def test_wrong_head_is_refused(self, llama: Any, tmp_path: Path, entry: Any, message: str) -> None:
        content = per_head()
        content["stats"]["layer01_head02"] = entry
        with pytest.raises(ValueError, match=rf"^kvc\.calibration: {message}"):
            calibration.load(self.write(tmp_path, content), llama)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rope_style", "interleaved"),
            ("num_layers", 4),
            ("num_attention_heads", 8),
            ("num_kv_heads", 1),
            ("num_kv_heads", torch.ones(2)),
            ("rope_theta", 5e5),
        ],
    )
    def test_wrong_description_is_refused(self, llama: Any, tmp_path: Path, key: str, value: Any) -> None:
        content = per_head()
        content["metadata"][key] = value
        with pytest.raises(
            ValueError, match=rf"^kvc\.calibration: {key} in stats.pt must be .* got {re.escape(str(value))}"
        ):
            calibration.load(self.write(tmp_path, content), llama)

    def test_code_in_a_file_does_not_run(self, llama: Any, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path.touch, (tmp_path / "ran",))

        path = self.write(tmp_path, {"stats": Bomb()})
        with pytest.raises(
            ValueError, match=r"stats.pt must be safetensors, or a torch file of plain tensors"
        ):
            calibration.load(path, llama)
        assert not (tmp_path / "ran").exists()


class TestReport:
    def test_numbers(self) -> None:
        ones = torch.ones(2, 2, 4)
        parallel = Calibration(
            q_mean_real=3 * ones,
            q_mean_imag=4 * ones,
            q_norm_excess=torch.stack([0 * ones[0], 15 * ones[0]]),  # R = 1, then 5 / 20
            freq_scale_sq=torch.ones(4),
            omega=torch.ones(4),
        )
        assert parallel.resultant_length[0].eq(1).all()
        assert parallel.resultant_length[1].eq(0.25).all()
        console = Console(width=120, file=io.StringIO())
        console.print(calibration.report(parallel))
        rows = re.findall(r"^ +(\d|all) (.*)$", console.file.getvalue(), re.MULTILINE)  # type: ignore[attr-defined]
        cells = {name: rest.split() for name, rest in rows}
        assert cells["0"][:5] == ["1.00", "1.00", "1.00", "100%", "1.00"]
        assert cells["1"][:5] == ["0.25", "0.25", "0.25", "0%", "0.25"]
        assert cells["all"][3:] == ["50%", "0.40", "1.00", "0.25"]

    def test_a_head_that_is_nowhere(self, measured: Calibration) -> None:
        zero = torch.zeros_like(measured.q_mean_real)
        nothing = dataclasses.replace(measured, q_mean_real=zero, q_mean_imag=zero, q_norm_excess=zero)
        assert nothing.resultant_length.eq(0).all()
        calibration.report(nothing)

    def test_picture(self, measured: Calibration, tmp_path: Path) -> None:
        calibration.report(measured, tmp_path / "r.png")
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(calibrate.build_app(), [str(a) for a in arguments])


@pytest.fixture(scope="module")
def on_disk(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it, with a tokenizer that knows 90 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    llama.save_pretrained(folder)
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 90)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        folder
    )
    (folder / "text.txt").write_text(
        "\n".join(" ".join(f"w{i % 89 + 1}" for i in range(j, j + 20)) for j in range(30))
    )
    return folder


class TestCommand:
    def test_collects_and_reports(self, llama: Any, on_disk: Path, tmp_path: Path) -> None:
        output, picture = tmp_path / "c.safetensors", tmp_path / "r.svg"
        result = run("collect", on_disk, on_disk / "text.txt", output, "--window", "64", "--plot", picture)
        assert result.exit_code == 0, result.output
        assert "600 tokens" in result.output
        assert picture.read_text().startswith("<?xml")
        found = calibration.load(output, llama)
        assert found.tokens_seen == 600
        assert found.model == on_disk.name
        ids = torch.tensor([i % 89 + 1 for j in range(30) for i in range(j, j + 20)])
        expected = calibration.collect(llama, ids, window=64)
        torch.testing.assert_close(found.q_mean_real, expected.q_mean_real)

        shown = run("report", output, "--model", on_disk, "--plot", tmp_path / "again.png")
        assert shown.exit_code == 0, shown.output
        assert (tmp_path / "again.png").exists()

    def test_reports_official_files(self, on_disk: Path, tmp_path: Path) -> None:
        torch.save(per_head(), tmp_path / "stats.pt")
        assert run("report", tmp_path / "stats.pt", "--model", on_disk).exit_code == 0
        assert run("report", tmp_path / "stats.pt").exit_code == 2

    def test_converts_official_files(self, llama: Any, on_disk: Path, tmp_path: Path) -> None:
        official, output = tmp_path / "stats.pt", tmp_path / "c.safetensors"
        torch.save(per_head(), official)
        result = run("convert", official, output, "--model", on_disk)
        assert result.exit_code == 0, result.output
        expected, found = calibration.load(official, llama), calibration.load(output)  # now without a model
        assert found.omega.equal(expected.omega)
        assert found.q_norm_excess.equal(expected.q_norm_excess)
        assert run("convert", on_disk / "text.txt", output, "--model", on_disk).exit_code == 2

    @pytest.mark.parametrize(
        "options", [("--window", "0"), ("--window", "8", "--stride", "9"), ("--dtype", "int8")]
    )
    def test_refuses_bad_options(self, on_disk: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
        output = tmp_path / "c.safetensors"
        assert run("collect", on_disk, on_disk / "text.txt", output, *options).exit_code == 2
        assert not output.exists()

    def test_refuses_what_cannot_be_written_before_the_model_runs(
        self, on_disk: Path, tmp_path: Path
    ) -> None:
        arguments = ("collect", on_disk, on_disk / "text.txt")
        assert run(*arguments, tmp_path / "nowhere" / "c.safetensors").exit_code == 2
        for picture in (tmp_path / "nowhere" / "c.png", tmp_path / "c.unknown"):
            assert run(*arguments, tmp_path / "c.safetensors", "--plot", picture).exit_code == 2
        assert run(*arguments, tmp_path / "c.safetensors", "--device", "banana").exit_code == 2
        assert not list(tmp_path.iterdir())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_says_that_there_is_no_gpu(self, on_disk: Path, tmp_path: Path) -> None:
        result = run("collect", on_disk, on_disk / "text.txt", tmp_path / "c", "--device", "cuda")
        assert result.exit_code == 2

    def test_names_the_extra_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "typer", None)
        with pytest.raises(SystemExit, match=r"kvc\[calibrate\]"):
            calibrate.build_app()


class TestTokenStream:
    def test_is_the_text_in_blocks_of_lines(self, on_disk: Path) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(on_disk)
        lines = (on_disk / "text.txt").read_text().splitlines(keepends=True)
        whole = tokenizer("".join(lines))["input_ids"]
        for block in (1, 100, 1 << 16):
            parts = list(calibration.token_stream(tokenizer, lines, block))
            assert len(parts) == {1: 30, 100: 15, 1 << 16: 1}[block]
            assert torch.cat(parts).tolist() == whole
        assert list(calibration.token_stream(tokenizer, [])) == []
