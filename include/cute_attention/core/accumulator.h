// core/accumulator.h: MMA accumulators seen as rows and columns of scores, and as the A operand of
// the next MMA.
//
// mma.sync m16n8 and WGMMA m64nN give a thread the same pattern: pairs of adjacent columns, in two
// rows that lie eight apart, and four neighbouring threads share a row. Only the nesting of the
// modes differs, and it ends here.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace cute_attention {

// Threads of a warp that hold parts of the same row.
constexpr int kThreadsPerRow = 4;

//   sm80: ((2 cols, 2 rows), MMA_M, MMA_N)     -> ((2, MMA_M), (2, MMA_N))
//   sm90: ((2 cols, 2 rows, V), MMA_M, MMA_N)  -> ((2, MMA_M), (2, V, MMA_N))
template <class AccumulatorLayout>
CUTE_HOST_DEVICE constexpr auto rows_and_columns(AccumulatorLayout const& accumulator) {
  using namespace cute;
  static_assert(decltype(rank(accumulator))::value == 3, "an accumulator is (MMA, MMA_M, MMA_N)");
  auto const rows = make_layout(get<0, 1>(accumulator), get<1>(accumulator));
  if constexpr (decltype(rank<0>(accumulator))::value == 2) {
    return make_layout(rows, make_layout(get<0, 0>(accumulator), get<2>(accumulator)));
  } else {
    return make_layout(
        rows, make_layout(get<0, 0>(accumulator), get<0, 2>(accumulator), get<2>(accumulator)));
  }
}

// The 16-column blocks of an accumulator as the K blocks of a 16-bit A operand from registers.
//   sm80: ((2, 2), MMA_M, MMA_N)     -> ((2, 2, 2), MMA_M, MMA_N / 2)
//   sm90: ((2, 2, V), MMA_M, MMA_N)  -> ((2, 2, 2), MMA_M, (V / 2, MMA_N))
template <class AccumulatorLayout>
CUTE_HOST_DEVICE constexpr auto as_a_operand(AccumulatorLayout const& accumulator) {
  using namespace cute;
  if constexpr (decltype(rank<0>(accumulator))::value == 2) {
    auto const pairs = logical_divide(get<2>(accumulator), Layout<_2>{});  // (2, MMA_N / 2)
    return make_layout(make_layout(get<0, 0>(accumulator), get<0, 1>(accumulator), get<0>(pairs)),
                       get<1>(accumulator), get<1>(pairs));
  } else {
    auto const pairs = logical_divide(get<0, 2>(accumulator), Layout<_2>{});  // (2, V / 2)
    return make_layout(make_layout(get<0, 0>(accumulator), get<0, 1>(accumulator), get<0>(pairs)),
                       get<1>(accumulator), make_layout(get<1>(pairs), get<2>(accumulator)));
  }
}

// Two floats rounded to 16-bit elements, the first in the low half.
template <class Element>
CUTE_HOST_DEVICE uint32_t pack(float first, float second) {
  cutlass::NumericArrayConverter<Element, float, 2> const round;
  cutlass::Array<float, 2> pair;
  pair[0] = first;
  pair[1] = second;
  auto const rounded = round(pair);
  return reinterpret_cast<uint32_t const&>(rounded);
}

// A register tensor rounded into another of the same size and order, two elements a register. MMAs
// read operands as 32-bit registers, so they are written as such: through 16-bit elements the
// compiler may take the two for unrelated.
template <class Source, class Target>
CUTE_DEVICE void convert_into(Source const& source, Target& target) {
  using namespace cute;
  using Element = typename Target::value_type;
  CUTE_STATIC_ASSERT_V(size(source) == size(target));
  uint32_t* const registers = reinterpret_cast<uint32_t*>(target.data());
  CUTE_UNROLL
  for (int i = 0; i < size(source) / 2; ++i) {
    registers[i] = pack<Element>(source.data()[2 * i], source.data()[2 * i + 1]);
  }
}

// The same for the eight values of K block `k` of an A operand whose blocks lie one after the
// other.
template <class Source, class Target>
CUTE_DEVICE void convert_block(Source const& source, int k, Target& target) {
  using Element = typename Target::value_type;
  uint32_t* const registers = reinterpret_cast<uint32_t*>(target.data()) + 4 * k;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    registers[i] = pack<Element>(source.data()[8 * k + 2 * i], source.data()[8 * k + 2 * i + 1]);
  }
}

// A register tensor rounded to Element, same layout.
template <class Element, class Source>
CUTE_DEVICE auto convert(Source const& source) {
  auto result = cute::make_fragment_like<Element>(source);
  convert_into(source, result);
  return result;
}

}  // namespace cute_attention
