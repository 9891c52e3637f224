// The worker: trains beside the page, so that the page stays quick. It answers calls, and tells how training goes.

import { applyUpdates, makeUpdate, nameOf } from "./rounds.js";
import { Rows } from "./rows.js";
import { fetchBytes, openRuntime } from "./runtime.js";
import { openStore } from "./store.js";
import { Training } from "./training.js";

const TELL_EVERY = 80; // milliseconds
const SAVE_EVERY = 1000;
const MOST_EVALUATED = 1000; // rows, where none are held out
const MOST_POINTS = 20_000; // of the loss that are kept; of longer runs every second one goes

let page, store, training, bundled, heldOut;
let samples = [];
let using = { bundled: true, own: true };
let history = emptyHistory();
let running = null; // a promise while it trains
let stopping = false;
let graphics = false;
let threads = 1;
let stamp = null; // of the run as we saved or took it up last

function emptyHistory() {
  return { steps: [], losses: [], validations: [], every: 1 };
}

const tell = (event, content = {}) => postMessage({ event, ...content });

// ---- opening ----

async function open({ threads: allowed }) {
  threads = allowed;
  page = JSON.parse(new TextDecoder().decode(await fetchBytes("./page.json", { cache: "no-cache" })));
  store = await openStore(page.fingerprint);
  await start(false);
  const data = await read("data.bin");
  bundled = page.data.training ? Rows.read(page.data.training, data) : null;
  heldOut = page.data.validation ? Rows.read(page.data.validation, data) : null;
  samples = (await saved("samples")) ?? [];
  const resumed = await goOn();
  useRows();
  return { ...status(), samples, resumed };
}

// Take up the run as it was saved last, unless it is ours; whether there is one.
async function goOn() {
  const run = await saved("runs");
  if (run && run.stamp !== stamp) {
    training.load(run.state, run.place);
    ({ history, using, stamp } = run);
  }
  return Boolean(run);
}

// Files belong to one page: what the browser has kept of an older one is another address.
const read = (name) => fetchBytes(`./${name}?${page.fingerprint}`);

async function start(onGraphics) {
  const made = await openTraining(onGraphics).catch((error) => {
    if (!onGraphics) throw error;
    tell("notice", { text: `The graphics card cannot be used (${error.message}); it trains on the processor.` });
    return openTraining(false);
  });
  training = made;
}

async function openTraining(onGraphics) {
  const ort = await openRuntime(page, onGraphics, threads);
  const made = await new Training(ort, page, read, { graphics: onGraphics }).open();
  graphics = onGraphics;
  return made;
}

async function saved(what) {
  try {
    return await store?.get(what);
  } catch {
    return undefined;
  }
}

function useRows() {
  const own = using.own && samples.length ? Rows.of(page.inputs, samples) : null;
  const rows = Rows.join(using.bundled ? bundled : null, own);
  training.setRows(rows ?? new Rows([], 0));
}

function status() {
  return {
    page,
    history,
    using,
    place: { ...training.place },
    rows: training.rows.count,
    perEpoch: training.batches.perEpoch,
    keeps: Boolean(store),
    graphics,
    threads,
    isRunning: running !== null,
  };
}

// ---- training ----

async function train({ epochs }) {
  if (running) return;
  if (!training.batches.perEpoch) {
    throw new Error(
      training.rows.count ? "There are too few samples for one batch." : "There is nothing to learn from yet.",
    );
  }
  stopping = false;
  let perSecond;
  running = withLock(async () => {
    await goOn(); // another tab may have trained it meanwhile
    const [began, from] = [performance.now(), training.place.step];
    try {
      await loop(training.place.epoch + epochs);
    } catch (error) {
      if (!graphics || error instanceof LossError) throw error;
      await leaveGraphics(error);
    } finally {
      await save();
    }
    perSecond = (1000 * (training.place.step - from)) / (performance.now() - began);
  });
  try {
    await running;
  } catch (error) {
    tell("failed", { text: error.message });
  } finally {
    running = null;
    tell("stopped", { ...status(), perSecond });
  }
}

