/* Work items that the threads of a parallel region share.
 *
 * The work ends when all items are done. An OpenMP barrier would wait for all threads, but a thread can lose its core
 * for longer than a whole layer takes: to the thread that sends the last pass's tokens, or to another model. Meanwhile
 * another thread repeats its unfinished item, if items may be computed twice.
 */
#ifndef SPECDEC_SHARED_WORK_H
#define SPECDEC_SHARED_WORK_H

#include <sched.h>
#include <stdint.h>

typedef struct {
    int32_t next;     /* the first item that is not taken */
    int32_t num_done;
    uint8_t *results; /* [items]: whether the item has a result. NULL: no item is computed twice */
} Work;

/* A thread's share of the work. */
typedef struct {
    Work *work;
    int32_t num_items, num_parts; /* a span is 1 / num_parts of the items that are left */
    int32_t item, end;
    uint64_t since, patience; /* in ticks: start of its last item, and twice the duration of an item */
} Turn;

#define TURNS 2000       /* iterations of an idle loop before the thread yields its core */
#define PATIENCE 50000   /* in ticks, before the duration of an item is known */

static inline Turn join(Work *work, int num_items, int num_parts) {
    return (Turn){.work = work, .num_items = num_items, .num_parts = num_parts, .item = -1, .end = 0};
}

/* Takes the next span of items; spans become shorter. Returns 0 if no item is left. */
static inline int take_span(Turn *turn) {
    int32_t next = __atomic_load_n(&turn->work->next, __ATOMIC_RELAXED), size;
    do {
        if (next >= turn->num_items)
            return 0;
        size = (turn->num_items - next + turn->num_parts - 1) / turn->num_parts;
    } while (!__atomic_compare_exchange_n(&turn->work->next, &next, next + size, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    turn->item = next;
    turn->end = next + size;
    return 1;
}

static inline int has_result(const Turn *turn, int item) {
    return turn->work->results && __atomic_load_n(turn->work->results + item, __ATOMIC_RELAXED);
}

static inline int is_over(const Turn *turn) {
    return __atomic_load_n(&turn->work->num_done, __ATOMIC_ACQUIRE) == turn->num_items;
}

/* Waits for the other threads; at most for its patience if items may be computed twice. Returns whether all is done. */
static inline int wait_for_others(const Turn *turn) {
    const uint64_t begin = __builtin_ia32_rdtsc();
    for (int turns = 1; !is_over(turn); turns++) {
        __builtin_ia32_pause();
        if (turn->work->results && __builtin_ia32_rdtsc() - begin > turn->patience)
            return 0;
        if (turns % TURNS == 0)
            sched_yield();
    }
    return 1;
}

/* Puts the next item to compute into turn->item; returns 0 when all are done. */
static inline int next_item(Turn *turn) {
    const uint64_t now = __builtin_ia32_rdtsc();
    turn->patience = turn->since ? 2 * (now - turn->since) : PATIENCE;
    do
        turn->item++;
    while (turn->item < turn->end && has_result(turn, turn->item));
    while (turn->item >= turn->end && !take_span(turn)) {
        if (wait_for_others(turn))
            return 0;
        for (int item = 0; item < turn->num_items; item++)
            if (!has_result(turn, item)) {
                turn->item = item;
                turn->end = item + 1;
                break;
            }
    }
    turn->since = __builtin_ia32_rdtsc();
    return 1;
}

/* Whether the result that this thread has computed is the item's first; only then may it be stored. */
static inline int is_first(Turn *turn) {
    uint8_t *result = turn->work->results + turn->item;
    return !__atomic_load_n(result, __ATOMIC_RELAXED) && !__atomic_exchange_n(result, 1, __ATOMIC_RELAXED);
}

static inline void item_is_done(Turn *turn) { __atomic_fetch_add(&turn->work->num_done, 1, __ATOMIC_RELEASE); }

#endif
