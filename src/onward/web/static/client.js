// The page's side of the worker: calls with answers, and events.

export class Client {
  constructor(onEvent) {
    this.waiting = new Map();
    this.last = 0;
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => {
      if (data.event) return onEvent(data.event, data);
      const { resolve, reject } = this.waiting.get(data.id);
      this.waiting.delete(data.id);
      return data.error === undefined ? resolve(data.result) : reject(new Error(data.error));
    };
    this.worker.onerror = (event) => {
      const error = new Error(event.message || "the worker did not start");
      for (const { reject } of this.waiting.values()) reject(error);
      this.waiting.clear();
    };
  }

  call(call, content) {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, call, content });
    });
  }
}
