/* The winner of the coupled exponential race over a vocabulary, for CPUs with AVX512-BF16. See coupled_draw.py.
 *
 * Few tokens of a row can win. A token's exponential E is at least the uniform number u that it is computed from. So a
 * token with u above its weight times the best E / weight so far is excluded without a logarithm. The remaining tokens
 * are compared in double precision, as in specdec/sampling/distributions.py. Rows that are not sound give any token.
 */
#include "kernels.h"

#define BLOCK 64           /* tokens that share a call of the random generator, and a largest logit */
#define LOG_RANGE 26.01    /* upper bound of the distance between the logarithms of two exponentials */
#define NOTHING 50         /* logits below the top at which a whole vocabulary has no weight in double precision */
#define LOG2_E 1.4426950408889634
#define MARGIN 1.001f      /* for comparisons in single precision */

/* Tokens in the order of their ids. */
typedef struct {
    float *logits;
    int32_t *ids;
    double *weights;
    int num;
} Tokens;

/* The last token that passes the filters, in order of logits and, for ties, of ids. */
typedef struct {
    float logit;
    int32_t id;
} Edge;

INLINE double sum_of(const double *weights, int at, __mmask16 some) {
    const __m512d low = _mm512_maskz_loadu_pd((__mmask8)some, weights + at);
    const __m512d high = _mm512_maskz_loadu_pd((__mmask8)(some >> 8), weights + at + 8);
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

INLINE __mmask16 first_of(int num) { return num >= 16 ? 0xffff : (__mmask16)((1 << num) - 1); }

/* Keeps the tokens with logits above the pivot, or below it, in place. */
CPU static void keep(Tokens *tokens, float pivot, int above) {
    int num = 0;
    const __m512 pivots = _mm512_set1_ps(pivot);
    for (int at = 0; at < tokens->num; at += 16) {
        const __mmask16 here = first_of(tokens->num - at);
        const __m512 logits = _mm512_maskz_loadu_ps(here, tokens->logits + at);
        const __mmask16 kept = above ? _mm512_mask_cmp_ps_mask(here, logits, pivots, _CMP_GT_OQ)
                                     : _mm512_mask_cmp_ps_mask(here, logits, pivots, _CMP_LT_OQ);
        const __m512i ids = _mm512_maskz_loadu_epi32(here, tokens->ids + at);
        const __m512d low = _mm512_maskz_loadu_pd((__mmask8)here, tokens->weights + at);
        const __m512d high = _mm512_maskz_loadu_pd((__mmask8)(here >> 8), tokens->weights + at + 8);
        const int num_low = __builtin_popcount(kept & 0xff);
        _mm512_mask_compressstoreu_ps(tokens->logits + num, kept, logits);
        _mm512_mask_compressstoreu_epi32(tokens->ids + num, kept, ids);
        _mm512_mask_compressstoreu_pd(tokens->weights + num, (__mmask8)kept, low);
        _mm512_mask_compressstoreu_pd(tokens->weights + num + num_low, (__mmask8)(kept >> 8), high);
        num += __builtin_popcount(kept);
    }
    tokens->num = num;
}

/* The median of three logits, from pseudo-random places, so that no order of the logits is a worst case. */
static float pivot_of(const Tokens *tokens) {
    const uint64_t num = (uint64_t)tokens->num;
    const float a = tokens->logits[(uint32_t)(num * 0x9E3779B97F4A7C15u >> 32) % num];
    const float b = tokens->logits[(uint32_t)(num * 0xD1B54A32D192ED03u >> 32) % num];
    const float c = tokens->logits[(uint32_t)(num * 0x8CB92BA72F3D8DD7u >> 32) % num];
    const float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* The edge up to which, itself included, the tokens weigh `goal` or more. Overwrites the tokens; there must be some. */
CPU static Edge edge_at(Tokens tokens, double goal) {
    Edge last = {-INFINITY, INT32_MAX};
    while (tokens.num) {
        const float pivot = pivot_of(&tokens);
        double above = 0;
        for (int at = 0; at < tokens.num; at += 16) {
            const __mmask16 here = first_of(tokens.num - at);
            const __m512 logits = _mm512_maskz_loadu_ps(here, tokens.logits + at);
            above += sum_of(tokens.weights, at, _mm512_mask_cmp_ps_mask(here, logits, _mm512_set1_ps(pivot), _CMP_GT_OQ));
        }
        if (above >= goal) {
            keep(&tokens, pivot, 1);
            continue;
        }
        goal -= above;
        for (int at = 0; at < tokens.num; at++)
            if (tokens.logits[at] == pivot) {
                last = (Edge){pivot, tokens.ids[at]};
                goal -= tokens.weights[at];
                if (goal <= 0)
                    return last;
            }
        keep(&tokens, pivot, 0);
    }
    return last;
}

/* 2 to the power of x, with a relative error of 2e-16. */
INLINE __m512d power_of_two(__m512d x) {
    static const double factors[] = { /* of the power series */
        1.36914888539041241e-12, 2.56784359934881958e-11, 4.44553827187081007e-10, 7.05491162080112088e-09,
        1.01780860092396960e-07, 1.32154867901443053e-06, 1.52527338040598377e-05, 1.54035303933816061e-04,
        1.33335581464284411e-03, 9.61812910762847688e-03, 5.55041086648215762e-02, 2.40226506959100694e-01,
        6.93147180559945286e-01, 1};
    x = _mm512_max_pd(_mm512_set1_pd(-1000), x);
    const __m512d whole = _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512d part = _mm512_sub_pd(x, whole);
    __m512d sum = _mm512_set1_pd(factors[0]);
    for (int i = 1; i < 14; i++)
        sum = _mm512_fmadd_pd(sum, part, _mm512_set1_pd(factors[i]));
    return _mm512_scalef_pd(sum, whole);
}

INLINE __m512i ids_from(int id) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_set1_epi32(id), lanes);
}

