// Trains on digits in JavaScript, with onnxruntime-node if it is installed, else with onnxruntime-web:
//
//     python digits.py write
//     npm install onnxruntime-web
//     node train.mjs lowered 100
//     python digits.py read
//
// The folder `lowered` has the output of `onward lower --all`, and samples as raw numbers: image.bin, labels.bin.

import { readFileSync, writeFileSync } from "node:fs";

const ort = await import("onnxruntime-node").catch(() => import("onnxruntime-web"));
const [BATCH, PIXELS] = [32, 64];
const [folder = "lowered", steps = "100"] = process.argv.slice(2);

const read = (name) => new Uint8Array(readFileSync(`${folder}/${name}`));
const contract = JSON.parse(readFileSync(`${folder}/step.json`, "utf8"));
const step = await ort.InferenceSession.create(read("step.onnx"));
const start = await ort.InferenceSession.create(read("state.onnx"));
const image = new Float32Array(read("image.bin").buffer);
const labels = new BigInt64Array(read("labels.bin").buffer);
const batches = Math.floor(labels.length / BATCH);

const state = { ...(await start.run({})) };
for (let number = 0; number < Number(steps); number++) {
  const first = (number % batches) * BATCH;
  const batch = {
    image: new ort.Tensor("float32", image.slice(first * PIXELS, (first + BATCH) * PIXELS), [BATCH, PIXELS]),
    labels: new ort.Tensor("int64", labels.slice(first, first + BATCH), [BATCH]),
  };
  const results = await step.run({ ...batch, ...state });
  for (const [name, output] of Object.entries(contract.update)) state[name] = results[output];
  console.log(results[contract.loss].data[0]);
}
writeFileSync(`${folder}/trained.safetensors`, asSafetensors(state));

// Returns state by name as a .safetensors file: a JSON header, then the numbers.
function asSafetensors(tensors) {
  const types = { float32: "F32", float64: "F64", int64: "I64" };
  const header = {};
  const pieces = [];
  let size = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    header[name] = { dtype: types[type], shape: dims, data_offsets: [size, size + data.byteLength] };
    size += data.byteLength;
    pieces.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  }
  const text = JSON.stringify(header);
  const padded = Buffer.from(text.padEnd(Math.ceil(Buffer.byteLength(text) / 8) * 8));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(padded.length));
  return Buffer.concat([length, padded, ...pieces]);
}
