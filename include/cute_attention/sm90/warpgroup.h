// sm90/warpgroup.h: the sizes of a warpgroup, the unit that issues WGMMAs.
#pragma once

namespace cute_attention::sm90 {

constexpr int kWarpgroupM = 64;  // rows of every WGMMA, of A and of the accumulator
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;

// Registers of a thread in a CTA of one producer warpgroup and kConsumers others. At entry all have
// an equal share of 65536; setmaxnreg moves the producer's to the consumers.
template <int kConsumers>
struct WarpgroupRegisters {
  static_assert(kConsumers >= 1 && kConsumers <= 3);
  static constexpr int kProducer = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumer = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
  static_assert(kWarpgroupThreads * (kProducer + kConsumers * kConsumer) <= 65536);
};

}  // namespace cute_attention::sm90
