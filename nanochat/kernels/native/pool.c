/* Runs programs: operations one after the other, each cut into parts that a few threads take in turn.
 *
 * There is no barrier. A ticket says which part of which operation is next; whoever finishes the last part of
 * an operation puts up the ticket of the next one, and does what is too small to divide by itself on the way.
 * So a thread whose core another program holds delays the others by the part it has in hand, not by every
 * operation that it misses. Threads wait by spinning briefly, then by letting others run, then asleep.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "op.h"

#define EXPORT __attribute__((visibility("default")))

enum { MAX_THREADS = 64, MAX_PARTS = 1023, PARTS_A_THREAD = 4 };
enum { SPINS = 4000, YIELDS = 50, POLL_NS = 50000, IDLE_SPINS = 2000 };
static const int64_t SMALLEST_PART = 1 << 14; /* Multiplications; fewer are done before another core has heard of it. */

/* Epoch (24 bits), operation (20), number of its parts (10), next part (10). */
#define OVER 0xfffffu
typedef uint64_t Ticket;
static Ticket ticket_of(uint32_t epoch, uint32_t op, uint32_t parts) {
    return (uint64_t)(epoch & 0xffffff) << 40 | (uint64_t)op << 20 | (uint64_t)parts << 10;
}
static uint32_t epoch_of(Ticket t) { return (uint32_t)(t >> 40); }
static uint32_t op_of(Ticket t) { return (uint32_t)(t >> 20) & 0xfffff; }
static uint32_t parts_of(Ticket t) { return (uint32_t)(t >> 10) & 1023; }
static uint32_t part_of(Ticket t) { return (uint32_t)t & 1023; }