INLINE __mmask16 let_through(__m512 logits, int id, Edge edge) {
    const __mmask16 equal = _mm512_cmp_ps_mask(logits, _mm512_set1_ps(edge.logit), _CMP_EQ_OQ);
    return _mm512_cmp_ps_mask(logits, _mm512_set1_ps(edge.logit), _CMP_GT_OQ) |
           _mm512_mask_cmple_epi32_mask(equal, ids_from(id), _mm512_set1_epi32(edge.id));
}

/* A row, padded with -infinity to whole blocks. */
typedef struct {
    const float *logits, *largest; /* [num_blocks * BLOCK], [num_blocks] */
    float top;
    int num_blocks;
} Row;

INLINE int is_out(const Row *row, int block, Edge edge, float least) {
    return row->largest[block] < edge.logit || row->largest[block] < least;
}

/* The weights of up to eight tokens; the most likely token weighs 1. */
INLINE __m512d weights_of(const Row *row, const float *logits, __mmask8 some, double per_logit) {
    const __m512d below = _mm512_sub_pd(_mm512_cvtps_pd(_mm256_maskz_loadu_ps(some, logits)), _mm512_set1_pd(row->top));
    return _mm512_maskz_mov_pd(some, power_of_two(_mm512_mul_pd(below, _mm512_set1_pd(per_logit))));
}

/* The total weight of the tokens that pass `edge`, in blocks that reach `least`. */
CPU static double total_weight(const Row *row, Edge edge, float least, double per_logit) {
    __m512d totals[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int block = 0; block < row->num_blocks; block++) {
        if (is_out(row, block, edge, least))
            continue;
        for (int id = block * BLOCK; id < (block + 1) * BLOCK; id += 16) {
            const __mmask16 some = let_through(_mm512_loadu_ps(row->logits + id), id, edge);
            for (int i = 0; i < 2; i++)
                totals[i] = _mm512_add_pd(totals[i], weights_of(row, row->logits + id + 8 * i, (__mmask8)(some >> 8 * i),
                                                                per_logit));
        }
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(totals[0], totals[1]));
}

