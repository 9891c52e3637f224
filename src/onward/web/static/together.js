// The panel for training with others: updates go from hand to hand as files, and samples stay where they are.

import { count, download, find, say } from "./elements.js";

export class TogetherPanel {
  constructor(client, title, onChange) {
    Object.assign(this, { client, title, onChange });
    find("make-update").addEventListener("click", () => this.#make());
    find("updates").addEventListener("change", (event) => this.#join(event.target));
    find("together").addEventListener("toggle", () => this.refresh());
  }

  async refresh() {
    if (find("together").open) find("state-name").textContent = (await this.client.call("name")).slice(0, 8);
  }

  async #make() {
    const [number, parts] = ["part-number", "part-count"].map((id) => Number(find(id).value));
    try {
      if (!(number >= 1 && number <= parts))
        throw new Error("The number of your part is between 1 and the number of parts.");
      const update = await this.client.call("update", { number, count: parts });
      const name = (await this.client.call("name")).slice(0, 8);
      download(update, `${this.title}-update-${name}-${number}-of-${parts}.safetensors`);
      say("Your update is a file now. Send it to the others, and add all of yours and theirs here.");
    } catch (error) {
      say(error.message);
    }
  }

  async #join(input) {
    try {
      const files = await Promise.all(
        Array.from(input.files, async (file) => ({ name: file.name, bytes: new Uint8Array(await file.arrayBuffer()) })),
      );
      const status = await this.client.call("join", { files });
      this.onChange(status);
      say(
        `One step with ${count(files.length, "update")}, of ${count(status.samples, "sample")}; loss ${status.loss.toFixed(4)}.`,
      );
      await this.refresh();
    } catch (error) {
      say(error.message);
    }
    input.value = "";
  }
}
