/* y = x · Wᵀ + bias, with W as int8 codes and each row of x made codes as it comes. Part 17.

   The instruction this is about (VNNI's vpdpbusd) takes 4 codes of x, from 0 to 255, and 4 codes of W for
   each of LANES columns, and adds the 4 products up for each column, in 32 bits. */

#if !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#error "this processor has no VNNI"
#endif

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512VNNI__) && !defined(NARROW)
#define LANES 16
#define dot4(sum, x, w) (ints)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define LANES 8
#define dot4(sum, x, w) (ints)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
#elif defined(__AVXVNNI__)
#define LANES 8
#define dot4(sum, x, w) (ints)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(x), (__m256i)(w))
#else
#error "this processor has VNNI for 16 lanes alone"
#endif

enum {
    COLUMNS = 2 * LANES, /* of W that are worked on at a time */
    ROWS = 6,            /* of codes, with all their sums in registers: 2 · 6 of them */
    MANY = 8 * ROWS,     /* of codes, for one thread at a time */
    MOST = 127,          /* the largest code of x, on both sides of ZERO */
    ZERO = 128
};

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));

static inline ints ints_at(const void *p) {
    ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline floats floats_at(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

#pragma GCC visibility push(default) /* of what follows; a CC may have it hidden otherwise */

int columns(void) { return COLUMNS; }

/* One row of x[K] becomes 1 or 2 rows of codes[Kp], and the size of a step between codes is returned. The
   second digit says, in steps finer by 2 · MOST, what the first left. A row with a number that is none has
   no steps: NAN, which its results become. */
static float encode(const float *x, int64_t K, int64_t Kp, int digits, uint8_t *codes) {
    float largest = 1e-30f, bad = 0;
#pragma omp simd reduction(max : largest) reduction(+ : bad)
    for (int64_t k = 0; k < K; k++) {
        float size = fabsf(x[k]);
        largest = size > largest ? size : largest;
        bad += x[k] - x[k]; /* 0, or NAN for what is not finite */
    }
    memset(codes, ZERO, digits * Kp);
    if (bad != 0) return NAN;
    float steps = MOST / largest;
    if (digits == 1) {
#pragma omp simd
        for (int64_t k = 0; k < K; k++) codes[k] = (uint8_t)((int32_t)rintf(x[k] * steps) + ZERO);
    } else {
#pragma omp simd
        for (int64_t k = 0; k < K; k++) {
            float exact = x[k] * steps, high = rintf(exact);
            codes[k] = (uint8_t)((int32_t)high + ZERO);
            codes[Kp + k] = (uint8_t)((int32_t)rintf((exact - high) * (2 * MOST)) + ZERO);
        }
    }
    return largest / MOST;
}

/* `rows` rows of codes[Kp] times one block of weights[Kp / 4][COLUMNS][4], less what ZERO adds to each column:
   sums[rows][COLUMNS]. `rows` is a constant wherever this is called, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(
    int rows, const uint8_t *codes, int64_t Kp, const int8_t *weights, const int32_t *zeros, float *sums) {
    ints left[ROWS], right[ROWS];
    for (int r = 0; r < rows; r++) left[r] = right[r] = (ints){0};
    for (int64_t k = 0; k < Kp; k += 4) {
        ints a = ints_at(weights + k * COLUMNS), b = ints_at(weights + k * COLUMNS + 4 * LANES);
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, codes + r * Kp + k, 4);
            ints x = (ints){0} + four;
            left[r] = dot4(left[r], x, a);
            right[r] = dot4(right[r], x, b);
        }
    }
    for (int r = 0; r < rows; r++) {
        floats whole = __builtin_convertvector(left[r] - ints_at(zeros), floats);
        memcpy(sums + r * COLUMNS, &whole, sizeof whole);
        whole = __builtin_convertvector(right[r] - ints_at(zeros + LANES), floats);
        memcpy(sums + r * COLUMNS + LANES, &whole, sizeof whole);
    }
}

/* x[T, K], weights[N / COLUMNS, Kp / 4, COLUMNS, 4]: Kp and N are filled up with codes of 0, and so are
   zeros (the sum of each column's codes, times ZERO), scale and bias -> out[T, N] without what was filled up.
   Returns 0, or 1 if there is no memory. */
int int8_linear(const float *x, int64_t T, int64_t K, int64_t Kp, const int8_t *weights, const int32_t *zeros,
                const float *scale, const float *bias, float *out, int64_t N, int digits, int threads) {
    uint8_t *codes = malloc(T * digits * Kp + 1);
    float *step = malloc(T * sizeof *step + 1);
    if (!codes || !step) {
        free(codes), free(step);
        return 1;
    }
#pragma omp parallel for num_threads(T * K < 1 << 16 ? 1 : threads)
    for (int64_t t = 0; t < T; t++) step[t] = encode(x + t * K, K, Kp, digits, codes + t * digits * Kp);

#pragma omp parallel for collapse(2) num_threads(T * K * N < 1 << 20 ? 1 : threads)
    for (int64_t n = 0; n < N; n += COLUMNS)
        for (int64_t many = 0; many < T * digits; many += MANY) {
            int64_t end = many + MANY < T * digits ? many + MANY : T * digits;
            int64_t width = N - n < COLUMNS ? N - n : COLUMNS;
            for (int64_t first = many; first < end; first += ROWS) {
                float sums[ROWS * COLUMNS];
                int rows = end - first < ROWS ? end - first : ROWS;
#define CASE(R) \
    case R: multiply(R, codes + first * Kp, Kp, weights + n * Kp, zeros + n, sums); break;
                switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
                for (int r = 0; r < rows; r += digits) {
                    float *y = sums + r * COLUMNS, own = step[(first + r) / digits];
                    if (digits == 2)
                        for (int i = 0; i < COLUMNS; i++) y[i] += y[COLUMNS + i] * (1.0f / (2 * MOST));
                    for (int i = 0; i < COLUMNS; i++) y[i] = y[i] * scale[n + i] * own + bias[n + i];
                    memcpy(out + (first + r) / digits * N + n, y, width * sizeof *y);
                }
            }
        }
    free(codes), free(step);
    return 0;
}