// Go back to the last save, on the processor: what was on the card may be lost.
async function leaveGraphics(error) {
  tell("notice", {
    text: `The graphics card failed (${error.message}). The run stands where it was saved last, on the processor.`,
  });
  await start(false);
  stamp = null;
  await goOn();
  useRows();
}

class LossError extends Error {}

// Two tabs would write over one another.
async function withLock(act) {
  if (!navigator.locks) return act();
  return navigator.locks.request(`onward ${page.fingerprint}`, { ifAvailable: true }, (lock) => {
    if (!lock) throw new Error("It trains in another tab already.");
    return act();
  });
}

async function loop(until) {
  let told = performance.now();
  let wrote = told;
  let steps = 0;
  if (!history.validations.length) await validate();
  while (!stopping && training.place.epoch < until) {
    const before = training.place.epoch;
    const metrics = await training.step();
    const loss = metrics[page.parts.step.loss];
    steps++;
    record(loss);
    if (!Number.isFinite(loss))
      throw new LossError("The loss is not a number any more. Start over, with a smaller learning rate.");
    if (training.place.epoch !== before) await validate();
    const now = performance.now();
    if (now - told > TELL_EVERY) {
      tell("progress", { history, place: { ...training.place }, perSecond: (steps * 1000) / (now - told) });
      [told, steps] = [now, 0];
      await new Promise((resolve) => setTimeout(resolve)); // what was said to us meanwhile
    }
    if (now - wrote > SAVE_EVERY) {
      await save();
      wrote = performance.now();
    }
  }
}

function record(loss) {
  const { step } = training.place;
  if (step % history.every) return;
  history.steps.push(step);
  history.losses.push(loss);
  if (history.steps.length < MOST_POINTS) return;
  history.every *= 2;
  history.losses = history.losses.filter((_, at) => history.steps[at] % history.every === 0);
  history.steps = history.steps.filter((one) => one % history.every === 0);
}

async function validate() {
  const result = await (heldOut ? training.evaluate(heldOut) : training.evaluate(training.rows, MOST_EVALUATED));
  history.validations.push({ step: training.place.step, ...result, heldOut: Boolean(heldOut) });
}

async function save() {
  if (!store) return;
  try {
    stamp = `${Date.now()} ${Math.random()}`;
    await store.put("runs", { state: await training.arrays(), place: training.place, history, using, stamp });
  } catch (error) {
    store = null;
    tell("notice", { text: `The browser does not keep the run (${error.name}): closing the tab loses it.` });
  }
}

async function stop() {
  stopping = true;
  await running;
  return status();
}

async function reset() {
  await stop();
  training.reset();
  history = emptyHistory();
  await store?.remove("runs");
  return status();
}

// ---- samples ----

async function setSamples({ samples: given }) {
  samples = given;
  return settleRows();
}

async function use(wanted) {
  using = { ...using, ...wanted };
  return settleRows();
}

async function settleRows() {
  useRows();
  try {
    await store?.put("samples", samples);
  } catch (error) {
    tell("notice", { text: `The browser does not keep your examples (${error.name}).` });
  }
  if (training.place.step) await save();
  return status();
}

// ---- others ----

async function choose({ graphics: wanted }) {
  await stop();
  const [state, place] = [await training.arrays(), training.place];
  const before = training;
  await start(wanted);
  await before.close();
  training.load(state, place);
  useRows();
  return status();
}

async function join({ files }) {
  await stop();
  const result = await applyUpdates(training, files);
  record(result.loss);
  await validate();
  await save();
  return { ...status(), ...result, name: await nameOf(training) };
}

// What uses sessions comes one after the other: a session runs one thing at a time.
const CALLS = {
  open,
  train,
  stop,
  reset,
  setSamples,
  use,
  choose,
  join,
  predict: ({ sample }) => training.predict(sample),
  model: () => training.model(),
  training: () => training.training(),
  update: ({ number, count }) => stop().then(() => makeUpdate(training, number, count)),
  name: () => nameOf(training),
};

onmessage = async ({ data: { id, call, content } }) => {
  try {
    postMessage({ id, result: await CALLS[call](content ?? {}) });
  } catch (error) {
    postMessage({ id, error: error?.message ?? String(error) });
  }
};
