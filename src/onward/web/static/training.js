// Training itself: the lowered step, again and again. It knows no page, and runs wherever onnxruntime does.

import { Batches } from "./rows.js";
import { ARRAYS, bytesOf, sizeOf } from "./tensors.js";
import { fill, readState } from "./weights.js";

export class Training {
  // `ort` is onnxruntime; `page` what `page.json` says; `read(name)` gives the bytes of a file of the page.
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

  // Go on from arrays by name, at a place.
  load(arrays, place) {
    const before = this.state ?? {};
    this.state = {};
    for (const { name, type, shape } of this.page.state) {
      this.state[name] = new this.ort.Tensor(type, arrays[name], shape);
    }
    Object.values(before).forEach(release);
    this.place = { ...place };
  }

  // All state as arrays by name, wherever it is.
  arrays() {
    return this.alone(async () => {
      const found = {};
      for (const { name, type } of this.page.state) {
        const data = await numbers(this.state[name]);
        found[name] = new ARRAYS[type](bytesOf(data).slice().buffer);
      }
      return found;
    });
  }

  // One thing at a time: somebody may try the model between two steps, never within one.
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

  // One step with the next batch; its metrics as numbers. An epoch has ended where `place.batch` is 0.
  step() {
    return this.alone(async () => {
      const { update, metrics } = this.page.parts.step;
      const batch = this.rows.take(this.nextRows(), this.ort.Tensor);
      const results = await this.run("step", batch);
      const told = {};
      for (const name of metrics) told[name] = Number((await numbers(results[name]))[0]);
      this.replace(update, results);
      this.advance();
      return told;
    });
  }

  advance() {
    const { place } = this;
    Object.assign(place, { step: place.step + 1, batch: place.batch + 1 });
    if (place.batch >= this.batches.perEpoch) Object.assign(place, { epoch: place.epoch + 1, batch: 0 });
  }

  // Put new state in the place of the old, all at once.
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

  // ---- how good it is ----

  // What is evaluated and exported: averages of parameters, where training keeps such.
  get exported() {
    const averages = Object.entries(this.page.averages).map(([name, average]) => [name, this.state[average]]);
    return { ...this.state, ...Object.fromEntries(averages) };
  }

  // The mean loss over all rows, or the first of them, and the share of them whose class is right.
  async evaluate(rows, most = rows.count) {
    const end = Math.min(rows.count, most);
    const size = this.page.order.batch_size;
    const sum = { loss: 0, right: 0, counted: 0 };
    for (let first = 0; first < end; first += size) {
      const taken = Array.from({ length: Math.min(size, end - first) }, (_, at) => first + at);
      const found = await this.alone(() => this.#evaluateBatch(rows, taken));
      for (const name of Object.keys(sum)) sum[name] += found[name];
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

  // A batch of these rows; of a model for one size, copies of the last fill it up.
  #full(rows, taken) {
    const missing = this.page.order.fixed ? this.page.order.batch_size - taken.length : 0;
    return rows.take([...taken, ...Array(missing).fill(taken.at(-1))], this.ort.Tensor);
  }

  // The sum of the losses of rows that count. What the copies add, a batch of them tells.
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
    const each = sizeOf(column.shape);
    const found = bestOf(await numbers(answers), answers.dims, axis);
    let right = 0;
    let counted = 0;
    taken.forEach((row, at) => {
      for (let place = 0; place < each; place++) {
        const label = Number(column.values[row * each + place]);
        if (label === ignored || label < 0) continue;
        counted++;
        if (found[at * each + place] === label) right++;
      }
    });
    return { right, counted };
  }

  // Outputs of the model for one sample, by name: {dims, values}.
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

  // The trained model as an .onnx file.
  async model() {
    return fill(await this.read("model.onnx"), this.page.trained, await this.arrays());
  }

  // The training model, to go on elsewhere.
  async training() {
    const places = this.page.state.map(({ name, offset }) => ({ state: name, offset }));
    return fill(this.file, places, await this.arrays());
  }

  // ---- sessions ----

  // Sessions are made one after the other, which those on a graphics card must be.
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

// The place of the largest number along an axis.
export function bestOf(values, dims, axis) {
  const at = axis < 0 ? axis + dims.length : axis;
  const inner = sizeOf(dims.slice(at + 1));
  const outer = sizeOf(dims.slice(0, at));
  const best = new Array(outer * inner).fill(0);
  for (let block = 0; block < outer; block++) {
    for (let place = 0; place < inner; place++) {
      const first = block * dims[at] * inner + place;
      let found = 0;
      for (let one = 1; one < dims[at]; one++) {
        if (values[first + one * inner] > values[first + found * inner]) found = one;
      }
      best[block * inner + place] = found;
    }
  }
  return best;
}
