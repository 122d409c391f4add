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
    for (int i = 0; i < TILE; i += 2) {
        const int64_t from = i < tile->count ? tile->slots[i] * dim : -1;
        const int64_t more = i + 1 < tile->count ? tile->slots[i + 1] * dim : -1;
        for (int64_t d = 0; d < dim; d += PANEL) {
#ifdef __AVX512BF16__
            if (type == BFLOAT16 && more >= 0) {
                const __m256i two[2] = {_mm256_loadu_si256((const void *)((const uint16_t *)op->v_cache + from + d)),
                                        _mm256_loadu_si256((const void *)((const uint16_t *)op->v_cache + more + d))};
                const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(two[0]), two[1], 1);
                _mm512_storeu_si512(run->v + d * TILE + i * PANEL, _mm512_permutexvar_epi16(pair_order(), both));
                continue;
            }
#endif
            store_pair(run->v + d * TILE, i, from < 0 ? (vf){0} : load(op->v_cache, type, from + d),
                       more < 0 ? (vf){0} : load(op->v_cache, type, more + d));
        }
    }
}

/* 2^x, for weights that are rounded to `elem` after. */
INLINE vf power_of_two(vf x) {
#ifdef __AVX512BF16__
    /* Within 2^-18: the series of e^(r ln 2), and r at most half. */
    const __m512 at_least = _mm512_max_ps(_mm512_set1_ps(-150.0f), (__m512)x), n = _mm512_roundscale_ps(at_least, 0);
    const vf r = (vf)_mm512_sub_ps(at_least, n);
    vf p = splat(1.3333558e-3f);
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, n);
#else
    return exponential(x * 0.69314718f);
#endif
}

/* The largest of each of sixteen vectors. */
INLINE vf largest_of(vf *x) {
    vu bits[LANES]; /* a vector of floats may not be read as one of integers in place */
    memcpy(bits, x, sizeof bits);
    transpose(bits);
    memcpy(x, bits, sizeof bits);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = larger(x[i], x[i + half]);
    return x[0];
}

/* What a row's scores are multiplied by, and where they count. */
typedef struct Sight {
    int low, high;
    const float *k_units, *v_units;
} Sight;

