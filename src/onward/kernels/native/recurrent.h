// Recurrent layers: the part that goes step by step, and its gradient. What does not depend on states is computed before,
// and after, for all steps at once. Sequences of a batch know nothing of each other, so that a task goes through all steps
// with a few of them, and never waits for another.
#pragma once
#include "functions.h"
#include "products.h"

namespace onward {
namespace ONWARD_ISA {

constexpr int kMostStates = 2;

// ---- some sequences at one step --------------------------------------------------------------------------------------

// Of each sequence there is a row: of as many numbers as there are units for a state, of a multiple for gates.
struct Moment {
  Index rows, units, time;
  const Index* lengths;  // of these sequences, if they have lengths of their own
  const float* before[kMostStates];

  bool goes_on(Index row) const { return lengths == nullptr || time < lengths[row]; }

  // Calls function(row, i, lanes) for the units of sequences that go on, a vector at a time.
  template <class Function>
  void each(const Function& function) const {
    for (Index row = 0; row < rows; row++)
      if (goes_on(row)) along(units, [&](Index i, auto lanes) { function(row, i, lanes); });
  }
};

struct Forward : Moment {
  const float *items, *bias;  // products with the inputs; a bias of the units
  float* after[kMostStates];
  float* kept;      // for the gradient
  float* products;  // with states, rows being whole vectors
};

struct Backward : Moment {
  const float* after[kMostStates];
  const float* kept;
  float* ditems;
  float* more;                 // what a cell has to say besides
  float* dstates[kMostStates];  // of what is after this step, then of what is before it; rows being whole vectors
  Index wide;
};

// Recurrent weights, a row for each unit of each gate: those of the first product of a step, and of a second one.
struct RecurrentWeights {
  Packed first, second;
};

// ---- cells -----------------------------------------------------------------------------------------------------------

// Each has the number of states, the gates in all and in the first product, and multiples of the units: what is kept for
// the gradient, and what the gradient has to say besides.

struct RnnCell {  // h = tanh(x + h R')
  static constexpr int kStates = 1, kGates = 1, kFirst = 1, kKept = 0, kMore = 0;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const Index at = row * s.units + i;
      put(s.after[0] + at, tanh(get(s.items + at, lanes) + get(s.products + row * wide + i, lanes)), lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    s.each([&](Index row, Index i, auto lanes) {
      const Index at = row * s.units + i;
      float* dstate = s.dstates[0] + row * s.wide + i;
      const V h = get(s.after[0] + at, lanes);
      put(s.ditems + at, get(dstate, lanes) * (1.f - h * h), lanes);
      put(dstate, V{}, lanes);
    });
    multiply({s.ditems, s.units, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

struct LstmCell {  // c = f c + i g, h = o tanh(c); gates are i, o, f, g
  static constexpr int kStates = 2, kGates = 4, kFirst = 4, kKept = 4, kMore = 0;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index n = s.units, wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 4 * n + i, *product = s.products + row * wide + i;
      const auto sum = [&](Index gate) { return get(item + gate * n, lanes) + get(product + gate * n, lanes); };
      const V in = sigmoid(sum(0)), out = sigmoid(sum(1)), forget = sigmoid(sum(2)), candidate = tanh(sum(3));
      const V memory = forget * get(s.before[1] + row * n + i, lanes) + in * candidate;
      put(s.after[0] + row * n + i, out * tanh(memory), lanes);
      put(s.after[1] + row * n + i, memory, lanes);
      float* kept = s.kept + row * 4 * n + i;
      put(kept, in, lanes);
      put(kept + n, out, lanes);
      put(kept + 2 * n, forget, lanes);
      put(kept + 3 * n, candidate, lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 4 * n + i;
      const V in = get(kept, lanes), out = get(kept + n, lanes), forget = get(kept + 2 * n, lanes);
      const V candidate = get(kept + 3 * n, lanes), bent = tanh(get(s.after[1] + row * n + i, lanes));
      float *dstate = s.dstates[0] + row * s.wide + i, *dmemory = s.dstates[1] + row * s.wide + i;
      const V dh = get(dstate, lanes), dc = get(dmemory, lanes) + dh * out * (1.f - bent * bent);
      float* ditem = s.ditems + row * 4 * n + i;
      put(ditem, dc * candidate * (in * (1.f - in)), lanes);
      put(ditem + n, dh * bent * (out * (1.f - out)), lanes);
      put(ditem + 2 * n, dc * get(s.before[1] + row * n + i, lanes) * (forget * (1.f - forget)), lanes);
      put(ditem + 3 * n, dc * in * (1.f - candidate * candidate), lanes);
      put(dmemory, dc * forget, lanes);
      put(dstate, V{}, lanes);
    });
    multiply({s.ditems, 4 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// h = n + z (h - n); gates are z, r, n. The candidate n resets the product with the state, bias included:
// n = tanh(x + r q), q = h R' + b. Besides, the gradient has that of products with states.
struct LinearGruCell {
  static constexpr int kStates = 1, kGates = 3, kFirst = 3, kKept = 4, kMore = 3;
  static constexpr bool kHasBias = true;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    multiply({s.before[0], s.units, 1}, s.rows, w.first, s.products, false);
    const Index n = s.units, wide = w.first.width();
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 3 * n + i, *product = s.products + row * wide + i;
      const auto sum = [&](Index gate) { return get(item + gate * n, lanes) + get(product + gate * n, lanes); };
      const V update = sigmoid(sum(0)), reset = sigmoid(sum(1));
      const V inner = get(product + 2 * n, lanes) + (s.bias == nullptr ? V{} : get(s.bias + i, lanes));
      const V candidate = tanh(get(item + 2 * n, lanes) + reset * inner);
      const V before = get(s.before[0] + row * n + i, lanes);
      put(s.after[0] + row * n + i, candidate + update * (before - candidate), lanes);
      float* kept = s.kept + row * 4 * n + i;
      put(kept, update, lanes);
      put(kept + n, reset, lanes);
      put(kept + 2 * n, candidate, lanes);
      put(kept + 3 * n, inner, lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 4 * n + i;
      const V update = get(kept, lanes), reset = get(kept + n, lanes), candidate = get(kept + 2 * n, lanes);
      float *dstate = s.dstates[0] + row * s.wide + i, *ditem = s.ditems + row * 3 * n + i;
      const V dh = get(dstate, lanes), before = get(s.before[0] + row * n + i, lanes);
      const V dupdate = dh * (before - candidate) * (update * (1.f - update));
      const V dcandidate = dh * (1.f - update) * (1.f - candidate * candidate);
      const V dreset = dcandidate * get(kept + 3 * n, lanes) * (reset * (1.f - reset));
      put(ditem, dupdate, lanes);
      put(ditem + n, dreset, lanes);
      put(ditem + 2 * n, dcandidate, lanes);
      float* dproduct = s.more + row * 3 * n + i;
      put(dproduct, dupdate, lanes);
      put(dproduct + n, dreset, lanes);
      put(dproduct + 2 * n, dcandidate * reset, lanes);
      put(dstate, dh * update, lanes);
    });
    multiply({s.more, 3 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// The same, but the candidate resets the state: n = tanh(x + (r h) R'). Besides, the gradient has the states r h.
struct GruCell {
  static constexpr int kStates = 1, kGates = 3, kFirst = 2, kKept = 3, kMore = 1;
  static constexpr bool kHasBias = false;

  static void advance(const Forward& s, const RecurrentWeights& w) {
    const Index n = s.units, wide = w.first.width();
    multiply({s.before[0], n, 1}, s.rows, w.first, s.products, false);
    s.each([&](Index row, Index i, auto lanes) {
      const float *item = s.items + row * 3 * n + i, *product = s.products + row * wide + i;
      const auto gate = [&](Index g) { return sigmoid(get(item + g * n, lanes) + get(product + g * n, lanes)); };
      float* kept = s.kept + row * 3 * n + i;
      const V reset = gate(1);
      put(kept, gate(0), lanes);
      put(kept + n, reset, lanes);
      put(s.after[0] + row * n + i, reset * get(s.before[0] + row * n + i, lanes), lanes);  // for the second product
    });
    multiply({s.after[0], n, 1}, s.rows, w.second, s.products, false);
    s.each([&](Index row, Index i, auto lanes) {
      float* kept = s.kept + row * 3 * n + i;
      const V candidate =
          tanh(get(s.items + (row * 3 + 2) * n + i, lanes) + get(s.products + row * w.second.width() + i, lanes));
      put(kept + 2 * n, candidate, lanes);
      const V before = get(s.before[0] + row * n + i, lanes);
      put(s.after[0] + row * n + i, candidate + get(kept, lanes) * (before - candidate), lanes);
    });
  }

  static void pull_back(const Backward& s, const RecurrentWeights& w) {
    const Index n = s.units;
    float* dreset_state = scratch(3, s.rows * s.wide);
    s.each([&](Index row, Index i, auto lanes) {
      const float* kept = s.kept + row * 3 * n + i;
      const V update = get(kept, lanes), reset = get(kept + n, lanes), candidate = get(kept + 2 * n, lanes);
      float *dstate = s.dstates[0] + row * s.wide + i, *ditem = s.ditems + row * 3 * n + i;
      const V dh = get(dstate, lanes), before = get(s.before[0] + row * n + i, lanes);
      put(ditem, dh * (before - candidate) * (update * (1.f - update)), lanes);
      put(ditem + 2 * n, dh * (1.f - update) * (1.f - candidate * candidate), lanes);
      put(dstate, dh * update, lanes);
      put(s.more + row * n + i, reset * before, lanes);
    });
    multiply({s.ditems + 2 * n, 3 * n, 1}, s.rows, w.second, dreset_state, false);
    s.each([&](Index row, Index i, auto lanes) {
      float* dstate = s.dstates[0] + row * s.wide + i;
      const V reset = get(s.kept + (row * 3 + 1) * n + i, lanes), before = get(s.before[0] + row * n + i, lanes);
      const V slope = get(dreset_state + row * s.wide + i, lanes);
      put(s.ditems + (row * 3 + 1) * n + i, slope * before * (reset * (1.f - reset)), lanes);
      put(dstate, get(dstate, lanes) + slope * reset, lanes);
    });
    multiply({s.ditems, 3 * n, 1}, s.rows, w.first, s.dstates[0], true);
  }
};

// ---- layers in one direction -----------------------------------------------------------------------------------------

template <class Cell>
struct RecurrentKernel : Kernel {
  explicit RecurrentKernel(const Attributes& a) : backwards(a.integer("backwards", 0) != 0) {}

  struct Sizes {
    Index steps, batch, units;
    std::vector<Index> of_steps(Index multiple) const { return {steps, batch, multiple * units}; }
    std::vector<Index> of_state() const { return {batch, units}; }
  };

  // The i-th step, in the order in which a layer goes through them.
  Index time(const Sizes& s, Index i) const { return backwards ? s.steps - 1 - i : i; }

  static void require_weights(const Tensor<const float>& r, const Sizes& s) {
    require(r.sizes == std::vector<Index>{Cell::kGates * s.units, s.units}, "recurrent weights do not fit the states");
  }

  static const Index* lengths_in(const Call& call, size_t index, const Sizes& s) {
    const auto lengths = call.indices(index);
    require(!lengths || lengths.size() == s.batch, "each sequence has a length");
    return lengths.data;
  }

  // Calls function(first, rows) for groups of sequences.
  template <class Function>
  static void each_group(const Call& call, const Sizes& s, const Function& function) {
    const Index groups = std::max(ceiling(s.batch, kMost), std::min(kTasks, ceiling(s.batch, kLeast)));
    call.parallel(groups, [&](Index i) {
      const Index first = s.batch * i / groups;
      function(first, s.batch * (i + 1) / groups - first);
    });
  }

  // Where a state is before the i-th step.
  const float* before(const Sizes& s, Index i, Index first, const Tensor<const float>& initial, const float* every) const {
    return i == 0 ? initial.data + first * s.units : every + (time(s, i - 1) * s.batch + first) * s.units;
  }

  bool backwards;

 private:
  // Sequences of a task. The more there are, the less often weights come from caches; but threads want tasks.
  static constexpr Index kLeast = 4, kMost = 16, kTasks = 4;
};

template <class Cell>
struct Recurrent : RecurrentKernel<Cell> {  // items, r, initial states, bias, lengths -> all states, last states, kept
  using Base = RecurrentKernel<Cell>;
  using Base::Base;
  using typename Base::Sizes;

  void compute(const Call& call) const override {
    constexpr size_t kStates = Cell::kStates;
    const auto items = call.input(0), r = call.input(1);
    require(items.sizes.size() == 3 && r.sizes.size() == 2, "a recurrent layer has steps, sequences and units");
    const Sizes s{items.sizes[0], items.sizes[1], r.sizes[1]};
    Base::require_weights(r, s);
    require(items.sizes == s.of_steps(Cell::kGates), "gates do not fit the states of a recurrent layer");
    const auto bias = Cell::kHasBias ? call.input(2 + kStates) : Tensor<const float>();
    require(!bias || bias.size() == s.units, "a bias has a number for each unit");
    const Index* lengths = Base::lengths_in(call, 2 + kStates + Cell::kHasBias, s);
    Tensor<const float> initial[kMostStates];
    Tensor<float> every[kMostStates], last[kMostStates];
    for (size_t k = 0; k < kStates; k++) {
      initial[k] = call.input(2 + k);
      require(initial[k].sizes == s.of_state(), "an initial state does not fit the items of a recurrent layer");
      every[k] = call.output(k, s.of_steps(1));
      last[k] = call.output(kStates + k, s.of_state());
    }
    const auto kept = Cell::kKept > 0 ? call.output(2 * kStates, s.of_steps(Cell::kKept)) : Tensor<float>();
    const RecurrentWeights w = weights(call, r);
    Base::each_group(call, s, [&](Index first, Index rows) {
      Forward now{};
      now.rows = rows, now.units = s.units, now.bias = bias.data;
      now.lengths = lengths == nullptr ? nullptr : lengths + first;
      now.products = scratch(2, rows * std::max(w.first.width(), w.second.width()));
      for (Index i = 0; i < s.steps; i++) {
        now.time = this->time(s, i);
        const Index at = now.time * s.batch + first;
        now.items = items.data + at * Cell::kGates * s.units;
        now.kept = kept.data + at * Cell::kKept * s.units;
        for (size_t k = 0; k < kStates; k++) {
          now.before[k] = this->before(s, i, first, initial[k], every[k].data);
          now.after[k] = every[k].data + at * s.units;
        }
        Cell::advance(now, w);
        hold(now);
      }
      for (size_t k = 0; k < kStates; k++) {
        const float* from = this->before(s, s.steps, first, initial[k], every[k].data);
        std::copy(from, from + rows * s.units, last[k].data + first * s.units);
      }
    });
  }

 private:
  static RecurrentWeights weights(const Call& call, const Tensor<const float>& r) {
    const Index units = r.sizes[1], columns = Cell::kFirst * units;
    return {packed(call, r.data, columns, units, 0),
            packed(call, r.data + columns * units, (Cell::kGates - Cell::kFirst) * units, units, 1)};
  }
  // Transposed: each row of weights gives a column of the product.
  static Packed packed(const Call& call, const float* r, Index columns, Index units, int slot) {
    const Packed to{tiles_of(columns), 1, units, scratch(slot, Packed::size(columns, 1, units))};
    call.parallel(static_cast<Index>(to.tiles.size()), [&](Index tile) {
      pack(to, static_cast<size_t>(tile), [&](Index, Index k, Index column) { return r[column * units + k]; });
    });
    return to;
  }
  // States of sequences that have ended stay as they are.
  static void hold(const Forward& now) {
    for (Index row = 0; row < now.rows; row++) {
      if (now.goes_on(row)) continue;
      for (int k = 0; k < Cell::kStates; k++) {
        const float* from = now.before[k] + row * now.units;
        std::copy(from, from + now.units, now.after[k] + row * now.units);
      }
    }
  }
};

// r, initial states, all states, kept, and of all hidden states and last states the gradients, lengths
//   -> the gradients of items and initial states, the hidden states before each step, and more
template <class Cell>
struct RecurrentGradient : RecurrentKernel<Cell> {
  using Base = RecurrentKernel<Cell>;
  using Base::Base;
  using typename Base::Sizes;

  void compute(const Call& call) const override {
    constexpr size_t kStates = Cell::kStates, kGiven = 1 + 2 * kStates + (Cell::kKept > 0);
    const auto r = call.input(0), all = call.input(1 + kStates);
    require(all.sizes.size() == 3, "a recurrent layer has steps, sequences and units");
    const Sizes s{all.sizes[0], all.sizes[1], all.sizes[2]};
    Base::require_weights(r, s);
    const auto kept = Cell::kKept > 0 ? call.input(1 + 2 * kStates) : Tensor<const float>();
    const auto dy = call.input(kGiven);
    require(!kept || kept.sizes == s.of_steps(Cell::kKept), "what was kept does not fit a recurrent layer");
    require(!dy || dy.sizes == all.sizes, "a gradient has the shape of what it is of");
    const Index* lengths = Base::lengths_in(call, kGiven + 1 + kStates, s);
    const auto ditems = call.output(0, s.of_steps(Cell::kGates));
    Tensor<const float> initial[kMostStates], every[kMostStates], dlast[kMostStates];
    Tensor<float> dinitial[kMostStates];
    for (size_t k = 0; k < kStates; k++) {
      initial[k] = call.input(1 + k), every[k] = call.input(1 + kStates + k), dlast[k] = call.input(kGiven + 1 + k);
      require(initial[k].sizes == s.of_state() && every[k].sizes == all.sizes, "states of a recurrent layer differ");
      require(!dlast[k] || dlast[k].sizes == s.of_state(), "a gradient has the shape of what it is of");
      dinitial[k] = call.output(1 + k, s.of_state());
    }
    const auto states = call.output(1 + kStates, s.of_steps(1));
    const auto more = Cell::kMore > 0 ? call.output(2 + kStates, s.of_steps(Cell::kMore)) : Tensor<float>();
    const RecurrentWeights w = weights(call, r);
    Base::each_group(call, s, [&](Index first, Index rows) {
      Backward now{};
      now.rows = rows, now.units = s.units, now.wide = w.first.width();
      now.lengths = lengths == nullptr ? nullptr : lengths + first;
      const Index size = rows * now.wide;
      float* memory = scratch(2, Cell::kStates * size);
      std::fill(memory, memory + Cell::kStates * size, 0.f);
      for (Index k = 0; k < Cell::kStates; k++) {
        now.dstates[k] = memory + k * size;
        if (dlast[k]) add(dlast[k].data + first * s.units, now, now.dstates[k]);
      }
      for (Index i = s.steps - 1; i >= 0; i--) {
        now.time = this->time(s, i);
        const Index at = now.time * s.batch + first;
        now.kept = kept.data + at * Cell::kKept * s.units;
        now.ditems = ditems.data + at * Cell::kGates * s.units;
        now.more = more.data + at * Cell::kMore * s.units;
        for (size_t k = 0; k < kStates; k++) {
          now.before[k] = this->before(s, i, first, initial[k], every[k].data);
          now.after[k] = every[k].data + at * s.units;
        }
        std::copy(now.before[0], now.before[0] + rows * s.units, states.data + at * s.units);
        if (dy) add(dy.data + at * s.units, now, now.dstates[0]);
        clear(now);
        Cell::pull_back(now, w);
      }
      for (size_t k = 0; k < kStates; k++)
        for (Index row = 0; row < rows; row++) {
          const float* from = now.dstates[k] + row * now.wide;
          std::copy(from, from + s.units, dinitial[k].data + (first + row) * s.units);
        }
    });
  }

 private:
  static RecurrentWeights weights(const Call& call, const Tensor<const float>& r) {
    const Index units = r.sizes[1], rows = Cell::kFirst * units;
    return {packed(call, r.data, rows, units, 0),
            packed(call, r.data + rows * units, (Cell::kGates - Cell::kFirst) * units, units, 1)};
  }
  static Packed packed(const Call& call, const float* r, Index rows, Index units, int slot) {
    const Packed to{tiles_of(units), 1, rows, scratch(slot, Packed::size(units, 1, rows))};
    call.parallel(static_cast<Index>(to.tiles.size()), [&](Index tile) {
      pack(to, static_cast<size_t>(tile), [&](Index, Index k, Index column) { return r[k * units + column]; });
    });
    return to;
  }
  static void add(const float* from, const Backward& now, float* to) {
    for (Index row = 0; row < now.rows; row++)
      for (Index i = 0; i < now.units; i++) to[row * now.wide + i] += from[row * now.units + i];
  }
  // Of sequences that have ended there is nothing to say but what goes through.
  static void clear(const Backward& now) {
    for (Index row = 0; row < now.rows; row++) {
      if (now.goes_on(row)) continue;
      const Index gates = Cell::kGates * now.units, more = Cell::kMore * now.units;
      std::fill(now.ditems + row * gates, now.ditems + (row + 1) * gates, 0.f);
      std::fill(now.more + row * more, now.more + (row + 1) * more, 0.f);
    }
  }
};

}  // namespace ONWARD_ISA
}  // namespace onward
