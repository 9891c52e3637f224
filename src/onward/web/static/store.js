// Storage in the browser: the run, and the visitor's samples. The key is the fingerprint of the page.

const NAME = "onward";
const STORES = ["runs", "samples"];

// Open the storage of the browser. Return null if there is none, as in some private windows.
export async function openStore(fingerprint) {
  try {
    const database = await new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => STORES.forEach((name) => request.result.createObjectStore(name));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
      request.onblocked = () => reject(new Error("blocked"));
    });
    return new Store(database, fingerprint);
  } catch {
    return null;
  }
}

class Store {
  constructor(database, key) {
    this.database = database;
    this.key = key;
  }

  get(store) {
    return this.#do(store, "readonly", (objects) => objects.get(this.key));
  }

  put(store, value) {
    return this.#do(store, "readwrite", (objects) => objects.put(value, this.key));
  }

  remove(store) {
    return this.#do(store, "readwrite", (objects) => objects.delete(this.key));
  }

  // One transaction: a tab may close at any time.
  #do(store, mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(store, mode);
      const request = act(transaction.objectStore(store));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? request.error);
    });
  }
}
