/* Products of many rows: c[r][16 p + i] = sum over k of a[r][k] * b[p][k][i].
 *
 * b lies in panels of 16 columns. Of bfloat16 a panel has pairs of k's side by side for each column, as tiles and
 * dot products of pairs want them: number (k, i) is at ((k / 2) * 16 + i) * 2 + k % 2. Of float32 it is at k * 16 + i.
 */

#ifdef __AVX512BF16__
typedef uint16_t elem;
enum { ELEM = BFLOAT16, PAIR = 2, ROWS_A_BLOCK = 12, PANELS_A_BLOCK = 2 };
#else
typedef float elem;
enum { ELEM = FLOAT32, PAIR = 1, PANELS_A_BLOCK = 1 };
#if defined(__AVX2__)
enum { ROWS_A_BLOCK = 6 };
#elif defined(__aarch64__)
enum { ROWS_A_BLOCK = 4 };
#else
enum { ROWS_A_BLOCK = 2 };
#endif
#endif
#ifdef __AMX_BF16__
enum { ROWS_AT_A_TIME = 32 };
#else
enum { ROWS_AT_A_TIME = (32 + ROWS_A_BLOCK / 2) / ROWS_A_BLOCK * ROWS_A_BLOCK }; /* so that few are left over */
#endif
enum { K_STEP = 32, ELEMS = PANEL * PAIR }; /* k is a multiple of the first; the second fill a vector */

#ifdef __AVX512BF16__
/* Of two times 16 numbers of 16 bits, the first of both, then the second of both, and so on. */
INLINE __m512i pair_order(void) {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                            18, 2, 17, 1, 16, 0);
}
#endif

/* Numbers k and k + 1 of all columns of a panel. */
INLINE void store_pair(elem *panel, int64_t k, vf first, vf second) {
#ifdef __AVX512BF16__
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(panel + k * PANEL, _mm512_permutexvar_epi16(pair_order(), both));
#else
    store(panel, FLOAT32, k * PANEL, first);
    store(panel, FLOAT32, (k + 1) * PANEL, second);
#endif
}

/* Numbers i on of an array of `type`, as many as fill a vector, zeros from `left` (a multiple of 16) on. */
INLINE vu elems_of(const void *p, int type, int64_t i, int64_t left) {
    vu x = {0};
    if (left <= 0) return x;
#ifdef __AVX512BF16__
    if (type == BFLOAT16 && left >= ELEMS) {
        memcpy(&x, (const uint16_t *)p + i, sizeof x);
        return x;
    }
    const vf low = load(p, type, i), high = left >= ELEMS ? load(p, type, i + LANES) : (vf){0};
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    return (vu)load(p, type, i);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* Eight times eight numbers, from one place to another, rows of both 16 numbers apart. */
INLINE void transpose_eights(const float *from, float *to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + 16 * i);
    for (int i = 0; i < 8; i += 2)
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
            a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}
#endif

/* Rows become columns. */
INLINE void transpose(vu *x) {
#ifdef __AVX512F__
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), high = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
        x[j] = (vu)_mm512_shuffle_i32x4(low, low2, 0x88), x[8 + j] = (vu)_mm512_shuffle_i32x4(low, low2, 0xdd);
        x[4 + j] = (vu)_mm512_shuffle_i32x4(high, high2, 0x88), x[12 + j] = (vu)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#elif defined(__AVX2__)
    float from[256], to[256];
    memcpy(from, x, sizeof from);
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose_eights(from + 16 * i + j, to + 16 * j + i);
    memcpy(x, to, sizeof to);
#else
    uint32_t from[16][16], to[16][16];
    memcpy(from, x, sizeof from);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    memcpy(x, to, sizeof to);
#endif
}