static struct {
    _Alignas(128) _Atomic Ticket ticket;
    _Alignas(128) _Atomic uint32_t done;  /* parts of the ticket's operation */
    _Alignas(128) _Atomic uint32_t epoch; /* of the newest run */
    _Atomic int threads;                  /* of the newest run */
    _Atomic int *was_short;               /* of the newest run: whether one of its parts had too little memory */
    const Op *ops;
    int num_ops;
    const Kernels *kernels;
    int num_workers;
    int num_asleep; /* under `lock` */
    pthread_mutex_t lock, running;
    pthread_cond_t wake;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .running = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* How many units of work an operation has, and about how many multiplications one of them is. */
static int64_t units_of(const Op *op, int64_t *cost) {
    const int64_t rows = *op->rows;
    switch (op->kind) {
    case LINEAR_INT4:
    case LINEAR_INT8:
    case LINEAR_FLOAT:
        *cost = (int64_t)PANEL * op->inner * (rows + 1) / 2;
        return rows ? (op->n + PANEL - 1) / PANEL : 0;
    case LINEAR_WIDE_INT4:
    case LINEAR_WIDE_INT8:
    case LINEAR_WIDE_FLOAT:
    case LINEAR_WIDE_HALVES:
        *cost = (int64_t)PANEL * op->inner * rows / 4;
        return rows ? (op->n + PANEL - 1) / PANEL : 0;
    case ATTENTION_WIDE:
        *cost = SMALLEST_PART;
        return (rows + query_tile(op) - 1) / query_tile(op) * op->kv_heads;
    case PACK_INT4:
    case PACK_INT8:
    case PACK_HALVES:
        *cost = (int64_t)PANEL * op->inner * 8;
        return (op->n + PANEL - 1) / PANEL;
    case LINEAR_UPPER:
        *cost = (int64_t)PANEL * op->inner * (rows + 1) / 2;
        return rows && !*op->batch_rows ? (op->n + PANEL - 1) / PANEL : 0;
    case LINEAR_REST:
        *cost = (int64_t)PANEL * (*op->batch_rows ? op->inner * (rows + 1) / 2 : 8 * rows);
        if (!rows || *op->batch_rows) return rows ? (op->n + PANEL - 1) / PANEL : 0;
        return ((op->n + PANEL - 1) / PANEL + SPREAD - 1) / SPREAD * SPREAD;
    case SAMPLE:
        *cost = SMALLEST_PART;
        return rows;
    case ATTENTION:
        *cost = SMALLEST_PART / 2;
        return rows * op->kv_heads;
    default:
        *cost = 8 * (int64_t)(op->kind == ROPE_STORE ? (op->heads + 2 * op->kv_heads) * op->head_dim
                              : op->kind == QUANTIZE ? op->inner
                                                     : op->n);
        return rows;
    }
}

static uint32_t parts_for(const Op *op, int threads, int64_t *units) {
    int64_t cost = 1;
    *units = units_of(op, &cost);
    if (threads <= 1) return *units > 0;
    int64_t parts = *units * cost / SMALLEST_PART, most = PARTS_A_THREAD * (int64_t)threads;
    if (parts > most) parts = most;
    if (parts > *units) parts = *units;
    if (parts > MAX_PARTS) parts = MAX_PARTS;
    return parts > 1 ? (uint32_t)parts : *units > 0;
}

/* Whether the part that this thread runs has asked for `scratch` in vain. */
static _Thread_local int is_short;

/* `was_short` belongs to the call whose part it is. */
static void run_part(const Kernels *kernels, const Op *op, int64_t units, uint32_t part, uint32_t parts,
                     _Atomic int *was_short) {
    const int64_t first = units * part / parts, last = units * (part + 1) / parts;
    is_short = 0;
    kernels->run[op->kind](op, first, last);
    if (is_short) atomic_store_explicit(was_short, 1, memory_order_relaxed);
}

/* Put up the next operation that is worth dividing; only one thread is here at a time. */
static void advance(uint32_t epoch, uint32_t next, int threads) {
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    for (; next < (uint32_t)pool.num_ops; next++) {
        int64_t units;
        const uint32_t parts = parts_for(&pool.ops[next], threads, &units);
        if (parts > 1) {
            atomic_store_explicit(&pool.ticket, ticket_of(epoch, next, parts), memory_order_release);
            return;
        }
        if (parts) run_part(pool.kernels, &pool.ops[next], units, 0, 1, pool.was_short);
    }
    atomic_store_explicit(&pool.ticket, ticket_of(epoch, OVER, 0), memory_order_release);
}

static void wait_for_change(Ticket seen) {
    for (int round = 0; atomic_load_explicit(&pool.ticket, memory_order_acquire) == seen; round++) {
        if (round < SPINS) {
            relax();
        } else if (round < SPINS + YIELDS) {
            sched_yield();
        } else {
            nanosleep(&(struct timespec){0, POLL_NS}, NULL);
        }
    }
}

/* Take parts until this run is over. */
static void work(uint32_t epoch, int threads) {
    for (;;) {
        Ticket ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        if (epoch_of(ticket) != (epoch & 0xffffff) || op_of(ticket) == OVER) return;
        if (part_of(ticket) >= parts_of(ticket)) {
            wait_for_change(ticket);
            continue;
        }
        /* A part once taken keeps the run from ending, so that what `pool` says of it holds. */
        if (!atomic_compare_exchange_weak_explicit(&pool.ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        const Op *op = &pool.ops[op_of(ticket)];
        int64_t cost;
        run_part(pool.kernels, op, units_of(op, &cost), part_of(ticket), parts_of(ticket), pool.was_short);
        if (atomic_fetch_add_explicit(&pool.done, 1, memory_order_acq_rel) + 1 == parts_of(ticket))
            advance(epoch, op_of(ticket) + 1, threads);
    }
}

static void *worker(void *argument) {
    const int index = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        uint32_t epoch = seen;
        for (int spin = 0; spin < IDLE_SPINS && epoch == seen; spin++) {
            relax();
            epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire);
        }
        if (epoch == seen) {
            pthread_mutex_lock(&pool.lock);
            pool.num_asleep++;
            while ((epoch = atomic_load_explicit(&pool.epoch, memory_order_acquire)) == seen)
                pthread_cond_wait(&pool.wake, &pool.lock);
            pool.num_asleep--;
            pthread_mutex_unlock(&pool.lock);
        }
        seen = epoch;
        const int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
        if (index < threads) work(epoch, threads);
    }
    return NULL;
}

/* A forked child has none of the threads. */
static void forget_workers(void) {
    pool.num_workers = pool.num_asleep = 0;
    /* Another thread of the parent may have been in mid-run; nobody here may take a part of that. */
    atomic_store(&pool.ticket, ticket_of(atomic_load(&pool.epoch), OVER, 0));
    pthread_mutex_init(&pool.lock, NULL);
    pthread_mutex_init(&pool.running, NULL);
    pthread_cond_init(&pool.wake, NULL);
}

/* As many workers as there can be beside the caller, up to `threads` - 1. */
static void hire(int threads) {
    static int watches_forks;
    if (!watches_forks) watches_forks = pthread_atfork(NULL, NULL, forget_workers) == 0;
    while (pool.num_workers + 1 < threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.num_workers + 1))) return;
        pthread_detach(thread);
        pool.num_workers++;
    }
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

void *scratch(size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    size_t *block = pthread_getspecific(scratch_key); /* its size, and from 64 on what is given out */
    if (!block || *block < bytes) {
        free(block);
        void *fresh = NULL;
        if (posix_memalign(&fresh, 64, 64 + bytes)) fresh = NULL;
        pthread_setspecific(scratch_key, fresh);
        if (!fresh) {
            is_short = 1;
            return NULL;
        }
        block = fresh, *block = bytes;
    }
    return (char *)block + 64;
}

