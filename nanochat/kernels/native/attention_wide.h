/* Attention of prompts: the queries of some tokens that follow each other meet a tile of keys at once
 * (arXiv:2205.14135). Units of work are `query_tile` tokens times the KV heads.
 */

/* What a run of tokens of one row needs, for one KV head. */
typedef struct Run {
    int64_t first;      /* token */
    int count, group;   /* tokens; query heads of each */
    int padded_dim;
    int64_t end;        /* the first query sees the keys before this place */
    elem *q, *k, *v, *weights;
    float *scores, *sums, *most, *total;
} Run;

INLINE int padded(int dim) { return (dim + K_STEP - 1) / K_STEP * K_STEP; }

/* Everything that `run` points to lies in one piece. */
static int make_room(Run *run, int most_rows, int dim) {
    const int64_t wide = run->padded_dim = padded(dim), rows = most_rows;
    const int64_t elems = rows * wide + TILE * wide + TILE * wide + rows * TILE;
    const int64_t floats = rows * TILE + rows * dim + 2 * ((rows + LANES - 1) / LANES * LANES);
    run->scores = scratch((size_t)(elems * (int64_t)sizeof(elem) + floats * 4));
    if (!run->scores) return 0;
    run->sums = run->scores + rows * TILE;
    run->most = run->sums + rows * dim;
    run->total = run->most + (rows + LANES - 1) / LANES * LANES;
    run->q = (elem *)(run->scores + floats);
    run->k = run->q + rows * wide;
    run->v = run->k + TILE * wide;
    run->weights = run->v + TILE * wide;
    return 1;
}

/* The tile's keys in panels of 16 keys, its values in panels of 16 dims; zeros for those beyond its end. */
INLINE void pack_tile(const Op *op, const Run *run, const Tile *tile, int type) {
    const int64_t dim = op->head_dim, wide = run->padded_dim;
    for (int i = 0; i < TILE; i += PANEL)
        for (int64_t d = 0; d < wide; d += ELEMS) {
            vu block[PANEL];
            for (int j = 0; j < PANEL; j++)
                block[j] = i + j < tile->count ? elems_of(op->k_cache, type, tile->slots[i + j] * dim + d, dim - d) : (vu){0};
            transpose(block);
            memcpy(run->k + i * wide + d * PANEL, block, sizeof block);
        }
    for (int i = 0; i < TILE; i += 2)
        for (int64_t d = 0; d < dim; d += PANEL) {
            const vf first = i < tile->count ? load(op->v_cache, type, tile->slots[i] * dim + d) : (vf){0};
            const vf second = i + 1 < tile->count ? load(op->v_cache, type, tile->slots[i + 1] * dim + d) : (vf){0};
            store_pair(run->v + d * TILE, i, first, second);
        }
}

/* Softmax of row r's scores, of which those of keys `low` to `high` count, against the largest so far. */
INLINE void weigh_row(const Op *op, const Run *run, int r, int low, int high, const float *k_units, const float *v_units) {
    const int dim = op->head_dim;
    vf s[TILE / LANES], high_so_far = splat(run->most[r]), added = {0};
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int j = 0; j < TILE / LANES; j++) {
        s[j] = load_floats(run->scores + r * TILE + j * LANES) * op->scale;
        if (k_units) s[j] *= load_floats(k_units + j * LANES);
        if (op->softcap > 0.0f) s[j] = op->softcap * hyperbolic_tangent(s[j] / op->softcap);
        if (low > 0 || high < TILE) {
            const vi place = lanes + j * LANES;
            s[j] = choose((place >= low) & (place < high), s[j], splat(-INFINITY));
        }
        high_so_far = larger(high_so_far, s[j]);
    }
    const float now = largest(high_so_far);
    elem *weights = run->weights + (int64_t)r * TILE;
    if (now == -INFINITY) {
        memset(weights, 0, TILE * sizeof(elem));
        return;
    }
    for (int j = 0; j < TILE / LANES; j++) {
        s[j] = exponential(s[j] - now);
        added += s[j];
        if (v_units) s[j] *= load_floats(v_units + j * LANES);
    }
#ifdef __AVX512BF16__
    for (int j = 0; j < TILE / LANES; j += 2) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)s[j + 1], (__m512)s[j]);
        memcpy(weights + j * LANES, &both, sizeof both);
    }
#else
    for (int j = 0; j < TILE / LANES; j++) store(weights, ELEM, j * LANES, s[j]);
