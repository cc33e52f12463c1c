/* Attention of packed rows over keys and values in the pool, for CPUs with AVX512-BF16. See paged_attention.py.
 *
 * The lanes of a register are queries: rows of one text, and the query heads that share a key head. Each lane computes
 * its query from the first key on, in runs of KEYS keys of its own text, so that its bits depend on its text alone.
 */
#include "kernels.h"

#define LANES 32 /* queries of a tile: two registers */
#define KEYS 128 /* keys of a run, which are scored before their values are added up */
#define SOME 8   /* queries per read of the values */
#define LINE 32  /* dimensions of a head per register */
#define MAX_HEAD_DIM 256

typedef struct {
    uint32_t queries[MAX_HEAD_DIM / 2][LANES]; /* two dimensions each */
    float scores[KEYS][LANES];
    uint32_t weights[KEYS / 2][LANES]; /* of two keys each */
    float sums[LANES][MAX_HEAD_DIM];   /* weighted values, with the dimensions in the order of add_values */
    float largest[LANES], totals[LANES], shrink[LANES];
    int32_t seen[LANES], first[LANES]; /* each query attends to the keys from first to seen - 1 */
    const bf16 *keys[KEYS], *values[KEYS];
} Scratch;

/* Stores NaN and infinity as 0: masked keys are multiplied by 0, not skipped. */
CPU static void put_head(const bf16 *from, bf16 *to, int head_dim) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int at = 0; at < head_dim; at += LINE) {
        const __m512i numbers = _mm512_loadu_si512(from + at);
        const __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(numbers, exponent), exponent);
        _mm512_storeu_si512(to + at, _mm512_maskz_mov_epi16(finite, numbers));
    }
}

void put(const Pass *pass, const Attention *attention, int row, Rows key, Rows value) {
    const int head_dim = attention->head_dim;
    for (int head = 0; head < attention->kv_heads; head++) {
        const int64_t to = ((int64_t)pass->slots[row] * attention->kv_heads + head) * head_dim;
        put_head(key.at + row * key.row + head * key.head, attention->keys + to, head_dim);
        put_head(value.at + row * value.row + head * value.head, attention->values + to, head_dim);
    }
}

/* The scores of num_keys keys, from `at` on. */
INLINE void score(const int num_vectors, const int num_keys, int at, int head_dim, Scratch *s) {
    __m512 sums[8][2];
    for (int key = 0; key < num_keys; key++)
        for (int i = 0; i < num_vectors; i++)
            sums[key][i] = _mm512_setzero_ps();
    for (int pair = 0; pair < head_dim / 2; pair++) {
        __m512i queries[2];
        for (int i = 0; i < num_vectors; i++)
            queries[i] = _mm512_loadu_si512(s->queries[pair] + i * 16);
        for (int key = 0; key < num_keys; key++) {
            int32_t both;
            memcpy(&both, s->keys[at + key] + pair * 2, sizeof both);
            const __m512i of_key = _mm512_set1_epi32(both);
            for (int i = 0; i < num_vectors; i++)
                sums[key][i] = _mm512_dpbf16_ps(sums[key][i], (__m512bh)queries[i], (__m512bh)of_key);
        }
    }
    for (int key = 0; key < num_keys; key++)
        for (int i = 0; i < num_vectors; i++)
            _mm512_storeu_ps(s->scores[at + key] + i * 16, sums[key][i]);
}

INLINE __mmask16 visible(__m512i first, __m512i seen, int key) {
    const __m512i keys = _mm512_set1_epi32(key);
    return _mm512_cmple_epi32_mask(first, keys) & _mm512_cmplt_epi32_mask(keys, seen);
}

/* Turns the scores of a run that begins with key `start` into weights, for 16 queries. The largest score so far weighs
 * 1. */
