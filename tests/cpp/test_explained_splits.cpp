// test_explained_splits.cpp: the number of splits that the C API explains is the one that it tells
// a launch, whatever it depends on: a cache, packed queries, the number that is asked for, bits
// that do not depend on the batch.
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "check.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using testing::device_memory;
using testing::ForwardCall;

// What a call is about; how its tensors lie does not matter.
struct Question {
  int32_t batch, seqlen_q, seqlen_k, heads_kv;
  bool cached, packed;
  int32_t num_splits, batch_invariant;

  int32_t total_q() const { return packed ? batch * seqlen_q : kNotPacked; }
};

std::string text_of(Question const& q) {
  return std::to_string(q.batch) + " x " + std::to_string(q.seqlen_q) + " x " +
         std::to_string(q.seqlen_k) + ", KV heads " + std::to_string(q.heads_kv) +
         (q.cached ? ", cache" : "") + (q.packed ? ", packed" : "") + ", splits " +
         std::to_string(q.num_splits) + (q.batch_invariant != 0 ? ", invariant" : "");
}

// The splits that a launch is told.
int32_t launched(Question const& q, Arch arch) {
  testing::Answer const answer = testing::forward([&](ForwardCall& call) {
    ForwardParams& params = call.params;
    if (q.packed) {
      testing::pack(params);
      params.total_q = q.total_q();
    }
    if (q.cached) {
      testing::put_into_cache(params);
      params.cu_seqlens_k = nullptr;
      params.cache.page_size = q.seqlen_k;
      params.cache.pages = q.batch;
      params.k_stride.batch = params.v_stride.batch = int64_t{q.seqlen_k} * params.k_stride.row;
    } else if (q.packed) {
      params.total_k = int64_t{q.batch} * q.seqlen_k;
    }
    params.batch = q.batch;
    params.seqlen_q = q.seqlen_q;
    params.seqlen_k = q.seqlen_k;
    params.heads = 4 * q.heads_kv;
    params.heads_kv = q.heads_kv;
    params.num_splits = q.num_splits;
    params.batch_invariant = q.batch_invariant;
    params.split_workspace = static_cast<float*>(device_memory());
    call.arch = int32_t(arch);
  });
  check_equal(answer.error, "", "error of " + text_of(q));
  return int32_t(answer.written[6]);
}

// The splits of the candidate that is chosen.
int32_t explained(Question const& q, Arch arch) {
  Problem const problem{Direction::Forward,
                        DType::Float16,
                        q.batch,
                        q.seqlen_q,
                        q.seqlen_k,
                        4 * q.heads_kv,
                        q.heads_kv,
                        64,
                        64,
                        kUnbounded,
                        kUnbounded,
                        0,
                        q.cached ? uint32_t(kCache) : 0,
                        kAnyRow,
                        q.total_q(),
                        q.num_splits,
                        q.batch_invariant};
  std::string const text = cute_attention_explain_json(&problem, testing::kDevice);
  std::string const chosen =
      std::string("\"backend\":\"sm") + std::to_string(int32_t(arch)) + "\",\"chosen\":true";
  size_t const at = text.find(chosen);
  check(at != std::string::npos, "a row is chosen for " + text_of(q));
  char const* const number = "\"num_splits\":";
  return std::atoi(text.c_str() + text.find(number, at) + std::strlen(number));
}

void test_all() {
  std::set<int32_t> found;
  for (int32_t batch : {1, 3, 40}) {
    for (int32_t seqlen_q : {1, 60, 700}) {
      for (int32_t seqlen_k : {64, 4096, 65536}) {
        for (int32_t heads_kv : {1, 8}) {
          for (bool cached : {false, true}) {
            for (bool packed : {false, true}) {
              for (int32_t num_splits : {0, 1, 5}) {
                for (int32_t invariant : {0, 1}) {
                  Question const q{batch,  seqlen_q, seqlen_k,   heads_kv,
                                   cached, packed,   num_splits, invariant};
                  for (Arch arch : {Arch::Sm80, Arch::Sm90}) {
                    int32_t const splits = launched(q, arch);
                    check_equal(explained(q, arch), splits, text_of(q));
                    found.insert(splits);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  check(found.size() > 6, "many numbers of splits");
}

}  // namespace
}  // namespace cute_attention

int main() {
  setenv("FAKE_CAPABILITY", "90", 1);
  unsetenv("CUTE_ATTENTION_SPLITS");
  cute_attention::test_all();
  return cute_attention::testing::report();
}
