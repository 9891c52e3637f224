// The training loop over the lowered step. It does not depend on the page, and runs on any onnxruntime.

import { Batches } from "./rows.js";
import { ARRAYS, bytesOf, sizeOf } from "./tensors.js";
import { fill, readState } from "./weights.js";

export class Training {
  // `ort` is onnxruntime; `page` is the content of `page.json`; `read(name)` returns the bytes of a file of the page.
  constructor(ort, page, read, { graphics = false } = {}) {
    Object.assign(this, { ort, page, read, graphics });
    this.sessions = {};
    this.place = { step: 0, epoch: 0, batch: 0 };
    this.turn = Promise.resolve();
    this.opening = Promise.resolve();
  }

  async open() {
    this.file = await this.read("training.onnx");
    this.reset();
    await Promise.all([this.session("step"), this.session("evaluation")]);
    return this;
  }

  // ---- state ----

  reset() {
    this.load(readState(this.file, this.page.state), { step: 0, epoch: 0, batch: 0 });
  }

  // Resume from arrays by name, at a position.
  load(arrays, place) {
    const before = this.state ?? {};
    this.state = {};
    for (const { name, type, shape } of this.page.state) {
      this.state[name] = new this.ort.Tensor(type, arrays[name], shape);
    }
    Object.values(before).forEach(release);
    this.place = { ...place };
  }

  // Return all state as arrays by name, also from the GPU.
  arrays() {
    return this.alone(async () => {
      const arrays = {};
      for (const { name, type } of this.page.state) {
        const data = await numbers(this.state[name]);
        arrays[name] = new ARRAYS[type](bytesOf(data).slice().buffer);
      }
      return arrays;
    });
  }

  // Run actions one at a time: predictions run between two steps, never within one.
  alone(act) {
    const result = this.turn.then(act);
    this.turn = result.catch(() => {});
    return result;
  }

  // ---- steps ----

  setRows(rows) {
    this.rows = rows;
    this.batches = new Batches(rows.count, this.page.order);
  }

  nextRows() {
    const { place, batches } = this;
    if (place.batch >= batches.perEpoch) Object.assign(place, { epoch: place.epoch + 1, batch: 0 });
    return batches.rows(place.epoch, place.batch);
  }

  // Make one step with the next batch, and return its metrics. An epoch has ended if `place.batch` is 0.
  step() {
    return this.alone(async () => {
      const { update, metrics } = this.page.parts.step;
      const batch = this.rows.take(this.nextRows(), this.ort.Tensor);
      const results = await this.run("step", batch);
      const values = {};
      for (const name of metrics) values[name] = Number((await numbers(results[name]))[0]);
      this.replace(update, results);
      this.advance();
      return values;
    });
  }

  advance() {
    const { place } = this;
    Object.assign(place, { step: place.step + 1, batch: place.batch + 1 });
    if (place.batch >= this.batches.perEpoch) Object.assign(place, { epoch: place.epoch + 1, batch: 0 });
  }

  // Replace old state by new state.
  replace(update, results) {
    const old = [];
    for (const [name, output] of Object.entries(update)) {
      old.push(this.state[name]);
      this.state[name] = results[output];
    }
    old.forEach(release);
  }

  async run(part, inputs, state = this.state) {
    const session = await this.session(part);
    const own = Object.fromEntries(this.page.parts[part].state.map((name) => [name, state[name]]));
    return session.run({ ...inputs, ...own });
  }

  // ---- evaluation ----

  // State for evaluation and export: moving averages of parameters, if training has them.
  get exported() {
    const averages = Object.entries(this.page.averages).map(([name, average]) => [name, this.state[average]]);
    return { ...this.state, ...Object.fromEntries(averages) };
  }

  // Return the mean loss and the accuracy over all rows, or over the first `most`.
  async evaluate(rows, most = rows.count) {
    const end = Math.min(rows.count, most);
    const size = this.page.order.batch_size;
    const sum = { loss: 0, right: 0, counted: 0 };
    for (let first = 0; first < end; first += size) {
      const taken = Array.from({ length: Math.min(size, end - first) }, (_, at) => first + at);
      const result = await this.alone(() => this.#evaluateBatch(rows, taken));
      for (const name of Object.keys(sum)) sum[name] += result[name];
    }
    return { loss: sum.loss / end, accuracy: sum.counted ? sum.right / sum.counted : null };
  }

  async #evaluateBatch(rows, taken) {
    const results = await this.run("evaluation", this.#full(rows, taken), this.exported);
    const mean = Number((await numbers(results[this.page.parts.evaluation.loss]))[0]);
    const loss = await this.#sumOfLosses(rows, taken, mean);
    const score = this.page.labels ? await this.#score(results, rows, taken) : { right: 0, counted: 0 };
    return { loss, ...score };
  }

  // Return a batch of rows. If the model has a fixed batch size, copies of the last row pad it.
  #full(rows, taken) {
    const missing = this.page.order.fixed ? this.page.order.batch_size - taken.length : 0;
    return rows.take([...taken, ...Array(missing).fill(taken.at(-1))], this.ort.Tensor);
  }

