// What the browser keeps: the run, and the samples that a person has given. Both belong to one page, by its fingerprint.

const NAME = "onward";
const STORES = ["runs", "samples"];

// Opens the storage of the browser; null where it has none for us, as in some private windows.
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

  // All of it is written, or nothing: a tab may close at any time.
  #do(store, mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(store, mode);
      const request = act(transaction.objectStore(store));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? request.error);
    });
  }
}
