/* What touches the paged cache. A token's slot is block * block_size + place, and a slot is [kv_heads, head_dim]. */

INLINE void normed_head(float *x, const Op *op, const void *weight, int type) {
    if (!weight) return;
    vf squares = {0};
    for (int i = 0; i < op->head_dim; i += LANES) {
        vf a = load_floats(x + i);
        squares += a * a;
    }
    const float factor = 1.0f / sqrtf(sum(squares) / (float)op->head_dim + op->eps);
    for (int i = 0; i < op->head_dim; i += LANES) {
        vf w = load(weight, type, i) + (op->plus_one ? 1.0f : 0.0f);
        store(x, FLOAT32, i, load_floats(x + i) * factor * w);
    }
}

/* Pairs are (i, i + rotary_dim / 2). */
INLINE void rotated_head(float *x, const Op *op, const float *cosines) {
    const int half = op->rotary_dim / 2;
    const float *sines = cosines + half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load_floats(x + i), b = load_floats(x + half + i);
        vf c = load_floats(cosines + i), s = load_floats(sines + i);
        store(x, FLOAT32, i, a * c - b * s);
        store(x, FLOAT32, half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* Times `reference.hadamard_matrix`, in sums and differences: first of the halves, then within blocks. */
INLINE void spread_head(float *x, int dim) {
    const int size = dim & -dim, half = dim / 2;
    const float factor = 1.0f / sqrtf((float)size);
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = (a + b) * factor, x[half + i] = (a - b) * factor;
    }
    for (int distance = 1; distance < size / 2; distance *= 2)
        for (int block = 0; block < dim; block += 2 * distance)
            for (int i = block; i < block + distance; i++) {
                const float a = x[i], b = x[i + distance];
                x[i] = a + b, x[i + distance] = a - b;
            }
}

/* `nanochat.kernels.store_kv` of one head: the same bits as the reference's. */
INLINE void store_head(const float *x, const Op *op, void *cache, uint16_t *scales, int64_t slot, int head) {
    const int64_t at = (slot * op->kv_heads + head) * op->head_dim;
    if (op->cache_type != INT8) {
        for (int i = 0; i < op->head_dim; i += LANES) store(cache, op->cache_type, at + i, load_floats(x + i));
        return;
    }
    float most = 0.0f;
    for (int i = 0; i < op->head_dim; i++) {
        const float a = fabsf(x[i]);
        if (a > most) most = a; /* false for NaN */
    }
    float scale = most / 127.0f;
    if (scale > 65504.0f) scale = 65504.0f;
    const uint16_t half = float_to_half(scale);
    scales[slot * op->kv_heads + head] = half;
    const float divisor = half_to_float(half);
    int8_t *values = (int8_t *)cache + at;
    for (int i = 0; i < op->head_dim; i++) {
        float a = half ? x[i] / divisor : 0.0f;
        if (!(a >= -127.0f)) a = a != a ? 0.0f : -127.0f;
        if (a > 127.0f) a = 127.0f;
        values[i] = (int8_t)(a + copysignf(0.49999997f, a));
    }
}

INLINE void rope_store(const Op *op, int64_t first, int64_t last, int type) {
    const int64_t dim = op->head_dim;
    float x[MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int64_t t = first; t < last; t++) {
        const int64_t slot = op->slots[t];
        const float *cosines = op->rotary_dim ? op->cos_sin + op->index[t] * op->rotary_dim : 0;
        if (op->x)
            for (int head = 0; head < op->heads; head++) {
                for (int64_t i = 0; i < dim; i += LANES)
                    store(x, FLOAT32, i, load(op->x, type, t * op->x_stride + head * dim + i));
                normed_head(x, op, op->q_norm, type);
                rotated_head(x, op, cosines);
                if (op->cache_type == INT8) spread_head(x, (int)dim);
                for (int64_t i = 0; i < dim; i += LANES)
                    store(op->y, type, (t * op->heads + head) * dim + i, load_floats(x + i));
            }
        if (slot < 0) continue;
        for (int head = 0; head < op->kv_heads; head++) {
            for (int64_t i = 0; i < dim; i += LANES)
                store(x, FLOAT32, i, load(op->k, type, t * op->k_stride + head * dim + i));
            normed_head(x, op, op->k_norm, type);
            rotated_head(x, op, cosines);
            if (op->x && op->cache_type == INT8) spread_head(x, (int)dim);
            if (op->x && type == BFLOAT16) /* rounded first, as `rope` returns it */
                for (int64_t i = 0; i < dim; i += LANES) {
                    uint16_t narrow[LANES];
                    store(narrow, BFLOAT16, 0, load_floats(x + i));
                    store(x, FLOAT32, i, load(narrow, BFLOAT16, 0));
                }
            store_head(x, op, op->k_cache, op->k_scale, slot, head);
            for (int64_t i = 0; i < dim; i += LANES)
                store(x, FLOAT32, i, load(op->v, type, t * op->v_stride + head * dim + i));
            store_head(x, op, op->v_cache, op->v_scale, slot, head);
        }
    }
}

static void run_rope_store(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        rope_store(op, first, last, FLOAT32);
    else
        rope_store(op, first, last, BFLOAT16);
}

enum { TILE = 64, HEADS_AT_ONCE = 4, KEYS_AT_ONCE = 4 };

/* The row whose queries token t is among; its number of rows if it is none's. */
INLINE int64_t row_of(const Op *op, int64_t t) {
    int64_t low = 0, high = *op->batch_rows;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (op->query_starts[middle + 1] <= t)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Softmax of a tile's scores against the largest so far; what was summed before is scaled down to it. */
INLINE void weigh(float *scores, int count, float *most, float *total, float *sums, int dim) {
    for (int i = count; i % LANES; i++) scores[i] = -INFINITY;
    vf high = splat(*most);
    for (int i = 0; i < count; i += LANES) high = larger(high, load_floats(scores + i));
    const float now = largest(high);
    const float kept = *most == -INFINITY ? 0.0f : expf(*most - now);
    vf added = {0};
    for (int i = 0; i < count; i += LANES) {
        vf w = exponential(load_floats(scores + i) - now);
        store(scores, FLOAT32, i, w);
        added += w;
    }
    *most = now, *total = *total * kept + sum(added);
    if (kept != 1.0f)
        for (int i = 0; i < dim; i += LANES) store(sums, FLOAT32, i, load_floats(sums + i) * kept);
}

/* What a query sees of a tile: up to TILE slots of the cache, times the number of KV heads and the head. */
typedef struct Tile {
    int count;
    int64_t slots[TILE];
} Tile;

/* Fill `tile` from `place` on, up to `end`; returns the place after it. */
INLINE int64_t fill_tile(const Op *op, Tile *tile, const int32_t *table, int64_t place, int64_t end, int head) {
    for (tile->count = 0; tile->count < TILE && place < end;) {
        const int64_t offset = place % op->block_size;
        int64_t slot = (table[place / op->block_size] * (int64_t)op->block_size + offset) * op->kv_heads + head;
        for (int64_t i = offset; i < op->block_size && tile->count < TILE && place < end; i++, place++) {
            tile->slots[tile->count++] = slot;
            slot += op->kv_heads;
        }
    }
    return place;
}

/* scores[g][i] = q[g] . k[i], of `heads` heads, a constant; some beyond the tile's end are of no meaning. */
INLINE void score(const Op *op, const Tile *tile, const float *q, float (*scores)[TILE], int heads, int type) {
    const int dim = op->head_dim;
    for (int i = 0; i < tile->count; i += KEYS_AT_ONCE) {
        vf a[HEADS_AT_ONCE * KEYS_AT_ONCE] = {{0}};
        int64_t from[KEYS_AT_ONCE];
        for (int j = 0; j < KEYS_AT_ONCE; j++) /* the last key again where there is no other */
            from[j] = tile->slots[i + j < tile->count ? i + j : tile->count - 1] * dim;
        for (int d = 0; d < dim; d += LANES)
            for (int j = 0; j < KEYS_AT_ONCE; j++) {
                const vf k = load(op->k_cache, type, from[j] + d);
                for (int g = 0; g < heads; g++) a[g * KEYS_AT_ONCE + j] += k * load_floats(q + g * dim + d);
            }
        const vf all = sums_of(a);
        for (int g = 0; g < heads; g++) memcpy(scores[g] + i, (const float *)&all + g * KEYS_AT_ONCE, 4 * KEYS_AT_ONCE);
    }
    if (type == INT8)
        for (int i = 0; i < tile->count; i++) {
            const float unit = half_to_float(op->k_scale[tile->slots[i]]);
            for (int g = 0; g < heads; g++) scores[g][i] *= unit;
        }
}

/* sums[g] += weights[g][i] * v[i]. */
INLINE void gather(const Op *op, const Tile *tile, float (*weights)[TILE], float *sums, int heads, int type) {
    const int dim = op->head_dim;
    if (type == INT8)
        for (int i = 0; i < tile->count; i++) {
            const float unit = half_to_float(op->v_scale[tile->slots[i]]);
            for (int g = 0; g < heads; g++) weights[g][i] *= unit;
        }
    for (int d = 0; d < dim; d += LANES) {
        vf a[HEADS_AT_ONCE];
        for (int g = 0; g < heads; g++) a[g] = load_floats(sums + g * dim + d);
        for (int i = 0; i < tile->count; i++) {
            const vf v = load(op->v_cache, type, tile->slots[i] * dim + d);
            for (int g = 0; g < heads; g++) a[g] += v * weights[g][i];
        }
        for (int g = 0; g < heads; g++) store(sums, FLOAT32, g * dim + d, a[g]);
    }
}

/* Of `heads` query heads, a constant, over one tile. */
INLINE void attend_tile(const Op *op, const Tile *tile, const float *q, float *sums, float *most, float *total,
                        int heads, int type) {
    float scores[HEADS_AT_ONCE][TILE] __attribute__((aligned(64)));
    score(op, tile, q, scores, heads, type);
    for (int g = 0; g < heads; g++) {
        if (op->softcap > 0.0f)
            for (int i = 0; i < tile->count; i++)
                scores[g][i] = op->softcap * tanhf(scores[g][i] / op->softcap);
        weigh(scores[g], tile->count, &most[g], &total[g], sums + g * op->head_dim, op->head_dim);
    }
    gather(op, tile, scores, sums, heads, type);
}

/* The query heads of KV head `head`, `group` of them, at token t. */
INLINE void attend(const Op *op, int64_t t, int head, int group, int type) {
    const int dim = op->head_dim;
    float q[MAX_GROUP_HEADS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float sums[MAX_GROUP_HEADS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float most[MAX_GROUP_HEADS], total[MAX_GROUP_HEADS];
    const int64_t row = row_of(op, t), from = head * group * dim;
    const int64_t length = row < *op->batch_rows ? op->context_lens[row] : 0;
    memset(sums, 0, sizeof(float) * group * dim);
    for (int g = 0; g < group; g++) most[g] = -INFINITY, total[g] = 0.0f;
    if (length > 0) {
        const int64_t end = length - (op->query_starts[row + 1] - 1 - t); /* what this query sees ends here */
        const int32_t *table = op->block_tables + row * op->table_width;
        for (int i = 0; i < group * dim; i += LANES)
            store(q, FLOAT32, i, load(op->x, op->x_type, t * op->x_stride + from + i) * op->scale);
        for (int64_t place = op->window && end > op->window ? end - op->window : 0; place < end;) {
            Tile tile;
            place = fill_tile(op, &tile, table, place, end, head);
            int g = 0;
            for (; g + HEADS_AT_ONCE <= group; g += HEADS_AT_ONCE)
                attend_tile(op, &tile, q + g * dim, sums + g * dim, most + g, total + g, HEADS_AT_ONCE, type);
            if (group - g == 3)
                attend_tile(op, &tile, q + g * dim, sums + g * dim, most + g, total + g, 3, type);
            else if (group - g == 2)
                attend_tile(op, &tile, q + g * dim, sums + g * dim, most + g, total + g, 2, type);
            else if (group - g == 1)
                attend_tile(op, &tile, q + g * dim, sums + g * dim, most + g, total + g, 1, type);
        }
    }
    for (int g = 0; g < group; g++)
        for (int d = 0; d < dim; d += LANES) {
            const vf x = load_floats(sums + g * dim + d);
            store(op->y, op->y_type, (t * op->heads + head * group + g) * dim + d, length > 0 ? x / total[g] : x);
        }
}

static void run_attention(const Op *op, int64_t first, int64_t last) {
    const int group = op->heads / op->kv_heads;
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t t = unit / op->kv_heads;
        const int head = (int)(unit % op->kv_heads);
        if (op->cache_type == FLOAT32)
            attend(op, t, head, group, FLOAT32);
        else if (op->cache_type == BFLOAT16)
            attend(op, t, head, group, BFLOAT16);
        else
            attend(op, t, head, group, INT8);
    }
}
