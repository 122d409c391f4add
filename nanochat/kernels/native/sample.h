/* Draws a token a row from logits: what `engine/sampler.py` says, without sorting. Units of work are rows. */

enum { BINS = 4096, BLOCK = 128 };

typedef struct Histogram {
    uint32_t counts[BINS];
    double masses[BINS];
} Histogram;

/* The tokens kept by top-k and top-p: those above `last`, and the first `equals` of those equal to it. */
typedef struct Kept {
    uint32_t last;
    int64_t equals;
    double mass;
} Kept;

/* Unsigned numbers in the order of the floats. */
INLINE uint32_t key_of(float x) {
    if (x == 0.0f) x = 0.0f; /* -0 is its equal */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The largest numbers of x, until there are `most` of them or their weights reach `mass`: one digit after the other. */
static Kept largest_ones(const float *x, const float *weights, int64_t n, int64_t most, double mass) {
    static const int shifts[] = {20, 8, 0}, widths[] = {12, 12, 8};
    Histogram histogram;
    int64_t above = 0;
    double mass_above = 0.0;
    uint32_t prefix = 0;
    for (int digit = 0; digit < 3; digit++) {
        const int shift = shifts[digit], bins = 1 << widths[digit], before = shift + widths[digit];
        memset(histogram.counts, 0, sizeof(uint32_t) * bins);
        memset(histogram.masses, 0, sizeof(double) * bins);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t key = key_of(x[i]);
            if (digit && key >> before != prefix) continue;
            const uint32_t bin = key >> shift & (uint32_t)(bins - 1);
            histogram.counts[bin]++;
            histogram.masses[bin] += weights[i];
        }
        int bin = bins - 1, lowest = bin;
        for (; bin >= 0; bin--) {
            if (!histogram.counts[bin]) continue;
            lowest = bin;
            if (above + histogram.counts[bin] >= most || mass_above + histogram.masses[bin] >= mass) break;
            above += histogram.counts[bin], mass_above += histogram.masses[bin];
        }
        if (bin < 0) { /* rounding: all of them together fall short */
            bin = lowest;
            above -= histogram.counts[bin], mass_above -= histogram.masses[bin];
        }
        prefix = prefix << widths[digit] | (uint32_t)bin;
        if (digit == 2) {
            const double weight = histogram.masses[bin] / histogram.counts[bin];
            int64_t equals = histogram.counts[bin];
            if (equals > most - above) equals = most - above;
            if (weight > 0.0 && ceil((mass - mass_above) / weight) < (double)equals)
                equals = (int64_t)ceil((mass - mass_above) / weight);
            if (equals < 1) equals = 1;
            return (Kept){prefix, equals, mass_above + (double)equals * weight};
        }
    }
    return (Kept){0, 0, 0.0};
}

INLINE uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* `sampler.uniforms`: a number in [0, 1), number `position` of a SplitMix64 generator. */
INLINE double uniform(int64_t seed, int64_t position) {
    const uint64_t state = mixed((uint64_t)seed) + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
    return (double)(mixed(state) >> 11) * 0x1p-53;
}

/* Of the block of up to BLOCK weights from `first` on. */
INLINE float mass_of_block(const float *weights, int64_t first, int64_t n) {
    const int64_t end = first + BLOCK < n ? first + BLOCK : n;
    vf sums = {0};
    int64_t i = first;
    for (; i + LANES <= end; i += LANES) sums += load_floats(weights + i);
    float mass = sum(sums);
    for (; i < end; i++) mass += weights[i];
    return mass;
}

static double mass_of(const float *weights, int64_t n) {
    double mass = 0.0;
    for (int64_t block = 0; block < n; block += BLOCK) mass += mass_of_block(weights, block, n);
    return mass;
}

/* The first place at which the running sum of weights exceeds `share` of the whole. */
static int64_t place_of_share(const float *weights, int64_t n, double share) {
    const double total = mass_of(weights, n);
    double target = share * total, before = 0.0;
    if (target >= total) target = nextafter(total, 0.0);
    int64_t found = 0;
    for (int64_t block = 0; block < n; block += BLOCK) {
        const double mass = mass_of_block(weights, block, n);
        if (before + mass > target) {
            double within = before;
            for (int64_t i = block; i < block + BLOCK && i < n; i++) {
                within += weights[i];
                if (weights[i] > 0.0f) found = i; /* the last one, if the block's sum was rounded up */
                if (within > target) break;
            }
            return found;
        }
        before += mass;
    }
    return found;
}

static void run_sample(const Op *op, int64_t first, int64_t last) {
    const int64_t n = op->n;
    for (int64_t t = first; t < last; t++) {
        const float *x = (const float *)op->x + t * op->x_stride;
        float *weights = (float *)op->summed + t * n;
        const int64_t likeliest = place_of_largest(x, n);
        const float best = x[likeliest] < 3.40282347e38f ? x[likeliest] : 3.40282347e38f;
        const float temperature = op->temperature[t];
        ((int64_t *)op->y)[t] = likeliest;
        if (temperature == 0.0f || !(best > -INFINITY)) continue;
        for (int64_t i = 0; i + LANES <= n; i += LANES) {
            const vf a = load_floats(x + i);
            store(weights, FLOAT32, i, choose(a == a, exponential((a - best) / temperature), (vf){0}));
        }
        for (int64_t i = n / LANES * LANES; i < n; i++)
            weights[i] = x[i] == x[i] ? expf((x[i] - best) / temperature) : 0.0f;
        const int64_t top_k = op->top_k[t] > 0 && op->top_k[t] < n ? op->top_k[t] : n;
        if (top_k < n || op->top_p[t] < 1.0f) {
            Kept kept = {0, n, 0.0};
            double mass = INFINITY;
            if (op->top_p[t] < 1.0f) {
                if (top_k < n)
                    kept = largest_ones(x, weights, n, top_k, INFINITY);
                else
                    kept.mass = mass_of(weights, n);
                mass = op->top_p[t] * kept.mass;
                if (mass >= kept.mass) mass = nextafter(kept.mass, 0.0);
            }
            kept = largest_ones(x, weights, n, top_k, mass);
            for (int64_t i = 0, equals = kept.equals; i < n; i++) {
                const uint32_t key = key_of(x[i]);
                if (key < kept.last || x[i] != x[i] || (key == kept.last && equals-- <= 0)) weights[i] = 0.0f;
            }
        }
        if (op->min_p[t] > 0.0f)
            for (int64_t i = 0; i < n; i++) weights[i] = weights[i] >= op->min_p[t] ? weights[i] : 0.0f;
        ((int64_t *)op->y)[t] = place_of_share(weights, n, uniform(op->seeds[t], op->index[t]));
    }
}