#ifdef __AMX_BF16__
/* Tiles 0 to 3 are c, of two times 16 rows and two panels; 4 and 5 are of a, 6 and 7 of b. */
INLINE void configure(int rows, int more_rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    const int of[8] = {rows, rows, more_rows, more_rows, rows, more_rows, 16, 16};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = (uint8_t)of[i];
    /* Not `_tile_loadconfig`: before GCC 12.4 and 13.3 it says that it reads 8 bytes, so others may never be stored. */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
INLINE void begin_products(void) { configure(16, 16); }
INLINE void end_products(void) { _tile_release(); }

/* Of up to 32 rows and two panels. */
INLINE void tile_product(const elem *a, int64_t a_stride, const elem *b, int64_t k, float *c, int64_t c_stride, int two_rows,
                         int two_panels, int add) {
    const elem *more_a = a + 16 * a_stride, *more_b = b + k * PANEL;
    float *more_c = c + 16 * c_stride;
    const int64_t line = c_stride * 4, a_line = a_stride * 2;
    if (add) {
        _tile_loadd(0, c, line);
        if (two_panels) _tile_loadd(1, c + PANEL, line);
        if (two_rows) _tile_loadd(2, more_c, line);
        if (two_rows && two_panels) _tile_loadd(3, more_c + PANEL, line);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < k; i += K_STEP) {
        _tile_loadd(4, a + i, a_line);
        _tile_loadd(6, b + i * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_loadd(7, more_b + i * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, more_a + i, a_line);
            _tile_dpbf16ps(2, 5, 6);
            if (two_panels) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, line);
    if (two_panels) _tile_stored(1, c + PANEL, line);
    if (two_rows) _tile_stored(2, more_c, line);
    if (two_rows && two_panels) _tile_stored(3, more_c + PANEL, line);
}

/* Between `begin_products` and `end_products`. With `add`, to what c holds. Not inline: three callers would each have a
 * copy of all its sizes, and a call is nothing beside the rows it multiplies. */
static __attribute__((noinline)) void product(const elem *a, int64_t a_stride, const elem *b, int64_t k, int panels, float *c, int64_t c_stride,
                    int rows, int add) {
    for (int r = 0; r < rows; r += 32) {
        const int first = rows - r < 16 ? rows - r : 16, second = rows - r < 32 ? rows - r - first : 16;
        if (first + second < 32) configure(first, second ? second : 1);
        for (int p = 0; p < panels; p += 2)
            tile_product(a + r * a_stride, a_stride, b + p * k * PANEL, k, c + r * c_stride + p * PANEL, c_stride,
                         second > 0, p + 1 < panels, add);
        if (first + second < 32) configure(16, 16);
    }
}

#else
INLINE void begin_products(void) {}
INLINE void end_products(void) {}

/* What a register holds of a row of c, by name, since GCC keeps sixteens in memory where registers are shorter. */
#if defined(__AVX512BF16__)
typedef __m512 Piece;
INLINE Piece piece_at(const float *p) { return _mm512_loadu_ps(p); }
INLINE void put_piece(float *p, Piece x) { _mm512_storeu_ps(p, x); }
INLINE Piece more(Piece sum, const elem *w, const elem *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
}
#elif defined(__AVX2__)
typedef __m256 Piece;
INLINE Piece piece_at(const float *p) { return _mm256_loadu_ps(p); }
INLINE void put_piece(float *p, Piece x) { _mm256_storeu_ps(p, x); }
INLINE Piece more(Piece sum, const elem *w, const elem *x) {
    return _mm256_fmadd_ps(_mm256_loadu_ps(w), _mm256_broadcast_ss(x), sum);
}
#else
typedef float Piece __attribute__((vector_size(16)));
INLINE Piece piece_at(const float *p) {
    Piece x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void put_piece(float *p, Piece x) { memcpy(p, &x, sizeof x); }
INLINE Piece more(Piece sum, const elem *w, const elem *x) { return sum + piece_at(w) * *x; }
#endif
enum { FEWER_ROWS = (ROWS_A_BLOCK + 2) / 3 }; /* a row alone takes half as long as a block */
enum { LENGTH = sizeof(Piece) / sizeof(float), PIECES = PANEL / LENGTH, MOST_PIECES = PANELS_A_BLOCK * PIECES };

/* `rows` rows and `panels` panels, both constants. */
INLINE void block_product(const elem *a, int64_t a_stride, const elem *b, int64_t k, float *c, int64_t c_stride, int rows,
                          int panels, int add) {
    const int pieces = panels * PIECES;
    Piece sums[ROWS_A_BLOCK][MOST_PIECES];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < pieces; p++) sums[r][p] = add ? piece_at(c + r * c_stride + p * LENGTH) : (Piece){0};
    for (int64_t i = 0; i < k; i += PAIR) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int p = 0; p < pieces; p++)
                sums[r][p] = more(sums[r][p], b + (p / PIECES * k + i) * PANEL + p % PIECES * LENGTH * PAIR,
                                  a + r * a_stride + i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < pieces; p++) put_piece(c + r * c_stride + p * LENGTH, sums[r][p]);
}

/* With `add`, to what c holds. */
static __attribute__((noinline)) void product(const elem *a, int64_t a_stride, const elem *b, int64_t k, int panels, float *c, int64_t c_stride,
                    int rows, int add) {
    for (int p = 0; p < panels; p += PANELS_A_BLOCK, b += PANELS_A_BLOCK * k * PANEL, c += PANELS_A_BLOCK * PANEL) {
        int r = 0;
        if (p + PANELS_A_BLOCK <= panels) {
            for (; r + ROWS_A_BLOCK <= rows; r += ROWS_A_BLOCK)
                block_product(a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride, ROWS_A_BLOCK, PANELS_A_BLOCK, add);
            for (; r + FEWER_ROWS <= rows; r += FEWER_ROWS)
                block_product(a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride, FEWER_ROWS, PANELS_A_BLOCK, add);
            for (; r < rows; r++)
                block_product(a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride, 1, PANELS_A_BLOCK, add);
        } else {
            for (; r < rows; r++) block_product(a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride, 1, 1, add);
        }
    }
}
#endif