/* The tokens that pass `edge` and are not below `least`; the buffers have room for all tokens. */
CPU static Tokens gather(const Row *row, Edge edge, float least, double per_logit, Tokens tokens) {
    tokens.num = 0;
    for (int block = 0; block < row->num_blocks; block++) {
        if (is_out(row, block, edge, least))
            continue;
        for (int id = block * BLOCK; id < (block + 1) * BLOCK; id += 16) {
            const __m512 logits = _mm512_loadu_ps(row->logits + id);
            __mmask16 some = let_through(logits, id, edge);
            some = _mm512_mask_cmp_ps_mask(some, logits, _mm512_set1_ps(least), _CMP_GE_OQ);
            _mm512_mask_compressstoreu_ps(tokens.logits + tokens.num, some, logits);
            _mm512_mask_compressstoreu_epi32(tokens.ids + tokens.num, some, ids_from(id));
            tokens.num += __builtin_popcount(some);
        }
    }
    for (int at = 0; at < tokens.num; at += 8) {
        const __mmask8 here = (__mmask8)first_of(tokens.num - at);
        _mm512_mask_storeu_pd(tokens.weights + at, here, weights_of(row, tokens.logits + at, here, per_logit));
    }
    return tokens;
}

/* The edge after the first k tokens: with weights of 1. */
CPU static Edge first_k(Tokens tokens, int k) {
    for (int at = 0; at < tokens.num; at++)
        tokens.weights[at] = 1;
    return edge_at(tokens, k);
}

CPU static Edge top_k(const Row *row, int k, Tokens tokens) {
    Edge edge = {-INFINITY, INT32_MAX};
    float least = -INFINITY;
    if (k <= row->num_blocks) { /* k blocks have a token at or above the k-th largest of the blocks' maxima */
        tokens.num = row->num_blocks;
        memcpy(tokens.logits, row->largest, tokens.num * sizeof(float));
        for (int block = 0; block < tokens.num; block++)
            tokens.ids[block] = block;
        least = first_k(tokens, k).logit;
    }
    return first_k(gather(row, edge, least, 0, tokens), k);
}

/* Tokens below `least` are not sorted: together they weigh no more than the part that top-p removes anyway. */
CPU static Edge top_p(const Row *row, Edge edge, double p, double temperature, Tokens tokens) {
    const double per_logit = LOG2_E / temperature;
    const double total = total_weight(row, edge, (float)(row->top - NOTHING * temperature), per_logit);
    const double least = row->top + temperature * log((1 - p) / (row->num_blocks * BLOCK));
    return edge_at(gather(row, edge, (float)least, per_logit, tokens), p * total);
}

/* The lowest logit that passes min_p, by scores in double precision. */
static float lowest_of_min_p(const Draw *draw, float top) {
    const double floor = top / draw->temperature + log(draw->min_p < 1 ? draw->min_p : 1);
    float logit = (float)(floor * draw->temperature); /* or a neighbouring float */
    for (int i = 0; i < 4 && logit / draw->temperature >= floor; i++)
        logit = nextafterf(logit, -INFINITY);
    for (int i = 0; i < 4 && logit / draw->temperature < floor; i++)
        logit = nextafterf(logit, INFINITY);
    return logit;
}

INLINE void multiply_wide(__m512i words, uint32_t by, __m512i *high, __m512i *low) {
    const __m512i factor = _mm512_set1_epi64(by);
    const __m512i even = _mm512_mul_epu32(words, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), factor);
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

