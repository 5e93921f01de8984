// Threads, blocks and launches.
//
// A fiber runs until it waits: at a barrier for its block, at a collective for the lanes of its mask.
// Which ready fiber is next is the launch's `order`: ascending, descending, or drawn from a seed.
// Fibers of one warp run before another warp's, so that a missing `__syncwarp` shows as well as a
// missing barrier.
#pragma once

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <pthread.h>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <utility>

#if !defined(__x86_64__)
#error "the emulator's context switch is written for x86-64"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define EMULATOR_TSAN 1
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

// Code of the emulator itself, which the sanitizers do not look at.
#define EMULATOR_OWN __attribute__((noinline, no_sanitize("thread", "address")))
// Where a function of CUDA was called.
#define EMULATOR_PLACE \
  const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulator {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;
constexpr int kMostStatics = 256;
constexpr size_t kPage = 4096;
constexpr size_t kDynamicAlignment = 1024;
constexpr size_t kCanaryBytes = 512;
constexpr unsigned char kCanary = 0x5A;
#if defined(EMULATOR_ASAN) || defined(EMULATOR_TSAN)
constexpr size_t kStackBytes = 512 << 10;
#else
constexpr size_t kStackBytes = 192 << 10;
#endif

enum class Wait : uint8_t { kNothing, kWarp, kBlock, kOver };

// A cp.async on its way.
struct Copy {
  void* into;
  const void* from;
  int num_bytes, group;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* tsan = nullptr;
  void* fake_stack = nullptr;
  uint3 index{};
  unsigned lane = 0, warp = 0;
  Wait wait = Wait::kNothing;
  // What it waits for.
  const void* operation = nullptr;
  unsigned mask = 0;
  void* payload = nullptr;
  const char* file = "";
  int line = 0;
  // cp.async, in the order of issue.
  int copy_group = 0;
  Copy* copies = nullptr;
  int num_copies = 0, copies_capacity = 0;
  int barrier_parity = 0;
};

// Lanes as bits.
struct Warp {
  unsigned exist = 0, ready = 0, waiting = 0, over = 0;
  char sync = 0;
};

struct State {
  Fiber fibers[kMostThreads];
  Warp warps[kMostThreads / kWarp];
  unsigned num_fibers = 0, num_warps = 0, num_stacks = 0;
  Fiber* current = nullptr;
  Fiber outside;
  uint3 block{};
  dim3 block_size, grid_size;
  unsigned alive = 0, at_barrier = 0;
  char barrier_sync[2] = {}, start_sync = 0, end_sync = 0;
  char* dynamic = nullptr;
  size_t dynamic_bytes = 0;
  struct {
    void* memory;
    size_t num_bytes;
  } statics[kMostStatics];
  int num_statics = 0;
  int order = 0;
  uint64_t random = 1;
  bool failed = false;
  char error[1024] = {};
  char signal_text[256] = {};
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  const void* outside_bottom = nullptr;
  size_t outside_bytes = 0;
};
inline State state;

// Plain loops: the standard library's code would be instrumented.
#define EMULATOR_EACH(fiber)                                             \
  for (::emulator::Fiber* fiber = ::emulator::state.fibers;              \
       fiber != ::emulator::state.fibers + ::emulator::state.num_fibers; \
       ++fiber)

inline void* dynamic_shared() { return state.dynamic; }

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch,@function
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

EMULATOR_OWN inline void switch_to(Fiber* to) {
  Fiber* from = state.current;
  if (from == to) return;
  state.current = to;
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(to->tsan, 1);  // 1: the switch itself orders nothing.
#endif
#ifdef EMULATOR_ASAN
  const bool outside = to == &state.outside;
  __sanitizer_start_switch_fiber(&from->fake_stack,
                                 outside ? state.outside_bottom : to->stack,
                                 outside ? state.outside_bytes : kStackBytes);
#endif
  emulator_switch(&from->stack_pointer, to->stack_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

// Ends the launch with a message that says which thread it was.
[[noreturn]] EMULATOR_OWN inline void fail(const char* what) {
  if (!state.failed) {
    const Fiber& fiber = *state.current;
    snprintf(state.error, sizeof state.error,
             "block (%u,%u,%u) thread (%u,%u,%u): %s", state.block.x,
             state.block.y, state.block.z, fiber.index.x, fiber.index.y,
             fiber.index.z, what);
    state.failed = true;
  }
  switch_to(&state.outside);
  abort();
}
#define EMULATOR_FAIL(...)                            \
  do {                                                \
    char emulator_text[700];                          \
    snprintf(emulator_text, sizeof emulator_text, __VA_ARGS__); \
    ::emulator::fail(emulator_text);                  \
  } while (0)

// One of these bits, in the launch's order.
EMULATOR_OWN inline unsigned pick(unsigned bits) {
  if (state.order == 0) return __builtin_ctz(bits);
  if (state.order == 1) return 31 - __builtin_clz(bits);
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  unsigned skip = (state.random >> 33) % __builtin_popcount(bits);
  while (skip--) bits &= bits - 1;
  return __builtin_ctz(bits);
}

EMULATOR_OWN inline Fiber* next_ready() {
  unsigned warps = 0;
  for (unsigned i = 0; i < state.num_warps; i++) {
    warps |= unsigned(state.warps[i].ready != 0) << i;
  }
  if (!warps) return &state.outside;
  const unsigned warp = pick(warps);
  return &state.fibers[warp * kWarp + pick(state.warps[warp].ready)];
}

// Give up the processor: to the own warp if it can go on, to another one, or to the launch.
EMULATOR_OWN inline void yield() {
  const unsigned warp = state.current->warp;
  const unsigned ready = state.warps[warp].ready;
  switch_to(ready ? &state.fibers[warp * kWarp + pick(ready)] : next_ready());
}

EMULATOR_OWN inline void open_barrier() {
  const Fiber* first = nullptr;
  EMULATOR_EACH(fiber) {
    if (fiber->wait != Wait::kBlock) continue;
    if (first == nullptr) first = fiber;
    if (fiber->line != first->line || strcmp(fiber->file, first->file) != 0) {
      EMULATOR_FAIL(
          "divergent __syncthreads: %s:%d (thread %u) and %s:%d (thread %u)",
          first->file, first->line, first->index.x, fiber->file, fiber->line,
          fiber->index.x);
    }
  }
  EMULATOR_EACH(fiber) {
    if (fiber->wait != Wait::kBlock) continue;
    fiber->wait = Wait::kNothing;
    state.warps[fiber->warp].ready |= 1u << fiber->lane;
  }
  state.at_barrier = 0;
}

EMULATOR_OWN inline void barrier(const char* file, int line) {
  Fiber& self = *state.current;
  self.file = file;
  self.line = line;
  self.wait = Wait::kBlock;
  [[maybe_unused]] const int parity = self.barrier_parity;
  self.barrier_parity ^= 1;
#ifdef EMULATOR_TSAN
  __tsan_release(&state.barrier_sync[parity]);
#endif
  state.warps[self.warp].ready &= ~(1u << self.lane);
  if (++state.at_barrier == state.alive) open_barrier();
  yield();
#ifdef EMULATOR_TSAN
  __tsan_acquire(&state.barrier_sync[parity]);
#endif
}

// All lanes of `mask` meet here; the last to come runs `compute(payloads, mask)` for all of them.
template <class Compute>
EMULATOR_OWN inline void collective(unsigned mask, const void* operation,
                                    const char* name, void* payload,
                                    const char* file, int line, bool orders_memory,
                                    Compute compute) {
  Fiber& self = *state.current;
  Warp& warp = state.warps[self.warp];
  const unsigned bit = 1u << self.lane;
  mask &= warp.exist;
  if (!(mask & bit)) {
    EMULATOR_FAIL("%s at %s:%d: lane %u is not in its own mask", name, file, line, self.lane);
  }
  if (mask & warp.over) {
    EMULATOR_FAIL("%s at %s:%d: the mask names lanes that have exited (%08x)", name,
                  file, line, mask & warp.over);
  }
  self.payload = payload;
  self.mask = mask;
  self.operation = operation;
  self.file = file;
  self.line = line;
#ifdef EMULATOR_TSAN
  if (orders_memory) __tsan_release(&warp.sync);
#endif
  warp.waiting |= bit;
  Fiber* lanes = &state.fibers[self.warp * kWarp];
  if ((warp.waiting & mask) == mask) {
    void* payloads[kWarp] = {};
    for (unsigned left = mask; left; left &= left - 1) {
      const Fiber& lane = lanes[__builtin_ctz(left)];
      if (lane.operation != operation || lane.mask != mask || lane.line != line) {
        EMULATOR_FAIL(
            "divergent warp collective: %s at %s:%d with mask %08x, but lane %u waits at "
            "%s:%d with mask %08x",
            name, file, line, mask, lane.lane, lane.file, lane.line, lane.mask);
      }
      payloads[lane.lane] = lane.payload;
    }
    compute(payloads, mask);
    warp.waiting &= ~mask;
    warp.ready |= mask;
    for (unsigned left = mask; left; left &= left - 1) {
      lanes[__builtin_ctz(left)].wait = Wait::kNothing;
    }
  } else {
    self.wait = Wait::kWarp;
    warp.ready &= ~bit;
  }
  yield();
#ifdef EMULATOR_TSAN
  if (orders_memory) __tsan_acquire(&warp.sync);
#endif
  (void)orders_memory;
}

EMULATOR_OWN inline void add_copy(void* into, const void* from, int num_bytes) {
  Fiber& self = *state.current;
  if (self.num_copies == self.copies_capacity) {
    self.copies_capacity = 2 * self.copies_capacity + 16;
    self.copies = static_cast<Copy*>(realloc(self.copies, self.copies_capacity * sizeof(Copy)));
    if (self.copies == nullptr) abort();
  }
  self.copies[self.num_copies++] = {into, from, num_bytes, self.copy_group};
}

// The oldest copy of this thread, if all but `pending` groups are to have arrived and it belongs to
// one of those; it is forgotten.
EMULATOR_OWN inline bool next_arrival(int pending, Copy& copy) {
  Fiber& self = *state.current;
  if (self.num_copies == 0 || self.copies[0].group >= self.copy_group - pending) return false;
  copy = self.copies[0];
  memmove(self.copies, self.copies + 1, --self.num_copies * sizeof(Copy));
  return true;
}

EMULATOR_OWN inline void fiber_main() {
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  for (;;) {
#ifdef EMULATOR_TSAN
    __tsan_acquire(&state.start_sync);
#endif
    state.kernel(state.arguments);
#ifdef EMULATOR_TSAN
    __tsan_release(&state.end_sync);  // Blocks come one after the other: races are sought in one.
#endif
    Fiber& self = *state.current;
    if (self.num_copies) EMULATOR_FAIL("exits with cp.async copies that were not waited for");
    Warp& warp = state.warps[self.warp];
    self.wait = Wait::kOver;
    warp.over |= 1u << self.lane;
    warp.ready &= ~(1u << self.lane);
    state.alive--;
    if (state.alive && state.at_barrier == state.alive) open_barrier();
    yield();
  }
}

// memset that the sanitizers do not see.
inline void fill(void* memory, int value, size_t num_bytes) {
  asm volatile("rep stosb" : "+D"(memory), "+c"(num_bytes) : "a"(value) : "memory");
}
constexpr int kNan = 0xFF;  // In every byte: NaN in fp16, bf16 and fp32, −1 in an integer.

// One static `__shared__` variable: an allocation of its own, whose bounds the sanitizers know.
template <class T>
EMULATOR_OWN inline T& shared_variable() {
  void* memory = nullptr;
  if (state.num_statics == kMostStatics || posix_memalign(&memory, 128, sizeof(T))) abort();
  fill(memory, kNan, sizeof(T));
  state.statics[state.num_statics++] = {memory, sizeof(T)};
  return *static_cast<T*>(memory);
}

EMULATOR_OWN inline void deadlock() {
  const Fiber *at_barrier = nullptr, *in_warp = nullptr;
  EMULATOR_EACH(fiber) {
    if (fiber->wait == Wait::kBlock) at_barrier = fiber;
    if (fiber->wait == Wait::kWarp) in_warp = fiber;
  }
  const Fiber& one = in_warp ? *in_warp : *at_barrier;
  snprintf(state.error, sizeof state.error,
           "block (%u,%u,%u): deadlock: thread %u waits for %s at %s:%d, and %s%s",
           state.block.x, state.block.y, state.block.z, one.index.x,
           in_warp ? "its warp" : "the block", one.file, one.line,
           at_barrier && in_warp ? "others wait at the barrier in " : "nobody can go on",
           at_barrier && in_warp ? at_barrier->file : "");
  state.failed = true;
}

EMULATOR_OWN inline void run_block() {
  state.alive = state.num_fibers;
  state.at_barrier = 0;
  for (unsigned i = 0; i < state.num_warps; i++) {
    Warp& warp = state.warps[i];
    warp.exist = warp.ready = warp.waiting = warp.over = 0;
  }
  EMULATOR_EACH(fiber) {
    fiber->wait = Wait::kNothing;
    fiber->copy_group = 0;
    fiber->barrier_parity = 0;
    state.warps[fiber->warp].exist |= 1u << fiber->lane;
    state.warps[fiber->warp].ready |= 1u << fiber->lane;
    void** top = reinterpret_cast<void**>(fiber->stack + kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;  // Registers that the switch pops.
    fiber->stack_pointer = top;
  }
  fill(state.dynamic, kNan, state.dynamic_bytes);
  for (int i = 0; i < state.num_statics; i++) {
    fill(state.statics[i].memory, kNan, state.statics[i].num_bytes);
  }
#ifdef EMULATOR_TSAN
  __tsan_release(&state.start_sync);
#endif
  while (!state.failed && state.alive) {
    Fiber* next = next_ready();
    if (next == &state.outside) return deadlock();
    switch_to(next);
  }
}

// A signal inside a kernel becomes the launch's error: it goes on in `fail`, on a stack of its own.
inline char emergency_stack[64 << 10];
inline void after_signal() { fail(state.signal_text); }
inline void on_signal(int signal, siginfo_t* info, void* context) {
  auto* machine = static_cast<ucontext_t*>(context);
  if (signal == SIGILL) {
    snprintf(state.signal_text, sizeof state.signal_text,
             "undefined behaviour: a misaligned access, an index out of bounds or an overflow");
  } else {
    snprintf(state.signal_text, sizeof state.signal_text, "invalid memory access at %p",
             info->si_addr);
  }
  auto top = reinterpret_cast<greg_t>(emergency_stack + sizeof emergency_stack);
  machine->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&after_signal);
  machine->uc_mcontext.gregs[REG_RSP] = (top & ~15) - 8;
}

// Catches signals while kernels run. AddressSanitizer has handlers of its own.
struct Signals {
#ifndef EMULATOR_ASAN
  struct sigaction before[3];
  stack_t stack_before{};
  static constexpr int kCaught[3] = {SIGSEGV, SIGBUS, SIGILL};
  Signals() {
    static char stack[64 << 10];
    stack_t ours{};
    ours.ss_sp = stack;
    ours.ss_size = sizeof stack;
    sigaltstack(&ours, &stack_before);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(kCaught[i], &action, &before[i]);
  }
  ~Signals() {
    for (int i = 0; i < 3; i++) sigaction(kCaught[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
#endif
};

EMULATOR_OWN inline void prepare_fibers(dim3 block, size_t count) {
  for (size_t i = 0; i < count; i++) {
    Fiber& fiber = state.fibers[i];
    fiber.num_copies = 0;
    if (i >= state.num_stacks) {
      void* memory = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) abort();
      mprotect(memory, kPage, PROT_NONE);
      fiber.stack = static_cast<char*>(memory) + kPage;
      state.num_stacks = i + 1;
    }
    fiber.index = {unsigned(i % block.x), unsigned(i / block.x % block.y),
                   unsigned(i / block.x / block.y)};
    fiber.lane = i % kWarp;
    fiber.warp = i / kWarp;
#ifdef EMULATOR_TSAN
    if (fiber.tsan) __tsan_destroy_fiber(fiber.tsan);
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  state.num_fibers = count;
  state.num_warps = (count + kWarp - 1) / kWarp;
}

// Runs all blocks. 0: all went well; otherwise `state.error` says what did not.
EMULATOR_OWN inline int launch(void (*kernel)(void**), dim3 grid, dim3 block, size_t most_threads,
                               size_t dynamic_bytes, void** arguments, int order) {
  const size_t count = size_t(block.x) * block.y * block.z;
  state.failed = false;
  state.error[0] = 0;
  if (count == 0 || count > most_threads || count > kMostThreads) {
    snprintf(state.error, sizeof state.error, "%zu threads a block: want 1 to %zu", count,
             most_threads);
    return 1;
  }
  if (grid.y > 65535 || grid.z > 65535) {
    snprintf(state.error, sizeof state.error, "grid (%u,%u,%u): y and z are 65535 at most", grid.x,
             grid.y, grid.z);
    return 1;
  }
  prepare_fibers(block, count);
  void* memory = nullptr;
#ifdef EMULATOR_ASAN
  if (posix_memalign(&memory, kDynamicAlignment, dynamic_bytes ? dynamic_bytes : 1)) abort();
#else
  if (posix_memalign(&memory, kDynamicAlignment, dynamic_bytes + kCanaryBytes)) abort();
  memset(static_cast<char*>(memory) + dynamic_bytes, kCanary, kCanaryBytes);
#endif
  state.dynamic = static_cast<char*>(memory);
  state.dynamic_bytes = dynamic_bytes;
  state.block_size = block;
  state.grid_size = grid;
  state.kernel = kernel;
  state.arguments = arguments;
  state.order = order;
  state.random = 0x9E3779B97F4A7C15ull * (unsigned(order) + 1);
  state.current = &state.outside;
#ifdef EMULATOR_TSAN
  state.outside.tsan = __tsan_get_current_fiber();
#endif
#ifdef EMULATOR_ASAN
  pthread_attr_t attributes;
  void* bottom;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &state.outside_bytes);
  pthread_attr_destroy(&attributes);
  state.outside_bottom = bottom;
#endif
  {
    [[maybe_unused]] const Signals signals;
    for (unsigned z = 0; z < grid.z && !state.failed; z++) {
      for (unsigned y = 0; y < grid.y && !state.failed; y++) {
        for (unsigned x = 0; x < grid.x && !state.failed; x++) {
          state.block = {x, y, z};
          run_block();
#ifdef EMULATOR_TSAN
          __tsan_acquire(&state.end_sync);
#endif
        }
      }
    }
  }
#ifndef EMULATOR_ASAN
  for (size_t i = 0; i < kCanaryBytes && !state.failed; i++) {
    if (static_cast<unsigned char*>(memory)[dynamic_bytes + i] != kCanary) {
      snprintf(state.error, sizeof state.error,
               "byte %zu past the %zu bytes of dynamic shared memory was written", i, dynamic_bytes);
      state.failed = true;
    }
  }
#endif
  free(memory);
  return state.failed;
}

// A kernel with its arguments given by address.
template <auto kKernel>
struct Entry;
template <class... Parameters, void (*kKernel)(Parameters...)>
struct Entry<kKernel> {
  template <size_t... I>
  static void spread(void** arguments, std::index_sequence<I...>) {
    kKernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
  }
  static void call(void** arguments) { spread(arguments, std::index_sequence_for<Parameters...>{}); }
  static int sizes(int* out) {
    int count = 0;
    ((out[count++] = int(sizeof(Parameters))), ...);
    return count;
  }
};

}  // namespace emulator

#define EMULATOR_VISIBLE extern "C" __attribute__((visibility("default")))
#define EMULATOR_EXPORT(NAME, MOST_THREADS)                                                 \
  EMULATOR_VISIBLE int emulator_launch_##NAME(const unsigned* grid, const unsigned* block,        \
                                        size_t dynamic_bytes, void** arguments, int order) { \
    return ::emulator::launch(&::emulator::Entry<&NAME>::call, dim3(grid[0], grid[1], grid[2]), \
                              dim3(block[0], block[1], block[2]), MOST_THREADS, dynamic_bytes,   \
                              arguments, order);                                                \
  }                                                                                         \
  EMULATOR_VISIBLE int emulator_parameters_##NAME(int* sizes) {                                   \
    return ::emulator::Entry<&NAME>::sizes(sizes);                                          \
  }
#define EMULATOR_EXPORT_ERROR \
  EMULATOR_VISIBLE const char* emulator_error() { return ::emulator::state.error; }
