/* What this machine can do now, as one line of JSON.
 *
 *   cc -O3 -march=native -pthread machine.c -o machine && ./machine THREADS
 *
 * read_gb_per_s: the best of several sums over 512 MiB in huge pages, all threads together.
 * gflop_per_s:   multiply-adds (two operations each) on registers, best of several, all threads. f32
 *                always; bf16 and int8 where the processor has dot products for them.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { ROUNDS = 6, ACCUMULATORS = 12 };
static const size_t NUM_BYTES = 512ul << 20;
static const long NUM_STEPS = 8000000;

static uint64_t *memory;
static int num_threads;
static volatile double sink[256]; /* Or nothing would be computed. */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *touch_part(void *argument) {
    size_t part = NUM_BYTES / 8 / num_threads, begin = part * (size_t)argument;
    for (size_t i = begin; i < begin + part; i++) memory[i] = i;
    return NULL;
}

static void *read_part(void *argument) {
    size_t part = NUM_BYTES / 8 / num_threads, begin = part * (size_t)argument;
    uint64_t sums[32] = {0}, total = 0;
    for (size_t i = begin; i + 32 <= begin + part; i += 32)
        for (int j = 0; j < 32; j++) sums[j] += memory[i + j];
    for (int j = 0; j < 32; j++) total += sums[j];
    sink[(size_t)argument] = (double)total;
    return NULL;
}

#ifdef __AVX512F__
typedef __m512 vector;
#define MULTIPLY_ADD _mm512_fmadd_ps
#define KEEP(x) __asm__ volatile("" : "+v"(x))
#elif defined(__FMA__)
typedef __m256 vector;
#define MULTIPLY_ADD _mm256_fmadd_ps
#define KEEP(x) __asm__ volatile("" : "+x"(x))
#else
typedef float vector __attribute__((vector_size(16)));
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#endif
#define LANES ((int)(sizeof(vector) / sizeof(float)))

static void *multiply_f32(void *argument) {
    vector sums[ACCUMULATORS] = {0}, a = {0}, b = {0};
    for (int i = 0; i < ACCUMULATORS; i++) KEEP(sums[i]); /* Or one would stand for all. */
    for (long k = 0; k < NUM_STEPS; k++) {
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = MULTIPLY_ADD(a, b, sums[i]);
        KEEP(a); /* Or the loop would be done at compile time. */
    }
    float total = 0;
    for (int i = 0; i < ACCUMULATORS; i++)
        for (int j = 0; j < LANES; j++) total += sums[i][j];
    sink[(size_t)argument] = total;
    return NULL;
}

#ifdef __AVX512BF16__
static void *multiply_bf16(void *argument) {
    __m512 sums[ACCUMULATORS];
    __m512bh a = (__m512bh)_mm512_setzero_si512();
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_setzero_ps();
    for (int i = 0; i < ACCUMULATORS; i++) KEEP(sums[i]);
    for (long k = 0; k < NUM_STEPS; k++) {
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
        KEEP(a);
    }
    float total = 0;
    for (int i = 0; i < ACCUMULATORS; i++) total += _mm512_reduce_add_ps(sums[i]);
    sink[(size_t)argument] = total;
    return NULL;
}
#endif

#ifdef __AVX512VNNI__
static void *multiply_int8(void *argument) {
    __m512i sums[ACCUMULATORS], a = _mm512_setzero_si512();
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_setzero_si512();
    for (int i = 0; i < ACCUMULATORS; i++) KEEP(sums[i]);
    for (long k = 0; k < NUM_STEPS; k++) {
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], a, a);
        KEEP(a);
    }
    int total = 0;
    for (int i = 0; i < ACCUMULATORS; i++) total += _mm512_reduce_add_epi32(sums[i]);
    sink[(size_t)argument] = total;
    return NULL;
}
#endif

/* Seconds of the fastest round with all threads at once. */
static double best_s(void *(*work)(void *)) {
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t threads[256];
        double begin = now_s();
        for (size_t i = 0; i < (size_t)num_threads; i++)
            if (pthread_create(&threads[i], NULL, work, (void *)i) != 0) exit(1);
        for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
        double seconds = now_s() - begin;
        if (seconds < best) best = seconds;
    }
    return best;
}

static double gop_per_s(void *(*work)(void *), int operations) {
    return (double)NUM_STEPS * ACCUMULATORS * operations * num_threads / best_s(work) / 1e9;
}

int main(int count, char **arguments) {
    num_threads = count == 2 ? atoi(arguments[1]) : 0;
    if (num_threads < 1 || num_threads > 256) {
        fprintf(stderr, "machine: THREADS must be 1 to 256\n");
        return 1;
    }
    memory = aligned_alloc(2ul << 20, NUM_BYTES);
    if (memory == NULL) {
        fprintf(stderr, "machine: cannot allocate 512 MiB\n");
        return 1;
    }
    madvise(memory, NUM_BYTES, MADV_HUGEPAGE);
    best_s(touch_part);
    size_t read = NUM_BYTES / 8 / num_threads * 8 * num_threads;
    printf("{\"read_gb_per_s\": %.2f, \"gflop_per_s\": {\"f32\": %.1f", read / best_s(read_part) / 1e9,
           gop_per_s(multiply_f32, 2 * LANES));
#ifdef __AVX512BF16__
    printf(", \"bf16\": %.1f", gop_per_s(multiply_bf16, 64));
#endif
#ifdef __AVX512VNNI__
    printf(", \"int8\": %.1f", gop_per_s(multiply_int8, 128));
#endif
    printf("}}\n");
    return 0;
}