/* The random words of the BLOCK tokens from `id` on, by Philox4x32-10; see specdec/core/noise.py. */
INLINE void words_of(const Draw *draw, int id, __m512i words[4]) {
    uint32_t keys[2] = {(uint32_t)draw->seed, (uint32_t)(draw->seed >> 32)};
    /* This order makes the four words of four counters those of 16 consecutive tokens. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i a = _mm512_set1_epi32((int)draw->position), b = _mm512_setzero_si512();
    __m512i c = _mm512_add_epi32(_mm512_set1_epi32(id / 4), order), d = _mm512_set1_epi32((int)draw->domain);
    for (int i = 0; i < 10; i++) {
        __m512i high[2], low[2];
        multiply_wide(a, 0xD2511F53, &high[0], &low[0]);
        multiply_wide(c, 0xCD9E8D57, &high[1], &low[1]);
        a = _mm512_xor_si512(high[1], _mm512_xor_si512(b, _mm512_set1_epi32((int)keys[0])));
        c = _mm512_xor_si512(high[0], _mm512_xor_si512(d, _mm512_set1_epi32((int)keys[1])));
        b = low[1];
        d = low[0];
        keys[0] += 0x9E3779B9;
        keys[1] += 0xBB67AE85;
    }
    const __m512i ab[2] = {_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)};
    const __m512i cd[2] = {_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d)};
    for (int i = 0; i < 2; i++) {
        words[2 * i] = _mm512_unpacklo_epi64(ab[i], cd[i]);
        words[2 * i + 1] = _mm512_unpackhi_epi64(ab[i], cd[i]);
    }
}

/* The leading tokens so far, best first, for ties the lowest ids first. */
typedef struct {
    int32_t *ids;  /* [most] */
    double *leads; /* [most]; -infinity: empty */
    int most;
} Ranking;

static void enter(Ranking ranking, int32_t id, double lead) {
    int place = ranking.most - 1;
    for (; place > 0 && lead > ranking.leads[place - 1]; place--) {
        ranking.leads[place] = ranking.leads[place - 1];
        ranking.ids[place] = ranking.ids[place - 1];
    }
    ranking.leads[place] = lead;
    ranking.ids[place] = id;
}

CPU static void race(const Draw *draw, const Row *row, Edge edge, Ranking ranking) {
    const float per_logit = (float)(LOG2_E / draw->temperature);
    const float least = ranking.most > 1 ? -INFINITY : (float)(row->top - 1.0001 * LOG_RANGE * draw->temperature);
    const double *const last = ranking.leads + ranking.most - 1;
    float limit = INFINITY; /* upper bound of u / weight */
    for (int block = 0; block < row->num_blocks; block++) {
        if (is_out(row, block, edge, least))
            continue;
        __m512i words[4];
        words_of(draw, block * BLOCK, words);
        for (int i = 0; i < 4; i++) {
            const int id = block * BLOCK + 16 * i;
            const __m512 logits = _mm512_loadu_ps(row->logits + id), below = _mm512_sub_ps(logits, _mm512_set1_ps(row->top));
            const __m512 weights = power(_mm512_mul_ps(below, _mm512_set1_ps(per_logit)));
            const __m512 u = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepu32_ps(words[i]), _mm512_set1_ps(0.5f)),
                                           _mm512_set1_ps(0x1p-32f));
            __mmask16 some = let_through(logits, id, edge);
            some = _mm512_mask_cmp_ps_mask(some, u, _mm512_mul_ps(weights, _mm512_set1_ps(limit)), _CMP_LE_OQ);
            if (!some)
                continue;
            uint32_t word[16];
            _mm512_storeu_si512(word, words[i]);
            for (; some; some &= (__mmask16)(some - 1)) {
                const int lane = __builtin_ctz(some);
                const double score = row->logits[id + lane] / draw->temperature;
                const double lead = score - log(-log1p(-(word[lane] + 0.5) * 0x1p-32));
                if (lead > *last) {
                    enter(ranking, id + lane, lead);
                    limit = MARGIN * (float)exp(row->top / draw->temperature - *last);
                }
            }
        }
    }
}

/* Copies a row into logits, padded to whole blocks, and the maximum of each block into largest. Returns the maximum. */
CPU static float fill(const void *from, int is_bf16, int num, float *logits, float *largest) {
    float top = -INFINITY;
    for (int block = 0; block * BLOCK < num; block++) {
        __m512 most = _mm512_set1_ps(-INFINITY);
        for (int at = block * BLOCK; at < (block + 1) * BLOCK; at += 16) {
            const __mmask16 here = at < num ? first_of(num - at) : 0;
            const __m512 some = is_bf16 ? (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(
                                              _mm256_maskz_loadu_epi16(here, (const bf16 *)from + at)), 16)
                                        : _mm512_maskz_loadu_ps(here, (const float *)from + at);
            const __m512 padded = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), here, some);
            _mm512_storeu_ps(logits + at, padded);
            most = _mm512_max_ps(most, padded);
        }
        largest[block] = _mm512_reduce_max_ps(most);
        top = largest[block] > top ? largest[block] : top;
    }
    return top;
}

