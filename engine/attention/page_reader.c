/* Attention of single tokens over keys and values that lie in pages. Part 12.

   A page holds P tokens, and a token's heads lie side by side. So all heads of a tile of tokens are computed
   before the next tile, and memory is read in the order in which it lies. The softmax is a running one
   (Part 9): what was summed up shrinks when a larger score comes. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 8 }; /* tokens at a time; those of the next tile are fetched into the cache meanwhile */

/* e^x for x ≤ 0, to the last bits of a float: 2^n · e^r with |r| ≤ ln 2 / 2, and e^r by Taylor's series. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);                        /* x / ln 2 */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;     /* ln 2 in two parts */
    float e = 1.0f / 5040;
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return e * power;
}

static inline float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* One sequence of `len` tokens, whose pages are `blocks`: query heads from `first` up to, and without, `last`.
   top[Hq] and sum[Hq]: each head's largest score so far, and the sum of its weights. */
static void attend(const float *q, const float *keys, const float *values, float *out, const int64_t *blocks,
                   int64_t len, int64_t P, int64_t first, int64_t last, int64_t group, int64_t Hkv, int64_t Dh,
                   float scale, float *top, float *sum) {
    memset(out + first * Dh, 0, (last - first) * Dh * sizeof *out);
    for (int64_t h = first; h < last; h++) top[h] = -INFINITY, sum[h] = 0;
    for (int64_t start = 0, count; start < len; start += count) {
        count = P - start % P < TILE ? P - start % P : TILE; /* of one page */
        if (count > len - start) count = len - start;
        /* Where the tile's first token lies, and that of the next tile (at the end: this one again). */
        int64_t offset = (blocks[start / P] * P + start % P) * Hkv * Dh, end = start + count;
        int64_t next_offset = end < len ? (blocks[end / P] * P + end % P) * Hkv * Dh : offset;
        for (int64_t h = first; h < last; h++) {
            /* Once for each key head: the next tile's keys and values, a cache line of 16 floats at a time. */
            for (int64_t t = 0; t < count && h % group == 0; t++)
                for (int64_t i = (t * Hkv + h / group) * Dh, last_i = i + Dh; i < last_i; i += 16) {
                    __builtin_prefetch(keys + next_offset + i, 0, 2);
                    __builtin_prefetch(values + next_offset + i, 0, 2);
                }
            const float *key = keys + offset + h / group * Dh, *value = values + offset + h / group * Dh;
            float weight[TILE], highest = top[h], *o = out + h * Dh;
            for (int64_t t = 0; t < count; t++) weight[t] = scale * dot(q + h * Dh, key + t * Hkv * Dh, Dh);
            for (int64_t t = 0; t < count; t++) highest = weight[t] > highest ? weight[t] : highest;
            if (highest > top[h]) {
                float shrink = exponential(top[h] - highest);
                for (int64_t i = 0; i < Dh; i++) o[i] *= shrink;
                sum[h] *= shrink;
                top[h] = highest;
            }
#pragma omp simd
            for (int64_t t = 0; t < count; t++) weight[t] = exponential(weight[t] - highest);
            for (int64_t t = 0; t < count; t++) {
                sum[h] += weight[t];
                for (int64_t i = 0; i < Dh; i++) o[i] += weight[t] * value[t * Hkv * Dh + i];
            }
        }
    }
    for (int64_t h = first; h < last; h++)
        for (int64_t i = 0; i < Dh; i++) out[h * Dh + i] /= sum[h];
}

#pragma GCC visibility push(default) /* of what follows; a CC may have it hidden otherwise */

/* q[S, Hq, Dh], whose sequences are `stride` floats apart; keys and values[B, P, Hkv, Dh]; tables[S, W];
   lens[S] -> out[S, Hq, Dh]. Returns 0, or 1 if there is no memory. */
int read_pages(const float *q, int64_t stride, const float *keys, const float *values, float *out,
               const int64_t *tables, int64_t W, const int64_t *lens, int64_t S, int64_t P, int64_t Hq,
               int64_t Hkv, int64_t Dh, float scale, int threads) {
    int64_t parts = S >= threads ? 1 : (threads + S - 1) / S; /* of a sequence's heads */
    if (parts > Hkv) parts = Hkv;
    float *running = malloc(2 * S * Hq * sizeof *running);
    if (!running) return 1;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (int64_t s = 0; s < S; s++)
        for (int64_t part = 0; part < parts; part++)
            attend(q + s * stride, keys, values, out + s * Hq * Dh, tables + s * W, lens[s], P,
                   Hkv * part / parts * (Hq / Hkv), Hkv * (part + 1) / parts * (Hq / Hkv), Hq / Hkv, Hkv, Dh,
                   scale, running + 2 * s * Hq, running + (2 * s + 1) * Hq);
    free(running);
    return 0;
}
