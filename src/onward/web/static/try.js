// The panel for predictions on drawings, images and rows, and for adding them as examples.

import { Pad } from "./pad.js";
import { fromImage } from "./pictures.js";
import { parse } from "./csv.js";
import { count, find, make, percent, say } from "./elements.js";
import { convert, sizeOf } from "./tensors.js";

const REPEAT = 200; // milliseconds between two samples while a button is held

export class TryPanel {
  // `teach(samples)` adds labeled samples.
  constructor(page, client, teach) {
    Object.assign(this, { page, client, teach });
    const taken = page.inputs.filter(({ is_target }) => !is_target);
    [this.input] = taken;
    this.rows = [];
    this.labels = isClassifier(page) ? page.labels : null;
    if (taken.length !== 1) {
      find("try").hidden = true; // the panel has one input only
      return;
    }
    if (this.labels) this.#makeClasses();
    if (page.picture) this.#makePad();
    else this.#makeRow();
    for (const mode of ["try", "teach"]) find(`mode-${mode}`).addEventListener("change", () => this.#setMode(mode));
    find("modes").hidden = !this.labels;
    this.#setMode("try");
  }

  get values() {
    return this.pad ? this.pad.values : this.row;
  }

  #setMode(mode) {
    find("try").dataset.mode = mode;
    find("teach-hint").hidden = mode !== "teach";
  }

  // ---- predictions ----

  // Update the prediction; if one is in progress, update once more after it.
  async refresh() {
    if (find("try").hidden) return;
    if (this.asking) {
      this.askAgain = true;
      return;
    }
    this.asking = true;
    try {
      do {
        this.askAgain = false;
        const { values } = this;
        const answer =
          values &&
          (await this.client.call("predict", { sample: { [this.input.name]: convert(values, this.input.type) } }));
        this.#show(this.values ? answer : null);
      } while (this.askAgain);
    } catch (error) {
      say(`The prediction failed: ${error.message}`);
    } finally {
      this.asking = false;
    }
  }

  #show(outputs) {
    if (!this.labels) {
      this.#showNumbers(outputs);
      return;
    }
    const shares = outputs && softmax(outputs[this.labels.output].values);
    const best = shares ? shares.indexOf(Math.max(...shares)) : -1;
    this.rows.forEach(({ row, bar, share }, at) => {
      row.classList.toggle("best", at === best);
      bar.style.width = shares ? `${100 * shares[at]}%` : "0";
      share.textContent = shares ? percent(shares[at]) : "";
    });
    const text = best < 0 ? "none yet" : `${this.labels.names[best]}, ${percent(shares[best])}`;
    if (find("verdict").textContent !== text) find("verdict").textContent = text;
  }

  #showNumbers(outputs) {
    const texts = Object.entries(outputs ?? {}).map(
      ([name, { values }]) => `${name}: ${values.slice(0, 20).map(short).join(", ")}`,
    );
    find("verdict").textContent = texts.join("; ") || "none yet";
  }

  // ---- classes ----

  #makeClasses() {
    const list = find("classes");
    this.labels.names.forEach((name, index) => {
      const bar = make("span", { className: "fill" });
      const share = make("span", { className: "share" });
      const counted = make("span", { className: "counted" });
      const add = make(
        "button",
        { type: "button", className: "add", "aria-label": `Add this to my examples of ${name}` },
        "Add",
      );
      const files = make("input", {
        type: "file",
        accept: "image/*",
        multiple: true,
        "aria-label": `Images of ${name}`,
      });
      const label = make("label", { className: "files" }, files, "Files");
      label.hidden = !this.page.picture;
      const row = make(
        "li",
        {},
        make("span", { className: "name" }, name),
        make("span", { className: "bar", "aria-hidden": "true" }, bar),
        share,
        counted,
        make("span", { className: "acts" }, add, label),
      );
      this.#holdable(add, () => this.#add(index));
      files.addEventListener("change", () => this.#addFiles(index, files));
      this.#droppable(row, (dropped) => this.#addAll(index, dropped));
      list.append(row);
      this.rows.push({ row, bar, share, counted });
    });
  }

  setCounts(samples) {
    const counts = this.rows.map(() => 0);
    for (const sample of samples) counts[Number(sample[this.labels?.input]?.[0] ?? 0)]++;
    this.rows.forEach(({ counted }, at) => (counted.textContent = counts[at] ? count(counts[at], "example") : ""));
  }

  #sample(values, index) {
    return { [this.input.name]: Array.from(values), [this.labels.input]: [index] };
  }

  #add(index) {
    if (!this.values) say(this.page.picture ? "Draw or choose an image first." : "Type a row first.");
    else this.teach([this.#sample(this.values, index)]);
  }

  // A button that repeats while it is held, for the camera.
  #holdable(button, act) {
    let timer;
    button.addEventListener("click", act);
    button.addEventListener("pointerdown", () => {
      if (this.pad?.stream) timer = setInterval(act, REPEAT);
    });
    for (const name of ["pointerup", "pointerleave", "pointercancel"]) {
      button.addEventListener(name, () => clearInterval(timer));
    }
  }

  async #addFiles(index, input) {
    await this.#addAll(index, input.files);
    input.value = "";
  }

  async #addAll(index, files) {
    const samples = [];
    const refused = [];
    for (const file of files) {
      try {
        samples.push(this.#sample(fromImage(await createImageBitmap(file), this.page.picture), index));
      } catch {
        refused.push(file.name);
      }
    }
    if (samples.length) this.teach(samples);
    if (refused.length) say(`Cannot open as images: ${refused.join(", ")}`);
  }

  // ---- images ----

  #makePad() {
    this.pad = new Pad(this.page.picture, () => this.refresh());
    find("try-row").remove();
    const choose = find("choose");
    choose.addEventListener("change", async () => {
      await this.#look(choose.files[0]);
      choose.value = "";
    });
    this.#droppable(find("pad-frame"), ([file]) => this.#look(file));
  }

  async #look(file) {
    try {
      this.pad.show(await createImageBitmap(file));
    } catch {
      say(`This browser cannot open ${file?.name ?? "this"} as an image.`);
    }
  }

  #droppable(element, take) {
    if (!this.page.picture) return;
    element.addEventListener("dragover", (event) => {
      event.preventDefault();
      element.classList.add("over");
    });
    element.addEventListener("dragleave", () => element.classList.remove("over"));
    element.addEventListener("drop", (event) => {
      event.preventDefault();
      element.classList.remove("over");
      if (event.dataTransfer.files.length) take(event.dataTransfer.files);
    });
  }

  // ---- numbers ----

  #makeRow() {
    find("try-picture").remove();
    const size = sizeOf(this.input.shape);
    find("row-label").textContent = `${count(size, "number")} for ${this.input.name}, separated by commas`;
    find("row").addEventListener("input", () => {
      const cells = parse(find("row").value)[0] ?? [];
      const isRow = cells.length === size && cells.every((cell) => cell !== "" && Number.isFinite(Number(cell)));
      this.row = isRow ? cells.map(Number) : null;
      find("row").setAttribute("aria-invalid", String(!isRow && cells.length > 0));
      this.refresh();
    });
  }
}

// True if the only target of a sample is one class.
export function isClassifier({ labels, inputs }) {
  return Boolean(labels) && inputs.length === 2 && !inputs.find(({ name }) => name === labels.input).shape.length;
}

const short = (number) => Number(number.toPrecision(5)).toString();

export function softmax(values) {
  const most = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}
