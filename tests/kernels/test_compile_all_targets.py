"""Every kernel as its launcher launches it, compiled ahead of time for each GPU generation: no GPU needed.

The launchers run with their kernel replaced by a recorder and the device's facts by another generation's, so
that what is compiled is what would be launched there. Shared memory must fit the generation, and registers
must hold nearly everything: code tuned on a data-centre card is thus kept from failing on a laptop's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.kernels import (
    activation,
    attention_decode,
    attention_prefill,
    attention_prefill_hopper,
    attention_runs,
    gpu_linear,
    gpu_linear_split,
    kv_convert,
    kv_store,
    norm_rope,
    rope_and_store,
    row_expansion,
    sampling,
    sampling_scan,
)
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.normed import Normed
from nanochat.kernels.rows import StepRows
from nanochat.kernels.seen import SeenRows
from nanochat.kernels.triton_utils import INTERPRETED, DeviceInfo
from nanochat.kernels.tuning import DecodeConfig, decode_config, prefill_config
from tests.kernels.compiling import NUM_SMS, SHARED_KB, Recorder, check_launches, programs_that_fit

pytestmark = pytest.mark.skipif(INTERPRETED, reason="under the interpreter nothing is compiled")


@pytest.fixture(autouse=True)
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the programs of decode attention do is worked out by a kernel of its own, which no GPU is here to run."""
    monkeypatch.setattr(attention_decode, "plan_runs", lambda *_, **__: torch.zeros(1, dtype=torch.int32))


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled code goes to a folder of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def float_dtype(capability: int) -> torch.dtype:
    return torch.bfloat16 if capability >= 80 else torch.float16


def attention_inputs(
    capability: int,
    dim: int,
    int8: bool,
    rows: int,
    queries: int,
    context: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, LayerCache, AttentionBatch]:
    """Shapes and types alone matter."""
    dtype = dtype or float_dtype(capability)
    data = [torch.zeros(2, 16, 8, dim, dtype=torch.int8 if int8 else dtype) for _ in range(2)]
    scales = [torch.zeros(2, 16, 8, dtype=torch.float16) for _ in range(2)] if int8 else []
    batch = AttentionBatch(
        num_decodes=rows if queries == 1 else 0,
        block_tables=torch.zeros(rows, 7, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32) * queries,
        max_query_len=queries,
        max_context_len=context,
    )
    return torch.zeros(rows * queries, 16, dim, dtype=dtype), LayerCache(*data, *scales), batch


FAMILIES = (75, 86, 90)
"""One generation of each family of tile sizes; the others differ from one of these in the compiler alone."""
CAPABILITIES = [pytest.param(c, marks=() if c in FAMILIES else pytest.mark.slow) for c in SHARED_KB]


def how_often(capability: int, dim: int) -> tuple[pytest.MarkDecorator, ...]:
    """Attention takes most time to compile, so less common cases are left to slower runs."""
    if capability not in FAMILIES:
        return (pytest.mark.long,)
    return () if dim == 128 else (pytest.mark.slow,) if dim == 64 else (pytest.mark.long,)


GPUS_AND_DIMS = [
    pytest.param(capability, dim, marks=how_often(capability, dim))
    for capability in SHARED_KB
    for dim in ((64, 80, 128, 256) if capability in FAMILIES else (128,))
]


@pytest.mark.parametrize(("capability", "dim"), GPUS_AND_DIMS)
@pytest.mark.parametrize("int8", [False, True])
def test_decode_attention(monkeypatch: pytest.MonkeyPatch, capability: int, dim: int, int8: bool) -> None:
    # Some tile sizes depend on the number of rows.
    for rows in ((2, 4, 40) if int8 else (2, 20)) if capability == 90 else (2,):
        inputs = attention_inputs(capability, dim, int8, rows, 1, 100)

        def two_layers(inputs: Any = inputs) -> None:
            """The second finds the plan made, so that it may start early."""
            for _ in range(2):
                attention_decode.decode_attention(*inputs, scale=1.0)

        compiled = check_launches(monkeypatch, capability, attention_decode, "_decode_kernel", two_layers)
        if capability == 90 and dim in (64, 128):
            # Of more that fit, the grid's would be placed unevenly; of fewer, some would come after all others.
            config, fit = decode_config(90, dim, 1 if int8 else 2, rows, 8), programs_that_fit(compiled[-1])
            assert fit == config.programs_per_sm


