// Tensors in a .safetensors file: a JSON header with names, types, shapes and offsets, then the numbers.

import { arrayAt, bytesOf, sizeOf } from "./tensors.js";

// prettier-ignore
const TYPES = {
  float64: "F64", float32: "F32", float16: "F16", int64: "I64", uint64: "U64", int32: "I32", uint32: "U32",
  int16: "I16", uint16: "U16", int8: "I8", uint8: "U8", bool: "BOOL",
};
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, short]) => [short, name]));
const LONGEST_HEADER = 100_000_000;

// `tensors`: {name: {type, shape, values}}; `about`: metadata, strings by name.
export function write(tensors, about) {
  const header = { __metadata__: about };
  let size = 0;
  for (const [name, { type, shape, values }] of Object.entries(tensors)) {
    header[name] = { dtype: TYPES[type], shape, data_offsets: [size, size + values.byteLength] };
    size += values.byteLength;
  }
  let text = new TextEncoder().encode(JSON.stringify(header));
  text = new Uint8Array([...text, ...Array((8 - (text.length % 8)) % 8).fill(32)]);
  const file = new Uint8Array(8 + text.length + size);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  for (const [name, { values }] of Object.entries(tensors)) {
    file.set(bytesOf(values), 8 + text.length + header[name].data_offsets[0]);
  }
  return file;
}

export function read(file) {
  const length = file.length < 8 ? Infinity : Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
  if (length > LONGEST_HEADER || 8 + length > file.length) throw new Error("it is not a .safetensors file");
  const { __metadata__: about = {}, ...entries } = JSON.parse(new TextDecoder().decode(file.subarray(8, 8 + length)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(entries)) {
    const [begin, end] = offsets;
    const type = NAMES[dtype];
    if (!type || 8 + length + end > file.length) throw new Error(`it is damaged at ${name}`);
    tensors[name] = { type, shape, values: arrayAt(file, 8 + length + begin, type, sizeOf(shape)) };
  }
  return { tensors, about };
}
