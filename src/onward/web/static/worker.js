// The worker: trains in the background, so that the page stays responsive. It answers calls and reports progress.

import { applyUpdates, makeUpdate, nameOf } from "./rounds.js";
import { Rows } from "./rows.js";
import { fetchBytes, openRuntime } from "./runtime.js";
import { openStore } from "./store.js";
import { Training } from "./training.js";

const REPORT_EVERY = 80; // milliseconds
const SAVE_EVERY = 1000; // milliseconds
const MOST_EVALUATED = 1000; // training rows, if there is no validation data
const MOST_POINTS = 20_000; // of the loss curve; longer runs keep every second, fourth ... point

let page, store, training, bundled, heldOut;
let samples = [];
let using = { bundled: true, own: true };
let history = emptyHistory();
let running = null; // a promise during training
let stopping = false;
let graphics = false;
let threads = 1;
let stamp = null; // of the run, when this tab last saved or loaded it

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
  const resumed = await resume();
  useRows();
  return { ...status(), samples, resumed };
}

// Load the saved run, unless this tab saved it. Return true if there is one.
async function resume() {
  const run = await saved("runs");
  if (run && run.stamp !== stamp) {
    training.load(run.state, run.place);
    ({ history, using, stamp } = run);
  }
  return Boolean(run);
}

// The fingerprint makes the browser cache files of different pages apart.
const read = (name) => fetchBytes(`./${name}?${page.fingerprint}`);

async function start(onGraphics) {
  training = await openTraining(onGraphics).catch((error) => {
    if (!onGraphics) throw error;
    tell("notice", { text: `WebGPU does not work (${error.message}). Training runs on the CPU.` });
    return openTraining(false);
  });
}

async function openTraining(onGraphics) {
  const ort = await openRuntime(page, onGraphics, threads);
  const opened = await new Training(ort, page, read, { graphics: onGraphics }).open();
  graphics = onGraphics;
  return opened;
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
      training.rows.count ? "There are too few samples for one batch." : "There are no samples yet.",
    );
  }
  stopping = false;
  let perSecond;
  running = withLock(async () => {
    await resume(); // another tab may have trained the run
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

// Return to the last saved state, on the CPU: state on the GPU may be lost.
async function leaveGraphics(error) {
  tell("notice", {
    text: `WebGPU failed (${error.message}). Training continues on the CPU from the last saved state.`,
  });
  await start(false);
  stamp = null;
  await resume();
  useRows();
}

class LossError extends Error {}

// Only one tab may train: two would overwrite each other's run.
async function withLock(act) {
  if (!navigator.locks) return act();
  return navigator.locks.request(`onward ${page.fingerprint}`, { ifAvailable: true }, (lock) => {
    if (!lock) throw new Error("Training runs in another tab.");
    return act();
  });
}

async function loop(until) {
  let lastReport = performance.now();
  let lastSave = lastReport;
  let steps = 0;
  if (!history.validations.length) await validate();
  while (!stopping && training.place.epoch < until) {
    const before = training.place.epoch;
    const metrics = await training.step();
    const loss = metrics[page.parts.step.loss];
    steps++;
    record(loss);
    if (!Number.isFinite(loss))
      throw new LossError("The loss is not finite. Start over with a smaller learning rate.");
    if (training.place.epoch !== before) await validate();
    const now = performance.now();
    if (now - lastReport > REPORT_EVERY) {
      tell("progress", { history, place: { ...training.place }, perSecond: (steps * 1000) / (now - lastReport) });
      [lastReport, steps] = [now, 0];
      await new Promise((resolve) => setTimeout(resolve)); // handles messages that have arrived
    }
    if (now - lastSave > SAVE_EVERY) {
      await save();
      lastSave = performance.now();
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
  history.steps = history.steps.filter((step) => step % history.every === 0);
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
    tell("notice", { text: `The browser cannot store the run (${error.name}): closing the tab loses it.` });
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

async function setSamples({ samples: newSamples }) {
  samples = newSamples;
  return settleRows();
}

async function use(choice) {
  using = { ...using, ...choice };
  return settleRows();
}

async function settleRows() {
  useRows();
  try {
    await store?.put("samples", samples);
  } catch (error) {
    tell("notice", { text: `The browser cannot store your examples (${error.name}).` });
  }
  if (training.place.step) await save();
  return status();
}

// ---- devices, updates of others ----

async function choose({ graphics: onGraphics }) {
  await stop();
  const [state, place] = [await training.arrays(), training.place];
  const before = training;
  await start(onGraphics);
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

// Calls that use sessions run one after the other: a session runs one call at a time.
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
