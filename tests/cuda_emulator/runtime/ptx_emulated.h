// What `cuda/ptx.cuh` wraps, on the CPU. Layouts of fragments: PTX ISA, "Matrix fragments".
#pragma once

namespace fastserve {

// The destination is NaN from the issue to the wait that covers it.
inline void cp_async_16(void* into, const void* from, bool is_there, EMULATOR_PLACE) {
  const auto addresses = uintptr_t(into) | (is_there ? uintptr_t(from) : 0);
  if (addresses & 15) {
    EMULATOR_FAIL("cp.async at %s:%d: an address is not a multiple of 16", file, line);
  }
  memset(into, emulator::kNan, 16);
  emulator::add_copy(into, from, is_there ? 16 : 0);
}
inline void cp_async_commit() { emulator::state.current->copy_group++; }
template <int kPending>
inline void cp_async_wait() {
  emulator::Copy copy;
  while (emulator::next_arrival(kPending, copy)) {
    memset(copy.into, 0, 16);
    if (copy.num_bytes) memcpy(copy.into, copy.from, copy.num_bytes);
  }
}

template <bool kTransposed>
inline void load_matrices(unsigned (&out)[4], const void* row, const char* file, int line) {
  struct Lane {
    uint16_t row[8];
    unsigned out[4];
  };
  static const char operation = 0;
  if (uintptr_t(row) & 15) {
    EMULATOR_FAIL("ldmatrix at %s:%d: a row's address is not a multiple of 16", file, line);
  }
  Lane mine;
  memcpy(mine.row, row, sizeof mine.row);
  auto spread = [](void** payloads, unsigned) __attribute__((no_sanitize("thread"))) {
    auto lane = [&](int index) { return static_cast<Lane*>(payloads[index]); };
    for (int index = 0; index < 32; index++) {
      const int first = index / 4, pair = 2 * (index % 4);
      for (int matrix = 0; matrix < 4; matrix++) {
        const int base = 8 * matrix;
        const unsigned low =
            kTransposed ? lane(base + pair)->row[first] : lane(base + first)->row[pair];
        const unsigned high =
            kTransposed ? lane(base + pair + 1)->row[first] : lane(base + first)->row[pair + 1];
        lane(index)->out[matrix] = low | high << 16;
      }
    }
  };
  emulator::collective(0xffffffffu, &operation, "ldmatrix", &mine, file, line, false, spread);
  for (int matrix = 0; matrix < 4; matrix++) out[matrix] = mine.out[matrix];
}
inline void ldmatrix_x4(unsigned (&out)[4], const void* row, EMULATOR_PLACE) {
  load_matrices<false>(out, row, file, line);
}
inline void ldmatrix_x4_trans(unsigned (&out)[4], const void* row, EMULATOR_PLACE) {
  load_matrices<true>(out, row, file, line);
}

template <class T>
inline float half_of(unsigned pair, int which) {
  const uint16_t bits = uint16_t(pair >> 16 * which);
  if constexpr (std::is_same_v<T, __half>) return emulator::from_half(bits);
  return emulator::from_bfloat16(bits);
}

template <class T>
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                         EMULATOR_PLACE) {
  struct Lane {
    const unsigned* a;
    unsigned b[2];
    float* d;
  };
  static const char operation = 0;
  Lane mine{a, {b0, b1}, d};
  auto multiply = [](void** payloads, unsigned) __attribute__((no_sanitize("thread"))) {
    float rows[16][16], cols[8][16];
    for (int index = 0; index < 32; index++) {
      const auto* lane = static_cast<Lane*>(payloads[index]);
      const int group = index / 4, pair = 2 * (index % 4);
      for (int which = 0; which < 2; which++) {
        rows[group][pair + which] = half_of<T>(lane->a[0], which);
        rows[group + 8][pair + which] = half_of<T>(lane->a[1], which);
        rows[group][pair + 8 + which] = half_of<T>(lane->a[2], which);
        rows[group + 8][pair + 8 + which] = half_of<T>(lane->a[3], which);
        cols[group][pair + which] = half_of<T>(lane->b[0], which);
        cols[group][pair + 8 + which] = half_of<T>(lane->b[1], which);
      }
    }
    for (int index = 0; index < 32; index++) {
      auto* lane = static_cast<Lane*>(payloads[index]);
      for (int element = 0; element < 4; element++) {
        const float* row = rows[index / 4 + 8 * (element / 2)];
        const float* col = cols[2 * (index % 4) + element % 2];
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) sum += row[k] * col[k];
        lane->d[element] += sum;
      }
    }
  };
  emulator::collective(0xffffffffu, &operation, "mma.m16n8k16", &mine, file, line, false, multiply);
}

}  // namespace fastserve
