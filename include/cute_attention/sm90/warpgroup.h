// sm90/warpgroup.h: the sizes of a warpgroup, the unit that issues WGMMAs.
#pragma once

namespace cute_attention::sm90 {

constexpr int kWarpgroupM = 64;  // rows of every WGMMA, of A and of the accumulator
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;
constexpr int kWarpM = kWarpgroupM / kWarpgroupWarps;  // rows of the accumulator that a warp has

// Registers of a thread in a CTA of one producer warpgroup and kConsumers others, where kCtas CTAs
// share an SM. At launch every thread has kAtLaunch, and the CTA owns no more than these: an equal
// share of 65536, as a multiple of 8. With two consumers that is 168, and 1024 registers belong to
// nobody. setmaxnreg moves the producer's to the consumers. A consumer that asks for more than is
// left waits for ever.
template <int kConsumers, int kCtas = 1>
struct WarpgroupRegisters {
  static_assert(kConsumers >= 1 && kConsumers <= 3 && (kCtas == 1 || kConsumers <= 2));
  static constexpr int kAtLaunch = 65536 / (kCtas * (1 + kConsumers) * kWarpgroupThreads) / 8 * 8;
  static constexpr int kProducer = kCtas > 1         ? 24
                                   : kConsumers == 1 ? 56
                                   : kConsumers == 2 ? 24
                                                     : 32;
  static constexpr int kConsumer =
      kCtas > 1         ? ((1 + kConsumers) * kAtLaunch - kProducer) / kConsumers / 8 * 8
      : kConsumers == 1 ? 256
      : kConsumers == 2 ? 240
                        : 160;
  static_assert(kProducer + kConsumers * kConsumer <= (1 + kConsumers) * kAtLaunch,
                "the roles have no more registers than the CTA has at launch");
};

}  // namespace cute_attention::sm90