@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_cuts_go_by_what_a_generation_has(kv_bytes: int) -> None:
    """10.3 and 11.0 have the shared memory of 9.0, and dependent launch; 12.1 has that of 8.9."""
    for sizes in ((64, kv_bytes, 4, 8), (128, kv_bytes, 40, 8), (256, kv_bytes, 4, 8)):
        assert decode_config(103, *sizes) == decode_config(110, *sizes) == decode_config(90, *sizes)
        assert decode_config(121, *sizes) == decode_config(120, *sizes) == decode_config(89, *sizes)
    for sizes in ((128, 2, kv_bytes, 500), (128, 2, kv_bytes, 8000)):
        assert prefill_config(103, *sizes) == prefill_config(90, *sizes)
        assert prefill_config(121, *sizes) == prefill_config(89, *sizes)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_plan_of_decode_attention(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    _, _, batch = attention_inputs(capability, 64, False, 300, 1, 100)
    config = DecodeConfig(32, 4, 1, 4, 4, 16)
    for window, int8 in ((0, False), (64, True)):
        check_launches(
            monkeypatch,
            capability,
            attention_runs,
            "_plan_kernel",
            lambda w=window, i=int8: attention_runs.plan_runs(batch, 528, 8, config, window=w, int8=i),
        )


@pytest.mark.parametrize(("capability", "dim"), GPUS_AND_DIMS)
@pytest.mark.parametrize("int8", [False, True])
def test_prefill_attention(monkeypatch: pytest.MonkeyPatch, capability: int, dim: int, int8: bool) -> None:
    """Whichever of the two kernels is launched on this GPU for these heads; tiles depend on the context."""
    monkeypatch.setattr(attention_prefill, "device_info", lambda device: DeviceInfo(capability, NUM_SMS))
    for context in {75: (32,), 90: (32, 256, 1024, 8192)}.get(capability, (32, 8192)):
        q, cache, batch = attention_inputs(capability, dim, int8, 2, 32, context)
        gluon = capability == 90 and int8 and dim in (64, 128) and context > 64
        check_launches(
            monkeypatch,
            capability,
            attention_prefill_hopper if gluon else attention_prefill,
            "_prefill_int8_kernel" if gluon else "_prefill_kernel",
            lambda a=(q, cache, batch): attention_prefill.prefill_attention(*a, scale=1.0),
        )


@pytest.mark.parametrize(("capability", "dim"), GPUS_AND_DIMS)
@pytest.mark.parametrize("window", [0, pytest.param(64, marks=pytest.mark.slow)])
def test_conversion_for_prefill(
    monkeypatch: pytest.MonkeyPatch, capability: int, dim: int, window: int
) -> None:
    q, *cached = attention_inputs(capability, dim, True, 2, 32, 1024)
    launch = functools.partial(kv_convert.convert_prefills, *cached, q.dtype, window)
    check_launches(monkeypatch, capability, kv_convert, "_convert_kernel", launch)


@pytest.mark.parametrize("dim", [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 80, 256))])
def test_prefill_attention_after_conversion(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """Only on Hopper, and under dependent launch."""
    for module in (attention_prefill, kv_convert):
        monkeypatch.setattr(module, "device_info", lambda device: DeviceInfo(90, NUM_SMS))
        monkeypatch.setattr(module, "dependent_launch", lambda device: True)
    monkeypatch.setattr(kv_convert, "_convert_kernel", Recorder(kv_convert._convert_kernel))
    for inputs in (attention_inputs(90, dim, True, 2, *sizes) for sizes in ((1024, 1024), (512, 8192))):
        launch = functools.partial(attention_prefill.prefill_attention, *inputs, scale=1.0)
        check_launches(monkeypatch, 90, attention_prefill, "_prefill_kernel", launch)
    assert len(kv_convert._convert_kernel.launches) == 2


def test_decodes_beside_a_prefill_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows that prefill begin is a number like others: it was an alignment, and a compilation in mid-chat."""
    modules = (attention_prefill, attention_prefill_hopper, kv_convert)
    for module in modules:
        monkeypatch.setattr(module, "device_info", lambda device: DeviceInfo(90, NUM_SMS), raising=False)
    names = ("_prefill_kernel", "_prefill_int8_kernel", "_convert_kernel")
    recorders = [Recorder(getattr(module, name)) for module, name in zip(modules, names, strict=True)]
    for module, name, recorder in zip(modules, names, recorders, strict=True):
        monkeypatch.setattr(module, name, recorder)
    for int8 in (False, True):
        q, cache, batch = attention_inputs(90, 128, int8, 8, 32, 1024)
        for num_decodes in range(6):
            mixed = dataclasses.replace(batch, num_decodes=num_decodes)
            attention_prefill.prefill_attention(q, cache, mixed, scale=1.0)
            if int8:
                kv_convert.convert_prefills(cache, mixed, q.dtype, 0)
    for recorder in recorders:
        assert len(recorder.launches) == 6
        first = recorder.launches[0].source
        for other in (launch.source for launch in recorder.launches):
            assert (other.signature, other.constants) == (first.signature, first.constants)
            assert other.attrs == first.attrs


@pytest.mark.parametrize("context", [200, 1024])
@pytest.mark.parametrize("group", [32, 64, 80, 128, 160])
def test_any_number_of_heads_may_share_one(monkeypatch: pytest.MonkeyPatch, group: int, context: int) -> None:
    """The Hopper kernel's tiles have room for some; others go to the kernel whose tiles grow with them."""
    for module in (attention_prefill, attention_prefill_hopper):
        monkeypatch.setattr(module, "device_info", lambda device: DeviceInfo(90, NUM_SMS), raising=False)
    recorders = []
    for module, name in (
        (attention_prefill, "_prefill_kernel"),
        (attention_prefill_hopper, "_prefill_int8_kernel"),
    ):
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    _, cache, batch = attention_inputs(90, 128, True, 2, 32, context)
    shared = LayerCache(
        cache.k[:, :, :1], cache.v[:, :, :1], cache.k_scale[:, :, :1], cache.v_scale[:, :, :1]
    )
    q = torch.zeros(64, group, 128, dtype=torch.bfloat16)
    attention_prefill.prefill_attention(q, shared, batch, scale=1.0)
    small_enough = group <= (64 if context <= 256 else 128)
    assert [len(recorder.launches) for recorder in recorders] == [not small_enough, small_enough]


@pytest.mark.slow
@pytest.mark.parametrize("capability", FAMILIES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("changes", [{"dtype": torch.float32}, {"window": 64, "softcap": 30.0}], ids=str)
def test_attention_of_the_rarer_kinds(
    monkeypatch: pytest.MonkeyPatch, capability: int, int8: bool, changes: dict[str, Any]
) -> None:
    options = dict(changes)
    dtype = options.pop("dtype", None)
    for queries, module, kernel, function in (
        (1, attention_decode, "_decode_kernel", attention_decode.decode_attention),
        (32, attention_prefill, "_prefill_kernel", attention_prefill.prefill_attention),
    ):
        inputs = attention_inputs(capability, 128, int8, 2, queries, 1024, dtype)
        check_launches(
            monkeypatch,
            capability,
            module,
            kernel,
            lambda f=function, a=inputs: f(*a, scale=1.0, **options),
        )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("int8", [False, True])
def test_store_kv(monkeypatch: pytest.MonkeyPatch, capability: int, int8: bool) -> None:
    k, cache, _ = attention_inputs(capability, 80, int8, 4, 1, 1)
    slots = torch.zeros(4, dtype=torch.int64)
    check_launches(
        monkeypatch,
        capability,
        kv_store,
        "_store_kernel",
        lambda: kv_store.store_kv(k[:, :8], k[:, 8:], cache, slots),
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_norm_rope_and_activation(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    dtype = float_dtype(capability)
    x = torch.zeros(8, 1024, dtype=dtype)
    q = torch.zeros(8, 16, 128, dtype=dtype)
    positions, angles, wide = torch.zeros(8, dtype=torch.int64), torch.zeros(64, 96), torch.zeros(64, 128)
    odd = torch.zeros(8, 8, 80, dtype=dtype)
    weight = torch.zeros(128, dtype=dtype)
    for module, name, launch in (
        (norm_rope, "_norm_kernel", lambda: norm_rope.rms_norm(x, x[0], 1e-6, x)),
        (
            norm_rope,
            "_divide_kernel",
            lambda: norm_rope.divide_norm(Normed(x, torch.zeros(9, x.shape[0]), 1e-6)),
        ),
        (norm_rope, "_norm_kernel", lambda: norm_rope.rms_norm(x, x[0], 1e-6, plus_one=True)),
        (
            norm_rope,
            "_rope_kernel",
            lambda: norm_rope.rope(q, q[:, :8], positions, angles, q_norm=weight, k_norm=weight),
        ),
        (
            norm_rope,
            "_rope_kernel",
            lambda: norm_rope.rope(q, q[:, :8], positions, wide, q_norm=weight, k_norm=weight, spread=True),
        ),
        (norm_rope, "_rope_kernel", lambda: norm_rope.rope(q, q[:, :8], positions, None, spread=True)),
        (norm_rope, "_rope_kernel", lambda: norm_rope.rope(odd, odd, positions, None, spread=True)),
        (activation, "_gate_kernel", lambda: activation.silu_mul(x)),
        (activation, "_gate_kernel", lambda: activation.gelu_tanh_mul(x)),
    ):
        check_launches(monkeypatch, capability, module, name, launch)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("int8", [False, True])
def test_rope_store(monkeypatch: pytest.MonkeyPatch, capability: int, int8: bool) -> None:
    q, cache, _ = attention_inputs(capability, 128, int8, 4, 1, 1)
    weight = torch.zeros(128, dtype=q.dtype)
    longs, angles = torch.zeros(4, dtype=torch.int64), torch.zeros(64, 128)
    check_launches(
        monkeypatch,
        capability,
        rope_and_store,
        "_rope_store_kernel",
        lambda: rope_and_store.rope_store(
            q, q[:, :8], q[:, 8:], longs, angles, cache, longs, q_norm=weight, k_norm=weight
        ),
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_expand_rows(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    ints = [torch.zeros(count, dtype=torch.int32) for count in (4, 4, 5, 4, 5, 9, 40)]
    last_ids, tables = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 7, dtype=torch.int32)
    check_launches(
        monkeypatch,
        capability,
        row_expansion,
        "_expand_kernel",
        lambda: row_expansion.expand_rows(StepRows(*ints), last_ids, tables, 16),
    )


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c.values[0] >= 80])
def test_linear(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Older GPUs have no kernel of ours."""
    half = torch.float16 if capability == 86 else torch.bfloat16
    weight, up, down = (
        torch.zeros(1, dtype=half).expand(shape).contiguous()
        for shape in ((256, 1024), (512, 1024), (256, 3072))
    )
    for rows in (3, 8) if capability == 90 else (3,):
        x, wide = torch.zeros(rows, 1024, dtype=half), torch.zeros(rows, 3072, dtype=half)
        normed = Normed(x, torch.zeros(36, rows), 1e-6)
        residual = torch.zeros(rows, 256)
        launches: list[Callable[[], object]] = [
            lambda x=normed: gpu_linear.linear(x, weight, weight[:, 0].contiguous(), dtype=torch.float32),
            lambda x=normed: gpu_linear.silu_linear(x, up),
        ]
        if half == torch.bfloat16:
            launches.append(
                lambda x=wide, r=residual: gpu_linear.linear_add_norm(x, down, None, r, r[0].to(half), 1e-6)
            )
        for launch in launches:
            check_launches(monkeypatch, capability, gpu_linear, "_linear_kernel", launch)
    wide = torch.zeros(32, 3072, dtype=half)
    check_launches(
        monkeypatch, capability, gpu_linear, "_linear_kernel", lambda: gpu_linear.linear(wide, down[:240])
    )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_split_linear(monkeypatch: pytest.MonkeyPatch, half: torch.dtype) -> None:
    """Hopper alone has it: tiles of one program, two, three and four, with what they are joined with."""
    monkeypatch.setattr(gpu_linear, "device_info", lambda device: DeviceInfo(90, 132))

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=half)

    whole, up = zeros(2048, 1024), zeros(3072, 576)
    for rows in (16, 32, 64):
        normed, wide = Normed(zeros(rows, 1024), torch.zeros(36, rows), 1e-6), zeros(rows, 3072)
        narrow = Normed(zeros(rows, 576), torch.zeros(9, rows), 1e-6)
        residual = torch.zeros(rows, 1024)
        launches: list[Callable[[], object]] = [
            lambda x=normed: gpu_linear.linear(x, whole, zeros(2048), dtype=torch.float32),
            lambda x=narrow: gpu_linear.silu_linear(x, up, zeros(3072)),
            lambda rows=rows: gpu_linear.linear(zeros(rows, 2048), zeros(1024, 2048)),
            lambda rows=rows: gpu_linear.linear(zeros(rows, 2560), zeros(960, 2560)),
        ]
        if half == torch.bfloat16:
            launches += [
                lambda x=wide, r=residual, p=plus_one: gpu_linear.linear_add_norm(
                    x, zeros(1024, 3072), None, r, zeros(1024), 1e-6, plus_one=p
                )
                for plus_one in (False, True)
            ]
        for launch in launches:
            check_launches(monkeypatch, 90, gpu_linear_split, "_split_kernel", launch)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_penalized", [False, True])
def test_sampling(monkeypatch: pytest.MonkeyPatch, capability: int, is_penalized: bool) -> None:
    row = torch.zeros(3)
    long = torch.zeros(3, dtype=torch.int64)
    seen = SeenRows(torch.zeros((4, 282), dtype=torch.int32), long, long)
    penalized = (row, seen) if is_penalized else None
    kernels = [
        (sampling_scan, "_best_kernel"),
        (sampling_scan, "_weigh_kernel"),
        (sampling_scan, "_copy_kernel"),
        (sampling, "_choose_kernel"),
    ]
    for module, name in kernels:
        with monkeypatch.context() as patch:
            for other_module, other in kernels:
                if other != name:
                    patch.setattr(other_module, other, Recorder(getattr(other_module, other)))
            check_launches(
                patch,
                capability,
                module,
                name,
                lambda: sampling.sample_tokens(
                    torch.zeros(3, 9000), row, row.int(), row, row, long, long, penalized
                ),
            )
