"""Cold pages for an engine: placement by family, checkpoint scales, the bound codec, admission."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvc
import pytest
import torch
from kvc import PageBuffer, PageLayout

NEEDS = "needs kvc[methods]"
pytest.importorskip("pydantic", reason=NEEDS)
pytest.importorskip("safetensors", reason=NEEDS)
pytest.importorskip("xxhash", reason=NEEDS)

from kvc.methods import (  # noqa: E402
    CacheRows,
    ColdPageCodec,
    ColdPageConfig,
    EngineFacts,
    HotBuffer,
    LayerBuffers,
    LayerFacts,
    LifeCycle,
    create_kv_cache_compression_manager,
    load_kv_scales,
)
from safetensors.torch import save_file  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SLOTS = 5


def pools_for(
    buffers: tuple[HotBuffer, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {b.pool: b.offset + b.nbytes for b in sorted(buffers, key=lambda b: b.offset)}
    pools = []
    for _, nbytes in sorted(sizes.items()):
        numbers = torch.randn(SLOTS, -(-nbytes // dtype.itemsize), generator=generator).to(dtype)
        pools.append(numbers.view(torch.uint8)[:, :nbytes].to(device))
    return pools


def bind(
    config: ColdPageConfig, rows: CacheRows | None, *roles: tuple[str, int], layer: int = 0
) -> PageLayout:
    """The layout of a layer whose buffers are one behind the other in pools of their own."""
    buffers = tuple(HotBuffer(role=role, pool=i, nbytes=nbytes) for i, (role, nbytes) in enumerate(roles))
    cycle = LifeCycle(id=0, layers=(LayerBuffers(layer=layer, buffers=buffers, rows=rows),))
    dtype = rows.dtype if rows else torch.uint8
    pools = [torch.zeros(SLOTS, b.nbytes, dtype=torch.uint8).view(dtype) for b in buffers]
    return ColdPageCodec(config, [pools], [cycle]).layouts[0]


def gqa(rows: CacheRows, **options: Any) -> PageLayout:
    return bind(ColdPageConfig(**options), rows, ("key", rows.nbytes), ("value", rows.nbytes))


class TestPlacement:
    """Against the builders of PageLayout, and sizes that are known from elsewhere."""

    @pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3])
    @pytest.mark.parametrize(
        ("rotary", "options", "expected"),
        [
            (64, {}, {}),
            (64, {"skip_rope_quantization": True}, {"rotary_dim": 64, "skip_rope_quantization": True}),
            (0, {"skip_rope_quantization": True}, {}),
            (64, {"nvfp4_residual_dim": 64}, {"residual_dim": 64}),
            (256, {"nvfp4_residual_dim": 64}, {"residual_dim": 64}),
        ],
    )
    def test_gqa(self, dtype: torch.dtype, rotary: int, options: Any, expected: Any) -> None:
        rows = CacheRows.gqa(2, 256, 4, dtype, rotary_dim=rotary)
        assert gqa(rows, **options) == PageLayout.attention(1, 2, 256, 4, dtype, **expected)

    def test_known_sizes(self) -> None:
        # Qwen3.5-like FP8 pages: 2 heads of 256, 4 tokens, 64 rotary elements.
        rows = CacheRows.gqa(2, 256, 4, E4M3, rotary_dim=64)
        assert gqa(rows).cold_page_bytes == 2304
        assert gqa(rows, skip_rope_quantization=True).cold_page_bytes == 2528
        # DeepSeek-V4: 32 rows and an indexer's 2,176 bytes.
        for dtype, options, nbytes in (
            (BF16, {"skip_rope_quantization": True}, 14_336),
            (E4M3, {"skip_rope_quantization": True}, 12_288),
            (E4M3, {}, 11_392),
            (E4M3, {"nvfp4_residual_dim": 64}, 12_544),
        ):
            rows = CacheRows.deepseek_v4(32, dtype)
            layout = bind(ColdPageConfig(**options), rows, ("compress", rows.nbytes), ("indexer", 2176))
            assert layout.cold_page_bytes == nbytes
        rows = CacheRows.mla(512, 64, 64, E4M3)
        assert (
            bind(ColdPageConfig(skip_rope_quantization=True), rows, ("key", rows.nbytes)).cold_page_bytes
            == 22_528
        )
        rows = CacheRows.mla(512, 64, 64, BF16)
        assert (
            bind(ColdPageConfig(), rows, ("key", rows.nbytes), ("index_key", 8448)).cold_page_bytes == 29_184
        )

    @pytest.mark.parametrize("options", [{}, {"skip_rope_quantization": True}, {"nvfp4_residual_dim": 64}])
    def test_mla_and_deepseek_trail(self, options: Any) -> None:
        expected = {("residual_dim" if k == "nvfp4_residual_dim" else k): v for k, v in options.items()}
        rows = CacheRows.mla(128, 64, 8, BF16)
        layout = bind(ColdPageConfig(**options), rows, ("key", rows.nbytes), ("index_key", 36))
        assert layout == PageLayout.mla(1, 128, 64, 8, BF16, side_bytes=36, **expected)
        rows = CacheRows.deepseek_v4(8, BF16)
        layout = bind(ColdPageConfig(**options), rows, ("compress", rows.nbytes))
        assert layout == PageLayout.deepseek_v4(1, 8, BF16, **expected)

    def test_everything_else_is_copied(self) -> None:
        layout = bind(
            ColdPageConfig(skip_rope_quantization=True), None, ("conv_state", 48), ("ssm_state", 100)
        )
        assert layout == PageLayout([[PageBuffer.copy(0, 48), PageBuffer.copy(1, 100)]])

    @pytest.mark.parametrize(
        ("row", "rope", "options", "text"),
        [
            (64, (0, 64), {"skip_rope_quantization": True}, "nothing is left to quantize"),
            (96, (32, 32), {"skip_rope_quantization": True}, "not in its middle"),
            (64, (0, 24), {"skip_rope_quantization": True}, "multiples of 16"),
            (64, (40, 24), {"skip_rope_quantization": True}, "multiples of 16"),
            (64, (0, 32), {"nvfp4_residual_dim": 64}, "64 or wider"),
            (160, (24, 72), {"nvfp4_residual_dim": 64}, ""),  # ends at 96: its last 64 begin at 32
            (160, (8, 70), {"nvfp4_residual_dim": 64}, "multiples of 16"),
        ],
    )
    def test_what_cannot_be_expressed_is_refused(self, row: int, rope: Any, options: Any, text: str) -> None:
        rows = CacheRows(family="gqa", dtype=BF16, rows=8, row_elements=row, rope_range=rope)
        gqa(rows)
        if text:
            with pytest.raises(ValueError, match=text):
                gqa(rows, **options)
        else:
            assert gqa(rows, **options).layers[0][0].residual_range == (32, 64)

    def test_unknown_rope_matters_only_where_it_is_needed(self) -> None:
        rows = CacheRows(family="gqa", dtype=BF16, rows=8, row_elements=64)
        gqa(rows)
        for options in ({"skip_rope_quantization": True}, {"nvfp4_residual_dim": 64}):
            with pytest.raises(NotImplementedError, match="not known"):
                gqa(rows, **options)

    def test_a_range_inside_with_skip_at_the_end_of_the_row(self) -> None:
        rows = CacheRows(family="gqa", dtype=BF16, rows=8, row_elements=96, rope_range=(64, 32))
        assert gqa(rows, skip_rope_quantization=True).layers[0][0].quantized_range == (0, 64)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"row_elements": 40}, "multiple of 16"),
            ({"dtype": torch.int8}, "float16, bfloat16"),
            ({"rope_range": (0, 80)}, "inside a row"),
            ({"rows": 0}, "greater than or equal to 1"),
            ({"family": "ssm"}, "gqa"),
        ],
    )
    def test_bad_rows(self, change: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            CacheRows(**({"family": "gqa", "dtype": BF16, "rows": 8, "row_elements": 64} | change))

    def test_bad_buffers(self) -> None:
        rows = CacheRows.gqa(2, 64, 4, BF16)
        for roles, text in (
            ([("key", rows.nbytes)], "no value"),
            ([("key", rows.nbytes), ("key", rows.nbytes)], "different"),
            ([("key", rows.nbytes), ("value", rows.nbytes - 32)], f"{rows.nbytes} bytes"),
        ):
            with pytest.raises(ValueError, match=text):
                bind(ColdPageConfig(), rows, *roles)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"quant": "int4"}, "nvfp4"),
            ({"nvfp4_residual_dim": 32}, "64"),
            ({"nvfp4_residual_dim": 64, "skip_rope_quantization": True}, "must be 0 beside"),
            ({"unknown": 1}, "Extra inputs"),
        ],
    )
    def test_bad_configurations(self, options: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            ColdPageConfig(**options)


class TestModelConfig:
    @pytest.mark.parametrize(
        ("extra", "rotary"),
        [
            ({}, 128),
            ({"rotary_dim": 32, "partial_rotary_factor": 0.5}, 32),
            ({"partial_rotary_factor": 0.5}, 64),
            ({"rotary_pct": 0.25}, 32),
            ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, 32),
            ({"partial_rotary_factor": 0.1}, 13),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, None),
        ],
    )
    def test_gqa_width(self, extra: Any, rotary: int | None) -> None:
        config = {
            "model_type": "qwen3",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        } | extra
        rows = CacheRows.from_model_config(config, 32, BF16, tensor_parallel_size=2)
        assert (rows.family, rows.rows, rows.row_elements) == ("gqa", 4 * 32, 128)
        assert rows.rope_range == (None if rotary is None else (0, rotary))
        gqa(rows)  # 13 elements matter only where they become a boundary
        if rotary == 13:
            with pytest.raises(ValueError, match="multiples of 16"):
                gqa(rows, skip_rope_quantization=True)

    def test_other_families_and_objects(self) -> None:
        mla = SimpleNamespace(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
        rows = CacheRows.from_model_config(mla, 64, E4M3, tensor_parallel_size=8)
        assert rows == CacheRows.mla(512, 64, 64, E4M3)
        vision = {"text_config": {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 256}}
        assert CacheRows.from_model_config(vision, 16, BF16) == CacheRows.gqa(4, 64, 16, BF16)
        v4 = {"model_type": "deepseek_v4", "kv_lora_rank": None}
        assert CacheRows.from_model_config(v4, 128, BF16) == CacheRows.deepseek_v4(32, BF16)
        with pytest.raises(ValueError, match="multiple of 4"):
            CacheRows.from_model_config(v4, 30, BF16)


def checkpoint(
    folder: Path, tensors: dict[str, float], name: str = "model.safetensors", **metadata: Any
) -> Path:
    save_file({k: torch.tensor(v) for k, v in tensors.items()}, folder / name)
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"} | metadata
    text = {"producer": {"name": "modelopt", "version": "0.40"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(text))
    return folder


def scale_name(layer: int, which: str, prefix: str = "model.") -> str:
    return f"{prefix}layers.{layer}.self_attn.{which}_proj.{which}_scale"


class TestScales:
    def test_names_and_duplicates(self, tmp_path: Path) -> None:
        names = {
            scale_name(0, "k"): 0.5,
            scale_name(0, "v"): 0.25,
            "model.layers.0.self_attn.q_proj.k_scale": 9.0,
        }
        checkpoint(tmp_path, names, "a.safetensors")
        checkpoint(
            tmp_path,
            {scale_name(0, "k", "model.language_model."): 0.75, scale_name(3, "k"): 2.0},
            "b.safetensors",
        )
        checkpoint(tmp_path, {scale_name(0, "k"): 100.0}, "consolidated.safetensors")
        assert load_kv_scales(tmp_path) == {0: {"k": 0.75, "v": 0.25}, 3: {"k": 2.0}}

    def test_metadata_decides(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, {scale_name(0, "k"): 0.5}, kv_cache_quant_algo="FP8")
        assert load_kv_scales(tmp_path) == {}
        (tmp_path / "hf_quant_config.json").unlink()
        assert load_kv_scales(tmp_path) == {}
        own = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}
        (tmp_path / "config.json").write_text(json.dumps(own))
        assert load_kv_scales(tmp_path) == {0: {"k": 0.5}}
        own["quantization_config"]["quant_method"] = "gptq"
        (tmp_path / "config.json").write_text(json.dumps(own))
        assert load_kv_scales(tmp_path) == {}
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match="JSON"):
            load_kv_scales(tmp_path)

    @pytest.mark.parametrize(
        "metadata",
        [
            {"producer": "modelopt", "quantization": {}},
            {"producer": {"name": "modelopt"}, "quantization": ["NVFP4"]},
            ["modelopt"],
        ],
    )
    def test_damaged_metadata_are_an_error(self, metadata: Any, tmp_path: Path) -> None:
        checkpoint(tmp_path, {scale_name(0, "k"): 0.5})
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(metadata))
        with pytest.raises(ValueError, match=r"hf_quant_config\.json must be a JSON object"):
            load_kv_scales(tmp_path)
        (tmp_path / "hf_quant_config.json").write_text('{"producer": null, "quantization": null}')
        assert load_kv_scales(tmp_path) == {}
        (tmp_path / "hf_quant_config.json").unlink()
        (tmp_path / "config.json").write_text('{"quantization_config": "modelopt"}')
        with pytest.raises(ValueError, match=r"quantization_config of .* must be a JSON object, got str"):
            load_kv_scales(tmp_path)

    @pytest.mark.parametrize("kept", [0, 5, -1])
    def test_a_file_that_was_cut_off_is_an_error(self, kept: int, tmp_path: Path) -> None:
        checkpoint(tmp_path, {scale_name(0, "k"): 0.5})
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
            load_kv_scales(tmp_path)

    def test_a_manager_reads_them_when_it_is_made(self, tmp_path: Path) -> None:
        layers = (LayerFacts(index=0, num_kv_heads=2, head_dim=64),)
        config = ColdPageConfig(scale_checkpoint_path=tmp_path)
        with pytest.raises(FileNotFoundError, match="safetensors"):
            create_kv_cache_compression_manager(config, facts(layers))
        checkpoint(tmp_path, {scale_name(0, "k"): 0.5, scale_name(0, "v"): 0.25})
        manager: Any = create_kv_cache_compression_manager(config, facts(layers))
        (tmp_path / "model.safetensors").unlink()
        pools = [[torch.zeros(SLOTS, 2, 2, 4, 64, dtype=BF16)]]
        manager.bind(SimpleNamespace(target=SimpleNamespace(pools=pools), draft=None))
        assert [b.global_scale for b in manager.codec.layouts[0].layers[0]] == [0.5, 0.25]

    def test_only_consolidated_files_are_read_when_there_are_no_others(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, {scale_name(0, "k"): 0.5}, "consolidated.safetensors")
        assert load_kv_scales(tmp_path) == {0: {"k": 0.5}}
        with pytest.raises(FileNotFoundError):
            load_kv_scales(tmp_path / "nowhere")

    @pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 2.0**-110, [0.5, 0.5]])
    def test_bad_scales(self, value: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="k_scale"):
            load_kv_scales(checkpoint(tmp_path, {scale_name(0, "k"): value}))

    def test_each_family_takes_its_own(self, tmp_path: Path) -> None:
        scales = {
            scale_name(4, "k"): 0.5,
            scale_name(4, "v"): 0.25,
            scale_name(5, "k"): 0.3,
            scale_name(6, "v"): 0.3,
        }
        config = ColdPageConfig(scale_checkpoint_path=checkpoint(tmp_path, scales))
        rows = CacheRows.gqa(1, 32, 4, BF16)
        both = ("key", rows.nbytes), ("value", rows.nbytes)
        assert [b.global_scale for b in bind(config, rows, *both, layer=4).layers[0]] == [0.5, 0.25]
        assert [b.global_scale for b in bind(config, rows, *both, layer=9).layers[0]] == [1.0, 1.0]
        with pytest.raises(ValueError, match="no v_scale"):
            bind(config, rows, *both, layer=5)
        draft = CacheRows.gqa(1, 32, 4, BF16, draft=True)
        assert [b.global_scale for b in bind(config, draft, *both, layer=4).layers[0]] == [1.0, 1.0]
        latent = CacheRows.mla(32, 16, 4, BF16)
        assert bind(config, latent, ("key", latent.nbytes), layer=5).layers[0][0].global_scale == 1.0
        assert bind(config, latent, ("key", latent.nbytes), layer=6).layers[0][0].global_scale == 1.0
        v4 = CacheRows.deepseek_v4(4, BF16)
        with pytest.raises(ValueError, match="no k_scale"):
            bind(config, v4, ("compress", v4.nbytes), layer=6)
        layout = bind(config, v4, ("compress", v4.nbytes), layer=5)
        assert layout.layers[0][0].global_scale == torch.tensor(0.3).item()


def many(device: torch.device | str = "cpu") -> tuple[ColdPageCodec, list[torch.Tensor]]:
    """Life cycles 3 and 1 with equal pages, 2 with others, 5 in another cold group and 7 in another hot group."""
    rows, short = CacheRows.gqa(2, 32, 4, BF16), CacheRows.gqa(2, 32, 2, BF16)

    def layers(r: CacheRows, number: int) -> tuple[LayerBuffers, ...]:
        buffers = tuple(
            HotBuffer(role=role, pool=i, nbytes=r.nbytes) for i, role in enumerate(("key", "value"))
        )
        return (LayerBuffers(layer=number, buffers=buffers, rows=r),)

    # As large as 3, and with K where that has V.
    swapped = LayerBuffers(layer=5, rows=rows, buffers=layers(rows, 5)[0].buffers[::-1])
    cycles = [
        LifeCycle(id=3, layers=layers(rows, 0)),
        LifeCycle(id=2, layers=layers(short, 1), cold_group=1),
        LifeCycle(id=1, layers=layers(rows, 2)),
        LifeCycle(id=5, layers=layers(rows, 3), cold_group=4),
        LifeCycle(id=7, layers=layers(rows, 4), hot_group=1),
        LifeCycle(id=9, layers=(swapped,)),
    ]
    buffers = cycles[0].layers[0].buffers
    groups = [pools_for(buffers, BF16, device) for _ in range(2)]
    return ColdPageCodec(ColdPageConfig(), groups, cycles), groups[0]


class TestCodec:
    def test_equal_life_cycles_batch_under_the_smallest(self) -> None:
        codec, _ = many()
        assert {c: codec.batching_id(c) for c in codec.life_cycles} == {1: 1, 2: 2, 3: 1, 5: 5, 7: 7, 9: 9}
        with pytest.raises(ValueError, match="life_cycle"):
            codec.batching_id(4)

    def test_batches_give_the_bytes_of_single_calls(self, device: torch.device) -> None:
        codec, pools = many(device)
        pairs = {
            3: torch.tensor([[0, 4], [2, 1]], dtype=torch.int32),
            1: torch.tensor([[1, 0]], dtype=torch.int32),
            2: torch.tensor([[3, 2]], dtype=torch.int32),
        }
        groups = {0: codec.cold_page_bytes(1), 1: codec.cold_page_bytes(2)}
        batched = {g: torch.zeros(4, n, dtype=torch.uint8, device=device) for g, n in groups.items()}
        single = {g: torch.zeros_like(t) for g, t in batched.items()}
        assert codec.encode_many(batched, pairs) == 2
        for cycle, its in pairs.items():
            codec.encode(cycle, single[1 if cycle == 2 else 0], its)
        for g in groups:
            assert torch.equal(batched[g], single[g])
        layout = codec.layouts[3]
        expected = torch.zeros_like(single[0])
        kvc.encode_pages_(expected, pools, torch.cat((pairs[1], pairs[3])), layout.table, layout.scales)
        assert torch.equal(batched[0], expected)
        for pool in pools:
            pool.zero_()
        assert codec.decode_many(batched, {c: p.flip(1) for c, p in pairs.items()}) == 2
        before = [p.clone() for p in pools]
        for cycle, its in pairs.items():
            codec.decode(cycle, single[1 if cycle == 2 else 0], its.flip(1))
        assert all(torch.equal(a, b) for a, b in zip(before, pools, strict=True))
        assert any(bool(p.any()) for p in pools)

    def test_contradictions_are_refused(self) -> None:
        rows = CacheRows.gqa(2, 32, 4, BF16)
        other = CacheRows.gqa(2, 32, 2, BF16)

        def cycle(identifier: int, r: CacheRows = rows, **options: Any) -> LifeCycle:
            buffers = tuple(
                HotBuffer(role=role, pool=i, nbytes=r.nbytes) for i, role in enumerate(("key", "value"))
            )
            return LifeCycle(
                id=identifier, layers=(LayerBuffers(layer=0, buffers=buffers, rows=r),), **options
            )

        pools = pools_for(cycle(0).layers[0].buffers, BF16)
        for arguments, text in (
            (([pools], []), "non-empty"),
            (([pools, []], [cycle(0)]), "non-empty"),
            (([pools], [cycle(0), cycle(0)]), "different ids"),
            (([pools], [cycle(0, hot_group=1)]), "below 1"),
            (([pools[:1]], [cycle(0)]), "in pools of its hot group"),
            (([pools], [cycle(0), cycle(1, other)]), "one cold page size"),
            (([[p[:, :-32] for p in pools]], [cycle(0)]), "bytes a slot"),
        ):
            with pytest.raises(ValueError, match=text):
                ColdPageCodec(ColdPageConfig(), *arguments)

    def test_native_codec_has_the_same_bytes(self, device: torch.device) -> None:
        codec, _ = many(device)
        try:
            native = codec.native()
        except ImportError as error:
            pytest.skip(str(error))
        pairs = torch.tensor([[0, 4], [2, 1], [1, 3]], dtype=torch.int32)
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        for cycle in codec.life_cycles:
            assert native.cold_page_bytes(cycle) == codec.cold_page_bytes(cycle)
            cold = torch.zeros(3, codec.cold_page_bytes(cycle), dtype=torch.uint8, device=device)
            expected = torch.zeros_like(cold)
            native.encode(cycle, cold.data_ptr(), pairs.data_ptr(), 3, stream)
            codec.encode(cycle, expected, pairs)
            assert torch.equal(cold, expected)
        # Which cold group is the engine's to know: there, 5 differs from 1 only by it.
        assert [native.batching_id(c) for c in (1, 2, 3, 5, 7, 9)] == [1, 2, 1, 1, 7, 9]


def facts(layers: tuple[LayerFacts, ...], **options: Any) -> EngineFacts:
    defaults: dict[str, Any] = {
        "layers": layers,
        "num_q_heads": 4,
        "rotary_dim": 32,
        "dtype": BF16,
        "device": torch.device("cpu"),
        "tokens_per_page": 4,
        "max_requests": 2,
        "max_seq_len": 64,
    }
    return EngineFacts(**(defaults | options))


class TestAdmission:
    def test_the_manager_binds_an_engine(self) -> None:
        layers = (
            LayerFacts(index=0, num_kv_heads=2, head_dim=64),
            LayerFacts(index=1, num_kv_heads=2, head_dim=64, window=8),
            LayerFacts(index=2, num_kv_heads=2, head_dim=64),
            LayerFacts(index=3, num_kv_heads=1, head_dim=24, kind="other"),
        )
        draft = (LayerFacts(index=0, num_kv_heads=1, head_dim=48),)
        config = ColdPageConfig(skip_rope_quantization=True)
        manager: Any = create_kv_cache_compression_manager(
            config, facts(layers, draft_layers=draft, block_reuse=True, max_draft_tokens=2)
        )
        both = torch.zeros(SLOTS, 2, 2, 4, 64, dtype=BF16)
        apart = [torch.zeros(SLOTS, 1, 2, 4, 64, dtype=BF16) for _ in range(2)]
        state = torch.zeros(SLOTS, 1, 1, 4, 24, dtype=BF16)
        small = torch.zeros(SLOTS, 2, 1, 4, 48, dtype=BF16)
        engine = SimpleNamespace(
            target=SimpleNamespace(pools=[[both], apart, [both.clone()], [state]]),
            draft=SimpleNamespace(pools=[[small]]),
        )
        manager.bind(engine)
        codec = manager.codec
        cycles = codec.life_cycles
        assert {c: (v.hot_group, v.cold_group) for c, v in cycles.items()} == {
            0: (0, 0),
            1: (0, 1),
            2: (1, 2),
        }
        assert [[b.pool for b in layer] for layer in codec.layouts[0].layers] == [[0, 0], [3, 3], [4]]
        assert [[b.pool for b in layer] for layer in codec.layouts[1].layers] == [[1, 2]]
        key, value = codec.layouts[0].layers[0]
        assert (key.quantized_range, value.quantized_range, value.offset) == ((32, 32), (0, 64), key.nbytes)
        assert codec.layouts[0].layers[2][0].transform == "copy"

    def test_mla_engines(self) -> None:
        layers = (LayerFacts(index=0, num_kv_heads=1, head_dim=96, kind="mla"),)
        manager: Any = create_kv_cache_compression_manager(
            ColdPageConfig(skip_rope_quantization=True), facts(layers)
        )
        pool = torch.zeros(SLOTS, 1, 1, 4, 96, dtype=BF16)
        manager.bind(SimpleNamespace(target=SimpleNamespace(pools=[[pool]]), draft=None))
        assert manager.codec.layouts[0] == PageLayout.mla(1, 64, 32, 4, BF16, skip_rope_quantization=True)

    def test_what_cannot_work_is_refused_at_construction(self) -> None:
        layers = (LayerFacts(index=7, num_kv_heads=2, head_dim=64),)
        with pytest.raises(ValueError, match=r"layer 7: .*nothing is left"):
            create_kv_cache_compression_manager(
                ColdPageConfig(skip_rope_quantization=True), facts(layers, rotary_dim=64)
            )
        odd = (LayerFacts(index=3, num_kv_heads=2, head_dim=40),)
        with pytest.raises(ValueError, match=r"(?s)layer 3: .*multiple of 16"):
            create_kv_cache_compression_manager(ColdPageConfig(), facts(odd))
        manager = create_kv_cache_compression_manager(ColdPageConfig(), facts(layers))
        pools = [[torch.zeros(SLOTS, 2, 2, 4, 64, dtype=BF16)]] * 2
        with pytest.raises(ValueError, match="those of 1 layers"):
            manager.bind(SimpleNamespace(target=SimpleNamespace(pools=pools), draft=None))
        interleaved = torch.zeros(SLOTS, 4, 2, 2, 64, dtype=BF16).transpose(1, 3).transpose(1, 2)
        with pytest.raises(ValueError, match="contiguous"):
            manager.bind(SimpleNamespace(target=SimpleNamespace(pools=[[interleaved]]), draft=None))
        for shape in ((SLOTS, 4, 2, 64), (0, 2, 2, 4, 64)):
            empty = [[torch.zeros(shape, dtype=BF16)]]
            with pytest.raises(ValueError, match=r"pools must be .* and not empty"):
                manager.bind(SimpleNamespace(target=SimpleNamespace(pools=empty), draft=None))

    def test_planes_that_lie_apart_have_the_cold_pages_of_planes_that_do_not(self) -> None:
        layers = (LayerFacts(index=0, num_kv_heads=2, head_dim=64),)
        together = torch.randn(SLOTS, 2, 4, 2, 64).to(BF16)
        apart = together.transpose(
            0, 1
        ).contiguous()  # [2, pages, tokens, heads, D], as FlashAttention has it
        cold = []
        for pool in (together.transpose(2, 3), apart.permute(1, 0, 3, 2, 4)):
            manager: Any = create_kv_cache_compression_manager(ColdPageConfig(), facts(layers))
            manager.bind(SimpleNamespace(target=SimpleNamespace(pools=[[pool]]), draft=None))
            pages = torch.zeros(1, manager.codec.cold_page_bytes(0), dtype=torch.uint8)
            manager.codec.encode(0, pages, torch.tensor([[0, 1]], dtype=torch.int32))
            cold.append(pages)
        assert cold[0].any()
        assert torch.equal(*cold)
