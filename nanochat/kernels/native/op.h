/* One operation of a decoder's step on the CPU, and what runs it. Mirrored by `library.py`.
 *
 * Tensors are rows of numbers, one row a token; sums are float32, and so are factors unless said. An operation's
 * results for a row depend on that row alone, whatever stands beside it and however many threads compute it.
 */
#ifndef NANOCHAT_OP_H
#define NANOCHAT_OP_H

#include <stddef.h>
#include <stdint.h>

enum Type { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

enum Kind {
    TAKE_ROWS = 0, /* y[t] = x[index[t]] * scale */
    RMS_NORM,      /* y = norm(x + residual) * w, summed = x + residual */
    GATED_SILU,    /* y = silu(first half of x) * second half */
    GATED_GELU,    /* the same with GELU's tanh approximation */
    QUANTIZE,      /* y = x in 8 bits, a scale for each group of 32 (see `quantized_row_bytes`) */
    LINEAR_INT4,   /* y = x @ w.T + bias of quantised x; `linear.h` has the order of w */
    LINEAR_INT8,
    LINEAR_FLOAT,  /* the same of float32 or bfloat16 x, and w [n, k] of that type */
    ROPE_STORE,    /* y = rotated x; k, rotated, and v go to the cache; of an INT8 cache x and k are spread */
    ATTENTION,     /* y = causal attention of x to the cache */
    ARGMAX,        /* y = place of the largest number of float32 x, the first of equals; NaN is the smallest */
    SAMPLE,        /* y = a token drawn from logits x; summed is used up */
    PACK_INT4,     /* y = x [n, inner] in 4 bits; summed[panel] = how far a number is from its level, in steps */
    PACK_INT8,     /* y = x [n, inner] in 8 bits; summed[output] = its scale */
    LINEAR_WIDE_INT4, /* y = x @ w.T + bias of many rows; w as of LINEAR_INT4 and so on. With AVX-512 both factors
                         are BF16, as in ATTENTION_WIDE, else float32, and so x must be */
    LINEAR_WIDE_INT8,
    LINEAR_WIDE_FLOAT,
    ATTENTION_WIDE, /* ATTENTION, for runs of many tokens */
    LINEAR_UPPER,   /* y = about x @ w.T + bias of quantised x; `linear_upper.h` has these four, and the order of w */
    BOUND,          /* summed[t] = two numbers that say which of LINEAR_UPPER's y may be the largest */
    LINEAR_REST,    /* those of y as LINEAR_INT8 has them, or all */
    PACK_HALVES,    /* y = x, which PACK_INT8 made, and w_scales; summed = each panel's vectors */
    LINEAR_WIDE_HALVES,
    WIDEN,          /* y = x, float32 of BF16 */
    NUM_KINDS
};

enum { GROUP = 32, PANEL = 16, MAX_GROUP_HEADS = 16, MAX_HEAD_DIM = 256, SPREAD = 64 };

typedef struct Op {
    int32_t kind;
    int32_t x_type, y_type, w_type, residual_type, cache_type;
    int32_t n, inner;   /* numbers in a row of y; in a row of x, where that differs */
    int32_t heads, kv_heads, head_dim, rotary_dim;
    int32_t block_size, table_width, window, plus_one;
    float eps, scale, softcap, unused;
    int64_t x_stride, k_stride, v_stride; /* numbers from one row to the next */
    const int32_t *rows;       /* how many rows there are when it runs */
    const int32_t *batch_rows; /* ATTENTION: how many runs of tokens. LINEAR_UPPER and so on: 1 if all of y is wanted */
    const void *x, *k, *v;
    void *y;
    const void *w, *w_scales, *bias;
    const void *residual;
    void *summed;
    const int64_t *index;      /* TAKE_ROWS: rows of x. ROPE_STORE: positions */
    const int64_t *slots;
    const float *cos_sin;
    const void *q_norm, *k_norm;
    void *k_cache, *v_cache;
    uint16_t *k_scale, *v_scale; /* float16 */
    const int32_t *block_tables, *context_lens, *query_starts;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *seeds;      /* index: the positions of the tokens to be drawn */
} Op;

/* What one instruction set has. `run` does part `part` of `parts` of an operation that has `units` of work. */
typedef struct Kernels {
    const char *name;
    void (*run[NUM_KINDS])(const Op *op, int64_t first, int64_t last);
} Kernels;

/* A quantised row: k bytes, then for each group its scale (float), scale * sum (float) and -128 * sum (int32). */
static inline int64_t quantized_row_bytes(int64_t k) { return k + k / GROUP * 12; }

/* Tokens that ATTENTION_WIDE takes at once: about as many as make 96 queries of a KV head. */
static inline int64_t query_tile(const Op *op) {
    const int64_t tokens = 96 * (int64_t)op->kv_heads / op->heads;
    return tokens < 4 ? 4 : tokens > 64 ? 64 : tokens;
}

/* The calling thread's own memory, 64-byte aligned, until it asks again; NULL if there is none. */
void *scratch(size_t bytes);

extern const Kernels kernels_plain;
#ifdef WITH_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef WITH_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef WITH_AMX
extern const Kernels kernels_amx;
#endif

#endif
