/* y = x · Wᵀ + bias, where W is int8 codes, and the rows of x become codes in the same call. Part 17.

   A row of W is a column of the product. VNNI's instruction vpdpbusd takes 4 codes of x, from 0 to 255, and 4
   codes of W for each of LANES columns. For each column the instruction adds the 4 products to a sum of 32 bits. */

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
    COLUMNS = 2 * LANES, /* columns of the product that are computed at a time */
    ROWS = 6,            /* rows of codes at a time: their 2 · 6 vectors of sums fit into the registers */
    CHUNK = 8 * ROWS,    /* rows of codes that a thread takes at a time */
    /* A number of x becomes a level from -MAX_LEVEL to MAX_LEVEL. Its code is level + ZERO_POINT, a byte without
       a sign. Both constants must be equal to those of int8_rows.py. */
    MAX_LEVEL = 127,
    ZERO_POINT = 128
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

#pragma GCC visibility push(default) /* Python calls the functions below; a CC with -fvisibility=hidden would hide them */

int columns(void) { return COLUMNS; }

/* Turns a row of x[K] into `digits` rows of codes[Kp], and returns the size of a step between two codes. The second
   digit is the rounding error of the first digit, in steps that are 2 · MAX_LEVEL times finer. If a number of the
   row is not finite, the function returns NAN, which makes all results of the row NAN. */
static float encode(const float *x, int64_t K, int64_t Kp, int digits, uint8_t *codes) {
    float largest = 1e-30f, not_finite = 0; /* `largest` is not 0, so that a row of zeros is not divided by 0 */
#pragma omp simd reduction(max : largest) reduction(+ : not_finite)
    for (int64_t k = 0; k < K; k++) {
        float size = fabsf(x[k]);
        largest = size > largest ? size : largest;
        not_finite += x[k] - x[k]; /* 0 for a finite number, else NAN */
    }
    memset(codes, ZERO_POINT, digits * Kp);
    if (not_finite != 0) return NAN; /* the condition is true if not_finite is NAN */
    float steps_per_unit = MAX_LEVEL / largest;
    if (digits == 1) {
#pragma omp simd
        for (int64_t k = 0; k < K; k++) codes[k] = (uint8_t)((int32_t)rintf(x[k] * steps_per_unit) + ZERO_POINT);
    } else {
#pragma omp simd
        for (int64_t k = 0; k < K; k++) {
            float exact = x[k] * steps_per_unit, coarse = rintf(exact);
            codes[k] = (uint8_t)((int32_t)coarse + ZERO_POINT);
            codes[Kp + k] = (uint8_t)((int32_t)rintf((exact - coarse) * (2 * MAX_LEVEL)) + ZERO_POINT);
        }
    }
    return largest / MAX_LEVEL;
}

/* sums[rows][COLUMNS] = codes[rows][Kp] times one block of weights[Kp / 4][COLUMNS][4], minus each column's
   zero_point_sums. Every caller passes a constant for `rows`, so that the compiler keeps the sums in registers. */
static inline __attribute__((always_inline)) void multiply(
    int rows, const uint8_t *codes, int64_t Kp, const int8_t *weights, const int32_t *zero_point_sums,
    float *sums) {
    ints left[ROWS], right[ROWS];
    for (int r = 0; r < rows; r++) left[r] = right[r] = (ints){0};
    for (int64_t k = 0; k < Kp; k += 4) {
        ints a = ints_at(weights + k * COLUMNS), b = ints_at(weights + k * COLUMNS + 4 * LANES);
        for (int r = 0; r < rows; r++) {
            int32_t four_codes;
            memcpy(&four_codes, codes + r * Kp + k, 4);
            ints x = (ints){0} + four_codes; /* the same four codes in every lane */
            left[r] = dot4(left[r], x, a);
            right[r] = dot4(right[r], x, b);
        }
    }
    for (int r = 0; r < rows; r++) {
        floats whole = __builtin_convertvector(left[r] - ints_at(zero_point_sums), floats);
        memcpy(sums + r * COLUMNS, &whole, sizeof whole);
        whole = __builtin_convertvector(right[r] - ints_at(zero_point_sums + LANES), floats);
        memcpy(sums + r * COLUMNS + LANES, &whole, sizeof whole);
    }
}

/* x[T, K] -> out[T, N]. Returns 0, or 1 if there is no memory.

   With Kp and Np = K and N, rounded up to multiples of 4 and COLUMNS: weights[Np / COLUMNS, Kp / 4, COLUMNS, 4],
   zero_point_sums[Np], scale[Np] and bias[Np], all padded with 0. A column's number in zero_point_sums is the sum
   of the column's codes times ZERO_POINT. `digits`: 1 or 2 digits for each number of x. */
int int8_linear(const float *x, int64_t T, int64_t K, int64_t Kp, const int8_t *weights,
                const int32_t *zero_point_sums, const float *scale, const float *bias, float *out, int64_t N, int digits, int threads) {
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
        for (int64_t chunk = 0; chunk < T * digits; chunk += CHUNK) {
            int64_t end = chunk + CHUNK < T * digits ? chunk + CHUNK : T * digits;
            int64_t width = N - n < COLUMNS ? N - n : COLUMNS;
            for (int64_t first = chunk; first < end; first += ROWS) {
                float sums[ROWS * COLUMNS];
                int rows = end - first < ROWS ? end - first : ROWS;
#define CASE(R) \
    case R: multiply(R, codes + first * Kp, Kp, weights + n * Kp, zero_point_sums + n, sums); break;
                switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
                for (int r = 0; r < rows; r += digits) {
                    float *y = sums + r * COLUMNS, row_step = step[(first + r) / digits];
                    if (digits == 2)
                        for (int i = 0; i < COLUMNS; i++) y[i] += y[COLUMNS + i] * (1.0f / (2 * MAX_LEVEL));
                    for (int i = 0; i < COLUMNS; i++) y[i] = y[i] * scale[n + i] * row_step + bias[n + i];
                    memcpy(out + (first + r) / digits * N + n, y, width * sizeof *y);
                }
            }
        }
    free(codes), free(step);
    return 0;
}
