/* All operations for the instruction set that the including file is compiled for. It defines KERNELS and NAME. */
#include "simd.h"

#include "rowwise.h"

#include "linear.h"

#include "linear_upper.h"

#include "pack.h"

#include "sample.h"

#include "attention.h"

#include "product.h"

#include "linear_wide.h"

#include "attention_wide.h"

const Kernels KERNELS = {
    NAME,
    {
        [TAKE_ROWS] = run_take_rows,
        [RMS_NORM] = run_rms_norm,
        [GATED_SILU] = run_silu,
        [GATED_GELU] = run_gelu,
        [QUANTIZE] = run_quantize,
        [LINEAR_INT4] = run_linear_int4,
        [LINEAR_INT8] = run_linear_int8,
        [LINEAR_FLOAT] = run_linear_float,
        [LINEAR_WIDE_INT4] = run_linear_wide,
        [LINEAR_WIDE_INT8] = run_linear_wide,
        [LINEAR_WIDE_FLOAT] = run_linear_wide,
        [LINEAR_WIDE_HALVES] = run_linear_wide,
        [LINEAR_UPPER] = run_linear_upper,
        [BOUND] = run_bound,
        [LINEAR_REST] = run_linear_rest,
        [WIDEN] = run_widen,
        [PACK_HALVES] = run_pack_halves,
        [ATTENTION_WIDE] = run_attention_wide,
        [ROPE_STORE] = run_rope_store,
        [ATTENTION] = run_attention,
        [ARGMAX] = run_argmax,
        [SAMPLE] = run_sample,
        [PACK_INT4] = run_pack_int4,
        [PACK_INT8] = run_pack_int8,
    },
};
