// The panel for federated training: people exchange updates as files, and samples stay local.

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
        throw new Error(`Your part is ${number}, not from 1 to ${parts}.`);
      const update = await this.client.call("update", { number, count: parts });
      const name = (await this.client.call("name")).slice(0, 8);
      download(update, `${this.title}-update-${name}-${number}-of-${parts}.safetensors`);
      say("Your update is saved. Send the file to the others, then choose all updates here, yours and theirs.");
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
        `Made a step with ${count(files.length, "update")} of ${count(status.samples, "sample")}; loss ${status.loss.toFixed(4)}.`,
      );
      await this.refresh();
    } catch (error) {
      say(error.message);
    }
    input.value = "";
  }
}
