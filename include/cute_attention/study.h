// study.h: choices of a kernel that exist for study. Every row of the tables has made them as
// TableChoices says. A row that was written in Python may make them otherwise, so that one can
// measure what a choice is worth; which kernels have which choices, and what they are called there,
// python/cute_attention/native/study.py says.
#pragma once

namespace cute_attention {

// How tiles come from global into shared memory.
enum class Copies {
  Async,  // cp.async, past the registers
  Plain,  // through registers: a thread waits for what it loads, and then stores it
};
// When the copies of K and V start.
enum class Loads {
  Eager,  // as soon as there is a buffer: they run beside products and softmax
  Late,   // when the tile is needed, and all threads wait for it
};
// Which score the exponents of a row of scores are relative to.
enum class Reference {
  WhereItPays,  // sm80: optimistic. sm90: exact where warpgroups take turns, and optimistic
                // elsewhere
  Optimistic,   // a maximum of the row that a later one replaces only where that matters
  Exact,        // the row's maximum so far; in sm90 kernels by core/straight_softmax.h
};
// How P becomes an operand.
enum class PathOfP {
  Registers,  // where a warp has all keys of its queries
  Shared,     // through shared memory
};
// Whether warpgroups take turns at the tensor cores.
enum class Turns {
  WhereTheyPay,  // where V has at most 128 columns
  Taken,
  None,
};
// How many tiles of queries a CTA computes; backward, of keys.
enum class Grid {
  Persistent,  // one after the other, until there are no more
  OneTile,
};
// When a kernel that computes all gradients computes dQ of a step (sm90/backward_compute.h).
enum class GradQ {
  WhereItPays,  // first at head dims up to 64 where nothing modifies scores, and late elsewhere
  First,        // one step late, before dS of that step
  Late,         // one step late, after dV of that step
  Same,         // in the step itself, where warpgroups wait for dS of each other
};
// Whether dQ is added up in global memory.
enum class GradQSums {
  WhereTheyFit,  // at head dims up to 128
  None,          // another kernel computes dQ, of the same products once more
};

struct TableChoices {
  static constexpr Copies kCopies = Copies::Async;
  static constexpr Loads kLoads = Loads::Eager;
  // Bytes of a row of a tile within which 16-byte vectors change places: 0 (none), 32, 64 or 128. A
  // tile with shorter rows has the largest that fits them.
  static constexpr int kSwizzle = 128;
  // How many blocks of 16 columns of an operand are in registers, or on their way there, when the
  // MMAs of the block before them start.
  static constexpr int kFragmentsAhead = 1;
  static constexpr Reference kReference = Reference::WhereItPays;
  static constexpr PathOfP kPathOfP = PathOfP::Registers;
  static constexpr Turns kTurns = Turns::WhereTheyPay;
  static constexpr Grid kGrid = Grid::Persistent;
  static constexpr GradQ kGradQ = GradQ::WhereItPays;
  static constexpr GradQSums kGradQSums = GradQSums::WhereTheyFit;
  // For how many blocks of keys the backward of sm90 has room for K; 0: the row's choice.
  static constexpr int kKeyStages = 0;
};

// The choices of a row. The source of a row for study specialises it.
template <class Row>
struct StudyOf : TableChoices {};

}  // namespace cute_attention
