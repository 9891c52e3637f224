// ONNX Runtime, on the processor or on the graphics card.

// Programs are packed, since few servers pack them; some servers unpack them on the way.
export async function fetchBytes(url, options) {
  const response = await fetch(url, options);
  if (!response.ok)
    throw new Error(`${url.split("?")[0]} is missing (${response.status}): was the whole folder copied?`);
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

// Several threads share memory, which browsers allow where a page is isolated from all others.
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
