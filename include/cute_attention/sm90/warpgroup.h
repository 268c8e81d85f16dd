// sm90/warpgroup.h: the sizes of a warpgroup, the unit that issues WGMMAs.
#pragma once

namespace cute_attention::sm90 {

constexpr int kWarpgroupM = 64;  // rows of every WGMMA, of A and of the accumulator
constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;

}  // namespace cute_attention::sm90
