// The data panel: the examples of the page, and the visitor's examples.

import { samplesOf } from "./csv.js";
import { count, find, make, say } from "./elements.js";
import { paint } from "./pictures.js";

const MOST_SHOWN = 48;

export class DataPanel {
  // `onChange(status)` is called with the status of the worker after each change.
  constructor(page, client, samples, using, onChange) {
    Object.assign(this, { page, client, samples, onChange });
    const bundled = page.data.training?.rows ?? 0;
    find("bundled-text").textContent = `${count(bundled, "example")} from this page`;
    find("use-bundled").closest("label").hidden = !bundled;
    find("use-bundled").checked = using.bundled;
    find("use-own").checked = using.own;
    for (const what of ["bundled", "own"]) {
      find(`use-${what}`).addEventListener("change", (event) => this.#send("use", { [what]: event.target.checked }));
    }
    find("table").addEventListener("change", (event) => this.#readTable(event.target));
    find("table-hint").textContent = this.#describeTable();
    const takesTables = page.inputs.filter(({ is_target }) => is_target).length === 1;
    for (const id of ["table-button", "table-hint", "own-hint"]) find(id).classList.toggle("gone", !takesTables);
    find("forget").addEventListener("click", () => this.set([]));
    this.#show();
  }

  add(samples) {
    return this.set([...this.samples, ...samples]);
  }

  async set(samples) {
    this.samples = samples;
    this.#show();
    await this.#send("setSamples", { samples });
  }

  async #send(call, content) {
    try {
      this.onChange(await this.client.call(call, content));
    } catch (error) {
      say(error.message);
    }
  }

  #show() {
    const total = this.samples.length;
    find("own-text").textContent = `${count(total, "example")} of yours`;
    find("use-own").closest("label").hidden = !total;
    find("own-hint").hidden = total > 0;
    find("own-hint").textContent =
      `Add your own examples${this.page.picture ? " under “Teach”, or" : ""} as a .csv file.`;
    find("forget").hidden = !total;
    const { picture, labels, inputs } = this.page;
    const input = inputs.find(({ is_target }) => !is_target);
    find("thumbnails").replaceChildren();
    if (!picture) return;
    this.samples.slice(-MOST_SHOWN).forEach((sample, at) => {
      const index = Math.max(total - MOST_SHOWN, 0) + at;
      const name = labels.names[sample[labels.input][0]];
      const canvas = make("canvas");
      paint(canvas, sample[input.name], picture);
      const button = make(
        "button",
        { type: "button", "aria-label": `Remove example ${index + 1}, ${name}`, title: "Remove" },
        canvas,
        make("span", {}, name),
      );
      button.addEventListener("click", () => this.set(this.samples.filter((_, other) => other !== index)));
      find("thumbnails").append(make("li", {}, button));
    });
  }

  // ---- tables ----

  #describeTable() {
    const { inputs, labels } = this.page;
    const parts = inputs.map((input) => {
      const size = input.shape.reduce((a, b) => a * b, 1);
      return `${count(size, size === 1 && input.name === labels?.input ? "class" : "number")} for ${input.name}`;
    });
    return `A .csv file with one line per example: ${parts.join(", then ")}. A header line is optional.`;
  }

  async #readTable(input) {
    const [file] = input.files;
    try {
      const samples = samplesOf(await file.text(), this.page.inputs, this.page.labels);
      await this.add(samples);
      say(`Added ${count(samples.length, "example")} from ${file.name}.`);
    } catch (error) {
      say(`Cannot read ${file.name}. ${error.message}`);
    }
    input.value = "";
  }
}
