// ONNX Runtime, on the CPU or on the GPU.

// Programs are stored compressed, since few servers compress them. Some servers decompress them in transit.
export async function fetchBytes(url, options) {
  const response = await fetch(url, options);
  if (!response.ok)
    throw new Error(`${url.split("?")[0]} is missing (${response.status}): copy the whole folder.`);
  return new Uint8Array(await response.arrayBuffer());
}

async function unpacked(bytes) {
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes.buffer;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

export async function openRuntime({ runtime }, graphics, threads) {
  const { module, program } = graphics ? runtime.graphics : runtime.processor;
  const [ort, packed] = await Promise.all([
    import(`./runtime/${module}`),
    fetchBytes(`./runtime/${program}?${runtime.version}`),
  ]);
  ort.env.wasm.wasmBinary = await unpacked(packed);
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = "error";
  return ort;
}

// Threads need shared memory, which browsers allow only on cross-origin isolated pages.
export function countThreads() {
  return globalThis.crossOriginIsolated ? Math.min(4, Math.ceil((navigator.hardwareConcurrency || 1) / 2)) : 1;
}

export async function hasGraphics() {
  try {
    return Boolean(await navigator.gpu?.requestAdapter());
  } catch {
    return false;
  }
}
