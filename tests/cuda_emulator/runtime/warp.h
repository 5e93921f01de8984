// Barriers, shuffles, and an atomic addition.
#pragma once

inline void __syncthreads(EMULATOR_PLACE) { emulator::barrier(file, line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_PLACE) {
  static const char operation = 0;
  emulator::collective(mask, &operation, "__syncwarp", nullptr, file, line, true,
                       [](void**, unsigned) {});
}

namespace emulator {

inline int lane() { return int(state.current->lane); }

template <class T>
struct Shuffle {
  T value;
  int source;
  bool is_absent;
};

template <class T>
inline T shuffle(unsigned mask, T value, int source, const char* name, const char* file, int line) {
  static const char operation = 0;
  Shuffle<T> mine{value, source, false};
  auto exchange = [](void** payloads, unsigned lanes) __attribute__((no_sanitize("thread"))) {
    T values[kWarp];
    for (unsigned left = lanes; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      values[lane] = static_cast<Shuffle<T>*>(payloads[lane])->value;
    }
    for (unsigned left = lanes; left; left &= left - 1) {
      auto* of = static_cast<Shuffle<T>*>(payloads[__builtin_ctz(left)]);
      of->is_absent = !(lanes >> of->source & 1);
      if (!of->is_absent) of->value = values[of->source];
    }
  };
  collective(mask, &operation, name, &mine, file, line, false, exchange);
  if (mine.is_absent) {
    EMULATOR_FAIL("%s at %s:%d reads lane %d, which takes no part (mask %08x)", name, file, line,
                  source, mask);
  }
  return mine.value;
}

}  // namespace emulator

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_PLACE) {
  const int lane = emulator::lane(), from = (lane & ~(width - 1)) | (source & (width - 1));
  return emulator::shuffle(mask, value, from, "__shfl_sync", file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_PLACE) {
  const int lane = emulator::lane(), other = lane ^ bits;
  const bool is_within = (other & ~(width - 1)) <= (lane & ~(width - 1));
  return emulator::shuffle(mask, value, is_within ? other : lane, "__shfl_xor_sync", file, line);
}

inline float atomicAdd(float* at, float by) {
  unsigned* bits = reinterpret_cast<unsigned*>(at);
  unsigned before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    float value;
    memcpy(&value, &before, sizeof value);
    const float sum = value + by;
    unsigned after;
    memcpy(&after, &sum, sizeof after);
    if (__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return value;
    }
  }
}