/* Scores j * 16 on of row r, times log2(e), and -inf where they don't count. */
INLINE vf seen_scores(const Op *op, const Run *run, int r, int j, Sight sight) {
    vf s = load_floats(run->scores + r * TILE + j * LANES);
    if (sight.k_units) s *= load_floats(sight.k_units + j * LANES);
    if (op->softcap > 0.0f)
        s = op->softcap * 1.44269504f * hyperbolic_tangent(s * (op->scale / op->softcap));
    else
        s *= op->scale * 1.44269504f;
    if (sight.low <= j * LANES && sight.high >= (j + 1) * LANES) return s;
    const vi place = (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + j * LANES;
    return choose((place >= sight.low) & (place < sight.high), s, splat(-INFINITY));
}

INLINE void store_weights(elem *to, vf first, vf second) {
#ifdef __AVX512BF16__
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    memcpy(to, &both, sizeof both);
#else
    store(to, FLOAT32, 0, first);
    store(to, FLOAT32, LANES, second);
#endif
}

/* Softmax of up to 16 rows' scores from row `r` on against the largest so far. */
INLINE void weigh_rows(const Op *op, const Run *run, int r, int count, const Sight *sights) {
    const int dim = op->head_dim;
    vf most[LANES], added[LANES];
    for (int i = 0; i < LANES; i++) {
        most[i] = splat(-INFINITY);
        added[i] = (vf){0};
        for (int j = 0; i < count && j < TILE / LANES; j++) {
            const vf s = seen_scores(op, run, r + i, j, sights[i]);
            store(run->scores, FLOAT32, (r + i) * TILE + j * LANES, s);
            most[i] = larger(most[i], s);
        }
    }
    const vf before = load_floats(run->most + r), now = larger(before, largest_of(most));
    /* A row that has seen nothing yet keeps nothing, and gives no weight. */
    const vf base = choose(now > -INFINITY, now, (vf){0}), kept = power_of_two(before - base);
    float bases[LANES], shares[LANES];
    memcpy(bases, &base, sizeof bases);
    memcpy(shares, &kept, sizeof shares);
    for (int i = 0; i < count; i++) {
        elem *weights = run->weights + (int64_t)(r + i) * TILE;
        for (int j = 0; j < TILE / LANES; j += 2) {
            vf w[2];
            for (int k = 0; k < 2; k++) {
                w[k] = power_of_two(load_floats(run->scores + (r + i) * TILE + (j + k) * LANES) - bases[i]);
                added[i] += w[k];
                if (sights[i].v_units) w[k] *= load_floats(sights[i].v_units + (j + k) * LANES);
            }
            store_weights(weights + j * LANES, w[0], w[1]);
        }
        float *sums = run->sums + (int64_t)(r + i) * dim;
        if (shares[i] != 1.0f)
            for (int d = 0; d < dim; d += LANES) store(sums, FLOAT32, d, load_floats(sums + d) * shares[i]);
    }
    store(run->most, FLOAT32, r, now);
    store(run->total, FLOAT32, r, load_floats(run->total + r) * kept + sums_of(added));
}

/* What the run's row r sees of the tile whose first key is at `place`. */
INLINE Sight sight_of(const Op *op, const Run *run, const Tile *tile, int64_t place, int r) {
    const int64_t end = run->end + r / run->group, begin = op->window && end > op->window ? end - op->window : 0;
    const int64_t low = begin > place ? begin - place : 0, high = end - place < tile->count ? end - place : tile->count;
    return (Sight){low < TILE ? (int)low : TILE, (int)high, 0, 0};
}

/* Whether the tile's values hold no NaN and no infinity. */
INLINE int has_numbers_only(const Op *op, const Tile *tile, int type) {
    vf zeros = {0}; /* NaN once something else was there */
    for (int i = 0; i < tile->count; i++)
        for (int d = 0; d < op->head_dim; d += LANES)
            zeros += 0.0f * load(op->v_cache, type, tile->slots[i] * op->head_dim + d);
    return sum(zeros) == 0.0f;
}

/* The product of weights and values without those that a row doesn't see, whose weight of 0 would make NaN of NaN. */
static __attribute__((noinline)) void add_seen_values(const Op *op, const Run *run, const Tile *tile, int64_t place,
                                                      int type) {
    const int dim = op->head_dim;
    for (int r = 0; r < run->count * run->group; r++) {
        const Sight sight = sight_of(op, run, tile, place, r);
        for (int i = sight.low; i < sight.high; i++) {
            const float weight = load_one(run->weights, ELEM, (int64_t)r * TILE + i);
            for (int d = 0; d < dim; d += LANES) {
                const int64_t to = (int64_t)r * dim + d;
                const vf value = load(op->v_cache, type, tile->slots[i] * dim + d);
                store(run->sums, FLOAT32, to, load_floats(run->sums + to) + weight * value);
            }
        }
    }
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
    int is_seen_whole = 1;
    for (int r = 0; r < rows; r += LANES) {
        const int count = rows - r < LANES ? rows - r : LANES;
        Sight sights[LANES];
        for (int i = 0; i < count; i++) {
            sights[i] = sight_of(op, run, tile, place, r + i);
            is_seen_whole &= sights[i].low == 0 && sights[i].high == tile->count;
            if (type == INT8) sights[i].k_units = k_units, sights[i].v_units = v_units;
        }
        weigh_rows(op, run, r, count, sights);
    }
    if (type != INT8 && !is_seen_whole && !has_numbers_only(op, tile, type)) {
        add_seen_values(op, run, tile, place, type);
        return;
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
    }
    for (int r = 0; r < (rows + LANES - 1) / LANES * LANES; r++) run->most[r] = -INFINITY, run->total[r] = 0.0f;
    memset(run->sums, 0, sizeof(float) * (size_t)rows * (size_t)dim);
    const int64_t last = run->end + run->count - 1; /* the last query sees the keys before this place */
    /* Tiles begin at multiples of their size, so that where the run begins changes no bit of a query's result. */
    const int64_t begins = op->window && run->end > op->window ? (run->end - op->window) / TILE * TILE : 0;
    for (int64_t place = begins; place < last;) {
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
            /* Not of tokens that are alone in this unit only: what stands before their row must not change them. */
            if (!length || after - op->query_starts[row] == 1) {
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
