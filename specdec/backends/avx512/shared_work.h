/* Work that the threads of a parallel region share in items.
 *
 * It is over when all items are done, not when all threads have come, as a barrier of OpenMP would have it. A thread may
 * be kept from its core for longer than a whole layer takes: by whoever carries the last pass's tokens, or by another
 * model. What it has begun is done again by another one meanwhile, where that is possible.
 */
#ifndef SPECDEC_SHARED_WORK_H
#define SPECDEC_SHARED_WORK_H

#include <sched.h>
#include <stdint.h>

typedef struct {
    int32_t next;     /* the first item that nobody has taken */
    int32_t num_done;
    uint8_t *results; /* [items]: whether somebody has a result. NULL: no item is done twice */
} Work;

/* A thread's part of it. */
typedef struct {
    Work *work;
    int32_t num_items, num_parts; /* it takes one of so many parts of what is left at a time */
    int32_t item, end;
    uint64_t since, patience; /* in ticks: when its last item began, and twice what that took */
} Turn;

#define TURNS 2000       /* of an idle loop, after which another thread may want the core */
#define PATIENCE 50000   /* in ticks, of a thread that does not know yet how long an item takes */

static inline Turn join(Work *work, int num_items, int num_parts) {
    return (Turn){.work = work, .num_items = num_items, .num_parts = num_parts, .item = -1, .end = 0};
}

/* Long spans first, then shorter ones. */
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

/* Waits for the others, but where items can be done twice no longer than its patience. Whether all is over then. */
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

/* The next item to be done, in turn->item; 0 when all are done. */
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

/* With an item's result at hand: whether it is the first one, and to be kept. */
static inline int is_first(Turn *turn) {
    uint8_t *result = turn->work->results + turn->item;
    return !__atomic_load_n(result, __ATOMIC_RELAXED) && !__atomic_exchange_n(result, 1, __ATOMIC_RELAXED);
}

static inline void item_is_done(Turn *turn) { __atomic_fetch_add(&turn->work->num_done, 1, __ATOMIC_RELEASE); }

#endif