CPU static void weigh(int lane, int start, int num_keys, float scale, Scratch *s) {
    const __m512i first = _mm512_loadu_si512(s->first + lane), seen = _mm512_loadu_si512(s->seen + lane);
    const __m512 none = _mm512_set1_ps(-INFINITY), scales = _mm512_set1_ps(scale);
    const __m512 before = _mm512_loadu_ps(s->largest + lane);
    __m512 largest = before;
    for (int key = 0; key < num_keys; key++) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(s->scores[key] + lane), scales);
        const __m512 own = _mm512_mask_mov_ps(none, visible(first, seen, start + key), scaled);
        largest = _mm512_max_ps(largest, own);
        _mm512_storeu_ps(s->scores[key] + lane, own);
    }
    _mm512_storeu_ps(s->largest + lane, largest);
    /* A query's largest score is -infinity before its first key. */
    const __mmask16 has_some = _mm512_cmpneq_ps_mask(largest, none);
    const __m512 top = _mm512_maskz_mov_ps(has_some, largest);
    const __m512 shrink = power(_mm512_sub_ps(before, top));
    _mm512_storeu_ps(s->shrink + lane, shrink);
    __m512 totals[2] = {_mm512_mul_ps(_mm512_loadu_ps(s->totals + lane), shrink), _mm512_setzero_ps()};
    for (int key = 0; key < num_keys; key += 2) {
        __m512i rounded[2];
        for (int i = 0; i < 2; i++) {
            const __m512 own = key + i < num_keys ? _mm512_loadu_ps(s->scores[key + i] + lane) : none;
            const __mmask16 shown = _mm512_cmpneq_ps_mask(own, none);
            const __m512 weights = _mm512_maskz_mov_ps(shown, power(_mm512_sub_ps(own, top)));
            totals[i] = _mm512_add_ps(totals[i], weights);
            rounded[i] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weights));
        }
        const __m512i both = _mm512_or_si512(rounded[0], _mm512_slli_epi32(rounded[1], 16));
        _mm512_storeu_si512(s->weights[key / 2] + lane, both);
    }
    _mm512_storeu_ps(s->totals + lane, _mm512_add_ps(totals[0], totals[1]));
}

/* Adds weighted values to the sums of num queries, for LINE dimensions: first those in the lower halves of the
 * register's 128-bit lanes, then the others. */
INLINE void add_values(const int num, int query, int dimension, int num_keys, Scratch *s) {
    __m512 sums[SOME][2];
    for (int q = 0; q < num; q++)
        for (int i = 0; i < 2; i++)
            sums[q][i] = _mm512_mul_ps(_mm512_loadu_ps(s->sums[query + q] + dimension + i * 16),
                                       _mm512_set1_ps(s->shrink[query + q]));
    for (int key = 0; key < num_keys; key += 2) {
        const __m512i even = _mm512_loadu_si512(s->values[key] + dimension);
        const __m512i odd = _mm512_loadu_si512(s->values[key + 1] + dimension);
        const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        for (int q = 0; q < num; q++) {
            const __m512i weights = _mm512_set1_epi32((int32_t)s->weights[key / 2][query + q]);
            sums[q][0] = _mm512_dpbf16_ps(sums[q][0], (__m512bh)weights, (__m512bh)low);
            sums[q][1] = _mm512_dpbf16_ps(sums[q][1], (__m512bh)weights, (__m512bh)high);
        }
    }
    for (int q = 0; q < num; q++)
        for (int i = 0; i < 2; i++)
            _mm512_storeu_ps(s->sums[query + q] + dimension + i * 16, sums[q][i]);
}

CPU static void add_some_values(int num, int query, int dimension, int num_keys, Scratch *s) {
    switch (num) {
#define CASE(number) case number: add_values(number, query, dimension, num_keys, s); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

/* Computes the next run of a chain's keys, which begins with key `start`. */
CPU static void run(const Tile *tile, int start, int num_keys, const Attention *attention, Scratch *s) {
    const int head_dim = attention->head_dim;
    if (tile->num > 16)
        for (int at = 0; at < num_keys; at += 4)
            score(2, 4, at, head_dim, s);
    else
        for (int at = 0; at < num_keys; at += 8)
            score(1, 8, at, head_dim, s);
    for (int lane = 0; lane < tile->num; lane += 16)
        weigh(lane, start, num_keys, attention->scale, s);
    for (int dimension = 0; dimension < head_dim; dimension += LINE) {
        int query = 0;
        for (int left = (tile->num + SOME - 1) / SOME; left > 0; left--) {
            const int num = (tile->num - query + left - 1) / left;
            add_some_values(num, query, dimension, num_keys, s);
            query += num;
        }
    }
}

CPU static void store(const float *sums, float total, bf16 *output, int head_dim) {
    const __m512 share = _mm512_set1_ps(1 / total);
    const __m512i order = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
    for (int at = 0; at < head_dim; at += LINE) {
        const __m256bh low = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + at), share));
        const __m256bh high = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + at + 16), share));
        const __m512i both = _mm512_permutex2var_epi64(_mm512_castsi256_si512((__m256i)low), order,
                                                       _mm512_castsi256_si512((__m256i)high));
        _mm512_storeu_si512(output + at, both);
    }
}