#if defined(WITH_AVX512) || defined(WITH_AVX2)
#include <cpuid.h>

enum {
    ECX1_FMA = 1 << 12, ECX1_OSXSAVE = 1 << 27,
    EBX7_AVX2 = 1 << 5, EBX7_F_DQ = 1 << 16 | 1 << 17, EBX7_BW = 1 << 30, ECX7_VNNI = 1 << 11, EAX71_BF16 = 1 << 5,
    EDX7_AMX_BF16_AND_TILE = 1 << 22 | 1 << 24,
    YMM = 6, ZMM = 0xe6, TILES = 0x60000, /* registers that the system saves */
};

#ifdef WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>

/* Linux lets a process use tiles once it has asked. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif

/* 3: AMX as well; 2: AVX-512 with VNNI and BF16; 1: AVX2; 0: neither. Asked of the processor itself, since compilers name the newer
 * ones differently or not at all. */
static int level_of_processor(void) {
    unsigned a, b, c, d, saved;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & ECX1_OSXSAVE) || !(c & ECX1_FMA)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & EBX7_AVX2) || (saved & YMM) != YMM) return 0;
    const int has_most = (b & EBX7_F_DQ) == EBX7_F_DQ && b & EBX7_BW && b >> 31 && c & ECX7_VNNI; /* 31: VL */
    if (!has_most || (saved & ZMM) != ZMM || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return 1;
    if (!(a & EAX71_BF16)) return 1;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    return (d & EDX7_AMX_BF16_AND_TILE) == EDX7_AMX_BF16_AND_TILE && (saved & TILES) == TILES ? 3 : 2;
}
#endif

static const Kernels *best_kernels(void) {
    static const Kernels *_Atomic best; /* a virtual machine takes its time to answer */
    if (best) return best;
    const Kernels *found = &kernels_plain;
#ifdef WITH_AVX2
    if (level_of_processor() >= 1) found = &kernels_avx2;
#endif
#ifdef WITH_AVX512
    if (level_of_processor() >= 2) found = &kernels_avx512;
#endif
#ifdef WITH_AMX
    if (level_of_processor() >= 3 && may_use_tiles()) found = &kernels_amx;
#endif
    best = found;
    return found;
}

/* The kernels of that name, or the best that this processor can run; NULL if it can't run the named ones. */
static const Kernels *find_kernels(const char *name) {
    const Kernels *best = best_kernels();
    if (!name || !*name || !__builtin_strcmp(name, best->name)) return best;
    if (!__builtin_strcmp(name, kernels_plain.name)) return &kernels_plain;
#ifdef WITH_AVX2
    if (level_of_processor() >= 1 && !__builtin_strcmp(name, kernels_avx2.name)) return &kernels_avx2;
#endif
#ifdef WITH_AVX512
    if (level_of_processor() >= 2 && !__builtin_strcmp(name, kernels_avx512.name)) return &kernels_avx512;
#endif
    return NULL;
}

EXPORT const char *nanochat_kernels(const char *name) {
    const Kernels *kernels = find_kernels(name);
    return kernels ? kernels->name : NULL;
}

EXPORT int nanochat_op_bytes(void) { return (int)sizeof(Op); }

/* Run operations one after the other on up to so many threads, by the kernels of that name. A second caller
 * meanwhile runs its own alone. Returns 0, 1 if there are no such kernels, or 2 if memory was short. */
EXPORT int nanochat_run(const Op *ops, int num_ops, int threads, const char *name) {
    const Kernels *kernels = find_kernels(name);
    if (!kernels) return 1;
    _Atomic int was_short = 0;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1 || num_ops >= (int)OVER || pthread_mutex_trylock(&pool.running)) {
        for (int i = 0; i < num_ops; i++) {
            int64_t cost;
            const int64_t units = units_of(&ops[i], &cost);
            if (units) run_part(kernels, &ops[i], units, 0, 1, &was_short);
        }
        return was_short ? 2 : 0;
    }
    hire(threads);
    pool.ops = ops, pool.num_ops = num_ops, pool.kernels = kernels, pool.was_short = &was_short;
    const uint32_t epoch = atomic_load_explicit(&pool.epoch, memory_order_relaxed) + 1;
    advance(epoch, 0, threads);
    pthread_mutex_lock(&pool.lock);
    atomic_store_explicit(&pool.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&pool.epoch, epoch, memory_order_release);
    if (pool.num_asleep) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    work(epoch, threads);
    pool.was_short = NULL; /* all parts are done */
    pthread_mutex_unlock(&pool.running);
    return was_short ? 2 : 0;
}

/* What the library was built from, and by which compiler. */
EXPORT const char *nanochat_sources(void) { return SOURCES; }
EXPORT const char *nanochat_compiler(void) { return COMPILER; }
