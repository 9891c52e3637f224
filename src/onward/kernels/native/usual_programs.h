// Programs of the optimizers that most people use, compiled: what an instruction gives stays in a register. They compute
// what the same instructions do one by one, to the last bit, in half the time.
#pragma once
#include <array>
#include <utility>

#include "vectors.h"

namespace onward {
namespace ONWARD_ISA {

enum Operation : Index { kAdd, kSub, kMul, kDiv, kMax, kMin, kSqrt, kNeg, kAbs, kSign, kWhere, kOperations };

template <int operation>
V operate(V a, V b) {
  if constexpr (operation == kAdd) return a + b;
  if constexpr (operation == kSub) return a - b;
  if constexpr (operation == kMul) return a * b;
  if constexpr (operation == kDiv) return a / b;
  if constexpr (operation == kMax) return choose((a > b) | (a != a), a, b);
  if constexpr (operation == kMin) return choose((a < b) | (a != a), a, b);
  if constexpr (operation == kNeg) return -a;
  if constexpr (operation == kAbs) return choose(a == V{}, V{}, choose(a < V{}, -a, a));
  if constexpr (operation == kSign) return choose(a > V{}, all(1), choose(a < V{}, all(-1), a));
  if constexpr (operation == kSqrt) {
    V root;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) root[i] = std::sqrt(a[i]);
    return root;
  }
  return a;  // kWhere: of what was chosen
}

struct Instruction {
  Index operation;
  std::array<Index, 3> operands;  // in the order of numbers, tensors, and what instructions gave before
};

// The product is rounded before anything is added to it, as it is where that is another instruction.
inline V rounded(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <size_t length, size_t made>
struct Usual {
  Index numbers, tensors;
  Instruction instructions[length];
  Index results[made];
};

constexpr Instruction add(Index a, Index b) { return {kAdd, {a, b, a}}; }
constexpr Instruction sub(Index a, Index b) { return {kSub, {a, b, a}}; }
constexpr Instruction mul(Index a, Index b) { return {kMul, {a, b, a}}; }
constexpr Instruction div(Index a, Index b) { return {kDiv, {a, b, a}}; }
constexpr Instruction sqrt(Index a) { return {kSqrt, {a, a, a}}; }

// The second one of each clips gradients by a factor.
inline constexpr Usual<2, 1> kSgd{1, 2, {mul(2, 0), sub(1, 3)}, {4}};
inline constexpr Usual<3, 1> kClippedSgd{2, 2, {mul(3, 0), mul(4, 1), sub(2, 5)}, {6}};
inline constexpr Usual<4, 2> kMomentum{2, 3, {mul(3, 0), add(5, 4), mul(6, 1), sub(2, 7)}, {8, 6}};
inline constexpr Usual<5, 2> kClippedMomentum{3, 3, {mul(4, 0), mul(5, 1), add(6, 7), mul(8, 2), sub(3, 9)}, {10, 8}};
inline constexpr Usual<12, 3> kAdam{6, 4,
                                    {mul(7, 0), mul(8, 1), add(10, 11), mul(9, 2), mul(8, 8), mul(14, 3), add(13, 15),
                                     sqrt(16), add(17, 4), div(12, 18), mul(19, 5), sub(6, 20)},
                                    {21, 12, 16}};
inline constexpr Usual<13, 3> kClippedAdam{7, 4,
                                           {mul(8, 0), mul(9, 1), mul(12, 2), add(11, 13), mul(10, 3), mul(12, 12),
                                            mul(16, 4), add(15, 17), sqrt(18), add(19, 5), div(14, 20), mul(21, 6),
                                            sub(7, 22)},
                                           {23, 14, 18}};
inline constexpr Usual<13, 3> kAdamW{7, 4,
                                     {mul(7, 0), mul(8, 1), mul(9, 2), add(12, 13), mul(10, 3), mul(9, 9), mul(16, 4),
                                      add(15, 17), sqrt(18), add(19, 5), div(14, 20), mul(21, 6), sub(11, 22)},
                                     {23, 14, 18}};
inline constexpr Usual<14, 3> kClippedAdamW{8, 4,
                                            {mul(8, 0), mul(9, 1), mul(10, 2), mul(14, 3), add(13, 15), mul(11, 4),
                                             mul(14, 14), mul(18, 5), add(17, 19), sqrt(20), add(21, 6), div(16, 22),
                                             mul(23, 7), sub(12, 24)},
                                            {25, 16, 20}};

template <const auto& usual, size_t i>
void execute_one(V* values) {
  constexpr Instruction it = usual.instructions[i];
  const V made = operate<it.operation>(values[it.operands[0]], values[it.operands[1]]);
  values[usual.numbers + usual.tensors + static_cast<Index>(i)] = it.operation == kMul ? rounded(made) : made;
}

template <const auto& usual, size_t... i>
void run_usual(const float* const* numbers, const float* const* inputs, float* const* outputs, Index offset,
               Index count, std::index_sequence<i...>) {
  V values[usual.numbers + usual.tensors + sizeof...(i)];
  for (Index n = 0; n < usual.numbers; n++) values[n] = all(*numbers[n]);
  along(count, [&](Index at, auto lanes) {
    for (Index t = 0; t < usual.tensors; t++) values[usual.numbers + t] = get(inputs[t] + offset + at, lanes);
    (execute_one<usual, i>(values), ...);
    Index output = 0;
    for (Index result : usual.results) put(outputs[output++] + offset + at, values[result], lanes);
  });
}

// Computes so many elements from an offset on.
using RunWhole = void (*)(const float* const* numbers, const float* const* inputs, float* const* outputs, Index offset,
                          Index count);

template <const auto& usual>
void match_usual(const std::vector<Instruction>& program, Index numbers, Index tensors,
                 const std::vector<Index>& results, RunWhole* found) {
  const auto is_same = [](const Instruction& a, const Instruction& b) {
    return a.operation == b.operation && a.operands == b.operands;
  };
  if (numbers != usual.numbers || tensors != usual.tensors) return;
  if (!std::equal(results.begin(), results.end(), std::begin(usual.results), std::end(usual.results))) return;
  if (!std::equal(program.begin(), program.end(), std::begin(usual.instructions), std::end(usual.instructions), is_same))
    return;
  *found = [](const float* const* numbers, const float* const* inputs, float* const* outputs, Index offset,
              Index count) {
    run_usual<usual>(numbers, inputs, outputs, offset, count,
                     std::make_index_sequence<std::size(decltype(usual.instructions){})>());
  };
}

// Null if a program is none of them.
inline RunWhole find_usual(const std::vector<Instruction>& program, Index numbers, Index tensors,
                           const std::vector<Index>& results) {
  RunWhole found = nullptr;
  match_usual<kSgd>(program, numbers, tensors, results, &found);
  match_usual<kClippedSgd>(program, numbers, tensors, results, &found);
  match_usual<kMomentum>(program, numbers, tensors, results, &found);
  match_usual<kClippedMomentum>(program, numbers, tensors, results, &found);
  match_usual<kAdam>(program, numbers, tensors, results, &found);
  match_usual<kClippedAdam>(program, numbers, tensors, results, &found);
  match_usual<kAdamW>(program, numbers, tensors, results, &found);
  match_usual<kClippedAdamW>(program, numbers, tensors, results, &found);
  return found;
}

}  // namespace ONWARD_ISA
}  // namespace onward
