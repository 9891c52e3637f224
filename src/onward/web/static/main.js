// The page: starts the worker, and shows its progress in the panels.

import { Chart } from "./chart.js";
import { Client } from "./client.js";
import { DataPanel } from "./data.js";
import { count, download, find, make, percent, say } from "./elements.js";
import { countThreads, hasGraphics } from "./runtime.js";
import { TogetherPanel } from "./together.js";
import { TryPanel } from "./try.js";

let client, page, tryPanel, lossChart, accuracyChart;
let isRunning = false;
let place = { step: 0, epoch: 0, batch: 0 };

// ---- progress ----

function show({ history, place: now, perSecond, rows, perEpoch }) {
  place = now;
  const { steps, losses, validations } = history;
  lossChart.draw(
    steps,
    losses,
    validations.map(({ step, loss }) => [step, loss]),
  );
  accuracyChart?.draw(
    [],
    [],
    validations.map(({ step, accuracy }) => [step, accuracy]),
  );
  const last = validations.at(-1);
  find("at-step").textContent = place.step.toLocaleString("en");
  find("at-epoch").textContent = place.epoch.toLocaleString("en");
  find("at-loss").textContent = losses.length ? losses.at(-1).toFixed(4) : "–";
  find("at-accuracy").textContent = last?.accuracy != null ? percent(last.accuracy) : "–";
  find("accuracy-of").textContent =
    last && !last.heldOut ? "on training examples" : "on validation examples";
  if (perSecond) find("at-speed").textContent = `${Math.round(perSecond).toLocaleString("en")} / s`;
  if (rows !== undefined)
    find("rows").textContent = `Training on ${count(rows, "example")}, ${count(perEpoch, "step")} per epoch.`;
}

function setRunning(running) {
  isRunning = running;
  document.body.classList.toggle("running", running);
  find("verdict").setAttribute("aria-live", running ? "off" : "polite"); // predictions change in every step
  find("go").textContent = running ? "Stop" : place.step ? "Resume" : "Train";
  find("reset").disabled = running || !place.step;
}

function settle(status) {
  show(status);
  if (!isRunning || !status.isRunning) setRunning(status.isRunning);
  tryPanel.refresh();
}

const events = {
  progress(content) {
    show(content);
    tryPanel.refresh();
  },
  stopped(content) {
    settle({ ...content, isRunning: false });
    find("progress").textContent = describe(content);
  },
  failed: ({ text }) => say(text),
  notice: ({ text }) => say(text),
};

function describe({ place: { step, epoch }, history: { validations } }) {
  const last = validations.at(-1);
  const result =
    last?.accuracy != null ? `, accuracy ${percent(last.accuracy)}` : last ? `, loss ${last.loss.toFixed(4)}` : "";
  return `${count(step, "step")}, ${count(epoch, "epoch")}${result}.`;
}

// ---- actions ----

async function go() {
  say("");
  if (isRunning) {
    await client.call("stop");
    return;
  }
  const epochs = Math.max(Math.round(Number(find("epochs").value)) || 1, 1);
  setRunning(true);
  find("progress").textContent = "Training.";
  try {
    await client.call("train", { epochs });
  } catch (error) {
    setRunning(false);
    find("progress").textContent = "";
    say(error.message);
  }
}

async function reset() {
  settle(await client.call("reset"));
  find("progress").textContent = "Reset to the initial state.";
}

async function save(what, name) {
  try {
    download(await client.call(what), name);
  } catch (error) {
    say(`The download failed: ${error.message}`);
  }
}

async function chooseDevice(event) {
  const graphics = event.target.value === "graphics";
  try {
    const status = await client.call("choose", { graphics });
    event.target.value = status.graphics ? "graphics" : "processor";
    settle(status);
    showDevice(status);
  } catch (error) {
    say(error.message);
  }
}

function showDevice({ graphics, threads }) {
  find("device-text").textContent = graphics
    ? "Training runs on the GPU."
    : `Training runs on the CPU, in ${count(threads, "thread")}.`;
}

// ---- start ----

function fillAbout(status) {
  document.title = `${page.title} – train it in the browser`;
  find("title").textContent = page.title;
  const rows = [
    ["parameters", page.about.parameters.toLocaleString("en")],
    ...page.about.rows,
    ["batches", `of ${page.order.batch_size}, in the order of onward train with seed ${page.order.seed}`],
    ["runtime", `ONNX Runtime ${page.runtime.version}`],
  ];
  for (const [name, text] of rows) find("facts").append(make("div", {}, make("dt", {}, name), make("dd", {}, text)));
  showDevice(status);
  const file = page.title.replace(/[^\w.-]+/g, "-") || "model";
  find("save-model").addEventListener("click", () => save("model", `${file}-trained.onnx`));
  find("save-training").addEventListener("click", () => save("training", `${file}-training.onnx`));
  find("kept").textContent = status.keeps
    ? "This browser stores the run and your examples: you can close the tab and resume later."
    : "This browser stores nothing for this page: closing the tab loses the run. Download the model before you close it.";
}

function missing() {
  if (typeof WebAssembly !== "object")
    return "This browser has no WebAssembly, which training needs. Use Firefox, Chrome, Edge or Safari.";
  if (typeof DecompressionStream !== "function")
    return "This browser has no DecompressionStream, which the page needs. Use a browser from 2023 or later.";
  return null;
}

function fail(text) {
  find("loading").hidden = true;
  find("trouble").hidden = false;
  find("trouble-text").textContent = text;
}

async function start() {
  const problem = missing();
  if (problem) return fail(problem);
  client = new Client((event, content) => events[event](content));
  fill(await client.call("open", { threads: countThreads() }));
  document.documentElement.dataset.ready = "true";
}

function fill(status) {
  ({ page } = status);
  find("loading").hidden = true;
  find("main").hidden = false;
  fillAbout(status);
  lossChart = new Chart(find("loss-chart"), {
    name: "Loss",
    format: (value) => String(Number(value.toPrecision(3))),
    least: 0,
  });
  if (page.labels)
    accuracyChart = new Chart(find("accuracy-chart"), {
      name: "Accuracy",
      format: (value) => `${Math.round(100 * value)} %`,
      least: 0,
      most: 1,
    });
  else for (const element of document.querySelectorAll(".of-classes")) element.hidden = true;
  const dataPanel = new DataPanel(page, client, status.samples, status.using, (now) => {
    settle(now);
    tryPanel.setCounts(dataPanel.samples);
  });
  tryPanel = new TryPanel(page, client, (samples) => dataPanel.add(samples));
  tryPanel.setCounts(status.samples);
  new TogetherPanel(client, page.title, settle);
  show(status);
  setRunning(false);
  if (status.resumed) find("progress").textContent = `Resumed: ${describe(status)}`;
  find("go").addEventListener("click", go);
  find("reset").addEventListener("click", reset);
  find("device").addEventListener("change", chooseDevice);
  find("about").addEventListener(
    "toggle",
    async () => (find("device").closest("label").hidden = !(await hasGraphics())),
    { once: true },
  );
}

start().catch((error) => fail(`The page did not start: ${error.message}`));