CPU static void rank_logits(const Row *row, Ranking ranking) {
    const double *const last = ranking.leads + ranking.most - 1;
    for (int block = 0; block < row->num_blocks; block++)
        for (int id = block * BLOCK; id < (block + 1) * BLOCK && row->largest[block] > *last; id += 16) {
            const __m512 logits = _mm512_loadu_ps(row->logits + id);
            __mmask16 some = _mm512_cmp_ps_mask(logits, _mm512_set1_ps((float)*last), _CMP_GT_OQ);
            for (; some; some &= (__mmask16)(some - 1)) {
                const int lane = __builtin_ctz(some);
                if (row->logits[id + lane] > *last)
                    enter(ranking, id + lane, row->logits[id + lane]);
            }
        }
}

CPU static Edge edge_of(const Draw *draw, const Row *row, int vocab_size, Tokens tokens) {
    Edge edge = {-INFINITY, INT32_MAX};
    if (draw->top_k > 0 && draw->top_k < vocab_size)
        edge = top_k(row, draw->top_k, tokens);
    if (draw->top_p < 1)
        edge = top_p(row, edge, draw->top_p, draw->temperature, tokens);
    if (draw->min_p > 0) {
        const float lowest = lowest_of_min_p(draw, row->top);
        edge = edge.logit < lowest ? (Edge){lowest, INT32_MAX} : edge;
    }
    return edge;
}

/* If fewer tokens can win than asked for, the first one fills the rest. */
CPU static void rank(const Draw *draw, const Row *row, int vocab_size, Tokens tokens, Ranking ranking) {
    for (int place = 0; place < ranking.most; place++) {
        ranking.ids[place] = 0;
        ranking.leads[place] = -INFINITY;
    }
    if (draw->temperature)
        race(draw, row, edge_of(draw, row, vocab_size, tokens), ranking);
    else
        rank_logits(row, ranking);
    for (int place = 1; place < ranking.most; place++)
        if (ranking.leads[place] == -INFINITY)
            ranking.ids[place] = ranking.ids[0];
}

/* Returns 0 if out of memory. */
static int rank_row(const Draw *draw, const void *from, int is_bf16, int vocab_size, Ranking ranking) {
    const int num_blocks = (vocab_size + BLOCK - 1) / BLOCK, num = num_blocks * BLOCK;
    const int num_sorted = draw->top_k > 0 || draw->top_p < 1 ? num : 0;
    double *const weights = malloc(num_sorted * (sizeof(double) + sizeof(float) + sizeof(int32_t)) +
                                   (num + num_blocks) * sizeof(float));
    if (!weights)
        return 0;
    float *const to_sort = (float *)(weights + num_sorted), *const logits = to_sort + num_sorted;
    float *const largest = logits + num;
    const Tokens tokens = {to_sort, (int32_t *)(largest + num_blocks), weights, 0};
    const Row row = {logits, largest, fill(from, is_bf16, vocab_size, logits, largest), num_blocks};
    rank(draw, &row, vocab_size, tokens, ranking);
    free(weights);
    return 1;
}

int draw_row(const Draw *draw, const void *logits, int is_bf16, int vocab_size, int32_t *token) {
    double lead;
    return rank_row(draw, logits, is_bf16, vocab_size, (Ranking){token, &lead, 1});
}

/* tokens and leads [num_rows][most] = the leading tokens of each row's race, the drawn token first, and their scores
 * with noise. logits: rows of vocab_size, bf16 or float32, row_bytes apart. Returns 0 if out of memory. */
int specdec_coupled_draw(const Draw *draws, const char *logits, int64_t row_bytes, int is_bf16, int vocab_size,
                         int num_rows, int most, int32_t *tokens, double *leads, int num_threads) {
    Work work = {0};
    int there_was_memory = 1;
#pragma omp parallel num_threads(num_threads < num_rows ? num_threads : num_rows)
    for (Turn turn = join(&work, num_rows, num_rows); next_item(&turn); item_is_done(&turn)) {
        const Ranking ranking = {tokens + (size_t)turn.item * most, leads + (size_t)turn.item * most, most};
        if (!rank_row(draws + turn.item, logits + turn.item * row_bytes, is_bf16, vocab_size, ranking))
            __atomic_store_n(&there_was_memory, 0, __ATOMIC_RELAXED);
    }
    return there_was_memory;
}