CPU static void attend_tile(const Pass *pass, const Attention *attention, const Tile *tile, int kv_head, Rows queries,
                            Rows outputs) {
    Scratch s;
    const int head_dim = attention->head_dim, groups = attention->heads / attention->kv_heads;
    const int32_t *rows = pass->rows + tile->rows, *num_seen = pass->num_seen + tile->rows;
    int first_key = INT32_MAX, num_keys = 0;
    memset(s.queries, 0, sizeof s.queries[0] * head_dim / 2);
    memset(s.totals, 0, sizeof s.totals);
    for (int lane = 0; lane < LANES; lane++) {
        s.largest[lane] = -INFINITY;
        s.first[lane] = s.seen[lane] = 0;
        if (lane >= tile->num)
            continue;
        const int row = (tile->first + lane) / groups, head = kv_head * groups + (tile->first + lane) % groups;
        const bf16 *query = queries.at + rows[row] * queries.row + head * queries.head;
        for (int pair = 0; pair < head_dim / 2; pair++)
            memcpy(&s.queries[pair][lane], query + pair * 2, sizeof s.queries[pair][lane]);
        memset(s.sums[lane], 0, sizeof s.sums[lane][0] * head_dim);
        s.seen[lane] = num_seen[row];
        s.first[lane] = num_seen[row] > attention->window ? num_seen[row] - attention->window : 0;
        first_key = s.first[lane] < first_key ? s.first[lane] : first_key;
        num_keys = s.seen[lane] > num_keys ? s.seen[lane] : num_keys;
    }
    for (int start = first_key / KEYS * KEYS; start < num_keys; start += KEYS) {
        const int num = num_keys - start < KEYS ? num_keys - start : KEYS;
        for (int key = 0; key < KEYS; key++) { /* the last key pads the run */
            const int64_t slot = pass->keys[tile->keys + start + (key < num ? key : num - 1)];
            const int64_t at = (slot * attention->kv_heads + kv_head) * head_dim;
            s.keys[key] = attention->keys + at;
            s.values[key] = attention->values + at;
            for (int line = 0; line < head_dim; line += LINE) { /* prefetch past the larger caches */
                _mm_prefetch((const char *)(s.keys[key] + line), _MM_HINT_NTA);
                _mm_prefetch((const char *)(s.values[key] + line), _MM_HINT_NTA);
            }
        }
        run(tile, start, num, attention, &s);
    }
    for (int lane = 0; lane < tile->num; lane++) {
        const int row = (tile->first + lane) / groups, head = kv_head * groups + (tile->first + lane) % groups;
        bf16 *output = outputs.at + rows[row] * outputs.row + head * outputs.head;
        store(s.sums[lane], s.totals[lane], output, head_dim);
    }
}

void attend(Turn turn, const Pass *pass, const Attention *attention, Rows query, Rows output) {
    const int kv_heads = attention->kv_heads;
    for (; next_item(&turn); item_is_done(&turn))
        attend_tile(pass, attention, pass->tiles + turn.item / kv_heads, turn.item % kv_heads, query, output);
}

/* The attention of one layer on its own. head_dim is a multiple of LINE, at most MAX_HEAD_DIM. Returns 1. */
int specdec_paged_attention(const Pass *pass, const Attention *attention, const Rows *query, const Rows *key,
                            const Rows *value, const Rows *output, int num_threads) {
    Work of_rows = {0}, of_tiles = {0};
#pragma omp parallel num_threads(num_threads)
    {
        for (Turn turn = join(&of_rows, pass->num_rows, num_threads); next_item(&turn); item_is_done(&turn))
            put(pass, attention, turn.item, *key, *value);
        const int items = pass->num_tiles * attention->kv_heads;
        attend(join(&of_tiles, items, items), pass, attention, *query, *output);
    }
    return 1;
}