  // Return the sum of the losses of rows, without those of padding: a batch of copies measures these.
  async #sumOfLosses(rows, taken, mean) {
    const { fixed, batch_size: size } = this.page.order;
    if (!fixed || taken.length === size) return mean * taken.length;
    const copies = rows.take(Array(size).fill(taken.at(-1)), this.ort.Tensor);
    const results = await this.run("evaluation", copies, this.exported);
    const one = Number((await numbers(results[this.page.parts.evaluation.loss]))[0]);
    return mean * size - one * (size - taken.length);
  }

  async #score(results, rows, taken) {
    const { output, axis, input, ignored } = this.page.labels;
    const answers = results[output];
    const column = rows.columns.find(({ name }) => name === input);
    const perRow = sizeOf(column.shape);
    const predictions = bestOf(await numbers(answers), answers.dims, axis);
    let right = 0;
    let counted = 0;
    taken.forEach((row, at) => {
      for (let position = 0; position < perRow; position++) {
        const label = Number(column.values[row * perRow + position]);
        if (label === ignored || label < 0) continue;
        counted++;
        if (predictions[at * perRow + position] === label) right++;
      }
    });
    return { right, counted };
  }

  // Return the outputs of the model for one sample, by name: {dims, values}.
  predict(sample) {
    const count = this.page.order.fixed ? this.page.order.batch_size : 1;
    const batch = {};
    for (const { name, type, shape } of this.page.inputs) {
      const size = sizeOf(shape);
      const values = new ARRAYS[type](count * size);
      if (sample[name]) for (let at = 0; at < count; at++) values.set(sample[name], at * size);
      batch[name] = new this.ort.Tensor(type, values, [count, ...shape]);
    }
    return this.alone(async () => {
      const results = await this.run("evaluation", batch, this.exported);
      const outputs = {};
      for (const name of this.page.parts.evaluation.outputs) {
        const dims = results[name].dims.slice(1);
        outputs[name] = { dims, values: Array.from(await numbers(results[name]), Number).slice(0, sizeOf(dims)) };
      }
      return outputs;
    });
  }

  // ---- files ----

  // Return the trained model as an .onnx file.
  async model() {
    return fill(await this.read("model.onnx"), this.page.trained, await this.arrays());
  }

  // Return the training model with its state as an .onnx file.
  async training() {
    const places = this.page.state.map(({ name, offset }) => ({ state: name, offset }));
    return fill(this.file, places, await this.arrays());
  }

  // ---- sessions ----

  // Sessions are created one after the other: WebGPU does not allow two at a time.
  session(part) {
    if (!this.sessions[part]) {
      this.sessions[part] = this.opening.then(() => this.#open(part));
      this.opening = this.sessions[part].catch(() => {});
    }
    return this.sessions[part];
  }

  async #open(part) {
    const options = { executionProviders: this.graphics ? ["webgpu", "wasm"] : ["wasm"], logSeverityLevel: 3 };
    if (this.graphics) {
      const types = new Map(this.page.state.map(({ name, type }) => [name, type]));
      const update = Object.entries(this.page.parts[part].update);
      const stays = update
        .filter(([name]) => types.get(name) === "float32")
        .map(([, output]) => [output, "gpu-buffer"]);
      options.preferredOutputLocation = Object.fromEntries(stays);
    }
    return this.ort.InferenceSession.create(await this.read(`${part}.onnx`), options);
  }

  async close() {
    Object.values(this.state ?? {}).forEach(release);
    for (const session of Object.values(this.sessions)) await (await session).release();
  }
}

export async function numbers(tensor) {
  return tensor.location === "cpu" ? tensor.data : tensor.getData();
}

function release(tensor) {
  if (tensor.location !== "cpu") tensor.dispose();
}

// Return the index of the largest number along an axis.
export function bestOf(values, dims, axis) {
  const at = axis < 0 ? axis + dims.length : axis;
  const inner = sizeOf(dims.slice(at + 1));
  const outer = sizeOf(dims.slice(0, at));
  const best = new Array(outer * inner).fill(0);
  for (let block = 0; block < outer; block++) {
    for (let offset = 0; offset < inner; offset++) {
      const first = block * dims[at] * inner + offset;
      let largest = 0;
      for (let index = 1; index < dims[at]; index++) {
        if (values[first + index * inner] > values[first + largest * inner]) largest = index;
      }
      best[block * inner + offset] = largest;
    }
  }
  return best;
}
