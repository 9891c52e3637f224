// Federated training: each person computes gradients of the same state on local data, and all apply the same mean.
//
// An update is a .safetensors file: a gradient for each parameter, the state that the forward pass changes, the number
// of samples, and the name of the initial state. If the loss is a mean, then the mean of gradients, weighted by samples,
// is the gradient of all samples.

import { digest } from "./digest.js";
import { read, write } from "./safetensors.js";
import { ARRAYS, bytesOf, sizeOf } from "./tensors.js";
import { numbers } from "./training.js";

const FORMAT = "onward-update-1";
const STATE = "state:";

export class RoundError extends Error {}

// Return the name of a state, a hash of its numbers.
export async function nameOf(training) {
  const arrays = await training.arrays();
  return digest(...training.page.state.map(({ name }) => bytesOf(arrays[name])));
}

// Return the update from part `number` (from 1) of `count` of the next batch.
export async function makeUpdate(training, number = 1, count = 1) {
  const { gradients, update, loss } = training.page.parts.gradients;
  const rows = training.nextRows().filter((_, at) => at % count === number - 1);
  if (!rows.length) throw new RoundError("This part of the batch is empty: use fewer parts.");
  if (training.page.order.fixed && count > 1) {
    throw new RoundError("This model takes batches of one size, which cannot be split.");
  }
  const results = await training.run("gradients", training.rows.take(rows, training.ort.Tensor));
  const tensors = {};
  const add = async (name, { type, dims }, output) => {
    const values = new ARRAYS[type](bytesOf(await numbers(results[output])).slice().buffer);
    tensors[name] = { type, shape: [...dims], values };
  };
  for (const name of Object.keys(gradients)) await add(name, results[name], name);
  for (const [name, output] of Object.entries(update)) await add(STATE + name, results[output], output);
  const about = {
    format: FORMAT,
    model: training.page.fingerprint,
    state: await nameOf(training),
    samples: String(rows.length),
    loss: String((await numbers(results[loss]))[0]),
  };
  return write(tensors, about);
}

// Apply the mean of updates to the state. The result does not depend on the order of the files.
export async function applyUpdates(training, files) {
  const updates = await checked(training, files);
  const samples = updates.reduce((sum, { about }) => sum + Number(about.samples), 0);
  const mean = (name) => {
    const { type, shape } = updates[0].tensors[name];
    if (!type.startsWith("float")) return same(name, updates);
    if (type === "float16") throw new RoundError("Updates in float16 are not supported.");
    const values = new ARRAYS[type](sizeOf(shape));
    for (let at = 0; at < values.length; at++) {
      let sum = 0;
      for (const { tensors, about } of updates) sum += tensors[name].values[at] * Number(about.samples);
      values[at] = sum / samples;
    }
    return new training.ort.Tensor(type, values, shape);
  };
  const { gradients, update } = training.page.parts.gradients;
  const forward = Object.fromEntries(Object.keys(update).map((name) => [name, mean(STATE + name)]));
  const sums = Object.fromEntries(Object.keys(gradients).map((name) => [name, mean(name)]));
  training.replace(Object.fromEntries(Object.keys(forward).map((name) => [name, name])), forward);
  training.replace(training.page.parts.apply.update, await training.run("apply", sums));
  training.advance();
  const loss = updates.reduce((sum, { about }) => sum + Number(about.loss) * Number(about.samples), 0) / samples;
  return { samples, loss };

  function same(name, all) {
    const [first, ...others] = all.map(({ tensors }) => tensors[name]);
    if (others.some(({ values }) => values.some((value, at) => value !== first.values[at]))) {
      throw new RoundError(`The updates differ in ${name.slice(STATE.length)}, which has no mean.`);
    }
    return new training.ort.Tensor(first.type, first.values, first.shape);
  }
}

async function checked(training, files) {
  const state = await nameOf(training);
  const names = [
    ...Object.keys(training.page.parts.gradients.gradients),
    ...Object.keys(training.page.parts.gradients.update).map((name) => STATE + name),
  ];
  const updates = files.map(({ name, bytes }) => {
    const { tensors, about } = parse(name, bytes);
    if (about.format !== FORMAT) throw new RoundError(`${name} is not an update.`);
    if (about.model !== training.page.fingerprint) throw new RoundError(`${name} is from another page or model.`);
    if (about.state !== state)
      throw new RoundError(`${name} is from another round: all must start from the same state.`);
    if (!(Number(about.samples) > 0) || names.some((tensor) => !tensors[tensor]))
      throw new RoundError(`${name} is damaged.`);
    return { tensors, about, key: digest(bytes) };
  });
  updates.sort((a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : 0)); // rounding depends on the order
  if (updates.some(({ key }, at) => at && key === updates[at - 1].key)) {
    throw new RoundError("The same update was added twice.");
  }
  return updates;
}

function parse(name, bytes) {
  try {
    return read(bytes);
  } catch (error) {
    throw new RoundError(`Cannot read ${name}: ${error.message}.`);
  }
}