#endif
    const float kept = run->most[r] == -INFINITY ? 0.0f : expf(run->most[r] - now);
    run->total[r] = run->total[r] * kept + sum(added);
    run->most[r] = now;
    float *sums = run->sums + (int64_t)r * dim;
    if (kept != 1.0f)
        for (int i = 0; i < dim; i += LANES) store(sums, FLOAT32, i, load_floats(sums + i) * kept);
}

/* All queries of the run over the tile whose first key is at `place`. */
INLINE void meet_tile(const Op *op, const Run *run, const Tile *tile, int64_t place, int type) {
    const int rows = run->count * run->group, dim = op->head_dim;
    float k_units[TILE], v_units[TILE];
    for (int i = 0; type == INT8 && i < TILE; i++) {
        k_units[i] = i < tile->count ? half_to_float(op->k_scale[tile->slots[i]]) : 0.0f;
        v_units[i] = i < tile->count ? half_to_float(op->v_scale[tile->slots[i]]) : 0.0f;
    }
    pack_tile(op, run, tile, type);
    product(run->q, run->padded_dim, run->k, run->padded_dim, TILE / PANEL, run->scores, TILE, rows, 0);
    for (int r = 0; r < rows; r++) {
        const int64_t end = run->end + r / run->group, begin = op->window && end > op->window ? end - op->window : 0;
        const int64_t low = begin > place ? begin - place : 0, high = end - place < tile->count ? end - place : tile->count;
        weigh_row(op, run, r, low < TILE ? (int)low : TILE, (int)high, type == INT8 ? k_units : 0, type == INT8 ? v_units : 0);
    }
    product(run->weights, TILE, run->v, TILE, dim / PANEL, run->sums, dim, rows, 1);
}

/* `run->count` tokens of one row, `slots` being what its block table leads to. */
INLINE void attend_run(const Op *op, Run *run, const int32_t *table, int head, int type) {
    const int dim = op->head_dim, rows = run->count * run->group;
    for (int r = 0; r < rows; r++) {
        const int64_t from = (run->first + r / run->group) * op->x_stride + (head * run->group + r % run->group) * (int64_t)dim;
        for (int d = 0; d < run->padded_dim; d += LANES) {
            vf x = {0};
            if (d < dim) x = op->x_type == FLOAT32 ? load(op->x, FLOAT32, from + d) : load(op->x, BFLOAT16, from + d);
            store(run->q, ELEM, (int64_t)r * run->padded_dim + d, x);
        }
        run->most[r] = -INFINITY, run->total[r] = 0.0f;
    }
    memset(run->sums, 0, sizeof(float) * (size_t)rows * (size_t)dim);
    const int64_t last = run->end + run->count - 1; /* the last query sees the keys before this place */
    for (int64_t place = op->window && run->end > op->window ? run->end - op->window : 0; place < last;) {
        Tile tile;
        const int64_t begin = place;
        place = fill_tile(op, &tile, table, place, last, head);
        meet_tile(op, run, &tile, begin, type);
    }
    for (int r = 0; r < rows; r++) {
        const int64_t to = ((run->first + r / run->group) * op->heads + head * run->group + r % run->group) * (int64_t)dim;
        const float factor = 1.0f / run->total[r];
        for (int d = 0; d < dim; d += LANES) store(op->y, op->y_type, to + d, load_floats(run->sums + (int64_t)r * dim + d) * factor);
    }
}

INLINE void attention_wide(const Op *op, int64_t first, int64_t last, int type) {
    Run run = {.group = op->heads / op->kv_heads};
    const int64_t tokens = query_tile(op);
    if (!make_room(&run, (int)tokens * run.group, op->head_dim)) return;
    begin_products();
    for (int64_t unit = first; unit < last; unit++) {
        const int head = (int)(unit % op->kv_heads);
        int64_t t = unit / op->kv_heads * tokens;
        const int64_t stop = t + tokens < *op->rows ? t + tokens : *op->rows;
        while (t < stop) {
            const int64_t row = row_of(op, t);
            const int64_t length = row < *op->batch_rows ? op->context_lens[row] : 0;
            const int64_t after = length ? op->query_starts[row + 1] : t + 1, end = after < stop ? after : stop;
            if (end - t == 1) {
                attend(op, t, head, run.group, type);
            } else {
                run.first = t, run.count = (int)(end - t), run.end = length - (after - 1 - t);
                attend_run(op, &run, op->block_tables + row * op->table_width, head, type);
            }
            t = end;
        }
    }
    end_products();
}

static void run_attention_wide(const Op *op, int64_t first, int64_t last) {
    if (op->cache_type == FLOAT32)
        attention_wide(op, first, last, FLOAT32);
    else if (op->cache_type == BFLOAT16)
        attention_wide(op, first, last, BFLOAT16);
    else
        attention_wide(op, first, last, INT8);
}
